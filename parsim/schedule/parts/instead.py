"""What may be judged in place of a plan that does not fit: other stages that fit, or recomputation.

stages          the fastest cut whose stages fit without recomputation
components      as few of them recomputed as make the plan fit
segments        whole layers recomputed, as few as make it fit, where a problem has segments
sets            of a model of few components, every set that fits (`parsim.schedule.parts.refinements`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from parsim.plans.placement import BATCH
from parsim.plans.plan import Plan
from parsim.plans.recompute import AUTO
from parsim.predict.planning_problem import PlanningProblem
from parsim.schedule.bounds.plan_floor import floor_excess_bytes, plan_floor
from parsim.schedule.bounds.step import step_bound_s
from parsim.schedule.parts.estimate import least_bytes
from parsim.schedule.parts.node import REMEMBERED, TRIED, Node
from parsim.schedule.parts.refinements import sets_that_fit
from parsim.schedule.parts.usual import is_large
from parsim.schedule.recomputation.every_set import are_few, tries_all_of
from parsim.schedule.recomputation.least_kept import LeastKept, kept_together, least_kept
from parsim.schedule.recomputation.segments import ending_with_most, segments_of
from parsim.schedule.recomputation.steps import may_fit_recomputing, place_excess_bytes
from parsim.schedule.recomputation.to_fit import recomputed_to_fit, segmented_to_fit
from parsim.schedule.space import zero_stages
from parsim.schedule.stage_costs import is_long
from parsim.schedule.stages import Cutting


def may_fit(problem: PlanningProblem, plan: Plan, cutting: Cutting | None) -> bool:
    """Whether a plan may fit with recomputation, or with its stages cut otherwise.

    Args:
        problem: model, cluster and batch. plan: of this model. cutting: where its stages may be cut otherwise.
    """
    if _recomputed_may_fit(problem, plan) or _segmented_may_fit(problem, plan):
        return True
    return _other_stages_may_fit(problem, plan, cutting)


def missing_of_cut(problem: PlanningProblem, plan: Plan, cutting: Cutting | None) -> tuple[float, Plan]:
    """By how much no plan with these stages fits, nor with those that are cut instead, and the one that needs least.

    Args:
        problem, plan, cutting: as above; the plan with any ZeRO stage.

    Returns:
        Where one might fit, 0 and the plan as it is.
    """
    found, closest = float("inf"), plan
    for stage in zero_stages(problem, problem.layout(plan)):
        own = replace(plan, zero_stage=stage)
        over = floor_excess_bytes(problem, own, recomputing=plan.recomputes)
        if not over or may_fit(problem, own, cutting):
            return 0.0, plan
        if over < found:
            found, closest = over, own
    return found, closest


def instead_of(problem: PlanningProblem, plan: Plan, cutting: Cutting | None) -> Iterator[Node]:
    """Parts that stand for a plan that does not fit.

    Args:
        problem, plan, cutting: as above.
    """
    bound_s = step_bound_s(problem, plan)

    def of(found: Plan | None, *, fits: bool = False) -> list[Node]:
        if found is None or found == plan:
            return []
        return [Node(step_bound_s(problem, found), 1, None, found, visits=REMEMBERED, fits=fits)]

    if _other_stages_may_fit(problem, plan, cutting) and cutting is not None:
        fitting = replace(cutting, zero_stage=plan.zero_stage, bucket_bytes=plan.bucket_bytes)
        yield Node(bound_s, 1, lambda: of(fitting.fitting(), fits=True), visits=TRIED, instead_of_one=True)
    recomputed, segmented = _recomputed_may_fit(problem, plan), _segmented_may_fit(problem, plan)
    if not (recomputed or segmented) or not may_fit_recomputing(problem, plan):
        return
    floor = plan_floor(problem, plan)
    least_s = bound_s if floor is None else max(bound_s, floor.recomputing_bound_s(plan.zero_stage))
    if recomputed:
        covered = tries_all_of(problem, plan)
        tried = Node(least_s, 1, lambda: of(_recomputed(problem, plan, cutting), fits=True), visits=TRIED, instead_of_one=True)
        yield replace(tried, covered=covered)
        if are_few(problem, plan):
            yield Node(least_s, 0, lambda: sets_that_fit(problem, plan), late=True, instead_of_one=True)

    def segments() -> list[Node]:
        found = _segmented(problem, plan, cutting)
        other = ending_with_most(problem, found) if found is not None and plan.zero_stage == 3 else None
        if found is None or other is None:
            return of(found, fits=True)
        if step_bound_s(problem, other) < step_bound_s(problem, found) and not any(place_excess_bytes(problem, other)):
            found, other = other, found
        return of(found, fits=True) + of(other)

    if segmented:
        yield Node(least_s, not recomputed, segments, visits=TRIED, instead_of_one=True)


def _recomputed_may_fit(problem: PlanningProblem, plan: Plan) -> bool:
    return problem.recompute == AUTO and not floor_excess_bytes(problem, plan, recomputing=True)


def _segmented_may_fit(problem: PlanningProblem, plan: Plan) -> bool:
    return bool(segments_of(problem)) and not floor_excess_bytes(problem, plan, recomputing=True, segments=True)


def _other_stages_may_fit(problem: PlanningProblem, plan: Plan, cutting: Cutting | None) -> bool:
    if cutting is None or plan.mesh.pp == 1 or plan.recomputes:
        return False
    floor = plan_floor(problem, plan)
    return floor is None or not floor.excess_of_any_cut(plan.zero_stage, recomputing=False)


def _recomputed(problem: PlanningProblem, plan: Plan, cutting: Cutting | None) -> Plan | None:
    """With components recomputed, of large problems also with longer stages where fewer microbatches are held."""
    ways: list[Callable[[], Plan | None]] = [lambda: recomputed_to_fit(problem, plan)]
    if cutting is not None and plan.mesh.pp > 1 and is_large(problem):
        ways.append(lambda: _with_longer_stages(problem, plan, cutting, least_kept(problem)))
        if is_long(problem.model):
            ways.reverse()  # memory takes long to work out, and the second way knows the better cut
    return next((found for way in ways if (found := way()) is not None), None)


def _segmented(problem: PlanningProblem, plan: Plan, cutting: Cutting | None) -> Plan | None:
    """The same with whole layers."""
    found = segmented_to_fit(problem, plan)
    if found is not None or cutting is None or plan.mesh.pp == 1 or not is_large(problem):
        return found
    tried = (_with_longer_stages(problem, plan, cutting, way) for way in kept_together(problem))
    return next((each for each in tried if each is not None), None)


def _with_longer_stages(problem: PlanningProblem, plan: Plan, cutting: Cutting, way: LeastKept) -> Plan | None:
    placed = [cutting.placements.get(component.name, BATCH) for component in problem.model.components]
    kept = least_bytes(problem, way, plan.mesh, plan.microbatch_samples, placed)
    fitting = replace(cutting, zero_stage=plan.zero_stage, bucket_bytes=plan.bucket_bytes)
    return fitting.fitting_recomputed(way.recompute, kept, way.segments)
