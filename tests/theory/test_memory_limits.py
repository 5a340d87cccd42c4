"""Plans made to miss the memory limit by 5%, through the calls of a user: refused above it, accepted below it."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest

import parsim as ps
from parsim.errors import DoesNotFitError
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.devices import DEVICE_KINDS, Allocator
from parsim.predict.memory import SAFE_PROBABILITY
from parsim.search.tree import is_tie
from parsim.units import format_bytes
from tests.models import sharded_model
from tests.theory.test_memory_verdict import MEASURED

MODEL = sharded_model(width=2**19, elements=40_000_000)
"""Parameters of 0.6 GiB, and 2 MiB a sample and value."""
BATCH = 64
HALF = ("a", "c")
ONE: dict[str, Any] = {"mesh": {"dp": 1, "tp": 1, "pp": 1}}
DP, TP, MIXED = ({"mesh": mesh} for mesh in ({"dp": 4}, {"tp": 4}, {"dp": 2, "tp": 2}))
PP, PP_DP = ({"mesh": mesh, "microbatches": 4} for mesh in ({"pp": 4}, {"pp": 2, "dp": 2}))
PLANS: dict[str, dict[str, Any]] = {
    "one device": ONE,
    "one device, microbatches": {**ONE, "microbatches": 8},
    "one device, recomputed": {**ONE, "recompute": "full"},
    "replicas": DP,
    "replicas, half recomputed": {**DP, "recompute": list(HALF)},
    **{f"ZeRO {stage}": {**DP, "zero_stage": stage, "bucket_bytes": 2**20} for stage in (1, 2, 3)},
    **{f"ZeRO {stage}, recomputed": {**DP, "zero_stage": stage, "recompute": "full"} for stage in (1, 2, 3)},
    **{f"ZeRO {stage}, microbatches": {**DP, "zero_stage": stage, "microbatches": 4} for stage in (2, 3)},
    **{f"pipeline, {order}": {**PP, "pipeline_order": order} for order in ("gpipe", "1f1b", "zero-bubble")},
    "pipeline, chunks": {"mesh": {"pp": 2}, "microbatches": 4, "pipeline_order": "interleaved", "chunks": 2},
    "pipeline, recomputed": {**PP, "pipeline_order": "gpipe", "recompute": "full"},
    "pipeline of replicas": PP_DP,
    "pipeline of replicas, ZeRO 1": {**PP_DP, "zero_stage": 1},
    "pipeline of replicas, ZeRO 3": {**PP_DP, "zero_stage": 3},
    "shards": TP,
    "shards, recomputed": {**TP, "recompute": "full"},
    "shards of replicas": MIXED,
    "shards of replicas, ZeRO 2": {**MIXED, "zero_stage": 2},
}


def machine(devices: int, memory_bytes: float, allocator: Allocator) -> Cluster:
    cluster = cluster_from_profile(load_profile("dgx1-v100-32gb"), devices)
    types = replace(cluster.devices[0].type, memory_bytes=round(memory_bytes), allocator=allocator)
    return replace(cluster, devices=tuple(replace(device, type=types) for device in cluster.devices))


def asked(memory_bytes: float, keys: dict[str, Any], allocator: Allocator = MEASURED) -> ps.Answer:
    settings = {f"plan.{key}": value for key, value in keys.items()}
    cluster = machine(prod(keys["mesh"].values()), memory_bytes, allocator)
    return ps.plan(MODEL, cluster=cluster, global_batch=BATCH, strategy="custom", settings=settings)


def test_there_are_plans_of_every_kind() -> None:
    assert len(PLANS) >= 20


DATASHEET = DEVICE_KINDS["cuda"].allocator


@pytest.mark.parametrize("name", list(PLANS)[::4])
def test_a_profile_from_datasheets_refuses_by_its_median_and_says_how_sure_it_is(name: str) -> None:
    """Its interval is far wider than 5% of a small plan: what is 5% below the limit is taken, and told to be in doubt."""
    roomy = asked(2**44, PLANS[name], DATASHEET)
    peak = max(rank.total_bytes for rank in roomy.prediction.evaluation.memory)
    above, below = (asked(capacity, PLANS[name], DATASHEET) for capacity in (peak / 1.05, peak * 1.05))
    assert (above.fits, below.fits) == (False, True)
    assert above.prediction.fit_probability < 0.5 < below.prediction.fit_probability < SAFE_PROBABILITY
    told = f"fits with a probability of only {below.prediction.fit_probability:.0%}"
    assert told in below.sentence()
    assert any(warning.startswith("may run out of memory: rank ") for warning in below.prediction.warnings)
    careful = asked(peak * 1.05, {**PLANS[name], "fit_probability": 0.95}, DATASHEET)
    assert not careful.fits
    high = max(rank.high_bytes for rank in roomy.prediction.evaluation.memory)
    assert f"devices of {format_bytes(high)} would do" in careful.verdict()
    assert asked(high, {**PLANS[name], "fit_probability": 0.95}, DATASHEET).fits


@pytest.mark.parametrize("name", PLANS)
def test_5_percent_too_much_is_refused_and_5_percent_less_is_not(name: str) -> None:
    roomy = asked(2**44, PLANS[name])
    assert roomy.fits
    peak = max(rank.total_bytes for rank in roomy.prediction.evaluation.memory)
    for capacity, fits in ((peak / 1.05, False), (peak * 1.05, True)):
        answer = asked(capacity, PLANS[name])
        predicted = ps.simulate(answer)
        assert predicted.plan == roomy.prediction.plan, "the keys leave one plan"
        assert (answer.fits, predicted.fits) == (fits, fits), predicted.warnings
        probability = predicted.fit_probability
        assert probability >= SAFE_PROBABILITY if fits else probability < 0.01
        if not fits:
            with pytest.raises(DoesNotFitError):
                _ = answer.chosen


def searched(memory_bytes: float, **keys: Any) -> ps.Answer:
    settings = {"plan.mesh": {"dp": 4}, **{f"plan.{key}": value for key, value in keys.items()}}
    cluster = machine(4, memory_bytes, DATASHEET)
    return ps.plan(MODEL, cluster=cluster, global_batch=BATCH, strategy="dp", settings=settings)


def test_a_search_prefers_plans_that_surely_fit_and_shows_a_faster_risk_beside_them() -> None:
    """Of one search: with 95% what is asked for by default, and what `fit_probability` = 0.5 would choose."""
    frugal = asked(2**44, {**DP, "zero_stage": 3, "microbatches": 16, "recompute": "full", "bucket_bytes": 2**20}, DATASHEET)
    capacity = max(rank.high_bytes for rank in frugal.prediction.evaluation.memory)
    tight, daring, careful = (searched(capacity, **keys) for keys in ({}, {"fit_probability": 0.5}, {"fit_probability": 0.95}))
    assert tight.prediction.is_safe
    assert not daring.prediction.is_safe
    assert tight.prediction.plan.program == careful.prediction.plan.program
    fastest = daring.search.chosen.result  # type: ignore[union-attr]
    is_faster = not is_tie(tight.search.chosen.result.step_s.median, fastest.step_s.median)  # type: ignore[union-attr]
    assert (tight.riskier is not None) == is_faster
    assert (f"fits with a probability of only {fastest.fit_probability:.0%}" in tight.runners_up()) == is_faster
    risky = tight.to_dict()["riskier"]
    assert risky is None or risky["plan"]["zero_stage"] == fastest.plan.zero_stage


def test_where_no_plan_surely_fits_the_answer_says_so() -> None:
    tight = searched(3.28 * 2**30, zero_stage=0, recompute="none", microbatches=1)
    assert tight.fits
    assert not tight.prediction.is_safe
    assert tight.riskier is None
    assert "No plan that was tried fits with 95%." in tight.runners_up()
