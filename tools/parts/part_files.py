"""The JSON of one GPU: datasheet numbers, prices and watts from the tables, with their sources, and its fits.

The V100's forms are parts, too: the numbers and fits of the shipped profiles of machines that have them.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from parsim.hardware.compose import load_profile
from parsim.hardware.profile import Profile
from tools.parts.catalog import (
    BUSY_ROWS,
    CONTEXT_BYTES,
    ECC_SHARE,
    IDLE,
    LAUNCH,
    REPORTED_SHARE,
    V100_FORMS,
    ZEUS_ROWS,
    CatalogGpu,
)
from tools.parts.gpus import DEPTHS, HALF_PRECISIONS, OTHERS, SOURCE, digits, peaks_of


def part_of(gpu: CatalogGpu, folder: Path, fits: list[dict[str, Any]]) -> dict[str, Any]:
    """The JSON of one part."""
    row = peaks_of(folder)[gpu.name]
    peaks = peak_numbers(gpu, row)
    share = REPORTED_SHARE * (ECC_SHARE if gpu.ecc_in_memory else 1.0)
    memory = float(row["memory_gb"]) * (1e9 if gpu.decimal_memory else 2**30) * share
    unit = "GB of 10^9 bytes" if gpu.decimal_memory else "GB"
    ecc = " and GDDR keeps a sixteenth for error correction, as on a T4 (NeuSight: 15 of 16)" if gpu.ecc_in_memory else ""
    sources: dict[str, dict[str, str]] = {
        "peaks": {
            "kind": "datasheet",
            "text": f"vendor figures gathered from {expanded(row['source'])}; dense, without sparsity",
        },
        "memory": {
            "kind": "derived",
            "text": f"nominal {row['memory_gb']} {unit} (as peaks) times the share that an A100 of 80 GB reports{ecc}",
        },
        "units": {"kind": gpu.units[1], "text": gpu.units[2]},
        "context": {"kind": "assumption", "text": "CUDA context and communicators: no measurement was found for this GPU"},
        SOURCE: {"kind": "derived", "text": fit_text(fits)},
    }
    part: dict[str, Any] = {
        "schema_version": 1,
        "name": gpu.name,
        "description": gpu.description,
        "sources": sources,
        "kind": gpu.kind,
        "memory_bytes": {"value": float(round(memory)), "source": "memory"},
        "memory_bandwidth_bytes_per_s": {"value": float(row["memory_gbs"]) * 1e9, "source": "peaks"},
        "context_bytes": {"value": float(CONTEXT_BYTES), "source": "context"},
        "multiprocessors": {"value": float(gpu.units[0]), "source": "units"},
        "peak_flop_per_s": {name: {"value": digits(value), "source": "peaks"} for name, value in peaks.items()},
    }
    if row["tdp_w"]:
        part["board_limit_w"] = {"value": float(row["tdp_w"]), "source": "peaks"}
    part |= economics(gpu, row, folder, sources)
    if gpu.name in LAUNCH:
        kind, text, seconds = LAUNCH[gpu.name]
        sources["launch"] = {"kind": kind, "text": text}
        part["launch_s"] = {"value": seconds, "source": "launch"}
    part |= {"link": gpu.link, "host_link": gpu.host_link} | ({"network": gpu.network} if gpu.network else {})
    part["gpus_per_node"] = gpu.gpus_per_node
    part["fits"] = [fit for fit in fits if set(fit["precisions"]) & set(peaks)]
    return part


def peak_numbers(gpu: CatalogGpu, row: Mapping[str, str]) -> dict[str, float]:
    """Peaks by precision."""
    found: dict[str, float] = {}
    for column, precisions in (
        ("fp32_tflops", ["fp32"]),
        ("tf32_tflops", ["tf32"]),
        ("fp16_bf16_tflops", HALF_PRECISIONS if gpu.bf16 else ["amp_fp16"]),
        ("fp8_tflops", ["fp8"]),
        ("fp4_tflops", ["nvfp4"]),
    ):
        if row[column]:
            found |= dict.fromkeys(precisions, float(row[column]) * 1e12)
    return found


def economics(gpu: CatalogGpu, row: Mapping[str, str], folder: Path, sources: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Price and watts, with their sources; left out where nobody published them."""
    found: dict[str, Any] = {}
    if gpu.name in BUSY_ROWS:
        name, workload = BUSY_ROWS[gpu.name]
        with (folder / "power.csv").open(encoding="utf-8") as file:
            rows = [entry for entry in csv.DictReader(file) if entry["gpu"] == name and entry["workload"] == workload]
        chosen = next((entry for entry in rows if entry["bin"] == "1e11 to 1e12 flop"), rows[-1])
        text = (
            f"median board power over {chosen['samples']} samples of {workload} ({chosen['bin']}), {expanded(chosen['source'])}"
        )
        sources["busy"] = {"kind": "measurement", "text": text}
        found["busy_power_w"] = {"value": float(chosen["median_w"]), "source": "busy"}
    elif gpu.name in ZEUS_ROWS:
        found["busy_power_w"] = {"value": zeus_watts(folder, *ZEUS_ROWS[gpu.name], sources), "source": "busy"}
    if gpu.name in IDLE:
        watts, text = IDLE[gpu.name]
        sources["idle"] = {"kind": "measurement", "text": text}
        found["idle_power_w"] = {"value": watts, "source": "idle"}
    if row["usd_per_gpu_hour"]:
        low, _, high = row["usd_per_gpu_hour"].partition(" to ")
        price = float(low) if not high else (float(low) + float(high)) / 2
        version = "v5" if "older" in row["price_note"] else "v8"
        sources["price"] = {"kind": "datasheet", "text": f"on demand at {row['price_note']}: {expanded('prices')}"}
        found["usd_per_hour"] = {
            "value": digits(price),
            "as_of": f"SkyPilot catalogue {version}, undated",
            "source": "price",
        }
    return found


def zeus_watts(folder: Path, gpu: str, limit_w: float, sources: dict[str, dict[str, str]]) -> float:
    """The median board power of whole trainings at one power limit."""
    with (folder / "power_limit_training.csv").open(encoding="utf-8") as file:
        rows = [entry for entry in csv.DictReader(file) if entry["gpu"] == gpu and float(entry["power_limit_w"]) == limit_w]
    text = f"median over {len(rows)} trainings of small models at the limit of {limit_w:g} W, {expanded(rows[0]['source'])}"
    sources["busy"] = {"kind": "measurement", "text": text}
    return float(np.median([float(entry["average_power_w"]) for entry in rows]))


SOURCES: dict[str, str] = {}
"""By key of sources.csv, repository, path and commit."""


def read_sources(folder: Path) -> None:
    """Fill `SOURCES`."""
    with (folder / "sources.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            SOURCES[row["key"]] = f"{row['repo']} {row['path']} @{row['commit'][:12]}".replace(" @thread text", "")


def expanded(keys: str) -> str:
    """The sources behind the keys of a cell, which may carry notes."""
    parts = [piece.strip() for piece in keys.split(";")]
    return "; ".join(SOURCES.get(part, part) for part in parts)


def fit_text(fits: Sequence[Mapping[str, Any]]) -> str:
    """What the fits were made from."""
    names = sorted({name for fit in fits for name in fit["held_out"] if name not in (OTHERS, DEPTHS)})
    donors = sorted({name for fit in fits for name in fit["transferred_from"]})
    own = f"fitted by tools.parts to published timings ({'; '.join(expanded(name) for name in names)})" if names else ""
    taken = f"without own rows: the mean of {', '.join(donors)}" if donors else ""
    return "; ".join(text for text in (own, taken) if text) or "fitted by tools.parts"


UNITS = "github sitar-lab/NeuSight scripts/asplos/data/device_configs/Tesla_V100-PCIE-32GB.json @6945927d9afc, Num_Sm"
CHIP = ("peak_flop_per_s", "memory_bandwidth_bytes_per_s", "multiprocessors")


def v100_parts(folder: Path) -> dict[str, dict[str, Any]]:
    """The part of every form, by name."""
    found: dict[str, dict[str, Any]] = {}
    for name, (profile_name, link, description) in V100_FORMS.items():
        profile = load_profile(profile_name)
        found[name] = _part(name, profile, link, description)
        if name in ZEUS_ROWS:
            watts = zeus_watts(folder, *ZEUS_ROWS[name], found[name]["sources"])
            found[name]["busy_power_w"] = {"value": watts, "source": "busy"}
    wide = {**found["v100-pcie-16gb"], "name": "v100-pcie-32gb", "description": "NVIDIA V100-PCIe, 32 GB."}
    wide["sources"] = {
        **wide["sources"],
        "memory-32gb": {"kind": "datasheet", "text": "github cli99/llm-analysis v100-pcie-32gb.json @d841e40aec8c; secondary"},
    }
    wide["memory_bytes"] = {"value": float(32 * 2**30), "source": "memory-32gb"}
    return {**found, "v100-pcie-32gb": wide}


def _part(name: str, profile: Profile, link: str, description: str) -> dict[str, Any]:
    (entry,) = profile.device_types.values()
    fits: dict[tuple[str, str, str], dict[str, Any]] = {}
    for fit in profile.compute.operator_fits:
        if fit.precision not in ("fp32", "amp_fp16"):
            continue
        fits[fit.kind, fit.phase, fit.precision] = {
            "kind": fit.kind,
            "phase": fit.phase,
            "form": fit.form,
            "precisions": [fit.precision],
            "coefficients": {key: value for key, value in fit.coefficients.items() if key not in CHIP},
            "relative_sigma": fit.relative_sigma,
            "min_flop": fit.min_flop,
            "max_flop": fit.max_flop,
            "points": fit.points,
            "source": fit.source,
        }
    efficiencies = [
        {
            "precisions": [found.precision],
            "factor": found.factor,
            "spread": found.spread,
            "points": found.points,
            "source": found.source,
        }
        for found in profile.compute.efficiencies
        if found.precision in ("fp32", *HALF_PRECISIONS)
    ]
    numbers = {
        "memory_bytes": entry.memory_bytes.model_dump(),
        "memory_bandwidth_bytes_per_s": entry.memory_bandwidth_bytes_per_s.model_dump(),
        "context_bytes": entry.context_bytes.model_dump(),
        "peak_flop_per_s": {
            key: number.model_dump() for key, number in entry.peak_flop_per_s.items() if key in ("fp32", "fp64", "amp_fp16")
        },
    }
    used = {value["source"] for key, value in numbers.items() if key != "peak_flop_per_s"}
    used |= {number["source"] for number in numbers["peak_flop_per_s"].values()}
    used |= {fit["source"] for fit in fits.values()} | {found["source"] for found in efficiencies}
    sources = {key: profile.sources[key].model_dump() for key in sorted(used)}
    sources["units"] = {"kind": "datasheet", "text": UNITS}
    return {
        "schema_version": 1,
        "name": name,
        "description": description,
        "sources": sources,
        "kind": entry.kind,
        **numbers,
        "multiprocessors": {"value": 80.0, "source": "units"},
        "link": link,
        "host_link": "pcie-3",
        **({} if link == "pcie-3" else {"network": "infiniband-100g"}),
        "gpus_per_node": 16 if link == "nvswitch-2" else 8,
        "fits": list(fits.values()),
        "efficiencies": efficiencies,
    }
