"""Sharding rules along a vocabulary: tables cut by rows, the largest of cut logits, and the sums of a cross-entropy."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from parsim.model.component import FULL, PARTIAL
from parsim.model.objective.vocabulary import class_sums
from parsim.model.shard.content import (
    LARGEST_OF_PART,
    SUMMAND,
    WHOLE,
    Piece,
    Refused,
    RuleOutcome,
    ShardNumber,
    Step,
    cut_along,
)
from parsim.model.shard.moves import reduced


def embedding(step: Step) -> RuleOutcome:
    """Whole, by rows of the table (a shard looks up the tokens it has, zeros for others), or by features."""
    tokens, table = step.given("input", 0), step.given("weight", 1)
    if step.content(tokens).form != FULL or step.content(table).form != FULL:
        raise Refused("an embedding of tokens or from a table that are not full")
    if step.given("max_norm", 3) is not None or step.given("scale_grad_by_freq", 5, False) or step.given("sparse", 6, False):
        return RuleOutcome(contents=(WHOLE,), whole_weight=True)
    part = step.decision(table, [(0, 1), (1, 1)])
    if part is None:
        return RuleOutcome(contents=(WHOLE,), whole_weight=True)
    converted = {table.slot: Piece(part.dim)}
    if part.dim == 1:
        return RuleOutcome(contents=(cut_along(len(step.made()) - 1),), converted=converted, label="column")
    padding = step.given("padding_idx", 2)
    padding = None if padding is None else padding % step.shape(table)[0]
    return RuleOutcome(
        contents=(SUMMAND,),
        converted=converted,
        function=own_rows,
        arguments=(tokens, table, ShardNumber(), padding),
        label="vocabulary",
    )


def own_rows(tokens: Tensor, table: Tensor, shard: int, padding: int | None = None) -> Tensor:
    """Rows [shard * len(table), ...) of an embedding: zeros for the tokens whose row another shard has.

    Row `padding` of the whole table gets no gradient.
    """
    rows = table.shape[0]
    local = tokens - shard * rows
    foreign = (local < 0) | (local >= rows)
    own = None if padding is None or not 0 <= padding - shard * rows < rows else padding - shard * rows
    return functional.embedding(local.masked_fill(foreign, 0), table, own).masked_fill(foreign.unsqueeze(-1), 0)


def largest(step: Step) -> RuleOutcome:
    """amax: over a cut dim each shard has the largest of its part."""
    given = step.given("input", 0)
    content, dims = step.content(given), step.given("dim", 1, ())
    if content.form == PARTIAL:
        raise Refused("amax of a partial tensor is not linear")
    if content.form == FULL:
        return step.same(WHOLE)
    rank = len(step.shape(given))
    over = {dim % rank for dim in ((dims,) if isinstance(dims, int) else dims)} or set(range(rank))
    if content.dim in over:
        if step.tensors[step.op.outputs[0][1]].differentiable:
            raise Refused(f"amax runs over dim {content.dim}, which is cut, and has a gradient")
        classes = step.shape(given)[content.dim]
        own = (given, dims, bool(step.given("keepdim", 2, False)), content.dim, classes, ShardNumber())
        return RuleOutcome(contents=(LARGEST_OF_PART,), function=largest_of_shard, arguments=own, label="vocabulary")
    return reduced(step, content)


def largest_of_shard(logits: Tensor, dims: Any, keepdim: bool, cut: int, classes: int, shard: int) -> Tensor:
    """amax over the entries [shard * n, ...) of dim `cut` that there are of `classes`: the last shard may end in padding."""
    size = logits.shape[cut]
    return torch.amax(logits.narrow(cut, 0, min(size, classes - shard * size)), dims, keepdim)


def class_sums_of_shard(step: Step) -> RuleOutcome:
    """The sums of a cross-entropy over the classes that a shard has."""
    logits, maximum, target = step.op.arguments[:3]
    contents = [step.content(entry) for entry in (logits, maximum, target)]
    if contents == [WHOLE] * 3:
        return step.same(WHOLE)
    if contents != [cut_along(len(step.shape(logits)) - 1), WHOLE, WHOLE]:
        raise Refused("the sums of a cross-entropy over logits that are cut, but not by classes")
    own = (logits, maximum, target, ShardNumber(), step.shape(logits)[-1])
    return RuleOutcome(contents=(SUMMAND,), function=class_sums, arguments=own, label="vocabulary")
