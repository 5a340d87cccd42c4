"""Seconds per call of short work on a device: warm, queued behind a kernel that waits, sustained.

1. The calls run until the device has been busy for `warm_s`: clocks rise, libraries choose their kernels.
2. A burst is groups of calls behind a hold, as in `parsim.execute.cuda.driver`. The hold is as long as the host needs to
   enqueue the burst. If the device had left it before the host was done, the burst is thrown away; the next one has half as
   many groups, behind a longer hold.
3. Bursts follow one another until the timed calls alone have taken `least_s`.

A group holds so many calls that the cost of its mark, about a microsecond, does not count. Leaves out what the host takes for a
launch, which `launches` measures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from parsim.errors import ExecutionError
from parsim.execute.cuda.driver import DeviceClock, Group, QueuedCall, longer_hold, timed_once

QUEUE_CALLS = 512
"""Calls of a burst at most: a CUDA queue holds about a thousand launches, and beyond them the host waits."""

GROUP_S = 200e-6
"""Least time of a group; 200 times the cost of a mark."""

MIN_GROUPS = 8
MAX_TRIES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds per call over the groups.

    Attributes:
        calls, groups: how many were timed. sustained_s: device seconds of the timed calls together.
        queued: every kept burst was enqueued before its first call started; False where a device has no queue.
        repeated_bursts: thrown away, since the hold before them was too short.
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
    clock: DeviceClock, calls: Sequence[QueuedCall], *, least_s: float = 1.0, warm_s: float = 0.2, held: bool = True
) -> Timing:
    """Seconds of one call, with `calls` taken in turns (each on its own operands, see `calibration.operand_pool`).

    Args:
        least_s: device seconds of timed calls at least. warm_s: of calls before them, on the host's clock.
        held: False for calls that wait for the device (copies of pageable memory): no hold can precede them.

    Raises: ExecutionError without a call, or if no hold is long enough for the host to enqueue a burst.
    """
    if not calls:
        raise ExecutionError("nothing to time: give at least one call")
    turns = _Turns(calls)
    estimate_s, enqueue_s = _warm(clock, turns, warm_s)
    group = min(QUEUE_CALLS // MIN_GROUPS, max(1, math.ceil(GROUP_S / estimate_s)))
    most = QUEUE_CALLS // group
    seconds: list[float] = []
    spent_s, hold_s, repeated = 0.0, longer_hold(enqueue_s * group * most), 0
    queued = held and clock.queues
    burst = partial(turns.run, group)
    while spent_s < least_s or len(seconds) < MIN_GROUPS:
        groups = min(most, max(MIN_GROUPS, math.ceil((least_s - spent_s) / (estimate_s * group))))
        found = timed_once(clock, [Group([burst])] * groups, hold_s if held else None)
        if queued and not found.hidden:
            repeated += 1
            most = max(MIN_GROUPS, most // 2)
            if repeated > MAX_TRIES:
                raise ExecutionError(
                    f"the device left a hold of {hold_s:.3g} s before the host had enqueued {group * groups} calls, "
                    f"{repeated} times; the host is too busy to time this call"
                )
            hold_s = longer_hold(max(hold_s, found.spent_s))
            continue
        spent_s += sum(found.seconds)
        seconds += [value / group for value in found.seconds]
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
        queued=queued,
        repeated_bursts=repeated,
    )


class _Turns:
    """Calls one after the other, from the first again after the last."""

    def __init__(self, calls: Sequence[QueuedCall]) -> None:
        self._calls = calls
        self._next = 0

    def run(self, count: int) -> None:
        for _ in range(count):
            self._calls[self._next]()
            self._next = (self._next + 1) % len(self._calls)


def _warm(clock: DeviceClock, turns: _Turns, warm_s: float) -> tuple[float, float]:
    """Seconds of a call on the device, and of enqueuing it, from the last round of warming up."""
    turns.run(1)
    clock.synchronize()
    begin_s, count = clock.host_s(), 1
    while True:
        found = timed_once(clock, [Group([partial(turns.run, count)])], None)
        if clock.host_s() - begin_s >= warm_s:
            return max(found.seconds[0] / count, 1e-9), found.issue_s[0] / count
        count = min(2 * count, QUEUE_CALLS)
