"""Copies of 1 MiB to 4 GiB: on the device, and between host and device, with pinned and with pageable host memory."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from calibration.operand_pool import operand_sets
from parsim.execute.cuda.driver import QueuedCall
from parsim.units import GIB, MIB, format_bytes
from tools.gpu.device import MeasuredDevice, UnsupportedError
from tools.gpu.timing import time_calls

Route = Literal["on_device", "to_device", "to_device_pageable", "to_host", "to_host_pageable"]

SIZES_BYTES = (MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB, 4 * GIB)
HOST_SIZES_BYTES = (MIB, 16 * MIB, 256 * MIB, GIB)
PAGEABLE = "_pageable"
POOL_SHARE = 0.25
"""Of the device's memory that source and target arrays may take together."""


def measure_copy(device: MeasuredDevice, route: Route, size_bytes: int, *, least_s: float) -> dict[str, Any]:
    """Bytes per second of a copy: on the device bytes read plus bytes written, otherwise the bytes that cross.

    Raises: UnsupportedError for a route to a host where the device is the host.
    """
    if route == "on_device":
        calls, sets, beyond = _on_device(device, size_bytes)
        moved = 2 * size_bytes
    elif device.device.type == "cpu":
        raise UnsupportedError("a copy between host and device needs a device of its own (CUDA)")
    else:
        calls, sets, beyond = [_crossing(device, route, size_bytes)], 1, True
        moved = size_bytes
    # a copy of pageable memory waits for the device, so nothing can be queued before it
    timing = time_calls(device.clock, calls, least_s=least_s, held=not route.endswith(PAGEABLE))
    return {
        "route": route,
        "size_bytes": size_bytes,
        "size": format_bytes(size_bytes),
        "sets": sets,
        "beyond_cache": beyond,
        "bytes_per_s": moved / timing.median_s,
        **timing.to_dict(),
    }


def _on_device(device: MeasuredDevice, size_bytes: int) -> tuple[list[QueuedCall], int, bool]:
    operands = operand_sets(
        (size_bytes, size_bytes),
        cache_bytes=device.cache_bytes,
        limit_bytes=int(POOL_SHARE * device.memory_bytes),
        device=device.device,
    )
    calls: list[QueuedCall] = []
    for _ in range(operands.sets):
        source, target = (operands.pool.take((size_bytes,), torch.uint8) for _ in range(2))
        _scramble(source)
        target.zero_()
        calls.append(partial(target.copy_, source))
    return calls, operands.sets, operands.beyond_cache


def _crossing(device: MeasuredDevice, route: Route, size_bytes: int) -> QueuedCall:
    pinned = not route.endswith(PAGEABLE)
    host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned)
    _scramble(host)
    there = torch.empty(size_bytes, dtype=torch.uint8, device=device.device)
    _scramble(there)
    if route.startswith("to_device"):
        return partial(there.copy_, host, non_blocking=pinned)
    return partial(host.copy_, there, non_blocking=pinned)


def _scramble(tensor: Tensor) -> None:
    """Bytes that do not repeat within a cache line's neighbourhood, without a second array of their size."""
    step = min(tensor.numel(), 16 * MIB)
    pattern = (torch.arange(step, device=tensor.device, dtype=torch.int64) * 2654435761 >> 13).to(torch.uint8)
    for begin in range(0, tensor.numel(), step):
        part = tensor[begin : begin + step]
        part.copy_(pattern[: part.numel()])
