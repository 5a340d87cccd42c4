"""From a topology to what collectives need: the rings of a group, and the busiest link of a set of transfers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from parsim.costs.rings import MAX_RING_DEVICES, pack_rings
from parsim.errors import CostError
from parsim.hardware.topology import Link, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSet:
    """The rings of one group of devices.

    Attributes:
        count: rings that run at once. seconds_per_byte: 1 / (count * rate of the slowest hop).
        relayed: the one ring crosses links of other kinds (PCIe, sockets), because no ring of direct links exists.
        kinds: of the links used.
    """

    devices: tuple[str, ...]
    count: int
    seconds_per_byte: float
    relayed: bool
    kinds: tuple[str, ...]


def ring_set(topology: Topology, link_kind: str, devices: tuple[str, ...]) -> RingSet:
    """Rings over `link_kind` lanes among `devices`; their order does not matter.

    Where the lanes hold no ring, or for more than MAX_RING_DEVICES devices, one ring in the order of the device numbers:
    a hop uses the direct lanes where there are some, otherwise the path over the other links, and the busiest link sets
    the pace. Leaves out rings of fewer devices joined by trees, and a better order of the relayed ring.

    Raises CostError if no path joins two neighbours.
    """
    return _ring_set(topology, link_kind, tuple(sorted(devices, key=_number)))


@lru_cache(maxsize=4096)
def _ring_set(topology: Topology, link_kind: str, devices: tuple[str, ...]) -> RingSet:
    if len(devices) <= MAX_RING_DEVICES:
        lanes = [[topology.lanes(a, b, link_kind) if a != b else 0 for b in devices] for a in devices]
        rings = pack_rings(lanes)
        if rings:
            used = [link for ring in rings for link in _ring_links(topology, link_kind, [devices[i] for i in ring])]
            rate = min(link.bandwidth_bytes_per_s for link in used)
            return RingSet(
                devices=devices,
                count=len(rings),
                seconds_per_byte=1.0 / (len(rings) * rate),
                relayed=False,
                kinds=(link_kind,),
            )
    flows = [(a, b, 1.0) for a, b in zip(devices, (*devices[1:], devices[0]), strict=True)]
    seconds_per_byte, _ = busiest_seconds_per_byte(topology, link_kind, flows)
    kinds = {link.kind for a, b, _ in flows for link in _route(topology, link_kind, a, b)}
    return RingSet(devices=devices, count=1, seconds_per_byte=seconds_per_byte, relayed=True, kinds=tuple(sorted(kinds)))


def busiest_seconds_per_byte(topology: Topology, link_kind: str, flows: Sequence[tuple[str, str, float]]) -> tuple[float, bool]:
    """Seconds per byte of the busiest link when all flows (from, to, share of the bytes) run at once, and whether every
    flow has direct lanes.

    A flow uses all direct lanes of `link_kind` between its ends, or else the shortest path over other links. Links are
    full duplex. Raises CostError if no path joins two devices.
    """
    load: dict[tuple[str, str, Link], float] = {}
    direct = True
    for source, destination, share in flows:
        route = _route(topology, link_kind, source, destination)
        straight = all(link.kind == link_kind for link in route)
        direct = direct and straight
        if straight:
            total = sum(link.lanes * link.bandwidth_bytes_per_s for link in route)
            for link in route:
                key = (source, destination, link)
                load[key] = load.get(key, 0.0) + share * link.lanes * link.bandwidth_bytes_per_s / total
            continue
        here = source
        for link in route:
            there = link.b if link.a == here else link.a
            load[(here, there, link)] = load.get((here, there, link), 0.0) + share
            here = there
    worst = max(weight / (link.lanes * link.bandwidth_bytes_per_s) for (_, _, link), weight in load.items())
    return worst, direct


def _route(topology: Topology, link_kind: str, source: str, destination: str) -> tuple[Link, ...]:
    straight = tuple(link for link in topology.between(source, destination) if link.kind == link_kind)
    route = straight or topology.path(source, destination, without_kind=link_kind)
    if not route:
        raise CostError(
            f"no link or path joins {source} and {destination}; list their links in the profile, "
            "or choose devices that are joined"
        )
    return route


def _ring_links(topology: Topology, link_kind: str, ring: Sequence[str]) -> list[Link]:
    hops = zip(ring, (*ring[1:], ring[0]), strict=True)
    return [link for a, b in hops for link in topology.between(a, b) if link.kind == link_kind]


def _number(device: str) -> tuple[int, str]:
    digits = re.search(r"\d+", device)
    return (int(digits[0]) if digits else 0, device)
