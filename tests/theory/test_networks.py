"""Collectives between nodes: closed forms on round numbers, and what must hold on any cluster."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from parsim.costs.communication.algorithms import choices, exchange_seconds
from parsim.costs.communication.collectives import estimate_collective, estimate_send_recv
from parsim.costs.communication.contention import NodeShare, Way, link_loads, part_loads
from parsim.errors import CostError, GraphError
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.parts import Network, load_network, shipped_networks
from parsim.hardware.profile import Sourced
from parsim.plans.mesh import Mesh
from parsim.plans.mixing import mixing_graph
from parsim.plans.stages import concurrent_groups, concurrent_transfers, concurrent_with
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
    shared = estimate_send_recv(work, made, concurrent=((0, 2), (1, 3))).median_s
    assert shared == pytest.approx(alone + S / 5e9, rel=1e-12)
    opposite = estimate_send_recv(work, made, concurrent=((3, 1),)).median_s
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
    both = estimate_collective(work, made, concurrent=((0, 2), (1, 3))).median_s
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


# What must hold of collectives on any cluster: Hypothesis over shipped machines, networks, groups and sizes.

MACHINES = ("dgx1-v100-32gb", "dgx2-v100", "p3-16xlarge", "pcie-8xv100", "summit-v100")
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
NODES = 4
SIZES = st.integers(0, 10**9)


@lru_cache(maxsize=64)
def made(machine: str, name: str, oversubscription: float = 1.0, speed: float = 1.0) -> Cluster:
    return cluster_from_profile(load_profile(machine), nodes=NODES, network=changed(name, oversubscription, speed))


def changed(name: str, oversubscription: float, speed: float) -> Network:
    """Two nodes per leaf, so that uplinks count."""
    network = load_network(name)
    rate = network.card.bandwidth_bytes_per_s
    card = network.card.model_copy(update={"bandwidth_bytes_per_s": Sourced(value=rate.value * speed, source=rate.source)})
    fabric = network.fabric.model_copy(
        update={"nodes_per_leaf": 2, "oversubscription": Sourced(value=oversubscription, source=rate.source)}
    )
    return network.model_copy(update={"card": card, "fabric": fabric})


@st.composite
def questions(draw: st.DrawFn) -> tuple[str, str, str, tuple[int, ...]]:
    machine, name, operation = (draw(st.sampled_from(options)) for options in (MACHINES, shipped_networks(), OPERATIONS))
    size = NODES * len(load_profile(machine).devices)
    count = draw(st.sampled_from((2, 3, 4, 8)))
    group = draw(st.lists(st.integers(0, size - 1), min_size=count, max_size=count, unique=True))
    return machine, name, operation, tuple(group)


def drawn_seconds(cluster: Cluster, operation: str, group: tuple[int, ...], size_bytes: int, concurrent: Any = ()) -> float:
    work = Collective(operation=operation, group=group, size_bytes=size_bytes)
    return estimate_collective(work, cluster, concurrent).median_s


@given(questions(), SIZES, SIZES)
@settings(max_examples=150, deadline=None)
def test_time_grows_with_the_size(question: tuple[str, str, str, tuple[int, ...]], a: int, b: int) -> None:
    machine, name, operation, group = question
    small, large = (drawn_seconds(made(machine, name), operation, group, size) for size in sorted((a, b)))
    assert 0 < small <= large * (1 + 1e-12)


@given(questions(), SIZES)
@settings(max_examples=150, deadline=None)
def test_worse_networks_are_never_faster(question: tuple[str, str, str, tuple[int, ...]], size: int) -> None:
    machine, name, operation, group = question
    best = drawn_seconds(made(machine, name), operation, group, size)
    assert drawn_seconds(made(machine, name, oversubscription=4.0), operation, group, size) >= best * (1 - 1e-12)
    assert drawn_seconds(made(machine, name, speed=0.5), operation, group, size) >= best * (1 - 1e-12)


@given(questions(), SIZES, st.permutations(range(2)), st.booleans())
@settings(max_examples=150, deadline=None)
def test_nodes_can_be_renumbered(
    question: tuple[str, str, str, tuple[int, ...]], size: int, inside: list[int], swap: bool
) -> None:
    """Leaves change places, and the nodes under a leaf do."""
    machine, name, operation, group = question
    cluster = made(machine, name)
    per_node = cluster.size // NODES
    order = [*inside, *(2 + place for place in inside)]
    order = order[2:] + order[:2] if swap else order
    moved = tuple(order[rank // per_node] * per_node + rank % per_node for rank in group)
    if operation == "broadcast":
        moved = tuple(sorted(moved))
        group = tuple(sorted(group))
    assert drawn_seconds(cluster, operation, moved, size) == pytest.approx(
        drawn_seconds(cluster, operation, group, size), rel=1e-12
    )


@given(questions(), SIZES, st.integers(1, 8))
@example(("dgx1-v100-32gb", "efa-100g", "all_reduce", (0, 8)), 1, 8)  # on node 1 the other one is like the group itself
@settings(max_examples=150, deadline=None)
def test_concurrent_groups_never_help(question: tuple[str, str, str, tuple[int, ...]], size: int, shift: int) -> None:
    machine, name, operation, group = question
    cluster = made(machine, name)
    other = tuple((rank + shift) % cluster.size for rank in group)
    alone = drawn_seconds(cluster, operation, group, size)
    beside = drawn_seconds(cluster, operation, group, size, (group, other))
    assert beside >= alone * (1 - 1e-12)
    assert drawn_seconds(cluster, operation, group, size, (other,)) == pytest.approx(beside, rel=1e-12)
    assert drawn_seconds(cluster, operation, group, size, (group,)) == pytest.approx(alone, rel=1e-12)


@given(st.sampled_from(MACHINES), st.data())
@settings(max_examples=200, deadline=None)
def test_every_byte_that_enters_a_switch_leaves_it(machine: str, data: st.DataObject) -> None:
    """The loads of flows: out of the source, through switches unchanged, into the destination."""
    cluster = made(machine, "infiniband-100g")
    shape = cluster.nodes.shapes[0]
    pairs = st.tuples(st.sampled_from(shape.devices), st.sampled_from(shape.devices)).filter(lambda pair: pair[0] != pair[1])
    flows = [(a, b, share) for (a, b), share in data.draw(st.lists(st.tuples(pairs, st.floats(0.1, 2.0)), max_size=8))]
    model = cluster.profile.communication.link_model
    assert model is not None
    balance: dict[str, float] = {}
    for (a, b, _), weight in link_loads(shape.topology, model.link_kind, flows).items():
        balance[a] = balance.get(a, 0.0) - weight
        balance[b] = balance.get(b, 0.0) + weight
    for a, b, share in flows:
        balance[a] += share
        balance[b] -= share
    assert all(abs(left) < 1e-9 for left in balance.values())


@given(st.sampled_from(MACHINES), st.sampled_from(("through", "rails", "pairs")), st.data())
@settings(max_examples=150, deadline=None)
def test_a_node_sends_as_much_as_it_receives(machine: str, way: Way, data: st.DataObject) -> None:
    cluster = made(machine, "infiniband-100g")
    shape = cluster.nodes.shapes[0]
    model = cluster.profile.communication.link_model
    assert model is not None
    numbers = range(len(shape.devices))
    members = tuple(sorted(data.draw(st.lists(st.sampled_from(numbers), min_size=1, max_size=6, unique=True))))
    ranks = len(members) * data.draw(st.integers(2, 4))
    _, outside = part_loads(shape, model.link_kind, NodeShare(members, way, ranks))
    sent = sum(load for (_, end, _), load in outside.items() if end == "fabric")
    received = sum(load for (start, _, _), load in outside.items() if start == "fabric")
    expected = len(members) * (ranks - len(members)) / ranks if way == "pairs" else 1.0
    assert sent == pytest.approx(received) == pytest.approx(expected)


@given(st.integers(1, 3), st.integers(1, 4), st.sampled_from((1, 2, 4, 8)), st.data())
def test_groups_of_a_mesh_that_run_together(pp: int, dp: int, tp: int, data: st.DataObject) -> None:
    """They are as many as there is room for, disjoint, in one stage, and every one of them says the same of itself."""
    mesh = Mesh(pp=pp, dp=dp, tp=tp)
    ways = data.draw(st.sampled_from([ways for ways in (1, 2, 4, 8) if tp % ways == 0]))
    stage, replica, first = (data.draw(st.integers(0, size - 1)) for size in (pp, dp, tp // ways))
    strided, whole = data.draw(st.booleans()), data.draw(st.booleans())
    shards = range(first, tp, tp // ways) if strided else range(first * ways, (first + 1) * ways)
    replicas = range(dp) if whole else [replica]
    group = tuple(mesh.rank(stage=stage, replica=r, shard=s) for r in replicas for s in shards)
    together = concurrent_groups(mesh, group)
    assert group in together
    assert sorted(rank for other in together for rank in other) == list(mesh.stage_ranks(stage))
    for other in together:
        assert set(concurrent_groups(mesh, other)) == set(together)


def test_transfers_of_a_mesh_that_run_together() -> None:
    mesh = Mesh(pp=2, dp=2, tp=2)
    assert set(concurrent_transfers(mesh, (0, 4))) == {(0, 4), (1, 5), (2, 6), (3, 7)}
    assert set(concurrent_transfers(mesh, (1, 0))) == {(1, 0), (3, 2)}
    assert concurrent_with(mesh, SendRecv(source=5, destination=1, size_bytes=1)) == concurrent_transfers(mesh, (5, 1))


def test_a_group_that_lists_a_rank_twice_is_refused() -> None:
    cluster = made("p3-16xlarge", "ethernet-25g")
    with pytest.raises(GraphError, match=r"lists a rank twice: \(0, 8, 0\)"):
        drawn_seconds(cluster, "all_reduce", (0, 8, 0), 1)
    with pytest.raises(CostError, match=r"a concurrent group lists a rank twice: \(1, 1\)"):
        drawn_seconds(cluster, "all_reduce", (0, 8), 1, ((1, 1),))
    with pytest.raises(CostError, match="a concurrent group names rank 99, but the cluster has ranks 0 to 31"):
        drawn_seconds(cluster, "all_reduce", (0, 8), 1, ((0, 99),))
    with pytest.raises(CostError, match="a concurrent transfer lists a rank twice"):
        estimate_send_recv(SendRecv(source=0, destination=8, size_bytes=1), cluster, ((3, 3),))


# Many transfers at once: the busiest card sets the pace, one transfer alone costs what it always did.

SIZE = 100_000_000


@pytest.fixture(scope="module")
def cards_cluster() -> Cluster:
    return cluster_from_profile(load_profile("p3-16xlarge"), nodes=4, network="ethernet-25g")


def pairs_of(name: str, n: int, t: int = 0) -> list[tuple[int, int]]:
    to, sender = np.nonzero((mixing_graph(name, n)(t) != 0) & ~np.eye(n, dtype=bool))
    return list(zip(sender.tolist(), to.tolist(), strict=True))


@pytest.mark.parametrize("pair", [(0, 1), (0, 5), (0, 8), (7, 31)])
@pytest.mark.parametrize("size", [0, 1000, SIZE])
def test_one_transfer_alone_is_a_send_recv(cards_cluster: Cluster, pair: tuple[int, int], size: int) -> None:
    wanted = estimate_send_recv(SendRecv(source=pair[0], destination=pair[1], size_bytes=size), cards_cluster).median_s
    assert exchange_seconds([pair], size, cards_cluster)[0] == pytest.approx(wanted, rel=1e-12)


def test_a_card_is_shared_by_all_that_leave_its_node(cards_cluster: Cluster) -> None:
    """Offset 1: one GPU of eight sends out of a node; offset 8: all eight do, and take eight times as long."""
    near = exchange_seconds(pairs_of("one_peer_exponential", 32, 0), SIZE, cards_cluster)
    far = exchange_seconds(pairs_of("one_peer_exponential", 32, 3), SIZE, cards_cluster)
    latency = exchange_seconds(pairs_of("one_peer_exponential", 32, 3), 0, cards_cluster).max()
    assert far.max() - latency == pytest.approx(8 * (near.max() - latency), rel=1e-9)
    card = cards_cluster.network
    assert card is not None
    assert far.max() - latency == pytest.approx(8 * SIZE / card.card.bandwidth_bytes_per_s.value, rel=0.01)
    assert np.sort(near)[:28].max() < 0.5 * near.max(), "inside a node NVLink or PCIe carries it"


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 9999), st.integers(1, 30))
def test_more_transfers_never_make_one_faster(cards_cluster: Cluster, seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    drawn = {(int(a), int(b)) for a, b in rng.integers(0, 32, (count, 2)) if a != b} | {(0, 9)}
    pairs = sorted(drawn)
    few = dict(zip(pairs[::2], exchange_seconds(pairs[::2], SIZE, cards_cluster), strict=True))
    all_of_them = dict(zip(pairs, exchange_seconds(pairs, SIZE, cards_cluster), strict=True))
    assert all(all_of_them[pair] >= few[pair] * (1 - 1e-12) for pair in few)


def test_bad_input(cards_cluster: Cluster) -> None:
    with pytest.raises(CostError, match=r"transfer 0 -> 32, but needs two of the cluster's ranks 0 to 31"):
        exchange_seconds([(0, 32)], 1, cards_cluster)
    with pytest.raises(CostError, match="3 -> 3"):
        exchange_seconds([(3, 3)], 1, cards_cluster)
    with pytest.raises(CostError, match="pair of ranks twice"):
        exchange_seconds([(0, 1), (0, 1)], 1, cards_cluster)
    with pytest.raises(CostError, match="size_bytes >= 0"):
        exchange_seconds([(0, 1)], -1, cards_cluster)
