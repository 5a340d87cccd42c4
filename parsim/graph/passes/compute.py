"""Loading, forward and backward of every component and microbatch, in the stage's pipeline order, and the transfers
between stages right behind the task that makes their data."""

from __future__ import annotations

from parsim.graph.draft import Draft, Key
from parsim.graph.layout import Layout
from parsim.graph.task import COMPUTE, HOST, Origin, Resource
from parsim.plan.pipeline import pipeline_actions
from parsim.work import Compute, LoadBatch, Phase, SendRecv


def add_computation(draft: Draft, layout: Layout) -> None:
    """Every rank: one LoadBatch if its stage reads the batch, then its actions."""
    plan = layout.plan
    for stage in range(plan.mesh.pp):
        actions = pipeline_actions(plan.pipeline_order, stage, plan.mesh.pp, plan.microbatches)
        for replica in range(plan.mesh.dp):
            _add_load(draft, layout, stage, replica)
            for action in actions:
                names = plan.stages[stage].components
                if action.phase is Phase.FORWARD:
                    for name in names:
                        _add_forward(draft, layout, stage, replica, name, action.microbatch)
                else:
                    for name in reversed(names):
                        if name in layout.differentiable:
                            _add_backward(draft, layout, stage, replica, name, action.microbatch)


def _add_load(draft: Draft, layout: Layout, stage: int, replica: int) -> None:
    values = layout.batch_values[stage]
    if not values:
        return
    plan, rank = layout.plan, layout.rank(stage, replica)
    samples = plan.microbatch_samples * plan.microbatches
    size_bytes = sum(layout.model.value[name].size_bytes(samples) for name in values)
    work = LoadBatch(samples=samples, size_bytes=size_bytes)
    draft.add(("load", rank), work, [Resource(rank, HOST)], [], Origin(stage=stage, replica=replica))


def _add_forward(draft: Draft, layout: Layout, stage: int, replica: int, name: str, microbatch: int) -> None:
    rank, component = layout.rank(stage, replica), layout.model.component(name)
    after: list[Key] = []
    for value in component.inputs:
        source = layout.stage_of_value[value]
        if source is None:
            after.append(("load", rank))
        elif source == stage:
            after.append((Phase.FORWARD, rank, layout.model.value[value].producer, microbatch))
        else:
            after.append(("send", value, microbatch, replica, stage))
    work = Compute(component=name, phase=Phase.FORWARD, samples=layout.plan.microbatch_samples)
    origin = Origin(stage=stage, replica=replica, component=name, microbatch=microbatch)
    key: Key = (Phase.FORWARD, rank, name, microbatch)
    draft.add(key, work, [Resource(rank, COMPUTE)], after, origin)
    for value in component.outputs:
        for target in layout.remote_stages[value]:
            transfer = SendRecv(
                source=rank,
                destination=layout.rank(target, replica),
                size_bytes=layout.model.value[value].size_bytes(layout.plan.microbatch_samples),
            )
            _add_transfer(draft, ("send", value, microbatch, replica, target), transfer, [key], origin, value)


def _add_backward(draft: Draft, layout: Layout, stage: int, replica: int, name: str, microbatch: int) -> None:
    rank, component = layout.rank(stage, replica), layout.model.component(name)
    after: list[Key] = [(Phase.FORWARD, rank, name, microbatch)]
    for value in component.outputs:
        if not layout.model.value[value].differentiable:
            continue
        for consumer in layout.backward_consumers(value):
            target = layout.stage_of[consumer]
            local: Key = (Phase.BACKWARD, rank, consumer, microbatch)
            after.append(local if target == stage else ("gradient", value, microbatch, replica, target))
    work = Compute(component=name, phase=Phase.BACKWARD, samples=layout.plan.microbatch_samples)
    origin = Origin(stage=stage, replica=replica, component=name, microbatch=microbatch)
    key: Key = (Phase.BACKWARD, rank, name, microbatch)
    draft.add(key, work, [Resource(rank, COMPUTE)], after, origin)
    for value in layout.gradients_to_send(stage, name):
        source = layout.stage_of_value[value]
        assert source is not None, "a value of another stage has a producer"
        transfer = SendRecv(
            source=rank,
            destination=layout.rank(source, replica),
            size_bytes=layout.model.value[value].size_bytes(layout.plan.microbatch_samples),
        )
        _add_transfer(draft, ("gradient", value, microbatch, replica, stage), transfer, [key], origin, value)


def _add_transfer(draft: Draft, key: Key, work: SendRecv, after: list[Key], origin: Origin, value: str) -> None:
    resources = [
        Resource(work.source, f"pp>{work.destination}"),
        Resource(work.destination, f"pp<{work.source}"),
    ]
    moved = Origin(stage=origin.stage, replica=origin.replica, microbatch=origin.microbatch, value=value)
    draft.add(key, work, resources, after, moved)
