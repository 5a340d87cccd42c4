"""Build the profiles of a DGX-1 with eight V100s from published measurements, or refit one from its own points.

    python -m tools.published.v100 --data DIR --out hardware_profiles/
    python -m tools.published.v100 --refit hardware_profiles/dgx1-v100-32gb.json

DIR holds collectives.csv, datasheet.csv, operators.csv and throughput.csv (id, source, ... per row). The profiles keep
every number that a fit of links or operators used, in SI units, with its source. `--refit` reads nothing else and reports
whether the fits agree: exactly on the processor that made them, within `REFIT_TOLERANCE` on others.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from calibration.fit.operators import NORMAL_MAD, fit_operators, kernel_of, read_operator_points
from parsim.costs.communication.measured import rounded
from parsim.costs.compute.formula import TILE_COEFFICIENTS, product_of
from parsim.errors import DataError, ParsimError, ProfileError
from parsim.hardware.compose import load_profile
from parsim.hardware.profile import (
    CollectivePoint,
    Communication,
    DeviceEntry,
    DeviceTypeEntry,
    LinkEntry,
    LinkNumbers,
    NicSlot,
    Noise,
    Profile,
    Provenance,
    Sourced,
    SourceEntry,
    save_profile,
)
from parsim.hardware.records import ComputeRecords, OperatorFit, OperatorPoint
from parsim.units import GIB, MIB
from tools.parts.products import BASE, NAMES, Chip, Products, fit_products, leave_shapes_out
from tools.parts.robust import named
from tools.published.v100_links import SOURCES as LINK_SOURCES
from tools.published.v100_links import fit_link_model
from tools.published.v100_throughput import read_table, with_efficiencies

DEVICE_TYPE = "V100-SXM2"
DEVICES = 8
MEMORY_ROWS = {
    "dgx1-v100-32gb": ("V100-SXM2-32GB", "v100-memory-32gb"),
    "dgx1-v100-16gb": ("V100-SXM2-16GB", "v100-memory-16gb"),
}
VTRAIN = "github VIA-Research/vTrain"
CONTEXT_BYTES = 700 * MIB
REFIT_TOLERANCE = 3e-4
"""Relative, of each number of a fit: searches end elsewhere with the last bits of another processor's arithmetic. The fits of
an AMD EPYC and of an Intel Xeon lie up to 3.1e-5 apart (2026-11-22)."""
DRIFT_SIGMA = 0.03
MIXED = "amp_fp16"
MULTIPROCESSORS = 80.0
"""github sitar-lab/NeuSight scripts/asplos/data/device_configs/Tesla_V100-PCIE-32GB.json @6945927d9afc, Num_Sm."""
LEAST_FLOP = 1e8
"""Of a product in the fit by tiles: smaller ones are all launch."""

SOURCES = {
    "nvlink-matrix": SourceEntry(
        kind="datasheet",
        text="nvidia-smi topo -m in github Oneflow-Inc/DLPerf reports/dlperf_benchmark_test_report_v1.md @c89430bac64f "
        "(rows ds-0205 to ds-0232)",
    ),
    "pcie-tree": SourceEntry(
        kind="datasheet",
        text="nvidia-smi topo -m of a DGX-1 as printed in msccl's topology tests: the network cards that are PIX to GPUs 0-1, "
        "2-3, 4-5 and 6-7 name the four PCIe switches; GPUs 0-3 and 4-7 sit on one socket each",
    ),
    "pcie-rate": SourceEntry(
        kind="datasheet",
        text="github NVIDIA/nccl src/graph/topo.h @069a3d4f95ca: PCI_BW 12.0, PCI Gen3 x16 (row ds-0204 gives 16 nominal)",
    ),
    "host-latency": SourceEntry(kind="assumption", text="one microsecond per PCIe or socket link; enters no collective"),
    "v100-memory-32gb": SourceEntry(
        kind="datasheet", text="github cli99/llm-analysis v100-sxm-32gb.json (row ds-0004), in GiB"
    ),
    "v100-memory-16gb": SourceEntry(
        kind="datasheet", text="the launch table's 16 GB (row ds-0144) for the V100-SXM2-16GB, in GiB; secondary"
    ),
    "v100-bandwidth": SourceEntry(
        kind="datasheet", text="github cli99/llm-analysis v100-sxm-32gb.json (row ds-0005); secondary"
    ),
    "v100-fp32": SourceEntry(kind="datasheet", text="gpu catalog of RajBhope/gpu-runtime-predictor (row ds-0162); secondary"),
    "v100-fp64": SourceEntry(kind="derived", text="half of fp32, the ratio of the launch table (rows ds-0140, ds-0141)"),
    "v100-tensor": SourceEntry(kind="datasheet", text="github cli99/llm-analysis v100-sxm-32gb.json (row ds-0007); secondary"),
    "context": SourceEntry(
        kind="assumption", text="CUDA context and what the driver keeps of the nominal memory: no measurement was found"
    ),
    "drift": SourceEntry(kind="assumption", text="no spread from run to run was published for this machine; 3% is assumed"),
}


def build(data_dir: Path, name: str) -> Profile:
    """The profile `name` (a key of MEMORY_ROWS) from the tables in `data_dir`.

    Raises DataError if a table or a row is missing.
    """
    facts = _read_facts(data_dir)
    operator_points, operator_sources = read_operator_points(data_dir)
    memory_key = MEMORY_ROWS[name][1]
    gigabytes = int(memory_key.rsplit("-", 1)[1].removesuffix("gb"))
    skeleton = Profile(
        schema_version=1,
        name=name,
        description=f"DGX-1 (V100): eight V100-SXM2 with {gigabytes} GB on the NVLink hybrid cube mesh, four PCIe switches, "
        "two sockets. Built from published numbers; parsim measured nothing on it. The two profiles of this machine "
        "differ in memory only.",
        provenance=Provenance(
            created=date.today().isoformat(),
            command="python -m tools.published.v100 --data DIR --out hardware_profiles/",
            machine="not a single machine: see sources",
        ),
        sources={**SOURCES, **LINK_SOURCES, **operator_sources},
        device_types={DEVICE_TYPE: _device_type(facts, gigabytes, memory_key)},
        devices=[DeviceEntry(index=index, type=DEVICE_TYPE) for index in range(DEVICES)],
        link_kinds={
            "nvlink": LinkNumbers(
                bandwidth_bytes_per_s=Sourced(value=25e9, source="fit-links"),
                latency_s=Sourced(value=0.0, source="fit-links"),
            ),
            "pcie": LinkNumbers(
                bandwidth_bytes_per_s=Sourced(value=12e9, source="pcie-rate"),
                latency_s=Sourced(value=1e-6, source="host-latency"),
            ),
            "smp": LinkNumbers(
                bandwidth_bytes_per_s=Sourced(value=12e9, source="fit-relay"),
                latency_s=Sourced(value=1e-6, source="host-latency"),
            ),
        },
        links=[*_nvlinks(facts), *_host_links()],
        nics=[NicSlot(at=f"pcie{index}", kind="pcie") for index in range(DEVICES // 2)],
        nics_source="pcie-tree",
        communication=Communication(backend="nccl", points=_read_collective_points(data_dir)),
        compute=ComputeRecords(operator_points=[_rounded(point) for point in operator_points]),
        noise=Noise(drift_sigma=DRIFT_SIGMA, source="drift"),
    )
    return with_efficiencies(refit(skeleton), data_dir)


def refit(profile: Profile) -> Profile:
    """The same profile with its link model, link rates and operator fits fitted again, from its own points alone.

    The efficiencies stay: the rows of whole models they come from are not in the profile.
    """
    device = profile.device_types[DEVICE_TYPE]
    link_model, rates = fit_link_model(profile)
    kinds = {
        name: entry.model_copy(
            update={"bandwidth_bytes_per_s": Sourced(value=rates[name][0], source=rates[name][1])} if name in rates else {}
        )
        for name, entry in profile.link_kinds.items()
    }
    fits = fit_operators(
        profile.compute.operator_points,
        DEVICE_TYPE,
        {precision: number.value for precision, number in device.peak_flop_per_s.items()},
        device.memory_bandwidth_bytes_per_s.value,
    )
    fits = [_by_tiles(fit, profile, device) if (fit.kind, fit.precision) == ("matmul", MIXED) else fit for fit in fits]
    return profile.model_copy(
        update={
            "link_kinds": kinds,
            "communication": profile.communication.model_copy(update={"link_model": link_model}),
            "compute": profile.compute.model_copy(update={"operator_fits": fits}),
        }
    )


def _by_tiles(fit: OperatorFit, profile: Profile, device: DeviceTypeEntry) -> OperatorFit:
    """Products of tensor cores by the formula "tiles", which also prices convolutions over arrays with channels last.

    Fitted to the same points: their errors are 5.1% in the median instead of 6.0%, 7.1% at depths that the fit has not seen. In
    fp32 "saturation" is nearer.
    """
    points = [point for point in profile.compute.operator_points if (point.kind, point.precision) == (fit.kind, fit.precision)]
    kernels = [(point, kernel_of(point)) for point in points]
    told = [(point, kernel) for point, kernel in kernels if kernel.flop >= LEAST_FLOP]
    sizes = np.array([[*product_of(kernel)[:4], kernel.size_bytes, point.seconds, 1.0] for point, kernel in told]).T
    problems, rows, columns, depth, size_bytes, seconds, sustained = sizes
    products = Products(rows, columns, depth, problems, size_bytes, seconds, sustained, (fit.source,) * len(told))
    chip = Chip(MULTIPROCESSORS, device.peak_flop_per_s[MIXED].value, device.memory_bandwidth_bytes_per_s.value)
    fitted = named(NAMES, fit_products(products, chip, BASE))
    coefficients = {name: rounded(value) for name, value in fitted.items() if name in TILE_COEFFICIENTS}
    return fit.model_copy(
        update={
            "form": "tiles",
            "coefficients": coefficients | chip.coefficients(),
            "relative_sigma": rounded(NORMAL_MAD * leave_shapes_out(products, chip, BASE).median),
            "min_flop": float(products.flop.min()),
            "points": len(told),
        }
    )


# --- reading ----------------------------------------------------------------------------------------------------------


def _read_facts(data_dir: Path) -> dict[str, float]:
    """Value by row id of datasheet.csv, and "links a b" for the NVLink matrix."""
    facts: dict[str, float] = {}
    for row in read_table(data_dir, "datasheet.csv"):
        if match := re.fullmatch(r"links GPU(\d)-GPU(\d)", row["key"]):
            facts[f"links {match[1]} {match[2]}"] = float(row["value"])
        elif re.fullmatch(r"[\d.]+", row["value"]):
            facts[row["id"]] = float(row["value"])
    return facts


def _fact(facts: dict[str, float], row: str) -> float:
    if row not in facts:
        raise DataError(f"datasheet.csv has no number in row {row!r}; use the tables this script was written for")
    return facts[row]


def _read_collective_points(data_dir: Path) -> list[CollectivePoint]:
    """All all_reduce rows that describe this machine, or stand in for a part of it; nccl-tests times are in microseconds."""
    points: list[CollectivePoint] = []
    for row in read_table(data_dir, "collectives.csv"):
        stand_in = ""
        if row["source"].startswith(VTRAIN):
            source = "vtrain"
        elif row["id"].startswith("col-nccltests") and row["hardware"].startswith("8x V100-SXM2-16GB, NVLink hybrid cube mesh"):
            source, stand_in = "nccl-log-8", "cube mesh with other GPU numbers, one process driving 8 GPUs"
        elif row["id"].startswith("col-nccltests") and row["hardware"].startswith("4x V100-SXM2-16GB, 2+2 over PCIe/SMP"):
            source, stand_in = "nccl-log-4-pcie", "4x V100-SXM2-16GB, 2+2 over PCIe and the sockets"
        else:
            continue
        if row["unit"] != "us":
            raise DataError(f"collectives.csv row {row['id']}: the unit must be us, got {row['unit']!r}")
        points.append(
            CollectivePoint(
                operation="all_reduce",
                group=list(range(int(row["gpus"]))),
                size_bytes=int(row["size_bytes_or_shape"]),
                seconds=float(f"{float(row['value']) * 1e-6:.9g}"),
                measured_on=stand_in,
                source=source,
            )
        )
    if not points:
        raise DataError(
            f"{data_dir / 'collectives.csv'} holds no all_reduce rows of a V100 cube mesh; use the project's tables"
        )
    return points


def _rounded(point: OperatorPoint) -> OperatorPoint:
    """Seconds with nine significant digits: unit conversion adds no more."""
    return point.model_copy(update={"seconds": float(f"{point.seconds:.9g}")})


def _device_type(facts: dict[str, float], gigabytes: int, memory_key: str) -> DeviceTypeEntry:
    fp32 = _fact(facts, "ds-0162") * 1e12
    return DeviceTypeEntry(
        kind="cuda",
        memory_bytes=Sourced(value=gigabytes * GIB, source=memory_key),
        memory_bandwidth_bytes_per_s=Sourced(value=_fact(facts, "ds-0005") * 1e9, source="v100-bandwidth"),
        context_bytes=Sourced(value=CONTEXT_BYTES, source="context"),
        peak_flop_per_s={
            "fp32": Sourced(value=fp32, source="v100-fp32"),
            "fp64": Sourced(value=fp32 / 2, source="v100-fp64"),
            "amp_fp16": Sourced(value=_fact(facts, "ds-0007") * 1e12, source="v100-tensor"),
        },
    )


def _nvlinks(facts: dict[str, float]) -> list[LinkEntry]:
    lanes = {(a, b): int(_fact(facts, f"links {a} {b}")) for a in range(DEVICES) for b in range(a + 1, DEVICES)}
    return [LinkEntry(a=f"gpu{a}", b=f"gpu{b}", kind="nvlink", lanes=count) for (a, b), count in lanes.items() if count]


def _host_links() -> list[LinkEntry]:
    """Two GPUs per PCIe switch, two switches per socket, one link between the sockets."""
    gpus = [LinkEntry(a=f"gpu{index}", b=f"pcie{index // 2}", kind="pcie") for index in range(DEVICES)]
    switches = [LinkEntry(a=f"pcie{index}", b=f"socket{index // 2}", kind="pcie") for index in range(DEVICES // 2)]
    return [*gpus, *switches, LinkEntry(a="socket0", b="socket1", kind="smp")]


def largest_difference(first: Any, second: Any) -> float:
    """The largest relative difference between numbers of two JSON documents; infinite where they differ otherwise."""
    if isinstance(first, Mapping) and isinstance(second, Mapping) and first.keys() == second.keys():
        return max((largest_difference(first[key], second[key]) for key in first), default=0.0)
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return max(map(largest_difference, first, second), default=0.0)
    if isinstance(first, float) and isinstance(second, float) and first * second > 0:
        return abs(first - second) / min(abs(first), abs(second))
    return 0.0 if first == second else math.inf


# --- command line -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """0: built, or refitted to the same numbers. 1: an error, or a refit that differs."""
    parser = argparse.ArgumentParser(prog="python -m tools.published.v100", description=__doc__)
    parser.add_argument(
        "--data", type=Path, help="folder with collectives.csv, datasheet.csv, operators.csv and throughput.csv"
    )
    parser.add_argument("--out", type=Path, help="folder the profiles are written to")
    parser.add_argument("--refit", type=Path, help="a profile to fit again from its own points")
    options = parser.parse_args(arguments)
    try:
        if options.refit is not None:
            return _refit_file(options.refit, options.out)
        if options.data is None or options.out is None:
            parser.error("give --data DIR and --out DIR, or --refit PROFILE.json")
        for name in MEMORY_ROWS:
            profile = build(options.data, name)
            path = options.out / f"{name}.json"
            save_profile(profile, path)
            print(f"wrote {path} ({path.stat().st_size // 1024} KiB)")
    except ParsimError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _refit_file(path: Path, out: Path | None) -> int:
    profile = load_profile(str(path))
    if DEVICE_TYPE not in profile.device_types:
        raise ProfileError(f"{path} has no device type {DEVICE_TYPE}; --refit is for the profiles this script builds")
    again = refit(profile)
    if out is not None:
        save_profile(again, out / path.name)
        print(f"wrote {out / path.name}")
    difference = largest_difference(profile.model_dump(mode="json"), again.model_dump(mode="json"))
    same = difference <= REFIT_TOLERANCE
    within = "exactly" if difference == 0 else f"to {difference:.1e}, which is another processor's arithmetic"
    print(f"{path.name}: the fits are {f'reproduced {within}' if same else 'NOT the same as in the file'}")
    return 0 if same or out is not None else 1


if __name__ == "__main__":
    raise SystemExit(main())
