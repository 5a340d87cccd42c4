"""From a prediction and the timelines of its run to a verdict (`parsim.costs.feedback.diagnosis`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from parsim.arrays import Floats
from parsim.costs.feedback.diagnosis import LEAST_STEPS, Diagnosis, ObservedStep, PredictedStep, diagnose
from parsim.costs.feedback.run_corrections import WorkClass, class_of, class_seconds, learn
from parsim.graph.taskgraph import TaskGraph
from parsim.hardware.device_kinds import device_name
from parsim.predict.evaluate import Evaluation, evaluate, sampled_durations_s
from parsim.predict.planning_problem import PlanningProblem
from parsim.schedule.live.planning import task_seconds
from parsim.timeline import Timeline
from parsim.work import LoadBatch


def diagnosis_of(
    problem: PlanningProblem,
    evaluation: Evaluation,
    timelines: Sequence[Timeline],
    *,
    step_s: float,
    timed: int,
    floor: float,
    slowness: float | None = None,
) -> Diagnosis:
    """Whether a run went as predicted and, where not, what was different.

    Args:
        problem, evaluation: of the plan that ran, with every rank simulated.
        timelines: of some of its steps. step_s: the mean measured step. timed: over how many steps.
        floor: relative noise of the step (A/A floor). slowness: of the machine, by a probe beside the run; None: unknown.

    Raises:
        CostError: nothing was recorded.
    """
    predicted = _predicted(problem, evaluation)
    graph = evaluation.graph
    seconds = [task_seconds(len(graph.tasks), timeline) for timeline in timelines]
    observed = ObservedStep(
        steps=[_by_class(graph, own) for own in seconds],
        loading=_loading_s(graph, np.mean(seconds, axis=0)) if seconds else [],
        step_s=step_s,
        timed=timed,
        floor=floor,
        slowness=slowness,
    )
    found = diagnose(predicted, observed)
    if found.as_predicted is not False or step_s < predicted.high_s or evaluation.period is not None or timed < LEAST_STEPS:
        return found
    return diagnose(predicted, observed, unexplained_s=step_s - _explained_s(problem, evaluation, predicted, observed))


def _predicted(problem: PlanningProblem, evaluation: Evaluation) -> PredictedStep:
    graph, step = evaluation.graph, evaluation.result.step_s
    own = task_seconds(len(graph.tasks), evaluation.timeline)
    drawn = sampled_durations_s(evaluation)
    places: dict[WorkClass, list[int]] = {}
    for task in graph.tasks:
        key = class_of(task.work, task.resources[0].rank)
        if key is not None:
            places.setdefault(key, []).append(task.index)
    draws: dict[WorkClass, Floats] = {key: drawn[:, tasks].sum(axis=1) for key, tasks in places.items()}
    return PredictedStep(
        seconds=_by_class(graph, own),
        draws=draws,
        loading=_loading_s(graph, own),
        low_s=step.p05,
        median_s=step.median,
        high_s=step.p95,
        devices=[device_name(device.index, device.type.kind) for device in problem.cluster.devices],
        cores_carry=problem.cluster.profile.communication.uses_cores,
        adapts=not evaluation.result.plan.synchronisation.is_relaxed,
    )


def _explained_s(problem: PlanningProblem, evaluation: Evaluation, predicted: PredictedStep, observed: ObservedStep) -> float:
    """The step of the plan if its tasks take what they took, on average."""
    keys = observed.steps[0]
    mean = {key: float(np.mean([step.get(key, 0.0) for step in observed.steps])) for key in keys}
    now = replace(problem, corrections=learn(mean, predicted.seconds))
    loading = max((seen - asked for seen, asked in zip(observed.loading, predicted.loading, strict=True)), default=0.0)
    return evaluate(now, evaluation.result.plan, samples=0, fold=False).result.step_s.median + max(0.0, loading)


def _by_class(graph: TaskGraph, seconds: Floats) -> dict[WorkClass, float]:
    return class_seconds(
        (task.work, task.resources[0].rank, own) for task, own in zip(graph.tasks, seconds.tolist(), strict=True)
    )


def _loading_s(graph: TaskGraph, seconds: Floats) -> list[float]:
    """By rank, of reading batches."""
    found = [0.0] * graph.world_size
    for task in graph.tasks:
        if isinstance(task.work, LoadBatch):
            found[task.resources[0].rank] += float(seconds[task.index])
    return found
