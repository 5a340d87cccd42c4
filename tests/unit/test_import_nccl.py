"""nccl-tests into a profile: rows become points, points become prices, and nothing is silently empty."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from parsim.app.foreign import import_file
from parsim.costs.communication.collectives import estimate_collective
from parsim.costs.communication.measured import unfitted_points
from parsim.errors import CostError, ImportedFileError
from parsim.formats.nccl_tests import NcclLog, NcclRow, NcclTest, read_nccl_tests, with_measured
from parsim.formats.source import SourceFile
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.network import load_network
from parsim.hardware.profile import CollectivePoint, Profile, SourceEntry, parse_profile, save_profile, shipped_profiles
from parsim.hardware.records import to_text
from parsim.work import Collective
from tests.unit.import_samples import SIZES, nccl_json, nccl_text, seconds_of

H100 = "8xh100-sxm"


def read(text: str, **given: object) -> NcclLog:
    return read_nccl_tests(SourceFile(Path("log.txt"), text.encode()), **given)  # type: ignore[arg-type]


def price(cluster: Cluster, size: int, group: tuple[int, ...], operation: str = "all_reduce", **beside: object) -> float:
    work = Collective(operation=operation, group=group, size_bytes=size)
    return estimate_collective(work, cluster, **beside).median_s  # type: ignore[arg-type]


def test_a_log_becomes_rows_whatever_stands_between_them() -> None:
    noisy = "\n".join(
        [
            "srun: job 17 queued",
            "NCCL INFO Channel 00/24 : 0 1 2 3",
            *(f"[1,0]<stdout>:{line}" for line in nccl_text().splitlines()),
        ]
    )
    for text in (nccl_text(), noisy, nccl_text().replace("\n", "\r\n")):
        (test,) = read(text).tests
        assert (test.operation, test.group, test.repeats) == ("all_reduce", tuple(range(8)), 20)
        assert len(test.rows) == 2 * len(SIZES)
        assert all(row.seconds == pytest.approx(seconds_of(row.size_bytes), rel=1e-3) for row in test.rows)
        assert {row.in_place for row in test.rows} == {True, False}
    assert read(noisy).skipped == {"lines of other programs": 2}


def test_text_and_json_say_the_same() -> None:
    (text,) = read(nccl_text(4, program="all_gather", redop="none")).tests
    (document,) = read(nccl_json(4)).tests
    assert (text.operation, text.group, text.devices) == (document.operation, document.group, document.devices)
    assert [row.size_bytes for row in text.rows] == [row.size_bytes for row in document.rows]


def test_several_tests_in_one_log() -> None:
    log = read(nccl_text(8) + nccl_text(2, program="sendrecv", redop="none"))
    assert [(test.operation, len(test.group)) for test in log.tests] == [("all_reduce", 8), ("send_recv", 2)]


def test_the_ratio_of_the_bandwidths_tells_the_operation_or_the_user_does() -> None:
    (test,) = read(nccl_text(program=None)).tests
    assert test.operation == "all_reduce"
    nameless = nccl_text(program=None, redop="none")
    with pytest.raises(ImportedFileError, match="--collective"):
        read(nameless)
    with pytest.raises(ImportedFileError, match=r"busbw is 1\.75 times algbw, but all_gather over 8 ranks makes it 0\.875"):
        read(nameless, collective="all_gather")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hello\nworld\n", "holds no row of nccl-tests .2 lines of other programs.; expected rows"),
        (nccl_text(wrong=3), "rows whose data came out wrong"),
        (nccl_text(1), "at least 2"),
        (nccl_text(devices=[0] * 8).replace("[0000:07:00]", "[0000:06:00]"), "lists a device twice"),
        ("\n".join(line for line in nccl_text().splitlines() if "Rank" not in line), "does not list its devices"),
        (nccl_text().replace("   time ", "cputime "), "times of the CPU"),
        ('{"results": 3}', "no list `results`"),
        ('{"results": [', "is not JSON"),
    ],
)
def test_what_cannot_be_used_is_refused(text: str, said: str) -> None:
    with pytest.raises(ImportedFileError, match=said):
        read(text)


def test_processes_that_see_one_device_each_are_told_apart_by_their_bus() -> None:
    log = read(nccl_text(4, devices=[0, 0, 0, 0]))
    assert log.tests[0].group == (0, 1, 2, 3)
    assert "order of their PCI bus" in log.notes[0]


@pytest.mark.parametrize(("error", "rows"), [("2e-06", 2 * len(SIZES)), ("0e+00", 2 * len(SIZES)), ("3e-02", 0)])
def test_the_largest_difference_of_old_versions_is_no_count_of_wrong_values(error: str, rows: int) -> None:
    text = nccl_text(program=None, error=error)
    if not rows:
        with pytest.raises(ImportedFileError, match="22 rows whose data came out wrong"):
            read(text)
        return
    assert len(read(text).tests[0].rows) == rows
    with pytest.raises(ImportedFileError, match="rows whose data came out wrong"):  # of integers nothing may differ
        read(nccl_text(program=None, error="1e+00").replace(" float ", " int32 "))


def test_processes_without_mpi_are_told_what_to_build() -> None:
    one = nccl_text(1, program=None)
    head = "\n".join(line for line in one.splitlines() if line.startswith("#"))
    other = head.replace("Pid   4000", "Pid   4001")
    for text in (f"{other}\n{one}", f"{one}{one.replace('Pid   4000', 'Pid   4001')}"):
        with pytest.raises(ImportedFileError, match=r"2 processes that each measured by themselves.*make MPI=1.*-g 2"):
            read(text)


def test_a_gpu_that_has_no_part_is_named(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(nccl_text(4, gpu="NVIDIA GH200 120GB", devices=[0] * 4))
    with pytest.raises(ImportedFileError, match="names NVIDIA GH200 120GB, of which no part is shipped"):
        import_file(tmp_path / "log.txt")
    assert import_file(tmp_path / "log.txt", cluster="4xh100-sxm").found["profile"] == "4xh100-sxm"


JUMPING = {2048: 7e-6, 10240: 7e-6, 34816: 40e-6, 133120: 8e-6, 526336: 42e-6, 2097152: 39e-6, 8388608: 46e-6, 33554432: 136e-6}
STEPPED = {
    2**power: 20e-6 + 2.0**power / 150e9 + (12e-6 if power > 18 else 0.0) + (40e-6 if power > 24 else 0.0)
    for power in range(10, 31)
}


@pytest.mark.parametrize("times", [JUMPING, STEPPED])
def test_a_log_comes_to_lie_inside_the_interval_and_nearer_than_before(times: dict[int, float]) -> None:
    rows = tuple(NcclRow(size_bytes=size, seconds=seconds, in_place=False) for size, seconds in times.items())
    test = NcclTest(operation="all_reduce", hosts=((0, 1),), devices=(), rows=rows, repeats=20)
    made, (group,) = with_measured(load_profile(H100), NcclLog(tests=(test,), skipped={}), "00000001", "log.txt")
    assert group.error_before is not None
    assert group.fit_error <= group.error_before
    cluster = cluster_from_profile(made)
    for size, seconds in times.items():
        estimate = estimate_collective(Collective(operation="all_reduce", group=(0, 1), size_bytes=size), cluster)
        spread = math.hypot(*(sigma for _, sigma in estimate.parameters))
        assert abs(math.log(seconds / estimate.median_s)) <= 1.645 * spread


def between(tmp_path: Path, hosts: int = 2, scale: float = 1.0, **text: object) -> Path:
    names = tuple(f"node-{host}" for host in range(hosts))
    devices = list(range(8)) * hosts
    path = tmp_path / f"log{hosts}.txt"
    path.write_text(nccl_text(8 * hosts, hosts=names, devices=devices, scale=scale, **text))  # type: ignore[arg-type]
    return path


def between_prices(network: str, hosts: int, operation: str = "all_reduce") -> list[tuple[float, float, float]]:
    """Per size: measured, predicted, and the spread of the prediction."""
    cluster = cluster_from_profile(load_profile(H100), nodes=hosts, network=network)
    found = []
    for size in SIZES:
        work = Collective(operation=operation, group=tuple(range(8 * hosts)), size_bytes=size)
        estimate = estimate_collective(work, cluster)
        spread = math.hypot(*(sigma for _, sigma in estimate.parameters))
        found.append((seconds_of(size), estimate.median_s, spread))
    return found


def test_a_log_of_two_hosts_calibrates_a_network(tmp_path: Path) -> None:
    into = tmp_path / "net.json"
    said = import_file(between(tmp_path), into=into, network="infiniband-400g")
    assert said.found["base"] == "infiniband-400g"
    assert said.found["fit_error"] < said.found["error_before"]
    errors = {}
    for network in ("infiniband-400g", str(into)):
        prices = between_prices(network, 2)
        errors[network] = sum(abs(math.log(predicted / measured)) for measured, predicted, _ in prices)
    assert errors[str(into)] < 0.5 * errors["infiniband-400g"]
    for measured, predicted, spread in between_prices(str(into), 2):
        assert abs(math.log(predicted / measured)) <= 1.645 * spread
    wide, narrow = (between_prices(str(into), hosts)[0][2] for hosts in (4, 2))
    assert wide >= load_network("infiniband-400g").relative_sigma.value  # nothing was measured over four nodes
    assert narrow != wide


def test_a_network_is_fitted_to_all_its_logs_and_the_same_log_again_changes_nothing(tmp_path: Path) -> None:
    into = tmp_path / "net.json"
    import_file(between(tmp_path), into=into, network="infiniband-400g")
    once = load_network(str(into))
    import_file(between(tmp_path), into=into)
    assert load_network(str(into)).points == once.points
    import_file(between(tmp_path, program="all_gather", redop="none", scale=0.7), into=into)
    points = load_network(str(into)).points
    assert {point.operation for point in points} == {"all_reduce", "all_gather"}
    assert len(points) == 2 * len(once.points)


def test_a_network_is_found_for_a_log_that_names_none_and_other_targets_are_refused(tmp_path: Path) -> None:
    log = between(tmp_path)
    assert "starts from" in import_file(log, into=tmp_path / "net.json").warnings[-1]
    save_profile(load_profile(H100), tmp_path / "profile.json")
    with pytest.raises(ImportedFileError, match=r"calibrates a network, but .*profile.json is none"):
        import_file(log, into=tmp_path / "profile.json")
    (tmp_path / "one.txt").write_text(nccl_text())
    with pytest.raises(ImportedFileError, match="is of one host"):
        import_file(tmp_path / "one.txt", network="infiniband-400g")
    both = tmp_path / "both.txt"
    both.write_text(nccl_text() + log.read_text())
    said = import_file(both, into=tmp_path / "both.json")
    assert said.found["profile"] == "8xh100-sxm"
    assert any("all_reduce over 2 hosts is left out" in warning for warning in said.warnings)


def imported(n: int = 8, scale: float = 1.0, base: str = H100, **text: object) -> Profile:
    profile = load_profile(base)
    made, _ = with_measured(profile, read(nccl_text(n, scale=scale, **text)), "0badcafe", "log.txt")  # type: ignore[arg-type]
    return made


def test_measured_points_set_the_price_on_a_machine_with_a_link_model(tmp_path: Path) -> None:
    save_profile(imported(8), tmp_path / "p.json")
    before = cluster_from_profile(load_profile(H100))
    after = cluster_from_profile(load_profile(str(tmp_path / "p.json")))
    everyone = tuple(range(8))
    for size in SIZES:
        assert price(after, size, everyone) == pytest.approx(seconds_of(size), rel=0.02)
        assert price(before, size, everyone) != pytest.approx(seconds_of(size), rel=0.02)
        assert price(after, size, (0, 1, 2, 3)) == price(before, size, (0, 1, 2, 3))  # not measured: by the links, as before
        assert price(after, size, everyone, "all_gather") == price(before, size, everyone, "all_gather")


def test_groups_that_the_links_join_alike_have_the_measured_price() -> None:
    cluster = cluster_from_profile(imported(4))
    assert (
        price(cluster, 2**26, (4, 5, 6, 7)) == price(cluster, 2**26, (0, 1, 2, 3)) == pytest.approx(seconds_of(2**26), rel=0.02)
    )
    cube = cluster_from_profile(imported(2, base="dgx1-v100-32gb", gpu="Tesla V100-SXM2-32GB"))
    assert price(cube, 2**26, (0, 1)) == pytest.approx(seconds_of(2**26), rel=0.02)  # one lane
    assert price(cube, 2**26, (1, 3)) == price(cube, 2**26, (0, 1))
    unlike = cluster_from_profile(load_profile("dgx1-v100-32gb"))
    assert price(cube, 2**26, (0, 3)) == price(unlike, 2**26, (0, 3))  # two lanes


def test_groups_at_once_stretch_the_bytes_alone() -> None:
    cluster = cluster_from_profile(imported(4, base="pcie-8xv100", gpu="Tesla V100-PCIE-16GB"))
    alone = price(cluster, 2**26, (0, 1, 2, 3))
    beside = price(cluster, 2**26, (0, 1, 2, 3), concurrent=((0, 1, 2, 3), (4, 5, 6, 7)))
    crossing = price(cluster, 2**26, (0, 1, 2, 3), concurrent=((0, 1, 2, 3), (0, 1, 2, 3), (1, 2)))
    assert alone <= beside <= crossing
    assert crossing > 1.2 * alone


def test_importing_again_changes_nothing() -> None:
    log = read(nccl_text())
    once, _ = with_measured(load_profile(H100), log, "00000001", "log.txt")
    twice, _ = with_measured(once, log, "00000001", "log.txt")
    assert once == twice
    assert parse_profile(to_text(once.model_dump(mode="json")), "x") == once


def test_the_error_of_the_profile_before_is_reported() -> None:
    plain = cluster_from_profile(load_profile(H100))
    _, (row,) = with_measured(load_profile(H100), read(nccl_text()), "00000001", "log.txt")
    errors = sorted(abs(price(plain, size, tuple(range(8))) / seconds_of(size) - 1) for size in SIZES)
    assert row.error_before == pytest.approx(errors[len(errors) // 2], rel=0.02)
    assert row.fit_error < 0.01


def test_a_profile_of_gloo_or_of_fewer_devices_refuses_the_points() -> None:
    with pytest.raises(ImportedFileError, match="has no device 4"):
        with_measured(load_profile("4xa100-sxm-80gb"), read(nccl_text()), "00000001", "log.txt")


def by_hand(sizes: tuple[int, ...], base: str = "dgx1-v100-32gb") -> Profile:
    profile = load_profile(base)
    points = [
        CollectivePoint(operation="all_reduce", group=list(range(8)), size_bytes=size, seconds=seconds_of(size), source="mine")
        for size in sizes
    ]
    old = profile.communication
    communication = old.model_copy(update={"points": [*old.points, *points]})
    sources = {**profile.sources, "mine": SourceEntry(kind="measurement", text="my own")}
    return profile.model_copy(update={"communication": communication, "sources": sources})


@pytest.mark.parametrize("base", ["dgx1-v100-32gb", H100])
def test_points_typed_in_by_hand_set_the_price(base: str) -> None:
    cluster = cluster_from_profile(by_hand((2**20, 2**24, 2**28), base))
    assert price(cluster, 2**26, tuple(range(8))) == pytest.approx(seconds_of(2**26), rel=0.02)


def test_points_typed_in_by_hand_that_are_too_few_are_refused() -> None:
    cluster = cluster_from_profile(by_hand((2**20,)))
    with pytest.raises(CostError, match=r"communication.points: all_reduce over 8 ranks was measured at 1 size.*at least 2"):
        price(cluster, 2**26, tuple(range(8)))


def test_no_shipped_profile_holds_points_that_price_nothing() -> None:
    for name in shipped_profiles():
        assert not unfitted_points(load_profile(name).communication)


def test_secrets_of_the_environment_stay_in_the_file() -> None:
    made, _ = with_measured(load_profile(H100), read(nccl_json(8)), "00000001", "log.json")
    assert "SECRET_TOKEN" not in json.dumps(made.model_dump(mode="json"))


def test_a_spread_below_zero_is_none() -> None:
    half = "25.00 0.04 0.07 0 20.0 30.0 29.0 -1.00"
    text = "\n".join(line for line in nccl_text().splitlines() if line.startswith("#"))
    rows = "".join(f"\n {size} {size // 4} float sum -1 {half} {half}" for size in (1000, 1024))
    (test,) = read(text + rows).tests
    assert [row.spread for row in test.rows] == [None] * 4
