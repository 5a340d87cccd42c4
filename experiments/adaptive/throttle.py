"""Slow one process down by a factor, from outside and without root: it is stopped for a part of every short period."""

from __future__ import annotations

import os
import signal
import threading
import time

PERIOD_S = 0.02


class Throttle:
    """While the context lasts, a process has 1 / `factor` of the time.

    Attributes:
        pid: of the process; all of its threads stop. factor: above 1.
    """

    def __init__(self, pid: int, factor: float) -> None:
        if not factor > 1:
            raise ValueError(f"a process is slowed by a factor above 1, got {factor}")
        self.pid, self.factor = pid, factor
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Throttle:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        running_s = PERIOD_S / self.factor
        try:
            while not self._over.is_set():
                os.kill(self.pid, signal.SIGSTOP)
                time.sleep(PERIOD_S - running_s)
                os.kill(self.pid, signal.SIGCONT)
                self._over.wait(running_s)
        except ProcessLookupError:
            return  # it has ended: there is nothing left to slow down
        finally:
            _go_on(self.pid)


def _go_on(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return
