"""Collectives inside one node: rings packed on its links, trees, or switches that add (NVLS), under the protocol that the
library's tuner takes.

Leaves out: the pipelining of chunks, and copies to pack parts of an array.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from parsim.costs.communication.closed_forms import ring_steps, ring_traffic
from parsim.costs.communication.contention import RingSet, inside_pace
from parsim.errors import CostError
from parsim.hardware.cluster import Cluster
from parsim.hardware.profile import LinkModel, LinkProtocol
from parsim.work import COLLECTIVE_KINDS


@dataclass(frozen=True, slots=True, kw_only=True)
class InsideChoice:
    """A collective inside the nodes: the protocol that the library's tuner takes, and the line it is priced on.

    Attributes:
        line: of seconds over bytes, beside the groups that run at once. size_bytes: where on it; less than asked for where a
            later protocol begins with less time (`line_at`).
        rings: of the slowest node. contention: seconds per byte of its busiest link over those alone.
    """

    protocol: LinkProtocol
    line: ProtocolLine
    size_bytes: float
    rings: RingSet
    contention: float

    @property
    def seconds(self) -> float:
        return self.line.seconds_at(self.size_bytes)


def inside_choice(
    operation: str,
    group: tuple[int, ...],
    size_bytes: float,
    cluster: Cluster,
    concurrent: tuple[tuple[int, ...], ...] = (),
) -> InsideChoice:
    """Price a collective among the members of a group (ascending) on each node, as the slowest node runs it.

    The library's tuner does not know of the `concurrent` groups, which do the same: it chooses as if there were none. Raises
    CostError if the profile has no link model, or no protocol prices the operation on these devices.
    """
    model = link_model_of(cluster)
    rings, seconds_per_byte = inside_pace(cluster, model.link_kind, group, concurrent)
    alone_s = inside_pace(cluster, model.link_kind, group)[1] if concurrent else seconds_per_byte
    lines = protocol_lines(operation, replace(rings, seconds_per_byte=seconds_per_byte), model, alone=rings)
    line, at_bytes, protocol = line_at(lines, size_bytes)
    return InsideChoice(
        protocol=protocol,
        line=line,
        size_bytes=at_bytes,
        rings=rings,
        contention=seconds_per_byte / alone_s if alone_s else 1.0,
    )


def link_model_of(cluster: Cluster) -> LinkModel:
    """The link model of a cluster's profile. Raises CostError if the profile prices communication without links."""
    model = cluster.profile.communication.link_model
    if model is None:
        raise CostError(f"profile {cluster.profile.name} has no link model; use a profile that has one")
    return model


@dataclass(frozen=True, slots=True)
class ProtocolLine:
    """seconds = latency_s + seconds_per_byte * S of one protocol, and the same as the library's tuner counts it."""

    protocol: LinkProtocol
    latency_s: float
    seconds_per_byte: float
    tuner_latency_s: float
    tuner_seconds_per_byte: float

    def seconds_at(self, size_bytes: float) -> float:
        return self.latency_s + self.seconds_per_byte * size_bytes


def protocol_lines(operation: str, rings: RingSet, model: LinkModel, alone: RingSet | None = None) -> list[ProtocolLine]:
    """One line of seconds over bytes per protocol, for rings with concurrent groups counted.

    The tuner's lane rate is the profile's; on relayed rings it is the path's own, while nothing else runs (`alone`; None:
    `rings`). Raises CostError if no protocol prices the operation on these rings.
    """
    n = len(rings.devices)
    steps, ring_share = ring_steps(operation, n), ring_traffic(operation, n)
    tuner_beta = (
        (alone or rings).seconds_per_byte if rings.relayed else 1.0 / (rings.count * model.tuner_bandwidth_bytes_per_s.value)
    )
    lines: list[ProtocolLine] = []
    for protocol in model.relay_protocols if rings.relayed else model.protocols:
        if protocol.algorithm != "ring" and not COLLECTIVE_KINDS[operation].trees:
            continue
        share, hops = ring_share, steps
        if protocol.algorithm == "tree":
            share = 2.0
        elif protocol.algorithm == "nvls":
            share, hops = nvls_traffic(n), 1
        lines.append(
            ProtocolLine(
                protocol=protocol,
                latency_s=protocol.base_s + hops * protocol.hop_s,
                seconds_per_byte=share * rings.seconds_per_byte / protocol.efficiency,
                tuner_latency_s=protocol.tuner_base_s + hops * protocol.tuner_hop_s,
                tuner_seconds_per_byte=share * tuner_beta / protocol.tuner_efficiency,
            )
        )
    if not lines:
        names = ", ".join(rings.devices)
        raise CostError(
            f"no protocol prices {operation} over {names}, whose rings must leave {model.link_kind}; "
            "add relay_protocols to the link model or choose devices that are connected in a ring"
        )
    return lines


def nvls_traffic(n: int) -> float:
    """Bytes through a device's links, per byte of S, of an all_reduce over n devices that the switch adds up and copies.

    A device sends its whole array once, piece by piece, towards the switch that adds (NVLink SHARP), and its own n-th part once
    more, which the switch copies to all: 1 + 1/n, where a ring sends 2 (n - 1)/n.
    """
    return 1.0 + 1.0 / n


def choose_protocol(lines: Sequence[ProtocolLine], size_bytes: float) -> tuple[float, LinkProtocol]:
    """The protocol with the least tuner time, and its seconds, made monotone in the size (`line_at`)."""
    line, at_bytes, protocol = line_at(lines, size_bytes)
    return line.seconds_at(at_bytes), protocol


def line_at(lines: Sequence[ProtocolLine], size_bytes: float) -> tuple[ProtocolLine, float, LinkProtocol]:
    """Find the line that prices a collective, the size at which to read it, and the protocol with the least tuner time.

    The tuner's choice is not always the fastest: where it changes, the time can drop (measured as well). A size therefore costs
    at most as much as the next protocol costs at its beginning.
    """
    current = min(lines, key=lambda line: (line.tuner_latency_s, line.tuner_seconds_per_byte))
    least, start, chosen = (current, size_bytes), 0.0, current
    while True:
        if start <= size_bytes:
            chosen, least = current, (current, size_bytes)
        elif current.seconds_at(start) < least[0].seconds_at(least[1]):
            least = current, start
        later = [line for line in lines if line.tuner_seconds_per_byte < current.tuner_seconds_per_byte]
        if not later:
            return *least, chosen.protocol
        start, current = min(
            ((_crossing(current, line), line) for line in later), key=lambda pair: (pair[0], pair[1].tuner_seconds_per_byte)
        )


def _crossing(slow: ProtocolLine, fast: ProtocolLine) -> float:
    """The size from which the tuner prefers `fast`, which has the smaller slope."""
    return (fast.tuner_latency_s - slow.tuner_latency_s) / (slow.tuner_seconds_per_byte - fast.tuner_seconds_per_byte)
