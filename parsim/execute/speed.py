"""What the probe (`parsim.execute.probe`) found, as plain numbers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Speed(NamedTuple):
    """Seconds of one probing on one rank: the step alone (rank 0), beside the others (ranks with a core, or the first on
    theirs), and an all_reduce over all ranks. None where the rank does not take part."""

    alone_s: float | None
    together_s: float | None
    exchange_s: float | None


def typical_speed(speeds: Sequence[Sequence[Speed]]) -> Speed:
    """Of each of the three the mean over ranks of the medians over rounds; None where nobody took part.

    Args: speeds: per rank and round.
    """

    def typical(which: int) -> float | None:
        columns = [[entry[which] for entry in rank] for rank in speeds]
        medians = [statistics.median(known) for rank in columns if (known := [value for value in rank if value is not None])]
        return statistics.mean(medians) if medians else None

    return Speed(*(typical(which) for which in range(len(Speed._fields))))
