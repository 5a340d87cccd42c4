"""How often does the predicted winner of two ways of synchronising win when both are executed?

    python -m experiments.relaxed.time_to_accuracy PROFILE [--rounds N] [--quick] [--json] [--out DIR]

PROFILE is one that `parsim calibrate` has measured here for two ranks; `--quick` compares nothing, so any will do. For each
case `to_target` predicts the seconds of each rule to a test accuracy: simulated seconds per step times steps of virtual
replicas, over three seeds. Then real processes train by each rule until the mean weights score the target. Every round has a
seed that the prediction has not seen. One launch trains all rules of a case and a round in turns. Predictions are kept in
DIR/predictions.jsonl before the first launch, and launches in DIR/launches.jsonl; the same command goes on behind the last one.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import sys
import tempfile
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

RANKS = 2
SEEDS = 3
"""Of the prediction: 0, 1, 2."""
FIRST_SEED = 10
"""Of the first round that is executed."""
MOST_STEPS = 1000
PATIENCE = 2
"""Times the predicted steps after which an executed training is given up."""
RULES = ("average/4", "average/16", "average/16 outer=nesterov:0.7:0.9", "gossip/1 ring", "gossip/4 ring", "merge/4", "stale")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A question: digits MLP of a width, samples of both replicas per step, learning rate and test accuracy."""

    width: int
    batch: int
    rate: float
    target: float

    @property
    def name(self) -> str:
        return f"width {self.width}, batch {self.batch}"


CASES = (
    Case(width=64, batch=32, rate=0.02, target=0.93),
    Case(width=512, batch=64, rate=0.02, target=0.95),
    Case(width=512, batch=256, rate=0.05, target=0.95),
)


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


def asked(profile: Path, case: Case) -> Answer:
    """The question about a case, planned."""
    return parsim.plan(
        "mlp",
        cluster=str(profile),
        devices=RANKS,
        global_batch=case.batch,
        args={"width": case.width},
        optimizer="sgd_momentum",
        strategy="dp",
        overrides=[f"training.learning_rate={case.rate}"],
    )


def predicted(answer: Answer, case: Case, rules: tuple[str, ...], seeds: int) -> list[dict[str, Any]]:
    """A row per rule: seconds and steps to the target, None where virtual replicas do not reach it, and its plan."""
    ranking = answer.to_target(case.target, rules=rules, seeds=seeds, most_steps=MOST_STEPS)
    return [
        {
            "rule": str(entry.rule),
            "predicted_s": entry.seconds,
            "steps": None if entry.learnt is None else entry.learnt.steps,
            "plan": None if entry.result is None else entry.result.plan.to_json(),
        }
        for entry in ranking.contenders
    ]


def executed(answer: Answer, case: Case, rows: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """One launch: every rule trained until the mean weights score the target, or twice as long as predicted. Per rule: reached,
    steps, seconds and score, at the target or at the end."""
    config = answer.question
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        answer.problem.model.save(folder / "model.json")
        runs = tuple(
            RunSpec(
                name=f"rule{number}",
                model=config.model_spec,
                model_path=str(folder / "model.json"),
                plan=Plan.from_json(row["plan"]),
                optimizer=config.training.optimizer,
                learning_rate=case.rate,
                dataset="digits",
                seed=seed,
            )
            for number, row in enumerate(rows)
        )
        Job(output=str(folder), mode="measure", runs=runs, steps=MOST_STEPS).save(folder / "job.json")
        Goal(target=case.target, most_steps=tuple(math.ceil(PATIENCE * row["steps"]) for row in rows)).save(folder)
        launch(
            folder / "job.json",
            RANKS,
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
                "predicted_steps": row["steps"],
                "executed_s": middle(own, "seconds"),
                "executed_steps": middle(own, "steps"),
                "rounds": len(own),
                "seconds": [found["seconds"] if found["reached"] else None for found in own],
            }
        )
    return table


def main() -> None:
    parser = part_parser(__doc__, "one case, one round, three rules, one seed", out="runs/time_to_accuracy")
    parser.add_argument("profile", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds is at least 1")
    cases, rules, rounds, seeds = (CASES[:1], RULES[:2], 1, 1) if options.quick else (CASES, RULES, options.rounds, SEEDS)
    try:
        profile = load_profile(str(options.profile)).name
        content = options.profile.read_bytes() if options.profile.is_file() else str(options.profile).encode()
        digest = hashlib.sha256(content).hexdigest()[:12]
        rows = raced(
            options.profile, digest, options.out / "quick" if options.quick else options.out, cases, rules, rounds, seeds
        )
    except (OSError, ParsimError) as error:
        parser.exit(1, f"{error}\n")
    show({"profile": profile, "rounds": rounds, "rows": rows}, as_json=options.json)


def raced(
    profile: Path, digest: str, out: Path, cases: tuple[Case, ...], rules: tuple[str, ...], rounds: int, seeds: int
) -> list[dict[str, Any]]:
    """Predict every case, then execute it in rounds; what is in `out` of this profile is not done again."""
    out.mkdir(parents=True, exist_ok=True)
    told, launched = Record(out / "predictions.jsonl", digest), Record(out / "launches.jsonl", digest)
    answers = {case: asked(profile, case) for case in cases}
    known = {entry["case"]: entry["rows"] for entry in told.entries}
    for case, answer in answers.items():
        if case.name not in known:
            known[case.name] = predicted(answer, case, rules, seeds)
            told.add({"case": case.name, "rows": known[case.name]})
            print(f"{case.name}: predicted", file=sys.stderr, flush=True)
    done = {(entry["case"], entry["round"]) for entry in launched.entries}
    for number in range(rounds):
        for case, answer in answers.items():
            if (case.name, number) in done:
                continue
            rows = [row for row in known[case.name] if row["steps"] is not None]
            found = executed(answer, case, rows, FIRST_SEED + number) if rows else []
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
