"""What the run file asks of plans holds for the plans that `--adaptive` changes to, through the file of the job."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from parsim.app.functions import plan
from parsim.app.launch import run_spec
from parsim.app.train import adaptive_spec
from parsim.costs.observed import RunCorrections
from parsim.errors import ExecutionError, ParsimError
from parsim.execute.adaptive import Steering, problem_of
from parsim.execute.job import Job
from parsim.execute.processes.group import ProcessPlace
from parsim.plans.plan import Plan
from parsim.search.adapt import planning as prepared
from parsim.search.adapt.planning import likely
from tests.quick import some_quick

PLACE = ProcessPlace(rank=0, world_size=2, local_rank=0, local_world_size=2, attempt=0)
STATES = (*likely(2), *(RunCorrections(ranks=((0, 1.0), (1, factor))) for factor in (0.2, 20.0)))


def job_of(folder: Path, settings: dict[str, object]) -> Job:
    """The job of `run --adaptive`, as the ranks read it."""
    pytest.importorskip("torch")
    given = {"cluster.devices": 2, "model.args": {"depth": 3, "width": 2048}, **settings}
    asked = plan("mlp", cluster="dgx1-v100-32gb", global_batch=64, settings=given).prediction
    asked.problem.model.save(folder / "model.json")
    run = run_spec(asked, "run", folder / "model.json")
    Job(output="", mode="train", runs=(run,), steps=9, adaptive=adaptive_spec(asked, 3)).save(folder / "job.json")
    return Job.load(folder / "job.json")


def plans_of(job: Job) -> set[Plan]:
    """All that the controller changes to as the machine changes."""
    run = job.runs[0]
    assert job.adaptive is not None
    controller = Steering(job.adaptive, run, job.steps, PLACE, built_s=0.0)._controller
    assert controller is not None
    return {controller.plan_for(state, run.plan).plan for state in STATES}


def placements(found: Plan) -> set[str]:
    return {str(placement) for stage in found.stages for _, placement in stage.placed()}


KEPT: dict[str, tuple[dict[str, object], Callable[[Plan], bool]]] = {
    "numbers": (
        {
            "plan.mesh": {"pp": 2},
            "plan.microbatches": 2,
            "plan.pipeline_order": "gpipe",
            "plan.bucket_bytes": 100_000,
            "plan.recompute": "full",
        },
        lambda found: (
            (found.mesh.pp, found.microbatches, found.pipeline_order, found.bucket_bytes, found.recompute)
            == (2, 2, "gpipe", 100_000, "full")
        ),
    ),
    "strategy": ({"plan.strategy": "dp"}, lambda found: placements(found) == {"batch"} and found.mesh.pp == 1),
    "forbid": ({"plan.forbid": {"*": ["place", "shard"]}}, lambda found: placements(found) <= {"batch", "replicate"}),
    "pin": ({"plan.pin": {"*": "replicate"}}, lambda found: placements(found) == {"replicate"}),
}


@pytest.mark.parametrize("key", some_quick(KEPT, *(name for name in KEPT if name != "forbid")))
def test_no_change_leaves_what_the_run_file_asks(key: str, tmp_path: Path) -> None:
    settings, keeps = KEPT[key]
    assert all(map(keeps, plans_of(job_of(tmp_path, settings))))


@pytest.mark.slow
def test_nor_does_a_planning_that_searches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MOST_RANKS", 1)
    settings, keeps = KEPT["strategy"]
    assert all(map(keeps, plans_of(job_of(tmp_path, settings))))


@pytest.mark.slow
def test_a_free_run_would_leave_them(tmp_path: Path) -> None:
    """So that the test above can fail."""
    free = plans_of(job_of(tmp_path, {}))
    assert not [key for key, (_, keeps) in KEPT.items() if all(map(keeps, free))]


def test_a_plan_by_hand_is_where_the_training_begins(tmp_path: Path) -> None:
    job = job_of(tmp_path, {"plan.strategy": "custom", "plan.mesh": {"pp": 2}, "plan.fit_probability": 0.9})
    assert job.adaptive is not None
    problem = problem_of(job.adaptive, job.runs[0])
    assert not problem.constraints.axes
    assert problem.fit_probability == 0.9
    assert (problem.zero_stage, problem.recompute) == (0, "none")  # of the plan: the file leaves them open


def test_what_takes_memory_beside_the_steps_is_known_when_planning_again(tmp_path: Path) -> None:
    beside: dict[str, object] = {"training.evaluation": {}, "training.no_weight_decay": ["bias"], "training.weight_decay": 0.1}
    job = job_of(tmp_path, {"plan.strategy": "dp", **beside})
    assert job.adaptive is not None
    problem = problem_of(job.adaptive, job.runs[0])
    assert (problem.scored, problem.update_calls) == ("weights", 2)


def changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> Job:
    path = folder / "job.json"
    document = json.loads(path.read_text())
    change(document["adaptive"])
    path.write_text(json.dumps(document))
    return Job.load(path)


def update_asked(change: dict[str, object], adaptive: dict[str, Any]) -> None:
    adaptive["asked"].update(change)


CHANGES: tuple[dict[str, object], ...] = (
    {"zero_stage": 4},
    {"zero_stage": True},
    {"recompute": "all"},
    {"recompute": 3},
    {"constraints": {"microbatches": 10**5}},
    {"constraints": {"pp": 0}},
    {"constraints": {"pp": 1.5}},
    {"constraints": {"pipeline_order": "backwards"}},
    {"constraints": {"synchronisation": {"kind": "average"}}},
    {"capacity_factor": 0.5},
    {"pins": [["fc1", "everywhere"]]},
    {"pins": [["fc1"]]},
    {"pins": [[7, "batch"]]},
    {"forbids": [["fc1", "everything"]]},
    {"unknown": 1},
)


def test_a_changed_job_is_refused(tmp_path: Path) -> None:
    job_of(tmp_path, {"plan.strategy": "dp"})
    path = tmp_path / "job.json"
    written = path.read_text()
    for change in CHANGES:
        path.write_text(written)
        with pytest.raises(ParsimError):
            changed(tmp_path, partial(update_asked, change))
    path.write_text(written)
    with pytest.raises(ExecutionError, match="fit_probability"):
        changed(tmp_path, lambda adaptive: adaptive.update(fit_probability=1.5))


def test_a_pin_of_another_model_is_refused(tmp_path: Path) -> None:
    job_of(tmp_path, {"plan.strategy": "dp"})
    job = changed(tmp_path, partial(update_asked, {"pins": [["nowhere", "batch"]]}))
    assert job.adaptive is not None
    with pytest.raises(ExecutionError, match="'nowhere', which"):
        problem_of(job.adaptive, job.runs[0])
