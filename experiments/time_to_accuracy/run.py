"""How often does the predicted winner of two ways of synchronising win when both are executed?

    python experiments/time_to_accuracy/run.py PROFILE [--rounds N] [--quick] [--json] [--out DIR]

PROFILE is one that `parsim calibrate` has measured here for two ranks. For each case `to_target` predicts the seconds of each
rule to a test accuracy: simulated seconds per step times steps of virtual replicas. Then real processes train by each rule,
from the same weights and samples, until a checkpoint scores the target: measured seconds per step times its steps.
Rules take turns in rounds. Launches are kept in DIR/launches.jsonl; the same command goes on behind the last one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import parsim
from parsim.execute.job import Job, RunSpec
from parsim.execute.processes.launch import launch
from parsim.execute.records.measurement import load_measurement
from parsim.execute.state.checkpoint import latest_checkpoint, load_state
from parsim.graph.lower import lower
from parsim.hardware.profile import load_profile
from parsim.virtual.to_target import SCORED_EVERY
from parsim.workflow.public.answer import Answer
from parsim.workflow.relaxed.learners import learner_of
from parsim.workflow.relaxed.to_target import Contender

RANKS = 2
SEED = 0
MOST_STEPS = 1000
MORE = 10
"""Times that a training may go on by `SCORED_EVERY` steps where it does not score the target after the predicted steps."""
RULES = ("average/4", "average/16", "average/16 outer=nesterov:0.7:0.9", "gossip/1 ring", "gossip/4 ring", "merge/4")


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


def executed(answer: Answer, case: Case, contender: Contender) -> dict[str, Any]:
    """One launch: trained until a checkpoint scores the target.

    Returns:
        reached: whether it did. steps: until then. step_s: mean seconds of a step of the first training. score: at the end.
    """
    assert contender.result is not None
    assert contender.learnt is not None
    assert contender.learnt.steps is not None
    plan, config = contender.result.plan, answer.config
    scorer = learner_of(answer, RANKS).training(case.rate, SEED)
    names = [name for name, _ in scorer.tensors]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        answer.problem.model.save(folder / "model.json")
        run = RunSpec(
            name="run",
            model=config.model_spec,
            model_path=str(folder / "model.json"),
            plan=plan,
            optimizer=config.training.optimizer,
            learning_rate=case.rate,
            dataset="digits",
            seed=SEED,
        )
        steps, step_s, score = int(contender.learnt.steps), 0.0, 0.0
        for number in range(1 + MORE):
            job = Job(output=str(folder), mode="train", runs=(run,), steps=steps, warmup_steps=0, resume=number > 0)
            job.save(folder / "job.json")
            launch(folder / "job.json", plan.world_size)
            step_s = step_s or load_measurement(folder / "run", lower(plan, answer.problem.model)).mean_step_s
            found = latest_checkpoint(folder / "checkpoints")
            assert found is not None
            weights = load_state(found).weights
            score = scorer.score(torch.cat([weights[name].flatten().float() for name in names]))
            if score >= case.target:
                break
            steps += SCORED_EVERY
        return {"reached": score >= case.target, "steps": found.step, "step_s": step_s, "score": score}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one case, one round, three rules")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/time_to_accuracy"))
    given = parser.parse_args()
    cases, rules, rounds = (CASES[:1], RULES[:2], 1) if given.quick else (CASES, RULES, given.rounds)
    given.out.mkdir(parents=True, exist_ok=True)
    profile = load_profile(str(given.profile)).name
    record = given.out / "launches.jsonl"
    kept = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    done = {(entry["case"], entry["rule"], entry["round"]) for entry in kept if entry["profile"] == profile}
    rows: list[dict[str, Any]] = []
    questions = {case: asked(given.profile, case) for case in cases}
    ranked = {
        case: answer.to_target(case.target, rules=rules, seeds=1, most_steps=MOST_STEPS).contenders
        for case, answer in questions.items()
    }
    for number in range(rounds):
        for case, contenders in ranked.items():
            for contender in contenders:
                key = (case.name, str(contender.rule), number)
                if contender.seconds is None or key in done:
                    continue
                entry = {"profile": profile, "case": case.name, "rule": str(contender.rule), "round": number}
                entry |= executed(questions[case], case, contender)
                kept.append(entry)
                with record.open("a") as file:
                    file.write(json.dumps(entry) + "\n")
    for case, contenders in ranked.items():
        for contender in contenders:
            own = [
                entry
                for entry in kept
                if (entry["profile"], entry["case"], entry["rule"]) == (profile, case.name, str(contender.rule))
                and entry["reached"]
                and entry["round"] < rounds
            ]
            seconds = [entry["steps"] * entry["step_s"] for entry in own]
            rows.append(
                {
                    "case": case.name,
                    "target": case.target,
                    "rule": str(contender.rule),
                    "predicted_s": contender.seconds,
                    "predicted_steps": None if contender.learnt is None else contender.learnt.steps,
                    "executed_s": statistics.median(seconds) if seconds else None,
                    "executed_steps": statistics.median(entry["steps"] for entry in own) if own else None,
                    "rounds": len(own),
                }
            )
    document = {"profile": profile, "rounds": rounds, "rows": rows}
    if given.json:
        print(json.dumps(document))
        return
    for row in rows:
        print({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})


if __name__ == "__main__":
    main()
