"""Copies of 1 MiB to 4 GiB: on the device, and between host and device, with pinned and with pageable host memory."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from calibration.gpu.driver import QueueDriver, UnsupportedError
from calibration.gpu.pools import OperandPool
from calibration.gpu.timing import TimedCall, time_calls
from parsim.units import GIB, MIB, format_bytes

Route = Literal["on_device", "to_device", "to_device_pageable", "to_host", "to_host_pageable"]

SIZES_BYTES = (MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB, 4 * GIB)
HOST_SIZES_BYTES = (MIB, 16 * MIB, 256 * MIB, GIB)
PAGEABLE = "_pageable"
POOL_SHARE = 0.25
"""Of the device's memory that source and target arrays may take together."""


def measure_copy(driver: QueueDriver, route: Route, size_bytes: int, *, least_s: float) -> dict[str, Any]:
    """Bytes per second of a copy: on the device bytes read plus bytes written, otherwise the bytes that cross.

    Raises: UnsupportedError for a route to a host where the device is the host.
    """
    if route == "on_device":
        calls, sets, beyond = _on_device(driver, size_bytes)
        moved = 2 * size_bytes
    elif driver.device.type == "cpu":
        raise UnsupportedError("a copy between host and device needs a device of its own (CUDA)")
    else:
        calls, sets, beyond = [_crossing(driver, route, size_bytes)], 1, True
        moved = size_bytes
    # a copy of pageable memory waits for the device, so nothing can be queued before it
    timing = time_calls(driver, calls, least_s=least_s, behind_sleep=not route.endswith(PAGEABLE))
    return {
        "route": route,
        "size_bytes": size_bytes,
        "size": format_bytes(size_bytes),
        "sets": sets,
        "beyond_cache": beyond,
        "bytes_per_s": moved / timing.median_s,
        **timing.to_dict(),
    }


def _on_device(driver: QueueDriver, size_bytes: int) -> tuple[list[TimedCall], int, bool]:
    pool = OperandPool(
        (size_bytes, size_bytes),
        cache_bytes=driver.cache_bytes,
        limit_bytes=int(POOL_SHARE * driver.memory_bytes),
        device=driver.device,
    )
    calls: list[TimedCall] = []
    for number in range(pool.sets):
        source, target = (pool.operand(number, place, (size_bytes,), torch.uint8) for place in (0, 1))
        _scramble(source)
        target.zero_()
        calls.append(partial(target.copy_, source))
    return calls, pool.sets, pool.beyond_cache


def _crossing(driver: QueueDriver, route: Route, size_bytes: int) -> TimedCall:
    pinned = not route.endswith(PAGEABLE)
    host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned)
    _scramble(host)
    device = torch.empty(size_bytes, dtype=torch.uint8, device=driver.device)
    _scramble(device)
    if route.startswith("to_device"):
        return partial(device.copy_, host, non_blocking=pinned)
    return partial(host.copy_, device, non_blocking=pinned)


def _scramble(tensor: Tensor) -> None:
    """Bytes that do not repeat within a cache line's neighbourhood, without a second array of their size."""
    step = min(tensor.numel(), 16 * MIB)
    pattern = (torch.arange(step, device=tensor.device, dtype=torch.int64) * 2654435761 >> 13).to(torch.uint8)
    for begin in range(0, tensor.numel(), step):
        part = tensor[begin : begin + step]
        part.copy_(pattern[: part.numel()])
