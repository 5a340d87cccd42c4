"""Loading, forward and backward of every component and microbatch, in the stage's pipeline order, and the communication of
values and gradients right behind the task that makes them.

A recomputed component runs its forward, or some operators of it, again right before its backward, or before the first half of a
backward in halves. It uses the inputs it kept as it had read them, so nothing is sent again. It waits for no gradient, so it
may run while the gradient is still being sent. A segment runs again as a whole before the backward of its last component. Its
conversions on the tp axis are sent again, and that backward waits for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from parsim.plans.pipeline import pipeline_actions
from parsim.program.passes.convert import (
    Moving,
    add_arriving_gradient,
    add_arriving_value,
    add_gradient_moves,
    add_repeated_moves,
    add_value_moves,
    converted_keys,
    gradient_keys,
    value_keys,
)
from parsim.program.passes.inside import add_parts
from parsim.program.placed import PlanIndex
from parsim.program.taskgraph import HOST, Draft, Origin, Resource, TaskKey
from parsim.work import BY_OPERATOR_PART, Compute, LoadBatch, Phase


def add_computation(draft: Draft, layout: PlanIndex) -> None:
    """Every rank: one LoadBatch if its components read the batch, then its actions; the tp ranks of a replica side by side."""
    plan = layout.plan
    for place in range(plan.mesh.pp):
        actions = pipeline_actions(plan.pipeline_order, place, plan.mesh.pp, plan.microbatches, plan.chunks)
        for replica in range(plan.mesh.copies):
            add_loads(draft, layout, place, replica)
            for stage, phase, microbatch in actions:
                for task_phase, name in computations(layout, stage, phase):
                    add_component(draft, layout, replica, task_phase, name, microbatch)


def add_loads(draft: Draft, layout: PlanIndex, stage: int, replica: int) -> None:
    plan = layout.plan
    for rank in filter(draft.keeps, (layout.rank(stage, replica, shard) for shard in range(plan.mesh.tp))):
        values = layout.batch_layouts(rank)
        if values:
            samples = plan.microbatch_samples * plan.microbatches * layout.batch_ways(rank) // plan.mesh.tp
            size_bytes = sum(layout.model.value[name].size_bytes(samples) for name in values)
            work = LoadBatch(samples=samples, size_bytes=size_bytes, parts=plan.microbatches)
            draft.add(("load", rank), work, [Resource(rank, HOST)], [], Origin(stage=stage, replica=replica))


def add_component(draft: Draft, layout: PlanIndex, replica: int, phase: Phase, name: str, microbatch: int) -> None:
    """One computation of a component for one microbatch, and the communication that it needs or that follows it."""
    match phase:
        case Phase.FORWARD:
            _add_forward(draft, layout, replica, name, microbatch)
        case Phase.RECOMPUTE if layout.segment_of(name):
            _add_again(draft, layout, replica, name, microbatch)
        case Phase.RECOMPUTE:
            _add_following(draft, layout, replica, name, microbatch, Phase.FORWARD, phase)
        case Phase.BACKWARD_WEIGHT:
            _add_following(draft, layout, replica, name, microbatch, Phase.BACKWARD_INPUT, phase)
        case _:
            _add_backward(draft, layout, replica, name, microbatch)


def computations(layout: PlanIndex, stage: int, phase: Phase) -> Iterator[tuple[Phase, str]]:
    """What a stage (one of `Plan.stages`) computes for one phase of a microbatch, in order: phase of the task, component. Of a
    backward in halves, a component without parameters runs all in the first, one whose inputs want no gradient all in the
    second."""
    names = layout.plan.stages[stage].components
    if phase is Phase.FORWARD:
        for name in names:
            yield phase, name
        return
    for name in reversed(names):
        if name not in layout.differentiable:
            continue
        if phase is Phase.BACKWARD_WEIGHT and layout.is_halved(name):
            yield phase, name
        elif phase is Phase.BACKWARD or layout.wants_input_gradient(name) == (phase is Phase.BACKWARD_INPUT):
            if layout.recomputes(name):
                segment = layout.segment_of(name) or (name,)
                for again in segment if name == segment[-1] else ():
                    yield Phase.RECOMPUTE, again
            yield layout.gradient_phase(name), name


def _compute(layout: PlanIndex, name: str, phase: Phase) -> Compute:
    placement = layout.placement[name]
    return Compute(
        component=name,
        phase=phase,
        samples=layout.local_samples(name),
        rule=placement.rule,
        ways=placement.ways,
        part=BY_OPERATOR_PART if phase is Phase.RECOMPUTE and layout.recomputes_by_operator(name) else "",
    )


def _add_forward(draft: Draft, layout: PlanIndex, replica: int, name: str, microbatch: int) -> None:
    component, stage = layout.model.component(name), layout.stage_of[name]
    work = _compute(layout, name, Phase.FORWARD)
    origin = Origin(stage=stage, replica=replica, component=name, microbatch=microbatch)
    for rank in filter(draft.keeps, layout.runners(name, replica)):
        shard = layout.plan.shard_of_rank(rank)
        after: list[TaskKey] = []
        for value in dict.fromkeys(component.inputs):
            reading = next(entry for entry in layout.readings[value] if name in entry.components)
            if name == layout.first_reader(value, reading):  # for all of them
                add_arriving_value(draft, layout, Moving(value, microbatch, replica), reading)
            after.extend(value_keys(layout, Moving(value, microbatch, replica), reading, shard))
        add_parts(draft, layout, rank, work, microbatch, after, origin)
    for value in component.outputs:
        add_value_moves(draft, layout, Moving(value, microbatch, replica))


def _add_backward(draft: Draft, layout: PlanIndex, replica: int, name: str, microbatch: int) -> None:
    component, stage, phase = layout.model.component(name), layout.stage_of[name], layout.gradient_phase(name)
    work = _compute(layout, name, phase)
    origin = Origin(stage=stage, replica=replica, component=name, microbatch=microbatch)
    gradients = [
        Moving(value, microbatch, replica, reading)
        for value in component.outputs
        if layout.model.value[value].differentiable
        for reading in layout.readings[value]
        if any(reader in layout.differentiable for reader in reading.components)
    ]
    before = Phase.RECOMPUTE if layout.recomputes(name) else Phase.FORWARD
    for moving in gradients:
        add_arriving_gradient(draft, layout, moving)
    for rank in filter(draft.keeps, layout.runners(name, replica)):
        shard = layout.plan.shard_of_rank(rank)
        after: list[TaskKey] = [(before, rank, name, microbatch)]
        for moving in gradients:
            after.extend(gradient_keys(layout, moving, shard))
        if name in layout.segment_of(name)[-1:]:  # and the conversions that its own second forward repeats
            for value in component.outputs:
                moving = Moving(value, microbatch, replica, again=True)
                for reading in layout.readings[value]:
                    after.extend(converted_keys(layout, moving, reading, shard))
        add_parts(draft, layout, rank, work, microbatch, after, origin)
    for value, reading in layout.completed_readings(stage, name):
        add_gradient_moves(draft, layout, Moving(value, microbatch, replica, reading))


def _add_again(draft: Draft, layout: PlanIndex, replica: int, name: str, microbatch: int) -> None:
    """The second forward of a component of a segment, and the conversions of what it makes."""
    component = layout.model.component(name)
    work = _compute(layout, name, Phase.RECOMPUTE)
    origin = Origin(stage=layout.stage_of[name], replica=replica, component=name, microbatch=microbatch)
    for rank in filter(draft.keeps, layout.runners(name, replica)):
        after: list[TaskKey] = [(Phase.FORWARD, rank, name, microbatch)]
        for value in dict.fromkeys(component.inputs):
            if layout.is_remade(value, name):
                reading = next(entry for entry in layout.readings[value] if name in entry.components)
                after.extend(
                    value_keys(layout, Moving(value, microbatch, replica, again=True), reading, layout.plan.shard_of_rank(rank))
                )
        add_parts(draft, layout, rank, work, microbatch, after, origin)
    for value in component.outputs:
        add_repeated_moves(draft, layout, Moving(value, microbatch, replica, again=True))


def _add_following(
    draft: Draft, layout: PlanIndex, replica: int, name: str, microbatch: int, before: Phase, phase: Phase
) -> None:
    """A phase of a component that needs nothing but an earlier one on the same rank."""
    work = _compute(layout, name, phase)
    origin = Origin(stage=layout.stage_of[name], replica=replica, component=name, microbatch=microbatch)
    for rank in filter(draft.keeps, layout.runners(name, replica)):
        after: list[TaskKey] = [(before, rank, name, microbatch)]
        add_parts(draft, layout, rank, work, microbatch, after, origin)
