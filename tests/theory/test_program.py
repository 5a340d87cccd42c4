"""Programs of repeated parts against the same run unrolled into one graph."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import graph_of, random_graph

from parsim.engines import dynamic, static
from parsim.engines.program import Part, Program, durations_by_step_s, unrolled
from parsim.errors import GraphError
from parsim.program.taskgraph import COMPUTE, Resource, TaskGraph
from parsim.work import Compute, Phase

RANKS = 4


def chain(ranks: int = 1, tasks: int = 1) -> TaskGraph:
    """On every rank `tasks` computations, one after another."""
    computation = Compute(component="a", phase=Phase.FORWARD, samples=1)
    return graph_of(ranks, *((computation, [Resource(rank, COMPUTE)], []) for rank in range(ranks) for _ in range(tasks)))


def random_part(random: Random) -> Part:
    drawn = random_graph(random, most_ranks=RANKS, most_tasks=12)
    graph = TaskGraph(tasks=drawn.tasks, world_size=RANKS, issue_order=drawn.issue_order)
    n = len(graph.tasks)

    def some() -> dict[str, tuple[int, ...]]:
        values = random.sample("abc", random.randint(0, 3)) if n else []
        return {value: tuple(random.sample(range(n), random.randint(1, min(3, n)))) for value in values}

    return Part(graph=graph, repeat=random.randint(1, 4), makes=some(), reads=some())


def random_program(random: Random, depth: int = 1) -> Program:
    parts: list[Part | Program] = [random_part(random) for _ in range(random.randint(1, 3))]
    if depth:
        parts.insert(random.randrange(len(parts) + 1), random_program(random, depth - 1))
    if not any(part.graph.tasks for part in Program(parts=tuple(parts)).walk_once()):
        parts.append(Part(graph=chain(RANKS)))
    return Program(parts=tuple(parts), repeat=random.randint(1, 3))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**9), st.booleans())
def test_the_dynamic_engine_runs_a_program_as_it_is_written(seed: int, varying: bool) -> None:
    """Start and end of every task, bit for bit those of the unrolled graph; values are read many steps after they were made."""
    random = Random(seed)
    program = random_program(random)
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, 50, len(part.graph.tasks)) / 1024 for part in program.walk()]
    first = {id(part): rows[step] for step, part in reversed(list(enumerate(program.walk())))}

    def seconds(part: Part, step: int) -> np.ndarray:
        return rows[step] if varying else first[id(part)]

    done = dynamic.run_program(program, seconds, varying=varying, record=True)
    timeline = static.simulate(unrolled(program), np.concatenate(durations_by_step_s(program, seconds, varying=varying)))
    np.testing.assert_array_equal(done.start_s[timeline.task], timeline.start_s)
    np.testing.assert_array_equal(done.end_s[timeline.task], timeline.end_s)


def test_bad_programs() -> None:
    with pytest.raises(GraphError, match="runs at least once, got repeat 0"):
        Part(graph=chain(), repeat=0)
    with pytest.raises(GraphError, match="'x' names task 1, but the part has tasks 0 to 0"):
        Part(graph=chain(), reads={"x": (1,)})
    with pytest.raises(GraphError, match="'x' names no task"):
        Part(graph=chain(), makes={"x": ()})
    with pytest.raises(GraphError, match=r"same ranks, got world sizes \[1, 2\]"):
        Program(parts=(Part(graph=chain()), Part(graph=chain(2))))
    with pytest.raises(GraphError, match="at least one part"):
        Program(parts=())
