"""The first thing a launched process runs: `python -m parsim.execute.processes.rank MODULE JOB.json`.

Ties its life to that of the process that launched it, before anything heavy is imported, and then runs MODULE as a program.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import sys

from parsim.execute.processes.output import PARENT_VARIABLE, die_with_parent


def main() -> None:
    """Run the module that the first argument names, with the rest as its arguments."""
    if PARENT_VARIABLE in os.environ:
        die_with_parent(int(os.environ[PARENT_VARIABLE]))
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1)  # how the launcher asks a rank that hangs where it is
    module = sys.argv[1]
    sys.argv = [module, *sys.argv[2:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
