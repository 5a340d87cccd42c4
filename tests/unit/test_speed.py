"""The pace of the cores as the probe finds it: what it changes of a prediction, and what it leaves."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calibration.rounds import environment as states
from calibration.rounds.environment import clocks_text, core_clocks_hz, machine_state, parse_ticks, stolen_share
from experiments.common.slow_machines import Machine, after_run, error
from parsim.costs.history import fingerprint
from parsim.costs.observed import (
    CommunicationClass,
    ComputeClass,
    Evidence,
    RunCorrections,
    refit,
    updates_of,
    with_update,
    without_updates,
)
from parsim.errors import CostError, ProfileError
from parsim.execute.processes.machine import describe_environment, is_measured, profile_differences
from parsim.execute.processes.speed_probe import SpeedProbe
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.profile import DeviceTypeEntry, HostOverhead, Noise, PaceToday, ProbeSeconds, Profile, save_profile
from parsim.hardware.records import ComponentPoint
from parsim.hardware.speed_factor import SpeedFactor, probe_seconds, speed_beside, speed_since
from parsim.numeric import Floats
from parsim.plans.plan import Plan
from parsim.predict.evaluate import evaluate, step_at_speed
from parsim.predict.problem import PlanningProblem
from parsim.predict.result import PlanResult
from parsim.search.families import FAMILIES
from parsim.work import Phase
from tests.models import chain_model
from tests.unit.test_profile import minimal

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


# Profiles that learn from a run: the right factor is found, noise is not learnt, and an update is undone when its cause is.

SLOW = RunCorrections(ranks=((0, 1.0), (1, 1.2)))
TARGET = 0.05


def updated_problem(profile: Profile, devices: int = 2) -> PlanningProblem:
    model = chain_model((4e9, 8e9, 6e9, 4e9), elements=400_000)
    return PlanningProblem(model=model, cluster=cluster_from_profile(profile, devices), global_batch=64)


def updated_plan(problem: PlanningProblem, family: str = "dp") -> Plan:
    return next(plan for plan in FAMILIES[family](problem) if plan.world_size == problem.cluster.size)


@pytest.mark.parametrize("family", ["dp", "mp"])
@pytest.mark.parametrize("seed", range(5))
def test_twenty_steps_bring_a_slowed_rank_back_under_target(family: str, seed: int) -> None:
    problem = updated_problem(load_profile("dgx1-v100-32gb"))
    machine = Machine(problem, updated_plan(problem, family), SLOW)
    found = after_run(machine, seed)
    assert error(machine, problem.cluster.profile) > TARGET
    assert error(machine, found.profile) < TARGET
    ranks = dict(updates_of(replace(problem.cluster, profile=found.profile)).ranks)
    assert ranks[1] / ranks.get(0, 1.0) == pytest.approx(1.2, abs=0.05)


@pytest.mark.parametrize("drift", [0.85, 1.1, 1.3])
def test_a_drift_of_everything_is_learnt(drift: float) -> None:
    problem = updated_problem(load_profile("dgx1-v100-32gb"))
    links = ((CommunicationClass("all_reduce", (0, 1)), drift),)
    machine = Machine(problem, updated_plan(problem), RunCorrections(ranks=((0, drift), (1, drift)), communication=links))
    found = after_run(machine, 1)
    assert error(machine, problem.cluster.profile) > TARGET
    assert error(machine, found.profile) < TARGET


def test_an_update_is_undone_when_its_cause_is_gone_and_does_not_compound() -> None:
    """Slow, slow again, and as at first: factors are of the profile as calibrated, so the third leaves none."""
    problem = updated_problem(load_profile("dgx1-v100-32gb"))
    plan, at_first = updated_plan(problem), problem.cluster.profile
    profile = at_first
    for factors, expected in ((SLOW, 1.2), (SLOW, 1.2), (RunCorrections(), None)):
        now = replace(problem, cluster=replace(problem.cluster, profile=profile))
        profile = after_run(Machine(now, plan, factors), 3, floor=0.03).profile
        ranks = dict(updates_of(replace(problem.cluster, profile=profile)).ranks)
        assert ranks == ({} if expected is None else {0: 1.0, 1: pytest.approx(expected, abs=0.04)})
    assert fingerprint(profile) == fingerprint(at_first)
    assert len(profile.updates) >= 2
    assert error(Machine(problem, plan, RunCorrections()), profile) < TARGET


@pytest.mark.parametrize("seed", range(8))
def test_noise_is_not_learnt(seed: int) -> None:
    """What changes, if anything, moves the prediction by no more than the noise of the run."""
    problem = updated_problem(load_profile("dgx1-v100-32gb"))
    machine = Machine(problem, updated_plan(problem), RunCorrections())
    found = after_run(machine, seed, floor=0.02)
    assert found.changes == ()
    assert found.profile is problem.cluster.profile


def test_a_profile_with_an_update_comes_back_from_its_file_and_says_so(tmp_path: Path) -> None:
    problem = updated_problem(load_profile("dgx1-v100-32gb"), devices=3)
    cluster = cluster_from_profile(problem.cluster.profile, [5, 2])
    links = ((CommunicationClass("all_reduce", (0, 1)), 2.0), (CommunicationClass("send_recv", (1, 0)), 3.0))
    factors = RunCorrections(ranks=((1, 1.5),), communication=links, phases=((Phase.FORWARD, 1.1),))
    provenance = {"created": "2026-11-21", "run": "r7", "plan": "dp2", "steps": 20, "aa_floor": 0.02}
    save_profile(with_update(cluster.profile, factors, cluster, provenance), tmp_path / "p.json")
    back = load_profile(str(tmp_path / "p.json"))
    assert back.updates[-1].devices[0].device == 2
    assert updates_of(cluster_from_profile(back, [5, 2])) == factors
    turned = updates_of(cluster_from_profile(back, [2, 5]))
    assert turned.ranks == ((0, 1.5),)
    assert dict(turned.communication)[CommunicationClass("send_recv", (0, 1))] == 3.0
    assert updates_of(cluster_from_profile(back, [1, 3])) == RunCorrections(phases=((Phase.FORWARD, 1.1),))
    assert fingerprint(back) != fingerprint(cluster.profile)
    assert fingerprint(without_updates(back)) == fingerprint(cluster.profile)
    on = replace(problem, cluster=cluster_from_profile(back, [5, 2]))
    result = evaluate(on, updated_plan(on), samples=0)
    assert result.result.cost_sources["updated"] > 0.9
    assert any("updated from run r7" in estimate.detail for estimate in result.estimates)


def test_what_an_update_says_of_other_devices_stays(tmp_path: Path) -> None:
    profile = load_profile("dgx1-v100-32gb")
    provenance = {"created": "2026-11-21", "run": "r", "plan": "dp2", "steps": 20, "aa_floor": 0.02}
    first = with_update(profile, RunCorrections(ranks=((1, 1.5),)), cluster_from_profile(profile, [6, 7]), provenance)
    second = with_update(first, RunCorrections(ranks=((0, 1.1),)), cluster_from_profile(first, [0, 1]), provenance)
    assert {entry.device: entry.factor for entry in second.updates[-1].devices} == {7: 1.5, 0: 1.1}


def test_an_update_of_an_unknown_phase_is_refused() -> None:
    profile = load_profile("dgx1-v100-32gb")
    cluster = cluster_from_profile(profile, 2)
    provenance = {"created": "", "run": "r", "plan": "", "steps": 1, "aa_floor": 0.0}
    broken = with_update(profile, RunCorrections(phases=((Phase.FORWARD, 2.0),)), cluster, provenance)
    phase = broken.updates[0].phases[0].model_copy(update={"phase": "foward"})
    broken = broken.model_copy(update={"updates": [broken.updates[0].model_copy(update={"phases": [phase]})]})
    with pytest.raises(ProfileError, match="'foward'; did you mean forward"):
        updates_of(cluster_from_profile(broken, 2))


COMPUTE = {
    ComputeClass(rank, "c", phase): seconds
    for rank in (0, 1)
    for phase, seconds in ((Phase.FORWARD, 1.0), (Phase.BACKWARD, 2.0), (Phase.OPTIMIZER, 0.5))
}
LINK = CommunicationClass("all_reduce", (0, 1))


def evidence(factors: RunCorrections, *, floor: float = 0.01) -> Evidence:
    """Without noise."""
    expected = {**COMPUTE, LINK: 0.5}
    observed = {
        key: seconds
        * (
            factors.communication_factor(key)
            if isinstance(key, CommunicationClass)
            else factors.rank_factor(key.rank) * dict(factors.phases).get(key.phase, 1.0)
        )
        for key, seconds in expected.items()
    }
    return Evidence(observed=[observed] * 3, expected=expected, step_s=4.0, floor=floor)


def test_exact_factors_are_found_whatever_their_kind() -> None:
    """Factors of phases are told apart from those of ranks up to a common factor: only products show."""
    truth = RunCorrections(
        ranks=((0, 1.0), (1, 1.4)), phases=((Phase.FORWARD, 1.0), (Phase.BACKWARD, 1.6)), communication=((LINK, 3.0),)
    )
    found = refit(evidence(truth), RunCorrections())
    for key in COMPUTE:
        product = found.rank_factor(key.rank) * dict(found.phases).get(key.phase, 1.0)
        assert product == pytest.approx(dict(truth.ranks)[key.rank] * dict(truth.phases).get(key.phase, 1.0), rel=0.02)
    assert dict(found.communication)[LINK] == pytest.approx(3.0)


def test_what_explains_less_than_the_floor_is_not_learnt() -> None:
    """Communication twice as slow is 12.5% of the step: above a floor of 10%, below one of 15%."""
    slow = RunCorrections(ranks=((0, 1.0), (1, 1.0)), communication=((LINK, 2.0),))
    assert dict(refit(evidence(slow, floor=0.10), RunCorrections()).communication) == {LINK: pytest.approx(2.0)}
    assert not refit(evidence(slow, floor=0.15), RunCorrections())


def test_hysteresis_keeps_what_is_not_contradicted() -> None:
    before = RunCorrections(ranks=((1, 1.20),))
    near = RunCorrections(ranks=((0, 1.0), (1, 1.21)))
    assert dict(refit(evidence(near, floor=0.02), before).ranks) == {0: 1.0, 1: 1.20}
    gone = refit(evidence(RunCorrections(ranks=((0, 1.0), (1, 1.005))), floor=0.02), before)
    assert not gone


@pytest.mark.parametrize(("step_s", "floor"), [(0.0, 0.1), (float("nan"), 0.1), (1.0, -0.1), (1.0, float("inf"))])
def test_evidence_without_numbers_is_refused(step_s: float, floor: float) -> None:
    with pytest.raises(CostError, match="a run needs a step time above 0"):
        Evidence(observed=[COMPUTE], expected=COMPUTE, step_s=step_s, floor=floor)
    with pytest.raises(CostError, match="nothing was observed"):
        Evidence(observed=[], expected=COMPUTE, step_s=1.0, floor=0.1)


# What is said when a profile's machine is not this one, and what a machine's state says. `simulate` and `plan` do not ask.

HERE: dict[str, Any] = {"processor": "AMD EPYC, 3rd", "cores": 2, "versions": {"torch": "2.13.0"}}
POINT = {
    "fingerprint": "f",
    "model": "m",
    "component": "c",
    "phase": "forward",
    "samples": 4,
    "device_type": "toy",
    "precision": "fp32",
    "seconds": 1e-3,
    "spread": 0.1,
    "repeats": 9,
    "source": "made up",
}


def measured_on(machine: str, torch: str = "2.13.0") -> Profile:
    profile = Profile.model_validate(minimal())
    provenance = profile.provenance.model_copy(update={"machine": machine, "versions": {"torch": torch}})
    compute = profile.compute.model_copy(update={"components": [ComponentPoint.model_validate(POINT)]})
    return profile.model_copy(update={"provenance": provenance, "compute": compute})


def on_gpus(profile: Profile, name: str) -> Profile:
    entry: DeviceTypeEntry = profile.device_types["toy"].model_copy(update={"kind": "cuda"})
    devices = [device.model_copy(update={"type": name}) for device in profile.devices]
    return profile.model_copy(update={"device_types": {name: entry}, "devices": devices})


def test_nothing_is_said_of_the_same_machine_or_of_published_profiles() -> None:
    assert profile_differences(measured_on("AMD EPYC, 3rd, 2 cores, Linux 6.1 x86_64"), HERE) == ()
    published = load_profile("dgx1-v100-32gb")
    assert not is_measured(published)
    assert profile_differences(published, HERE, []) == ()


@pytest.mark.parametrize(
    ("machine", "torch", "words"),
    [
        (
            "Intel Xeon, 2 cores, Linux",
            "2.13.0",
            ("measured on Intel Xeon", "this machine has AMD EPYC, 3rd"),
        ),
        ("AMD EPYC, 3rd, 64 cores, Linux", "2.13.0", ("measured with 64 cores", "this machine has 2", "calibrate again")),
        ("AMD EPYC, 3rd, 2 cores, Linux", "2.11.0", ("torch 2.11.0", "here is 2.13.0", "calibrate again")),
        ("by hand", "2.13.0", ("measured on by hand",)),
    ],
)
def test_another_processor_core_count_or_torch_is_said_with_both_values(
    machine: str, torch: str, words: tuple[str, ...]
) -> None:
    (warning,) = profile_differences(measured_on(machine, torch), HERE)
    assert all(word in warning for word in words), warning


def test_gpus_count_by_name_and_the_processor_beside_them_does_not() -> None:
    profile = on_gpus(measured_on("Intel Xeon, 64 cores, Linux"), "Tesla V100")
    assert profile_differences(profile, HERE, ["Tesla V100", "Tesla V100"]) == ()
    assert profile_differences(profile, HERE, None) == ()
    (warning,) = profile_differences(profile, HERE, ["A100"])
    assert "measured on Tesla V100, this machine has A100" in warning
    (none,) = profile_differences(profile, HERE, [])
    assert "this machine has no GPU" in none


# --- the state of a machine -------------------------------------------------------------------------------------------


def test_this_machine_tells_plain_json_without_host_user_or_path() -> None:
    state = machine_state()
    text = json.dumps(state)
    assert os.uname().nodename not in text
    assert "/" not in text
    if Path("/proc/stat").is_file():
        assert state["ticks"]["user"] > 0
    if Path("/proc/cpuinfo").is_file() and "core_hz" in state:
        assert len(state["core_hz"]) == describe_environment()["cores"]
        assert all(1e8 < clock < 1e10 for clock in state["core_hz"].values())


def test_clocks_and_governors_of_a_machine_that_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for core, khz in enumerate((1_500_000, 3_000_000)):
        folder = tmp_path / f"cpu{core}" / "cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_cur_freq").write_text(f"{khz}\n")
        (folder / "scaling_governor").write_text("performance\n")
    monkeypatch.setattr(states, "CPUS", tmp_path)
    state = machine_state()
    assert state["core_hz"] == {"0": 1.5e9, "1": 3e9}
    assert clocks_text(state) == "clocks 1.50 to 3.00 GHz, governor performance"
    monkeypatch.setattr(states, "CPUS", tmp_path / "none")
    assert core_clocks_hz("model name\t: x\ncpu MHz\t\t: 2450.000\ncpu MHz\t\t: 2000.5\n") == {"0": 2.45e9, "1": 2.0005e9}
    assert clocks_text({}) == "clock unknown, governor unknown"


@given(st.lists(st.integers(0, 10**9), min_size=8, max_size=8), st.lists(st.integers(0, 10**6), min_size=8, max_size=8))
def test_stolen_share_is_of_the_ticks_that_passed(start: list[int], passed: list[int]) -> None:
    def state(ticks: list[int]) -> dict[str, Any]:
        return {"ticks": parse_ticks("cpu  " + " ".join(map(str, ticks)) + " 0 0\ncpu0 1 2 3\n")}

    end = [before + more for before, more in zip(start, passed, strict=True)]
    share = stolen_share(state(start), state(end))
    assert share == (passed[-1] / sum(passed) if sum(passed) else None)
    assert stolen_share({}, {}) is None


@pytest.mark.parametrize(("then", "now"), [(True, False), (False, True), (True, True), (None, True)])
def test_priority_of_communication_is_compared(then: bool | None, now: bool) -> None:
    profile = measured_on("AMD EPYC, 3rd, 2 cores, Linux 6.1 x86_64")
    environment = {} if then is None else {"communication_priority": then}
    profile = profile.model_copy(update={"provenance": profile.provenance.model_copy(update={"environment": environment})})
    found = profile_differences(profile, {**HERE, "communication_priority": now})
    assert len(found) == (then is not None and then != now)
    if found:
        assert f"communication will be {'faster' if now else 'slower'} than predicted" in found[0]
