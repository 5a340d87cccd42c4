"""Kernel times of a trace into a profile: one factor for each kind of kernel, judged on shapes that it was not taken from.

A call's time is that of the kernels behind one counted operator, in the midst of the steps: caches, clocks and other streams
are those of the training. A factor is the median of measured / predicted over the shapes of a kind, and moves the whole fit:
its utilisation, its share of the bandwidth and its floor. Shapes are divided in two by turns along their arithmetic; each half
is predicted with the factor of the other, which gives the errors that are shown and the spread that the profile keeps.

Leaves out: kernels without counted shapes (norms, activations, the optimizer), convolutions, and communication.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from parsim.costs.compute.formula import KernelModel, fit_key
from parsim.costs.compute.launches import Launch, element_bytes
from parsim.errors import ImportedFileError
from parsim.formats.kineto import ShapedCall, Trace
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.parts import gpu_named
from parsim.hardware.profile import Profile, SourceEntry
from parsim.hardware.records import HeldOut, OperatorFit
from parsim.report.tables import Column, ReportTable
from parsim.units import format_percent

FEWEST_SHAPES = 4
"""Distinct shapes of a kind: two to take a factor from, and two to judge it on."""
RATES, FLOORS = ("utilisation", "bandwidth_fraction"), ("floor_s",)
"""Coefficients of a fit that are divided by a factor on its seconds, and that are multiplied; efficiencies are divided too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindFactor:
    """Attributes:
    kind, phase: of the fit. factor: on its seconds. shapes: distinct ones. before: median |log(measured / predicted)| of the
    profile as it was. held_out: errors on shapes that the factor was not taken from.
    """

    kind: str
    phase: str
    factor: float
    shapes: int
    before: float
    held_out: HeldOut

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "held_out": self.held_out.model_dump()}


def profile_from_trace(trace: Trace, profile: Profile, precision: str, source: str) -> tuple[Profile, tuple[KindFactor, ...]]:
    """The profile with fits as fast as the kernels of a trace.

    Args:
        trace: of one GPU of the profile, with shapes. precision: of its products. source: text of the new source.

    Raises:
        ImportedFileError: another GPU, no shapes, or too few for every kind of kernel.
    """
    cluster = cluster_from_profile(profile)
    kinds = {device.type.name: device.type for device in cluster.devices}
    part = gpu_named(trace.device)
    if not trace.on_gpu or len(kinds) != 1 or (part is not None and part.name not in kinds):
        raise ImportedFileError(
            f"the trace is of {trace.device or 'a CPU'}, and {profile.name} has {', '.join(kinds)}; give the GPU of the trace "
            "as --on 8xGPU"
        )
    (device,) = kinds.values()
    model = KernelModel(profile, device, precision)
    ratios: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for launch, seconds in _launches(trace.calls, precision):
        ratios.setdefault(fit_key(launch), []).append((launch.flop, seconds / model.price(launch).seconds))
    factors = tuple(
        _factor(kind, phase, [ratio for _, ratio in sorted(rows)])
        for (kind, phase), rows in sorted(ratios.items())
        if len(rows) >= FEWEST_SHAPES
    )
    fitted = {(fit.kind, fit.phase) for fit in profile.compute.operator_fits if fit.precision == precision}
    if not (factors := tuple(entry for entry in factors if (entry.kind, entry.phase) in fitted)):
        counts = ", ".join(f"{len(rows)} of {kind} {phase}" for (kind, phase), rows in sorted(ratios.items())) or "none"
        why = trace.no_shapes or f"{FEWEST_SHAPES} distinct shapes of a kind that {profile.name} has a fit for are needed"
        raise ImportedFileError(
            f"the trace calibrates nothing: {why}; shapes found: {counts}. Record more layers or batch sizes"
        )
    key = f"trace:{source.partition(',')[0]}"
    by_kind = {(entry.kind, entry.phase): entry for entry in factors}
    fits = [
        _scaled(fit, by_kind[fit.kind, fit.phase], key)
        if (fit.kind, fit.phase) in by_kind and (fit.precision, fit.device_type) == (precision, device.name)
        else fit
        for fit in profile.compute.operator_fits
    ]
    changed = profile.model_copy(
        update={
            "compute": profile.compute.model_copy(update={"operator_fits": fits}),
            "sources": dict(profile.sources) | {key: SourceEntry(kind="measurement", text=source)},
        }
    )
    return changed, factors


def _launches(calls: Iterable[ShapedCall], precision: str) -> list[tuple[Launch, float]]:
    """Each distinct shape as a launch, with the median of its seconds."""
    seconds: dict[tuple[str, str, tuple[tuple[str, float], ...], bool], list[float]] = {}
    for call in calls:
        seconds.setdefault((call.kind, call.phase, call.sizes, call.causal), []).append(call.seconds)
    flop = {(call.kind, call.phase, call.sizes, call.causal): call.flop for call in calls}
    return [
        (
            Launch(
                kind=kind,
                function="linear" if kind == "matmul" else "causal" if causal else "plain",
                phase=phase,
                sizes=sizes,
                flop=flop[kind, phase, sizes, causal],
                size_bytes=element_bytes(precision) * _elements(kind, dict(sizes)),
            ),
            median(values),
        )
        for (kind, phase, sizes, causal), values in seconds.items()
    ]


def _elements(kind: str, sizes: Mapping[str, float]) -> float:
    """Of the operands and the result, once."""
    if kind == "attention":
        return 2 * sizes["problems"] * (sizes["queries"] + sizes["keys"]) * sizes["depth"]
    rows, depth, columns = sizes["rows"], sizes["depth"], sizes["columns"]
    return sizes["problems"] * (rows * depth + depth * columns + rows * columns)


def _factor(kind: str, phase: str, ratios: Sequence[float]) -> KindFactor:
    """Of measured / predicted by shape, in the order of their arithmetic."""
    halves = (ratios[::2], ratios[1::2])
    logs = [math.log(ratio / median(halves[1 - half])) for half in (0, 1) for ratio in halves[half]]
    errors = np.abs(logs)
    held_out = HeldOut(
        rows=len(ratios), median=float(np.median(errors)), p90=float(np.quantile(errors, 0.9)), bias=float(np.median(logs))
    )
    before = float(np.median(np.abs(np.log(ratios))))
    return KindFactor(kind=kind, phase=phase, factor=median(ratios), shapes=len(ratios), before=before, held_out=held_out)


def _scaled(fit: OperatorFit, entry: KindFactor, source: str) -> OperatorFit:
    """The fit whose seconds are the factor times as long, with the spread of the held-out shapes."""

    def moved(name: str, value: float) -> float:
        if name in RATES or name.startswith("efficiency_"):
            return value / entry.factor
        return value * entry.factor if name in FLOORS else value

    return fit.model_copy(
        update={
            "coefficients": {name: moved(name, value) for name, value in fit.coefficients.items()},
            "relative_sigma": max(entry.held_out.p90 / 1.645, 0.01),
            "held_out": dict(fit.held_out) | {"trace": entry.held_out},
            "points": entry.shapes,
            "source": source,
        }
    )


def factor_table(factors: Sequence[KindFactor]) -> ReportTable:
    """What the trace changes, and how well it predicts shapes that it was not taken from."""
    rows = [
        (
            f"{entry.kind} {entry.phase}",
            str(entry.shapes),
            f"x {entry.factor:.3g}",
            format_percent(math.expm1(entry.before)),
            format_percent(math.expm1(entry.held_out.median)),
            format_percent(math.expm1(entry.held_out.p90)),
        )
        for entry in factors
    ]
    names = ("shapes", "seconds", "error before", "held-out error", "nine of ten below")
    return ReportTable(
        title="Kernels of the trace against the profile",
        columns=(Column(name="kernels"), *(Column(name=name, numeric=True) for name in names)),
        rows=tuple(rows),
        notes=("Each half of the shapes is predicted with the factor of the other half.",),
    )
