"""Parts that are opened last: what the other parts of a family stand for, as far as it may be faster than the best plan.

cuts          beside the cut whose slowest stage is fastest, every other one, the least bound first
placements    of a model of few components, every joint choice
recomputation of a model of few components, every set that fits and recomputes no more than another one
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

from parsim.errors import PlanError
from parsim.hardware.devices import DEVICE_KINDS
from parsim.plans.layouts import BATCH, Placement
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import rank_of_stage
from parsim.plans.plan import AUTO, DEFAULT_BUCKET_BYTES, FULL, Plan
from parsim.predict.problem import PlanningProblem
from parsim.search.bound import lowered_s, step_bound_s
from parsim.search.estimate import LeastSeconds, least_bytes, least_missing_bytes
from parsim.search.memory_floor import LeastKept, floor_excess_bytes, kept_together, least_kept, plan_floor
from parsim.search.placement.problem import choices_by_bound, count_choices
from parsim.search.prices import Prices
from parsim.search.recompute import (
    are_few,
    every_set,
    may_fit_recomputing,
    recomputed_to_fit,
    recomputes_more,
    segmented_to_fit,
    tries_all_of,
)
from parsim.search.space import (
    Bounds,
    Node,
    are_listed,
    count_cuts,
    every_cut,
    is_small,
    orders,
    zero_stages,
)
from parsim.search.stages import Cutting, is_long, place_excess_bytes, segments_of

OfCut = Callable[[Cutting, Bounds], list[Node]]

MOST_CUTS = 64
"""Of one mesh, number of microbatches and order: cuts that are tried beside the one whose slowest stage is fastest."""


def other_cuts(cutting: Cutting, size: int, bound_s: float, of_cut: OfCut) -> list[Node]:
    """Every cut but the one whose slowest stage is fastest, the least bound first.

    Args:
        size: plans of one cut. bound_s: of all of them. of_cut: the parts of one cut.
    """
    most = min(MOST_CUTS, cutting.others)
    if not most:
        return []

    def begun() -> list[Node]:
        listed = cutting.others_by_bound()

        def following(left: int) -> list[Node]:
            bound_and_cut = next(listed, None) if left else None
            if bound_and_cut is None:
                return []
            least_s, cut = bound_and_cut
            least_s = lowered_s(cutting.problem, cutting.mesh, least_s)
            rest = Node(least_s, size * (left - 1), lambda: following(left - 1), late=True, visits=0)
            return [Node(least_s, size, partial(of_cut, cutting, cut), late=True), rest]

        return following(most)

    return [Node(bound_s, size * most, begun, late=True)]


def every_choice(
    problem: PlanningProblem, strategy: str, mesh: Mesh, count: int, least: LeastSeconds, size: int, of_cut: OfCut
) -> list[Node]:
    """Every joint choice of placements under every cut, where both are few.

    Args:
        strategy: name that the plans get. least: with the options of the components. size: plans of one choice.
        of_cut: the parts of one cut.
    """
    total, components = count_choices(least.options), len(problem.model.components)
    if not total:
        return []
    nodes = []
    bound_s = lowered_s(problem, mesh, least.sum_s * count / mesh.pp)
    for order, chunks in orders(problem, mesh):
        stages = mesh.pp * chunks
        if not are_listed(components, stages) or count_cuts(components, stages) > MOST_CUTS:
            continue
        cutting = Cutting(
            problem=problem, strategy=strategy, mesh=mesh, microbatches=count, order=order, chunks=chunks, placements={}
        )
        missing = partial(least_missing_bytes, problem, mesh, count, ((order, chunks),), mixed=True)
        for cut in every_cut(components, stages):
            opened = partial(_choices, cutting, cut, least.options, size, of_cut)
            nodes.append(Node(bound_s, total * size, opened, missing_bytes=missing, late=True))
    return nodes


def _choices(cutting: Cutting, cut: Bounds, options: Sequence[Sequence[Placement]], size: int, of_cut: OfCut) -> list[Node]:
    """One by one, the least bound first."""
    problem, mesh = cutting.problem, cutting.mesh
    names = [component.name for component in problem.model.components]
    places = rank_of_stage(cutting.order, mesh.pp, cutting.chunks)
    place_of = [places[number] for number, (first, last) in enumerate(cut) for _ in range(first, last)]
    prices = Prices(problem, mesh, problem.global_batch // (mesh.dp * cutting.microbatches))
    bounds, rows = choices_by_bound(prices, options, place_of, cutting.microbatches)
    bounds = lowered_s(problem, mesh, bounds)

    def of_choice(chosen: Sequence[Placement]) -> list[Node]:
        placed = cutting.placing(dict(zip(names, chosen, strict=True)))
        try:
            problem.layout(placed.plan(cut))
        except PlanError:  # components that share a parameter hold it differently, or a value cannot be cut
            return []
        return of_cut(placed, cut)

    def following(number: int) -> list[Node]:
        if number == len(bounds):
            return []
        bound_s = float(bounds[number])
        chosen = [own[row] for own, row in zip(options, rows[number], strict=True)]
        rest = Node(bound_s, size * (len(bounds) - number - 1), partial(following, number + 1), late=True, visits=0)
        if all(placement == BATCH for placement in chosen):
            return [rest]  # more replicas, by another name
        return [Node(bound_s, size, partial(of_choice, chosen), late=True), rest]

    return following(0)


def sets_that_fit(problem: PlanningProblem, plan: Plan) -> list[Node]:
    """The plan with every set of recomputed components that fits and does not recompute more than another one.

    The least bound first, and one by one: memory takes longer to work out than a bound, and most sets are too slow.
    """
    floor = plan_floor(problem, plan)
    possible = (
        each
        for each in every_set(problem, plan)
        if floor is None or floor.may_fit_with(plan.zero_stage, each.recomputed, each.recomputed_by_operator)
    )
    tried = sorted(((step_bound_s(problem, each), each) for each in possible), key=itemgetter(0))
    fitting: list[Plan] = []

    def from_on(number: int) -> list[Node]:
        more = number < len(tried)
        return [Node(tried[number][0], 0, partial(judged, number), late=True, instead_of_one=True, visits=0)] if more else []

    def judged(number: int) -> list[Node]:
        bound_s, each = tried[number]
        if any(recomputes_more(each, less) for less in fitting) or any(place_excess_bytes(problem, each)):
            return from_on(number + 1)
        fitting.append(each)
        return [Node(bound_s, 1, plan=each), *from_on(number + 1)]

    return from_on(0)


# What may be judged in place of a plan that does not fit: other stages that fit, or recomputation.
#
# stages          the fastest cut whose stages fit without recomputation
# components      as few of them recomputed as make the plan fit
# segments        whole layers recomputed, as few as make it fit, where a problem has segments
# sets            of a model of few components, every set that fits (`sets_that_fit`)


def may_fit(problem: PlanningProblem, plan: Plan, cutting: Cutting | None) -> bool:
    """Whether a plan may fit with recomputation, or with its stages cut otherwise.

    Args:
        cutting: where its stages may be cut otherwise.
    """
    if _recomputed_may_fit(problem, plan) or _segmented_may_fit(problem, plan):
        return True
    return _other_stages_may_fit(problem, plan, cutting)


def missing_of_cut(problem: PlanningProblem, plan: Plan, cutting: Cutting | None) -> tuple[float, Plan]:
    """By how much no plan with these stages and any ZeRO stage fits, nor with those that are cut instead, and the one that
    needs least; where one might fit, 0 and the plan as it is."""
    least, closest = float("inf"), plan
    for stage in zero_stages(problem, problem.layout(plan)):
        staged = replace(plan, zero_stage=stage)
        over = floor_excess_bytes(problem, staged, recomputing=plan.recomputes)
        if not over or may_fit(problem, staged, cutting):
            return 0.0, plan
        if over < least:
            least, closest = over, staged
    return least, closest


def instead_of(problem: PlanningProblem, plan: Plan, cutting: Cutting | None) -> Iterator[Node]:
    """Parts that stand for a plan that does not fit."""
    bound_s = step_bound_s(problem, plan)

    def of(other: Plan | None, *, fits: bool = False) -> list[Node]:
        if other is None or other == plan:
            return []
        return [Node(step_bound_s(problem, other), 1, None, other, fits=fits)]

    if _other_stages_may_fit(problem, plan, cutting) and cutting is not None:
        fitting = replace(cutting, zero_stage=plan.zero_stage, bucket_bytes=plan.bucket_bytes)
        yield Node(bound_s, 1, lambda: of(fitting.fitting(), fits=True), instead_of_one=True)
    recomputed, segmented = _recomputed_may_fit(problem, plan), _segmented_may_fit(problem, plan)
    if not (recomputed or segmented) or not may_fit_recomputing(problem, plan):
        return
    floor = plan_floor(problem, plan)
    least_s = bound_s if floor is None else max(bound_s, floor.recomputing_bound_s(plan.zero_stage))
    if recomputed:
        covered = tries_all_of(problem, plan)
        tried = Node(least_s, 1, lambda: of(_recomputed(problem, plan, cutting), fits=True), instead_of_one=True)
        yield replace(tried, covered=covered)
        if are_few(problem, plan):
            yield Node(least_s, 0, lambda: sets_that_fit(problem, plan), late=True, instead_of_one=True)

    if segmented:
        opened = partial(_segmented, problem, plan, cutting)
        yield Node(least_s, not recomputed, lambda: of(opened(), fits=True), instead_of_one=True)


def _recomputed_may_fit(problem: PlanningProblem, plan: Plan) -> bool:
    if problem.constraints.layers_alike and segments_of(problem):
        return False
    return problem.recompute == AUTO and not floor_excess_bytes(problem, plan, recomputing=True)


def _segmented_may_fit(problem: PlanningProblem, plan: Plan) -> bool:
    return bool(segments_of(problem)) and not floor_excess_bytes(problem, plan, recomputing=True, segments=True)


def _other_stages_may_fit(problem: PlanningProblem, plan: Plan, cutting: Cutting | None) -> bool:
    if cutting is None or plan.mesh.pp == 1 or plan.recomputes:
        return False
    floor = plan_floor(problem, plan)
    return floor is None or not floor.excess_of_any_cut(plan.zero_stage, recomputing=False)


def _as_with_other_buckets(
    problem: PlanningProblem, plan: Plan, found: Callable[[], Plan | None], known: dict[Plan, Plan | None]
) -> Plan | None:
    """What was found for the plan with another bucket size, if it fits with this one too; else what is found anew.

    Args:
        known: by plan, whatever its bucket size, what was found first.
    """
    key = replace(plan.program, bucket_bytes=DEFAULT_BUCKET_BYTES)
    if (other := known.get(key)) is not None:
        other = replace(other, bucket_bytes=plan.bucket_bytes, strategy=plan.strategy)
        if not any(place_excess_bytes(problem, other)):
            return other
    elif key in known:
        return None
    own = found()
    known.setdefault(key, own)
    return own


def _recomputed(problem: PlanningProblem, plan: Plan, cutting: Cutting | None) -> Plan | None:
    """With components recomputed, of large problems also with longer stages where fewer microbatches are held."""
    found = partial(_newly_recomputed, problem, plan, cutting)
    return _as_with_other_buckets(problem, plan, found, problem.answers(_recomputed))


def _newly_recomputed(problem: PlanningProblem, plan: Plan, cutting: Cutting | None) -> Plan | None:
    ways: list[Callable[[], Plan | None]] = [lambda: recomputed_to_fit(problem, plan)]
    if cutting is not None and plan.mesh.pp > 1 and not is_small(problem):
        ways.append(lambda: _with_longer_stages(problem, plan, cutting, least_kept(problem)))
        if is_long(problem.model):
            ways.reverse()  # memory takes long to work out, and the second way knows the better cut
    return next((fitting for way in ways if (fitting := way()) is not None), None)


def _segmented(problem: PlanningProblem, plan: Plan, cutting: Cutting | None) -> Plan | None:
    """With whole layers recomputed, of large problems also with longer stages."""
    found = partial(_newly_segmented, problem, plan, cutting)
    return _as_with_other_buckets(problem, plan, found, problem.answers(_segmented))


def _newly_segmented(problem: PlanningProblem, plan: Plan, cutting: Cutting | None) -> Plan | None:
    fitting = segmented_to_fit(problem, plan)
    if fitting is not None or cutting is None or plan.mesh.pp == 1 or is_small(problem):
        return fitting
    tried = (_with_longer_stages(problem, plan, cutting, way) for way in kept_together(problem))
    return next((each for each in tried if each is not None), None)


def _with_longer_stages(problem: PlanningProblem, plan: Plan, cutting: Cutting, way: LeastKept) -> Plan | None:
    placed = [cutting.placements.get(component.name, BATCH) for component in problem.model.components]
    kept = least_bytes(problem, way, plan.mesh, plan.microbatch_samples, placed)
    fitting = replace(cutting, zero_stage=plan.zero_stage, bucket_bytes=plan.bucket_bytes)
    return fitting.fitting_recomputed(way.recompute, kept, way.segments)


# Whether a plan that does not fit would with something in the host's memory: a way out that a search does not take itself.


def way_out(problem: PlanningProblem, plan: Plan) -> str:
    """`; with plan.optimizer_offload = true it would fit`; "" where offload does not help, or devices compute on the host."""
    if any(DEVICE_KINDS[device.type.kind].on_cores for device in problem.cluster.devices[: plan.world_size]):
        return ""
    state: dict[str, Any] = {} if plan.optimizer_offload else {"optimizer_offload": True}
    activations: dict[str, Any] = {} if plan.activation_offload is True else {"activation_offload": True}
    again: tuple[dict[str, Any], ...] = ({}, {"recompute": FULL, "segments": ()}) if problem.recompute == AUTO else ({},)
    for keys in (state, activations, state | activations if state and activations else {}):
        for recomputing in again if keys else ():
            try:
                other = replace(plan, **keys, **recomputing)
            except PlanError:  # segments, halves, relaxed synchronisation
                continue
            if all(memory.fits for memory in problem.unlike_memory(other)):
                more = ", recomputing activations" if recomputing else ""
                return f"; with {' and '.join(f'plan.{key} = true' for key in keys)} it would fit{more}"
    return ""
