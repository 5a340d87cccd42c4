"""A Cluster: the devices a plan runs on, their links, and the profile that prices them. Rank r runs on `devices[r]`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from parsim.errors import ProfileError
from parsim.hardware.devices import DEVICE_KINDS, Device, DeviceType, device_name
from parsim.hardware.parts import Network, load_network, shipped_networks
from parsim.hardware.profile import LinkEntry, NicSlot, Profile
from parsim.hardware.topology import DEVICE_ROLES, HOST_ROLES, NETWORK_ROLES, NIC_ROLE, Link, Topology, role_of
from parsim.numeric import Ints

# The nodes of a topology: the parts that stay connected without the switches of the network.
#
# Nodes that are built alike share one NodeShape, with local names (gpu0, pcie1, nic0). A result for one node holds for all of
# them, so pricing a cluster of thousands takes as long as a few nodes.


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A network card and its link to a leaf: capacity in each direction, latency one way."""

    nic: str
    bandwidth_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class NodeShape:
    """One node by local names: `devices` are numbered from 0. Its ports lead to the network."""

    devices: tuple[str, ...]
    topology: Topology
    ports: tuple[Port, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A leaf switch: its uplinks together (None: it has none), and the latency of one, one way."""

    uplink_bytes_per_s: float | None
    uplink_latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Nodes:
    """Attributes:
    shapes: per node, alike nodes share one. leaf: per node, the leaf its cards reach ("" without a network). leaves: by name.
    place: device -> (node, number within the node).
    """

    shapes: tuple[NodeShape, ...]
    leaf: tuple[str, ...]
    leaves: Mapping[str, Leaf]
    place: Mapping[str, tuple[int, int]]


@lru_cache(maxsize=16)
def nodes_of(topology: Topology) -> Nodes:
    """The nodes of a topology, in the order of their lowest device. Raises ProfileError if the cards of one node reach
    several leaves."""
    if isinstance(topology, CopiedTopology):
        return topology.nodes
    inside, outside = _split(topology)
    groups = _groups(inside)
    cards: dict[str, list[Link]] = {}
    for link in outside:
        for end in (link.a, link.b):
            if role_of(end) == NIC_ROLE:
                cards.setdefault(end, []).append(link)
    made: dict[object, NodeShape] = {}
    shapes: list[NodeShape] = []
    leaf_of: list[str] = []
    place: dict[str, tuple[int, int]] = {}
    for number, (devices, links, nics) in enumerate(groups):
        local = {device: f"{role_of(device)}{index}" for index, device in enumerate(devices)}
        place.update({device: (number, index) for index, device in enumerate(devices)})
        for link in links:
            for end in (link.a, link.b):
                local.setdefault(end, end.rpartition("/")[2])
        joins = tuple(
            (local[link.a], local[link.b], link.kind, link.lanes, link.bandwidth_bytes_per_s, link.latency_s) for link in links
        )
        up = [(nic, link) for nic in nics for link in cards.get(nic, ())]
        ports = tuple((local[nic], link.capacity_bytes_per_s, link.latency_s) for nic, link in up)
        key = (len(devices), joins, ports)
        if key not in made:
            made[key] = NodeShape(
                tuple(local[device] for device in devices),
                Topology(tuple(replace(link, a=local[link.a], b=local[link.b]) for link in links)),
                tuple(Port(nic=nic, bandwidth_bytes_per_s=rate, latency_s=latency) for nic, rate, latency in ports),
            )
        shapes.append(made[key])
        reached = {link.other(nic) for nic, link in up}
        if len(reached) > 1:
            switches = ", ".join(sorted(reached))
            raise ProfileError(f"node {number} reaches the switches {switches}; connect all its cards to one leaf")
        leaf_of.append(next(iter(reached), ""))
    return Nodes(shapes=tuple(shapes), leaf=tuple(leaf_of), leaves=_leaves(outside), place=place)


def _split(topology: Topology) -> tuple[list[Link], list[Link]]:
    """Links inside nodes, and links with an end at a switch of the network."""
    inside: list[Link] = []
    outside: list[Link] = []
    role = {end: role_of(end) for end in topology.ends}
    for link in topology.links:
        (outside if role[link.a] in NETWORK_ROLES or role[link.b] in NETWORK_ROLES else inside).append(link)
    return inside, outside


def _groups(links: list[Link]) -> list[tuple[list[str], list[Link], list[str]]]:
    """Per node its devices in the order of their numbers, its links and its cards; parts without a device are left out."""
    parts = Topology(tuple(links)).parts()
    part_of = {end: number for number, part in enumerate(parts) for end in part}
    joined: list[list[Link]] = [[] for _ in parts]
    for link in links:
        joined[part_of[link.a]].append(link)
    nodes: list[tuple[list[str], list[Link], list[str]]] = []
    for part, inside in zip(parts, joined, strict=True):
        devices = sorted((end for end in part if role_of(end) in DEVICE_ROLES), key=_number)
        if devices:
            nodes.append((devices, inside, sorted((end for end in part if role_of(end) == NIC_ROLE), key=_number)))
    return sorted(nodes, key=lambda node: _number(node[0][0]))


def _leaves(outside: list[Link]) -> dict[str, Leaf]:
    rates: dict[str, float] = {}
    latencies: dict[str, float] = {}
    for link in outside:
        ends = [end for end in (link.a, link.b) if role_of(end) in NETWORK_ROLES]
        for end in ends:
            rates.setdefault(end, 0.0)
            if len(ends) == 2:
                rates[end] += link.capacity_bytes_per_s
                latencies[end] = max(latencies.get(end, 0.0), link.latency_s)
    return {end: Leaf(uplink_bytes_per_s=rate or None, uplink_latency_s=latencies.get(end, 0.0)) for end, rate in rates.items()}


def _number(end: str) -> tuple[int, str]:
    digits = re.search(r"\d+$", end)
    return (int(digits[0]) if digits else 0, end)


# Several nodes of one machine, joined by leaf and spine switches: the links of the whole cluster as one topology.


def node_links(profile: Profile) -> tuple[Link, ...]:
    return tuple(_link(profile, entry.a, entry.b, entry) for entry in profile.links)


def cluster_links(profile: Profile, nodes: int, network: Network) -> tuple[Link, ...]:
    """The links of `nodes` copies of the machine, of their network cards, and of the switches that join them.

    Device d of node k is number k * (devices of the profile) + its place in the profile; every other end of node k is called
    "node<k>/<end>". Card i of a node is "node<k>/nic<i>", plugged into slot i of the profile, in turn if there are more cards;
    without slots into host memory. All cards of a node reach leaf k // nodes_per_leaf; with more than one leaf, each is joined
    to spine0 by uplinks that carry its cards' bandwidth over the oversubscription. A leaf that serves fewer nodes has fewer
    uplinks. Leaves out how single flows are routed over several spine switches: those that collide share less than this.

    Raises ProfileError if the machine has no place for a card, or is several nodes itself.
    """
    if len({entry.node for entry in profile.devices}) > 1:
        raise ProfileError(f"profile {profile.name} has several nodes itself; use it with nodes = 1, or a profile of one node")
    if profile.communication.link_model is None:
        raise ProfileError(
            f"profile {profile.name} prices communication by group of ranks as measured, not by links, so nothing is known of "
            "several of it. Set nodes = 1, or choose a profile with a link model"
        )
    slots = _slots(profile, network)
    local = {
        device_name(entry.index, profile.device_types[entry.type].kind): place for place, entry in enumerate(profile.devices)
    }
    per_node = len(profile.devices)
    card, fabric = network.card, network.fabric
    links: list[Link] = []
    for node in range(nodes):

        def name(end: str, node: int = node) -> str:
            if end in local:
                return f"{role_of(end)}{node * per_node + local[end]}"
            return f"node{node}/{end}"

        links += [_link(profile, name(entry.a), name(entry.b), entry) for entry in profile.links]
        for number, slot in enumerate(slots):
            nic = f"node{node}/{NIC_ROLE}{number}"
            links.append(_link(profile, name(slot.at), nic, slot))
            links.append(
                Link(
                    a=nic,
                    b=f"leaf{node // fabric.nodes_per_leaf}",
                    kind=network.name,
                    lanes=1,
                    bandwidth_bytes_per_s=card.bandwidth_bytes_per_s.value,
                    latency_s=card.latency_s.value,
                )
            )
    return (*links, *_uplinks(network, nodes, len(slots)))


def _uplinks(network: Network, nodes: int, cards: int) -> list[Link]:
    """The links from every leaf to spine0, for so many cards per node; none where one leaf reaches all nodes."""
    card, fabric = network.card, network.fabric
    leaves = -(-nodes // fabric.nodes_per_leaf)
    if leaves == 1:
        return []
    return [
        Link(
            a=f"leaf{leaf}",
            b="spine0",
            kind=network.name,
            lanes=min(fabric.nodes_per_leaf, nodes - leaf * fabric.nodes_per_leaf) * cards,
            bandwidth_bytes_per_s=card.bandwidth_bytes_per_s.value / fabric.oversubscription.value,
            latency_s=fabric.uplink_latency_s.value,
        )
        for leaf in range(leaves)
    ]


class CopiedTopology(Topology):
    """Copies of a machine on a network. One copy tells its nodes; its links, hundreds of thousands, are made when asked for."""

    def __init__(self, profile: Profile, copies: int, network: Network) -> None:
        """Raises ProfileError as `cluster_links`."""
        self.__dict__.update(_made_of=(profile, copies, network), _one=nodes_of(Topology(cluster_links(profile, 1, network))))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CopiedTopology) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __reduce__(self) -> tuple[Any, ...]:
        return CopiedTopology, self.__dict__["_made_of"]

    @property
    def _key(self) -> tuple[object, ...]:
        """Equal where the links are: the copied links, how many copies, the network."""
        _, copies, network = self.__dict__["_made_of"]
        return self._shape.topology, self._shape.ports, copies, network.fabric

    @property
    def _shape(self) -> NodeShape:
        shape: NodeShape = self.__dict__["_one"].shapes[0]
        return shape

    @cached_property
    def links(self) -> tuple[Link, ...]:
        return cluster_links(*self.__dict__["_made_of"])

    @cached_property
    def nodes(self) -> Nodes:
        """As `nodes_of` finds them in the links."""
        _, copies, network = self.__dict__["_made_of"]
        fabric, per_node = network.fabric, len(self._shape.devices)
        uplinks = _uplinks(network, copies, len(self._shape.ports))
        leaf_of = tuple(f"leaf{node // fabric.nodes_per_leaf}" for node in range(copies))
        own = [(role_of(name), index) for name, (_, index) in self.__dict__["_one"].place.items()]
        return Nodes(
            shapes=(self._shape,) * copies,
            leaf=leaf_of,
            leaves=_leaves(uplinks) if uplinks else {leaf_of[0]: Leaf(uplink_bytes_per_s=None, uplink_latency_s=0.0)},
            place={f"{role}{node * per_node + index}": (node, index) for node in range(copies) for role, index in own},
        )


def _slots(profile: Profile, network: Network) -> Sequence[NicSlot]:
    slots: list[NicSlot] = list(profile.nics)
    if not slots:
        hosts = sorted({end for link in profile.links for end in (link.a, link.b) if role_of(end) in HOST_ROLES})
        if not hosts:
            raise ProfileError(
                f"profile {profile.name} names no slot for a network card and no host memory; add "
                'nics = [{"at": ..., "kind": ...}] to it'
            )
        kind = next(link.kind for link in profile.links if hosts[0] in (link.a, link.b))
        slots = [NicSlot(at=host, kind=kind) for host in hosts]
    cards = network.card.per_node or (len(slots) if profile.nics else 1)
    return [slots[number % len(slots)] for number in range(cards)]


def _link(profile: Profile, a: str, b: str, entry: LinkEntry | NicSlot) -> Link:
    kind = profile.link_kinds[entry.kind]
    return Link(
        a=a,
        b=b,
        kind=entry.kind,
        lanes=entry.lanes,
        bandwidth_bytes_per_s=kind.bandwidth_bytes_per_s.value,
        latency_s=kind.latency_s.value,
    )


MOST_DEVICES = 2**17
"""Of a cluster: more than any machine of today has, and a few seconds to build."""

NodeSpread = tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Attributes: devices (by rank), topology (of all nodes), profile (measurements and fits of one node), network (that
    joins several nodes; None for one)."""

    name: str
    devices: tuple[Device, ...]
    topology: Topology
    profile: Profile
    network: Network | None = None

    def __repr__(self) -> str:
        """`Cluster(dgx1-v100-32gb: 8 x V100-SXM2-32GB)`."""
        types = Counter(device.type.name for device in self.devices)
        devices = ", ".join(f"{count} x {name}" for name, count in types.items())
        return f"Cluster({self.name}: {devices})"

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def _hash(self) -> int:
        """Of what tells clusters of one search apart too, as comparing profiles takes long: the host as frameworks use it."""
        return hash((self.name, tuple(device.index for device in self.devices), self.topology, repr(self.profile.host)))

    @property
    def size(self) -> int:
        return len(self.devices)

    def core_of_rank(self, world_size: int) -> tuple[int, ...]:
        """Cores of the first `world_size` ranks, numbered from 0: ranks with the same number share one. Devices without a
        core share nothing."""
        if not self._has_cores:
            return tuple(range(min(world_size, self.size)))
        seen: dict[tuple[int, int | None, int], int] = {}
        return tuple(
            seen.setdefault((device.node, device.core, rank if device.core is None else -1), len(seen))
            for rank, device in enumerate(self.devices[:world_size])
        )

    @cached_property
    def _has_cores(self) -> bool:
        return any(device.core is not None for device in self.devices)

    @cached_property
    def nodes(self) -> Nodes:
        return nodes_of(self.topology)

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Per rank its node and the number of its device there; as the devices say where all collectives are measured.
        Raises ProfileError for a device that no link joins, where prices follow from links."""
        if self.profile.communication.link_model is None and not self.topology.links:
            seen: Counter[int] = Counter()
            numbered = []
            for device in self.devices:
                numbered.append((device.node, seen[device.node]))
                seen[device.node] += 1
            return tuple(numbered)
        places = self.nodes.place
        names = [device_name(device.index, device.type.kind) for device in self.devices]
        if lost := [name for name in names if name not in places]:
            raise ProfileError(
                f"profile {self.profile.name} has no link to {', '.join(lost)}, but prices communication by links; list them"
            )
        return tuple(places[name] for name in names)

    @cached_property
    def place_table(self) -> Ints:
        """int64 [2, ranks]: `places` by column."""
        return np.array(self.places, dtype=np.int64).reshape(-1, 2).T

    def host_path(self, device: Device) -> tuple[str | None, tuple[Link, ...]]:
        """The nearest host memory of a device and the links from it, by the names of a node; None, () if no link tells."""
        place = self.nodes.place.get(device_name(device.index, device.type.kind))
        if place is None:
            return None, ()
        shape, number = self.nodes.shapes[place[0]], place[1]
        host = shape.topology.socket_of(shape.devices[number])
        return host, () if host is None else shape.topology.path(host, shape.devices[number])

    @cached_property
    def most_on_a_node(self) -> int:
        return max(Counter(node for node, _ in self.places).values())

    def spread(self, group: tuple[int, ...]) -> NodeSpread:
        """Devices of a group's ranks: per node, in order, the sorted numbers of their devices there."""
        if group not in self._spreads:
            members: dict[int, list[int]] = {}
            for rank in group:
                node, number = self.places[rank]
                members.setdefault(node, []).append(number)
            self._spreads[group] = tuple((node, tuple(sorted(numbers))) for node, numbers in sorted(members.items()))
        return self._spreads[group]

    @cached_property
    def _spreads(self) -> dict[tuple[int, ...], NodeSpread]:
        return {}


def cluster_from_profile(
    profile: Profile,
    devices: int | Sequence[int] | None = None,
    *,
    nodes: int = 1,
    network: str | Network | None = None,
) -> Cluster:
    """The first `devices` devices of each of `nodes` such machines, or the listed ones, or all.

    Args:
        devices: listed numbers count through the nodes: device d of node k is k * (devices per node) + d.
        network: between the nodes: a shipped network by name, the path of one, or a Network. With one node it prices nothing.

    Raises:
        ProfileError: the profile lacks that many devices, or these; the topology is not connected; no network, an unknown one,
            or a machine that cannot be multiplied.
    """
    if nodes < 1:
        raise ProfileError(f"a cluster needs nodes >= 1, got {nodes}")
    if nodes * len(profile.devices) > MOST_DEVICES:
        raise ProfileError(
            f"nodes = {nodes:,} of profile {profile.name} are {nodes * len(profile.devices):,} devices, and a cluster may have "
            f"{MOST_DEVICES:,} at most; use nodes <= {MOST_DEVICES // len(profile.devices):,}"
        )
    if nodes > 1 and network is None:
        raise ProfileError(f"nodes = {nodes} needs a network between them: one of {', '.join(shipped_networks())}")
    joined = load_network(network) if isinstance(network, str) else network
    if nodes > 1 and joined is not None:
        topology: Topology = CopiedTopology(profile, nodes, joined)
        name = f"{nodes} x {profile.name} on {joined.name}"
    else:
        topology, name, joined = Topology(node_links(profile)), profile.name, None
    by_number = _devices(profile, nodes)
    per_node = len(profile.devices)
    if devices is None:
        numbers = list(by_number)
    elif isinstance(devices, int):
        if not 1 <= devices <= per_node:
            each = "" if nodes == 1 else " per node"
            raise ProfileError(
                f"profile {profile.name} has {per_node} devices, {devices} were asked for{each}; ask for 1 to {per_node}"
            )
        numbers = [number for place, number in enumerate(by_number) if place % per_node < devices]
    else:
        numbers = list(devices)
    for number in numbers:
        if number not in by_number:
            who = f"profile {profile.name} has" if nodes == 1 else f"{nodes} nodes of profile {profile.name} have"
            first, last = min(by_number), max(by_number)
            listing = str(sorted(by_number)) if len(by_number) <= 32 else f"{first} to {last}"
            raise ProfileError(f"{who} no device {number}; it has {listing}")
    if len(set(numbers)) != len(numbers):
        raise ProfileError(f"cluster.devices lists a device twice: {numbers}")
    if profile.communication.link_model is not None:
        _check_connected(profile, Topology(links=node_links(profile)))
    chosen = tuple(by_number[number] for number in numbers)
    return _first_equal(Cluster(name=name, devices=chosen, topology=topology, profile=profile, network=joined))


@lru_cache(maxsize=8)
def _first_equal(cluster: Cluster) -> Cluster:
    """The first of equal clusters. Caches find it by identity, instead of comparing thousands of links."""
    return cluster


def _devices(profile: Profile, nodes: int) -> dict[int, Device]:
    """By number; node by node, each in the order of the profile."""
    types = {
        name: DeviceType(
            name=name,
            kind=entry.kind,
            memory_bytes=int(entry.memory_bytes.value),
            peak_flop_per_s={precision: number.value for precision, number in entry.peak_flop_per_s.items()},
            memory_bandwidth_bytes_per_s=entry.memory_bandwidth_bytes_per_s.value,
            context_bytes=int(entry.context_bytes.value),
            allocator=entry.allocator or DEVICE_KINDS[entry.kind].allocator,
        )
        for name, entry in profile.device_types.items()
    }
    per_node = len(profile.devices)
    places = [(entry.index, entry.node, entry) for entry in profile.devices]
    if nodes > 1:
        places = [
            (node * per_node + place, node, entry) for node in range(nodes) for place, entry in enumerate(profile.devices)
        ]
    return {number: Device(index=number, type=types[entry.type], node=node, core=entry.core) for number, node, entry in places}


def _check_connected(profile: Profile, topology: Topology) -> None:
    """All devices of a machine hang together; whatever hangs on no device is a slip of the file too."""
    names = [device_name(entry.index, profile.device_types[entry.type].kind) for entry in profile.devices]
    if len(names) == 1:
        return
    parts = [sorted(part) for part in topology.parts()]
    parts += [[name] for name in names if not topology.at(name)]
    if len(parts) > 1:
        listing = " | ".join(", ".join(part[:6]) + (", ..." if len(part) > 6 else "") for part in parts[:4])
        raise ProfileError(
            f"the topology of profile {profile.name} falls into {len(parts)} parts that no link connects: {listing}; "
            "add the missing link"
        )
