"""The first thing a launched process runs: `python -m parsim.execute.processes.rank MODULE JOB.json`.

Ties its life to that of the process that launched it, before anything heavy is imported, and then runs MODULE as a program.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import sys
from multiprocessing import process
from pathlib import Path

from parsim.execute.processes.heartbeat import BEATS_VARIABLE
from parsim.execute.processes.output import PARENT_VARIABLE, die_with_parent

LONGEST_SOCKET = 100
"""Bytes of the name of a Unix socket: 108 with its end on Linux, 104 on macOS."""


def main() -> None:
    if PARENT_VARIABLE in os.environ:
        die_with_parent(int(os.environ[PARENT_VARIABLE]))
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1)  # how the launcher asks a rank that hangs where it is
    if BEATS_VARIABLE in os.environ:
        _keep_sockets_in(Path(os.environ[BEATS_VARIABLE]).parent)
    module = sys.argv[1]
    sys.argv = [module, *sys.argv[2:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _keep_sockets_in(folder: Path) -> None:
    """Sockets of this process's DataLoader workers go where they are removed with the launch, however the rank ends. Where the
    folder's name is so long that a socket in it could have none, Python's own choice remains."""
    if len(os.fsencode(folder / "listener-12345678")) < LONGEST_SOCKET:
        process.current_process()._config["tempdir"] = str(folder)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
