"""Uneven pipeline stages, chosen by cost: contiguous runs of components whose slowest stage is as fast as can be.

Exact dynamic programme over (stages, components). Ties are broken towards the smaller sum of transfers. Leaves out the
fill and drain of the pipeline, which the simulator adds when the candidates are judged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from parsim.errors import ScheduleError

INFINITE = float("inf")

FloatArray = NDArray[np.float64]


def partition(
    components: int,
    stages: int,
    stage_s: Callable[[int, int], FloatArray],
    cut_s: Sequence[float],
) -> tuple[tuple[int, int], ...]:
    """Bounds (first, one past the last) of each stage.

    Args:
        components: n >= stages >= 1.
        stage_s: stage_s(stage, last) is float64 [last]: for every first < last the time of components first..last-1 on that
            stage's devices, in seconds; infinite where they do not fit its memory.
        cut_s: cut_s[i] is the transfer across the cut before component i (0 < i < n), in seconds.

    Raises:
        ScheduleError: fewer components than stages, or no partition fits the memory.
    """
    if stages > components:
        raise ScheduleError(f"{components} components cannot fill {stages} pipeline stages; use at most {components} stages")
    transfer_s = np.array([0.0, *cut_s[1:components]])
    slowest = np.full((stages + 1, components + 1), INFINITE)
    moved = np.full((stages + 1, components + 1), INFINITE)
    cut = np.zeros((stages + 1, components + 1), dtype=np.int64)
    slowest[0, 0] = moved[0, 0] = 0.0
    for stage in range(1, stages + 1):
        for end in range(stage, components - (stages - stage) + 1):
            reached = np.maximum(slowest[stage - 1, :end], stage_s(stage - 1, end))
            least = reached.min()
            if least == INFINITE:
                continue
            ties = np.flatnonzero(reached == least)
            sums = moved[stage - 1, ties] + transfer_s[ties]
            start = int(ties[sums.argmin()])
            slowest[stage, end], moved[stage, end], cut[stage, end] = least, sums.min(), start
    if slowest[stages, components] == INFINITE:
        raise ScheduleError(f"no cut into {stages} stages fits the devices' memory; use more devices or a smaller batch")
    bounds: list[tuple[int, int]] = []
    end = components
    for stage in range(stages, 0, -1):
        start = int(cut[stage, end])
        bounds.append((start, end))
        end = start
    return tuple(reversed(bounds))


def sums_until(up_to: FloatArray, last: int) -> FloatArray:
    """float64 [last]: for every first < last the sum of entries first..last-1, from running sums (`up_to[0]` is 0)."""
    sums: FloatArray = up_to[last] - up_to[:last]
    return sums
