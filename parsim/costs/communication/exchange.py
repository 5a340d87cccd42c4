"""Many transfers at once: the cost of an exchange of neighbours, where every rank sends to a few others at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from parsim.arrays import Floats
from parsim.costs.communication.internode import parts_of, point_to_point
from parsim.costs.communication.intranode import link_model_of
from parsim.costs.communication.transfers import hop_latency_s, transfer_loads
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
    _check(pairs, size_bytes, cluster)
    latency_s, seconds_per_byte = _latencies_and_paces(tuple(pairs), cluster)
    found: Floats = latency_s + seconds_per_byte * size_bytes
    return found


@lru_cache(maxsize=16)
def _latencies_and_paces(pairs: tuple[tuple[int, int], ...], cluster: Cluster) -> tuple[Floats, Floats]:
    """float64 [pairs] seconds, and seconds per byte: a round sends its buckets over the same links, one size after another."""
    model = link_model_of(cluster)
    loads = [transfer_loads(cluster, model.link_kind, pair) for pair in pairs]
    total: dict[object, float] = {}
    for load in loads:
        for link, (weight, _) in load.items():
            total[link] = total.get(link, 0.0) + weight
    found = np.empty((2, len(pairs)))
    for place, (pair, load) in enumerate(zip(pairs, loads, strict=True)):
        pace = max(total[link] / capacity for link, (_, capacity) in load.items())
        latency, efficiency = model.point_to_point_base_s, 1.0
        if cluster.places[pair[0]][0] != cluster.places[pair[1]][0]:
            latency, efficiency = point_to_point(parts_of(cluster)[0], model)
            latency += hop_latency_s(cluster, pair)
        found[:, place] = latency, pace / efficiency
    return found[0], found[1]


def _check(pairs: Sequence[tuple[int, int]], size_bytes: float, cluster: Cluster) -> None:
    if size_bytes < 0:
        raise CostError(f"an exchange needs size_bytes >= 0, got {size_bytes}")
    if len(set(pairs)) != len(pairs):
        raise CostError("an exchange lists a pair of ranks twice; send both messages as one")
    for source, destination in pairs:
        if not (0 <= source < cluster.size and 0 <= destination < cluster.size) or source == destination:
            raise CostError(
                f"an exchange names the transfer {source} -> {destination}, but needs two of the cluster's ranks "
                f"0 to {cluster.size - 1}"
            )
