"""Piecewise lines: the seconds of a measured collective over its bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from parsim.hardware.profile import CollectiveFit, Regime


def fitted_s(fit: CollectiveFit, size_bytes: float) -> float:
    """Seconds of a piecewise fit at a size; never less than at the end of an earlier regime.

    Args:
        fit: lines per range of sizes, for one operation and group size.
        size_bytes: the whole array.
    """
    return regimes_s(fit.regimes, size_bytes)


def regimes_s(regimes: Sequence[Regime], size_bytes: float) -> float:
    """Seconds of piecewise lines, sorted by size: the running maximum, so that the time never falls with the size.

    Args:
        regimes: lines in ascending order of size, seconds over bytes.
        size_bytes: the whole array; beyond the last line it is extrapolated.
    """
    regime, at_bytes = regime_at(regimes, size_bytes)
    return regime.latency_s + regime.seconds_per_byte * at_bytes


def regime_at(regimes: Sequence[Regime], size_bytes: float) -> tuple[Regime, float]:
    """Find the line that prices a message, and the size at which to read it.

    Args:
        regimes: lines in ascending order of size.
        size_bytes: of the message.

    Returns:
        The most expensive candidate: the line of the size itself, or the end of an earlier line. So the time never falls with
        the size.
    """
    most, seconds = (regimes[0], 0.0), -math.inf
    for number, regime in enumerate(regimes, start=1):
        end = regime.max_size_bytes
        inside = end is None or size_bytes <= end or number == len(regimes)
        at_bytes = size_bytes if inside or end is None else end
        own_s = regime.latency_s + regime.seconds_per_byte * at_bytes
        if own_s > seconds:
            most, seconds = (regime, at_bytes), own_s
        if inside:
            break
    return most
