"""Does a profile learn from one run of 20 steps that a rank, or everything, became slower, and unlearn it afterwards?

    python -m experiments.adaptive.closed_loop [--quick] [--seed N] [--out DIR] [--json]
    python -m experiments.adaptive.closed_loop --real [--through COMMAND] [--out DIR] [--json]

Simulated: models x plans x ranks x seeds on a DGX-1, whose true durations differ from the profile's and are noisy. `parsim
validate --update`'s own function sees 20 steps; its next prediction is judged by 200 new steps.

Real: two processes on this machine. A profile is calibrated; then the core of one rank, and in a second scenario those of
both, is shared with a competitor that takes a sixth of it. COMMAND runs before every measuring command (say, one that waits
until the machine is quiet).
"""

from __future__ import annotations

import itertools
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from experiments.common.running import part_parser, show
from experiments.common.slow_machines import Machine, after_run, error
from parsim.app.ask import reopen
from parsim.app.measured import measured
from parsim.costs.observed import CommunicationClass, RunCorrections, class_of, updates_of
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.predict.compare import aa_floor
from parsim.predict.evaluate import evaluate
from parsim.predict.problem import PlanningProblem
from parsim.search.adapt.observed import updated
from parsim.search.families import FAMILIES

MODELS = {"resnet50": 256, "vit_b_16": 128, "bert": 64}
TARGET = 0.05
SIGMAS = (0.02, 0.08)
SLOWER = 1.2
ROUNDS = 5
"""Of four steps each."""

RUN = """\
[model]
name = "vit_small"
args = {{ hidden = 192, layers = 4, patch = 4 }}
[cluster]
profile = "{profile}"
devices = 2
[training]
global_batch = 32
learning_rate = 0.001
optimizer = "adam"
[plan]
strategy = "custom"
mesh = {mesh}
microbatches = {microbatches}
"""
SCENARIOS = {"rank 1": "1", "both ranks": "0,1"}
"""Cores that a competitor works on."""

PLANS = {"dp2": ("{ dp = 2 }", 1), "pp2": ("{ pp = 2 }", 2)}


def main() -> None:
    parser = part_parser(__doc__, "one model, one seed", out="runs/closed_loop")
    parser.add_argument("--models", default=",".join(MODELS), help="of the simulated runs")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="the first of the seeds")
    parser.add_argument("--real", action="store_true", help="two processes on this machine")
    parser.add_argument("--plans", default=",".join(PLANS), help="of the real runs")
    parser.add_argument("--within", action="store_true", help="of one launch, 20 steps teach and the next 20 test")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS), help="of the real runs")
    parser.add_argument("--through", default="", help="runs every measuring command of --real")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    if chosen.real:
        play = within if chosen.within else real
        rows = list(play(chosen.out, chosen.plans.split(","), chosen.scenarios.split(","), shlex.split(chosen.through)))
    else:
        names = chosen.models.split(",")[: 1 if chosen.quick else None]
        seeds = range(chosen.seed, chosen.seed + (1 if chosen.quick else chosen.seeds))
        rows = [row for name in names for row in simulated(name, MODELS[name], seeds)]
    show({"rows": rows if chosen.real else list(summary(rows))}, as_json=chosen.json)


def simulated(name: str, batch: int, seeds: range) -> Iterator[dict[str, object]]:
    """Every family's first plan on 2 and 4 devices, each rank slowed in turn, and drifts of everything."""
    profile = load_profile("dgx1-v100-32gb")
    for devices in (2, 4):
        problem = PlanningProblem(
            model=load_model(ModelSpec(name=name)), cluster=cluster_from_profile(profile, devices), global_batch=batch
        )
        for family in ("dp", "mp", "hp") if devices > 2 else ("dp", "mp"):
            plan = next((plan for plan in FAMILIES[family](problem) if plan.world_size == devices), None)
            if plan is None:
                continue
            causes = {f"rank {rank} slower": slowed(devices, rank) for rank in range(devices)}
            units = evaluate(problem, plan, samples=0, fold=False).compiled.columns.units
            classes = dict.fromkeys(class_of(unit.work, unit.rank) for unit in units)
            links = [key for key in classes if isinstance(key, CommunicationClass)]
            for factor in (0.85, 1.1, 1.3):
                causes[f"everything x{factor}"] = RunCorrections(
                    ranks=tuple((rank, factor) for rank in range(devices)),
                    communication=tuple((key, factor) for key in links),
                )
            for cause, factors in causes.items():
                for sigma in SIGMAS:
                    for seed in seeds:
                        machine = Machine(problem, plan, factors, sigma)
                        yield {"model": name, "plan": plan.summary(), "cause": cause, "noise": sigma, "seed": seed} | judged(
                            machine, seed
                        )


def slowed(devices: int, slow: int) -> RunCorrections:
    return RunCorrections(ranks=tuple((rank, SLOWER if rank == slow else 1.0) for rank in range(devices)))


def judged(machine: Machine, seed: int) -> dict[str, object]:
    """Errors before the update, after it, after the cause is gone, and after the update that this leads to."""
    profile = machine.problem.cluster.profile
    after = after_run(machine, seed).profile
    with_profile = replace(machine.problem, cluster=replace(machine.problem.cluster, profile=after))
    healthy = replace(machine, factors=RunCorrections(), problem=with_profile)
    undone = after_run(healthy, seed + 1_000).profile
    return {
        "before": error(machine, profile),
        "after": error(machine, after),
        "cause gone": error(healthy, after),
        "undone": error(healthy, undone),
        "left": len(updates_of(replace(machine.problem.cluster, profile=undone)).ranks),
    }


def summary(rows: list[dict[str, Any]]) -> Iterator[dict[str, object]]:
    """By cause and noise: median and worst errors, and how many are under the target."""
    kinds = dict.fromkeys(("one rank slower" if "rank" in row["cause"] else row["cause"], row["noise"]) for row in rows)
    for cause, noise in kinds:
        of_kind = [
            row
            for row in rows
            if row["noise"] == noise and (row["cause"] == cause or ("one" in cause and "rank" in row["cause"]))
        ]
        shown: dict[str, object] = {"cause": cause, "noise": noise, "cases": len(of_kind)}
        for stage in ("before", "after", "cause gone", "undone"):
            errors = [row[stage] for row in of_kind]
            under = sum(value <= TARGET for value in errors)
            shown[stage] = f"{100 * median(errors):.1f}% (worst {100 * max(errors):.1f}%), under target {under}"
        yield shown


def real(out: Path, plans: list[str], scenarios: list[str], through: list[str]) -> Iterator[dict[str, object]]:
    """Per plan: as calibrated, then for each scenario the error before, after the update, and when the cause is gone."""
    profile, first = out / "here.json", out / f"{plans[0]}.toml"
    for name in plans:
        mesh, microbatches = PLANS[name]
        (out / f"{name}.toml").write_text(RUN.format(profile=profile.resolve(), mesh=mesh, microbatches=microbatches))
    if not profile.is_file():
        parsim([], through, "calibrate", str(first), "--out", str(profile), "--quick", "--nproc", "2")
    for name in plans:
        file = str(out / f"{name}.toml")
        yield step(name, "healthy", "as calibrated", [], through, file, update=True)
        for scenario in scenarios:
            slow = competitor(scenario)
            yield step(name, scenario, "before the update", slow, through, file, update=True)
            yield step(name, scenario, "after the update", slow, through, file)
            yield step(name, scenario, "cause gone", [], through, file, update=True)
            yield step(name, scenario, "update undone", [], through, file)


def competitor(scenario: str) -> list[str]:
    """What is put before a command, so that it runs beside a competitor."""
    script = str(Path(__file__).with_name("slowed.py"))
    return [sys.executable, script, "--cores", SCENARIOS[scenario], "--factor", str(SLOWER), "--"]


def within(out: Path, plans: list[str], scenarios: list[str], through: list[str]) -> Iterator[dict[str, object]]:
    """Per plan and scenario one launch under the competitor: its first 20 steps update the profile, its next 20 judge that.

    The machine has less time to drift between the two than between launches. The profile's file stays as it is.
    """
    for name, scenario in itertools.product(plans, scenarios):
        rounds = str(2 * ROUNDS)
        seen = parsim(competitor(scenario), through, "validate", str(out / f"{name}.toml"), "--rounds", rounds)
        yield split(Path(seen["folder"]), name, scenario)


def split(folder: Path, name: str, scenario: str) -> dict[str, object]:
    opened, asked, run = reopen(folder)
    seen = measured(opened, run, asked.evaluation)
    teaching, testing = seen.step_s[:ROUNDS], float(seen.step_s[ROUNDS:].mean())
    found = updated(
        asked.problem,
        asked.evaluation.result.plan,
        asked.evaluation.graph,
        seen.timelines[: len(seen.timelines) // 2],
        step_s=float(teaching.mean()),
        floor=aa_floor(teaching.tolist()).median,
        run=run,
        steps=seen.steps // 2,
    )
    row = {
        "plan": name,
        "scenario": scenario,
        "taught_ms": round(1e3 * float(teaching.mean()), 2),
        "tested_ms": round(1e3 * testing, 2),
        "error_before": f"{100 * (found.before_s / testing - 1):+.1f}%",
        "error_after": f"{100 * (found.after_s / testing - 1):+.1f}%",
        "changes": "; ".join(found.changes),
    }
    print(row, file=sys.stderr, flush=True)
    return row


def step(
    plan: str, scenario: str, stage: str, slow: list[str], through: list[str], file: str, *, update: bool = False
) -> dict[str, object]:
    """One validation of 20 steps; `update` the profile with what it shows."""
    seen = parsim(slow, through, "validate", file, "--rounds", str(ROUNDS), *(["--update"] if update else []))
    row = {
        "plan": plan,
        "scenario": scenario,
        "stage": stage,
        "predicted_ms": round(1e3 * seen["predicted"], 2),
        "measured_ms": round(1e3 * seen["measured"], 2),
        "error": f"{100 * seen['relative_error']:+.1f}%",
        "aa_floor": f"{100 * seen['aa_floor']['median']:.1f}%",
        "changes": "; ".join(seen["update"]["changes"]) if update else "",
    }
    print(row, file=sys.stderr, flush=True)
    return row


def parsim(slow: list[str], through: list[str], *arguments: str) -> dict[str, Any]:
    command = [*through, *slow, sys.executable, "-m", "parsim", *arguments, "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{shlex.join(command)} failed: {done.stderr}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


if __name__ == "__main__":
    main()
