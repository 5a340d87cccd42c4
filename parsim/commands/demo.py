"""`parsim demo`: the main job, end to end, on whatever this machine has.

(a) Which way of training ResNet-50 and ViT-B/16 on eight V100s is fastest, and why the others lose. (b) The same question for a
small ResNet and a small ViT on this machine, on its GPUs or else its CPU. It calibrates, plans, and trains for real with the
chosen plan and two others. It shows the error of the prediction and the noise floor of the measurement. (c) A report.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from parsim.app.config import RunConfig, parse_config
from parsim.app.doctor import progress
from parsim.commands.output import JsonFlag, print_json, print_tables
from parsim.errors import MissingDependencyError

if TYPE_CHECKING:
    from calibration.rounds.request import CalibrationRequest
    from parsim.app.answer import Answer
    from parsim.app.calibration import ChosenRanks
    from parsim.app.run_folder import RunFolder
    from parsim.execute.measurement import Measurement
    from parsim.hardware.profile import Profile
    from parsim.plans.plan import Plan
    from parsim.predict.compare import Comparison
    from parsim.predict.evaluate import Evaluation
    from parsim.report.page import ReportSection
    from parsim.search.search import Search

WHAT_IF = """\
[model]
name = "{model}"
[cluster]
profile = "dgx1-v100-32gb"
devices = 8
[training]
global_batch = 1024
precision = "fp32"
optimizer = "{optimizer}"
"""

REAL = """\
[model]
name = "{model}"
args = {args}
[cluster]
profile = "{profile}"
devices = {devices}
[training]
global_batch = 32
optimizer = "{optimizer}"
learning_rate = {learning_rate}
dataset = "digits"
"""

WHAT_IF_MODELS = (("resnet50", "sgd_momentum"), ("vit_b_16", "adam"))
REAL_MODELS: tuple[tuple[str, dict[str, int], str, float], ...] = (
    ("resnet_small", {}, "sgd_momentum", 0.01),
    ("vit_small", {"patch": 8}, "adamw", 0.001),
)
GLOBAL_BATCH = 32
LOCAL_BATCHES = (32, 16, 8, 4)
CPU_RANKS, MOST_RANKS = 2, 8
PLANS_RUN = 3
STEPS_PER_ROUND = 6
WARMUP_STEPS = 3


@dataclass(frozen=True, slots=True)
class Thoroughness:
    """How much of its time the demo takes to measure.

    Attributes:
        quick: whether the calibration is; a quick one knows less, and its intervals are wider.
        rounds: of the real runs. planning_s, calibrating_s, running_s: what the parts take on two quiet cores, each run one
            model; they only serve to say how much time is left.
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
        result, comparison = self.evaluation.result, self.comparison.to_dict()
        return {
            "model": self.model,
            "strategy": result.strategy,
            "plan_summary": result.plan.summary(),
            **comparison,
            "losses": list(self.seen.losses),
        }


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the profile, the runs and report.html.")] = Path("parsim-demo"),
    nproc: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_RANKS, help="Ranks of the real runs. Default: one per GPU, or 2 processes on a CPU."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Calibrate and measure longer: five minutes instead of two.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Plan, calibrate, train and compare on this machine, and write a report: everything once, in two minutes."""
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError("the demo trains for real and needs torch; pip install 'parsim[torch]'")
    from parsim.app.calibration import choose_ranks
    from parsim.report.tables import validation_table

    ranks = choose_ranks(nproc, most=MOST_RANKS, cpu_ranks=CPU_RANKS)
    how = FULL if full else QUICK
    longer = "" if full else "; the calibration is a quick one, so its intervals are wide (--full measures longer)"
    print(f"Training for real on {ranks}{longer}", file=sys.stderr, flush=True)
    _say_left(how, runs=len(REAL_MODELS), planned=False, calibrated=False)
    what_if = [_what_if(model, optimizer) for model, optimizer in WHAT_IF_MODELS]
    if not as_json:
        for config, found in what_if:
            _print_strategies(config, found, f"{config.model.name} on 8 V100s, global batch 1024")
    profile_path = out / "profile.json"
    _say_left(how, runs=len(REAL_MODELS), calibrated=False)
    profile = _calibrate(profile_path, ranks, how)
    real: list[tuple[Answer, list[RealRun]]] = []
    for model, args, optimizer, learning_rate in REAL_MODELS:
        _say_left(how, runs=len(REAL_MODELS) - len(real))
        asked = _plan_here(
            REAL.format(
                model=model,
                args="{ " + ", ".join(f"{name} = {value}" for name, value in args.items()) + " }",
                profile=profile_path.resolve(),
                devices=ranks.count,
                optimizer=optimizer,
                learning_rate=learning_rate,
            ),
            model,
        )
        if not as_json and asked.search is not None:
            _print_strategies(asked.config, asked.search, f"{model} on {ranks.count_text}, global batch {GLOBAL_BATCH}")
        real.append((asked, _run_plans(asked, out / model, how)))
    rows = [run for _, runs in real for run in runs]
    report = out / "report.html"
    _write_report(report, what_if, real, profile, ranks, how)
    if as_json:
        strategies = {config.model.name: found.to_dict()["candidates"] for config, found in what_if}
        strategies |= {
            asked.config.model.name: asked.search.to_dict()["candidates"] for asked, _ in real if asked.search is not None
        }
        print_json(
            {"strategies": strategies, "runs": [run.to_dict() for run in rows], "report": str(report), "ranks": asdict(ranks)}
        )
        return
    print_tables(
        [validation_table([(run.model, run.evaluation.result.plan.summary(), run.comparison.to_dict()) for run in rows])]
    )
    for run in rows:
        if run.seen.losses:
            first, last = run.seen.losses[0], run.seen.losses[-1]
            print(f"{run.model} under {run.name}: loss {first:.3f} -> {last:.3f}")
    for line in _summary(what_if, real):
        print(line)
    print(f"report: {report}")


def _say_left(how: Thoroughness, *, runs: int, planned: bool = True, calibrated: bool = True) -> None:
    """About how long the rest takes, on stderr."""
    from parsim.units import format_seconds

    left = runs * how.running_s + (0.0 if planned else how.planning_s) + (0.0 if calibrated else how.calibrating_s)
    print(f"About {format_seconds(left)} left, longer on a busy machine", file=sys.stderr, flush=True)


def _what_if(model: str, optimizer: str) -> tuple[RunConfig, Search]:
    from parsim.app.ask import answer

    config = parse_config(WHAT_IF.format(model=model, optimizer=optimizer), where=f"{model} on V100")
    with progress(f"Planning {model} on 8 V100s"):
        asked = answer(config)
    assert asked.search is not None, "the demo's file leaves the plan to the search"
    return config, asked.search


def _print_strategies(config: RunConfig, found: Search, title: str) -> None:
    from parsim.report.tables import strategy_table
    from parsim.search.search import same_program

    chosen = None if found.chosen is None else found.chosen.result.to_dict()
    print_tables([strategy_table([entry.result.to_dict() for entry in found.candidates], chosen=chosen, title=title)])
    if found.chosen is None:
        print(f"{config.model.name}: no plan fits.")
        return
    first, *others = (entry.result for entry in found.candidates if entry.result.fits)
    runner_up = next((other for other in others if not same_program(other.plan, first.plan)), None)
    why = f"; {runner_up.strategy} is {runner_up.reason}" if runner_up is not None else ""
    print(f"chosen: {first.plan.summary()}{why}\n")


def calibration_of_demo(ranks: ChosenRanks, *, quick: bool = False) -> CalibrationRequest:
    """What part (b) measures."""
    from calibration.rounds.request import CalibrationRequest
    from parsim.model.spec import ModelSpec

    return CalibrationRequest(
        models=tuple((ModelSpec(name=name, args=tuple(args.items())), LOCAL_BATCHES) for name, args, _, _ in REAL_MODELS),
        optimizers=tuple(dict.fromkeys(optimizer for _, _, optimizer, _ in REAL_MODELS)),
        nproc=ranks.count,
        device=ranks.kind,
        quick=quick,
    )


def _calibrate(path: Path, ranks: ChosenRanks, how: Thoroughness) -> Profile:
    from calibration.rounds.calibrate import calibrate

    path.parent.mkdir(parents=True, exist_ok=True)
    with progress(f"Calibrating this machine on {ranks.count_text}") as say:
        return calibrate(calibration_of_demo(ranks, quick=how.quick), path, on_line=say, leftover="discard")


def _plan_here(text: str, model: str) -> Answer:
    from parsim.app.ask import answer

    config = parse_config(text, where=f"{model} here")
    with progress(f"Planning {model} on this machine"):
        return answer(config)


def plans_to_run(asked: Answer) -> list[Evaluation]:
    """The chosen plan and the best of other families, each program once; on one device the plan with other numbers of
    microbatches, since there is nothing to distribute."""
    from dataclasses import replace

    from parsim.predict.evaluate import evaluate

    assert asked.search is not None, "the demo's file leaves the plan to the search"
    programs = {  # two families may meet in one plan: it runs once
        replace(entry.result.plan, strategy="custom"): entry for entry in reversed(asked.search.candidates) if entry.result.fits
    }
    found = list(reversed(programs.values()))[:PLANS_RUN]
    if asked.problem.cluster.size > 1 or not found:
        return found
    chosen = found[0].result.plan
    for batch in LOCAL_BATCHES:
        count = GLOBAL_BATCH // batch
        if len(found) < PLANS_RUN and count != chosen.microbatches:
            plan = replace(chosen, strategy="single", microbatches=count)
            found.append(evaluate(asked.problem, plan, reason=f"to compare, with {count} microbatches"))
    return found


def run_name(plan: Plan, devices: int) -> str:
    """The strategy; on one device with the number of microbatches, which tells its plans apart."""
    return plan.strategy if devices > 1 else f"{plan.strategy}-mb{plan.microbatches}"


def _run_plans(asked: Answer, path: Path, how: Thoroughness) -> list[RealRun]:
    """Train under the chosen plan and the best of other families, interleaved in one launch."""
    from dataclasses import replace

    from parsim.app.ask import device_kind, every_rank, judge, launch_job, measured, run_spec
    from parsim.app.run_folder import RunFolder
    from parsim.execute.job import Job

    evaluations = [every_rank(asked.problem, entry) for entry in plans_to_run(asked)]
    folder: RunFolder = RunFolder(path)
    folder.write_question(asked.config, asked.problem.model, evaluations[0].result.plan, asked.problem.cluster.profile)
    names = [run_name(entry.result.plan, asked.problem.cluster.size) for entry in evaluations]
    job = Job(
        output=str(path.resolve()),
        mode="measure",
        runs=tuple(
            run_spec(replace(asked.prediction, evaluation=entry), name, folder.model)
            for name, entry in zip(names, evaluations, strict=True)
        ),
        steps=STEPS_PER_ROUND,
        rounds=how.rounds,
        warmup_steps=WARMUP_STEPS,
        device=device_kind(asked.prediction),
    )
    with progress(f"Training {asked.config.model.name} for real under {', '.join(names)}") as say:
        launch_job(job, folder, say)
    runs = []
    for name, entry in zip(names, evaluations, strict=True):
        seen = measured(folder, name, entry)
        runs.append(
            RealRun(
                model=asked.config.model.name,
                name=name,
                evaluation=entry,
                seen=seen,
                comparison=judge(asked.problem, entry, seen),
            )
        )
    return runs


def _write_report(
    path: Path,
    what_if: Sequence[tuple[RunConfig, Search]],
    real: Sequence[tuple[Answer, list[RealRun]]],
    profile: Profile,
    ranks: ChosenRanks,
    how: Thoroughness,
) -> None:
    from parsim.app.write_folder import report_facts
    from parsim.report.more_tables import calibration_table
    from parsim.report.page import ReportData, write_report

    with progress("Writing the report"):
        sections = [_what_if_section(config, found) for config, found in what_if]
        sections += [_real_section(asked, runs, ranks, how) for asked, runs in real]
        data = ReportData(
            title="parsim demo",
            facts=report_facts(),
            summary=_summary(what_if, real),
            sections=sections,
            extra_tables=(calibration_table(profile),),
        )
        write_report(data, path)


def _summary(what_if: Sequence[tuple[RunConfig, Search]], real: Sequence[tuple[Answer, list[RealRun]]]) -> list[str]:
    from parsim.plans.plan import plan_in_words
    from parsim.units import format_seconds

    lines = []
    for config, found in what_if:
        if found.chosen is not None:
            result = found.candidates[0].result
            step = format_seconds(result.step_s.median)
            lines.append(f"{config.model.name} on 8 V100s: use {plan_in_words(result.plan)}, {step} per step (predicted).")
    for asked, runs in real:
        lines.append(f"{asked.config.model.name} here: {_measured_sentence(runs)}")
    return lines


def _measured_sentence(runs: Sequence[RealRun]) -> str:
    """Whether the plan that was predicted fastest was the fastest, and how large the errors are."""
    from parsim.units import format_percent, format_seconds

    def step_s(run: RealRun) -> float:
        return run.comparison.step.measured_s

    predicted = min(runs, key=lambda run: run.comparison.step.predicted_s)
    fastest = min(runs, key=step_s)
    told = f"{predicted.name} was predicted fastest, and was: {format_seconds(step_s(predicted))} per step measured"
    if fastest is not predicted:
        lost = step_s(predicted) / step_s(fastest) - 1
        told = (
            f"{predicted.name} was predicted fastest; measured, {fastest.name} was, and {predicted.name} took {lost:.0%} longer"
        )
    errors = sorted(abs(run.comparison.step.relative_error or 0.0) for run in runs)
    return f"{told}. Step times of {len(runs)} plans were off by {format_percent(errors[0])} to {format_percent(errors[-1])}."


def _what_if_section(config: RunConfig, found: Search) -> ReportSection:
    from parsim.app.write_folder import report_run
    from parsim.report.page import ReportSection

    shown = [found.candidates[0]] if found.chosen is not None else []
    return ReportSection(
        model=config.model.name,
        title=f"{config.model.name} on 8 V100s (what if)",
        text=f"Global batch {config.training.global_batch}, {config.training.optimizer}, {config.training.precision}; "
        "no V100 was there: costs come from published measurements.",
        results=[entry.result.to_dict() for entry in found.candidates],
        chosen=None if found.chosen is None else found.candidates[0].result.to_dict(),
        runs=[report_run(entry, None, None) for entry in shown],
    )


def _real_section(asked: Answer, runs: Sequence[RealRun], ranks: ChosenRanks, how: Thoroughness) -> ReportSection:
    from parsim.app.write_folder import report_run
    from parsim.report.page import ReportSection

    assert asked.search is not None, "the demo's file leaves the plan to the search"
    return ReportSection(
        model=asked.config.model.name,
        title=f"{asked.config.model.name} on {ranks.count_text} of this machine (run for real)",
        text=f"Global batch {asked.config.training.global_batch}, digits; every plan ran {how.rounds} interleaved rounds of "
        f"{STEPS_PER_ROUND} steps.",
        results=[entry.result.to_dict() for entry in asked.search.candidates],
        chosen=asked.search.candidates[0].result.to_dict() if asked.fits else None,
        runs=[report_run(run.evaluation, run.seen, run.comparison) for run in runs],
    )
