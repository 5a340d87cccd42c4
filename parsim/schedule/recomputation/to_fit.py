"""The cheapest recomputation that makes a plan fit: memory bought with forwards run twice.

At every place on the pp axis, steps are taken in the order of what a second of recomputing each frees, the best first. As few
are taken as make its ranks fit (`parsim.schedule.recomputation.steps`).

Leaves out: other sets of components than the first of that order, some of which may be cheaper. Of a model of few components
all sets are tried (`every_set`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from parsim.plans.plan import Plan
from parsim.plans.recompute import FULL, SELECTIVE
from parsim.predict.planning_problem import PlanningProblem
from parsim.schedule.parts.usual import is_large
from parsim.schedule.recomputation.least_kept import kept_together, least_kept
from parsim.schedule.recomputation.segments import within_stages
from parsim.schedule.recomputation.steps import (
    Relief,
    backwards_of,
    most_worthwhile_first,
    place_excess_bytes,
    recomputing,
)
from parsim.schedule.stage_costs import is_long

MOST_HALVINGS, FEW_HALVINGS = 64, 4
"""How often the number of recomputed components is narrowed down at most, and for long models."""


def recomputed_to_fit(problem: PlanningProblem, plan: Plan) -> Plan | None:
    """The plan with as few of each place's components recomputed as make it fit, the most worthwhile first.

    Args:
        problem: model, cluster and batch. plan: of this model, without recomputation.

    Returns:
        None if it fits with none of the sets that are likely to hold least. Raises CostError where a forward has no price.
    """
    everything = next((each for each in _holding_least(problem, plan) if _fits(problem, each)), None)
    if everything is None:
        return None
    return _fewest_steps(problem, plan, most_worthwhile_first(problem, plan), everything)


def segmented_to_fit(problem: PlanningProblem, plan: Plan) -> Plan | None:
    """The same with layers recomputed as segments: as few as make the plan fit, and as short ones.

    Args:
        problem: model, cluster and batch, and whether plans may have segments. plan: of this model, without recomputation.

    Returns:
        None if it does not fit so. Raises CostError where a forward has no price.
    """
    for way in kept_together(problem):
        segments = within_stages(plan, way.segments)
        everything = replace(plan, recompute=way.recompute, segments=segments)
        if segments and _fits(problem, everything):
            return _fewest_steps(problem, plan, most_worthwhile_first(problem, plan, segments), everything)
    return None


def _fits(problem: PlanningProblem, plan: Plan) -> bool:
    return not any(place_excess_bytes(problem, plan))


def _fewest_steps(problem: PlanningProblem, plan: Plan, by_place: Sequence[Sequence[Relief]], everything: Plan) -> Plan:
    """The plan with as few of the first steps of every place as make it fit, or else a plan that is known to fit."""
    too_few, enough = [-1] * len(by_place), [len(steps) for steps in by_place]
    left = FEW_HALVINGS if is_long(problem.model) else MOST_HALVINGS
    while left and any(most - few > 1 for few, most in zip(too_few, enough, strict=True)):
        left -= 1
        tried = [(few + most) // 2 if most - few > 1 else most for few, most in zip(too_few, enough, strict=True)]
        for place, over in enumerate(place_excess_bytes(problem, recomputing(plan, by_place, tried))):
            if over and tried[place] < enough[place]:
                too_few[place] = tried[place]
            elif not over:
                enough[place] = tried[place]
    least = recomputing(plan, by_place, enough)
    return least if _fits(problem, least) else everything


def _holding_least(problem: PlanningProblem, plan: Plan) -> Iterator[Plan]:
    """The plan with the sets of which one holds least: all components, all by operator, and all but those at either end.

    A recomputed component keeps its inputs. The first one may so keep another copy of the batch, and the last ones logits that
    nobody would keep.
    """
    if is_large(problem):
        yield replace(plan, recompute=least_kept(problem).recompute)
        if is_long(problem.model):
            return
    yield replace(plan, recompute=FULL)
    if any(component.selective is not None for component in problem.model.components):
        yield replace(plan, recompute=SELECTIVE)
    if not is_large(problem):
        names = backwards_of(problem, plan)
        for some in (names[1:], names[:-2], names[1:-2]):
            if some:
                yield replace(plan, recompute=tuple(some))
