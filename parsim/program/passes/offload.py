"""Copies between a device and its host, and updates by the host (`parsim.plans.plan` says what is copied when).

Each direction of a rank's link to the host is a queue of its own, and so is the host's work for the rank. Copies of activations
cannot deadlock. A computation waits for what was saved two computations before, and a fetch for a computation two before its
own. Both queues follow the order of the computation, and the copies of the optimizer come behind those of activations.

Leaves out: batches, which take the same link and are small; copies that wait for other ranks' copies (their price knows them).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from parsim.errors import PlanError
from parsim.program.buckets import Bucket
from parsim.program.passes.gradients import (
    gradients_complete,
    last_backward_key,
    reduction_key,
    replica_sum_key,
    returned_key,
    scale_key,
)
from parsim.program.passes.inside import first_key
from parsim.program.passes.unsharded import Use, uses_of
from parsim.program.placed import PlanIndex
from parsim.program.taskgraph import FROM_HOST, HOST_CORES, TO_HOST, Draft, Origin, Resource, TaskKey
from parsim.work import HostCopy, HostUpdate, Phase


def add_offloaded_optimizer(draft: Draft, layout: PlanIndex) -> None:
    """With `optimizer_offload`: per rank and bucket a copy of gradients, the host's update, and a copy of parameters."""
    if not layout.plan.optimizer_offload:
        return
    for rank in draft.kept_ranks():
        buckets = layout.rank_buckets(rank)
        arrived: list[TaskKey] = [("to host", rank, bucket.number) for bucket in buckets]
        sizes = [layout.updated_bytes(bucket.family, len(bucket.group)) for bucket in buckets]
        for bucket, key, size_bytes in zip(buckets, arrived, sizes, strict=True):
            work = HostCopy(size_bytes=size_bytes, to_host=True)
            after = _complete(layout, rank, bucket)
            draft.add(key, work, [Resource(rank, TO_HOST)], after, _origin(layout, rank, bucket))
        for bucket, size_bytes in zip(buckets, sizes, strict=True):
            updated: TaskKey = ("host update", rank, bucket.number)
            elements = layout.updated_elements(bucket.family, len(bucket.group))
            update = HostUpdate(elements=elements, optimizer=bucket.family.first[0].optimizer)
            draft.add(updated, update, [Resource(rank, HOST_CORES)], arrived, _origin(layout, rank, bucket))
            back = HostCopy(size_bytes=size_bytes, to_host=False)
            key = returned_key(rank, bucket.number)
            draft.add(key, back, [Resource(rank, FROM_HOST)], [updated], _origin(layout, rank, bucket))


def _complete(layout: PlanIndex, rank: int, bucket: Bucket) -> list[TaskKey]:
    """What must have ended before a bucket's gradients are those that the rank updates with."""
    if layout.plan.clip_gradients:
        return [scale_key(rank)]
    if bucket.family.replicas > 1:
        return [replica_sum_key(bucket, rank)]
    if len(bucket.group) > 1:
        return [reduction_key(layout, bucket)]
    place = layout.plan.stage_of_rank(rank)
    backwards = [last_backward_key(layout, rank, name) for name in layout.completes(bucket.family, place)]
    return backwards or gradients_complete(layout, rank)


def _origin(layout: PlanIndex, rank: int, bucket: Bucket) -> Origin:
    return Origin(stage=layout.plan.stage_of_rank(rank), replica=layout.plan.replica_of_rank(rank), bucket=bucket.number)


class ComponentUses(NamedTuple):
    """Uses in a row of one component and microbatch, in one direction, and the first and last computation: what a fetch is for,
    or a copy behind."""

    component: str
    microbatch: int
    forward: bool
    first: Use
    last: Use


def groups_of(uses: Sequence[Use]) -> list[ComponentUses]:
    """The computation of a rank, by component."""
    groups: list[ComponentUses] = []
    for use in uses:
        key = use.component, use.microbatch, use.phase is Phase.FORWARD
        if groups and groups[-1][:3] == key:
            groups[-1] = groups[-1]._replace(last=use)
        else:
            groups.append(ComponentUses(*key, use, use))
    return groups


def add_activation_copies(draft: Draft, layout: PlanIndex) -> None:
    """With `activation_offload`: a copy behind every forward that saves, and one before the backward that reads it. Raises
    PlanError where nobody has said how much each component saves (`PlanIndex.offloaded`)."""
    plan = layout.plan
    if not plan.activation_offload:
        return
    if layout.offloaded is None:
        raise PlanError("activation_offload needs the bytes that components save; lower the plan by its PlanningProblem")
    for place in range(plan.mesh.pp):
        uses = uses_of(layout, place)
        for shard in range(plan.mesh.tp):
            groups = groups_of([use for use in uses if layout.placement[use.component].runs_on(shard)])
            for replica in range(plan.mesh.copies):
                rank = layout.rank(place, replica, shard)
                if draft.keeps(rank):
                    _add_copies(draft, layout, rank, groups, layout.offloaded)


def _add_copies(draft: Draft, layout: PlanIndex, rank: int, groups: Sequence[ComponentUses], sizes: Mapping[str, int]) -> None:
    stage, replica = layout.plan.stage_of_rank(rank), layout.plan.replica_of_rank(rank)
    for number, group in enumerate(groups):
        name, size = group.component, sizes.get(group.component, 0)
        if not size:
            continue
        copied: TaskKey = ("offload", rank, name, group.microbatch)
        origin = Origin(stage=stage, replica=replica, component=name, microbatch=group.microbatch)
        begins = partial(_begins, layout, rank)
        if group.forward:
            work = HostCopy(size_bytes=size, to_host=True)
            draft.add(copied, work, [Resource(rank, TO_HOST)], [group.last.key(rank)], origin)
            if number + 2 < len(groups):
                draft.wait(begins(groups[number + 2]), copied)
            continue
        fetched: TaskKey = ("fetch", rank, name, group.microbatch)
        after = [copied, *([groups[number - 2].last.key(rank)] if number >= 2 else ())]
        draft.add(fetched, HostCopy(size_bytes=size, to_host=False), [Resource(rank, FROM_HOST)], after, origin)
        draft.wait(begins(group), fetched)


def _begins(layout: PlanIndex, rank: int, group: ComponentUses) -> TaskKey:
    return first_key(layout, group.first.phase, rank, group.component, group.microbatch)
