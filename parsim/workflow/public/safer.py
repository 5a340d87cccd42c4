"""A plan that surely fits, beside a choice that may run out of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from parsim.costs.memory.verdict import SAFE_PROBABILITY
from parsim.errors import PlanError, ScheduleError
from parsim.predict.evaluate import Evaluation
from parsim.predict.planning_problem import PlanningProblem
from parsim.schedule.search import search


def safer_plan(problem: PlanningProblem, ranked: Sequence[Evaluation], chosen: Evaluation) -> Evaluation | None:
    """The fastest plan known that fits with `SAFE_PROBABILITY`: of those ranked, or of a search near the choice.

    That search keeps mesh, microbatches and strategy of the choice, and leaves ZeRO, buckets and recomputation as free as the
    question does. A safe plan on another mesh may be faster.

    Args:
        problem: model, cluster and batch. ranked: the plans of the answer. chosen: that among them which may not fit.
    """
    found = [entry for entry in ranked if entry.result.fits and entry.result.fit_probability >= SAFE_PROBABILITY]
    if not problem.constraints.synchronisation.is_relaxed:
        near = _near(problem, chosen)
        found += [] if near is None else [near]
    return min(found, key=lambda entry: entry.result.step_s.median, default=None)


def _near(problem: PlanningProblem, chosen: Evaluation) -> Evaluation | None:
    plan = chosen.result.plan
    mesh = plan.mesh
    constraints = replace(problem.constraints, pp=mesh.pp, dp=mesh.dp, tp=mesh.tp, microbatches=plan.microbatches)
    careful = replace(problem, fit_probability=SAFE_PROBABILITY, constraints=constraints)
    try:
        return search(careful, (chosen.result.strategy,)).chosen
    except (PlanError, ScheduleError):  # the strategy has no plan under these constraints
        return None
