"""From collectives, transfers and overlaps as they were timed to the points of a profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from calibration.fit.drift import Drift, RoundTiming, estimate_drift
from calibration.rounds.request import entries_of
from parsim.costs.communication.closed_forms import regimes_s
from parsim.hardware.profile import CollectiveFit, CollectivePoint, Overlap, OverlapPoint
from parsim.model.model import Model
from parsim.numeric import Floats
from parsim.units import KIB

LEAST_S = 1e-9
MISHAPS = 0.02
"""Share of the timings of one operation and size that is cut."""

STALL_S = 0.1
"""What a call can wait for a thread that uses up its time slice; longer ones were somebody else's."""


def all_reduce_sizes(models: Sequence[Model], sizes_bytes: Sequence[int], element_bytes: int) -> tuple[int, ...]:
    """The sizes asked for, and the gradients of each model as one bucket where they lie within or a little above them."""
    whole = {model.parameter_count * element_bytes for model in models}
    return tuple(sorted({*sizes_bytes, *(size for size in whole if KIB <= size <= 2 * max(sizes_bytes))}))


def communication_drift(entries: Sequence[Mapping[str, Any]]) -> Drift:
    """Common factors of the rounds of `collectives`; an item is an operation over a group at a size."""
    return estimate_drift(
        RoundTiming((entry["operation"], *entry["group"], entry["size_bytes"]), entry["round"], value)
        for entry in entries
        for repeat in entry["seconds"]
        for value in repeat
    )


def collective_points(raw: Mapping[str, Any]) -> list[CollectivePoint]:
    """Mean over rounds, repeats and places in the chain, by operation, group and size; sorted. The common factor of a
    round is divided out.

    Rare long calls count in the mean over all points (`stalling_s`), which one point has too few calls to tell.
    """
    entries = [entry for _, entry in entries_of(raw, "collectives")]
    drift = communication_drift(entries)
    found: dict[tuple[str, tuple[int, ...], int], list[float]] = {}
    for entry in entries:
        values = [drift.steady(value, entry["round"]) for repeat in entry["seconds"] for value in repeat]
        found.setdefault((entry["operation"], tuple(entry["group"]), entry["size_bytes"]), []).extend(values)
    points = []
    stalls_s = stalling_s(list(found.values()))
    for (operation, group, size_bytes), seconds in sorted(found.items()):
        mean_s, spread = mean_and_spread(seconds)
        mean_s, spread = mean_s + stalls_s, spread * mean_s / (mean_s + stalls_s)
        points.append(
            CollectivePoint(
                operation=operation,
                group=list(group),
                size_bytes=size_bytes,
                seconds=max(mean_s, LEAST_S),
                spread=spread,
                repeats=len(seconds),
                source="collectives",
            )
        )
    return points


def stalling_s(points: Sequence[Sequence[float]]) -> float:
    """Seconds per call that `mean_and_spread` cuts off, in the mean over the calls of all points; of one call STALL_S at most.
    Points whose calls take long in any case tell nothing of it."""
    cut = [
        np.minimum(np.asarray(seconds) - usual, STALL_S)
        for seconds, usual in ((seconds, _without_mishaps(seconds)) for seconds in points)
        if usual.mean() < STALL_S / 10
    ]
    return float(np.concatenate(cut).mean()) if cut else 0.0


def mean_and_spread(seconds: Sequence[float]) -> tuple[float, float]:
    """Mean, and standard deviation over it, with the longest MISHAPS of the values cut to the next one.

    Not the median: a call that waits for its core is rare but long, and every call holds up the step. Cut, so that one mishap
    of another program does not count for a whole point.
    """
    values = _without_mishaps(seconds)
    mean = float(values.mean())
    return mean, float(values.std() / mean) if mean > 0 else 0.0


def _without_mishaps(seconds: Sequence[float]) -> Floats:
    """float64 [len(seconds)], in their order."""
    values = np.asarray(seconds, dtype=np.float64)
    return np.minimum(values, float(np.sort(values)[-1 - int(MISHAPS * len(values))]))


def overlap_stall(slower: float, longer: float) -> float:
    """The factor of computation beside an operation that is priced at max(1, longer) times its time between computations.

    Args:
        slower: how much longer computation takes while it and an operation both run.
        longer: what the operation takes then, over the same between computations.

    Beside one operation of d seconds a computation loses `longer` * d * (1 - 1/`slower`) seconds, and that is what it loses in
    a simulation with the factor returned.
    """
    return 1.0 / (1.0 - min(1.0, longer) * (1.0 - 1.0 / slower))


def overlap_factors(entries: Sequence[Mapping[str, Any]], fits: Sequence[CollectiveFit]) -> Overlap | None:
    """Slowdown of every operation and size and of all_reduce as a whole, at least 1; None with one rank.

    Communication: the mean time beside computation over that which the fits give for the same operation between computations.
    Computation: the median over models, rounds and ranks, brought to that time: what an operation takes less beside
    computation (whose threads hardly slept) does not hold computation up (`overlap_stall`).
    """
    groups: dict[tuple[str, int, int], list[Mapping[str, Any]]] = {}
    for entry in entries:
        groups.setdefault((entry["operation"], entry["group_size"], entry["size_bytes"]), []).append(entry)
    alone = {(fit.operation, fit.group_size): fit for fit in fits}
    points = []
    for (operation, group_size, size_bytes), alike in sorted(groups.items()):
        computing = [factor for entry in alike for factor in entry["computation"] if factor is not None]
        beside = [seconds for entry in alike for seconds in entry["communication_s"]]
        fit = alone.get((operation, group_size))
        if computing and beside and fit is not None:
            longer = mean_and_spread(beside)[0] / regimes_s(fit.regimes, size_bytes)
            points.append(
                OverlapPoint(
                    operation=operation,
                    group_size=group_size,
                    size_bytes=size_bytes,
                    compute_factor=overlap_stall(max(1.0, float(np.median(computing))), longer),
                    communication_factor=max(1.0, longer),
                    repeats=len(beside),
                    source="overlap",
                )
            )
    reduced = [point for point in points if point.operation == "all_reduce"]
    if not reduced:
        return None
    return Overlap(
        compute_factor=float(np.median([point.compute_factor for point in reduced])),
        communication_factor=float(np.median([point.communication_factor for point in reduced])),
        points=points,
        source="overlap",
    )
