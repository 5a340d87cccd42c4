"""A small profile, and points of a calibration with usual values: a test names those that it is about."""

from __future__ import annotations

from typing import Any

from parsim.hardware.profile import Profile
from parsim.hardware.records import ComponentPoint, OptimizerPoint
from parsim.model.component import Component

USUAL: dict[str, Any] = {"device_type": "toy", "spread": 0.0, "repeats": 9, "source": "s"}


def component_point(component: Component, seconds: float, **changes: Any) -> ComponentPoint:
    """A forward of the component over 8 samples in fp32, unless `changes` say otherwise."""
    usual = {**USUAL, "model": "toy", "phase": "forward", "samples": 8, "precision": "fp32"}
    named = {"fingerprint": component.fingerprint, "component": component.name, "seconds": seconds}
    return ComponentPoint.model_validate({**usual, **named, **changes})


def optimizer_point(elements: int, tensors: int, seconds: float, **changes: Any) -> OptimizerPoint:
    """A step of SGD with momentum, unless `changes` say otherwise."""
    named = {"optimizer": "sgd_momentum", "elements": elements, "tensors": tensors, "seconds": seconds}
    return OptimizerPoint.model_validate({**USUAL, **named, **changes})


def toy_profile(*, kind: str = "cuda", devices: int = 1, source: str = "measurement", **tables: Any) -> Profile:
    """Devices of one type, whose every number is 1e10 unless a table says otherwise."""
    number = {"value": 1e10, "source": "s"}
    names = ("memory_bytes", "memory_bandwidth_bytes_per_s", "context_bytes")
    toy = {"kind": kind, **dict.fromkeys(names, number), "peak_flop_per_s": {"fp32": number}}
    document = {
        "schema_version": 1,
        "name": "toy",
        "description": "",
        "provenance": {"created": "2025-01-01", "command": "", "machine": ""},
        "sources": {"s": {"kind": source, "text": ""}},
        "device_types": {"toy": toy},
        "devices": [{"index": index, "type": "toy"} for index in range(devices)],
        "communication": {"backend": "nccl"},
    }
    return Profile.model_validate(document | tables)
