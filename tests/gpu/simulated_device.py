"""A device with a queue and a host in front of it, in exact arithmetic: launches, sleeps and marks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from calibration.gpu.driver import QueueMark


class SimulatedDevice:
    """Attributes:
    launch_s, mark_s: of the host. host_now_s, free_s: where host and device are. largest_queue: most work between two waits.
    """

    queues = True
    name = "simulated"

    def __init__(self, *, launch_s: float = 10e-6, mark_s: float = 1e-6, cache_bytes: int = 1 << 20) -> None:
        self.device = torch.device("cpu")
        self.launch_s, self.mark_s = launch_s, mark_s
        self.cache_bytes, self.memory_bytes = cache_bytes, 1 << 32
        self.host_now_s = self.free_s = 0.0
        self.marks: list[float] = []
        self.queued = self.largest_queue = 0
        self.sleeps: list[float] = []

    def kernel(self, seconds: float) -> Callable[[], None]:
        """A call that takes so long on the device."""

        def call() -> None:
            self._enqueue(self.launch_s, seconds)

        return call

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self._enqueue(self.launch_s, seconds)

    def mark(self) -> QueueMark:
        self.host_now_s += self.mark_s
        self.marks.append(max(self.free_s, self.host_now_s))
        return QueueMark(len(self.marks) - 1)

    def passed(self, mark: QueueMark) -> bool:
        return self.marks[mark.number] <= self.host_now_s

    def seconds(self, begin: QueueMark, end: QueueMark) -> float:
        return self.marks[end.number] - self.marks[begin.number]

    def wait(self) -> None:
        self.host_now_s = max(self.host_now_s, self.free_s)
        self.queued = 0

    def host_s(self) -> float:
        return self.host_now_s

    def forget(self) -> None:
        self.marks.clear()

    def _enqueue(self, host_s: float, device_s: float) -> None:
        self.host_now_s += host_s
        self.free_s = max(self.free_s, self.host_now_s) + device_s
        self.queued += 1
        self.largest_queue = max(self.largest_queue, self.queued)
