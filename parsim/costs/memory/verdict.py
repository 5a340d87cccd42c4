"""Whether memory fits, as a probability: P(peak <= capacity) from the intervals of the lines that cannot be counted exactly.

All uncertain lines of all ranks are taken at the same quantile q. So the peak at quantile q is the sum of its lines at q, and
the probability that it fits is the q at which the sum reaches the capacity. Between and beyond the known quantiles the spread
is that of a normal distribution, with one width below the median and another one above.

A plan fits unless it is more likely than not to run out of memory (`FIT_PROBABILITY`), or with the probability that is asked
for (`[plan] fit_probability`). It is called safe from `SAFE_PROBABILITY` on; in between, every answer says the probability.

Leaves out: lines that vary independently, whose sum would have a narrower interval.
"""

from __future__ import annotations

from functools import cache
from math import ceil
from statistics import NormalDist

FIT_PROBABILITY = 0.5
"""A plan fits if its peak stays within the capacity with at least this probability: the same as its median within the capacity.

So a plan 5% below its limit is not refused, and one 5% above it is, however wide the interval of a profile from datasheets is.
"""

SAFE_PROBABILITY = 0.95
"""From this probability on a plan that fits is called safe; below it the answer says so."""

P95 = 0.95
"""The upper quantile that intervals are given at."""

DOUBTFUL = (0.01, 0.99)
"""Between these probabilities a table shows the probability beside the verdict."""


def fit_probability(low_bytes: int, median_bytes: int, high_bytes: int, limit_bytes: int) -> float:
    """P(peak <= limit).

    Args:
        low_bytes, median_bytes, high_bytes: the peak at p05, at the median and at p95, ascending; a side without a spread is
            exact.
        limit_bytes: the capacity.

    Returns:
        0 to 1; at least 0.5 exactly if `median_bytes` <= `limit_bytes`, and at least 0.95 exactly if `high_bytes` is.
    """
    above = limit_bytes >= median_bytes
    width = high_bytes - median_bytes if above else median_bytes - low_bytes
    if width <= 0:
        return 1.0 if above else 0.0
    if limit_bytes == high_bytes:
        return P95
    return NormalDist().cdf(_deviation(P95) * (limit_bytes - median_bytes) / width)


def bytes_at(low_bytes: int, median_bytes: int, high_bytes: int, probability: float) -> int:
    """What a device must have for a peak to fit with a probability: the inverse of `fit_probability`.

    Args:
        low_bytes, median_bytes, high_bytes: as above. probability: above 0 and below 1.
    """
    known = {0.5: median_bytes, P95: high_bytes}
    if probability in known:
        return known[probability]
    above = probability > 0.5
    width = high_bytes - median_bytes if above else median_bytes - low_bytes
    return median_bytes + ceil(width * _deviation(probability) / _deviation(P95))


@cache
def _deviation(probability: float) -> float:
    """In standard deviations."""
    return NormalDist().inv_cdf(probability)


def verdict_text(fits: bool, probability: float) -> str:
    """ "yes" or "NO", with the probability where it is neither almost 0 nor almost 1.

    Args:
        fits: the verdict. probability: that the peak stays within the capacity.
    """
    word = "yes" if fits else "NO"
    return f"{word} ({probability:.0%})" if DOUBTFUL[0] < probability < DOUBTFUL[1] else word
