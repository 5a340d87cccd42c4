"""The flows of collectives and transfers: over links that exist, in the proportions and at the pace that their prices use."""

from __future__ import annotations

import pytest

from parsim.costs.communication.collectives import estimate_collective, estimate_send_recv
from parsim.engines import dynamic
from parsim.engines.scenario import Flow, conditions_for, flow_of, parse_scenario
from parsim.errors import CostError, ScenarioError
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.parts import load_network
from parsim.program.columns import columns_of
from parsim.program.taskgraph import from_text
from parsim.work import COLLECTIVES, Collective, SendRecv

LEAVES = load_network("infiniband-100g").fabric.nodes_per_leaf
SMALL = cluster_from_profile(load_profile("dgx1-v100-32gb"), 8)
PCIE = cluster_from_profile(load_profile("pcie-8xv100"), 8)
SWITCHED = cluster_from_profile(load_profile("dgx2-v100"), 16)
MANY = cluster_from_profile(load_profile("dgx1-v100-32gb"), nodes=LEAVES + 2, network="infiniband-100g")
AWAY = 8 * LEAVES
"""The first rank under the second leaf."""


def groups(cluster: Cluster) -> list[tuple[int, ...]]:
    near = [(0, 1), (0, 3), (0, 1, 2, 3), tuple(range(8))]
    return near if cluster is not MANY else [*near, (0, 8), (1, 9), tuple(range(16)), (0, AWAY), (0, 1, AWAY, AWAY + 1)]


def flows(cluster: Cluster) -> list[tuple[Collective | SendRecv, Flow]]:
    works: list[Collective | SendRecv] = [
        Collective(operation=operation, group=group, size_bytes=1 << 26)
        for operation in COLLECTIVES
        for group in groups(cluster)
    ]
    works += [SendRecv(source=group[0], destination=group[-1], size_bytes=1 << 26) for group in groups(cluster)]
    found = [(work, flow_of(work, cluster)) for work in works]
    assert all(flow is not None for _, flow in found)
    return [(work, flow) for work, flow in found if flow is not None]


@pytest.mark.parametrize("cluster", [SMALL, PCIE, SWITCHED, MANY], ids=lambda cluster: cluster.name)
def test_flows_go_over_links_of_the_topology(cluster: Cluster) -> None:
    for work, flow in flows(cluster):
        for lane, share in flow.loads.items():
            assert cluster.topology.between(lane.source, lane.target), f"{work}: no link {lane}"
            assert 0 < share <= 1
        assert max(flow.loads.values()) == 1
        for lane, room in flow.room.items():
            links = cluster.topology.between(lane.source, lane.target)
            assert room <= sum(link.capacity_bytes_per_s for link in links) * (1 + 1e-12)


@pytest.mark.parametrize("cluster", [SMALL, PCIE, SWITCHED, MANY], ids=lambda cluster: cluster.name)
def test_transfer_seconds_lie_within_the_price_and_grow_with_the_bytes(cluster: Cluster) -> None:
    for work, flow in flows(cluster):
        price = estimate_collective(work, cluster) if isinstance(work, Collective) else estimate_send_recv(work, cluster)
        assert 0.5 * price.median_s < flow.transfer_s <= price.median_s, f"{work}: 64 MiB are mostly bytes"
    tiny = flow_of(SendRecv(source=0, destination=1, size_bytes=8), cluster)
    assert tiny is not None
    assert tiny.transfer_s < 0.01 * estimate_send_recv(SendRecv(source=0, destination=1, size_bytes=8), cluster).median_s


def test_nothing_moves_between_one_rank_and_itself() -> None:
    assert flow_of(Collective(operation="all_reduce", group=(3,), size_bytes=8), SMALL) is None


def test_a_path_under_one_root_complex_is_shared() -> None:
    """PCIe: two transfers between the sockets meet on the link between them; two within different switches do not."""
    across = [flow_of(SendRecv(source=a, destination=b, size_bytes=1 << 20), PCIE) for a, b in ((0, 4), (1, 5))]
    inside = [flow_of(SendRecv(source=a, destination=b, size_bytes=1 << 20), PCIE) for a, b in ((0, 1), (4, 5))]
    shared = [set(pair[0].loads) & set(pair[1].loads) for pair in (across, inside) if pair[0] and pair[1]]
    assert shared[0]
    assert not shared[1]


def test_a_card_that_fades_slows_what_goes_through_it() -> None:
    """A scenario names the links of a cluster as its topology does: a card of node 0 and its leaf."""
    text = "world_size 16\n0 r0.pp>8 r8.pp<0 | send_recv 67108864 B 0>8 | - | stage=0\n"
    text += "1 r7.pp>15 r15.pp<7 | send_recv 67108864 B 7>15 | - | stage=0\n"
    graph = from_text(text)
    durations = [estimate_send_recv(task.work, MANY).median_s for task in graph.tasks]  # type: ignore[arg-type]
    flow = flow_of(graph.tasks[0].work, MANY)  # type: ignore[arg-type]
    assert flow is not None
    card = next(lane for lane in flow.loads if lane.target == "leaf0")
    scenario = parse_scenario(f'[[links]]\nbetween = ["{card.source}", "leaf0"]\nbandwidth_factor = 0.25\n')
    got = dynamic.simulate(graph, durations, conditions=conditions_for(scenario, columns_of(graph), MANY))
    ends = dict(zip(got.task.tolist(), got.end_s.tolist(), strict=True))
    slower = flow.full_pace / (0.25 * flow.room[card])
    assert slower > 2, "a quarter of the card is less than any other link on the way"
    assert ends[0] == pytest.approx(durations[0] + (slower - 1) * flow.transfer_s, rel=1e-9)
    assert ends[1] == durations[1]


def test_uplinks_are_shared_by_all_that_cross_them() -> None:
    """Transfers of different nodes and cards meet on the uplinks of their leaf and nowhere else."""
    pair = [flow_of(SendRecv(source=a, destination=AWAY + a, size_bytes=1 << 20), MANY) for a in (0, 8)]
    assert pair[0] is not None
    assert pair[1] is not None
    common = set(pair[0].loads) & set(pair[1].loads)
    assert {(lane.source, lane.target) for lane in common} == {("leaf0", "spine0"), ("spine0", "leaf1")}


def test_a_profile_without_links_is_told() -> None:
    profile = load_profile("dgx1-v100-32gb")
    without = profile.model_copy(update={"communication": profile.communication.model_copy(update={"link_model": None})})
    cluster = cluster_from_profile(without, 2)
    graph = from_text("world_size 2\n0 r0.dp r1.dp | all_reduce 8 B over 0,1 | - | stage=0\n")
    with pytest.raises(ScenarioError, match=r"knows no links, so none can change or be shared\. Drop links and share_links"):
        conditions_for(parse_scenario("share_links = true"), columns_of(graph), cluster)
    with pytest.raises(CostError, match="has no link model"):
        flow_of(Collective(operation="all_reduce", group=(0, 1), size_bytes=8), cluster)
