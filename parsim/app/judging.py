"""A run that has ended: its question asked again, what its ranks wrote down, and how right the prediction was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from parsim.app.load import cluster_of
from parsim.app.prediction import Prediction
from parsim.app.run_folder import RunFolder
from parsim.app.training_checks import whole_periods
from parsim.errors import ConfigError, ExecutionError
from parsim.execute.job import Job
from parsim.hardware.profile import Profile
from parsim.hardware.speed_factor import SpeedFactor, speed_beside
from parsim.model.model import Model
from parsim.plans.plan import Plan
from parsim.predict.compare import Comparison, PaceComparison, compare, kind_intervals_s, relative_error
from parsim.predict.evaluate import Evaluation, evaluate, sampled_durations_s, step_at_speed
from parsim.predict.problem import PlanningProblem
from parsim.report.more_tables import memory_levels
from parsim.report.tables import format_error
from parsim.units import format_seconds

if TYPE_CHECKING:
    from parsim.execute.measurement import Measurement


MOST_BLOCKS = 20
"""Into so many parts a training is cut for its A/A floor: steps that follow one another share their disturbances."""


def levels_of(asked: Prediction, seen: Measurement) -> list[dict[str, Any]]:
    """Memory of every rank as several parties counted it, beside what was predicted of it (`parsim.report.more_tables`)."""
    return [row.to_dict() for row in memory_levels(asked.evaluation.memory, seen.memory_uses)]


def measured(folder: RunFolder, run: str, evaluation: Evaluation) -> Measurement:
    """What the ranks of one run of the folder's job wrote down."""
    from parsim.execute.measurement import load_measurement

    seen = load_measurement(folder.records(run), evaluation.graph)
    return replace(seen, left_out=len(seen.step_s) - len(whole_periods(seen, evaluation.result.plan)))


def judge(problem: PlanningProblem, evaluation: Evaluation, seen: Measurement) -> Comparison:
    """Predicted against measured, task by task; of peak memory what lies in tensors, which is what can be measured alike.

    Raises: ExecutionError if no step was recorded.
    """
    if not seen.timelines or not len(seen.step_s):
        raise ExecutionError("the run recorded no step to compare; train for at least one step after the warm-up")
    durations = sampled_durations_s(evaluation)
    found = evaluation.result.interval_correction
    comparison = compare(
        evaluation.graph,
        evaluation.timeline,
        seen.timelines,
        predicted_step=evaluation.result.step_s,
        measured_step=[float(value) for value in seen.step_s],
        predicted_memory_bytes=[sum(memory.tensor_lines.values()) for memory in evaluation.memory],
        measured_memory_bytes=seen.peak_bytes if all(seen.peak_bytes) else (),
        kind_intervals=kind_intervals_s(evaluation.graph, durations),
        rounds=[part.tolist() for part in np.array_split(seen.step_s, min(len(seen.step_s), MOST_BLOCKS))],
    )
    correction = None if found is None else found.to_dict()
    return replace(comparison, interval_correction=correction, at_pace=at_pace(problem, evaluation, seen))


def at_pace(problem: PlanningProblem, evaluation: Evaluation, seen: Measurement) -> PaceComparison | None:
    """What the profile says of the step at the pace of the cores beside the run; None if nobody looked."""
    speed = speed_beside(problem.cluster.profile, seen.pace_s, evaluation.result.plan.world_size)
    if speed is None:
        return None
    predicted_s = step_at_speed(problem, evaluation, speed)
    error = relative_error(predicted_s, seen.mean_step_s)
    return PaceComparison(slowness=speed.mean, predicted_s=predicted_s, relative_error=error)


def speed_of(profile: Profile, found: PaceComparison | None) -> dict[str, Any] | None:
    """A pace as text and numbers, and a warning where the machine is no longer what the profile's intervals count on."""
    if found is None:
        return None
    speed = SpeedFactor.uniform(found.slowness)
    longer = speed.text
    then = f"then {format_seconds(found.predicted_s)} are predicted ({format_error(found.relative_error)})"
    text = f"the same work took {longer} than while profile {profile.name} was measured; {then}"
    warning = f"the machine's speed has changed ({longer} for the same work): calibrate again"
    return {**found.to_dict(), "text": text, "warning": warning if speed.is_beyond(profile) else ""}


def typical_step(seen: Measurement) -> int:
    """Index of the recorded step whose makespan is the median."""
    order = sorted(range(len(seen.timelines)), key=lambda number: seen.timelines[number].makespan_s)
    return order[len(order) // 2]


def ask_again(folder: RunFolder) -> Prediction:
    """The question of a run folder, priced anew from the profile, its history and the plan that lie in it.

    Raises: ConfigError if it is not a complete run folder.
    """
    config = folder.read_config()
    for path in (folder.model, folder.plan, folder.profile):
        if not path.is_file():
            raise ConfigError(f"{folder.path} holds no {path.name}, so it is not a complete run folder; simulate or run again")
    plan = Plan.load(folder.plan)
    profile = folder.read_profile()
    problem = PlanningProblem(
        model=Model.load(folder.model),
        cluster=cluster_of(config.cluster, profile),
        history=folder.read_history(profile),
        global_batch=plan.global_batch,
        numerics=config.training.numerics,
        clip_gradients=plan.clip_gradients,
        fit_probability=config.plan.fit_probability,
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
