"""Cut a block after its residual adds, so that a transformer block becomes its attention and its MLP.

The *residual stream* is what enters the block, what embeddings make, the sums onto it, and all that is made of it without a
weight matrix (norms, views). A residual add joins two activations, one of them in the stream. Calls after the last one stay
with it if they use no parameters (the activation that ends a residual block of a convolutional network).
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

_ADDS = (Tensor.add, Tensor.add_, torch.add)


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
    ends = [*_kept(recording, block, _residual_adds(recording, block)), block.end]
    if len(ends) == 1:
        return [block]
    starts = [block.start, *ends[:-1]]
    return [CallInterval(_name(recording, block, start, end), start, end) for start, end in zip(starts, ends, strict=True)]


def _residual_adds(recording: Recording, block: CallInterval) -> list[int]:
    """Numbers of the calls after each residual add."""
    made: set[int] = set()
    stream: set[int] = set()
    found = []
    for number in range(block.start, block.end):
        op = recording.ops[number]
        read = [entry for entry in op.reads if entry not in recording.state and entry not in recording.constants]
        stream.update(entry for entry in read if entry not in made)
        if _is_sum(op, read) and any(entry in stream for entry in read):
            found.append(number + 1)
            streams = True
        elif op.function is functional.embedding:
            streams = True
        else:
            streams = bool(read) and all(entry in stream for entry in read) and not _matrices(recording, op)
        outputs = [entry for _, entry in op.outputs]
        made.update(outputs)
        (stream.update if streams else stream.difference_update)(outputs)
    return found


def _is_sum(op: RecordedOp, read: Sequence[int]) -> bool:
    return op.function in _ADDS and len(read) == 2 and all(type(value) is Ref for value in op.arguments[:2])


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
