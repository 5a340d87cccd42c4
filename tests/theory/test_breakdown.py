"""Categories of a step: they sum to it for any timeline, and each situation lands where the table says."""

from __future__ import annotations

import re
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import graph_of, random_durations_s, random_graph, timed_graphs

from parsim.costs.estimate import OverlapFactors
from parsim.engines import static
from parsim.engines.static import compile_graph, simulate
from parsim.errors import GraphError
from parsim.predict.breakdown import RankBreakdown, breakdown, covered_until, critical_path, step_fractions, union
from parsim.program.taskgraph import Resource, TaskGraph, from_text
from parsim.report.trace import IDLE, LEAST_SHARE, LETTERS, PIECES, sketch
from parsim.timeline import Span, Timeline
from parsim.work import Collective, Compute, LoadBatch, OptimizerStep, Phase

FORWARD_LOADED = """
world_size 1
0 r0.host | load x8 64 B | - | stage=0
1 r0.compute | forward a x8 | 0 | stage=0
"""

TWO_REPLICAS = """
world_size 2
0 r0.compute | backward a x8 | - | stage=0
1 r1.compute | backward a x8 | - | stage=0
2 r0.dp r1.dp | all_reduce 64 B over 0,1 | 0,1 | stage=0
3 r0.compute | optimizer 4 elements in 1 | 2 | stage=0
4 r1.compute | optimizer 4 elements in 1 | 2 | stage=0
"""

TWO_STAGES = """
world_size 2
0 r0.compute | forward a x8 | - | stage=0
1 r0.pp>1 r1.pp<0 | send_recv 64 B 0>1 | 0 | stage=0
2 r1.host | load x8 64 B | - | stage=1
3 r1.compute | forward b x8 | 1,2 | stage=1
"""


def categories(entry: RankBreakdown) -> tuple[float, ...]:
    """compute, load, host, exposed communication, bubble, idle."""
    return (entry.compute_s, entry.load_s, entry.host_s, entry.exposed_communication_s, entry.bubble_s, entry.idle_s)


def measured(*spans: tuple[int, str, float, float]) -> Timeline:
    return Timeline.from_spans([Span(*span) for span in spans], "measured")


@given(timed_graphs(), st.floats(0.0, 2.0))
def test_categories_sum_to_the_step(timed: tuple[TaskGraph, list[float]], share: float) -> None:
    """Simulated, with and without slowdown, and for steps shorter and longer than the timeline."""
    graph, durations = timed
    for overlap in (None, OverlapFactors(compute=1.5, communication=1.25)):
        timeline = static.simulate(graph, durations, overlap=overlap)
        for step_s in (None, share * timeline.makespan_s):
            wanted = timeline.makespan_s if step_s is None else step_s
            parts = breakdown(graph, timeline, step_s)
            assert [entry.rank for entry in parts] == list(range(graph.world_size))
            for entry in parts:
                assert entry.step_s == pytest.approx(wanted, rel=1e-9, abs=1e-12)
                assert min(*categories(entry), entry.communication_busy_s) >= 0
                assert entry.exposed_communication_s <= entry.communication_busy_s * (1 + 1e-9) + 1e-12
                if step_s is None:
                    assert entry.host_s <= 1e-9 * wanted, "a simulated task starts as soon as it can"


@given(timed_graphs(), st.integers(0, 1 << 30))
def test_categories_sum_for_any_measured_timeline(timed: tuple[TaskGraph, list[float]], seed: int) -> None:
    """Spans moved about at random: overlapping on one stream, ending after what waited for them, before 0."""
    graph, durations = timed
    timeline = static.simulate(graph, durations)
    rng = np.random.default_rng(seed)
    scale = timeline.makespan_s or 1.0
    start = timeline.start_s + scale * rng.normal(0, 0.1, len(timeline))
    end = np.maximum(start, timeline.end_s + scale * rng.normal(0, 0.1, len(timeline)))
    shaken = Timeline(
        source="measured",
        resources=timeline.resources,
        task=timeline.task,
        resource=timeline.resource,
        start_s=start,
        end_s=end,
    )
    step_s = max(0.0, shaken.makespan_s)
    for entry in breakdown(graph, shaken, step_s):
        assert entry.step_s == pytest.approx(step_s, rel=1e-9, abs=1e-12)
        assert min(categories(entry)) >= 0


def category_at(graph: TaskGraph, timeline: Timeline, rank: int, moment: float) -> str:
    """The table of `breakdown`, asked of one moment that is the start or end of no span."""
    spans = list(timeline)
    ends = {}
    for span in spans:
        ends[span.task] = max(ends.get(span.task, 0.0), span.end_s)
    kinds = {task.index: type(task.work).__name__ for task in graph.tasks}
    communicates = {index: kind in ("Collective", "SendRecv") for index, kind in kinds.items()}
    own = [span for span in spans if span.resource.startswith(f"r{rank}.")]
    computing = [span for span in own if span.resource == f"r{rank}.compute" and not communicates[span.task]]
    if any(span.start_s <= moment < span.end_s for span in computing):
        return "compute"
    if any(span.start_s <= moment < span.end_s for span in own if communicates[span.task]):
        return "exposed"
    later = [span for span in computing if span.start_s > moment]
    if not later:
        return "bubble" if any(kinds[span.task] == "SendRecv" for span in own) else "idle"
    order = graph.issue_order[next(r for r in graph.resources if str(r) == f"r{rank}.compute")]
    task = min(later, key=lambda span: order.index(span.task)).task
    pending = [need for need in graph.predecessors()[task] if ends[need] > moment]
    if any(kinds[need] == "LoadBatch" for need in pending):
        begun = moment >= min(span.start_s for span in own)
        return "load" if begun else "bubble" if any(kinds[span.task] == "SendRecv" for span in own) else "idle"
    if any(kinds[need] == "SendRecv" or rank not in graph.tasks[need].ranks for need in pending):
        return "bubble"
    return "idle" if pending else "host"


def test_a_rank_that_has_not_begun_its_step_is_not_loading() -> None:
    """Rank 1 is still in the step before: its load starts at 3 and ends at 4."""
    graph = from_text(
        "world_size 2\n"
        "0 r0.host | load x1 8 B | - | stage=0\n"
        "1 r0.compute | forward a x1 | 0 | stage=0 component=a\n"
        "2 r1.host | load x1 8 B | - | stage=0\n"
        "3 r1.compute | forward a x1 | 2 | stage=0 component=a\n"
    )
    spans = [Span(0, "r0.host", 0, 1), Span(1, "r0.compute", 1, 5), Span(2, "r1.host", 3, 4), Span(3, "r1.compute", 4, 8)]
    late = breakdown(graph, Timeline.from_spans(spans, "measured"))[1]
    assert (late.load_s, late.idle_s, late.compute_s) == (1.0, 3.0, 4.0)
    assert late.step_s == 8.0


def test_categories_equal_a_moment_by_moment_reading() -> None:
    """300 random graphs on the grid, where every cut is a multiple of 1/1024 s: the middle of each cell is read off."""
    for seed in range(300):
        random = Random(seed)
        graph = random_graph(random, most_ranks=4, most_tasks=14)
        durations = random_durations_s(random, len(graph.tasks), on_grid=True)
        durations = [min(value, 8 / 1024) for value in durations]
        timeline = static.simulate(graph, durations)
        cells = round(timeline.makespan_s * 1024)
        for entry in breakdown(graph, timeline):
            found = [category_at(graph, timeline, entry.rank, (cell + 0.5) / 1024) for cell in range(cells)]
            names = ("compute", "load", "host", "exposed", "bubble", "idle")
            wanted = [found.count(name) / 1024 for name in names]
            np.testing.assert_allclose(categories(entry), wanted, rtol=0, atol=1e-12, err_msg=f"seed {seed} {entry}")


def test_waiting_for_the_batch_is_load() -> None:
    graph = from_text(FORWARD_LOADED)
    (entry,) = breakdown(graph, static.simulate(graph, [3.0, 2.0]))
    assert categories(entry) == (2.0, 3.0, 0.0, 0.0, 0.0, 0.0)


def test_a_gap_with_everything_ready_is_host() -> None:
    """The batch is there at 3, the forward starts at 3.5; the step goes on to 6 although the last span ends at 5.5."""
    graph = from_text(FORWARD_LOADED)
    timeline = measured((0, "r0.host", 0.0, 3.0), (1, "r0.compute", 3.5, 5.5))
    (entry,) = breakdown(graph, timeline, 6.0)
    assert categories(entry) == (2.0, 3.0, 1.0, 0.0, 0.0, 0.0)


def test_a_late_replica_is_idle_until_the_collective_runs() -> None:
    """Rank 0 is ready at 1, rank 1 at 3: rank 0 idles for 2, then both have 4 of exposed communication."""
    graph = from_text(TWO_REPLICAS)
    parts = breakdown(graph, static.simulate(graph, [1.0, 3.0, 4.0, 0.5, 0.5]))
    assert categories(parts[0]) == (1.5, 0.0, 0.0, 4.0, 0.0, 2.0)
    assert categories(parts[1]) == (3.5, 0.0, 0.0, 4.0, 0.0, 0.0)
    fractions = step_fractions(parts)
    assert fractions.communication_fraction == fractions.communication_busy_fraction == 4 / 7.5
    assert (fractions.exposed_communication_s, fractions.bubble_fraction) == (4.0, 0.0)


def test_a_stage_waits_for_its_peer_then_for_the_transfer() -> None:
    """Before the transfer: bubble, unless the own batch is missing (load goes first); during it: exposed."""
    graph = from_text(TWO_STAGES)
    first, second = breakdown(graph, static.simulate(graph, [5.0, 1.0, 2.0, 3.0]))
    assert categories(first) == (5.0, 0.0, 0.0, 1.0, 3.0, 0.0), "done while its peer still works: bubble"
    assert categories(second) == (3.0, 2.0, 0.0, 1.0, 3.0, 0.0)


def test_hidden_communication_counts_as_busy_alone() -> None:
    graph = from_text(
        "world_size 1\n0 r0.compute | forward a x8 | - | stage=0\n1 r0.dp | all_reduce 8 B over 0 | - | stage=0\n"
    )
    (entry,) = breakdown(graph, static.simulate(graph, [3.0, 2.0]))
    assert categories(entry) == (3.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert entry.communication_busy_s == 2.0


def test_a_rank_without_tasks_and_an_empty_step() -> None:
    graph = from_text("world_size 2\n0 r0.compute | forward a x8 | - | stage=0\n")
    assert categories(breakdown(graph, static.simulate(graph, [2.0]))[1]) == (0.0, 0.0, 0.0, 0.0, 0.0, 2.0)
    empty = TaskGraph(tasks=(), world_size=1)
    parts = breakdown(empty, static.simulate(empty, []))
    assert parts[0].step_s == 0.0
    assert step_fractions(parts).communication_fraction == 0.0
    assert step_fractions(()).bubble_fraction == 0.0
    assert critical_path(empty, static.simulate(empty, [])) == ()


def test_a_timeline_of_another_graph_is_refused() -> None:
    graph = from_text(FORWARD_LOADED)
    with pytest.raises(GraphError, match=r"task 7, the graph has tasks 0\.\.1"):
        breakdown(graph, measured((7, "r0.host", 0.0, 1.0)))
    with pytest.raises(GraphError, match=r"r0\.dp, which the graph lacks"):
        breakdown(graph, measured((0, "r0.dp", 0.0, 1.0)))
    with pytest.raises(GraphError, match="no row for task 1"):
        critical_path(graph, measured((0, "r0.host", 0.0, 1.0)))
    with pytest.raises(GraphError, match="finite and >= 0, got nan"):
        breakdown(graph, measured((0, "r0.host", 0.0, 1.0)), float("nan"))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), max_size=12))
def test_union_and_cover_equal_counting(spans: list[tuple[int, int]]) -> None:
    start = np.array([first for first, _ in spans], dtype=float)
    end = np.array([first + length for first, length in spans], dtype=float)
    merged = union(start, end)
    cells = [any(first <= cell < first + length for first, length in spans) for cell in range(40)]
    assert (merged[1] - merged[0]).sum() == sum(cells)
    assert np.all(merged[0][1:] > merged[1][:-1])
    times = np.arange(40.0)
    assert covered_until(merged[0], merged[1], times).tolist() == [float(sum(cells[: int(time)])) for time in times]


# The sketch of a timeline: every piece has the kind that takes most of it.


def unfolded(text: str) -> str:
    return "".join(letter * int(count or 1) for letter, count in re.findall(r"([A-Z.])(\d*)", text))


def test_a_step_is_written_by_its_parts() -> None:
    computes, both = [Resource(0, "compute")], [Resource(0, "dp"), Resource(1, "dp")]
    graph = graph_of(
        2,
        (Compute(component="a", phase=Phase.FORWARD, samples=1), computes, []),
        (Compute(component="a", phase=Phase.BACKWARD, samples=1), computes, [0]),
        (Collective(operation="all_reduce", group=(0, 1), size_bytes=8), both, [1]),
        (LoadBatch(samples=1, size_bytes=8), [Resource(0, "host")], []),
    )
    compiled = compile_graph(graph)
    timeline = simulate(compiled, np.array([1.0, 2.0, 3.0, 3.0]))
    lanes = dict(sketch(compiled, timeline, [0, 1]))
    assert lanes == {
        "rank 0 computation": f"F{PIECES // 6}B{PIECES // 3}.{PIECES // 2}",
        "rank 0 communication": f".{PIECES // 2}C{PIECES // 2}",
        "rank 0 loading": f"L{PIECES // 2}.{PIECES // 2}",
        "rank 1 communication": f".{PIECES // 2}C{PIECES // 2}",
    }
    assert {"F", "B", "C"} <= set(LETTERS)


WORKS = {
    "F": Compute(component="a", phase=Phase.FORWARD, samples=1),
    "B": Compute(component="a", phase=Phase.BACKWARD, samples=1),
    "O": OptimizerStep(elements=1, tensors=1),
}
SPANS = st.lists(st.tuples(st.sampled_from("FBO"), st.floats(0, 1), st.floats(0, 1)), max_size=12)


@given(SPANS)
def test_it_equals_the_shares_counted_piece_by_piece(spans: list[tuple[str, float, float]]) -> None:
    """On a step of 1 s, which a load on another rank takes."""
    spans = [(letter, min(a, b), max(a, b)) for letter, a, b in spans]
    works = [(WORKS[letter], [Resource(0, "compute")], []) for letter, _, _ in spans]
    graph = graph_of(2, *works, (LoadBatch(samples=1, size_bytes=8), [Resource(1, "host")], []))
    rows = [Span(number, "r0.compute", a, b) for number, (_, a, b) in enumerate(spans)]
    timeline = Timeline.from_spans([*rows, Span(len(spans), "r1.host", 0.0, 1.0)], "measured")
    lanes = dict(sketch(compile_graph(graph), timeline, [0]))
    assert list(lanes) == (["rank 0 computation"] if spans else [])
    text = unfolded(lanes["rank 0 computation"]) if spans else ""
    assert len(text) == (PIECES if spans else 0)
    for piece, letter in enumerate(text):
        low, high = piece / PIECES, (piece + 1) / PIECES
        shares = dict.fromkeys("FBO", 0.0)
        for kind, a, b in spans:
            shares[kind] += max(0.0, min(b, high) - max(a, low)) * PIECES
        if letter == IDLE:
            assert max(shares.values()) < LEAST_SHARE + 1e-9
        else:
            assert shares[letter] == pytest.approx(max(shares.values()), abs=1e-9)
            assert shares[letter] > LEAST_SHARE - 1e-9
