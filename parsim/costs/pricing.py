"""Price a whole graph: every distinct piece of work on every kind of device once.

Leaves out: how tasks slow one another while they overlap; the engines apply that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from parsim.costs.costs import Costs
from parsim.costs.estimate import Estimate
from parsim.work import Collective, Compute, LoadBatch, SendRecv, Work

Priced = tuple[Work, int] | tuple[Work, int, bool]
Concurrent = Callable[[Work], tuple[tuple[int, ...], ...]]
"""The groups (or transfers) that communicate at the same time as a collective (or transfer)."""


def price(
    work_of_ranks: Iterable[Priced],
    costs: Costs,
    known: dict[Hashable, Estimate] | None = None,
    concurrent: Concurrent | None = None,
) -> list[Estimate]:
    """Estimates in the order given, memoised per distinct work and device type. Communication is kept per work, which names its
    ranks, and loading per device, whose path to the host it takes. Computation: components that do the same are one.

    Args:
        work_of_ranks: (work, rank) per task; for communication any rank of it will do. A third entry says whether it is
            computation that resumes after its rank has waited for communication (`parsim.graph.columns.Unit`).
        known: estimates of earlier calls with the same `costs`, read and added to; None starts anew.
        concurrent: None: every collective and transfer runs alone.

    Raises:
        CostError: as `Costs.estimate`.
    """
    known = {} if known is None else known
    estimates: list[Estimate] = []
    waits, asks = bool(costs.post_wait_s), concurrent is not None and costs.shares_links
    for work, rank, *resumes in work_of_ranks:
        others: tuple[tuple[int, ...], ...] = ()
        if isinstance(work, Collective | SendRecv):
            key: Hashable = work
            if asks and concurrent is not None:
                others = concurrent(work)
                key = key, others
        else:
            key = _key(work, rank, costs)
        after_wait = waits and any(resumes)
        if after_wait:
            key = key, "after a wait"
        if key not in known:
            known[key] = costs.estimate(work, rank, others, after_wait=after_wait)
        estimates.append(known[key])
    return estimates


def _key(work: Work, rank: int, costs: Costs) -> Hashable:
    """Of what no link carries."""
    if not 0 <= rank < costs.cluster.size:
        return work, rank
    if isinstance(work, Compute) and not costs.differ_by_rank:
        return costs.same_computation(work), costs.device_kind(rank)
    device = costs.cluster.devices[rank]
    return (work, device.index) if isinstance(work, LoadBatch) else (work, costs.device_kind(rank))
