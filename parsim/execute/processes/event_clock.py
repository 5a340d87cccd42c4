"""Seconds of work on a GPU, by its own events, with the launches of the host out of the way.

A GPU runs what the host queues. Small kernels take less time than their launch, so a clock around them measures the host.
Here a kernel that only waits (the hold) is queued first. The host queues everything else while the device still waits.
Then the device runs it without a gap, and events between the calls record the times. The host's own seconds of queueing
are kept beside.

`EventDriver` is what this needs of a device; the tests put a device in its place whose time is computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch

EventMark = Any
"""An event of a driver."""

QueuedCall = Callable[[], object]

FIRST_HOLD_S = 1e-3
MOST_HOLD_S = 0.25
HOLD_MARGIN = 1.5
"""A hold is longer than what the host last needed by this factor, and by FIRST_HOLD_S."""

WARM_S = 1.1
"""Of sustained work before anything is timed: clocks rise within milliseconds, and fall with power and heat within a second."""

WARM_SIDE = 4096

CYCLES = 20_000_000
"""Of the sleep kernel that tells how many cycles one second has."""


class EventDriver(Protocol):
    """What timing by events needs of a device. All but `now_s`, `passed` and `synchronize` only queue."""

    def now_s(self) -> float:
        """The host's clock."""

    def hold(self, seconds: float) -> None:
        """Queue a kernel that does nothing for about so long."""

    def mark(self) -> EventMark:
        """Queue an event that notes the device's time."""

    def passed(self, mark: EventMark) -> bool:
        """Whether the device has come past the event."""

    def synchronize(self) -> None:
        """Wait until everything that was queued has ended."""

    def seconds_between(self, start: EventMark, end: EventMark) -> float:
        """By the device's clock; both events have passed."""


class CudaEventDriver:
    """The current stream of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cycles_per_s = 1e9
        for _ in range(2):  # the first one loads the kernel
            start = self.mark()
            torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
            end = self.mark()
            self.synchronize()
            self._cycles_per_s = CYCLES / self.seconds_between(start, end)

    def now_s(self) -> float:
        return time.perf_counter()

    def hold(self, seconds: float) -> None:
        torch.cuda._sleep(max(1, int(seconds * self._cycles_per_s)))  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def passed(self, mark: EventMark) -> bool:
        return bool(mark.query())

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def seconds_between(self, start: EventMark, end: EventMark) -> float:
        return float(start.elapsed_time(end)) / 1e3


@cache
def driver_of(device: torch.device) -> EventDriver | None:
    """The driver of a GPU; None on a CPU, whose calls end before they return."""
    return CudaEventDriver(device) if device.type == "cuda" else None


class Group(NamedTuple):
    """Calls that are timed together, between two events, and what is queued right before them, untimed."""

    calls: Sequence[QueuedCall]
    before: QueuedCall | None = None


class TimedGroups(NamedTuple):
    """Of every group.

    Attributes:
        seconds: of the device. issue_s: of the host, to queue the calls. hidden: the host had queued everything before the
            device began; else `seconds` may hold the host's.
    """

    seconds: list[float]
    issue_s: list[float]
    hidden: bool


def timed_groups(driver: EventDriver, groups: Sequence[Group]) -> TimedGroups:
    """Queue all groups behind one hold and read the events; once more behind a longer one where the hold was too short.

    Calls must not wait for the device: such a call is never hidden.
    """
    hold_s = FIRST_HOLD_S
    while True:
        driver.synchronize()
        driver.hold(hold_s)
        held, begin_s = driver.mark(), driver.now_s()
        marks, issue_s = [], []
        for group in groups:
            if group.before is not None:
                group.before()
            start, start_s = driver.mark(), driver.now_s()
            for call in group.calls:
                call()
            issue_s.append(driver.now_s() - start_s)
            marks.append((start, driver.mark()))
        hidden = not driver.passed(held)
        spent_s = driver.now_s() - begin_s
        driver.synchronize()
        seconds = [driver.seconds_between(start, end) for start, end in marks]
        if hidden or hold_s >= MOST_HOLD_S:
            return TimedGroups(seconds, issue_s, hidden)
        hold_s = longer_hold(max(hold_s, spent_s))


def longer_hold(spent_s: float) -> float:
    """Seconds of a hold behind which the host can spend so many."""
    return min(MOST_HOLD_S, HOLD_MARGIN * spent_s + FIRST_HOLD_S)


def warm_up(driver: EventDriver, work: QueuedCall, seconds: float = WARM_S) -> None:
    """Keep the device busy with `work` for at least so long, waiting for it after each so that no queue builds up."""
    begin_s = driver.now_s()
    while driver.now_s() - begin_s < seconds:
        work()
        driver.synchronize()


def products(dtype: torch.dtype, device: torch.device) -> QueuedCall:
    """Work that keeps a GPU busy for some milliseconds: matrix products."""
    left, right = (torch.ones(WARM_SIDE, WARM_SIDE, dtype=dtype, device=device) for _ in range(2))
    return lambda: torch.mm(left, right)
