"""Gradient synchronisation and the optimizer: one collective per bucket as soon as its last gradient is there.

With ZeRO the collective before the optimizer's step is a reduce_scatter. Each rank of the group updates its part of the
parameters with its part of the optimizer state. An all_gather afterwards gives every rank all of them. What ZeRO 2 and 3
do with every microbatch is in `parsim.graph.passes.unsharded`.
"""

from __future__ import annotations

from functools import lru_cache

from parsim.graph.graph_builder import Draft, TaskKey
from parsim.graph.parameter_buckets import Bucket
from parsim.graph.passes.inside import first_key
from parsim.graph.plan_index import PlanIndex
from parsim.graph.task import COMPUTE, Origin, Resource
from parsim.plans.pipeline import pipeline_actions, rank_of_stage
from parsim.work import Collective, OptimizerStep, Phase

DP_STREAM = "dp"


def last_backward_key(layout: PlanIndex, rank: int, component: str) -> TaskKey:
    """The task on this rank that is the last of the step to add to the gradients of the component's parameters."""
    return (layout.weight_phase(component), rank, component, _last_microbatch(layout, layout.chunk_of[component]))


def _last_microbatch(layout: PlanIndex, chunk: int) -> int:
    plan = layout.plan
    return _last_backward(plan.pipeline_order, plan.mesh.pp, plan.microbatches, plan.chunks, chunk)


@lru_cache(maxsize=4096)
def _last_backward(order: str, places: int, microbatches: int, chunks: int, stage: int) -> int:
    """The microbatch whose backward a stage of a pipeline runs last."""
    actions = pipeline_actions(order, rank_of_stage(order, places, chunks)[stage], places, microbatches, chunks)
    return next(
        action for action in reversed(actions) if action.stage == stage and action.phase is not Phase.FORWARD
    ).microbatch


class _Queues:
    """Of groups of ranks those that are lowered, and their queues: asked once for all buckets of a group."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._known: dict[int, tuple[tuple[int, ...], list[int], list[Resource]]] = {}

    def of(self, group: tuple[int, ...]) -> tuple[list[int], list[Resource]]:
        """Ranks that are lowered, and their queues for gradients."""
        if id(group) not in self._known:  # the group is kept, so no other one gets its identity
            kept = self._draft.kept(group)
            self._known[id(group)] = group, kept, [Resource(rank, DP_STREAM) for rank in kept]
        return self._known[id(group)][1:]


def reduction_key(layout: PlanIndex, bucket: Bucket, microbatch: int | None = None, replica: int | None = None) -> TaskKey:
    """The collective that sums the bucket's gradients: of this microbatch where each has its own (None: of the last one).

    Args:
        replica: where replicas are mixed in rounds, whose gradients are summed apart from the others'.
    """
    if layout.zero_stage_of(bucket) < 2:
        return ("reduce", bucket.number, *(() if replica is None else ("of", replica)))
    if microbatch is None:
        microbatch = _last_microbatch(layout, layout.chunk_of[layout.completes(bucket, bucket.stages[0])[0]])
    return ("reduce", bucket.number, microbatch)


def summed_groups(layout: PlanIndex, bucket: Bucket) -> dict[int | None, tuple[int, ...]]:
    """The ranks over which a bucket's gradients are summed: all that hold it, or by replica where replicas mix in rounds."""
    if not layout.plan.synchronisation.mixes:
        return {None: bucket.group}
    groups: dict[int | None, tuple[int, ...]] = {}
    for rank in bucket.group:
        replica = layout.plan.replica_of_rank(rank)
        groups[replica] = (*groups.get(replica, ()), rank)
    return groups


def add_gradient_reduction(draft: Draft, layout: PlanIndex) -> None:
    """One all_reduce (ZeRO 1: reduce_scatter) per bucket over all ranks that hold its parameters; none where one rank does."""
    groups = [
        (bucket, *entry) for bucket in layout.buckets.having(draft.keeps_any) for entry in summed_groups(layout, bucket).items()
    ]
    for bucket, replica, group in groups:
        if len(group) == 1 or layout.zero_stage_of(bucket) >= 2:
            continue
        kept = draft.kept(group)
        if not kept:
            continue
        after: list[TaskKey] = []
        for stage in bucket.stages:
            ranks = [rank for rank in kept if layout.plan.stage_of_rank(rank) == stage]
            for component in layout.completes(bucket, stage):
                after.extend(last_backward_key(layout, rank, component) for rank in ranks)
        work = bucket_work(layout, bucket, group)
        resources = [Resource(rank, DP_STREAM) for rank in kept]
        origin = Origin(stage=bucket.stages[0], bucket=bucket.number, replica=replica)
        draft.add(reduction_key(layout, bucket, replica=replica), work, resources, after, origin)


def bucket_work(layout: PlanIndex, bucket: Bucket, group: tuple[int, ...] | None = None) -> Collective:
    """How the bucket's gradients are summed, over all that hold it or over a group of them."""
    operation, size_bytes = _summing(layout, bucket)
    return Collective(operation=operation, group=group or bucket.group, size_bytes=size_bytes)


def _summing(layout: PlanIndex, bucket: Bucket) -> tuple[str, int]:
    """The operation that sums the bucket's gradients, and the bytes of its array."""
    return ("reduce_scatter", bucket.padded_bytes) if layout.is_divided(bucket) else ("all_reduce", bucket.size_bytes)


class _Works:
    """Collectives of buckets, one for all of a size over the same ranks."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int], Collective] = {}

    def of(self, operation: str, size_bytes: int, group: tuple[int, ...]) -> Collective:
        """The work; it keeps its group, so no other group gets its identity."""
        key = operation, size_bytes, id(group)
        if key not in self._known:
            self._known[key] = Collective(operation=operation, group=group, size_bytes=size_bytes)
        return self._known[key]


def gathering_work(bucket: Bucket) -> Collective:
    """How a divided bucket's parameters are put together."""
    return Collective(operation="all_gather", group=bucket.group, size_bytes=bucket.padded_bytes)


def scale_key(rank: int) -> TaskKey:
    """The task that scales the gradients of a rank by their global norm."""
    return ("clip", rank)


def updates_of(layout: PlanIndex, rank: int) -> tuple[OptimizerStep, ...]:
    """What a rank updates: one step per group of parameters, the usual ones first; a bucket is of one group."""
    sizes: dict[tuple[str, str], list[int]] = {}
    for bucket in layout.rank_buckets(rank):
        divided, lead = layout.is_divided(bucket), bucket.first[0]
        size = sizes.setdefault((lead.group, lead.optimizer), [0, 0])
        size[0] += bucket.chunk_elements if divided else bucket.elements
        size[1] += 1 if divided else len(bucket.first)
    return tuple(
        OptimizerStep(elements=elements, tensors=tensors, group=group, optimizer=optimizer)
        for (group, optimizer), (elements, tensors) in sorted(sizes.items())
    )


def gradients_complete(layout: PlanIndex, rank: int) -> list[TaskKey]:
    """What must have ended before a rank has all gradients that it updates with."""
    own = layout.plan.replica_of_rank(rank) if layout.plan.synchronisation.mixes else None
    after = [
        reduction_key(layout, bucket, replica=own)
        for bucket in layout.rank_buckets(rank)
        if len(summed_groups(layout, bucket)[own]) > 1
    ]
    first: dict[int, str] = {}
    for name in layout.rank_components(rank):
        if name in layout.differentiable:
            first.setdefault(layout.chunk_of[name], name)
    return [*after, *(last_backward_key(layout, rank, name) for name in first.values())]


def add_optimizer(draft: Draft, layout: PlanIndex) -> None:
    """One OptimizerStep per rank and update group after its buckets and its own backwards, over what it updates.

    The last one of a rank has the key (OPTIMIZER, rank): whoever waits for it waits for all.
    """
    for rank in draft.kept_ranks():
        if not layout.rank_buckets(rank):
            continue
        stage, replica = layout.plan.stage_of_rank(rank), layout.plan.replica_of_rank(rank)
        after = gradients_complete(layout, rank)
        if layout.plan.clip_gradients:
            after = [*after, scale_key(rank)]
        *before, last = updates_of(layout, rank)
        keys: list[TaskKey] = [*((Phase.OPTIMIZER, rank, work.group) for work in before), (Phase.OPTIMIZER, rank)]
        for key, work in zip(keys, (*before, last), strict=True):
            draft.add(key, work, [Resource(rank, COMPUTE)], after, Origin(stage=stage, replica=replica))


def add_gathering_ahead(draft: Draft, layout: PlanIndex) -> None:
    """ZeRO 1 with `gather_ahead`: at the beginning of a step one all_gather per divided bucket, in the order of first use.

    The first forward of a component that uses the bucket waits for it.
    """
    if not layout.plan.gather_ahead:
        return
    order = layout.model.component_index
    users = {bucket.number: layout.users_of(bucket) for bucket in layout.buckets if layout.is_divided(bucket)}
    divided = [bucket for bucket in layout.buckets if bucket.number in users]
    for bucket in sorted(divided, key=lambda bucket: min(order[name] for name in users[bucket.number])):
        ranks = [rank for rank in bucket.group if draft.keeps(rank)]
        key: TaskKey = ("gather", bucket.number)
        resources = [Resource(rank, DP_STREAM) for rank in bucket.group]
        draft.add(key, gathering_work(bucket), resources, [], Origin(stage=bucket.stages[0], bucket=bucket.number))
        for rank in ranks:
            for name in users[bucket.number]:
                if layout.runs_on(rank, name):
                    draft.wait(first_key(layout, Phase.FORWARD, rank, name, 0), key)


def add_parameter_gathering(draft: Draft, layout: PlanIndex) -> None:
    """ZeRO 1 and 2: one all_gather per divided bucket after every rank of its group has updated its part."""
    if layout.plan.gather_ahead:
        return
    queues, works = _Queues(draft), _Works()
    updated: dict[int, list[TaskKey]] = {}
    for bucket in layout.buckets.having(draft.keeps_any):
        if layout.zero_stage_of(bucket) in (1, 2):
            kept, resources = queues.of(bucket.group)
            if id(bucket.group) not in updated:
                updated[id(bucket.group)] = [(Phase.OPTIMIZER, rank) for rank in kept]
            work = works.of("all_gather", bucket.padded_bytes, bucket.group)
            origin = Origin(stage=bucket.stages[0], bucket=bucket.number)
            draft.add(("gather", bucket.number), work, resources, updated[id(bucket.group)], origin)
