"""Files of lstopo and Nsight Systems: what is read, refused and left out."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from parsim.app.foreign import import_file
from parsim.errors import ImportedFileError
from parsim.formats.kineto import read_nsys
from parsim.formats.ledger import ledger_of
from parsim.formats.source import SourceFile
from parsim.formats.topology import read_lstopo
from parsim.hardware.compose import load_profile
from parsim.timeline import Timeline
from tests.unit.import_samples import LSTOPO, TOPO, nsys_database


def source(content: str | bytes, name: str = "file") -> SourceFile:
    return SourceFile(Path(name), content if isinstance(content, bytes) else content.encode())


def test_lstopo_shows_the_tree_and_the_lanes() -> None:
    tree = read_lstopo(source(LSTOPO))
    assert tree.lanes == {(0, 1): 12, (2, 3): 12}
    assert tree.switch == (0, 0, 1, 2)
    assert tree.socket == (0, 1, 1)
    assert tree.cards == (("mlx5_0", "pcie0"), ("mlx5_1", "socket1"))


def test_lstopo_and_topo_give_the_same_links(tmp_path: Path) -> None:
    """Of the same machine, but that the matrix does not tell the two switches of the second socket apart from its bridge."""
    (tmp_path / "machine.xml").write_text(LSTOPO)
    (tmp_path / "machine.txt").write_text(TOPO)
    profiles = []
    for name in ("machine.xml", "machine.txt"):
        import_file(tmp_path / name, cluster="4xa100-sxm-80gb", into=tmp_path / f"{name}.json")
        profiles.append(load_profile(str(tmp_path / f"{name}.json")))
    lanes = [sorted((link.a, link.b, link.lanes) for link in profile.links if link.kind == "nvlink") for profile in profiles]
    assert lanes[0] == lanes[1] == [("gpu0", "gpu1", 12), ("gpu2", "gpu3", 12)]
    assert [len(profile.nics) for profile in profiles] == [2, 2]


def test_lstopo_without_the_matrix_keeps_the_lanes_of_the_profile(tmp_path: Path) -> None:
    (tmp_path / "machine.xml").write_text(LSTOPO.replace('name="NVLinkBandwidth"', 'name="Other"'))
    done = import_file(tmp_path / "machine.xml", cluster="4xa100-sxm-80gb", into=tmp_path / "made.json")
    assert done.found["direct"] == "not shown by the tool; kept"
    before = [link for link in load_profile("4xa100-sxm-80gb").links if link.kind == "nvlink"]
    assert [link for link in load_profile(str(tmp_path / "made.json")).links if link.kind == "nvlink"] == before


def test_lstopo_counts_lanes_to_switches() -> None:
    """Four GPUs and a switch: every pair shows the lanes of one GPU, as in the matrix of nvidia-smi."""
    values = " ".join("300000" if (a == 4) != (b == 4) else "0" for a in range(5) for b in range(5))
    start, end = LSTOPO.index("<indexes"), LSTOPO.index("</distances2>")
    text = (
        f'{LSTOPO[:start]}<indexes length="1">15 13 35 38 99</indexes><u64values length="1">{values}</u64values>{LSTOPO[end:]}'
    )
    tree = read_lstopo(source(text))
    assert {(link.b, link.lanes) for link in tree.direct_links(12)} == {("nvswitch0", 12)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<topology><object type='Machine'/></topology>", "and none is a GPU"),
        ("<other/>", "is not a topology of hwloc"),
        (LSTOPO[:900], "is not a complete XML file"),
        (LSTOPO.replace("300000", "310001"), "is not a multiple of a lane's 25000, 20000 MB/s"),
        (LSTOPO.replace("0 300000 0 0 300000", "0 300000"), "lists 4 devices and 1[0-9] values"),
        ('<!DOCTYPE t [<!ENTITY a "b">]><topology>&a;</topology>', "defines entities of its own"),
    ],
)
def test_lstopo_files_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(ImportedFileError, match=message):
        read_lstopo(source(text))


def test_nsys_gives_the_ledger_of_the_mean_step() -> None:
    trace = read_nsys(source(nsys_database(steps=3)))
    ledger = ledger_of(trace, None)
    assert (trace.steps, trace.device) == (3, "NVIDIA A100-SXM4-80GB")
    assert ledger.step_s == pytest.approx(0.010)
    assert ledger.compute_s == pytest.approx(0.006)
    assert ledger.exposed_communication_s == pytest.approx(0.002)
    assert ledger.exposed_copies_s == pytest.approx(0.001)
    assert ledger.launch_gaps_s == pytest.approx(0.0006)  # until the copy was launched
    assert ledger.idle_s == pytest.approx(0.0004)
    assert sum(seconds for _, seconds in ledger.entries()) == pytest.approx(ledger.step_s)


def test_nsys_becomes_a_timeline(tmp_path: Path) -> None:
    (tmp_path / "report.sqlite").write_bytes(nsys_database())
    done = import_file(tmp_path / "report.sqlite", into=tmp_path / "timeline.json.gz")
    assert done.kind == "nsys"
    timeline = Timeline.load(tmp_path / "timeline.json.gz")
    assert len(timeline) == done.found["activities"] == 6
    assert any("records no shapes" in warning for warning in done.warnings)
    assert timeline.resources == ("r0.stream7", "r0.stream13")


def test_nsys_takes_one_of_several_gpus() -> None:
    database = source(nsys_database(gpus=2))
    first, second = read_nsys(database), read_nsys(database, ranks=[1])
    assert (first.rank, second.rank) == (0, 1)
    assert first.skipped == {"activities of other GPUs": 6}
    assert any("give --ranks N" in note for note in first.notes)
    with pytest.raises(ImportedFileError, match="has kernels of GPU 0, 1, and none of GPU 7"):
        read_nsys(database, ranks=[7])


def without(table: str) -> bytes:
    connection = sqlite3.connect(":memory:")
    connection.deserialize(nsys_database())
    connection.execute(f"DROP TABLE {table}")
    connection.execute("VACUUM")
    return connection.serialize()


def test_nsys_files_that_are_refused() -> None:
    with pytest.raises(ImportedFileError, match="has no table CUPTI_ACTIVITY_KIND_KERNEL: no kernel was recorded"):
        read_nsys(source(without("CUPTI_ACTIVITY_KIND_KERNEL")))
    with pytest.raises(ImportedFileError, match="cannot be read as SQLite"):
        read_nsys(source(b"SQLite format 3\x00" + b"CUPTI_ACTIVITY_KIND" * 50))
    assert read_nsys(source(without("NVTX_EVENTS"))).steps == 1


def test_a_damaged_definition_of_a_table_is_refused() -> None:
    """Found by damaging files: the error quotes bytes that are no text."""
    data = nsys_database().replace(b"id INTEGER, name TEXT", b"id INTEGER ) \xc5ame TEX", 1)
    with pytest.raises(ImportedFileError, match="cannot be read as SQLite"):
        read_nsys(source(data))


def test_a_view_in_place_of_a_table_is_not_run() -> None:
    connection = sqlite3.connect(":memory:")
    connection.execute(
        "CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) "
        "SELECT x AS start, x AS end, 0 AS deviceId FROM n"
    )
    with pytest.raises(ImportedFileError, match="has no table CUPTI_ACTIVITY_KIND_KERNEL"):
        read_nsys(source(connection.serialize()))


def test_nvlink_to_cpus_carries_nothing_between_gpus() -> None:
    """POWER: two lanes of every GPU go to the CPU of its socket, which hwloc lists as one end of them."""
    values = ["0 300000 0 0 75000", "300000 0 0 0 75000", "0 0 0 300000 0", "0 0 300000 0 0", "75000 75000 0 0 0"]
    matrix = f"""<indexes length="15">PCIDev:15 PCIDev:13 PCIDev:35 PCIDev:38 Package:30 </indexes>
    <u64values length="90">{" ".join(values)} </u64values>
  </distances2>"""
    start = LSTOPO.index("<indexes length")
    text = LSTOPO[:start].replace('nbobjs="4"', 'nbobjs="5"') + matrix + "\n</topology>\n"
    assert read_lstopo(source(text)).lanes == read_lstopo(source(LSTOPO)).lanes
