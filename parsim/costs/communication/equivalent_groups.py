"""Groups that cost the same: equal shapes on equal nodes, with equal concurrent groups.

In a plan of thousands of ranks most groups are such copies. parsim prices one of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache

from parsim.collectives import COLLECTIVE_KINDS
from parsim.costs.communication.intranode import link_model_of
from parsim.costs.communication.traffic import Way, leaf_shares, uplink_rate
from parsim.costs.communication.transfers import transfer_pace
from parsim.costs.estimate import Estimate
from parsim.hardware.cluster import Cluster
from parsim.hardware.nodes import NodeShape

WAYS: tuple[Way, ...] = ("through", "rails", "pairs")
NodePart = tuple[tuple[int, ...], bool, int]
"""Numbers of a group's devices on one node, whether it has others elsewhere, how many it has in all."""

GroupsAtOnce = tuple[tuple[int, ...], ...]
"""Groups, or pairs of a transfer, that run at the same time."""


@lru_cache(maxsize=65536)
def alike(cluster: Cluster, group: tuple[int, ...], concurrent: Sequence[tuple[int, ...]]) -> Hashable:
    """A key that is equal for two groups of a cluster that cost the same.

    It holds for every collective but broadcast, whose root depends on the order of ranks. The key contains what prices depend
    on: per node its shape and the devices of the group and of the concurrent ones, and per leaf the loads of its uplinks.

    Args:
        cluster: the machine.
        group: ranks, ascending.
        concurrent: groups that run at the same time.

    Raises:
        ProfileError: a device that no link joins.
    """
    spread, nodes = cluster.spread(group), cluster.nodes
    there, is_listed = _by_node(cluster, concurrent), group in _distinct(concurrent)
    places: dict[tuple[NodeShape, tuple[int, ...], tuple[NodePart, ...], float], int] = {}
    for node, members in spread:
        others = list(there.get(node, ()))
        own = (members, len(spread) > 1, len(group))
        if is_listed:  # else the like of it there is another group's
            others.remove(own)
        leaf = nodes.leaves.get(nodes.leaf[node])
        place = (nodes.shapes[node], members, tuple(others), 0.0 if leaf is None else leaf.uplink_latency_s)
        places[place] = places.get(place, 0) + 1
    uplinks = []
    for way in WAYS if len({nodes.leaf[node] for node, _ in spread}) > 1 else ():
        own_shares, total = leaf_shares(cluster, group, way, concurrent)
        uplinks.append(tuple(sorted((own_shares[leaf], total[leaf], uplink_rate(cluster, leaf)) for leaf in own_shares)))
    return len(group), frozenset(places.items()), tuple(uplinks)


@lru_cache(maxsize=256)
def _by_node(cluster: Cluster, groups: Sequence[tuple[int, ...]]) -> dict[int, tuple[NodePart, ...]]:
    found: dict[int, list[NodePart]] = {}
    for group in _distinct(groups):
        spread = cluster.spread(group)
        for node, members in spread:
            found.setdefault(node, []).append((members, len(spread) > 1, len(group)))
    return {node: tuple(sorted(parts)) for node, parts in found.items()}


@lru_cache(maxsize=256)
def _distinct(groups: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], None]:
    """Every group once, its ranks ascending, in first-seen order."""
    return dict.fromkeys(tuple(sorted(group)) for group in groups)


@lru_cache(maxsize=64)
def known_estimates(cluster: Cluster) -> dict[Hashable, Estimate]:
    """What has been worked out for a cluster, by operation, size and `alike`."""
    return {}


def alike_collectives(cluster: Cluster, operation: str, group: tuple[int, ...], concurrent: GroupsAtOnce) -> Hashable | None:
    """Equal for groups that pay the same for one operation on as many bytes; None: nothing says so.

    Args:
        cluster: the machine. operation: a collective. group: its ranks. concurrent: groups that run at the same time.
    """
    if cluster.profile.communication.link_model is None or COLLECTIVE_KINDS[operation].rooted:
        return None
    return alike(cluster, tuple(sorted(group)), concurrent)


def alike_transfers(cluster: Cluster, pair: tuple[int, int], concurrent: GroupsAtOnce) -> Hashable | None:
    """The same for transfers between nodes; of those inside a node nothing says so.

    Args:
        cluster: the machine. pair: (source, destination). concurrent: pairs at the same time, this one among them.
    """
    if cluster.profile.communication.link_model is None or cluster.places[pair[0]][0] == cluster.places[pair[1]][0]:
        return None
    kind = link_model_of(cluster).link_kind
    return transfer_pace(cluster, kind, pair, concurrent), transfer_pace(cluster, kind, pair), len(concurrent)
