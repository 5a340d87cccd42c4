"""Gradient synchronisation and the optimizer: one collective per bucket as soon as its last gradient is there.

With ZeRO the collective before the optimizer's step is a reduce_scatter. Each rank of the group updates its part of the
parameters with its part of the optimizer state. An all_gather afterwards gives every rank all of them. What ZeRO 2 and 3
do with every microbatch is in `parsim.program.passes.unsharded`, the sums over sharding groups in
`parsim.program.passes.gradients`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import NamedTuple

from parsim.plans.pipeline import pipeline_actions, rank_of_stage
from parsim.program.buckets import Bucket, BucketFamily
from parsim.program.passes.inside import first_key
from parsim.program.placed import PlanIndex
from parsim.program.taskgraph import COMPUTE, Draft, DraftEntry, Origin, Resource, Task, TaskKey
from parsim.work import NORM, SCALE, ClipGradients, Collective, OptimizerStep, Phase

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
    backwards = (action for action in reversed(actions) if action.stage == stage and action.phase is not Phase.FORWARD)
    return next(backwards).microbatch


class _Queues:
    """The ranks of a group that are lowered, and their queues: asked once for all buckets of a group."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._queues: dict[int, tuple[tuple[int, ...], list[int], tuple[Resource, ...]]] = {}

    def of(self, group: tuple[int, ...]) -> tuple[list[int], tuple[Resource, ...]]:
        if id(group) not in self._queues:  # the group is kept, so no other one gets its identity
            ranks = self._draft.kept(group)
            self._queues[id(group)] = group, ranks, tuple([Resource(rank, DP_STREAM) for rank in ranks])
        return self._queues[id(group)][1:]


def reduction_key(layout: PlanIndex, bucket: Bucket, microbatch: int | None = None, replica: int | None = None) -> TaskKey:
    """The collective that sums the bucket's gradients: of this microbatch where each has its own (None: of the last one).
    replica: where replicas are mixed in rounds, whose gradients are summed apart from the others'."""
    if layout.zero_stage_of(bucket) < 2:
        return _reduction_key(bucket.number, replica)
    if microbatch is None:
        microbatch = _last_microbatch(layout, layout.chunk_of[layout.completes(bucket.family, bucket.stages[0])[0]])
    return microbatch_sum_key(bucket, microbatch)


def microbatch_sum_key(bucket: Bucket, microbatch: int) -> TaskKey:
    """The collective that sums what one microbatch adds to a bucket of ZeRO 2 or 3."""
    return ("reduce", bucket.number, microbatch)


def _reduction_key(bucket: int, replica: int | None) -> TaskKey:
    return ("reduce", bucket) if replica is None else ("reduce", bucket, "of", replica)


def replica_sum_key(bucket: Bucket, rank: int) -> TaskKey:
    """The collective that sums a rank's part of a bucket of its own sharding group over all groups: one key for all that take
    part."""
    family = bucket.family
    first = family.first_alike(bucket.number - family.begin)
    return ("replicas", family.begin + first, bucket.group.index(rank))


def summed_groups(layout: PlanIndex, held_by: tuple[int, ...]) -> dict[int | None, tuple[int, ...]]:
    """The ranks over which a bucket's gradients are summed: all that hold it, or by replica where replicas mix in rounds."""
    if not layout.plan.synchronisation.mixes:
        return {None: held_by}
    groups: dict[int | None, tuple[int, ...]] = {}
    for rank in held_by:
        replica = layout.plan.replica_of_rank(rank)
        groups[replica] = (*groups.get(replica, ()), rank)
    return groups


def add_gradient_reduction(draft: Draft, layout: PlanIndex) -> None:
    """One all_reduce (ZeRO 1: reduce_scatter) per bucket over all ranks that hold its parameters; none where one rank does."""
    queues, works, last = _Queues(draft), _Works(), LastBackwards(layout)
    sums: dict[int, list[_Sum]] = {}
    for family in layout.buckets.families:
        if id(family.groups) not in sums:
            sums[id(family.groups)] = list(_sums(draft, layout, family, queues))
        for place, ranks, replica, group, kept, resources in sums[id(family.groups)]:
            if layout.zero_stage(family, ranks) >= 2:
                continue
            operation, size_bytes = _summing(layout, family, ranks)
            number = family.begin + place
            origin = partial(Origin, stage=family.stages[0], bucket=number, replica=replica)
            entry = works.of(operation, size_bytes, group), resources, last.of(family, kept)
            draft.add_alike(_reduction_key(number, replica), entry, origin)


class _Sum(NamedTuple):
    """A sum over several ranks of which some are lowered (kept), as all buckets of the same groups have it: at that place among
    the groups, of a bucket that so many ranks hold."""

    place: int
    held_by: int
    replica: int | None
    group: tuple[int, ...]
    kept: list[int]
    resources: tuple[Resource, ...]


def _sums(draft: Draft, layout: PlanIndex, family: BucketFamily, queues: _Queues) -> Iterator[_Sum]:
    for place, (_, held_by) in enumerate(family.groups):
        for replica, group in summed_groups(layout, held_by).items() if draft.keeps_any(held_by) else ():
            kept, resources = queues.of(group)
            if len(group) > 1 and kept:
                yield _Sum(place, len(held_by), replica, group, kept, resources)


class LastBackwards:
    """The tasks that are the last of a step to add to the gradients of a bucket: asked once for all that end alike."""

    def __init__(self, layout: PlanIndex) -> None:
        self._layout = layout
        self._keys: dict[tuple[tuple[tuple[str, ...], ...], tuple[int, ...], int], tuple[TaskKey, ...]] = {}

    def of(self, family: BucketFamily, kept: list[int]) -> tuple[TaskKey, ...]:
        """On some ranks of a bucket; the same list of ranks for all buckets of a group."""
        layout = self._layout
        ending = tuple([layout.completes(family, stage) for stage in family.stages])
        key = ending, family.stages, id(kept)
        if key not in self._keys:
            keys = [
                last_backward_key(layout, rank, component)
                for stage, components in zip(family.stages, ending, strict=True)
                for component in components
                for rank in kept
                if layout.plan.stage_of_rank(rank) == stage
            ]
            self._keys[key] = tuple(dict.fromkeys(keys))
        return self._keys[key]


def bucket_work(layout: PlanIndex, bucket: Bucket, group: tuple[int, ...] | None = None) -> Collective:
    operation, size_bytes = _summing(layout, bucket.family, len(bucket.group))
    return Collective(operation=operation, group=group or bucket.group, size_bytes=size_bytes)


def _summing(layout: PlanIndex, family: BucketFamily, ranks: int) -> tuple[str, int]:
    """The operation that sums a bucket's gradients over so many ranks, and the bytes of its array."""
    if layout.zero_stage(family, ranks):
        return "reduce_scatter", family.padded_bytes(ranks)
    return "all_reduce", family.size_bytes


class _Works:
    """Collectives of buckets, one for all of a size over the same ranks."""

    def __init__(self) -> None:
        self._works: dict[tuple[str, int, int], Collective] = {}

    def of(self, operation: str, size_bytes: int, group: tuple[int, ...]) -> Collective:
        """The work; it keeps its group, so no other group gets its identity."""
        key = operation, size_bytes, id(group)
        if key not in self._works:
            self._works[key] = Collective(operation=operation, group=group, size_bytes=size_bytes)
        return self._works[key]


def gathering_work(bucket: Bucket) -> Collective:
    return Collective(operation="all_gather", group=bucket.group, size_bytes=bucket.padded_bytes)


def returned_key(rank: int, bucket: int) -> TaskKey:
    """With `optimizer_offload`, the copy that brings a rank's new parameters of a bucket back from the host."""
    return ("from host", rank, bucket)


def scale_key(rank: int) -> TaskKey:
    return ("clip", rank)


def updates_of(layout: PlanIndex, rank: int) -> tuple[OptimizerStep, ...]:
    """What a rank updates: one step per group of parameters, the usual ones first; a bucket is of one group."""
    if rank not in layout.rank_updates:
        sizes: dict[tuple[str, str], list[int]] = {}
        for bucket in layout.rank_buckets(rank):
            family, lead, ranks = bucket.family, bucket.family.first[0], len(bucket.group)
            size = sizes.setdefault((lead.group, lead.optimizer), [0, 0])
            size[0] += layout.updated_elements(family, ranks)
            size[1] += 1 if layout.zero_stage(family, ranks) else len(family.first)
        layout.rank_updates[rank] = tuple(
            OptimizerStep(elements=elements, tensors=tensors, update_group=group, optimizer=optimizer)
            for (group, optimizer), (elements, tensors) in sorted(sizes.items())
        )
    return layout.rank_updates[rank]


def gradients_complete(layout: PlanIndex, rank: int) -> list[TaskKey]:
    """What must have ended before a rank has all gradients that it updates with."""
    if layout.plan.synchronisation.mixes:
        replica = layout.plan.replica_of_rank(rank)
        summed = [bucket for bucket in layout.rank_buckets(rank) if len(summed_groups(layout, bucket.group)[replica]) > 1]
        after = [reduction_key(layout, bucket, replica=replica) for bucket in summed]
    else:
        after = [reduction_key(layout, bucket) for bucket in layout.rank_buckets(rank) if len(bucket.group) > 1]
        after += [replica_sum_key(bucket, rank) for bucket in layout.rank_buckets(rank) if bucket.family.replicas > 1]
    first: dict[int, str] = {}
    for name in layout.rank_components(rank):
        if name in layout.differentiable:
            first.setdefault(layout.chunk_of[name], name)
    return [*after, *(last_backward_key(layout, rank, name) for name in first.values())]


def add_optimizer(draft: Draft, layout: PlanIndex) -> None:
    """One OptimizerStep per rank and update group after its buckets and its own backwards, over what it updates. The last one
    of a rank has the key (OPTIMIZER, rank): whoever waits for it waits for all."""
    for rank in () if layout.plan.optimizer_offload else draft.kept_ranks():
        if not layout.rank_buckets(rank):
            continue
        stage, replica = layout.plan.stage_of_rank(rank), layout.plan.replica_of_rank(rank)
        after = gradients_complete(layout, rank)
        if layout.plan.clip_gradients:
            after = [*after, scale_key(rank)]
        *before, last = updates_of(layout, rank)
        keys: list[TaskKey] = [*((Phase.OPTIMIZER, rank, work.update_group) for work in before), (Phase.OPTIMIZER, rank)]
        for key, work in zip(keys, (*before, last), strict=True):
            draft.add(key, work, [Resource(rank, COMPUTE)], after, Origin(stage=stage, replica=replica))


def add_gathering_ahead(draft: Draft, layout: PlanIndex) -> None:
    """ZeRO 1 with `gather_ahead`: at the beginning of a step one all_gather per divided bucket, in the order of first use. The
    first forward of a component that uses the bucket waits for it."""
    if not layout.plan.gathers_ahead:
        return
    order, queues = layout.model.component_index, _Queues(draft)
    buckets = [layout.buckets.of(family, place) for family, place in layout.buckets.places(draft.keeps_any)]
    users = {bucket: layout.users_of(bucket.family) for bucket in buckets if layout.is_divided(bucket)}
    for bucket in sorted(users, key=lambda bucket: min(order[name] for name in users[bucket])):
        key: TaskKey = ("gather", bucket.number)
        ranks, resources = queues.of(bucket.group)
        draft.add_alike(key, (gathering_work(bucket), resources, ()), Origin(stage=bucket.stages[0], bucket=bucket.number))
        for rank in ranks:
            for name in users[bucket]:
                if layout.runs_on(rank, name):
                    draft.wait(first_key(layout, Phase.FORWARD, rank, name, 0), key)


def add_parameter_gathering(draft: Draft, layout: PlanIndex) -> None:
    """ZeRO 1 and 2: one all_gather per divided bucket after every rank of its group has updated its part."""
    if layout.plan.gathers_ahead:
        return
    queues, works, entries = _Queues(draft), _Works(), dict[int, DraftEntry]()
    for family, place in layout.buckets.places(draft.keeps_any):
        group, number = family.groups[place][1], family.begin + place
        if layout.zero_stage(family, len(group)) in (1, 2):
            ranks, resources = queues.of(group)
            work = works.of("all_gather", family.padded_bytes(len(group)), group)
            if layout.plan.optimizer_offload:
                entry: DraftEntry = work, resources, tuple([returned_key(rank, number) for rank in ranks])
            elif id(work) in entries:
                entry = entries[id(work)]
            else:
                entry = entries[id(work)] = work, resources, tuple([(Phase.OPTIMIZER, rank) for rank in ranks])
            draft.add_alike(("gather", number), entry, partial(Origin, stage=family.stages[0], bucket=number))


# Clipping by the global norm of all gradients: each rank's share of the squared norm, one all_reduce of it, and the scaling.
#
# Every gradient is counted once. Ranks that hold the same gradients share the work: each counts its part of them, as ZeRO
# divides them anyway.


NORM_BYTES = 8
"""The sum of squares is sent as one float64, whatever the gradients are."""


class CountedPart(NamedTuple):
    """The elements `start` to `stop` of a bucket (fewer where the bucket ends before), which one rank counts."""

    bucket: Bucket
    start: int
    stop: int

    @property
    def elements(self) -> int:
        return max(0, min(self.stop, self.bucket.elements) - self.start)


def counted_by(layout: PlanIndex, rank: int) -> list[CountedPart]:
    """The parts of a rank's buckets whose squares it adds up. Over all ranks every gradient is in one part."""
    same, parts = layout.same_pieces, []
    for bucket in layout.rank_buckets(rank):
        chunk, ways, groups = bucket.chunk_elements, bucket.first[0].ways, bucket.family.groups
        piece = id(groups), ways, bucket.shard % ways
        if piece not in same:  # of replicated components every tp rank has its own gradients
            same[piece] = [place for place, (shard, _) in enumerate(groups) if shard % ways == piece[-1]]
        places = same[piece]
        share = -(-chunk // len(places))
        first = bucket.group.index(rank) * chunk
        start = first + places.index(bucket.number - bucket.family.begin) * share
        parts.append(CountedPart(bucket, min(start, first + chunk), min(start + share, first + chunk)))
    return parts


def add_clipping(draft: Draft, layout: PlanIndex) -> None:
    """With `clip_gradients`: behind the last gradient of each rank its share of the norm, their sum, and the scaling."""
    if not layout.plan.clip_gradients:
        return
    group = tuple(sorted(set().union(*layout.buckets.groups.values())))
    ranks = draft.kept(group)
    for rank in ranks:
        parts = counted_by(layout, rank)
        work = ClipGradients(part=NORM, elements=sum(part.elements for part in parts), tensors=len(parts))
        draft.add(_norm_key(rank), work, [Resource(rank, COMPUTE)], gradients_complete(layout, rank), _origin(layout, rank))
    if len(group) > 1 and ranks:
        total = Collective(operation="all_reduce", group=group, size_bytes=NORM_BYTES)
        resources = [Resource(rank, DP_STREAM) for rank in ranks]
        draft.add(SUM_KEY, total, resources, [_norm_key(rank) for rank in ranks], Origin(stage=0))
    for rank in ranks:
        steps = updates_of(layout, rank)
        before = SUM_KEY if len(group) > 1 else _norm_key(rank)
        elements, tensors = sum(step.elements for step in steps), sum(step.tensors for step in steps)
        work = ClipGradients(part=SCALE, elements=elements, tensors=tensors)
        draft.add(scale_key(rank), work, [Resource(rank, COMPUTE)], [before], _origin(layout, rank))


def sums_norm(task: Task) -> bool:
    """Whether a task is the all_reduce of the squared norm: one float64 of no bucket, value or component."""
    origin = task.origin
    names = (origin.bucket, origin.hop, origin.value, origin.component)
    is_one_number = isinstance(task.work, Collective) and task.work.size_bytes == NORM_BYTES
    return is_one_number and all(name is None for name in names)


SUM_KEY: TaskKey = ("norm",)


def _norm_key(rank: int) -> TaskKey:
    return ("norm", rank)


def _origin(layout: PlanIndex, rank: int) -> Origin:
    return Origin(stage=layout.plan.stage_of_rank(rank), replica=layout.plan.replica_of_rank(rank))


# HSDP: what follows the reduce_scatter inside a sharding group, so that all groups update with the gradients of all replicas.
#
# The ranks at the same place of all sharding groups hold the same part of a bucket. They all_reduce their parts once a step,
# behind the last reduce_scatter. Of a bucket that one rank of each group holds whole (experts divided over all of a group),
# they all_reduce the bucket. Each has a queue of its own, so the sum over one bucket's replicas runs beside the next bucket's
# reduce_scatter.
#
# Why it cannot deadlock: every rank has these sums in the order of the buckets. They wait for reduce_scatters and backwards
# alone, which wait for none of them.
#
# Source: the second of the three ways of PyTorch's FSDP2 (pull request 126166, "Supported set_all_reduce_gradients=False for
# HSDP"): reduce_scatter with every microbatch, all_reduce with the last. Leaves out: the first, which FSDP2 takes by itself,
# with an all_reduce for every microbatch.


REPLICA_STREAM = f"{DP_STREAM}_replicas"


def replica_sum_work(layout: PlanIndex, bucket: Bucket, rank: int) -> Collective | None:
    """How a rank's part of a bucket, summed over its sharding group, is summed over all groups; None: there is one group."""
    family = bucket.family
    if family.replicas == 1:
        return None
    first, index = family.first_alike(bucket.number - family.begin), bucket.group.index(rank)
    group = tuple([ranks[index] for _, ranks in family.groups[first : first + family.replicas]])
    return Collective(operation="all_reduce", group=group, size_bytes=layout.updated_bytes(family, len(bucket.group)))


class _Peers(NamedTuple):
    """The ranks at one place of all sharding groups, of which some are lowered, as all buckets of the same groups have them.
    first: among the groups of the buckets, that of the first. kept: by place behind it, the ranks that are lowered."""

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
        for peer in peers[id(family.groups)]:
            if ranks > 1:
                buckets = (layout.buckets.of(family, place) for place, _ in peer.kept)
                after: tuple[TaskKey, ...] = tuple([reduction_key(layout, bucket) for bucket in buckets])
            else:
                after = last.of(family, ranks_of.setdefault(id(peer), [rank for _, rank in peer.kept]))
            whole = Collective(operation="all_reduce", group=peer.group, size_bytes=size_bytes)
            work = works.setdefault((size_bytes, id(peer.group)), whole)
            number = family.begin + peer.first
            origin = partial(Origin, stage=family.stages[0], bucket=number)
            key = replica_sum_key(layout.buckets.of(family, peer.kept[0][0]), peer.kept[0][1])
            draft.add_alike(key, (work, peer.resources, after), origin)
