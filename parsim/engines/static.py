"""The static engine: an array program over issue-ordered graphs, exact and fast.

Same-instant rule (both engines): each resource runs its tasks in issue order. A task starts when its dependencies have ended
and it is at the head of every resource it needs, which are then all free. It holds them all until it ends. So what happens in
one instant never depends on which event is looked at first.

Without slowdown the schedule is the longest path over dependencies and issue orders: start = max(ends before), end =
start + duration. With overlap factors the engine follows the rates from instant to instant. While a rank computes and
communicates at once, its computation runs at rate 1 / compute and its communication at 1 / communication. A collective or
a transfer runs at the rate of its slowest rank. Ranks that share a core slow one another as if they were one rank, and k
of them that compute at once run at 1 / k each (processor sharing).

Leaves out: links shared by several transfers, and decisions at run time (see the dynamic engine).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from parsim.costs.estimate import OverlapFactors
from parsim.engines.boundary import checked_durations_s, checked_slowdown, checked_unit_durations_s, simulated_timeline
from parsim.engines.compile import AnyGraph, compile_graph
from parsim.errors import GraphError
from parsim.timeline import Timeline


def simulate(graph: AnyGraph, durations_s: ArrayLike, *, overlap: OverlapFactors | None = None) -> Timeline:
    """The Timeline of one step that starts at 0 with every resource free.

    Args:
        graph: compile it once (`compile_graph`) to simulate it often.
        durations_s: float64 [n], seconds each task takes alone.
        overlap: slowdown while one rank computes and communicates at once; None for none.

    Raises:
        GraphError: a cycle of dependencies; durations of the wrong shape, negative or not finite; factors below 1.
        DeadlockError: issue orders that wait for one another.
    """
    compiled = compile_graph(graph)
    slowdown = checked_slowdown(overlap, compiled.columns.world_size)
    durations = checked_durations_s(compiled.columns, durations_s, dimensions=1)
    from parsim.engines import kernels

    start, end = np.zeros(compiled.size), np.zeros(compiled.size)
    floor = np.zeros(len(compiled.arrays.last))
    if slowdown.is_none:
        kernels.run_plain(compiled.arrays, durations, floor, start, end)
    else:
        on_core = compiled.resources_of_cores(slowdown.core)
        kernels.run_with_overlap(compiled.with_rates, slowdown, on_core, durations, floor, start, end)
    return simulated_timeline(compiled.columns, start, end)


def makespans_s(graph: AnyGraph, durations_s: ArrayLike, *, overlap: OverlapFactors | None = None) -> NDArray[np.float64]:
    """The end of the last task, for every row of durations.

    Args:
        graph: a TaskGraph or its compiled form. durations_s: float64 [S, n].
        overlap: slowdown of computation and communication that run at once (None: none).

    Returns:
        float64 [S] seconds. Leaves out links shared by several transfers.

    Raises:
        GraphError, DeadlockError: as `simulate`.
    """
    return step_times_s(graph, durations_s, steps=1, overlap=overlap)


def step_times_s(
    graph: AnyGraph,
    durations_s: ArrayLike,
    *,
    steps: int,
    overlap: OverlapFactors | None = None,
    unit: NDArray[np.int64] | None = None,
    together: NDArray[np.int64] | None = None,
) -> NDArray[np.float64]:
    """float64 [S]: the mean step of `steps` repeats of the graph, for every row of `durations_s` (float64 [S, n]).

    Args:
        unit: int64 [n], the column of `durations_s` (then float64 [S, units]) each task has, for tasks that share durations.
        together: int64 [resources], a number >= 0 for each: those of one number begin a repeat when all of them have ended the
            one before (`parsim.engines.steps`); None: each by itself.

    Memory: 64 n bytes at most beside the arguments and the compiled graph, whatever S and `steps` are.

    All resources are free at 0, and the graph is issued `steps` times. The result is the end of the very last task
    divided by `steps`. Nothing but its own queue (and those `together` with it) holds a resource back between
    repeats: the first task of a resource in a repeat waits for the resource's last task of the repeat before, and for its
    dependencies in its own repeat. So a resource that is done early begins the next repeat early. The fill and drain of
    the whole run are divided among the steps; `steps=1` gives the makespan. Nothing is unrolled: only the resources'
    frontiers are carried over.

    Leaves out: dependencies between tasks of different repeats beyond issue order, the slowdown (`overlap`) between tasks of
    different repeats. Also noise from step to step: a row holds for all its repeats.

    Raises GraphError for steps < 1, else as `simulate`.
    """
    if steps < 1:
        raise GraphError(f"steps must be >= 1, got {steps}")
    compiled = compile_graph(graph)
    slowdown = checked_slowdown(overlap, compiled.columns.world_size)
    if unit is None:
        durations, column = checked_durations_s(compiled.columns, durations_s, dimensions=2), np.empty(0, dtype=np.int64)
    else:
        durations, column = checked_unit_durations_s(compiled.columns, durations_s, unit)
    from parsim.engines import kernels

    on_core = compiled.resources_of_cores(slowdown.core)
    groups = np.arange(len(compiled.arrays.last)) if together is None else np.ascontiguousarray(together, dtype=np.int64)
    arrays = compiled.arrays if slowdown.is_none else compiled.with_rates
    ends: NDArray[np.float64]
    if slowdown.is_none and len(durations) > 1:
        ends = kernels.last_ends_of_rows(arrays, durations, column, steps, groups)
    else:
        ends = kernels.last_ends(arrays, slowdown, on_core, slowdown.is_none, durations, column, steps, groups)
    return ends / steps
