"""Collectives against closed forms, exact oracles and invariants."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from itertools import combinations, pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parsim.costs.communication.algorithms import line_at, protocol_lines
from parsim.costs.communication.closed_forms import busbw_bytes_per_s, overlap_of, regimes_s, ring_steps, ring_traffic
from parsim.costs.communication.collectives import _by_measured, estimate_collective, estimate_send_recv
from parsim.costs.communication.contention import RingSet, hamiltonian_cycles, link_loads, pace, pack_rings, ring_set
from parsim.costs.communication.measured import fit_regimes
from parsim.costs.estimate import Estimate
from parsim.errors import CostError, ProfileError
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.profile import (
    CollectiveFit,
    CollectivePoint,
    LinkModel,
    LinkProtocol,
    Overlap,
    OverlapPoint,
    Regime,
    Sourced,
)
from parsim.hardware.topology import Link, Topology
from parsim.units import GIB, MIB
from parsim.work import COLLECTIVES, Collective, SendRecv

sizes = st.integers(min_value=0, max_value=2**33)


@pytest.fixture(scope="module")
def dgx1() -> Cluster:
    return cluster_from_profile(load_profile("dgx1-v100-32gb"))


def all_reduce(cluster: Cluster, size_bytes: int, group: tuple[int, ...], operation: str = "all_reduce") -> float:
    return estimate_collective(Collective(operation=operation, group=group, size_bytes=size_bytes), cluster).median_s


# --- closed forms -----------------------------------------------------------------------------------------------------


def test_ring_all_reduce_counts_its_steps_by_simulation() -> None:
    """n - 1 steps of reduce-scatter and n - 1 of all-gather, each moving one of n chunks over every hop at once."""
    for n in (1, 2, 3, 5, 8):
        size, alpha, beta = 840.0, 0.25, 0.5
        clock = 0.0
        for _phase in ("reduce_scatter", "all_gather"):
            for _step in range(n - 1):
                clock += alpha + size / n * beta
        seconds = ring_steps("all_reduce", n) * alpha + ring_traffic("all_reduce", n) * size * beta
        assert seconds == pytest.approx(clock, rel=1e-12)
        assert busbw_bytes_per_s("all_reduce", size, n, 1.0) == pytest.approx(size * 2 * (n - 1) / n, rel=1e-12)
    with pytest.raises(CostError, match="group_size must be >= 1, got 0"):
        ring_steps("all_reduce", 0)


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter"])
def test_busbw_factor_of_the_halves_of_all_reduce(operation: str) -> None:
    assert busbw_bytes_per_s(operation, 1e9, 8, 1.0) / 1e9 == pytest.approx(7 / 8, rel=1e-12)


# --- ring packing -----------------------------------------------------------------------------------------------------


def brute_force_rings(lanes: tuple[tuple[int, ...], ...]) -> int:
    """The most edge-disjoint directed Hamiltonian cycles, by trying every multiset of them."""
    n = len(lanes)
    cycles = [(0, *rest) for rest in permutations(range(1, n))]
    arcs = [tuple((cycle[i], cycle[(i + 1) % n]) for i in range(n)) for cycle in cycles]

    @cache
    def most(first: int, free: tuple[tuple[int, ...], ...]) -> int:
        best = 0
        for number in range(first, len(arcs)):
            if all(free[a][b] > 0 for a, b in arcs[number]):
                left = [list(row) for row in free]
                for a, b in arcs[number]:
                    left[a][b] -= 1
                best = max(best, 1 + most(number, tuple(map(tuple, left))))
        return best

    return most(0, lanes)


@st.composite
def lane_matrices(draw: st.DrawFn, most_devices: int = 5, most_lanes: int = 2) -> tuple[tuple[int, ...], ...]:
    n = draw(st.integers(2, most_devices))
    symmetric = draw(st.booleans())
    matrix = [[0 if a == b else draw(st.integers(0, most_lanes)) for b in range(n)] for a in range(n)]
    if symmetric:
        matrix = [[matrix[min(a, b)][max(a, b)] for b in range(n)] for a in range(n)]
    return tuple(map(tuple, matrix))


@settings(max_examples=300)
@given(lanes=lane_matrices())
def test_packing_equals_brute_force_and_uses_no_lane_twice(lanes: tuple[tuple[int, ...], ...]) -> None:
    rings = pack_rings(lanes)
    assert len(rings) == brute_force_rings(lanes)
    used = np.zeros((len(lanes), len(lanes)), dtype=int)
    for ring in rings:
        assert sorted(ring) == list(range(len(lanes)))
        for a, b in zip(ring, (*ring[1:], ring[0]), strict=True):
            used[a, b] += 1
    assert (used <= np.array(lanes)).all()


def test_complete_graphs_hold_a_ring_per_neighbour() -> None:
    """A complete directed graph on n vertices decomposes into n - 1 Hamiltonian cycles except for n = 4 and 6 (Tillson)."""
    for n, expected in ((3, 2), (4, 2), (5, 4), (6, 4), (7, 6), (8, 7)):
        assert len(pack_rings([[int(a != b) for b in range(n)] for a in range(n)])) == expected
    assert len(list(hamiltonian_cycles([[int(a != b) for b in range(6)] for a in range(6)]))) == math.factorial(5)


def test_packing_refuses_more_than_eight_devices() -> None:
    with pytest.raises(CostError, match="2 to 8 devices"):
        pack_rings([[0] * 9 for _ in range(9)])


@pytest.mark.parametrize(
    ("group", "rings"),
    [((0, 1), 1), ((0, 3), 2), ((0, 1, 2), 2), ((0, 1, 2, 3), 4), ((4, 5, 6, 7), 4), ((0, 1, 4, 5), 2), (tuple(range(8)), 6)],
)
def test_rings_of_a_dgx1(dgx1: Cluster, group: tuple[int, ...], rings: int) -> None:
    found = ring_set(dgx1.topology, "nvlink", tuple(f"gpu{index}" for index in group))
    assert (found.count, found.relayed) == (rings, False)


def test_a_group_without_a_ring_is_relayed_over_the_sockets(dgx1: Cluster) -> None:
    found = ring_set(dgx1.topology, "nvlink", ("gpu0", "gpu5"))
    assert (found.relayed, found.kinds) == (True, ("pcie", "smp"))
    smp = dgx1.profile.link_kinds["smp"].bandwidth_bytes_per_s.value
    assert found.seconds_per_byte == pytest.approx(1 / smp, rel=1e-12)


# --- links ------------------------------------------------------------------------------------------------------------


def star(arms: int, rate: float = 1e9) -> Topology:
    return Topology(
        links=tuple(
            Link(a=f"gpu{index}", b="pcie0", kind="pcie", lanes=1, bandwidth_bytes_per_s=rate, latency_s=0.0)
            for index in range(arms)
        )
    )


def test_flows_that_share_a_link_add_up() -> None:
    shared = link_loads(star(3), "nvlink", [("gpu0", "gpu1", 1.0), ("gpu0", "gpu2", 1.0)])
    assert pace(shared, shared) == pytest.approx(2e-9)
    opposite = link_loads(star(3), "nvlink", [("gpu0", "gpu1", 1.0), ("gpu1", "gpu0", 1.0)])
    assert pace(opposite, opposite) == pytest.approx(1e-9), "links are full duplex"


def test_nothing_passes_through_another_device() -> None:
    chain = Topology(
        links=tuple(
            Link(a=f"gpu{i}", b=f"gpu{i + 1}", kind="nvlink", lanes=1, bandwidth_bytes_per_s=1e9, latency_s=0.0)
            for i in range(2)
        )
    )
    assert chain.path("gpu0", "gpu2") == ()
    with pytest.raises(CostError, match="no link or path connects gpu0 and gpu2"):
        link_loads(chain, "nvlink", [("gpu0", "gpu2", 1.0)])


def test_paths_over_the_pcie_tree(dgx1: Cluster) -> None:
    tree = Topology(tuple(link for link in dgx1.topology.links if link.kind != "nvlink"))
    assert [link.kind for link in tree.path("gpu0", "gpu5")] == ["pcie", "pcie", "smp", "pcie", "pcie"]
    assert [link.kind for link in tree.path("gpu0", "gpu1")] == ["pcie", "pcie"]
    assert dgx1.topology.socket_of("gpu3") == "socket0"
    assert dgx1.topology.socket_of("gpu4") == "socket1"


# --- estimates --------------------------------------------------------------------------------------------------------


GROUPS = [(0, 1), (0, 3), (0, 5), (0, 1, 4), (0, 1, 2, 3), (0, 1, 2, 3, 4, 5), tuple(range(8))]


@settings(max_examples=60)
@given(operation=st.sampled_from(COLLECTIVES), group=st.sampled_from(GROUPS), small=sizes, large=sizes)
def test_never_faster_for_more_bytes(dgx1: Cluster, operation: str, group: tuple[int, ...], small: int, large: int) -> None:
    small, large = sorted((small, large))
    first, second = (all_reduce(dgx1, size, group, operation) for size in (small, large))
    assert 0 < first <= second * (1 + 1e-12)


@settings(max_examples=60)
@given(operation=st.sampled_from(COLLECTIVES), size=sizes, group=st.sampled_from(GROUPS), data=st.data())
def test_the_order_of_a_group_does_not_matter(
    dgx1: Cluster, operation: str, size: int, group: tuple[int, ...], data: st.DataObject
) -> None:
    shuffled = tuple(data.draw(st.permutations(group)))
    assert all_reduce(dgx1, size, shuffled, operation) == pytest.approx(all_reduce(dgx1, size, group, operation), rel=1e-12)


@pytest.mark.parametrize("operation", COLLECTIVES)
def test_one_rank_needs_no_communication(dgx1: Cluster, operation: str) -> None:
    assert all_reduce(dgx1, 10**9, (3,), operation) == 0.0


def test_large_arrays_run_at_the_rate_of_the_packed_rings(dgx1: Cluster) -> None:
    lane = dgx1.profile.link_kinds["nvlink"].bandwidth_bytes_per_s.value
    for group, rings in (((0, 1), 1), ((0, 1, 2, 3), 4), (tuple(range(8)), 6)):
        seconds = all_reduce(dgx1, 2**40, group)
        assert busbw_bytes_per_s("all_reduce", 2**40, len(group), seconds) == pytest.approx(rings * lane, rel=1e-3)


def test_what_was_never_measured_is_less_certain(dgx1: Cluster) -> None:
    def spread(operation: str, group: tuple[int, ...], size: int = 2**26) -> float:
        estimate = estimate_collective(Collective(operation=operation, group=group, size_bytes=size), dgx1)
        return sum(sigma for _, sigma in estimate.parameters)

    measured = spread("all_reduce", (0, 1, 2, 3))
    assert spread("all_reduce", (4, 5, 6, 7)) == measured, "as many rings over as many GPUs as the measured group"
    assert measured < spread("all_reduce", (0, 3)) < spread("all_gather", (0, 1, 2, 3)) < spread("all_reduce", (0, 5)) + 0.05
    assert spread("all_reduce", (0, 1, 2, 3), 1024) > measured
    assert estimate_collective(Collective(operation="all_reduce", group=(0, 1), size_bytes=1024), dgx1).extrapolated


def test_transfers_take_the_direct_lanes_or_the_sockets(dgx1: Cluster) -> None:
    def send(source: int, destination: int) -> float:
        return estimate_send_recv(SendRecv(source=source, destination=destination, size_bytes=2**30), dgx1).median_s

    lane = dgx1.profile.link_kinds["nvlink"].bandwidth_bytes_per_s.value
    assert send(0, 1) == pytest.approx(2**30 / lane, rel=1e-3)
    assert send(0, 3) == pytest.approx(2**30 / lane / 2, rel=2e-3)
    assert send(0, 5) == pytest.approx(2**30 / dgx1.profile.link_kinds["smp"].bandwidth_bytes_per_s.value, rel=1e-3)


def test_a_transfer_without_bytes_takes_what_it_takes_to_begin(dgx1: Cluster) -> None:
    model = dgx1.profile.communication.link_model
    assert model is not None
    nothing = estimate_send_recv(SendRecv(source=0, destination=1, size_bytes=0), dgx1).median_s
    assert nothing == model.point_to_point_base_s > 0


# --- choice of the protocol -------------------------------------------------------------------------------------------


def protocol(algorithm: str, name: str, base: float, hop: float, share: float, *, slower: float = 1.0) -> LinkProtocol:
    return LinkProtocol.model_validate(
        {
            "algorithm": algorithm,
            "protocol": name,
            "base_s": base * slower,
            "hop_s": hop * slower,
            "efficiency": share / slower,
            "tuner_base_s": base,
            "tuner_hop_s": hop,
            "tuner_efficiency": share,
            "source": "x",
            "tuner_source": "x",
        }
    )


def model_of(*protocols: LinkProtocol) -> LinkModel:
    return LinkModel(
        link_kind="nvlink",
        protocols=list(protocols),
        tuner_bandwidth_bytes_per_s=Sourced(value=1e9, source="x"),
        point_to_point_base_s=0.0,
        relative_sigma=0.0,
        unmeasured_group_sigma=0.0,
        measured_groups=[],
        min_size_bytes=0,
        max_size_bytes=1,
        source="x",
    )


EIGHT = RingSet(devices=tuple(f"gpu{i}" for i in range(8)), count=2, seconds_per_byte=0.5e-9, relayed=False, kinds=("nvlink",))


def test_the_cheaper_algorithm_is_chosen() -> None:
    """With the tuner's constants equal to the times, the choice is the minimum: trees first, rings from some size on."""
    model = model_of(protocol("ring", "Simple", 1e-5, 2e-6, 1.0), protocol("tree", "Simple", 1e-5, 5e-7, 1.0))
    lines = protocol_lines("all_reduce", EIGHT, model)
    chosen = []
    for size in (0, 10**3, 10**5, 10**6, 10**7, 10**9):
        line, at_bytes, name = line_at(lines, size)
        chosen.append(name.algorithm)
        assert line.seconds_at(at_bytes) == pytest.approx(min(each.seconds_at(size) for each in lines), rel=1e-12)
    assert chosen == ["tree", "tree", "tree", "ring", "ring", "ring"]


def test_trees_are_for_all_reduce_only() -> None:
    model = model_of(protocol("ring", "Simple", 1e-5, 2e-6, 1.0), protocol("tree", "Simple", 0.0, 0.0, 9.0))
    assert {line.protocol.algorithm for line in protocol_lines("all_gather", EIGHT, model)} == {"ring"}
    with pytest.raises(CostError, match="no protocol prices broadcast"):
        protocol_lines("broadcast", EIGHT, model_of(protocol("tree", "Simple", 0.0, 0.0, 9.0)))


@settings(max_examples=300)
@given(data=st.data())
def test_the_choice_follows_the_tuner_and_stays_monotone(data: st.DataObject) -> None:
    number = st.floats(1e-7, 1e-4)
    protocols = [
        protocol(
            "ring",
            str(i),
            data.draw(number),
            data.draw(number),
            data.draw(st.floats(0.05, 1)),
            slower=data.draw(st.floats(0.2, 5)),
        )
        for i in range(data.draw(st.integers(1, 5)))
    ]
    lines = protocol_lines("all_reduce", EIGHT, model_of(*protocols))
    before = 0.0
    for size in (0, 10, 10**3, 10**4, 10**5, 3 * 10**5, 10**6, 10**7, 10**8, 10**10):
        line, at_bytes, chosen = line_at(lines, size)
        seconds = line.seconds_at(at_bytes)
        tuner = {line.protocol.protocol: line.tuner_latency_s + line.tuner_seconds_per_byte * size for line in lines}
        assert tuner[chosen.protocol] == pytest.approx(min(tuner.values()), rel=1e-9)
        line = next(line for line in lines if line.protocol is chosen)
        assert seconds <= (line.latency_s + line.seconds_per_byte * size) * (1 + 1e-12)
        assert seconds >= before * (1 - 1e-12)
        before = seconds


# --- fits of measured collectives -------------------------------------------------------------------------------------


def points_of(line: list[Regime], all_sizes: list[int], noise: float = 0.0) -> list[CollectivePoint]:
    rng = np.random.default_rng(0)
    return [
        CollectivePoint(
            operation="all_reduce",
            group=[0, 1],
            size_bytes=size,
            seconds=regimes_s(line, size) * float(np.exp(noise * rng.standard_normal())),
            spread=0.1,
            source="x",
        )
        for size in all_sizes
    ]


SIZES = [4, 1024, 4096, 16384, 65536, 2**18, 2**20, 2**21, 2**22, 2**23, 2**24, 2**25]
LINE = [
    Regime(max_size_bytes=65536, latency_s=2e-4, seconds_per_byte=2e-9),
    Regime(max_size_bytes=2**22, latency_s=5e-4, seconds_per_byte=1e-9),
    Regime(max_size_bytes=None, latency_s=1e-3, seconds_per_byte=1.4e-9),
]


def test_a_fit_finds_the_line_its_points_lie_on() -> None:
    (fit,) = fit_regimes(points_of(LINE, SIZES))
    for size in (*SIZES, 3 * 2**20, 2**26):
        assert regimes_s(fit.regimes, size) == pytest.approx(regimes_s(LINE, size), rel=0.02)
    assert (fit.operation, fit.group_size, fit.min_size_bytes, fit.max_size_bytes) == ("all_reduce", 2, 4, 2**25)
    assert fit.repeat_sigma == 0.1


def test_one_straight_line_needs_one_regime() -> None:
    straight = [Regime(max_size_bytes=None, latency_s=1e-4, seconds_per_byte=1e-9)]
    (fit,) = fit_regimes(points_of(straight, SIZES))
    assert len(fit.regimes) == 1
    assert fit.regimes[0].latency_s == pytest.approx(1e-4, rel=1e-4)
    assert fit.regimes[0].seconds_per_byte == pytest.approx(1e-9, rel=1e-4)


def test_a_fit_ignores_an_outlier_and_knows_its_spread() -> None:
    straight = [Regime(max_size_bytes=None, latency_s=1e-4, seconds_per_byte=1e-9)]
    points = points_of(straight, SIZES, noise=0.05)
    points[6] = points[6].model_copy(update={"seconds": points[6].seconds * 5})
    (fit,) = fit_regimes(points)
    for size in SIZES:
        assert regimes_s(fit.regimes, size) == pytest.approx(regimes_s(straight, size), rel=0.25)
    assert 0.01 <= fit.relative_sigma <= 0.15


@settings(max_examples=15)
@given(seconds=st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=9))
def test_any_fit_is_monotone_in_the_size(seconds: list[float]) -> None:
    points = [
        CollectivePoint(operation="all_gather", group=[0, 1, 2], size_bytes=4**number, seconds=value, source="x")
        for number, value in enumerate(seconds)
    ]
    (fit,) = fit_regimes(points)
    sizes = {*range(0, 2000, 7), *(4**k + d for k in range(12) for d in (-1, 0, 1))}
    curve = [regimes_s(fit.regimes, size) for size in sorted(sizes)]
    assert all(earlier <= later for earlier, later in pairwise(curve))
    assert fit.regimes == sorted(fit.regimes, key=lambda regime: regime.max_size_bytes or math.inf)


def test_fits_are_per_operation_and_group_size() -> None:
    points = points_of(LINE, SIZES)
    other = [point.model_copy(update={"group": [0, 1, 2, 3], "seconds": 2 * point.seconds}) for point in points]
    foreign = [point.model_copy(update={"group": [0, 1, 2], "measured_on": "another box"}) for point in points]
    sends = [point.model_copy(update={"operation": "send_recv", "group": [1, 0]}) for point in points]
    fits = fit_regimes([*points, *other, *foreign, *sends])
    assert [(fit.operation, fit.group_size) for fit in fits] == [("all_reduce", 2), ("all_reduce", 4), ("send_recv", 2)]
    assert regimes_s(fits[1].regimes, 2**20) == pytest.approx(2 * regimes_s(fits[0].regimes, 2**20), rel=1e-4)


def test_a_size_at_the_end_of_a_line_is_on_that_line_and_never_below_it() -> None:
    """The next line begins behind it, where it may jump up; where it would fall, the end of the line before counts."""
    jumps = [Regime(max_size_bytes=100, latency_s=1.0, seconds_per_byte=0.01)]
    for latency_s, behind_s in ((5.0, 6.01), (0.0, 2.0)):
        lines = [*jumps, Regime(max_size_bytes=None, latency_s=latency_s, seconds_per_byte=0.01)]
        assert regimes_s(lines, 100) == pytest.approx(2.0)
        assert regimes_s(lines, 101) == pytest.approx(behind_s)


def test_contention_on_measured_lines_is_a_term_of_its_own() -> None:
    """Bytes take 1.5 times as long beside another group; the latency stays."""
    line = Regime(max_size_bytes=None, latency_s=1.0, seconds_per_byte=0.01)
    fit = CollectiveFit(
        operation="all_reduce",
        group_size=2,
        algorithm="ring",
        regimes=[line],
        relative_sigma=0.0,
        min_size_bytes=0,
        max_size_bytes=1000,
        source="x",
    )
    shared = {term.name: term.value for term in _by_measured(fit, 1.5, 100, 2).terms}
    assert shared == pytest.approx({"bytes": 1.0, "contention": 0.5, "latency": 1.0})
    assert "contention" not in [term.name for term in _by_measured(fit, 1.0, 100, 1).terms]


def test_one_size_is_not_enough() -> None:
    with pytest.raises(ProfileError, match="measured at 1 size"):
        fit_regimes(points_of(LINE, [1024, 1024]))


# All 247 subsets of two or more GPUs of the cube mesh: what any all_reduce over them must obey, measured or not.

GPUS = range(8)
SUBSETS = [group for size in range(2, 9) for group in combinations(GPUS, size)]


@cache
def cluster() -> Cluster:
    return cluster_from_profile(load_profile("dgx1-v100-32gb"))


@cache
def lanes() -> tuple[tuple[int, ...], ...]:
    topology = cluster().topology
    return tuple(tuple(topology.lanes(f"gpu{a}", f"gpu{b}", "nvlink") if a != b else 0 for b in GPUS) for a in GPUS)


@cache
def price(group: tuple[int, ...], size_bytes: int) -> Estimate:
    return estimate_collective(Collective(operation="all_reduce", group=group, size_bytes=size_bytes), cluster())


def inside(group: tuple[int, ...]) -> list[list[int]]:
    return [[lanes()[a][b] for b in group] for a in group]


def automorphisms() -> Iterator[tuple[int, ...]]:
    """Renumberings of the eight GPUs that keep the number of lanes of every pair."""
    for image in permutations(GPUS):
        if all(lanes()[a][b] == lanes()[image[a]][image[b]] for a in GPUS for b in range(a)):
            yield image


@pytest.mark.slow
@pytest.mark.parametrize("size_bytes", [MIB, GIB])
def test_subsets_that_are_alike_on_the_links_cost_the_same(size_bytes: int) -> None:
    """Where rings of NVLinks exist; a relay also depends on the PCIe switches, which the symmetries of the cube do not keep."""
    for image in automorphisms():
        for group in SUBSETS:
            if "relayed" not in price(group, size_bytes).detail:
                renumbered = tuple(sorted(image[gpu] for gpu in group))
                assert price(renumbered, size_bytes).median_s == price(group, size_bytes).median_s, (group, renumbered)


def test_no_subset_is_faster_than_its_links() -> None:
    """Bus bandwidth is at most the lanes of the device that has the fewest of them inside the group, times a lane's rate."""
    rate = cluster().profile.link_kinds["nvlink"].bandwidth_bytes_per_s.value
    for group in SUBSETS:
        fewest = min(sum(row) for row in inside(group))
        found = busbw_bytes_per_s("all_reduce", GIB, len(group), price(group, GIB).median_s)
        if "relayed" not in price(group, GIB).detail:
            assert found <= fewest * rate * (1 + 1e-9), group
        else:
            assert found <= cluster().profile.link_kinds["pcie"].bandwidth_bytes_per_s.value, group


def test_a_group_without_a_ring_relays_and_says_so() -> None:
    """A ring exists where there is a Hamiltonian cycle of NVLinks (an exhaustive search is the oracle); else PCIe is named,
    and the uncertainty is wider."""
    ringless = 0
    for group in SUBSETS:
        estimate = price(group, GIB)
        has_ring = any(hamiltonian_cycles(inside(group)))
        ringless += not has_ring
        assert ("relayed over" in estimate.detail) == (not has_ring), group
        assert ("communication:relay" in dict(estimate.parameters)) == (not has_ring), group
    assert 0 < ringless < len(SUBSETS)


def point(operation: str, size_bytes: int, compute: float, communication: float) -> OverlapPoint:
    return OverlapPoint(
        operation=operation,
        group_size=2,
        size_bytes=size_bytes,
        compute_factor=compute,
        communication_factor=communication,
        repeats=5,
        source="x",
    )


MEASURED = Overlap(
    compute_factor=2.0,
    communication_factor=3.0,
    points=[point("all_reduce", 100, 1.2, 4.0), point("all_reduce", 10_000, 2.2, 2.0), point("all_gather", 100, 1.1, 1.0)],
    source="x",
)


def reduce(size_bytes: int, operation: str = "all_reduce") -> Collective:
    return Collective(operation=operation, group=(0, 1), size_bytes=size_bytes)


@given(st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=200))
def test_no_slowdown_stays_none(seconds: list[float]) -> None:
    """A mean of ones can round to less than one, which no engine takes."""
    found = overlap_of(MEASURED, [reduce(100, "all_gather")] * len(seconds), seconds)
    assert found.communication == pytest.approx(1.0)
    assert found.communication >= 1.0
