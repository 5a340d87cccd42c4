"""The machine's speed as the probe finds it: what it changes of a prediction, and what it leaves."""

from __future__ import annotations

import math

import pytest
import torch

from parsim.costs.estimate import Estimate
from parsim.execute.probe import SpeedProbe
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.profile import Noise, Profile, load_profile
from parsim.plan.plan import Plan
from parsim.schedule.evaluate import evaluate
from parsim.schedule.families import FAMILIES
from parsim.schedule.problem import Problem
from parsim.schedule.speed import at_speed, differs, slowness
from tests.models import chain_model


def profile_with(noise: Noise | None) -> Profile:
    return load_profile("dgx1-v100-32gb").model_copy(update={"noise": noise})


def noise(probe_s: float | None, drift_sigma: float = 0.1) -> Noise:
    return Noise(drift_sigma=drift_sigma, probe_s=probe_s, source="throughput")


def problem_on(devices: int) -> Problem:
    model = chain_model((4e9, 8e9, 6e9, 4e9), elements=400_000)
    return Problem(model=model, cluster=cluster_from_profile(profile_with(None), devices), global_batch=64)


def plan_of(problem: Problem, family: str) -> Plan:
    return next(plan for plan in FAMILIES[family](problem) if plan.world_size == problem.cluster.size)


def step_s(problem: Problem, plan: Plan) -> float:
    return evaluate(problem, plan, samples=0, fold=False).result.step_s.median


def _loads(estimate: Estimate) -> bool:
    return any(name == "load" for name, _ in estimate.parameters)


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.3])
def test_a_step_of_computation_alone_takes_as_many_times_as_long(factor: float) -> None:
    problem = problem_on(1)
    plan = plan_of(problem, "single")
    computing_s = sum(estimate.median_s for estimate in evaluate(problem, plan, samples=0).estimates if not _loads(estimate))
    expected = step_s(problem, plan) + (factor - 1) * computing_s
    assert step_s(at_speed(problem, factor), plan) == pytest.approx(expected, rel=1e-9)


def test_communication_keeps_its_time() -> None:
    problem = problem_on(2)
    plan = plan_of(problem, "mp")
    usual, slow = step_s(problem, plan), step_s(at_speed(problem, 2.0), plan)
    assert usual < slow < 2 * usual


def test_speeds_add_up_and_one_is_none() -> None:
    problem = problem_on(2)
    plan = plan_of(problem, "dp")
    assert step_s(at_speed(problem, 1.0), plan) == step_s(problem, plan)
    twice = step_s(at_speed(at_speed(problem, 1.2), 1.5), plan)
    assert twice == pytest.approx(step_s(at_speed(problem, 1.8), plan), rel=1e-12)


def test_slowness_is_the_mean_of_the_ranks_medians_over_the_probe_of_then() -> None:
    seen = [[2e-3, 2.2e-3, 50e-3], [3e-3, 3e-3, 2.9e-3]]
    assert slowness(profile_with(noise(2e-3)), seen) == pytest.approx((2.2 + 3.0) / 2 / 2.0)
    assert slowness(profile_with(noise(2e-3)), [[], [2e-3]]) == pytest.approx(1.0)
    assert slowness(profile_with(noise(None)), seen) is None
    assert slowness(profile_with(None), seen) is None
    assert slowness(profile_with(noise(2e-3)), [[], []]) is None


def test_a_change_is_said_beyond_two_deviations() -> None:
    known = profile_with(noise(2e-3, drift_sigma=0.1))
    assert not differs(known, math.exp(0.19))
    assert differs(known, math.exp(0.21))
    assert differs(known, math.exp(-0.21))
    assert not differs(profile_with(None), 3.0)


def test_the_probe_changes_nothing_but_the_clock() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    probe = SpeedProbe(torch.device("cpu"))
    seconds = [probe.seconds() for _ in range(3)]
    assert torch.equal(torch.rand(3), expected)
    assert all(0 < value < 10 for value in seconds)
