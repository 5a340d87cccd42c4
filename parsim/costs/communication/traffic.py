"""Loads of links: the bytes each group sends through its nodes, and how much groups that run at once slow one another.

A group is seen node by node as a Part: which devices of the node belong to it, and the way its bytes go. All loads are
shares of the bytes that the collective moves through its slowest hop (so a ring loads every hop with 1, two rings with
1/2 each). Links, network cards and the uplinks of leaf switches alike carry the sum of all parts; a group is paced by the
busiest of those it uses. This assumes that the groups move as many bytes at the same time, as equal replicas in the same
step do.

Results depend on the shape of a node and the parts on it, not on its number. So a cluster of thousands of equal nodes
costs one table look-up per node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from parsim.costs.communication.linkgraph import LinkLoad, LinkStep, RingSet, added, link_loads, pace, ring_set
from parsim.errors import CostError
from parsim.hardware.cluster import Cluster
from parsim.hardware.nodes import NodeShape, Port
from parsim.hardware.topology import Link, walk_of

Way = Literal["inside", "through", "rails", "pairs"]
"""inside: the group (or its phase) stays in the node. through: one ring or tree over all members comes in and goes out at the
cards nearest to them. rails: every member exchanges its piece of the node's bytes with its counterparts in the other nodes.
pairs: every member sends to every other of the group."""

FABRIC = "fabric"


@dataclass(frozen=True, slots=True)
class NodeShare:
    """What one group does on one node; `ranks` is the size of the whole group."""

    members: tuple[int, ...]
    way: Way
    ranks: int


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Seconds per byte of the busiest link inside the nodes, and of the busiest on the way between them.

    Attributes:
        relayed: a ring inside some node leaves the direct links. hop_latency_s: of the links from one node to the next.
        members: the most that one node holds. nodes: how many there are.
    """

    inside_s_per_byte: float
    outside_s_per_byte: float
    relayed: bool
    hop_latency_s: float
    members: int
    nodes: int


@lru_cache(maxsize=16384)
def group_pace(
    cluster: Cluster, link_kind: str, group: tuple[int, ...], way: Way, concurrent: tuple[tuple[int, ...], ...] = ()
) -> LinkRates:
    """How fast a group of several nodes moves bytes while the `concurrent` groups do the same.

    Args:
        cluster: the machine. link_kind: of the direct lanes inside nodes.
        group: ranks, ascending. way: the route of its bytes (`Way`).
        concurrent: groups that move as many bytes at the same time.

    Returns:
        Rates in seconds per byte. Leaves out collisions of routes inside the network.

    Raises:
        CostError: a member's node has no network card.
    """
    spread, nodes = cluster.spread(group), cluster.nodes
    others = _others(cluster, group, way, concurrent)
    inside = outside = port_latency = 0.0
    relayed = False
    for node, members in spread:
        part = NodeShare(members, way, len(group))
        there = others.get(node, ())
        seconds = part_pace(nodes.shapes[node], link_kind, part, there)
        inside, outside = max(inside, seconds[0]), max(outside, seconds[1])
        relayed = relayed or (len(members) > 1 and _leaves_direct_links(nodes.shapes[node], link_kind, part))
        if len(spread) > 1:
            port_latency = max(port_latency, max(port.latency_s for port in ports_of(nodes.shapes[node], members)))
    uplinks, crossing = _uplinks(cluster, group, way, concurrent)
    return LinkRates(
        inside_s_per_byte=inside,
        outside_s_per_byte=max(outside, uplinks),
        relayed=relayed,
        hop_latency_s=2 * port_latency + crossing,
        members=max(len(members) for _, members in spread),
        nodes=len(spread),
    )


@lru_cache(maxsize=16384)
def inside_pace(
    cluster: Cluster, link_kind: str, group: tuple[int, ...], concurrent: tuple[tuple[int, ...], ...] = ()
) -> tuple[RingSet, float]:
    """The rings of the slowest node, and their seconds per byte while the `concurrent` groups do the same inside their nodes.

    Args:
        cluster, link_kind, group, concurrent: as for `group_pace`.
    """
    others = _others(cluster, group, "inside", concurrent)
    found = []
    for node, members in cluster.spread(group):
        shape = cluster.nodes.shapes[node]
        seconds, _ = part_pace(shape, link_kind, NodeShare(members, "inside", len(group)), others.get(node, ()))
        found.append((seconds, rings_of(shape, link_kind, members)))
    seconds, rings = max(found, key=lambda entry: entry[0])
    return rings, seconds


def uplink_rate(cluster: Cluster, leaf: str) -> float:
    """Bytes per second of a leaf's uplinks.

    Args:
        cluster: the machine. leaf: name of a leaf switch.

    Raises:
        CostError: the leaf has no uplink.
    """
    rate = cluster.nodes.leaves[leaf].uplink_bytes_per_s
    if rate is None:
        raise CostError(f"{leaf} has no uplink to the leaves of the other nodes; connect the switches in the topology")
    return rate


@lru_cache(maxsize=65536)
def part_pace(shape: NodeShape, link_kind: str, own: NodeShare, others: tuple[NodeShare, ...]) -> tuple[float, float]:
    """Seconds per byte of the busiest link inside the node, and of the busiest to the network, that `own` uses.

    Args:
        shape: of the node. link_kind: of the direct lanes.
        own, others: the share of this group, and those of the groups at the same time.
    """
    inside, outside = part_loads(shape, link_kind, own)
    total = added([inside, outside, *(load for other in others for load in part_loads(shape, link_kind, other))])
    alone = 0.0
    if own.way in ("inside", "through") and len(own.members) > 1:
        rings = rings_of(shape, link_kind, own.members)
        alone = rings.seconds_per_byte if own.way == "inside" or not rings.relayed else 0.0
    return max(alone, pace(inside, total)), pace(outside, total)


@lru_cache(maxsize=65536)
def _leaves_direct_links(shape: NodeShape, link_kind: str, part: NodeShare) -> bool:
    if part.way == "pairs":
        return any(link.kind != link_kind for _, _, link in part_loads(shape, link_kind, part)[0])
    return rings_of(shape, link_kind, part.members).relayed


@lru_cache(maxsize=65536)
def part_loads(shape: NodeShape, link_kind: str, part: NodeShare) -> tuple[dict[LinkStep, float], dict[LinkStep, float]]:
    """Loads of one part on the links between its members, and on those between them and the network.

    Args:
        shape: of the node. link_kind: of the direct lanes. part: the group's share on this node.
    """
    names = [shape.devices[member] for member in part.members]
    size = len(names)
    if part.way == "inside":
        return (dict(rings_of(shape, link_kind, part.members).loads) if size > 1 else {}), {}
    if part.way == "rails":
        return {}, added(_out_and_in(shape, member, member, 1.0 / size) for member in part.members)
    if part.way == "pairs":
        share = 1.0 / part.ranks
        flows: list[LinkLoad] = [(a, b, share) for a in names for b in names if a != b]
        away = part.ranks - size
        outward = [_out_and_in(shape, member, member, away * share) for member in part.members] if away else []
        return link_loads(shape.topology, link_kind, flows), added(outward)
    cards = dict.fromkeys(port_of(shape, member) for member in part.members)
    inward: list[Mapping[LinkStep, float]] = []
    chain: list[LinkLoad] = []
    for card in cards:
        order = _order(shape, part.members, card)
        inward.append(_out_and_in(shape, order[-1], order[0], 1.0 / len(cards), card))
        chain += [(shape.devices[a], shape.devices[b], 1.0 / len(cards)) for a, b in pairwise(order)]
    if size == 1:
        return {}, added(inward)
    rings = rings_of(shape, link_kind, part.members)
    return (link_loads(shape.topology, link_kind, chain) if rings.relayed else dict(rings.loads)), added(inward)


@lru_cache(maxsize=65536)
def port_of(shape: NodeShape, member: int) -> Port:
    """The network card with the fewest links to a device; devices with several at the same distance take turns.

    Args:
        shape: of the node. member: index of the device in it.
    """
    nearest = _nearest(shape, member)
    turn = sum(_nearest(shape, earlier) == nearest for earlier in range(member))
    return nearest[turn % len(nearest)]


def ports_of(shape: NodeShape, members: Sequence[int]) -> tuple[Port, ...]:
    return tuple(port_of(shape, member) for member in members)


@lru_cache(maxsize=65536)
def way_out(shape: NodeShape, member: int, port: Port | None = None) -> tuple[LinkStep, ...]:
    """The links from a device to its network card and into the network.

    Args:
        shape: of the node. member: index of the device. port: another card than its nearest.
    """
    port = port or port_of(shape, member)
    path = shape.topology.path(shape.devices[member], port.nic)
    return (*walk_of(path, shape.devices[member]), (port.nic, FABRIC, _port_link(port)))


def rings_of(shape: NodeShape, link_kind: str, members: tuple[int, ...]) -> RingSet:
    """The rings of some devices of a node.

    Args:
        shape: of the node. link_kind: of the direct lanes. members: indices of the devices.
    """
    return ring_set(shape.topology, link_kind, tuple(shape.devices[member] for member in members))


def reverse(step: LinkStep) -> LinkStep:
    """The same link in the other direction."""
    return step[1], step[0], step[2]


@lru_cache(maxsize=65536)
def _nearest(shape: NodeShape, member: int) -> tuple[Port, ...]:
    reached = [(len(path), port) for port in shape.ports if (path := shape.topology.path(shape.devices[member], port.nic))]
    if not reached:
        raise CostError(
            f"{shape.devices[member]} reaches no network card of its node, so its group cannot leave it; join a card to the "
            "links of the profile"
        )
    least = min(length for length, _ in reached)
    return tuple(port for length, port in reached if length == least)


def _order(shape: NodeShape, members: tuple[int, ...], card: Port) -> tuple[int, ...]:
    """The members in a chain that ends at the first one near the card, so that it begins at a second one where there is one."""
    last = next(place for place, member in enumerate(members) if port_of(shape, member) == card)
    return members[last + 1 :] + members[: last + 1]


def _out_and_in(shape: NodeShape, last: int, first: int, share: float, card: Port | None = None) -> dict[LinkStep, float]:
    """`share` leaves the node from the device `last` and as much comes in to `first`."""
    steps = [*way_out(shape, last, card), *map(reverse, way_out(shape, first, card))]
    return added({step: share} for step in steps)


@lru_cache(maxsize=4096)
def _port_link(port: Port) -> Link:
    return Link(
        a=port.nic, b=FABRIC, kind=FABRIC, lanes=1, bandwidth_bytes_per_s=port.bandwidth_bytes_per_s, latency_s=port.latency_s
    )


def _others(
    cluster: Cluster, group: tuple[int, ...], way: Way, concurrent: tuple[tuple[int, ...], ...]
) -> Mapping[int, tuple[NodeShare, ...]]:
    """The parts of the other groups on the nodes of this one."""
    if not concurrent:
        return {}
    there = _parts(cluster, concurrent, way)
    spread = cluster.spread(group)
    if group not in concurrent:
        return {node: there[node] for node, _ in spread if node in there}
    found: dict[int, tuple[NodeShare, ...]] = {}
    for node, members in spread:
        parts = list(there[node])
        parts.remove(NodeShare(members, way if len(spread) > 1 else "inside", len(group)))
        found[node] = tuple(parts)
    return found


@lru_cache(maxsize=256)
def _parts(cluster: Cluster, groups: tuple[tuple[int, ...], ...], way: Way) -> dict[int, tuple[NodeShare, ...]]:
    """What all groups do on each node: a group of several nodes goes `way`, one of a single node stays inside it."""
    found: dict[int, list[NodeShare]] = {}
    for group in dict.fromkeys(groups):
        spread = cluster.spread(group)
        for node, members in spread:
            found.setdefault(node, []).append(NodeShare(members, way if len(spread) > 1 else "inside", len(group)))
    return {node: tuple(sorted(parts, key=lambda part: (part.members, part.way, part.ranks))) for node, parts in found.items()}


def _uplinks(
    cluster: Cluster, group: tuple[int, ...], way: Way, concurrent: tuple[tuple[int, ...], ...]
) -> tuple[float, float]:
    """Seconds per byte of the busiest uplink that the group crosses, and the seconds an average hop spends on uplinks.

    A ring or tree in the order of the nodes leaves every leaf once; pairs leave it with all that is meant for elsewhere.
    """
    own, total = leaf_shares(cluster, group, way, concurrent)
    worst = crossing = 0.0
    for name in own:
        worst = max(worst, total[name] / uplink_rate(cluster, name))
        crossing = max(crossing, 2 * cluster.nodes.leaves[name].uplink_latency_s)
    return worst, crossing * len(own) / len(cluster.spread(group))


def leaf_shares(
    cluster: Cluster, group: tuple[int, ...], way: Way, concurrent: Sequence[tuple[int, ...]]
) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Share of the bytes that leaves each leaf: of one group, and of all groups; empty if the group lies under one leaf.

    Args:
        cluster, group, way, concurrent: as for `group_pace`.
    """
    own = own_leaf_shares(cluster, group, way)
    if not own:
        return {}, {}
    return own, _all_leaf_shares(cluster, concurrent if group in concurrent else (*concurrent, group), way)


@lru_cache(maxsize=4096)
def own_leaf_shares(cluster: Cluster, group: tuple[int, ...], way: Way) -> dict[str, float]:
    """Share of a group's bytes that leaves each leaf; empty if the group lies under one leaf.

    Args:
        cluster, group, way: as for `group_pace`.
    """
    count: dict[str, int] = {}
    for node, members in cluster.spread(group):
        leaf = cluster.nodes.leaf[node]
        count[leaf] = count.get(leaf, 0) + len(members)
    if len(count) < 2 or way == "inside":
        return {}
    return {leaf: held * (len(group) - held) / len(group) if way == "pairs" else 1.0 for leaf, held in count.items()}


@lru_cache(maxsize=1024)
def _all_leaf_shares(cluster: Cluster, groups: Sequence[tuple[int, ...]], way: Way) -> dict[str, float]:
    total: dict[str, float] = {}
    for group in dict.fromkeys(groups):
        for leaf, share in own_leaf_shares(cluster, group, way).items():
            total[leaf] = total.get(leaf, 0.0) + share
    return total
