"""Where a race is run, and what disturbs it: two ranks over a link that can be shaped, or on the loopback interface."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from experiments.this_machine.namespaces import ShapedPair, possible, shaped_pair
from parsim.execute.processes.launch import launch
from parsim.execute.processes.output import rank_processes

PERIOD_S = 0.02


class Throttle:
    """While the context lasts, a process has 1 / `factor` of the time: all of its threads are stopped for a part of every
    period."""

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
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)


RANKS = 2
SLOW_RANK, THROTTLE = 1, 5.0
"""Which rank is throttled, and how many times as long its work takes then."""
CALM_BYTES_PER_S, RATE_BYTES_PER_S = 625e6, 12.5e6
"""Of the link: 5 Gbit/s at first, 100 Mbit/s when it is disturbed."""
AHEAD_S = 1.5
"""Ranks say at most once in a second where they are; in between, the step is reckoned from their pace."""


@dataclass(kw_only=True)
class Arena:
    """Attributes: link: between the ranks' namespaces; None: they meet on the loopback interface. why: there is no link."""

    link: ShapedPair | None
    why: str = ""

    def run(self, job: Path, on_text: Callable[[str], None]) -> None:
        """Launch the two ranks and wait for them. Raises ExecutionError as the launchers do."""
        (self.link or launch)(job, RANKS, on_line=on_text, timeout_s=240.0)

    @contextlib.contextmanager
    def disturbed(self, kind: str) -> Iterator[None]:
        """Args: kind: "link" shapes the link, "throttled" stops a rank again and again; both until the context is left."""
        if kind == "link":
            assert self.link is not None, self.why
            self.link.shape(RATE_BYTES_PER_S)
            try:
                yield
            finally:
                self.link.shape(CALM_BYTES_PER_S)
            return
        pid = rank_processes(os.getpid()).get(SLOW_RANK)
        if pid is None:
            raise RuntimeError(f"no process of rank {SLOW_RANK} runs below {os.getpid()}")
        with Throttle(pid, THROTTLE):
            yield


@contextlib.contextmanager
def arena() -> Iterator[Arena]:
    """Two network namespaces with a link where this machine can have them."""
    why = possible()
    if why:
        yield Arena(link=None, why=why)
        return
    with shaped_pair(CALM_BYTES_PER_S, changes=True) as pair:
        yield Arena(link=pair)


@dataclass(kw_only=True)
class AtStep:
    """Enters a context once a training has made so many steps, as far as its progress tells. Leave it with `close`.

    Attributes: step: after which. begin: enters it. since: when that was, in seconds of `time.perf_counter`; None: not yet.
    """

    step: int
    begin: Callable[[], contextlib.AbstractContextManager[None]]
    since: float | None = None
    _held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _last: tuple[int, float] | None = None
    _timer: threading.Timer | None = None

    def seen(self, step: int) -> None:
        """The training has made so many steps by now."""
        now = time.perf_counter()
        if self.since is not None or self._timer is not None:
            return
        if step >= self.step:
            self._enter()
        elif self._last is not None:
            pace = (step - self._last[0]) / (now - self._last[1])
            if pace > 0 and (self.step - step) / pace < AHEAD_S:
                self._timer = threading.Timer((self.step - step) / pace, self._enter)
                self._timer.start()
        self._last = (step, now)

    def _enter(self) -> None:
        self._held.enter_context(self.begin())
        self.since = time.perf_counter()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        self._held.close()
