"""How close are the steps of trainings whose replicas average rarely, timed step by step without a barrier?

    python -m experiments.relaxed.trained_periods PROFILE [--rounds N] [--steps N] [--quick] [--seed N] [--json]

PROFILE is one that `parsim calibrate` has measured here for two ranks. All plans are predicted first; then they train, one
launch each, in interleaved rounds. `measured_s` is a whole period on one rank over its steps. `first_to_last_s` is what a step
of one number lasts from the first rank's begin to the last one's end: it contains the distance between the ranks (`skew_s`).
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.common.running import part_parser, show
from experiments.relaxed.run import CASES, RANKS, problem_of
from parsim.app.launch import whole_periods
from parsim.execute.job import Job, RunSpec
from parsim.execute.measurement import load_measurement
from parsim.execute.processes.launch import launch
from parsim.execute.processes.machine import describe_environment, machine_line
from parsim.hardware.compose import load_profile
from parsim.hardware.speed_factor import speed_beside
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from parsim.plans.synchronisation import parse_synchronisation
from parsim.predict.evaluate import Evaluation, evaluate, step_at_speed
from parsim.predict.problem import PlanningProblem
from parsim.search.by_hand import custom_plan

RULES = ("average/1", "average/4", "average/22", "average/200", "gossip/22 ring", "stale")


def trained(problem: PlanningProblem, spec: ModelSpec, entry: Evaluation, steps: int, seed: int) -> dict[str, Any]:
    """One training of so many steps, and its step by both clocks."""
    plan = entry.result.plan
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        problem.model.save(folder / "model.json")
        run = RunSpec(
            name="run",
            model=spec,
            model_path=str(folder / "model.json"),
            plan=plan,
            optimizer="sgd_momentum",
            learning_rate=0.01,
            dataset="digits",
            seed=seed,
        )
        Job(output=str(folder), mode="train", runs=(run,), steps=steps).save(folder / "job.json")
        launch(folder / "job.json", RANKS)
        seen = load_measurement(folder / run.name, entry.graph)
    left_out, together = whole_periods(seen, plan)
    seen = replace(seen, left_out=left_out, together=together)
    spans = list(zip(*(record.rounds[left_out:] for record in seen.ranks), strict=True))
    first_to_last = [max(end for _, end, _ in each) - min(start for start, _, _ in each) for each in spans]
    speed, step_s = speed_beside(problem.cluster.profile, seen.pace_s, RANKS), entry.result.step_s
    row = {
        "rule": str(plan.synchronisation),
        "predicted_s": step_s.median,
        "p05_s": step_s.p05,
        "p95_s": step_s.p95,
        "measured_s": seen.mean_step_s,
        "first_to_last_s": statistics.fmean(first_to_last),
        "skew_s": seen.skew_s,
        "error": step_s.median / seen.mean_step_s - 1,
    }
    if speed is not None:
        row["error_at_speed"] = step_at_speed(problem, entry, speed) / seen.mean_step_s - 1
    return row


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median errors by either clock, and how many steps lie in their intervals."""
    found: dict[str, Any] = {
        "rows": len(rows),
        "within_interval": sum(row["p05_s"] <= row["measured_s"] <= row["p95_s"] for row in rows),
        "median_error": statistics.median(abs(row["error"]) for row in rows),
        "median_error_first_to_last": statistics.median(abs(row["predicted_s"] / row["first_to_last_s"] - 1) for row in rows),
        "longest_first_to_last": max(row["first_to_last_s"] / row["measured_s"] for row in rows),
    }
    if rows and all("error_at_speed" in row for row in rows):
        found["median_error_at_speed"] = statistics.median(abs(row["error_at_speed"]) for row in rows)
    return found


def main() -> None:
    parser = part_parser(__doc__, "two rules, one round of few steps")
    parser.add_argument("profile")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rounds, steps, rules = (1, 30, RULES[1:3]) if options.quick else (options.rounds, options.steps, RULES)
    spec, batch = CASES["mlp, 64"]
    problem = problem_of(options.profile, spec, batch)
    parsed = [parse_synchronisation(rule) for rule in rules]
    meshes = [Mesh(pp=RANKS) if rule.kind == "stale" else Mesh(dp=RANKS) for rule in parsed]
    plans = [custom_plan(problem, mesh, synchronisation=rule) for mesh, rule in zip(meshes, parsed, strict=True)]
    found = [evaluate(problem, plan) for plan in plans]
    rows = [trained(problem, spec, entry, steps, options.seed + number) for number in range(rounds) for entry in found]
    document = {
        "machine": machine_line(describe_environment()),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "profile": load_profile(options.profile).name,
        "rounds": rounds,
        "steps": steps,
        "seed": options.seed,
        "summary": summary_of(rows),
        "rows": rows,
    }
    show(document, as_json=options.json)


if __name__ == "__main__":
    main()
