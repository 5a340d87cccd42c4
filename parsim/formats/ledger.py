"""What a trace says: where its steps went, as a ledger from the ideal to the measured time; and factors on a profile's kernels.

At every moment of the recorded steps the rank is in the first of these that holds:

    compute                 a kernel (or an operator of a CPU) runs that is neither communication nor a copy
    exposed communication   communication runs
    exposed copies          a copy to, from or on the device runs
    data loading            nothing runs, and the host has not yet launched what runs next, since it fetches data
    launch gaps             nothing runs, and the host has not yet launched what runs next
    idle                    nothing runs although it was launched (it waits for the device), or nothing tells why

Compute is divided by the arithmetic behind it: `ideal` is that arithmetic at the device's peak; `slow kernels` is what kernels
with arithmetic take beyond; `uncounted products` are kernels that multiply matrices by their name, whose shapes no operator
tells; `other kernels` have none (norms, activations, optimizer: bound by memory). On a CPU a
gap between operators is the interpreter's: `launch gaps`.

Arithmetic is counted as executed, recomputation included. So `utilisation` is the hardware FLOP utilisation; it equals the MFU
if nothing is recomputed.
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
from parsim.formats.kineto import KINDS, PRODUCTS, ShapedCall, Trace
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.parts import gpu_named
from parsim.hardware.profile import Profile, SourceEntry
from parsim.hardware.records import HeldOut, OperatorFit
from parsim.numeric import Bools, Floats
from parsim.predict.breakdown import covered_until, union
from parsim.report.tables import ReportTable, columns_of
from parsim.units import format_percent

TOP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTotal:
    """All calls of one kernel or operator: seconds per step, calls per step, and share of the peak (None: not counted)."""

    name: str
    seconds: float
    calls: float
    share_of_peak: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLedger:
    """Seconds of the mean step. `ideal_s`, `slow_kernels_s`: None without recorded shapes or a known peak.

    With `uncounted_s` above 0 the arithmetic of a step is more than `flop`, and the utilisation higher.

    Attributes: step_s: the sum of compute_s, the exposed, loading, gaps and idle. communication_busy_s counts hidden
        communication too. flop: of a step. utilisation: flop / (step_s * peak). top: the kernels that take longest.
    """

    step_s: float
    compute_s: float
    exposed_communication_s: float
    exposed_copies_s: float
    loading_s: float
    launch_gaps_s: float
    idle_s: float
    communication_busy_s: float
    flop: float
    peak_flop_per_s: float | None
    ideal_s: float | None
    slow_kernels_s: float | None
    other_kernels_s: float | None
    uncounted_s: float
    top: tuple[KernelTotal, ...]

    @property
    def utilisation(self) -> float | None:
        return None if self.ideal_s is None or self.step_s <= 0 else self.ideal_s / self.step_s

    def entries(self) -> list[tuple[str, float]]:
        """Name and seconds; they sum to the step."""
        if self.ideal_s is None or self.slow_kernels_s is None or self.other_kernels_s is None:
            compute = [("compute", self.compute_s)]
        else:
            compute = [
                ("ideal: arithmetic at the peak", self.ideal_s),
                ("slow kernels: arithmetic below the peak", self.slow_kernels_s),
                *([("uncounted products: shapes not recorded", self.uncounted_s)] if self.uncounted_s else []),
                ("other kernels: no counted arithmetic", self.other_kernels_s),
            ]
        return [
            *compute,
            ("exposed communication", self.exposed_communication_s),
            ("exposed copies", self.exposed_copies_s),
            ("data loading", self.loading_s),
            ("launch gaps: the host is late", self.launch_gaps_s),
            ("idle", self.idle_s),
        ]

    def to_dict(self) -> dict[str, Any]:
        document = asdict(self)
        top = document.pop("top")
        return {**document, "utilisation": self.utilisation, "kernels": list(top)}


def ledger_of(trace: Trace, peak_flop_per_s: float | None) -> TraceLedger:
    """The ledger of the mean step.

    Args: trace: of one rank. peak_flop_per_s: of its device in the precision of the run (None: unknown).
    """
    rows = trace.activities
    compute, communication, copies = (rows.kind == KINDS.index(kind) for kind in KINDS)
    edges = np.unique(np.concatenate([[0.0, trace.window_s], rows.start_s, rows.end_s]))
    computing, sending, copying = (_covers(trace, kind, edges) for kind in (compute, communication, copies))
    lengths = np.diff(edges)
    nothing = ~(computing | sending | copying)
    loading_s, gaps_s, idle_s = _gaps(trace, edges, nothing)
    steps = trace.steps
    compute_s = float(lengths[computing].sum()) / steps
    flop = float(rows.flop.sum()) / steps
    ideal = slow = other = None
    uncounted = 0.0
    if peak_flop_per_s is not None and not trace.no_shapes and flop > 0:
        # Kernels may overlap: time with arithmetic counts as such, and the ideal cannot exceed it.
        arithmetic = _covers(trace, compute & (rows.flop > 0), edges)
        with_flop_s = float(lengths[arithmetic].sum()) / steps
        ideal = flop / peak_flop_per_s
        slow = with_flop_s - ideal
        named = np.array([bool(PRODUCTS.search(name)) for name in rows.names], dtype=bool)
        products = _covers(trace, compute & named[rows.name] & (rows.flop == 0), edges) & ~arithmetic
        uncounted = float(lengths[products].sum()) / steps if trace.on_gpu else 0.0
        other = max(0.0, compute_s - with_flop_s - uncounted)
    return TraceLedger(
        step_s=trace.step_s,
        compute_s=compute_s,
        exposed_communication_s=float(lengths[sending & ~computing].sum()) / steps,
        exposed_copies_s=float(lengths[copying & ~computing & ~sending].sum()) / steps,
        loading_s=loading_s / steps,
        launch_gaps_s=gaps_s / steps,
        idle_s=idle_s / steps,
        communication_busy_s=float(lengths[sending].sum()) / steps,
        flop=flop,
        peak_flop_per_s=peak_flop_per_s,
        ideal_s=ideal,
        slow_kernels_s=slow,
        other_kernels_s=other,
        uncounted_s=uncounted,
        top=_top(trace, compute, peak_flop_per_s),
    )


def _covers(trace: Trace, rows: Bools, edges: Floats) -> Bools:
    """bool [edges - 1]: whether one of these activities runs in the piece between two edges."""
    begun = np.searchsorted(edges, trace.activities.start_s[rows])
    ended = np.searchsorted(edges, trace.activities.end_s[rows])
    change = np.zeros(len(edges), dtype=np.int64)
    np.add.at(change, begun, 1)
    np.add.at(change, ended, -1)
    covered: Bools = np.cumsum(change)[:-1] > 0
    return covered


def _gaps(trace: Trace, edges: Floats, nothing: Bools) -> tuple[float, float, float]:
    begin, end = edges[:-1][nothing], edges[1:][nothing]
    if not len(begin):
        return 0.0, 0.0, 0.0
    late_until, rows = end, trace.activities
    if trace.on_gpu:
        after = np.searchsorted(rows.start_s, end, side="left")
        launched = np.append(rows.launched_s, np.nan)[np.minimum(after, len(rows.start_s))]
        late_until = np.where(np.isnan(launched), begin, np.clip(launched, begin, end))
    late = float((late_until - begin).sum())
    first, last, _ = union(trace.loading[:, 0], trace.loading[:, 1])
    loading = float((covered_until(first, last, late_until) - covered_until(first, last, begin)).sum())
    return loading, late - loading, float((end - begin).sum()) - late


def _top(trace: Trace, compute: Bools, peak_flop_per_s: float | None) -> tuple[KernelTotal, ...]:
    rows = trace.activities
    name = rows.name[compute]
    seconds = np.bincount(name, (rows.end_s - rows.start_s)[compute], minlength=len(rows.names))
    calls = np.bincount(name, minlength=len(rows.names))
    flop = np.bincount(name, rows.flop[compute], minlength=len(rows.names))
    return tuple(
        KernelTotal(
            name=rows.names[number],
            seconds=float(seconds[number]) / trace.steps,
            calls=float(calls[number]) / trace.steps,
            share_of_peak=float(flop[number] / (seconds[number] * peak_flop_per_s))
            if peak_flop_per_s and flop[number] > 0
            else None,
        )
        for number in np.argsort(-seconds, kind="stable")[:TOP].tolist()
        if seconds[number] > 0
    )


# Kernel times of a trace into a profile: one factor for each kind of kernel, judged on shapes that it was not taken from.
#
# A call's time is that of the kernels behind one counted operator, in the midst of the steps. A factor is the median of
# measured / predicted over the shapes of a kind, and moves the whole fit: its utilisation, its share of the bandwidth and its
# floor. Shapes are divided in two by turns along their arithmetic; each half is predicted with the factor of the other, which
# gives the errors that are shown and the spread that the profile keeps.
#
# Leaves out: kernels without counted shapes (norms, activations, the optimizer), convolutions, and communication.


FEWEST_SHAPES = 4
"""Distinct shapes of a kind: two to take a factor from, and two to judge it on."""
RATES, FLOORS = ("utilisation", "bandwidth_fraction"), ("floor_s",)
"""Coefficients of a fit that are divided by a factor on its seconds, and that are multiplied; efficiencies are divided too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindFactor:
    """Attributes: kind, phase: of the fit. factor: on its seconds. shapes: distinct ones. before: median |log(measured /
    predicted)| of the profile as it was. held_out: errors on shapes that the factor was not taken from.
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

    Args: trace: of one GPU of the profile, with shapes. precision: of its products. source: text of the new source.
    Raises: ImportedFileError: another GPU, no shapes, or too few for every kind of kernel.
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
    return ReportTable(
        title="Kernels of the trace against the profile",
        columns=columns_of(
            *("kernels", "shapes", "seconds", "error before", "held-out error", "nine of ten below"), words=("kernels",)
        ),
        rows=tuple(rows),
        notes=("Each half of the shapes is predicted with the factor of the other half.",),
    )
