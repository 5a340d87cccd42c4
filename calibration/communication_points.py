"""From collectives, transfers and overlaps as they were timed to the points of a profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from calibration.drift import Drift, Observation, estimate_drift, robust_sigma
from calibration.raw_points import entries_of
from parsim.hardware.profile import CollectivePoint, Overlap, OverlapPoint
from parsim.model.model import Model
from parsim.units import KIB

LEAST_S = 1e-9


def all_reduce_sizes(models: Sequence[Model], sizes_bytes: Sequence[int], element_bytes: int) -> tuple[int, ...]:
    """The sizes asked for, and the gradients of each model as one bucket where they lie within or a little above them."""
    whole = {model.parameter_count * element_bytes for model in models}
    return tuple(sorted({*sizes_bytes, *(size for size in whole if KIB <= size <= 2 * max(sizes_bytes))}))


def communication_drift(entries: Sequence[Mapping[str, Any]]) -> Drift:
    """Common factors of the rounds of `collectives`; an item is an operation over a group at a size."""
    return estimate_drift(
        Observation((entry["operation"], *entry["group"], entry["size_bytes"]), entry["round"], value)
        for entry in entries
        for repeat in entry["seconds"]
        for value in repeat
    )


def collective_points(raw: Mapping[str, Any]) -> list[CollectivePoint]:
    """Median over rounds, repeats and places in the chain, by operation, group and size; sorted. What was common to all that
    was measured in a round is divided out."""
    entries = [entry for _, entry in entries_of(raw, "collectives")]
    drift = communication_drift(entries)
    found: dict[tuple[str, tuple[int, ...], int], list[float]] = {}
    for entry in entries:
        values = [drift.steady(value, entry["round"]) for repeat in entry["seconds"] for value in repeat]
        found.setdefault((entry["operation"], tuple(entry["group"]), entry["size_bytes"]), []).extend(values)
    return [
        CollectivePoint(
            operation=operation,
            group=list(group),
            size_bytes=size_bytes,
            seconds=max(float(np.median(seconds)), LEAST_S),
            spread=robust_sigma(seconds),
            repeats=len(seconds),
            source="collectives",
        )
        for (operation, group, size_bytes), seconds in sorted(found.items())
    ]


def overlap_factors(entries: Sequence[Mapping[str, Any]]) -> Overlap | None:
    """Medians over models, rounds and ranks, at least 1, of every operation and size and of all_reduce as a whole; None if
    nothing ran side by side (one rank)."""
    groups: dict[tuple[str, int, int], list[Mapping[str, Any]]] = {}
    for entry in entries:
        groups.setdefault((entry["operation"], entry["group_size"], entry["size_bytes"]), []).append(entry)
    points = []
    for (operation, group_size, size_bytes), alike in sorted(groups.items()):
        computing, communicating = _factors(alike)
        if computing and communicating:
            points.append(
                OverlapPoint(
                    operation=operation,
                    group_size=group_size,
                    size_bytes=size_bytes,
                    compute_factor=_at_least_one(computing),
                    communication_factor=_at_least_one(communicating),
                    repeats=len(communicating),
                    source="overlap",
                )
            )
    computing, communicating = _factors([entry for entry in entries if entry["operation"] == "all_reduce"])
    if not computing and not communicating:
        return None
    return Overlap(
        compute_factor=_at_least_one(computing),
        communication_factor=_at_least_one(communicating),
        points=points,
        source="overlap",
    )


def _factors(entries: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    """What was found of computation and of communication."""
    computing = [factor for entry in entries for factor in entry["computation"] if factor is not None]
    return computing, [entry["communication"] for entry in entries if entry["communication"] is not None]


def _at_least_one(factors: Sequence[float]) -> float:
    """Running beside something else speeds nothing up: what looks like it is a processor that was woken already."""
    return max(1.0, float(np.median(factors))) if factors else 1.0
