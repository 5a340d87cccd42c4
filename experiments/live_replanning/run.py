"""Does a run that may change its plan end sooner than the best fixed plan, when a rank is throttled in the middle?

    python experiments/live_replanning/run.py [--quick] [--pairs N] [--seconds N] [--out DIR] [--json]

A profile is calibrated for two ranks. `start` is the plan that the search finds, `other` the one that it would find if rank 1
took FACTOR times as long. Every pair trains the same steps as `adaptive` (from `start`), as `start` and as `other`, in turning
order. From step CALM on rank 1 is stopped for a part of every 20 ms; no process of parsim is told. As many pairs are trained
undisturbed. One more pair trains in float64, and its weights are compared. What lies in DIR already is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from throttle import Throttle

from parsim.costs.feedback.run_corrections import RunCorrections
from parsim.execute.processes.processes import rank_processes
from parsim.files import read_json, write_json_atomically
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.profile import load_profile
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.plans.plan import Plan
from parsim.predict.planning_problem import PlanningProblem
from parsim.schedule.live.planning import search_planner
from parsim.schedule.search import search

ROOT = Path(__file__).resolve().parents[2]
FACTOR = 5.0
SLOW_RANK = 1
WINDOW = 5
SIZES = {False: (300, 600), True: (60, 160)}
"""Steps until the throttle, and in all; `--quick` and the pair in float64 have the smaller ones."""
BATCH, WIDTH = 512, 1024
WAYS = ("adaptive", "start", "other")
RUN = """\
[model]
name = "mlp"
args = {{ width = {width} }}
[cluster]
profile = "{profile}"
devices = 2
[training]
dataset = "experiments.live_replanning.samples:repeated"
global_batch = {batch}
optimizer = "sgd_momentum"
learning_rate = 0.001
dtype = "{dtype}"
steps = {steps}
[plan]
strategy = "{plan}"
"""
STEP = re.compile(r"step (\d+)/\d+")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short pair of each kind: a check that all runs")
    parser.add_argument("--pairs", type=int, default=10, help="disturbed, and undisturbed")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no training after so many, and go on at the next call"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/live_replanning"))
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    asked = parser.parse_args()
    until = time.monotonic() + asked.seconds
    asked.out.mkdir(parents=True, exist_ok=True)
    plans = plans_of(asked.out)
    rows = []
    for place, ways in order_of(1 if asked.quick else asked.pairs):
        for way in ways:
            if time.monotonic() > until:
                break
            rows.append(trained(asked.out, plans, place, way, quick=asked.quick))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    document = {
        "plans": {name: plan.summary() for name, plan in plans.items()},
        "factor": FACTOR,
        "window_steps": WINDOW,
        "rows": rows,
    }
    print(json.dumps(document) if asked.json else json.dumps(document, indent=1))


def order_of(pairs: int) -> list[tuple[str, tuple[str, ...]]]:
    """What is trained one after the other: the name of a pair, and its ways in the order of their turn."""
    found: list[tuple[str, tuple[str, ...]]] = [("float64", ("adaptive", "start"))]
    for number in range(pairs):
        turn = number % len(WAYS)
        found.append((f"throttled {number}", WAYS[turn:] + WAYS[:turn]))
        found.append((f"quiet {number}", ("adaptive", "start") if number % 2 else ("start", "adaptive")))
    return found


def plans_of(out: Path) -> dict[str, Plan]:
    """The two fixed plans, from the profile of this machine; both are made once."""
    profile = out / "here.json"
    if not profile.is_file():
        file = out / "calibrate.toml"
        file.write_text(
            RUN.format(width=WIDTH, profile=profile.resolve(), batch=BATCH, dtype="float32", steps=10, plan="adaptive")
        )
        parsim("calibrate", str(file), "--out", str(profile), "--quick", "--nproc", "2")
    files = {name: out / f"{name}.plan.json" for name in WAYS[1:]}
    if not all(file.is_file() for file in files.values()):
        problem = PlanningProblem(
            model=load_model(ModelSpec(name="mlp", args=(("width", WIDTH),))),
            cluster=cluster_from_profile(load_profile(str(profile)), 2),
            global_batch=BATCH,
            optimizer="sgd_momentum",
        )
        start = next(
            entry.result.plan
            for entry in search(problem, ("adaptive", "dp", "mp"), samples=0).candidates
            if entry.result.plan.world_size == 2
        )
        planner = search_planner(problem, ("adaptive",), world_size=2)
        other = planner(
            RunCorrections(ranks=tuple((rank, FACTOR if rank == SLOW_RANK else 1.0) for rank in (0, 1))), start
        ).plan
        for name, plan in (("start", start), ("other", other)):
            plan.save(files[name])
    return {name: Plan.load(file) for name, file in files.items()}


def trained(out: Path, plans: dict[str, Plan], pair: str, way: str, *, quick: bool) -> dict[str, Any]:
    """One training, or what is known of it: seconds from the first timed step to the last, decisions, losses."""
    short = quick or pair == "float64"
    folder = out / f"{'quick ' if quick else ''}{pair} {way}".replace(" ", "-")
    kept = folder.with_suffix(".json")
    if kept.is_file():
        known: dict[str, Any] = read_json(kept)
        return known
    calm, steps = SIZES[short]
    file = folder.with_suffix(".toml")
    file.write_text(
        RUN.format(
            width=WIDTH,
            profile=(out / "here.json").resolve(),
            batch=BATCH,
            dtype="float64" if pair == "float64" else "float32",
            steps=steps,
            plan=(out / f"{'other' if way == 'other' else 'start'}.plan.json").resolve(),
        )
    )
    adaptive = ["--adaptive", "--window", str(WINDOW)] if way == "adaptive" else []
    throttled = not pair.startswith("quiet")
    seen = parsim("run", str(file), "--nproc", "2", "--out", str(folder), *adaptive, slow_from=calm if throttled else None)
    rounds = read_json(folder / "run" / "rank0.json")["rounds"]
    row = {
        "pair": pair,
        "way": way,
        "seconds": rounds[-1][1] - rounds[0][0],
        "steps": len(seen["losses"]),
        "switches": [
            {key: entry[key] for key in ("step", "reason", "planning_s", "predicted_switch_s", "switch_s")}
            | {"plan": Plan.from_json(entry["plan"]).summary()}
            for entry in seen["decisions"]
            if entry["plan"] is not None
        ],
        "looks": len(seen["decisions"]),
        "plannings_s": [entry["planning_s"] for entry in seen["decisions"] if entry["planning_s"]],
        "losses": seen["losses"] if pair == "float64" else [seen["losses"][0], seen["losses"][-1]],
    }
    write_json_atomically(kept, row)
    return row


def parsim(*arguments: str, slow_from: int | None = None) -> dict[str, Any]:
    """What a command prints as JSON.

    Args:
        arguments: of parsim. slow_from: the step after which rank 1 is throttled, as far as its progress tells; None: never.
    """
    command = [sys.executable, "-m", "parsim", *arguments, "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PARSIM_ALLOW_CODE": "1", "PYTHONPATH": str(ROOT)}
    with ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        )
        assert process.stderr is not None
        assert process.stdout is not None
        lines, slowed = [], slow_from is None
        for line in process.stderr:
            lines.append(line)
            step = STEP.search(line)
            if not slowed and step and slow_from is not None and int(step[1]) >= slow_from:
                pid = rank_processes(process.pid).get(SLOW_RANK)
                if pid is None:
                    raise RuntimeError(f"no process of rank {SLOW_RANK} below {process.pid}")
                stack.enter_context(Throttle(pid, FACTOR))
                slowed = True
        text = process.stdout.read()
        if process.wait() != 0:
            sys.exit(f"parsim {' '.join(arguments)} failed:\n{''.join(lines[-20:])}")
    if not slowed:
        sys.exit(f"the training of {arguments[1]} ended before step {slow_from} was seen; nothing was throttled")
    found: dict[str, Any] = json.loads(text)
    return found


if __name__ == "__main__":
    main()
