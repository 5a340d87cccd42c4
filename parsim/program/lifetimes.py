"""The fullest moment of a rank that holds several numbers of microbatches: chunks of a pipeline, and backwards in halves.

Between the halves of a backward all saved activations stay, beside the gradient that has arrived at every operator with a
parameter. A component without parameters runs all in the first half, one that hands on no gradient all in the second. What the
first half takes was counted when the Model was traced (`SplitBackward`). Of shards and of models from sizes it is derived from
operators. That leaves out what the first half makes for a while, and parameters that enter several operators.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from typing import NamedTuple, TypeVar

from parsim.model.component import ALONE, Component, Selective, Size, Value, share_of
from parsim.model.formats import component_in, value_in
from parsim.model.shard.narrow import narrow
from parsim.plans.layouts import LOCAL_HOPS, Hop, ValueLayout, conversion, hop_groups, hop_pairs
from parsim.plans.pipeline import (
    MOST_CHECKED,
    PIPELINE_ORDERS,
    Action,
    few_rounds,
    in_few_rounds,
    pipeline_actions,
    rank_of_stage,
    stages_by_rank,
)
from parsim.program.passes.convert import POINT_TO_POINT_HOPS
from parsim.program.passes.gradients import replica_sum_work
from parsim.program.passes.unsharded import gradient_windows, parameter_windows, uses_of
from parsim.program.placed import PlanIndex, Reading
from parsim.program.task import COMPUTE, Task
from parsim.work import ClipGradients, Collective, OptimizerStep, Phase

GATES = {"_thnn_fused_lstm_cell": 4, "_thnn_fused_gru_cell": 3}
"""Cells of fused recurrent layers, and the gates of each hidden feature."""


class HeldMoment(NamedTuple):
    """One action of a rank.

    Attributes:
        chunk, phase: what runs.
        alive: per chunk the microbatches whose forward has begun and whose backward has not ended, with that of the action.
        waiting: per chunk those whose backward has run for inputs and not yet for weights; the action's own counts if it is
            the half for weights.
        arriving: by link to this rank the messages for which there is room that the action does not read.
        leaving: by link from this rank those held that an earlier action has made.
        unread: per chunk the microbatches whose forward has not begun.
        between: by link from one chunk to another one here, what an earlier action has made and no action has read.
        microbatch: of the action that stands for this one (`parsim.program.lifetimes`).
    """

    chunk: int
    phase: Phase
    alive: tuple[int, ...]
    waiting: tuple[int, ...]
    arriving: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()
    unread: tuple[int, ...] = ()
    microbatch: int = 0
    between: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """Attributes:
    chunk_of: by component of the rank. moments: of its actions. halved: components whose backward runs in halves.
    for_weights: those whose backward hands on no gradient.
    arriving_bytes, leaving_bytes: of one message of every link, in the order of the moments.
    between_bytes: likewise of what one chunk hands to another one of this rank.
    made_before: by component the bytes that components before it in a forward, and in a backward, have made for other ranks.
    """

    chunk_of: Mapping[str, int]
    moments: Sequence[HeldMoment]
    halved: Collection[str] = ()
    for_weights: Collection[str] = ()
    arriving_bytes: Sequence[float] = ()
    leaving_bytes: Sequence[float] = ()
    between_bytes: Sequence[float] = ()
    made_before: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def arriving(self, moment: HeldMoment) -> float:
        """Bytes of the room for messages at that moment."""
        return sum(count * size for count, size in zip(moment.arriving, self.arriving_bytes, strict=True))

    def leaving(self, moment: HeldMoment) -> float:
        """Bytes of messages that are held at that moment, and of what waits for another chunk here."""
        sent = sum(count * size for count, size in zip(moment.leaving, self.leaving_bytes, strict=True))
        return sent + sum(count * size for count, size in zip(moment.between, self.between_bytes, strict=True))


class Moment(NamedTuple):
    """Bytes beyond the end of the last forward, while a component runs; and how much of it are buckets that are whole then."""

    size_bytes: float
    whole_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentMoments:
    """One component of one microbatch on a rank, bytes.

    Attributes:
        kept: from its forward to the end of its backward. again: what its second forward saves anew.
        forward: the fullest moment of its forward, beyond what it and those before it in its chunk keep.
        second: beyond all that is kept, while it runs forward again; with what waits beside it.
        alive: likewise while it runs backward. gradients: of its outputs, as it reads them. handed: of its inputs, as it makes
            them, with what waits beside it.
        whole: buckets that are whole meanwhile, by phase and microbatch.
        first_half: beyond all that is kept, while it runs the first half of its backward; with what waits beside it.
        waits: what that leaves for the second half. None: neither was counted.
    """

    component: Component
    samples: int
    kept: float
    again: float
    forward: float
    second: float
    alive: float
    gradients: float
    handed: float = 0.0
    whole: Mapping[tuple[Phase, int], float] = field(default_factory=dict)
    first_half: float | None = None
    waits: float = 0.0

    def moment(self, size: float, microbatch: int, *phases: Phase) -> Moment:
        """So many bytes beside the buckets that are whole in the phase, or in the one of several that the plan has."""
        whole = max((self.whole.get((phase, microbatch), 0.0) for phase in phases), default=0.0)
        return Moment(size + whole, whole)

    def backward(self, before: float, microbatch: int, alive: float | None = None) -> Moment:
        """The fullest moment of its backward, and of its forward before that, beyond what is kept; `before` is there too.

        Args:
            alive: in place of that of a whole backward.
        """
        again = self.moment(before + self.second, microbatch, Phase.RECOMPUTE) if self.second else Moment(0.0, 0.0)
        size = before + (self.alive if alive is None else alive)
        return max(again, self.moment(size, microbatch, Phase.BACKWARD, Phase.BACKWARD_INPUT))


def fullest(
    parts: Sequence[ComponentMoments], chunks: Chunks, element_bytes: int, inputs: Callable[[HeldMoment], float]
) -> tuple[HeldMoment, float, Moment]:
    """The fullest moment, against the fullest forward.

    Args:
        parts: components of the rank, in order.
        element_bytes: of an activation. inputs: bytes of batches that no activation stands for.

    Returns:
        The forward at which most is kept; bytes that wait between halves then; and how much more the fullest moment has.
    """
    by_chunk: dict[int, list[ComponentMoments]] = {}
    for part in parts:
        by_chunk.setdefault(chunks.chunk_of[part.component.name], []).append(part)
    kept = {chunk: sum(part.kept for part in own) for chunk, own in by_chunk.items()}
    halves = {chunk: sum(_waiting(part, chunks, element_bytes) for part in own) for chunk, own in by_chunk.items()}

    def waiting(moment: HeldMoment) -> float:
        return sum(moment.waiting[chunk] * size for chunk, size in halves.items())

    def held(moment: HeldMoment) -> float:
        beside = chunks.arriving(moment) + chunks.leaving(moment) + inputs(moment)
        return sum(moment.alive[chunk] * size for chunk, size in kept.items()) + waiting(moment) + beside

    known: dict[tuple[int, Phase, int], Moment] = {}

    def beyond(moment: HeldMoment) -> Moment:
        key = moment.chunk, moment.phase, moment.microbatch
        if key not in known:
            own = by_chunk.get(moment.chunk, [])
            known[key] = _beyond(moment, own, kept.get(moment.chunk, 0.0), chunks, element_bytes)
        return known[key]

    running = [moment for moment in chunks.moments if moment.chunk in by_chunk or not by_chunk]  # a rank may hold none
    base = max((moment for moment in running if moment.phase is Phase.FORWARD), key=held)
    best, most = max(((beyond(moment), held(moment)) for moment in running), key=lambda pair: pair[0].size_bytes + pair[1])
    return base, waiting(base), Moment(max(0.0, most + best.size_bytes - held(base)), best.whole_bytes)


def _beyond(moment: HeldMoment, own: Sequence[ComponentMoments], kept: float, chunks: Chunks, element_bytes: int) -> Moment:
    """The fullest moment of an action beyond what is held."""
    match moment.phase:
        case Phase.FORWARD:
            return _forward(own, kept, moment.microbatch)
        case Phase.BACKWARD:
            return _backward(own, moment.microbatch)
        case Phase.BACKWARD_INPUT:
            return _for_inputs(own, chunks, element_bytes, moment.microbatch)
    return _for_weights(own, chunks, element_bytes, moment.microbatch)


def _forward(own: Sequence[ComponentMoments], kept: float, microbatch: int) -> Moment:
    before, found = 0.0, Moment(0.0, 0.0)
    for part in own:
        found = max(found, part.moment(before + part.forward - kept, microbatch, Phase.FORWARD))
        before += part.kept
    return found


def _backward(own: Sequence[ComponentMoments], microbatch: int) -> Moment:
    """While a component runs, what those after it in the chunk kept is free."""
    free, found = 0.0, Moment(0.0, 0.0)
    for part in reversed(own):
        found = max(found, part.backward(-free, microbatch))
        free += part.kept
    return found


def _for_inputs(own: Sequence[ComponentMoments], chunks: Chunks, element_bytes: int, microbatch: int) -> Moment:
    """Nothing is free before the half for weights, but what components without parameters kept."""
    so_far, found = 0.0, Moment(0.0, 0.0)
    for part in reversed(own):
        waits = _waiting(part, chunks, element_bytes)
        if part.component.name in chunks.halved and part.first_half is not None:
            found = max(found, part.backward(so_far, microbatch, part.first_half))
        elif part.component.name not in chunks.for_weights:
            ended = part.moment(so_far + waits + part.handed, microbatch, Phase.BACKWARD, Phase.BACKWARD_INPUT)
            found = max(found, part.backward(so_far, microbatch), ended)
        so_far += waits
    return found


def _for_weights(own: Sequence[ComponentMoments], chunks: Chunks, element_bytes: int, microbatch: int) -> Moment:
    """What waited for a component is free after it; what one without parameters kept was free before."""
    free, found = 0.0, Moment(0.0, 0.0)
    for part in reversed(own):
        largest = max((entry.size_bytes for entry in part.component.trainable_parameters), default=0)
        waits = _waiting(part, chunks, element_bytes)
        if part.component.name in chunks.for_weights:
            found = max(found, part.backward(-waits - free, microbatch))
        else:
            found = max(found, part.moment(largest - free, microbatch, Phase.BACKWARD_WEIGHT))
        free += part.kept + waits
    return found


def _waiting(part: ComponentMoments, chunks: Chunks, element_bytes: int) -> float:
    """What the component adds between the halves of a microbatch's backward."""
    name = part.component.name
    if name in chunks.halved:
        if part.first_half is not None:
            return part.waits + part.again
        return max(part.gradients, _arrived_bytes(part, element_bytes)) + part.again
    if name in chunks.for_weights:
        return part.gradients
    return -part.kept


def _arrived_bytes(part: ComponentMoments, element_bytes: int) -> float:
    """Gradients that arrive at operators with a parameter: as large as what these operators make.

    A fused recurrent layer is one operator there: the gradient of its hidden features arrives, and none of its gates.
    """
    total = 0.0
    operators = part.component.operators
    gates = {dict(operator.shape)["elements"] for operator in operators if operator.function in GATES}
    for operator in operators:
        sizes = dict(operator.shape)
        if operator.function in GATES:
            elements = sizes["elements"] // GATES[operator.function]
            total += elements * operator.count * element_bytes * part.samples
        elif operator.kind == "matmul" and sizes["n"] in gates:
            continue
        elif operator.parameter_bytes and operator.kind != "embedding":
            made = {
                "matmul": ("problems", "m", "n"),
                "convolution": ("k", "out_h", "out_w"),
                "memory_bound": ("elements",),
            }.get(operator.kind, ())
            elements = 1
            for dim in made:
                elements *= sizes.get(dim, 1)
            total += elements * operator.count * element_bytes * part.samples
    return total


# When the stages of a pipeline make room for what others send, and how long they hold what they send: by the order alone.
#
# Between two places on the pp axis and in one direction, messages follow one another. Those that one action makes for another
# one are a group. A rank has room for the next group of every such stream and for no more:
#
#     receive   room for the first group is there from the beginning of the step, that for another one right before the action
#               that reads the group before it
#     send      a group is held until the action has ended that makes the next one, which waits for the first to be sent; a
#               value at most until the first backward of its microbatch, or the second forward before that, which waits too
#               (where an order would not end so, nothing waits: `ends`)
#
# So the memory of a rank does not depend on how fast its neighbours are. The executor (`parsim.execute.transfers`) and the
# prediction (`parsim.program.lifetimes`) both follow this rule.


class StageLink(NamedTuple):
    """Two stages of which the first sends something to the second for every microbatch.

    Attributes:
        source, target: numbers of stages; a gradient goes from a later to an earlier one.
        late: a gradient that only the half for weights of its reader takes.
    """

    source: int
    target: int
    late: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Attributes: order: a key of `PIPELINE_ORDERS`. ranks, microbatches, chunks: as for `pipeline_actions`.
    links: between stages on different ranks, ascending.
    """

    order: str
    ranks: int
    microbatches: int
    chunks: int = 1
    links: tuple[StageLink, ...] = ()


class MessageGroup(NamedTuple):
    """What one action of a rank sends for one action of another rank.

    Attributes:
        links: of which it is. made: number of the action that makes it, on its rank. read: of the one that reads it, on that
            rank. room: the first action there during which there is room for it.
        held: the last action of the sender during which it is held; None: to the end of the step.
    """

    links: tuple[StageLink, ...]
    made: int
    read: int
    room: int
    held: int | None


def beside_actions(pipeline: Pipeline, rank: int) -> tuple[list[list[StageLink]], list[list[StageLink]]]:
    """By action of a rank, in order: for which links there is room that the action does not read; and what of others is held.

    Args:
        pipeline: with its links. rank: of the pipeline.
    """
    count = len(_actions(pipeline)[rank])
    arriving: list[list[StageLink]] = [[] for _ in range(count)]
    leaving: list[list[StageLink]] = [[] for _ in range(count)]
    for other in range(pipeline.ranks):
        if other == rank:
            continue
        for group in groups(pipeline, other, rank):
            for number in range(group.room, group.read):
                arriving[number].extend(group.links)
        for group in groups(pipeline, rank, other):
            last = count - 1 if group.held is None else group.held
            for number in range(group.made + 1, last + 1):
                leaving[number].extend(group.links)
    return arriving, leaving


@lru_cache(maxsize=1024)
def groups(pipeline: Pipeline, source: int, target: int) -> tuple[MessageGroup, ...]:
    """What one rank sends another one in a step, in order.

    Args:
        pipeline: with its links. source, target: ranks of the pipeline.
    """
    place = rank_of_stage(pipeline.order, pipeline.ranks, pipeline.chunks)
    links = [link for link in pipeline.links if (place[link.source], place[link.target]) == (source, target)]
    if not links:
        return ()
    actions = _actions(pipeline)
    at = [{action: number for number, action in enumerate(own)} for own in actions]
    found = list(_sent(links, actions[source], at[target], _backward_transfers(pipeline)))
    soonest = [entry.read for entry in found]  # the first action that reads this group or a later one
    for number in range(len(soonest) - 2, -1, -1):
        soonest[number] = min(soonest[number], soonest[number + 1])
    complete = []
    for number, entry in enumerate(found):
        room = 0 if number == 0 else min(found[number - 1].read, soonest[number])
        held = found[number + 1].made if number + 1 < len(found) else None
        microbatch = actions[source][entry.made].microbatch
        if all(link.source < link.target for link in entry.links):
            back = at[source][Action(entry.links[0].source, _backward_transfers(pipeline), microbatch)] - 1
            held = back if held is None else min(held, back)
        complete.append(entry._replace(room=room, held=held))
    return tuple(complete)


@lru_cache(maxsize=256)
def ends(pipeline: Pipeline, *, sends_wait: bool = True) -> bool:
    """Whether the order ends if a rank has room for one group ahead.

    It always does where sends do not wait: a receive waits for actions before the one that reads it. Where they wait, nearly
    all shipped orders do. Steps of more than `MOST_CHECKED` actions of shipped orders without chunks are not walked through.

    Args:
        pipeline: with its links. sends_wait: an action that follows one which makes a group waits until the group before is
            sent.
    """
    actions = _actions(pipeline)
    if pipeline.chunks == 1 and sum(map(len, actions)) > MOST_CHECKED:
        return True
    pairs = [(a, b) for a in range(pipeline.ranks) for b in range(pipeline.ranks) if a != b and groups(pipeline, a, b)]
    sent = dict.fromkeys(pairs, 0)
    reached = [0] * pipeline.ranks

    def can_run(rank: int, action: int) -> bool:
        for (source, target), count in sent.items():
            unsent = groups(pipeline, source, target)[count:]
            if target == rank and any(group.read == action for group in unsent):
                return False
            if sends_wait and source == rank and len(unsent) > 1 and unsent[1].made < action:
                return False
        return True

    moved = True
    while moved:
        moved = False
        for (source, target), count in sent.items():
            unsent = groups(pipeline, source, target)[count:]
            if unsent and unsent[0].made < reached[source] and unsent[0].room <= reached[target]:
                sent[source, target] += 1
                moved = True
        for rank, own in enumerate(actions):
            if reached[rank] < len(own) and can_run(rank, reached[rank]):
                reached[rank] += 1
                moved = True
    return all(count == len(own) for count, own in zip(reached, actions, strict=True))


def _sent(
    links: Sequence[StageLink], actions: Sequence[Action], read_at: dict[Action, int], backward: Phase
) -> Iterator[MessageGroup]:
    for number, action in enumerate(actions):
        forward = action.phase is Phase.FORWARD
        if not forward and action.phase is not backward:
            continue
        own = [link for link in links if link.source == action.stage and (link.source < link.target) == forward]
        for target in dict.fromkeys(link.target for link in own):
            of_target = tuple(link for link in own if link.target == target)
            phase = Phase.FORWARD if forward else backward
            if not forward and all(link.late for link in of_target):
                phase = Phase.BACKWARD_WEIGHT
            read = read_at[Action(target, phase, action.microbatch)]
            yield MessageGroup(links=of_target, made=number, read=read, room=0, held=None)


def _actions(pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
    return tuple(
        pipeline_actions(pipeline.order, rank, pipeline.ranks, pipeline.microbatches, pipeline.chunks)
        for rank in range(pipeline.ranks)
    )


def _backward_transfers(pipeline: Pipeline) -> Phase:
    """The phase that hands on gradients."""
    return Phase.BACKWARD_INPUT if PIPELINE_ORDERS[pipeline.order].halves else Phase.BACKWARD


# The activations that a rank keeps for the backward under a plan; precision and recomputation change them.
#
# A recomputed component keeps its inputs as it reads them, and copies of its buffers. Its saved activations live only from
# its second forward to the end of its backward. So its inputs have one keeper more, and its saved values one fewer. By
# operator
# it keeps outputs of operators besides, and of its inputs and outputs those that `Selective.values` names.
#
# Leaves out: values that share one storage (each counts by itself where a recomputed component reads it).


VIEWS = ("split_batch", "keep")
"""Hops whose result lies in the storage of what they start from."""


@dataclass(frozen=True)
class KeptActivations:
    """A model as the ranks of one layout keep it. Components are as one rank has them: shards, where the plan cuts them."""

    layout: PlanIndex
    precision: str

    @cached_property
    def values(self) -> Mapping[str, Value]:
        """All values, with the components that keep them under this plan."""
        if not self._recomputes:
            return self._before
        return {value.name: self._value(value) for value in self._before.values()}

    @cached_property
    def _before(self) -> Mapping[str, Value]:
        """All values, with the components that would keep them if nothing were recomputed."""
        return {value.name: value_in(value, self.precision) for value in self.layout.model.values}

    def _value(self, value: Value) -> Value:
        readers = {
            name
            for name in self.layout.consumers[value.name]
            if self._keeps_again(value.name, name) and not self.layout.is_remade(value.name, name)
        }
        if value.producer is not None and self._by_operator(value.producer) and self._keeps_again(value.name, value.producer):
            readers.add(value.producer)
        savers = value.savers or ()
        if not readers and not any(self.layout.recomputes(name) for name in savers):
            return value
        keepers = readers | {name for name in savers if not self.layout.recomputes(name)}
        order = self.layout.model.component_index
        return replace(value, savers=tuple(sorted(keepers, key=lambda name: order[name])), saved=bool(keepers))

    def _by_operator(self, name: str) -> bool:
        return self.layout.recomputes_by_operator(name)

    def _keeps_again(self, value: str, name: str) -> bool:
        """Whether a recomputed component keeps an input, or by operator also an output."""
        if not self._by_operator(name):
            return self.layout.recomputes(name)
        selective = self.layout.model.component(name).selective
        assert selective is not None
        return value in selective.values

    def component(self, name: str) -> Component:
        """The part of the component on a rank that runs it, with its saved activations under this plan."""
        if name not in self._components:
            self._components[name] = self._component(name)
        return self._components[name]

    @cached_property
    def _components(self) -> dict[str, Component]:
        return {}

    @cached_property
    def _recomputes(self) -> bool:
        return bool(self.layout.plan.recomputed or self.layout.plan.recomputed_by_operator)

    def _component(self, name: str) -> Component:
        own = self._alone(name)
        if not self._recomputes:
            return own
        rate, fixed = own.saved_activation_bytes, own.saved_fixed_bytes
        if self.layout.recomputes(name):
            rate, fixed = 0, own.buffer_bytes
        if self._by_operator(name) and own.selective is not None:
            rate, fixed = own.selective.kept[0], own.selective.kept[1] + own.buffer_bytes
        for value in self._values_at(name):
            before, now = (_counts(name, values[value]) for values in (self._before, self.values))
            counted = now - (before and not self.layout.recomputes(name))
            own_rate, own_fixed = self._size_at(name, value)
            rate, fixed = rate + counted * own_rate, fixed + counted * own_fixed
            elsewhere = before and not now and not self.layout.is_remade(value, name)
            if elsewhere and value in own.inputs and self.values[value].savers:  # kept for an earlier component too
                own = replace(own, backward_peaks=tuple((r + own_rate, f + own_fixed) for r, f in own.backward_peaks))
        return replace(own, saved_activation_bytes=max(0, rate), saved_fixed_bytes=max(0, fixed))

    def counted_values(self, name: str) -> list[tuple[str, int]]:
        """The values among what a component saves, and their bytes of one microbatch as it has them."""
        samples, found = self.layout.local_samples(name), list[tuple[str, int]]()
        for value in self._values_at(name):
            if _counts(name, self.values[value]):
                rate, fixed = self._size_at(name, value)
                found.append((value, rate * samples + fixed))
        return found

    def again(self, name: str) -> Again:
        """The changes of memory by the second forward of a recomputed component.

        An input that its backward does not need is let go before that, if nobody else keeps it. Of a segment, what earlier
        components have saved again is there too.
        """
        segment = self.layout.segment_of(name)
        if not segment:
            return self._again(name)
        parts = [self._again(entry) for entry in segment[: segment.index(name) + 1]]
        return Again(saved_bytes=sum(part.saved_bytes for part in parts), released_bytes=parts[-1].released_bytes)

    def _again(self, name: str) -> Again:
        own, samples = self._alone(name), self.layout.local_samples(name)
        saved, released = own.saved_activation_bytes * samples + own.saved_fixed_bytes, 0
        if self._by_operator(name) and own.selective is not None:
            return self._again_by_operator(name, own.selective, samples)
        for value in dict.fromkeys(own.inputs):
            rate, fixed = self._size_at(name, value)
            before, now = self._before[value], self.values[value]
            if self.layout.is_remade(value, name):
                continue
            if _counts(name, before):
                saved -= rate * samples + fixed
            if name not in (before.savers or ()) and _counts(name, now) and now.producer is not None:
                released += rate * samples + fixed
        return Again(saved_bytes=max(0, saved), released_bytes=released)

    def _again_by_operator(self, name: str, selective: Selective[Size], samples: int) -> Again:
        """Inputs that the backward does not need are let go here too. The counted bytes contain all else."""
        released = 0
        for value in selective.values:
            rate, fixed = self._size_at(name, value)
            before, now = self._before[value], self.values[value]
            if name not in (before.savers or ()) and _counts(name, now) and now.producer not in (None, name):
                released += rate * samples + fixed

        def fullest(peaks: tuple[tuple[int, int], ...]) -> int:
            return max((rate * samples + fixed for rate, fixed in peaks), default=0)

        return Again(
            saved_bytes=selective.again[0] * samples + selective.again[1],
            released_bytes=released,
            first_bytes=fullest(selective.first_peaks),
            fullest_bytes=fullest(selective.second_peaks),
        )

    def _alone(self, name: str) -> Component:
        """What a rank has of the component, as if nothing were recomputed."""
        placement = self.layout.placement[name]
        own = narrow(component_in(self.layout.model.component(name), self.precision), placement.rule, placement.ways)
        return own.at_samples(self.layout.local_samples(name))

    def _values_at(self, name: str) -> tuple[str, ...]:
        component = self.layout.model.component(name)
        return tuple(dict.fromkeys((*component.inputs, *component.outputs)))

    def _size_at(self, name: str, value: str) -> tuple[int, int]:
        """Bytes per sample that the component sees, and fixed, of a value as it reads or makes it."""
        entry = self._before[value]
        made = self.layout.model.value[value].producer == name
        ends = self.layout.source[value] if made else self.layout.reads_in(name, value)
        share = share_of(ends.value.size, ends.value.ways) if ends.value.form == "shard" else ALONE
        rate = entry.bytes_per_sample
        if entry.producer is not None and self.layout.stage_of[entry.producer] == self.layout.stage_of[name]:
            hops = conversion(self.layout.source[value].value, ends.value, self.layout.plan.mesh.tp)
            if made or all(hop.operation in VIEWS for hop in hops):  # else a copy, which has no larger storage
                rate = entry.storage_bytes_per_sample or rate
        return share.of(rate), entry.fixed_bytes


def _counts(name: str, value: Value) -> bool:
    """Whether the value is among what this component saves: it is the first that keeps it."""
    return (value.savers or ())[:1] == (name,)


# When a rank makes and gives up the room of buckets that are whole for a while only (ZeRO 2 and 3).
#
# All of it happens between two computations, at places that the program alone decides. So the memory of a rank does not
# depend on
# how fast its communication is, and equals the prediction (`parsim.program.lifetimes`):
#
#     gradients    whole from the first backward that adds to them. The array, and room for this rank's part of the sum, stay
#                  until the computation that waits for their reduce_scatter, or for a later one of the same group.
#     parameters   from the end of the computation for which their all_gather waits, to the end of the last that uses them.
#                  Those are given up first where gradients are complete after the same computation.
#
# Rejected: gradients given up when their reduce_scatter has ended. The peak was lower by a bucket where the communication was
# faster than the next backward, and a run could not rely on that.


BucketOfMicrobatch = tuple[int, int]


@dataclass(kw_only=True)
class Room:
    """Around one computation, in this order.

    Attributes:
        forgotten: gradients given up before it. ending_parameters: given up after it.
        ending_gradients: complete after it. beginning_parameters: for which there is room from then on.
    """

    forgotten: list[BucketOfMicrobatch] = field(default_factory=list)
    ending_parameters: list[int] = field(default_factory=list)
    ending_gradients: list[BucketOfMicrobatch] = field(default_factory=list)
    beginning_parameters: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class Rooms:
    """Attributes: around: by number of a task. first_parameters: gathered before anything was computed in the step."""

    around: dict[int, Room]
    first_parameters: list[int]


def rooms_of(tasks: Sequence[tuple[Task, str, tuple[int, ...]]]) -> Rooms:
    """What the tasks of a rank say of its buckets.

    Args:
        tasks: in issue order, each with its stream and the tasks of this rank that it waits for.
    """
    place = {task.index: number for number, (task, stream, _) in enumerate(tasks) if stream == COMPUTE}
    gathered: dict[int, int] = {}
    sent: dict[int, BucketOfMicrobatch] = {}
    groups: dict[int, tuple[int, ...]] = {}
    rooms = Rooms(around={}, first_parameters=[])

    def around(task: int) -> Room:
        return rooms.around.setdefault(task, Room())

    for task, _, before in tasks:
        bucket, microbatch = task.origin.bucket, task.origin.microbatch
        if bucket is None or microbatch is None:
            continue
        assert isinstance(task.work, Collective)
        if task.work.operation == "all_gather":
            gathered[task.index] = bucket
            after = max((index for index in before if index in place), key=place.__getitem__, default=None)
            (rooms.first_parameters if after is None else around(after).beginning_parameters).append(bucket)
        else:
            sent[task.index] = (bucket, microbatch)
            groups[task.index] = task.work.group
            for index in before:
                around(index).ending_gradients.append((bucket, microbatch))
    last: dict[int, int] = {}
    waiting = dict(sent)  # in issue order
    for task, stream, before in tasks:
        if stream != COMPUTE:
            continue
        last.update((index, task.index) for index in before if index in gathered)
        ended = [index for index in before if index in sent]
        for index in list(waiting):
            known = any(groups[index] == groups[other] and index <= other for other in ended)
            if known or isinstance(task.work, OptimizerStep | ClipGradients):
                around(task.index).forgotten.append(waiting.pop(index))
    for index, task_index in last.items():
        around(task_index).ending_parameters.append(gathered[index])
    return rooms


# Values that wait for their readers, and gradients that wait for their makers, while another component of the rank runs.
#
# A value that no backward needs lives until its last reader has run; one that a later component saves first, until that one
# counts it. A value may have several readers, or be read long after it was made. Its gradient lies there from the backward of
# its last reader to that of its maker. A gradient from another rank lies there from the beginning of the backward: it comes
# from what was run last.
#
# Leaves out: that gradients of two values may be one storage, as those of a residual sum's operands.


class Wait(NamedTuple):
    """Bytes that are there while the components of a rank from number `first` to number `last` run; none if that is less."""

    first: int
    last: int
    size_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """By component, bytes of one microbatch.

    Attributes:
        values: alive while it runs forward, which neither it makes nor the components before it save.
        gradients: alive while it runs backward, which are neither those of its outputs nor made by it.
    """

    values: Mapping[str, float] = field(default_factory=dict)
    gradients: Mapping[str, float] = field(default_factory=dict)


NOTHING_WAITS = Waiting()


def waiting_bytes(
    components: Sequence[Component],
    values: Mapping[str, Value],
    size_bytes: Callable[[Value], float],
    gradients: Mapping[str, Sequence[Wait]] | None = None,
    waits: Mapping[str, Sequence[Wait]] | None = None,
) -> Waiting:
    """What waits on a rank while each of its components runs.

    Args:
        components: of the rank, in execution order. values: of the model by name, as kept under the plan.
        size_bytes: of one microbatch of a value on this rank.
        gradients: by value those that wait here for its maker. None: one of all readers here, as large as the value.
        waits: by value where it waits here, for those that lie here in several layouts.
    """
    place = {component.name: number for number, component in enumerate(components)}
    readers: dict[str, list[int]] = {}
    for number, component in enumerate(components):
        for name in dict.fromkeys(component.inputs):
            readers.setdefault(name, []).append(number)
    forward, backward = [0.0] * len(components), [0.0] * len(components)
    for name, reads in readers.items():
        value = values[name]
        made = -1 if value.producer is None else place.get(value.producer, -1)
        if waits is None or name not in waits:
            _add(forward, Wait(made + 1, _counted_at(value, place, reads[-1]), size_bytes(value)))
        if gradients is None and value.differentiable and value.producer is not None:
            _add(backward, Wait((made if made >= 0 else reads[0]) + 1, reads[-1] - 1, size_bytes(value)))
    for into, known in ((forward, waits), (backward, gradients)):
        for own in (known or {}).values():
            for wait in own:
                _add(into, wait)
    names = [component.name for component in components]
    return Waiting(values=dict(zip(names, forward, strict=True)), gradients=dict(zip(names, backward, strict=True)))


def _add(sizes: list[float], wait: Wait) -> None:
    for number in range(wait.first, wait.last + 1):
        sizes[number] += wait.size_bytes


def _counted_at(value: Value, place: Mapping[str, int], last_read: int) -> int:
    """The last component in whose forward the value is in nothing that a component keeps yet; -1: nobody knows."""
    if value.savers is None:
        return -1
    return next((place[saver] for saver in value.savers if saver in place), last_read)


# Values and components of a rank that are like earlier ones: what is counted of the first of a kind holds for the others.
#
# Components of one kind do the same work, placed alike, beside neighbours that do (`parsim.program.placed`). So a value
# waits as long after its maker as that of another component of this kind, if as much is kept of it as far away. That holds
# where
# its maker, its readers and those that keep it are of one chunk: what comes before and after does not matter then.
#
# Where components are placed on single tp ranks, nothing is alike.


T = TypeVar("T")


class CountedKinds:
    """What was counted of values and components, by kind.

    Args:
        layout: the plan and its model. values: by name, as kept under the plan.

    Attributes:
        kind: by component a number, equal for those of one kind whose values are as large; empty where nothing is alike.
        known: what was counted, by whether of values or components, what, and of which kind. numbers: of kinds of values.
    """

    def __init__(self, layout: PlanIndex, values: Mapping[str, Value]) -> None:
        self.layout = layout
        self.values = values
        self.kind: dict[str, int] = {}
        self.known: dict[tuple[str, str, int], object] = {}
        self.numbers: dict[Hashable, int] = {}
        if layout.shards_alike:
            sizes: dict[Hashable, int] = {}
            size = {
                name: sizes.setdefault(
                    (value.bytes_per_sample, value.fixed_bytes, value.differentiable, value.saved), len(sizes)
                )
                for name, value in values.items()
            }
            kinds: dict[Hashable, int] = {}
            for component, alike in zip(layout.model.components, layout.kinds.of, strict=True):
                own = tuple([size[value] for value in (*component.inputs, *component.outputs)])
                key = alike, own, _views(component)
                self.kind[component.name] = kinds.setdefault(key, len(kinds))

    def on(self, rank: int) -> AlikeOnRank:
        """The same for the values and components of a rank."""
        return AlikeOnRank(self, rank)


def _views(component: Component) -> Hashable:
    """Which inputs have gradients that are parts of those of outputs, and of which."""
    return tuple([(component.inputs.index(own), component.outputs.index(of)) for own, of in component.gradient_views])


class AlikeOnRank:
    """What was counted already, as it stands on one rank.

    Args:
        counted: on all ranks. rank: global number.

    Attributes: place: of the rank's components, their number in execution order.
    """

    def __init__(self, counted: CountedKinds, rank: int) -> None:
        self.place = {name: number for number, name in enumerate(counted.layout.rank_components(rank))}
        self._counted = counted
        self._numbers: dict[str, int | None] = {}

    def waits(self, what: str, value: Value, count: Callable[[], list[Wait]]) -> list[Wait]:
        """Where a value, or its gradient, waits on the rank: counted, or those of its like beside other components.

        Args:
            what: is counted. value: of the model. count: does so.
        """
        number = self._number(value)
        if number is None or value.producer is None:
            return count()
        begin = self.place[value.producer]
        first, found = self._once(("value", what, number), lambda: (begin, count()))
        if first == begin:
            return found
        return [Wait(wait.first + begin - first, wait.last + begin - first, wait.size_bytes) for wait in found]

    def of_value(self, what: str, value: Value, count: Callable[[], T]) -> T:
        """What does not depend on where on the rank a value is.

        Args:
            what, value, count: as for `waits`.
        """
        number = self._number(value)
        return count() if number is None else self._once(("value", what, number), count)

    def of_component(self, what: str, name: str, count: Callable[[], T]) -> T:
        """What depends on a component and on the values that it reads and makes.

        Args:
            what: is counted. name: of the component. count: does so.
        """
        kind = self._counted.kind
        return self._once(("component", what, kind[name]), count) if kind else count()

    def _once(self, key: tuple[str, str, int], count: Callable[[], T]) -> T:
        known = self._counted.known
        if key not in known:
            known[key] = count()
        return known[key]  # type: ignore[return-value]  # of one key, all that is counted is of one type

    def _number(self, value: Value) -> int | None:
        """Equal for values that are alike; None: nothing says of which others this one is."""
        if value.name not in self._numbers:
            self._numbers[value.name] = self._new_number(value)
        return self._numbers[value.name]

    def _new_number(self, value: Value) -> int | None:
        layout, maker, kind = self._counted.layout, value.producer, self._counted.kind
        if maker is None or maker not in self.place or not kind:
            return None
        chunk_of, readers = layout.chunk_of, layout.consumers[value.name]
        chunk, begin = chunk_of[maker], self.place[maker]
        users = (*readers, *(value.savers or ()))
        for user in users:
            if chunk_of[user] != chunk:
                return None
        key = (
            kind[maker],
            layout.model.component(maker).outputs.index(value.name),
            value.savers is None,
            tuple([self.place[user] - begin for user in users]),
            tuple([kind[reader] for reader in readers]),
        )
        return self._counted.numbers.setdefault(key, len(self._counted.numbers))


# A few actions of a long pipeline that stand for all of them: the beginning, two of what repeats, and the end.


REPEATS = 4
"""Actions of one kind in a row, or in turn with another one, of which the inner two are like all further ones."""


class FewActions(NamedTuple):
    """Attributes:
    actions: of one place, in order. microbatches: by action of the whole order, that of the one among `actions` which
        stands for it: the same phase of the same stage, with the like before and after it.
    """

    actions: tuple[Action, ...]
    microbatches: tuple[int, ...]


@lru_cache(maxsize=1024)
def few_actions(order: str, place: int, ranks: int, microbatches: int, chunks: int) -> FewActions:
    """Fewer actions in which buckets come and go as in all of them.

    Args:
        order: of a pipeline. place: in it. ranks, chunks: of the pipeline. microbatches: per step.
    """
    whole = pipeline_actions(order, place, ranks, microbatches, chunks)
    few = few_rounds(order, ranks, microbatches)
    actions = pipeline_actions(order, place, ranks, few, chunks)
    numbers = [in_few_rounds(order, ranks, microbatches, action.microbatch) for action in whole]
    if chunks > 1 or PIPELINE_ORDERS[order].halves:
        return FewActions(tuple(actions), tuple(numbers))
    standing = _stand_for(actions)
    by_action = {
        (action.phase, action.microbatch): actions[other].microbatch for action, other in zip(actions, standing, strict=True)
    }
    kept = sorted(set(standing))
    return FewActions(
        tuple(actions[number] for number in kept),
        tuple(by_action[action.phase, number] for action, number in zip(whole, numbers, strict=True)),
    )


def _stand_for(actions: Sequence[Action]) -> list[int]:
    """By action the number of the one that stands for it, where the inner ones of many repeats stand for one another."""
    phases = [action.phase for action in actions]
    found: list[int] = []
    while (first := len(found)) < len(phases):
        repeats, period = _repeats(phases, first)
        for repeat in range(repeats):
            inner = REPEATS // 2 <= repeat < repeats - REPEATS // 2
            other = first + (REPEATS // 2 if inner else repeat) * period
            found += range(other, other + period)
    return found


def _repeats(phases: Sequence[object], first: int) -> tuple[int, int]:
    """How often what begins there repeats, and its actions: one, or two in turn. (1, 1) where it repeats too seldom."""
    for period in (1, 2):
        unit, repeats = phases[first : first + period], 1
        while phases[first + repeats * period : first + (repeats + 1) * period] == unit:
            repeats += 1
        if repeats > REPEATS:
            return repeats, period
    return 1, 1


# What a rank of a pipeline holds while it runs each of its actions: microbatches of every chunk, and messages.


@lru_cache(maxsize=1024)
def held_moments(
    pipeline: Pipeline, rank: int, *, apart: bool = False, own: tuple[StageLink, ...] = ()
) -> tuple[HeldMoment, ...]:
    """Every moment but those at which the same runs and no more is held than at another one, batches not yet read apart.

    Args:
        pipeline: with the links between its stages. rank: of the pipeline.
        apart: other microbatches are something else that runs, for what is held of buckets depends on the microbatch.
        own: links between stages of this rank. What one makes waits for the other, if other actions run in between.

    Returns:
        Messages by link, in the order of `links_of` and of `own`.
    """
    order, ranks, microbatches, chunks = pipeline.order, pipeline.ranks, pipeline.microbatches, pipeline.chunks
    stages = stages_by_rank(order, ranks, chunks)[rank]
    chunk_of = {stage: chunk for chunk, stage in enumerate(stages)}
    inward, outward = links_of(pipeline, rank)
    messages = zip(*beside_actions(pipeline, rank), strict=True)
    alive, waiting, unread = [0] * chunks, [0] * chunks, [microbatches] * chunks
    between = [0] * len(own)
    seen: dict[tuple[int, Phase, int], dict[tuple[int, ...], HeldMoment]] = {}
    actions = pipeline_actions(order, rank, ranks, microbatches, chunks)
    numbers = few_actions(order, rank, ranks, microbatches, chunks).microbatches if apart else (0,) * len(actions)
    for action, number, (arriving, leaving) in zip(actions, numbers, messages, strict=True):
        chunk, phase = chunk_of[action.stage], action.phase
        alive[chunk] += phase is Phase.FORWARD
        unread[chunk] -= phase is Phase.FORWARD
        for place, link in enumerate(own):
            between[place] -= link.target == action.stage and _moves(phase, link)
        there, sent = _held_counts(arriving, inward), _held_counts(leaving, outward)
        moment = HeldMoment(chunk, phase, tuple(alive), tuple(waiting), there, sent, tuple(unread), number, tuple(between))
        seen.setdefault((chunk, phase, number), {}).setdefault((*alive, *waiting, *there, *sent, *between), moment)
        waiting[chunk] += (phase is Phase.BACKWARD_INPUT) - (phase is Phase.BACKWARD_WEIGHT)
        alive[chunk] -= phase in (Phase.BACKWARD, Phase.BACKWARD_WEIGHT)
        for place, link in enumerate(own):
            between[place] += link.source == action.stage and _moves(phase, link)
    return tuple(moment for held in seen.values() for moment in _most(held))


def _moves(phase: Phase, link: StageLink) -> bool:
    """Whether an action of that phase makes or reads what the link has: a value goes to a later stage, a gradient back."""
    return phase is Phase.FORWARD if link.source < link.target else phase in (Phase.BACKWARD, Phase.BACKWARD_INPUT)


def _most(held: Mapping[tuple[int, ...], HeldMoment]) -> list[HeldMoment]:
    """Those at which something is held that no other moment holds beside all else, in their order."""
    most: list[tuple[int, ...]] = []
    for counts in sorted(held, key=sum, reverse=True):
        if not any(all(a >= b for a, b in zip(other, counts, strict=True)) for other in most):
            most.append(counts)
    return [moment for counts, moment in held.items() if counts in most]


def links_of(pipeline: Pipeline, rank: int) -> tuple[tuple[StageLink, ...], tuple[StageLink, ...]]:
    """The links that end on a rank, and those that begin there, ascending.

    Args:
        pipeline: with its links. rank: of the pipeline.
    """
    stages = stages_by_rank(pipeline.order, pipeline.ranks, pipeline.chunks)[rank]
    inward = tuple(link for link in pipeline.links if link.target in stages)
    return inward, tuple(link for link in pipeline.links if link.source in stages)


def _held_counts(found: Sequence[StageLink], links: Sequence[StageLink]) -> tuple[int, ...]:
    return tuple(map(found.count, links))


# What the stages of a plan send one another, as the links of its pipeline (`parsim.program.lifetimes`).


class Message(NamedTuple):
    """A value or a gradient that one tp rank of a stage sends the same tp rank of another one, for every microbatch."""

    link: StageLink
    value: str
    reading: Reading


def messages(layout: PlanIndex, names: Iterable[str], shard: int) -> Iterator[Message]:
    """Those of some values.

    Args:
        layout: the plan and its model. names: of values. shard: place on the tp axis.
    """
    tp, halves = layout.plan.mesh.tp, PIPELINE_ORDERS[layout.plan.pipeline_order].halves
    for name in names:
        value, home = layout.model.value[name], layout.stage_of_value[name]
        if home is None or value.producer is None:
            continue
        maker = layout.chunk_of[value.producer]
        for reading in layout.readings[name]:
            if reading.stage == home:
                continue
            if shard in reading.ends.value.holders(tp):
                yield Message(StageLink(maker, layout.chunk_of[reading.components[0]]), name, reading)
            backward = [reader for reader in reading.components if reader in layout.differentiable]
            if value.differentiable and backward and shard in reading.ends.gradient.holders(tp):
                late = halves and not layout.wants_input_gradient(value.producer)
                yield Message(StageLink(layout.chunk_of[backward[0]], maker, late), name, reading)


def pipeline_of(layout: PlanIndex, shard: int, place: int | None = None) -> Pipeline:
    """The pipeline of a plan with the links of one tp rank.

    Args:
        layout: the plan and its model. shard: place on the tp axis.
        place: on the pp axis, if the links that begin or end there are enough.
    """
    plan = layout.plan
    names = [value.name for value in layout.model.values] if place is None else layout.values_at[place]
    links = {message.link for message in messages(layout, names, shard)}
    if place is not None:
        places = plan.stage_places
        links = {link for link in links if place in (places[link.source], places[link.target])}
    return Pipeline(
        order=plan.pipeline_order,
        ranks=plan.mesh.pp,
        microbatches=plan.microbatches,
        chunks=plan.chunks,
        links=tuple(sorted(links)),
    )


# What a rank of a plan exchanges with others, and the buffers that this takes.


def local_bytes(layout: PlanIndex, value: Value, how: ValueLayout) -> float:
    """Bytes of one microbatch of a value on a rank that holds any of it.

    Args:
        layout: the plan and its model. value: of the model. how: the layout of the value.
    """
    return value.bytes_per_sample * layout.microbatch_samples * layout.local_share(how) + value.fixed_bytes


def rank_traffic(kept: KeptActivations, rank: int, backend: str) -> Traffic:
    """Communicators and buffers of a rank.

    Args:
        kept: values under the plan. rank: global number. backend: that communicates.
    """
    sent = _messages(kept.layout, kept.values, rank)
    return Traffic(
        backend=backend,
        communicators=len({message.group for message in sent}),
        largest_message_bytes=round(max((message.size_bytes for message in sent), default=0.0)),
        posted_bytes=_posted_bytes(kept, rank),
    )


def _posted_bytes(kept: KeptActivations, rank: int) -> float:
    """Of stages that are not synchronised: room for the gradient of a step, from its beginning."""
    plan = kept.layout.plan
    if plan.synchronisation.kind != "stale":
        return 0.0
    place = plan.stage_of_rank(rank)
    found = messages_by_link(kept, rank).items()
    return sum(size for link, size in found if link.source > link.target and plan.stage_places[link.target] == place)


def next_step_bytes(kept: KeptActivations, rank: int) -> float:
    """Of decoupled stages: room for what arrives during a step and is read in the next one.

    Args:
        kept: values under the plan. rank: global number.
    """
    plan = kept.layout.plan
    place = plan.stage_of_rank(rank)
    return sum(size for link, size in messages_by_link(kept, rank).items() if plan.stage_places[link.target] == place)


def messages_by_link(kept: KeptActivations, rank: int) -> dict[StageLink, float]:
    """Bytes of one microbatch on every link that begins or ends on a rank, as they count there.

    A value that is sent as it is kept for a backward here takes no memory of its own.

    Args:
        kept: values under the plan. rank: global number.
    """
    layout, plan = kept.layout, kept.layout.plan
    place = plan.stage_of_rank(rank)
    found: dict[StageLink, float] = {}
    for message in messages(layout, layout.values_at[place], plan.shard_of_rank(rank)):
        if place in (plan.stage_places[message.link.source], plan.stage_places[message.link.target]):
            found[message.link] = found.get(message.link, 0.0) + _message_bytes(kept, rank, message)
    return found


def _message_bytes(kept: KeptActivations, rank: int, message: Message) -> float:
    layout, (link, name, reading) = kept.layout, message
    if link.source > link.target:
        return local_bytes(layout, kept.values[name], reading.ends.gradient)
    value, how = kept.values[name], reading.ends.value
    sends = layout.plan.stage_places[link.source] == layout.plan.stage_of_rank(rank)
    return 0.0 if sends and _is_kept(layout, value, how, rank) else local_bytes(layout, value, how)


def made_before(kept: KeptActivations, rank: int, names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """By component of a rank the bytes that its action has made for other stages before it: in a forward, in a backward.

    What a component here still reads is left out: it waits for that one.

    Args:
        kept: values under the plan. rank: global number. names: components of the rank, in order.
    """
    layout, plan = kept.layout, kept.layout.plan
    number = {name: count for count, name in enumerate(names)}
    place = plan.stage_of_rank(rank)
    forward, backward = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    for message in messages(layout, layout.values_at[place], plan.shard_of_rank(rank)):
        if plan.stage_places[message.link.source] != place:
            continue
        size = _message_bytes(kept, rank, message)
        if message.link.source < message.link.target:
            users = (layout.model.value[message.value].producer, *layout.consumers[message.value])
            last = max((number[name] for name in users if name in number), default=len(names))
            later, found = [name for name in names if number[name] > last], forward
        else:
            first = min((number[name] for name in message.reading.components if name in number), default=0)
            later, found = [name for name in names if number[name] < first], backward
        for name in later:
            if layout.chunk_of[name] == message.link.source:
                found[name] += size
    return {name: (forward[name], backward[name]) for name in names}


def _is_kept(layout: PlanIndex, value: Value, how: ValueLayout, rank: int) -> bool:
    """Whether a value lies here, in the layout in which it is sent, until the backward of its microbatch."""
    made = layout.source[value.name].value
    if any(hop.operation not in VIEWS for hop in conversion(made, how, layout.plan.mesh.tp)):
        return False
    return value.savers is None or any(layout.runs_on(rank, name) for name in value.savers)


# --- messages ---------------------------------------------------------------------------------------------------------


class _Message(NamedTuple):
    """What a rank sends, receives or reduces, and the process group it does it in."""

    group: tuple[object, ...]
    size_bytes: float


def _messages(layout: PlanIndex, values: Mapping[str, Value], rank: int) -> list[_Message]:
    """Every kind of message of one step: gradient buckets, conversions, transfers between stages.

    Of buckets of the same ranks the largest, and values that are as large and laid out alike count once.
    """
    plan = layout.plan
    stage, shard = plan.stage_of_rank(rank), plan.shard_of_rank(rank)
    found = _bucket_messages(layout, rank)
    seen: set[object] = set()
    for value in (values[name] for name in layout.values_at[stage]):
        home = layout.stage_of_value[value.name]
        if home is None:
            continue
        made, readings = layout.source[value.name], layout.readings[value.name]
        size = value.bytes_per_sample, value.fixed_bytes, value.differentiable
        alike = (home, made, size, tuple([(reading.stage, reading.ends) for reading in readings]))
        if alike in seen:
            continue
        seen.add(alike)
        for reading in readings:
            ways = [(home, reading.stage, made.value, reading.ends.value, reading.ends.value)]
            if value.differentiable:
                ways.append((reading.stage, home, reading.ends.gradient, made.gradient, reading.ends.gradient))
            for source, target, begin, end, moved in ways:
                if source != target and stage in (source, target) and shard in moved.holders(plan.mesh.tp):
                    found.append(_Message((source, target), local_bytes(layout, value, moved)))
                if stage == home:
                    for hop in conversion(begin, end, plan.mesh.tp):
                        found += _hop_messages(layout, value, hop, shard)
    return found


def _bucket_messages(layout: PlanIndex, rank: int) -> list[_Message]:
    """The largest gradient bucket of every group of ranks, and the largest part that sharding groups sum."""
    largest: dict[int, _Message] = {}
    for bucket in layout.rank_buckets(rank):
        size = bucket.padded_bytes if layout.is_divided(bucket) else bucket.size_bytes
        group = id(bucket.group)  # buckets of the same ranks share one tuple
        if len(bucket.group) > 1 and (group not in largest or size > largest[group].size_bytes):
            largest[group] = _Message(("dp", bucket.group), size)
        if (work := replica_sum_work(layout, bucket, rank)) is not None:
            known = largest.get(key := -1 - group)
            if known is None or work.size_bytes > known.size_bytes:
                largest[key] = _Message(("dp", work.group), work.size_bytes)
    return list(largest.values())


def _hop_messages(layout: PlanIndex, value: Value, hop: Hop, shard: int) -> list[_Message]:
    tp = layout.plan.mesh.tp
    if hop.operation in LOCAL_HOPS:
        return []
    size_bytes = max(local_bytes(layout, value, hop.source), local_bytes(layout, value, hop.target))
    if hop.operation in POINT_TO_POINT_HOPS:
        pairs = [tuple(sorted(pair)) for pair in hop_pairs(hop, tp) if shard in pair]
        return [_Message(("tp", pair), size_bytes / (1 if hop.operation == "move" else tp)) for pair in pairs]
    return [_Message(("tp", group), size_bytes) for group in hop_groups(hop, tp) if shard in group]


# What a rank holds of a value or a gradient while it is converted from one layout to another.


def bytes_here(layout: PlanIndex, value: Value, how: ValueLayout, rank: int) -> float:
    """Bytes of one microbatch of a value on a rank; 0 where the rank holds nothing in that layout.

    Args:
        layout: the plan and its model. value: of the model. how: the layout of the value. rank: global number.
    """
    if how.form == "placed" and how.rank != layout.plan.shard_of_rank(rank):
        return 0.0
    return local_bytes(layout, value, how)


def is_view(hop: Hop, shard: int) -> bool:
    """Whether what a tp rank has after the hop lies in what it had before. That holds for pieces of the batch, and for the
    whole of which a rank has sent pieces or copies to the others.

    Args:
        hop: of a conversion. shard: the tp rank.
    """
    return hop.operation in VIEWS or (hop.operation in ("scatter", "broadcast") and shard == hop.source.rank)


def storage_of(hops: Sequence[Hop], made: ValueLayout, shard: int) -> ValueLayout:
    """The layout whose memory the result of the hops lies in on a tp rank.

    Args:
        hops: a conversion. made: what it starts from. shard: the tp rank.
    """
    for hop in reversed(hops):
        if not is_view(hop, shard):
            return hop.target
    return made


def gradient_bytes(layout: PlanIndex, values: Mapping[str, Value], name: str, rank: int) -> tuple[float, float]:
    """Gradients of a component's outputs on a rank as it wants them; and at most, in the fullest step of a conversion to that.

    Args:
        layout: the plan and its model. values: by name, as kept under the plan. name: of the component. rank: global number.
    """
    total = all_wanted = 0.0
    for output in layout.model.component(name).outputs:
        value, wanted = values[output], layout.source[output].gradient
        if value.differentiable:
            steps = [
                _step_bytes(layout, value, hop, rank)
                for reading in layout.readings[output]
                for hop in conversion(reading.ends.gradient, wanted, layout.plan.mesh.tp)
            ]
            all_wanted += local_bytes(layout, value, wanted)
            total += max(local_bytes(layout, value, wanted), *steps, 0.0)
    return all_wanted, total


def converted_for_others(
    layout: PlanIndex, values: Mapping[str, Value], rank: int, waiting: Mapping[str, float]
) -> dict[str, float]:
    """Bytes of gradients that a rank helps to convert for a maker on another tp rank, and of what waits beside them.

    They follow the backward of their reader, so they are there right before that of the component which runs backward next.

    Args:
        layout: the plan and its model. values: by name, as kept under the plan. rank: global number.
        waiting: by component the gradients that wait beside its backward.
    """
    found: dict[str, float] = {}
    if layout.shards_alike:  # every maker is on the rank too, or on another stage
        return found
    names = layout.rank_components(rank)
    for number, name in enumerate(names):
        for value in dict.fromkeys(layout.model.component(name).inputs):
            entry = values[value]
            elsewhere = entry.producer is not None and not layout.runs_on(rank, entry.producer)
            here = layout.stage_of_value[value] == layout.plan.stage_of_rank(rank)
            if entry.differentiable and elsewhere and here and name in layout.differentiable:
                hops = conversion(layout.reads_in(name, value).gradient, layout.source[value].gradient, layout.plan.mesh.tp)
                most = max((_step_bytes(layout, entry, hop, rank) for hop in hops), default=0.0)
                beside = names[max(0, number - 1)]
                found[beside] = max(found.get(beside, 0.0), most + waiting.get(name, 0.0))
    return found


def handed_bytes(layout: PlanIndex, values: Mapping[str, Value], name: str) -> float:
    """Gradients of a component's inputs on a rank that runs it, as it makes them.

    Args:
        layout: the plan and its model. values: by name, as kept under the plan. name: of the component.
    """
    total = 0.0
    for number, value in enumerate(layout.model.component(name).inputs):
        entry = values[value]
        if entry.differentiable and entry.producer is not None and value not in layout.model.component(name).inputs[:number]:
            total += local_bytes(layout, entry, layout.reads_in(name, value).gradient)
    return total


def _step_bytes(layout: PlanIndex, value: Value, hop: Hop, rank: int) -> float:
    """What the rank holds of a value at the fullest moment of a hop: what it had and what it has then.

    A rank that gathers has the pieces of all before it joins them.
    """
    before, after = (bytes_here(layout, value, how, rank) for how in (hop.source, hop.target))
    if is_view(hop, layout.plan.shard_of_rank(rank)):
        return max(before, after)
    return 2 * after if hop.operation == "gather" and after else before + after


# Values that wait on a rank for their readers, and gradients for their makers, in every layout in which they lie there.


def waiting_values(
    layout: PlanIndex, values: Mapping[str, Value], rank: int, alike: AlikeOnRank | None = None
) -> dict[str, list[Wait]]:
    """Values that a rank has while it runs forward, before a component there keeps them (`waiting_bytes`).

    Every layout of a value is a storage of its own. It lives from when the value is made to the last component that reads it
    there, or to the first that keeps it. A piece of a dim is cut when it is read, so until then all that it is cut from waits.

    Args:
        layout: the plan and its model. values: by name, as kept under the plan. rank: global number.
        alike: what was counted already on the ranks of this plan; None: nothing.

    Returns:
        By value. Leaves out batches, and values of which the Model does not say who keeps them.
    """
    alike = alike or CountedKinds(layout, values).on(rank)
    names, place = layout.rank_components(rank), alike.place
    order = layout.model.component_index
    numbers = [order[name] for name in names]  # ascending
    here = [layout.model.component(name) for name in names]
    found: dict[str, list[Wait]] = {}
    for name in dict.fromkeys(value for component in here for value in (*component.inputs, *component.outputs)):
        value = values[name]
        if value.producer is not None and value.savers is not None:
            begins = bisect_right(numbers, order[value.producer])
            waits = partial(_waits, layout, value, value.savers, place, rank, begins)
            found[name] = alike.waits("values", value, waits)
    return found


def _waits(
    layout: PlanIndex, value: Value, savers: tuple[str, ...], place: Mapping[str, int], rank: int, begins: int
) -> list[Wait]:
    """`begins`: components of the rank up to the maker of the value."""
    shard, tp = layout.plan.shard_of_rank(rank), layout.plan.mesh.tp
    assert value.producer is not None
    made, here = layout.source[value.name].value, value.producer in place
    if not here and layout.stage_of_value[value.name] == layout.plan.stage_of_rank(rank):
        begins = _room_from(layout, value, rank, begins)
    last: dict[ValueLayout, int] = {}
    kept: dict[ValueLayout, int] = {made: place[value.producer]} if here and value.producer in savers else {}
    cut: list[Wait] = []
    for reading in layout.readings[value.name]:
        for name in reading.components:
            if name not in place:
                continue
            hops = conversion(made, reading.ends.value, tp) if here else ()
            storage = storage_of(hops, made, shard) if here else reading.ends.value
            while hops and hops[-1].operation in LOCAL_HOPS:
                hops = hops[:-1]
            whole = storage_of(hops, made, shard) if here else storage
            if whole != storage and not is_view(conversion(made, reading.ends.value, tp)[-1], shard):
                last[whole] = max(last.get(whole, 0), place[name] - 1)
                cut.append(Wait(place[name], place[name], bytes_here(layout, value, storage, rank)))
            elif name in savers:
                kept[storage] = min(kept.get(storage, place[name]), place[name])
            else:
                last[storage] = max(last.get(storage, 0), place[name])
    ends = {storage: kept.get(storage, last.get(storage, -1)) for storage in dict.fromkeys((*last, *kept))}
    waits = [Wait(begins, end, bytes_here(layout, value, storage, rank)) for storage, end in ends.items()]
    return [wait for wait in (*waits, *cut) if wait.first <= wait.last and wait.size_bytes]


def waiting_gradients(
    layout: PlanIndex, values: Mapping[str, Value], rank: int, alike: AlikeOnRank | None = None
) -> dict[str, list[Wait]]:
    """Gradients that a rank has while other components than their reader and their maker run (`waiting_bytes`).

    One that is a part of a larger gradient keeps all of that, until another reader adds to it. Left out is what another stage
    sends for the half for weights alone: its message is counted until then (`StageLink.late`).

    Args:
        layout: the plan and its model. values: by name, as kept under the plan. rank: global number.
        alike: what was counted already on the ranks of this plan; None: nothing.
    """
    alike = alike or CountedKinds(layout, values).on(rank)
    here = [layout.model.component(name) for name in layout.rank_components(rank)]
    found: dict[str, list[Wait]] = {}
    for value in dict.fromkeys(value for component in here for value in (*component.outputs, *component.inputs)):
        entry = values[value]
        if entry.differentiable and entry.producer is not None:
            waits = alike.waits("gradients", entry, partial(_gradient_waits, layout, values, entry, alike.place, rank))
            if waits:
                found[value] = waits
    return found


def _gradient_waits(
    layout: PlanIndex, values: Mapping[str, Value], entry: Value, place: Mapping[str, int], rank: int
) -> list[Wait]:
    """Of one value that a rank makes or reads."""
    assert entry.producer is not None
    order, names = layout.model.component_index, layout.rank_components(rank)
    halves, home = PIPELINE_ORDERS[layout.plan.pipeline_order].halves, layout.stage_of_value[entry.name]
    late = halves and not layout.wants_input_gradient(entry.producer)
    first_reader = min((place[name] for name in layout.consumers[entry.name] if name in place), default=0)
    ends = place.get(entry.producer, first_reader) + 1
    found: list[Wait] = []
    for reading in layout.readings[entry.name]:
        readers = [name for name in reading.components if name in layout.differentiable]
        local = sorted(place[name] for name in readers if name in place)
        if not readers or not (local or entry.producer in place):
            continue
        if late and not local and reading.stage != home:
            continue
        begins = local[-1] if local else bisect_left(names, min(map(order.__getitem__, readers)), key=order.__getitem__)
        if not local and reading.stage == home:
            begins = _room_until(layout, entry, rank, begins)
        size = _gradient_size(layout, entry, reading)
        whole = 0.0
        if local and not layout.is_halved(names[local[-1]]):  # else what waits between the halves keeps it
            whole = _whole_bytes(layout, values, entry.name, names[local[-1]])
        again = local[-2] if len(local) > 1 else ends
        stays = reading.stage == home and reading.ends.gradient == layout.source[entry.name].gradient
        if whole > size and (stays or len(local) > 1):  # what is sent is copied, and what is converted made anew
            found.append(Wait(max(again, ends), begins - 1, whole))
            begins = max(again, ends)
        found.append(Wait(ends, begins - 1, size))
    return found


def between_chunks(kept: KeptActivations, rank: int) -> dict[StageLink, float]:
    """Bytes of one microbatch that one chunk of a rank makes and another one there reads, by link, ascending.

    Values wait until a component keeps them, or for their last reader; a gradient from the first backward that adds to it.
    In a V the first and the last chunk of a rank are neighbours in the model.

    Args:
        kept: values under the plan. rank: global number.
    """
    layout = kept.layout
    found: dict[StageLink, float] = {}
    if layout.plan.chunks == 1:
        return found
    here = layout.rank_components(rank)
    for name in dict.fromkeys(output for component in here for output in layout.model.component(component).outputs):
        value, source = kept.values[name], layout.source[name]
        maker = layout.chunk_of[layout.model.value[name].producer or ""]
        readers = {reader: layout.chunk_of[reader] for reader in layout.consumers[name] if layout.runs_on(rank, reader)}
        later = [chunk for chunk in readers.values() if chunk != maker]
        savers = [layout.chunk_of[saver] for saver in value.savers or () if layout.runs_on(rank, saver)]
        links = []
        if later and value.savers is not None and maker not in savers:
            links.append((StageLink(maker, min(savers, default=max(later))), source.value))
        back = [chunk for reader, chunk in readers.items() if chunk != maker and reader in layout.differentiable]
        if back and value.differentiable:
            links.append((StageLink(max(back), maker), source.gradient))
        for link, how in links:
            found[link] = found.get(link, 0.0) + bytes_here(layout, value, how, rank)
    return dict(sorted(found.items()))


def _room_from(layout: PlanIndex, value: Value, rank: int, begins: int) -> int:
    """The first component beside which there is room for a value that another tp rank makes.

    A rank that only receives makes room as soon as its communication before has ended, long before the other one sends.

    Args:
        begins: components of the rank before the maker of the value.
    """
    names, order = layout.rank_components(rank), layout.model.component_index
    assert value.producer is not None
    found = 0
    for other in layout.values_at[layout.plan.stage_of_rank(rank)]:
        entry = layout.model.value[other]
        before = entry.producer is not None and order[entry.producer] < order[value.producer]
        if before and _communicates(layout, other, rank, gradient=False):
            assert entry.producer is not None
            found = max(found, sum(order[name] <= order[entry.producer] for name in names))
    return min(found, begins)


def _room_until(layout: PlanIndex, value: Value, rank: int, begins: int) -> int:
    """One more than the last component whose backward runs beside the room for a gradient of another tp rank's making.

    Args:
        begins: components of the rank before the reader whose gradient it is.
    """
    names, order = layout.rank_components(rank), layout.model.component_index
    assert value.producer is not None
    later = [
        sum(order[name] < order[entry.producer] for name in names) + (entry.producer in names)
        for entry in map(layout.model.value.__getitem__, layout.values_at[layout.plan.stage_of_rank(rank)])
        if entry.producer is not None
        and entry.differentiable
        and order[entry.producer] > order[value.producer]
        and _communicates(layout, entry.name, rank, gradient=True)
    ]
    return max(begins, min(later, default=len(names)))


def _communicates(layout: PlanIndex, value: str, rank: int, *, gradient: bool) -> bool:
    """Whether the rank takes part in converting a value of its stage, or its gradient, on the tp axis."""
    shard, tp, stage = layout.plan.shard_of_rank(rank), layout.plan.mesh.tp, layout.plan.stage_of_rank(rank)
    if layout.stage_of_value[value] != stage:
        return False
    source = layout.source[value]
    for reading in layout.readings[value]:
        ends = (reading.ends.gradient, source.gradient) if gradient else (source.value, reading.ends.value)
        for hop in conversion(*ends, tp):
            if hop.operation in POINT_TO_POINT_HOPS:
                if any(shard in pair for pair in hop_pairs(hop, tp)):
                    return True
            elif hop.operation not in LOCAL_HOPS:
                return True
    return False


def _whole_bytes(layout: PlanIndex, values: Mapping[str, Value], value: str, reader: str) -> float:
    """Of the gradient of an output of the reader that its gradient of the value is a part of; 0: of none."""
    output = dict(layout.model.component(reader).gradient_views).get(value)
    return local_bytes(layout, values[output], layout.source[output].gradient) if output else 0.0


def _gradient_size(layout: PlanIndex, value: Value, reading: Reading) -> float:
    """Of the gradient of one reading, converted as far as that sends something: what sends nothing is made when it is read."""
    storage = reading.ends.gradient
    for hop in conversion(storage, layout.source[value.name].gradient, layout.plan.mesh.tp):
        storage = storage if hop.operation in LOCAL_HOPS else hop.target
    return local_bytes(layout, value, storage)


# ZeRO 2 and 3: bytes of buckets that are whole (unsharded) on a rank while each of its components runs.
#
# The executor makes and gives up their room between computations (`parsim.program.lifetimes`), so they do not depend on how
# fast the communication is. Gradients are there from the first backward that adds to them until the computation that waits
# for
# their reduce_scatter. While they are being sent, there is room for this rank's part of the sum too. Parameters are there
# from
# the computation beside which they are gathered to the last one that needs them.


def unsharded_bytes(layout: PlanIndex, rank: int) -> dict[tuple[Phase, str, int], float]:
    """Bytes of whole buckets by phase, component of the rank and microbatch; empty below ZeRO 2.

    Args:
        layout: the plan and its model. rank: global number.

    Returns:
        Of a few actions (`parsim.program.lifetimes`), by which `HeldMoment.microbatch` counts too. A forward that is computed
        again is a phase of its own: gradients that are still being sent then may be gone in the backward. Leaves out temporary
        copies of the communication library.
    """
    if layout.plan.zero_stage < 2:
        return {}
    plan = layout.plan
    place, pipeline = plan.stage_of_rank(rank), (plan.mesh.pp, plan.microbatches, plan.chunks)
    # buckets come and go by what runs right before and after
    uses = uses_of(layout, place, few_actions(plan.pipeline_order, place, *pipeline).actions)
    found: dict[tuple[Phase, str, int], float] = {}
    sizes = {bucket.number: bucket.padded_bytes for bucket in layout.rank_buckets(rank)}
    changes = [0] * (len(uses) + 1)  # of the bytes that are whole, from one use to the next
    gradients, parameters = (windows(layout, uses, sizes, in_order=False) for windows in (gradient_windows, parameter_windows))
    for window in (*gradients, *parameters):
        size = sizes[window.bucket.number]
        begins, ends = (window.ahead, window.last) if window.parameters else (window.first, window.freed)
        if begins > ends:
            continue
        changes[begins] += size
        changes[ends + 1] -= size
        if not window.parameters and (sent := max(begins, window.last + 1)) <= ends:
            part = size // len(window.bucket.group)
            changes[sent] += part
            changes[ends + 1] -= part
    whole = accumulate(changes)
    for use, size in zip(uses, whole, strict=False):
        if layout.runs_on(rank, use.component):
            found[use.phase, use.component, use.microbatch] = float(size)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """The changes of memory by the second forward of a recomputed component, bytes of one microbatch.

    Attributes:
        saved_bytes: saved for the backward. released_bytes: of its inputs, released at that moment.
        first_bytes, fullest_bytes: where only some operators run again, the fullest moment of the first forward, and that of
            the second beyond all that is kept. None: that of the whole forward.
    """

    saved_bytes: int
    released_bytes: int = 0
    first_bytes: int = 0
    fullest_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What a rank exchanges with others.

    Attributes:
        communicators: process groups with collectives or transfers this rank takes part in; 0 for one rank alone.
        largest_message_bytes: the largest bucket or transfer; gloo keeps a scratch copy of it.
        posted_bytes: room for gradients that is there from the beginning of the step, and read by the first backwards, where
            `RankStep.pipeline` does not say.
    """

    backend: str = "nccl"
    communicators: int = 0
    largest_message_bytes: int = 0
    posted_bytes: float = 0.0


NO_TRAFFIC = Traffic()
"""A rank that communicates with nobody."""
