"""nccl-tests into a profile: rows become points, points become prices, and nothing is silently empty."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parsim.costs.communication.collectives import estimate_collective
from parsim.costs.communication.measured import unfitted_points
from parsim.errors import CostError, ImportedFileError
from parsim.formats.nccl_tests import NcclLog, read_nccl_tests, with_measured
from parsim.formats.source import SourceFile
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
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
        (nccl_text(hosts=("a", "b")), "across 2 hosts .a, b."),
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
