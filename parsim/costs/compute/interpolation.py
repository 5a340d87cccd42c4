"""Between and beyond the sample counts at which a component was measured."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from parsim.costs.estimate import Term, Terms, folded_s


class Interpolated(NamedTuple):
    """Attributes: terms: of the seconds. how: they were got, for people. doublings: outside the measured range (0 inside)."""

    terms: Terms
    how: str
    doublings: float

    @property
    def seconds(self) -> float:
        return folded_s(self.terms)


def interpolation_terms(samples: Sequence[int], seconds: Sequence[float], wanted: int) -> Interpolated:
    """Time at `wanted` samples from a measured curve.

    Between two measured counts the time is linear. Above the last count it is proportional to the samples. Below the first
    count it follows the line through the first two, kept between proportional and constant. With a single count it is
    proportional both ways.

    Args:
        samples: measured counts, ascending and distinct. seconds: at these counts. wanted: samples >= 1.

    Returns:
        The terms and the distance in doublings. Leaves out steps where a library changes its algorithm.
    """
    first, last = samples[0], samples[-1]
    place = bisect_left(samples, wanted)
    if place < len(samples) and samples[place] == wanted:
        return Interpolated((_at(wanted, seconds[place]),), f"at {wanted} samples", 0.0)
    if wanted > last:
        how = f"extrapolated in proportion from {last} samples"
        return Interpolated(_in_proportion(last, seconds[-1], wanted), how, math.log2(wanted / last))
    if wanted < first:
        doublings = math.log2(first / wanted)
        proportional = _in_proportion(first, seconds[0], wanted)
        if len(samples) == 1:
            return Interpolated(proportional, f"extrapolated in proportion from {first} samples", doublings)
        how = f"extrapolated on the line below {first} samples"
        slope = (seconds[1] - seconds[0]) / (samples[1] - first)
        line = _on_line(first, seconds[0], slope, wanted, samples[1])
        if folded_s(line) < folded_s(proportional):
            line = proportional
        return Interpolated(line if folded_s(line) <= seconds[0] else (_at(first, seconds[0]),), how, doublings)
    below, above = samples[place - 1], samples[place]
    slope = (seconds[place] - seconds[place - 1]) / (above - below)
    how = f"interpolated between {below} and {above} samples"
    return Interpolated(_on_line(below, seconds[place - 1], slope, wanted, above), how, 0.0)


def _at(samples: int, seconds: float) -> Term:
    return Term(f"measured at {samples} samples", "start", seconds, "measured")


def _in_proportion(samples: int, seconds: float, wanted: int) -> Terms:
    return (
        _at(samples, seconds),
        Term("samples asked for", "times", float(wanted), "measured", "in proportion to the samples"),
        Term("samples measured", "over", float(samples), "measured", "in proportion to the samples"),
    )


def _on_line(samples: int, seconds: float, slope: float, wanted: int, other: int) -> Terms:
    what = f"{wanted - samples} samples of {slope:.4g} s, on the line to {other} samples"
    return (_at(samples, seconds), Term("further samples", "plus", slope * (wanted - samples), "measured", what))
