"""The fullest moment of a rank that holds several numbers of microbatches: chunks of a pipeline, and backwards in halves.

Between the halves of a backward all saved activations stay, beside the gradient that has arrived at every operator with a
parameter. A component without parameters runs all in the first half, one that hands on no gradient all in the second. What the
first half takes was counted when the Model was traced (`SplitBackward`). Of shards and of models from sizes it is derived from
operators. That leaves out what the first half makes for a while, and parameters that enter several operators.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from parsim.model.component import Component
from parsim.work import Phase

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
        microbatch: of the action that stands for this one (`parsim.plans.few_actions`).
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
