"""Both engines against each other and against a naive transcription of the same-instant rule."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from random import Random

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import graph_of, random_durations_s, random_graph, timed_graphs

from parsim.costs.estimate import OverlapFactors
from parsim.engines import dynamic, static
from parsim.engines.static import compile_graph
from parsim.errors import GraphError
from parsim.predict.breakdown import critical_path, lower_bound_s
from parsim.program.taskgraph import COMPUTE, Origin, Resource, Task, TaskGraph
from parsim.timeline import Timeline
from parsim.work import Collective, Compute, Phase, SendRecv, is_communication

RANDOM_GRAPHS = 2000


def naive_schedule(
    graph: TaskGraph,
    durations: Sequence,
    factors: tuple = (1, 1),
    core_of_rank: Sequence[int] | None = None,
    *,
    divided: bool = False,
) -> tuple[list, list]:
    """The rule word for word, O(n^2) and slower: look at every task in every instant. Exact for Fractions.

    Leaves no room for cleverness: who is at the head of what, who runs, who is slowed are all found anew each time.
    """
    n = len(graph.tasks)
    start: list = [None] * n
    end: list = [None] * n
    left = list(durations)
    now = durations[0] * 0 if n else 0

    def can_start(task) -> bool:
        if start[task.index] is not None or any(end[need] is None for need in task.dependencies):
            return False
        heads = [next(i for i in graph.issue_order[resource] if end[i] is None) for resource in task.resources]
        return all(head == task.index for head in heads)

    def side(task, rank) -> int:
        """0 computes on this rank, 1 communicates on it, -1 neither."""
        on = [resource.stream for resource in task.resources if resource.rank == rank]
        if is_communication(task.work):
            return 1 if on else -1
        return 0 if COMPUTE in on else -1

    core = core_of_rank or range(graph.world_size)

    def slowdown(task, running):
        slowest = 1
        for rank in task.ranks:
            own = side(task, rank)
            if own < 0:
                continue
            neighbours = [other for other in range(graph.world_size) if core[other] == core[rank]]
            sides = [side(other, near) for other in running for near in neighbours if near in other.ranks]
            factor = factors[own] if 1 - own in sides else 1
            if own == 0:
                factor *= sides.count(0)
            elif divided:
                factor *= Fraction(sides.count(1), sum(side(task, near) == 1 for near in neighbours if near in task.ranks))
            slowest = max(slowest, factor)
        return slowest

    while any(entry is None for entry in end):
        changed = True
        while changed:
            changed = False
            for task in graph.tasks:
                if can_start(task):
                    start[task.index] = now
                    changed = True
                if start[task.index] is not None and end[task.index] is None and left[task.index] == 0:
                    end[task.index] = now
                    changed = True
        running = [task for task in graph.tasks if start[task.index] is not None and end[task.index] is None]
        if not running:
            break
        rates = {task.index: slowdown(task, running) for task in running}
        step = min(left[task.index] * rates[task.index] for task in running)
        for task in running:
            left[task.index] -= step / rates[task.index]
        now += step
    return start, end


def per_task(graph: TaskGraph, timeline: Timeline) -> tuple[np.ndarray, np.ndarray]:
    start, end = np.full(len(graph.tasks), np.nan), np.full(len(graph.tasks), np.nan)
    start[timeline.task], end[timeline.task] = timeline.start_s, timeline.end_s
    return start, end


def assert_same(first: Timeline, second: Timeline) -> None:
    """Bitwise, row by row."""
    assert first.resources == second.resources
    for column in ("task", "resource", "start_s", "end_s"):
        np.testing.assert_array_equal(getattr(first, column), getattr(second, column), err_msg=column)


@pytest.mark.parametrize("part", range(4))
def test_engines_agree_bitwise_and_with_the_rule(part: int) -> None:
    """2,000 graphs; on the grid of 1/1024 s floating point is exact, and so is the naive transcription."""
    for seed in range(part * RANDOM_GRAPHS // 4, (part + 1) * RANDOM_GRAPHS // 4):
        random = Random(seed)
        graph = random_graph(random)
        durations = random_durations_s(random, len(graph.tasks), on_grid=seed % 2 == 0)
        timeline = static.simulate(graph, durations)
        assert_same(timeline, dynamic.simulate(graph, durations))
        assert timeline.makespan_s == (static.makespans_s(graph, [durations])[0] if graph.tasks else 0.0)
        if seed % 2 == 0:
            start, end = naive_schedule(graph, durations)
            got_start, got_end = per_task(graph, timeline)
            assert got_start.tolist() == start, f"seed {seed}"
            assert got_end.tolist() == end, f"seed {seed}"


@given(timed_graphs())
def test_engines_agree_bitwise_on_drawn_graphs(timed: tuple[TaskGraph, list[float]]) -> None:
    graph, durations = timed
    assert_same(static.simulate(graph, durations), dynamic.simulate(graph, durations))


def some_cores(random: Random, world_size: int) -> tuple[int, ...]:
    """Cores of ranks, at least two of which share one (if there are two)."""
    return tuple(random.randrange(max(1, world_size - 1)) for _ in range(world_size))


@pytest.mark.parametrize(
    ("factors", "shares", "divided"),
    [
        *((factors, False, False) for factors in ((2.0, 1.5), (1.0, 1.3), (1.25, 1.0), (3.0, 4.0))),
        *((factors, True, False) for factors in ((1.0, 1.0), (1.5, 1.25))),
        *((factors, True, True) for factors in ((1.0, 1.0), (1.5, 1.25))),
    ],
)
def test_engines_agree_bitwise_and_with_exact_arithmetic_where_tasks_slow_one_another(
    factors: tuple[float, float], shares: bool, divided: bool
) -> None:
    """By overlap, by computation of ranks that share a core, and by several communications on one. The static engine follows
    the same rates through the same instants, so its deviation is nought. Of the rule in rational numbers start and end of every
    task are within 1e-12 of the makespan."""
    slowed = 0
    for seed in range(300):
        random = Random(seed)
        graph = random_graph(random, most_tasks=20)
        durations = random_durations_s(random, len(graph.tasks), on_grid=seed % 2 == 0)
        cores = some_cores(random, graph.world_size) if shares and seed % 4 else None
        overlap = OverlapFactors(compute=factors[0], communication=factors[1], core_of_rank=cores, communications_share=divided)
        less = replace(overlap, communications_share=False) if divided else replace(overlap, core_of_rank=None)
        timeline = static.simulate(graph, durations, overlap=overlap)
        assert_same(timeline, dynamic.simulate(graph, durations, overlap=overlap))
        slowed += timeline.makespan_s > static.simulate(graph, durations, overlap=less if shares else None).makespan_s
        if seed % 2 == 0:
            rational = [Fraction(value) for value in durations], tuple(map(Fraction, factors)), cores
            for got, wanted in zip(per_task(graph, timeline), naive_schedule(graph, *rational, divided=divided), strict=True):
                np.testing.assert_allclose(got, np.array(wanted, dtype=float), rtol=0, atol=1e-12 * (1 + timeline.makespan_s))
    assert slowed > 40, "too few of the graphs slow anything for this test to mean something"


def test_communications_at_once_in_closed_form() -> None:
    """Two streams of one rank: d_1 <= d_2 seconds alone end at 2 d_1 and d_1 + d_2; a rank elsewhere is not slowed."""
    sent = [(0, 1), (0, 2), (3, 4)]
    graph = graph_of(
        5,
        *(
            (SendRecv(source=a, destination=b, size_bytes=1), (Resource(a, f"pp>{b}"), Resource(b, f"pp<{a}")), ())
            for a, b in sent
        ),
    )
    for engine in (static, dynamic):
        _, end = per_task(graph, engine.simulate(graph, [1.0, 3.0, 3.0], overlap=OverlapFactors(communications_share=True)))
        assert end.tolist() == [2.0, 4.0, 3.0]


def test_processor_sharing_in_closed_form() -> None:
    """k ranks on one core, one computation of d_1 <= ... <= d_k seconds each: the i-th ends at
    d_i + the work done meanwhile by the others, i.e. sum over j of min(d_i, d_j)."""
    durations = [0.5, 1.0, 1.0, 4.0]
    computation = Compute(component="c", phase=Phase.FORWARD, samples=1)
    graph = graph_of(4, *((computation, (Resource(rank, COMPUTE),), ()) for rank in range(4)))
    _, end = per_task(graph, static.simulate(graph, durations, overlap=OverlapFactors(core_of_rank=(7, 7, 7, 7))))
    assert end.tolist() == [sum(min(own, other) for other in durations) for own in durations] == [2.0, 3.5, 3.5, 6.5]
    _, end = per_task(graph, static.simulate(graph, durations, overlap=OverlapFactors(core_of_rank=(0, 1, 0, 1))))
    assert end.tolist() == [1.0, 2.0, 1.5, 5.0]
    with pytest.raises(GraphError, match="core_of_rank names the cores of 3 ranks; the graph has 4"):
        static.simulate(graph, durations, overlap=OverlapFactors(core_of_rank=(0, 1, 0)))


@given(timed_graphs(), st.data())
def test_longer_durations_never_shorten_the_makespan(timed: tuple[TaskGraph, list[float]], data: st.DataObject) -> None:
    """True since the order is fixed; under list scheduling it is not (Graham's anomalies)."""
    graph, durations = timed
    extra = data.draw(st.lists(st.floats(0, 1e3), min_size=len(durations), max_size=len(durations)))
    longer = [a + b for a, b in zip(durations, extra, strict=True)]
    makespans = static.makespans_s(graph, [durations, longer])
    assert makespans[1] >= makespans[0]


@given(timed_graphs(), st.integers(-20, 20))
def test_scaling_by_a_power_of_two_is_exact(timed: tuple[TaskGraph, list[float]], exponent: int) -> None:
    graph, durations = timed
    overlap = OverlapFactors(compute=1.5, communication=1.25)
    scaled = [value * 2.0**exponent for value in durations]
    for factors in (None, overlap):
        before, after = static.simulate(graph, durations, overlap=factors), static.simulate(graph, scaled, overlap=factors)
        np.testing.assert_array_equal(after.end_s, before.end_s * 2.0**exponent)


@given(timed_graphs())
def test_nothing_is_done_twice_at_once_and_all_work_is_done(timed: tuple[TaskGraph, list[float]]) -> None:
    graph, durations = timed
    timeline = static.simulate(graph, durations, overlap=OverlapFactors(compute=1.5, communication=1.25))
    start, end = per_task(graph, timeline)
    assert len(timeline) == sum(len(task.resources) for task in graph.tasks)
    for order in graph.issue_order.values():
        for earlier, later in itertools.pairwise(order):
            assert end[earlier] <= start[later]
    for task in graph.tasks:
        assert all(end[need] <= start[task.index] for need in task.dependencies)
        taken, alone = end[task.index] - start[task.index], durations[task.index]
        slack = 1e-9 * (1 + end[task.index])
        assert alone - slack <= taken <= 1.5 * alone + slack


@given(timed_graphs())
def test_lower_bound_and_critical_path(timed: tuple[TaskGraph, list[float]]) -> None:
    graph, durations = timed
    timeline = static.simulate(graph, durations)
    path = critical_path(graph, timeline)
    assert lower_bound_s(graph, durations) <= timeline.makespan_s * (1 + 1e-12)
    length = 0.0
    for index in path:
        length += durations[index]
    assert length == timeline.makespan_s, "summed from the front, the path is the schedule's own arithmetic"
    before = graph.predecessors()
    assert all(earlier in before[later] for earlier, later in itertools.pairwise(path))
    assert not path or not before[path[0]]


@given(timed_graphs(most_tasks=12), st.integers(1, 5))
def test_repeats_equal_the_unrolled_graph(timed: tuple[TaskGraph, list[float]], steps: int) -> None:
    """Carrying the frontier is the same as issuing the graph `steps` times in one long graph."""
    graph, durations = timed
    n = len(graph.tasks)
    tasks = tuple(
        replace(task, index=task.index + shift, dependencies=tuple(need + shift for need in task.dependencies))
        for shift in range(0, n * steps, n or 1)
        for task in graph.tasks
    )
    order = {
        resource: tuple(index + shift for shift in range(0, n * steps, n or 1) for index in entries)
        for resource, entries in graph.issue_order.items()
    }
    unrolled = TaskGraph(tasks=tasks, world_size=graph.world_size, issue_order=order)
    whole = static.simulate(unrolled, durations * steps).makespan_s
    assert static.step_times_s(graph, [durations], steps=steps).tolist() == [whole / steps]


@given(timed_graphs(most_tasks=12))
def test_repeats_behind_a_barrier_take_the_makespan_each(timed: tuple[TaskGraph, list[float]]) -> None:
    """A last collective that holds every resource keeps repeats apart, with slowdown too.

    Without it no such bound holds with slowdown: a rank that starts a step early can meet more overlap in it.
    """
    graph, durations = timed
    n = len(graph.tasks)
    work = Collective(operation="all_reduce", group=tuple(range(graph.world_size)), size_bytes=8)
    barrier = Task(index=n, work=work, resources=graph.resources, dependencies=(), origin=Origin(stage=0))
    assume(graph.resources)
    order = {resource: (*entries, n) for resource, entries in graph.issue_order.items()}
    closed = TaskGraph(tasks=(*graph.tasks, barrier), world_size=graph.world_size, issue_order=order)
    overlap = OverlapFactors(compute=1.5, communication=1.25)
    makespan = static.simulate(closed, [*durations, 0.5], overlap=overlap).makespan_s
    rows = [[*durations, 0.5]] * 2
    assert static.makespans_s(closed, rows, overlap=overlap).tolist() == [makespan] * 2
    np.testing.assert_allclose(static.step_times_s(closed, rows, steps=3, overlap=overlap), makespan, rtol=1e-12)


def test_samples_are_independent_rows() -> None:
    random = Random(5)
    graph = random_graph(random, most_tasks=60)
    compiled = compile_graph(graph)
    rows = np.array([random_durations_s(random, len(graph.tasks), on_grid=False) for _ in range(20)])
    one_by_one = [static.simulate(compiled, row).makespan_s for row in rows]
    assert static.makespans_s(compiled, rows).tolist() == one_by_one
    assert static.makespans_s(compiled, rows[:0]).shape == (0,)


def test_durations_per_unit_are_those_per_task() -> None:
    """Tasks that share a column of durations: the same numbers as with a column each, with and without slowdown."""
    random = Random(11)
    graph = random_graph(random, most_tasks=60)
    n = len(graph.tasks)
    unit = np.array([random.randrange(5) for _ in range(n)])
    columns = np.random.default_rng(1).uniform(0.0, 1.0, (7, 5))
    for overlap in (None, OverlapFactors(compute=1.5, communication=1.25)):
        whole = static.step_times_s(graph, columns[:, unit], steps=3, overlap=overlap)
        assert static.step_times_s(graph, columns, steps=3, overlap=overlap, unit=unit).tolist() == whole.tolist()
    with pytest.raises(GraphError, match=r"durations_s must have shape \[samples, units\] and unit"):
        static.step_times_s(graph, columns, steps=1, unit=unit[:-1])
    with pytest.raises(GraphError, match="unit names columns 0 to 7, durations_s has 0 to 4"):
        static.step_times_s(graph, columns, steps=1, unit=np.where(np.arange(n) == 0, 7, np.minimum(unit, 0)))
    columns[2, unit[3]] = np.nan
    with pytest.raises(GraphError, match=r"task \d+ .* has duration nan s in sample 2"):
        static.step_times_s(graph, columns, steps=1, unit=unit)
