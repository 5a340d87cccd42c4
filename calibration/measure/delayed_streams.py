"""Streams of a calibration, on which computation can be made to wait for communication as it does in tensor parallelism."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from parsim.execute.streams import Operation, Streams, TaskTime
from parsim.graph.task import COMPUTE

FIRST_CALL = 1_000_000_000
"""The number of the first exchange, beyond those of all tasks."""


class Pausing:
    """Streams on which each computation can be made to wait for a call of `before` that begins when the last one has ended.

    Attributes: computed_s: processor seconds of each computation of the step at hand or just finished, and of handing over the
        call before it.
    """

    loads_ahead = False

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._last: int | None = None
        self._calls = 0
        self.before: Operation | None = None
        self.computed_s: list[float] = []

    def submit(self, task: int, stream: str, dependencies: Sequence[int], operation: Operation) -> None:
        self._streams.submit(task, stream, dependencies, operation)

    def compute(self, task: int, stream: str, dependencies: Sequence[int], operation: Operation) -> None:
        if self._last is None:
            self.computed_s = []
        handing_s = time.thread_time()
        if self.before is not None and self._last is not None and stream == COMPUTE:
            call = FIRST_CALL + self._calls
            self._calls += 1
            self._streams.submit(call, "tp", [self._last], self.before)
            dependencies = [*dependencies, call]
        handing_s = time.thread_time() - handing_s

        def counted() -> None:
            begin_s = time.thread_time()
            operation()
            if stream == COMPUTE:
                self.computed_s.append(handing_s + time.thread_time() - begin_s)

        self._streams.compute(task, stream, dependencies, counted)
        self._last = task

    def load(self, task: int, stream: str, dependencies: Sequence[int], operation: Operation) -> None:
        self.compute(task, stream, dependencies, operation)

    def loaded(self, task: int) -> None:
        self._streams.loaded(task)

    def load_ahead(self, task: int, stream: str, operation: Operation) -> None:
        self._streams.load_ahead(task, stream, operation)

    def used(self, tensor: Tensor) -> None:
        self._streams.used(tensor)

    def fence(self) -> Any:
        return self._streams.fence()

    def after(self, fence: Any) -> None:
        self._streams.after(fence)

    def finish(self) -> list[TaskTime]:
        self._last = None
        return [entry for entry in self._streams.finish() if entry.task < FIRST_CALL]

    def close(self) -> None:
        self._streams.close()
