"""Whether memory fits, as a probability: P(peak <= capacity) from the intervals of the lines that cannot be counted exactly.

All uncertain lines of all ranks are taken at the same quantile q. So the peak at quantile q is the sum of its lines at q, and
the probability that it fits is the q at which the sum reaches the capacity. Between and beyond the known quantiles the spread
is that of a normal distribution, with one width below the median and another one above.

Leaves out: lines that vary independently, whose sum would have a narrower interval.
"""

from __future__ import annotations

from functools import cache
from statistics import NormalDist

FIT_PROBABILITY = 0.95
"""A plan fits if its peak stays within the capacity with at least this probability: the same as its p95 within the capacity."""

DOUBTFUL = (0.01, 0.99)
"""Between these probabilities a table shows the probability beside the verdict."""


def fit_probability(low_bytes: int, median_bytes: int, high_bytes: int, limit_bytes: int) -> float:
    """P(peak <= limit).

    Args:
        low_bytes, median_bytes, high_bytes: the peak at p05, at the median and at p95, ascending; a side without a spread is
            exact.
        limit_bytes: the capacity.

    Returns:
        0 to 1; at least `FIT_PROBABILITY` exactly if `high_bytes` <= `limit_bytes`.
    """
    above = limit_bytes >= median_bytes
    width = high_bytes - median_bytes if above else median_bytes - low_bytes
    if width <= 0:
        return 1.0 if above else 0.0
    if limit_bytes == high_bytes:
        return FIT_PROBABILITY
    return NormalDist().cdf(_quantile_of_p95() * (limit_bytes - median_bytes) / width)


@cache
def _quantile_of_p95() -> float:
    return NormalDist().inv_cdf(FIT_PROBABILITY)


def verdict_text(fits: bool, probability: float) -> str:
    """ "yes" or "NO", with the probability where it is neither almost 0 nor almost 1.

    Args:
        fits: the verdict. probability: that the peak stays within the capacity.
    """
    word = "yes" if fits else "NO"
    return f"{word} ({probability:.0%})" if DOUBTFUL[0] < probability < DOUBTFUL[1] else word
