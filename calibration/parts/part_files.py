"""The JSON of one GPU: datasheet numbers, prices and watts from the tables, with their sources, and its fits."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from calibration.parts.catalog import (
    BUSY_ROWS,
    CONTEXT_BYTES,
    ECC_SHARE,
    IDLE,
    LAUNCH,
    REPORTED_SHARE,
    ZEUS_ROWS,
    CatalogGpu,
)
from calibration.parts.gpus import DEPTHS, HALF_PRECISIONS, OTHERS, SOURCE, digits, peaks_of


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
    part |= {"link": gpu.link, "host_link": gpu.host_link, "gpus_per_node": gpu.gpus_per_node}
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
    own = f"fitted by calibration.parts to published timings ({'; '.join(expanded(name) for name in names)})" if names else ""
    taken = f"without own rows: the mean of {', '.join(donors)}" if donors else ""
    return "; ".join(text for text in (own, taken) if text) or "fitted by calibration.parts"
