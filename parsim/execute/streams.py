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
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from parsim.execute.cuda.driver import TorchCudaDriver
from parsim.execute.cuda.streams import CudaStreams
from parsim.execute.processes.priority import take_priority
from parsim.execute.processes.supervise.heartbeat import pulse
from parsim.execute.records.task_time import Operation, TaskTime

__all__ = ["Operation", "Streams", "TaskTime", "ThreadStreams", "make_streams"]


class Streams(Protocol):
    """What the interpreter needs of a device.

    Where the device `loads_ahead`, a step's batch is copied by `load`, or was by `load_ahead` in the step before and is
    only `loaded` now. An operation calls three functions while it issues. `used`: its stream reads a tensor that another
    stream may have allocated. `fence`: marks its launches so far. `after`: makes it wait for a fence.
    """

    @property
    def loads_ahead(self) -> bool: ...

    def submit(self, task: int, stream: str, dependencies: Sequence[int], operation: Operation) -> None: ...

    def compute(self, task: int, stream: str, dependencies: Sequence[int], operation: Operation) -> None: ...

    def load(self, task: int, stream: str, dependencies: Sequence[int], operation: Operation) -> None: ...

    def loaded(self, task: int) -> None: ...

    def load_ahead(self, task: int, stream: str, operation: Operation) -> None: ...

    def finish(self) -> list[TaskTime]: ...

    def close(self) -> None: ...

    def used(self, tensor: Tensor) -> None: ...

    def fence(self) -> Any: ...

    def after(self, fence: Any) -> None: ...


class ThreadStreams:
    """For CPU ranks: one thread per communication stream, blocked inside the collective without holding the interpreter, and
    before the computation where the system lets it (`parsim.execute.processes.priority`).

    Loading takes the time of the core that computes: it runs in its turn.
    """

    loads_ahead = False

    def __init__(self) -> None:
        self._queues: dict[str, queue.SimpleQueue[Callable[[], None] | None]] = {}
        self._threads: list[threading.Thread] = []
        self._ended: dict[int, threading.Event] = {}
        self._end_s: dict[int, float] = {}
        self._free_s: dict[str, float] = {}
        self._times: list[TaskTime] = []
        self._failure: BaseException | None = None
        self._pulse = pulse()

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
        self._wait_for([self._ended[dependency] for dependency in dependencies if dependency in self._ended])
        self._check()
        ready_s = time.perf_counter()
        operation()
        self._note(task, stream, ready_s)
        if task in self._ended:  # a communication waits for it
            self._ended[task].set()
        self._pulse.beat()

    def load(self, task: int, stream: str, dependencies: Sequence[int], operation: Operation) -> None:
        self.compute(task, stream, dependencies, operation)

    def loaded(self, task: int) -> None:
        raise AssertionError(f"task {task}: nothing is loaded ahead on a CPU")

    def load_ahead(self, task: int, stream: str, operation: Operation) -> None:
        raise AssertionError(f"task {task}: nothing is loaded ahead on a CPU")

    def used(self, tensor: Tensor) -> None:
        """Threads share one memory, in which a tensor lives as long as somebody holds it."""

    def fence(self) -> None:
        """An operation has ended when it returns."""

    def after(self, fence: None) -> None:
        """See `fence`."""

    def finish(self) -> list[TaskTime]:
        self._wait_for(list(self._ended.values()))
        self._check()
        times, self._times, self._ended, self._end_s = self._times, [], {}, {}
        return times

    def close(self) -> None:
        for entry in self._queues.values():
            entry.put(None)
        for thread in self._threads:
            thread.join(timeout=1.0)

    def _wait_for(self, events: Iterable[threading.Event]) -> None:
        for event in events:
            if not event.is_set():
                with self._pulse.waiting():
                    event.wait()

    def _note(self, task: int, stream: str, ready_s: float) -> None:
        self._end_s[task] = time.perf_counter()
        self._times.append(TaskTime(task, stream, ready_s, self._end_s[task]))

    def _event(self, task: int) -> threading.Event:
        """That the task has ended. A computation has one only if a communication depends on it."""
        if task not in self._ended:
            self._ended[task] = threading.Event()
            if task in self._end_s:
                self._ended[task].set()
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


def make_streams(device: torch.device) -> Streams:
    """The streams of a rank that computes on `device`."""
    return CudaStreams(TorchCudaDriver(device)) if device.type == "cuda" else ThreadStreams()
