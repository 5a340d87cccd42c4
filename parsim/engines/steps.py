"""Steps in a row, as the executor makes them: a rank begins one when all that it did in the one before has ended.

So the parameters that ZeRO gathers at a step's end are there before the next one reads them, while a rank that is done early
does not wait for the others. Loading alone may run ahead (`OverlapFactors.loads_ahead`).
"""

from __future__ import annotations

from itertools import product

import numpy as np
from numpy.typing import ArrayLike, NDArray

from parsim.costs.estimate import OverlapFactors
from parsim.engines import static
from parsim.engines.compile import CompiledGraph
from parsim.engines.program import Part, TrainingProgram
from parsim.graph.columns import Columns, Ints
from parsim.graph.task import HOST


def mean_step_s(
    compiled: CompiledGraph, durations_s: ArrayLike, overlap: OverlapFactors, *, steps: int, unit: Ints | None = None
) -> NDArray[np.float64]:
    """float64 [S]: the mean of `steps` steps in a row, for every row of `durations_s`. Else as `static.step_times_s`."""
    together = waiting_together(compiled.columns, overlap)
    return static.step_times_s(compiled, durations_s, steps=steps, overlap=overlap, unit=unit, together=together)


def waiting_together(columns: Columns, overlap: OverlapFactors) -> Ints:
    """int64 [resources]: a number for each, equal for those that begin a step together, which are all of a rank."""
    if not overlap.loads_ahead:
        return columns.resource_rank
    loads = np.array([resource.stream == HOST for resource in columns.resources], dtype=np.bool_)
    return np.where(loads, columns.resource_rank + columns.world_size, columns.resource_rank)


def carried_by_steps(columns: Columns, overlap: OverlapFactors) -> tuple[tuple[int, int], ...]:
    """The same for a program of the dynamic engine, its `Part.carries`: (task that waits, task of the step before)."""
    ends: dict[int, tuple[list[int], list[int]]] = {}
    for resource, number in enumerate(waiting_together(columns, overlap).tolist()):
        issued = columns.issued.row(resource)
        if len(issued):
            first, last = ends.setdefault(number, ([], []))
            first.append(int(issued[0]))
            last.append(int(issued[-1]))
    return tuple(dict.fromkeys(pair for first, last in ends.values() for pair in product(first, last)))


def steps_in_a_row(columns: Columns, rows_s: NDArray[np.float64], overlap: OverlapFactors) -> TrainingProgram:
    """A program of the dynamic engine: a step for each row of `rows_s`, float64 [steps, n]."""
    carries = carried_by_steps(columns, overlap)
    return TrainingProgram(parts=(Part(graph=columns.graph, durations_s=rows_s, repeats=len(rows_s), carries=carries),))
