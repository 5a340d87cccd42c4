"""A GPU for executor and calibration: its streams and events, a kernel that only waits, and how work on it is timed.

`EventClock` times work on the stream at hand; `Driver` adds streams. `TorchCudaDriver` is a real GPU by torch.cuda. Tests
have a driver with virtual time in its place, so that launches, waits and timings are checked without a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils import dlpack

from parsim.private import _DisableTorchDispatch, gpu_sleep

S = TypeVar("S")
E = TypeVar("E")

URGENT, USUAL = -1, 0
"""torch.cuda's priorities: the lower the number, the sooner."""

CYCLES = 20_000_000
"""Cycles of the sleep kernel that tells how many one second has: about 10 ms."""

STEADY, MOST_SLEEPS = 0.02, 50
"""The clock of a GPU that was idle rises within some kernels: the rate counts once two in a row differ by so little."""


class EventClock(Protocol[E]):
    """Times work by events of the device, E. All but `host_s`, `passed` and `synchronize` only queue, on the current stream."""

    @property
    def queues(self) -> bool:
        """Whether the device works through a queue while the host goes on; a CPU does not."""

    def hold(self, seconds: float) -> None:
        """Queue a kernel that does nothing for about so long."""

    def mark(self) -> E:
        """Queue an event that notes the device's time."""

    def passed(self, event: E) -> bool:
        """Whether the device has come past the event."""

    def synchronize(self) -> None:
        """Wait until everything that was queued on the device has ended."""

    def elapsed_s(self, start: E, end: E) -> float:
        """Seconds by the device's clock between two events that have passed."""

    def host_s(self) -> float:
        """The host's monotonic clock, which all ranks of a host share."""


class Driver(EventClock[E], Protocol[S, E]):
    """A GPU with streams, S."""

    def current(self) -> S:
        """The stream that launches go to now."""

    def stream(self, *, urgent: bool) -> S:
        """A new stream; the kernels of an urgent one come before those of others that wait for the same processors."""

    def on(self, stream: S) -> AbstractContextManager[object]:
        """Inside, launches and allocations go to the stream."""

    def record(self, stream: S) -> E:
        """A new event, reached when all that the stream was given so far has ended. It knows its time."""

    def wait(self, stream: S, event: E) -> None:
        """What the stream is given from now on begins after the event."""

    def finish(self, event: E) -> None:
        """The host waits for the event."""

    def used(self, tensor: Tensor, stream: S) -> None:
        """The stream reads memory that another may have allocated: it is free only when that has ended too."""

    def unowned(self, tensor: Tensor) -> Tensor:
        """A tensor on this memory of which the allocator knows nothing; it holds the one that is given."""


class TorchCudaDriver:
    """One GPU, by torch.cuda."""

    queues = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def stream(self, *, urgent: bool) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device, priority=URGENT if urgent else USUAL)  # type: ignore[no-untyped-call]

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def finish(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def used(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        if tensor.is_cuda:
            tensor.record_stream(stream)

    def unowned(self, tensor: Tensor) -> Tensor:
        return alias_of(tensor) if tensor.is_cuda else tensor

    def hold(self, seconds: float) -> None:
        gpu_sleep(max(1, int(seconds * self.cycles_per_s())))  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        return self.record(self.current())

    def passed(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def elapsed_s(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1e3

    def host_s(self) -> float:
        return time.perf_counter()

    def cycles_per_s(self) -> float:
        """Cycles of the sleep kernel in a second; the first call on a GPU measures it and waits for the device."""
        return _cycles_per_s(self._device)


@cache
def _cycles_per_s(device: torch.device) -> float:
    return steady_cycles_per_s(TorchCudaDriver(device), gpu_sleep)


def alias_of(tensor: Tensor) -> Tensor:
    """A tensor's memory under another storage, which holds the tensor; no mode of torch sees it being made. Modes that count
    memory would take it for the first reader of what has just arrived."""
    with _DisableTorchDispatch():
        return dlpack.from_dlpack(dlpack.to_dlpack(tensor))  # type: ignore[attr-defined]


def steady_cycles_per_s(clock: EventClock[Any], sleep: Callable[[int], object]) -> float:
    """Cycles of the sleep kernel per second, once the device's clock has risen. The first call loads the kernel, and `sleep`
    queues one of so many cycles.
    """
    rates: list[float] = []
    while len(rates) < MOST_SLEEPS:
        start = clock.mark()
        sleep(CYCLES)
        end = clock.mark()
        clock.synchronize()
        rates.append(CYCLES / clock.elapsed_s(start, end))
        if len(rates) > 2 and abs(rates[-1] / rates[-2] - 1) < STEADY:
            break
    return rates[-1]


@cache
def driver_of(device: torch.device) -> Driver[Any, Any] | None:
    """The driver of a GPU, ready to hold it; None on a CPU, whose calls end before they return."""
    if device.type != "cuda":
        return None
    driver = TorchCudaDriver(device)
    driver.cycles_per_s()
    return driver


# Seconds of work on a GPU, by its own events, with the launches of the host out of the way.
#
# A GPU runs what the host queues. Small kernels take less time than their launch, so a clock around them measures the host.
# Here a kernel that only waits (the hold) is queued first. The host queues everything else while the device still waits. Then
# the device runs it without a gap, and events between the calls record the times. The host's own seconds of queueing are kept
# beside.


DeviceClock = EventClock[Any]
QueuedCall = Callable[[], object]

FIRST_HOLD_S = 1e-3
MOST_HOLD_S = 0.25
HOLD_MARGIN = 1.5
"""A hold is longer than what the host last needed by this factor, and by FIRST_HOLD_S."""

WARM_S = 1.1
"""Seconds of work before anything is timed: clocks rise within milliseconds, and fall with power and heat within a second."""

WARM_SIDE = 4096


class Group(NamedTuple):
    """Calls that are timed together, between two events, and what is queued right before them, untimed."""

    calls: Sequence[QueuedCall]
    before: QueuedCall | None = None


class TimedGroups(NamedTuple):
    """What was timed, group by group: seconds of the device, and of the host to queue the calls. hidden: the host had queued
    everything before the device began; else `seconds` may hold the host's. spent_s: of the host, to queue everything."""

    seconds: list[float]
    issue_s: list[float]
    hidden: bool
    spent_s: float


def timed_once(clock: DeviceClock, groups: Sequence[Group], hold_s: float | None) -> TimedGroups:
    """Queue all groups behind one hold (None: without, for calls that wait for the device) and read the events. A group with
    nothing before it begins at the event that ended the group before: a queue holds about a thousand entries."""
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
    """Time all groups behind one hold; once more behind a longer one where the hold was too short. Calls must not wait for the
    device: such a call is never hidden."""
    hold_s = FIRST_HOLD_S
    while True:
        timed = timed_once(clock, groups, hold_s)
        if timed.hidden or hold_s >= MOST_HOLD_S:
            return timed
        hold_s = longer_hold(max(hold_s, timed.spent_s))


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
        left, right = (torch.ones(WARM_SIDE, WARM_SIDE, dtype=dtype, device=device) for _ in range(2))
        warm_up(driver, lambda: torch.mm(left, right))
