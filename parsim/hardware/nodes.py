"""The nodes of a topology: the parts that stay connected without the switches of the network.

Nodes that are built alike share one NodeShape, with local names (gpu0, pcie1, nic0). A result for one node holds for all
of them, so pricing a cluster of thousands takes as long as a few nodes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from parsim.errors import ProfileError
from parsim.hardware.topology import DEVICE_ROLES, NETWORK_ROLES, NIC_ROLE, Link, Topology, role_of


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
    """The nodes of a topology, in the order of their lowest device.

    Raises ProfileError if the cards of one node reach several leaves.
    """
    inside, outside = _split(topology)
    groups = _groups(inside)
    cards: dict[str, list[Link]] = {}
    for link in outside:
        for end in (link.a, link.b):
            if role_of(end) == NIC_ROLE:
                cards.setdefault(end, []).append(link)
    known: dict[object, NodeShape] = {}
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
        shape = known.get(key)
        if shape is None:
            shape = NodeShape(
                tuple(local[device] for device in devices),
                Topology(tuple(map(_relink, joins))),
                tuple(Port(nic=nic, bandwidth_bytes_per_s=rate, latency_s=latency) for nic, rate, latency in ports),
            )
            known[key] = shape
        shapes.append(shape)
        leaf_of.append(_only_leaf(number, {link.other(nic) for nic, link in up}))
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
    root: dict[str, str] = {}

    def find(end: str) -> str:
        top = root.setdefault(end, end)
        while top != root[top]:
            top = root[top]
        root[end] = top
        return top

    for link in links:
        a, b = find(link.a), find(link.b)
        if a != b:
            root[b] = a
    found: dict[str, tuple[list[str], list[Link], list[str]]] = {}
    for end in root:
        role = role_of(end)
        devices, _, nics = found.setdefault(find(end), ([], [], []))
        if role in DEVICE_ROLES:
            devices.append(end)
        elif role == NIC_ROLE:
            nics.append(end)
    for link in links:
        found[find(link.a)][1].append(link)
    for devices, _, nics in found.values():
        devices.sort(key=_number)
        nics.sort(key=_number)
    return sorted((entry for entry in found.values() if entry[0]), key=lambda entry: _number(entry[0][0]))


def _relink(join: tuple[str, str, str, int, float, float]) -> Link:
    a, b, kind, lanes, bandwidth, latency = join
    return Link(a=a, b=b, kind=kind, lanes=lanes, bandwidth_bytes_per_s=bandwidth, latency_s=latency)


def _only_leaf(number: int, leaves: set[str]) -> str:
    if len(leaves) > 1:
        raise ProfileError(f"node {number} reaches the switches {', '.join(sorted(leaves))}; connect all its cards to one leaf")
    return next(iter(leaves), "")


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
