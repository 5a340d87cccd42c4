"""How a GPU rank issues its tasks: a CUDA stream per resource, in issue order.

Events carry the dependencies, so the host runs ahead of the GPU.

Every call goes to a `Driver` (`parsim.execute.cuda.driver`), so tests can check the order of launches, waits and records
without a GPU. The tests' driver has virtual time and feeds torch's CUDA sanitizer.

A communication may be submitted before what it needs has been enqueued: it waits here, first in first out per stream, until
the last of its dependencies is enqueued. Every task is looked at once per dependency, so a step costs time linear in its tasks
and dependencies (times the logarithm of how many are released at once).

Memory of the computation that a communication reads or fills is held here until the computation's stream waits for that
communication, directly or through others (`lent`). So the program alone decides when it is free. Rejected: `record_stream`
(`used`). The allocator then gives memory back once the device has come past the communication. The host is hundreds of kernels
ahead of that, and asks for new memory meanwhile: with ZeRO 3 the parameters of many buckets lay beside one another.
What a communication allocated itself is `used`, as autograd may keep it for a later task. A transfer is given its tensor
`unowned`: ProcessGroupNCCL calls `record_stream` for what is sent and received, also where its caller waits for the transfer.
The allocator passes over memory that it has not handed out itself.

The host waits for its own events only, never for the whole device. It waits for one event at the beginning of a step,
which aligns the GPU's clock with the host's, and for the last event of each stream at the end. Leaves out how far the
host was behind while it issued.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from parsim.execute.cuda.driver import Driver
from parsim.execute.processes.heartbeat import pulse
from parsim.execute.streams import Operation, TaskTime
from parsim.program.taskgraph import HOST

S = TypeVar("S")
E = TypeVar("E")


class _Waiting(NamedTuple):
    """A communication that was submitted, by the order of submission."""

    number: int
    task: int
    stream: str
    dependencies: tuple[int, ...]
    operation: Operation


class _End(NamedTuple):
    """Where a task ends, and by stream the last task (in the order of issue) that whoever waits for it is behind."""

    stream: Any
    event: Any
    behind: Mapping[Any, int]


class _Timed(NamedTuple):
    task: int
    stream: str
    start: Any
    end: Any


Fence = tuple[Any, Any]
"""(stream, event): what was launched there before."""


class CudaStreams(Generic[S, E]):
    """See the module. The stream that is current when this is made carries the computation.

    Attributes: loads_ahead: the batch of the next step is copied while this step computes (`load_ahead`).
    """

    loads_ahead = queues = True

    def __init__(self, driver: Driver[S, E]) -> None:
        self._driver = driver
        self._compute = driver.current()
        self._streams: dict[str, S] = {}
        self._ahead: E | None = None
        self._submitted = self._issued = 0
        self._forget()

    def _forget(self) -> None:
        self._ends: dict[int, _End] = {}
        self._behind: dict[S, dict[S, int]] = {}
        self._lent: dict[S, deque[tuple[int, Tensor]]] = {}
        self._timed: list[_Timed] = []
        self._last: dict[str, E] = {}
        self._base: tuple[float, E] | None = None
        self._queues: dict[str, deque[_Waiting]] = {}
        self._missing: dict[int, int] = {}
        self._dependents: dict[int, list[_Waiting]] = {}
        self._ready: list[_Waiting] = []

    def submit(self, task: int, stream: str, dependencies: Sequence[int], operation: Operation) -> None:
        """Communication: enqueued as soon as all it depends on is, and those before it on its stream are."""
        entry = _Waiting(self._submitted, task, stream, tuple(dependencies), operation)
        self._submitted += 1
        missing = [index for index in entry.dependencies if index not in self._ends]
        self._missing[entry.number] = len(missing)
        for index in missing:
            self._dependents.setdefault(index, []).append(entry)
        queue = self._queues.setdefault(stream, deque())
        queue.append(entry)
        self._look_at(queue)
        self._release()

    def compute(self, task: int, stream: str, dependencies: Sequence[int], operation: Operation) -> None:
        """Computation: enqueued now; all it depends on is."""
        self._enqueue(task, stream, dependencies, operation, self._compute)
        self._release()

    def load(self, task: int, stream: str, dependencies: Sequence[int], operation: Operation) -> None:
        """Loading of this step's batch, on the copy engine, which nothing but its readers waits for."""
        self._enqueue(task, stream, dependencies, operation, self._stream(stream))
        self._release()

    def loaded(self, task: int) -> None:
        """This step's batch was loaded ahead, in the step before: its readers wait for that."""
        assert self._ahead is not None, "load_ahead was called in the step before"
        ahead, self._ahead = self._ahead, None
        self._enqueued(task, self._stream(HOST), ahead)
        self._release()

    def load_ahead(self, task: int, stream: str, operation: Operation) -> None:
        """Load the next step's batch. It counts as this step's `task`, unless this step had to load its own batch too."""
        loaded_its_own = any(entry.task == task for entry in self._timed)
        timed = self._launch(task, stream, operation, self._stream(stream))
        self._ahead = timed.end
        if not loaded_its_own:
            self._timed.append(timed)

    def finish(self) -> list[TaskTime]:
        """Wait for everything of this step, and for what it loaded ahead."""
        waiting = [entry.task for queue in self._queues.values() for entry in queue]
        assert not waiting, f"tasks {waiting} depend on tasks that were never issued"
        with pulse().waiting():
            for event in self._last.values():
                self._driver.finish(event)
        times: list[TaskTime] = []
        if self._base is not None:
            host_s, base = self._base
            for task, stream, start, end in self._timed:
                seconds = (host_s + self._driver.elapsed_s(base, event) for event in (start, end))
                times.append(TaskTime(task, stream, *seconds))
        self._forget()
        return times

    def close(self) -> None:
        for event in [*self._last.values(), *([] if self._ahead is None else [self._ahead])]:
            self._driver.finish(event)
        self._ahead = None
        self._forget()

    def used(self, tensor: Tensor) -> None:
        """Whoever issues now reads the tensor on its stream, wherever it was allocated."""
        self._driver.used(tensor, self._driver.current())

    def lent(self, tensor: Tensor) -> None:
        """The communication that issues now uses memory of the computation, and only until its task ends."""
        stream = self._driver.current()
        if stream != self._compute:
            self._lent.setdefault(stream, deque()).append((self._issued, tensor))

    def unowned(self, tensor: Tensor) -> Tensor:
        """The tensor as a transfer is to have it, whose memory is `lent` or `used`."""
        return self._driver.unowned(tensor)

    def fence(self) -> Fence:
        """What has been launched so far by whoever issues now."""
        stream = self._driver.current()
        return stream, self._driver.record(stream)

    def after(self, fence: Fence) -> None:
        """What is launched next by whoever issues now begins after the fence."""
        stream, event = fence
        current = self._driver.current()
        if current != stream:
            self._driver.wait(current, event)

    def _stream(self, name: str) -> S:
        """Communication comes before computation that wants the same processors: others wait for it. Copies need none."""
        if name not in self._streams:
            self._streams[name] = self._driver.stream(urgent=name != HOST)
        return self._streams[name]

    def _look_at(self, queue: deque[_Waiting]) -> None:
        if queue and not self._missing[queue[0].number]:
            heapq.heappush(self._ready, queue[0])

    def _release(self) -> None:
        """Enqueue communication whose turn it is, in the order of submission where several can begin."""
        while self._ready:
            entry = heapq.heappop(self._ready)
            queue = self._queues[entry.stream]
            self._enqueue(entry.task, entry.stream, entry.dependencies, entry.operation, self._stream(entry.stream))
            queue.popleft()  # only now, so that the next one is looked at once
            del self._missing[entry.number]
            self._look_at(queue)

    def _enqueue(self, task: int, stream: str, dependencies: Sequence[int], operation: Operation, on: S) -> None:
        for index in dependencies:
            assert index in self._ends, f"task {task} depends on task {index}, which was not issued before it"
            end = self._ends[index]
            if end.stream != on:
                self._driver.wait(on, end.event)
                self._comes_behind(on, end)
        timed = self._launch(task, stream, operation, on)
        self._timed.append(timed)
        self._enqueued(task, on, timed.end)

    def _comes_behind(self, stream: S, end: _End) -> None:
        """A stream waits for the end of a task. The computation gets back what it had lent to whom it now comes behind."""
        behind = self._behind.setdefault(stream, {})
        for other, number in end.behind.items():
            if number > behind.get(other, 0):
                behind[other] = number
                lent = self._lent.get(other) if stream == self._compute else None
                while lent and lent[0][0] <= number:
                    lent.popleft()

    def _launch(self, task: int, stream: str, operation: Operation, on: S) -> _Timed:
        driver = self._driver
        self._issued += 1
        if self._base is None:
            base = driver.record(self._compute)
            driver.finish(base)
            self._base = driver.host_s(), base
        with driver.on(on):
            start = driver.record(on)
            operation()
            end = driver.record(on)
        self._last[stream] = end
        return _Timed(task, stream, start, end)

    def _enqueued(self, task: int, on: S, end: E) -> None:
        self._ends[task] = _End(on, end, {**self._behind.get(on, {}), on: self._issued})
        for entry in self._dependents.pop(task, ()):
            self._missing[entry.number] -= 1
            if not self._missing[entry.number] and self._queues[entry.stream][0] is entry:
                heapq.heappush(self._ready, entry)
