"""Closed forms of collectives in the alpha-beta model.

Overlap of several messages: the mean is of the share of time in which computation stands still, because shares add up and
factors do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from parsim.costs.estimate import OverlapFactors, Term, TermOrigin, Terms
from parsim.errors import CostError
from parsim.hardware.profile import CollectiveFit, Overlap, OverlapPoint, Regime
from parsim.units import format_bytes, format_seconds
from parsim.work import COLLECTIVE_KINDS, Collective, SendRecv, Work


def ring_all_reduce_s(size_bytes: float, group_size: int, latency_s: float, seconds_per_byte: float) -> float:
    """Time of a ring all_reduce in the alpha-beta model: 2 (n - 1) alpha + 2 (n - 1)/n * S * beta.

    Args:
        size_bytes: S, the whole array held by each rank. group_size: n >= 1; one rank costs nothing.
        latency_s, seconds_per_byte: alpha and beta of the slowest hop of the ring.

    Leaves out the reduction arithmetic and the launch. Raises CostError if an argument is out of range.
    """
    return ring_steps("all_reduce", group_size) * latency_s + ring_traffic("all_reduce", group_size) * _size(
        size_bytes
    ) * _positive(seconds_per_byte)


def tree_all_reduce_s(
    size_bytes: float, group_size: int, latency_s: float, seconds_per_byte: float, *, depth: int | None = None
) -> float:
    """Time of a tree all_reduce in the alpha-beta model: up and down a tree of `depth` levels.

    t = 2 depth alpha + 2 S beta

    Args:
        size_bytes: S, the whole array held by each rank.
        group_size: n >= 1; one rank costs nothing.
        latency_s, seconds_per_byte: alpha and beta of one hop.
        depth: levels. The default, ceil(log2 n), is the double binary tree: every rank forwards each half of the array once
            up and once down, which uses the full bandwidth of its links. Inside one box NCCL's trees are chains of depth n -
            1, also in its tuner.

    Returns:
        Seconds. Leaves out the pipelining of chunks, as the ring does.

    Raises:
        CostError: an argument is out of range.
    """
    if _group(group_size) == 1:
        return 0.0
    levels = math.ceil(math.log2(group_size)) if depth is None else depth
    return 2 * levels * latency_s + 2 * _size(size_bytes) * _positive(seconds_per_byte)


def ring_steps(operation: str, group_size: int) -> int:
    """Number of hops that follow one another on a ring.

    Args:
        operation: a key of `COLLECTIVE_KINDS`.
        group_size: n >= 1.

    Returns:
        2 (n - 1) for all_reduce; n - 1 for all_gather, reduce_scatter, broadcast and all_to_all.
    """
    return COLLECTIVE_KINDS[operation].hops(_group(group_size))


def ring_traffic(operation: str, group_size: int) -> float:
    """Bytes through the slowest hop of a ring, per byte of the array S.

    Args:
        operation: a key of `COLLECTIVE_KINDS` that runs on a ring.
        group_size: n >= 1; one rank moves nothing.

    Returns:
        2 (n - 1)/n for all_reduce, (n - 1)/n for all_gather and reduce_scatter, 1 for a pipelined broadcast.

    Raises:
        CostError: all_to_all, which does not run on a ring (see `all_to_all_s`).
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
    """Bus bandwidth as nccl-tests defines it: S / t times a factor of the operation.

    Args:
        operation: a collective, or "send_recv".
        size_bytes: S, the whole array.
        group_size: n >= 1.
        seconds: t, the measured time.

    Returns:
        Bytes per second. The factor is 2 (n - 1)/n for all_reduce, 1 for broadcast and send_recv, (n - 1)/n for the others.
        Zero if no time passes.
    """
    if seconds <= 0:
        return 0.0
    if operation == "send_recv":
        return size_bytes / seconds
    return size_bytes / seconds * (COLLECTIVE_KINDS[operation].traffic(group_size) if _group(group_size) > 1 else 0.0)


def _group(group_size: int) -> int:
    if group_size < 1:
        raise CostError(f"group_size must be >= 1, got {group_size}")
    return group_size


def _size(size_bytes: float) -> float:
    if size_bytes < 0:
        raise CostError(f"size_bytes must be >= 0, got {size_bytes}")
    return size_bytes


def _positive(value: float) -> float:
    if value < 0:
        raise CostError(f"seconds_per_byte must be >= 0, got {value}")
    return value


# --- the mutual slowdown of computation and communication -------------------------------------------------------------


def overlap_of(measured: Overlap, works: Sequence[Work], seconds: Iterable[float]) -> OverlapFactors:
    """One pair of slowdown factors for a whole program, as the engines take it: means over its communication, weighted by
    time.

    A small message leaves the processor to the computation while it waits for its peer; a large one keeps the processor
    busy. So each message has the factors of its size, interpolated over log(size) between the measured sizes of its
    operation (of all_reduce for operations without points). Sizes outside the range take the nearest. Of computation, the
    interpolated and averaged quantity is the lost share of time, 1 - 1/factor.

    Args:
        measured: the profile's factors, with or without points by size.
        works, seconds: pieces of work and the time of each; computation is ignored.

    Returns:
        Factors >= 1. Leaves out differences between single messages, and the size for a profile without points.
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
    """(compute, communication) factors while one operation of one size runs.

    Args:
        measured: the profile's factors. operation: a collective or "send_recv". size_bytes: of the message.
    """
    points = _of_operation(measured.points, operation) or _of_operation(measured.points, "all_reduce")
    if not points:
        return measured.compute_factor, measured.communication_factor
    sizes = [math.log(max(1, point.size_bytes)) for point in points]
    at = math.log(max(1, size_bytes))
    held = np.interp(at, sizes, [1 - 1 / point.compute_factor for point in points])
    communication = np.interp(at, sizes, [point.communication_factor for point in points])
    return 1 / (1 - float(held)), float(communication)


def _of_operation(points: Sequence[OverlapPoint], operation: str) -> list[OverlapPoint]:
    """Ascending in size; of several group sizes that of the most ranks."""
    own = [point for point in points if point.operation == operation]
    most = max((point.group_size for point in own), default=0)
    return sorted((point for point in own if point.group_size == most), key=lambda point: point.size_bytes)


# --- piecewise lines through a measured collective --------------------------------------------------------------------


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


# --- terms of a price -------------------------------------------------------------------------------------------------


def moving_terms(
    size_bytes: float,
    seconds_per_byte: float,
    latency_s: float,
    *,
    alone_seconds_per_byte: float | None = None,
    groups: int = 0,
    latency: str = "",
    origin: TermOrigin = "fitted",
) -> Terms:
    """Terms for the bytes, for contention if there is some, and for latency.

        seconds = bytes * seconds_per_byte alone + contention + latency

    Contention is what the bytes take longer while other groups use the same links. Latency is not stretched.

    Args:
        size_bytes: of the whole array. seconds_per_byte: of the whole array, while other groups run.
        alone_seconds_per_byte: alone (None: nothing else runs). groups: how many run at once.
        latency_s: of the operation. latency: what it consists of, as text. origin: of the numbers.

    Returns:
        The terms, in seconds. Leaves out that contention may end before the transfer does.
    """
    alone = seconds_per_byte if alone_seconds_per_byte is None else alone_seconds_per_byte
    alone_s, seconds = alone * size_bytes, seconds_per_byte * size_bytes
    terms = [Term("bytes", "start", alone_s, origin, f"{format_bytes(size_bytes)} at {alone:.4g} s/B")]
    if seconds != alone_s:
        what = f"{groups} groups share links: {seconds_per_byte / alone:.3g} times as long as alone"
        terms.append(Term("contention", "plus", seconds - alone_s, "fitted", what))
    terms.append(Term("latency", "plus", latency_s, origin, latency))
    return tuple(terms)


def hops_text(base_s: float, *hops: tuple[int, float]) -> str:
    """Describe a latency, e.g. `10 us + 14 hops of 1.2 us`.

    Args:
        base_s: seconds before the hops. hops: (count, seconds of one).
    """
    return " + ".join(
        [format_seconds(base_s), *(f"{count} hops of {format_seconds(seconds)}" for count, seconds in hops if count)]
    )
