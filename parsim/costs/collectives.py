"""What a collective or a transfer costs: closed forms over the links of the machine, or piecewise lines measured per group.

A profile says which: where it holds a link model (NCCL on NVLink), times follow from rings packed on the link graph;
otherwise (gloo) from `CollectiveFit`s. Only all_reduce was measured on the DGX-1V that the link model stands for: the other
operations are derived from the same links by their closed forms and carry a wider uncertainty for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from parsim.costs.estimate import Estimate
from parsim.costs.linkgraph import RingSet, busiest_seconds_per_byte, ring_set
from parsim.errors import CostError
from parsim.hardware.cluster import Cluster
from parsim.hardware.profile import CollectiveFit, LinkModel, LinkProtocol, Regime
from parsim.hardware.topology import device_name
from parsim.work import Collective, SendRecv

EXTRAPOLATION_SIGMA = 0.25
"""Relative spread given to what was not measured: sizes outside the range, derived operations, relayed rings. Assumed."""

MEASURED_ON_LINKS = "all_reduce"


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
    """Time of a tree all_reduce: up and down a tree of `depth` levels, 2 depth alpha + 2 S beta.

    `depth` defaults to ceil(log2 n), the double binary tree, in which every rank forwards each half of the array once
    up and once down, so that the full bandwidth of its links is used. Within one box NCCL's trees are chains of depth
    n - 1 (so its tuner counts them). One rank costs nothing. Leaves out the pipelining of chunks, as for the ring.

    Raises CostError if an argument is out of range.
    """
    if _group(group_size) == 1:
        return 0.0
    levels = math.ceil(math.log2(group_size)) if depth is None else depth
    return 2 * levels * latency_s + 2 * _size(size_bytes) * _positive(seconds_per_byte)


def ring_steps(operation: str, group_size: int) -> int:
    """Hops one after the other: 2 (n - 1) for all_reduce, n - 1 for all_gather, reduce_scatter, broadcast, all_to_all."""
    return (2 if operation == "all_reduce" else 1) * (_group(group_size) - 1)


def ring_traffic(operation: str, group_size: int) -> float:
    """Bytes through the slowest hop of a ring per byte of S: 2 (n - 1)/n for all_reduce, (n - 1)/n for all_gather and
    reduce_scatter, 1 for a pipelined broadcast. One rank moves nothing. all_to_all does not run on a ring: see
    `all_to_all_s`."""
    n = _group(group_size)
    if n == 1:
        return 0.0
    match operation:
        case "all_reduce":
            return 2 * (n - 1) / n
        case "all_gather" | "reduce_scatter":
            return (n - 1) / n
        case "broadcast":
            return 1.0
    raise CostError(f"no ring runs {operation!r}; known: all_gather, all_reduce, broadcast, reduce_scatter")


def busbw_bytes_per_s(operation: str, size_bytes: float, group_size: int, seconds: float) -> float:
    """Bus bandwidth as nccl-tests defines it: S / t times 2 (n - 1)/n for all_reduce, (n - 1)/n for all_gather,
    reduce_scatter and all_to_all, 1 for broadcast and send_recv. Zero where no time passes."""
    if seconds <= 0:
        return 0.0
    factor = {"send_recv": 1.0, "all_to_all": (group_size - 1) / group_size}.get(operation)
    return size_bytes / seconds * (ring_traffic(operation, group_size) if factor is None else factor)


def estimate_collective(work: Collective, cluster: Cluster) -> Estimate:
    """Price a collective over ranks of `cluster`.

    Raises CostError if the group names a rank the cluster has not, if no link joins two members, or if neither a link
    model nor a fit for this operation and group size is in the profile.
    """
    devices = _devices(work.group, cluster, work.operation)
    if len(devices) == 1:
        return Estimate(median_s=0.0, source="fitted", detail="one rank: nothing to do")
    model = cluster.profile.communication.link_model
    if model is None:
        return _from_fits(work.operation, len(devices), work.size_bytes, cluster)
    if work.operation == "all_to_all":
        return _all_to_all(devices, work.size_bytes, cluster, model)
    rings = ring_set(cluster.topology, model.link_kind, devices)
    seconds, protocol = choose_protocol(protocol_lines(work.operation, rings, model), work.size_bytes)
    extra = [] if _measured(rings, cluster, model) else [("communication:unmeasured group", model.unmeasured_group_sigma)]
    if work.operation != MEASURED_ON_LINKS:
        extra.append(("communication:derived operation", EXTRAPOLATION_SIGMA))
    if rings.relayed:
        extra = [("communication:relay", EXTRAPOLATION_SIGMA)]
    where = "relayed over " + "+".join(rings.kinds) if rings.relayed else f"on {rings.count} ring(s)"
    derived = "" if work.operation == MEASURED_ON_LINKS else ", closed form"
    return _link_estimate(
        seconds, work.size_bytes, model, f"{protocol.algorithm} {protocol.protocol} {where}{derived}", protocol.algorithm, extra
    )


def estimate_send_recv(work: SendRecv, cluster: Cluster) -> Estimate:
    """Price a transfer between two ranks: over their direct lanes, or the path over PCIe and sockets where none joins them.

    Raises CostError as `estimate_collective` does.
    """
    a, b = _devices((work.source, work.destination), cluster, "send_recv")
    model = cluster.profile.communication.link_model
    if model is None:
        return _from_fits("send_recv", 2, work.size_bytes, cluster)
    beta, direct = busiest_seconds_per_byte(cluster.topology, model.link_kind, [(a, b, 1.0)])
    detail = f"direct {model.link_kind}" if direct else "relayed over other links"
    extra = [("communication:derived operation", EXTRAPOLATION_SIGMA)]
    return _link_estimate(model.point_to_point_base_s + beta * work.size_bytes, work.size_bytes, model, detail, "p2p", extra)


def fitted_s(fit: CollectiveFit, size_bytes: float) -> float:
    """Seconds of a piecewise fit at a size; never less than at the end of an earlier regime."""
    return regimes_s(fit.regimes, size_bytes)


def regimes_s(regimes: Sequence[Regime], size_bytes: float) -> float:
    """Seconds of piecewise lines, sorted by size: the running maximum, so that the time never falls with the size."""
    seconds = 0.0
    for regime in regimes:
        end = regime.max_size_bytes
        inside = end is None or size_bytes <= end
        seconds = max(seconds, regime.latency_s + regime.seconds_per_byte * (size_bytes if inside or end is None else end))
        if inside:
            return seconds
    last = regimes[-1]
    return max(seconds, last.latency_s + last.seconds_per_byte * size_bytes)


@dataclass(frozen=True, slots=True)
class ProtocolLine:
    """seconds = latency_s + seconds_per_byte * S of one protocol, and the same as the library's tuner counts it."""

    protocol: LinkProtocol
    latency_s: float
    seconds_per_byte: float
    tuner_latency_s: float
    tuner_seconds_per_byte: float


def protocol_lines(operation: str, rings: RingSet, model: LinkModel) -> list[ProtocolLine]:
    """One line per protocol. The tuner's lane rate is the profile's; on relayed rings it is the path's own."""
    n = len(rings.devices)
    steps, ring_share = ring_steps(operation, n), ring_traffic(operation, n)
    tuner_beta = rings.seconds_per_byte if rings.relayed else 1.0 / (rings.count * model.tuner_bandwidth_bytes_per_s.value)
    lines: list[ProtocolLine] = []
    for protocol in model.relay_protocols if rings.relayed else model.protocols:
        if protocol.algorithm == "tree" and operation != "all_reduce":
            continue
        share = 2.0 if protocol.algorithm == "tree" else ring_share
        lines.append(
            ProtocolLine(
                protocol=protocol,
                latency_s=protocol.base_s + steps * protocol.hop_s,
                seconds_per_byte=share * rings.seconds_per_byte / protocol.efficiency,
                tuner_latency_s=protocol.tuner_base_s + steps * protocol.tuner_hop_s,
                tuner_seconds_per_byte=share * tuner_beta / protocol.tuner_efficiency,
            )
        )
    if not lines:
        names = ", ".join(rings.devices)
        raise CostError(
            f"no protocol prices {operation} over {names}, whose rings must leave {model.link_kind}; "
            "add relay_protocols to the link model or choose devices that a ring of links joins"
        )
    return lines


def choose_protocol(lines: Sequence[ProtocolLine], size_bytes: int) -> tuple[float, LinkProtocol]:
    """The protocol with the least tuner time, and its seconds, made monotone in the size.

    The tuner's choice is not always the fastest one: at the size where it changes its mind the time can drop (measured
    as well). A size therefore costs at most what the next protocol costs where it begins.
    """
    current = min(lines, key=lambda line: (line.tuner_latency_s, line.tuner_seconds_per_byte))
    seconds, chosen, start = math.inf, current, 0.0
    while True:
        if start <= size_bytes:
            chosen, seconds = current, current.latency_s + current.seconds_per_byte * size_bytes
        else:
            seconds = min(seconds, current.latency_s + current.seconds_per_byte * start)
        later = [line for line in lines if line.tuner_seconds_per_byte < current.tuner_seconds_per_byte]
        if not later:
            return seconds, chosen.protocol
        start, current = min(
            ((_crossing(current, line), line) for line in later), key=lambda pair: (pair[0], pair[1].tuner_seconds_per_byte)
        )


def _crossing(slow: ProtocolLine, fast: ProtocolLine) -> float:
    """The size from which the tuner prefers `fast`, which has the smaller slope."""
    return (fast.tuner_latency_s - slow.tuner_latency_s) / (slow.tuner_seconds_per_byte - fast.tuner_seconds_per_byte)


def _all_to_all(devices: tuple[str, ...], size_bytes: int, cluster: Cluster, model: LinkModel) -> Estimate:
    """Every rank sends S/n to every other at once; the busiest link sets the pace."""
    share = 1.0 / len(devices)
    flows = [(a, b, share) for a in devices for b in devices if a != b]
    beta, direct = busiest_seconds_per_byte(cluster.topology, model.link_kind, flows)
    detail = "pairwise over direct links, closed form" if direct else "pairwise, some pairs relayed, closed form"
    extra = [("communication:derived operation", EXTRAPOLATION_SIGMA)]
    return _link_estimate(model.point_to_point_base_s + beta * size_bytes, size_bytes, model, detail, "pairwise", extra)


def _link_estimate(
    seconds: float, size_bytes: int, model: LinkModel, detail: str, algorithm: str, extra: list[tuple[str, float]]
) -> Estimate:
    outside = not model.min_size_bytes <= size_bytes <= model.max_size_bytes
    widened = [("communication:size outside measured range", EXTRAPOLATION_SIGMA)] if outside else []
    return Estimate(
        median_s=seconds,
        source="fitted",
        parameters=((f"communication:{algorithm}", model.relative_sigma), *extra, *widened),
        detail=detail,
        extrapolated=outside,
    )


def _from_fits(operation: str, group_size: int, size_bytes: int, cluster: Cluster) -> Estimate:
    fits = [fit for fit in cluster.profile.communication.fits if fit.operation == operation]
    match = next((fit for fit in fits if fit.group_size == group_size), None)
    if match is None:
        known = ", ".join(str(fit.group_size) for fit in sorted(fits, key=lambda fit: fit.group_size)) or "none"
        raise CostError(
            f"profile {cluster.profile.name} has no measured {operation} over {group_size} ranks (measured group sizes: "
            f"{known}); measure it with `parsim calibrate --nproc {group_size}`"
        )
    outside = not match.min_size_bytes <= size_bytes <= match.max_size_bytes
    widened = (("communication:size outside measured range", EXTRAPOLATION_SIGMA),) if outside else ()
    return Estimate(
        median_s=fitted_s(match, size_bytes),
        source="fitted",
        parameters=((f"communication:{operation}/{group_size}", match.relative_sigma), *widened),
        repeat_sigma=match.repeat_sigma,
        detail=f"{match.algorithm}, piecewise line over {match.min_size_bytes}..{match.max_size_bytes} B",
        extrapolated=outside,
    )


def _measured(rings: RingSet, cluster: Cluster, model: LinkModel) -> bool:
    """True if a measured group has the same size and the same number of rings."""
    kind = cluster.devices[0].type.kind
    return any(
        len(group) == len(rings.devices)
        and ring_set(cluster.topology, model.link_kind, tuple(device_name(index, kind) for index in group)).count == rings.count
        for group in model.measured_groups
    )


def _devices(ranks: Sequence[int], cluster: Cluster, operation: str) -> tuple[str, ...]:
    for rank in ranks:
        if not 0 <= rank < cluster.size:
            raise CostError(
                f"{operation} names rank {rank}, but the cluster has ranks 0 to {cluster.size - 1}; use more devices"
            )
    return tuple(device_name(cluster.devices[rank].index, cluster.devices[rank].type.kind) for rank in ranks)


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
