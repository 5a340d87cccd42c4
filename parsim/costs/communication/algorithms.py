"""Collectives over links, inside a node and between nodes: each algorithm under each protocol.

Inside a node: rings packed on its links, trees, or switches that add (NVLS), under the protocol that the library's tuner takes.
Between nodes, for all_reduce, all_gather, reduce_scatter and broadcast:

Ring: all members in one ring (one per network card and more), which crosses from node to node as often as there are nodes:

    seconds = base + (steps - crossings) * hop inside + crossings * hop between + traffic * max(inside, between) * S

Here steps and traffic are `ring_steps` and `ring_traffic` over all n ranks, and crossings is `ring_steps` over the K
nodes. "Inside" and "between" are the seconds per byte of the busiest link inside and between nodes
(`parsim.costs.communication.contention`), divided by the protocol's efficiency.

Tree (all_reduce): a chain inside each node and a double binary tree over the nodes, which pass the array up and down:

    seconds = base + 2 (m - 1) hop inside + 2 ceil(log2 K) hop between + max(2 inside, c between) * S

for m members on a node; c = 2, but 1 for two nodes, where each sends the other one half up and one half down. With
switches that add inside a node (NVLS), the chain and its 2 are replaced by the switch's one step and 1 + 1/m.

Hierarchical (as many members on every node): reduce_scatter inside; then each member and its counterparts (its rail) run
the operation over the nodes with S/m; then all_gather inside. Each phase takes its best protocol, and no phase overlaps
another. An all_gather or a reduce_scatter uses the phases that it needs; a broadcast goes over the nodes from one member,
then inside.

parsim takes the algorithm with the least predicted time. NCCL decides in the same way with its own model
(src/graph/tuning.cc, read at 01afd20a77b5: the same steps, traffic and trees, its constants for hops). NCCL has no
hierarchical algorithm; libraries above it have one (Horovod, BlueFog). A network file forbids an algorithm by leaving it
out of `algorithms`.

Leaves out: the pipelining of chunks, copies to pack parts of an array, LL's longer hops inside a node when several nodes take
part, the plateau of large rings, switches that reduce (SHARP), and collisions at the ends of the network's routes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from parsim.costs.communication.closed_forms import hops_text, moving_terms, ring_steps, ring_traffic
from parsim.costs.communication.contention import (
    LinkRates,
    RingSet,
    group_pace,
    inside_pace,
    out_of,
    ports_of,
    reverse,
    transfer_loads,
    uplink_rate,
)
from parsim.costs.estimate import Term, Terms
from parsim.errors import CostError
from parsim.hardware.cluster import Cluster
from parsim.hardware.parts import Network, NetworkProtocol
from parsim.hardware.profile import LinkModel, LinkProtocol
from parsim.numeric import Floats, Ints
from parsim.work import COLLECTIVE_KINDS


@dataclass(frozen=True, slots=True, kw_only=True)
class InsideChoice:
    """A collective inside the nodes: the protocol that the library's tuner takes, and the line it is priced on.

    Attributes:
        size_bytes: where on the line; less than asked for where a later protocol begins with less time (`line_at`).
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
    concurrent: tuple[tuple[int, ...], ...],
) -> InsideChoice:
    """Price a collective among the members of a group (ascending) on each node, as the slowest node runs it.

    The library's tuner chooses as if there were no `concurrent` groups, which do the same. Raises CostError if the profile has
    no link model, or no protocol prices the operation on these devices.
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

    The tuner's lane rate is the profile's; on relayed rings it is the path's own, while nothing else runs (`alone`). Raises
    CostError if no protocol prices the operation on these rings.
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
        crossings = []  # the size from which the tuner prefers a line with a smaller slope
        for line in later:
            slower = current.tuner_seconds_per_byte - line.tuner_seconds_per_byte
            crossings.append(((line.tuner_latency_s - current.tuner_latency_s) / slower, line))
        start, current = min(crossings, key=lambda pair: (pair[0], pair[1].tuner_seconds_per_byte))


# --- between nodes ----------------------------------------------------------------------------------------------------


NVLS_PROTOCOL = "Simple"

RankGroups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmChoice:
    """One way to run a collective.

    Attributes:
        base_s, hops, seconds_per_byte: of a ring or a tree: seconds = base_s + hops + seconds_per_byte * size, with the count
            and seconds of each kind of hop. phases: of the hierarchical form, each with its seconds, one after the other.
    """

    algorithm: str
    protocol: str
    size_bytes: float
    base_s: float = 0.0
    hops: tuple[tuple[int, float], ...] = ()
    seconds_per_byte: float = 0.0
    phases: tuple[tuple[str, float], ...] = ()

    @property
    def latency_s(self) -> float:
        seconds = self.base_s
        for count, hop_s in self.hops:
            seconds += count * hop_s
        return seconds

    @property
    def seconds(self) -> float:
        if self.phases:
            return sum(seconds for _, seconds in self.phases)
        return self.latency_s + self.seconds_per_byte * self.size_bytes


def chosen_terms(
    best: AlgorithmChoice, operation: str, group: tuple[int, ...], cluster: Cluster, concurrent: RankGroups
) -> Terms:
    """The terms of one choice of `choices` for a group. Contention is the time beyond what the group takes alone."""
    alone = best
    if concurrent:
        undisturbed = choices(operation, group, best.size_bytes, cluster)
        alone = next(one for one in undisturbed if (one.algorithm, one.protocol) == (best.algorithm, best.protocol))
    groups = len({*concurrent, group})
    if not best.phases:
        return moving_terms(
            best.size_bytes,
            best.seconds_per_byte,
            best.latency_s,
            alone_seconds_per_byte=alone.seconds_per_byte,
            groups=groups,
            latency=hops_text(best.base_s, *best.hops),
        )
    terms: list[Term] = []
    for (name, seconds), (_, alone_s) in zip(best.phases, alone.phases, strict=True):
        shared = f"{seconds / alone_s:.3g} times as long as alone: {groups} groups share links" if seconds != alone_s else ""
        terms.append(Term(name, "plus" if terms else "start", seconds, "fitted", shared))
    return tuple(terms)


def choices(
    operation: str, group: tuple[int, ...], size_bytes: float, cluster: Cluster, concurrent: RankGroups = ()
) -> list[AlgorithmChoice]:
    """Price every algorithm and protocol for a group (ascending) on several nodes, fastest first.

    Raises CostError: nothing prices the operation, a member's node has no network card, or the cluster has no network.
    """
    network, model = parts_of(cluster)
    pace = group_pace(cluster, model.link_kind, group, "through", concurrent)
    options: list[AlgorithmChoice] = []
    if "ring" in network.algorithms:
        options += _protocol_choices("ring", ring_form(operation, len(group), pace), size_bytes, pace, network, model)
    if "tree" in network.algorithms and COLLECTIVE_KINDS[operation].trees:
        options += _protocol_choices("tree", tree_form(pace.members, pace), size_bytes, pace, network, model)
        options += _nvls_trees(size_bytes, pace, network, model)
    if "hierarchical" in network.algorithms:
        options += _hierarchical(operation, group, size_bytes, cluster, concurrent)
    if not options:
        raise CostError(
            f"network {network.name} has no algorithm for {operation}: it lists {', '.join(network.algorithms)}; "
            "add ring to them"
        )
    return sorted(options, key=lambda choice: choice.seconds)


def rails_s(operation: str, group: tuple[int, ...], size_bytes: float, cluster: Cluster, concurrent: RankGroups) -> float:
    """Seconds of the phase between nodes of the hierarchical form: every member runs `operation` with its counterparts on
    its part of an array of `size_bytes`. Raises CostError as `choices`."""
    network, model = parts_of(cluster)
    pace = group_pace(cluster, model.link_kind, group, "rails", concurrent)
    rails = _protocol_choices("ring", ring_form(operation, pace.nodes, pace), size_bytes, pace, network, model)
    if COLLECTIVE_KINDS[operation].trees and "tree" in network.algorithms:
        rails += _protocol_choices("tree", tree_form(1, pace), size_bytes, pace, network, model)
    return min(choice.seconds for choice in rails)


def parts_of(cluster: Cluster) -> tuple[Network, LinkModel]:
    """The network and the link model of a cluster of several nodes. Raises CostError where one of them is missing."""
    model = cluster.profile.communication.link_model
    if cluster.network is None or model is None:
        raise CostError(
            f"cluster {cluster.name} has a group on several nodes, but no network connects them; make it with "
            "cluster_from_profile(profile, nodes=..., network=...)"
        )
    return cluster.network, model


def point_to_point(network: Network, model: LinkModel) -> tuple[float, float]:
    """Of a message between nodes: seconds without the latency of the links, and the share of the bandwidth that large ones
    reach."""
    best = max((entry for entry in network.protocols if entry.algorithm == "ring"), key=lambda entry: entry.efficiency)
    return model.point_to_point_base_s + best.hop_s, best.efficiency


class Form(NamedTuple):
    """An algorithm in the formulas of this module: its hops, and the bytes through the busiest link, per byte of S."""

    inside_hops: int
    crossings: int
    inside_traffic: float
    outside_traffic: float


def ring_form(operation: str, ranks: int, pace: LinkRates) -> Form:
    """A ring over so many ranks."""
    crossings, traffic = ring_steps(operation, pace.nodes), ring_traffic(operation, ranks)
    return Form(ring_steps(operation, ranks) - crossings, crossings, traffic, traffic)


def tree_form(members: int, pace: LinkRates) -> Form:
    """An all_reduce by chains of so many members, and a tree over the nodes."""
    return Form(2 * (members - 1), 2 * _levels(pace), 2.0, _tree_share(pace))


def _protocol_choices(
    algorithm: str, form: Form, size_bytes: float, pace: LinkRates, network: Network, model: LinkModel
) -> list[AlgorithmChoice]:
    return [
        AlgorithmChoice(
            algorithm=algorithm,
            protocol=between.protocol,
            size_bytes=size_bytes,
            base_s=inside.base_s,
            hops=((form.inside_hops, inside.hop_s), (form.crossings, between.hop_s + pace.hop_latency_s)),
            seconds_per_byte=max(
                form.inside_traffic * (pace.inside_s_per_byte / (inside.efficiency * between.inside_efficiency)),
                form.outside_traffic * (pace.outside_s_per_byte / between.efficiency),
            ),
        )
        for between, inside in _protocols(algorithm, pace, network, model)
    ]


def _nvls_trees(size_bytes: float, pace: LinkRates, network: Network, model: LinkModel) -> list[AlgorithmChoice]:
    """Trees over the nodes whose inside is added up and copied by the node's switch (the best of its nvls protocols)."""
    inside = [entry for entry in model.protocols if entry.algorithm == "nvls"]
    between = [entry for entry in network.protocols if entry.algorithm == "tree" and entry.protocol == NVLS_PROTOCOL]
    if not inside or not between or pace.relayed or pace.members < 2:
        return []
    switch, tree = max(inside, key=lambda protocol: protocol.efficiency), between[0]
    rate = max(
        nvls_traffic(pace.members) * pace.inside_s_per_byte / switch.efficiency,
        _tree_share(pace) * pace.outside_s_per_byte / tree.efficiency,
    )
    return [
        AlgorithmChoice(
            algorithm="nvls tree",
            protocol=NVLS_PROTOCOL,
            size_bytes=size_bytes,
            base_s=switch.base_s + switch.hop_s,
            hops=((2 * _levels(pace), tree.hop_s + pace.hop_latency_s),),
            seconds_per_byte=rate,
        )
    ]


def _levels(pace: LinkRates) -> int:
    return math.ceil(math.log2(pace.nodes))


def _tree_share(pace: LinkRates) -> float:
    """The share of the bytes that a node sends in a tree: of two nodes each sends the other one half up and one half down."""
    return 1.0 if pace.nodes == 2 else 2.0


def _hierarchical(
    operation: str, group: tuple[int, ...], size_bytes: float, cluster: Cluster, concurrent: RankGroups
) -> list[AlgorithmChoice]:
    sizes = {len(members) for _, members in cluster.spread(group)}
    kind = COLLECTIVE_KINDS[operation]
    if len(sizes) > 1 or sizes == {1} or not kind.phases:
        return []
    if kind.rooted:
        first: dict[int, int] = {}
        for rank in group:
            first.setdefault(cluster.places[rank][0], rank)
        members, others = tuple(first.values()), tuple(other for other in concurrent if other != group)
    else:
        members, others = group, concurrent
    phases = [(f"{operation} between nodes", rails_s(operation, members, size_bytes, cluster, others))]
    for inside in kind.phases:
        phases.append((f"{inside} inside nodes", inside_choice(inside, group, size_bytes, cluster, concurrent).seconds))
    return [AlgorithmChoice(algorithm="hierarchical", protocol="", size_bytes=size_bytes, phases=tuple(phases))]


def _protocols(
    algorithm: str, pace: LinkRates, network: Network, model: LinkModel
) -> Iterator[tuple[NetworkProtocol, LinkProtocol]]:
    """The network's protocols of an algorithm, each with the ring of the same protocol inside a node, as which a tree's
    chain is priced too."""
    local = model.relay_protocols if pace.relayed and model.relay_protocols else model.protocols
    inside = {entry.protocol: entry for entry in local if entry.algorithm == "ring"}
    shares_one = False
    for entry in network.protocols:
        if entry.algorithm == algorithm and entry.protocol in inside:
            shares_one = True
            yield entry, inside[entry.protocol]
    if algorithm == "ring" and not shares_one:
        raise CostError(
            f"network {network.name} and the profile's link model share no protocol of the ring: "
            f"{', '.join(entry.protocol for entry in network.protocols)} against {', '.join(inside)}; add one to the network"
        )


# --- many transfers at once -------------------------------------------------------------------------------------------


def exchange_seconds(pairs: Sequence[tuple[int, int]], size_bytes: float, cluster: Cluster) -> Floats:
    """Time of each transfer of an exchange in which all transfers (source, destination) run at once: float64 [pairs]
    seconds.

    A transfer moves at the speed of the busiest link, network card or uplink on its path. That link carries every transfer that
    uses it and stays busy to the end. A rank issues its sends and receives as one group, so it pays the launch once. Leaves out
    that a transfer speeds up once others have ended, collisions of routes in the network, and the arithmetic after an arrival.

    Raises CostError: an unknown rank, a rank that sends to itself, a pair listed twice, a profile without a link model, or
    links between nodes without a network.
    """
    if size_bytes < 0:
        raise CostError(f"an exchange needs size_bytes >= 0, got {size_bytes}")
    latency_s, seconds_per_byte = _latencies_and_paces(tuple(pairs), cluster)
    seconds: Floats = latency_s + seconds_per_byte * size_bytes
    return seconds


@lru_cache(maxsize=4)
def _latencies_and_paces(pairs: tuple[tuple[int, int], ...], cluster: Cluster) -> tuple[Floats, Floats]:
    """float64 [pairs] seconds, and seconds per byte: a round sends its buckets over the same links, one size after another."""
    if len(set(pairs)) != len(pairs):
        raise CostError("an exchange lists a pair of ranks twice; send both messages as one")
    for source, destination in pairs:
        if not (0 <= source < cluster.size and 0 <= destination < cluster.size) or source == destination:
            raise CostError(
                f"an exchange names the transfer {source} -> {destination}, but needs two of the cluster's ranks "
                f"0 to {cluster.size - 1}"
            )
    model = link_model_of(cluster)
    ends = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    node = np.array([place for place, _ in cluster.places], dtype=np.int64)[ends]
    inside = node[:, 0] == node[:, 1]
    near = [transfer_loads(cluster, model.link_kind, (source, to)) for source, to in ends[inside].tolist()]
    total: dict[object, float] = {}
    for load in near:
        for link, (weight, _) in load.items():
            total[link] = total.get(link, 0.0) + weight
    line = np.empty((2, len(pairs)))
    far = ends[~inside]
    if len(far):
        base_s, efficiency = point_to_point(parts_of(cluster)[0], model)
        latency_s, pace = _latencies_between_nodes(far, cluster, model.link_kind, total)
        line[:, ~inside] = base_s + latency_s, pace / efficiency
    line[0, inside] = model.point_to_point_base_s
    line[1, inside] = [max(total[link] / capacity for link, (_, capacity) in load.items()) for load in near]
    return line[0], line[1]


def _latencies_between_nodes(far: Ints, cluster: Cluster, link_kind: str, total: dict[object, float]) -> tuple[Floats, Floats]:
    """Latency and seconds per byte of transfers between nodes, int64 [transfers, 2]: by rank and by leaf, since a million of
    them use few links. `total`: of links inside nodes; added to."""
    nodes = cluster.nodes
    names = tuple(nodes.leaves)
    number = {name: place for place, name in enumerate(names)}
    leaf = np.array([number.get(nodes.leaf[node], -1) for node, _ in cluster.places], dtype=np.int64)[far]
    crossing = leaf[:, 0] != leaf[:, 1]
    latency_s, pace = np.zeros(len(far)), np.zeros(len(far))
    links: list[dict[int, list[tuple[object, float, float]]]] = []
    for end in (0, 1):
        ranks, counts = np.unique(far[:, end], return_counts=True)
        from_rank: dict[int, list[tuple[object, float, float]]] = {}
        for rank in ranks.tolist():
            node, member = cluster.places[rank]
            out = out_of(nodes.shapes[node], link_kind, member).items()
            from_rank[rank] = [
                ((node, reverse(step) if end == 1 else step), part, step[2].capacity_bytes_per_s) for step, part in out
            ]
        links.append(from_rank)
        for rank, count in zip(ranks.tolist(), counts.tolist(), strict=True):
            for link, part, _ in links[end][rank]:
                total[link] = total.get(link, 0.0) + part * count
    for end in (0, 1):
        by_rank = np.zeros((2, cluster.size))
        for rank, passed_links in links[end].items():
            node, member = cluster.places[rank]
            by_rank[:, rank] = (
                ports_of(nodes.shapes[node], member)[0].latency_s,
                max(total[link] / rate for link, _, rate in passed_links),
            )
        latency_s += by_rank[0, far[:, end]]
        pace = np.maximum(pace, by_rank[1, far[:, end]])
        passed = leaf[crossing, end]
        by_leaf = np.zeros((2, len(names)))
        for place, count in zip(*np.unique(passed, return_counts=True), strict=True):
            by_leaf[:, place] = nodes.leaves[names[place]].uplink_latency_s, count / uplink_rate(cluster, names[place])
        latency_s[crossing] += by_leaf[0, passed]
        pace[crossing] = np.maximum(pace[crossing], by_leaf[1, passed])
    return latency_s, pace
