"""HSDP: what follows the reduce_scatter inside a sharding group, so that all groups update with the gradients of all replicas.

The ranks at the same place of all sharding groups hold the same part of a bucket. They all_reduce their parts once a step,
behind the last reduce_scatter. Of a bucket that one rank of each group holds whole (experts divided over all of a group), they
all_reduce the bucket. Each has a queue of its own, so the sum over one bucket's replicas runs beside the next bucket's
reduce_scatter.

Why it cannot deadlock: every rank has these sums in the order of the buckets. They wait for reduce_scatters and backwards
alone, which wait for none of them.

Source: the second of the three ways of PyTorch's FSDP2 (pull request 126166, "Supported set_all_reduce_gradients=False for
HSDP"): reduce_scatter with every microbatch, all_reduce with the last. Leaves out: the first, which FSDP2 takes by itself, with
an all_reduce for every microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from parsim.graph.graph_builder import Draft, TaskKey
from parsim.graph.parameter_buckets import Bucket, BucketFamily
from parsim.graph.passes.gradients import DP_STREAM, LastBackwards, reduction_key, replica_sum_key
from parsim.graph.plan_index import PlanIndex
from parsim.graph.task import Origin, Resource
from parsim.work import Collective

REPLICA_STREAM = f"{DP_STREAM}_replicas"


def replica_sum_work(layout: PlanIndex, bucket: Bucket, rank: int) -> Collective | None:
    """How a rank's part of a bucket, summed over its sharding group, is summed over all groups; None: there is one group.

    Args:
        layout: of the plan. bucket: of it. rank: of the bucket's group.
    """
    family = bucket.family
    if family.replicas == 1:
        return None
    first, index = family.first_alike(bucket.number - family.begin), bucket.group.index(rank)
    group = tuple([ranks[index] for _, ranks in family.groups[first : first + family.replicas]])
    return Collective(operation="all_reduce", group=group, size_bytes=layout.updated_bytes(family, len(bucket.group)))


class _Peers(NamedTuple):
    """The ranks at one place of all sharding groups, of which some are lowered, as all buckets of the same groups have them.

    Attributes:
        first: among the groups of the buckets, that of the first. kept: by place behind it, the ranks that are lowered.
    """

    first: int
    group: tuple[int, ...]
    kept: tuple[tuple[int, int], ...]
    resources: tuple[Resource, ...]


def _peers(draft: Draft, family: BucketFamily) -> Iterator[_Peers]:
    for first in range(0, len(family.groups), family.replicas):
        alike = [ranks for _, ranks in family.groups[first : first + family.replicas]]
        if not any(map(draft.keeps_any, alike)):
            continue
        for group in zip(*alike, strict=True):
            kept = tuple([(place, rank) for place, rank in enumerate(group, start=first) if draft.keeps(rank)])
            if kept:
                yield _Peers(first, group, kept, tuple([Resource(rank, REPLICA_STREAM) for _, rank in kept]))


def add_replica_sums(draft: Draft, layout: PlanIndex) -> None:
    """One all_reduce per bucket and place in the sharding groups, over all groups."""
    if layout.plan.mesh.groups == 1:
        return
    last, works = LastBackwards(layout), dict[tuple[int, int], Collective]()
    peers: dict[int, list[_Peers]] = {}
    ranks_of: dict[int, list[int]] = {}
    for family in layout.buckets.families:
        if id(family.groups) not in peers:
            peers[id(family.groups)] = list(_peers(draft, family))
        ranks = len(family.groups[0][1])
        size_bytes = layout.updated_bytes(family, ranks)
        for own in peers[id(family.groups)]:
            if ranks > 1:
                buckets = (layout.buckets.of(family, place) for place, _ in own.kept)
                after: tuple[TaskKey, ...] = tuple([reduction_key(layout, bucket) for bucket in buckets])
            else:
                after = last.of(family, ranks_of.setdefault(id(own), [rank for _, rank in own.kept]))
            work = works.setdefault(
                (size_bytes, id(own.group)), Collective(operation="all_reduce", group=own.group, size_bytes=size_bytes)
            )
            number = family.begin + own.first
            origin = partial(Origin, stage=family.stages[0], bucket=number)
            key = replica_sum_key(layout.buckets.of(family, own.kept[0][0]), own.kept[0][1])
            draft.add_alike(key, (work, own.resources, after), origin)
