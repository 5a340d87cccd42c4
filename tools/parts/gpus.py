"""Fits of all GPUs: each on its own, then once more drawn towards its family; and the JSON of each part.

A GPU without rows takes the mean of its family (of all GPUs if the family has none). How far that is off is judged by leaving
each GPU out that has rows: its errors under the prior of the others stand under "other GPUs" in `held_out`.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from parsim.costs.compute.formula import ATTENTION_COEFFICIENTS, TILE_COEFFICIENTS, Array
from tools.parts import attentions, products, streams
from tools.parts.catalog import (
    GPUS,
    CatalogGpu,
)
from tools.parts.products import FP4, FP8, FP32, HALF, Chip
from tools.parts.robust import Errors, Prior, named, pooled

if TYPE_CHECKING:
    import pandas as pd

HALF_PRECISIONS = ["bf16", "amp_bf16", "amp_fp16"]
TF32_SIGMA = 0.1
"""Assumed beside a 16-bit fit's own where tf32 takes its coefficients: nobody published rows in tf32."""
DIGITS = 5
LEAST_SIGMA = 0.02
SOURCE = "fit"
OTHERS, DEPTHS = "other GPUs", "other depths"
"""What is left out of a fit beside its sources: the whole GPU, and a third of the depths at a time."""
UNKNOWN_SIGMA = 0.3
HELD_SIGMA = 0.01
"""Of the logarithm of a parameter that a GPU's rows cannot tell: they must not move it."""

KINDS: Mapping[str, tuple[str, str]] = {
    HALF: ("fp16_bf16_tflops", "bf16"),
    FP8: ("fp8_tflops", "fp8"),
    FP4: ("fp4_tflops", "nvfp4"),
    FP32: ("fp32_tflops", "fp32"),
}


@dataclass
class Family:
    """Fits of one kind of kernel over all GPUs.

    Attributes:
        base: prior where no GPU is known. fits: by GPU, the logarithms. untold: by GPU, the parameters that its own rows cannot
            tell, by number. limits: by GPU, watts of its board.
    """

    base: Prior
    limits: Mapping[str, float] = field(default_factory=dict)
    fits: dict[str, Array] = field(default_factory=dict)
    final: dict[str, Array] = field(default_factory=dict)
    untold: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def lenders(self, gpu: CatalogGpu) -> list[CatalogGpu]:
        """The other GPUs with a fit that may stand for this one's."""
        return [other for other in GPUS if other.name != gpu.name and other.name in self.fits and other.lends]

    def prior(self, gpu: CatalogGpu) -> tuple[Prior, list[str]]:
        """From the other GPUs of the family, else from all others; and which they were. Without rows, its chip's mean."""
        others = self.lenders(gpu)
        same = [other.name for other in others if other.chip == gpu.chip != ""]
        if same and gpu.name not in self.fits:
            mean = np.mean([self.final[name] for name in same], axis=0)
            return Prior(self.base.names, mean, self.base.sigma), same
        near = [other.name for other in others if other.family == gpu.family]
        donors = near or sorted((other.name for other in others), key=list(self.fits).index)
        return self.held(gpu, pooled([self.fits[name] for name in donors], self.base.names, self.base)), donors

    def held(self, gpu: CatalogGpu, prior: Prior) -> Prior:
        """The prior with what the GPU's rows cannot tell held at what those that tell it have: of its family, else of all.

        It is how far a burst is above the limit of power, so a family with boards of several limits gives a line over them.
        """
        mean, sigma = prior.mean.copy(), prior.sigma.copy()
        for number in self.untold.get(gpu.name, ()):
            tell = [other for other in self.lenders(gpu) if number not in self.untold[other.name]]
            near = [other for other in tell if other.family == gpu.family]
            if values := [self.fits[other.name][number] for other in near or tell]:
                mean[number], sigma[number] = np.mean(values), HELD_SIGMA
            watts = [math.log(self.limits.get(board.name, 1.0)) for board in (*near, gpu)]
            if len(set(watts[:-1])) > 1 and all(watts):
                mean[number] = np.polyval(np.polyfit(watts[:-1], values, 1), watts[-1])
        return Prior(prior.names, mean, sigma)


def peaks_of(folder: Path) -> dict[str, dict[str, str]]:
    """By name of a GPU of the catalog, its row of peaks.csv with what the catalog adds."""
    with (folder / "peaks.csv").open(encoding="utf-8") as file:
        rows = {row["gpu"]: row for row in csv.DictReader(file)}
    empty = dict.fromkeys(next(iter(rows.values())), "")
    found: dict[str, dict[str, str]] = {}
    for gpu in GPUS:
        row = rows[gpu.peaks] if gpu.peaks else empty
        sources = ";".join(text for text in (row["source"], gpu.numbers_from.replace(";", ",")) if text)
        found[gpu.name] = {**row, **gpu.numbers, "source": sources}
    return found


def chip_of(gpu: CatalogGpu, peaks: Mapping[str, Mapping[str, str]], kind: str) -> Chip | None:
    """None where no peak of that precision is published."""
    row = peaks[gpu.name]
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
    untold: Callable[[Any], tuple[int, ...]] = lambda _: (),
    watts: Mapping[str, float] | None = None,
) -> dict[str, Fitted]:
    """Fit one kind of kernel for every GPU that has a peak of its precision. base: prior where nothing is known. untold:
    numbers of the parameters that rows cannot tell. watts: of boards, at most."""
    data = {gpu.name: rows_of(gpu) for gpu in GPUS if chip(gpu) is not None}
    family = Family(base, limits=watts or {}, untold={name: untold(rows) for name, rows in data.items()})
    for gpu in sorted(GPUS, key=lambda gpu: bool(family.untold.get(gpu.name))):  # those that tell everything first
        own = chip(gpu)
        if own is not None and len(data[gpu.name]):
            family.fits[gpu.name] = fit(data[gpu.name], own, family.held(gpu, base))
    found: dict[str, Fitted] = {}
    for gpu in sorted(
        GPUS, key=lambda gpu: gpu.name not in family.fits
    ):  # a board without rows is what its chip turned out to be
        own = chip(gpu)
        if own is None:
            continue
        rows = data[gpu.name]
        prior, donors = family.prior(gpu)
        theta = fit(rows, own, prior) if len(rows) else prior.mean
        family.final[gpu.name] = theta
        held: dict[str, Errors] = {}
        if len(rows):
            held = leave_out(rows, own, prior)
            if donors:
                held[OTHERS] = judge(rows, own, named(prior.names, prior.mean))
        flop = flop_of(rows) if len(rows) else np.array([1e8, 1e13])
        limits = (float(flop.min()), float(flop.max()))
        found[gpu.name] = Fitted(named(prior.names, theta), len(rows), limits, held, [] if len(rows) else donors)
    return found


def sigma_of(fitted: Fitted, all_fitted: Mapping[str, Fitted]) -> float:
    """Relative spread of the prices, from the errors on what the fit had not seen.

    Of several sources the typical one left out; of a single source its other depths; without rows, the typical GPU left out.
    """
    if fitted.points:
        sources = [error.median for name, error in fitted.held_out.items() if name not in (OTHERS, DEPTHS)]
        if len(sources) < 2 and DEPTHS in fitted.held_out:
            sources = [fitted.held_out[DEPTHS].median]
    else:
        lenders = [all_fitted[gpu.name] for gpu in GPUS if gpu.lends and gpu.name in all_fitted]
        sources = [entry.held_out[OTHERS].median for entry in lenders if OTHERS in entry.held_out]
    return max(LEAST_SIGMA, 1.4826 * float(np.median(sources))) if sources else UNKNOWN_SIGMA


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
    for kind, precisions in ((HALF, HALF_PRECISIONS), (FP8, ["fp8"]), (FP4, ["nvfp4"]), (FP32, ["fp32"])):
        _add(found, _product_fits(table, peaks, kind, precisions))
    rows = attentions.read_attentions(folder)
    for direction in ("fwd", "bwd"):
        _add(found, _attention_fits(rows, peaks, direction))
    _add(found, _stream_fits(streams.read_streams(folder), peaks))
    return found


def _add(found: dict[str, list[dict[str, Any]]], entries: Mapping[str, list[dict[str, Any]]]) -> None:
    for name, own in entries.items():
        found[name] += own


def _product_fits(
    table: pd.DataFrame, peaks: Mapping[str, Mapping[str, str]], kind: str, precisions: Sequence[str]
) -> dict[str, list[dict[str, Any]]]:
    """Matrix products in one precision; tf32 takes the coefficients of the 16-bit fit."""

    def rows_of(gpu: CatalogGpu) -> products.Products:
        return products.products_of(table, gpu.rows, kind)

    def chip(gpu: CatalogGpu) -> Chip | None:
        return chip_of(gpu, peaks, kind)

    def leave_out(rows: products.Products, own: Chip, prior: Prior) -> dict[str, Errors]:
        return {**products.errors_without_sources(rows, own, prior), DEPTHS: products.leave_shapes_out(rows, own, prior)}

    watts = {name: float(row["tdp_w"]) for name, row in peaks.items() if row["tdp_w"]}
    fitted = fit_all(
        products.BASE,
        rows_of,
        chip,
        products.fit_products,
        products.judge,
        leave_out,
        lambda rows: np.asarray(rows.flop),
        products.untold,
        watts,
    )
    fitted = no_slower(fitted, chip, watts)
    found: dict[str, list[dict[str, Any]]] = {}
    for name, own in fitted.items():
        sigma = sigma_of(own, fitted)
        found[name] = [part_fit("matmul", "forward", "tiles", precisions, TILE_COEFFICIENTS, own, sigma)]
        if kind == HALF:
            tf32 = Fitted(own.parameters, 0, own.flop, {}, [name])
            found[name].append(part_fit("matmul", "forward", "tiles", ["tf32"], TILE_COEFFICIENTS, tf32, sigma + TF32_SIGMA))
    return found


def no_slower(
    fitted: Mapping[str, Fitted], chip: Callable[[CatalogGpu], Chip | None], watts: Mapping[str, float]
) -> dict[str, Fitted]:
    """The fits, with no large product slower than on a measured board of the family with no more watts, peak and bandwidth.

    Boards of one silicon differ by less than fits to tables of different libraries do.
    """
    found = dict(fitted)
    boards = {gpu.name: (gpu.family, own, watts.get(gpu.name, 0.0)) for gpu in GPUS if (own := chip(gpu)) is not None}
    for name, (family, own, limit) in sorted(boards.items(), key=lambda entry: entry[1][2]):
        lesser = [
            other
            for other, (kin, its, most) in boards.items()
            if kin == family and found[other].points and 0 < most <= limit and its.is_within(own)
        ]
        seconds = products.large_s(own, found[name].parameters)
        least = min((products.large_s(boards[other][1], found[other].parameters) for other in lesser), default=seconds)
        raised = found[name].parameters["utilisation"] * max(1.0, seconds / least)
        found[name] = replace(found[name], parameters={**found[name].parameters, "utilisation": raised})
    return found


def _attention_fits(
    table: pd.DataFrame, peaks: Mapping[str, Mapping[str, str]], direction: str
) -> dict[str, list[dict[str, Any]]]:
    """Fused attention in one direction ("fwd", "bwd"), of the library that is each GPU's default."""
    backward = direction == "bwd"
    libraries = {gpu.name: gpu.attention[0] for gpu in GPUS}

    def rows_of(gpu: CatalogGpu) -> attentions.Attentions:
        return attentions.attentions_of(table, gpu.attention_rows, direction, gpu.attention)

    def chip(gpu: CatalogGpu) -> Chip | None:
        return chip_of(gpu, peaks, HALF)

    def fit(rows: attentions.Attentions, own: Chip, prior: Prior) -> Array:
        return attentions.fit_attentions(rows, own, prior, backward=backward)

    def judge(rows: attentions.Attentions, own: Chip, told: Mapping[str, float]) -> Errors:
        return attentions.judge(rows, own, told, backward=backward)

    def leave_out(rows: attentions.Attentions, own: Chip, prior: Prior) -> dict[str, Errors]:
        return attentions.errors_without_sources(rows, own, prior, backward=backward)

    def flop(rows: attentions.Attentions) -> Array:
        return attentions.flop_of(rows, backward=backward)

    fitted = fit_all(attentions.BASE, rows_of, chip, fit, judge, leave_out, flop)
    phase = "backward" if backward else "forward"
    return {
        name: [
            part_fit(
                "attention",
                phase,
                "fused_attention",
                HALF_PRECISIONS,
                ATTENTION_COEFFICIENTS,
                own,
                sigma_of(own, fitted),
                libraries[name] if own.points else "transferred",
            )
        ]
        for name, own in fitted.items()
    }


def _stream_fits(table: pd.DataFrame, peaks: Mapping[str, Mapping[str, str]]) -> dict[str, list[dict[str, Any]]]:
    """Kernels that only move memory, for every precision."""

    def rows_of(gpu: CatalogGpu) -> streams.StreamRows:
        return streams.streams_of(table, streams.ROWS.get(gpu.name, gpu.rows))

    def chip(gpu: CatalogGpu) -> Chip | None:
        return chip_of(gpu, peaks, FP32) or chip_of(gpu, peaks, HALF)

    fitted = fit_all(
        streams.BASE,
        rows_of,
        chip,
        streams.fit_streams,
        streams.judge,
        streams.errors_without_sources,
        lambda rows: np.asarray(rows.size_bytes),
    )
    precisions = [*HALF_PRECISIONS, "tf32", "fp32", "fp8"]
    return {
        name: [part_fit("memory_bound", "forward", "saturation", precisions, streams.NAMES, own, sigma_of(own, fitted))]
        for name, own in fitted.items()
    }
