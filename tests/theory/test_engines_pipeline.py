"""Closed forms of pipelines, on graphs made by the real lowering. Each formula stands with its hypotheses."""

from __future__ import annotations

import numpy as np
import pytest

from parsim.analyze.bounds import lower_bound_s
from parsim.analyze.breakdown import breakdown, step_fractions
from parsim.analyze.critical_path import critical_path
from parsim.graph.lower import lower
from parsim.graph.taskgraph import TaskGraph
from parsim.model.component import Component, Value
from parsim.model.model import Model
from parsim.plan.mesh import Mesh
from parsim.plan.plan import Plan, Stage
from parsim.simulate import dynamic, static
from parsim.work import Compute, Phase, SendRecv


def pipeline_graph(stages: int, microbatches: int, order: str, replicas: int = 1) -> TaskGraph:
    """One component per stage, no parameters (so no gradient reduction and no optimizer)."""
    names = [f"c{number}" for number in range(stages)]
    values = ["input:0", *(f"{name}:0" for name in names)]
    model = Model(
        name="chain",
        granularity="block",
        components=tuple(
            Component(name=name, inputs=(values[number],), outputs=(values[number + 1],)) for number, name in enumerate(names)
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
        stages=tuple(Stage(components=(name,), ranks=mesh.stage_ranks(number)) for number, name in enumerate(names)),
        global_batch=microbatches * replicas,
        microbatches=microbatches,
        pipeline_order=order,
    )
    return lower(plan, model)


def durations_s(graph: TaskGraph, f: float, b: float, x: float) -> np.ndarray:
    """Forward f, backward b, transfer x; loading and the rest take no time."""

    def seconds(work: object) -> float:
        if isinstance(work, Compute):
            return f if work.phase is Phase.FORWARD else b
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
