"""Build the profiles of other machines with V100s: a DGX-2, AWS p3.16xlarge, a node of Summit, and eight on PCIe alone.

    python -m tools.published.v100_machines --data DIR --out hardware_profiles/

The shipped DGX-1 profile gives what belongs to the device (the operator fits) and to NCCL on NVLink or PCIe (the protocols of
the link model). Its sources say where it was measured; the points of those fits stay there. What belongs to
the machine is written here: devices, links, network cards. DIR holds collectives.csv, with the all_reduce log of a DGX-2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import numpy as np

from parsim.costs.communication.measured import rounded
from parsim.errors import DataError, ParsimError
from parsim.hardware.compose import load_profile
from parsim.hardware.profile import (
    CollectivePoint,
    Communication,
    DeviceEntry,
    DeviceTypeEntry,
    LinkEntry,
    LinkModel,
    LinkNumbers,
    NicSlot,
    Profile,
    Provenance,
    Sourced,
    SourceEntry,
    save_profile,
)
from parsim.hardware.records import ComputeRecords, Efficiency, OperatorFit, source_keys
from parsim.units import GIB, MIB
from tools.published.v100_throughput import read_table

BASE = "dgx1-v100-16gb"
DGX2_LOG = "DGX-2, 12 of 16 V100-SXM3-32GB"
DGX2_GPUS = 12
LARGE_BYTES = 32 * MIB

SOURCES = {
    "same-device": SourceEntry(
        kind="derived",
        text=f"the fit of the V100-SXM2 in profile {BASE}, where its points are; taken over because it belongs to the device",
    ),
    "same-library": SourceEntry(
        kind="derived",
        text=f"protocols and spreads of NCCL in profile {BASE}, where their points are; taken over to other links of V100s",
    ),
    "nvswitch": SourceEntry(
        kind="datasheet",
        text="DGX-2: two boards of eight V100s and six NVSwitches, every GPU with one of its six NVLinks to each switch "
        "(en.wikichip.org nvidia/nvswitch, nextplatform.com 2018-04-13). The six switches of a board are one endpoint here. 48 "
        "links between the boards, eight per pair of switches, so that nothing blocks, from the 18 ports (8 GPUs, 2 unused)",
    ),
    "dgx2-log": SourceEntry(
        kind="measurement",
        text="GitHub README, index file 21031070799 (fork of nccl-tests, host seville): all_reduce of one process driving 12 "
        "of the 16 GPUs of a DGX-2 while another job had the others (rows col-nccltests with that hardware, out of place)",
    ),
    "fit-nvswitch": SourceEntry(
        kind="derived",
        text="rate of a lane: slope of the dgx2-log points from 32 MiB up, six lanes per GPU (tools.published.v100_machines)",
    ),
    "dgx2-pcie": SourceEntry(
        kind="assumption",
        text="two GPUs and a network card on each of eight PCIe switches, four per socket: eight EDR cards are general "
        "knowledge, the tree was not looked up",
    ),
    "sxm3-memory": SourceEntry(kind="datasheet", text="32 GB per GPU, the name of the device in the dgx2-log; in GiB"),
    "p3": SourceEntry(
        kind="datasheet",
        text="p3.16xlarge: eight V100 with 16 GB and NVLink, 25 Gb/s of network (AWS announcement as reprinted by infoq.cn, "
        "j629I8X512fg8tuKd6ke). That its links are the cube mesh of the DGX-1 is general knowledge; the PCIe tree is assumed "
        "to be the DGX-1's, with the one network card at the first socket",
    ),
    "summit": SourceEntry(
        kind="datasheet",
        text="en.wikichip.org supercomputers/summit: two POWER9 with three V100s each; two NVLink bricks between a GPU and its "
        "CPU and between every two GPUs of a CPU; X Bus 64 GB/s both directions together between the CPUs",
    ),
    "summit-xbus": SourceEntry(
        kind="datasheet",
        text="half of 64 GB/s (en.wikichip.org), as github NVIDIA/nccl src/graph/topo.h counts it (P9_BW 32.0)",
    ),
    "summit-card": SourceEntry(
        kind="datasheet",
        text="one dual-port EDR adapter per node with a PCIe 4.0 connection to each CPU (eetimes.com, Inside the Summit "
        "supercomputer): two cards here. Eight lanes of Gen4 carry what sixteen of Gen3 do",
    ),
    "pcie-box": SourceEntry(
        kind="assumption",
        text="a common box of eight cards: two GPUs per PCIe switch, two switches per root complex (the socket), two sockets, "
        "a network card at each; no particular machine was looked up",
    ),
    "v100-pcie-fp32": SourceEntry(kind="datasheet", text="14.03 Tflop/s, github sitar-lab/NeuSight's device table"),
    "v100-pcie-fp64": SourceEntry(kind="derived", text="half of fp32"),
    "v100-pcie-tensor": SourceEntry(kind="derived", text="125 Tflop/s of the SXM2 scaled as fp32 is"),
    "scaled-device": SourceEntry(
        kind="derived",
        text=f"the fit of the V100-SXM2 in profile {BASE} at the peaks of this device: the shares of the peak are taken "
        "to be the same",
    ),
}


def build(name: str, data_dir: Path) -> Profile:
    """The profile `name`, a key of MACHINES. Raises DataError if the log of the DGX-2 is missing."""
    base = load_profile(BASE)
    return {
        "dgx2-v100": lambda: _dgx2(base, data_dir),
        "p3-16xlarge": lambda: _p3(base),
        "summit-v100": lambda: _summit(base),
        "pcie-8xv100": lambda: _pcie_box(base),
    }[name]()


MACHINES = ("dgx2-v100", "p3-16xlarge", "pcie-8xv100", "summit-v100")


def lane_rate(points: Sequence[CollectivePoint], lanes: int) -> float:
    """Bytes per second of one lane: all_reduce moves 2 (n - 1)/n of the array over `lanes` lanes of every device. Least squares
    of the relative errors of a line through the points from LARGE_BYTES up."""
    large = [point for point in points if point.size_bytes >= LARGE_BYTES]
    size = np.array([float(point.size_bytes) for point in large])
    seconds = np.array([point.seconds for point in large])
    (_, slope), *_ = np.linalg.lstsq(
        np.column_stack([np.ones(len(size)), size]) / seconds[:, None], np.ones(len(size)), rcond=None
    )
    ranks = len(large[0].group)
    return float(2 * (ranks - 1) / ranks / (lanes * slope))


def _dgx2(base: Profile, data_dir: Path) -> Profile:
    points = _dgx2_points(data_dir)
    rate = rounded(lane_rate(points, 6))
    links = [LinkEntry(a=f"gpu{index}", b=f"nvswitch{index // 8}", kind="nvlink", lanes=6) for index in range(16)]
    links.append(LinkEntry(a="nvswitch0", b="nvswitch1", kind="nvlink", lanes=48))
    links += [LinkEntry(a=f"gpu{index}", b=f"pcie{index // 2}", kind="pcie") for index in range(16)]
    links += [LinkEntry(a=f"pcie{index}", b=f"socket{index // 4}", kind="pcie") for index in range(8)]
    links.append(LinkEntry(a="socket0", b="socket1", kind="smp"))
    device = _device(base, memory=Sourced(value=32 * GIB, source="sxm3-memory"))
    return _profile(
        base,
        name="dgx2-v100",
        description="DGX-2: sixteen V100-SXM3 with 32 GB behind NVSwitches, eight PCIe switches with a network card each. "
        "Built from published numbers and the fits of the V100-SXM2; parsim measured nothing on it.",
        device_type="V100-SXM3",
        device=device,
        count=16,
        kinds={**base.link_kinds, "nvlink": _kind(rate, "fit-nvswitch", base.link_kinds["nvlink"].latency_s)},
        links=links,
        nics=[NicSlot(at=f"pcie{index}", kind="pcie") for index in range(8)],
        nics_source="dgx2-pcie",
        fits=_fits(base, "V100-SXM3", device, "same-device"),
        model=_model(base),
        points=points,
        used=("nvswitch", "dgx2-log"),
    )


def _p3(base: Profile) -> Profile:
    device = _device(base)
    return _profile(
        base,
        name="p3-16xlarge",
        description="AWS p3.16xlarge: eight V100-SXM2 with 16 GB on the NVLink hybrid cube mesh, one 25 Gb/s network card. The "
        f"links and fits of {BASE}; parsim measured nothing on it.",
        device_type="V100-SXM2",
        device=device,
        count=8,
        kinds=base.link_kinds,
        links=base.links,
        nics=[NicSlot(at="socket0", kind="pcie")],
        nics_source="p3",
        fits=_fits(base, "V100-SXM2", device, "same-device"),
        model=_model(base, measured=True),
        used=("p3", "nvlink-matrix", "pcie-tree"),
    )


def _summit(base: Profile) -> Profile:
    device = _device(base)
    triples = [(first, first + 1, first + 2) for first in (0, 3)]
    pairs = [(a, b) for triple in triples for a in triple for b in triple if a < b]
    links = [LinkEntry(a=f"gpu{a}", b=f"gpu{b}", kind="nvlink", lanes=2) for a, b in pairs]
    links += [LinkEntry(a=f"gpu{index}", b=f"socket{index // 3}", kind="nvlink-host", lanes=2) for index in range(6)]
    links.append(LinkEntry(a="socket0", b="socket1", kind="smp"))
    zero = base.link_kinds["pcie"].latency_s
    kinds = {
        "nvlink": base.link_kinds["nvlink"],
        "nvlink-host": _kind(base.link_kinds["nvlink"].bandwidth_bytes_per_s.value, "same-library", zero),
        "smp": _kind(32e9, "summit-xbus", zero),
        "pcie": _kind(base.link_kinds["pcie"].bandwidth_bytes_per_s.value, "summit-card", zero),
    }
    return _profile(
        base,
        name="summit-v100",
        description="A node of Summit (IBM AC922): two sockets with three V100-SXM2 of 16 GB each, NVLink inside a socket and "
        "to its CPU, two EDR rails. Built from published numbers and the fits of the DGX-1's V100; nothing was measured on it.",
        device_type="V100-SXM2",
        device=device,
        count=6,
        kinds=kinds,
        links=links,
        nics=[NicSlot(at=f"socket{index}", kind="pcie") for index in range(2)],
        nics_source="summit-card",
        fits=_fits(base, "V100-SXM2", device, "same-device"),
        model=_model(base),
        used=("summit",),
    )


def _pcie_box(base: Profile) -> Profile:
    peaks = {
        "fp32": Sourced(value=14.03e12, source="v100-pcie-fp32"),
        "fp64": Sourced(value=7.015e12, source="v100-pcie-fp64"),
        "amp_fp16": Sourced(value=rounded(125e12 * 14.03 / 15.7), source="v100-pcie-tensor"),
    }
    device = _device(base).model_copy(update={"peak_flop_per_s": peaks})
    links = [LinkEntry(a=f"gpu{index}", b=f"pcie{index // 2}", kind="pcie") for index in range(8)]
    links += [LinkEntry(a=f"pcie{index}", b=f"socket{index // 2}", kind="pcie") for index in range(4)]
    links.append(LinkEntry(a="socket0", b="socket1", kind="smp"))
    relayed = _model(base).relay_protocols
    simple = next(entry for entry in relayed if entry.protocol == "Simple")
    model = _model(base).model_copy(
        update={
            "link_kind": "pcie",
            "protocols": relayed,
            "point_to_point_base_s": rounded(simple.base_s + simple.hop_s),
            "tuner_bandwidth_bytes_per_s": base.link_kinds["pcie"].bandwidth_bytes_per_s,
        }
    )
    return _profile(
        base,
        name="pcie-8xv100",
        description="Eight V100-PCIe with 16 GB on four PCIe switches under two root complexes, no NVLink. Built from "
        "published numbers and the fits of the DGX-1's V100; parsim measured nothing on it.",
        device_type="V100-PCIe",
        device=device,
        count=8,
        kinds={name: base.link_kinds[name] for name in ("pcie", "smp")},
        links=links,
        nics=[NicSlot(at=f"socket{index}", kind="pcie") for index in range(2)],
        nics_source="pcie-box",
        fits=_fits(base, "V100-PCIe", device, "scaled-device"),
        model=model,
        used=("pcie-box",),
    )


def _profile(
    base: Profile,
    *,
    name: str,
    description: str,
    device_type: str,
    device: DeviceTypeEntry,
    count: int,
    kinds: dict[str, LinkNumbers],
    links: list[LinkEntry],
    nics: list[NicSlot],
    nics_source: str,
    fits: list[OperatorFit],
    model: LinkModel,
    used: tuple[str, ...],
    points: Sequence[CollectivePoint] = (),
) -> Profile:
    """The profile with those sources that it names."""
    every = {**base.sources, **SOURCES}
    profile = Profile(
        schema_version=1,
        name=name,
        description=description,
        provenance=Provenance(
            created=date.today().isoformat(),
            command="python -m tools.published.v100_machines --data DIR --out hardware_profiles/",
            machine="not a single machine: see sources",
        ),
        sources=every,
        device_types={device_type: device},
        devices=[DeviceEntry(index=index, type=device_type) for index in range(count)],
        link_kinds=kinds,
        links=links,
        nics=nics,
        nics_source=nics_source,
        communication=Communication(backend="nccl", link_model=model, points=list(points)),
        compute=ComputeRecords(operator_fits=fits, efficiencies=_efficiencies(base, device_type, fits[0].source)),
        noise=base.noise,
    )
    named = source_keys(profile.model_dump()) | set(used)
    return profile.model_copy(update={"sources": {key: entry for key, entry in every.items() if key in named}})


def _device(base: Profile, memory: Sourced | None = None) -> DeviceTypeEntry:
    (entry,) = base.device_types.values()
    return entry if memory is None else entry.model_copy(update={"memory_bytes": memory})


def _kind(rate: float, source: str, latency: Sourced) -> LinkNumbers:
    return LinkNumbers(bandwidth_bytes_per_s=Sourced(value=rate, source=source), latency_s=latency)


def _fits(base: Profile, device_type: str, device: DeviceTypeEntry, source: str) -> list[OperatorFit]:
    """The DGX-1's fits for another device type, at its own peaks."""
    found = []
    for fit in base.compute.operator_fits:
        coefficients = dict(fit.coefficients)
        if "peak_flop_per_s" in coefficients:
            coefficients["peak_flop_per_s"] = device.peak_flop_per_s[fit.precision].value
        found.append(fit.model_copy(update={"device_type": device_type, "coefficients": coefficients, "source": source}))
    return found


def _efficiencies(base: Profile, device_type: str, source: str) -> list[Efficiency]:
    """What whole models reach of the operators' throughput on a DGX-1, taken for the same device elsewhere."""
    return [entry.model_copy(update={"device_type": device_type, "source": source}) for entry in base.compute.efficiencies]


def _model(base: Profile, measured: bool = False) -> LinkModel:
    """The DGX-1's link model; its measured groups only where the links are the same."""
    model = base.communication.link_model
    if model is None:
        raise DataError(f"profile {base.name} has no link model; build it with python -m tools.published.v100")
    protocols = [entry.model_copy(update={"source": "same-library"}) for entry in model.protocols]
    relayed = [entry.model_copy(update={"source": "same-library"}) for entry in model.relay_protocols]
    update = {"protocols": protocols, "relay_protocols": relayed, "point_sources": [], "source": "same-library"}
    return model.model_copy(update=update if measured else {**update, "measured_groups": []})


def _dgx2_points(data_dir: Path) -> list[CollectivePoint]:
    table = read_table(data_dir, "collectives.csv")
    rows = [row for row in table if row["hardware"].startswith(DGX2_LOG) and row["unit"] == "us"]
    points = [
        CollectivePoint(
            operation="all_reduce",
            group=list(range(DGX2_GPUS)),
            size_bytes=int(row["size_bytes_or_shape"]),
            seconds=float(f"{float(row['value']) * 1e-6:.9g}"),
            measured_on="12 of the 16 GPUs, one process driving them",
            source="dgx2-log",
        )
        for row in rows
        if row["id"].startswith("col-nccltests") and row["model_or_op"] == "nccl all_reduce" and "out-of-place" in row["notes"]
    ]
    if sum(point.size_bytes >= LARGE_BYTES for point in points) < 2:
        raise DataError(f"collectives.csv in {data_dir} holds no all_reduce rows of {DGX2_LOG}; use the project's tables")
    return points


def main(arguments: Sequence[str] | None = None) -> int:
    """0: written. 1: an error."""
    parser = argparse.ArgumentParser(prog="python -m tools.published.v100_machines", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with collectives.csv")
    parser.add_argument("--out", type=Path, required=True, help="folder the profiles are written to")
    options = parser.parse_args(arguments)
    try:
        for name in MACHINES:
            path = options.out / f"{name}.json"
            save_profile(build(name, options.data), path)
            print(f"wrote {path} ({path.stat().st_size // 1024} KiB)")
    except ParsimError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
