"""What it costs to give a device work: a launch, an event, a synchronisation, a replay of a captured graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from calibration.gpu.driver import QueueDriver, UnsupportedError
from calibration.gpu.timing import QUEUE_CALLS, time_calls

REPEATS = 30
GRAPH_KERNELS = 100
COUNT = QUEUE_CALLS // 2
"""Launches in a row: few enough that the queue takes them all."""

SLEEP_S = 0.05
"""Longer than the host needs to enqueue them."""


def launch_cost(driver: QueueDriver, *, least_s: float = 0.2) -> dict[str, Any]:
    """Seconds of a launch of the smallest elementwise operator: on the host, and on the device between two like it.

    Returns: host_s, the median over repeats of enqueuing one call behind a sleep; device_s, of one call queued behind others.
    """
    small = torch.ones(1, device=driver.device)
    call = partial(small.add_, 1.0)
    host = _host_seconds(driver, call)
    timing = time_calls(driver, [call], least_s=least_s)
    return {"host_s": host, "device_s": timing.median_s, **timing.to_dict()}


def event_cost(driver: QueueDriver) -> dict[str, Any]:
    """Seconds of recording an event on the host, and what two events in a row say lies between them.

    Returns: host_s, and between_s: median, least and most, the floor below which no single call can be timed by events.
    """
    host = _host_seconds(driver, driver.mark)
    between = []
    for _ in range(REPEATS):
        driver.sleep(1e-4)
        begin = driver.mark()
        end = driver.mark()
        driver.wait()
        between.append(driver.seconds(begin, end))
    driver.forget()
    return {
        "host_s": host,
        "between_s": statistics.median(between),
        "between_least_s": min(between),
        "between_most_s": max(between),
        "repeats": REPEATS,
    }


def synchronisation_cost(driver: QueueDriver) -> dict[str, Any]:
    """Seconds from a launch on an idle device until the host knows that it has ended; and of a wait for nothing."""
    small = torch.ones(1, device=driver.device)
    round_trips, idle = [], []
    for _ in range(REPEATS):
        driver.wait()
        begin_s = driver.host_s()
        small.add_(1.0)
        driver.wait()
        round_trips.append(driver.host_s() - begin_s)
        begin_s = driver.host_s()
        driver.wait()
        idle.append(driver.host_s() - begin_s)
    return {"round_trip_s": statistics.median(round_trips), "idle_wait_s": statistics.median(idle), "repeats": REPEATS}


def graph_cost(driver: QueueDriver) -> dict[str, Any]:
    """Seconds per kernel of a captured graph of small kernels: on the host, and on the device.

    Raises: UnsupportedError without CUDA.
    """
    if driver.device.type != "cuda":
        raise UnsupportedError("CUDA graphs need CUDA")
    small = torch.ones(1, device=driver.device)
    stream = torch.cuda.Stream(driver.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(driver.device))
    with torch.cuda.stream(stream):
        small.add_(1.0)
    torch.cuda.current_stream(driver.device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_KERNELS):
            small.add_(1.0)
    host = _host_seconds(driver, graph.replay, count=8)
    timing = time_calls(driver, [graph.replay], least_s=0.2)
    return {
        "kernels": GRAPH_KERNELS,
        "host_per_replay_s": host,
        "device_per_kernel_s": timing.median_s / GRAPH_KERNELS,
        **timing.to_dict(),
    }


def _host_seconds(driver: QueueDriver, call: Callable[[], object], count: int = COUNT) -> float:
    """Of one call on the host while the device sleeps: the median over repeats, the first left out."""
    found = []
    driver.wait()
    for _ in range(REPEATS):
        driver.sleep(SLEEP_S)
        begin_s = driver.host_s()
        for _ in range(count):
            call()
        found.append((driver.host_s() - begin_s) / count)
        driver.wait()
        driver.forget()
    return statistics.median(found[1:])
