"""Steps in a row, as the executor runs them: a rank begins a step when all its tasks of the step before have ended.

So the parameters that ZeRO gathers at a step's end are there before the next step reads them. A rank that is done early
does not wait for the others. Loading may run ahead (`OverlapFactors.loads_ahead`), and messages of merging in turn may outlast
a step (`parsim.graph.task.outlasts`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from parsim.arrays import Ints
from parsim.costs.estimate import OverlapFactors
from parsim.engines import static
from parsim.engines.compile import CompiledGraph
from parsim.engines.program import Carried, Part, Program
from parsim.graph.columns import Columns
from parsim.graph.task import HOST, outlasts


def mean_step_s(
    compiled: CompiledGraph, durations_s: ArrayLike, overlap: OverlapFactors, *, steps: int, unit: Ints | None = None
) -> NDArray[np.float64]:
    """The mean of several steps in a row, for every row of durations.

    Args:
        compiled: the graph of one step. durations_s: float64 [S, n], or [S, units] with `unit`.
        overlap: slowdown factors. steps: in a row. unit: int64 [n], the unit of each task.

    Returns:
        float64 [S] seconds. Leaves out failures and changes of the machine between steps.
    """
    together = waiting_together(compiled.columns, overlap)
    return static.step_times_s(compiled, durations_s, steps=steps, overlap=overlap, unit=unit, together=together)


def waiting_together(columns: Columns, overlap: OverlapFactors) -> Ints:
    """A number per resource, equal for those that begin a step together: all of a rank, except what runs ahead or outlasts it.

    Args:
        columns: the program. overlap: tells whether loading runs ahead.

    Returns:
        int64 [resources].
    """
    found = np.array(columns.resource_rank, dtype=np.int64)
    if overlap.loads_ahead:
        loads = np.array([resource.stream == HOST for resource in columns.resources], dtype=np.bool_)
        found = np.where(loads, found + columns.world_size, found)
    alone = np.flatnonzero([outlasts(resource) for resource in columns.resources])
    found[alone] = 2 * columns.world_size + np.arange(len(alone))
    return found


def carried_by_steps(columns: Columns, overlap: OverlapFactors) -> tuple[Carried, Carried]:
    """The same as values of a Program (`Part.makes` and `Part.reads`): one value per group that begins a step together.

    Args:
        columns: the program. overlap: tells whether loading runs ahead.
    """
    ends: dict[int, tuple[list[int], list[int]]] = {}
    for resource, number in enumerate(waiting_together(columns, overlap).tolist()):
        if outlasts(columns.resources[resource]):
            continue  # its own order carries it on
        issued = columns.issued.row(resource)
        if len(issued):
            first, last = ends.setdefault(number, ([], []))
            first.append(int(issued[0]))
            last.append(int(issued[-1]))
    made = {f"step {number}": tuple(dict.fromkeys(last)) for number, (_, last) in ends.items()}
    read = {f"step {number}": tuple(dict.fromkeys(first)) for number, (first, _) in ends.items()}
    return made, read


def steps_in_a_row(columns: Columns, overlap: OverlapFactors, *, steps: int) -> Program:
    """Several steps of a graph as a Program.

    Args:
        columns: the program of one step. overlap: tells whether loading runs ahead. steps: in a row.
    """
    makes, reads = carried_by_steps(columns, overlap)
    return Program(parts=(Part(graph=columns.graph, repeat=steps, makes=makes, reads=reads),))
