"""Ends of an interval from the errors of other rows: of one side each, since frameworks err to one side."""

from __future__ import annotations

import math
from collections.abc import Sequence

TAIL = 0.05
END_ROWS = 19
WIDER = 0.1
"""With fewer rows no end leaves out 5% of them: the outermost rows are the ends, a tenth of their distance farther out."""

NOISE = 0.02
"""What two measurements of one run differ by at least."""

Ends = tuple[float, float]


def ends_of(errors: Sequence[float]) -> Ends:
    """Ends of a 90% interval of log(measured / predicted), from log errors (predicted over measured).

    They hold 0 and the noise around it.

    Args:
        errors: of other rows of the same kind, at least one.
    """
    ordered = sorted(-error for error in errors)
    place = max(0, math.floor((len(ordered) + 1) * TAIL) - 1)
    low, high = ordered[place], ordered[-1 - place]
    if len(ordered) < END_ROWS:
        low, high = low - WIDER * (high - low), high + WIDER * (high - low)
    return min(low, -NOISE), max(high, NOISE)
