"""Plain values between ranks: as JSON, never as a pickle, because whoever reached a rank's socket could run code by one.

Also how ranks wait for rank 0 while it works alone (scores, decides): without a limit of time, through the store. A
collective would give up after its timeout, however well rank 0 is.
"""

from __future__ import annotations

import json
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from parsim.data.blocks.exchange import on_process_group
from parsim.execute.processes.group import ProcessPlace
from parsim.execute.processes.heartbeat import pulse

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.5
_PAUSE_SHARE = 1 / 16
"""Pause over time waited so far: a rank goes on at most so much later, and asks some hundred times in a long wait."""
T = TypeVar("T")


def meet() -> None:
    with pulse().waiting():
        dist.barrier()


def gather_values(value: Any) -> list[Any]:
    """What every rank gave, by rank, on all ranks. Tuples arrive as lists."""
    with pulse().waiting():
        return on_process_group(device=str(default_device())).gather(value)


def value_of_rank_0(value: Any) -> Any:
    """What rank 0 gave, on all ranks; the others' value is not read."""
    content = json.dumps(value, default=dict).encode() if dist.get_rank() == 0 else b""
    size = torch.tensor([len(content)], device=default_device())
    with pulse().waiting():
        dist.broadcast(size, src=0)
    held = torch.zeros(int(size), dtype=torch.uint8, device=size.device)
    if content:
        held.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    with pulse().waiting():
        dist.broadcast(held, src=0)
    return json.loads(bytes(held.cpu().numpy()))


def done_by_rank_0(place: ProcessPlace, work: Callable[[], T]) -> T | None:
    """Rank 0 does the work, and returns its result; the others wait for it, however long it takes, and return None. Every rank
    calls it. Where there is no store, the others wait in a barrier."""
    _calls[place.attempt] += 1  # the same number on every rank
    key = f"done by rank 0/{_calls[place.attempt]}"
    result = work() if dist.get_rank() == 0 else None
    if place.store is None:
        meet()
    elif dist.get_rank() == 0:
        place.store.set(key, "yes")
    else:
        began_s = time.monotonic()
        with pulse().waiting():
            while not place.store.check([key]):
                pause_s = _PAUSE_SHARE * (time.monotonic() - began_s)
                time.sleep(min(max(pause_s, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S))
    return result


_calls: Counter[int] = Counter()
"""Works of rank 0 so far, by attempt."""


def default_device() -> torch.device:
    on_gpu = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


# One clock for the ranks of several machines, whose monotonic clocks count from a start of their own each.
#
# Ranks of one machine share a clock, and their times are compared as they are. Those of others look at theirs right behind a
# barrier, which all ranks leave at nearly the same moment. They do so before and after what is measured. In between, the
# difference to rank 0's clock is taken to change evenly: clocks of two machines run apart by some microseconds in a second.
#
# Leaves out the ten or so microseconds in which ranks leave a barrier, and clocks that are corrected on the way.


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
    looks_s = []
    for _ in range(LOOKS):
        meet()
        looks_s.append(_now_s())
    everyone = gather_values(looks_s)
    here = everyone[machines.index(machines[dist.get_rank()])]  # of one rank for all of a machine, which share a clock
    ahead_s = statistics.median(one - other for one, other in zip(here, everyone[0], strict=True))
    return ClockLook(statistics.median(looks_s), ahead_s)


def on_rank_0(before: ClockLook, after: ClockLook) -> Callable[[float], float]:
    """From seconds on this machine's clock to those on rank 0's, by looks before and after what was measured."""
    passed_s, drift_s = after.own_s - before.own_s, after.ahead_s - before.ahead_s
    rate = drift_s / passed_s if passed_s > 0 else 0.0
    return lambda own_s: own_s - before.ahead_s - rate * (own_s - before.own_s)


def _now_s() -> float:
    return time.perf_counter()


def _machine() -> str:
    """What ranks that share a clock have in common. Containers of one machine do, whatever their names are."""
    return _BOOT.read_text().strip() if _BOOT.is_file() else socket.gethostname()
