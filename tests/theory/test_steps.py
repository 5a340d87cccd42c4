"""Steps in a row: what waits for the step before, by closed forms and in both engines alike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import graph_of, timed_graphs

from parsim.costs.estimate import OverlapFactors
from parsim.engines import dynamic
from parsim.engines.program import Part, Program, by_step, carried_by_steps, mean_step_s, steps_in_a_row
from parsim.engines.static import compile_graph
from parsim.program.columns import columns_of
from parsim.program.taskgraph import COMPUTE, HOST, Resource, TaskGraph
from parsim.work import Collective, Compute, LoadBatch, OptimizerStep, Phase, Work

LOAD_S, FORWARD_S, UPDATE_S, GATHER_S = 0.25, 2.0, 1.0, 0.5


def zero_steps(ranks: int) -> tuple[TaskGraph, list[float]]:
    """Every rank loads, computes and updates its part; then the parts are gathered."""
    rows: list[tuple[Work, Sequence[Resource], Sequence[int]]] = []
    for rank in range(ranks):
        compute = [Resource(rank, COMPUTE)]
        rows.append((LoadBatch(samples=1, size_bytes=4), [Resource(rank, HOST)], []))
        rows.append((Compute(component="all", phase=Phase.FORWARD, samples=1), compute, [len(rows) - 1]))
        rows.append((OptimizerStep(elements=1, tensors=1), compute, [len(rows) - 1]))
    gather = Collective(operation="all_gather", group=tuple(range(ranks)), size_bytes=4)
    rows.append((gather, [Resource(rank, "dp") for rank in range(ranks)], range(2, 3 * ranks, 3)))
    return graph_of(ranks, *rows), [LOAD_S, FORWARD_S, UPDATE_S] * ranks + [GATHER_S]


def step_s(graph: TaskGraph, durations: list[float], overlap: OverlapFactors, steps: int = 5) -> float:
    return float(mean_step_s(compile_graph(graph), [durations], overlap, steps=steps)[0])


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_next_step_waits_for_what_is_gathered_at_the_end(ranks: int) -> None:
    graph, durations = zero_steps(ranks)
    whole = LOAD_S + FORWARD_S + UPDATE_S + GATHER_S
    assert step_s(graph, durations, OverlapFactors(loads_ahead=False)) == whole
    assert step_s(graph, durations, OverlapFactors()) == pytest.approx(whole - LOAD_S * 4 / 5), "only the first load shows"


def test_a_rank_that_is_done_does_not_wait_for_the_others() -> None:
    """Two ranks of 3 and 1 seconds in turn, each with work of its own: no step of both takes longer than its own."""
    computation = Compute(component="all", phase=Phase.FORWARD, samples=1)
    graph = graph_of(2, *((computation, [Resource(rank, COMPUTE)], []) for rank in range(2)))
    assert step_s(graph, [3.0, 1.0], OverlapFactors(loads_ahead=False)) == 3.0
    makes, reads = carried_by_steps(columns_of(graph), OverlapFactors(loads_ahead=False))
    program = Program(parts=(Part(graph=graph, repeat=2, makes=makes, reads=reads),))
    rows = by_step(np.array([[3.0, 1.0], [1.0, 3.0]]))
    assert dynamic.run_program(program, rows, varying=True).makespan_s == 4.0


@given(timed_graphs(most_tasks=12), st.booleans())
def test_both_engines_agree(timed: tuple[TaskGraph, list[float]], loads_ahead: bool) -> None:
    """What waits for the step before is told to the one by numbers of resources, to the other by dependencies."""
    graph, durations = timed
    overlap = OverlapFactors(loads_ahead=loads_ahead)
    program = steps_in_a_row(columns_of(graph), overlap, steps=4)
    done = dynamic.run_program(program, lambda part, step: durations)
    assert done.makespan_s / 4 == step_s(graph, durations, overlap, steps=4)


@given(timed_graphs(most_tasks=12), st.integers(2, 11), st.booleans(), st.integers(0, 2**32 - 1))
def test_rows_that_go_through_a_graph_side_by_side_end_as_each_alone(
    timed: tuple[TaskGraph, list[float]], rows: int, by_unit: bool, seed: int
) -> None:
    compiled, tasks = compile_graph(timed[0]), len(timed[1])
    random, together = np.random.default_rng(seed), OverlapFactors(loads_ahead=False)
    unit = random.integers(0, 3, tasks) if by_unit else None
    durations = random.exponential(size=(rows, 3 if by_unit else tasks))
    found = mean_step_s(compiled, durations, together, steps=3, unit=unit)
    assert found.tolist() == [mean_step_s(compiled, row[None, :], together, steps=3, unit=unit)[0] for row in durations]
