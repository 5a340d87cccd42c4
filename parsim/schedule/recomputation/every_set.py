"""Every set of recomputed components of a model of few components, the smallest sets first."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod

from parsim.plans.plan import Plan
from parsim.plans.recompute import SELECTIVE
from parsim.predict.planning_problem import PlanningProblem
from parsim.schedule.recomputation.steps import SOME, WHOLE, backwards_of, recompute_of

FEW_COMPONENTS = 6
"""Of a model with at most so many backwards every set is tried."""

MOST_SETS = 2**FEW_COMPONENTS
"""Beyond so many, components are recomputed whole alone in the sets that are tried."""


def every_set(problem: PlanningProblem, plan: Plan) -> list[Plan]:
    """The plan with every set of recomputed components, the smallest sets first. By operator, too, where these are few.

    Args:
        problem: model, cluster and batch. plan: of this model, without recomputation.

    Returns:
        None for larger models.
    """
    if not are_few(problem, plan):
        return []
    backwards, ways = backwards_of(problem, plan), _ways(problem, plan)
    if prod(map(len, ways)) > MOST_SETS:
        ways = [(0, WHOLE)] * len(backwards)
    levels = sorted(product(*ways), key=sum)
    return [replace(plan, recompute=recompute_of(zip(backwards, each, strict=True))) for each in levels]


def tries_all_of(problem: PlanningProblem, plan: Plan) -> bool:
    """Whether `every_set` holds every set, those by operator too.

    Args:
        problem: model, cluster and batch. plan: of this model, without recomputation.
    """
    return are_few(problem, plan) and prod(map(len, _ways(problem, plan))) <= MOST_SETS


def _ways(problem: PlanningProblem, plan: Plan) -> list[tuple[int, ...]]:
    """By component that has a backward how it may be recomputed."""
    some = problem.layout(replace(plan, recompute=SELECTIVE))
    every = backwards_of(problem, plan)
    return [(0, SOME, WHOLE) if some.recomputes_by_operator(name) else (0, WHOLE) for name in every]


def recomputes_more(one: Plan, other: Plan) -> bool:
    """Whether a plan recomputes all that another one does.

    Args:
        one, other: plans of `every_set`, which differ in nothing else.
    """
    whole, some = set(one.recomputed), set(one.recomputed_by_operator)
    return set(other.recomputed) <= whole and set(other.recomputed_by_operator) <= whole | some


def are_few(problem: PlanningProblem, plan: Plan) -> bool:
    """Whether every set of recomputed components is tried.

    Args:
        problem: model, cluster and batch. plan: of this model.
    """
    return len(backwards_of(problem, plan)) <= FEW_COMPONENTS
