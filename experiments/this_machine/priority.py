"""What it brings that communication comes before computation (`parsim.execute.processes.setup`).

    python experiments/this_machine/priority.py [--launches N] [--out DIR]

The same plans, launched with and without in turn; per plan the median over launches of the mean step, and of what its
collectives took together.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

import numpy as np

from experiments.this_machine.cases import SMALL, SUBJECTS, cases_of, problem_of
from experiments.this_machine.measuring import Seen, measure
from parsim.costs.observed import task_durations_s
from parsim.execute.processes.launch import launch
from parsim.execute.processes.setup import SWITCH, is_granted
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.work import Collective

MODELS, LABELS, ROUNDS = ("mlp", "vit_small"), ("dp 2", "dp 2, zero 1", "tp 2"), 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=3, help="of each way")
    parser.add_argument("--out", type=Path, default=Path("runs/priority"))
    asked = parser.parse_args()
    if not is_granted():
        raise SystemExit("this user may not have real-time threads: there is nothing to compare; try as root or `ulimit -r 1`")
    cluster = cluster_from_profile(load_profile("dgx1-v100-32gb"), SMALL)  # plans only: nothing is priced
    subjects = [subject for subject in SUBJECTS if subject.name in MODELS]
    cases = [case for s in subjects for case in cases_of(s, problem_of(s, cluster)) if case.label in LABELS]
    found: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for number in range(asked.launches):
        for priority in (False, True):
            os.environ[SWITCH] = str(int(priority))
            for seen in measure(asked.out, cases, SMALL, ROUNDS, launch, seed=number):
                found.setdefault((seen.case.name, priority), []).append(_ms(seen))
    shutil.rmtree(asked.out)
    print("| plan | step without, ms | with | collectives without, ms | with |\n|---|---|---|---|---|")
    for case in cases:
        without, given = (np.median(found[case.name, priority], axis=0) for priority in (False, True))
        print(f"| {case.name} | {without[0]:.1f} | {given[0]:.1f} | {without[1]:.1f} | {given[1]:.1f} |")


def _ms(seen: Seen) -> tuple[float, float]:
    """Mean step, and all its collectives."""
    taken = np.mean(
        [task_durations_s(len(seen.graph.tasks), timeline, complete=True) for timeline in seen.measurement.timelines], axis=0
    )
    sent = sum(seconds for task, seconds in zip(seen.graph.tasks, taken, strict=True) if isinstance(task.work, Collective))
    return 1e3 * seen.measurement.mean_step_s, 1e3 * float(sent)


if __name__ == "__main__":
    main()
