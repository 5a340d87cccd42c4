"""Which shardings cut nothing but a vocabulary: these may cut it into pieces that do not divide it.

As in Megatron-LM, pieces are equal and the last one ends in rows that stand for no token. The rows are zeros. No token looks
them up, and the parts of the loss leave their logits out. So their gradients are zeros as well, and no optimizer moves them.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.nn.functional as functional
from torch import Tensor

from parsim.model.component import FULL, MAXIMUM, PARTIAL
from parsim.model.objective.vocabulary import class_sums
from parsim.model.runnable import CallProgram
from parsim.model.shard.content import SHARD, Piece, operands_of
from parsim.model.shard.propagation import Propagation
from parsim.model.shard.rules import PRODUCTS, QUOTIENTS, SAME, Functions

_VOCABULARY: Functions = (functional.embedding, functional.linear, torch.addmm, torch.amax, Tensor.amax, class_sums)
_KNOWN: Functions = (*_VOCABULARY, *SAME, *PRODUCTS, *QUOTIENTS, torch.tanh, Tensor.tanh)
"""What may be done to padding: zeros stay zeros, and so do their gradients. The rules of the others know nothing of it."""


def vocabulary_size(program: CallProgram, found: Propagation, logits: Collection[str]) -> int:
    """Rows of the vocabulary, if a sharding cuts nothing else; 0 if it does.

    Args:
        program: of the whole component. found: what the sharding does. logits: the values that the parts of the loss read.
    """
    state = {slot for _, slot in program.state}
    sizes: set[int] = set()
    for op, outcome in zip(program.ops, found.outcomes, strict=True):
        slots = (*operands_of(op), *(slot for _, slot in op.outputs))
        pieces = {slot: how for slot, how in outcome.converted.items() if type(how) is Piece}
        ends = [(slot, *found.contents[slot][1:]) for slot in slots if found.contents[slot].form == SHARD]
        ends += [(slot, *how) for slot, how in pieces.items()]
        if not ends:
            continue
        if op.function not in _KNOWN or outcome.limit:
            return 0
        if op.function in QUOTIENTS and any(found.contents[slot].form == SHARD for slot in operands_of(op)[1:]):
            return 0  # divided by zero
        if not pieces.keys() <= state or any(blocks > 1 or runs for _, _, blocks, runs in ends):
            return 0
        sizes.update(program.tensors[slot].shape[dim] for slot, dim, _, _ in ends)
    if len(sizes) != 1 or found.rule not in ("vocabulary", "column"):
        return 0
    outputs = zip(program.outputs, found.outputs, strict=True)
    made = {name for (name, _, _), form in outputs if form not in (FULL, PARTIAL, MAXIMUM)}
    if (found.rule == "column" and not made) or not made <= set(logits):
        return 0
    return sizes.pop()
