"""Every cut of a chain into pipeline stages, the one with the least bound first.

Let t_s be the time of one microbatch on stage s, and e_s the least time of what comes before it. No pipeline takes less than
e_s + M t_s for any s. The largest of these is the bound of a cut. A best-first search over (stage, first component) finds the
cuts in its order: what the remaining stages take at least is known exactly, by a dynamic programme from the last stage on.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import combinations, pairwise
from math import comb

import numpy as np

from parsim.arrays import Floats
from parsim.schedule.partition import INFINITE

Bounds = tuple[tuple[int, int], ...]

MOST_ENTRIES = 2**21
"""Of the tables of all stages together. Beyond, only the cut whose slowest stage is fastest is known."""


def count_cuts(components: int, stages: int) -> int:
    """Cuts of so many components into so many runs, none of them empty."""
    return comb(components - 1, stages - 1)


def every_cut(components: int, stages: int) -> Iterator[Bounds]:
    """All of them.

    Args:
        components, stages: of which `count_cuts` are few.
    """
    for inner in combinations(range(1, components), stages - 1):
        yield tuple(pairwise((0, *inner, components)))


def are_listed(components: int, stages: int) -> bool:
    """Whether `cuts_by_bound` takes a problem of this size."""
    return (components + 1) ** 2 * stages <= MOST_ENTRIES


def cuts_by_bound(
    components: int, stages: int, stage_s: Callable[[int], Floats], before_s: Floats, microbatches: int
) -> Iterator[tuple[float, Bounds]]:
    """Pairs of bound and cut, bounds ascending.

    Args:
        components, stages: `are_listed`.
        stage_s: as `partition` takes it. before_s: float64 [n + 1], what comes before a stage at least, by its first component.
        microbatches: M.

    Yields:
        Seconds that no pipeline with the cut goes below, and per stage its first component and one past its last. Cuts with a
        stage that is infinite are left out.
    """
    rounds = [microbatches * stage_s(stage) + before_s[None, :] for stage in range(stages)]
    to_go = [np.full(components + 1, INFINITE) for _ in range(stages + 1)]
    to_go[stages][components] = 0.0
    for stage in range(stages - 1, -1, -1):
        to_go[stage] = np.maximum(rounds[stage], to_go[stage + 1][:, None]).min(axis=0)
    heap: list[tuple[float, int, tuple[int, ...]]] = [(float(to_go[0][0]), 0, (0,))]
    while heap:
        bound, depth, starts = heapq.heappop(heap)
        if bound == INFINITE:
            return
        stage = -depth
        if stage == stages:
            yield bound, tuple(pairwise(starts))
            continue
        reached = np.maximum(_decided_s(rounds, starts), np.maximum(rounds[stage][:, starts[-1]], to_go[stage + 1]))
        for last in np.flatnonzero(np.isfinite(reached)).tolist():
            heapq.heappush(heap, (float(reached[last]), depth - 1, (*starts, last)))


def _decided_s(rounds: list[Floats], starts: tuple[int, ...]) -> float:
    """The bound of the stages that are decided.

    Args:
        rounds: by stage, seconds at [last, first]. starts: first components of the decided stages, and of the next one.
    """
    return max((float(rounds[stage][last, first]) for stage, (first, last) in enumerate(pairwise(starts))), default=0.0)
