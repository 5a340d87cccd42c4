"""One rank, one core, one thread: the setup of every worker process, the same in calibration and execution.

Threads made later (gloo's, autograd's) inherit the affinity: call `prepare_rank` before `init_process_group`.
"""

from __future__ import annotations

import ctypes
import os
import sys
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
    """Pin this process and set its threads; call once, first thing in a worker.

    On the CPU a rank gets one core and one thread. With `device="cuda"` it keeps its cores: the host only launches kernels
    (`parsim.execute.processes.group.init_group` selects the GPU). Leaves out NUMA placement.
    """
    import torch

    if device == "cuda":
        return Pinning(core=None, threads=torch.get_num_threads(), shared_by=1)
    torch.set_num_threads(1)
    keep_freed_memory()
    cores = available_cores()
    if not _before_pinning:
        _before_pinning.append(cores)
    shared_by, first = -(-local_world_size // len(cores)), local_rank < len(cores)
    if not hasattr(os, "sched_setaffinity"):
        return Pinning(core=None, threads=1, shared_by=shared_by, first=first)
    core = core_of_rank(local_rank, cores)
    os.sched_setaffinity(0, {core})
    return Pinning(core=core, threads=1, shared_by=shared_by, first=first)


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory, so that a step does not fault in again the pages the last one gave back.

    No mapping of large arrays, no trimming. By default every array above 32 MiB is mapped anew, and times depend on what ran
    before: `x + 1` on 64 MiB took 42 ms, not 6 ms (2-core virtual machine). Every thread has its own arena. With a shared one,
    a communicating thread that waits for the arena of the computing thread holds a lock of gloo. Gloo's loop has priority over
    the computation and polls that lock, so one step in ten stood still for a second.

    Returns False where there is no glibc. The heap settles within about five repeats, somewhat above its peak, and stays so to
    the end.
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
