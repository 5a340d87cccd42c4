"""Run a predicted plan for real: train with it, measure it in rounds, or read an earlier run again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from parsim.app.answer import Answer
from parsim.app.ask import answer_of, ask, reopen, whole, with_every_rank
from parsim.app.calibration import Calibration
from parsim.app.config import PlanSection, Question
from parsim.app.doctor import progress, warn
from parsim.app.functions import ask_aloud, check_nothing_beside, question_by_name, takes_keys
from parsim.app.launch import (
    check_adaptive,
    check_images_suit,
    check_launchable,
    check_runnable,
    check_shards,
    check_training,
    job_of,
    launch_job,
    on_first_graph,
    rounds_in_words,
    samples_not_taken,
    steps_per_epoch,
    steps_per_round,
    total_steps,
    warn_of_profile,
    with_loading,
)
from parsim.app.load import cluster_of, problem_of
from parsim.app.measured import Measured, compared, record_of, remember, remembered, speed_of, updatable, update_profile
from parsim.app.prediction import Prediction
from parsim.app.question import question_from_file
from parsim.app.run_folder import RunFolder, ending_told, forget_results, held, is_measured, new_folder, resumption, write_json
from parsim.app.write_folder import write_run_files
from parsim.costs.loading import MeasuredLoading
from parsim.errors import ConfigError, DoesNotFitError, ParsimError, PlanError, RankLostError
from parsim.execute.job import SCORE, AdaptiveSpec
from parsim.execute.metrics import loss_curve
from parsim.files import parse_json, read_json, read_regular
from parsim.plans.constraints import FREE, SearchConstraints
from parsim.plans.plan import Plan
from parsim.predict.evaluate import evaluate
from parsim.predict.memory import FIT_PROBABILITY
from parsim.report.tables import memory_levels
from parsim.units import format_seconds

STEPS_PER_ROUND = 4


@takes_keys
def run(
    model: str | Path | Answer | Prediction,
    cluster: str | Path | Calibration | None = None,
    *,
    global_batch: int | None = None,
    nproc: int | None = None,
    steps: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    checkpoint_every: int | None = None,
    adaptive: bool = False,
    window_steps: int = 20,
    timeout_s: float = 30.0,
    elastic: bool = False,
    max_restarts: int = 3,
    settings: Mapping[str, object] | None = None,
    overrides: Sequence[str] = (),
    **keys: Any,
) -> Measured:
    """Train for real under a plan on this machine, and compare with the prediction. Blocks until the training has ended.

    The processes are started as separate programs: a script needs no `if __name__ == "__main__"`.

    Args:
        model: a Prediction, an Answer (its chosen plan), or the name of a model as for `plan`, with cluster, global_batch and
            keys.
        nproc: processes; default: one per rank of the plan. Any other number is an error.
        steps: steps to train; default: as in the question, or one pass over the data.
        keys, settings, overrides: as for `plan`.
        out: folder of the run; default: a new one under runs/. resume: continue from the latest checkpoint in it.
        checkpoint_every: steps between checkpoints; 0: at the end only; None: about every minute, if that takes less than 2% of
            the time.
        adaptive: measure while training, decide every `window_steps` steps, and change the plan if that saves time.
        timeout_s: a process that is stopped, or makes no progress, for longer ends the run.
        elastic: if a rank dies, restart from the latest checkpoint, at most `max_restarts` times. A device on which ranks have
            died twice is dropped, and the others get a new plan.

    Raises:
        ParsimError: DoesNotFitError, PlanError (more or fewer processes than ranks, several nodes), ModelError (a model given
            as a value, which the processes cannot build), ExecutionError (a rank failed).
    """
    path = None if out is None else Path(out)
    check_options(
        adaptive=adaptive, resume=resume, out=out, checkpoint_every=checkpoint_every, elastic=elastic, max_restarts=max_restarts
    )
    _check_seconds("timeout_s", timeout_s)
    if isinstance(model, Answer | Prediction):
        beside = {"cluster": cluster, "global_batch": global_batch, "settings": settings, "overrides": overrides or None}
        check_nothing_beside(model, **beside, **keys)
        prediction = model.chosen if isinstance(model, Answer) else model
        name = prediction.problem.model.name
    else:
        question = question_by_name(model, cluster, global_batch, settings, keys, overrides)
        check_launchable(question)
        if question.source.model is None:
            check_images_suit(question)
        prediction, name = whole(ask_aloud(question, runs_here=True)).prediction, question.source.name
    if steps is not None:
        if steps < 1:
            raise ConfigError(f"steps = {steps}: must be >= 1")
        training = prediction.question.training.model_copy(update={"steps": steps})
        prediction = replace(prediction, question=prediction.question.changed(training=training))
    if adaptive:
        check_adaptive(prediction.plan, prediction.question.training.shards)
    prediction, warnings = _ready(prediction, nproc)
    all_steps = total_steps(prediction.question)
    for text in filter(None, (samples_not_taken(prediction.question, all_steps), *rounds_in_words(prediction.plan, all_steps))):
        warn(text)
    folder = RunFolder(path) if resume and path is not None else new_folder(path, name)
    if resume:
        folder.read_config()  # before the folder is made
    with held(folder), ending_told(folder, all_steps):
        if resume:
            begun = resumption(folder, prediction.question, all_steps)
            for text in begun.warnings:
                warn(text)
            if begun.is_finished:
                document = parse_json(read_regular(folder.result), allow_nan=True)
                return replace(open_run(folder.path), document={**document, "warnings": list(begun.warnings)})
            warnings += begun.warnings
        if resume and is_measured(folder, prediction.plan, step=begun.step, steps=all_steps):
            return _reported(prediction, folder, all_steps, warnings, is_adaptive=False)  # only the report is missing
        forget_results(folder)

        def attempt(prediction: Prediction, again: bool, restart: Sequence[str]) -> Measured:
            spec = adaptive_spec(prediction, window_steps) if adaptive else None
            every = 0 if adaptive and checkpoint_every is None else checkpoint_every  # nothing resumes an adaptive training
            options = {"checkpoint_every": every, "resume": resume or again, "adaptive": spec}
            return _trained(prediction, folder, all_steps, [*warnings, *restart], options, timeout_s)

        if not elastic:
            return attempt(prediction, False, ())
        return restarting(attempt, prediction, folder, steps=all_steps, max_restarts=max_restarts)


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
    target: str | Path | Answer | Prediction,
    *,
    out: str | Path | None = None,
    rounds: int = 10,
    tasks: bool = False,
    history: str | Path | None = None,
    session: str | None = None,
    update: bool = False,
    timeout_s: float = 30.0,
    overrides: Sequence[str] = (),
) -> Measured:
    """Compare a prediction with a measurement, of an existing run or of new rounds; record the result in the profile's
    history.

    Args:
        target: the folder of a run; or, for a new measurement, a run file, a Prediction or an Answer.
        rounds: of a new measurement, at least 4, because the A/A floor splits them. tasks: keep every task in the JSON.
        out: folder of a new run. overrides: as for `plan`.
        history: record the validation in this file instead of the profile's own.
        session: name of measurements made together; a correction from one of them is never tested on another.
        update: write the run's factors relative to the profile into the profile. timeout_s: as `run`.

    Raises:
        ParsimError: as `run`; ConfigError for an update of a shipped profile.
    """
    _check_seconds("timeout_s", timeout_s)
    if isinstance(target, str | Path) and Path(target).is_dir():
        folder, prediction, name = reopen(Path(target))
        prediction = replace(prediction, question=with_history(prediction.question, history))
        warnings = warn_of_profile(prediction)
        return _judged(folder, compared(folder, prediction, name), warnings, tasks=tasks, session=session, update=update)
    if rounds < 4:
        raise ConfigError(f"rounds = {rounds}: the A/A floor splits them into halves of at least 2; measure 4 or more")
    if isinstance(target, Answer | Prediction):
        prediction = target.chosen if isinstance(target, Answer) else target
        prediction = replace(prediction, question=with_history(prediction.question, history))
        name = prediction.problem.model.name
    else:
        question = with_history(question_from_file(Path(target), overrides), history)
        if update:
            updatable(question)
        check_launchable(question)
        with progress("Planning"):
            prediction, name = whole(ask(question, runs_here=True)).prediction, question.source.name
    if update:
        updatable(prediction.question)
    prediction, warnings = _ready(prediction, None)
    prediction = _on_one_graph(prediction)
    plan, folder = prediction.plan, new_folder(None if out is None else Path(out), f"{name}-validation")
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


def open_run(folder: str | Path) -> Measured:
    """Read the results of an earlier run, and compare them with the profile, history and plan in its folder.

    Args:
        folder: a run folder, as `parsim.run` made it.

    Raises:
        ConfigError: it is not a run folder.
        ExecutionError: it was simulated and never run.
    """
    opened, prediction, name = reopen(Path(folder))
    run = compared(opened, prediction, name)
    document = {"folder": str(opened.path), "plan": prediction.plan.summary(), **run.comparison.to_dict()}
    document["diagnosis"] = run.diagnosis.to_dict()
    try:
        result = parse_json(read_regular(opened.result), allow_nan=True)
        losses, first = [float(loss) for loss in result["losses"]], int(result.get("losses_from_step", 1))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # no training that has ended
        return replace(run, document=document)
    return replace(run, document=document | {"losses": losses, "losses_from_step": first})


def _check_seconds(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name} = {value}: must be a number of seconds above 0")


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


def with_history(config: Question, path: str | Path | None) -> Question:
    """A question with another place for its profile's history, if one is given."""
    if path is None:
        return config
    return config.changed(cluster=config.cluster.model_copy(update={"history": str(Path(path).resolve())}))


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


# `--elastic`: a training whose rank dies goes on by itself, on the devices that are left.
#
# The rule is a pure state machine (`Survivors`). A device is left out once it is lost, or once a rank on it has died twice.
# Until then all go on with the same plan. With fewer devices the question is planned again for these. The training goes on from
# its latest checkpoint, which any plan of the model can read. Every attempt is a launch of its own, with its own store, so
# nobody finds the addresses of dead peers. Leaves out: a launcher that dies. Start it again with --resume.


TIMES_OUT = 2
"""Deaths of ranks on one device after which it is left out."""


@dataclass(slots=True)
class Survivors:
    """Which devices a training goes on with.

    Attributes: devices: numbers in the profile, by rank. deaths: of ranks, by device.
    """

    devices: tuple[int, ...]
    deaths: Counter[int] = field(default_factory=Counter)

    def after(self, ranks: Sequence[int], *, device_lost: bool) -> tuple[int, ...]:
        """The devices that are left after these ranks died; all of them where none would be left.

        Args: ranks: of the plan at hand. device_lost: their devices do not answer any more.
        """
        named = [self.devices[rank] for rank in ranks if rank < len(self.devices)]
        if len(named) < len(self.devices):  # where all hang, none is to blame
            self.deaths.update(named)
        out = {device for device in named if device_lost or self.deaths[device] >= TIMES_OUT}
        self.devices = tuple(device for device in self.devices if device not in out) or self.devices
        return self.devices


def restarting(
    attempt: Callable[[Prediction, bool, Sequence[str]], Measured],
    prediction: Prediction,
    folder: RunFolder,
    *,
    steps: int,
    max_restarts: int,
) -> Measured:
    """Train, and go on after ranks have died.

    Args: attempt: trains under a prediction, from the latest checkpoint if the second argument is true; the third: warnings.
        prediction: to begin with. folder: held by the caller. steps: of the whole training. max_restarts: how often.
    Raises: RankLostError: the last one, once there were too many. DoesNotFitError, PlanError: no plan on what is left.
    """
    survivors = Survivors(tuple(device.index for device in prediction.problem.cluster.devices))
    restarts: list[dict[str, Any]] = []
    warnings: list[str] = []
    while True:
        try:
            done = attempt(prediction, bool(restarts), warnings)
        except RankLostError as error:
            text = str(error).partition(" The checkpoint of step ")[0]
            if len(restarts) == max_restarts:
                more = f" It was restarted {max_restarts} times (--max-restarts)." if max_restarts else ""
                raise error.with_text(f"{error}{more}") from error
            begun_s = time.monotonic()
            before = prediction.plan
            devices = survivors.after(error.ranks, device_lost=error.device_lost)
            prediction = on_devices(prediction, devices)
            step, plan = resumption(folder, prediction.question, steps).step, prediction.plan
            if error.raised and restarts and restarts[-1]["step"] == step and restarts[-1]["failure"] == text:
                raise error.with_text(f"{error} It was restarted and failed in the same way.") from error
            planning_s = time.monotonic() - begun_s
            restart = {"failure": text, "ranks": list(error.ranks), "step": step, "devices": list(devices)}
            restarts.append(restart | {"plan": plan.summary(), "planning_s": planning_s})
            how = "under the same plan" if plan == before else f"on {len(devices)} devices under {plan.summary()}"
            warnings = [
                f"{text.rstrip('.')}. The training continues automatically from step {step}, {how} (restart {len(restarts)} of "
                f"at most {max_restarts}, decided in {format_seconds(planning_s)})"
            ]
            warn(warnings[0])
            forget_results(folder)
        else:
            return replace(done, document={**done.document, "restarts": restarts})


def on_devices(asked: Prediction, devices: Sequence[int]) -> Prediction:
    """A prediction on these devices of its cluster: itself, or that of a plan for fewer.

    A plan that was given by hand, or a mesh, cannot be kept on fewer: then the best of all families is taken.

    Raises: DoesNotFitError: no plan fits. PlanError: replicas have weights of their own, which fewer cannot take over.
    """
    cluster = asked.problem.cluster
    if [device.index for device in cluster.devices] == list(devices):
        return asked
    if asked.plan.synchronisation.mixes:
        raise PlanError(
            f"the plan ({asked.plan.summary()}) has replicas with weights of their own, and {len(devices)} devices are left: "
            "fewer replicas cannot continue with them; continue with --resume on as many devices"
        )
    config = asked.question.changed(cluster=asked.question.cluster.model_copy(update={"devices": tuple(devices)}))
    try:
        return _planned(asked, config)
    except ParsimError:
        return _planned(asked, config.changed(plan=PlanSection()))


def _planned(asked: Prediction, config: Question) -> Prediction:
    cluster = cluster_of(config.cluster, asked.problem.cluster.profile)
    problem = problem_of(config, model=asked.problem.model, cluster=cluster)
    answer = whole(answer_of(config, replace(problem, loading=asked.problem.loading)))
    if not answer.fits:
        raise DoesNotFitError(answer.sentence())
    check_runnable(answer.prediction, None)
    return with_every_rank(answer.prediction)
