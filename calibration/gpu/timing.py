"""Seconds per call of short work on a device: warm, queued behind a sleep kernel, sustained.

1. The calls run until the device has been busy for `warm_s`: clocks rise, libraries choose their kernels.
2. A burst is a sleep kernel and then groups of calls with a mark between the groups. The sleep is as long as the host needs to
   enqueue the burst. If the device had left the sleep before the host was done, the burst is thrown away; the next one is half
   as long, behind a sleep twice as long.
3. Bursts follow one another until the timed calls alone have taken `least_s`.

A group holds so many calls that the cost of its mark, about a microsecond, does not count. Leaves out what the host takes for a
launch, which `launches` measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from calibration.gpu.driver import QueueDriver
from parsim.errors import ExecutionError

TimedCall = Callable[[], object]

QUEUE_CALLS = 512
"""Calls of a burst at most: a CUDA queue holds about a thousand launches, and beyond them the host waits."""

GROUP_S = 200e-6
"""Least time of a group; 200 times the cost of a mark."""

MIN_GROUPS = 8
SLEEP_MARGIN = 2.0
MIN_SLEEP_S = 200e-6
MAX_SLEEP_S = 0.25
MAX_TRIES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds per call over the groups.

    Attributes:
        calls, groups: how many were timed. sustained_s: device seconds of the timed calls together.
        queued: every kept burst was enqueued before its first call started; False where a device has no queue.
        repeated_bursts: thrown away, since the sleep before them was too short.
    """

    median_s: float
    mean_s: float
    p05_s: float
    p95_s: float
    best_s: float
    calls: int
    groups: int
    sustained_s: float
    queued: bool
    repeated_bursts: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def time_calls(
    driver: QueueDriver, calls: Sequence[TimedCall], *, least_s: float = 1.0, warm_s: float = 0.2, behind_sleep: bool = True
) -> Timing:
    """Seconds of one call, with `calls` taken in turns (each on its own operands, see `pools`).

    Args:
        least_s: device seconds of timed calls at least. warm_s: of calls before them, on the host's clock.
        behind_sleep: False for calls that wait for the device (copies of pageable memory): no sleep can precede them.

    Raises: ExecutionError without a call, or if no sleep is long enough for the host to enqueue a burst.
    """
    if not calls:
        raise ExecutionError("nothing to time: give at least one call")
    turns = _Turns(calls)
    estimate_s, enqueue_s = _warm(driver, turns, warm_s)
    group = min(QUEUE_CALLS // MIN_GROUPS, max(1, math.ceil(GROUP_S / estimate_s)))
    most = QUEUE_CALLS // group
    seconds: list[float] = []
    spent_s, sleep_s, repeated = 0.0, _sleep_s(enqueue_s * group * most), 0
    while spent_s < least_s or len(seconds) < MIN_GROUPS:
        groups = min(most, max(MIN_GROUPS, math.ceil((least_s - spent_s) / (estimate_s * group))))
        found, late = _burst(driver, turns, group, groups, sleep_s if behind_sleep else None)
        if late:
            repeated += 1
            most = max(MIN_GROUPS, most // 2)
            if repeated > MAX_TRIES:
                raise ExecutionError(
                    f"the device left a sleep of {sleep_s:.3g} s before the host had enqueued {group * groups} calls, "
                    f"{repeated} times; the host is too busy to time this call"
                )
            sleep_s = min(MAX_SLEEP_S, 2 * sleep_s)
            continue
        spent_s += sum(found)
        seconds += [value / group for value in found]
    table = np.array(seconds, dtype=np.float64)
    p05, median, p95 = np.quantile(table, (0.05, 0.5, 0.95))
    return Timing(
        median_s=float(median),
        mean_s=float(table.mean()),
        p05_s=float(p05),
        p95_s=float(p95),
        best_s=float(table.min()),
        calls=group * len(seconds),
        groups=len(seconds),
        sustained_s=spent_s,
        queued=driver.queues and behind_sleep,
        repeated_bursts=repeated,
    )


class _Turns:
    """Calls one after the other, from the first again after the last."""

    def __init__(self, calls: Sequence[TimedCall]) -> None:
        self._calls = calls
        self._next = 0

    def run(self, count: int) -> None:
        for _ in range(count):
            self._calls[self._next]()
            self._next = (self._next + 1) % len(self._calls)


def _warm(driver: QueueDriver, turns: _Turns, warm_s: float) -> tuple[float, float]:
    """Seconds of a call on the device, and of enqueuing it, from the last round of warming up."""
    turns.run(1)
    driver.wait()
    begin_s, count = driver.host_s(), 1
    while True:
        start, start_s = driver.mark(), driver.host_s()
        turns.run(count)
        enqueued_s = driver.host_s() - start_s
        end = driver.mark()
        driver.wait()
        taken_s = driver.seconds(start, end)
        driver.forget()
        if driver.host_s() - begin_s >= warm_s:
            return max(taken_s / count, 1e-9), enqueued_s / count
        count = min(2 * count, QUEUE_CALLS)


def _burst(driver: QueueDriver, turns: _Turns, group: int, groups: int, sleep_s: float | None) -> tuple[list[float], bool]:
    """Seconds of every group, and whether the device began before the host was done. None: without a sleep."""
    if sleep_s is not None:
        driver.sleep(sleep_s)
    marks = [driver.mark()]
    for _ in range(groups):
        turns.run(group)
        marks.append(driver.mark())
    late = sleep_s is not None and driver.queues and driver.passed(marks[0])
    driver.wait()
    seconds = [driver.seconds(begin, end) for begin, end in pairwise(marks)]
    driver.forget()
    return seconds, late


def _sleep_s(enqueue_s: float) -> float:
    return min(MAX_SLEEP_S, max(MIN_SLEEP_S, SLEEP_MARGIN * enqueue_s))
