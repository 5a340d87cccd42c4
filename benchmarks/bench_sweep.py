"""CPU time of a sweep of ResNet-50 on eight V100: given plans, and searched ones. Prints, asserts nothing.

python benchmarks/bench_sweep.py [--given 100] [--searched 100] [--quick]
"""

from __future__ import annotations

import argparse
import time

from machine import QUICK_NOTE, add_quick, machine_line

from parsim.app.sweep.sweep import Sweep, sweep

GIVEN = {"plan.strategy": "custom", "plan.mesh": {"dp": 8}}


def timed(what: str, count: int, over: dict[str, object], settings: dict[str, object]) -> None:
    """One row of the table: CPU and wall seconds in this process."""
    begun, wall = time.process_time(), time.perf_counter()
    found: Sweep = sweep("resnet50", over, cluster="dgx1-v100-32gb", global_batch=256, settings=settings, jobs=1)
    spent, passed = time.process_time() - begun, time.perf_counter() - wall
    print(f"| {what} | {len(found.rows)} | {found.failed} | {spent:.1f} | {passed:.1f} | {100 * spent / count:.1f} |")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--given", type=int, default=100)
    options.add_argument("--searched", type=int, default=100)
    add_quick(options)
    asked = options.parse_args()
    given, searched = (4, 2) if asked.quick else (asked.given, asked.searched)
    print(machine_line())
    print("\n| points | asked | failed | CPU s | wall s | CPU s per 100 |\n|---|---|---|---|---|---|")
    batches = [256 + 64 * number for number in range(max(given, searched) // 2)]
    over = {"training.global_batch": batches[: given // 2], "plan.zero_stage": [0, 1]}
    timed("given, the first of the process", given, over, dict(GIVEN))
    over = {"training.global_batch": [batch + 32 for batch in batches[: given // 2]], "plan.zero_stage": [0, 1]}
    timed("given, once more", given, over, dict(GIVEN))
    over = {"training.global_batch": batches[: searched // 2], "plan.strategy": ["dp", "adaptive"]}
    timed("searched, half dp and half adaptive", searched, over, {})
    if asked.quick:
        print(QUICK_NOTE)


if __name__ == "__main__":
    main()
