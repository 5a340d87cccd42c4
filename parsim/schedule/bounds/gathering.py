"""ZeRO 3: what a place on the pp axis waits for at least, because parameters are gathered at most one lot ahead.

A lot is what runs on the same gathered parameters. Those of a lot are gathered from the end of the lot before the previous one
on (`parsim.graph.passes.unsharded`). A backward without prefetch gathers them from the end of the previous one on. So lots that
compute little leave the gathers of the next ones uncovered.

Leaves out: the first two lots of a block, which may be gathered before it begins; conversions; sums of gradients, which share
the stream.
"""

from __future__ import annotations

from parsim.graph.passes.compute import computations
from parsim.graph.passes.gradients import gathering_work
from parsim.graph.plan_index import PlanIndex
from parsim.predict.planning_problem import PlanningProblem
from parsim.schedule.bounds.computation import prices_of
from parsim.schedule.options import Prices
from parsim.work import BY_OPERATOR_PART, Phase


def gathered_s(problem: PlanningProblem, layout: PlanIndex, place: int, rank: int) -> tuple[float, float]:
    """Of one microbatch: seconds of all gathers, and of computation that waits for them.

    Args:
        problem: model, cluster and batch. layout: of a plan with ZeRO 3. place: on the pp axis. rank: the first one there.

    Returns:
        Without the gathers of what is whole from the block before. The second is 0 where backwards run in halves.
    """
    total = waiting = 0.0
    whole = not any(map(layout.is_halved, layout.plan.components))
    for chunk in layout.plan.place_stages(place):
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            block = [own for own in computations(layout, chunk, phase) if layout.runs_on(rank, own[1])]
            lots = _lots(problem, layout, rank, block)
            total += sum(gathered for gathered, *_ in lots)
            waiting += _block_s(lots, ahead=phase is Phase.FORWARD or layout.plan.backward_prefetch) if whole else 0.0
    return total, waiting


def _lots(
    problem: PlanningProblem, layout: PlanIndex, rank: int, block: list[tuple[Phase, str]]
) -> list[tuple[float, float, float]]:
    """Of a block's lots: seconds of the gathers that one begins with (none of the first), of computation before it that needs
    no parameters, and of its own."""
    lots: list[tuple[float, float, float]] = []
    needed: dict[int, None] | None = None
    between, prices = 0.0, prices_of(problem, layout.plan)
    for phase, name in block:
        buckets = {bucket.number: bucket for bucket in layout.unsharded_buckets(name) if rank in bucket.group}
        own = _compute_s(prices, layout, rank, name, phase)
        if not buckets:
            between += own
            continue
        if needed is None or needed.keys() != buckets.keys():
            entering = [bucket for number, bucket in buckets.items() if needed is not None and number not in needed]
            gathering = sum(
                problem.price([(gathering_work(bucket), rank)], layout.plan.mesh)[0].median_s for bucket in entering
            )
            lots.append((gathering, between, own))
        else:
            gathering, before, others = lots[-1]
            lots[-1] = (gathering, before, others + between + own)
        needed, between = dict.fromkeys(buckets), 0.0
    return lots


def _block_s(lots: list[tuple[float, float, float]], *, ahead: bool) -> float:
    """When a block's last lot ends, after the block has begun."""
    ends: list[float] = []
    for number, (gathering, between, own) in enumerate(lots):
        ready = (ends[-1] if ends else 0.0) + between
        if number >= 2:
            ready = max(ready, (ends[-2] if ahead else ends[-1]) + gathering)
        ends.append(ready + own)
    return ends[-1] if ends else 0.0


def _compute_s(prices: Prices, layout: PlanIndex, rank: int, name: str, phase: Phase) -> float:
    """Of one computation of a microbatch."""
    part = BY_OPERATOR_PART if phase is Phase.RECOMPUTE and layout.recomputes_by_operator(name) else ""
    return prices.compute_on_s(prices.problem.model.component(name), layout.placement[name], phase, rank, part)
