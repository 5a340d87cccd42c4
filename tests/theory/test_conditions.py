"""The dynamic engine under a scenario: nothing changes where nothing happens, closed forms where something does."""

from __future__ import annotations

import itertools
from random import Random

import numpy as np
import pytest
from hypothesis import given
from strategies import random_durations_s, random_graph, timed_graphs

from parsim.costs.communication.collectives import estimate_collective, estimate_send_recv
from parsim.costs.estimate import OverlapFactors
from parsim.engines import dynamic, static
from parsim.engines.scenario import (
    Conditions,
    Jitter,
    Lane,
    LinkChange,
    Scenario,
    Straggler,
    conditions_for,
    flow_of,
    jittered_s,
    parse_scenario,
)
from parsim.errors import ScenarioError
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.program.columns import columns_of
from parsim.program.taskgraph import Origin, Resource, Task, TaskGraph, from_text
from parsim.timeline import Timeline
from parsim.work import Collective, SendRecv, Work, is_communication

DGX = cluster_from_profile(load_profile("dgx1-v100-32gb"), 8)
PAIR = cluster_from_profile(load_profile("dgx1-v100-32gb"), nodes=2, network="infiniband-100g")
OVERLAP = OverlapFactors(compute=1.5, communication=1.25)


def alone_s(work: Work, random: Random) -> float:
    """Seconds of communication as the machine prices it; of other work, some at random."""
    if isinstance(work, Collective):
        return estimate_collective(work, DGX).median_s
    return estimate_send_recv(work, DGX).median_s if isinstance(work, SendRecv) else random.uniform(0, 1e-4)


def assert_same(first: Timeline, second: Timeline) -> None:
    for column in ("task", "resource", "start_s", "end_s"):
        np.testing.assert_array_equal(getattr(first, column), getattr(second, column), err_msg=column)


@given(timed_graphs(most_ranks=6))
def test_an_empty_scenario_gives_the_static_timeline(timed: tuple[TaskGraph, list[float]]) -> None:
    graph, durations = timed
    conditions = conditions_for(parse_scenario(""), columns_of(graph), DGX)
    assert_same(static.simulate(graph, durations), dynamic.simulate(graph, durations, conditions=conditions))


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [None, OVERLAP])
def test_conditions_that_touch_nothing_give_the_static_timeline(overlap: OverlapFactors | None) -> None:
    """Every task runs through the paces, and none is changed: a straggler of another time, and links that nobody shares."""
    later = Conditions(scenario=Scenario(stragglers=(Straggler(rank=0, factor=3.0, from_s=1e9),), share_links=True))
    for seed in range(1000):
        random = Random(seed)
        graph = random_graph(random)
        durations = random_durations_s(random, len(graph.tasks), on_grid=seed % 2 == 0)
        wanted = static.simulate(graph, durations, overlap=overlap)
        assert_same(wanted, dynamic.simulate(graph, durations, overlap=overlap, conditions=later))


@pytest.mark.slow
def test_where_no_two_flows_meet_on_a_link_the_timeline_is_the_static_one() -> None:
    """Random programs with the prices and flows of a real machine: bitwise where no lane has two flows at once, and never
    shorter where one has."""
    apart = shared = 0
    for seed in range(400):
        random = Random(seed)
        graph = random_graph(random, most_ranks=6)
        durations = [alone_s(task.work, random) for task in graph.tasks]
        wanted = static.simulate(graph, durations)
        got = dynamic.simulate(graph, durations, conditions=conditions_for(Scenario(share_links=True), columns_of(graph), DGX))
        if meet(graph, wanted):
            shared += 1
            assert np.all(got.end_s >= wanted.end_s * (1 - 1e-12)), f"seed {seed}"
        else:
            apart += 1
            assert_same(wanted, got)
    assert apart > 100
    assert shared > 40


def meet(graph: TaskGraph, timeline: Timeline) -> bool:
    """Whether two flows of the timeline use one lane at the same time."""
    spans: dict[Lane, dict[int, tuple[float, float]]] = {}
    for span in timeline:
        work = graph.tasks[span.task].work
        flow = flow_of(work, DGX) if isinstance(work, Collective | SendRecv) else None
        for lane in () if flow is None else flow.loads:
            spans.setdefault(lane, {})[span.task] = (span.start_s, span.end_s)
    return any(later[0] < earlier[1] for used in spans.values() for earlier, later in itertools.pairwise(sorted(used.values())))


def chain_of_transfers(pairs: list[tuple[int, int]], size_bytes: int) -> TaskGraph:
    """Transfers one after the other on one cluster: no two at once."""
    tasks = tuple(
        Task(
            index=index,
            work=SendRecv(source=a, destination=b, size_bytes=size_bytes),
            resources=(Resource(a, f"pp>{b}"), Resource(b, f"pp<{a}")),
            dependencies=(index - 1,) if index else (),
            origin=Origin(stage=0),
        )
        for index, (a, b) in enumerate(pairs)
    )
    return TaskGraph(tasks=tasks, world_size=16)


def test_links_used_one_after_the_other_are_not_shared() -> None:
    graph = chain_of_transfers([(0, 8), (1, 9), (0, 8), (3, 0)], 1 << 24)
    durations = [estimate_send_recv(task.work, PAIR).median_s for task in graph.tasks]  # type: ignore[arg-type]
    conditions = conditions_for(Scenario(share_links=True), columns_of(graph), PAIR)
    assert conditions is not None
    assert len(conditions.flows) == 3
    assert_same(static.simulate(graph, durations), dynamic.simulate(graph, durations, conditions=conditions))


def at_once(works: list[SendRecv | Collective], world_size: int) -> TaskGraph:
    """Each on streams of its own, so nothing but links joins them."""
    tasks = tuple(
        Task(
            index=index,
            work=work,
            resources=tuple(
                Resource(rank, f"s{index}") for rank in (work.group if isinstance(work, Collective) else (work.source,))
            ),
            dependencies=(),
            origin=Origin(stage=0),
        )
        for index, work in enumerate(works)
    )
    return TaskGraph(tasks=tasks, world_size=world_size)


@pytest.mark.parametrize("size_bytes", [1 << 16, 1 << 22, 1 << 28])
def test_two_transfers_through_one_card_take_twice_their_bytes(size_bytes: int) -> None:
    """GPUs 0 and 1 of a DGX-1 share a card: latency + 2 transfer, as the prices say of concurrent transfers."""
    works = [SendRecv(source=rank, destination=rank + 8, size_bytes=size_bytes) for rank in (0, 1)]
    durations = [estimate_send_recv(work, PAIR).median_s for work in works]
    graph = at_once(list(works), 16)
    conditions = conditions_for(Scenario(share_links=True), columns_of(graph), PAIR)
    both = estimate_send_recv(works[0], PAIR, ((0, 8), (1, 9))).median_s
    assert both > durations[0]
    got = dynamic.simulate(graph, durations, conditions=conditions)
    np.testing.assert_allclose(got.end_s, both, rtol=1e-9)


def test_replicas_of_a_mesh_slow_one_another_as_their_price_says() -> None:
    """Eight data-parallel groups over two nodes, one per GPU, four cards: the ring's bytes take as much longer as one card's
    load grows. The price of concurrent groups may change algorithm; here it is held against the same one."""
    groups = [(rank, rank + 8) for rank in range(8)]
    works: list[SendRecv | Collective] = [
        Collective(operation="all_gather", group=group, size_bytes=1 << 28) for group in groups
    ]
    durations = [estimate_collective(work, PAIR).median_s for work in works]  # type: ignore[arg-type]
    graph = at_once(works, 16)
    conditions = conditions_for(Scenario(share_links=True), columns_of(graph), PAIR)
    got = dynamic.simulate(graph, durations, conditions=conditions)
    wanted = estimate_collective(works[0], PAIR, tuple(groups)).median_s  # type: ignore[arg-type]
    np.testing.assert_allclose(got.end_s, wanted, rtol=1e-3)
    assert wanted > 1.5 * durations[0]


def test_the_first_to_end_leaves_its_share_to_the_other() -> None:
    """Two transfers on one card, one of twice the bytes: the short one takes twice as long, then the long one is alone."""
    works: list[SendRecv | Collective] = [
        SendRecv(source=0, destination=8, size_bytes=1 << 28),
        SendRecv(source=1, destination=9, size_bytes=1 << 29),
    ]
    durations = np.array([estimate_send_recv(work, PAIR).median_s for work in works])  # type: ignore[arg-type]
    parts = [flow_of(work, PAIR) for work in works]
    moved = np.array([part.transfer_s for part in parts if part is not None])
    graph = at_once(works, 16)
    got = dynamic.simulate(graph, durations, conditions=conditions_for(Scenario(share_links=True), columns_of(graph), PAIR))
    latency = durations - moved
    np.testing.assert_allclose(got.end_s, [latency[0] + 2 * moved[0], latency[1] + moved[0] + moved[1]], rtol=1e-6)


def test_bytes_are_conserved_on_a_shared_lane() -> None:
    """However three transfers overlap on a card, it moves all their bytes at its full rate and no faster."""
    sizes = [1 << 26, 3 << 25, 1 << 28]
    works: list[SendRecv | Collective] = [
        SendRecv(source=rank, destination=rank + 8, size_bytes=size) for rank, size in zip((0, 1, 0), sizes, strict=True)
    ]
    flows = [flow_of(work, PAIR) for work in works]
    assert all(flow is not None for flow in flows)
    durations = [estimate_send_recv(work, PAIR).median_s for work in works]  # type: ignore[arg-type]
    graph = at_once(works, 16)
    got = dynamic.simulate(graph, durations, conditions=conditions_for(Scenario(share_links=True), columns_of(graph), PAIR))
    latency = min(seconds - flow.transfer_s for seconds, flow in zip(durations, flows, strict=True) if flow is not None)
    assert got.makespan_s == pytest.approx(latency + sum(flow.transfer_s for flow in flows if flow is not None), rel=1e-6)


def transfer_on(cluster: Cluster, size_bytes: int) -> tuple[TaskGraph, float, float]:
    work = SendRecv(source=0, destination=3, size_bytes=size_bytes)
    flow = flow_of(work, cluster)
    assert flow is not None
    return at_once([work], 8), estimate_send_recv(work, cluster).median_s, flow.transfer_s


def test_half_a_link_doubles_the_bytes_and_not_the_latency() -> None:
    """And another link changes nothing."""
    graph, alone, moved = transfer_on(DGX, 1 << 20)
    for factor in (0.5, 0.1, 2.0):
        change = LinkChange(between=("gpu3", "gpu0"), bandwidth_factor=factor)
        got = dynamic.simulate(graph, [alone], conditions=conditions_for(Scenario(links=(change,)), columns_of(graph), DGX))
        assert got.makespan_s == pytest.approx(alone - moved + moved / factor, rel=1e-9)
    change = LinkChange(between=("gpu1", "gpu2"), bandwidth_factor=0.01)
    got = dynamic.simulate(graph, [alone], conditions=conditions_for(Scenario(links=(change,)), columns_of(graph), DGX))
    assert got.makespan_s == alone


def test_a_link_that_is_down_for_a_while_delays_by_that_while() -> None:
    graph, alone, moved = transfer_on(DGX, 1 << 28)
    down = LinkChange(between=("gpu0", "gpu3"), bandwidth_factor=0.0, from_s=alone - moved / 2, until_s=7.0)
    got = dynamic.simulate(graph, [alone], conditions=conditions_for(Scenario(links=(down,)), columns_of(graph), DGX))
    assert got.makespan_s == pytest.approx(7.0 + moved / 2, rel=1e-9)
    for_good = Scenario(links=(LinkChange(between=("gpu0", "gpu3"), bandwidth_factor=0.0),))
    with pytest.raises(ScenarioError, match=r"never ends: bandwidth_factor = 0 on gpu0-gpu3"):
        dynamic.simulate(graph, [alone], conditions=conditions_for(for_good, columns_of(graph), DGX))


TWO_RANKS = from_text(
    "world_size 2\n0 r0.compute | forward a x1 | - | stage=0\n1 r1.compute | forward a x1 | - | stage=0\n"
    "2 r0.dp r1.dp | all_reduce 8 B over 0,1 | 0,1 | stage=0\n"
)


@pytest.mark.parametrize(
    ("from_s", "until_s", "wanted"), [(0.0, None, 5.0), (2.0, None, 3.0), (1.0, 1.5, 2.25 + 1), (0.5, 2.5, 4.0)]
)
def test_a_straggler_is_waited_for(from_s: float, until_s: float | None, wanted: float) -> None:
    """2 s of computation on each rank, rank 1 twice as slow in a spell: of the spell's seconds half are lost."""
    spell = Straggler(rank=1, factor=2.0, from_s=from_s, until_s=until_s)
    conditions = conditions_for(Scenario(stragglers=(spell,)), columns_of(TWO_RANKS), DGX)
    got = dynamic.simulate(TWO_RANKS, [2.0, 2.0, 1.0], conditions=conditions)
    assert got.makespan_s == wanted
    assert got.end_s[0] == 2.0, "the other rank is not slowed"


def test_a_step_that_begins_later_meets_the_later_conditions() -> None:
    scenario = Scenario(stragglers=(Straggler(rank=1, factor=2.0, from_s=3600.0),))
    for start_s, wanted in ((0.0, 3.0), (3600.0, 5.0), (3599.0, 4.0)):
        conditions = conditions_for(scenario.model_copy(update={"start_s": start_s}), columns_of(TWO_RANKS), DGX)
        assert dynamic.simulate(TWO_RANKS, [2.0, 2.0, 1.0], conditions=conditions).makespan_s == wanted


def test_stragglers_for_good_are_longer_durations() -> None:
    """Bitwise: a computation or a load takes the factor of the slowest rank it runs on, communication what it took."""
    factors = (1.0, 1.5, 2.0, 1.25, 3.0, 1.0)
    stragglers = tuple(Straggler(rank=rank, factor=factor) for rank, factor in enumerate(factors))
    conditions = Conditions(scenario=Scenario(stragglers=stragglers))
    for seed in range(200):
        random = Random(seed)
        graph = random_graph(random, most_ranks=6)
        durations = random_durations_s(random, len(graph.tasks), on_grid=seed % 2 == 0)
        longer = [
            seconds if is_communication(task.work) else seconds * max(factors[rank] for rank in task.ranks)
            for task, seconds in zip(graph.tasks, durations, strict=True)
        ]
        assert_same(static.simulate(graph, longer), dynamic.simulate(graph, durations, conditions=conditions))


@pytest.mark.parametrize("factor", [0.5, 0.125, 4.0])
def test_slow_links_for_good_are_longer_transfers(factor: float) -> None:
    """Latency as it was, bytes over the factor, on random graphs with durations as the cluster prices them."""
    slowed = 0
    for seed in range(60):
        random = Random(seed)
        graph = random_graph(random, most_ranks=6)
        columns = columns_of(graph)
        durations, longer = [], []
        for task in graph.tasks:
            alone = alone_s(task.work, random)
            flow = flow_of(task.work, DGX) if isinstance(task.work, Collective | SendRecv) else None
            moved = 0.0 if flow is None else flow.transfer_s
            durations.append(alone)
            longer.append(alone - moved + moved / factor)
        change = LinkChange(bandwidth_factor=factor)
        conditions = conditions_for(Scenario(links=(change,)), columns, DGX)
        got = dynamic.simulate(graph, durations, conditions=conditions)
        np.testing.assert_allclose(got.end_s, static.simulate(graph, longer).end_s, rtol=1e-9)
        slowed += got.makespan_s != static.simulate(graph, durations).makespan_s
    assert slowed > 20, "too few of the graphs send anything that matters"


@pytest.mark.parametrize("distribution", ["lognormal", "gamma", "uniform"])
def test_jitter_has_mean_one_and_its_own_sigma(distribution: str) -> None:
    jitter = Jitter.model_validate({"distribution": distribution, "compute_sigma": 0.3, "communication_sigma": 0.1})
    columns = columns_of(TWO_RANKS)
    rows = jittered_s(np.array([2.0, 2.0, 1.0]), columns, jitter, np.random.default_rng(0), 40_000)
    np.testing.assert_allclose(rows.mean(axis=0), [2.0, 2.0, 1.0], rtol=0.01)
    np.testing.assert_allclose(rows.std(axis=0) / rows.mean(axis=0), [0.3, 0.3, 0.1], rtol=0.03)
    assert (rows >= 0).all()
    again = jittered_s(np.array([2.0, 2.0, 1.0]), columns, jitter, np.random.default_rng(0), 40_000)
    assert rows.tobytes() == again.tobytes()


def test_nothing_waits_on_a_rank_that_is_no_faster_than_before() -> None:
    """Slower links and slower ranks never shorten a step (the issue order is fixed)."""
    for seed in range(100):
        random = Random(seed)
        graph = random_graph(random, most_ranks=6)
        durations = random_durations_s(random, len(graph.tasks), on_grid=False)
        slow = Conditions(scenario=Scenario(stragglers=tuple(Straggler(rank=rank, factor=1 + rank / 3) for rank in range(6))))
        slower = Conditions(scenario=Scenario(stragglers=tuple(Straggler(rank=rank, factor=1 + rank) for rank in range(6))))
        spans = [dynamic.simulate(graph, durations, conditions=entry).makespan_s for entry in (None, slow, slower)]
        assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(spans))
