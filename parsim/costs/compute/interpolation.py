"""Between and beyond the sample counts at which a component was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def interpolate_s(samples: Sequence[int], seconds: Sequence[float], wanted: int) -> tuple[float, str, float]:
    """Time at `wanted` samples from a measured curve (samples ascending and distinct).

    Linear between two measured counts; above the last one proportional to the samples; below the first one on the line
    through the first two, kept between proportional and constant; with a single count proportional both ways.

    Returns:
        Seconds, how it was got (for people), and how many doublings `wanted` lies outside the range (0 inside).
    """
    first, last = samples[0], samples[-1]
    if wanted in samples:
        return seconds[list(samples).index(wanted)], f"at {wanted} samples", 0.0
    if wanted > last:
        return seconds[-1] * wanted / last, f"extrapolated in proportion from {last} samples", math.log2(wanted / last)
    if wanted < first:
        proportional = seconds[0] * wanted / first
        doublings = math.log2(first / wanted)
        if len(samples) == 1:
            return proportional, f"extrapolated in proportion from {first} samples", doublings
        slope = (seconds[1] - seconds[0]) / (samples[1] - first)
        line = seconds[0] - slope * (first - wanted)
        return min(max(line, proportional), seconds[0]), f"extrapolated on the line below {first} samples", doublings
    value = float(np.interp(wanted, samples, seconds))
    below = max(count for count in samples if count < wanted)
    above = min(count for count in samples if count > wanted)
    return value, f"interpolated between {below} and {above} samples", 0.0
