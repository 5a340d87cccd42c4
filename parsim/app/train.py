"""Run a predicted plan for real: train with it, measure it in rounds, or read an earlier run again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from parsim.app.ask import with_every_rank
from parsim.app.config import Question
from parsim.app.doctor import progress, warn
from parsim.app.elastic import restarting
from parsim.app.judging import record_of, remember, remembered, reopen, speed_of, updatable, update_profile
from parsim.app.launch import check_launchable, check_runnable, job_of, launch_job, warn_of_profile
from parsim.app.measured import Measured, compared
from parsim.app.prediction import Prediction
from parsim.app.run_folder import (
    RunFolder,
    ending_told,
    forget_results,
    held,
    is_measured,
    new_folder,
    resumption,
    write_json,
)
from parsim.app.training_checks import (
    check_adaptive,
    check_shards,
    check_training,
    on_first_graph,
    rounds_in_words,
    samples_not_taken,
    steps_per_epoch,
    steps_per_round,
    total_steps,
    with_loading,
)
from parsim.app.write_folder import write_run_files
from parsim.costs.loading import MeasuredLoading
from parsim.errors import ConfigError, PlanError
from parsim.execute.job import SCORE, AdaptiveSpec
from parsim.execute.measurement import loss_curve
from parsim.files import parse_json, read_json, read_regular
from parsim.plans.constraints import FREE, SearchConstraints
from parsim.plans.plan import Plan
from parsim.predict.evaluate import evaluate
from parsim.predict.memory import FIT_PROBABILITY
from parsim.report.more_tables import memory_levels

STEPS_PER_ROUND = 4


def train(
    prediction: Prediction,
    *,
    nproc: int | None,
    out: Path | None,
    name: str,
    resume: bool,
    checkpoint_every: int | None,
    adaptive: bool,
    window_steps: int,
    timeout_s: float,
    elastic: bool,
    max_restarts: int,
) -> Measured:
    """Train under the plan, and compare with the prediction. Args: as `parsim.run`; name: of a new folder."""
    check_options(
        adaptive=adaptive,
        resume=resume,
        out=out,
        checkpoint_every=checkpoint_every,
        elastic=elastic,
        max_restarts=max_restarts,
    )
    if adaptive:
        check_adaptive(prediction.plan, prediction.question.training.shards)
    prediction, warnings = _ready(prediction, nproc)
    steps = total_steps(prediction.question)
    for text in filter(None, (samples_not_taken(prediction.question, steps), *rounds_in_words(prediction.plan, steps))):
        warn(text)
    folder = RunFolder(out) if resume and out is not None else new_folder(out, name)
    if resume:
        folder.read_config()  # before the folder is made
    with held(folder), ending_told(folder, steps):
        if resume:
            begun = resumption(folder, prediction.question, steps)
            for text in begun.warnings:
                warn(text)
            if begun.is_finished:
                document = parse_json(read_regular(folder.result), allow_nan=True)
                return replace(open_measured(folder.path), document={**document, "warnings": list(begun.warnings)})
            warnings += begun.warnings
        if resume and is_measured(folder, prediction.plan, step=begun.step, steps=steps):
            return _reported(prediction, folder, steps, warnings, is_adaptive=False)  # only the report is missing
        forget_results(folder)

        def attempt(prediction: Prediction, again: bool, restart: Sequence[str]) -> Measured:
            spec = adaptive_spec(prediction, window_steps) if adaptive else None
            every = 0 if adaptive and checkpoint_every is None else checkpoint_every  # nothing resumes an adaptive training
            options = {"checkpoint_every": every, "resume": resume or again, "adaptive": spec}
            return _trained(prediction, folder, steps, [*warnings, *restart], options, timeout_s)

        if not elastic:
            return attempt(prediction, False, ())
        return restarting(attempt, prediction, folder, steps=steps, max_restarts=max_restarts)


def _trained(
    prediction: Prediction, folder: RunFolder, steps: int, warnings: Sequence[str], options: dict[str, Any], timeout_s: float
) -> Measured:
    """One launch. Args: options: of its Job."""
    folder.write_question(prediction)
    job = job_of(prediction, folder, steps, **options)
    with progress(f"Training {steps} steps under {prediction.plan.summary()}") as say:
        of_ranks = launch_job(job, folder, say, prediction, hang_s=timeout_s)
    return _reported(prediction, folder, steps, [*warnings, *of_ranks], is_adaptive=job.adaptive is not None)


def _reported(prediction: Prediction, folder: RunFolder, steps: int, warnings: Sequence[str], *, is_adaptive: bool) -> Measured:
    """Compare what the ranks wrote down with the prediction, and write the result and the pages."""
    decisions: list[dict[str, Any]] = read_json(folder.path / "decisions.json") if is_adaptive else []
    changed = [decision for decision in decisions if decision["plan"] is not None]
    if changed:
        plan = Plan.from_json(changed[-1]["plan"])
        prediction = replace(prediction, evaluation=evaluate(prediction.problem, plan, fold=False))
        plan.save(folder.plan)
    run = compared(folder, prediction)
    seen, loading = run.seen, prediction.problem.loading
    score: dict[str, Any] = read_json(folder.path / SCORE)
    curve = loss_curve(folder.path, seen.losses, score.get("stopped_early_at") or steps)
    if curve.validation is not None and "validation" in score:
        score["validation"] = list(curve.validation)
    document = {
        **prediction.result.to_dict(),
        "folder": str(folder.path),
        "steps": steps,
        "losses": list(curve.losses),
        "losses_from_step": curve.first_step,
        **score,
        "decisions": decisions,
        "comparison": run.comparison.to_dict(),
        "loading": None if loading is None else loading.to_dict(),
        "diagnosis": run.diagnosis.to_dict(),
        "history": remembered(prediction, seen, run.comparison, plan_changed=bool(changed)),
        "memory_levels": [row.to_dict() for row in memory_levels(prediction.evaluation.memory, seen.memory_uses)],
        "warnings": [*prediction.warnings, *warnings],
    }
    write_run_files(folder, prediction, run)
    write_json(folder.result, document)  # the last file: whoever finds it knows that the run has ended
    return replace(run, document=document)


def check_options(
    *, adaptive: bool, resume: bool, out: object, checkpoint_every: int | None, elastic: bool = False, max_restarts: int = 0
) -> None:
    """Raises ConfigError for options that exclude or need one another, or cannot be."""
    if checkpoint_every is not None and checkpoint_every < 0:
        raise ConfigError(f"checkpoint_every = {checkpoint_every}: must be >= 0; 0 writes one at the end only")
    if adaptive and resume:
        raise ConfigError("--adaptive starts a new training and cannot continue one; drop --resume")
    if resume and out is None:
        raise ConfigError("--resume needs --out, the folder of the run to continue")
    if elastic and adaptive:
        raise ConfigError("--adaptive cannot continue a training that ended, and --elastic does; drop one of them")
    if max_restarts < 0:
        raise ConfigError(f"max_restarts = {max_restarts}: must be >= 0")


def validate(
    prediction: Prediction,
    *,
    out: Path | None,
    name: str,
    rounds: int,
    tasks: bool,
    session: str | None,
    update: bool,
    timeout_s: float,
) -> Measured:
    """Measure the plan in rounds, compare, and remember it beside the profile. Arguments and errors as `parsim.validate`."""
    if update:
        updatable(prediction.question)
    prediction, warnings = _ready(prediction, None)
    prediction = _on_one_graph(prediction)
    plan, folder = prediction.plan, new_folder(out, name)
    folder.write_question(prediction)
    steps = steps_per_round(plan, STEPS_PER_ROUND)
    job = job_of(prediction, folder, steps, mode="measure", rounds=rounds)
    with progress(f"Measuring {rounds} rounds under {plan.summary()}") as say:
        warnings += launch_job(job, folder, say, prediction, hang_s=timeout_s)
    return _judged(folder, compared(folder, prediction), warnings, tasks=tasks, session=session, update=update)


def _on_one_graph(prediction: Prediction) -> Prediction:
    """The prediction on the first graph of a plan that changes it (Ada): a whole schedule would take too long to measure."""
    plan = on_first_graph(prediction.plan)
    if plan == prediction.plan:
        return prediction
    warn(f"{prediction.plan.synchronisation} is measured and predicted on its first graph: {plan.synchronisation}")
    return replace(prediction, evaluation=evaluate(prediction.problem, plan, fold=False))


def validate_again(path: Path, *, history: Path | None, tasks: bool, session: str | None, update: bool) -> Measured:
    """Compare and remember a folder that was run. Raises ConfigError: it is no run folder; ExecutionError: it was never run."""
    folder, prediction, name = reopen(path)
    if history is not None:
        prediction = replace(prediction, question=with_history(prediction.question, history))
    warnings = warn_of_profile(prediction)
    return _judged(folder, compared(folder, prediction, name), warnings, tasks=tasks, session=session, update=update)


def open_measured(path: Path) -> Measured:
    """Read a run folder, and write nothing. Raises ConfigError: it is not a run folder; ExecutionError: it was never run."""
    folder, prediction, name = reopen(path)
    run = compared(folder, prediction, name)
    document = {"folder": str(folder.path), "plan": prediction.plan.summary(), **run.comparison.to_dict()}
    document["diagnosis"] = run.diagnosis.to_dict()
    try:
        result = parse_json(read_regular(folder.result), allow_nan=True)
        losses, first = [float(loss) for loss in result["losses"]], int(result.get("losses_from_step", 1))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # no training that has ended
        return replace(run, document=document)
    return replace(run, document=document | {"losses": losses, "losses_from_step": first})


def _ready(prediction: Prediction, nproc: int | None) -> tuple[Prediction, list[str]]:
    """The prediction of every rank of a plan that can run here, and what has changed since its profile was measured."""
    check_launchable(prediction.question)
    cluster = prediction.problem.cluster
    if cluster.network is not None:
        raise PlanError(f"{cluster.name} has several nodes: only the processes of one can be started from here; run on one")
    check_runnable(prediction, nproc)
    check_training(prediction.question, prediction.problem.model)
    check_shards(prediction.question, prediction.plan)
    warnings = warn_of_profile(prediction)
    if prediction.step_size is not None:
        for text in prediction.step_size.warnings():
            warn(text)
            warnings.append(text)
    return with_every_rank(with_loading(prediction)), warnings


def _judged(
    folder: RunFolder, run: Measured, warnings: list[str], *, tasks: bool, session: str | None, update: bool
) -> Measured:
    """Compare, remember, and write the run's pages."""
    prediction, seen, comparison = run.prediction, run.seen, run.comparison
    loading, speed = prediction.problem.loading, speed_of(prediction.problem.cluster.profile, comparison.at_pace)
    record = record_of(prediction, seen, comparison, session)
    document = {
        "folder": str(folder.path),
        "plan": prediction.plan.summary(),
        **comparison.to_dict(tasks=tasks),
        "diagnosis": run.diagnosis.to_dict(),
        "loading": None if loading is None else loading.to_dict(),
        "at_pace": speed,
        "warnings": [*warnings, *([speed["warning"]] if speed and speed["warning"] else [])],
        "history": remember(prediction, record),
    }
    if update:
        document["update"] = update_profile(prediction, seen, comparison, record)
    write_json(folder.path / "validation.json", document)
    write_run_files(folder, prediction, run)
    return replace(run, document=document)


def with_history(config: Question, path: Path) -> Question:
    """A question with another place for its profile's history."""
    return config.changed(cluster=config.cluster.model_copy(update={"history": str(path.resolve())}))


def adaptive_spec(prediction: Prediction, window_steps: int) -> AdaptiveSpec:
    """What the ranks need in order to plan again.

    A plan by hand, or of a file, is where the training begins: its mesh and the other keys that fix it bind no later plan.
    """
    config, problem, loading = prediction.question, prediction.problem, prediction.problem.loading
    is_searched = config.plan.strategy != "custom" and config.plan.plan_path is None
    devices = config.devices
    chosen = tuple(range(devices)) if isinstance(devices, int) else None if devices is None else tuple(devices)
    return AdaptiveSpec(
        profile=config.cluster.machine,
        devices=chosen,
        precision=config.training.precision,
        window_steps=window_steps,
        epoch_steps=steps_per_epoch(config),
        fit_probability=config.plan.fit_probability or FIT_PROBABILITY,
        loading=loading if isinstance(loading, MeasuredLoading) else None,
        asked=SearchConstraints(
            strategy=config.plan.strategy if is_searched else "adaptive",
            constraints=problem.constraints if is_searched else FREE,
            zero_stage=problem.zero_stage,
            recompute=problem.recompute,
            pins=problem.pins,
            forbids=problem.forbids,
            capacity_factor=problem.routing.capacity_factor,
        ),
    )
