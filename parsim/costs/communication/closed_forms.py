"""Closed forms of collectives in the alpha-beta model.

Overlap of several messages: the mean is of the share of time in which computation stands still, because shares add up and
factors do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from parsim.costs.estimate import OverlapFactors, Term, Terms
from parsim.errors import CostError
from parsim.hardware.profile import Overlap, Regime
from parsim.units import format_bytes, format_seconds
from parsim.work import COLLECTIVE_KINDS, Collective, SendRecv, Work


def ring_steps(operation: str, group_size: int) -> int:
    """Number of hops that follow one another on a ring: 2 (n - 1) for all_reduce; n - 1 for the others."""
    return COLLECTIVE_KINDS[operation].hops(_group(group_size))


def ring_traffic(operation: str, group_size: int) -> float:
    """Bytes through the slowest hop of a ring of n ranks, per byte of the array S; one rank moves nothing.

    2 (n - 1)/n for all_reduce, (n - 1)/n for all_gather and reduce_scatter, 1 for a pipelined broadcast. Raises CostError for
    all_to_all, which does not run on a ring.
    """
    n = _group(group_size)
    if n == 1:
        return 0.0
    kind = COLLECTIVE_KINDS[operation]
    if kind.pairwise:
        rings = ", ".join(sorted(COLLECTIVE_KINDS.where(pairwise=False)))
        raise CostError(f"there is no ring algorithm for {operation!r}; known: {rings}")
    return kind.traffic(n)


def busbw_bytes_per_s(operation: str, size_bytes: float, group_size: int, seconds: float) -> float:
    """Bus bandwidth as nccl-tests defines it: S / t times 2 (n - 1)/n for all_reduce, 1 for broadcast and send_recv, (n -
    1)/n for the others; 0 if no time passes."""
    if seconds <= 0:
        return 0.0
    if operation == "send_recv":
        return size_bytes / seconds
    return size_bytes / seconds * (COLLECTIVE_KINDS[operation].traffic(group_size) if _group(group_size) > 1 else 0.0)


def _group(group_size: int) -> int:
    if group_size < 1:
        raise CostError(f"group_size must be >= 1, got {group_size}")
    return group_size


# --- the mutual slowdown of computation and communication -------------------------------------------------------------


def overlap_of(measured: Overlap, works: Sequence[Work], seconds: Iterable[float]) -> OverlapFactors:
    """One pair of slowdown factors for a whole program, as the engines take it: means over its communication, weighted by
    time.

    A small message leaves the processor to the computation while it waits for its peer; a large one keeps the processor busy.
    So each message has the factors of its size, interpolated over log(size) between the measured sizes of its operation (of
    all_reduce for operations without points). Sizes outside the range take the nearest. Of computation, the interpolated and
    averaged quantity is the lost share of time, 1 - 1/factor. Leaves out differences between single messages, and the size for
    a profile without points.
    """
    shares, weights = [], []
    for work, weight in zip(works, seconds, strict=True):
        if isinstance(work, Collective | SendRecv) and weight > 0:
            operation = work.operation if isinstance(work, Collective) else "send_recv"
            compute, communication = factors_at(measured, operation, work.size_bytes)
            shares.append((1 - 1 / compute, communication))
            weights.append(weight)
    if not shares:
        return OverlapFactors(compute=measured.compute_factor, communication=measured.communication_factor)
    held, communication = np.average(np.array(shares), axis=0, weights=weights)
    return OverlapFactors(compute=max(1.0, 1 / (1 - float(held))), communication=max(1.0, float(communication)))  # ones round


def factors_at(measured: Overlap, operation: str, size_bytes: int) -> tuple[float, float]:
    """(compute, communication) factors while one operation of one size runs; of several group sizes those of most ranks."""
    points = [point for point in measured.points if point.operation == operation]
    points = points or [point for point in measured.points if point.operation == "all_reduce"]
    if not points:
        return measured.compute_factor, measured.communication_factor
    most = max(point.group_size for point in points)
    points = sorted((point for point in points if point.group_size == most), key=lambda point: point.size_bytes)
    sizes = [math.log(max(1, point.size_bytes)) for point in points]
    at = math.log(max(1, size_bytes))
    held = np.interp(at, sizes, [1 - 1 / point.compute_factor for point in points])
    communication = np.interp(at, sizes, [point.communication_factor for point in points])
    return 1 / (1 - float(held)), float(communication)


# --- piecewise lines through a measured collective --------------------------------------------------------------------


def regimes_s(regimes: Sequence[Regime], size_bytes: float) -> float:
    """Seconds of ascending piecewise lines at a size of the whole array (`regime_at`)."""
    regime, at_bytes = regime_at(regimes, size_bytes)
    return regime.latency_s + regime.seconds_per_byte * at_bytes


def regime_at(regimes: Sequence[Regime], size_bytes: float) -> tuple[Regime, float]:
    """The line that prices a message, and the size at which to read it: the most expensive of ascending lines, that of the
    size itself or the end of an earlier one. So the time never falls with the size. Beyond the last line it is extrapolated."""
    most, seconds = (regimes[0], 0.0), -math.inf
    for number, regime in enumerate(regimes, start=1):
        end = regime.max_size_bytes
        inside = end is None or size_bytes <= end or number == len(regimes)
        at_bytes = size_bytes if inside or end is None else end
        line_s = regime.latency_s + regime.seconds_per_byte * at_bytes
        if line_s > seconds:
            most, seconds = (regime, at_bytes), line_s
        if inside:
            break
    return most


# --- terms of a price -------------------------------------------------------------------------------------------------


def moving_terms(
    size_bytes: float,
    seconds_per_byte: float,
    latency_s: float,
    *,
    alone_seconds_per_byte: float,
    groups: int,
    latency: str,
) -> Terms:
    """Terms for the bytes, for contention if there is some, and for latency.

        seconds = bytes * seconds_per_byte alone + contention + latency

    Contention is what the bytes take longer while other groups use the same links. Latency is not stretched. Leaves out that
    contention may end before the transfer does.

    Args:
        seconds_per_byte: of the whole array, while other groups run. alone_seconds_per_byte: alone.
        groups: how many run at once. latency: what it consists of, as text.
    """
    alone = alone_seconds_per_byte
    alone_s, seconds = alone * size_bytes, seconds_per_byte * size_bytes
    terms = [Term("bytes", "start", alone_s, "fitted", f"{format_bytes(size_bytes)} at {alone:.4g} s/B")]
    if seconds != alone_s:
        what = f"{groups} groups share links: {seconds_per_byte / alone:.3g} times as long as alone"
        terms.append(Term("contention", "plus", seconds - alone_s, "fitted", what))
    terms.append(Term("latency", "plus", latency_s, "fitted", latency))
    return tuple(terms)


def hops_text(base_s: float, *hops: tuple[int, float]) -> str:
    """Describe a latency, e.g. `10 us + 14 hops of 1.2 us`, from seconds before the hops and (count, seconds of one)."""
    return " + ".join(
        [format_seconds(base_s), *(f"{count} hops of {format_seconds(seconds)}" for count, seconds in hops if count)]
    )
