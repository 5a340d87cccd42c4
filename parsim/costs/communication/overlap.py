"""The mutual slowdown of computation and communication of a program: measured factors, chosen by the sizes of its
messages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from parsim.costs.estimate import OverlapFactors
from parsim.hardware.profile import Overlap, OverlapPoint
from parsim.work import Collective, SendRecv, Work


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
