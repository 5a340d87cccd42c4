"""Ends of an interval from the errors of other rows: of one side each, since frameworks err to one side.

Two doubts are kept apart. What rows of a framework err by, their middle and their scale below and above it, is doubt of the
model. Runs lose more time than they gain against a prediction, so the scales differ: one for both sides gives the short side
room that it never uses. How many scales an interval reaches is settled twice over all other rows: for complete ones, and for
those whose blanks a rule has filled. The second is larger by what the assumptions add. A kind with enough rows settles it by
itself: where its errors have no outliers, it needs no room for those of other kinds.

Of all intervals that hold `SHARE` of n rows, and one row more for the one to come (split conformal prediction), the shortest
counts.
"""

from __future__ import annotations

import math
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
    """Of log(measured / predicted) over some rows: the median, and of each side a deviation that outliers hardly move."""

    middle: float
    below: float
    above: float

    def scales_away(self, error: float) -> float:
        """How many scales of its side a row's log error (predicted over measured) lies from the middle; negative below it."""
        away = -error - self.middle
        return away / (self.above if away > 0 else self.below)


def spread_of(errors: Sequence[float]) -> Spread:
    """Of log errors (predicted over measured) of other rows of the same kind, at least one."""
    middle = median(-error for error in errors)
    away = [-error - middle for error in errors]
    below, above = (
        max(NOISE, DEVIATIONS_TO_SIGMA * median(side)) for side in ([-x for x in away if x <= 0], [x for x in away if x >= 0])
    )
    return Spread(middle, below, above)


def reach_of(distances: Sequence[float], spread: Spread) -> Ends:
    """So many scales below and above the middle hold `SHARE` of the rows and of one to come, at the least width.

    Args:
        distances: of rows, at least one, in scales of their own kind (`Spread.scales_away`). spread: of the interval's kind.
    """
    ordered = sorted(distances)
    held = min(len(ordered), math.ceil(SHARE * (len(ordered) + 1)))
    ends = ((max(0.0, -ordered[first]), max(0.0, ordered[first + held - 1])) for first in range(len(ordered) - held + 1))
    return min(ends, key=lambda reach: reach[0] * spread.below + reach[1] * spread.above)


def ends_of(spread: Spread, reach: Ends) -> Ends:
    """Ends of a 90% interval of log(measured / predicted). They hold 0 and the noise around it.

    Args:
        spread: of other rows of the same kind. reach: in scales, below and above.
    """
    below, above = reach
    return min(spread.middle - below * spread.below, -NOISE), max(spread.middle + above * spread.above, NOISE)
