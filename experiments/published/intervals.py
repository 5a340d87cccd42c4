"""Ends of an interval from the errors of other rows: of one side each, since frameworks err to one side.

Two doubts are kept apart. What rows of a framework err by, their middle and their scale, is doubt of the model. How many scales
an interval reaches is settled twice over all rows: for complete ones, and for those whose blanks a rule has filled. The
second is larger by what the assumptions add. A kind with enough rows settles it by itself: where its errors have no outliers,
it needs no room for those of other kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

SHARE = 0.9
"""Of the rows that intervals are to hold."""

NOISE = 0.02
"""What two measurements of one run differ by at least."""

DEVIATIONS_TO_SIGMA = 1.4826
"""Standard deviations of a normal distribution in its median absolute deviation."""

Ends = tuple[float, float]


class Spread(NamedTuple):
    """Of log(measured / predicted) over some rows: the median, and a standard deviation that outliers hardly move."""

    middle: float
    scale: float

    def scales_away(self, error: float) -> float:
        """How many scales a row's log error (predicted over measured) lies from the middle."""
        return abs(-error - self.middle) / self.scale


def spread_of(errors: Sequence[float]) -> Spread:
    """Of log errors (predicted over measured) of other rows of the same kind, at least one."""
    middle = median(-error for error in errors)
    return Spread(middle, max(NOISE, DEVIATIONS_TO_SIGMA * median(abs(-error - middle) for error in errors)))


def reach_of(distances: Sequence[float]) -> float:
    """So many scales hold `SHARE` of the rows, given how many each lies from the middle of the others."""
    ordered = sorted(distances)
    return ordered[min(len(ordered) - 1, int(SHARE * len(ordered)))]


def ends_of(spread: Spread, reach: float) -> Ends:
    """Ends of a 90% interval of log(measured / predicted). They hold 0 and the noise around it.

    Args:
        spread: of other rows of the same kind. reach: in scales.
    """
    away = reach * spread.scale
    return min(spread.middle - away, -NOISE), max(spread.middle + away, NOISE)
