"""Comparison of a predicted with a measured timeline: exact cases, invariants, and the noise floor against its theory."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsim.costs.observed import task_durations_s
from parsim.errors import GraphError, ParsimError
from parsim.predict.compare import aa_floor, compare, drift, kind_intervals_s, relative_error
from parsim.predict.result import Interval
from parsim.program.taskgraph import COMPUTE, Origin, Resource, Task, TaskGraph
from parsim.timeline import Span, Timeline
from parsim.work import Collective, Compute, Phase

SECONDS = st.floats(1e-3, 1e3)


def graph_of(forwards: int) -> TaskGraph:
    """`forwards` components on rank 0 and as many backwards on rank 1, then one all_reduce over both."""
    tasks = [
        Task(
            index=number,
            work=Compute(component=f"c{number % forwards}", phase=phase, samples=4),
            resources=(Resource(rank, COMPUTE),),
            dependencies=(),
            origin=Origin(stage=0, component=f"c{number % forwards}"),
        )
        for number, (phase, rank) in enumerate([(Phase.FORWARD, 0)] * forwards + [(Phase.BACKWARD, 1)] * forwards)
    ]
    reduce = Task(
        index=2 * forwards,
        work=Collective(operation="all_reduce", group=(0, 1), size_bytes=1024),
        resources=(Resource(0, "dp"), Resource(1, "dp")),
        dependencies=tuple(range(2 * forwards)),
        origin=Origin(stage=0, bucket=0),
    )
    return TaskGraph(tasks=(*tasks, reduce), world_size=2)


def timeline_of(graph: TaskGraph, seconds: Sequence[float], wait_s: float = 0.0) -> Timeline:
    """Tasks one after another; of a task on two ranks the second starts `wait_s` later, when it really begins."""
    spans, now = [], 0.0
    for task, duration in zip(graph.tasks, seconds, strict=True):
        begin = now + (wait_s if len(task.resources) > 1 else 0.0)
        for place, resource in enumerate(task.resources):
            spans.append(Span(task.index, str(resource), begin if place else now, begin + duration))
        now = begin + duration
    return Timeline.from_spans(spans, "measured" if wait_s else "simulated")


@given(st.lists(SECONDS, min_size=5, max_size=5))
def test_a_timeline_agrees_with_itself(seconds: list[float]) -> None:
    graph = graph_of(2)
    timeline = timeline_of(graph, seconds)
    found = compare(graph, timeline, timeline)
    assert found.step.relative_error == 0
    assert all(row.relative_error == 0 for row in found.tasks)
    assert all(row.relative_error == 0 and row.median_absolute_relative_error == 0 for row in found.kinds)
    assert sum(row.count for row in found.kinds) == len(graph.tasks)


@given(st.lists(SECONDS, min_size=5, max_size=5), st.floats(0.1, 10))
def test_a_prediction_scaled_by_k_is_off_by_k_minus_1_everywhere(seconds: list[float], factor: float) -> None:
    graph = graph_of(2)
    found = compare(graph, timeline_of(graph, [factor * value for value in seconds]), timeline_of(graph, seconds))
    errors = [
        found.step.relative_error,
        *(row.relative_error for row in found.tasks),
        *(row.relative_error for row in found.kinds),
    ]
    assert errors == pytest.approx([factor - 1] * len(errors), rel=1e-6, abs=1e-6)


def test_a_collective_runs_from_the_common_start_to_the_latest_end() -> None:
    graph = graph_of(1)
    late = timeline_of(graph, [1.0, 1.0, 0.5], wait_s=7.0)
    assert task_durations_s(len(graph.tasks), late, complete=True) == pytest.approx([1.0, 1.0, 0.5])
    assert late.makespan_s == pytest.approx(9.5)


def test_tasks_compare_with_the_median_and_the_step_with_the_mean() -> None:
    graph = graph_of(1)
    steps = [timeline_of(graph, [value, 1.0, 1.0]) for value in (1.0, 2.0, 9.0)]
    found = compare(graph, steps[0], steps)
    assert found.tasks[0].measured_s == 2.0
    assert found.tasks[0].relative_error == -0.5
    assert found.step.measured_s == pytest.approx((3 + 4 + 11) / 3)
    assert found.step.steps == 3
    assert found.aa_floor is None


def test_kinds_sum_their_tasks_and_know_their_interval() -> None:
    graph = graph_of(2)
    predicted, measured = timeline_of(graph, [1, 2, 3, 4, 5]), timeline_of(graph, [2, 2, 3, 3, 4])
    intervals = kind_intervals_s(graph, np.array([[1.0, 2, 3, 4, 5], [2, 3, 3, 4, 4], [1, 2, 3, 4, 6]]))
    found = {row.kind: row for row in compare(graph, predicted, measured, kind_intervals=intervals).kinds}
    assert set(found) == {"forward", "backward", "all_reduce"}
    forward = found["forward"]
    assert (forward.count, forward.predicted_s, forward.measured_s) == (2, 3.0, 4.0)
    assert forward.relative_error == -0.25
    assert forward.median_absolute_relative_error == 0.25
    assert intervals["forward"].median == 3.0
    assert forward.within_interval is True
    assert found["backward"].within_interval is False


def test_step_interval_memory_and_json() -> None:
    graph = graph_of(1)
    timeline = timeline_of(graph, [1, 1, 1])
    found = compare(
        graph,
        timeline,
        timeline,
        predicted_step=Interval(median=3.3, p05=3.1, p95=3.6),
        measured_step=[2.9, 3.0, 3.1, 3.0],
        predicted_memory_bytes=[110, 90],
        measured_memory_bytes=[100, 100],
    )
    document = json.loads(json.dumps(found.to_dict(tasks=True)))
    assert document["predicted"] == 3.3
    assert document["measured"] == pytest.approx(3.0)
    assert document["relative_error"] == pytest.approx(0.1)
    assert document["within_interval"] is False
    assert document["predicted_step_s"] == {"median": 3.3, "p05": 3.1, "p95": 3.6}
    assert set(document["kinds"]["forward"]) >= {"predicted", "measured", "relative_error", "within_interval"}
    assert [row["relative_error"] for row in document["memory"]] == pytest.approx([0.1, -0.1])
    assert len(document["tasks"]) == 3
    assert document["aa_floor"]["median"] <= document["aa_floor"]["p95"]


def test_an_error_against_nothing_is_not_a_number() -> None:
    assert relative_error(0.0, 0.0) == 0.0
    assert relative_error(1.0, 0.0) is None
    assert relative_error(1.0, 2.0) == -0.5
    graph = graph_of(1)
    found = compare(graph, timeline_of(graph, [1, 1, 1]), timeline_of(graph, [0, 1, 1]))
    assert found.tasks[0].relative_error is None
    assert json.loads(json.dumps(found.to_dict()))["kinds"]["forward"]["relative_error"] is None


def test_largest_errors_come_first() -> None:
    graph = graph_of(6)
    seconds = np.ones(13)
    wrong = seconds + np.arange(13)
    found = compare(graph, timeline_of(graph, wrong.tolist()), timeline_of(graph, seconds.tolist()))
    assert [row.task for row in found.largest_errors] == list(range(12, 2, -1))


def test_timelines_of_other_graphs_are_refused() -> None:
    graph, larger = graph_of(1), graph_of(2)
    own, other = timeline_of(graph, [1] * 3), timeline_of(larger, [1] * 5)
    with pytest.raises(GraphError, match=r"names task 3, but the graph has tasks 0\.\.2"):
        compare(graph, own, other)
    with pytest.raises(GraphError, match="lacks 2 of the graph's 5 tasks, the first is task 3"):
        compare(larger, other, own)
    with pytest.raises(ParsimError, match="at least one measured step"):
        compare(graph, own, [])
    with pytest.raises(ParsimError, match="predicted for 2 ranks and measured on 1"):
        compare(graph, own, own, predicted_memory_bytes=[1, 2], measured_memory_bytes=[1])


@given(st.lists(st.floats(0.5, 2.0), min_size=4, max_size=30))
def test_the_floor_is_ordered_and_bounded(rounds: list[float]) -> None:
    floor = aa_floor(rounds, splits=50)
    assert 0 <= floor.median <= floor.p95 <= max(rounds) / min(rounds) - 1 + 1e-12


def test_equal_rounds_have_no_floor_and_no_drift() -> None:
    assert aa_floor([0.25] * 8) == (0.0, 0.0)
    assert drift([0.25] * 8) == 0.0
    assert drift([1, 1, 1, 1.1, 1.1, 1.1]) == pytest.approx(0.1)
    assert drift([1.0, 1.0, 50.0, 1.1, 1.1]) == pytest.approx(0.1), "the odd round in the middle belongs to neither half"


def test_the_floor_of_independent_noise_is_what_theory_says() -> None:
    """Halves of n/2 rounds with relative noise s differ by a normal with deviation 2 s / sqrt(n)."""
    rng = np.random.default_rng(5)
    noise, count = 0.05, 400
    floor = aa_floor(1 + noise * rng.standard_normal(count), splits=4000)
    deviation = 2 * noise / np.sqrt(count)
    assert floor.median == pytest.approx(0.6745 * deviation, rel=0.15)
    assert floor.p95 == pytest.approx(1.96 * deviation, rel=0.15)


def test_rounds_not_steps_are_split() -> None:
    """What a whole round shares cannot be averaged away by more steps per round."""
    shared = [0.9, 1.1, 0.95, 1.05, 1.0, 1.0]
    assert aa_floor([[value] * 50 for value in shared]) == pytest.approx(aa_floor(shared))


def test_the_floor_refuses_too_little() -> None:
    with pytest.raises(ParsimError, match=">= 4 rounds, got 3"):
        aa_floor([1.0, 1.0, 1.0])
    with pytest.raises(ParsimError, match="step times > 0 in every round"):
        aa_floor([[1.0], [], [1.0], [1.0]])
