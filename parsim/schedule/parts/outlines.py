"""The parts of one mesh of a large problem: an outline per number of microbatches and usual order, all else in a late part."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from parsim.errors import CostError, PlanError, ScheduleError
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import PIPELINE_ORDERS
from parsim.plans.placement import Placement
from parsim.predict.planning_problem import PlanningProblem
from parsim.schedule.bounds.chain import ChainSeconds, chain_seconds
from parsim.schedule.bounds.devices import DeviceSeconds
from parsim.schedule.bounds.step import ROUNDING, least_noise
from parsim.schedule.partition import least_round_s
from parsim.schedule.parts.estimate import estimated_s
from parsim.schedule.parts.node import Node
from parsim.schedule.parts.usual import is_usual
from parsim.schedule.space import is_chain, microbatch_counts, orders

OrderAndChunks = tuple[str, int]


def outlines(
    problem: PlanningProblem,
    mesh: Mesh,
    ways: int,
    *,
    placed: Callable[[int], Mapping[str, Placement]],
    part: Callable[[int, OrderAndChunks, float], Node],
    others: Callable[[tuple[OrderAndChunks, ...]], list[Node]],
) -> list[Node]:
    """The parts of one mesh whose components are all placed alike.

    Args:
        problem, mesh: of the plans. ways: ZeRO stages and bucket sizes of one cut. placed: the placements, by number of
            microbatches. part: the part of some microbatches and an order, with its bound. others: the parts of some orders.

    Raises:
        ScheduleError: the batch or the components do not divide so far.
    """
    counts, every = microbatch_counts(problem, mesh), orders(problem, mesh)
    usual = [order for order in every if is_usual(problem, mesh, order)]
    least_s = problem.remembered(DeviceSeconds).step_s(problem, mesh.size)
    found = []
    for count in counts:
        for order in usual:
            bound_s, promise_s = _figures(problem, mesh, count, order, placed)
            found.append(part(count, order, max(least_s, bound_s)).promising(promise_s))
    unusual = tuple(order for order in every if order not in usual)
    if unusual:
        found.append(Node(least_s, len(counts) * len(unusual) * ways, lambda: others(unusual), late=True))
    return found


def _figures(
    problem: PlanningProblem, mesh: Mesh, count: int, order: OrderAndChunks, placed: Callable[[int], Mapping[str, Placement]]
) -> tuple[float, float]:
    """Bound and estimate. Of what is impossible or has no price neither is known: it says so when it is opened."""
    try:
        placements = placed(count)
        chain = chain_seconds(problem, mesh, count, placements)
        return outline_bound_s(problem, mesh, count, order, chain), estimated_s(problem, mesh, count, order, placements, chain)
    except (PlanError, ScheduleError, CostError):
        return 0.0, float("inf")


def outline_bound_s(problem: PlanningProblem, mesh: Mesh, count: int, order: OrderAndChunks, chain: ChainSeconds) -> float:
    """Seconds that no step goes below, whatever the cut, the ZeRO stage, the buckets and what is recomputed.

    Args:
        problem, mesh: of the plans. count: microbatches per replica. order: with its stages per rank. chain: of one microbatch.
    """
    halves = PIPELINE_ORDERS[order[0]].halves
    whole_s = chain.computing_s if halves else chain.least_s(mesh.pp * order[1])
    bound_s = max(count * whole_s / mesh.pp, count * chain.longest_s)
    if is_chain(problem) and not halves:
        bound_s = max(bound_s, whole_s)  # one microbatch alone
        if order[1] == 1 and mesh.pp > 1:
            bound_s = max(bound_s, least_round_s(chain.seconds, mesh.pp, count, saved_s=float(chain.crossing_s.max())))
    return bound_s * least_noise(problem, mesh.size) * ROUNDING
