"""Keeping count of the processes of one launch, so that none outlives it.

Every rank leads a session of its own, and its children may lead others. Three mechanisms each cover one case. The
kernel kills a process when its parent dies (`die_with_parent`). The end of a launch kills all descendants, found
through /proc. It also kills all processes with the launch's mark in their environment, which finds those whose parent
is already gone. Leaves out: without /proc (macOS) only the first net and process groups remain.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Collection
from pathlib import Path

MARK_VARIABLE = "PARSIM_LAUNCH"
PARENT_VARIABLE = "PARSIM_PARENT"
_PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5


def die_with_parent(parent: int) -> None:
    """Have this process killed (SIGKILL) as soon as process `parent` ends; at once if it has ended already.

    Must be called in a child whose parent started it from its main thread: the kernel's signal follows the thread.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os._exit(1)


def descendants(roots: Collection[int]) -> set[int]:
    """All living processes below `roots` (without them)."""
    children: dict[int, list[int]] = {}
    for pid, parent in _living().items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    frontier = list(roots)
    while frontier:
        for child in children.get(frontier.pop(), ()):
            if child not in found:
                found.add(child)
                frontier.append(child)
    return found


def marked(mark: str) -> set[int]:
    """All living processes that were started with PARSIM_LAUNCH=mark in their environment."""
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    found = set()
    for pid in _living():
        if wanted in _variables(pid):
            found.add(pid)
    return found - {os.getpid()}


def rank_processes(root: int) -> dict[int, int]:
    """The processes of ranks below `root`, by rank. Of what a rank has started itself, and what has its variables, none."""
    parents = _living()
    ranks = {}
    for pid in descendants([root]):
        own = next((entry[5:] for entry in _variables(pid) if entry.startswith(b"RANK=")), b"")
        if own.isdigit():
            ranks[pid] = int(own)
    return {rank: pid for pid, rank in ranks.items() if ranks.get(parents.get(pid, 0)) != rank}


def _variables(pid: int) -> list[bytes]:
    """What a process was started with, NAME=VALUE each; nothing if it has just ended, or belongs to somebody else."""
    with contextlib.suppress(OSError):
        return (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    return []


def _living() -> dict[int, int]:
    """Process number to parent, without zombies."""
    found: dict[int, int] = {}
    if not _PROC.is_dir():
        return found
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state not in ("Z", "X"):
                    found[int(entry.name)] = int(parent)
    return found


def kill_launch(roots: Collection[int], mark: str, within_s: float = 10.0) -> set[int]:
    """SIGKILL the processes `roots`, their groups, their descendants and everything marked; return what is still alive
    after that.

    Every root must be a child of this process that leads its own process group; the caller reaps it.
    """
    deadline = time.monotonic() + within_s
    while True:
        targets = descendants(roots) | marked(mark)
        for root in roots:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(root, signal.SIGKILL)
        for pid in targets:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not targets or time.monotonic() > deadline:
            return targets
        time.sleep(0.02)
