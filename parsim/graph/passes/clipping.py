"""Clipping by the global norm of all gradients: each rank's share of the squared norm, one all_reduce of it, and the scaling.

Every gradient is counted once. Ranks that hold the same gradients share the work: each counts its part of them, as ZeRO
divides them anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from parsim.graph.graph_builder import Draft, TaskKey
from parsim.graph.parameter_buckets import Bucket
from parsim.graph.passes.gradients import DP_STREAM, gradients_complete, scale_key, updates_of
from parsim.graph.plan_index import PlanIndex
from parsim.graph.task import COMPUTE, Origin, Resource, Task
from parsim.work import NORM, SCALE, ClipGradients, Collective

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
    """The parts of a rank's buckets whose squares it adds up. Over all ranks every gradient is in one part.

    Args:
        layout: of the plan. rank: of it.
    """
    same = _same_gradients(layout.buckets)
    found = []
    for bucket in layout.rank_buckets(rank):
        chunk, alike = bucket.chunk_elements, same[bucket.number]
        share = -(-chunk // len(alike))
        first = bucket.group.index(rank) * chunk
        start = first + alike.index(bucket.number) * share
        found.append(CountedPart(bucket, min(start, first + chunk), min(start + share, first + chunk)))
    return found


def _same_gradients(buckets: Sequence[Bucket]) -> dict[int, tuple[int, ...]]:
    """Of each bucket the numbers of those with the same gradients: of replicated components every tp rank has its own."""
    found: dict[tuple[object, ...], list[int]] = {}
    for bucket in buckets:
        key = tuple((held.name, held.ways, held.shard if held.part is not None else 0) for held in bucket.parameters)
        found.setdefault(key, []).append(bucket.number)
    return {number: tuple(numbers) for numbers in found.values() for number in numbers}


def add_clipping(draft: Draft, layout: PlanIndex) -> None:
    """With `clip_gradients`: behind the last gradient of each rank its share of the norm, their sum, and the scaling."""
    if not layout.plan.clip_gradients:
        return
    group = tuple(rank for rank in range(layout.plan.world_size) if layout.rank_buckets(rank))
    kept = draft.kept(group)
    for rank in kept:
        parts = counted_by(layout, rank)
        work = ClipGradients(part=NORM, elements=sum(part.elements for part in parts), tensors=len(parts))
        draft.add(_norm_key(rank), work, [Resource(rank, COMPUTE)], gradients_complete(layout, rank), _origin(layout, rank))
    if len(group) > 1 and kept:
        total = Collective(operation="all_reduce", group=group, size_bytes=NORM_BYTES)
        resources = [Resource(rank, DP_STREAM) for rank in kept]
        draft.add(SUM_KEY, total, resources, [_norm_key(rank) for rank in kept], Origin(stage=0))
    for rank in kept:
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
