"""Profiles that learn from a run: the right factor is found, noise is not learnt, and an update is undone when its cause is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

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
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.profile import Profile, save_profile
from parsim.plans.plan import Plan
from parsim.predict.evaluate import evaluate
from parsim.predict.problem import PlanningProblem
from parsim.search.families import FAMILIES
from parsim.work import Phase
from tests.models import chain_model

SLOW = RunCorrections(ranks=((0, 1.0), (1, 1.2)))
TARGET = 0.05


def problem_on(profile: Profile, devices: int = 2) -> PlanningProblem:
    model = chain_model((4e9, 8e9, 6e9, 4e9), elements=400_000)
    return PlanningProblem(model=model, cluster=cluster_from_profile(profile, devices), global_batch=64)


def plan_of(problem: PlanningProblem, family: str = "dp") -> Plan:
    return next(plan for plan in FAMILIES[family](problem) if plan.world_size == problem.cluster.size)


@pytest.mark.parametrize("family", ["dp", "mp"])
@pytest.mark.parametrize("seed", range(5))
def test_twenty_steps_bring_a_slowed_rank_back_under_target(family: str, seed: int) -> None:
    problem = problem_on(load_profile("dgx1-v100-32gb"))
    machine = Machine(problem, plan_of(problem, family), SLOW)
    found = after_run(machine, seed)
    assert error(machine, problem.cluster.profile) > TARGET
    assert error(machine, found.profile) < TARGET
    ranks = dict(updates_of(replace(problem.cluster, profile=found.profile)).ranks)
    assert ranks[1] / ranks.get(0, 1.0) == pytest.approx(1.2, abs=0.05)


@pytest.mark.parametrize("drift", [0.85, 1.1, 1.3])
def test_a_drift_of_everything_is_learnt(drift: float) -> None:
    problem = problem_on(load_profile("dgx1-v100-32gb"))
    links = ((CommunicationClass("all_reduce", (0, 1)), drift),)
    machine = Machine(problem, plan_of(problem), RunCorrections(ranks=((0, drift), (1, drift)), communication=links))
    found = after_run(machine, 1)
    assert error(machine, problem.cluster.profile) > TARGET
    assert error(machine, found.profile) < TARGET


def test_an_update_is_undone_when_its_cause_is_gone_and_does_not_compound() -> None:
    """Slow, slow again, and as at first: factors are of the profile as calibrated, so the third leaves none."""
    problem = problem_on(load_profile("dgx1-v100-32gb"))
    plan, at_first = plan_of(problem), problem.cluster.profile
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
    problem = problem_on(load_profile("dgx1-v100-32gb"))
    machine = Machine(problem, plan_of(problem), RunCorrections())
    found = after_run(machine, seed, floor=0.02)
    assert found.changes == ()
    assert found.profile is problem.cluster.profile


def test_a_profile_with_an_update_comes_back_from_its_file_and_says_so(tmp_path: Path) -> None:
    problem = problem_on(load_profile("dgx1-v100-32gb"), devices=3)
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
    result = evaluate(on, plan_of(on), samples=0)
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
