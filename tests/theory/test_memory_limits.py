"""Plans made to miss the memory limit by 5%, through the calls of a user: refused above it, accepted below it."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest

import parsim as ps
from parsim.costs.memory.verdict import FIT_PROBABILITY
from parsim.errors import DoesNotFitError
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.profile import load_profile
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


def machine(devices: int, memory_bytes: float) -> Cluster:
    cluster = cluster_from_profile(load_profile("dgx1-v100-32gb"), devices)
    types = replace(cluster.devices[0].type, memory_bytes=round(memory_bytes), allocator=MEASURED)
    return replace(cluster, devices=tuple(replace(device, type=types) for device in cluster.devices))


def asked(memory_bytes: float, keys: dict[str, Any]) -> ps.Answer:
    settings = {f"plan.{key}": value for key, value in keys.items()}
    cluster = machine(prod(keys["mesh"].values()), memory_bytes)
    return ps.plan(MODEL, cluster=cluster, global_batch=BATCH, strategy="custom", settings=settings)


def test_there_are_plans_of_every_kind() -> None:
    assert len(PLANS) >= 20


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
        assert probability >= FIT_PROBABILITY if fits else probability < 0.01
        if not fits:
            with pytest.raises(DoesNotFitError):
                _ = answer.chosen
