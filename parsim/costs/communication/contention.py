"""Loads of links: the bytes each group sends through its nodes, and how much groups that run at once slow one another.

A group is seen node by node as a Part: which devices of the node belong to it, and the way its bytes go. All loads are
shares of the bytes that the collective moves through its slowest hop (so a ring loads every hop with 1, two rings with
1/2 each). Links, network cards and the uplinks of leaf switches alike carry the sum of all parts; a group is paced by the
busiest of those it uses. This assumes that the groups move as many bytes at the same time, as equal replicas in the same
step do.

Results depend on the shape of a node and the parts on it, not on its number. So a cluster of thousands of equal nodes
costs one table look-up per node.

Inside a node the bytes go over rings. NCCL all_reduces along several rings at once, each over its own lanes, so the bandwidth
of a group is the number of rings (edge-disjoint directed Hamiltonian cycles on the link graph) times the rate of a lane. On an
eight-GPU cube mesh that gives 1, 4 and 6 rings for GPUs 0-1, 0-3 and 0-7. Every lane carries one ring in each direction.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from random import Random
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from parsim.errors import CostError
from parsim.hardware.cluster import Cluster, Nodes, NodeShape, NodeSpread, Port
from parsim.hardware.topology import SOCKETS, Link, Topology, walk_of
from parsim.numeric import solve

MAX_RING_DEVICES = 8
PEELINGS = 100

Ring = tuple[int, ...]
Vertex = TypeVar("Vertex")


def pack_rings(lanes: Sequence[Sequence[int]]) -> tuple[Ring, ...]:
    """Pack as many edge-disjoint directed Hamiltonian cycles as the multigraph holds.

    The count is exact: no vertex has lanes for more rings, or it is the optimum of an integer programme over all Hamiltonian
    cycles (HiGHS proves it). Which of several optimal packings is returned is not specified. Leaves out rings that pass through
    devices outside the group.

    Args:
        lanes: lanes[i][j] >= 0 directed lanes from vertex i to vertex j, n x n with 2 <= n <= MAX_RING_DEVICES.

    Returns:
        The rings, each the vertices in order from 0 on; one that occurs twice is listed twice. Raises CostError for another
            matrix.
    """
    matrix = tuple(tuple(int(count) for count in row) for row in lanes)
    size = len(matrix)
    if not 2 <= size <= MAX_RING_DEVICES or any(len(row) != size for row in matrix):
        raise CostError(
            f"rings are packed for 2 to {MAX_RING_DEVICES} devices on a square lane matrix, got {size} rows; "
            "relay over other links for larger groups"
        )
    most = min(*map(sum, matrix), *(sum(row[b] for row in matrix) for b in range(size)))
    return (_peel(matrix, most) or _optimal(matrix)) if most else ()


def _peel(lanes: Sequence[Sequence[int]], target: int) -> tuple[Ring, ...]:
    """`target` rings taken off one after the other, the widest lanes first; () if no attempt gets that far."""
    random = Random(0)
    for _ in range(PEELINGS):
        free = [list(row) for row in lanes]
        rings: list[Ring] = []
        while len(rings) < target and (ring := next(hamiltonian_cycles(free, random), ())):
            for a, b in arcs(ring):
                free[a][b] -= 1
            rings.append(ring)
        if len(rings) == target:
            return tuple(rings)
    return ()


def _optimal(lanes: tuple[tuple[int, ...], ...]) -> tuple[Ring, ...]:
    """The integer programme: how often each Hamiltonian cycle is used, within the lanes."""
    cycles = list(hamiltonian_cycles(lanes))
    if not cycles:
        return ()
    used = [(a, b) for a in range(len(lanes)) for b in range(len(lanes)) if a != b and lanes[a][b] > 0]
    row = {arc: number for number, arc in enumerate(used)}
    incidence: NDArray[np.float64] = np.zeros((len(used), len(cycles)))
    for column, cycle in enumerate(cycles):
        for arc in arcs(cycle):
            incidence[row[arc], column] = 1.0
    capacity = np.array([lanes[a][b] for a, b in used], dtype=float)
    none = np.full(len(used), -np.inf)
    times, status = solve(np.ones(len(cycles)), incidence, none, capacity, most=float(capacity.max()), whole=True)
    if times is None:
        raise CostError(f"no ring packing was found for lanes {lanes}: {status}")
    counts = np.rint(times).astype(int)
    return tuple(cycle for cycle, count in zip(cycles, counts.tolist(), strict=True) for _ in range(count))


def hamiltonian_cycles(lanes: Sequence[Sequence[int]], random: Random | None = None) -> Iterator[Ring]:
    """Yield every directed cycle from vertex 0 through all vertices, once; at most (n - 1)! of them.

    With `random` the widest lanes come first, and equal ones in a random order.
    """
    walk, unseen = [0], set(range(1, len(lanes)))

    def extend() -> Iterator[Ring]:
        here = walk[-1]
        if not unseen and lanes[here][0] > 0:
            yield tuple(walk)
        options = [vertex for vertex in sorted(unseen) if lanes[here][vertex] > 0]
        if random is not None:
            random.shuffle(options)
            options.sort(key=lambda vertex: -lanes[here][vertex])
        for vertex in options:
            walk.append(vertex)
            unseen.remove(vertex)
            yield from extend()
            unseen.add(vertex)
            walk.pop()

    return extend()


def arcs(ring: Sequence[Vertex]) -> list[tuple[Vertex, Vertex]]:
    """The steps of a walk around a ring, back to its beginning."""
    return list(zip(ring, (*ring[1:], ring[0]), strict=True))


# --- links inside a node ----------------------------------------------------------------------------------------------

LinkStep = tuple[str, str, Link]
"""A link in one direction: from, to, link."""

LinkLoad = tuple[str, str, float]
"""From, to, and the share of the bytes that passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSet:
    """The rings of one group of devices.

    Attributes:
        count: rings that run at once. seconds_per_byte: 1 / (count * rate of the slowest hop).
        relayed: the one ring crosses links of other kinds (PCIe, sockets), because no ring of direct links exists.
        kinds: of the links used. loads: per link and direction, the share of the rings' bytes that passes.
    """

    devices: tuple[str, ...]
    count: int
    seconds_per_byte: float
    relayed: bool
    kinds: tuple[str, ...]
    loads: tuple[tuple[LinkStep, float], ...] = ()


def ring_set(topology: Topology, link_kind: str, devices: tuple[str, ...]) -> RingSet:
    """Rings over `link_kind` lanes among `devices`, whose order does not matter, by the first of three forms that exists.

    (1) Rings packed on the lanes that join the devices directly, for at most MAX_RING_DEVICES devices. (2) Rings through
    switches of that kind that join all devices (NVSwitch, a PCIe tree under one root), in the order of device numbers, as many
    as the busiest link carries. (3) One ring in that order whose hops use direct lanes where they exist and the path over other
    links elsewhere. The slowest hop sets the rate of all rings. Leaves out rings of fewer devices joined by trees, and a better
    order in forms 2 and 3. Raises CostError if no path joins two neighbours.
    """
    return _ring_set(topology, link_kind, tuple(sorted(devices, key=_number)))


@lru_cache(maxsize=4096)
def _ring_set(topology: Topology, link_kind: str, devices: tuple[str, ...]) -> RingSet:
    if len(devices) <= MAX_RING_DEVICES:
        lanes = [[topology.lanes(a, b, link_kind) if a != b else 0 for b in devices] for a in devices]
        rings = pack_rings(lanes)
        if rings:
            flows = [(devices[a], devices[b], 1.0 / len(rings)) for ring in rings for a, b in arcs(ring)]
            loads = link_loads(topology, link_kind, flows)
            rate = min(link.bandwidth_bytes_per_s for _, _, link in loads)
            return RingSet(
                devices=devices,
                count=len(rings),
                seconds_per_byte=1.0 / (len(rings) * rate),
                relayed=False,
                kinds=(link_kind,),
                loads=tuple(loads.items()),
            )
    loads = link_loads(topology, link_kind, [(a, b, 1.0) for a, b in arcs(devices)])
    seconds_per_byte = pace(loads, loads)
    kinds = tuple(sorted({link.kind for _, _, link in loads}))
    slowest = min(link.bandwidth_bytes_per_s for _, _, link in loads)
    return RingSet(
        devices=devices,
        count=max(1, int(1.0 / (seconds_per_byte * slowest) + 1e-9)) if kinds == (link_kind,) else 1,
        seconds_per_byte=seconds_per_byte,
        relayed=kinds != (link_kind,),
        kinds=kinds,
        loads=tuple(loads.items()),
    )


def link_loads(topology: Topology, link_kind: str, flows: Iterable[LinkLoad]) -> dict[LinkStep, float]:
    """Share of the bytes that passes each link in each direction while all flows run at once.

    A flow (from, to, share of the bytes) uses all direct lanes of `link_kind` between its ends, or a path of that kind through
    switches, or else the shortest path over any links. Links are full duplex. Raises CostError if no path joins two devices.
    """
    load: dict[LinkStep, float] = {}
    for source, destination, share in flows:
        for step, part in _route(topology, link_kind, source, destination):
            load[step] = load.get(step, 0.0) + share * part
    return load


def pace(used: Iterable[LinkStep], total: Mapping[LinkStep, float]) -> float:
    """Seconds per byte of the busiest of the links `used`; 0 for no link. `total`: load of every link, shares of the bytes."""
    return max((total[step] / step[2].capacity_bytes_per_s for step in used), default=0.0)


def added(loads: Iterable[Mapping[LinkStep, float]]) -> dict[LinkStep, float]:
    """The sum of several loads."""
    total: dict[LinkStep, float] = {}
    for load in loads:
        for step, weight in load.items():
            total[step] = total.get(step, 0.0) + weight
    return total


@lru_cache(maxsize=65536)
def _route(topology: Topology, link_kind: str, source: str, destination: str) -> tuple[tuple[LinkStep, float], ...]:
    """The links a flow takes, each with the part of its bytes."""
    straight = [link for link in topology.between(source, destination) if link.kind == link_kind]
    if straight:
        total = sum(link.capacity_bytes_per_s for link in straight)
        return tuple(((source, destination, link), link.capacity_bytes_per_s / total) for link in straight)
    path = topology.path(source, destination, only_kind=link_kind) or topology.path(source, destination)
    if not path:
        raise CostError(
            f"no link or path connects {source} and {destination}; list their links in the profile, or choose connected devices"
        )
    return tuple((step, 1.0) for step in walk_of(path, source))


def _number(device: str) -> tuple[int, str]:
    digits = re.search(r"\d+", device)
    return (int(digits[0]) if digits else 0, device)


# --- groups on nodes --------------------------------------------------------------------------------------------------

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
    """How fast a group of several nodes moves bytes on a `way` while the `concurrent` groups move as many. Leaves out
    collisions of routes inside the network. Raises CostError for a member's node without a network card."""
    spread, nodes = cluster.spread(group), cluster.nodes
    others = shares_of_others(cluster, group, way, concurrent)
    inside = outside = port_latency = 0.0
    relayed = False
    for shape, members, there in _kinds_of_nodes(nodes, spread, others):
        part = NodeShare(members, way, len(group))
        seconds = part_pace(shape, link_kind, part, there)
        inside, outside = max(inside, seconds[0]), max(outside, seconds[1])
        relayed = relayed or (len(members) > 1 and _leaves_direct_links(shape, link_kind, part))
        if len(spread) > 1:
            ports = (port for member in members for port in ports_of(shape, member))
            port_latency = max(port_latency, max(port.latency_s for port in ports))
    own, total = leaf_shares(cluster, group, way, concurrent)
    crossing = 0.0  # a ring or tree in node order leaves every leaf once; pairs with all that is meant for elsewhere
    for leaf in own:
        outside = max(outside, total[leaf] / uplink_rate(cluster, leaf))
        crossing = max(crossing, 2 * nodes.leaves[leaf].uplink_latency_s)
    return LinkRates(
        inside_s_per_byte=inside,
        outside_s_per_byte=outside,
        relayed=relayed,
        hop_latency_s=2 * port_latency + crossing * len(own) / len(spread),
        members=max(len(members) for _, members in spread),
        nodes=len(spread),
    )


@lru_cache(maxsize=16384)
def inside_pace(
    cluster: Cluster, link_kind: str, group: tuple[int, ...], concurrent: tuple[tuple[int, ...], ...] = ()
) -> tuple[RingSet, float]:
    """The rings of the slowest node, and their seconds per byte while the `concurrent` groups do the same in their nodes."""
    others = shares_of_others(cluster, group, "inside", concurrent)
    paces = []
    for shape, members, there in _kinds_of_nodes(cluster.nodes, cluster.spread(group), others):
        seconds, _ = part_pace(shape, link_kind, NodeShare(members, "inside", len(group)), there)
        paces.append((seconds, rings_of(shape, link_kind, members)))
    seconds, rings = max(paces, key=lambda pair: pair[0])
    return rings, seconds


def _kinds_of_nodes(
    nodes: Nodes, spread: NodeSpread, others: Mapping[int, tuple[NodeShare, ...]]
) -> list[tuple[NodeShape, tuple[int, ...], tuple[NodeShare, ...]]]:
    """The nodes of a group that differ: their shape, the members there, and the parts of other groups."""
    kinds: dict[tuple[int, tuple[int, ...], int], int] = {}
    for node, members in spread:
        kinds.setdefault((id(nodes.shapes[node]), members, id(others.get(node, ()))), node)
    return [(nodes.shapes[node], members, others.get(node, ())) for (_, members, _), node in kinds.items()]


def uplink_rate(cluster: Cluster, leaf: str) -> float:
    """Bytes per second of a leaf's uplinks. Raises CostError if it has none."""
    rate = cluster.nodes.leaves[leaf].uplink_bytes_per_s
    if rate is None:
        raise CostError(f"{leaf} has no uplink to the leaves of the other nodes; connect the switches in the topology")
    return rate


@lru_cache(maxsize=65536)
def part_pace(shape: NodeShape, link_kind: str, part: NodeShare, others: tuple[NodeShare, ...]) -> tuple[float, float]:
    """Seconds per byte of the busiest link inside the node, and of the busiest to the network, that `part` uses beside
    `others`."""
    inside, outside = part_loads(shape, link_kind, part)
    total = added([inside, outside, *(load for other in others for load in part_loads(shape, link_kind, other))])
    alone = 0.0
    if part.way in ("inside", "through") and len(part.members) > 1:
        rings = rings_of(shape, link_kind, part.members)
        alone = rings.seconds_per_byte if part.way == "inside" or not rings.relayed else 0.0
    return max(alone, pace(inside, total)), pace(outside, total)


@lru_cache(maxsize=65536)
def _leaves_direct_links(shape: NodeShape, link_kind: str, part: NodeShare) -> bool:
    if part.way == "pairs":
        return any(link.kind != link_kind for _, _, link in part_loads(shape, link_kind, part)[0])
    return rings_of(shape, link_kind, part.members).relayed


@lru_cache(maxsize=65536)
def part_loads(shape: NodeShape, link_kind: str, part: NodeShare) -> tuple[dict[LinkStep, float], dict[LinkStep, float]]:
    """Loads of one part on the links between its members, and on those between them and the network."""
    names = [shape.devices[member] for member in part.members]
    size = len(names)
    if part.way == "inside":
        return (dict(rings_of(shape, link_kind, part.members).loads) if size > 1 else {}), {}
    if part.way == "rails":
        return {}, added(_out_and_in(shape, link_kind, member, 1.0 / size) for member in part.members)
    if part.way == "pairs":
        share = 1.0 / part.ranks
        flows: list[LinkLoad] = [(a, b, share) for a in names for b in names if a != b]
        away = part.ranks - size
        outward = [_out_and_in(shape, link_kind, member, away * share) for member in part.members] if away else []
        return link_loads(shape.topology, link_kind, flows), added(outward)
    relayed = size > 1 and rings_of(shape, link_kind, part.members).relayed
    near: dict[Port, int] = {}
    for place, member in enumerate(part.members):
        for port in ports_of(shape, member):
            near.setdefault(port, place)
    load: dict[LinkStep, float] = {}
    chain: list[LinkLoad] = []
    for port, last in near.items():
        order = part.members[last + 1 :] + part.members[: last + 1]
        # Direct links close the ring, so it enters at the device beside the card; on PCIe it enters at the next one.
        first = order[0] if relayed else order[-1]
        ways = (way_out(shape, link_kind, order[-1], port), map(reverse, way_out(shape, link_kind, first, port)))
        load = added([load, *({step: 1.0 / len(near)} for way in ways for step in way)])
        chain += [(shape.devices[a], shape.devices[b], 1.0 / len(near)) for a, b in pairwise(order)]
    if size == 1:
        return {}, load
    rings = rings_of(shape, link_kind, part.members)
    return (link_loads(shape.topology, link_kind, chain) if relayed else dict(rings.loads)), load


@lru_cache(maxsize=65536)
def ports_of(shape: NodeShape, member: int) -> tuple[Port, ...]:
    """The network cards that a device sends by: those with the fewest links to it. Devices with the same nearest cards
    divide them; where there are fewer cards than devices, they take turns."""
    nearest = _nearest(shape, member)
    if not nearest:
        raise CostError(
            f"{shape.devices[member]} reaches no network card of its node, so its group cannot leave it; join a card to the "
            "links of the profile"
        )
    sharers = [other for other in range(len(shape.devices)) if _nearest(shape, other) == nearest]
    each = max(1, len(nearest) // len(sharers))
    first = sharers.index(member) * each
    return tuple(nearest[place % len(nearest)] for place in range(first, first + each))


@lru_cache(maxsize=65536)
def way_out(shape: NodeShape, link_kind: str, member: int, port: Port) -> tuple[LinkStep, ...]:
    """The links from a device to a network card and into the network.

    A card of the other socket is reached over direct links and the device beside the card, where they join the two (NCCL's
    PXN): github NVIDIA/nccl, src/graph/paths.cc.
    """
    device = shape.devices[member]
    path = shape.topology.path(device, port.nic)
    if any(link.kind == SOCKETS for link in path):
        beside = min(shape.devices, key=lambda other: len(shape.topology.path(other, port.nic)) or math.inf)
        direct = shape.topology.path(device, beside, only_kind=link_kind)
        path = (*direct, *shape.topology.path(beside, port.nic)) if direct else path
    rate, latency_s = port.bandwidth_bytes_per_s, port.latency_s
    out = Link(a=port.nic, b=FABRIC, kind=FABRIC, lanes=1, bandwidth_bytes_per_s=rate, latency_s=latency_s)
    return (*walk_of(path, device), (port.nic, FABRIC, out))


def rings_of(shape: NodeShape, link_kind: str, members: tuple[int, ...]) -> RingSet:
    return ring_set(shape.topology, link_kind, tuple(shape.devices[member] for member in members))


def reverse(step: LinkStep) -> LinkStep:
    return step[1], step[0], step[2]


@lru_cache(maxsize=65536)
def _nearest(shape: NodeShape, member: int) -> tuple[Port, ...]:
    reached = [(len(path), port) for port in shape.ports if (path := shape.topology.path(shape.devices[member], port.nic))]
    least = min((length for length, _ in reached), default=0)
    return tuple(port for length, port in reached if length == least)


@lru_cache(maxsize=65536)
def out_of(shape: NodeShape, link_kind: str, member: int) -> Mapping[LinkStep, float]:
    """Share of what a device sends out of its node that passes each link: its cards carry equal parts."""
    ports = ports_of(shape, member)
    return added({step: 1.0 / len(ports)} for port in ports for step in way_out(shape, link_kind, member, port))


def _out_and_in(shape: NodeShape, link_kind: str, member: int, share: float) -> dict[LinkStep, float]:
    """`share` leaves the node from a device, and as much comes in to it."""
    out = out_of(shape, link_kind, member)
    return added({way: share * part} for step, part in out.items() for way in (step, reverse(step)))


def shares_of_others(
    cluster: Cluster, group: tuple[int, ...], way: Way, concurrent: tuple[tuple[int, ...], ...]
) -> Mapping[int, tuple[NodeShare, ...]]:
    """The parts of the other groups on the nodes of this one."""
    if not concurrent:
        return {}
    there = _parts(cluster, concurrent, way)
    spread = cluster.spread(group)
    if group not in concurrent:
        return {node: there[node] for node, _ in spread if node in there}
    others: dict[int, tuple[NodeShare, ...]] = {}
    rest: dict[tuple[int, tuple[int, ...]], tuple[NodeShare, ...]] = {}  # nodes with the same parts share one tuple
    for node, members in spread:
        key = id(there[node]), members
        if key not in rest:
            parts = list(there[node])
            parts.remove(NodeShare(members, way if len(spread) > 1 else "inside", len(group)))
            rest[key] = tuple(parts)
        others[node] = rest[key]
    return others


@lru_cache(maxsize=256)
def _parts(cluster: Cluster, groups: tuple[tuple[int, ...], ...], way: Way) -> dict[int, tuple[NodeShare, ...]]:
    """What all groups do on each node: a group of several nodes goes `way`, one of a single node stays inside it. Nodes with
    the same parts share one tuple."""
    distinct = tuple(dict.fromkeys(groups))
    sizes = np.array([len(group) for group in distinct], dtype=np.int64)
    node, place = cluster.place_table[:, [rank for group in distinct for rank in group]]
    number = np.repeat(np.arange(len(distinct)), sizes)
    order = np.lexsort((place, number, node))
    node, place, number = node[order], place[order], number[order]
    begins = (np.diff(node, prepend=-1) != 0) | (np.diff(number, prepend=-1) != 0)
    several = np.bincount(number[begins], minlength=len(distinct)) > 1
    rows = np.stack([place, begins, several[number], sizes[number]], axis=1)
    starts = np.flatnonzero(np.diff(node, prepend=-1))
    alike: dict[bytes, tuple[NodeShare, ...]] = {}
    known: dict[tuple[NodeShare, ...], tuple[NodeShare, ...]] = {}
    shared: dict[int, tuple[NodeShare, ...]] = {}
    for start, some in zip(starts.tolist(), np.split(rows, starts[1:]), strict=True):
        key = some.tobytes()
        if key not in alike:
            parts = (part.tolist() for part in np.split(some, np.flatnonzero(some[:, 1])[1:]))
            shares = (NodeShare(tuple([row[0] for row in part]), way if part[0][2] else "inside", part[0][3]) for part in parts)
            ordered = tuple(sorted(shares, key=lambda part: (part.members, part.way, part.ranks)))
            alike[key] = known.setdefault(ordered, ordered)
        shared[int(node[start])] = alike[key]
    return shared


def leaf_shares(
    cluster: Cluster, group: tuple[int, ...], way: Way, concurrent: Sequence[tuple[int, ...]]
) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Share of the bytes that leaves each leaf: of one group, and of all groups; empty if the group lies under one leaf."""
    shares = own_leaf_shares(cluster, group, way)
    if not shares:
        return {}, {}
    return shares, _all_leaf_shares(cluster, concurrent if group in concurrent else (*concurrent, group), way)


@lru_cache(maxsize=4096)
def own_leaf_shares(cluster: Cluster, group: tuple[int, ...], way: Way) -> dict[str, float]:
    """Share of a group's bytes that leaves each leaf; empty if the group lies under one leaf."""
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


# --- transfers from rank to rank --------------------------------------------------------------------------------------


@lru_cache(maxsize=65536)
def transfer_pace(
    cluster: Cluster, link_kind: str, pair: tuple[int, ...], concurrent: tuple[tuple[int, ...], ...] = ()
) -> tuple[float, bool, float]:
    """Speed of a transfer (source, destination) while the `concurrent` ones run: seconds per byte of its busiest link,
    whether it has direct lanes, and the latency of the links between the nodes in seconds (0 inside one). Leaves out that a
    transfer speeds up once others have ended."""
    loads = transfer_loads(cluster, link_kind, pair)
    if concurrent:
        at_once = concurrent if pair in distinct_pairs(concurrent) else (*concurrent, pair)
        total = {place: _loads_at(cluster, link_kind, at_once, place) for place, _ in loads}
        seconds = max([total[key[0]][key] / capacity for key, (_, capacity) in loads.items()])
    else:
        seconds = max([weight / capacity for weight, capacity in loads.values()])
    (source, a), (destination, b) = cluster.places[pair[0]], cluster.places[pair[1]]
    if source == destination:
        shape = cluster.nodes.shapes[source]
        links = link_loads(shape.topology, link_kind, [(shape.devices[a], shape.devices[b], 1.0)])
        return seconds, all(link.kind == link_kind for _, _, link in links), 0.0
    shapes, leaves = cluster.nodes.shapes, (cluster.nodes.leaf[source], cluster.nodes.leaf[destination])
    latency_s = ports_of(shapes[source], a)[0].latency_s + ports_of(shapes[destination], b)[0].latency_s
    if leaves[0] != leaves[1]:
        latency_s += sum(cluster.nodes.leaves[leaf].uplink_latency_s for leaf in leaves)
    return seconds, False, latency_s


@lru_cache(maxsize=256)
def distinct_pairs(pairs: tuple[tuple[int, ...], ...]) -> frozenset[tuple[int, ...]]:
    return frozenset(pairs)


@lru_cache(maxsize=65536)
def _loads_at(cluster: Cluster, link_kind: str, pairs: tuple[tuple[int, ...], ...], place: object) -> dict[object, float]:
    """The share of the bytes on every link of a node or leaf switch, of several transfers at once."""
    total: dict[object, float] = {}
    for pair in _transfers_at(cluster, pairs).get(place, ()):
        for key, (weight, _) in transfer_loads(cluster, link_kind, pair).items():
            if key[0] == place:
                total[key] = total.get(key, 0.0) + weight
    return total


@lru_cache(maxsize=256)
def _transfers_at(cluster: Cluster, pairs: tuple[tuple[int, ...], ...]) -> dict[object, list[tuple[int, ...]]]:
    """By node and by leaf switch the transfers that begin or end there; one listed twice counts once."""
    places, leaf = cluster.places, cluster.nodes.leaf
    by_place: dict[object, list[tuple[int, ...]]] = {}
    for pair in dict.fromkeys(pairs):
        nodes = {places[rank][0] for rank in pair}
        for place in (*nodes, *{leaf[node] for node in nodes}):
            by_place.setdefault(place, []).append(pair)
    return by_place


@lru_cache(maxsize=65536)
def transfer_loads(cluster: Cluster, link_kind: str, pair: tuple[int, ...]) -> dict[tuple[object, object], tuple[float, float]]:
    """Share of the bytes and capacity (bytes per second) of every link that a transfer (source, destination) uses."""
    (source, a), (destination, b) = cluster.places[pair[0]], cluster.places[pair[1]]
    nodes = cluster.nodes
    shape = nodes.shapes[source]
    if source == destination:
        flow = [(shape.devices[a], shape.devices[b], 1.0)]
        inside = link_loads(shape.topology, link_kind, flow)
        return {(source, step): (weight, step[2].capacity_bytes_per_s) for step, weight in inside.items()}
    loads: dict[tuple[object, object], tuple[float, float]] = {}
    for step, part in out_of(shape, link_kind, a).items():
        loads[(source, step)] = (part, step[2].capacity_bytes_per_s)
    for step, part in out_of(nodes.shapes[destination], link_kind, b).items():
        loads[(destination, reverse(step))] = (part, step[2].capacity_bytes_per_s)
    leaves = nodes.leaf[source], nodes.leaf[destination]
    if leaves[0] != leaves[1]:
        for leaf, direction in zip(leaves, ("up", "down"), strict=True):
            loads[(leaf, direction)] = (1.0, uplink_rate(cluster, leaf))
    return loads
