"""Which links of a cluster a piece of communication uses, and how much of its time it needs them.

A collective or a transfer is one flow. Its bytes pass several links in fixed proportions (rings load every hop equally),
so one rate describes it. Its slowest link sets that rate. Of the seconds it takes alone, `transfer_s` move bytes, at the
pace at which its busiest link is full; the rest is latency, which no other flow lengthens.

Leaves out: the phases of a hierarchical collective, whose links are taken to be used together. As the prices do, it also leaves
out trees inside a node, which load the links of its rings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from parsim.costs.communication.collectives import estimate_collective, estimate_send_recv
from parsim.costs.communication.contention import (
    FABRIC,
    LinkStep,
    NodeShare,
    Way,
    own_leaf_shares,
    part_loads,
    transfer_loads,
    uplink_rate,
)
from parsim.costs.communication.internode import choices
from parsim.costs.communication.intranode import link_model_of
from parsim.errors import ScenarioError
from parsim.hardware.cluster import Cluster
from parsim.numeric import Floats
from parsim.work import COLLECTIVE_KINDS, Collective, SendRecv

SPINE = "spine0"
_SECANT = 1 / 1024
"""Relative step over which the bandwidth part of a cost is measured."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One direction of a link, by the endpoints' names in the topology."""

    source: str
    target: str
    kind: str

    def joins(self, a: str, b: str) -> bool:
        return {self.source, self.target} == {a, b}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Attributes:
    loads: per lane, the share of the flow's rate that passes, the largest 1. room: per lane its bytes per second.
    transfer_s: seconds alone in which bytes move.
    """

    loads: Mapping[Lane, float]
    room: Mapping[Lane, float]
    transfer_s: float

    @property
    def full_pace(self) -> float:
        """Bytes per second on its busiest lane when it is alone."""
        return min(self.room[lane] / share for lane, share in self.loads.items())


@lru_cache(maxsize=4096)
def flow_of(work: Collective | SendRecv, cluster: Cluster) -> Flow | None:
    """The flow of a piece of communication; None where it moves nothing over any link.

    Raises CostError for a profile that prices communication without links (fits per group, as for gloo), or as its price does.
    """
    loads = _collective_loads(work, cluster) if isinstance(work, Collective) else _transfer_loads(work, cluster)
    loads = {lane: load for lane, load in loads.items() if load[0] > 0}
    if not loads:
        return None
    largest = max(share for share, _ in loads.values())
    return Flow(
        loads={lane: share / largest for lane, (share, _) in loads.items()},
        room={lane: room for lane, (_, room) in loads.items()},
        transfer_s=_transfer_s(work, cluster),
    )


def _transfer_s(work: Collective | SendRecv, cluster: Cluster) -> float:
    """S * dT/dS at the work's own size: the part of its seconds that grows with its bytes."""
    more = work.size_bytes + max(1, int(work.size_bytes * _SECANT))
    alone = _seconds(work, work.size_bytes, cluster)
    slope = (_seconds(work, more, cluster) - alone) / (more - work.size_bytes)
    return min(max(0.0, slope * work.size_bytes), alone)


def _seconds(work: Collective | SendRecv, size_bytes: int, cluster: Cluster) -> float:
    if isinstance(work, Collective):
        return estimate_collective(replace(work, size_bytes=size_bytes), cluster).median_s
    transfer = SendRecv(source=work.source, destination=work.destination, size_bytes=size_bytes)
    return estimate_send_recv(transfer, cluster).median_s


Loads = dict[Lane, tuple[float, float]]
"""Per lane the share of the bytes that passes, and the lane's bytes per second."""


def _collective_loads(work: Collective, cluster: Cluster) -> Loads:
    if len(work.group) < 2:
        return {}
    group = tuple(sorted(work.group))
    kind = link_model_of(cluster).link_kind
    spread = cluster.spread(group)
    ways: tuple[Way, ...] = ("inside",)
    if COLLECTIVE_KINDS[work.operation].pairwise:
        ways = ("pairs",)
    elif len(spread) > 1:
        best = choices(work.operation, group, work.size_bytes, cluster)[0]
        ways = ("rails", "inside") if best.algorithm == "hierarchical" else ("through",)
    by_lane: Loads = {}
    for way in ways:
        for node, members in spread:
            for loads in part_loads(cluster.nodes.shapes[node], kind, NodeShare(members, way, len(group))):
                for step, share in loads.items():
                    _add(by_lane, _lane(cluster, node, step), share, step[2].capacity_bytes_per_s)
        for leaf, share in own_leaf_shares(cluster, group, way).items():
            for lane in (Lane(leaf, SPINE, FABRIC), Lane(SPINE, leaf, FABRIC)):
                _add(by_lane, lane, share, uplink_rate(cluster, leaf))
    return by_lane


def _transfer_loads(work: SendRecv, cluster: Cluster) -> Loads:
    by_lane: Loads = {}
    loads = transfer_loads(cluster, link_model_of(cluster).link_kind, (work.source, work.destination))
    for (place, step), (share, room) in loads.items():
        if isinstance(place, int) and isinstance(step, tuple):
            _add(by_lane, _lane(cluster, place, step), share, room)
        else:
            leaf = str(place)
            _add(by_lane, Lane(leaf, SPINE, FABRIC) if step == "up" else Lane(SPINE, leaf, FABRIC), share, room)
    return by_lane


def _add(loads: Loads, lane: Lane, share: float, room: float) -> None:
    loads[lane] = (loads[lane][0] + share if lane in loads else share, room)


def _lane(cluster: Cluster, node: int, step: LinkStep) -> Lane:
    """A link of a node, by local names, as the whole topology calls it."""
    names = _names(cluster)[node]
    source, target = (cluster.nodes.leaf[node] if end == FABRIC else names.get(end, end) for end in step[:2])
    return Lane(source, target, step[2].kind)


@lru_cache(maxsize=16)
def _names(cluster: Cluster) -> tuple[Mapping[str, str], ...]:
    """Per node, local names to those of the topology."""
    nodes = cluster.nodes
    names: list[dict[str, str]] = [{} for _ in nodes.shapes]
    for device, (node, place) in nodes.place.items():
        names[node][nodes.shapes[node].devices[place]] = device
    ends = set(cluster.topology.ends)
    for node, shape in enumerate(nodes.shapes):
        for end in (*shape.topology.ends, *(port.nic for port in shape.ports)):
            if (full := f"node{node}/{end}") in ends:
                names[node].setdefault(end, full)
    return tuple(names)


# Links shared max-min fairly: the rates of flows that each load several links, by filling all of them like water.
#
# A flow has one rate; link l carries `loads[l, f]` times the rate of flow f, at most its capacity, and no flow goes faster than
# its own limit. The rates are max-min fair: none can be raised without lowering one that is not higher already. All rates rise
# together; where a link is full, the flows on it stop, and the others go on. A collective is one flow whose loads couple its
# links: the slowest paces all of them.
#
# Leaves out: round-trip times and bursts, through which real transports come close to fair shares only over longer spans.
#
# This is the known progressive filling; that it holds for any loads >= 0 is what the tests show against a linear programme.


_TIE = 1e-12
"""Links that fill up within this of one another, relatively, count as filling up at once."""


def max_min_rates(loads: ArrayLike, capacity: ArrayLike, limit: ArrayLike) -> Floats:
    """The max-min fair rates.

    Args:
        loads: float64 [L, F], >= 0: what one unit of a flow's rate puts on a link. 0 where it does not pass.
        capacity: float64 [L], >= 0, in the unit of loads times rates. limit: float64 [F], >= 0; inf for none.

    Returns:
        float64 [F]. A flow on a link of capacity 0 has rate 0.

    Raises:
        ScenarioError: shapes that do not fit, negative or NaN entries, infinite loads, or a flow that nothing limits.
    """
    load, room, most = (np.asarray(numbers, dtype=np.float64) for numbers in (loads, capacity, limit))
    _check(load, room, most)
    flows = len(most)
    rates = np.zeros(flows)
    rising = np.ones(flows, dtype=np.bool_)
    level = 0.0
    while rising.any():
        pressure = load[:, rising].sum(axis=1)
        used = load[:, ~rising] @ rates[~rising]
        with np.errstate(divide="ignore", invalid="ignore"):
            full_at = np.where(pressure > 0, np.maximum(room - used, 0.0) / pressure, np.inf)
        # Rounding must not let the water fall.
        level = max(level, min(float(full_at.min(initial=np.inf)), float(most[rising].min())))
        full = full_at <= level * (1 + _TIE)
        stops = rising & ((load[full] > 0).any(axis=0) | (most <= level))
        rates[stops] = level
        rising &= ~stops
    return rates


def _check(loads: Floats, capacity: Floats, limit: Floats) -> None:
    if loads.shape != (*capacity.shape, *limit.shape) or loads.ndim != 2:
        raise ScenarioError(
            f"loads must have shape [links, flows], got {list(loads.shape)} for {capacity.size} links and {limit.size} flows"
        )
    for name, numbers in (("loads", loads), ("capacity", capacity), ("limit", limit)):
        if not bool(np.all(numbers >= 0)):
            raise ScenarioError(f"{name} must be >= 0, got {float(numbers[~(numbers >= 0)][0])}")
    if not bool(np.isfinite(loads).all()):
        raise ScenarioError("loads must be finite; a flow that a link cannot carry has that link's capacity 0")
    unbounded = np.isinf(limit) & ~(loads[np.isfinite(capacity)] > 0).any(axis=0)
    if unbounded.any():
        raise ScenarioError(f"nothing limits flow {int(unbounded.argmax())}; give it a limit or a link of finite capacity")
