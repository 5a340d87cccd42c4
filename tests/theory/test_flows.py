"""The flows of collectives and transfers: over links that exist, in the proportions and at the pace that their prices use."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from parsim.costs.communication.collectives import estimate_collective, estimate_send_recv
from parsim.engines import dynamic
from parsim.engines.scenario import Flow, conditions_for, flow_of, max_min_rates, parse_scenario
from parsim.errors import CostError, ScenarioError
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.parts import load_network
from parsim.numeric import Floats
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


# Max-min fair rates: closed forms, the properties that define them, and a lexicographic linear programme as the oracle.

INF = np.inf
Instance = tuple[Floats, Floats, Floats]


@pytest.mark.parametrize(
    ("loads", "capacity", "limit", "rates"),
    [
        *((np.ones((1, flows)), [3.0], [INF] * flows, [3.0 / flows] * flows) for flows in (1, 2, 7)),
        (np.ones((1, 3)), [10.0], [1.0, INF, INF], [1.0, 4.5, 4.5]),
        ([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]], [2.0, 10.0], [INF] * 3, [1.0, 1.0, 9.0]),
        (np.concatenate([np.ones((6, 1)), np.eye(6)], axis=1), np.ones(6), [INF] * 7, [0.5] * 7),
        ([[1.0, 0.0], [0.0, 1.0]], [0.0, 5.0], [INF, INF], [0.0, 5.0]),
        (np.zeros((2, 0)), [1.0, 1.0], [], []),
    ],
    ids=[
        "alone",
        "two alike",
        "seven alike",
        "a slow one",
        "a long one over two links",
        "parking lot",
        "a link down",
        "no flows",
    ],
)
def test_closed_forms(loads: Floats, capacity: Floats, limit: Floats, rates: list[float]) -> None:
    """Equal flows share equally; what a slow flow, or a long one over a small link, leaves goes to the others; of n links in a
    row, one flow over all and one per link have 1/2 each; a link that is down stops its flows alone."""
    np.testing.assert_allclose(max_min_rates(loads, capacity, limit), rates, rtol=1e-15)


@st.composite
def instances(draw: st.DrawFn) -> Instance:
    links, flows = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    load = st.sampled_from([0.0, 0.0, 1.0, 1.0, 0.5, 0.25, 0.7, 2.0])
    loads = np.array([[draw(load) for _ in range(flows)] for _ in range(links)])
    capacity = np.array([draw(st.floats(0.125, 100.0)) for _ in range(links)])
    limit = np.array([draw(st.one_of(st.just(200.0), st.floats(0.01, 50.0))) for _ in range(flows)])
    return loads, capacity, limit


@given(instances())
def test_no_link_is_over_its_capacity_and_every_flow_has_its_bottleneck(instance: Instance) -> None:
    """The bottleneck condition characterises max-min fairness: a full link on which no flow is faster, or the own limit."""
    loads, capacity, limit = instance
    rates = max_min_rates(loads, capacity, limit)
    carried = loads @ rates
    assert np.all(carried <= capacity * (1 + 1e-9))
    assert np.all(rates <= limit)
    for flow, rate in enumerate(rates):
        full = (loads[:, flow] > 0) & (carried >= capacity * (1 - 1e-9))
        fastest = [rates[loads[link] > 0].max() <= rate * (1 + 1e-9) for link in np.flatnonzero(full)]
        assert rate == limit[flow] or any(fastest)


@given(instances(), st.integers(-8, 8))
def test_scaling_every_capacity_and_limit_scales_the_rates(instance: Instance, exponent: int) -> None:
    loads, capacity, limit = instance
    scale = 2.0**exponent
    rates = max_min_rates(loads, capacity, limit)
    np.testing.assert_array_equal(max_min_rates(loads, capacity * scale, limit * scale), rates * scale)


@given(instances(), st.randoms(use_true_random=False))
def test_the_order_of_links_and_flows_does_not_matter(instance: Instance, random: object) -> None:
    loads, capacity, limit = instance
    links, flows = list(range(len(capacity))), list(range(len(limit)))
    random.shuffle(links)  # type: ignore[attr-defined]
    random.shuffle(flows)  # type: ignore[attr-defined]
    shuffled = max_min_rates(loads[np.ix_(links, flows)], capacity[links], limit[flows])
    np.testing.assert_allclose(shuffled, max_min_rates(loads, capacity, limit)[flows], rtol=1e-9)


def lexicographic(loads: Floats, capacity: Floats, limit: Floats) -> Floats:
    """Maximise the least rate, fix the flows that can rise no further, go on with the rest, by linear programmes."""
    flows = len(limit)
    fixed: dict[int, float] = {}
    while len(fixed) < flows:
        free = [flow for flow in range(flows) if flow not in fixed]
        bounds = [(fixed.get(flow, 0.0), fixed.get(flow, limit[flow])) for flow in range(flows)]
        at_least = [[-float(other == flow) for other in range(flows)] + [1.0] for flow in free]
        rows = np.vstack([np.hstack([loads, np.zeros((len(loads), 1))]), at_least])
        room = np.concatenate([capacity, np.zeros(len(free))])
        found = linprog([0.0] * flows + [-1.0], A_ub=rows, b_ub=room, bounds=[*bounds, (0, None)])
        assert found.status == 0, found.message
        least = float(found.x[-1])
        for flow in free:
            lower = [(fixed.get(other, least * (1 - 1e-9)), fixed.get(other, limit[other])) for other in range(flows)]
            aim = [-float(other == flow) for other in range(flows)]
            best = linprog(aim, A_ub=loads, b_ub=capacity * (1 + 1e-12), bounds=lower)
            assert best.status == 0, best.message
            if -best.fun <= least * (1 + 1e-6):
                fixed[flow] = least
    return np.array([fixed[flow] for flow in range(flows)])


@pytest.mark.parametrize("seed", range(60))
def test_equals_the_lexicographic_linear_programme(seed: int) -> None:
    random = np.random.default_rng(seed)
    links, flows = int(random.integers(1, 5)), int(random.integers(1, 6))
    loads = random.choice([0.0, 1.0, 0.5, 0.3], size=(links, flows))
    capacity, limit = random.uniform(0.5, 10.0, links), random.uniform(0.2, 12.0, flows)
    np.testing.assert_allclose(max_min_rates(loads, capacity, limit), lexicographic(loads, capacity, limit), rtol=1e-5)


@pytest.mark.parametrize(
    ("loads", "capacity", "limit", "message"),
    [
        ([[1.0]], [1.0, 2.0], [1.0], "shape"),
        ([[-1.0]], [1.0], [1.0], "loads must be >= 0, got -1"),
        ([[1.0]], [float("nan")], [1.0], "capacity must be >= 0, got nan"),
        ([[INF]], [1.0], [1.0], "finite"),
        ([[0.0]], [1.0], [INF], "nothing limits flow 0"),
    ],
)
def test_bad_input(loads: list[list[float]], capacity: list[float], limit: list[float], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        max_min_rates(loads, capacity, limit)
