"""The link model of a DGX-1 with V100s: NCCL's tuner constants, and the times fitted to published all_reduces.

One rate per lane and latencies per protocol are fitted for every group at once. The tables do not name the protocol of a
point, because the library's tuner chooses it (its constants are in the model). NCCL's constants of 2020 reproduce the sizes at
which the measured times jump.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from parsim.costs.communication.algorithms import line_at, protocol_lines
from parsim.costs.communication.closed_forms import ring_steps, ring_traffic
from parsim.costs.communication.contention import RingSet, ring_set
from parsim.costs.communication.measured import fit_linear, rounded
from parsim.errors import ProfileError
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.devices import device_name
from parsim.hardware.profile import CollectivePoint, LinkModel, LinkProtocol, Profile, Sourced, SourceEntry

RingCount = Callable[[Sequence[int]], int]


def assign_protocols(
    points: Sequence[CollectivePoint], model: LinkModel, ring_count: RingCount
) -> dict[str, list[CollectivePoint]]:
    """The points by the protocol the tuner would use (for relayed rings if the point's group has no ring)."""
    assigned: dict[str, list[CollectivePoint]] = {}
    for point in points:
        rings = _rings(point, ring_count, 1.0)
        _, _, protocol = line_at(protocol_lines(point.operation, rings, model), point.size_bytes)
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
    predicted = []
    for point in points:
        lines = protocol_lines(point.operation, _rings(point, ring_count, lane_seconds_per_byte), model)
        line, at_bytes, _ = line_at(lines, point.size_bytes)
        predicted.append(line.seconds_at(at_bytes))
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


SOURCES = {
    "vtrain": SourceEntry(
        kind="measurement",
        text="github VIA-Research/vTrain trace/v100: NCCL all_reduce, 2, 4 and 8 GPUs of an 8-GPU V100-SXM2 node, 1 MiB to 1 "
        "GiB (rows vtrain-lut-0141 to -0160, -0181 to -0200, -0261 to -0280). That these are GPUs 0-1, 0-3 and 0-7 of a cube "
        "mesh is inferred from the bandwidths",
    ),
    "nccl-log-8": SourceEntry(
        kind="measurement",
        text="public GitHub note titled NCCL, 2019-09-26 (rows col-nccltests-0001 to -0050): nccl-tests -g 8, NCCL 2.4 era. "
        "One process drives eight GPUs, so the times contain its launches; only the slope below 1 MiB is used",
    ),
    "nccl-log-4-pcie": SourceEntry(
        kind="measurement",
        text="GitHub note, index file 57383841940 (rows col-nccltests-0053 to -0082): nccl-tests -g 4, NCCL 2.26.2, 4 V100s, "
        "2+2 over PCIe and the sockets of another box; stands in for a ring that must leave NVLink",
    ),
    "nccl-tuner": SourceEntry(
        kind="datasheet",
        text="constants of NCCL's own cost model, github NVIDIA/nccl src/graph/tuning.cc @01afd20a77b5 (2020): base and "
        "per-hop latencies, protocol bandwidth ratios; trees at half their bandwidth, about the middle of its correction table",
    ),
    "nccl-lane": SourceEntry(
        kind="datasheet",
        text="github NVIDIA/nccl src/graph/topo.h @069a3d4f95ca: SM70_NVLINK_BW 20.0, what the tuner counts per lane",
    ),
    "fit-links": SourceEntry(
        kind="derived",
        text="fitted to the vtrain points by tools.published.v100_links. LL: slope from nccl-log-8, latency = "
        "NCCL's constant plus the launch that the fitted Simple latency has beyond NCCL's; no process-per-GPU time below "
        "1 MiB was found. Trees: the fitted ring times NCCL's ratio of tree to ring",
    ),
    "fit-relay": SourceEntry(
        kind="derived", text="fitted to the nccl-log-4-pcie points by tools.published.v100_links; another box"
    ),
}

TREE_CORRECTION = 0.5
MICRO = 1e-6


def _protocol(
    algorithm: str, protocol: str, base_us: float, hop_us: float, efficiency: float, source: str = "fit-links"
) -> LinkProtocol:
    """A protocol with the tuner's constants; its times are set to the same until they are fitted."""
    return LinkProtocol.model_validate(
        {
            "algorithm": algorithm,
            "protocol": protocol,
            "base_s": rounded(base_us * MICRO),
            "hop_s": rounded(hop_us * MICRO),
            "efficiency": rounded(efficiency),
            "tuner_base_s": rounded(base_us * MICRO),
            "tuner_hop_s": rounded(hop_us * MICRO),
            "tuner_efficiency": rounded(efficiency),
            "source": source,
            "tuner_source": "nccl-tuner",
        }
    )


RING_LL = _protocol("ring", "LL", 3.6, 0.47, 1 / 4)
RING_LL128 = _protocol("ring", "LL128", 10.0, 1.9, 0.92)
RING_SIMPLE = _protocol("ring", "Simple", 8.4, 3.4, 1.0)
TREE_LL = _protocol("tree", "LL", 4.4, 0.52, TREE_CORRECTION * 0.9 / 3.8)
TREE_LL128 = _protocol("tree", "LL128", 4.4, 1.2, TREE_CORRECTION * 0.9 * 7 / 9)
RELAY_LL = _protocol("ring", "LL", 3.6, 1.0, 1 / 4, "fit-relay")
RELAY_SIMPLE = _protocol("ring", "Simple", 8.4, 5.7, 1.0, "fit-relay")
"""NCCL's constants: baseLat, hwLat (NVLINK, or PCI for the relayed ring) in microseconds, and the share of the bandwidth.
LL128 is off over PCIe; the Simple tree (28 us per hop) is never chosen within one box and left out."""


def fit_link_model(profile: Profile) -> tuple[LinkModel, dict[str, tuple[float, str]]]:
    """The link model from the profile's points and links, and the fitted rate of a lane by link kind with its source key.

    Raises ProfileError if the points do not cover the protocols.
    """
    cluster = cluster_from_profile(profile)

    def ring_count(group: Sequence[int]) -> int:
        names = tuple(device_name(index, "cuda") for index in group)
        rings = ring_set(cluster.topology, "nvlink", names)
        return 0 if rings.relayed else rings.count

    points = profile.communication.points
    own = [point for point in points if not point.measured_on]
    log = [point for point in points if point.source == "nccl-log-8"]
    model, lane = _fit(own, log, ring_count)
    errors = relative_errors(own, model, lane, ring_count)
    relay, relay_lane = _fit_relay([point for point in points if point.source == "nccl-log-4-pcie"])
    return model.model_copy(
        update={
            "relay_protocols": relay,
            "relative_sigma": rounded(1.4826 * float(np.median(np.abs(errors)))),
            "unmeasured_group_sigma": rounded(_left_out_group_error(own, log, ring_count)),
        }
    ), {"nvlink": (rounded(1 / lane), "fit-links"), "smp": (rounded(1 / relay_lane), "fit-relay")}


def _fit(own: Sequence[CollectivePoint], log: Sequence[CollectivePoint], ring_count: RingCount) -> tuple[LinkModel, float]:
    """The model without relayed rings, and seconds per byte of one lane."""
    sizes = [point.size_bytes for point in own]
    tuner = LinkModel(
        link_kind="nvlink",
        protocols=[RING_LL, RING_LL128, RING_SIMPLE, TREE_LL, TREE_LL128],
        tuner_bandwidth_bytes_per_s=Sourced(value=20e9, source="nccl-lane"),
        point_to_point_base_s=0.0,
        relative_sigma=0.0,
        unmeasured_group_sigma=0.0,
        measured_groups=[list(group) for group in sorted({tuple(point.group) for point in own}, key=len)],
        point_sources=sorted({point.source for point in own}),
        min_size_bytes=min(sizes),
        max_size_bytes=max(sizes),
        source="fit-links",
    )
    assigned = assign_protocols(own, tuner, ring_count)
    low_latency = assign_protocols(log, tuner, ring_count).get("ring LL", [])
    if len(low_latency) < 4:
        raise ProfileError(f"{len(low_latency)} points of nccl-log-8 lie in the LL range; at least 4 are needed")
    simple_base, simple_hop, lane = fit_lines(assigned.get("ring Simple", []), ring_count)
    base, hop, beta = fit_lines(assigned.get("ring LL128", []), ring_count)
    _, low_beta = fit_slope(low_latency, ring_count)
    launch_s = max(0.0, simple_base - RING_SIMPLE.tuner_base_s)
    ring_ll = with_times(RING_LL, RING_LL.tuner_base_s + launch_s, RING_LL.tuner_hop_s, lane / low_beta)
    ring_ll128 = with_times(RING_LL128, base, hop, lane / beta)
    protocols = [
        ring_ll,
        ring_ll128,
        with_times(RING_SIMPLE, simple_base, simple_hop, 1.0),
        _tree(TREE_LL, ring_ll, RING_LL),
        _tree(TREE_LL128, ring_ll128, RING_LL128),
    ]
    update = {"protocols": protocols, "point_to_point_base_s": rounded(simple_base + simple_hop)}
    return tuner.model_copy(update=update), lane


def _tree(tree: LinkProtocol, fitted: LinkProtocol, ring: LinkProtocol) -> LinkProtocol:
    """The tree's times: the fitted ring's, changed as the tuner's constants of the tree differ from the ring's."""
    return with_times(
        tree,
        fitted.base_s + tree.tuner_base_s - ring.tuner_base_s,
        fitted.hop_s * tree.tuner_hop_s / ring.tuner_hop_s,
        fitted.efficiency * tree.tuner_efficiency / TREE_CORRECTION / ring.tuner_efficiency,
    )


def _fit_relay(points: Sequence[CollectivePoint]) -> tuple[list[LinkProtocol], float]:
    """Protocols of a ring over PCIe and the sockets, and seconds per byte of the socket link that paces it.

    All points are of one group size: the tuner's constants say which share of the latency grows with the hops.
    """
    simple_latency, lane = fit_slope([point for point in points if point.size_bytes >= 262_144], lambda group: 1)
    low_latency, low_beta = fit_slope([point for point in points if point.size_bytes <= 131_072], lambda group: 1)
    steps = 2 * (len(points[0].group) - 1)
    protocols = []
    for protocol, latency, efficiency in ((RELAY_LL, low_latency, lane / low_beta), (RELAY_SIMPLE, simple_latency, 1.0)):
        scale = latency / (protocol.tuner_base_s + steps * protocol.tuner_hop_s)
        protocols.append(with_times(protocol, scale * protocol.tuner_base_s, scale * protocol.tuner_hop_s, efficiency))
    return protocols, lane


def _left_out_group_error(own: Sequence[CollectivePoint], log: Sequence[CollectivePoint], ring_count: RingCount) -> float:
    """Root mean square relative error of predicting each group from the others."""
    errors = []
    for group in sorted({tuple(point.group) for point in own}, key=len):
        rest = [point for point in own if tuple(point.group) != group]
        model, lane = _fit(rest, log, ring_count)
        errors.append(relative_errors([point for point in own if tuple(point.group) == group], model, lane, ring_count))
    return float(np.sqrt(np.mean(np.concatenate(errors) ** 2)))
