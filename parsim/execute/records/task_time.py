"""When a task ran, as one rank saw it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

Operation = Callable[[], None]


class TaskTime(NamedTuple):
    """Seconds on the host's monotonic clock, which all ranks of one host share (`parsim.execute.processes.clocks`)."""

    task: int
    stream: str
    ready_s: float
    end_s: float
