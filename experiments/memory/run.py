"""How far is the predicted peak memory from the measured one?

    python -m experiments.memory.run [--quick] [--models A,B] [--ranks N] [--seconds N] [--missing] [--predict] [--write]

Ten models under named plans and plans drawn at random, on two and four processes: one device, replicas, pipelines of every
order, shards, ZeRO 1 to 3, components placed by themselves or recomputed; and plain steps under autocast. Nine kinds of modules
more under fewer plans (kinds.py), and all of them with averaged weights, clipped gradients and every precision of a CPU.
Predicted from the Model and the Plan alone. Measured by counting the bytes of every live tensor, operator by operator, during
one step of a real run. What no tensor accounts for (the process itself, gloo's scratch copies) is on neither side.

What was measured of a plan is kept in the folder of `--out` under a key of the model and the plan, and is not measured again:
`--predict` measures nothing. Remove the folder after a change of the executor. `--write` puts all of it into results.json. A
case that is not in the folder keeps the measured peaks that results.json has of it, and is predicted anew. `--missing` measures
only what results.json has not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessRaisedException

from experiments.common.catalogue import record, recorded
from experiments.common.running import commit
from experiments.memory.cases import BATCH_SAMPLES, Case, Question, processes, staged
from experiments.memory.judge import SMALLEST_BYTES, by_line, summary
from experiments.memory.kinds import ALL, cases_of
from experiments.memory.ranks import autocast_peak_bytes, is_measured, measure, measured
from parsim.execute.job import RunSpec
from parsim.files import write_text_atomically
from parsim.model.formats import RECORDED_WEIGHTS, Numerics, recorded_weights
from parsim.model.load import load_model
from parsim.model.model import Model
from parsim.plans.mesh import Mesh
from parsim.predict.problem import PlanningProblem

AUTOCAST_SAMPLES = (BATCH_SAMPLES // 4, BATCH_SAMPLES)
AT_ONCE = 8
"""Plans of one set of processes: between two sets the time is looked at."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two models")
    parser.add_argument("--models", help="some of them, by name")
    parser.add_argument("--ranks", type=int, help="measure plans of so many ranks alone")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many, and go on at the next call")
    parser.add_argument("--missing", action="store_true", help="measure only what results.json has not")
    parser.add_argument("--predict", action="store_true", help="measure nothing")
    parser.add_argument("--write", action="store_true", help="results.json, of all models that were measured")
    parser.add_argument("--out", type=Path, default=Path("runs/memory"))
    asked = parser.parse_args()
    names = asked.models.split(",") if asked.models else None
    questions = [question for question in ALL if names is None or question.label.rpartition("-")[0] in names]
    questions = questions[: 2 if asked.quick else None]
    until = 0.0 if asked.predict else time.monotonic() + asked.seconds
    before = recorded_peaks()
    failed: set[str] = set()
    open_ = list(questions)
    while open_ and time.monotonic() < until:
        known = before if asked.missing else {}
        open_ = [question for question in open_ if measure_some(question, asked.out, failed, known, asked.ranks)]
    rows = [row for question in questions for row in answers(question, asked.out, before)]
    for row in sorted(rows, key=lambda row: -abs(row["error_percent"])):
        print(f"{row['error_percent']:+7.2f}%  {row['model']:22} {row['case']:45} {row['plan']}")
    print(json.dumps(summary(rows), indent=1))
    if asked.write:  # a plan that is not drawn any more stays as it was recorded
        every = [*(recorded("memory") or {}).get("rows", ()), *rows]
        rows = list({(row["model"], row["case"], row["plan"]): row for row in every}.values())
        machine = {"processor": platform.processor() or platform.machine(), "torch": torch.__version__}
        record("memory", {"run": {"date": time.strftime("%Y-%m-%d"), "commit": commit(), **machine}, "rows": rows})


Peaks = Mapping[tuple[str, str, str], Sequence[Mapping[str, Any]]]
"""What was measured on every rank, by model, case and plan."""


def recorded_peaks() -> Peaks:
    """What results.json has: the peaks of all ranks, and the lines of the one of which the row has them."""
    return {
        (row["model"], row["case"], row["plan"]): [
            {"peak_bytes": peak, "by_line": row["measured_lines"] if sum(row.get("measured_lines", ())) == peak else None}
            for _, _, _, peak in row["ranks"]
        ]
        for row in (recorded("memory") or {}).get("rows", ())
    }


def measure_some(question: Question, out: Path, failed: set[str], known: Peaks, ranks: int | None = None) -> int:
    """Measure the next few cases that are not known, in an order that mixes their kinds, and return how many are left. failed:
    names of runs; the next one is added. ranks: of plans; None: all."""
    models, folder = _traced(question, out)
    asked = [case for case in cases_of(question, models) if (question.label, case.label, plan_text(case)) not in known]
    runs = sorted((job_of(question, case, folder) for case in asked), key=lambda run: (run.plan.world_size > 2, run.name))
    open_ = [run for run in runs if run.name not in failed and not is_measured(folder, run)]
    open_ = [run for run in open_ if ranks in (None, run.plan.world_size)]
    weights = recorded_weights(open_[0].precision) if open_ else ""
    now = [run for run in open_ if recorded_weights(run.precision) == weights][:AT_ONCE]
    try:
        measure(models[weights or "float32"], now, folder)
    except ProcessRaisedException as error:
        fault = next(run for run in now if not is_measured(folder, run))
        failed.add(fault.name)
        print(f"{question.label}: {fault.plan.summary()} in {fault.precision} failed\n{error}", flush=True)
    if not known and not question.kind:
        for samples in AUTOCAST_SAMPLES:
            path = folder / f"autocast-{samples}.json"
            if not path.is_file():
                write_text_atomically(path, json.dumps(autocast_peak_bytes(question.spec, samples)))
    left = len(open_) - len(now)
    print(f"{time.strftime('%H:%M:%S')} {question.label}: {left} left", flush=True)
    return left


def answers(question: Question, out: Path, before: Peaks) -> list[dict[str, Any]]:
    """A row for every case of the question that was measured, now or before."""
    models, folder = _traced(question, out)
    rows = []
    for case in cases_of(question, models):
        model = models[recorded_weights(case.precision)]
        run = job_of(question, case, folder)
        if is_measured(folder, run):
            found = [{**entry, "by_line": by_line(entry["lines"])} for entry in measured(folder, run)]
            rows.append(answer(question, model, case, found))
        elif known := before.get((question.label, case.label, plan_text(case))):
            rows.append(answer(question, model, case, known))
    return rows + under_autocast(question, models["float32"], folder, before)


def plan_text(case: Case) -> str:
    """Of the plan, its optimizer, and what else changes memory. That gradients are clipped is part of a plan."""
    words = case.plan.summary(), case.optimizer, "" if case.precision == "fp32" else case.precision
    return ", ".join(filter(None, [*words, "averaged" if case.recipe.ema else ""]))


@cache
def _traced(question: Question, out: Path) -> tuple[dict[str, Model], Path]:
    folder = out / question.label
    folder.mkdir(parents=True, exist_ok=True)
    return models_of(question), folder


def models_of(question: Question) -> dict[str, Model]:
    """The Model of a question by torch's name of the weights' type."""
    return {
        weights: load_model(question.spec, granularity=question.granularity, weights=weights)
        for weights in RECORDED_WEIGHTS.values()
    }


def job_of(question: Question, case: Case, folder: Path) -> RunSpec:
    """What the ranks run of a case. folder: of the question."""
    is_plain = plan_text(case) == plan_text(Case("", case.plan, case.optimizer))
    other = [] if is_plain else [case.precision, case.recipe.model_dump(mode="json")]
    content = json.dumps([case.plan.to_dict(), case.optimizer, *other], sort_keys=True)
    return RunSpec(
        name=hashlib.sha256(content.encode()).hexdigest()[:16],
        model=question.spec,
        model_path=str(folder / "model.json"),
        plan=case.plan,
        optimizer=case.optimizer,
        learning_rate=1e-3,
        dataset=question.dataset,
        precision=case.precision,
        recipe=case.recipe,
    )


def problem_of(model: Model, case: Case) -> PlanningProblem:
    """What is asked of a case's memory. model: of the weights that its precision records."""
    return PlanningProblem(
        model=model,
        cluster=processes(),
        global_batch=BATCH_SAMPLES,
        numerics=Numerics(optimizer=case.optimizer, precision=case.precision, ema=case.recipe.ema is not None),
    )


def answer(question: Question, model: Model, case: Case, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the rank whose error is largest, of those with `SMALLEST_BYTES`; and of every rank the prediction with its interval,
    and the measured peak."""
    problem = problem_of(model, case)
    ranks = []
    for entry in problem.memory(case.plan):
        predicted, peak = sum(entry.tensor_lines.values()), found[entry.rank]["peak_bytes"]
        beside = entry.total_bytes - predicted
        bounds = entry.low_bytes - beside, predicted, entry.high_bytes - beside, peak
        lines = by_line(entry.tensor_lines), found[entry.rank]["by_line"]
        ranks.append((100 * (predicted - peak) / peak, bounds, lines))
    judged = [rank for rank in ranks if rank[1][3] >= SMALLEST_BYTES] or ranks
    error, _, (foreseen, seen) = max(judged, key=lambda rank: abs(rank[0]))
    return {
        "model": question.label,
        "tuned": question.tuned,
        "case": case.label,
        "kind": case.kind,
        "plan": plan_text(case),
        "error_percent": round(error, 3),
        "fullest_percent": round(max(ranks, key=lambda rank: rank[1][3])[0], 3),
        "ranks": [bounds for _, bounds, _ in ranks],
        **({"predicted_lines": foreseen, "measured_lines": seen} if seen is not None else {}),
    }


def under_autocast(question: Question, model: Model, folder: Path, before: Peaks) -> list[dict[str, Any]]:
    """One plain step in this process under the CPU's autocast to bfloat16, at two batches, without the executor."""
    rows = []
    for samples in AUTOCAST_SAMPLES:
        path, key = folder / f"autocast-{samples}.json", (question.label, f"autocast, {samples} samples", "one plain step")
        if path.is_file() or key in before:
            peak = json.loads(path.read_text()) if path.is_file() else before[key][0]["peak_bytes"]
            problem = PlanningProblem(
                model=model, cluster=processes(), global_batch=samples, numerics=Numerics(precision="amp_bf16", optimizer="sgd")
            )
            (memory,) = problem.memory(replace(staged(model, Mesh()), global_batch=samples))
            predicted = sum(memory.tensor_lines.values())
            rows.append(
                {
                    "model": question.label,
                    "tuned": question.tuned,
                    "case": f"autocast, {samples} samples",
                    "kind": "autocast",
                    "plan": "one plain step",
                    "error_percent": round(100 * (predicted - peak) / peak, 3),
                    "fullest_percent": round(100 * (predicted - peak) / peak, 3),
                    "ranks": [(predicted, predicted, predicted, peak)],
                }
            )
    return rows


if __name__ == "__main__":
    main()
