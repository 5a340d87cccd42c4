"""Many transfers at once: the busiest card sets the pace, one transfer alone costs what it always did."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parsim.costs.communication.algorithms import exchange_seconds
from parsim.costs.communication.collectives import estimate_send_recv
from parsim.errors import CostError
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.plans.mixing import mixing_graph
from parsim.work import SendRecv

SIZE = 100_000_000


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return cluster_from_profile(load_profile("p3-16xlarge"), nodes=4, network="ethernet-25g")


def pairs_of(name: str, n: int, t: int = 0) -> list[tuple[int, int]]:
    to, sender = np.nonzero((mixing_graph(name, n)(t) != 0) & ~np.eye(n, dtype=bool))
    return list(zip(sender.tolist(), to.tolist(), strict=True))


@pytest.mark.parametrize("pair", [(0, 1), (0, 5), (0, 8), (7, 31)])
@pytest.mark.parametrize("size", [0, 1000, SIZE])
def test_one_transfer_alone_is_a_send_recv(cluster: Cluster, pair: tuple[int, int], size: int) -> None:
    wanted = estimate_send_recv(SendRecv(source=pair[0], destination=pair[1], size_bytes=size), cluster).median_s
    assert exchange_seconds([pair], size, cluster)[0] == pytest.approx(wanted, rel=1e-12)


def test_a_card_is_shared_by_all_that_leave_its_node(cluster: Cluster) -> None:
    """Offset 1: one GPU of eight sends out of a node; offset 8: all eight do, and take eight times as long."""
    near = exchange_seconds(pairs_of("one_peer_exponential", 32, 0), SIZE, cluster)
    far = exchange_seconds(pairs_of("one_peer_exponential", 32, 3), SIZE, cluster)
    latency = exchange_seconds(pairs_of("one_peer_exponential", 32, 3), 0, cluster).max()
    assert far.max() - latency == pytest.approx(8 * (near.max() - latency), rel=1e-9)
    card = cluster.network
    assert card is not None
    assert far.max() - latency == pytest.approx(8 * SIZE / card.card.bandwidth_bytes_per_s.value, rel=0.01)
    assert np.sort(near)[:28].max() < 0.5 * near.max(), "inside a node NVLink or PCIe carries it"


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 9999), st.integers(1, 30))
def test_more_transfers_never_make_one_faster(cluster: Cluster, seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    drawn = {(int(a), int(b)) for a, b in rng.integers(0, 32, (count, 2)) if a != b} | {(0, 9)}
    pairs = sorted(drawn)
    few = dict(zip(pairs[::2], exchange_seconds(pairs[::2], SIZE, cluster), strict=True))
    all_of_them = dict(zip(pairs, exchange_seconds(pairs, SIZE, cluster), strict=True))
    assert all(all_of_them[pair] >= few[pair] * (1 - 1e-12) for pair in few)


def test_bad_input(cluster: Cluster) -> None:
    with pytest.raises(CostError, match=r"transfer 0 -> 32, but needs two of the cluster's ranks 0 to 31"):
        exchange_seconds([(0, 32)], 1, cluster)
    with pytest.raises(CostError, match="3 -> 3"):
        exchange_seconds([(3, 3)], 1, cluster)
    with pytest.raises(CostError, match="pair of ranks twice"):
        exchange_seconds([(0, 1), (0, 1)], 1, cluster)
    with pytest.raises(CostError, match="size_bytes >= 0"):
        exchange_seconds([(0, 1)], -1, cluster)
