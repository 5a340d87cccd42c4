"""Closed forms of pipelines, on graphs made by the real lowering. Each formula stands with its hypotheses."""

from __future__ import annotations

import numpy as np
import pytest

from parsim.engines import dynamic, static
from parsim.model.component import Component, Parameter, Value
from parsim.model.model import Model
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import rank_of_stage
from parsim.plans.plan import Plan, Stage
from parsim.predict.breakdown import breakdown, critical_path, lower_bound_s, step_fractions
from parsim.program.lower import lower
from parsim.program.taskgraph import TaskGraph, from_text, to_text
from parsim.work import Compute, Phase, SendRecv


def pipeline_plan(
    stages: int, microbatches: int, order: str, replicas: int = 1, *, chunks: int = 1, weights: bool = False
) -> tuple[Plan, Model]:
    """One component per stage (`stages` counts ranks, of `chunks` stages each).

    Without weights there is no gradient reduction, no optimizer and nothing to do in the second half of a backward.
    """
    names = [f"c{number}" for number in range(stages * chunks)]
    values = ["input:0", *(f"{name}:0" for name in names)]
    model = Model(
        name="chain",
        granularity="block",
        components=tuple(
            Component(
                name=name,
                inputs=(values[number],),
                outputs=(values[number + 1],),
                parameters=(Parameter(name=f"{name}.weight", elements=10),) if weights else (),
            )
            for number, name in enumerate(names)
        ),
        values=tuple(
            Value(name=value, producer=names[number - 1] if number else None, bytes_per_sample=4)
            for number, value in enumerate(values)
        ),
        inputs=("input:0",),
        outputs=(values[-1],),
    )
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
    return plan, model


def pipeline_graph(
    stages: int, microbatches: int, order: str, replicas: int = 1, *, chunks: int = 1, weights: bool = False
) -> TaskGraph:
    return lower(*pipeline_plan(stages, microbatches, order, replicas, chunks=chunks, weights=weights))


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


@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_1f1b_makespan_without_transfer(stages: int, microbatches: int) -> None:
    """(M+S-1)(f+b), as GPipe, but only at x = 0."""
    graph = pipeline_graph(stages, microbatches, "1f1b")
    timeline = static.simulate(graph, durations_s(graph, 1.0, 2.0, 0.0))
    assert timeline.makespan_s == (microbatches + stages - 1) * 3.0


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


def test_replicas_of_a_pipeline_do_not_disturb_one_another() -> None:
    alone, twice = pipeline_graph(3, 4, "1f1b"), pipeline_graph(3, 4, "1f1b", replicas=2)
    times = [static.simulate(graph, durations_s(graph, 1.0, 2.0, 0.1)).makespan_s for graph in (alone, twice)]
    assert times[0] == times[1]


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
