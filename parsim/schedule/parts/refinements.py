"""Parts that are opened last: what the other parts of a family stand for, as far as it may be faster than the best plan.

cuts          beside the cut whose slowest stage is fastest, every other one, the least bound first
placements    of a model of few components, every joint choice
recomputation of a model of few components, every set that fits and recomputes no more than another one
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter

from parsim.errors import PlanError
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import rank_of_stage
from parsim.plans.placement import BATCH, Placement
from parsim.plans.plan import DEFAULT_BUCKET_BYTES, Plan
from parsim.predict.planning_problem import PlanningProblem
from parsim.schedule.bounds.plan_floor import plan_floor
from parsim.schedule.bounds.step import ROUNDING, least_noise, step_bound_s
from parsim.schedule.cuts import Bounds, are_listed, count_cuts, every_cut
from parsim.schedule.options import Prices
from parsim.schedule.parts.least import LeastSeconds, least_missing_bytes
from parsim.schedule.parts.node import Node
from parsim.schedule.placement.every_choice import choices_by_bound, count_choices
from parsim.schedule.recomputation.every_set import every_set, recomputes_more
from parsim.schedule.recomputation.steps import place_excess_bytes
from parsim.schedule.space import orders
from parsim.schedule.stages import Cutting

OfCut = Callable[[Cutting, Bounds], list[Node]]

MOST_CUTS = 64
"""Of one mesh, number of microbatches and order: cuts that are tried beside the one whose slowest stage is fastest."""


def other_cuts(cutting: Cutting, size: int, bound_s: float, of_cut: OfCut) -> list[Node]:
    """Every cut but the one whose slowest stage is fastest, the least bound first.

    Args:
        cutting: into how many stages, with which placements. size: plans of one cut. bound_s: of all of them.
        of_cut: the parts of one cut.
    """
    most = min(MOST_CUTS, cutting.others)
    if not most:
        return []
    listed: Iterator[tuple[float, Bounds]] = iter(())

    def begun() -> list[Node]:
        nonlocal listed
        listed = cutting.others_by_bound()
        return following(most)

    def following(left: int) -> list[Node]:
        found = next(listed, None) if left else None
        if found is None:
            return []
        least = found[0] * least_noise(cutting.problem, cutting.mesh.size) * ROUNDING
        rest = Node(least, size * (left - 1), lambda: following(left - 1), late=True, visits=0)
        return [Node(least, size, partial(of_cut, cutting, found[1]), late=True), rest]

    return [Node(bound_s, size * most, begun, late=True)]


def every_choice(
    problem: PlanningProblem, strategy: str, mesh: Mesh, count: int, least: LeastSeconds, size: int, of_cut: OfCut
) -> list[Node]:
    """Every joint choice of placements under every cut, where both are few.

    Args:
        problem, mesh: of the plans. strategy: name that they get. count: microbatches per replica. least: with the options of
            the components. size: plans of one choice. of_cut: the parts of one cut.
    """
    total, components = count_choices(least.options), len(problem.model.components)
    if not total:
        return []
    found = []
    bound_s = least.sum_s * count / mesh.pp * least_noise(problem, mesh.size) * ROUNDING
    for order, chunks in orders(problem, mesh):
        stages = mesh.pp * chunks
        if not are_listed(components, stages) or count_cuts(components, stages) > MOST_CUTS:
            continue
        cutting = Cutting(
            problem=problem, strategy=strategy, mesh=mesh, microbatches=count, order=order, chunks=chunks, placements={}
        )
        for cut in every_cut(components, stages):
            opened = partial(_choices, cutting, cut, least.options, size, of_cut)
            missing = partial(least_missing_bytes, problem, mesh, count, ((order, chunks),), mixed=True)
            found.append(Node(bound_s, total * size, opened, missing_bytes=missing, late=True))
    return found


def _choices(cutting: Cutting, cut: Bounds, options: Sequence[Sequence[Placement]], size: int, of_cut: OfCut) -> list[Node]:
    """One by one, the least bound first."""
    problem, mesh = cutting.problem, cutting.mesh
    samples = problem.global_batch // (mesh.dp * cutting.microbatches)
    prices = Prices(problem=problem, mesh=mesh, samples=samples, bucket_bytes=DEFAULT_BUCKET_BYTES)
    places = rank_of_stage(cutting.order, mesh.pp, cutting.chunks)
    place_of = [places[number] for number, (first, last) in enumerate(cut) for _ in range(first, last)]
    bounds, rows = choices_by_bound(prices, options, place_of, cutting.microbatches)
    bounds = bounds * least_noise(problem, mesh.size) * ROUNDING

    def following(number: int) -> list[Node]:
        if number == len(bounds):
            return []
        bound_s = float(bounds[number])
        chosen = [own[row] for own, row in zip(options, rows[number], strict=True)]
        rest = Node(bound_s, size * (len(bounds) - number - 1), partial(following, number + 1), late=True, visits=0)
        if all(placement == BATCH for placement in chosen):
            return [rest]  # more replicas, by another name
        return [Node(bound_s, size, partial(_of_choice, cutting, cut, chosen, of_cut), late=True), rest]

    return following(0)


def _of_choice(cutting: Cutting, cut: Bounds, chosen: Sequence[Placement], of_cut: OfCut) -> list[Node]:
    names = (component.name for component in cutting.problem.model.components)
    placed = cutting.placing(dict(zip(names, chosen, strict=True)))
    try:
        cutting.problem.layout(placed.plan(cut))
    except PlanError:  # components that share a parameter hold it differently, or a value cannot be cut
        return []
    return of_cut(placed, cut)


def sets_that_fit(problem: PlanningProblem, plan: Plan) -> list[Node]:
    """The plan with every set of recomputed components that fits and does not recompute more than another one.

    The least bound first, and one by one: memory takes longer to work out than a bound, and most sets are too slow.

    Args:
        problem: model, cluster and batch. plan: of this model, without recomputation.
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
