"""Groups and transfers that pay the same for the same bytes, whatever these are: to price one of them for all.

Only where communication is priced by links (`parsim.costs.communication.collectives`).
"""

from __future__ import annotations

from collections.abc import Hashable

from parsim.collectives import COLLECTIVE_KINDS
from parsim.costs.communication.equivalent_groups import alike
from parsim.costs.communication.intranode import link_model_of
from parsim.costs.communication.transfers import transfer_pace
from parsim.hardware.cluster import Cluster

Groups = tuple[tuple[int, ...], ...]


def alike_collectives(cluster: Cluster, operation: str, group: tuple[int, ...], concurrent: Groups) -> Hashable | None:
    """Equal for groups that pay the same for one operation on as many bytes; None: nothing says so.

    Args:
        cluster: the machine. operation: a collective. group: its ranks. concurrent: groups that run at the same time.
    """
    if cluster.profile.communication.link_model is None or COLLECTIVE_KINDS[operation].rooted:
        return None
    return alike(cluster, tuple(sorted(group)), concurrent)


def alike_transfers(cluster: Cluster, pair: tuple[int, int], concurrent: Groups) -> Hashable | None:
    """The same for transfers between nodes; of those inside a node nothing says so.

    Args:
        cluster: the machine. pair: (source, destination). concurrent: pairs at the same time, this one among them.
    """
    if cluster.profile.communication.link_model is None or cluster.places[pair[0]][0] == cluster.places[pair[1]][0]:
        return None
    kind = link_model_of(cluster).link_kind
    return transfer_pace(cluster, kind, pair, concurrent), transfer_pace(cluster, kind, pair), len(concurrent)
