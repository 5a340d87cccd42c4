"""Machines and networks against published measurements, and the shipped profiles against the tables they are built from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from parsim.costs.communication.algorithms import choices
from parsim.costs.communication.closed_forms import busbw_bytes_per_s
from parsim.costs.communication.collectives import estimate_collective
from parsim.errors import DataError
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.parts import load_network, shipped_networks
from parsim.hardware.profile import save_profile
from parsim.hardware.records import source_keys
from parsim.units import GIB, KIB, MIB
from parsim.work import Collective
from tests.published.v100_rows import collective_rows
from tools.published.v100_machines import LARGE_BYTES, MACHINES, build, lane_rate, main

DATA = Path(os.environ.get("PARSIM_V100_DATA", Path(__file__).resolve().parents[2].parent / "shared" / "data" / "v100"))
PROFILES = Path(__file__).resolve().parents[2] / "hardware_profiles"
needs_data = pytest.mark.skipif(
    not (DATA / "collectives.csv").is_file(), reason="the published tables are not here; set PARSIM_V100_DATA to their folder"
)


@needs_data
@pytest.mark.parametrize("name", MACHINES)
def test_the_shipped_profiles_are_what_the_tables_give(name: str, tmp_path: Path) -> None:
    """All but the date of their making."""
    shipped = load_profile(name)
    built = build(name, DATA)
    made_then = built.provenance.model_copy(update={"created": shipped.provenance.created})
    path = tmp_path / f"{name}.json"
    save_profile(built.model_copy(update={"provenance": made_then}), path)
    assert path.read_text() == (PROFILES / f"{name}.json").read_text()


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.json")), ids=lambda path: path.stem)
def test_the_shipped_profiles_are_written_as_a_profile_is_written_today(path: Path, tmp_path: Path) -> None:
    """Seen without the tables too: a new field of a profile is a new field of the shipped ones."""
    save_profile(load_profile(str(path)), tmp_path / path.name)
    assert (tmp_path / path.name).read_text() == path.read_text()


def test_profiles_cannot_be_built_without_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError, match=r"must name the folder that holds collectives\.csv"):
        build("dgx2-v100", tmp_path)
    assert main(["--data", str(tmp_path), "--out", str(tmp_path)]) == 1
    assert "collectives.csv" in capsys.readouterr().err


def test_every_number_of_a_network_has_a_source_and_every_source_a_number() -> None:
    for name in shipped_networks():
        network = load_network(name)
        assert source_keys(network.model_dump()) == set(network.sources), name


def test_the_dgx2_log_fits_a_line() -> None:
    """The points in the profile itself (12 of 16 GPUs behind NVSwitches): the lane rate comes from them, and from 32 MiB up the
    model is within 10% of every one."""
    profile = load_profile("dgx2-v100")
    points = profile.communication.points
    assert lane_rate(points, 6) == pytest.approx(profile.link_kinds["nvlink"].bandwidth_bytes_per_s.value, rel=1e-5)
    cluster = cluster_from_profile(profile)
    large = [point for point in points if point.size_bytes >= LARGE_BYTES]
    assert len(large) >= 5
    for point in large:
        work = Collective(operation="all_reduce", group=tuple(point.group), size_bytes=point.size_bytes)
        assert estimate_collective(work, cluster).median_s == pytest.approx(point.seconds, rel=0.10), point


def test_two_nodes_of_eight_on_efa() -> None:
    """nccl-tests over two p3dn.24xlarge (the cube mesh with 32 GB, one card of 100 Gb/s), the ring forced. Source: AWS EFA
    guide, rows col-nccltests-0083 to -0118. The network was fitted to both ends; in the middle NCCL 2.4.8 took its
    protocol otherwise: 17% less time at 64 KiB, and up to twice as long at megabytes."""
    cluster = cluster_from_profile(load_profile("dgx1-v100-32gb"), nodes=2, network="efa-100g")
    log = [row for row in collective_rows() if row.machine.nodes == 2]
    assert len(log) >= 15
    for row in log:
        size_bytes, measured_s = row.size_bytes, row.seconds
        found = choices("all_reduce", tuple(range(16)), size_bytes, cluster)
        ring_s = next(choice.seconds for choice in found if choice.algorithm == "ring")
        if size_bytes <= 16 * KIB or size_bytes >= 16 * MIB:
            assert ring_s == pytest.approx(measured_s, rel=0.17), size_bytes
        else:
            assert 0.45 < ring_s / measured_s < 1.25, size_bytes


def test_two_dgx1_on_infiniband() -> None:
    """58 GB/s of bus bandwidth by tree over two DGX-1 with four EDR cards each: more than the cards' 49 together, since two
    nodes exchange halves. Source: github NVIDIA/nccl issue 307, comment of 2020-03-20."""
    cluster = cluster_from_profile(load_profile("dgx1-v100-32gb"), nodes=2, network="infiniband-100g")
    work = Collective(operation="all_reduce", group=tuple(range(16)), size_bytes=GIB)
    priced = estimate_collective(work, cluster)
    assert priced.detail.startswith("tree Simple")
    assert busbw_bytes_per_s("all_reduce", GIB, 16, priced.median_s) == pytest.approx(58e9, rel=0.05)
