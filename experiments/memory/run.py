"""How far is the predicted peak memory from the measured one?

    python experiments/memory/run.py [--quick] [--models A,B] [--out DIR] [--json]

Every model of the zoo small enough for this machine under many plans on two processes: one device, replicas, pipelines of both
orders, shards, divided optimizer state, components placed by themselves, components recomputed; and one plain step under
autocast. Predicted from the Model and the Plan alone; measured by counting the bytes of every live tensor, operator by
operator, during one step of a real run. What no tensor accounts for (the process itself, gloo's scratch copies) is on neither
side.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cases import BATCH_SAMPLES, QUESTIONS, Question, plans, staged, two_processes
from lines import LINES, by_line, table

from parsim.execute.autocast_step import autocast_peak_bytes
from parsim.execute.job import Job, RunSpec
from parsim.execute.processes.launch import launch
from parsim.execute.records.measurement import RankRecord
from parsim.files import write_csv
from parsim.model.load import load_model
from parsim.plans.mesh import Mesh
from parsim.predict.planning_problem import PlanningProblem


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two models")
    parser.add_argument("--models", help="some of them, by name")
    parser.add_argument("--out", type=Path, default=Path("runs/memory"))
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    names = asked.models.split(",") if asked.models else None
    questions = [question for question in QUESTIONS if names is None or question.spec.name in names]
    chosen = questions[: 2 if asked.quick else None]
    rows = [row for question in chosen for row in itertools.chain(measure(question), under_autocast(question))]
    asked.out.mkdir(parents=True, exist_ok=True)
    write_csv(asked.out / "memory.csv", rows)
    if asked.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items() if not key.startswith(("predicted ", "measured "))))
    for kept, what in ((False, "held-out models"), (True, "models looked at")):
        errors = [abs(float(row["error_percent"])) for row in rows if row["tuned"] is kept]
        if errors:
            worst, mean = max(errors), statistics.mean(errors)
            print(f"{what}: {len(errors)} cases, mean |error| {mean:.2f}%, worst {worst:.2f}%")
    print("\n".join(table(rows)))


def measure(question: Question) -> Iterator[dict[str, Any]]:
    """All plans of one model in one launch; per plan the rank whose error is largest."""
    model = load_model(question.spec, granularity=question.granularity)
    base = PlanningProblem(model=model, cluster=two_processes(), global_batch=BATCH_SAMPLES)
    cases = list(plans(model))
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        model.save(folder / "model.json")
        runs = tuple(
            RunSpec(
                name=f"case{number}",
                model=question.spec,
                model_path=str(folder / "model.json"),
                plan=case.plan,
                optimizer=case.optimizer,
                learning_rate=1e-3,
                dataset=question.dataset,
            )
            for number, case in enumerate(cases)
        )
        job = Job(output=text, mode="measure", runs=runs, steps=1, rounds=1, warmup_steps=1)
        job.save(folder / "job.json")
        launch(folder / "job.json", job.world_size, timeout_s=900)
        for case, run in zip(cases, runs, strict=True):
            problem = replace(base, optimizer=case.optimizer)
            worst: dict[str, Any] = {}
            for entry in problem.memory(case.plan):
                predicted = sum(entry.tensor_lines.values())
                record = RankRecord.load(folder / run.name, entry.rank)
                measured = record.peak_bytes
                error = 100 * (predicted - measured) / measured
                if not worst or abs(error) > abs(worst["error_percent"]):
                    worst = {
                        "rank": entry.rank,
                        "predicted_bytes": predicted,
                        "measured_bytes": measured,
                        "error_percent": round(error, 2),
                        "largest_line": largest(entry.tensor_lines),
                        **{f"predicted {name}": size for name, size in by_line(entry.tensor_lines).items()},
                        **{f"measured {name}": size for name, size in by_line(record.memory_lines).items()},
                    }
            yield {
                "model": question.spec.name,
                "granularity": question.granularity,
                "tuned": question.tuned,
                "case": case.label,
                "optimizer": case.optimizer,
                **worst,
            }


def largest(lines: Mapping[str, int]) -> str:
    return max(lines, key=lambda name: lines[name])


def under_autocast(question: Question) -> Iterator[dict[str, Any]]:
    """One plain step in this process under the CPU's autocast to bfloat16, at two batches: plans are executed in fp32 alone."""
    model = load_model(question.spec, granularity=question.granularity)
    for samples in (BATCH_SAMPLES // 4, BATCH_SAMPLES):
        problem = PlanningProblem(
            model=model, cluster=two_processes(), global_batch=samples, precision="amp_bf16", optimizer="sgd"
        )
        plan = replace(staged(model, Mesh()), global_batch=samples)
        (memory,) = problem.memory(plan)
        predicted, measured = sum(memory.tensor_lines.values()), autocast_peak_bytes(question.spec, samples)
        yield {
            "model": question.spec.name,
            "granularity": question.granularity,
            "tuned": question.tuned,
            "case": f"autocast, {samples} samples",
            "optimizer": "none",
            "rank": 0,
            "predicted_bytes": predicted,
            "measured_bytes": measured,
            "error_percent": round(100 * (predicted - measured) / measured, 2),
            "largest_line": largest(memory.tensor_lines),
            **{f"{side} {name}": "" for side in ("predicted", "measured") for name in LINES},
        }


if __name__ == "__main__":
    main()
