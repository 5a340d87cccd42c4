"""What reading a dataset of the user's own adds to a step: by hand, on a CPU, with workers, on a GPU, and in a job's file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parsim.app.functions import plan
from parsim.app.run_folder import RunFolder
from parsim.costs.loading import WAIT, MeasuredLoading
from parsim.errors import ConfigError, CostError
from parsim.execute.job import AdaptiveSpec, Job, RunSpec
from parsim.model.spec import ModelSpec
from parsim.predict.evaluate import Evaluation, evaluate
from parsim.predict.problem import PlanningProblem
from parsim.work import LoadBatch

LOADING = MeasuredLoading(
    first_s=1e-3,
    again_s=4e-4,
    sample_s=2e-3,
    passing_s=0.0,
    handover_s=1e-4,
    workers=0,
    cores=2,
    core_share=0.5,
    sigma=0.05,
    repeat_sigma=0.1,
    global_batch=32,
    batch=16,
    batches=30,
    samples=200,
    readers=2,
    taken_s=0.5,
    prepared_s=0.0,
    warm_up_s=0.0,
)
READ_S = 1e-3 + 4e-4 + 16 * 2e-3
"""16 samples in two parts."""


@pytest.fixture
def asked(tmp_path: Path) -> Evaluation:
    pytest.importorskip("torch")
    from tests.execute.test_bad_run import write_profile

    write_profile(tmp_path)
    return of(tmp_path / "profile.json")


def of(cluster: Path | str) -> Any:
    settings: dict[str, object] = {
        "plan.strategy": "custom",
        "plan.mesh": {"dp": 2},
        "plan.microbatches": 2,
        "cluster.devices": 2,
    }
    return plan("mlp", cluster=cluster, global_batch=32, settings=settings)


def step_s(asked: Any, loading: MeasuredLoading) -> Evaluation:
    problem: PlanningProblem = replace(asked.problem, loading=loading)
    return evaluate(problem, asked.chosen.plan)


def load_s(evaluation: Evaluation) -> float:
    return next(
        estimate.median_s
        for unit, estimate in zip(evaluation.compiled.columns.units, evaluation.estimates, strict=True)
        if isinstance(unit.work, LoadBatch)
    )


def test_a_rank_that_reads_in_its_turn_takes_so_much_longer(asked: Any) -> None:
    free = step_s(asked, replace(LOADING, first_s=0.0, again_s=0.0, sample_s=0.0)).result.step_s
    read = step_s(asked, LOADING).result.step_s
    assert read.median - free.median == pytest.approx(READ_S, rel=1e-9)
    assert read.p95 - read.median > 0.05 * READ_S
    passed = step_s(asked, replace(LOADING, passing_s=1e-4)).result.step_s
    assert passed.median - read.median == pytest.approx(32e-4, rel=1e-9)


def test_workers_on_cores_of_their_own_cost_the_hand_over_or_bound_the_step(asked: Any) -> None:
    free = step_s(asked, replace(LOADING, first_s=0.0, again_s=0.0, sample_s=0.0))
    free_s = free.result.step_s.median - load_s(free)
    fast = step_s(asked, replace(LOADING, workers=256, cores=64))
    assert fast.result.step_s.median == pytest.approx(free_s + 2e-4, rel=1e-9)
    slow = step_s(asked, replace(LOADING, workers=2, cores=64))
    assert slow.result.step_s.median == pytest.approx(READ_S / 2, rel=1e-9)
    assert load_s(slow) == pytest.approx(READ_S / 2 - free_s, rel=1e-6)
    assert any(term.name == WAIT for estimate in slow.estimates for term in estimate.terms)
    stream = step_s(asked, replace(LOADING, workers=2, cores=64, passing_s=1e-2))
    assert stream.result.step_s.median == pytest.approx(READ_S / 2 + 0.32, rel=1e-9)


def test_workers_without_cores_take_what_they_compute_from_the_ranks(asked: Any) -> None:
    found = step_s(asked, replace(LOADING, workers=4, cores=2))
    assert load_s(found) == pytest.approx(2e-4 + 0.5 * READ_S)
    half = step_s(asked, replace(LOADING, workers=4, cores=3))
    assert load_s(half) == pytest.approx(2e-4 + 0.25 * READ_S)


def test_a_step_on_a_gpu_is_no_shorter_than_a_read() -> None:
    """A thread reads the next batch, and only then it is copied. Workers read beside the copy."""
    asked = of("dgx1-v100-32gb")
    assert asked.prediction.step_s.median < READ_S
    copy_s = load_s(step_s(asked, replace(LOADING, first_s=0.0, again_s=0.0, sample_s=0.0)))
    slow = replace(LOADING, sample_s=copy_s / 16)
    assert load_s(step_s(asked, slow)) == pytest.approx(1e-3 + 4e-4 + copy_s + copy_s)
    assert load_s(step_s(asked, replace(LOADING, workers=256))) == pytest.approx(max(READ_S / 256, copy_s))
    assert step_s(asked, LOADING).result.step_s.median == pytest.approx(
        READ_S + copy_s, rel=0.02
    )  # the first of the steps loads its own batch, too
    assert step_s(asked, replace(LOADING, workers=8)).result.step_s.median == pytest.approx(READ_S / 8, rel=0.2)
    nothing = step_s(asked, replace(LOADING, first_s=0.0, again_s=0.0, sample_s=0.0))
    assert nothing.result.step_s.median == asked.prediction.step_s.median


def test_the_profiles_speed_factor_does_not_change_what_was_measured_now(asked: Any) -> None:
    costs = replace(asked.problem, loading=LOADING).costs(2)
    work = LoadBatch(samples=16, size_bytes=0, parts=2)
    slower = replace(costs)
    object.__setattr__(slower, "_context", replace(costs._context, speed=1.5))
    assert slower.estimate(work, 0).median_s == costs.estimate(work, 0).median_s == pytest.approx(READ_S)


def test_a_job_keeps_what_the_controller_plans_with(asked: Any, tmp_path: Path) -> None:
    run = RunSpec(
        name="run",
        model=ModelSpec(name="mlp"),
        model_path="",
        plan=asked.chosen.plan,
        optimizer="sgd",
        learning_rate=0.1,
        dataset="digits",
    )
    spec = AdaptiveSpec(profile="p", devices=None, precision="fp32", window_steps=5, epoch_steps=9, loading=LOADING)
    job = Job(output="", mode="train", runs=(run,), steps=1, adaptive=spec)
    job.save(tmp_path / "job.json")
    assert Job.load(tmp_path / "job.json") == job


def test_a_changed_record_is_refused() -> None:
    for change in ({"sigma": "wide"}, {"unknown": 1.0}, {"batch": 1.5}, {"sample_s": -1.0}, {"batches": 0}):
        with pytest.raises(CostError):
            MeasuredLoading.from_dict({**LOADING.to_dict(), **change})


def test_a_run_folder_whose_record_was_changed_says_so(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.read_loading() is None
    for content in ("[]", "{", '{"measured": true}', json.dumps({**LOADING.to_dict(), "workers": -1})):
        folder.loading.write_text(content)
        with pytest.raises(ConfigError, match=r"loading\.json"):
            folder.read_loading()
    folder.loading.write_text(json.dumps(LOADING.to_dict()))
    assert folder.read_loading() == LOADING
