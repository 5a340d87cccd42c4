"""Both engines: against each other, the same-instant rule and closed forms; what they refuse."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import graph_of, random_durations_s, random_graph, timed_graphs

from parsim.costs.estimate import OverlapFactors
from parsim.engines import dynamic, static
from parsim.engines.static import compile_graph
from parsim.errors import DeadlockError, GraphError
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import rank_of_stage
from parsim.plans.plan import Plan, Stage
from parsim.predict.breakdown import breakdown, critical_path, lower_bound_s, step_fractions
from parsim.program.lower import lower
from parsim.program.taskgraph import COMPUTE, Origin, Resource, Task, TaskGraph, from_text, to_text
from parsim.timeline import Timeline
from parsim.work import Collective, Compute, Phase, SendRecv, is_communication
from tests.models import bare_chain

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
        assert timeline.makespan_s == (static.step_times_s(graph, [durations])[0] if graph.tasks else 0.0)
        if seed % 2 == 0:
            start, end = naive_schedule(graph, durations)
            got_start, got_end = per_task(graph, timeline)
            assert got_start.tolist() == start, f"seed {seed}"
            assert got_end.tolist() == end, f"seed {seed}"


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
    makespans = static.step_times_s(graph, [durations, longer])
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
    assert static.step_times_s(closed, rows, overlap=overlap).tolist() == [makespan] * 2
    np.testing.assert_allclose(static.step_times_s(closed, rows, steps=3, overlap=overlap), makespan, rtol=1e-12)


def test_samples_are_independent_rows() -> None:
    random = Random(5)
    graph = random_graph(random, most_tasks=60)
    compiled = compile_graph(graph)
    rows = np.array([random_durations_s(random, len(graph.tasks), on_grid=False) for _ in range(20)])
    one_by_one = [static.simulate(compiled, row).makespan_s for row in rows]
    assert static.step_times_s(compiled, rows).tolist() == one_by_one
    assert static.step_times_s(compiled, rows[:0]).shape == (0,)


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


# What both engines refuse, and that the message shows where and why.

Engine = Callable[..., Timeline]
engines = pytest.mark.parametrize("simulate", [static.simulate, dynamic.simulate], ids=["static", "dynamic"])

CYCLE = """
world_size 1
0 r0.compute | forward a x1 | - | stage=0
1 r0.compute | forward b x1 | 2 | stage=0
2 r0.dp | all_reduce 8 B over 0 | 3 | stage=0
3 r0.compute | forward c x1 | 0,1 | stage=0
"""

# Two ranks issue the same two collectives in opposite orders.
CROSSED = """
world_size 3
0 r0.compute | forward a x1 | - | stage=0
1 r0.dp r1.dp | all_reduce 8 B over 0,1 | 0 | stage=0
2 r0.dp r1.dp | all_gather 8 B over 0,1 | 0 | stage=0
3 r1.compute | backward a x1 | 2 | stage=0
4 r2.compute | forward b x1 | - | stage=0
order r1.dp 2,1
"""

# One stream for both directions: each rank first sends and never comes to receive; a dependency closes the ring.
BEHIND = """
world_size 1
0 r0.compute | forward a x1 | 1 | stage=0
1 r0.compute | forward b x1 | - | stage=0
"""


@engines
def test_a_cycle_of_dependencies_is_printed(simulate: Engine) -> None:
    with pytest.raises(GraphError, match="depend on one another in a cycle") as caught:
        simulate(from_text(CYCLE), [1.0] * 4)
    assert not isinstance(caught.value, DeadlockError)
    text = str(caught.value)
    assert "task 1 (forward b x1 on r0.compute) waits for task 2 (all_reduce 8 B over 0 on r0.dp) waits for task 3" in text
    assert text.endswith("remove one of these dependencies")


@engines
def test_a_deadlock_prints_the_grid(simulate: Engine) -> None:
    with pytest.raises(DeadlockError) as caught:
        simulate(from_text(CROSSED), [1.0] * 5)
    assert str(caught.value).splitlines() == [
        "deadlock: issue orders wait for one another, 3 of 5 tasks can never start",
        "rank | compute          | dp",
        "0    | done             | *1 all_reduce 8 B over 0,1",
        "1    | *3 backward a x1 | *2 all_gather 8 B over 0,1",
        "2    | done             |",
        "(* = blocked head of its resource)",
        "task 1 (all_reduce 8 B over 0,1 on r0.dp r1.dp) needs r1.dp, where task 2 is first",
        "task 2 (all_gather 8 B over 0,1 on r0.dp r1.dp) needs r0.dp, where task 1 is first",
        "task 3 (backward a x1 on r1.compute) needs task 2 to end",
        "cycle: task 1 (all_reduce 8 B over 0,1 on r0.dp r1.dp) waits for "
        "task 2 (all_gather 8 B over 0,1 on r0.dp r1.dp) waits for task 1",
        "issue the tasks that share ranks in one common order on all their resources, or give them streams of their own",
    ]


@engines
def test_a_task_issued_before_what_it_needs_is_a_deadlock(simulate: Engine) -> None:
    with pytest.raises(DeadlockError, match=r"task 0 .* needs task 1 to end"):
        simulate(from_text(BEHIND), [1.0, 1.0])


def test_a_large_deadlock_is_cut_short() -> None:
    """40 ranks in a ring, each first waiting for the next: the message stays readable."""
    n = 40
    lines = [f"{i} r{i}.dp r{(i + 1) % n}.dp | all_reduce 8 B over {i},{(i + 1) % n} | - | stage=0" for i in range(n)]
    orders = [f"order r{i}.dp {i},{(i - 1) % n}" for i in range(n)]
    with pytest.raises(DeadlockError, match="24 more ranks") as caught:
        compile_graph(from_text("\n".join([f"world_size {n}", *lines, *orders])))
    assert len(str(caught.value)) < 6000
    assert "28 more blocked tasks" in str(caught.value)


ONE = "world_size 1\n0 r0.compute | forward a x1 | - | stage=0\n1 r0.dp | all_reduce 8 B over 0 | 0 | stage=0\n"


@engines
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), -float("inf")])
def test_bad_durations_name_the_task_and_the_value(simulate: Engine, value: float) -> None:
    with pytest.raises(GraphError, match=rf"task 1 \(all_reduce 8 B over 0 on r0\.dp\) has duration {value} s"):
        simulate(from_text(ONE), [1.0, value])


@engines
def test_shapes_are_checked(simulate: Engine) -> None:
    graph = from_text(ONE)
    for wrong in ([1.0], [[1.0, 1.0]], 1.0, []):
        with pytest.raises(GraphError, match=r"durations_s must have shape \[2\], one entry per task"):
            simulate(graph, wrong)
    with pytest.raises(GraphError, match=r"shape \[samples, 2\], one entry per task, got \[2\]"):
        static.step_times_s(graph, [1.0, 1.0], steps=2)
    with pytest.raises(GraphError, match="steps must be >= 1, got 0"):
        static.step_times_s(graph, [[1.0, 1.0]], steps=0)
    with pytest.raises(GraphError, match="has duration -1"):
        lower_bound_s(graph, [1.0, -1.0])


@engines
@pytest.mark.parametrize("factors", [(0.5, 1.0), (1.0, float("nan")), (float("inf"), 1.0)])
def test_overlap_factors_below_one_are_refused(simulate: Engine, factors: tuple[float, float]) -> None:
    with pytest.raises(GraphError, match="overlap factors must be finite and >= 1"):
        simulate(from_text(ONE), [1.0, 1.0], overlap=OverlapFactors(compute=factors[0], communication=factors[1]))


@engines
def test_an_empty_graph_takes_no_time(simulate: Engine) -> None:
    empty = TaskGraph(tasks=(), world_size=1)
    assert simulate(empty, []).makespan_s == 0.0
    assert static.step_times_s(empty, [[], []], steps=3).tolist() == [0.0, 0.0]
    assert lower_bound_s(empty, []) == 0.0


@engines
def test_a_compiled_graph_serves_as_well(simulate: Engine) -> None:
    graph = from_text(ONE)
    compiled = compile_graph(graph)
    assert compile_graph(compiled) is compiled
    assert list(simulate(compiled, [1.0, 2.0])) == list(simulate(graph, [1.0, 2.0]))


def test_importing_the_engines_does_not_load_numba() -> None:
    code = "import parsim.engines.static, parsim.predict.breakdown, sys; print('numba' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root, timeout=60)
    assert run.stdout.strip() == "False"


# Closed forms of pipelines, on graphs made by the real lowering. Each formula stands with its hypotheses.


def pipeline_graph(
    stages: int, microbatches: int, order: str, replicas: int = 1, *, chunks: int = 1, weights: bool = False
) -> TaskGraph:
    """One component per stage (`stages` counts ranks, of `chunks` stages each).

    Without weights there is no gradient reduction, no optimizer and nothing to do in the second half of a backward.
    """
    names = [f"c{number}" for number in range(stages * chunks)]
    model = bare_chain(names, elements=10 if weights else 0, bytes_per_sample=4)
    mesh = Mesh(pp=stages, dp=replicas)
    plan = Plan(
        strategy="hp",
        mesh=mesh,
        stages=tuple(
            Stage(components=(name,), ranks=mesh.stage_ranks(place))
            for name, place in zip(names, rank_of_stage(order, stages, chunks), strict=True)
        ),
        global_batch=microbatches * replicas,
        microbatches=microbatches,
        pipeline_order=order,
    )
    return lower(plan, model)


def durations_s(graph: TaskGraph, f: float, b: float, x: float, w: float = 0.0) -> np.ndarray:
    """Forward f, backward b, transfer x; loading and the rest take no time. Of b, w is for weights where it runs in halves."""
    phases = {Phase.FORWARD: f, Phase.BACKWARD: b, Phase.BACKWARD_INPUT: b - w, Phase.BACKWARD_WEIGHT: w}

    def seconds(work: object) -> float:
        if isinstance(work, Compute):
            return phases[work.phase]
        return x if isinstance(work, SendRecv) else 0.0

    return np.array([seconds(task.work) for task in graph.tasks])


SHAPES = [(1, 1), (1, 5), (2, 1), (2, 4), (3, 7), (4, 4), (4, 16), (5, 3), (8, 64)]


@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
@pytest.mark.parametrize(("f", "b", "x"), [(1.0, 2.0, 0.0), (1.0, 2.0, 0.125), (0.7, 0.7, 0.7), (2.0, 1.3, 0.9)])
def test_gpipe_makespan(stages: int, microbatches: int, f: float, b: float, x: float) -> None:
    """(M+S-1)(f+b) + 2(S-1)x for x <= f and x <= b: each boundary is crossed once on the way down and once back."""
    graph = pipeline_graph(stages, microbatches, "gpipe")
    wanted = (microbatches + stages - 1) * (f + b) + 2 * (stages - 1) * x
    for engine in (static, dynamic):
        assert engine.simulate(graph, durations_s(graph, f, b, x)).makespan_s == pytest.approx(wanted, rel=1e-12)


def test_1f1b_with_transfer_is_longer_than_gpipes_formula() -> None:
    """S = 8, M = 64, f = 1, b = 2, x = 0.1: each transfer of the alternating phase is waited for."""
    timelines = {}
    for order in ("gpipe", "1f1b"):
        graph = pipeline_graph(8, 64, order)
        timelines[order] = static.simulate(graph, durations_s(graph, 1.0, 2.0, 0.1)).makespan_s
    assert timelines["gpipe"] == pytest.approx(214.4, rel=1e-12)
    assert timelines["1f1b"] == pytest.approx(225.4, rel=1e-12)


@pytest.mark.parametrize(("f", "b"), [(1.0, 2.0), (1.0, 1.0), (2.0, 1.0)])
@pytest.mark.parametrize(
    ("ranks", "microbatches", "chunks"), [(2, 2, 2), (2, 4, 3), (4, 4, 2), (4, 8, 2), (3, 9, 4), (8, 16, 2), (8, 32, 3)]
)
def test_interleaved_makespan(ranks: int, microbatches: int, chunks: int, f: float, b: float) -> None:
    """(V M + S - 1)(f + b) for f and b of one chunk, x = 0 and M a multiple of S: the bubble is a V-th of 1F1B's.

    Source: Narayanan et al., Megatron-LM (2021), section 2.2.
    """
    graph = pipeline_graph(ranks, microbatches, "interleaved", chunks=chunks)
    for engine in (static, dynamic):
        makespan = engine.simulate(graph, durations_s(graph, f, b, 0.0)).makespan_s
        assert makespan == (chunks * microbatches + ranks - 1) * (f + b)


HALVES = [(1.0, 1.0, 1.0), (1.0, 1.5, 0.5), (1.0, 2.0, 1.0), (2.0, 1.0, 1.0), (1.0, 1.0, 0.5)]


@pytest.mark.parametrize(("f", "i", "w"), HALVES)
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (2, 5), (4, 4), (4, 9), (8, 8), (8, 64)])
def test_zero_bubble_makespan(stages: int, microbatches: int, f: float, i: float, w: float) -> None:
    """M (f + i + w) + (S - 1)(f + i - w) for x = 0, M >= S and w <= f, i: ZB-H1 of Qi et al. (2023), section 2.

    1F1B's fill is (S - 1)(f + i + w) at the same times.
    """
    graph = pipeline_graph(stages, microbatches, "zero-bubble", weights=True)
    for engine in (static, dynamic):
        makespan = engine.simulate(graph, durations_s(graph, f, i + w, 0.0, w)).makespan_s
        assert makespan == pytest.approx(microbatches * (f + i + w) + (stages - 1) * (f + i - w), rel=1e-12)
    one = pipeline_graph(stages, microbatches, "1f1b", weights=True)
    assert makespan < static.simulate(one, durations_s(one, f, i + w, 0.0)).makespan_s


@pytest.mark.parametrize(("microbatches", "f", "i", "w"), [(3, 1.0, 1.0, 1.0), (8, 1.0, 1.0, 1.5)])
def test_zero_bubble_is_slower_than_its_formula_outside_its_hypotheses(microbatches: int, f: float, i: float, w: float) -> None:
    """Fewer microbatches than stages (S = 4) leave nothing to fill with; longer halves for weights stand in the way."""
    graph = pipeline_graph(4, microbatches, "zero-bubble", weights=True)
    makespan = static.simulate(graph, durations_s(graph, f, i + w, 0.0, w)).makespan_s
    assert makespan > microbatches * (f + i + w) + 3 * (f + i - w) + 0.1


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 3), (2, 8), (3, 5), (4, 7), (4, 16), (8, 32)])
@pytest.mark.parametrize("f", [1.0, 0.25])
def test_zero_bubble_v_makespan(stages: int, microbatches: int, f: float) -> None:
    """6 M f + (S - 1) f for x = 0, M >= 2 S - 1 and f = i = w per chunk: no rank idles but before its first and after its
    last action (Qi et al. (2023), section 6). 1F1B over the same work takes 6 M f + 6 (S - 1) f."""
    graph = pipeline_graph(stages, microbatches, "zero-bubble-v", chunks=2, weights=True)
    for engine in (static, dynamic):
        makespan = engine.simulate(graph, durations_s(graph, f, 2 * f, 0.0, f)).makespan_s
        assert makespan == pytest.approx(6 * microbatches * f + (stages - 1) * f, rel=1e-12)


def test_the_two_chunks_of_the_last_rank_send_nothing_between_them() -> None:
    """In a V stage S - 1 and S are one rank's: of 2 S - 1 borders 2 S - 2 are crossed, forward and back."""
    graph = pipeline_graph(3, 2, "zero-bubble-v", chunks=2, weights=True)
    pairs = [(task.work.source, task.work.destination) for task in graph.tasks if isinstance(task.work, SendRecv)]
    assert sorted(pairs) == sorted(2 * [(0, 1), (1, 2), (2, 1), (1, 0)] * 2)


def test_a_backward_in_halves_does_all_the_work_once() -> None:
    """Where nothing is to be done in one half, the whole backward runs in the other: no parameters, or no input gradient."""
    texts = to_text(pipeline_graph(2, 1, "zero-bubble", weights=True)).splitlines()
    works = [line.split(" | ")[1] for line in texts[1:]]
    assert [work for work in works if work.startswith("backward")] == [
        "backward c0 x1",
        "backward_input c1 x1",
        "backward_weight c1 x1",
    ]
    whole = to_text(pipeline_graph(2, 1, "zero-bubble"))
    assert "backward c1 x1" in whole
    assert "backward_input" not in whole
    assert from_text(whole) == pipeline_graph(2, 1, "zero-bubble")


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_bubble_fraction(order: str, stages: int, microbatches: int) -> None:
    """(S-1)/(M+S-1) on every rank at x = 0, and nothing else but computing."""
    graph = pipeline_graph(stages, microbatches, order)
    parts = breakdown(graph, static.simulate(graph, durations_s(graph, 1.0, 2.0, 0.0)))
    wanted = (stages - 1) / (microbatches + stages - 1)
    for entry in parts:
        assert entry.bubble_s / entry.step_s == pytest.approx(wanted, abs=1e-12)
        assert entry.compute_s == 3.0 * microbatches
        assert entry.load_s == entry.host_s == entry.idle_s == entry.exposed_communication_s == 0.0
    assert step_fractions(parts).bubble_fraction == pytest.approx(wanted, abs=1e-12)


def test_a_waiting_stage_splits_into_transfer_and_bubble() -> None:
    """S = 2, M = 1, x = 0.5: each stage waits for its peer's work (bubble) and for two transfers (exposed)."""
    graph = pipeline_graph(2, 1, "gpipe")
    timeline = static.simulate(graph, durations_s(graph, 1.0, 2.0, 0.5))
    assert timeline.makespan_s == 7.0
    for entry, bubble in zip(breakdown(graph, timeline), (3.0, 3.0), strict=True):
        assert (entry.compute_s, entry.exposed_communication_s, entry.bubble_s) == (3.0, 1.0, bubble)
        assert entry.communication_busy_s == 1.0


def test_steady_state_of_repeated_steps_has_no_fill() -> None:
    """GPipe at x = 0: a stage idles (S-1)(f+b) between two steps of its own, so K steps take K(M+S-1)(f+b) at most, and
    stage 0 starts the next step as soon as its own last backward is done."""
    graph = pipeline_graph(4, 8, "gpipe")
    durations = durations_s(graph, 1.0, 2.0, 0.0)[None, :]
    one, many = (static.step_times_s(graph, durations, steps=steps)[0] for steps in (1, 50))
    assert one == 33.0
    assert many == 33.0, "stage 0 both begins and ends a step, so consecutive steps cannot overlap"


def test_critical_path_and_bounds_of_a_pipeline() -> None:
    graph = pipeline_graph(4, 8, "gpipe")
    durations = durations_s(graph, 1.0, 2.0, 0.25)
    timeline = static.simulate(graph, durations)
    path = critical_path(graph, timeline)
    assert sum(durations[list(path)]) == timeline.makespan_s
    assert lower_bound_s(graph, durations) == 24.0, "eight microbatches of 3 s on one stage"
