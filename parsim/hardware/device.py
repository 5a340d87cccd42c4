"""The rates and memory of one device; every number comes from a profile, which keeps its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parsim.hardware.allocator import NO_ALLOCATOR, Allocator


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceType:
    """Attributes:
    kind: a row of `parsim.hardware.device_kinds` ("cuda", "cpu") or "package.module:ROW".
    peak_flop_per_s: by precision, a row of `parsim.model.number_formats` ("fp32", "amp_fp16") or "package.module:ROW"; one
        left out cannot be used.
    context_bytes: memory the framework takes before the first tensor. allocator: what it takes beside the tensors.
    """

    name: str
    kind: str
    memory_bytes: int
    peak_flop_per_s: Mapping[str, float]
    memory_bandwidth_bytes_per_s: float
    context_bytes: int
    allocator: Allocator = NO_ALLOCATOR


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """`index` is the device's number in the profile; `node` the host it sits in.

    Attributes: core: of that host, which devices of the same core share (None: a device by itself).
    """

    index: int
    type: DeviceType
    node: int = 0
    core: int | None = None
