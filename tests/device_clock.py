"""A GPU whose time is computed: the host queues, which takes its time; the device runs in order what was queued."""

from __future__ import annotations

from collections.abc import Callable


class VirtualDevice:
    """Attributes:
    host_s: the host's clock. free_s: when the device will have run everything queued so far. log: what was queued or waited
        for, in order. launch_s: of the host, for each kernel.
    """

    def __init__(self, *, launch_s: float = 10e-6) -> None:
        self.host_s = 0.0
        self.free_s = 0.0
        self.launch_s = launch_s
        self.log: list[str] = []
        self.holds_s: list[float] = []
        self._marks: list[float] = []

    def launch(self, seconds: float, name: str = "kernel") -> None:
        """A kernel of so many seconds: the host spends `launch_s`, and the device starts it when it is free and told."""
        self.log.append(name)
        self.host_s += self.launch_s
        self.free_s = max(self.free_s, self.host_s) + seconds

    def kernel(self, seconds: float, name: str = "kernel") -> Callable[[], None]:
        return lambda: self.launch(seconds, name)

    # --- as `parsim.execute.processes.event_clock.Driver` ---

    def now_s(self) -> float:
        return self.host_s

    def hold(self, seconds: float) -> None:
        self.holds_s.append(seconds)
        self.launch(seconds, "hold")

    def mark(self) -> int:
        self.log.append("mark")
        self._marks.append(max(self.free_s, self.host_s))
        return len(self._marks) - 1

    def passed(self, mark: int) -> bool:
        return self._marks[mark] <= self.host_s

    def synchronize(self) -> None:
        self.log.append("synchronize")
        self.host_s = max(self.host_s, self.free_s)

    def seconds_between(self, start: int, end: int) -> float:
        if not (self.passed(start) and self.passed(end)):
            raise AssertionError("an event was read before the device had come past it")
        return self._marks[end] - self._marks[start]
