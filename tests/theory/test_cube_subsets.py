"""All 247 subsets of two or more GPUs of the cube mesh: what any all_reduce over them must obey, measured or not."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import combinations, permutations

import pytest

from parsim.costs.communication.closed_forms import busbw_bytes_per_s
from parsim.costs.communication.collectives import estimate_collective
from parsim.costs.communication.contention import hamiltonian_cycles, ring_set
from parsim.costs.estimate import Estimate
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.units import GIB, KIB, MIB
from parsim.work import Collective

GPUS = range(8)
SUBSETS = [group for size in range(2, 9) for group in combinations(GPUS, size)]
SIZES = (KIB, MIB, 16 * MIB, GIB)


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


def test_there_are_247_subsets() -> None:
    assert len(SUBSETS) == 2**8 - 8 - 1 == 247


def test_every_device_has_six_lanes_and_the_cube_has_symmetries() -> None:
    assert [sum(row) for row in lanes()] == [6] * 8
    assert len(list(automorphisms())) > 1


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


@pytest.mark.slow
def test_more_bytes_never_take_less_time() -> None:
    for group in SUBSETS:
        seconds = [price(group, size_bytes).median_s for size_bytes in SIZES]
        assert seconds == sorted(seconds), group


def test_the_order_of_the_ranks_does_not_matter() -> None:
    for group in SUBSETS[::7]:
        backwards = Collective(operation="all_reduce", group=group[::-1], size_bytes=MIB)
        assert estimate_collective(backwards, cluster()).median_s == price(group, MIB).median_s


def test_unmeasured_groups_are_less_certain_than_measured_ones() -> None:
    measured = {"communication:unmeasured group", "communication:relay"}
    for group in ((0, 1), (0, 1, 2, 3), tuple(GPUS)):
        assert not measured & set(dict(price(group, MIB).parameters))
    assert "communication:unmeasured group" in dict(price((0, 1, 2), MIB).parameters)


def test_ring_counts_of_the_published_groups() -> None:
    """22.6, 85.3 and 134.4 GB/s of bus bandwidth are 1, 4 and 6 lanes; a pair with two links runs two rings."""
    for group, rings in (((0, 1), 1), ((0, 3), 2), ((0, 1, 2, 3), 4), (tuple(GPUS), 6)):
        assert ring_set(cluster().topology, "nvlink", tuple(f"gpu{index}" for index in group)).count == rings
