"""The work of `parsim demo`: the main job, end to end, on whatever this machine has.

(a) Which way of training ResNet-50 and ViT-B/16 on eight V100s is fastest, and why the others lose. (b) The same question for a
small ResNet and a small ViT on this machine, on its GPUs or else its CPU. It calibrates, plans, and trains for real with the
chosen plan and two others. It shows the error of the prediction and the noise floor of the measurement. (c) A report.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from parsim.app.answer import Answer
from parsim.app.ask import ask, every_rank, whole
from parsim.app.calibration import ChosenRanks, choose_ranks
from parsim.app.doctor import progress
from parsim.app.launch import device_kind, launch_job, run_spec
from parsim.app.measured import judge, measured
from parsim.app.question import question_of
from parsim.app.run_folder import RunFolder
from parsim.app.write_folder import report_facts, report_run
from parsim.execute.job import Job
from parsim.execute.measurement import Measurement
from parsim.model.spec import ModelSpec
from parsim.plans.plan import Plan, plan_in_words
from parsim.predict.compare import Comparison
from parsim.predict.evaluate import Evaluation, evaluate
from parsim.report.page import ReportData, ReportSection, write_report
from parsim.report.tables import ReportTable, calibration_table, validation_table
from parsim.units import format_percent, format_seconds

WHAT_IF_MODELS = {"resnet50": "sgd_momentum", "vit_b_16": "adam"}
"""Optimizers of part (a), by model."""
REAL_MODELS: dict[str, dict[str, Any]] = {
    "resnet_small": {"training.optimizer": "sgd_momentum", "training.learning_rate": 0.01, "model.args": {}},
    "vit_small": {"training.optimizer": "adamw", "training.learning_rate": 0.001, "model.args": {"patch": 8}},
}
"""Keys of part (b), by model."""
GLOBAL_BATCH = 32
LOCAL_BATCHES = (32, 16, 8, 4)
CPU_RANKS, MOST_RANKS = 2, 8
PLANS_RUN = 3
STEPS_PER_ROUND = 6
WARMUP_STEPS = 3


@dataclass(frozen=True, slots=True)
class Thoroughness:
    """How much of its time the demo takes to measure: a quick calibration knows less, and its intervals are wider.

    Attributes: quick: the calibration. rounds: of the real runs. planning_s, calibrating_s, running_s: what the parts take on
        two quiet cores, each run one model; they only serve to say how much time is left.
    """

    quick: bool
    rounds: int
    planning_s: float
    calibrating_s: float
    running_s: float


QUICK = Thoroughness(quick=True, rounds=5, planning_s=15.0, calibrating_s=35.0, running_s=20.0)
FULL = Thoroughness(quick=False, rounds=12, planning_s=15.0, calibrating_s=150.0, running_s=30.0)


@dataclass(frozen=True, kw_only=True)
class RealRun:
    """One plan of part (b) with what was measured of it."""

    model: str
    name: str
    evaluation: Evaluation
    seen: Measurement
    comparison: Comparison

    def to_dict(self) -> dict[str, Any]:
        result = self.evaluation.result
        return {
            "model": self.model,
            "strategy": result.strategy,
            "plan_summary": result.plan.summary(),
            **self.comparison.to_dict(),
            "losses": list(self.seen.losses),
        }


@dataclass(frozen=True, kw_only=True)
class Demo:
    """The result. Attributes: what_if: part (a). real: part (b), with the runs of each question. report: of both, a page."""

    what_if: tuple[Answer, ...]
    real: tuple[tuple[Answer, tuple[RealRun, ...]], ...]
    ranks: ChosenRanks
    report: Path

    @property
    def runs(self) -> tuple[RealRun, ...]:
        return tuple(run for _, runs in self.real for run in runs)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, as `parsim demo --json` prints it."""
        answers = [*self.what_if, *(answer for answer, _ in self.real)]
        return {
            "strategies": {answer.question.model.name: answer.to_dict()["candidates"] for answer in answers},
            "runs": [run.to_dict() for run in self.runs],
            "report": str(self.report),
            "ranks": asdict(self.ranks),
        }

    def table(self) -> ReportTable:
        """Predicted against measured, one row per run."""
        rows = [(run.model, run.evaluation.result.plan.summary(), run.comparison.to_dict()) for run in self.runs]
        return validation_table(rows)

    def lines(self) -> list[str]:
        """What was learnt, which plans are best, and where the report lies."""
        losses = [
            f"{run.model} under {run.name}: loss {run.seen.losses[0]:.3f} -> {run.seen.losses[-1]:.3f}"
            for run in self.runs
            if run.seen.losses
        ]
        return [*losses, *summary_lines(self.what_if, self.real), f"report: {self.report}"]


def run_demo(out: Path, nproc: int | None, *, full: bool, show: Callable[[Answer], None]) -> Demo:
    """Plan, calibrate, train and compare on this machine, and write a report.

    Args: out: folder of the profile, the runs and the report. nproc: ranks of the real runs; None: one per GPU, or 2 processes.
        full: calibrate and measure longer. show: is given every answer as soon as it is there.
    Raises: ConfigError: more ranks than GPUs. ParsimError: as `plan`, `calibrate` and `run`.
    """
    from calibration.rounds.calibrate import calibrate

    ranks = choose_ranks(nproc, most=MOST_RANKS, cpu_ranks=CPU_RANKS)
    how = FULL if full else QUICK
    longer = "" if full else "; the calibration is a quick one, so its intervals are wide (--full measures longer)"
    print(f"Training for real on {ranks}{longer}", file=sys.stderr, flush=True)
    running_s = how.running_s * len(REAL_MODELS)
    _say_left(how.planning_s + how.calibrating_s + running_s)
    what_if = []
    for model, optimizer in WHAT_IF_MODELS.items():
        keys = {"cluster.devices": 8, "training.precision": "fp32", "training.optimizer": optimizer}
        question = question_of(model, cluster="dgx1-v100-32gb", global_batch=1024, settings=keys)
        with progress(f"Planning {model} on 8 V100s"):
            what_if.append(ask(question))
        show(what_if[-1])
    profile_path = out / "profile.json"
    profile_path.parent.mkdir(parents=True, exist_ok=True)
    _say_left(how.calibrating_s + running_s)
    with progress(f"Calibrating this machine on {ranks.count_text}") as say:
        profile = calibrate(calibration_of_demo(ranks, quick=how.quick), profile_path, on_line=say, leftover="discard")
    real = []
    for number, (model, keys) in enumerate(REAL_MODELS.items()):
        _say_left(how.running_s * (len(REAL_MODELS) - number))
        keys = {**keys, "cluster.devices": ranks.count, "training.dataset": "digits"}
        question = question_of(model, cluster=profile_path.resolve(), global_batch=GLOBAL_BATCH, settings=keys)
        with progress(f"Planning {model} on this machine"):
            answer = whole(ask(question))
        show(answer)
        real.append((answer, _run_plans(answer, out / model, how)))
    report = out / "report.html"
    with progress("Writing the report"):
        no_v100 = "fp32; no V100 was there: costs come from published measurements"
        sections = [
            _section(answer, "8 V100s (what if)", f"{answer.question.training.optimizer}, {no_v100}", None)
            for answer in what_if
        ]
        rounds = f"digits; every plan ran {how.rounds} interleaved rounds of {STEPS_PER_ROUND} steps"
        where = f"{ranks.count_text} of this machine (run for real)"
        sections += [_section(answer, where, rounds, runs) for answer, runs in real]
        data = ReportData(
            title="parsim demo",
            facts=report_facts(),
            summary=[*summary_lines([], real), *summary_lines(what_if, [])],  # measured first: the picture shows these
            sections=sections,
            extra_tables=(calibration_table(profile),),
        )
        write_report(data, report)
    return Demo(what_if=tuple(what_if), real=tuple(real), ranks=ranks, report=report)


def _say_left(seconds: float) -> None:
    print(f"About {format_seconds(seconds)} left, longer on a busy machine", file=sys.stderr, flush=True)


def calibration_of_demo(ranks: ChosenRanks, *, quick: bool = False) -> Any:
    """What part (b) measures, a `calibration.rounds.request.CalibrationRequest`."""
    from calibration.rounds.request import CalibrationRequest

    specs = [ModelSpec(name=name, args=tuple(keys["model.args"].items())) for name, keys in REAL_MODELS.items()]
    return CalibrationRequest(
        models=tuple((spec, LOCAL_BATCHES) for spec in specs),
        optimizers=tuple(dict.fromkeys(keys["training.optimizer"] for keys in REAL_MODELS.values())),
        nproc=ranks.count,
        device=ranks.kind,
        quick=quick,
    )


def plans_to_run(answer: Answer) -> list[Evaluation]:
    """The chosen plan and the best of other families, each program once; on one device the plan with other numbers of
    microbatches, since there is nothing to distribute."""
    candidates = answer.search.candidates if answer.search is not None else (answer.evaluation,)
    programs: dict[Plan, Evaluation] = {}  # two families may meet in one plan: it runs once
    for evaluation in candidates:
        if evaluation.result.fits:
            programs.setdefault(evaluation.result.plan.program, evaluation)
    evaluations = list(programs.values())[:PLANS_RUN]
    if answer.problem.cluster.size > 1 or not evaluations:
        return evaluations
    chosen = evaluations[0].result.plan
    for batch in LOCAL_BATCHES:
        count = GLOBAL_BATCH // batch
        if len(evaluations) < PLANS_RUN and count != chosen.microbatches:
            plan = replace(chosen, strategy="single", microbatches=count)
            evaluations.append(evaluate(answer.problem, plan, reason=f"to compare, with {count} microbatches"))
    return evaluations


def run_name(plan: Plan, devices: int) -> str:
    """The strategy; on one device with the number of microbatches, which tells its plans apart."""
    return plan.strategy if devices > 1 else f"{plan.strategy}-mb{plan.microbatches}"


def _run_plans(answer: Answer, path: Path, how: Thoroughness) -> tuple[RealRun, ...]:
    """Train under the chosen plan and the best of other families, interleaved in one launch."""
    question, problem = answer.question, answer.problem
    evaluations = [every_rank(problem, evaluation) for evaluation in plans_to_run(answer)]
    folder = RunFolder(path)
    named = {run_name(evaluation.result.plan, problem.cluster.size): evaluation for evaluation in evaluations}
    predictions = {name: replace(answer.prediction, evaluation=evaluation) for name, evaluation in named.items()}
    folder.write_question(next(iter(predictions.values())))
    job = Job(
        output=str(path.resolve()),
        mode="measure",
        runs=tuple(run_spec(prediction, name, folder.model) for name, prediction in predictions.items()),
        steps=STEPS_PER_ROUND,
        rounds=how.rounds,
        warmup_steps=WARMUP_STEPS,
        device=device_kind(answer.prediction),
    )
    with progress(f"Training {question.model.name} for real under {', '.join(named)}") as say:
        launch_job(job, folder, say)
    runs = []
    for name, evaluation in named.items():
        seen = measured(folder, name, evaluation)
        comparison = judge(problem, evaluation, seen)
        runs.append(RealRun(model=question.model.name, name=name, evaluation=evaluation, seen=seen, comparison=comparison))
    return tuple(runs)


def summary_lines(what_if: Sequence[Answer], real: Sequence[tuple[Answer, Sequence[RealRun]]]) -> list[str]:
    """One line for every question: the plan to use, or how right the prediction was."""
    lines = []
    for answer in what_if:
        if answer.fits:
            result, name = answer.evaluation.result, answer.question.model.name
            step = format_seconds(result.step_s.median)
            lines.append(f"{name} on 8 V100s: use {plan_in_words(result.plan)}, {step} per step (predicted).")
    return [*lines, *(f"{answer.question.model.name} here: {measured_sentence(runs)}" for answer, runs in real)]


def measured_sentence(runs: Sequence[RealRun]) -> str:
    """Whether the plan that was predicted fastest was the fastest, and how large the errors are."""
    predicted = min(runs, key=lambda run: run.comparison.step.predicted_s)
    fastest = min(runs, key=lambda run: run.comparison.step.measured_s)
    name, step_s = predicted.name, predicted.comparison.step.measured_s
    verdict = f"was predicted fastest, and was: {format_seconds(step_s)} per step measured"
    if fastest is not predicted:
        lost = step_s / fastest.comparison.step.measured_s - 1
        verdict = f"was predicted fastest; measured, {fastest.name} was, and {name} took {lost:.0%} longer"
    errors = sorted(abs(run.comparison.step.relative_error or 0.0) for run in runs)
    off = f"{format_percent(errors[0])} to {format_percent(errors[-1])}"
    return f"{name} {verdict}. Step times of {len(runs)} plans were off by {off}."


def _section(answer: Answer, where: str, text: str, runs: Sequence[RealRun] | None) -> ReportSection:
    name, chosen = answer.question.model.name, answer.evaluation.result.to_dict() if answer.fits else None
    if runs is not None:
        shown = [report_run(run.evaluation, run.seen, run.comparison) for run in runs]
    else:
        shown = [report_run(answer.evaluation, None, None)] if answer.fits else []
    return ReportSection(
        model=name,
        title=f"{name} on {where}",
        text=f"Global batch {answer.question.training.global_batch}, {text}.",
        results=[prediction.result.to_dict() for prediction in answer.candidates],
        chosen=chosen,
        runs=shown,
    )
