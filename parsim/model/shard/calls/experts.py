"""Products of tokens, sorted by expert, with one table per expert: cut inside every expert, as an MLP is.

So every shard has its part of all experts, and which experts the tokens choose changes nothing between shards. A table is a
parameter [experts, features, features], or its transpose.
"""

from __future__ import annotations

from parsim.model.component import FULL
from parsim.model.runnable import CallProgram, Ref
from parsim.model.shard.content import SHARD, SUMMAND, WHOLE, Piece, Refused, RuleOutcome, Step, cut_along
from parsim.model.shard.moves import moving, permuted

NAMES = ("transformers::grouped_mm_fallback", "aten::_grouped_mm")
"""Operators without a Python function of their own."""


def grouped_product(step: Step) -> RuleOutcome:
    """y = x W[expert of the row], W [experts, inputs, outputs]: by columns, or by rows where x is cut."""
    given, weight = step.op.arguments[0], step.op.arguments[1]
    content, table = step.content(given), step.content(weight)
    others = [slot for slot in step.operands() if slot not in (given.slot, weight.slot)]
    if len(step.shape(given)) != 2 or any(step.contents[slot].form != FULL for slot in others):
        raise Refused("a product with experts whose tokens are no rows, or whose offsets are not full")
    if content.form == FULL:
        part = step.decision(weight, [(2, 1), (2, 2)]) if weight.slot in step.state else None
        if table.form == SHARD and table.dim == 2:
            return RuleOutcome(contents=(cut_along(1, table.blocks),), label="column")
        if part is not None:
            return RuleOutcome(
                contents=(cut_along(1, part.blocks),), converted={weight.slot: Piece(2, part.blocks)}, label="column"
            )
        if table != WHOLE:
            raise Refused("the tables of experts are cut along their input, which is full")
        return RuleOutcome(contents=(WHOLE,), whole_weight=True)
    if content.form != SHARD or content.dim != 1 or content.runs:
        raise Refused("a product with experts of tokens that are summands, or cut in several rows")
    if weight.slot in step.state:
        return RuleOutcome(contents=(SUMMAND,), converted={weight.slot: Piece(1, content.blocks)}, label="row")
    if table != cut_along(1, content.blocks):
        raise Refused("the tables of experts are not cut as the tokens' features are")
    return RuleOutcome(contents=(SUMMAND,), label="row")


def transposed(step: Step) -> RuleOutcome:
    """A transpose; that of the tables of experts decides how these are cut."""
    given = step.op.arguments[0] if step.op.arguments else None
    if type(given) is not Ref or given.slot not in step.state or step.op.outputs[0][1] not in step.tables:
        return moving(permuted)(step)
    part = step.decision(given, [(1, 1), (1, 2), (2, 1)])
    if part is None:
        return RuleOutcome(contents=(WHOLE,), whole_weight=True)
    made = permuted(step, cut_along(part.dim, part.blocks)).contents
    return RuleOutcome(contents=made, converted={given.slot: Piece(part.dim, part.blocks)})


def tables_of(program: CallProgram, is_product: frozenset[int]) -> frozenset[int]:
    """Slots that calls read as tables of experts.

    Args:
        is_product: numbers of the calls that are such products.
    """
    read = (program.ops[number].arguments[1] for number in is_product)
    return frozenset(entry.slot for entry in read if type(entry) is Ref)
