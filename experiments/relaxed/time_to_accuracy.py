"""How often does the predicted winner of two ways of synchronising win when both are executed, at 2 and at 4 processes?

    python -m experiments.relaxed.time_to_accuracy PROFILE... [--rounds N] [--quick] [--json] [--out DIR]

Each PROFILE is one that `parsim calibrate` has measured here; a case takes the one of as many ranks as it has processes. For
each case `to_target` predicts the seconds of each rule to a test accuracy: simulated seconds per step times steps of virtual
replicas, over five seeds. Then real processes train by each rule until the mean weights score the target. Every round has a
seed that the prediction has not seen. One launch trains all rules of a case and a round in turns. Predictions are kept in
DIR/predictions.jsonl before the first launch, and launches in DIR/launches.jsonl; the same command goes on behind the last one.
`--quick` compares nothing, so any profile will do.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import parsim
from experiments.common.catalogue import ROOT
from experiments.common.running import part_parser, show
from experiments.relaxed.time_to_accuracy_rank import FOUND, Goal
from parsim.app.answer import Answer
from parsim.errors import ParsimError
from parsim.execute.job import Job, RunSpec
from parsim.execute.processes.launch import launch
from parsim.files import read_json
from parsim.hardware.compose import load_profile
from parsim.plans.plan import Plan
from parsim.plans.synchronisation import parse_synchronisation

SEEDS = 5
"""Of the prediction: 0 to 4."""
FIRST_SEED = 10
"""Of the first round that is executed."""
MOST_STEPS = 600
PATIENCE = 2
"""Times the predicted steps after which an executed training is given up."""
RULES = (
    "average/1",
    "average/4",
    "average/16",
    "average/64",
    "average/16 outer=nesterov:0.7:0.9",
    "gossip/1 ring",
    "gossip/4 ring",
    "gossip/1 ring combination=combine_adapt",
    "merge/4",
    "stale",
    "stale schedule=ddg",
)
"""Beside all_reduce, on any number of processes."""
OF_FOUR = ("gossip/1 exponential", "gossip/1 ada(rounds=20, epochs=2)", "gossip/1 ring schedule=fdg")
"""Graphs that are rings on two processes, and replicas of stages, which need four."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A question: processes, how digits are dealt to them, and the accuracy. MLP of width 64, 32 samples a step, momentum."""

    processes: int
    shards: str
    target: float
    width: int = 64
    batch: int = 32
    rate: float = 0.005

    @property
    def name(self) -> str:
        return f"{self.processes} processes, {self.shards.replace('_', '-').replace('iid', 'IID')} shards"

    @property
    def rules(self) -> tuple[str, ...]:
        return RULES if self.processes == 2 else (*RULES, *OF_FOUR)


CASES = (
    Case(processes=2, shards="iid", target=0.88),
    Case(processes=2, shards="label_sorted", target=0.85),
    Case(processes=4, shards="iid", target=0.88),
    Case(processes=4, shards="label_sorted", target=0.80),
)
"""Targets where scores still rise: steps to them differ by 8% between seeds, and by 30% to .93 at four times the rate."""


class Record:
    """Lines of JSON in a file, each with the profile that it belongs to; the file grows by a line when one is known."""

    def __init__(self, path: Path, profile: str) -> None:
        self._path, self._profile = path, profile
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.entries = [entry for line in lines if (entry := json.loads(line))["profile"] == profile]

    def add(self, entry: dict[str, Any]) -> None:
        line = {"profile": self._profile, **entry}
        self.entries.append(line)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def asked(profile: str, case: Case, *, is_stale: bool = False) -> Answer:
    """The question about a case, planned: with as many replicas as processes, or with stages that the simulator chooses."""
    mesh = [] if is_stale else [f"plan.mesh.dp={case.processes}"]
    return parsim.plan(
        "mlp",
        cluster=profile,
        devices=case.processes,
        global_batch=case.batch,
        args={"width": case.width},
        optimizer="sgd_momentum",
        strategy="dp",
        overrides=[f"training.learning_rate={case.rate}", f"training.shards={case.shards}", *mesh],
    )


def predicted(profile: str, case: Case, rules: tuple[str, ...], seeds: int) -> list[dict[str, Any]]:
    """A row per rule: seconds and steps to the target, None where virtual replicas do not reach it, and its plan."""
    rows = {}
    for is_stale in (True, False):
        of_kind = tuple(rule for rule in rules if parse_synchronisation(rule).is_stale == is_stale)
        if is_stale and not of_kind:
            continue
        answer = asked(profile, case, is_stale=is_stale)
        for entry in answer.to_target(case.target, rules=of_kind, seeds=seeds, most_steps=MOST_STEPS).contenders:
            rows[str(entry.rule)] = {
                "rule": str(entry.rule),
                "predicted_s": entry.seconds,
                "log_deviation": entry.log_deviation,
                "steps": None if entry.learnt is None else entry.learnt.steps,
                "plan": None if entry.result is None else entry.result.plan.to_json(),
            }
    return list(rows.values())


def executed(profile: str, case: Case, rows: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """One launch: every rule trained until the mean weights score the target, or twice as long as predicted. Per rule: reached,
    steps, seconds and score, at the target or at the end."""
    answer = asked(profile, case)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        answer.problem.model.save(folder / "model.json")
        runs = tuple(
            RunSpec(
                name=f"rule{number}",
                model=answer.question.model_spec,
                model_path=str(folder / "model.json"),
                plan=Plan.from_json(row["plan"]),
                optimizer=answer.question.training.optimizer,
                learning_rate=case.rate,
                dataset="digits",
                seed=seed,
                shards=case.shards,
            )
            for number, row in enumerate(rows)
        )
        Job(output=str(folder), mode="measure", runs=runs, steps=MOST_STEPS).save(folder / "job.json")
        Goal(target=case.target, most_steps=tuple(math.ceil(PATIENCE * row["steps"]) for row in rows)).save(folder)
        launch(
            folder / "job.json",
            case.processes,
            module="experiments.relaxed.time_to_accuracy_rank",
            env={"PYTHONPATH": str(ROOT)},
            hang_s=120.0,
        )
        found = read_json(folder / FOUND)
    return [{"rule": row["rule"], **found[run.name]} for row, run in zip(rows, runs, strict=True)]


def middle(rows: list[dict[str, Any]], key: str) -> float | None:
    """The median over rounds; None where half of them or more did not reach the target."""
    value = statistics.median([row[key] if row["reached"] else math.inf for row in rows]) if rows else math.inf
    return None if value == math.inf else value


def joined(case: Case, predictions: list[dict[str, Any]], launches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per rule of a case: predicted, and the median of the executed rounds."""
    table = []
    for row in predictions:
        own = [found for entry in launches for found in entry["rows"] if found["rule"] == row["rule"]]
        table.append(
            {
                "case": case.name,
                "target": case.target,
                "rule": row["rule"],
                "predicted_s": row["predicted_s"],
                "log_deviation": row["log_deviation"],
                "predicted_steps": row["steps"],
                "executed_s": middle(own, "seconds"),
                "executed_steps": middle(own, "steps"),
                "rounds": len(own),
                "seconds": [found["seconds"] if found["reached"] else None for found in own],
            }
        )
    return table


def main() -> None:
    parser = part_parser(__doc__, "one case, one round, two rules, one seed", out="runs/time_to_accuracy")
    parser.add_argument("profiles", nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds is at least 1")
    rounds, seeds = (1, 1) if options.quick else (options.rounds, SEEDS)
    try:
        loaded = {name: load_profile(name) for name in options.profiles}
        sizes = {len(profile.devices): name for name, profile in loaded.items()}
        raced_cases = {case: sizes.get(case.processes, options.profiles[0]) for case in CASES}
        if options.quick:
            raced_cases = dict(list(raced_cases.items())[:1])
        contents = [Path(name).read_bytes() if Path(name).is_file() else name.encode() for name in options.profiles]
        digest = hashlib.sha256(b"".join(contents)).hexdigest()[:12]
        rules = RULES[:2] if options.quick else None
        rows = raced(raced_cases, digest, options.out / "quick" if options.quick else options.out, rules, rounds, seeds)
    except (OSError, ParsimError) as error:
        parser.exit(1, f"{error}\n")
    show({"profiles": [profile.name for profile in loaded.values()], "rounds": rounds, "rows": rows}, as_json=options.json)


def raced(
    cases: Mapping[Case, str], digest: str, out: Path, rules: tuple[str, ...] | None, rounds: int, seeds: int
) -> list[dict[str, Any]]:
    """Predict every case, then execute it in rounds; what is in `out` of these profiles is not done again.

    Args: cases: with the profile of each. rules: None: those of the case.
    """
    out.mkdir(parents=True, exist_ok=True)
    told, launched = Record(out / "predictions.jsonl", digest), Record(out / "launches.jsonl", digest)
    known = {entry["case"]: entry["rows"] for entry in told.entries}
    for case, profile in cases.items():
        if case.name not in known:
            known[case.name] = predicted(profile, case, rules or case.rules, seeds)
            told.add({"case": case.name, "rows": known[case.name]})
            print(f"{case.name}: predicted", file=sys.stderr, flush=True)
    done = {(entry["case"], entry["round"]) for entry in launched.entries}
    for number in range(rounds):
        for case, profile in cases.items():
            if (case.name, number) in done:
                continue
            rows = [row for row in known[case.name] if row["steps"] is not None]
            found = executed(profile, case, rows, FIRST_SEED + number) if rows else []
            launched.add({"case": case.name, "round": number, "rows": found})
            print(f"{case.name}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return [
        row
        for case in cases
        for row in joined(
            case,
            known[case.name],
            [entry for entry in launched.entries if entry["case"] == case.name and entry["round"] < rounds],
        )
    ]


if __name__ == "__main__":
    main()
