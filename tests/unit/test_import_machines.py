"""Files of lstopo and Nsight Systems: what is read, refused and left out."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import parsim as ps
from parsim.app.foreign import import_file
from parsim.costs.communication.closed_forms import busbw_bytes_per_s
from parsim.costs.communication.collectives import estimate_collective, estimate_send_recv
from parsim.costs.communication.measured import unfitted_points
from parsim.errors import CostError, ImportedFileError
from parsim.formats.kineto import read_nsys
from parsim.formats.ledger import ledger_of
from parsim.formats.nccl_tests import NcclLog, NcclRow, NcclTest, read_nccl_tests, with_measured
from parsim.formats.source import SourceFile
from parsim.formats.topology import read_lstopo
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.parts import load_network
from parsim.hardware.profile import CollectivePoint, Profile, SourceEntry, parse_profile, save_profile, shipped_profiles
from parsim.hardware.records import to_text
from parsim.timeline import Timeline
from parsim.work import Collective, SendRecv
from tests.quick import some_quick
from tests.unit.import_samples import LSTOPO, SIZES, TOPO, nccl_json, nccl_text, nsys_database, seconds_of


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


# Topologies of usual machines: the file of one prices as the machine that ships, and what cannot be is refused.

LEGEND = "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"


def matrix(
    gpus: int,
    direct: Callable[[int, int], str],
    cards: Sequence[str] = (),
    near: Callable[[int, int], str] = lambda gpu, card: "SYS",
    *,
    between: Callable[[int, int], str] = lambda a, b: "SYS",
    numa: Callable[[int], str] = lambda gpu: "0\tN/A",
    legend: str = LEGEND,
) -> str:
    """`nvidia-smi topo -m`: entries between GPUs, between GPUs and cards, and between cards."""
    head = [f"GPU{gpu}" for gpu in range(gpus)] + list(cards)
    lines = ["\t" + "\t".join([*head, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])]
    for a in range(gpus):
        entries = [" X " if a == b else direct(a, b) for b in range(gpus)] + [near(a, card) for card in range(len(cards))]
        lines.append("\t".join([f"GPU{a}", *entries, f"{numa(a)[0]}-9", numa(a)]))
    for a, name in enumerate(cards):
        entries = [near(gpu, a) for gpu in range(gpus)] + [" X " if a == b else between(a, b) for b in range(len(cards))]
        lines.append("\t".join([name, *entries]))
    return "\n".join([*lines, legend])


def nics(count: int) -> list[str]:
    return [f"NIC{number}" for number in range(count)]


def half(gpu: int) -> str:
    return f"{gpu // 4}\tN/A"


def own_card(gpu: int, card: int) -> str:
    """Eight cards, each under the switch of one GPU."""
    return "PIX" if gpu == card else "NODE" if gpu // 4 == card // 4 else "SYS"


def on_one_socket(a: int, b: int) -> str:
    return "NODE" if a // 4 == b // 4 else "SYS"


def rocm(gpus: int) -> str:
    """`rocm-smi --showtopo` of a full mesh."""
    head = "       " + "".join(f"GPU{gpu:<10d}" for gpu in range(gpus))

    def table(title: str, entry: str) -> list[str]:
        rows = [f"GPU{a}   " + "".join(f"{'0' if a == b else entry:<13s}" for b in range(gpus)) for a in range(gpus)]
        return [f" {title} ".center(90, "="), head, *rows, ""]

    tables = [
        *table("Weight between two GPUs", "15"),
        *table("Hops between two GPUs", "1"),
        *table("Link Type between two GPUs", "XGMI"),
    ]
    nodes = [f"GPU[{gpu}]\t\t: (Topology) Numa Node: {gpu // 4}" for gpu in range(gpus)]
    return "\n".join([" ROCm System Management Interface ".center(90, "="), *tables, *nodes, ""])


def amd(gpus: int) -> str:
    """`amd-smi topology` of a full mesh, whose GPUs have addresses."""
    addresses = [f"0000:{16 * gpu + 5:02x}:00.0" for gpu in range(gpus)]

    def table(title: str, own: str, entry: str) -> list[str]:
        rows = [f"{name} " + "".join(f"{own if name == to else entry:<13s}" for to in addresses) for name in addresses]
        return [f"{title} TABLE:", " " * 13 + " ".join(addresses), *rows]

    tables = [*table("ACCESS", "ENABLED", "ENABLED"), *table("WEIGHT", "0", "15"), *table("HOPS", "0", "1")]
    return "\n".join([*tables, *table("LINK TYPE", "SELF", "XGMI"), *table("NUMA BW", "N/A", "50000-50000"), "", "Legend:", ""])


def amd_json(gpus: int, form: str) -> str:
    """`amd-smi topology --json` since 2024, before that, and `rocm-smi --showtopo --json`."""
    pairs = [(a, b) for a in range(gpus) for b in range(gpus) if a < b]
    if form == "sentences":
        words = {"Link type": "XGMI", "Hops": "1"}
        rows = {f"(Topology) {what} between DRM devices {a} and {b}": word for what, word in words.items() for a, b in pairs}
        return json.dumps({"system": rows})
    kinds = [["SELF" if a == b else "XGMI" for b in range(gpus)] for a in range(gpus)]
    if form == "tables":
        tables = [{f"gpu_{b}": kind for b, kind in enumerate(row)} for row in kinds]
        return json.dumps([{"gpu": a, "bdf": f"0000:{a:02x}:00.0", "link_type": table} for a, table in enumerate(tables)])
    links = [[{"gpu": b, "link_type": kind, "num_hops": 1} for b, kind in enumerate(row)] for row in kinds]
    return json.dumps([{"gpu": a, "bdf": f"0000:{a:02x}:00.0", "links": row[::-1]} for a, row in enumerate(links)])


def switched(lanes: int) -> Callable[[int, int], str]:
    return lambda a, b: f"NV{lanes}"


MACHINES: dict[str, tuple[str, str, str]] = {
    "HGX H100": ("8xh100-sxm", "infiniband-400g", matrix(8, switched(18), nics(8), own_card, between=on_one_socket, numa=half)),
    "HGX B200": ("8xb200", "infiniband-400g", matrix(8, switched(18), nics(8), own_card, between=on_one_socket, numa=half)),
    "DGX H100 with cards for storage": (
        "8xh100-sxm",
        "infiniband-400g",
        matrix(
            8,
            switched(18),
            nics(10),
            lambda gpu, card: own_card(gpu, card) if card < 8 else "NODE" if gpu // 4 == card - 8 else "SYS",
            between=lambda a, b: "NODE" if (a // 4 if a < 8 else a - 8) == (b // 4 if b < 8 else b - 8) else "SYS",
            numa=half,
        ),
    ),
    "DGX A100": (
        "8xa100-sxm-80gb",
        "infiniband-200g",
        matrix(
            8,
            switched(12),
            nics(10),
            lambda gpu, card: "PXB" if gpu // 2 == card // 2 else "SYS",
            between=lambda a, b: "PXB" if a // 2 == b // 2 else "SYS",
            numa=lambda gpu: f"{gpu // 2}\tN/A",
        ),
    ),
    "a tray of GB200": (
        "4xgb200",
        "infiniband-400g",
        matrix(
            4,
            switched(18),
            nics(4),
            between=lambda a, b: "NODE" if a // 2 == b // 2 else "SYS",
            numa=lambda gpu: f"{gpu // 2}\t{8 * gpu + 2}",
        ),
    ),
    "p4d": (
        "8xa100-sxm-40gb",
        "efa-400g",
        matrix(
            8,
            switched(12),
            nics(4),
            lambda gpu, card: "PIX" if gpu // 2 == card else "NODE" if gpu // 4 == card // 2 else "SYS",
            between=lambda a, b: "NODE" if a // 2 == b // 2 else "SYS",
            numa=half,
        ),
    ),
    "p5": (
        "8xh100-sxm",
        "efa-3200g",
        matrix(
            8,
            switched(18),
            [f"rdmap{79 + card}s0" for card in range(32)],
            lambda gpu, card: own_card(gpu, card // 4),
            between=lambda a, b: "PIX" if a // 4 == b // 4 else on_one_socket(a // 4, b // 4),
            numa=half,
        ),
    ),
    "p5 without its cards": ("8xh100-sxm", "efa-3200g", matrix(8, switched(18), numa=half)),
    "a3": ("8xh100-sxm", "tcpxo-200g", matrix(8, switched(18), numa=half)),
    "ND H100": (
        "8xh100-sxm",
        "infiniband-400g",
        matrix(
            8,
            switched(18),
            [f"mlx5_ib{card}" for card in range(8)],
            lambda gpu, card: "NODE" if gpu // 4 == card // 4 else "SYS",
            between=on_one_socket,
            numa=half,
        ),
    ),
    "MI300X": ("8xmi300x", "roce-400g", rocm(8)),
    "MI300X by amd-smi": ("8xmi300x", "roce-400g", amd(8)),
    **{f"MI300X by JSON, {form}": ("8xmi300x", "roce-400g", amd_json(8, form)) for form in ("links", "tables", "sentences")},
    "lstopo of SXM GPUs without NVML": (
        "4xa100-sxm-80gb",
        "infiniband-200g",
        LSTOPO.replace('name="NVLinkBandwidth"', 'name="Other"').replace("mlx5_", "eth").replace("ib0", "eth2"),
    ),
}


def made(text: str, folder: Path, on: str) -> ps.Imported:
    (folder / "topo.txt").write_text(text)
    return ps.import_file(folder / "topo.txt", into=folder / "made.json", cluster=on)


def clusters(folder: Path, on: str, nodes: int, network: str) -> list[Cluster]:
    names = (on, str(folder / "made.json"))
    return [cluster_from_profile(load_profile(name), nodes=nodes, network=network) for name in names]


def seconds(cluster: Cluster, operation: str, size: int, group: tuple[int, ...] | None = None) -> float:
    work = Collective(operation=operation, group=group or tuple(range(cluster.size)), size_bytes=size)
    return estimate_collective(work, cluster).median_s


def bus(cluster: Cluster, operation: str, group: tuple[int, ...]) -> float:
    """GB/s of 1 GB."""
    return busbw_bytes_per_s(operation, 1e9, len(group), seconds(cluster, operation, 10**9, group)) / 1e9


@pytest.mark.parametrize("machine", some_quick(MACHINES, "HGX H100", "a tray of GB200", "p5"))
def test_the_file_of_a_machine_prices_as_the_machine_that_ships(tmp_path: Path, machine: str) -> None:
    on, network, text = MACHINES[machine]
    made(text, tmp_path, on)
    for nodes in (1, 2, 4, 16):
        shipped, imported = clusters(tmp_path, on, nodes, network)
        for operation in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
            for size in (2**20, 2**23, 2**26, 2**30):
                expected = seconds(shipped, operation, size)
                assert seconds(imported, operation, size) == pytest.approx(expected, rel=0.03), (nodes, operation, size)
        for far in (1, shipped.size - 1):
            pairs = [SendRecv(source=0, destination=far, size_bytes=2**26) for _ in range(2)]
            first, second = (
                estimate_send_recv(pair, cluster).median_s for pair, cluster in zip(pairs, (shipped, imported), strict=True)
            )
            assert second == pytest.approx(first, rel=0.03)


def test_a_gpu_without_nvlink_leaves_the_others_their_switch(tmp_path: Path) -> None:
    text = matrix(
        8, lambda a, b: on_one_socket(a, b) if 2 in (a, b) else "NV18", nics(8), own_card, between=on_one_socket, numa=half
    )
    said = made(text, tmp_path, "8xb200")
    assert said.found["direct"] == "18 lanes of 7 GPUs to a switch"
    assert any("GPU 2 has no NVLink" in warning for warning in said.warnings)
    shipped, imported = clusters(tmp_path, "8xb200", 1, "infiniband-400g")
    seven = (0, 1, 3, 4, 5, 6, 7)
    assert bus(imported, "all_reduce", seven) == pytest.approx(bus(shipped, "all_reduce", seven), rel=1e-9)
    assert bus(imported, "all_reduce", tuple(range(8))) < 60


def test_a_gpu_with_links_down_slows_the_groups_that_it_is_in(tmp_path: Path) -> None:
    """A pair shows the lanes of the GPU that has fewer."""
    made(matrix(8, lambda a, b: "NV12" if 5 in (a, b) else "NV18"), tmp_path, "8xh100-sxm")
    shipped, imported = clusters(tmp_path, "8xh100-sxm", 1, "infiniband-400g")
    four, with_it = (0, 1, 2, 3), (2, 3, 4, 5)
    assert bus(imported, "all_gather", four) == pytest.approx(bus(shipped, "all_gather", four), rel=1e-9)
    assert bus(imported, "all_gather", with_it) == pytest.approx(12 / 18 * bus(shipped, "all_gather", with_it), rel=0.02)


def bridged(a: int, b: int) -> str:
    return "NV12" if a // 2 == b // 2 else on_one_socket(a, b)


def test_bridged_pairs_are_fast_and_what_leaves_them_goes_over_pcie(tmp_path: Path) -> None:
    """Measured elsewhere: about 208 GB/s over a pair of A100 and 20 over three."""
    text = matrix(8, bridged, numa=half)
    with pytest.raises(ImportedFileError, match="start from --on 8xa100-pcie-80gb@nvlink-bridge-3") as refused:
        made(text, tmp_path, "8xa100-pcie-80gb")
    works = str(refused.value).split("--on ")[1].split(" or")[0]
    made(text, tmp_path, works)
    _, imported = clusters(tmp_path, works, 1, "infiniband-200g")
    assert bus(imported, "all_reduce", (0, 1)) == pytest.approx(208, rel=0.1)
    assert bus(imported, "all_reduce", (0, 1, 2)) == pytest.approx(20, rel=0.25)


def test_the_hint_for_a_file_that_names_no_machine_works(tmp_path: Path) -> None:
    for text in (matrix(8, bridged), matrix(8, switched(12)), matrix(4, lambda a, b: "PHB"), rocm(4)):
        (tmp_path / "topo.txt").write_text(text)
        with pytest.raises(ImportedFileError, match="does not name the machine") as refused:
            ps.import_file(tmp_path / "topo.txt")
        hint = str(refused.value).split("--on ")[1].split(" or")[0].split(",")[0]
        assert ("mi" in hint) == (text == rocm(4))
        assert made(text, tmp_path, hint).into
        (tmp_path / "made.json").unlink()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\tGPU0\tGPU1\n GPU0\tX\tOK\n GPU1\tOK\tX\n", "topo -p2p.*nvidia-smi topo -m"),
        ("\tGPU0\tGPU1\nGPU0\t X \tPHB\nGPU1\tPHB\t X \n", r"--on 2xGPU \(`parsim profile list`\)"),
        ("Machine (63GB total)\n  Package L#0\n    NUMANode L#0 (P#0 63GB)\n", "lstopo --of xml"),
        ("| NVIDIA-SMI 550.54.15      Driver Version: 550.54.15 |\n", "nvidia-smi topo -m"),
        ("#SBATCH --nodes=2\nsrun ./build/all_reduce_perf -b 8 -e 8G\n", "give what it prints"),
    ],
)
def test_output_that_shows_no_machine_says_what_to_give(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(ImportedFileError, match=message):
        ps.import_file(tmp_path / "a.txt")


def test_the_matrix_without_nvlink_keeps_the_lanes_and_says_so(tmp_path: Path) -> None:
    """`nvidia-smi topo -mp`: with a legend of NV# the machine has none."""
    hidden = matrix(
        8, on_one_socket, nics(8), own_card, between=on_one_socket, numa=half, legend="\nLegend:\n\n  X    = Self\n"
    )
    said = made(hidden, tmp_path, "8xh100-sxm")
    assert any("topo -mp" in warning for warning in said.warnings)
    shipped, imported = clusters(tmp_path, "8xh100-sxm", 4, "infiniband-400g")
    assert seconds(imported, "all_reduce", 2**30) == seconds(shipped, "all_reduce", 2**30)
    (tmp_path / "made.json").unlink()
    with pytest.raises(ImportedFileError, match=r"shows no NVLink, and .* start from --on 8xh100-sxm@pcie-"):
        made(matrix(8, on_one_socket, numa=half), tmp_path, "8xh100-sxm")


@pytest.mark.parametrize(
    ("text", "on", "said"),
    [
        (matrix(8, switched(18)), "8xa100-sxm-80gb", "shows 18 lanes of NVLink at GPU 0, and a GPU of this profile has 12"),
        (
            matrix(8, lambda a, b: "NV18" if a // 4 == b // 4 else "NV9"),
            "8xh100-sxm",
            "shows 90 lanes .* has 18.* GPUs 0 and 4",
        ),
        (
            matrix(3, switched(18), nics(2), lambda gpu, card: "PIX" if gpu == 0 else "SYS", between=lambda a, b: "SYS"),
            "3xh100-sxm",
            "NIC0 and NIC1 are under one PCIe switch by what other entries say, but their own is SYS",
        ),
        (rocm(4).replace("XGMI", "QPI ", 1), "4xmi300x", "GPU0 to GPU1 is QPI"),
        ("\n".join(rocm(4).splitlines()[:-8]), "4xmi300x", "missing, cut or not square"),
        ("===== Weight between two GPUs =====\n     GPU0 GPU1\nGPU0 0 15\nGPU1 15 0\n", "4xmi300x", "link types is missing"),
    ],
)
def test_a_topology_that_cannot_be_is_refused(tmp_path: Path, text: str, on: str, said: str) -> None:
    with pytest.raises(ImportedFileError, match=said):
        made(text, tmp_path, on)


def test_a_card_of_the_other_socket_is_reached_over_nvlink(tmp_path: Path) -> None:
    """One card for eight GPUs: its bandwidth limits, not the link between the sockets (PXN of NCCL)."""
    made(matrix(8, switched(18), nics(1), own_card, numa=half), tmp_path, "8xh100-sxm")
    _, imported = clusters(tmp_path, "8xh100-sxm", 2, "infiniband-400g")
    far = SendRecv(source=7, destination=15, size_bytes=2**30)
    assert 2**30 / estimate_send_recv(far, imported).median_s == pytest.approx(48e9, rel=0.02)


def test_every_card_of_a_gpu_carries_its_part() -> None:
    """p5: 32 cards of 100 Gb/s, four beside each GPU, come to 3,200 Gb/s and not to 800."""
    cluster = cluster_from_profile(load_profile("8xh100-sxm"), nodes=4, network="efa-3200g")
    assert 250 < bus(cluster, "all_gather", tuple(range(32))) < 333
    far = SendRecv(source=0, destination=8, size_bytes=2**30)
    assert 2**30 / estimate_send_recv(far, cluster).median_s == pytest.approx(4 * 10.4e9, rel=0.05)


# nccl-tests into a profile: rows become points, points become prices, and nothing is silently empty.

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
