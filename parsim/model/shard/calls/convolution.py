"""Sharding rules of convolutions by channels, and of the norms and pools that stand beside them."""

from __future__ import annotations

from parsim.model.component import FULL, PARTIAL
from parsim.model.runnable import Ref
from parsim.model.shard.content import SHARD, SUMMAND, WHOLE, First, Piece, Refused, Rule, RuleOutcome, Step, cut_along


def bias_as(bias: Ref | None, how: First | Piece) -> dict[int, First | Piece]:
    """How a bias enters the call, if there is one."""
    return {} if bias is None else {bias.slot: how}


def convolution(step: Step) -> RuleOutcome:
    """Whole, by output channels, or by input channels; one filter per channel follows its input, other groups stay whole."""
    given, kernel, bias = step.given("input", 0), step.given("weight", 1), step.given("bias", 2)
    content = step.content(given)
    if any(step.content(value).form != FULL for value in (kernel, bias)):
        raise Refused("a convolution with a kernel that is not full")
    if content.form == FULL:
        part = None if step.given("groups", 6, 1) != 1 else step.decision(kernel, [(0, 1)])
        if part is None:
            return RuleOutcome(contents=(WHOLE,), whole_weight=True)
        return RuleOutcome(
            contents=(cut_along(len(step.made()) - len(step.shape(kernel)) + 1),),
            converted=bias_as(bias, Piece(0)) | {kernel.slot: Piece(0)},
            label="channels_out",
        )
    groups = step.given("groups", 6, 1)
    if content.form == SHARD and content.dim == 1 and not content.runs and groups == step.shape(given)[1]:
        own = step.shape(kernel)[0] // groups
        if own == 1:  # one filter for each channel
            rest = (step.given("stride", 3, 1), step.given("padding", 4, 0), step.given("dilation", 5, 1))
            return RuleOutcome(
                contents=(content,),
                converted=bias_as(bias, Piece(0, content.blocks)) | {kernel.slot: Piece(0, content.blocks)},
                function=step.op.function,
                arguments=(given, kernel, bias, *rest, groups // step.ways),
            )
    if groups != 1 or content.form != SHARD or content.dim != 1:
        raise Refused("a convolution that is grouped, or of a tensor not cut by channels")
    return RuleOutcome(
        contents=(SUMMAND,),
        converted=bias_as(bias, First()) | {kernel.slot: Piece(1, content.blocks)},
        label="channels_in",
    )


def batch_norm(step: Step) -> RuleOutcome:
    """By channels, running statistics with them."""
    given = step.given("input", 0)
    content = step.content(given)
    if content.form == FULL:
        return step.same(WHOLE)
    if content.form == PARTIAL or content.dim != 1:
        raise Refused("batch normalisation of a partial tensor or of one not cut by channels")
    others = [slot for slot in step.operands() if slot != given.slot]
    return RuleOutcome(contents=(content,), converted={slot: Piece(0, content.blocks) for slot in others})


def pool(spatial: int, *, linear: bool) -> Rule:
    """A pool over the last `spatial` dims; an average passes summands."""

    def rule(step: Step) -> RuleOutcome:
        given = step.given("input", 0)
        content = step.content(given)
        if content.form == PARTIAL and not linear:
            raise Refused("a maximum of a partial tensor")
        if content.form == SHARD and content.dim >= len(step.shape(given)) - spatial:
            raise Refused("a pool over a dim that is cut")
        return step.same(content)

    return rule
