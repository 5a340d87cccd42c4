"""The compiled loop of the exact placement solver. Importing this module loads numba (about a second)."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from parsim.arrays import Floats


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
