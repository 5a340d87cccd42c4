"""How one rank issues its tasks: computation in the calling thread, communication on streams of its own, in issue order.

Both classes give the same contract. `submit` never waits; `compute` runs the operation after its dependencies; `finish`
returns when everything submitted has ended. Each task leaves a `TaskTime`: `ready_s` is when this rank could start it (its
dependencies here ended and its stream free), `end_s` when it ended here. What a thread takes to wake up and to get the
processor lies within the time of a communication (others wait for it meanwhile) and between computations. Who waits for whom
across ranks is decided when the ranks' records are merged.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from parsim.execute.processes.priority import take_priority

Operation = Callable[[], None]


class TaskTime(NamedTuple):
    """Seconds on the host's monotonic clock, which all ranks of one host share."""

    task: int
    stream: str
    ready_s: float
    end_s: float


class Streams(Protocol):
    """What the interpreter needs of a device."""

    def submit(self, task: int, stream: str, dependencies: Sequence[int], operation: Operation) -> None: ...

    def compute(self, task: int, stream: str, dependencies: Sequence[int], operation: Operation) -> None: ...

    def finish(self) -> list[TaskTime]: ...

    def close(self) -> None: ...


class ThreadStreams:
    """For CPU ranks: one thread per communication stream, blocked inside the collective without holding the interpreter, and
    before the computation where the system lets it (`parsim.execute.processes.priority`)."""

    def __init__(self) -> None:
        self._queues: dict[str, queue.SimpleQueue[Callable[[], None] | None]] = {}
        self._threads: list[threading.Thread] = []
        self._ended: dict[int, threading.Event] = {}
        self._end_s: dict[int, float] = {}
        self._free_s: dict[str, float] = {}
        self._times: list[TaskTime] = []
        self._failure: BaseException | None = None

    def submit(self, task: int, stream: str, dependencies: Sequence[int], operation: Operation) -> None:
        if stream not in self._queues:
            self._queues[stream] = queue.SimpleQueue()
            thread = threading.Thread(target=_serve, args=(self._queues[stream],), name=f"parsim {stream}", daemon=True)
            thread.start()
            self._threads.append(thread)
        before = [self._event(dependency) for dependency in dependencies]
        ended, submitted_s = self._event(task), time.perf_counter()

        def run() -> None:
            try:
                for event in before:
                    event.wait()
                if self._failure is None:
                    ready_s = max([submitted_s, *(self._end_s[dependency] for dependency in dependencies)])
                    ready_s = max(ready_s, self._free_s.get(stream, ready_s))
                    operation()
                    self._note(task, stream, ready_s)
                    self._free_s[stream] = self._end_s[task]
            except BaseException as error:
                self._failure = self._failure or error
            finally:
                ended.set()

        self._queues[stream].put(run)

    def compute(self, task: int, stream: str, dependencies: Sequence[int], operation: Operation) -> None:
        for dependency in dependencies:
            event = self._ended.get(dependency)
            if event is not None:
                event.wait()
        self._check()
        ready_s = time.perf_counter()
        operation()
        self._note(task, stream, ready_s)
        self._event(task).set()

    def finish(self) -> list[TaskTime]:
        for event in list(self._ended.values()):
            event.wait()
        self._check()
        times, self._times, self._ended, self._end_s = self._times, [], {}, {}
        return times

    def close(self) -> None:
        for entry in self._queues.values():
            entry.put(None)
        for thread in self._threads:
            thread.join(timeout=1.0)

    def _note(self, task: int, stream: str, ready_s: float) -> None:
        self._end_s[task] = time.perf_counter()
        self._times.append(TaskTime(task, stream, ready_s, self._end_s[task]))

    def _event(self, task: int) -> threading.Event:
        if task not in self._ended:
            self._ended[task] = threading.Event()
        return self._ended[task]

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure


def _serve(entries: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    take_priority()
    while True:
        entry = entries.get()
        if entry is None:
            return
        entry()


class CudaStreams:
    """For GPU ranks: a CUDA stream per communication stream; events carry the dependencies, the host runs ahead.

    Times are read from events after the step and placed on the host clock at the step's first event. Leaves out how far
    the host itself was behind.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._compute = torch.cuda.current_stream(device)
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._events: dict[int, tuple[str, torch.cuda.Event, torch.cuda.Event]] = {}
        self._waiting: list[tuple[int, str, tuple[int, ...], Operation]] = []
        self._base: tuple[float, torch.cuda.Event] | None = None

    def submit(self, task: int, stream: str, dependencies: Sequence[int], operation: Operation) -> None:
        self._waiting.append((task, stream, tuple(dependencies), operation))
        self._release()

    def compute(self, task: int, stream: str, dependencies: Sequence[int], operation: Operation) -> None:
        self._release()
        self._enqueue(task, stream, dependencies, operation, self._compute)
        self._release()

    def finish(self) -> list[TaskTime]:
        self._release()
        torch.cuda.synchronize(self._device)
        assert not self._waiting, "every communication task follows computation of its own rank or none"
        if self._base is None:
            return []
        host_s, base = self._base
        times = [
            TaskTime(task, stream, host_s + base.elapsed_time(start) / 1e3, host_s + base.elapsed_time(end) / 1e3)
            for task, (stream, start, end) in self._events.items()
        ]
        self._events, self._base = {}, None
        return times

    def close(self) -> None:
        torch.cuda.synchronize(self._device)

    def _release(self) -> None:
        """Enqueue waiting communication, in order per stream, whose dependencies have been enqueued."""
        held: set[str] = set()
        remaining = []
        for task, stream, dependencies, operation in self._waiting:
            if stream in held or any(dependency not in self._events for dependency in dependencies):
                held.add(stream)
                remaining.append((task, stream, dependencies, operation))
                continue
            if stream not in self._streams:
                self._streams[stream] = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._enqueue(task, stream, dependencies, operation, self._streams[stream])
        self._waiting = remaining

    def _enqueue(
        self, task: int, stream: str, dependencies: Sequence[int], operation: Operation, on: torch.cuda.Stream
    ) -> None:
        with torch.cuda.stream(on):
            for dependency in dependencies:
                on.wait_event(self._events[dependency][2])
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record(on)
            if self._base is None:
                torch.cuda.synchronize(self._device)
                self._base = (time.perf_counter(), start)
            operation()
            end.record(on)
            self._events[task] = (stream, start, end)


def make_streams(device: torch.device) -> Streams:
    """The streams of a rank that computes on `device`."""
    return CudaStreams(device) if device.type == "cuda" else ThreadStreams()
