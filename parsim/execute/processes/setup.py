"""One rank, one core, one thread: the setup of every worker process, the same in calibration and execution.

Threads made later (gloo's, autograd's) inherit the affinity: call `prepare_rank` before `init_process_group`.

Every thread has a malloc arena of its own: a gloo thread waited for the arena that the computation held, while holding a
lock that gloo's loop polls with priority.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
"""Parameters of glibc's mallopt (malloc.h)."""

ARENAS = 256
"""More than a rank has threads; threads beyond would share them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinning:
    """Attributes: core (None: this system cannot pin), threads, shared_by (ranks on that core; >1 share its time), first (no
    rank before this one is on that core)."""

    core: int | None
    threads: int
    shared_by: int
    first: bool = True


def available_cores() -> tuple[int, ...]:
    """Cores this process may use, sorted; respects cgroup cpusets and `taskset`."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


_before_pinning: list[tuple[int, ...]] = []


def cores_before_pinning() -> tuple[int, ...]:
    """Cores that this process might use before `prepare_rank` gave it one of them; else those that it may use."""
    return _before_pinning[0] if _before_pinning else available_cores()


def core_of_rank(local_rank: int, cores: tuple[int, ...]) -> int:
    """Ranks go round the cores: rank r on core r mod n."""
    return cores[local_rank % len(cores)]


def prepare_rank(local_rank: int, local_world_size: int, *, device: str = "cpu") -> Pinning:
    """Pin this process to one core and set its threads to one; call once, first thing in a worker. With `device="cuda"` it
    keeps its cores: the host only launches kernels (`init_group` selects the GPU). Leaves out NUMA placement."""
    import torch

    if device == "cuda":
        return Pinning(core=None, threads=torch.get_num_threads(), shared_by=1)
    torch.set_num_threads(1)
    keep_freed_memory()
    cores = available_cores()
    if not _before_pinning:
        _before_pinning.append(cores)
    core = core_of_rank(local_rank, cores) if hasattr(os, "sched_setaffinity") else None
    if core is not None:
        os.sched_setaffinity(0, {core})
    shared_by = -(-local_world_size // len(cores))
    return Pinning(core=core, threads=1, shared_by=shared_by, first=local_rank < len(cores))


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory, so that a step does not fault in again the pages the last one gave back: no mapping of
    large arrays, no trimming. By default every array above 32 MiB is mapped anew, and times depend on what ran before: `x + 1`
    on 64 MiB took 42 ms, not 6 ms (2-core virtual machine). Every thread has its own arena. With a shared one, a communicating
    thread that waits for the arena of the computing thread holds a lock of gloo. Gloo's loop has priority over the computation
    and polls that lock, so one step in ten stood still for a second.

    Returns False where there is no glibc. The heap settles within about five repeats, somewhat above its peak, and stays so.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all([mallopt(M_MMAP_MAX, 0), mallopt(M_TRIM_THRESHOLD, -1), mallopt(M_ARENA_MAX, ARENAS)])


def give_back_freed_memory() -> bool:
    """Let the system have the pages of freed memory again, once; False where there is no glibc or nothing to give back."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None
    return trim is not None and bool(trim(0))


# Communication first: its threads run as soon as they wake, where the system lets them.
#
# With gloo a rank's computation and communication share a core. A thread that a message wakes up waits there until the
# computing thread has used its time slice. That takes some milliseconds, in which the peer waits too. Threads under real-time
# round-robin scheduling (Linux, SCHED_RR) do not wait; they sleep but for the moments in which there is something to send or to
# add. On a 2-core virtual machine steps of two ranks got 17 to 54% shorter (`experiments/this_machine/priority.py`).
#
# All of them have one priority. Gloo's loop over its sockets and the threads that use them wait for one another by polling, and
# a thread with higher priority would poll forever. What the computation holds none of them may wait for: see
# `parsim.execute.processes.setup.keep_freed_memory`. A call in a thousand still takes 50 to 100 ms, when one looks for a whole
# time slice.
#
# It takes root, CAP_SYS_NICE or a limit `rtprio` of 1 (`ulimit -r`). Elsewhere everything works as usual, more slowly.


SWITCH = "PARSIM_PRIORITY"
"""Environment variable: 0 leaves all threads alike."""

LOWEST = 1
"""Real-time priority: above everything usual, below whatever else the system runs so."""


def take_priority() -> bool:
    """Put the calling thread before usual ones; False where the system does not let it, or SWITCH says no."""
    if not hasattr(os, "sched_setscheduler") or os.environ.get(SWITCH) == "0":
        return False
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(LOWEST))
    except OSError:
        return False
    return True


def is_granted() -> bool:
    with threads_with_priority() as has_priority:
        return has_priority


@contextlib.contextmanager
def threads_with_priority() -> Iterator[bool]:
    """Threads begun inside have priority, as they inherit it; the calling one only has it inside. Yields whether they do."""
    if not hasattr(os, "sched_getscheduler"):
        yield False
        return
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    has_priority = take_priority()
    try:
        yield has_priority
    finally:
        if has_priority:
            os.sched_setscheduler(0, policy, parameters)
