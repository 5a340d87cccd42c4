"""Topologies of usual machines: the file of one prices as the machine that ships, and what cannot be is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import parsim as ps
from parsim.costs.communication.closed_forms import busbw_bytes_per_s
from parsim.costs.communication.collectives import estimate_collective, estimate_send_recv
from parsim.errors import ImportedFileError
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.work import Collective, SendRecv
from tests.quick import some_quick
from tests.unit.import_samples import LSTOPO

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
        assert made(text, tmp_path, str(refused.value).split("--on ")[1].split(" or")[0].split(",")[0]).into
        (tmp_path / "made.json").unlink()


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
