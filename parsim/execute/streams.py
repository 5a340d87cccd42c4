"""How one rank issues its tasks: computation in the calling thread, communication on separate streams, in issue order.

CPU ranks have threads (`ThreadStreams`), GPU ranks CUDA streams (`parsim.execute.cuda.streams`). Both give the same contract.
`submit` never waits; `compute` runs the operation after its dependencies; `finish` returns when everything submitted has
ended. Each task leaves a `TaskTime`: `ready_s` is when this rank could start it (its dependencies here ended and its stream
free), `end_s` when it ended here. What a thread takes to wake up and to get the processor lies within the time of a
communication (others wait for it meanwhile) and between computations. Who waits for whom across ranks is decided when the
ranks' records are merged.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from parsim.execute.processes.heartbeat import pulse
from parsim.execute.processes.setup import take_priority

Operation = Callable[[], None]
BatchSource = Callable[[int], Mapping[str, Tensor]]
"""Microbatch number -> the batch values (model inputs, "target") this rank reads: its `Layout.batch_ways` share."""


class TaskTime(NamedTuple):
    """Seconds on the host's monotonic clock, which all ranks of one host share (`parsim.execute.processes.exchange`)."""

    task: int
    stream: str
    ready_s: float
    end_s: float


_recorded = tuple.__new__
"""Makes a TaskTime in a third of the time of TaskTime(...), for every task of every step."""


class Streams(Protocol):
    """What the interpreter needs of a device.

    Where the device `loads_ahead`, a step's batch is copied by `load`, or was by `load_ahead` in the step before and is only
    `loaded` now. Where it `queues`, the host runs ahead, and the device may run one after the other what several streams were
    given: ranks then issue in one order (`parsim.execute.runtime`). An operation calls five functions while it issues. `used`:
    its stream reads a tensor that another stream may have allocated. `lent`: the same of a communication and of memory of the
    computation. `unowned`: a tensor as a transfer is to have it. `fence`: marks its launches so far. `after`: makes it wait for
    a fence.
    """

    @property
    def loads_ahead(self) -> bool: ...
    @property
    def queues(self) -> bool: ...
    def submit(self, task: int, stream: str, dependencies: Sequence[int], operation: Operation) -> None: ...
    def compute(self, task: int, stream: str, dependencies: Sequence[int], operation: Operation) -> None: ...
    def load(self, task: int, stream: str, dependencies: Sequence[int], operation: Operation) -> None: ...
    def loaded(self, task: int) -> None: ...
    def load_ahead(self, task: int, stream: str, operation: Operation) -> None: ...
    def finish(self) -> list[TaskTime]: ...
    def close(self) -> None: ...
    def used(self, tensor: Tensor) -> None: ...
    def lent(self, tensor: Tensor) -> None: ...
    def unowned(self, tensor: Tensor) -> Tensor: ...
    def fence(self) -> Any: ...
    def after(self, fence: Any) -> None: ...


@dataclass(slots=True, eq=False, kw_only=True)
class _Waiting:
    """A communication that was submitted. `missing`: how many of its dependencies have not ended."""

    task: int
    stream: str
    dependencies: Sequence[int]
    operation: Operation
    submitted_s: float
    missing: int = 0


class ThreadStreams:
    """For CPU ranks: one thread per communication stream, blocked inside the collective without holding the interpreter, and
    before the computation where the system lets it (`parsim.execute.processes.setup`). Both share a core. So a thread is woken
    once per communication, when all that it needs has ended. Loading takes the time of the core that computes: it runs in its
    turn."""

    loads_ahead = queues = False
    _clock = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self._queues: dict[str, queue.SimpleQueue[_Waiting | None]] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()  # of what follows, up to `_waiting`
        self._dependents: dict[int, list[_Waiting]] = {}
        self._waiting: dict[str, deque[_Waiting]] = {}
        self._running: dict[int, threading.Lock] = {}  # of communications, held until they have ended
        self._end_s: dict[int, float] = {}
        self._free_s: dict[str, float] = {}
        self._times: list[TaskTime] = []
        self._failure: BaseException | None = None
        self._pulse = pulse()

    def submit(self, task: int, stream: str, dependencies: Sequence[int], operation: Operation) -> None:
        if stream not in self._queues:
            self._begin(stream)
        running = threading.Lock()
        running.acquire()
        self._running[task] = running
        entry = _Waiting(task=task, stream=stream, dependencies=dependencies, operation=operation, submitted_s=self._clock())
        with self._lock:
            for dependency in dependencies:
                if dependency not in self._end_s:
                    entry.missing += 1
                    self._dependents.setdefault(dependency, []).append(entry)
            self._waiting[stream].append(entry)
            self._release(stream)

    def _begin(self, stream: str) -> None:
        self._queues[stream] = queue.SimpleQueue()
        self._waiting[stream] = deque()
        thread = threading.Thread(target=self._serve, args=(self._queues[stream],), name=f"parsim {stream}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _release(self, stream: str) -> None:
        """Hand over the communications whose turn it is. Called with the lock."""
        waiting = self._waiting[stream]
        while waiting and not waiting[0].missing:
            self._queues[stream].put(waiting.popleft())

    def _ended(self, task: int) -> None:
        """The task has ended, or failed: what waits for it alone begins."""
        with self._lock:
            for entry in self._dependents.pop(task, ()):
                entry.missing -= 1
                if not entry.missing:
                    self._release(entry.stream)

    def _serve(self, entries: queue.SimpleQueue[_Waiting | None]) -> None:
        take_priority()
        while (entry := entries.get()) is not None:
            try:
                if self._failure is None:
                    self._communicate(entry)
            except BaseException as error:
                self._failure = self._failure or error
            finally:
                self._end_s.setdefault(entry.task, entry.submitted_s)  # a failed one has ended too
                self._ended(entry.task)
                self._running[entry.task].release()
                del entry  # the operation holds tensors of the step

    def _communicate(self, entry: _Waiting) -> None:
        stream = entry.stream
        ready_s = max(entry.submitted_s, self._free_s.get(stream, 0.0))
        for dependency in entry.dependencies:
            ready_s = max(ready_s, self._end_s[dependency])
        entry.operation()
        self._note(entry.task, stream, ready_s)
        self._free_s[stream] = self._end_s[entry.task]

    def compute(self, task: int, stream: str, dependencies: Sequence[int], operation: Operation) -> None:
        for dependency in dependencies:
            if dependency in self._running:
                self._wait_for(dependency)
        self._check()
        ready_s = self._clock()
        operation()
        self._note(task, stream, ready_s)
        if task in self._dependents:
            self._ended(task)
        self._pulse.beat()

    def load(self, task: int, stream: str, dependencies: Sequence[int], operation: Operation) -> None:
        self.compute(task, stream, dependencies, operation)

    def loaded(self, task: int) -> None:
        raise AssertionError(f"task {task}: nothing is loaded ahead on a CPU")

    def load_ahead(self, task: int, stream: str, operation: Operation) -> None:
        raise AssertionError(f"task {task}: nothing is loaded ahead on a CPU")

    def used(self, tensor: Tensor) -> None:
        """Threads share one memory, in which a tensor lives as long as somebody holds it."""

    def lent(self, tensor: Tensor) -> None:
        """See `used`."""

    def unowned(self, tensor: Tensor) -> Tensor:
        """See `used`."""
        return tensor

    def fence(self) -> None:
        """An operation has ended when it returns."""

    def after(self, fence: None) -> None:
        """See `fence`."""

    def finish(self) -> list[TaskTime]:
        for task in self._running:
            self._wait_for(task)
        self._check()
        times, self._times, self._running, self._end_s = self._times, [], {}, {}
        return times

    def close(self) -> None:
        for entry in self._queues.values():
            entry.put(None)
        for thread in self._threads:
            thread.join(timeout=1.0)

    def _wait_for(self, task: int) -> None:
        running = self._running[task]
        if running.locked():
            with self._pulse.waiting(), running:
                pass

    def _note(self, task: int, stream: str, ready_s: float) -> None:
        self._end_s[task] = end_s = self._clock()
        self._times.append(_recorded(TaskTime, (task, stream, ready_s, end_s)))

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
