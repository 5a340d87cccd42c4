"""Uneven pipeline stages, chosen by cost: contiguous runs of components whose slowest stage is as fast as can be.

Exact dynamic programme over (stages, components). Ties are broken towards the smaller sum of transfers. Leaves out the
fill and drain of the pipeline, which the simulator adds when the candidates are judged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from parsim.arrays import Floats
from parsim.errors import ScheduleError

INFINITE = float("inf")


def partition(
    components: int,
    stages: int,
    stage_s: Callable[[int], Floats],
    cut_s: Sequence[float],
) -> tuple[tuple[int, int], ...]:
    """Bounds (first, one past the last) of each stage.

    Args:
        components: n >= stages >= 1.
        stage_s: stage_s(stage) is float64 [n + 1, n + 1]: at [last, first] the time of components first..last-1 on that
            stage's devices, in seconds; infinite where they do not fit its memory, and for first >= last.
        cut_s: cut_s[i] is the transfer across the cut before component i (0 < i < n), in seconds.

    Raises:
        ScheduleError: fewer components than stages, or no partition fits the memory.
    """
    if stages > components:
        raise ScheduleError(f"{components} components cannot fill {stages} pipeline stages; use at most {components} stages")
    transfer_s = np.array([0.0, *cut_s[1:components], 0.0])
    slowest = np.full(components + 1, INFINITE)
    moved = np.zeros(components + 1)
    slowest[0] = 0.0
    cuts: list[NDArray[np.int64]] = []
    for stage in range(stages):
        reached = np.maximum(slowest, stage_s(stage))
        least = reached.min(axis=1)
        sums = np.where(reached == least[:, None], moved + transfer_s, INFINITE)
        cuts.append(sums.argmin(axis=1))
        slowest, moved = least, sums.min(axis=1)
    if slowest[components] == INFINITE:
        raise ScheduleError(f"no cut into {stages} stages fits the devices' memory; use more devices or a smaller batch")
    bounds: list[tuple[int, int]] = []
    end = components
    for starts in reversed(cuts):
        start = int(starts[end])
        bounds.append((start, end))
        end = start
    return tuple(reversed(bounds))


def least_round_s(seconds: Floats, stages: int, microbatches: int, *, saved_s: float = 0.0) -> float:
    """A lower bound of the step of a pipeline, whatever the cut into stages: one stage per rank.

    With t_s the time of one microbatch on stage s, a step takes at least sum_{j < s} t_j + M t_s for every s. Stage s can begin
    only when a microbatch has come to it, and its last gradient still goes back to the first stage. The bound is the least x
    for which some cut keeps all of these at or below x. For a given x a stage that takes as much as it may leaves later stages
    no less room in the end, so the longest runs decide.

    Args:
        seconds: float64 [n], forward and backward of one microbatch by component. stages: 1 to n. microbatches: M.
        saved_s: what a cut may save at most, of both its sides together.
    """
    up_to = np.concatenate([[0.0], np.cumsum(seconds)])
    whole = float(up_to[-1])

    def reaches(bound_s: float) -> bool:
        taken = 0
        for stage in range(stages):
            before = max(0.0, float(up_to[taken]) - stage * saved_s)
            room = float(up_to[taken]) + 2 * saved_s + (bound_s - before) / microbatches
            taken = int(np.searchsorted(up_to, room, side="right")) - 1
        return taken >= len(seconds)

    low, high = max(0.0, whole - (stages - 1) * saved_s) * microbatches / stages, whole * microbatches
    if reaches(low):
        return low
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return low


def sums_between(up_to: Floats) -> Floats:
    """float64 [n + 1, n + 1]: at [last, first] the sum of entries first..last-1, from running sums (`up_to[0]` is 0)."""
    sums: Floats = up_to[:, None] - up_to[None, :]
    return sums
