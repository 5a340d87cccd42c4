"""Is there memory for new blocks? Asked before anything is allocated, and answered alike on every rank."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from parsim.data.blocks.grid import BlockGrid, bytes_by_owner
from parsim.data.blocks.processes import Processes
from parsim.errors import DataError
from parsim.units import format_bytes

UNCHECKED_BYTES = 16 * 2**20
"""Arrays up to this size are not checked: the ranks would exchange a message to find out."""
_LIMIT, _USED = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


def available_bytes(device: str = "cpu") -> int | None:
    """Memory that this process could allocate now: of the GPU, or of the host within the container's limit; None if unknown."""
    if device != "cpu":
        import torch

        return int(torch.cuda.mem_get_info(torch.device(device))[0]) if device.startswith("cuda") else None
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        host = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        try:
            host = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError):
            return None
    try:
        return min(host, max(0, int(_LIMIT.read_text()) - int(_USED.read_text())))
    except (OSError, ValueError):  # no limit, or "max"
        return host


def check_room(what: str, grid: BlockGrid, owners: Sequence[int], itemsize: int, processes: Processes) -> None:
    """Raise DataError, on every rank, if the blocks of a host's ranks (or a GPU's) are larger than its free memory."""
    needed = bytes_by_owner(grid, owners, processes.ranks, itemsize)
    check_bytes(what, needed, processes, rows=grid.shape[0] if grid.shape else None)


def check_bytes(what: str, needed: Sequence[int], processes: Processes, *, rows: int | None = None) -> None:
    """As `check_room`, for the bytes that each rank needs. `rows`: of the array, to tell how many would fit."""
    if sum(needed) <= UNCHECKED_BYTES:
        return
    memory = socket.gethostname() if processes.device == "cpu" else f"{socket.gethostname()} {processes.device}"
    found = processes.gather((memory, available_bytes(processes.device)))
    places = [found[0]] * processes.ranks if processes.rank is None else found
    for name in dict.fromkeys(name for name, _ in places):
        members = [rank for rank, (place, _) in enumerate(places) if place == name]
        wanted = sum(needed[rank] for rank in members)
        free = min((free for place, free in places if place == name and free is not None), default=None)
        if free is None or wanted <= free:
            continue
        fitting = "" if rows is None else f"at most {int(rows * free / wanted)} of {rows} rows fit; "
        raise DataError(
            f"{what} needs {format_bytes(wanted)} on {name} (rank{'s' if len(members) > 1 else ''} "
            f"{', '.join(map(str, members))}), where {format_bytes(free)} are free; {fitting}use fewer rows, a smaller dtype, "
            f"or at least {-(-wanted // max(1, free))} machines of this size"
        )
