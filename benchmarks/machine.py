"""What every benchmark prints first: the machine it ran on; and how it times."""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from pathlib import Path

QUICK_NOTE = "\n--quick: small sizes, to see that the benchmark runs. The figures above say nothing about speed."


def add_quick(parser: argparse.ArgumentParser) -> None:
    """The option that every benchmark has: `make bench-quick` and the tests run it."""
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run at all?")


def machine_line() -> str:
    return f"{platform.system()} {platform.machine()}: {processor_name()}, Python {platform.python_version()}"


def processor_name() -> str:
    """From the kernel where it says, else from Python."""
    information = Path("/proc/cpuinfo")
    if information.is_file():
        lines = information.read_text().splitlines()
        cores = sum(line.startswith("processor") for line in lines)
        for line in lines:
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {cores} cores seen"
    return platform.processor() or platform.machine()


def seconds(call: Callable[[], object], *, repeats: int = 3) -> float:
    """The best of some runs: CPU seconds of this process, which other programs change least."""
    best = float("inf")
    for _ in range(repeats):
        begun = time.process_time()
        call()
        best = min(best, time.process_time() - begun)
    return best
