"""The checked inputs of both engines besides the graph, and the Timeline both return."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from parsim.arrays import Ints
from parsim.costs.estimate import OverlapFactors
from parsim.engines.deadlock import describe_task
from parsim.errors import GraphError
from parsim.graph.columns import Columns
from parsim.timeline import Timeline


def checked_durations_s(
    columns: Columns, durations_s: ArrayLike, *, dimensions: int, step: int | None = None
) -> NDArray[np.float64]:
    """`durations_s` as contiguous float64 of shape [n] or [S, n]; `step` of a program, for the message.

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
        sample = f" in sample {place[0]}" if dimensions == 2 else "" if step is None else f" in step {step}"
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


class Slowdown(NamedTuple):
    """How what runs at once slows one another.

    Attributes:
        compute, communication: factors while the other side runs on the same core.
        core: int64 [world_size], the core of each rank, numbered from 0.
        divided: what communicates at once on a core slows one another.
    """

    compute: float
    communication: float
    core: Ints
    divided: bool = False

    @property
    def is_none(self) -> bool:
        """Whether nothing ever slows anything."""
        return self.compute == self.communication == 1.0 and not self.shares_cores and not self.divided

    @property
    def shares_cores(self) -> bool:
        return len(np.unique(self.core)) < len(self.core)


def checked_slowdown(overlap: OverlapFactors | None, world_size: int) -> Slowdown:
    """Factors 1.0 and a core for every rank for None.

    Raises GraphError unless both factors are finite and >= 1, and every rank has a core (if any has).
    """
    own = np.arange(world_size, dtype=np.int64)
    if overlap is None:
        return Slowdown(1.0, 1.0, own)
    factors = float(overlap.compute), float(overlap.communication)
    if not all(math.isfinite(factor) and factor >= 1 for factor in factors):
        raise GraphError(
            f"overlap factors must be finite and >= 1 (1 = no slowdown), got compute {factors[0]}, communication {factors[1]}"
        )
    if not overlap.core_of_rank:
        return Slowdown(*factors, own, overlap.communications_share)
    if len(overlap.core_of_rank) < world_size:
        raise GraphError(f"core_of_rank names the cores of {len(overlap.core_of_rank)} ranks; the graph has {world_size}")
    _, core = np.unique(np.array(overlap.core_of_rank[:world_size], dtype=np.int64), return_inverse=True)
    return Slowdown(*factors, np.asarray(core, dtype=np.int64).reshape(world_size), overlap.communications_share)


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
