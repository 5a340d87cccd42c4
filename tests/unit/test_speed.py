"""The pace of the cores as the probe finds it: what it changes of a prediction, and what it leaves."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from parsim.execute.processes.speed_probe import SpeedProbe
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.profile import HostOverhead, Noise, PaceToday, ProbeSeconds, Profile
from parsim.hardware.speed_factor import SpeedFactor, probe_seconds, speed_beside, speed_since
from parsim.numeric import Floats
from parsim.plans.plan import Plan
from parsim.predict.evaluate import evaluate, step_at_speed
from parsim.predict.problem import PlanningProblem
from parsim.predict.result import PlanResult
from parsim.search.families import FAMILIES
from tests.models import chain_model

THEN = ProbeSeconds(alone=2e-3, together=3e-3)


def profile_with(noise: Noise | None) -> Profile:
    return load_profile("dgx1-v100-32gb").model_copy(update={"noise": noise})


def on_cores(profile: Profile) -> Profile:
    """The same machine as one of CPU ranks: the pace of a core is that of everything its rank does."""
    text = profile.model_dump_json().replace('"kind":"cuda"', '"kind":"cpu"').replace('"gpu', '"cpu')
    return Profile.model_validate_json(text)


def noise(probe: ProbeSeconds | None, *, rank_sigma: float = 0.0) -> Noise:
    return Noise(drift_sigma=0.1, rank_sigma=rank_sigma, probe=probe, source="drift")


def problem_on(devices: int, profile: Profile | None = None) -> PlanningProblem:
    model = chain_model((4e9, 8e9, 6e9, 4e9), elements=400_000)
    profile = profile_with(None) if profile is None else profile
    return PlanningProblem(model=model, cluster=cluster_from_profile(profile, devices), global_batch=64)


def plan_of(problem: PlanningProblem, family: str) -> Plan:
    return next(plan for plan in FAMILIES[family](problem) if plan.world_size == problem.cluster.size)


def slowness(profile: Profile, probe_s: Floats, ranks: int) -> Floats:
    factor = speed_beside(profile, probe_s, ranks)
    assert factor is not None
    return factor.by_rank


def paced_s(problem: PlanningProblem, plan: Plan, slow: Floats) -> float:
    return step_at_speed(problem, evaluate(problem, plan, samples=0, fold=False), SpeedFactor(slow))


@pytest.mark.parametrize("family", ["dp", "mp"])
def test_a_machine_as_many_times_as_slow_takes_as_many_times_as_long(family: str) -> None:
    problem = problem_on(2, on_cores(profile_with(None)))
    plan = plan_of(problem, family)
    usual = evaluate(problem, plan, samples=0).result.step_s.median
    for factor in (0.8, 1.0, 1.3):
        assert paced_s(problem, plan, np.full((2, 3), factor)) == pytest.approx(factor * usual, rel=1e-12)


def test_data_parallel_ranks_wait_for_the_one_that_is_slow_in_each_round() -> None:
    """Means over rounds are alike, but the ranks are slow in turn: each round takes as long as with both of them slow, but for
    communication, which takes the mean of its ranks."""
    problem = problem_on(2, on_cores(profile_with(None)))
    plan = plan_of(problem, "dp")
    evaluation = evaluate(problem, plan, samples=0)
    usual_s = evaluation.result.step_s.median
    in_turn_s = paced_s(problem, plan, np.array([[1.0, 2.0], [2.0, 1.0]]))
    assert in_turn_s == pytest.approx(paced_s(problem, plan, np.array([[1.0], [2.0]])), rel=1e-12)
    communication_s = sum(part.exposed_communication_s for part in evaluation.breakdown) / 2
    assert 1.5 * usual_s < in_turn_s <= 2 * usual_s
    assert in_turn_s == pytest.approx(2 * usual_s - 0.5 * communication_s, rel=0.05)


def test_what_the_pace_leaves_of_the_ranks_noise_counts_and_not_all_of_it() -> None:
    loud = profile_with(noise(THEN, rank_sigma=0.3))
    quiet = profile_with(noise(THEN.model_copy(update={"rank_sigma": 0.3}), rank_sigma=0.3))
    even = np.ones((2, 4))
    for problem in (problem_on(2, loud), problem_on(2, quiet)):
        plan = plan_of(problem, "dp")
        evaluation = evaluate(problem, plan, samples=0, fold=False)
        left = problem.cluster.profile.noise.probe.rank_sigma  # type: ignore[union-attr]
        expected = evaluation.result.step_s.median if left else evaluation.steady_s
        assert step_at_speed(problem, evaluation, SpeedFactor(even)) == pytest.approx(expected, rel=1e-12)


def test_ranks_on_one_core_are_slow_together() -> None:
    """Two ranks that compute as much: with a core each the step is the slower one's, on one core it is their sum."""
    known = profile_with(noise(None, rank_sigma=0.2))
    devices = [device.model_copy(update={"core": 0}) for device in known.devices[:2]]
    longer = []
    for profile in (known, known.model_copy(update={"devices": devices})):
        problem = problem_on(2, profile)
        evaluation = evaluate(problem, plan_of(problem, "dp"), samples=0, fold=False)
        longer.append(evaluation.result.step_s.median / evaluation.steady_s)
    slower_of_two = 1 + 0.2 / math.sqrt(math.pi)
    assert longer == pytest.approx([slower_of_two, 1.0], abs=0.04)


def test_slowness_is_against_one_rank_alone_or_one_per_core() -> None:
    """Eight devices; then two ranks on each of two cores."""
    known = profile_with(noise(THEN))
    assert slowness(known, np.array([[2e-3, 4e-3]]), 1) == pytest.approx(np.array([[1.0, 2.0]]))
    assert slowness(known, np.full((8, 1), 3e-3), 8) == pytest.approx(np.ones((8, 1)))
    assert slowness(known, np.full((2, 1), 3e-3), 2) == pytest.approx(np.full((2, 1), 3e-3 / (2e-3 + 1e-3 / 7)))
    devices = [device.model_copy(update={"core": number % 2}) for number, device in enumerate(known.devices[:4])]
    crowded = known.model_copy(update={"devices": devices})
    looked = np.array([[3e-3, 6e-3], [3e-3, 9e-3]])
    assert slowness(crowded, looked, 4) == pytest.approx(np.array([[1, 2], [1, 3], [1, 2], [1, 3]]))


def refreshed(profile: Profile, alone: float, together: float) -> Profile:
    return profile.model_copy(update={"today": PaceToday(created="now", alone=alone, together=together)})


@pytest.mark.parametrize("family", ["dp", "mp"])
def test_a_profile_is_brought_to_todays_pace(family: str) -> None:
    """Every price is as many times as long, one rank's by the pace of one alone; what a run finds is against today's."""
    host = HostOverhead(task_s=1e-3, step_s=0.25, post_wait_s=0.01, load_s=0.1, source="drift")
    known = on_cores(profile_with(noise(THEN, rank_sigma=0.1)).model_copy(update={"host": host}))
    known = known.model_copy(update={"devices": known.devices[:2]})
    today = refreshed(known, alone=3e-3, together=3.6e-3)
    then, now = problem_on(2, known), problem_on(2, today)
    plan = plan_of(then, family)
    before, after = (evaluate(problem, plan, samples=50, fold=False) for problem in (then, now))
    assert after.result.step_s.median == pytest.approx(1.2 * before.result.step_s.median, rel=1e-12)
    assert after.result.step_s.p95 == pytest.approx(1.2 * before.result.step_s.p95, rel=1e-12)
    single = plan_of(problem_on(1, known), "single")
    alone = [evaluate(problem, single, samples=0).result.step_s.median for problem in (then, now)]
    assert alone[1] == pytest.approx(1.5 * alone[0], rel=1e-12)
    looked = np.full((2, 1), 3.6e-3)
    assert slowness(today, looked, 2) == pytest.approx(np.ones((2, 1)))
    as_before_s = step_at_speed(now, after, SpeedFactor(np.ones((2, 1))))
    assert as_before_s == pytest.approx(paced_s(then, plan, np.full((2, 1), 1.2)), rel=1e-12)


def test_a_pace_without_one_to_compare_changes_nothing() -> None:
    assert speed_since(refreshed(profile_with(noise(None)), 1.0, 1.0)).mean == 1.0
    assert speed_since(profile_with(noise(THEN))).mean == 1.0
    assert probe_seconds(profile_with(None)) is None
    assert probe_seconds(profile_with(noise(THEN)), 1) == 2e-3
    assert probe_seconds(refreshed(profile_with(noise(THEN)), 1e-3, 5e-3), 1) == 1e-3
    assert probe_seconds(refreshed(profile_with(noise(THEN)), 1e-3, 5e-3)) == 5e-3
    now = np.array([[3e-3]])
    assert speed_beside(profile_with(noise(THEN)), np.empty((0, 3)), 1) is None
    assert speed_beside(profile_with(noise(None)), now, 1) is None
    assert speed_beside(profile_with(None), now, 1) is None


def test_a_change_is_said_beyond_two_deviations() -> None:
    known = profile_with(noise(None))
    assert not SpeedFactor.uniform(math.exp(0.19)).is_beyond(known)
    assert SpeedFactor.uniform(math.exp(0.21)).is_beyond(known)
    assert SpeedFactor.uniform(math.exp(-0.21)).is_beyond(known)
    assert not SpeedFactor.uniform(3.0).is_beyond(profile_with(None))


def test_the_probe_changes_nothing_but_the_clock() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    probe = SpeedProbe(torch.device("cpu"))
    with torch.no_grad():
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
