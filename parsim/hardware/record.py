"""The common base of all parts of a hardware profile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, strict=True)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


LEAST_BYTES_PER_S = 1e6
"""Of a link, a network card or a memory: what is slower was meant in GB/s, or in MB/s."""

LEAST_FLOP_PER_S = 1e6
"""Of a device: what is slower was meant in TFLOP/s."""

LEAST_MEMORY_BYTES = 2**16
"""Of a device: what is less was meant in GiB."""

LONGEST_LATENCY_S = 1.0
"""Of a link: what is longer was meant in microseconds."""


def check_rate(key: str, value: float) -> None:
    """Raise ValueError for bytes per second that no link, card or memory has.

    Args:
        key: of the value, for the message.
    """
    if value < LEAST_BYTES_PER_S:
        raise ValueError(f"{key} = {value:g} bytes/s: must be >= {LEAST_BYTES_PER_S:g}{meant(value, 'GB/s', 1e9)}")


def check_latency(key: str, value: float) -> None:
    """Raise ValueError for seconds that no message waits."""
    if value > LONGEST_LATENCY_S:
        raise ValueError(f"{key} = {value:g} s: must be <= {LONGEST_LATENCY_S:g}{meant(value, 'us', 1e-6)}")


def check_device(bytes_of: Mapping[str, float], peaks: Mapping[str, float]) -> None:
    """Raise ValueError for a device that could do nothing or hold nothing.

    Args:
        bytes_of: `memory_bytes` and `memory_bandwidth_bytes_per_s`. peaks: `peak_flop_per_s`, by precision.
    """
    memory = bytes_of["memory_bytes"]
    if memory < LEAST_MEMORY_BYTES:
        raise ValueError(f"memory_bytes = {memory:g}: must be >= {LEAST_MEMORY_BYTES}{meant(memory, 'GiB', 2**30)}")
    check_rate("memory_bandwidth_bytes_per_s", bytes_of["memory_bandwidth_bytes_per_s"])
    for precision, peak in peaks.items():
        if peak < LEAST_FLOP_PER_S:
            fix = meant(peak, "TFLOP/s", 1e12) or f"; leave {precision} out if the device cannot compute in it"
            raise ValueError(f"peak_flop_per_s.{precision} = {peak:g} FLOP/s: must be >= {LEAST_FLOP_PER_S:g}{fix}")


def meant(value: float, unit: str, factor: float) -> str:
    """The likely slip: a number in another unit, and how to write it."""
    return f"; {unit} meant? then write {value * factor:g}" if value else ""


OLD_KEYS = {"post_wait_s": "resume_s", "core_sharing": "crowding"}
"""What keys of a profile were called before. Files with the old ones load; new files have the new ones."""


def either_key(key: str) -> AliasChoices:
    """A key of OLD_KEYS by its new or its old name."""
    return AliasChoices(key, OLD_KEYS[key])


class ProfileRecord(BaseModel):
    """Base of all parts: unknown keys are errors, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)
