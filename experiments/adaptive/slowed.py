"""Run a command while some cores are busy with something else part of the time.

    python experiments/adaptive/slowed.py --cores 1 --factor 1.2 -- COMMAND ...

On each named core a competitor computes in bursts of `BURST_S` of processor time. In between it sleeps as long as it is ahead
of its share. So whoever else is pinned there takes about `factor` times as long.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import time

BURST_S = 0.002


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", default="1", help="e.g. 0,1")
    parser.add_argument("--factor", type=float, default=1.2)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    chosen = parser.parse_args()
    command = [part for part in chosen.command if part != "--"]
    cores = [int(core) for core in chosen.cores.split(",")]
    competitors = [multiprocessing.Process(target=compete, args=(core, chosen.factor), daemon=True) for core in cores]
    for competitor in competitors:
        competitor.start()
    try:
        sys.exit(subprocess.run(command, check=False).returncode)
    finally:
        for competitor in competitors:
            competitor.terminate()


def compete(core: int, factor: float) -> None:
    """Take (factor - 1) / factor of a core, for ever: the other has 1 / factor of all time."""
    os.sched_setaffinity(0, {core})
    share, started, had = (factor - 1) / factor, time.monotonic(), time.process_time()
    while True:
        until = time.process_time() + BURST_S
        while time.process_time() < until:
            pass
        ahead_s = (time.process_time() - had) / share - (time.monotonic() - started)
        time.sleep(max(0.0, ahead_s))


if __name__ == "__main__":
    main()
