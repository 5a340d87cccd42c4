"""Uneven pipeline stages, chosen by cost: contiguous runs of components whose slowest stage is as fast as can be.

Exact dynamic programme over (stages, components). Ties are broken towards the smaller sum of transfers. Leaves out the
fill and drain of the pipeline, which the simulator adds when the candidates are judged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from parsim.errors import ScheduleError

INFINITE = float("inf")


def partition(
    components: int,
    stages: int,
    stage_s: Callable[[int, int, int], float],
    cut_s: Sequence[float],
) -> tuple[tuple[int, int], ...]:
    """Bounds (first, one past the last) of each stage.

    Args:
        components: n >= stages >= 1.
        stage_s: stage_s(stage, first, last) is the time of components first..last-1 on that stage's devices, in seconds;
            infinite where they do not fit its memory.
        cut_s: cut_s[i] is the transfer across the cut before component i (0 < i < n), in seconds.

    Raises:
        ScheduleError: fewer components than stages, or no partition fits the memory.
    """
    if stages > components:
        raise ScheduleError(f"{components} components cannot fill {stages} pipeline stages; use at most {components} stages")
    best: list[list[tuple[float, float]]] = [[(INFINITE, INFINITE)] * (components + 1) for _ in range(stages + 1)]
    cut: list[list[int]] = [[0] * (components + 1) for _ in range(stages + 1)]
    best[0][0] = (0.0, 0.0)
    for stage in range(1, stages + 1):
        for end in range(stage, components - (stages - stage) + 1):
            for start in range(stage - 1, end):
                before = best[stage - 1][start]
                if before[0] == INFINITE:
                    continue
                transfer = cut_s[start] if start else 0.0
                slowest = max(before[0], stage_s(stage - 1, start, end))
                candidate = (slowest, before[1] + transfer)
                if candidate < best[stage][end]:
                    best[stage][end] = candidate
                    cut[stage][end] = start
    if best[stages][components][0] == INFINITE:
        raise ScheduleError(f"no cut into {stages} stages fits the devices' memory; use more devices or a smaller batch")
    bounds: list[tuple[int, int]] = []
    end = components
    for stage in range(stages, 0, -1):
        start = cut[stage][end]
        bounds.append((start, end))
        end = start
    return tuple(reversed(bounds))
