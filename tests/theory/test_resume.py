"""Computation that resumes after its rank waited for communication: which tasks do, what they cost, how it is measured."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from calibration.fit.build_profile import core_sharing, resuming_s
from calibration.measure.delayed_streams import Pausing
from calibration.measure.overlap import core_sharing_factor, resumed_s
from parsim.execute.rank_run import make_streams
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.profile import HostOverhead
from parsim.predict.evaluate import Evaluation, evaluate
from parsim.predict.problem import PlanningProblem
from parsim.program.taskgraph import COMPUTE
from parsim.search.families import FAMILIES
from parsim.work import Compute, Phase
from tests.models import chain_model

RESUME_S = 0.125


def found(family: str, ranks: int, post_wait_s: float, *, engine: str = "static") -> Evaluation:
    host = HostOverhead(task_s=0.0, step_s=0.0, post_wait_s=post_wait_s, source="throughput")
    profile = load_profile("dgx1-v100-32gb").model_copy(update={"host": host})
    model = chain_model((4e9, 8e9, 6e9, 4e9), elements=400_000)
    problem = PlanningProblem(model=model, cluster=cluster_from_profile(profile, ranks), global_batch=64)
    plan = next(plan for plan in FAMILIES[family](problem) if plan.world_size == ranks)
    return evaluate(problem, plan, samples=20, fold=False, engine=engine)


def test_a_rank_alone_never_waits() -> None:
    assert found("single", 1, RESUME_S).result.step_s == found("single", 1, 0.0).result.step_s


def test_the_optimizer_waits_for_the_gradients_and_nothing_else_does() -> None:
    plain, resumed = found("dp", 2, 0.0), found("dp", 2, RESUME_S)
    assert resumed.result.step_s.median == pytest.approx(plain.result.step_s.median + RESUME_S, rel=1e-9)


@pytest.mark.parametrize("engine", ["static", "dynamic"])
def test_both_ends_of_a_pipeline_wait_for_every_microbatch(engine: str) -> None:
    """Tasks that depend on a transfer take RESUME_S more, all others what they took."""
    plain, resumed = found("mp", 2, 0.0, engine=engine), found("mp", 2, RESUME_S, engine=engine)
    graph = plain.graph
    communicates = plain.compiled.columns.communicates
    waits = [any(communicates[need] for need in task.dependencies) and not communicates[task.index] for task in graph.tasks]
    seconds = [np.array([entry.estimates[unit].median_s for unit in entry.compiled.columns.unit]) for entry in (plain, resumed)]
    np.testing.assert_allclose(seconds[1] - seconds[0], np.where(waits, RESUME_S, 0.0), rtol=0, atol=1e-12)
    first = {
        (task.work.component, task.work.phase)
        for task, late in zip(graph.tasks, waits, strict=True)
        if late and isinstance(task.work, Compute)
    }
    assert len(first) == 2, "the forward of the second stage's first component, the backward of the first stage's last"
    assert {phase for _, phase in first} == {Phase.FORWARD, Phase.BACKWARD}
    assert sum(waits) == 2 * plain.result.plan.microbatches


def test_units_that_resume_are_units_of_their_own() -> None:
    columns = found("mp", 2, 0.0).compiled.columns
    split = columns.resuming()
    assert [split.units[unit].work for unit in split.unit] == [columns.units[unit].work for unit in columns.unit]
    assert len({(unit.work, unit.rank, unit.resumes) for unit in split.units}) == len(split.units)
    assert split.graph == columns.graph


def test_what_a_step_with_pauses_takes_longer() -> None:
    assert resumed_s([1.0, 2.0, 3.0], [7.0, 2.5, 3.1]) == pytest.approx(0.3)
    assert resumed_s([1.0], [2.0]) == 0.0, "the first never waits"


def test_the_median_counts_and_is_never_a_gain() -> None:
    def raw(*seconds: float) -> dict[str, object]:
        return {"ranks": [{"resume": [{"model": 0, "samples": 8, "seconds": value} for value in seconds]}, {}]}

    assert resuming_s(raw(1e-4, 3e-4, 9.0)) == 3e-4
    assert resuming_s(raw(-1e-4, -3e-4, 9.0)) == 0.0
    assert resuming_s(raw()) == 0.0


def _busy() -> None:
    """Ten milliseconds of the processor's."""
    end_s = time.thread_time() + 0.01
    while time.thread_time() < end_s:
        pass


def test_computations_wait_for_the_call_before_them() -> None:
    streams = Pausing(make_streams(torch.device("cpu")))
    said: list[str] = []

    def call() -> None:
        time.sleep(0.02)
        said.append("call")

    try:
        for before in (None, call):
            streams.before = before
            for number in range(3):
                streams.compute(number, COMPUTE, [], lambda number=number: said.append(str(number)))  # type: ignore[misc]
            times = {entry.task: entry for entry in streams.finish()}
            assert sorted(times) == [0, 1, 2], "calls are nobody's task"
            gaps = [times[number].ready_s - times[number - 1].end_s for number in (1, 2)]
            assert all(gap > 0.019 for gap in gaps) if before else all(gap < 0.019 for gap in gaps)
            assert len(streams.computed_s) == 3, "of this step alone"
            assert max(streams.computed_s) < 0.019, "the wait is not work of the processor's"
        streams.compute(3, COMPUTE, [], _busy)
        assert streams.computed_s[0] >= 0.01
        streams.finish()
    finally:
        streams.close()
    assert said == ["0", "1", "2", "0", "call", "1", "call", "2"]


def test_crowding_is_the_median_of_ratios_and_never_a_gain() -> None:
    def raw(*ratios: float) -> dict[str, object]:
        return {"ranks": [{"crowding": [{"model": 0, "samples": 8, "ratio": ratio} for ratio in ratios]}, {}]}

    assert core_sharing(raw(1.02, 1.06, 3.0)) == 1.06
    assert core_sharing(raw(0.9, 0.98)) == 1.0
    assert core_sharing(raw()) == 1.0
    assert core_sharing_factor([(1.0, 1.2), (2.0, 2.0), (1.0, 1 / 1.2)]) == pytest.approx(1.0)
