"""Gradient synchronisation and the optimizer: one all_reduce per bucket as soon as its last gradient is there."""

from __future__ import annotations

from parsim.graph.draft import Draft, Key
from parsim.graph.layout import Layout
from parsim.graph.task import COMPUTE, Origin, Resource
from parsim.plan.pipeline import pipeline_actions
from parsim.work import Collective, OptimizerStep, Phase

DP_STREAM = "dp"


def last_backward_microbatch(layout: Layout, stage: int) -> int:
    """The microbatch whose backward this stage runs last."""
    plan = layout.plan
    actions = pipeline_actions(plan.pipeline_order, stage, plan.mesh.pp, plan.microbatches)
    return [action.microbatch for action in actions if action.phase is Phase.BACKWARD][-1]


def add_gradient_reduction(draft: Draft, layout: Layout) -> None:
    """One all_reduce per bucket over all ranks that hold its parameters; none where a single rank does."""
    for bucket in layout.buckets:
        if len(bucket.group) == 1:
            continue
        after: list[Key] = []
        for stage in bucket.stages:
            component = layout.completes(bucket, stage)
            if component is not None:
                microbatch = last_backward_microbatch(layout, stage)
                after.extend((Phase.BACKWARD, rank, component, microbatch) for rank in layout.plan.stages[stage].ranks)
        work = Collective(operation="all_reduce", group=bucket.group, size_bytes=bucket.size_bytes)
        resources = [Resource(rank, DP_STREAM) for rank in bucket.group]
        draft.add(("reduce", bucket.number), work, resources, after, Origin(stage=bucket.stages[0], bucket=bucket.number))


def add_optimizer(draft: Draft, layout: Layout) -> None:
    """One OptimizerStep per rank after its buckets and its own backwards."""
    for stage, entry in enumerate(layout.plan.stages):
        parameters = layout.stage_parameters(stage)
        if not parameters:
            continue
        work = OptimizerStep(elements=sum(p.elements for p in parameters), tensors=len(parameters))
        for replica in range(layout.plan.mesh.dp):
            rank = layout.rank(stage, replica)
            after: list[Key] = [
                ("reduce", bucket.number) for bucket in layout.buckets if rank in bucket.group and len(bucket.group) > 1
            ]
            last = last_backward_microbatch(layout, stage)
            after.extend((Phase.BACKWARD, rank, name, last) for name in entry.components[:1] if name in layout.differentiable)
            origin = Origin(stage=stage, replica=replica)
            draft.add((Phase.OPTIMIZER, rank), work, [Resource(rank, COMPUTE)], after, origin)
