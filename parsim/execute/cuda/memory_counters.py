"""A GPU's memory as four counters see it; each is compared with the lines of the prediction that it covers.

live        tensors, by watching every operator (`parsim.model.memory.live_memory`)
allocated   blocks the caching allocator has handed out: tensors rounded up, and workspaces of libraries that ask it
reserved    what the allocator has taken from the driver
driver      what the device has no longer free: the context, communicators, and other processes
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes at the peak of a step; `driver_bytes` right after it. None where nobody counts: on a CPU all but the first."""

    live_bytes: int
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    driver_bytes: int | None = None


class MemoryCounters(Protocol):
    """The counters of one device."""

    def give_back(self) -> None: ...

    def forget_peaks(self) -> None: ...

    def allocated_bytes(self) -> int: ...

    def reserved_bytes(self) -> int: ...

    def driver_bytes(self) -> int: ...


class TorchMemoryCounters:
    """Those of torch.cuda."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._cuda = torch.cuda

    def give_back(self) -> None:
        """What tensors that are gone had taken from the driver, which libraries cannot use."""
        self._cuda.empty_cache()

    def forget_peaks(self) -> None:
        """Also what the allocator has taken for anything but steps, such as a score or the plan before."""
        self.give_back()
        self._cuda.reset_peak_memory_stats(self._device)

    def allocated_bytes(self) -> int:
        """At most, since the peaks were forgotten; so is the next."""
        return int(self._cuda.max_memory_allocated(self._device))

    def reserved_bytes(self) -> int:
        return int(self._cuda.max_memory_reserved(self._device))

    def driver_bytes(self) -> int:
        free, total = self._cuda.mem_get_info(self._device)
        return int(total - free)


def counters_of(device: torch.device) -> MemoryCounters | None:
    """None for a CPU."""
    return TorchMemoryCounters(device) if device.type == "cuda" else None
