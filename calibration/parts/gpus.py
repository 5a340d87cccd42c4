"""Fits of all GPUs: each on its own, then once more drawn towards its family; and the JSON of each part.

A GPU without rows takes the mean of its family (of all GPUs if the family has none). How far that is off is judged by leaving
each GPU out that has rows: its errors under the prior of the others stand under "other GPUs" in `held_out`.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from calibration.parts import attentions, products, streams
from calibration.parts.catalog import (
    BUSY_ROWS,
    CONTEXT_BYTES,
    ECC_SHARE,
    GPUS,
    IDLE,
    REPORTED_SHARE,
    ZEUS_ROWS,
    CatalogGpu,
)
from calibration.parts.products import FP8, FP32, HALF, Chip
from calibration.parts.robust import Errors, Prior, named, pooled
from parsim.costs.compute.tile_model import Array

HALF_PRECISIONS = ["bf16", "amp_bf16", "amp_fp16"]
TF32_SIGMA = 0.1
"""Assumed beside a 16-bit fit's own where tf32 takes its coefficients: nobody published rows in tf32."""
DIGITS = 5
LEAST_SIGMA = 0.02
SOURCE = "fit"

KINDS: Mapping[str, tuple[str, str]] = {
    HALF: ("fp16_bf16_tflops", "bf16"),
    FP8: ("fp8_tflops", "fp8"),
    FP32: ("fp32_tflops", "fp32"),
}


@dataclass
class Family:
    """Fits of one kind of kernel over all GPUs.

    Attributes:
        base: prior where no GPU is known. fits: by GPU, the logarithms; own: how many rows each has.
    """

    base: Prior
    fits: dict[str, Array] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)

    def prior(self, gpu: CatalogGpu) -> tuple[Prior, list[str]]:
        """From the other GPUs of the family, else from all others; and which they were."""
        near = [
            other.name for other in GPUS if other.family == gpu.family and other.name != gpu.name and other.name in self.fits
        ]
        donors = near or [name for name in self.fits if name != gpu.name]
        return pooled([self.fits[name] for name in donors], self.base.names, self.base), donors


def peaks_of(folder: Path) -> dict[str, dict[str, str]]:
    """Rows of peaks.csv by GPU."""
    with (folder / "peaks.csv").open(encoding="utf-8") as file:
        return {row["gpu"]: row for row in csv.DictReader(file)}


def chip_of(gpu: CatalogGpu, row: Mapping[str, str], kind: str) -> Chip | None:
    """None where no peak of that precision is published."""
    text = row[KINDS[kind][0]]
    return Chip(gpu.units[0], float(text) * 1e12, float(row["memory_gbs"]) * 1e9) if text else None


@dataclass(frozen=True, slots=True)
class Fitted:
    """The final fit of one GPU: parameters, rows, errors, and whose they are."""

    parameters: dict[str, float]
    points: int
    flop: tuple[float, float]
    held_out: dict[str, Errors]
    donors: list[str]


def fit_all(
    base: Prior,
    rows_of: Callable[[CatalogGpu], Any],
    chip: Callable[[CatalogGpu], Chip | None],
    fit: Callable[[Any, Chip, Prior], Array],
    judge: Callable[[Any, Chip, Mapping[str, float]], Errors],
    leave_out: Callable[[Any, Chip, Prior], dict[str, Errors]],
    flop_of: Callable[[Any], Array],
) -> dict[str, Fitted]:
    """Fit one kind of kernel for every GPU that has a peak of its precision.

    Args:
        base: prior where nothing is known. rows_of, chip: of a GPU.
        fit, judge, leave_out: of rows. flop_of: the FLOP of rows.
    """
    family = Family(base)
    data = {gpu.name: rows_of(gpu) for gpu in GPUS if chip(gpu) is not None}
    for gpu in GPUS:
        own = chip(gpu)
        if own is not None and len(data[gpu.name]):
            family.fits[gpu.name] = fit(data[gpu.name], own, base)
    found: dict[str, Fitted] = {}
    for gpu in GPUS:
        own = chip(gpu)
        if own is None:
            continue
        rows = data[gpu.name]
        prior, donors = family.prior(gpu)
        theta = fit(rows, own, prior) if len(rows) else prior.mean
        held: dict[str, Errors] = {}
        if len(rows):
            held = leave_out(rows, own, prior)
            if donors:
                held["other GPUs"] = judge(rows, own, named(prior.names, prior.mean))
        flop = flop_of(rows) if len(rows) else np.array([1e8, 1e13])
        limits = (float(flop.min()), float(flop.max()))
        found[gpu.name] = Fitted(named(prior.names, theta), len(rows), limits, held, [] if len(rows) else donors)
    return found


def sigma_of(fitted: Fitted, all_fitted: Mapping[str, Fitted]) -> float:
    """Relative spread of the prices: the typical error of held-out sources, or of GPUs left out where there are no rows."""
    judged = [fitted] if fitted.points else list(all_fitted.values())
    key = "other GPUs"
    sources = [
        error.median for entry in judged for name, error in entry.held_out.items() if (name == key) == (not fitted.points)
    ] or [error.median for entry in judged for error in entry.held_out.values()]
    return max(LEAST_SIGMA, 1.4826 * float(np.median(sources))) if sources else 0.3


def part_fit(
    kind: str,
    phase: str,
    form: str,
    precisions: Sequence[str],
    names: Sequence[str],
    fitted: Fitted,
    sigma: float,
    variant: str = "",
) -> dict[str, Any]:
    """One entry of `fits` of a part."""
    return {
        "kind": kind,
        "phase": phase,
        "form": form,
        "variant": variant,
        "precisions": list(precisions),
        "coefficients": {
            name: digits(min(fitted.parameters[name], 1.0) if name == "quantisation" else fitted.parameters[name])
            for name in names
        },
        "relative_sigma": digits(sigma),
        "min_flop": digits(fitted.flop[0]),
        "max_flop": digits(fitted.flop[1]),
        "points": fitted.points,
        "held_out": {
            name: {"rows": error.rows, "median": digits(error.median), "p90": digits(error.p90), "bias": digits(error.bias)}
            for name, error in sorted(fitted.held_out.items())
        },
        "transferred_from": fitted.donors,
        "source": SOURCE,
    }


def digits(value: float) -> float:
    """To `DIGITS` significant digits."""
    return float(f"{value:.{DIGITS}g}")


def all_fits(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The entries of `fits` of every GPU."""
    peaks = peaks_of(folder)
    found: dict[str, list[dict[str, Any]]] = {gpu.name: [] for gpu in GPUS}
    table = products.read_products(folder)
    for kind, precisions in ((HALF, HALF_PRECISIONS), (FP8, ["fp8"]), (FP32, ["fp32"])):
        fitted = fit_all(
            products.BASE,
            lambda gpu, kind=kind: products.products_of(table, gpu.rows, kind),
            lambda gpu, kind=kind: chip_of(gpu, peaks[gpu.peaks], kind),
            products.fit_products,
            products.judge,
            products.leave_sources_out,
            lambda rows: rows.flop,
        )
        for gpu in GPUS:
            if gpu.name not in fitted:
                continue
            own = fitted[gpu.name]
            sigma = sigma_of(own, fitted)
            found[gpu.name].append(part_fit("matmul", "forward", "tiles", precisions, products.COEFFICIENTS, own, sigma))
            if kind == HALF:
                tf32 = Fitted(own.parameters, 0, own.flop, {}, [gpu.name])
                entry = part_fit("matmul", "forward", "tiles", ["tf32"], products.COEFFICIENTS, tf32, sigma + TF32_SIGMA)
                found[gpu.name].append(entry)
    rows = attentions.read_attentions(folder)
    for direction, phase in (("fwd", "forward"), ("bwd", "backward")):
        backward = direction == "bwd"
        fitted = fit_all(
            attentions.BASE,
            lambda gpu, direction=direction: attentions.attentions_of(rows, gpu.attention_rows, direction, gpu.attention),
            lambda gpu: chip_of(gpu, peaks[gpu.peaks], HALF),
            lambda own, chip, prior, backward=backward: attentions.fit_attentions(own, chip, prior, backward=backward),
            lambda own, chip, told, backward=backward: attentions.judge(own, chip, told, backward=backward),
            lambda own, chip, prior, backward=backward: attentions.leave_sources_out(own, chip, prior, backward=backward),
            lambda own, backward=backward: attentions.flop_of(own, backward=backward),
        )
        for gpu in GPUS:
            if gpu.name in fitted:
                own = fitted[gpu.name]
                sigma = sigma_of(own, fitted)
                names = attentions.COEFFICIENTS
                variant = gpu.attention[0] if own.points else "transferred"
                entry = part_fit("attention", phase, "fused_attention", HALF_PRECISIONS, names, own, sigma, variant)
                found[gpu.name].append(entry)
    moved = streams.read_streams(folder)
    fitted = fit_all(
        streams.BASE,
        lambda gpu: streams.streams_of(moved, streams.ROWS.get(gpu.name, gpu.rows)),
        lambda gpu: chip_of(gpu, peaks[gpu.peaks], FP32) or chip_of(gpu, peaks[gpu.peaks], HALF),
        streams.fit_streams,
        streams.judge,
        streams.leave_sources_out,
        lambda rows: rows.size_bytes,
    )
    for gpu in GPUS:
        own = fitted[gpu.name]
        precisions = [*HALF_PRECISIONS, "tf32", "fp32", "fp8"]
        entry = part_fit("memory_bound", "forward", "saturation", precisions, streams.NAMES, own, sigma_of(own, fitted))
        found[gpu.name].append(entry)
    return found


def part_of(gpu: CatalogGpu, folder: Path, fits: list[dict[str, Any]]) -> dict[str, Any]:
    """The JSON of one part."""
    row = peaks_of(folder)[gpu.peaks]
    peaks = peak_numbers(gpu, row)
    share = REPORTED_SHARE * (ECC_SHARE if gpu.ecc_in_memory else 1.0)
    memory = float(row["memory_gb"]) * 2**30 * share
    ecc = " and GDDR keeps a sixteenth for error correction, as on a T4 (NeuSight: 15 of 16)" if gpu.ecc_in_memory else ""
    sources: dict[str, dict[str, str]] = {
        "peaks": {
            "kind": "datasheet",
            "text": f"vendor figures gathered from {expanded(row['source'])}; dense, without sparsity",
        },
        "memory": {
            "kind": "derived",
            "text": f"nominal {row['memory_gb']} GB (as peaks) times the share that an A100 of 80 GB reports{ecc}",
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
        version = "an older catalogue (v5)" if "older" in row["price_note"] else "catalogue v8"
        sources["price"] = {"kind": "datasheet", "text": f"on demand at {row['price_note']}: {expanded('prices')}"}
        found["usd_per_hour"] = {
            "value": digits(price),
            "as_of": f"SkyPilot {version}; its commit bears no date here",
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
    names = sorted({name for fit in fits for name in fit["held_out"] if name != "other GPUs"})
    donors = sorted({name for fit in fits for name in fit["transferred_from"]})
    own = f"fitted by calibration.parts to published timings ({'; '.join(expanded(name) for name in names)})" if names else ""
    taken = f"without own rows: the mean of {', '.join(donors)}" if donors else ""
    return "; ".join(text for text in (own, taken) if text) or "fitted by calibration.parts"
