"""Seconds of work on a GPU, by its own events, with the launches of the host out of the way.

A GPU runs what the host queues. Small kernels take less time than their launch, so a clock around them measures the host.
Here a kernel that only waits (the hold) is queued first. The host queues everything else while the device still waits.
Then the device runs it without a gap, and events between the calls record the times. The host's own seconds of queueing
are kept beside.

Every call goes to an `EventClock` (`parsim.execute.cuda.driver`); tests have one with computed time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from parsim.execute.cuda.driver import EventClock, driver_of

DeviceClock = EventClock[Any]
QueuedCall = Callable[[], object]

FIRST_HOLD_S = 1e-3
MOST_HOLD_S = 0.25
HOLD_MARGIN = 1.5
"""A hold is longer than what the host last needed by this factor, and by FIRST_HOLD_S."""

WARM_S = 1.1
"""Of sustained work before anything is timed: clocks rise within milliseconds, and fall with power and heat within a second."""

WARM_SIDE = 4096


class Group(NamedTuple):
    """Calls that are timed together, between two events, and what is queued right before them, untimed."""

    calls: Sequence[QueuedCall]
    before: QueuedCall | None = None


class TimedGroups(NamedTuple):
    """Of every group.

    Attributes:
        seconds: of the device. issue_s: of the host, to queue the calls. hidden: the host had queued everything before the
            device began; else `seconds` may hold the host's. spent_s: of the host, to queue everything.
    """

    seconds: list[float]
    issue_s: list[float]
    hidden: bool
    spent_s: float


def timed_once(clock: DeviceClock, groups: Sequence[Group], hold_s: float | None) -> TimedGroups:
    """Queue all groups behind one hold and read the events.

    A group with nothing before it begins at the event that ended the group before: a queue holds about a thousand entries.

    Args:
        hold_s: None: without a hold, for calls that wait for the device.
    """
    clock.synchronize()
    if hold_s is not None:
        clock.hold(hold_s)
    held, begin_s = clock.mark(), clock.host_s()
    end, marks, issue_s = held, [], []
    for group in groups:
        start = end
        if group.before is not None:
            group.before()
            start = clock.mark()
        start_s = clock.host_s()
        for call in group.calls:
            call()
        issue_s.append(clock.host_s() - start_s)
        end = clock.mark()
        marks.append((start, end))
    hidden = hold_s is not None and not clock.passed(held)
    spent_s = clock.host_s() - begin_s
    clock.synchronize()
    return TimedGroups([clock.elapsed_s(start, end) for start, end in marks], issue_s, hidden, spent_s)


def timed_groups(clock: DeviceClock, groups: Sequence[Group]) -> TimedGroups:
    """Time all groups behind one hold; once more behind a longer one where the hold was too short.

    Calls must not wait for the device: such a call is never hidden.
    """
    hold_s = FIRST_HOLD_S
    while True:
        found = timed_once(clock, groups, hold_s)
        if found.hidden or hold_s >= MOST_HOLD_S:
            return found
        hold_s = longer_hold(max(hold_s, found.spent_s))


def longer_hold(spent_s: float) -> float:
    """Seconds of a hold behind which the host can spend so many."""
    return min(MOST_HOLD_S, HOLD_MARGIN * spent_s + FIRST_HOLD_S)


def warm_up(clock: DeviceClock, work: QueuedCall, seconds: float = WARM_S) -> None:
    """Keep the device busy with `work` for at least so long, waiting for it after each so that no queue builds up."""
    begin_s = clock.host_s()
    while clock.host_s() - begin_s < seconds:
        work()
        clock.synchronize()


def warm_gpu(device: torch.device, dtype: torch.dtype) -> None:
    """Raise a GPU's clocks to those of sustained work, by matrix products; a CPU needs none."""
    driver = driver_of(device)
    if driver is not None:
        warm_up(driver, products(dtype, device))


def products(dtype: torch.dtype, device: torch.device) -> QueuedCall:
    """Work that keeps a GPU busy for some milliseconds: matrix products."""
    left, right = (torch.ones(WARM_SIDE, WARM_SIDE, dtype=dtype, device=device) for _ in range(2))
    return lambda: torch.mm(left, right)
