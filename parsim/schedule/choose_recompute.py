"""The cheapest recomputation that makes a plan fit: memory bought with forwards run twice.

Components are taken in the order of what a second of recomputing each frees, the best first, and as few as make every rank fit.

Leaves out: choosing per stage, so a stage with room recomputes as much as a full one whose components are alike.
"""

from __future__ import annotations

from dataclasses import replace

from parsim.plans.plan import Plan
from parsim.plans.recompute import FULL
from parsim.predict.kept_activations import KeptActivations
from parsim.predict.planning_problem import PlanningProblem
from parsim.schedule.closed_form import ClosedFormEstimates
from parsim.work import Phase


def recomputed_to_fit(problem: PlanningProblem, plan: Plan) -> Plan | None:
    """The plan with the fewest of its components recomputed with which it fits, the most worthwhile first; None if it never
    does. Raises CostError where a forward has no price."""
    order = _most_worthwhile_first(problem, plan)
    if not order or not _fits(problem, replace(plan, recompute=tuple(order))):
        return None
    too_few, enough = 0, len(order)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if _fits(problem, replace(plan, recompute=tuple(order[:middle]))):
            enough = middle
        else:
            too_few = middle
    return replace(plan, recompute=tuple(order[:enough]))


def _most_worthwhile_first(problem: PlanningProblem, plan: Plan) -> list[str]:
    """All components that have a backward, by bytes that recomputing them frees per second of their forward."""
    kept = KeptActivations(problem.layout(replace(plan, recompute=FULL)), problem.precision)
    prices = ClosedFormEstimates(problem).prices(plan)
    worth: dict[str, float] = {}
    for component in problem.model.components:
        placement = kept.layout.placement[component.name]
        if kept.layout.recomputes(component.name):
            seconds = prices.compute_s(component, placement, Phase.FORWARD)
            worth[component.name] = kept.again(component.name).saved_bytes / max(seconds, 1e-12)
    return sorted(worth, key=lambda name: -worth[name])


def _fits(problem: PlanningProblem, plan: Plan) -> bool:
    return all(entry.fits for entry in problem.memory(plan))
