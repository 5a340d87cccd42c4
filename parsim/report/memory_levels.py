"""Predicted and measured memory of every rank, like with like: each counter beside the lines of the prediction that it sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from parsim.costs.memory.records import RankMemory
from parsim.execute.cuda.memory_counters import MemoryUse


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLevel:
    """Attributes: level: "live", "allocated", "reserved" or "driver". relative_error: (predicted - measured) / measured."""

    rank: int
    level: str
    predicted_bytes: int
    measured_bytes: int
    relative_error: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def memory_levels(predicted: Sequence[RankMemory], measured: Sequence[MemoryUse | None]) -> tuple[MemoryLevel, ...]:
    """Up to four rows per rank; none for a counter that was not there.

    Live and allocated are held against the lines of tensors, reserved against these and the line `allocator`, what the driver
    no longer has against all lines.
    """
    rows = []
    for memory, use in zip(predicted, measured, strict=True):
        if use is None:
            continue
        tensors = sum(memory.tensor_lines.values())
        for level, foreseen, seen in (
            ("live", tensors, use.live_bytes),
            ("allocated", tensors, use.allocated_bytes),
            ("reserved", tensors + memory.line("allocator"), use.reserved_bytes),
            ("driver", memory.total_bytes, use.driver_bytes),
        ):
            if seen:
                error = (foreseen - seen) / seen
                rows.append(
                    MemoryLevel(
                        rank=memory.rank, level=level, predicted_bytes=foreseen, measured_bytes=seen, relative_error=error
                    )
                )
    return tuple(rows)
