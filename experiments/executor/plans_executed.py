"""Does every plan that the search can emit train the same weights as one process?

    python -m experiments.executor.plans_executed [--quick] [--plans N] [--steps N] [--nproc 2,4] [--models A,B] [--seed N]
        [--only 3,17] [--seconds N] [--timeout N] [--out DIR] [--write] [--json]

Plans are drawn at random through the search's own families and run for real over gloo in float64: one launch per model and
number of processes, in which the processes train under one plan after another. Weights, optimizer state, running statistics
and the loss of every step are compared with single-process training. What was compared already lies in the folder of `--out`
and is not run again, as long as the same plan is drawn under its number: a change of the search draws others. Remove the folder
after a change of the executor. `--only` runs some plans, whatever is known of them.
Needs a CPU build of torch: the processes are forked after a trace, and under a CUDA build autograd refuses to work in them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["PARSIM_ALLOW_CODE"] = "1"  # two of the five models are modules beside this file

import torch

from experiments.common.catalogue import record, recorded
from experiments.common.running import commit, part_parser
from experiments.executor.comparing import TOLERANCE, Outcome, References, outcomes_of
from experiments.executor.drawing import drawn, features_of
from experiments.executor.judge import run_of, summary
from experiments.executor.models import SUBJECTS
from parsim.execute.processes.machine import describe_environment, machine_line
from parsim.files import write_text_atomically

NAME = "plans_executed"
AT_ONCE = 50
"""Plans of one launch: between two launches the time is looked at."""


def main() -> None:
    parser = part_parser(__doc__, "two plans of five steps each", out="runs/plans_executed")
    parser.add_argument("--plans", type=int, default=50, help="per model and number of processes")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--nproc", default="2,4")
    parser.add_argument("--models", default=",".join(SUBJECTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="the plans of these numbers alone, run again whatever is known of them")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many, and go on at the next call")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="plans of one launch at most")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that one plan may take")
    parser.add_argument("--write", action="store_true", help="keep the results in results.json")
    parser.add_argument("--go-on", action="store_true", help="run no row again of which results.json records the commit")
    asked = parser.parse_args()
    if torch.backends.cuda.is_built():
        parser.error(f"forks processes that differentiate, which torch {torch.__version__} refuses: use a CPU build of torch")
    plans, steps = (2, 5) if asked.quick else (asked.plans, asked.steps)
    until = time.monotonic() + asked.seconds
    numbers = [int(part) for part in asked.only.split(",")] if asked.only else list(range(plans))
    launches = [(name, int(part)) for name in asked.models.split(",") for part in asked.nproc.split(",")]
    references = {name: References(steps=steps) for name, _ in launches}
    found: dict[tuple[str, int], list[dict[str, Any]]] = {launch: [] for launch in launches}
    for first in range(0, len(numbers), asked.at_once):
        for name, processes in launches:
            some = numbers[first : first + asked.at_once]
            found[name, processes] += compared(name, processes, some, references[name], asked, until)
    rows = [row for own in found.values() for row in own]
    if asked.write:
        rows = with_earlier(rows)
    document = {"summary": summary(rows), "rows": rows}
    if asked.write:
        run = run_of(rows, command=" ".join(["python", "-m", "experiments.executor.plans_executed", *sys.argv[1:]]))
        run |= {"torch": torch.__version__, "seed": asked.seed, "steps": steps}
        record(NAME, {"run": run, **document})
    print(json.dumps(document) if asked.json else json.dumps(document["summary"], indent=1))
    if document["summary"]["failed"]:
        sys.exit(1)


def compared(
    name: str, processes: int, numbers: Sequence[int], references: References, asked: argparse.Namespace, until: float
) -> list[dict[str, Any]]:
    """Rows of some plans of one model, by number, in one launch; known ones are not run again. None begins after `until`."""
    folder = asked.out / f"{references.steps}-steps"
    paths = {number: folder / f"{name}-{processes}-{asked.seed}-{number}.json" for number in numbers}
    if asked.go_on:
        keep_recorded(paths, name, processes)
    plans = {number: drawn(name, processes, asked.seed, number) for number in numbers} if time.monotonic() < until else {}
    rows = {number: json.loads(path.read_text()) for number, path in paths.items() if path.is_file()}
    known = {number for number, row in rows.items() if "commit" in row}  # of the plan that is drawn under the number now
    some = [
        plan
        for number, plan in plans.items()
        if asked.only or number not in known or rows[number]["plan"] != plan.plan.summary()
    ]
    if some:
        launch = {
            "machine": machine_line(describe_environment()),
            "date": time.strftime("%Y-%m-%d"),
            "commit": commit(),
            "load": round(os.getloadavg()[0], 1),
        }
        began_s, cpu_began_s = time.monotonic(), processor_s()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as place:
            found = outcomes_of(some, Path(place), steps=references.steps, timeout_s=asked.timeout, references=references)
        passed_s = {"wall_s": time.monotonic() - began_s, "cpu_s": processor_s() - cpu_began_s}
        launch |= {key: round(seconds / len(some), 2) for key, seconds in passed_s.items()}  # an equal share of each plan
        for outcome in found:
            if not outcome.holds:
                print(outcome.describe(), file=sys.stderr, flush=True)
            write_text_atomically(paths[outcome.drawn.number], json.dumps(row_of(outcome, references.moved) | launch))
        print(f"{len(some)} plans to {some[-1].name}: {passed_s['wall_s']:.0f} s", file=sys.stderr, flush=True)
    return [json.loads(path.read_text()) for path in paths.values() if path.is_file()]


def keep_recorded(paths: dict[int, Path], name: str, processes: int) -> None:
    """Put rows of results.json that record their commit where those of this call are kept, as far as none lie there."""
    for row in (recorded(NAME) or {}).get("rows", []):
        path = paths.get(row["number"]) if (row["model"], row["processes"]) == (name, processes) else None
        if path is not None and "commit" in row and not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(path, json.dumps(row))


def processor_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def with_earlier(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of results.json, and in place of those that were run again their new ones: a call that ends early loses none."""

    def key(row: dict[str, Any]) -> tuple[str, int, int]:
        return row["model"], row["processes"], row["number"]

    return list(({key(row): row for row in (recorded(NAME) or {}).get("rows", [])} | {key(row): row for row in rows}).values())


def row_of(outcome: Outcome, moved: float) -> dict[str, Any]:
    """What results.json keeps of one plan. moved: by how much training moved the weights at least."""
    plan, difference = outcome.drawn, outcome.difference
    return {
        "model": plan.subject,
        "processes": plan.processes,
        "number": plan.number,
        "plan": plan.plan.summary(),
        "granularity": plan.granularity,
        "optimizer": plan.optimizer,
        "features": features_of(plan),
        "difference": None if difference is None else difference.worst,
        "reason": "" if outcome.holds else outcome.reason or f"above {TOLERANCE}: {difference}",
        "moved": moved,
    }


if __name__ == "__main__":
    main()
