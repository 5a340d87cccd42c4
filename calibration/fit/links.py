"""A link model fitted to measured all_reduces: one rate per lane, and latencies per protocol, for every group at once.

The tables do not name the protocol of a point, because the library's tuner chooses it (its constants are in the model).
NCCL's constants of 2020 reproduce the sizes at which the measured times jump.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from parsim.costs.communication.closed_forms import ring_steps, ring_traffic
from parsim.costs.communication.contention import RingSet
from parsim.costs.communication.intranode import choose_protocol, protocol_lines
from parsim.costs.communication.regime_fits import fit_linear, rounded
from parsim.errors import ProfileError
from parsim.hardware.profile import CollectivePoint, LinkModel, LinkProtocol

RingCount = Callable[[Sequence[int]], int]


def assign_protocols(
    points: Sequence[CollectivePoint], model: LinkModel, ring_count: RingCount
) -> dict[str, list[CollectivePoint]]:
    """The points by the protocol the tuner would use (for relayed rings if the point's group has no ring)."""
    assigned: dict[str, list[CollectivePoint]] = {}
    for point in points:
        rings = _rings(point, ring_count, 1.0)
        _, protocol = choose_protocol(protocol_lines(point.operation, rings, model), point.size_bytes)
        assigned.setdefault(f"{protocol.algorithm} {protocol.protocol}", []).append(point)
    return assigned


def fit_lines(points: Sequence[CollectivePoint], ring_count: RingCount) -> tuple[float, float, float]:
    """base_s, hop_s and seconds per byte of one lane of ring all_reduces: the least relative error over all groups.

    Raises ProfileError if there are fewer than 4 points.
    """
    if len(points) < 4:
        raise ProfileError(f"{len(points)} all_reduce points for one protocol; a fit of 3 numbers needs at least 4")
    columns = np.array(
        [
            (
                1.0,
                ring_steps("all_reduce", len(point.group)),
                ring_traffic("all_reduce", len(point.group)) * point.size_bytes / max(1, ring_count(point.group)),
            )
            for point in points
        ]
    )
    base, hop, beta = fit_linear(columns, _seconds(points))
    return float(base), float(hop), float(beta)


def fit_slope(points: Sequence[CollectivePoint], ring_count: RingCount) -> tuple[float, float]:
    """Latency and seconds per byte of one lane from points of one group size; the latency takes up any launch overhead."""
    columns = np.array(
        [
            (1.0, ring_traffic("all_reduce", len(point.group)) * point.size_bytes / max(1, ring_count(point.group)))
            for point in points
        ]
    )
    latency, beta = fit_linear(columns, _seconds(points))
    return float(latency), float(beta)


def relative_errors(
    points: Sequence[CollectivePoint], model: LinkModel, lane_seconds_per_byte: float, ring_count: RingCount
) -> NDArray[np.float64]:
    """predicted / measured - 1, float64 [n]."""
    predicted = [
        choose_protocol(
            protocol_lines(point.operation, _rings(point, ring_count, lane_seconds_per_byte), model), point.size_bytes
        )[0]
        for point in points
    ]
    return np.array(predicted) / _seconds(points) - 1.0


def with_times(protocol: LinkProtocol, base_s: float, hop_s: float, efficiency: float) -> LinkProtocol:
    """The protocol with fitted times, rounded."""
    update = {"base_s": rounded(max(0.0, base_s)), "hop_s": rounded(max(0.0, hop_s)), "efficiency": rounded(efficiency)}
    return protocol.model_copy(update=update)


def _rings(point: CollectivePoint, ring_count: RingCount, lane_seconds_per_byte: float) -> RingSet:
    count = ring_count(point.group)
    return RingSet(
        devices=tuple(f"gpu{index}" for index in point.group),
        count=max(1, count),
        seconds_per_byte=lane_seconds_per_byte / max(1, count),
        relayed=count == 0,
        kinds=(),
    )


def _seconds(points: Sequence[CollectivePoint]) -> NDArray[np.float64]:
    return np.array([point.seconds for point in points], dtype=np.float64)
