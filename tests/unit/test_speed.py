"""The machine's speed as the probe finds it: what it changes of a prediction, and what it leaves."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from parsim.costs.estimate import Estimate
from parsim.execute.probe import SpeedProbe
from parsim.execute.speed import Speed, typical_speed
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.profile import HostOverhead, Noise, ProbeSeconds, Profile, load_profile
from parsim.plan.plan import Plan
from parsim.schedule.evaluate import evaluate
from parsim.schedule.families import FAMILIES
from parsim.schedule.problem import Problem
from parsim.schedule.result import PlanResult
from parsim.schedule.speed import Slowness, at_speed, differs, slowness
from tests.models import chain_model


def profile_with(noise: Noise | None) -> Profile:
    return load_profile("dgx1-v100-32gb").model_copy(update={"noise": noise})


def noise(probe: ProbeSeconds | None, drift_sigma: float = 0.1) -> Noise:
    return Noise(drift_sigma=drift_sigma, probe=probe, source="throughput")


def problem_on(devices: int) -> Problem:
    model = chain_model((4e9, 8e9, 6e9, 4e9), elements=400_000)
    return Problem(model=model, cluster=cluster_from_profile(profile_with(None), devices), global_batch=64)


def plan_of(problem: Problem, family: str) -> Plan:
    return next(plan for plan in FAMILIES[family](problem) if plan.world_size == problem.cluster.size)


def step_s(problem: Problem, plan: Plan) -> float:
    return evaluate(problem, plan, samples=0, fold=False).result.step_s.median


def slow(computing: float, exchange: float = 1.0) -> Slowness:
    return Slowness(alone=computing, together=computing, exchange=exchange)


def _loads(estimate: Estimate) -> bool:
    return any(name == "load" for name, _ in estimate.parameters)


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.3])
def test_a_step_of_computation_alone_takes_as_many_times_as_long(factor: float) -> None:
    problem = problem_on(1)
    plan = plan_of(problem, "single")
    computing_s = sum(estimate.median_s for estimate in evaluate(problem, plan, samples=0).estimates if not _loads(estimate))
    expected = step_s(problem, plan) + (factor - 1) * computing_s
    found = Slowness(alone=factor, together=7.0, exchange=9.0)
    assert step_s(at_speed(problem, found, 1), plan) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("family", ["dp", "mp"])
def test_computation_and_communication_have_a_speed_each(family: str) -> None:
    problem = problem_on(2)
    plan = plan_of(problem, family)
    usual, both = step_s(problem, plan), step_s(at_speed(problem, slow(2.0, 2.0), 2), plan)
    assert both == pytest.approx(2 * usual, rel=1e-3), "all but loading, which is next to nothing"
    assert usual < step_s(at_speed(problem, slow(2.0), 2), plan) < both
    assert usual < step_s(at_speed(problem, slow(1.0, 2.0), 2), plan) < both


def test_speeds_multiply_and_one_is_none() -> None:
    problem = problem_on(2)
    plan = plan_of(problem, "dp")
    assert step_s(at_speed(problem, slow(1.0), 2), plan) == step_s(problem, plan)
    twice = step_s(at_speed(at_speed(problem, slow(1.2, 1.1), 2), slow(1.5, 2.0), 2), plan)
    assert twice == pytest.approx(step_s(at_speed(problem, slow(1.8, 2.2), 2), plan), rel=1e-12)


def test_between_one_rank_and_all_cores_in_proportion() -> None:
    """Eight devices; then two ranks on each of two cores."""
    found, machine = Slowness(alone=1.0, together=1.7), profile_with(None)
    assert [found.computing(ranks, machine) for ranks in (1, 2, 4, 8, 9)] == pytest.approx([1.0, 1.1, 1.3, 1.7, 1.7])
    devices = [device.model_copy(update={"core": number % 2}) for number, device in enumerate(machine.devices[:4])]
    crowded = machine.model_copy(update={"devices": devices})
    assert [found.computing(ranks, crowded) for ranks in (1, 2, 4)] == pytest.approx([1.0, 1.7, 1.7])


def test_typical_is_the_mean_of_the_ranks_medians() -> None:
    first = [Speed(2e-3, 3e-3, 1e-4), Speed(2.2e-3, 3.2e-3, 2e-4), Speed(50e-3, 60e-3, 3e-4)]
    second = [Speed(None, 4e-3, 4e-4), Speed(None, 4.2e-3, 4e-4), Speed(None, 4.1e-3, 4e-4)]
    third = [Speed(None, None, None)] * 3
    assert typical_speed([first, second, third]) == pytest.approx((2.2e-3, (3.2e-3 + 4.1e-3) / 2, 3e-4))
    assert typical_speed([]) == Speed(None, None, None)


def test_slowness_needs_both_probes() -> None:
    then = ProbeSeconds(alone=2e-3, together=2.5e-3, exchange=1e-4)
    assert slowness(profile_with(noise(then)), 3e-3, 2.5e-3, 2e-4) == Slowness(alone=1.5, together=1.0, exchange=2.0)
    assert slowness(profile_with(noise(then)), 3e-3, 2.5e-3, None) == Slowness(alone=1.5, together=1.0, exchange=1.0)
    assert slowness(profile_with(noise(then)), None, None, None) is None
    assert slowness(profile_with(noise(None)), 3e-3, 2.5e-3, 2e-4) is None
    assert slowness(profile_with(None), 3e-3, 2.5e-3, 2e-4) is None


def test_a_change_is_said_beyond_two_deviations() -> None:
    known = profile_with(noise(None, drift_sigma=0.1))
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


def test_what_ranks_do_between_steps_comes_on_top() -> None:
    def found(between_s: float) -> PlanResult:
        profile = profile_with(None).model_copy(
            update={"host": HostOverhead(task_s=0.0, step_s=between_s, source="throughput")}
        )
        problem = problem_on(2)
        problem = replace(problem, cluster=replace(problem.cluster, profile=profile))
        return evaluate(problem, plan_of(problem, "dp"), samples=50).result

    without, given = found(0.0), found(0.25)
    assert given.step_s.median == pytest.approx(without.step_s.median + 0.25, rel=1e-12)
    assert given.step_s.p95 / given.step_s.median == pytest.approx(without.step_s.p95 / without.step_s.median, rel=1e-9)
