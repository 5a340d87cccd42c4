"""Transfers from rank to rank: the links each takes, and how much those that run at once slow one another."""

from __future__ import annotations

from functools import lru_cache

from parsim.costs.communication.linkgraph import busiest_seconds_per_byte, link_loads
from parsim.costs.communication.traffic import port_of, reverse, uplink_rate, way_out
from parsim.hardware.cluster import Cluster


@lru_cache(maxsize=65536)
def transfer_pace(
    cluster: Cluster, link_kind: str, pair: tuple[int, ...], concurrent: tuple[tuple[int, ...], ...] = ()
) -> tuple[float, bool, float]:
    """Speed of a transfer from rank to rank while the `concurrent` ones run.

    Args:
        cluster: the machine. link_kind: of the direct lanes.
        pair: (source, destination). concurrent: pairs at the same time.

    Returns:
        Seconds per byte of its busiest link, whether it has direct lanes, and the latency of the links between the nodes in
        seconds (0 inside one). Leaves out that a transfer speeds up once others have ended.
    """
    own = transfer_loads(cluster, link_kind, pair)
    if concurrent:
        total = _all_transfer_loads(cluster, link_kind, concurrent if pair in _distinct(concurrent) else (*concurrent, pair))
        seconds = max([total[key] / capacity for key, (_, capacity) in own.items()])
    else:
        seconds = max([weight / capacity for weight, capacity in own.values()])
    (source, a), (destination, b) = cluster.places[pair[0]], cluster.places[pair[1]]
    if source == destination:
        shape = cluster.nodes.shapes[source]
        flow = (shape.devices[a], shape.devices[b], 1.0)
        return seconds, busiest_seconds_per_byte(shape.topology, link_kind, [flow])[1], 0.0
    return seconds, False, hop_latency_s(cluster, pair)


def hop_latency_s(cluster: Cluster, pair: tuple[int, ...]) -> float:
    """Latency of the links between the nodes of two ranks: both cards, and the uplinks if their leaves differ.

    Args:
        cluster: the machine. pair: (source, destination).
    """
    (source, a), (destination, b) = cluster.places[pair[0]], cluster.places[pair[1]]
    shapes = cluster.nodes.shapes
    latency = port_of(shapes[source], a).latency_s + port_of(shapes[destination], b).latency_s
    leaves = cluster.nodes.leaf[source], cluster.nodes.leaf[destination]
    if leaves[0] != leaves[1]:
        latency += sum(cluster.nodes.leaves[leaf].uplink_latency_s for leaf in leaves)
    return latency


@lru_cache(maxsize=256)
def _distinct(pairs: tuple[tuple[int, ...], ...]) -> frozenset[tuple[int, ...]]:
    return frozenset(pairs)


@lru_cache(maxsize=256)
def _all_transfer_loads(cluster: Cluster, link_kind: str, pairs: tuple[tuple[int, ...], ...]) -> dict[object, float]:
    """The same of several transfers at once; one listed twice counts once."""
    total: dict[object, float] = {}
    for pair in dict.fromkeys(pairs):
        for key, (weight, _) in transfer_loads(cluster, link_kind, pair).items():
            total[key] = total.get(key, 0.0) + weight
    return total


@lru_cache(maxsize=65536)
def transfer_loads(cluster: Cluster, link_kind: str, pair: tuple[int, ...]) -> dict[tuple[object, object], tuple[float, float]]:
    """Share of the bytes and capacity (bytes per second) of every link that a transfer uses.

    Args:
        cluster: the machine. link_kind: of the direct lanes. pair: (source, destination).
    """
    (source, a), (destination, b) = cluster.places[pair[0]], cluster.places[pair[1]]
    nodes = cluster.nodes
    shape = nodes.shapes[source]
    if source == destination:
        flow = [(shape.devices[a], shape.devices[b], 1.0)]
        inside = link_loads(shape.topology, link_kind, flow)
        return {(source, step): (weight, step[2].capacity_bytes_per_s) for step, weight in inside.items()}
    found: dict[tuple[object, object], tuple[float, float]] = {}
    for step in way_out(shape, a):
        found[(source, step)] = (1.0, step[2].capacity_bytes_per_s)
    for step in map(reverse, way_out(nodes.shapes[destination], b)):
        found[(destination, step)] = (1.0, step[2].capacity_bytes_per_s)
    leaves = nodes.leaf[source], nodes.leaf[destination]
    if leaves[0] != leaves[1]:
        for leaf, direction in zip(leaves, ("up", "down"), strict=True):
            found[(leaf, direction)] = (1.0, uplink_rate(cluster, leaf))
    return found
