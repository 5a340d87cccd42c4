"""Streams of a calibration. Computation can wait for communication, as in tensor parallelism. On a GPU it can wait until
the host has queued it, so its events time the device alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from parsim.execute.cuda.driver import DeviceClock, longer_hold
from parsim.execute.streams import Operation, Streams, TaskTime
from parsim.program.taskgraph import COMPUTE

FIRST_CALL = 1_000_000_000
"""The number of the first exchange, beyond those of all tasks."""

MOST_LATE = 3
"""A task that is not queued in time so often in a row, each time behind a hold longer than it had needed before, waits for the
device itself. fp16 does: whether a gradient has overflowed decides whether there is an update."""


class Pausing:
    """Streams on which each computation can be made to wait for a call of `before` that begins when the last one has ended.

    Attributes:
        computed_s: processor seconds of each computation of the step at hand or just finished, and of handing over the call
            before it.
        holding: each computation is queued on an idle device behind a kernel that waits, so that none of its time is the host's
            (`parsim.execute.cuda.driver`); nothing without a driver. A task that waits for the device is not held: no
            hold is long enough, and the host would wait for the hold too. It still begins on an idle device.
        issue_s: of the step at hand or just finished, by task: seconds of the host in each computation. On a GPU it queues
            kernels meanwhile, and under `holding` it waits for nothing.
        between_s: of the step at hand or just finished: seconds of the host from the end of each computation to the beginning
            of the next. Without `holding` they are those of the interpreter.
        hidden: whether every computation held so far in this step was queued before the device began with it.
        watching: without `holding`, look whether the device has begun with a computation when it is queued.
        ahead: of the step at hand or just finished, the computations with which it had not: their events time the device alone,
            in the state that training leaves it in.
    """

    loads_ahead = queues = False

    def __init__(self, streams: Streams, driver: DeviceClock | None = None) -> None:
        self._streams = streams
        self._driver = driver
        self._last: int | None = None
        self._calls = 0
        self._known_s: dict[int, float] = {}
        self._late: dict[int, int] = {}
        self.before: Operation | None = None
        self.holding = self.watching = False
        self.ahead: set[int] = set()
        self.computed_s: list[float] = []
        self.issue_s: dict[int, float] = {}
        self.between_s: list[float] = []
        self._ended_s: float | None = None
        self.hidden = True

    @property
    def holds(self) -> bool:
        """Whether computation can be held here: on a GPU."""
        return self._driver is not None

    def submit(self, task: int, stream: str, dependencies: Sequence[int], operation: Operation) -> None:
        self._streams.submit(task, stream, dependencies, operation)

    def compute(self, task: int, stream: str, dependencies: Sequence[int], operation: Operation) -> None:
        if self._last is None:
            self.computed_s, self.issue_s, self.between_s, self._ended_s = [], {}, [], None
            self.hidden, self.ahead = True, set()
        handing_s = time.thread_time()
        if self.before is not None and self._last is not None and stream == COMPUTE:
            call = self._extra()
            self._streams.submit(call, "tp", [self._last], self.before)
            dependencies = [*dependencies, call]
        handing_s = time.thread_time() - handing_s
        held = self._hold(task) if stream == COMPUTE else []

        def counted() -> None:
            begun = self._driver.mark() if self._driver is not None and self.watching and stream == COMPUTE else None
            begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
            operation()
            if stream == COMPUTE:
                self.computed_s.append(handing_s + time.thread_time() - begin_cpu_s)
                end_s = time.perf_counter()
                self.issue_s[task] = end_s - begin_s
                if self._ended_s is not None:
                    self.between_s.append(begin_s - self._ended_s)
                self._ended_s = end_s
                self._queued(task, held)
            if begun is not None and self._driver is not None and not self._driver.passed(begun):
                self.ahead.add(task)

        self._streams.compute(task, stream, dependencies, counted)
        self._last = task

    def _hold(self, task: int) -> list[Any]:
        """Let the device wait, on the stream that computes, for about as long as the host will need to queue this task.

        Returns: the event behind the wait; nothing where nothing waits.
        """
        driver = self._driver
        if driver is None or not self.holding:
            return []
        held: list[Any] = []
        hold_s = longer_hold(self._known_s.get(task, 0.0))

        def wait() -> None:
            driver.hold(hold_s)
            held.append(driver.mark())

        driver.synchronize()
        if self._late.get(task, 0) >= MOST_LATE:
            return []
        self._streams.compute(self._extra(), COMPUTE, [], wait)
        return held

    def _queued(self, task: int, held: Sequence[Any]) -> None:
        if not held or self._driver is None:
            return
        late, known_s = self._driver.passed(held[0]), self._known_s.get(task, 0.0)
        expected = 0 < known_s < longer_hold(known_s)
        self._late[task] = self._late.get(task, 0) + 1 if late and expected else 0
        # a first call loads libraries and takes long; what is known of a task falls by half a step
        self._known_s[task] = max(self.issue_s[task], 0.5 * known_s)
        self.hidden = self.hidden and not late

    def _extra(self) -> int:
        self._calls += 1
        return FIRST_CALL + self._calls - 1

    def load(self, task: int, stream: str, dependencies: Sequence[int], operation: Operation) -> None:
        self.compute(task, stream, dependencies, operation)

    def loaded(self, task: int) -> None:
        self._streams.loaded(task)

    def load_ahead(self, task: int, stream: str, operation: Operation) -> None:
        self._streams.load_ahead(task, stream, operation)

    def used(self, tensor: Tensor) -> None:
        self._streams.used(tensor)

    def lent(self, tensor: Tensor) -> None:
        self._streams.lent(tensor)

    def unowned(self, tensor: Tensor) -> Tensor:
        return self._streams.unowned(tensor)

    def fence(self) -> Any:
        return self._streams.fence()

    def after(self, fence: Any) -> None:
        self._streams.after(fence)

    def finish(self) -> list[TaskTime]:
        self._last = None
        return [entry for entry in self._streams.finish() if entry.task < FIRST_CALL]

    def close(self) -> None:
        self._streams.close()
