"""Close the loop: from a prediction and its measurement to a profile that would have predicted it."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from parsim.costs.diagnosis import LEAST_STEPS, Diagnosis, ObservedStep, PredictedStep, diagnose
from parsim.costs.observed import (
    Evidence,
    RunCorrections,
    WorkClass,
    class_of,
    learn,
    refit,
    task_durations_s,
    updates_of,
    with_update,
    without_updates,
)
from parsim.hardware.devices import device_name
from parsim.hardware.profile import Profile
from parsim.numeric import Floats
from parsim.plans.plan import Plan
from parsim.predict.evaluate import Evaluation, evaluate, sampled_durations_s
from parsim.predict.problem import PlanningProblem
from parsim.program.taskgraph import TaskGraph
from parsim.search.adapt.planning import expected_seconds, seconds_by_class
from parsim.timeline import Timeline
from parsim.work import LoadBatch

FINE = 1e-3
"""A step is matched to this relative error."""

MOST_PASSES = 12
PRINTED_DIGITS = 6


@dataclass(frozen=True, kw_only=True)
class Updated:
    """Attributes:
    profile: with one more update; the very same where nothing changed. changes: what changed, for people.
    before_s, after_s: the predicted step under the profile as it was and as it is.
    """

    profile: Profile
    changes: tuple[str, ...]
    before_s: float
    after_s: float


def updated(
    problem: PlanningProblem,
    plan: Plan,
    graph: TaskGraph,
    timelines: Sequence[Timeline],
    *,
    step_s: float,
    floor: float,
    run: str,
    steps: int,
) -> Updated:
    """The problem's profile after a run of `plan`.

    Task times teach the factors of ranks, phases and communication (`parsim.costs.observed`). If the step is
    still off by more than the floor, the time lies between the tasks, which the profile counts as computation. Then all ranks'
    factors are scaled until the step fits.

    Args:
        graph, timelines: the plan's program and its measured steps. step_s: the mean measured step. floor: its A/A floor.
        run, steps: for the record.

    Raises:
        CostError: nothing was observed. GraphError, PlanError: as `evaluate`.
    """
    profile, before = problem.cluster.profile, updates_of(problem.cluster)
    base = _on(problem, without_updates(profile))
    observed = [seconds_by_class(graph, task_durations_s(len(graph.tasks), timeline)) for timeline in timelines]
    evidence = Evidence(observed=observed, expected=expected_seconds(base, plan), step_s=step_s, floor=floor)
    corrections = _rounded(_fitted_to_step(base, plan, refit(evidence, before), step_s, floor))
    before_s = _step_s(problem, plan)
    changes = _changes(before, corrections)
    if not changes:
        return Updated(profile=profile, changes=(), before_s=before_s, after_s=before_s)
    provenance = {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "run": run,
        "plan": plan.summary(),
        "steps": steps,
        "aa_floor": floor,
    }
    after = with_update(profile, corrections, problem.cluster, provenance)
    return Updated(profile=after, changes=changes, before_s=before_s, after_s=_step_s(_on(problem, after), plan))


def _fitted_to_step(
    base: PlanningProblem, plan: Plan, corrections: RunCorrections, step_s: float, floor: float
) -> RunCorrections:
    """The factors with those of the ranks scaled until the predicted step is the measured one, if it is off by more than noise.

    A secant in logarithms: the step grows with the ranks' factors, by at most as much. One that hardly depends on them is left.
    """

    def scaled(scale: float) -> RunCorrections:
        ranks = range(base.cluster.size)
        return replace(corrections, ranks=tuple((rank, corrections.rank_factor(rank) * math.exp(scale)) for rank in ranks))

    def error_of(tried: RunCorrections) -> float:
        return math.log(_step_s(replace(base, corrections=tried), plan) / step_s)

    error = error_of(corrections)
    if abs(error) <= math.log1p(floor):
        return corrections
    scale, slope = 0.0, 1.0
    for _ in range(MOST_PASSES):
        if abs(error) <= FINE:
            break
        change = -error / slope
        scale += change
        following = error_of(scaled(scale))
        moved = (following - error) / change
        if moved < 0.1:
            return corrections
        error, slope = following, moved
    return scaled(scale)


def _step_s(problem: PlanningProblem, plan: Plan) -> float:
    return evaluate(problem, plan, samples=0, fold=False).result.step_s.median


def _on(problem: PlanningProblem, profile: Profile) -> PlanningProblem:
    """The question on another version of the profile."""
    return replace(problem, cluster=replace(problem.cluster, profile=profile))


Key = TypeVar("Key")


def _rounded(corrections: RunCorrections) -> RunCorrections:
    """More digits would only record the noise of one run."""

    def short(pairs: Iterable[tuple[Key, float]]) -> tuple[tuple[Key, float], ...]:
        return tuple((key, float(f"{factor:.{PRINTED_DIGITS}g}")) for key, factor in pairs)

    return RunCorrections(
        ranks=short(corrections.ranks), phases=short(corrections.phases), communication=short(corrections.communication)
    )


def _changes(before: RunCorrections, after: RunCorrections) -> tuple[str, ...]:
    """Such as "rank 1: x1 -> x1.2"."""
    old, new = _named(before), _named(after)
    return tuple(
        f"{name}: x{old.get(name, 1.0):.3g} -> x{new.get(name, 1.0):.3g}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name, 1.0) != new.get(name, 1.0)
    )


def _named(corrections: RunCorrections) -> dict[str, float]:
    return {
        **{f"rank {rank}": factor for rank, factor in corrections.ranks},
        **{phase.value: factor for phase, factor in corrections.phases},
        **{str(key): factor for key, factor in corrections.communication},
    }


# From a prediction and the timelines of its run to a verdict (`parsim.costs.diagnosis`).


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
    seconds = [task_durations_s(len(graph.tasks), timeline) for timeline in timelines]
    observed = ObservedStep(
        steps=[seconds_by_class(graph, own) for own in seconds],
        loading=_loading_s(graph, np.mean(seconds, axis=0)) if seconds else [],
        step_s=step_s,
        timed=timed,
        floor=floor,
        slowness=slowness,
    )
    verdict = diagnose(predicted, observed)
    if verdict.as_predicted is not False or step_s < predicted.high_s or evaluation.period is not None or timed < LEAST_STEPS:
        return verdict
    return diagnose(predicted, observed, unexplained_s=step_s - _explained_s(problem, evaluation, predicted, observed))


def _predicted(problem: PlanningProblem, evaluation: Evaluation) -> PredictedStep:
    graph, step = evaluation.graph, evaluation.result.step_s
    seconds_by_task = task_durations_s(len(graph.tasks), evaluation.timeline)
    drawn = sampled_durations_s(evaluation)
    places: dict[WorkClass, list[int]] = {}
    for task in graph.tasks:
        key = class_of(task.work, task.resources[0].rank)
        if key is not None:
            places.setdefault(key, []).append(task.index)
    draws: dict[WorkClass, Floats] = {key: drawn[:, tasks].sum(axis=1) for key, tasks in places.items()}
    return PredictedStep(
        seconds=seconds_by_class(graph, seconds_by_task),
        draws=draws,
        loading=_loading_s(graph, seconds_by_task),
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


def _loading_s(graph: TaskGraph, seconds: Floats) -> list[float]:
    """By rank the seconds of reading batches."""
    by_rank = [0.0] * graph.world_size
    for task in graph.tasks:
        if isinstance(task.work, LoadBatch):
            by_rank[task.resources[0].rank] += float(seconds[task.index])
    return by_rank
