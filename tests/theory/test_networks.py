"""Collectives between nodes against closed forms worked out by hand, on machines with round numbers (tests/round_machines)."""

from __future__ import annotations

from typing import Any

import pytest

from parsim.costs.communication.algorithms import choices
from parsim.costs.communication.collectives import estimate_collective, estimate_send_recv
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.plans.mesh import Mesh
from parsim.predict.problem import PlanningProblem
from parsim.search.prices import Prices
from parsim.work import Collective, SendRecv
from tests.models import chain_model
from tests.round_machines import network, pair_machine

MB = 10**6
S = 100 * MB


def cluster(nodes: int, **changes: Any) -> Cluster:
    return cluster_from_profile(pair_machine(), nodes=nodes, network=network(**changes))


def seconds(made: Cluster, operation: str = "all_reduce", size_bytes: int = S, group: tuple[int, ...] | None = None) -> float:
    work = Collective(operation=operation, group=group or tuple(range(made.size)), size_bytes=size_bytes)
    return estimate_collective(work, made).median_s


HOP_S = 8e-6
"""Between nodes: 6 us, and 1 us of each card."""


@pytest.mark.parametrize(
    ("operation", "changes", "expected_s"),
    [
        # 4 ranks: 6 steps, of which 2 between nodes and 4 inside (2 us); 3/2 S over the one card of 5 GB/s
        ("all_reduce", {}, 10e-6 + 4 * 2e-6 + 2 * HOP_S + 1.5 * S / 5e9),
        ("all_gather", {}, 10e-6 + 2 * 2e-6 + HOP_S + 3 / 4 * S / 5e9),
        ("reduce_scatter", {}, 10e-6 + 2 * 2e-6 + HOP_S + 3 / 4 * S / 5e9),
        ("broadcast", {}, 10e-6 + 2 * 2e-6 + HOP_S + S / 5e9),
        # cards of 100 GB/s over PCIe of 50: the lane of 20 GB/s inside the node sets the pace
        ("all_reduce", {"bandwidth": 100e9}, 10e-6 + 4 * 2e-6 + 2 * HOP_S + 1.5 * S / 20e9),
    ],
)
def test_rings_over_two_nodes(operation: str, changes: dict[str, float], expected_s: float) -> None:
    assert seconds(cluster(2, algorithms=["ring"], **changes), operation) == pytest.approx(expected_s, rel=1e-12)


def test_trees_over_four_nodes_and_over_two() -> None:
    """A chain of 2 inside, 2 levels over the nodes, up and down: 2 S over the card of 5 GB/s. Two nodes send each half once."""
    (tree,) = choices("all_reduce", tuple(range(8)), S, cluster(4, algorithms=["tree"]))
    assert tree.algorithm == "tree"
    assert tree.seconds == pytest.approx(10e-6 + 2 * 2e-6 + 4 * HOP_S + 2 * S / 5e9, rel=1e-12)
    expected = 10e-6 + 2 * 2e-6 + 2 * HOP_S + max(S / 5e9, 2 * S / 20e9)
    assert seconds(cluster(2, algorithms=["tree"])) == pytest.approx(expected, rel=1e-12)


def test_hierarchical_all_reduce() -> None:
    """reduce_scatter inside (1 hop, S/2 at 20 GB/s), a ring of the 4 nodes for both rails at once through the one card (6
    hops of 8 us, 3/2 S/2 each, so 3/2 S at 5 GB/s), all_gather inside. No tree over the nodes is allowed here."""
    made = cluster(4, algorithms=["ring", "hierarchical"])
    inside = 10e-6 + 2e-6 + S / 2 / 20e9
    expected = 2 * inside + 10e-6 + 6 * 8e-6 + 1.5 * S / 5e9
    found = {choice.algorithm: choice.seconds for choice in choices("all_reduce", tuple(range(8)), S, made)}
    assert found["hierarchical"] == pytest.approx(expected, rel=1e-12)


def test_rings_over_leaves_wait_for_the_uplinks() -> None:
    """4 nodes, 2 per leaf, uplinks at half of the cards' 2 x 5 GB/s: 5 GB/s for the one ring, so no slower; the hops that leave
    a leaf take 2 x 3 us more, half of the crossings on average."""
    made = cluster(4, algorithms=["ring"], nodes_per_leaf=2, oversubscription=2.0)
    hop = 6e-6 + 2e-6 + 6e-6 * 2 / 4
    assert seconds(made) == pytest.approx(10e-6 + 8 * 2e-6 + 6 * hop + 14 / 8 * S / 5e9, rel=1e-12)
    slower = cluster(4, algorithms=["ring"], nodes_per_leaf=2, oversubscription=4.0)
    assert seconds(slower) == pytest.approx(10e-6 + 8 * 2e-6 + 6 * hop + 14 / 8 * S / 2.5e9, rel=1e-12)


def test_transfer_from_card_to_card() -> None:
    made = cluster(2)
    work = SendRecv(source=0, destination=2, size_bytes=S)
    alone = 10e-6 + 6e-6 + 2e-6 + S / 5e9
    assert estimate_send_recv(work, made).median_s == pytest.approx(alone, rel=1e-12)
    shared = estimate_send_recv(work, made, concurrent=[(0, 2), (1, 3)]).median_s
    assert shared == pytest.approx(alone + S / 5e9, rel=1e-12)
    opposite = estimate_send_recv(work, made, concurrent=[(3, 1)]).median_s
    assert opposite == pytest.approx(alone, rel=1e-12)  # full duplex


def test_all_to_all_is_paced_by_what_leaves_a_node() -> None:
    """Each of the 2 ranks of a node sends S/4 to each of 2 ranks elsewhere: S over the card."""
    assert seconds(cluster(2), "all_to_all") == pytest.approx(10e-6 + 6e-6 + 2e-6 + S / 5e9, rel=1e-12)


def test_two_groups_through_one_card_take_twice_as_long() -> None:
    """One rank of each node per group: its ring leaves through the card that both share."""
    made = cluster(2, algorithms=["ring"])
    work = Collective(operation="all_reduce", group=(0, 2), size_bytes=S)
    latency = 10e-6 + 2 * 8e-6
    assert estimate_collective(work, made).median_s == pytest.approx(latency + S / 5e9, rel=1e-12)
    both = estimate_collective(work, made, concurrent=[(0, 2), (1, 3)]).median_s
    assert both == pytest.approx(latency + 2 * S / 5e9, rel=1e-12)


def test_the_algorithm_changes_with_the_size() -> None:
    """Over 32 nodes a tree has the fewest hops; for large arrays the ring moves (n - 1)/n of what the tree does."""
    made = cluster(32)
    group = tuple(range(made.size))
    small, large = (choices("all_reduce", group, size, made)[0].algorithm for size in (1000, 1000 * MB))
    assert small == "tree"
    assert large in ("ring", "hierarchical")
    for size in (1000, MB, S):
        found = choices("all_reduce", group, size, made)
        assert seconds(made, size_bytes=size) == min(choice.seconds for choice in found)
        assert {choice.algorithm for choice in found} == {"ring", "tree", "hierarchical"}


def test_one_node_of_a_cluster_costs_what_the_machine_alone_costs() -> None:
    assert seconds(cluster(3), group=(2, 3)) == seconds(cluster_from_profile(pair_machine()))


def test_plans_price_groups_that_share_a_card() -> None:
    """dp = 2 over the nodes, tp = 2 inside: both gradient sums leave through one card, both stages' transfers too. The closed
    form that ranks plans sees the same price."""
    made = cluster(2, algorithms=["ring"])
    problem = PlanningProblem(model=chain_model(), cluster=made, global_batch=8)
    mesh = Mesh(dp=2, tp=2)
    work = Collective(operation="all_reduce", group=(0, 2), size_bytes=S)
    expected = 10e-6 + 2 * 8e-6 + 2 * S / 5e9
    (priced,) = problem.price([(work, 0)], mesh)
    assert priced.median_s == pytest.approx(expected, rel=1e-12)
    quick = Prices(problem=problem, mesh=mesh, samples=4, bucket_bytes=S)
    assert quick.work_s(work, 0) == priced.median_s
    (shifted,) = problem.price([(Collective(operation="all_reduce", group=(0, 2), size_bytes=S), 0)], Mesh(dp=1, tp=4))
    assert shifted.median_s == pytest.approx(expected, rel=1e-12)  # (0, 2) and (1, 3) are shifts along tp there
    transfer = SendRecv(source=0, destination=2, size_bytes=S)
    (sent,) = problem.price([(transfer, 0)], Mesh(pp=2, dp=2))
    assert sent.median_s == pytest.approx(10e-6 + 6e-6 + 2e-6 + 2 * S / 5e9, rel=1e-12)


@pytest.mark.parametrize(("nodes", "levels"), [(2, 1), (3, 2), (4, 2), (5, 3), (8, 3)])
def test_a_tree_has_as_many_levels_as_halvings_of_its_nodes_rounded_up(nodes: int, levels: int) -> None:
    """Nothing but hops: up and down inside once, and over each level."""
    (tree,) = choices("all_reduce", tuple(range(2 * nodes)), 0, cluster(nodes, algorithms=["tree"]))
    assert tree.seconds == pytest.approx(10e-6 + 2 * 2e-6 + 2 * levels * HOP_S, rel=1e-12)
