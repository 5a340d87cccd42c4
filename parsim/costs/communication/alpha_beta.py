"""Closed forms of collectives in the alpha-beta model."""

from __future__ import annotations

import math

from parsim.collectives import COLLECTIVE_KINDS
from parsim.errors import CostError


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
