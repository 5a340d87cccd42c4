"""What must hold of collectives on any cluster: Hypothesis over shipped machines, networks, groups and sizes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from parsim.costs.communication.collectives import estimate_collective, estimate_send_recv
from parsim.costs.communication.contention import NodeShare, Way, link_loads, part_loads
from parsim.errors import CostError, GraphError
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.parts import Network, load_network, shipped_networks
from parsim.hardware.profile import Sourced
from parsim.plans.mesh import Mesh
from parsim.plans.stages import concurrent_groups, concurrent_transfers, concurrent_with
from parsim.work import Collective, SendRecv

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


def seconds(cluster: Cluster, operation: str, group: tuple[int, ...], size_bytes: int, concurrent: Any = ()) -> float:
    work = Collective(operation=operation, group=group, size_bytes=size_bytes)
    return estimate_collective(work, cluster, concurrent).median_s


@given(questions(), SIZES, SIZES)
@settings(max_examples=150, deadline=None)
def test_time_grows_with_the_size(question: tuple[str, str, str, tuple[int, ...]], a: int, b: int) -> None:
    machine, name, operation, group = question
    small, large = (seconds(made(machine, name), operation, group, size) for size in sorted((a, b)))
    assert 0 < small <= large * (1 + 1e-12)


@given(questions(), SIZES)
@settings(max_examples=150, deadline=None)
def test_worse_networks_are_never_faster(question: tuple[str, str, str, tuple[int, ...]], size: int) -> None:
    machine, name, operation, group = question
    best = seconds(made(machine, name), operation, group, size)
    assert seconds(made(machine, name, oversubscription=4.0), operation, group, size) >= best * (1 - 1e-12)
    assert seconds(made(machine, name, speed=0.5), operation, group, size) >= best * (1 - 1e-12)


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
    assert seconds(cluster, operation, moved, size) == pytest.approx(seconds(cluster, operation, group, size), rel=1e-12)


@given(questions(), SIZES, st.integers(1, 8))
@example(("dgx1-v100-32gb", "efa-100g", "all_reduce", (0, 8)), 1, 8)  # on node 1 the other one is like the group itself
@settings(max_examples=150, deadline=None)
def test_concurrent_groups_never_help(question: tuple[str, str, str, tuple[int, ...]], size: int, shift: int) -> None:
    machine, name, operation, group = question
    cluster = made(machine, name)
    other = tuple((rank + shift) % cluster.size for rank in group)
    alone = seconds(cluster, operation, group, size)
    beside = seconds(cluster, operation, group, size, [group, other])
    assert beside >= alone * (1 - 1e-12)
    assert seconds(cluster, operation, group, size, [other]) == pytest.approx(beside, rel=1e-12)
    assert seconds(cluster, operation, group, size, [group]) == pytest.approx(alone, rel=1e-12)


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
        seconds(cluster, "all_reduce", (0, 8, 0), 1)
    with pytest.raises(CostError, match=r"a concurrent group lists a rank twice: \(1, 1\)"):
        seconds(cluster, "all_reduce", (0, 8), 1, [(1, 1)])
    with pytest.raises(CostError, match="a concurrent group names rank 99, but the cluster has ranks 0 to 31"):
        seconds(cluster, "all_reduce", (0, 8), 1, [(0, 99)])
    with pytest.raises(CostError, match="a concurrent transfer lists a rank twice"):
        estimate_send_recv(SendRecv(source=0, destination=8, size_bytes=1), cluster, [(3, 3)])
