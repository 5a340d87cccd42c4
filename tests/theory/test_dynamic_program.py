"""Programs: repeats without unrolling, what steps carry over, and resources that serve by arrival, whose record replays."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import GRID_S, graph_of, random_graph, timed_graphs

from experiments.relaxed.arrivals import merge_events
from parsim.costs.estimate import OverlapFactors
from parsim.engines import dynamic, static
from parsim.engines.program import (
    Part,
    Program,
    carried_by_steps,
    mean_step_s,
    steps_in_a_row,
    unrolled,
)
from parsim.engines.static import compile_graph
from parsim.errors import GraphError
from parsim.program.columns import columns_of
from parsim.program.taskgraph import COMPUTE, HOST, Origin, Resource, Task, TaskGraph
from parsim.work import Collective, Compute, LoadBatch, OptimizerStep, Phase, Work

COUNTER = Resource(0, "merge")
ORIGIN = Origin(stage=0)


def with_counter(graph: TaskGraph, random: Random) -> TaskGraph:
    """The graph, of which some tasks also need the counter; its own issue order there is only the list's."""
    tasks = tuple(
        Task(
            index=task.index,
            work=task.work,
            resources=(*task.resources, COUNTER) if random.random() < 0.4 else task.resources,
            dependencies=task.dependencies,
            origin=task.origin,
        )
        for task in graph.tasks
    )
    order = dict(graph.issue_order)
    using = tuple(task.index for task in tasks if COUNTER in task.resources)
    return TaskGraph(tasks=tasks, world_size=graph.world_size, issue_order={**order, COUNTER: using} if using else order)


Timed = tuple[Program, list[np.ndarray]]
"""A program and the seconds of every step."""


@st.composite
def programs(draw: st.DrawFn, *, counter: bool = True) -> Timed:
    """One to three parts over the same ranks, with ties in time; they make and read two values."""
    random = draw(st.randoms(use_true_random=False))
    parts: list[Part] = []
    rows: list[np.ndarray] = []
    for _ in range(draw(st.integers(1, 3))):
        graph = random_graph(random, most_ranks=4, most_tasks=8)
        graph = TaskGraph(tasks=graph.tasks, world_size=4, issue_order=graph.issue_order)
        graph = with_counter(graph, random) if counter else graph
        n, repeats = len(graph.tasks), draw(st.integers(1, 3))
        drawn = repeats if draw(st.booleans()) else 1
        durations = np.array([draw(st.integers(0, 4)) * GRID_S for _ in range(drawn * n)]).reshape(drawn, n)
        rows += [durations[repeat % drawn] for repeat in range(repeats)]
        makes, reads = ({value: (random.randrange(n),) for value in "ab"} if n else {} for _ in range(2))
        parts.append(Part(graph=graph, repeat=repeats, makes=makes, reads=reads))
    used = any(COUNTER in part.graph.issue_order for part in parts)
    return Program(parts=tuple(parts), arrival=frozenset({COUNTER} if used else ())), rows


@given(programs())
def test_the_order_that_arrival_recorded_replays_in_the_static_engine(timed: Timed) -> None:
    """Start and end of every task of every step, bitwise; times are multiples of 1/1024 s, so ties are common."""
    program, seconds = timed
    done = dynamic.run_program(program, seconds, record=True)
    graph, durations = unrolled(program, done.served), np.concatenate(seconds)
    replayed = static.simulate(graph, durations)
    start, end = np.full(len(graph.tasks), np.nan), np.full(len(graph.tasks), np.nan)
    start[replayed.task], end[replayed.task] = replayed.start_s, replayed.end_s
    np.testing.assert_array_equal(done.start_s, start)
    np.testing.assert_array_equal(done.end_s, end)


@given(programs())
def test_a_counter_serves_one_at_a_time_and_first_come_first(timed: Timed) -> None:
    program, seconds = timed
    done = dynamic.run_program(program, seconds, record=True)
    first = program.first_number
    served = [first[step] + task for step, task in done.served.get(COUNTER, ())]
    ends = done.end_s[served]
    starts = done.start_s[served]
    assert np.all(starts[1:] >= ends[:-1])
    users = sum(COUNTER in task.resources for part in program.steps for task in part.graph.tasks)
    assert len(served) == len(set(served)) == users


@given(programs(counter=False))
def test_programs_without_counters_equal_their_unrolled_graph(timed: Timed) -> None:
    program, seconds = timed
    overlap = OverlapFactors(compute=1.5, communication=1.25)
    graph, durations = unrolled(program), np.concatenate(seconds)
    for factors in (None, overlap):
        done = dynamic.run_program(program, seconds, overlap=factors, record=True)
        whole = static.simulate(graph, durations, overlap=factors)
        assert done.makespan_s == whole.makespan_s or not len(whole)
        np.testing.assert_array_equal(done.end_s[whole.task], whole.end_s)


def workers_graph(workers: int) -> TaskGraph:
    """Local work on each rank, then its merge at the one counter."""
    tasks = []
    for rank in range(workers):
        compute = Resource(rank, COMPUTE)
        local = Compute(component="epoch", phase=Phase.FORWARD, samples=1)
        tasks.append(Task(index=2 * rank, work=local, resources=(compute,), dependencies=(), origin=ORIGIN))
        merge = OptimizerStep(elements=1, tensors=1)
        tasks.append(
            Task(index=2 * rank + 1, work=merge, resources=(compute, COUNTER), dependencies=(2 * rank,), origin=ORIGIN)
        )
    return TaskGraph(tasks=tuple(tasks), world_size=workers)


@pytest.mark.parametrize("merge_s", [0.0, 0.25, 2.0])
@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0), (1.0, 1.7, 3.1), (0.25, 2.0, 2.0, 0.5)])
def test_asynchronous_workers_arrive_as_the_event_queue_says(speeds: tuple[float, ...], merge_s: float) -> None:
    """The queue of `experiments.relaxed.arrivals` makes the same merges at the same times, ties included."""
    epochs, workers = 5, len(speeds)
    graph = workers_graph(workers)
    durations = np.array([seconds for speed in speeds for seconds in (speed, merge_s)])
    program = Program(parts=(Part(graph=graph, repeat=epochs),), arrival=frozenset({COUNTER}))
    done = dynamic.run_program(program, [durations] * epochs, record=True)
    wanted = merge_events(lambda worker, _: speeds[worker], workers, merge_s=merge_s, epochs=epochs)
    assert [(event.epoch, 2 * event.worker + 1) for event in wanted] == list(done.served[COUNTER])
    numbers = [program.first_number[step] + task for step, task in done.served[COUNTER]]
    assert [event.start_s for event in wanted] == done.start_s[numbers].tolist()
    assert [event.end_s for event in wanted] == done.end_s[numbers].tolist()


def test_what_a_program_cannot_be() -> None:
    graph = workers_graph(2)
    part = Part(graph=graph)
    with pytest.raises(GraphError, match=r"no task uses the arrival resource r1.merge; the program has r0.compute"):
        Program(parts=(part,), arrival=frozenset({Resource(1, "merge")}))
    with pytest.raises(GraphError, match="of which 1 serve by arrival"):
        Program(parts=(part,), arrival=frozenset({COUNTER, Resource(0, COMPUTE)}))
    merging = Program(parts=(part,), arrival=frozenset({COUNTER}))
    with pytest.raises(GraphError, match=r"r0.merge serves by arrival: the order is known once .* pass `served`"):
        unrolled(merging)
    with pytest.raises(GraphError, match="at least once, got repeat 0"):
        Part(graph=graph, repeat=0)
    with pytest.raises(GraphError, match=r"shape \[4\], one entry per task, got \[2, 4\]"):
        dynamic.run_program(merging, [np.ones((2, 4))])
    rows = np.ones((2, 4))
    rows[1, 2] = np.nan
    with pytest.raises(GraphError, match="has duration nan s in step 1"):
        dynamic.run_program(Program(parts=(Part(graph=graph, repeat=2),)), list(rows))


# Programs of repeated parts against the same run unrolled into one graph.

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


def random_program(random: Random) -> Program:
    parts = [random_part(random) for _ in range(random.randint(1, 4))]
    if not any(part.graph.tasks for part in parts):
        parts.append(Part(graph=chain(RANKS)))
    return Program(parts=tuple(parts * random.randint(1, 3)))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**9))
def test_the_dynamic_engine_runs_a_program_as_it_is_written(seed: int) -> None:
    """Start and end of every task, bit for bit those of the unrolled graph; values are read many steps after they were made."""
    program = random_program(Random(seed))
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, 50, len(part.graph.tasks)) / 1024 for part in program.steps]
    done = dynamic.run_program(program, rows, record=True)
    timeline = static.simulate(unrolled(program), np.concatenate(rows))
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


# Steps in a row: what waits for the step before, by closed forms and in both engines alike.

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
    assert dynamic.run_program(program, [[3.0, 1.0], [1.0, 3.0]]).makespan_s == 4.0


@given(timed_graphs(most_tasks=12), st.booleans())
def test_both_engines_agree(timed: tuple[TaskGraph, list[float]], loads_ahead: bool) -> None:
    """What waits for the step before is told to the one by numbers of resources, to the other by dependencies."""
    graph, durations = timed
    overlap = OverlapFactors(loads_ahead=loads_ahead)
    program = steps_in_a_row(columns_of(graph), overlap, steps=4)
    done = dynamic.run_program(program, [durations] * 4)
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
