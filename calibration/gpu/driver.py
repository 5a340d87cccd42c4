"""The clock and the queue of one device, so that every microbenchmark runs on a GPU, on a CPU and on a simulated device.

A GPU works through a queue while the host goes on. Events in that queue time the work. A sleep kernel at its head lets
the host enqueue everything before the first timed call starts. So no launch by the host delays a call. A CPU has no
queue: a call has ended when it returns.
"""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol

import torch

from parsim.errors import ExecutionError
from parsim.execute.processes.environment import memory_limit_bytes, processor_name
from parsim.units import MIB

CALIBRATION_CYCLES = 20_000_000
"""Of the sleep kernel when its clock is measured: about 10 ms."""

CPU_CACHE_BYTES = 32 * MIB
"""Assumed of a CPU's last cache, which torch does not tell."""


class UnsupportedError(ExecutionError):
    """This device cannot run a case, which is no fault of the case: it is skipped, with the reason."""


class QueueMark(NamedTuple):
    """A place in a device's queue: its number, which the driver that made it understands."""

    number: int


class QueueDriver(Protocol):
    """What a microbenchmark needs of a device.

    Attributes:
        queues: whether the device works through a queue while the host goes on.
        cache_bytes: of the last cache in front of the device's memory. memory_bytes: of the device.
    """

    device: torch.device
    name: str
    queues: bool
    cache_bytes: int
    memory_bytes: int

    def sleep(self, seconds: float) -> None:
        """Keep the queue busy for at least so long; returns at once. Does nothing on a device without a queue."""

    def mark(self) -> QueueMark:
        """A new mark at the end of the queue."""

    def passed(self, mark: QueueMark) -> bool:
        """Whether the device has come to the mark."""

    def seconds(self, begin: QueueMark, end: QueueMark) -> float:
        """Device seconds between two marks that the device has passed."""

    def wait(self) -> None:
        """Until the queue is empty."""

    def host_s(self) -> float:
        """The host's monotonic clock."""

    def forget(self) -> None:
        """Let go of all marks."""


class CudaQueueDriver:
    """One CUDA device, on the current stream, timed by events.

    Raises: ExecutionError without a CUDA device.
    """

    queues = True

    def __init__(self, index: int = 0) -> None:
        if not torch.cuda.is_available():
            raise ExecutionError("torch sees no CUDA device; use --device cpu, or a CUDA build of torch and a driver")
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        properties = torch.cuda.get_device_properties(self.device)
        self.name = str(properties.name)
        self.cache_bytes = int(properties.L2_cache_size)
        self.memory_bytes = int(properties.total_memory)
        self._events: list[torch.cuda.Event] = []
        self._spare: list[torch.cuda.Event] = []
        self._cycles_per_s = self._measure_cycles()

    def sleep(self, seconds: float) -> None:
        torch.cuda._sleep(max(1, int(seconds * self._cycles_per_s)))  # type: ignore[no-untyped-call]

    def mark(self) -> QueueMark:
        event = self._spare.pop() if self._spare else _new_event()
        event.record()
        self._events.append(event)
        return QueueMark(len(self._events) - 1)

    def passed(self, mark: QueueMark) -> bool:
        return bool(self._events[mark.number].query())  # type: ignore[no-untyped-call]

    def seconds(self, begin: QueueMark, end: QueueMark) -> float:
        return float(self._events[begin.number].elapsed_time(self._events[end.number])) * 1e-3

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def host_s(self) -> float:
        return time.perf_counter()

    def forget(self) -> None:
        """The events are used again: making one costs more than recording it."""
        self._spare.extend(self._events)
        self._events.clear()

    def _measure_cycles(self) -> float:
        """Cycles of the sleep kernel per second: the second of two, since clocks rise with the first."""
        for _ in range(2):
            begin, end = _new_event(), _new_event()
            begin.record()
            torch.cuda._sleep(CALIBRATION_CYCLES)  # type: ignore[no-untyped-call]
            end.record()
            end.synchronize()
        return CALIBRATION_CYCLES / (float(begin.elapsed_time(end)) * 1e-3)


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class WallDriver:
    """This host's processor by the wall clock: the same programme, without a queue."""

    queues = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.name = processor_name()
        self.cache_bytes = CPU_CACHE_BYTES
        self.memory_bytes = memory_limit_bytes()
        self._marks_s: list[float] = []

    def sleep(self, seconds: float) -> None:
        """There is no queue to keep busy."""

    def mark(self) -> QueueMark:
        self._marks_s.append(time.perf_counter())
        return QueueMark(len(self._marks_s) - 1)

    def passed(self, mark: QueueMark) -> bool:
        return mark.number < len(self._marks_s)

    def seconds(self, begin: QueueMark, end: QueueMark) -> float:
        return self._marks_s[end.number] - self._marks_s[begin.number]

    def wait(self) -> None:
        """Every call has ended when it returns."""

    def host_s(self) -> float:
        return time.perf_counter()

    def forget(self) -> None:
        self._marks_s.clear()


def make_driver(device: str) -> QueueDriver:
    """Args: device: "cuda" or "cpu". Raises: ExecutionError for another one, or where torch sees no GPU."""
    if device == "cuda":
        return CudaQueueDriver()
    if device == "cpu":
        return WallDriver()
    raise ExecutionError(f"unknown device {device!r}; use cuda or cpu")
