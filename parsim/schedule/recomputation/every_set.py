"""Every set of recomputed components of a model of few components, the smallest sets first."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod

from parsim.plans.plan import Plan
from parsim.plans.recompute import SELECTIVE
from parsim.predict.planning_problem import PlanningProblem
from parsim.schedule.recomputation.steps import backwards_of, recompute_of

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
    backwards = backwards_of(problem, plan)
    some = problem.layout(replace(plan, recompute=SELECTIVE))
    ways = [(0, 1, 2) if some.recomputes_by_operator(name) else (0, 2) for name in backwards]
    if prod(map(len, ways)) > MOST_SETS:
        ways = [(0, 2)] * len(backwards)
    levels = sorted(product(*ways), key=sum)
    return [replace(plan, recompute=recompute_of(zip(backwards, each, strict=True))) for each in levels]


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
