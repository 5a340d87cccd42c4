"""Quantities that collectives need of a topology: the rings of a group, and the busiest link of a set of transfers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from parsim.costs.communication.rings import MAX_RING_DEVICES, pack_rings
from parsim.errors import CostError
from parsim.hardware.topology import Link, Topology, walk_of

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
    """Rings over `link_kind` lanes among `devices`; their order does not matter.

    The first of three forms that exists is taken. (1) Rings packed on the lanes that join the devices directly, for at most
    MAX_RING_DEVICES devices. (2) Rings through switches of that kind that join all devices (NVSwitch, a PCIe tree under one
    root). They take the order of device numbers, and there are as many as the busiest link carries. (3) One ring in that order
    whose hops use direct lanes where they exist and the path over other links elsewhere. The slowest hop sets the rate of all
    rings.

    Args:
        topology: links of one node. link_kind: such as "nvlink". devices: names in the topology.

    Returns:
        The rings. Leaves out rings of fewer devices joined by trees, and a better order in forms 2 and 3.

    Raises:
        CostError: no path joins two neighbours.
    """
    return _ring_set(topology, link_kind, tuple(sorted(devices, key=_number)))


@lru_cache(maxsize=4096)
def _ring_set(topology: Topology, link_kind: str, devices: tuple[str, ...]) -> RingSet:
    if len(devices) <= MAX_RING_DEVICES:
        lanes = [[topology.lanes(a, b, link_kind) if a != b else 0 for b in devices] for a in devices]
        rings = pack_rings(lanes)
        if rings:
            flows = [
                (devices[a], devices[b], 1.0 / len(rings))
                for ring in rings
                for a, b in zip(ring, (*ring[1:], ring[0]), strict=True)
            ]
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
    loads = link_loads(topology, link_kind, [(a, b, 1.0) for a, b in zip(devices, (*devices[1:], devices[0]), strict=True)])
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


def busiest_seconds_per_byte(
    topology: Topology, link_kind: str, flows: Sequence[LinkLoad], others: Sequence[LinkLoad] = ()
) -> tuple[float, bool]:
    """Seconds per byte of the busiest link that `flows` use while all of them and `others` run at once.

    A flow uses all direct lanes of `link_kind` between its ends, or a path of that kind through switches, or else the
    shortest path over any links. Links are full duplex.

    Args:
        topology: links of one node. link_kind: of the direct lanes.
        flows, others: (from, to, share of the bytes).

    Returns:
        Seconds per byte, and whether every flow has direct lanes.

    Raises:
        CostError: no path joins two devices.
    """
    loads = link_loads(topology, link_kind, flows)
    total = added([loads, link_loads(topology, link_kind, others)]) if others else loads
    return pace(loads, total), all(link.kind == link_kind for _, _, link in loads)


def link_loads(topology: Topology, link_kind: str, flows: Iterable[LinkLoad]) -> dict[LinkStep, float]:
    """Share of the bytes that passes each link in each direction while all flows run at once.

    Args:
        topology, link_kind: as for `busiest_seconds_per_byte`. flows: (from, to, share of the bytes).
    """
    load: dict[LinkStep, float] = {}
    for source, destination, share in flows:
        for step, part in _route(topology, link_kind, source, destination):
            load[step] = load.get(step, 0.0) + share * part
    return load


def pace(own: Iterable[LinkStep], total: Mapping[LinkStep, float]) -> float:
    """Seconds per byte of the busiest of the links `own`; 0 for no link.

    Args:
        own: link steps used. total: load of every link step, shares of the bytes.
    """
    return max((total[step] / step[2].capacity_bytes_per_s for step in own), default=0.0)


def added(loads: Iterable[Mapping[LinkStep, float]]) -> dict[LinkStep, float]:
    """The sum of several loads.

    Args:
        loads: each maps a link step to a share of the bytes.
    """
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
