"""Cut a block after its residual adds, so that a transformer block becomes its attention and its MLP.

The *residual stream* is what enters the block, what embeddings make, the sums onto it, and all that is made of it without a
weight matrix (norms, views). A residual add joins two activations, one of them in the stream, and is not a sum of attention
scores and their bias. Calls after the last one stay with it if they use no parameters (the activation that ends a residual
block of a convolutional network). Where a branch is normalised before its sum, the cut is before that norm. What a shard
makes up to there is a summand, of which no norm can be taken. A branch is also cut after a product that makes narrow
parameters of its own features (time step, B and C of a selective scan). Shards make summands of these, and go on with their
features.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import torch
import torch.nn.functional as functional
from torch import Tensor

from parsim.model.runnable import Ref
from parsim.model.tracing.recorder import RecordedOp, Recording

_ADDS = (Tensor.add, Tensor.add_, torch.add, Tensor.__add__, Tensor.__iadd__)
_SCORES = (functional.softmax, torch.softmax, Tensor.softmax, functional.scaled_dot_product_attention)
_PRODUCTS = (
    functional.linear,
    torch.addmm,
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
    torch.bmm,
    Tensor.bmm,
    torch.baddbmm,
)
_SPLITS = (torch.split, Tensor.split, torch.chunk, Tensor.chunk)
_NORMS = (functional.layer_norm, functional.rms_norm, torch.mean, Tensor.mean, torch.var, Tensor.var)
_MOVES = (
    *(Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, Tensor.contiguous, Tensor.transpose, torch.transpose),
    *(Tensor.squeeze, Tensor.permute, Tensor.to, functional.dropout),
)


@dataclass(slots=True)
class CallInterval:
    """Calls `start` <= number < `end` form the component `name`; `inputs` and `outputs` are value numbers."""

    name: str
    start: int
    end: int
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)


def sublayers(recording: Recording, block: CallInterval) -> list[CallInterval]:
    """The pieces of a block; the block itself if it has one.

    A piece is named after the innermost module around its weight matrices (layers.0.attention), or the first of them where
    that would be the whole block (layers.0.fc1).
    """
    adds = _residual_adds(recording, block)
    ends = [*_kept(recording, block, sorted({*adds, *_inner_sums(recording, block, adds)})), block.end]
    return pieces_at(recording, block, ends)


def pieces_at(recording: Recording, block: CallInterval, ends: Sequence[int]) -> list[CallInterval]:
    """The pieces of a block that end at these calls, named as `sublayers` says."""
    if len(ends) == 1:
        return [block]
    starts = [block.start, *ends[:-1]]
    return [CallInterval(_name(recording, block, start, end), start, end) for start, end in zip(starts, ends, strict=True)]


def _residual_adds(recording: Recording, block: CallInterval) -> list[int]:
    """Numbers of the calls after each residual add."""
    made: set[int] = set()
    stream: set[int] = set()
    found: list[int] = []
    for number in range(block.start, block.end):
        op = recording.ops[number]
        read = [entry for entry in op.reads if entry not in recording.state and entry not in recording.constants]
        stream.update(entry for entry in read if entry not in made)
        if _is_residual(op, read, stream) and not _are_scores(recording, block, number):
            found.append(_before_norm(recording, block, found[-1] if found else block.start, number) or number + 1)
            streams = True
        elif op.function is functional.embedding:
            streams = True
        else:
            streams = bool(read) and all(entry in stream for entry in read) and not _matrices(recording, op)
        outputs = [entry for _, entry in op.outputs]
        made.update(outputs)
        (stream.update if streams else stream.difference_update)(outputs)
    return found


def _inner_sums(recording: Recording, block: CallInterval, adds: Sequence[int]) -> list[int]:
    """Numbers of the calls after products of a branch's features whose narrower result is split, while the features go on."""
    inside: set[int] = set()
    found: list[int] = []
    ops = recording.ops
    for number in range(block.start, block.end):
        op = ops[number]
        outputs = [entry for _, entry in op.outputs]
        has_matrix = bool(_matrices(recording, op))
        if op.function is functional.linear and has_matrix and op.reads[0] in inside:
            given, (made, *_) = op.reads[0], outputs
            narrower = recording.tensors[made].shape[-1] < recording.tensors[given].shape[-1]
            later = ops[number + 1 : block.end]
            split = any(other.function in _SPLITS and len(other.outputs) > 1 and made in other.reads for other in later)
            if narrower and split and any(given in other.reads for other in later):
                found.append(number + 1)
        if number + 1 in adds:
            inside.difference_update(outputs)
        elif has_matrix or not inside.isdisjoint(op.reads):
            inside.update(outputs)
    return found


def _is_residual(op: RecordedOp, read: Sequence[int], stream: set[int]) -> bool:
    """A sum of two activations, one of them in the stream."""
    if op.function not in _ADDS or len(read) != 2 or any(type(value) is not Ref for value in op.arguments[:2]):
        return False
    return any(entry in stream for entry in read)


def _are_scores(recording: Recording, block: CallInterval, number: int) -> bool:
    """Whether the sum reaches a softmax or an attention without a product in between."""
    derived = {entry for _, entry in recording.ops[number].outputs}
    for op in recording.ops[number + 1 : block.end]:
        if derived.isdisjoint(op.reads):
            continue
        if op.function in _SCORES:
            return True
        if op.function not in _PRODUCTS and not _matrices(recording, op):
            derived.update(entry for _, entry in op.outputs)
    return False


def _before_norm(recording: Recording, block: CallInterval, start: int, number: int) -> int | None:
    """Where the branch that ends in this sum leaves its last matrix, if it is normalised after that; else None."""
    matrices = [place for place in range(start, number) if _matrices(recording, recording.ops[place])]
    if not matrices:
        return None
    end = matrices[-1] + 1
    derived = {entry for _, entry in recording.ops[matrices[-1]].outputs}
    normalised = False
    for op in recording.ops[end:number]:
        if not derived.isdisjoint(op.reads):
            derived.update(entry for _, entry in op.outputs)
            normalised |= op.function in _NORMS
    if not normalised:
        return None
    while recording.ops[end].function in _MOVES and not derived.isdisjoint(recording.ops[end].reads):
        end += 1
    return end


def _kept(recording: Recording, block: CallInterval, ends: Sequence[int]) -> list[int]:
    """Those with parameters on both sides; embeddings stay together."""
    kept: list[int] = []
    start = block.start
    for end in ends:
        before, after = recording.ops[start:end], recording.ops[end : block.end]
        if any(op.function is functional.embedding for op in after):
            continue
        if any(_parameters(recording, op) for op in before) and any(_parameters(recording, op) for op in after):
            kept.append(end)
            start = end
    return kept


def _parameters(recording: Recording, op: RecordedOp) -> list[int]:
    return [number for number in op.reads if number in recording.state and recording.state[number].kind == "parameter"]


def _matrices(recording: Recording, op: RecordedOp) -> list[int]:
    return [number for number in _parameters(recording, op) if recording.tensors[number].dim() >= 2]


def _name(recording: Recording, block: CallInterval, start: int, end: int) -> str:
    ops = recording.ops[start:end]
    numbers = [number for op in ops for number in _matrices(recording, op)]
    numbers = numbers or [number for op in ops for number in _parameters(recording, op)]
    owners = [recording.state[number].name.rpartition(".")[0].split(".") for number in numbers]
    shared = _beginning(owners)
    path, _, again = block.name.partition("#")
    below = ".".join(shared).startswith(f"{path}.")
    name = re.sub(r"\s", "_", ".".join(shared if below else owners[0]))
    return f"{name}#{again}" if again else name


def _beginning(paths: Sequence[Sequence[str]]) -> list[str]:
    """What all of them begin with."""
    return [steps[0] for steps in takewhile(lambda steps: len(set(steps)) == 1, zip(*paths, strict=False))]
