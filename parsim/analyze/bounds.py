"""Lower bounds of the step that hold for any order of the same tasks."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from parsim.engines.boundary import checked_durations_s
from parsim.engines.compile import AnyGraph, compile_graph


def lower_bound_s(graph: AnyGraph, durations_s: ArrayLike) -> float:
    """Seconds: the larger of the busiest resource's total work and the longest path of dependencies.

    Holds for every issue order and every slowdown >= 1, since a resource does one thing at a time and a task waits for
    its dependencies. Leaves out that a resource also waits (pipeline fill), so it can be far below the best order.

    Args: durations_s: float64 [n], seconds each task takes alone. Raises GraphError as the engines do.
    """
    compiled = compile_graph(graph)
    durations = checked_durations_s(compiled.columns, durations_s, dimensions=1)
    if not compiled.size:
        return 0.0
    from parsim.engines.kernels import longest_path

    path = longest_path(compiled.arrays.order, compiled.dependencies, durations, np.zeros(compiled.size))
    return max(busiest_resource_s(compiled, durations), float(path))


def busiest_resource_s(graph: AnyGraph, durations_s: ArrayLike) -> float:
    """Seconds of work of the resource that has most: what the *mean* of many steps cannot go below either.

    One step alone cannot beat its longest path, but consecutive steps overlap (a batch is loaded while the last step
    computes), so the path bounds no mean. Arguments and errors as for `lower_bound_s`.
    """
    compiled = compile_graph(graph)
    durations = checked_durations_s(compiled.columns, durations_s, dimensions=1)
    if not compiled.size:
        return 0.0
    resources = compiled.arrays.resources
    return float(np.bincount(resources.values, weights=durations[resources.row_numbers]).max())
