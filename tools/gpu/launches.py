"""The host's cost of giving a device work: a launch, an event, a synchronisation, a replay of a captured graph."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from parsim.execute.cuda.driver import DeviceClock, Group, QueuedCall, timed_once
from tools.gpu.device import MeasuredDevice, SpoiledProcessError, UnsupportedError
from tools.gpu.timing import QUEUE_CALLS, time_calls

REPEATS = 30
GRAPH_KERNELS = 100
COUNT = QUEUE_CALLS // 2
"""Launches in a row: few enough that the queue takes them all."""

HOLD_S = 0.05
"""Longer than the host needs to enqueue them."""

SHORT_HOLD_S = 1e-4
"""Longer than it needs for two events."""


def launch_cost(device: MeasuredDevice, *, least_s: float = 0.2) -> dict[str, Any]:
    """Seconds of a launch of the smallest elementwise operator: on the host, and on the device between two like it.

    Returns: host_s, the median over repeats of enqueuing one call behind a hold; device_s, of one call queued behind others.
    """
    small = torch.ones(1, device=device.device)
    call = partial(small.add_, 1.0)
    host = _host_seconds(device.clock, call)
    timing = time_calls(device.clock, [call], least_s=least_s)
    return {"host_s": host, "device_s": timing.median_s, **timing.to_dict()}


def event_cost(clock: DeviceClock) -> dict[str, Any]:
    """Seconds of making and recording an event on the host, and what two events in a row say lies between them.

    Returns: host_s, and between_s: median, least and most, the floor below which no single call can be timed by events.
    """
    host = _host_seconds(clock, clock.mark)
    between = [timed_once(clock, [Group([])], SHORT_HOLD_S).seconds[0] for _ in range(REPEATS)]
    return {
        "host_s": host,
        "between_s": statistics.median(between),
        "between_least_s": min(between),
        "between_most_s": max(between),
        "repeats": REPEATS,
    }


def synchronisation_cost(device: MeasuredDevice) -> dict[str, Any]:
    """Seconds from a launch on an idle device until the host knows that it has ended; and of a wait for nothing."""
    small = torch.ones(1, device=device.device)
    clock = device.clock
    round_trips, idle = [], []
    for _ in range(REPEATS):
        clock.synchronize()
        begin_s = clock.host_s()
        small.add_(1.0)
        clock.synchronize()
        round_trips.append(clock.host_s() - begin_s)
        begin_s = clock.host_s()
        clock.synchronize()
        idle.append(clock.host_s() - begin_s)
    return {"round_trip_s": statistics.median(round_trips), "idle_wait_s": statistics.median(idle), "repeats": REPEATS}


def graph_cost(device: MeasuredDevice) -> dict[str, Any]:
    """Seconds per kernel of a captured graph of small kernels: on the host, and on the device.

    Raises: UnsupportedError without CUDA.
    """
    if device.device.type != "cuda":
        raise UnsupportedError("CUDA graphs need CUDA")
    small = torch.ones(1, device=device.device)
    stream = torch.cuda.Stream(device.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device.device))
    with torch.cuda.stream(stream):
        small.add_(1.0)
    torch.cuda.current_stream(device.device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        for _ in range(GRAPH_KERNELS):
            small.add_(1.0)
    host = _host_seconds(device.clock, graph.replay, count=8)
    timing = time_calls(device.clock, [graph.replay], least_s=0.2)
    return {
        "kernels": GRAPH_KERNELS,
        "host_per_replay_s": host,
        "device_per_kernel_s": timing.median_s / GRAPH_KERNELS,
        **timing.to_dict(),
    }


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """What is launched inside becomes the graph.

    Raises: SpoiledProcessError if it does not. torch then leaves the stream of the capture current, and its generator of random
        numbers and its allocator in the capture.
    """
    try:
        with torch.cuda.graph(graph):
            yield
    except Exception as error:
        raise SpoiledProcessError(f"a CUDA graph could not be captured: {type(error).__name__}: {error}") from error


def _host_seconds(clock: DeviceClock, call: QueuedCall, count: int = COUNT) -> float:
    """Of one call on the host while the device waits: the median over repeats, the first left out."""
    found = [timed_once(clock, [Group([call] * count)], HOLD_S).issue_s[0] / count for _ in range(REPEATS)]
    return statistics.median(found[1:])
