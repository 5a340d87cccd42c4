"""Which operators can be sharded how: one table from recorded torch functions to rules.

A call that is not in the table is done whole by every shard where its operands are full and it draws no random numbers
(`parsim.model.shard.unlisted`). Contents of tensors are full, partial or shard (`parsim.model.shard.content`). The matrix
rules are those of Shoeybi et al., "Megatron-LM" (2019), section 3; the rest is what linear, elementwise and data-moving
calls do to them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from parsim.model.component import FULL, PARTIAL
from parsim.model.objective.vocabulary import class_sums
from parsim.model.runnable import Ref
from parsim.model.shard.calls import experts
from parsim.model.shard.calls.convolution import batch_norm, bias_as, convolution, pool
from parsim.model.shard.calls.multi_head import multi_head
from parsim.model.shard.calls.vocabulary import class_sums_of_shard, embedding, largest
from parsim.model.shard.content import (
    SHARD,
    SUMMAND,
    WHOLE,
    First,
    Piece,
    Refused,
    Rule,
    RuleOutcome,
    ShardNumber,
    Step,
    cut_along,
)
from parsim.model.shard.grouped_queries import attention_of_shard
from parsim.model.shard.moves import (
    divided,
    expanded,
    indexed,
    joined,
    moving,
    permuted,
    reduced,
    repeated,
    reshaped,
    same,
    stacked,
    unbound,
)
from parsim.model.shard.randomness import drawn_by_shard

_RUNS = (1, 2, 3)
"""A fused projection has as many runs as results: two with a gate, three for query, key and value."""


def _forms(step: Step) -> set[str]:
    return {step.contents[slot].form for slot in step.operands()}


def _together(step: Step) -> RuleOutcome:
    """Elementwise with broadcasting: where one operand is cut the others are cut alike."""
    operands = step.operands()
    shapes = {slot: step.tensors[slot].shape for slot in operands}
    cuts = {
        content._replace(dim=content.dim - len(shapes[slot]))
        for slot in operands
        if (content := step.contents[slot]).form == SHARD
    }
    if not cuts:
        return step.same(WHOLE)
    if len(cuts) > 1:
        raise Refused("an elementwise call on tensors that are cut in different dims")
    (cut,) = cuts
    size = step.made()[cut.dim]
    converted = {
        slot: Piece(len(shapes[slot]) + cut.dim, cut.blocks, cut.runs)
        for slot in operands
        if step.contents[slot].form == FULL and len(shapes[slot]) >= -cut.dim and shapes[slot][cut.dim] == size
    }
    made = cut._replace(dim=len(step.made()) + cut.dim)
    return RuleOutcome(contents=(made,) * len(step.op.outputs), converted=converted)


def _sum(step: Step) -> RuleOutcome:
    """a + b, a - b: a full summand of partial ones is contributed by shard 0 alone."""
    forms = _forms(step)
    if PARTIAL not in forms:
        return _together(step)
    if SHARD in forms:
        raise Refused("a sum of a partial tensor and a cut one")
    if any(type(value) is not Ref for value in step.op.arguments[:2]):
        raise Refused("a number added to a partial tensor would be added by every shard")
    full = [slot for slot in step.operands() if step.contents[slot].form == FULL]
    return RuleOutcome(contents=(SUMMAND,), converted={slot: First() for slot in full})


def _product(step: Step) -> RuleOutcome:
    """a * b with one partial factor."""
    forms = [step.content(value).form for value in step.op.arguments[:2]]
    if PARTIAL not in forms:
        return _together(step)
    if sorted(forms) != [FULL, PARTIAL]:
        raise Refused("a product of a partial tensor and one that is not full")
    return step.same(SUMMAND)


def _quotient(step: Step) -> RuleOutcome:
    """a / b with a partial dividend."""
    if step.content(step.op.arguments[1]).form == PARTIAL:
        raise Refused("a quotient by a partial tensor is not linear")
    return _product(step)


def _pointwise(step: Step) -> RuleOutcome:
    """Nothing nonlinear may be done to summands."""
    if PARTIAL in _forms(step):
        raise Refused(f"{_name(step)} of a partial tensor is not linear")
    return _together(step)


def _dropout(step: Step) -> RuleOutcome:
    """What all shards hold alike gets one mask, a cut tensor independent masks (`parsim.model.shard.randomness`)."""
    content = step.content(step.given("input", 0))
    p, training = step.given("p", 1, 0.5), step.given("training", 2, True)
    if not (p and training) or content.form != SHARD:
        return step.same(content)
    if step.op.function is not functional.dropout:
        raise Refused(f"{_name(step)} drops whole channels, which a cut tensor may share with other shards")
    arguments = (functional.dropout, ShardNumber(), step.given("input", 0), p, training, step.given("inplace", 3, False))
    return RuleOutcome(contents=(content,), function=drawn_by_shard, arguments=arguments)


def _softmax(step: Step) -> RuleOutcome:
    outcome = _pointwise(step)
    (content,) = outcome.contents
    dim = step.given("dim", 1)
    if content.form == SHARD and (dim is None or dim % len(step.made()) == content.dim):
        raise Refused(f"softmax runs over dim {content.dim}, which is cut")
    return outcome


def _matrix(step: Step, given: Ref, weight: Ref, bias: Ref | None, out: int) -> RuleOutcome:
    """y = x W + b with the output features in dim `out` of W: whole, by columns (features) or by rows."""
    content = step.content(given)
    last = len(step.shape(given)) - 1
    if any(step.content(value).form != FULL for value in (weight, bias)) or len(step.shape(weight)) != 2:
        raise Refused(f"{_name(step)} with a weight that is not full")
    if content.form == PARTIAL:
        raise Refused(f"{_name(step)} of a partial tensor: sum it first")
    if content.form == FULL:
        part = step.decision(weight, [(out, blocks) for blocks in _RUNS], runs_dim=out)
        if part is None:
            return RuleOutcome(contents=(WHOLE,), whole_weight=True)
        if part.dim != out:
            raise Refused(f"{part.name} is cut along its input, which is full")
        return RuleOutcome(
            contents=(cut_along(last, part.blocks, part.runs),),
            converted=bias_as(bias, Piece(0, part.blocks, part.runs)) | {weight.slot: Piece(out, part.blocks, part.runs)},
            label="column",
        )
    if content.dim != last:
        return RuleOutcome(contents=(content,), whole_weight=True)
    return RuleOutcome(
        contents=(SUMMAND,),
        converted=bias_as(bias, First()) | {weight.slot: Piece(1 - out, content.blocks, content.runs)},
        label="row",
    )


def _linear(step: Step) -> RuleOutcome:
    return _matrix(step, step.given("input", 0), step.given("weight", 1), step.given("bias", 2), out=0)


def _addmm(step: Step) -> RuleOutcome:
    """Linear layers written as torch.addmm(b, x, W), W [inputs, outputs]."""
    bias = step.given("input", 0)
    if len(step.shape(bias)) != 1 or {name for name, _ in step.op.keywords} & {"beta", "alpha"}:
        raise Refused("addmm with factors or with a bias that is not one row")
    return _matrix(step, step.given("mat1", 1), step.given("mat2", 2), bias, out=1)


def _batched_matmul(step: Step) -> RuleOutcome:
    """Of two activations, cut in a leading dim (heads); a full one beside a cut one is taken piece by piece."""
    pair = step.op.arguments[:2]
    if all(type(entry) is Ref for entry in pair) and (rows := _rows(step, *pair)) is not None:
        return rows
    contents = {step.content(entry) for entry in pair}
    if contents == {WHOLE}:
        return step.same(WHOLE)
    cuts = {
        (content.dim - len(step.shape(entry)), content.blocks)
        for entry in pair
        if (content := step.content(entry)).form == SHARD and not content.runs
    }
    if len(cuts) != 1 or any(step.content(entry).form == PARTIAL for entry in pair):
        raise Refused("matmul of tensors that are not cut in the same leading dim")
    ((back, blocks),) = cuts
    rank = len(step.made())
    if back >= -2 or rank < -back:
        raise Refused("matmul of tensors that are not cut in the same leading dim")
    converted: dict[int, First | Piece] = {
        entry.slot: Piece(len(step.shape(entry)) + back, blocks)
        for entry in pair
        if step.content(entry) == WHOLE and len(step.shape(entry)) >= -back and step.shape(entry)[back] > 1
    }
    label = "queries" if converted else "attention"
    return RuleOutcome(contents=(cut_along(rank + back, blocks),), converted=converted, label=label)


def _rows(step: Step, one: Ref, other: Ref) -> RuleOutcome | None:
    """Rows of the first factor beside a full second one: of a parameter [rows, inputs], or of a cut activation."""
    content, rank = step.content(one), len(step.made())
    if step.content(other) != WHOLE or rank < 2:
        return None
    if one.slot in step.state and len(step.shape(one)) == 2 and len(step.shape(other)) > 2:
        part = step.decision(one, [(0, 1)])
        if part is None:
            return RuleOutcome(contents=(WHOLE,), whole_weight=True)
        return RuleOutcome(contents=(cut_along(rank - 2),), converted={one.slot: Piece(0)}, label="column")
    if content.form != SHARD or content.runs or content.dim != len(step.shape(one)) - 2:
        return None
    return RuleOutcome(contents=(cut_along(rank - 2, content.blocks),))


_ATTENTION = (("query", None), ("key", None), ("value", None), ("attn_mask", None), ("dropout_p", 0.0))
_ATTENTION_KEYWORDS = ("is_causal", "scale", "enable_gqa")


def _attention(step: Step) -> RuleOutcome:
    """Scaled dot-product attention over its own heads; query and key heads may differ in number (grouped queries)."""
    query, key, value, mask, dropout = (step.given(name, place, other) for place, (name, other) in enumerate(_ATTENTION))
    contents = {step.content(entry) for entry in (query, key, value)}
    if contents == {WHOLE} and step.content(mask) == WHOLE:
        return step.same(WHOLE)
    rank = len(step.shape(query))
    content = step.content(query)
    heads = rank - 3
    if content.form != SHARD or content.dim != heads or content.blocks > 1:
        raise Refused("attention whose query is not cut by heads")
    converted, grouped = _own_keys(step, query, key, value)
    if type(mask) is Ref and len(step.shape(mask)) >= 3 and step.shape(mask)[-3] > 1:
        place = len(step.shape(mask)) - 3
        if step.content(mask) == WHOLE:
            converted[mask.slot] = Piece(place)
        elif step.content(mask) != cut_along(place):
            raise Refused("attention with a mask that is cut, but not by heads")
    elif step.content(mask) != WHOLE:
        raise Refused("attention with a mask that is not full")
    picks = grouped and not converted.keys() & {key.slot, value.slot}
    outcome = RuleOutcome(contents=(content,), converted=converted, label="queries" if grouped else "attention")
    if not dropout and not picks:
        return outcome
    causal, scale, gqa = (step.given(name, 5 + place) for place, name in enumerate(_ATTENTION_KEYWORDS))
    own = (ShardNumber(), step.ways, query, key, value, mask, dropout, bool(causal), scale, bool(gqa))
    return replace(outcome, function=partial(attention_of_shard, picks=picks), arguments=own)


def _own_keys(step: Step, query: Ref, key: Ref, value: Ref) -> tuple[dict[int, First | Piece], bool]:
    """What is converted, and whether a shard picks from all key and value heads those that its queries use."""
    content, forms = step.content(query), {step.content(entry).form for entry in (key, value)}
    if {step.content(entry) for entry in (key, value)} == {content}:
        return {}, False
    if forms != {FULL}:
        raise Refused("attention whose key and value are not cut by heads as its query is, nor full")
    if step.shape(key)[-3] == step.shape(query)[-3]:
        return {entry.slot: Piece(len(step.shape(entry)) - 3) for entry in (key, value)}, True
    return {}, True


def _layer_norm(step: Step) -> RuleOutcome:
    """Over full features."""
    given = step.given("input", 0)
    content = step.content(given)
    kept = len(step.shape(given)) - len(step.given("normalized_shape", 1))
    if content.form == PARTIAL or (content.form == SHARD and content.dim >= kept):
        raise Refused("layer normalisation of a partial tensor or of one cut in the dims it runs over")
    return step.same(content)


def _name(step: Step) -> str:
    return str(getattr(step.op.function, "__name__", step.op.function))


Functions = tuple[Callable[..., Any], ...]
_SUMS: Functions = (
    *(Tensor.add, Tensor.add_, torch.add, Tensor.sub, Tensor.sub_, torch.sub),
    *(Tensor.__add__, Tensor.__radd__, Tensor.__iadd__, Tensor.__sub__, Tensor.__isub__),
)
PRODUCTS: Functions = (Tensor.mul, Tensor.mul_, torch.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__)
QUOTIENTS: Functions = (Tensor.div, Tensor.div_, torch.div, Tensor.true_divide, torch.true_divide)
_POINTWISE: Functions = (
    *(functional.relu, torch.relu, torch.relu_, Tensor.relu, functional.relu6, functional.leaky_relu, functional.hardtanh),
    *(functional.elu, functional.selu, functional.celu, functional.gelu, functional.silu, functional.mish),
    *(functional.hardswish, functional.hardsigmoid, functional.softplus, functional.logsigmoid),
    *(functional.tanh, torch.tanh, Tensor.tanh, functional.sigmoid, torch.sigmoid, Tensor.sigmoid),
    *(torch.exp, Tensor.exp, torch.log, Tensor.log, torch.sqrt, Tensor.sqrt, torch.rsqrt, Tensor.rsqrt),
    *(torch.pow, Tensor.pow, torch.square, Tensor.square, torch.abs, Tensor.abs, torch.clamp, Tensor.clamp),
    *(torch.sin, Tensor.sin, torch.cos, Tensor.cos, torch.erf, Tensor.erf, Tensor.__rsub__, Tensor.__rtruediv__),
    *(torch.where, Tensor.where, torch.masked_fill, Tensor.masked_fill, torch.maximum, torch.minimum),
    *(Tensor.eq, Tensor.ne, Tensor.lt, Tensor.le, Tensor.gt, Tensor.ge, Tensor.__eq__, Tensor.__ne__),
)
SAME: Functions = (
    *(torch.neg, Tensor.neg, Tensor.contiguous, Tensor.clone, torch.clone, Tensor.to),
    *(Tensor.float, Tensor.double, Tensor.type, Tensor.type_as, Tensor.detach),
)
"""Shapes and places of elements stay."""
DROPOUTS: Functions = (functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d)

RULES: dict[Callable[..., Any], Rule] = {
    functional.linear: _linear,
    torch.addmm: _addmm,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm), _batched_matmul),
    functional.scaled_dot_product_attention: _attention,
    functional.multi_head_attention_forward: multi_head,
    functional.embedding: embedding,
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), convolution),
    functional.batch_norm: batch_norm,
    **dict.fromkeys((functional.layer_norm, functional.rms_norm), _layer_norm),
    **dict.fromkeys((functional.softmax, torch.softmax, Tensor.softmax), _softmax),
    **dict.fromkeys((torch.amax, Tensor.amax), largest),
    class_sums: class_sums_of_shard,
    **dict.fromkeys((functional.max_pool1d, torch.max_pool1d), pool(1, linear=False)),
    **dict.fromkeys((functional.max_pool2d, torch.max_pool2d), pool(2, linear=False)),
    **dict.fromkeys((functional.max_pool3d, torch.max_pool3d), pool(3, linear=False)),
    **dict.fromkeys((functional.avg_pool1d, functional.adaptive_avg_pool1d), pool(1, linear=True)),
    **dict.fromkeys((functional.avg_pool2d, functional.adaptive_avg_pool2d), pool(2, linear=True)),
    **dict.fromkeys((functional.avg_pool3d, functional.adaptive_avg_pool3d), pool(3, linear=True)),
    **dict.fromkeys(_SUMS, _sum),
    **dict.fromkeys(PRODUCTS, _product),
    **dict.fromkeys(QUOTIENTS, _quotient),
    **dict.fromkeys(_POINTWISE, _pointwise),
    **dict.fromkeys(DROPOUTS, _dropout),
    **dict.fromkeys(SAME, moving(same)),
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten), moving(reshaped)),
    **dict.fromkeys((Tensor.unflatten, torch.unflatten, Tensor.view_as, Tensor.reshape_as), moving(reshaped)),
    **dict.fromkeys((Tensor.squeeze, torch.squeeze, Tensor.unsqueeze, torch.unsqueeze), moving(reshaped)),
    **dict.fromkeys((Tensor.permute, torch.permute, Tensor.transpose, torch.transpose), experts.transposed),
    **dict.fromkeys((Tensor.swapaxes, torch.swapaxes, Tensor.movedim, torch.movedim, Tensor.t, torch.t), moving(permuted)),
    **dict.fromkeys((Tensor.expand, Tensor.expand_as), moving(expanded)),
    **dict.fromkeys((Tensor.unbind, torch.unbind, Tensor.select, torch.select), moving(unbound)),
    Tensor.__getitem__: moving(indexed),
    **dict.fromkeys((Tensor.split, torch.split, Tensor.chunk, torch.chunk), moving(divided)),
    **dict.fromkeys((Tensor.repeat_interleave, torch.repeat_interleave), moving(repeated)),
    **dict.fromkeys((torch.cat, torch.concat), joined),
    torch.stack: stacked,
    **dict.fromkeys((Tensor.mean, torch.mean, Tensor.sum, torch.sum), moving(reduced)),
}


def rule_of(function: Callable[..., Any]) -> Rule | None:
    """The rule of a recorded function; None if it has none of its own."""
    found = RULES.get(function)
    if found is None and isinstance(function, OpOverload | OpOverloadPacket):
        packet = function.overloadpacket if isinstance(function, OpOverload) else function
        return experts.grouped_product if packet._qualified_op_name in experts.NAMES else None
    return found
