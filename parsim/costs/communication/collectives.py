"""The price of a collective or a transfer: closed forms over the links of the machine, or piecewise lines measured per
group.

The profile decides. Groups that were measured on this machine are priced by what was measured
(`parsim.costs.communication.measured`). If it holds a link model (NCCL on NVLink or PCIe), times of all others follow from
rings packed on the links of a node, and from the network across nodes (`parsim.costs.communication.algorithms`). Without a
link model (gloo), times come from `CollectiveFit`s. Only all_reduce was measured on the DGX-1V that the link model describes.
The other operations are derived from the same links by their closed forms, with a wider uncertainty.

Groups that run at the same time slow one another where they share a link, a network card or an uplink. The caller passes
these groups as `concurrent`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from functools import lru_cache

from parsim.costs.communication.algorithms import choices, chosen_terms, inside_choice, link_model_of, parts_of, point_to_point
from parsim.costs.communication.closed_forms import (
    hops_text,
    moving_terms,
    regime_at,
    ring_steps,
)
from parsim.costs.communication.contention import (
    NodeShare,
    RingSet,
    Way,
    distinct_pairs,
    group_pace,
    leaf_shares,
    rings_of,
    shares_of_others,
    transfer_pace,
    uplink_rate,
)
from parsim.costs.communication.measured import fits_of, measured_fit, measured_transfer
from parsim.costs.estimate import Estimate, Term, Terms
from parsim.errors import CostError
from parsim.hardware.cluster import Cluster, NodeShape
from parsim.hardware.profile import CollectiveFit, LinkModel
from parsim.model.divided import places_visited
from parsim.units import format_bytes
from parsim.work import COLLECTIVE_KINDS, Collective, SendRecv

WAYS: tuple[Way, ...] = ("through", "rails", "pairs")
GroupsAtOnce = tuple[tuple[int, ...], ...]
"""Groups, or pairs of a transfer, that run at the same time."""


@lru_cache(maxsize=65536)
def alike(cluster: Cluster, group: tuple[int, ...], concurrent: GroupsAtOnce) -> Hashable:
    """A key that is equal for two groups of a cluster that cost the same, in every collective but broadcast, whose root
    depends on the order of ranks.

    It contains what prices depend on: per node its shape and the devices of the group and of the concurrent ones, and per leaf
    the loads of its uplinks. In a plan of thousands of ranks most groups are such copies, of which one is priced. Raises
    ProfileError for a device that no link joins.
    """
    spread, nodes = cluster.spread(group), cluster.nodes
    others = shares_of_others(cluster, group, "through", _distinct(concurrent))
    kinds: Counter[tuple[int, tuple[int, ...], int, float]] = Counter()  # hashing shapes and shares takes long
    shapes: dict[int, NodeShape] = {}
    shares: dict[int, tuple[NodeShare, ...]] = {}
    for node, members in spread:
        leaf = nodes.leaves.get(nodes.leaf[node])
        latency_s = 0.0 if leaf is None else leaf.uplink_latency_s
        shape, there = nodes.shapes[node], others.get(node, ())
        shapes[id(shape)], shares[id(there)] = shape, there
        kinds[id(shape), members, id(there), latency_s] += 1
    places: Counter[Hashable] = Counter()
    for (shape_id, members, there_id, latency_s), count in kinds.items():
        places[shapes[shape_id], members, shares[there_id], latency_s] += count
    uplinks = []
    for way in WAYS if len({nodes.leaf[node] for node, _ in spread}) > 1 else ():
        own_shares, total = leaf_shares(cluster, group, way, concurrent)
        uplinks.append(tuple(sorted((own_shares[leaf], total[leaf], uplink_rate(cluster, leaf)) for leaf in own_shares)))
    return len(group), frozenset(places.items()), tuple(uplinks)


@lru_cache(maxsize=256)
def _distinct(groups: GroupsAtOnce) -> GroupsAtOnce:
    """Every group once, its ranks ascending; the same value, whose hash is known, where that holds."""
    distinct = tuple(dict.fromkeys(tuple(sorted(group)) for group in groups))
    return groups if distinct == groups else distinct


@lru_cache(maxsize=64)
def known_estimates(cluster: Cluster) -> dict[Hashable, Estimate]:
    """What has been worked out for a cluster, by operation, size and `alike`."""
    return {}


def alike_collectives(cluster: Cluster, operation: str, group: tuple[int, ...], concurrent: GroupsAtOnce) -> Hashable | None:
    """Equal for groups that pay the same for one operation on as many bytes; None: nothing says so."""
    if cluster.profile.communication.link_model is None or COLLECTIVE_KINDS[operation].rooted:
        return None
    return alike(cluster, tuple(sorted(group)), concurrent)


def alike_transfers(cluster: Cluster, pair: tuple[int, int], concurrent: GroupsAtOnce) -> Hashable | None:
    """Equal for transfers between nodes that pay the same for as many bytes; None inside a node, where nothing says so."""
    if cluster.profile.communication.link_model is None or cluster.places[pair[0]][0] == cluster.places[pair[1]][0]:
        return None
    kind = link_model_of(cluster).link_kind
    return transfer_pace(cluster, kind, pair, concurrent), transfer_pace(cluster, kind, pair), len(concurrent)


ON_ONE_CORE = "send_recv_on_one_core"
"""The name in profiles of a transfer between ranks that share a core: only one end works at a time."""

EXTRAPOLATION_SIGMA = 0.25
"""Relative spread given to what was not measured: sizes outside the range, derived operations, relayed rings. Assumed."""

MEASURED_ON_LINKS = "all_reduce"
DERIVED = ("communication:derived operation", EXTRAPOLATION_SIGMA)


def estimate_collective(work: Collective, cluster: Cluster, concurrent: GroupsAtOnce = ()) -> Estimate:
    """Price a collective over ranks of `cluster`.

    Args:
        concurrent: groups of ranks that run the same collective over as many bytes at the same time, with or without this one,
            such as the T data-parallel groups of a mesh with T tensor shards. Fits per group (gloo) ignore it.

    Fits include packing where it was measured (gloo); the link model leaves out packing, a copy in the device's memory.

    Raises:
        CostError: a group names an unknown rank or one rank twice; no link joins two members; the profile has neither a link
            model nor a fit for this operation and group size.
    """
    _check_ranks(work.group, cluster, work.operation)
    if len(work.group) == 1:
        return Estimate.of((Term("one rank", "start", 0.0, "fitted"),), source="fitted", detail="one rank: nothing to do")
    if cluster.profile.communication.link_model is None:
        names = (packed_operation(work.operation), work.operation) if work.packed else (work.operation,)
        return _from_fits(names, len(work.group), work.size_bytes, cluster)
    _check_concurrent(cluster, concurrent, "a concurrent group")
    group = tuple(sorted(work.group))
    if COLLECTIVE_KINDS[work.operation].rooted:
        return _by_links(work, group, cluster, concurrent)
    estimates = known_estimates(cluster)
    key = (work.operation, work.size_bytes, work.visits, alike(cluster, group, concurrent))
    if key not in estimates:
        estimates[key] = _by_links(work, group, cluster, concurrent)
    return estimates[key]


def _by_links(work: Collective, group: tuple[int, ...], cluster: Cluster, concurrent: GroupsAtOnce) -> Estimate:
    others = _distinct(concurrent)
    if COLLECTIVE_KINDS[work.operation].pairwise:
        return _pairwise(work.operation, group, work.size_bytes, cluster, others, work.visits)
    if len(cluster.spread(group)) > 1:
        return _between_nodes(work.operation, group, work.size_bytes, cluster, others)
    return _inside_node(work.operation, group, work.size_bytes, cluster, others)


@lru_cache(maxsize=4096)
def _check_concurrent(cluster: Cluster, groups: GroupsAtOnce, what: str) -> None:
    for group in groups:
        _check_ranks(group, cluster, what)


def estimate_send_recv(work: SendRecv, cluster: Cluster, concurrent: GroupsAtOnce = ()) -> Estimate:
    """Price a transfer between two ranks, beside the `concurrent` ones of as many bytes (with or without this one).

    Inside a node it uses their direct lanes, or the path over PCIe and sockets if no lane joins them. Between nodes it goes
    from network card to network card. Leaves out that a transfer speeds up once a concurrent one has ended. Raises CostError as
    `estimate_collective`.
    """
    pair = (work.source, work.destination)
    _check_ranks(pair, cluster, "send_recv")
    if cluster.profile.communication.link_model is None:
        cores = cluster.core_of_rank(cluster.size)
        names = (ON_ONE_CORE, "send_recv") if cores[pair[0]] == cores[pair[1]] else ("send_recv",)
        return _from_fits(names, 2, work.size_bytes, cluster)
    _check_concurrent(cluster, concurrent, "a concurrent transfer")
    model = link_model_of(cluster)
    crosses = cluster.places[pair[0]][0] != cluster.places[pair[1]][0]
    if crosses:
        parts_of(cluster)
    if found := measured_transfer(cluster, pair, concurrent):
        return _by_measured(*found, work.size_bytes, len({*concurrent, pair}))
    beta, direct, hop_latency_s = transfer_pace(cluster, model.link_kind, pair, concurrent)
    alone = transfer_pace(cluster, model.link_kind, pair)[0] if concurrent else beta
    at_once = distinct_pairs(concurrent)
    groups = len(at_once) + (pair not in at_once)
    estimates, key = (
        known_estimates(cluster),
        ("send_recv", work.size_bytes, beta, alone, direct, hop_latency_s, crosses, groups),
    )
    if key in estimates:  # all that the rest depends on
        return estimates[key]
    base_s, rate, extra = model.point_to_point_base_s, 1.0, [DERIVED]
    detail = f"direct {model.link_kind}" if direct else "relayed over other links"
    if crosses:
        network, _ = parts_of(cluster)
        base_s, rate = point_to_point(network, model)
        detail = f"card to card over {network.name}"
        extra.append(("communication:network", network.sigma("send_recv", [1, 1])))
    terms = moving_terms(
        work.size_bytes,
        beta / rate,
        base_s + hop_latency_s,
        alone_seconds_per_byte=alone / rate,
        groups=groups,
        latency=hops_text(base_s, (1 if crosses else 0, hop_latency_s)),
    )
    estimates[key] = _link_estimate(terms, work.size_bytes, model, detail, "p2p", extra)
    return estimates[key]


def _inside_node(
    operation: str, group: tuple[int, ...], size_bytes: int, cluster: Cluster, concurrent: GroupsAtOnce
) -> Estimate:
    model = link_model_of(cluster)
    if found := measured_fit(cluster, operation, group, concurrent):
        return _by_measured(*found, size_bytes, len({*concurrent, group}))
    choice = inside_choice(operation, group, size_bytes, cluster, concurrent)
    protocol, rings, line = choice.protocol, choice.rings, choice.line
    extra = (
        [] if _measured(rings, group, cluster, model) else [("communication:unmeasured group", model.unmeasured_group_sigma)]
    )
    if operation != MEASURED_ON_LINKS:
        extra.append(DERIVED)
    if rings.relayed:
        extra = [("communication:relay", EXTRAPOLATION_SIGMA)]
    where = "relayed over " + "+".join(rings.kinds) if rings.relayed else f"on {rings.count} ring(s)"
    derived = "" if operation == MEASURED_ON_LINKS else ", closed form"
    detail = f"{protocol.algorithm} {protocol.protocol} {where}{derived}"
    steps = ring_steps(operation, len(rings.devices))
    terms = moving_terms(
        choice.size_bytes,
        line.seconds_per_byte,
        line.latency_s,
        alone_seconds_per_byte=line.seconds_per_byte / choice.contention,
        groups=len({*concurrent, group}),
        latency=hops_text(line.protocol.base_s, (steps, line.protocol.hop_s)),
    )
    return _link_estimate(terms, size_bytes, model, detail, protocol.algorithm, extra)


def _between_nodes(
    operation: str, group: tuple[int, ...], size_bytes: int, cluster: Cluster, concurrent: GroupsAtOnce
) -> Estimate:
    network, model = parts_of(cluster)
    best = choices(operation, group, size_bytes, cluster, concurrent)[0]
    members = [len(devices) for _, devices in cluster.spread(group)]
    extra = [
        ("communication:unmeasured group", model.unmeasured_group_sigma),
        ("communication:network", network.sigma(operation, members)),
    ]
    if operation != MEASURED_ON_LINKS:
        extra.append(DERIVED)
    how = f"{best.algorithm} {best.protocol}".strip()
    detail = f"{how} over {len(cluster.spread(group))} nodes on {network.name}, closed form"
    terms = chosen_terms(best, operation, group, cluster, concurrent)
    return _link_estimate(terms, size_bytes, model, detail, best.algorithm, extra)


def _pairwise(
    operation: str,
    group: tuple[int, ...],
    size_bytes: int,
    cluster: Cluster,
    concurrent: GroupsAtOnce,
    visits: int = 0,
) -> Estimate:
    """Every rank sends to every other at once, S/n in an all_to_all; the busiest link sets the pace.

    With `visits` (`Collective`) links between ranks and between nodes carry less: places_visited / visits of S each.

    Leaves out the cost of each message beyond the first hop, which many small ones over a network have.
    """
    model = link_model_of(cluster)
    if len(cluster.spread(group)) == 1 and (found := measured_fit(cluster, operation, group, concurrent)):
        size_bytes = round(size_bytes * (places_visited(len(group), visits) / visits if visits else 1.0))
        return _by_measured(*found, size_bytes, len({*concurrent, group}))
    extra = [DERIVED]
    pace = group_pace(cluster, model.link_kind, group, "pairs", concurrent)
    alone = group_pace(cluster, model.link_kind, group, "pairs") if concurrent else pace
    base_s, efficiency, hop_s = model.point_to_point_base_s, 1.0, 0.0
    detail = "pairwise, some pairs relayed, closed form" if pace.relayed else "pairwise over direct links, closed form"
    if pace.nodes > 1:
        network, _ = parts_of(cluster)
        base_s, efficiency = point_to_point(network, model)
        hop_s = pace.hop_latency_s
        members = [len(devices) for _, devices in cluster.spread(group)]
        extra.append(("communication:network", network.sigma(operation, members)))
        detail = f"pairwise over {pace.nodes} nodes on {network.name}, closed form"
    share = COLLECTIVE_KINDS[operation].traffic(len(group)) / COLLECTIVE_KINDS["all_to_all"].traffic(len(group))
    inside = outside = share
    if visits:
        inside, outside = (share * places_visited(places, visits) / visits for places in (len(group), pace.nodes))
        detail += f", once per rank and node of {visits} visits"
    terms = moving_terms(
        size_bytes,
        max(inside * pace.inside_s_per_byte, outside * pace.outside_s_per_byte / efficiency),
        base_s + hop_s,
        alone_seconds_per_byte=max(inside * alone.inside_s_per_byte, outside * alone.outside_s_per_byte / efficiency),
        groups=len({*concurrent, group}),
        latency=hops_text(base_s, (1 if hop_s else 0, hop_s)),
    )
    return _link_estimate(terms, size_bytes, model, detail, "pairwise", extra)


def _link_estimate(
    terms: Terms, size_bytes: int, model: LinkModel, detail: str, algorithm: str, extra: list[tuple[str, float]]
) -> Estimate:
    outside = not model.min_size_bytes <= size_bytes <= model.max_size_bytes
    widened = [("communication:size outside measured range", EXTRAPOLATION_SIGMA)] if outside else []
    return Estimate.of(
        terms,
        source="fitted",
        parameters=((f"communication:{algorithm}", model.relative_sigma), *extra, *widened),
        detail=detail,
        extrapolated=outside,
    )


def packed_operation(operation: str) -> str:
    return f"{operation}_packed"


def _from_fits(names: Sequence[str], group_size: int, size_bytes: int, cluster: Cluster) -> Estimate:
    """By the first of these operations that the profile has measured at all: the special one, then the one it is a case of."""
    measured = {fit.operation for fit in fits_of(cluster)}
    operation = next((name for name in names if name in measured), names[-1])
    fits = sorted((fit for fit in fits_of(cluster) if fit.operation == operation), key=lambda fit: fit.group_size)
    match = next((fit for fit in fits if fit.group_size == group_size), None)
    if match is None:
        sizes = ", ".join(str(fit.group_size) for fit in fits) or "none"
        raise CostError(
            f"profile {cluster.profile.name} has no measured {operation} over {group_size} ranks (measured group sizes: "
            f"{sizes}); measure it with `parsim calibrate --nproc {group_size}`"
        )
    return _by_measured(match, 1.0, size_bytes, 1)


def _by_measured(fit: CollectiveFit, contention: float, size_bytes: int, groups: int) -> Estimate:
    """A price on measured lines, whose bytes take `contention` times as long beside the other of `groups` groups."""
    outside = not fit.min_size_bytes <= size_bytes <= fit.max_size_bytes
    widened = (("communication:size outside measured range", EXTRAPOLATION_SIGMA),) if outside else ()
    regime, at_bytes = regime_at(fit.regimes, size_bytes)
    where = f"regime up to {'any size' if regime.max_size_bytes is None else format_bytes(regime.max_size_bytes)}"
    return Estimate.of(
        moving_terms(
            at_bytes,
            regime.seconds_per_byte * contention,
            regime.latency_s,
            alone_seconds_per_byte=regime.seconds_per_byte,
            groups=groups,
            latency=where,
        ),
        source="fitted",
        parameters=((f"communication:{fit.operation}/{fit.group_size}", fit.relative_sigma), *widened),
        repeat_sigma=fit.repeat_sigma,
        detail=f"{fit.algorithm}, piecewise line over {fit.min_size_bytes}..{fit.max_size_bytes} B",
        extrapolated=outside,
    )


def _measured(rings: RingSet, group: tuple[int, ...], cluster: Cluster, model: LinkModel) -> bool:
    """True if a measured group has the same size and the same number of rings."""
    ((node, _),) = cluster.spread(group)
    shape = cluster.nodes.shapes[node]
    return any(
        len(other) == len(rings.devices) and rings_of(shape, model.link_kind, tuple(other)).count == rings.count
        for other in model.measured_groups
        if max(other) < len(shape.devices)
    )


def _check_ranks(ranks: Sequence[int], cluster: Cluster, what: str) -> None:
    if len(set(ranks)) != len(ranks):
        raise CostError(f"{what} lists a rank twice: {tuple(ranks)}; list every rank once")
    if ranks and (min(ranks) < 0 or max(ranks) >= cluster.size):
        rank = next(rank for rank in ranks if not 0 <= rank < cluster.size)
        raise CostError(f"{what} names rank {rank}, but the cluster has ranks 0 to {cluster.size - 1}; use more devices")
