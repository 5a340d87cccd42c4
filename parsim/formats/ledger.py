"""Where the steps of a trace went, as a ledger from the ideal to the measured time; its entries sum to the step.

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

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from parsim.formats.kineto import KINDS, PRODUCTS, Trace
from parsim.numeric import Bools, Floats
from parsim.predict.breakdown import covered_until, union

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

    Attributes:
        step_s: the sum of compute_s, the exposed, loading, gaps and idle. communication_busy_s counts hidden communication too.
        flop: of a step. utilisation: flop / (step_s * peak). top: the kernels that take longest.
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

    Args:
        trace: of one rank. peak_flop_per_s: of its device in the precision of the run (None: unknown).
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
    """Seconds of loading, of launch gaps and of idleness in which nothing runs."""
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
