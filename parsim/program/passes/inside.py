"""Communication inside a component: keys and values between pieces of a sequence (cp), tokens and experts (ep).

A component that has any runs in parts, one after the other on its rank:

    forward    half of the rest, attention, experts, half of the rest           (recompute likewise)
    backward   half of the rest, experts, attention, half of the rest

ring          attention is cp equal blocks. Keys and values go round meanwhile: block k + 1 waits for the k-th shift, so with a
              block of a seconds and a shift of x, attention ends a + (cp - 1) max(a, x) after it began. In the backward
              each shift carries keys and values and what there is of their gradients, 2 x, and after the last block the
              gradients take one more shift home: a' + (cp - 1) max(a', 2x) + x.
all_gather    all keys and values before attention; in its backward again, and a reduce_scatter of their gradients behind it.
experts       an all_to_all takes tokens to the experts that they visit, another one brings them back; in the backward too.
              With delayed weight gradients, half of the experts' backward runs beside the second one.
              Overlapped, both run beside the component's own parts, which stand for those of another microbatch: what takes a
              seconds of computation behind its first part, and x for both exchanges, takes max(a, x). Without delayed
              weight gradients half of the experts' backward waits for both.

All ranks of a group do this in step, on a stream of the axis. The last part carries the key of the whole, so whatever waits
for the component waits for it.

Leaves out: where between the parts the rest lies (it is split in halves), and shifts that take turns with an all_to_all. Of
overlapped exchanges: microbatches without another one beside them, and computation of other components.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from parsim.model.component import InnerExchange
from parsim.program.placed import PlanIndex
from parsim.program.taskgraph import COMPUTE, Draft, Origin, Resource, TaskKey
from parsim.work import BY_OPERATOR_PART, Collective, Compute, Phase

CONTEXT_STREAM = "cp"
EXPERT_STREAM = "ep"
BACKWARDS = (Phase.BACKWARD, Phase.BACKWARD_INPUT)


class InnerStep(NamedTuple):
    """A part of a component, or (operation given) a communication inside it. `after`: numbers of earlier steps. `share`: of a
    communication, its bytes over those of the exchange."""

    what: str
    parts: int
    after: tuple[int, ...]
    operation: str = ""
    share: float = 1.0

    def visits_of(self, inside: InnerExchange) -> int:
        return inside.expert_visits if self.what == EXPERT_STREAM else 0


def inner_steps(inside: InnerExchange, phase: Phase, exchange: str) -> tuple[InnerStep, ...]:
    """What a component does in a phase (forward, recompute, or the first half of the backward), in order; none where it is one
    piece. exchange: of `Plan.context_exchange`."""
    backward = phase in BACKWARDS
    steps = [InnerStep("rest", 2, ())]
    order = ("experts", "attention") if backward else ("attention", "experts")
    for part in order:
        if part == "attention" and inside.context_ways > 1:
            _attention(steps, inside.context_ways, exchange, backward)
        if part == "experts" and inside.expert_ways > 1:
            _experts(steps, inside, backward)
    if inside.context_ways == 1:
        steps.append(InnerStep("attention", 1, (len(steps) - 1,)))
    if inside.expert_ways == 1:
        steps.append(InnerStep("experts", 1, (len(steps) - 1,)))
    last, back = len(steps) - 1, [number for number, step in enumerate(steps) if step.what == EXPERT_STREAM][1:]
    if not (inside.overlapped and back):
        return (*steps, InnerStep("rest", 2, (last,)))
    if backward:
        steps.append(InnerStep("experts", 2, (last,) if inside.delayed else (last, *back)))
    return (*steps, InnerStep("rest", 2, (len(steps) - 1, *back)))


def _experts(steps: list[InnerStep], inside: InnerExchange, backward: bool) -> None:
    """Experts between their exchanges, or beside them. The last step is what the component goes on with."""
    before, first = len(steps) - 1, len(steps)
    if inside.overlapped:  # in the backward without the gradients of weights, which follow at the end
        steps.append(InnerStep(EXPERT_STREAM, 1, (0,), "all_to_all"))
        steps.append(InnerStep(EXPERT_STREAM, 1, (first,), "all_to_all"))
        steps.append(InnerStep("experts", 2 if backward else 1, (before,)))
        return
    delayed = backward and inside.delayed
    steps.append(InnerStep(EXPERT_STREAM, 1, (before,), "all_to_all"))
    steps.append(InnerStep("experts", 2 if delayed else 1, (first,)))
    if delayed:
        steps.append(InnerStep("experts", 2, (first + 1,)))
    steps.append(InnerStep(EXPERT_STREAM, 1, (first + 1,), "all_to_all"))


def _attention(steps: list[InnerStep], ways: int, exchange: str, backward: bool) -> None:
    begin = len(steps) - 1
    if exchange == "all_gather":
        steps.append(InnerStep(CONTEXT_STREAM, 1, (begin,), "all_gather"))
        steps.append(InnerStep("attention", 1, (begin + 1,)))
        if backward:
            steps.append(InnerStep(CONTEXT_STREAM, 1, (begin + 2,), "reduce_scatter"))
        return
    piece = 1 / ways
    block, shift = begin, begin
    for number in range(ways):
        steps.append(InnerStep("attention", ways, (block, shift) if shift != block else (block,)))
        block = len(steps) - 1
        if number < ways - 1:
            before = {shift, *(steps[block].after[:1] if backward and number else ())}
            steps.append(InnerStep(CONTEXT_STREAM, 1, tuple(sorted(before)), "ring_shift", piece * (2 if backward else 1)))
            shift = len(steps) - 1
    if backward:
        steps.append(InnerStep(CONTEXT_STREAM, 1, (block,), "ring_shift", piece))


def first_key(layout: PlanIndex, phase: Phase, rank: int, name: str, microbatch: int) -> TaskKey:
    """The task with which a component begins on a rank: what its parameters are gathered for."""
    again = phase is Phase.RECOMPUTE and layout.recomputes_by_operator(name)  # in one piece: attention does not run again
    if layout.inside(name) is None or phase is Phase.BACKWARD_WEIGHT or again:
        return (phase, rank, name, microbatch)
    return (phase, rank, name, microbatch, 0)


def add_parts(
    draft: Draft, layout: PlanIndex, rank: int, work: Compute, microbatch: int, after: Sequence[TaskKey], origin: Origin
) -> None:
    """The computation `work` of a rank: one task, or its parts with what is exchanged between them. after: what its first part
    waits for."""
    name, phase = work.component, work.phase
    whole: TaskKey = (phase, rank, name, microbatch)
    inside = layout.inside(name)
    if inside is None or phase is Phase.BACKWARD_WEIGHT or work.part == BY_OPERATOR_PART:
        draft.add(whole, work, [Resource(rank, COMPUTE)], after, origin)
        return
    steps = inner_steps(inside, phase, layout.plan.context_exchange)
    keys = [_key(layout, steps, number, work, rank, microbatch) for number in range(len(steps))]
    for number, step in enumerate(steps):
        before = [keys[other] for other in step.after] if step.after else list(after)
        if not step.operation:
            part = replace(work, part=step.what, parts=step.parts)
            draft.add(keys[number], part, [Resource(rank, COMPUTE)], before, origin)
        elif keys[number] not in draft:
            group = layout.inner_group(rank, step.what)
            size = inside.context_bytes * step.share if step.what == CONTEXT_STREAM else inside.expert_bytes
            exchange = Collective(
                operation=step.operation,
                group=group,
                size_bytes=round(size * layout.local_samples(name)),
                visits=step.visits_of(inside),
            )
            waits = [
                _key(layout, steps, other, work, member, microbatch)
                for member in group
                if draft.keeps(member)
                for other in step.after
            ]
            resources = [Resource(member, step.what) for member in group]
            draft.add(keys[number], exchange, resources, waits, origin)


def _key(layout: PlanIndex, steps: Sequence[InnerStep], number: int, work: Compute, rank: int, microbatch: int) -> TaskKey:
    """The origin of a rank's own part, or of what its group does together."""
    step = steps[number]
    if number == len(steps) - 1:
        return (work.phase, rank, work.component, microbatch)
    if step.operation:
        return ("inside", work.phase, layout.inner_group(rank, step.what)[0], work.component, microbatch, number)
    return (work.phase, rank, work.component, microbatch, number)
