"""What `parsim run` says of a prediction: planted slow ranks, links and machines are named, and nothing else is."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from experiments.common.slow_machines import Machine
from parsim.costs.diagnosis import Diagnosis, ObservedStep, PredictedStep, diagnose
from parsim.costs.observed import NO_RUN_CORRECTIONS, CommunicationClass, ComputeClass, RunCorrections
from parsim.errors import CostError
from parsim.hardware.compose import load_profile
from parsim.predict.compare import aa_floor
from parsim.predict.evaluate import Evaluation, evaluate
from parsim.search.adapt.observed import diagnosis_of
from parsim.work import Phase
from tests.models import chain_model
from tests.unit.test_speed import plan_of, problem_on

STEPS = 24


@lru_cache
def machine(family: str, devices: int, factors: RunCorrections = NO_RUN_CORRECTIONS) -> tuple[Machine, Evaluation]:
    model = chain_model((4e7, 8e7, 6e7, 4e7), elements=4_000_000)
    problem = replace(problem_on(devices, load_profile("dgx1-v100-32gb")), model=model)
    plan = plan_of(problem, family)
    return Machine(problem, plan, factors, sigma=0.02), evaluate(problem, plan, fold=False)


def verdict(family: str, devices: int, factors: RunCorrections, seed: int, slowness: float | None = None) -> Diagnosis:
    """Of a training on a machine that is slower than predicted by these factors."""
    played, evaluation = machine(family, devices, factors)
    timelines, times = played.steps(STEPS, seed)
    floor = aa_floor(np.array(times).reshape(6, -1).tolist()).median
    return diagnosis_of(
        played.problem,
        evaluation,
        timelines,
        step_s=float(np.mean(times)),
        timed=STEPS,
        floor=floor,
        slowness=slowness,
    )


@pytest.mark.parametrize(("family", "devices"), [("dp", 2), ("dp", 4), ("mp", 2), ("mp", 4)])
@pytest.mark.parametrize("seed", range(4))
def test_a_run_that_nothing_disturbs_is_as_predicted(family: str, devices: int, seed: int) -> None:
    found = verdict(family, devices, RunCorrections(), seed)
    assert found.as_predicted
    assert found.findings == ()
    assert found.text.startswith("as predicted: a step took ")


@pytest.mark.parametrize(("family", "devices", "rank"), [("dp", 2, 1), ("dp", 4, 3), ("mp", 4, 2)])
@pytest.mark.parametrize(("factor", "seed"), [(1.3, 0), (2.0, 1)])
def test_a_slow_rank_is_named_with_its_speed(family: str, devices: int, rank: int, factor: float, seed: int) -> None:
    factors = RunCorrections(ranks=tuple((own, factor if own == rank else 1.0) for own in range(devices)))
    found = verdict(family, devices, factors, seed)
    assert [(one.kind, one.subject) for one in found.findings] == [("rank", f"rank {rank}")]
    assert found.findings[0].factor == pytest.approx(factor, rel=0.05)
    assert f"rank {rank} (gpu{rank}) computes" in found.lines()[1]
    if factor == 2.0:
        assert found.as_predicted is False


@pytest.mark.parametrize("seed", range(2))
def test_a_slow_link_of_a_pipeline_is_named(seed: int) -> None:
    slow = tuple((CommunicationClass("send_recv", pair), 40.0) for pair in ((1, 2), (2, 1)))
    usual = tuple((CommunicationClass("send_recv", pair), 1.0) for pair in ((0, 1), (1, 0), (2, 3), (3, 2)))
    found = verdict("mp", 4, RunCorrections(communication=slow + usual), seed)
    assert [(one.kind, one.subject) for one in found.findings] == [("link", "link gpu1-gpu2")]
    assert found.findings[0].factor == pytest.approx(40, rel=0.1)
    assert "link gpu1-gpu2 at 2." in found.findings[0].text


def test_a_slow_link_of_two_replicas_is_named_by_the_share_of_its_speed() -> None:
    factors = RunCorrections(communication=((CommunicationClass("all_reduce", (0, 1)), 10.0),))
    found = verdict("dp", 2, factors, 1)
    assert [one.kind for one in found.findings] == ["link"]
    assert "link gpu0-gpu1 at 1" in found.findings[0].text
    assert found.as_predicted is False


@pytest.mark.parametrize(
    ("slowness", "kind", "said"),
    [(None, "machine", "calibrate again"), (1.6, "machine", "60.0% slower"), (1.0, "prices", "off")],
)
def test_a_slow_machine_is_told_from_wrong_prices_by_the_probe(slowness: float | None, kind: str, said: str) -> None:
    factors = RunCorrections(ranks=tuple((rank, 1.6) for rank in range(4)))
    found = verdict("dp", 4, factors, 2, slowness)
    assert found.as_predicted is False
    assert [one.kind for one in found.findings] == [kind]
    assert said in " ".join(found.lines())


def test_a_slow_rank_of_a_slow_machine_is_both() -> None:
    factors = RunCorrections(ranks=((0, 1.6), (1, 1.6), (2, 3.2), (3, 1.6)))
    found = verdict("dp", 4, factors, 3)
    assert {(one.kind, one.subject) for one in found.findings} == {("rank", "rank 2"), ("machine", "machine")}
    assert "rank 2 (gpu2) computes" in found.findings[0].text


KEYS = [ComputeClass(rank, "c", Phase.FORWARD) for rank in (0, 1)]


def case(
    ranks: tuple[float, float], *, loading: float = 0.0, cores_carry: bool = True, link: float = 1.0, adapts: bool = True
) -> Diagnosis:
    """By hand: two ranks of 10 ms, an all_reduce of 4 ms, known within 2%."""
    link_key = CommunicationClass("all_reduce", (0, 1))
    expected = {KEYS[0]: 0.01, KEYS[1]: 0.01, link_key: 0.004}
    rng = np.random.default_rng(0)
    draws = {key: seconds * np.exp(rng.normal(0, 0.02, 200)) for key, seconds in expected.items()}
    step = {KEYS[0]: 0.01 * ranks[0], KEYS[1]: 0.01 * ranks[1], link_key: 0.004 * link}
    predicted = PredictedStep(
        seconds=expected,
        draws=draws,
        loading=[0.001, 0.001],
        low_s=0.0135,
        median_s=0.014,
        high_s=0.0145,
        devices=["cpu0", "cpu1"],
        cores_carry=cores_carry,
        adapts=adapts,
    )
    step_s = max(step[KEYS[0]], step[KEYS[1]]) + step[link_key] + loading
    return diagnose(
        predicted, ObservedStep(steps=[step] * 8, loading=[0.001, 0.001 + loading], step_s=step_s, timed=8, floor=0.01)
    )


def test_what_a_slow_core_does_to_the_communication_that_it_carries_is_its_own() -> None:
    assert [one.subject for one in case((1.0, 2.0), link=2.0).findings] == ["rank 1"]
    assert {one.subject for one in case((1.0, 2.0), link=2.0, cores_carry=False).findings} == {"rank 1", "link cpu0-cpu1"}
    assert [one.subject for one in case((1.0, 1.0), link=2.0).findings] == ["link cpu0-cpu1"]


def test_a_plan_that_adaptive_refuses_is_not_advised_to_use_it() -> None:
    for change in ({"ranks": (1.0, 2.0)}, {"ranks": (1.0, 1.0), "link": 2.0}):
        (usual,), (relaxed,) = (case(**change, adapts=adapts).findings for adapts in (True, False))  # type: ignore[arg-type]
        assert "--adaptive" in usual.advice
        assert "--adaptive" not in relaxed.advice
        assert relaxed.text == usual.text


def test_slow_loading_is_told_with_the_rank_that_waits_most() -> None:
    found = case((1.0, 1.0), loading=0.02)
    assert [one.kind for one in found.findings] == ["loading"]
    assert "21 ms of a step on rank 1" in found.findings[0].text
    assert "workers" in found.findings[0].advice


def test_a_fast_machine_is_told_too() -> None:
    found = case((0.5, 0.5))
    assert found.as_predicted is False
    assert "shorter" in found.text
    assert [one.kind for one in found.findings] == ["machine"]
    assert "faster than when it was calibrated" in found.findings[0].text


def test_few_steps_are_no_verdict_and_no_step_is_an_error() -> None:
    played, evaluation = machine("dp", 2)
    timelines, _ = played.steps(2, 0)
    found = diagnosis_of(played.problem, evaluation, timelines, step_s=1.0, timed=2, floor=0.0)
    assert found.as_predicted is None
    assert "2 timed steps" in found.text
    with pytest.raises(CostError, match="a diagnosis needs a recorded step"):
        diagnosis_of(played.problem, evaluation, timelines[:0], step_s=1.0, timed=20, floor=0.0)


def test_time_between_tasks_is_told_where_tasks_do_not_explain_the_step() -> None:
    played, evaluation = machine("dp", 2)
    timelines, times = played.steps(STEPS, 5)
    step_s = 2 * float(np.mean(times))
    found = diagnosis_of(played.problem, evaluation, timelines, step_s=step_s, timed=STEPS, floor=0.01)
    assert [one.kind for one in found.findings] == ["between"]
    assert found.findings[0].seconds == pytest.approx(step_s / 2, rel=0.1)


def test_a_verdict_is_that_of_the_interval_and_names_the_noise_beside_it() -> None:
    """A table with "within: NO" and a run that "went as predicted" would contradict one another."""
    played, evaluation = machine("dp", 2)
    timelines, _ = played.steps(STEPS, 5)
    step_s = evaluation.result.step_s.p95 * 1.02
    found = diagnosis_of(played.problem, evaluation, timelines, step_s=step_s, timed=STEPS, floor=0.05)
    assert found.as_predicted is False
    assert found.text.startswith("not as predicted")
    assert "that far it may be noise: two halves of the run differ by 5.0%" in found.text


def test_updates_of_a_profile_are_part_of_the_prediction() -> None:
    played, _ = machine("dp", 2)
    slow = RunCorrections(ranks=((0, 1.0), (1, 1.5)))
    problem = replace(played.problem, corrections=slow)
    timelines, times = replace(played, factors=slow).steps(STEPS, 1)
    evaluation = evaluate(problem, played.plan, fold=False)
    found = diagnosis_of(problem, evaluation, timelines, step_s=float(np.mean(times)), timed=STEPS, floor=0.01)
    assert (found.as_predicted, found.findings) == (True, ())
