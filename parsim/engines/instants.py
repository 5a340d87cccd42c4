"""The end of an instant: work that must wait until all other events of one time have happened."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import simpy


class Instants:
    """A SimPy environment whose instants have an end: first those who came are lined up, then paces are set."""

    def __init__(self) -> None:
        self.environment = simpy.Environment()
        self._line_up: list[Callable[[], None]] = []
        self._set_paces: list[Callable[[], None]] = []
        self._armed = False

    def line_up(self, action: Callable[[], None]) -> None:
        """Do `action` when nothing else is left in this instant; it may start tasks."""
        self._line_up.append(action)
        self._arm()

    def set_paces(self, action: Callable[[], None]) -> None:
        """Do `action` when nobody is left to line up either."""
        self._set_paces.append(action)
        self._arm()

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            self.environment.timeout(0).callbacks.append(lambda _: self._look())

    def _look(self) -> None:
        self._armed = False
        if self.environment.peek() > self.environment.now:
            due = self._line_up or self._set_paces
            actions = due.copy()
            due.clear()
            for action in actions:
                action()
        if self._line_up or self._set_paces:
            self._arm()


class Counter:
    """A resource that serves one task at a time, first come first served.

    Those who come in one instant are lined up by rank, then step, then task.
    """

    def __init__(self, instants: Instants, serve: Callable[[tuple[int, int]], None]) -> None:
        self.served: list[tuple[int, int]] = []
        self._instants = instants
        self._serve = serve
        self._line: deque[tuple[int, int]] = deque()
        self._come: list[tuple[int, tuple[int, int]]] = []
        self._busy = False

    def ask(self, key: tuple[int, int], rank: int) -> None:
        """The task (step, task) of `rank` has come."""
        if not self._come:
            self._instants.line_up(self._line_up)
        self._come.append((rank, key))

    def leave(self) -> None:
        """The task that was served has ended."""
        self._busy = False
        self._next()

    def _line_up(self) -> None:
        self._line.extend(key for _, key in sorted(self._come))
        self._come.clear()
        self._next()

    def _next(self) -> None:
        if self._line and not self._busy:
            self._busy = True
            key = self._line.popleft()
            self.served.append(key)
            self._serve(key)
