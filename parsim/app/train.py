"""Run a predicted plan for real: train with it, measure it in rounds, or read an earlier run again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parsim.app.ask import with_every_rank
from parsim.app.config import Question
from parsim.app.doctor import progress, warn
from parsim.app.elastic import MAX_RESTARTS, check_elastic, restarting
from parsim.app.judging import judge, levels_of, measured, reopen, speed_of
from parsim.app.launch import check_launchable, check_runnable, device_kind, launch_job, run_spec, warn_of_profile
from parsim.app.measured import Measured
from parsim.app.prediction import Prediction
from parsim.app.record_validation import diagnosed, record_of, remember, remembered, updatable, update_profile
from parsim.app.run_folder import RunFolder, ending_told, forget_results, held, new_folder, resumption, write_json
from parsim.app.training_checks import (
    check_adaptive,
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
from parsim.execute.job import SCORE, AdaptiveSpec, Job
from parsim.execute.metrics_file import loss_curve
from parsim.execute.processes.launch import HANG_S
from parsim.files import parse_json, read_json, read_regular
from parsim.plans.constraints import FREE, SearchConstraints
from parsim.plans.plan import Plan
from parsim.predict.evaluate import evaluate

if TYPE_CHECKING:
    from parsim.execute.measurement import Measurement


RUN = "run"
"""Name of the only run of a job."""
ROUNDS = 10
STEPS_PER_ROUND = 4
WINDOW_STEPS = 20


def train(
    asked: Prediction,
    *,
    nproc: int | None = None,
    out: Path | None = None,
    name: str = RUN,
    resume: bool = False,
    checkpoint_every: int = 0,
    adaptive: bool = False,
    window_steps: int = WINDOW_STEPS,
    timeout_s: float = HANG_S,
    elastic: bool = False,
    max_restarts: int = MAX_RESTARTS,
) -> Measured:
    """Train under the plan, and compare with the prediction.

    Args:
        nproc: processes; None: as many as the plan has ranks, and any other number is an error.
        out: folder of the run; None: a new one, runs/NAME. resume: go on from the latest checkpoint in it.
        checkpoint_every: steps between checkpoints; 0: at the end only.
        adaptive: measure on the way and change plan where that pays, looking every `window_steps` steps.
        timeout_s: a process that is stopped, or does nothing, for longer ends the run.
        elastic: go on by itself after a rank has died, at most `max_restarts` times (`parsim.app.elastic`).

    Raises:
        ConfigError, PlanError, ModelError, DoesNotFitError: what cannot be run. ExecutionError: a rank failed.
    """
    check_options(adaptive=adaptive, resume=resume, out=out, checkpoint_every=checkpoint_every)
    check_elastic(elastic=elastic, adaptive=adaptive, max_restarts=max_restarts)
    if adaptive:
        check_adaptive(asked.plan)
    asked, changed_since = _ready(asked, nproc)
    steps = total_steps(asked.question)
    for told in filter(None, (samples_not_taken(asked.question, steps), *rounds_in_words(asked.plan, steps))):
        warn(told)
    folder = RunFolder(out) if resume and out is not None else new_folder(out, name)
    if resume:
        folder.read_config()  # before the folder is made
    with held(folder), ending_told(folder, steps):
        begun = resumption(folder, asked.question, steps) if resume else None
        for text in () if begun is None else begun.warnings:
            warn(text)
        if begun is not None and begun.is_finished:
            return _as_it_ended(folder, begun.warnings)
        forget_results(folder, RUN)
        changed_since += [] if begun is None else begun.warnings

        def attempt(asked: Prediction, again: bool, told: Sequence[str]) -> Measured:
            return _trained(
                asked,
                folder,
                steps,
                [*changed_since, *told],
                resume=resume or again,
                checkpoint_every=checkpoint_every,
                adaptive=adaptive,
                window_steps=window_steps,
                timeout_s=timeout_s,
            )

        if not elastic:
            return attempt(asked, False, ())
        return restarting(attempt, asked, folder, steps=steps, run=RUN, max_restarts=max_restarts)


def _as_it_ended(folder: RunFolder, warnings: Sequence[str]) -> Measured:
    """A training that has made all its steps already."""
    found = open_measured(folder.path)
    document = {**parse_json(read_regular(folder.result), allow_nan=True), "warnings": list(warnings)}
    return replace(found, document=document)


def _trained(
    asked: Prediction,
    folder: RunFolder,
    steps: int,
    warnings: Sequence[str],
    *,
    resume: bool,
    checkpoint_every: int,
    adaptive: bool,
    window_steps: int,
    timeout_s: float,
) -> Measured:
    plan = asked.plan
    _write_question(folder, asked)
    job = Job(
        output=str(folder.path.resolve()),
        mode="train",
        runs=(run_spec(asked, RUN, folder.model),),
        steps=steps,
        warmup_steps=min(3, max(0, steps - 1)),
        device=device_kind(asked),
        checkpoint_every=checkpoint_every,
        resume=resume,
        adaptive=adaptive_spec(asked, window_steps) if adaptive else None,
    )
    with progress(f"Training {steps} steps under {plan.summary()}") as say:
        told = launch_job(job, folder, say, asked, hang_s=timeout_s)
    decisions: list[dict[str, Any]] = read_json(folder.path / "decisions.json") if adaptive else []
    changed = [decision for decision in decisions if decision["plan"] is not None]
    if changed:
        plan = Plan.from_json(changed[-1]["plan"])
        asked = replace(asked, evaluation=evaluate(asked.problem, plan, fold=False))
        plan.save(folder.plan)
    seen = measured(folder, RUN, asked.evaluation)
    comparison = judge(asked.problem, asked.evaluation, seen)
    diagnosis = diagnosed(asked, seen, comparison)
    score: dict[str, Any] = read_json(folder.path / SCORE)
    document = {
        **asked.result.to_dict(),
        "folder": str(folder.path),
        "steps": steps,
        **_learnt(folder, seen, score, steps),
        "decisions": decisions,
        "comparison": comparison.to_dict(),
        "loading": None if asked.problem.loading is None else asked.problem.loading.to_dict(),
        "diagnosis": diagnosis.to_dict(),
        "history": remembered(asked, seen, comparison, plan_changed=bool(changed)),
        "memory_levels": levels_of(asked, seen),
        "warnings": [*asked.warnings, *warnings, *told],
    }
    write_run_files(folder, asked, seen, comparison, diagnosis)
    write_json(folder.result, document)  # the last file: whoever finds it knows that the run has ended
    return Measured(
        folder=folder.path, prediction=asked, comparison=comparison, seen=seen, diagnosis=diagnosis, document=document
    )


def _learnt(folder: RunFolder, seen: Measurement, score: dict[str, Any], steps: int) -> dict[str, Any]:
    """Losses and scores of the whole training, over all its parts."""
    curve = loss_curve(folder.path, seen.losses, score.get("stopped_early_at") or steps)
    looks = {} if curve.validation is None or "validation" not in score else {"validation": list(curve.validation)}
    return {"losses": list(curve.losses), "losses_from_step": curve.first_step, **score, **looks}


def check_options(*, adaptive: bool, resume: bool, out: object, checkpoint_every: int = 0) -> None:
    """Raises ConfigError for options that exclude or need one another, or cannot be."""
    if checkpoint_every < 0:
        raise ConfigError(f"checkpoint_every = {checkpoint_every}: must be >= 0; 0 writes one at the end only")
    if adaptive and resume:
        raise ConfigError("--adaptive starts a new training and cannot continue one; drop --resume")
    if resume and out is None:
        raise ConfigError("--resume needs --out, the folder of the run to continue")


def validate(
    asked: Prediction,
    *,
    out: Path | None = None,
    name: str = RUN,
    rounds: int = ROUNDS,
    tasks: bool = False,
    session: str | None = None,
    update: bool = False,
    timeout_s: float = HANG_S,
) -> Measured:
    """Measure the plan in rounds, compare, and remember it beside the profile.

    Args:
        out: folder of the new run; None: runs/NAME. tasks: list every task in the JSON.
        session: name of measurements made together. update: write into the profile what the run shows it to be wrong by.
        timeout_s: as `train`.

    Raises:
        ConfigError: a shipped profile cannot be updated; else as `train`.
    """
    if update:
        updatable(asked.question)
    asked, changed_since = _ready(asked, None)
    asked = _on_one_graph(asked)
    folder = new_folder(out, name)
    _write_question(folder, asked)
    job = Job(
        output=str(folder.path.resolve()),
        mode="measure",
        runs=(run_spec(asked, RUN, folder.model),),
        steps=steps_per_round(asked.plan, STEPS_PER_ROUND),
        rounds=rounds,
        device=device_kind(asked),
    )
    with progress(f"Measuring {rounds} rounds under {asked.plan.summary()}") as say:
        changed_since += launch_job(job, folder, say, asked, hang_s=timeout_s)
    seen = measured(folder, RUN, asked.evaluation)
    return _judged(folder, asked, seen, changed_since, tasks=tasks, session=session, update=update)


def _on_one_graph(asked: Prediction) -> Prediction:
    """Of a plan whose graph changes (Ada) the prediction on its first one: a whole schedule would take too long to measure."""
    plan = on_first_graph(asked.plan)
    if plan == asked.plan:
        return asked
    warn(f"{asked.plan.synchronisation} is measured and predicted on its first graph: {plan.synchronisation}")
    return replace(asked, evaluation=evaluate(asked.problem, plan, fold=False))


def validate_again(
    path: Path,
    *,
    history: Path | None = None,
    tasks: bool = False,
    session: str | None = None,
    update: bool = False,
) -> Measured:
    """The same of a folder that was run. Raises ConfigError: it is not a run folder; ExecutionError: it was never run."""
    folder, asked, name = reopen(path)
    if history is not None:
        asked = replace(asked, question=with_history(asked.question, history))
    changed_since = warn_of_profile(asked)
    seen = measured(folder, name, asked.evaluation)
    return _judged(folder, asked, seen, changed_since, tasks=tasks, session=session, update=update)


def open_measured(path: Path) -> Measured:
    """Read a run folder, and write nothing. Raises ConfigError: it is not a run folder; ExecutionError: it was never run."""
    folder, asked, name = reopen(path)
    seen = measured(folder, name, asked.evaluation)
    comparison = judge(asked.problem, asked.evaluation, seen)
    diagnosis = diagnosed(asked, seen, comparison)
    document = {
        "folder": str(folder.path),
        "plan": asked.plan.summary(),
        **comparison.to_dict(),
        "diagnosis": diagnosis.to_dict(),
        **_losses_in(folder),
    }
    return Measured(
        folder=folder.path, prediction=asked, comparison=comparison, seen=seen, diagnosis=diagnosis, document=document
    )


def _losses_in(folder: RunFolder) -> dict[str, Any]:
    """What the result of a finished training tells of its losses; nothing where there is none."""
    try:
        result = parse_json(read_regular(folder.result), allow_nan=True)
        losses, first = [float(loss) for loss in result["losses"]], int(result.get("losses_from_step", 1))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
    return {"losses": losses, "losses_from_step": first}


def _ready(asked: Prediction, nproc: int | None) -> tuple[Prediction, list[str]]:
    """The prediction of every rank of a plan that can run here, and what has changed since its profile was measured."""
    check_launchable(asked.question)
    if asked.problem.cluster.network is not None:
        raise PlanError(
            f"{asked.problem.cluster.name} has several nodes: only the processes of one can be started from here; run on one"
        )
    check_runnable(asked, nproc)
    check_training(asked.question, asked.problem.model)
    changed_since = warn_of_profile(asked)
    return with_every_rank(with_loading(asked)), changed_since


def _write_question(folder: RunFolder, asked: Prediction) -> None:
    problem = asked.problem
    folder.write_question(asked.question, problem.model, asked.plan, problem.cluster.profile, problem.history, problem.loading)


def _judged(
    folder: RunFolder,
    asked: Prediction,
    seen: Measurement,
    changed_since: list[str],
    *,
    tasks: bool,
    session: str | None,
    update: bool,
) -> Measured:
    """Compare, remember, and write the run's pages."""
    comparison = judge(asked.problem, asked.evaluation, seen)
    diagnosis = diagnosed(asked, seen, comparison)
    document = {"folder": str(folder.path), "plan": asked.plan.summary(), **comparison.to_dict(tasks=tasks)}
    document["diagnosis"] = diagnosis.to_dict()
    document["loading"] = None if asked.problem.loading is None else asked.problem.loading.to_dict()
    speed = speed_of(asked.problem.cluster.profile, comparison.at_pace)
    document["at_pace"] = speed
    document["warnings"] = [*changed_since, *([speed["warning"]] if speed and speed["warning"] else [])]
    record = record_of(asked, seen, comparison, session)
    document["history"] = remember(asked, record)
    if update:
        document["update"] = update_profile(asked, seen, comparison, record)
    write_json(folder.path / "validation.json", document)
    write_run_files(folder, asked, seen, comparison, diagnosis)
    return Measured(
        folder=folder.path, prediction=asked, comparison=comparison, seen=seen, diagnosis=diagnosis, document=document
    )


def with_history(config: Question, path: Path) -> Question:
    """The same run file with another place for its profile's history."""
    cluster = config.cluster.model_copy(update={"history": str(path.resolve())})
    return config.model_copy(update={"cluster": cluster})


def adaptive_spec(asked: Prediction, window_steps: int) -> AdaptiveSpec:
    """What the ranks need in order to plan again.

    A plan by hand, or of a file, is where the training begins: its mesh and the other keys that fix it bind no later plan.
    """
    config, problem, loading = asked.question, asked.problem, asked.problem.loading
    is_searched = config.plan.strategy != "custom" and config.plan.plan_path is None
    devices = config.devices
    chosen = tuple(range(devices)) if isinstance(devices, int) else None if devices is None else tuple(devices)
    return AdaptiveSpec(
        profile=config.cluster.machine,
        devices=chosen,
        precision=config.training.precision,
        window_steps=window_steps,
        epoch_steps=steps_per_epoch(config),
        fit_probability=config.plan.fit_probability,
        loading=loading if isinstance(loading, MeasuredLoading) else None,
        asked=SearchConstraints(
            strategy=config.plan.strategy if is_searched else "adaptive",
            constraints=problem.constraints if is_searched else FREE,
            zero_stage=problem.zero_stage,
            recompute=problem.recompute,
            pins=problem.pins,
            forbids=problem.forbids,
            capacity_factor=problem.capacity_factor,
        ),
    )
