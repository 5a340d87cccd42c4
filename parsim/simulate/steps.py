"""Steps in a row, as the executor makes them: a rank begins one when all that it did in the one before has ended.

So the parameters that ZeRO gathers at a step's end are there before the next one reads them, while a rank that is done early
does not wait for the others. Loading alone may run ahead (`OverlapFactors.loads_ahead`).
"""

from __future__ import annotations

from itertools import product

import numpy as np
from numpy.typing import ArrayLike, NDArray

from parsim.costs.estimate import OverlapFactors
from parsim.graph.columns import Columns, Ints
from parsim.graph.task import HOST
from parsim.simulate import static
from parsim.simulate.compile import CompiledGraph, Program, compile_graph


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


def carried_by_steps(program: Program, overlap: OverlapFactors) -> tuple[tuple[int, int], ...]:
    """The same for a program of the dynamic engine, its `Part.carries`: (task that waits, task of the step before)."""
    compiled = compile_graph(program)
    together = waiting_together(compiled.columns, overlap).tolist()
    first: dict[int, list[int]] = {}
    last: dict[int, list[int]] = {}
    heads = compiled.arrays.heads
    for task, resource in zip(heads.row_numbers.tolist(), heads.values.tolist(), strict=True):
        first.setdefault(together[resource], []).append(task)
    for resource, task in enumerate(compiled.arrays.last.tolist()):
        if task >= 0:
            last.setdefault(together[resource], []).append(task)
    return tuple(dict.fromkeys(pair for number, tasks in first.items() for pair in product(tasks, last[number])))
