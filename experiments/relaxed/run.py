"""How close are the predictions of relaxed plans, where they can be run?

    python -m experiments.relaxed.run PROFILE [--rounds N] [--quick] [--seed N] [--json]

PROFILE is one that `parsim calibrate` has measured here for two ranks. All plans are predicted first. Then they are measured
in interleaved rounds of one launch, the synchronous plan twice: how far its two measurements differ is the floor of every
error. A probe beside each round tells how fast the cores were; the second error is after correcting for that.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from experiments.common.running import part_parser, show
from parsim.execute.job import Job, RunSpec
from parsim.execute.measurement import load_measurement
from parsim.execute.processes.launch import launch
from parsim.execute.processes.machine import describe_environment, machine_line
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.speed_factor import speed_beside
from parsim.model.formats import Numerics
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from parsim.plans.synchronisation import parse_synchronisation
from parsim.predict.evaluate import Evaluation, evaluate, step_at_speed
from parsim.predict.problem import PlanningProblem
from parsim.search.by_hand import custom_plan

RANKS = 2
STEPS = 8
"""Timed together: whole periods of every rule."""
RULES = (
    "all_reduce",
    "all_reduce",
    "average/1",
    "average/4",
    "average/8 outer=nesterov:0.7:0.9",
    "gossip/1 ring",
    "gossip/4 ring",
    "merge/4",
    "merge/8 merge=staleness:0.6",
    "stale",
)
MLP = ModelSpec(name="mlp", args=(("width", 512),))
CASES = {"mlp, 256": (MLP, 256), "mlp, 64": (MLP, 64)}


def problem_of(profile: str, spec: ModelSpec, batch: int) -> PlanningProblem:
    return PlanningProblem(
        model=load_model(spec),
        cluster=cluster_from_profile(load_profile(profile), RANKS),
        global_batch=batch,
        numerics=Numerics(precision="fp32", optimizer="sgd_momentum"),
    )


def predicted(problem: PlanningProblem) -> list[Evaluation]:
    """Every rule on two replicas, or two stages where gradients are stale."""
    rules = [parse_synchronisation(text) for text in RULES]
    plans = [
        custom_plan(problem, Mesh(pp=RANKS) if rule.kind == "stale" else Mesh(dp=RANKS), synchronisation=rule) for rule in rules
    ]
    return [evaluate(problem, plan) for plan in plans]


def measured(
    name: str, problem: PlanningProblem, spec: ModelSpec, found: list[Evaluation], rounds: int, seed: int
) -> list[dict[str, Any]]:
    """One launch in which all rules take turns; a row per rule."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        problem.model.save(folder / "model.json")
        runs = tuple(
            RunSpec(
                name=f"rule{number}",
                model=spec,
                model_path=str(folder / "model.json"),
                plan=entry.result.plan,
                optimizer="sgd_momentum",
                learning_rate=0.01,
                dataset="digits",
                seed=seed,
            )
            for number, entry in enumerate(found)
        )
        job = Job(output=str(folder), mode="measure", runs=runs, steps=STEPS, rounds=rounds, settle_steps=2)
        job.save(folder / "job.json")
        launch(folder / "job.json", RANKS)
        rows = []
        for run, entry in zip(runs, found, strict=True):
            seen = load_measurement(folder / run.name, entry.graph)
            speed = speed_beside(problem.cluster.profile, seen.pace_s, RANKS)
            step_s = entry.result.step_s
            row = {
                "case": name,
                "rule": str(run.plan.synchronisation),
                "predicted_s": step_s.median,
                "p05_s": step_s.p05,
                "p95_s": step_s.p95,
                "measured_s": seen.mean_step_s,
                "median_round_s": float(statistics.median(seen.step_s)),
                "cpu_s": sum(seen.cpu_s),
                "error": step_s.median / seen.mean_step_s - 1,
            }
            if speed is not None:
                row["error_at_speed"] = step_at_speed(problem, entry, speed) / seen.mean_step_s - 1
            rows.append(row)
    return rows


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median errors of the relaxed rules, beside the floor; and how well ratios to the synchronous plan are predicted."""
    relaxed = [row for row in rows if row["rule"] != "all_reduce"]
    floors, ratios = [], []
    for case in dict.fromkeys(row["case"] for row in rows):
        first, second = (row for row in rows if row["case"] == case and row["rule"] == "all_reduce")
        floors.append(abs(first["measured_s"] / second["measured_s"] - 1))
        usual_s = (first["measured_s"] + second["measured_s"]) / 2
        ratios += [
            (row["predicted_s"] / first["predicted_s"]) / (row["measured_s"] / usual_s) - 1
            for row in relaxed
            if row["case"] == case
        ]
    found = {
        "rows": len(relaxed),
        "median_error": statistics.median(abs(row["error"]) for row in relaxed),
        "median_error_of_ratios": statistics.median(abs(ratio) for ratio in ratios),
        "floor": max(floors),
        "within_interval": sum(row["p05_s"] <= row["measured_s"] <= row["p95_s"] for row in relaxed),
    }
    if all("error_at_speed" in row for row in relaxed):
        found["median_error_at_speed"] = statistics.median(abs(row["error_at_speed"]) for row in relaxed)
    return found


def main() -> None:
    parser = part_parser(__doc__, "one case, three rounds")
    parser.add_argument("profile")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    rounds = 3 if options.quick else options.rounds
    for name, (spec, batch) in list(CASES.items())[: 1 if options.quick else None]:
        problem = problem_of(options.profile, spec, batch)
        rows += measured(name, problem, spec, predicted(problem), rounds, options.seed)
    document = {
        "machine": machine_line(describe_environment()),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "profile": load_profile(options.profile).name,
        "rounds": rounds,
        "seed": options.seed,
        "summary": summary_of(rows),
        "rows": rows,
    }
    show(document, as_json=options.json)


if __name__ == "__main__":
    main()
