"""The compiled loops of the exact placement solver. Importing this module loads numba (about a second)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from parsim.arrays import Floats
from parsim.jit import njit


@njit(cache=True, nogil=True)
def undominated(
    seconds: Floats, late: Floats, memory: Floats, most_comparisons: int
) -> tuple[NDArray[np.bool_], int]:  # pragma: no cover (compiled)
    """Which labels no other one makes superfluous.

    Args:
        seconds, late: float64 [labels], sorted by (seconds, late). memory: float64 [labels, ranks], bytes.
        most_comparisons: of two labels; beyond it the remaining labels are kept unseen, and the count says so.

    Returns:
        bool [labels], and how many pairs were compared (more than `most_comparisons`: it was left early).
    """
    count, ranks = memory.shape
    keep = np.zeros(count, dtype=np.bool_)
    kept = np.empty(count, dtype=np.int64)
    found = 0
    compared = 0
    for place in range(count):
        if compared > most_comparisons:
            keep[place:] = True
            return keep, compared
        superfluous = False
        for number in range(found):
            other = kept[number]
            compared += 1
            behind = late[other] - late[place]
            if seconds[other] + (behind if behind > 0.0 else 0.0) > seconds[place]:
                continue
            superfluous = True
            for rank in range(ranks):
                if memory[other, rank] > memory[place, rank]:
                    superfluous = False
                    break
            if superfluous:
                # What dominates one label tends to dominate the next: try it earlier.
                kept[number] = kept[number // 2]
                kept[number // 2] = other
                break
        if not superfluous:
            kept[found] = place
            found += 1
            keep[place] = True
    return keep, compared


@njit(cache=True, nogil=True)
def least_of_states(
    states: NDArray[np.int64],
    ways: NDArray[np.int64],
    begins: NDArray[np.int64],
    firsts: NDArray[np.int64],
    nodes: NDArray[np.int64],
    edges: NDArray[np.int64],
    edge_firsts: NDArray[np.int64],
    before: NDArray[np.int64],
    option: NDArray[np.int64],
    edge_s: Floats,
    node_s: Floats,
) -> tuple[Floats, NDArray[np.int64]]:  # pragma: no cover (compiled)
    """The least seconds of every state of a `StateTable`, and the extension that has them.

    Args:
        node_s: float64 [options]. The others are the fields of a StateTable.

    Returns:
        float64 and int64 [states of all cuts]. The first state is the empty one, of 0 seconds.
    """
    count = begins[-1] + states[-1]
    least = np.zeros(count)
    picks = np.zeros(count, dtype=np.int64)
    for number in range(len(states)):
        size = states[number] * ways[number]
        for state in range(states[number]):
            best, pick = np.inf, 0
            for way in range(ways[number]):
                place = state * ways[number] + way
                at = firsts[number] + place
                seconds = least[begins[number] + before[at]] + node_s[nodes[number] + option[at]]
                for edge in range(edges[number]):
                    seconds += edge_s[edge_firsts[number] + edge * size + place]
                if seconds < best:
                    best, pick = seconds, way
            least[begins[number + 1] + state] = best
            picks[begins[number + 1] + state] = pick
    return least, picks


@njit(cache=True, nogil=True)
def way_to_the_last(
    ways: NDArray[np.int64],
    begins: NDArray[np.int64],
    firsts: NDArray[np.int64],
    before: NDArray[np.int64],
    option: NDArray[np.int64],
    picks: NDArray[np.int64],
) -> NDArray[np.int64]:  # pragma: no cover (compiled)
    """The options on the way to the last state.

    Args:
        picks: of `least_of_states`. The others are the fields of a StateTable.
    """
    chosen = np.zeros(len(ways), dtype=np.int64)
    state = 0
    for back in range(len(ways)):
        number = len(ways) - 1 - back
        at = firsts[number] + state * ways[number] + picks[begins[number + 1] + state]
        chosen[number] = option[at]
        state = before[at]
    return chosen
