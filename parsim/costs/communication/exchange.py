"""Many transfers at once: the cost of an exchange of neighbours, where every rank sends to a few others at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from parsim.arrays import Floats, Ints
from parsim.costs.communication.internode import parts_of, point_to_point
from parsim.costs.communication.intranode import link_model_of
from parsim.costs.communication.traffic import port_of, reverse, uplink_rate, way_out
from parsim.costs.communication.transfers import transfer_loads
from parsim.errors import CostError
from parsim.hardware.cluster import Cluster


def exchange_seconds(pairs: Sequence[tuple[int, int]], size_bytes: float, cluster: Cluster) -> Floats:
    """Time of each transfer of an exchange in which all transfers run at once.

    A transfer moves at the speed of the busiest link, network card or uplink on its path. That link carries every transfer
    that uses it and stays busy to the end. A rank issues its sends and receives as one group, so it pays the launch once.

    Args:
        pairs: (source, destination) of every transfer, each once.
        size_bytes: of each transfer.
        cluster: the machine, with a link model.

    Returns:
        float64 [pairs] seconds. Leaves out that a transfer speeds up once others have ended, collisions of routes in the
        network, and the arithmetic after an arrival.

    Raises:
        CostError: an unknown rank, a rank that sends to itself, a pair listed twice, a profile without a link model, or links
            between nodes without a network.
    """
    if size_bytes < 0:
        raise CostError(f"an exchange needs size_bytes >= 0, got {size_bytes}")
    latency_s, seconds_per_byte = _latencies_and_paces(tuple(pairs), cluster)
    found: Floats = latency_s + seconds_per_byte * size_bytes
    return found


@lru_cache(maxsize=4)
def _latencies_and_paces(pairs: tuple[tuple[int, int], ...], cluster: Cluster) -> tuple[Floats, Floats]:
    """float64 [pairs] seconds, and seconds per byte: a round sends its buckets over the same links, one size after another."""
    _check(pairs, cluster)
    model = link_model_of(cluster)
    ends = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    node = np.array([place for place, _ in cluster.places], dtype=np.int64)[ends]
    inside = node[:, 0] == node[:, 1]
    near = [transfer_loads(cluster, model.link_kind, (source, to)) for source, to in ends[inside].tolist()]
    total: dict[object, float] = {}
    for load in near:
        for link, (weight, _) in load.items():
            total[link] = total.get(link, 0.0) + weight
    found = np.empty((2, len(pairs)))
    far = ends[~inside]
    if len(far):
        base_s, efficiency = point_to_point(parts_of(cluster)[0], model)
        latency_s, pace = _between_nodes(far, cluster, total)
        found[:, ~inside] = base_s + latency_s, pace / efficiency
    found[0, inside] = model.point_to_point_base_s
    found[1, inside] = [max(total[link] / capacity for link, (_, capacity) in load.items()) for load in near]
    return found[0], found[1]


def _between_nodes(far: Ints, cluster: Cluster, total: dict[object, float]) -> tuple[Floats, Floats]:
    """Latency and seconds per byte of transfers between nodes: by rank and by leaf, since a million of them use few links.

    Args:
        far: int64 [transfers, 2]. cluster: the machine. total: what links inside nodes carry; that of these is added.
    """
    nodes = cluster.nodes
    names = tuple(nodes.leaves)
    number = {name: place for place, name in enumerate(names)}
    leaf = np.array([number.get(nodes.leaf[node], -1) for node, _ in cluster.places], dtype=np.int64)[far]
    crossing = leaf[:, 0] != leaf[:, 1]
    latency_s, pace = np.zeros(len(far)), np.zeros(len(far))
    links: list[dict[int, list[tuple[object, float]]]] = []
    for end in (0, 1):
        ranks, counts = np.unique(far[:, end], return_counts=True)
        links.append({rank: _links_of(cluster, rank, inward=end == 1) for rank in ranks.tolist()})
        for rank, count in zip(ranks.tolist(), counts.tolist(), strict=True):
            for link, _ in links[end][rank]:
                total[link] = total.get(link, 0.0) + count
    for end in (0, 1):
        by_rank = np.zeros((2, cluster.size))
        for rank, own in links[end].items():
            node, member = cluster.places[rank]
            by_rank[:, rank] = port_of(nodes.shapes[node], member).latency_s, max(total[link] / rate for link, rate in own)
        latency_s += by_rank[0, far[:, end]]
        pace = np.maximum(pace, by_rank[1, far[:, end]])
        passed = leaf[crossing, end]
        by_leaf = np.zeros((2, len(names)))
        for place, count in zip(*np.unique(passed, return_counts=True), strict=True):
            by_leaf[:, place] = nodes.leaves[names[place]].uplink_latency_s, count / uplink_rate(cluster, names[place])
        latency_s[crossing] += by_leaf[0, passed]
        pace[crossing] = np.maximum(pace[crossing], by_leaf[1, passed])
    return latency_s, pace


def _links_of(cluster: Cluster, rank: int, *, inward: bool) -> list[tuple[object, float]]:
    """The links from a rank into the network, or back, and their bytes per second."""
    node, member = cluster.places[rank]
    steps = way_out(cluster.nodes.shapes[node], member)
    return [((node, step), step[2].capacity_bytes_per_s) for step in (map(reverse, steps) if inward else steps)]


def _check(pairs: Sequence[tuple[int, int]], cluster: Cluster) -> None:
    if len(set(pairs)) != len(pairs):
        raise CostError("an exchange lists a pair of ranks twice; send both messages as one")
    for source, destination in pairs:
        if not (0 <= source < cluster.size and 0 <= destination < cluster.size) or source == destination:
            raise CostError(
                f"an exchange names the transfer {source} -> {destination}, but needs two of the cluster's ranks "
                f"0 to {cluster.size - 1}"
            )
