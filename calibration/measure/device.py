"""The best rates of one device with every rank busy: arithmetic, memory, and the framework's own memory.

A GPU is measured by events behind a hold (`parsim.execute.cuda.driver`), after a second of work, and at sizes that fill
it. The products and copies of a CPU core would measure its launches and its L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from parsim.execute.cuda.driver import Group, driver_of, timed_groups, warm_gpu
from parsim.execute.processes.machine import memory_limit_bytes, resident_bytes
from parsim.execute.rank_run import make_streams
from parsim.units import GIB, MIB

MATMUL_SIDE = 1024
COPY_BYTES = 64 * MIB
GPU_MATMUL_SIDE = 8192
GPU_COPY_BYTES = 2 * GIB
GPU_COPY_SHARE = 0.1
"""Of the GPU's memory, each of the two arrays of the copy at most."""
REPEATS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """Attributes:
    name: of the device as its driver or the system calls it.
    memory_bytes: what one rank may use: the GPU's memory, or this host's memory divided by its ranks.
    context_bytes: taken before the first model: of the GPU, or the resident set of the process.
    """

    name: str
    memory_bytes: int
    context_bytes: int
    peak_flop_per_s: float
    copy_bytes_per_s: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_device(device: torch.device, dtype: torch.dtype, *, name: str) -> DeviceFacts:
    """Facts of this rank's device; every rank calls it at the same time."""
    context = context_bytes(device)
    dist.barrier()
    warm_gpu(device, dtype)
    flop_per_s = matmul_flop_per_s(device, dtype)
    dist.barrier()
    copy = copy_bytes_per_s(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        properties = torch.cuda.get_device_properties(device)
        return DeviceFacts(
            name=properties.name,
            memory_bytes=properties.total_memory,
            context_bytes=context,
            peak_flop_per_s=flop_per_s,
            copy_bytes_per_s=copy,
        )
    return DeviceFacts(
        name=name,
        memory_bytes=memory_limit_bytes() // dist.get_world_size(),
        context_bytes=context,
        peak_flop_per_s=flop_per_s,
        copy_bytes_per_s=copy,
    )


def context_bytes(device: torch.device) -> int:
    """Memory in use that no tensor owns. On CUDA it counts what other processes hold on the GPU too."""
    if device.type != "cuda":
        return resident_bytes()
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def matmul_flop_per_s(device: torch.device, dtype: torch.dtype, side: int | None = None) -> float:
    """Flop per second of a square matrix product; the best of a few. side: left out, by the kind of the device."""
    side = side or (GPU_MATMUL_SIDE if device.type == "cuda" else MATMUL_SIDE)
    left = torch.randn(side, side, device=device).to(dtype)
    right = torch.randn(side, side, device=device).to(dtype)
    product = torch.empty_like(left)
    return 2 * side**3 / _best_s(device, lambda: torch.mm(left, right, out=product))


def copy_bytes_per_s(device: torch.device, size_bytes: int | None = None) -> float:
    """Bytes read plus bytes written per second of a copy between two large arrays; the best of a few. size_bytes: of each, left
    out, by the device."""
    size_bytes = size_bytes or _copied_bytes(device)
    source = torch.ones(size_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * size_bytes / _best_s(device, lambda: target.copy_(source))


def _copied_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return COPY_BYTES
    return min(GPU_COPY_BYTES, int(GPU_COPY_SHARE * torch.cuda.get_device_properties(device).total_memory))


def _best_s(device: torch.device, operation: Callable[[], object]) -> float:
    driver = driver_of(device)
    if driver is not None:
        return min(timed_groups(driver, [Group([operation])] * (REPEATS + 1)).seconds[1:])
    streams = make_streams(device)

    def run() -> None:
        operation()

    try:
        for number in range(REPEATS + 1):
            streams.compute(number, "compute", [], run)
        times = sorted(streams.finish())[1:]
    finally:
        streams.close()
    return min(entry.end_s - entry.ready_s for entry in times)
