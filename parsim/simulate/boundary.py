"""What both engines are given beside the graph, checked; and the Timeline both return."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from parsim.costs.estimate import OverlapFactors
from parsim.errors import GraphError
from parsim.graph.columns import Columns
from parsim.simulate.deadlock import describe_task
from parsim.timeline import Timeline


def checked_durations_s(columns: Columns, durations_s: ArrayLike, *, dimensions: int) -> NDArray[np.float64]:
    """`durations_s` as contiguous float64 of shape [n] or [S, n].

    Raises GraphError for another shape, or for a negative or non-finite entry (which task, which value).
    """
    array = np.ascontiguousarray(durations_s, dtype=np.float64)
    n = columns.size
    if array.ndim != dimensions or array.shape[-1] != n:
        wanted = f"[{n}]" if dimensions == 1 else f"[samples, {n}]"
        raise GraphError(f"durations_s must have shape {wanted}, one entry per task, got {list(array.shape)}")
    good = (array >= 0) & (array < np.inf)
    if not good.all():
        place = tuple(int(axis[0]) for axis in np.nonzero(~good))
        sample = f" in sample {place[0]}" if dimensions == 2 else ""
        raise GraphError(
            f"{describe_task(columns.graph, place[-1])} has duration {array[place]} s{sample}; "
            "durations must be finite and >= 0: check the cost of this work"
        )
    return array


def checked_unit_durations_s(
    columns: Columns, durations_s: ArrayLike, unit: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """`durations_s` as contiguous float64 [S, units], `unit` as int64 [n]. Raises GraphError as `checked_durations_s`."""
    array, column = np.ascontiguousarray(durations_s, dtype=np.float64), np.ascontiguousarray(unit, dtype=np.int64)
    if array.ndim != 2 or column.shape != (columns.size,):
        raise GraphError(
            f"durations_s must have shape [samples, units] and unit [{columns.size}], got {list(array.shape)} and "
            f"{list(column.shape)}"
        )
    if columns.size and not 0 <= int(column.min()) <= int(column.max()) < array.shape[1]:
        raise GraphError(f"unit names columns {column.min()} to {column.max()}, durations_s has 0 to {array.shape[1] - 1}")
    good = (array >= 0) & (array < np.inf)
    for sample, place in np.argwhere(~good):
        tasks = np.flatnonzero(column == place)
        if len(tasks):
            raise GraphError(
                f"{describe_task(columns.graph, int(tasks[0]))} has duration {array[sample, place]} s in sample {sample}; "
                "durations must be finite and >= 0: check the cost of this work"
            )
    return array, column


def checked_factors(overlap: OverlapFactors | None) -> tuple[float, float]:
    """(compute, communication) factors, 1.0 for None. Raises GraphError unless both are finite and >= 1."""
    if overlap is None:
        return 1.0, 1.0
    factors = float(overlap.compute), float(overlap.communication)
    if not all(math.isfinite(factor) and factor >= 1 for factor in factors):
        raise GraphError(
            f"overlap factors must be finite and >= 1 (1 = no slowdown), got compute {factors[0]}, communication {factors[1]}"
        )
    return factors


def simulated_timeline(columns: Columns, start_s: NDArray[np.float64], end_s: NDArray[np.float64]) -> Timeline:
    """One row per task and resource, task by task, from start and end per task (float64 [n])."""
    rows = columns.uses.row_numbers
    return Timeline(
        source="simulated",
        resources=tuple(map(str, columns.resources)),
        task=rows,
        resource=columns.uses.values,
        start_s=start_s[rows],
        end_s=end_s[rows],
    )
