"""One clock for the ranks of several machines, whose monotonic clocks count from a start of their own each.

Ranks of one machine share a clock, and their times are compared as they are. Those of others look at theirs right behind a
barrier, which all ranks leave at nearly the same moment. They do so before and after what is measured. In between, the
difference to rank 0's clock is taken to change evenly: clocks of two machines run apart by some microseconds in a second.

Leaves out the ten or so microseconds in which ranks leave a barrier, and clocks that are corrected on the way.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from parsim.execute.processes.exchange import gather_values, meet

LOOKS = 9
"""Barriers of which the median difference counts."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class ClockLook(NamedTuple):
    """Seconds on this machine's clock, and by how much it was ahead of rank 0's then."""

    own_s: float
    ahead_s: float


def look() -> ClockLook:
    """Compare the clocks of all ranks, each of which calls it at once."""
    machines = gather_values(_machine())
    if len(set(machines)) == 1:
        return ClockLook(_now_s(), 0.0)
    own = []
    for _ in range(LOOKS):
        meet()
        own.append(_now_s())
    everyone = gather_values(own)
    here = everyone[machines.index(machines[dist.get_rank()])]  # of one rank for all of a machine, which share a clock
    ahead_s = statistics.median(one - other for one, other in zip(here, everyone[0], strict=True))
    return ClockLook(statistics.median(own), ahead_s)


def on_rank_0(before: ClockLook, after: ClockLook) -> Callable[[float], float]:
    """From seconds on this machine's clock to those on rank 0's.

    Args:
        before, after: looks around what was measured.
    """
    passed_s, drift_s = after.own_s - before.own_s, after.ahead_s - before.ahead_s
    rate = drift_s / passed_s if passed_s > 0 else 0.0
    return lambda own_s: own_s - before.ahead_s - rate * (own_s - before.own_s)


def _now_s() -> float:
    """The clock of `TaskTime` and of rounds."""
    return time.perf_counter()


def _machine() -> str:
    """What ranks that share a clock have in common. Containers of one machine do, whatever their names are."""
    return _BOOT.read_text().strip() if _BOOT.is_file() else socket.gethostname()
