"""A run that has ended: its question asked again, what its ranks wrote down, how right the prediction was, what to remember."""

from __future__ import annotations

import datetime
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from parsim.app.config import Question
from parsim.app.load import cluster_of
from parsim.app.prediction import Prediction
from parsim.app.run_folder import RunFolder
from parsim.app.training_checks import changes_graph, whole_periods
from parsim.costs.diagnosis import Diagnosis
from parsim.costs.history import ValidationRecord, append_record, fingerprint, history_lines, history_path, read_history
from parsim.costs.observed import without_updates
from parsim.errors import ConfigError, CostError, ExecutionError, ParsimError
from parsim.execute.job import Job
from parsim.execute.processes.machine import describe_environment
from parsim.hardware.compose import load_profile
from parsim.hardware.profile import Profile, save_profile
from parsim.hardware.speed_factor import SpeedFactor, speed_beside
from parsim.model.model import Model
from parsim.plans.plan import Plan
from parsim.predict.compare import MINIMUM_ROUNDS, Comparison, PaceComparison, compare, kind_intervals_s, relative_error
from parsim.predict.evaluate import Evaluation, evaluate, sampled_durations_s, step_at_speed
from parsim.predict.memory import FIT_PROBABILITY
from parsim.predict.problem import PlanningProblem
from parsim.report.tables import format_error
from parsim.search.adapt.observed import diagnosis_of, updated
from parsim.timeline import Timeline
from parsim.units import format_seconds

if TYPE_CHECKING:
    from parsim.execute.measurement import Measurement


MOST_BLOCKS = 20
"""Into so many parts a training is cut for its A/A floor: steps that follow one another share their disturbances."""
LEAST_RECORDED = 20
"""Timed steps of a training that the history takes; the predicted interval is for the mean of as many."""
VERSIONS = ("python", "torch", "numpy", "parsim")


def measured(folder: RunFolder, run: str, evaluation: Evaluation) -> Measurement:
    """What the ranks of one run of the folder's job wrote down."""
    from parsim.execute.measurement import load_measurement

    seen = load_measurement(folder.records(run), evaluation.graph)
    left_out, together = whole_periods(seen, evaluation.result.plan)
    return replace(seen, left_out=left_out, together=together)


def judge(problem: PlanningProblem, evaluation: Evaluation, seen: Measurement) -> Comparison:
    """Predicted against measured, task by task; of peak memory what lies in tensors, which is what can be measured alike.

    Raises: ExecutionError if no step was recorded.
    """
    if not seen.timelines or not len(seen.step_s):
        raise ExecutionError("the run recorded no step to compare; train for at least one step after the warm-up")
    comparison = compare(
        evaluation.graph,
        evaluation.timeline,
        seen.timelines,
        predicted_step=evaluation.result.step_s,
        measured_step=[float(value) for value in seen.step_s],
        predicted_memory_bytes=[sum(memory.tensor_lines.values()) for memory in evaluation.memory],
        measured_memory_bytes=seen.peak_bytes if all(seen.peak_bytes) else (),
        kind_intervals=kind_intervals_s(evaluation.graph, sampled_durations_s(evaluation)),
        rounds=[part.tolist() for part in np.array_split(seen.step_s, min(len(seen.step_s), MOST_BLOCKS))],
    )
    pace, speed = None, speed_beside(problem.cluster.profile, seen.pace_s, evaluation.result.plan.world_size)
    if speed is not None:  # the step at the pace of the cores beside the run
        predicted_s = step_at_speed(problem, evaluation, speed)
        error = relative_error(predicted_s, seen.mean_step_s)
        pace = PaceComparison(slowness=speed.mean, predicted_s=predicted_s, relative_error=error)
    correction = evaluation.result.interval_correction
    return replace(
        comparison,
        interval_correction=None if correction is None else correction.to_dict(),
        at_pace=pace,
        skew_s=seen.skew_s if evaluation.result.plan.synchronisation.is_relaxed else None,
    )


def speed_of(profile: Profile, pace: PaceComparison | None) -> dict[str, Any] | None:
    """A pace as text and numbers, and a warning where the machine is no longer what the profile's intervals count on."""
    if pace is None:
        return None
    speed = SpeedFactor.uniform(pace.slowness)
    then = f"then {format_seconds(pace.predicted_s)} are predicted ({format_error(pace.relative_error)})"
    text = f"the same work took {speed.text} than while profile {profile.name} was measured; {then}"
    warning = f"the machine's speed has changed ({speed.text} for the same work): calibrate again"
    return {**pace.to_dict(), "text": text, "warning": warning if speed.is_beyond(profile) else ""}


def typical_step(seen: Measurement) -> Timeline:
    """The recorded step whose makespan is the median."""
    return sorted(seen.timelines, key=lambda timeline: timeline.makespan_s)[len(seen.timelines) // 2]


def ask_again(folder: RunFolder) -> Prediction:
    """The question of a run folder, priced anew from the profile, its history and the plan that lie in it.

    Raises: ConfigError if it is not a complete run folder.
    """
    config = folder.read_config()
    for path in (folder.model, folder.plan, folder.profile):
        if not path.is_file():
            raise ConfigError(f"{folder.path} holds no {path.name}, so it is not a complete run folder; simulate or run again")
    plan, profile = Plan.load(folder.plan), load_profile(str(folder.profile))
    problem = PlanningProblem(
        model=Model.load(folder.model),
        cluster=cluster_of(config.cluster, profile),
        history=read_history(folder.history, profile),
        global_batch=plan.global_batch,
        numerics=config.training.numerics,
        clip_gradients=plan.clip_gradients,
        fit_probability=config.plan.fit_probability or FIT_PROBABILITY,
        loading=folder.read_loading(),
    )
    fold = False if folder.job.is_file() else None
    return Prediction(question=config, problem=problem, evaluation=evaluate(problem, plan, fold=fold))


def reopen(path: Path) -> tuple[RunFolder, Prediction, str]:
    """A folder that was run: its question asked again, and the name of its run.

    Raises: ConfigError if it is not a run folder; ExecutionError if it was never run.
    """
    folder = RunFolder(path)
    asked = ask_again(folder)
    if not folder.job.is_file():
        raise ExecutionError(f"{path} was never run; use `parsim run` with --out {path}")
    return folder, asked, Job.load(folder.job).runs[0].name


# What is remembered: a line in the profile's history and, on request, an update of the profile.


def record_of(asked: Prediction, seen: Measurement, comparison: Comparison, session: str | None = None) -> ValidationRecord:
    """What was predicted before any correction, and what was measured.

    Args:
        session: of measurements made together; left out: this one stands alone.
    """
    correction = asked.evaluation.result.interval_correction
    if correction is None:
        raise CostError("a record needs an interval, and this step was predicted without draws; evaluate it with samples > 0")
    environment, plan = describe_environment(), asked.evaluation.result.plan
    measurement = hashlib.sha256(seen.step_s.tobytes()).hexdigest()[:16]
    return ValidationRecord(
        model=asked.problem.model.name,
        run=session or measurement,
        predicted_s=correction.uncorrected.median,
        low_s=correction.uncorrected.p05,
        high_s=correction.uncorrected.p95,
        measured_s=comparison.step.measured_s,
        when=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        profile=fingerprint(asked.problem.cluster.profile),
        batch=plan.global_batch,
        plan=plan.summary(),
        ranks=plan.world_size,
        steps=seen.steps,
        rounds=len(seen.step_s),
        aa_floor=None if comparison.aa_floor is None else comparison.aa_floor.median,
        machine=f"{environment['processor']}, {environment['cores']} cores",
        measurement=measurement,
        versions={name: environment["versions"][name] for name in VERSIONS if name in environment["versions"]},
    )


def diagnosed(asked: Prediction, seen: Measurement, comparison: Comparison) -> Diagnosis:
    """Whether a run went as predicted and, where not, what was different and what to do."""
    return diagnosis_of(
        asked.problem,
        asked.evaluation,
        seen.timelines,
        step_s=comparison.step.measured_s,
        timed=seen.steps,
        floor=0.0 if comparison.aa_floor is None else comparison.aa_floor.median,
        slowness=None if comparison.at_pace is None else comparison.at_pace.slowness,
    )


def remember(asked: Prediction, record: ValidationRecord) -> dict[str, Any]:
    """Append the record to the history that the run file's profile has; says where, or why not."""
    table, profile = asked.question.cluster, asked.problem.cluster.profile
    path = history_path(table.profile or "", table.history)
    if path is None:
        text = f"not recorded: {table.machine} is a shipped profile; say where its history lies: --history FILE"
        return {"path": None, "recorded": False, "text": text}
    before = history_lines(path, profile) if path.exists() else []
    is_new = all(line.record is None or line.record.measurement != record.measurement for line in before)
    if is_new:
        append_record(path, record)
    text = f"recorded in {path}" if is_new else f"this measurement is in {path} already"
    apart = next((line for line in history_lines(path, profile) if line.record == record and line.why), None)
    if apart is not None:
        text += f", and not used: {apart.why}; `parsim history {table.profile or 'PROFILE'} --remove {apart.number}` removes it"
    return {"path": str(path), "recorded": is_new, "text": text}


def remembered(asked: Prediction, seen: Measurement, comparison: Comparison, *, plan_changed: bool) -> dict[str, Any]:
    """Append the record of a training, if it has enough steps under one plan to say something; says why not."""
    why = ""
    if plan_changed:
        why = "the plan changed on the way"
    elif changes_graph(asked.evaluation.result.plan):
        why = "the predicted step is a mean over all graphs of the plan, and the steps had others"
    elif seen.steps < asked.evaluation.result.plan.synchronisation.period_steps:
        why = f"{seen.steps} timed steps are no whole period of {asked.evaluation.result.plan.synchronisation}"
    elif seen.steps < LEAST_RECORDED:
        why = f"{seen.steps} timed steps are fewer than the {LEAST_RECORDED} that an interval is for"
    elif asked.evaluation.result.interval_correction is None:
        why = "the step was predicted without an interval"
    if not why:
        try:
            return remember(asked, record_of(asked, seen, comparison))
        except (OSError, ParsimError) as error:  # the training has ended well
            why = str(error)
    return {"path": None, "recorded": False, "text": f"not recorded: {why}"}


def updatable(config: Question) -> Path:
    """The file of the profile that an update is written into. Raises ConfigError for a shipped profile."""
    path = Path(config.cluster.profile or "")
    if path.suffix != ".json" or not path.is_file():
        raise ConfigError(
            f"--update writes into the profile, and {config.cluster.machine!r} is not a file of yours; calibrate one with "
            "`parsim calibrate --out PROFILE.json` and name it as cluster.profile"
        )
    return path


def update_profile(asked: Prediction, seen: Measurement, comparison: Comparison, record: ValidationRecord) -> dict[str, Any]:
    """Write into the profile what the run showed it to be wrong by; says what changed.

    Raises:
        ConfigError: a shipped profile, or one calibrated anew since the run. CostError: too few rounds to know their noise.
    """
    path = updatable(asked.question)
    cluster, plan = asked.problem.cluster, asked.evaluation.result.plan
    profile = load_profile(str(path))
    if fingerprint(without_updates(profile)) != fingerprint(without_updates(cluster.profile)):
        raise ConfigError(f"{path} was calibrated again after this run; validate a new run")
    if comparison.aa_floor is None:
        raise CostError(
            f"an update needs >= {MINIMUM_ROUNDS} rounds to separate an error from noise, the run has {len(seen.step_s)}; "
            "measure more"
        )
    problem = replace(asked.problem, cluster=replace(cluster, profile=profile))
    update = updated(
        problem,
        plan,
        asked.evaluation.graph,
        seen.timelines,
        step_s=comparison.step.measured_s,
        floor=comparison.aa_floor.median,
        run=record.run,
        steps=seen.steps,
    )
    if update.changes:
        save_profile(update.profile, path)
    text = "; ".join(update.changes) or "nothing is off by more than the noise of the run"
    return {
        "profile": str(path),
        "changes": list(update.changes),
        "predicted_before": update.before_s,
        "predicted_after": update.after_s,
        "relative_error_after": relative_error(update.after_s, comparison.step.measured_s),
        "text": f"{path}: {text}",
    }
