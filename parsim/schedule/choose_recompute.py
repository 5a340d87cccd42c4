"""The cheapest recomputation that makes a plan fit: memory bought with forwards run twice.

Of every place on the pp axis components are taken in the order of what a second of recomputing each frees, the best first, and
as few as make its ranks fit.

Leaves out: other sets of components than the first of that order, some of which may be cheaper. Of a model of few components
all sets are tried (`every_set_that_fits`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from parsim.plans.plan import Plan
from parsim.plans.recompute import FULL, NONE
from parsim.predict.kept_activations import KeptActivations
from parsim.predict.planning_problem import PlanningProblem
from parsim.schedule.bounds.computation import prices_of
from parsim.work import Phase

FEW_COMPONENTS = 6
"""Of a model with at most so many backwards every set is tried."""


def recomputed_to_fit(problem: PlanningProblem, plan: Plan) -> Plan | None:
    """The plan with as few of each place's components recomputed as make it fit, the most worthwhile first.

    Args:
        problem: model, cluster and batch. plan: of this model.

    Returns:
        None if it does not fit with all of them recomputed. Raises CostError where a forward has no price.
    """
    everything = replace(plan, recompute=FULL)
    if any(place_excess_bytes(problem, everything)):
        return None
    by_place = _most_worthwhile_first(problem, plan)
    too_few, enough = [-1] * len(by_place), [len(names) for names in by_place]
    while any(most - few > 1 for few, most in zip(too_few, enough, strict=True)):
        tried = [(few + most) // 2 if most - few > 1 else most for few, most in zip(too_few, enough, strict=True)]
        for place, over in enumerate(place_excess_bytes(problem, _recomputing(plan, by_place, tried))):
            if over and tried[place] < enough[place]:
                too_few[place] = tried[place]
            elif not over:
                enough[place] = tried[place]
    least = _recomputing(plan, by_place, enough)
    return everything if any(place_excess_bytes(problem, least)) else least


def every_set_that_fits(problem: PlanningProblem, plan: Plan) -> list[Plan]:
    """The plan with every set of recomputed components that fits, none of which holds another; none for larger models.

    Args:
        problem: model, cluster and batch. plan: of this model, without recomputation.
    """
    if not are_few(problem, plan):
        return []
    backwards = _backwards(problem, plan)
    fitting: list[frozenset[str]] = []
    found = []
    for size in range(len(backwards) + 1):
        for some in combinations(backwards, size):
            if any(less <= set(some) for less in fitting):
                continue
            tried = replace(plan, recompute=some or NONE)
            if not any(place_excess_bytes(problem, tried)):
                fitting.append(frozenset(some))
                found.append(tried)
    return found


def are_few(problem: PlanningProblem, plan: Plan) -> bool:
    """Whether every set of recomputed components is tried.

    Args:
        problem: model, cluster and batch. plan: of this model.
    """
    return len(_backwards(problem, plan)) <= FEW_COMPONENTS


def _backwards(problem: PlanningProblem, plan: Plan) -> list[str]:
    return [name for name in plan.components if name in problem.layout(plan).differentiable]


def _recomputing(plan: Plan, by_place: Sequence[Sequence[str]], counts: Sequence[int]) -> Plan:
    chosen = tuple(name for names, count in zip(by_place, counts, strict=True) for name in names[:count])
    return replace(plan, recompute=chosen)


def place_excess_bytes(problem: PlanningProblem, plan: Plan) -> list[float]:
    """Per place on the pp axis by how much its worst rank does not fit.

    Args:
        problem: model, cluster and batch. plan: of this model.
    """
    worst = [0.0] * plan.mesh.pp
    for entry in problem.memory(plan):
        if not entry.fits:
            place = plan.stage_of_rank(entry.rank)
            worst[place] = max(worst[place], float(entry.excess_bytes), 1.0)
    return worst


def _most_worthwhile_first(problem: PlanningProblem, plan: Plan) -> list[list[str]]:
    """Per place the components that have a backward, by bytes that recomputing them frees per second of their forward."""
    kept = KeptActivations(problem.layout(replace(plan, recompute=FULL)), problem.precision)
    prices = prices_of(problem, plan)
    worth: dict[str, float] = {}
    for component in problem.model.components:
        placement = kept.layout.placement[component.name]
        if kept.layout.recomputes(component.name):
            seconds = prices.compute_s(component, placement, Phase.FORWARD)
            worth[component.name] = kept.again(component.name).saved_bytes / max(seconds, 1e-12)
    found: list[list[str]] = [[] for _ in range(plan.mesh.pp)]
    for name in sorted(worth, key=lambda name: -worth[name]):
        found[kept.layout.stage_of[name]].append(name)
    return found
