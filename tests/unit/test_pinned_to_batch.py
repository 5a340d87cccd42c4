"""Everything pinned to batch-sharding: the best plan is found, and microbatches that do not divide are left out."""

from __future__ import annotations

import contextlib

import pytest

from parsim.app.functions import plan
from parsim.errors import ScheduleError
from parsim.plans.plan import Plan
from parsim.predict.evaluate import simulated_step
from parsim.search.families import FAMILIES

MODEL = {"model.args": {"depth": 3, "width": 64}, "plan.pin": {"*": "batch"}, "plan.zero_stage": 0, "plan.bucket_bytes": 10**9}


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "devices"), [(1, 2), (6, 4), (64, 2), (64, 4), (1024, 8)])
def test_the_best_plan_of_batch_sharded_components_is_found(batch: int, devices: int) -> None:
    answer = plan("mlp", cluster="dgx1-v100-32gb", global_batch=batch, devices=devices, settings=MODEL)
    problem = answer.prediction.problem
    chosen = answer.chosen.plan
    assert {str(placement) for stage in chosen.stages for _, placement in stage.placed()} == {"batch"}
    every: list[Plan] = []
    for name in ("single", "dp", "mp", "hp"):
        with contextlib.suppress(ScheduleError):  # hp needs four devices
            every += FAMILIES[name](problem)
    assert every
    seconds = {found: simulated_step(problem, found).step_s for found in every}
    for found in every:
        assert {str(placement) for stage in found.stages for _, placement in stage.placed()} == {"batch"}, found
        assert problem.global_batch // (found.mesh.dp * found.microbatches) % found.mesh.tp == 0, found
    assert simulated_step(problem, chosen).step_s == pytest.approx(min(seconds.values()), rel=1e-9)
