"""Which operators can be sharded how: one table from recorded torch functions to rules (`RULES`).

A call that is not in the table is done whole by every shard where its operands are full and it draws no random numbers
(`parsim.model.shard.propagate`). Contents of tensors are full, partial or shard (`parsim.model.shard.content`). The matrix
rules are those of Shoeybi et al., "Megatron-LM" (2019), section 3; the rest is what linear, elementwise and data-moving
calls do to them.

Random numbers: what all shards hold alike is masked alike, and the pieces of a cut tensor independently. The generators of all
shards of a component must begin its forward with one seed, which depends on the samples and on nothing else
(`parsim.execute.numerics` sees to it). A call on full tensors or summands then draws the same numbers in every shard. A call
on pieces draws from a stream of its shard, and leaves the generator with a next seed that is again the same for all. So the
shards equal one process that draws the mask of a cut tensor piece by piece from the same streams.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from parsim.model.component import FULL, PARTIAL
from parsim.model.runnable import Nested, Ref
from parsim.model.shard.content import (
    LARGEST_OF_PART,
    SHARD,
    SUMMAND,
    WHOLE,
    Content,
    Refused,
    Rule,
    RuleOutcome,
    ShardNumber,
    Step,
    cut_along,
)
from parsim.model.total_loss import class_sums
from parsim.private import FakeTensor, OpOverload, OpOverloadPacket

# --- calls that only move data: where the cut dim of a tensor goes; summands pass through all of them ------------------


def moving(place: Callable[[Step, Content], RuleOutcome]) -> Rule:
    """A rule for one moved tensor (the first argument): `place` is asked only where it is cut."""

    def rule(step: Step) -> RuleOutcome:
        content = step.content(step.given("input", 0))
        return place(step, content) if content.form == SHARD else step.same(content)

    return rule


def carried(before: Sequence[int], after: Sequence[int], content: Content) -> Content | None:
    """The cut of a tensor of shape `before` that is reshaped to `after`; None if no single dim is cut any more.

    A cut of dim d in b blocks divides the flat array into prod(before[:d]) * b runs, each of which is cut in pieces.
    """
    if content.runs:
        return None if list(before) != list(after) else content
    runs = math.prod(before[: content.dim]) * content.blocks
    outer = 1
    for place, size in enumerate(after):
        if runs % outer == 0 and size > runs // outer and size % (runs // outer) == 0:
            return cut_along(place, runs // outer)
        outer *= size
    return None


def reshaped(step: Step, content: Content) -> RuleOutcome:
    """view, reshape, flatten, unflatten, squeeze, unsqueeze: sizes that name the cut dim become local ones."""
    given = step.given("input", 0)
    if any(isinstance(value, torch.dtype) for value in step.op.arguments):
        raise Refused("a view as another dtype does not keep the dims of a cut tensor")
    before, after = step.shape(given), step.made()
    made = carried(before, after, content)
    if made is None:
        raise Refused(f"reshaping {before} to {after} spreads dim {content.dim}, which is cut, over several dims")
    return RuleOutcome(contents=(made,), function=Tensor.reshape, arguments=(given, step.local(after, made.dim)))


def permuted(step: Step, content: Content) -> RuleOutcome:
    """permute, transpose and the like: the call on a probe whose sizes number its dims tells where the cut dim goes."""
    probe = torch.empty(tuple(range(2, 2 + len(step.shape(step.given("input", 0))))), device="meta")
    keywords = {name: value for name, value in step.op.keywords if name != "input"}
    made = step.op.function(probe, *step.op.arguments[1:], **keywords)
    return step.same(content._replace(dim=list(made.shape).index(content.dim + 2)))


def expanded(step: Step, content: Content) -> RuleOutcome:
    given, after = step.given("input", 0), step.made()
    dim = content.dim + len(after) - len(step.shape(given))
    return RuleOutcome(contents=(content._replace(dim=dim),), function=Tensor.expand, arguments=(given, step.local(after, dim)))


def unbound(step: Step, content: Content) -> RuleOutcome:
    """unbind, select: one dim goes."""
    dim = step.given("dim", 1, 0) % len(step.shape(step.given("input", 0)))
    if dim == content.dim:
        raise Refused(f"{step.name} takes dim {dim} apart, which is cut")
    return step.same(content._replace(dim=content.dim - (dim < content.dim)))


def indexed(step: Step, content: Content) -> RuleOutcome:
    """x[...] with integers, slices, None and an ellipsis; the cut dim must be taken whole, or in whole runs."""
    rank = len(step.shape(step.given("input", 0)))
    index = step.op.arguments[1]
    items = list(index) if isinstance(index, tuple) else [index]
    if any(not (item is None or item is Ellipsis or type(item) in (int, slice)) for item in items):
        raise Refused("a cut tensor is indexed by a tensor, a list or a mask")
    taken = sum(item is not None and item is not Ellipsis for item in items)
    if not any(item is Ellipsis for item in items):
        items.append(Ellipsis)
    at = next(place for place, item in enumerate(items) if item is Ellipsis)
    items[at : at + 1] = [slice(None)] * (rank - taken)
    read = made = 0
    for item in items:
        if item is not None:
            if read == content.dim:
                return step.same(content._replace(dim=made)) if item == slice(None) else _run_taken(step, content, items, made)
            read += 1
        made += type(item) is not int
    raise AssertionError("an index runs over every dim")


def _run_taken(step: Step, content: Content, items: list[object], made: int) -> RuleOutcome:
    """x[..., a:b, ...] that is one or several whole runs of the cut dim, all else taken whole."""
    given = step.given("input", 0)
    size, item = step.shape(given)[content.dim], items[content.dim]
    others = [other for place, other in enumerate(items) if place != content.dim]
    if not isinstance(item, slice) or len(items) != len(step.shape(given)) or any(other != slice(None) for other in others):
        raise Refused(f"x[{item}] takes a part of dim {content.dim}, which is cut, and others")
    start, stop, stride = item.indices(size)
    runs = _runs(content, size)
    edges = [0, *accumulate(runs)]
    if stride != 1 or start not in edges or stop not in edges or start >= stop:
        raise Refused(f"x[{item}] takes a part of dim {content.dim}, which is cut in runs of {runs}")
    taken = runs[edges.index(start) : edges.index(stop)]
    arguments = (given, content.dim, start // step.ways, (stop - start) // step.ways)
    return RuleOutcome(contents=(_in_runs(made, taken),), function=torch.narrow, arguments=arguments)


def _runs(content: Content, size: int) -> tuple[int, ...]:
    """Sizes of the runs of a cut dim."""
    return content.runs or (size // content.blocks,) * content.blocks


def _in_runs(dim: int, runs: Sequence[int]) -> Content:
    return cut_along(dim, len(runs)) if len(set(runs)) == 1 else cut_along(dim, 1, tuple(runs))


def divided(step: Step, content: Content) -> RuleOutcome:
    """split, chunk: along another dim nothing changes; along the cut one each run must lie within one part."""
    given = step.given("input", 0)
    dim = step.given("dim", 2, 0) % len(step.shape(given))
    if dim != content.dim:
        return step.same(content)
    sizes = [step.made(number)[dim] for number in range(len(step.op.outputs))]
    runs = _runs(content, step.shape(given)[dim])
    edges, ends = [0, *accumulate(runs)], [0, *accumulate(sizes)]
    if not set(ends) <= set(edges):
        raise Refused(f"dim {dim} is cut in runs of {runs}, which do not fall to parts of {sizes}")
    parts = [runs[edges.index(start) : edges.index(stop)] for start, stop in pairwise(ends)]
    return RuleOutcome(
        contents=tuple(_in_runs(dim, part) for part in parts),
        function=torch.split,
        arguments=(given, [size // step.ways for size in sizes], dim),
    )


def repeated(step: Step, content: Content) -> RuleOutcome:
    """repeat_interleave by a number: a run of entries becomes a longer run."""
    given, times = step.given("input", 0), step.given("repeats", 1)
    dim = step.given("dim", 2)
    if type(times) is not int or dim is None:
        raise Refused(f"{step.name} with repeats per entry, or over all dims")
    if dim % len(step.shape(given)) != content.dim:
        return step.same(content)
    return step.same(content._replace(runs=tuple(size * times for size in content.runs)))


def joined(step: Step) -> RuleOutcome:
    """cat: pieces along another dim than they are cut in, or summands."""
    operands = step.operands()
    cuts = {step.contents[slot] for slot in operands} - {WHOLE}
    if not cuts:
        return step.same(WHOLE)
    if len(cuts) > 1 or type(step.given("tensors", 0)) is not Nested:
        raise Refused(f"cat joins tensors with different contents: {sorted(cuts)}")
    (content,) = cuts
    dim = step.given("dim", 1, 0) % len(step.made())
    if content.form == SHARD and dim == content.dim:
        raise Refused(f"cat joins along dim {dim}, which is cut")
    full = [slot for slot in operands if step.contents[slot].form == FULL]
    return RuleOutcome(contents=(content,), converted=dict.fromkeys(full, content))


def stacked(step: Step) -> RuleOutcome:
    """stack: tensors that are cut alike."""
    contents = {step.contents[slot] for slot in step.operands()}
    if len(contents) != 1:
        raise Refused(f"stack joins tensors with different contents: {sorted(contents)}")
    (content,) = contents
    if content.form != SHARD:
        return step.same(content)
    dim = step.given("dim", 1, 0) % len(step.made())
    return step.same(content._replace(dim=content.dim + (dim <= content.dim)))


def reduced(step: Step, content: Content) -> RuleOutcome:
    """mean, sum over dims that are not cut."""
    rank = len(step.shape(step.given("input", 0)))
    dims = step.given("dim", 1)
    if dims is None:
        raise Refused(f"{step.name} runs over all dims, one of which is cut")
    over = {dim % rank for dim in ((dims,) if isinstance(dims, int) else dims)}
    if content.dim in over:
        raise Refused(f"{step.name} runs over dim {content.dim}, which is cut")
    gone = 0 if len(step.made()) == rank else sum(dim < content.dim for dim in over)
    return step.same(content._replace(dim=content.dim - gone))


# --- random numbers of a shard ----------------------------------------------------------------------------------------


def drawn_by_shard(function: Callable[..., Any], shard: int, value: Tensor, *arguments: Any, **keywords: Any) -> Any:
    """`function(value, ...)` with the random numbers of that shard.
    Seeds make a chain that never comes back to one it had, whatever else was drawn in between."""
    if isinstance(value, FakeTensor) or value.is_meta:
        return function(value, *arguments, **keywords)
    generator = generator_of(value.device)
    seed = generator.initial_seed()
    generator.manual_seed(_seed(seed, str(shard)))
    try:
        return function(value, *arguments, **keywords)
    finally:
        generator.manual_seed(_seed(seed, "all"))


def generator_of(device: torch.device) -> torch.Generator:
    """The generator that calls on this device draw from."""
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def _seed(seed: int, stream: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed} {stream}".encode(), digest_size=7).digest(), "big")


# --- elementwise ------------------------------------------------------------------------------------------------------


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
        slot: cut._replace(dim=len(shapes[slot]) + cut.dim)
        for slot in operands
        if step.contents[slot].form == FULL and len(shapes[slot]) >= -cut.dim and shapes[slot][cut.dim] == size
    }
    return replace(step.same(cut._replace(dim=len(step.made()) + cut.dim)), converted=converted)


def _sum(step: Step) -> RuleOutcome:
    """a + b, a - b: a full summand of partial ones is contributed by shard 0 alone."""
    if PARTIAL not in step.forms:
        return _together(step)
    if SHARD in step.forms:
        raise Refused("a sum of a partial tensor and a cut one")
    if any(type(value) is not Ref for value in step.op.arguments[:2]):
        raise Refused("a number added to a partial tensor would be added by every shard")
    full = [slot for slot in step.operands() if step.contents[slot].form == FULL]
    return RuleOutcome(contents=(SUMMAND,), converted=dict.fromkeys(full, SUMMAND))


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
    if PARTIAL in step.forms:
        raise Refused(f"{step.name} of a partial tensor is not linear")
    return _together(step)


def _dropout(step: Step) -> RuleOutcome:
    """What all shards hold alike gets one mask, a cut tensor independent masks (`parsim.model.shard.rules`)."""
    content = step.content(step.given("input", 0))
    p, training = step.given("p", 1, 0.5), step.given("training", 2, True)
    if not (p and training) or content.form != SHARD:
        return step.same(content)
    if step.op.function is not functional.dropout:
        raise Refused(f"{step.name} drops whole channels, which a cut tensor may share with other shards")
    arguments = (functional.dropout, ShardNumber(), step.given("input", 0), p, training, step.given("inplace", 3, False))
    return RuleOutcome(contents=(content,), function=drawn_by_shard, arguments=arguments)


def _softmax(step: Step) -> RuleOutcome:
    outcome = _pointwise(step)
    (content,) = outcome.contents
    dim = step.given("dim", 1)
    if content.form == SHARD and (dim is None or dim % len(step.made()) == content.dim):
        raise Refused(f"softmax runs over dim {content.dim}, which is cut")
    return outcome


# --- products with weights and of activations -------------------------------------------------------------------------


_RUNS = (1, 2, 3)
"""A fused projection has as many runs as results: two with a gate, three for query, key and value."""


def _entering(*operands: tuple[Ref | None, Content]) -> dict[int, Content]:
    """Contents with which full operands enter a call; None: there is no bias."""
    return {value.slot: content for value, content in operands if value is not None}


def _matrix(step: Step, given: Ref, weight: Ref, bias: Ref | None, out: int) -> RuleOutcome:
    """y = x W + b with the output features in dim `out` of W: whole, by columns (features) or by rows."""
    content = step.content(given)
    last = len(step.shape(given)) - 1
    if any(step.content(value).form != FULL for value in (weight, bias)) or len(step.shape(weight)) != 2:
        raise Refused(f"{step.name} with a weight that is not full")
    if content.form == PARTIAL:
        raise Refused(f"{step.name} of a partial tensor: sum it first")
    if content.form == FULL:
        part = step.decision(weight, [(out, blocks) for blocks in _RUNS], runs_dim=out)
        if part is None:
            return step.whole()
        if part.dim != out:
            raise Refused(f"{part.name} is cut along its input, which is full")
        features = cut_along(last, part.blocks, part.runs)
        converted = _entering((bias, features._replace(dim=0)), (weight, features._replace(dim=out)))
        return RuleOutcome(contents=(features,), converted=converted, label="column")
    if content.dim != last:
        return RuleOutcome(contents=(content,), whole_weight=True)
    converted = _entering((bias, SUMMAND), (weight, content._replace(dim=1 - out)))
    return RuleOutcome(contents=(SUMMAND,), converted=converted, label="row")


def _linear(step: Step) -> RuleOutcome:
    return _matrix(step, step.given("input", 0), step.given("weight", 1), step.given("bias", 2), out=0)


def _addmm(step: Step) -> RuleOutcome:
    """Linear layers written as torch.addmm(b, x, W), W [inputs, outputs]."""
    bias = step.given("input", 0)
    if len(step.shape(bias)) != 1 or {name for name, _ in step.op.keywords} & {"beta", "alpha"}:
        raise Refused("addmm with factors or with a bias that is not one row")
    return _matrix(step, step.given("mat1", 1), step.given("mat2", 2), bias, out=1)


def _batched_matmul(step: Step) -> RuleOutcome:
    """Product of two activations, cut in a leading dim (heads); a full one beside a cut one is taken piece by piece."""
    pair = step.op.arguments[:2]
    if all(type(factor) is Ref for factor in pair) and (rows := _rows(step, *pair)) is not None:
        return rows
    if all(step.content(factor) == WHOLE for factor in pair):
        return step.same(WHOLE)
    cuts = {
        (content.dim - len(step.shape(factor)), content.blocks)
        for factor in pair
        if (content := step.content(factor)).form == SHARD and not content.runs
    }
    back, blocks = min(cuts, default=(0, 1))
    rank = len(step.made())
    if len(cuts) != 1 or any(step.content(factor).form == PARTIAL for factor in pair) or back >= -2 or rank < -back:
        raise Refused("matmul of tensors that are not cut in the same leading dim")
    converted = {
        factor.slot: cut_along(len(step.shape(factor)) + back, blocks)
        for factor in pair
        if step.content(factor) == WHOLE and len(step.shape(factor)) >= -back and step.shape(factor)[back] > 1
    }
    label = "queries" if converted else "attention"
    return RuleOutcome(contents=(cut_along(rank + back, blocks),), converted=converted, label=label)


def _rows(step: Step, one: Ref, other: Ref) -> RuleOutcome | None:
    """Rows of the first factor beside a full second one: of a parameter [rows, inputs], or of a cut activation."""
    content, rank = step.content(one), len(step.made())
    if step.content(other) != WHOLE or rank < 2:
        return None
    if one.slot in step.state and len(step.shape(one)) == 2 and len(step.shape(other)) > 2:
        if step.decision(one, [(0, 1)]) is None:
            return step.whole()
        return RuleOutcome(contents=(cut_along(rank - 2),), converted={one.slot: cut_along(0)}, label="column")
    if content.form != SHARD or content.runs or content.dim != len(step.shape(one)) - 2:
        return None
    return RuleOutcome(contents=(cut_along(rank - 2, content.blocks),))


# --- convolutions by channels, norms and pools ------------------------------------------------------------------------


def _convolution(step: Step) -> RuleOutcome:
    """Whole, by output channels, or by input channels; one filter per channel follows its input, other groups stay whole."""
    given, kernel, bias = step.given("input", 0), step.given("weight", 1), step.given("bias", 2)
    content, groups = step.content(given), step.given("groups", 6, 1)
    if any(step.content(value).form != FULL for value in (kernel, bias)):
        raise Refused("a convolution with a kernel that is not full")
    if content.form == FULL:
        if groups != 1 or step.decision(kernel, [(0, 1)]) is None:
            return step.whole()
        channels = cut_along(len(step.made()) - len(step.shape(kernel)) + 1)
        converted = _entering((bias, cut_along(0)), (kernel, cut_along(0)))
        return RuleOutcome(contents=(channels,), converted=converted, label="channels_out")
    if content.form != SHARD or content.dim != 1:
        raise Refused("a convolution that is grouped, or of a tensor not cut by channels")
    per_channel = step.shape(kernel)[0] == groups == step.shape(given)[1] and not content.runs
    if per_channel:
        rest = (step.given("stride", 3, 1), step.given("padding", 4, 0), step.given("dilation", 5, 1))
        return RuleOutcome(
            contents=(content,),
            converted=_entering((bias, cut_along(0, content.blocks)), (kernel, cut_along(0, content.blocks))),
            function=step.op.function,
            arguments=(given, kernel, bias, *rest, groups // step.ways),
        )
    if groups != 1:
        raise Refused("a convolution that is grouped, or of a tensor not cut by channels")
    converted = _entering((bias, SUMMAND), (kernel, cut_along(1, content.blocks)))
    return RuleOutcome(contents=(SUMMAND,), converted=converted, label="channels_in")


def _batch_norm(step: Step) -> RuleOutcome:
    """By channels, running statistics with them."""
    given = step.given("input", 0)
    content = step.content(given)
    if content.form == FULL:
        return step.same(WHOLE)
    if content.form == PARTIAL or content.dim != 1:
        raise Refused("batch normalisation of a partial tensor or of one not cut by channels")
    others = [slot for slot in step.operands() if slot != given.slot]
    return RuleOutcome(contents=(content,), converted=dict.fromkeys(others, cut_along(0, content.blocks)))


def _pool(spatial: int, *, linear: bool) -> Rule:
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


def _layer_norm(step: Step) -> RuleOutcome:
    """Over full features."""
    given = step.given("input", 0)
    content = step.content(given)
    first = len(step.shape(given)) - len(step.given("normalized_shape", 1))
    if content.form == PARTIAL or (content.form == SHARD and content.dim >= first):
        raise Refused("layer normalisation of a partial tensor or of one cut in the dims it runs over")
    return step.same(content)


# --- experts ----------------------------------------------------------------------------------------------------------


EXPERT_PRODUCTS = ("transformers::grouped_mm_fallback", "aten::_grouped_mm")
"""Products of tokens, sorted by expert, with one table per expert; operators without a Python function of their own."""


def grouped_product(step: Step) -> RuleOutcome:
    """y = x W[expert of the row], W [experts, inputs, outputs]: by columns, or by rows where x is cut.
    So every shard has its part of all experts, and which experts the tokens choose changes nothing between shards. A table is a
    parameter [experts, features, features], or its transpose."""
    tokens, weight = step.op.arguments[:2]
    content, table = step.content(tokens), step.content(weight)
    others = [slot for slot in step.operands() if slot not in (tokens.slot, weight.slot)]
    if len(step.shape(tokens)) != 2 or any(step.contents[slot].form != FULL for slot in others):
        raise Refused("a product with experts whose tokens are no rows, or whose offsets are not full")
    if content.form == FULL:
        part = step.decision(weight, [(2, 1), (2, 2)])
        if table.form == SHARD and table.dim == 2:
            return RuleOutcome(contents=(cut_along(1, table.blocks),), label="column")
        if part is not None:
            converted = {weight.slot: cut_along(2, part.blocks)}
            return RuleOutcome(contents=(cut_along(1, part.blocks),), converted=converted, label="column")
        if table != WHOLE:
            raise Refused("the tables of experts are cut along their input, which is full")
        return step.whole()
    if content.form != SHARD or content.dim != 1 or content.runs:
        raise Refused("a product with experts of tokens that are summands, or cut in several rows")
    inputs = cut_along(1, content.blocks)
    if weight.slot in step.state:
        return RuleOutcome(contents=(SUMMAND,), converted={weight.slot: inputs}, label="row")
    if table != inputs:
        raise Refused("the tables of experts are not cut as the tokens' features are")
    return RuleOutcome(contents=(SUMMAND,), label="row")


def scanned(step: Step) -> RuleOutcome:
    """A selective scan by features: dim 1 of [batch, features, length], dim 0 of its state matrix, skip and bias."""
    x, dt, a, b, c, d, z, bias = step.op.arguments[:8]
    cuts = {content for each in (x, dt, z) if (content := step.content(each)) != WHOLE}
    if not cuts and step.forms == {FULL}:
        return step.same(WHOLE)
    if len(cuts) != 1 or {step.content(each) for each in (a, b, c, d, bias)} != {WHOLE}:
        raise Refused("a selective scan whose operands are cut in different ways, or whose states are not full")
    (cut,) = cuts
    if cut.form != SHARD or cut.dim != 1 or cut.runs:
        raise Refused("a selective scan of a tensor that is not cut by features")
    features = cut_along(0, cut.blocks)
    entering = _entering((x, cut), (dt, cut), (z, cut), (a, features), (d, features), (bias, features))
    return replace(step.same(cut), converted={slot: to for slot, to in entering.items() if step.contents[slot] == WHOLE})


def _transposed(step: Step) -> RuleOutcome:
    """A transpose; that of the tables of experts decides how these are cut."""
    table = step.op.arguments[0] if step.op.arguments else None
    if type(table) is not Ref or table.slot not in step.state or step.op.outputs[0][1] not in step.tables:
        return moving(permuted)(step)
    part = step.decision(table, [(1, 1), (1, 2), (2, 1)])
    if part is None:
        return step.whole()
    cut = cut_along(part.dim, part.blocks)
    return RuleOutcome(contents=permuted(step, cut).contents, converted={table.slot: cut})


# --- attention over a shard's own heads -------------------------------------------------------------------------------


def _attention(step: Step) -> RuleOutcome:
    """Scaled dot-product attention over its own heads; query and key heads may differ in number (grouped queries)."""
    query, key, value = (step.given(name, place) for place, name in enumerate(("query", "key", "value")))
    mask, dropout = step.given("attn_mask", 3), step.given("dropout_p", 4, 0.0)
    content, masked = step.content(query), step.content(mask)
    if all(step.content(operand) == WHOLE for operand in (query, key, value, mask)):
        return step.same(WHOLE)
    if content.form != SHARD or content.dim != len(step.shape(query)) - 3 or content.blocks > 1:
        raise Refused("attention whose query is not cut by heads")
    converted: dict[int, Content] = {}
    takes_heads = {step.content(operand) for operand in (key, value)} != {content}  # from all heads of keys and values
    if takes_heads:
        if {step.content(operand).form for operand in (key, value)} != {FULL}:
            raise Refused("attention whose key and value are not cut by heads as its query is, nor full")
        if step.shape(key)[-3] == step.shape(query)[-3]:
            converted = {operand.slot: cut_along(len(step.shape(operand)) - 3) for operand in (key, value)}
    picks = takes_heads and not converted  # those that its queries use, which are fewer
    if type(mask) is Ref and len(step.shape(mask)) >= 3 and step.shape(mask)[-3] > 1:
        heads = cut_along(len(step.shape(mask)) - 3)
        if masked == WHOLE:
            converted[mask.slot] = heads
        elif masked != heads:
            raise Refused("attention with a mask that is cut, but not by heads")
    elif masked != WHOLE:
        raise Refused("attention with a mask that is not full")
    outcome = RuleOutcome(contents=(content,), converted=converted, label="queries" if takes_heads else "attention")
    if not dropout and not picks:
        return outcome
    causal, scale, grouped = step.given("is_causal", 5), step.given("scale", 6), step.given("enable_gqa", 7)
    arguments = (ShardNumber(), step.ways, query, key, value, mask, dropout, bool(causal), scale, bool(grouped))
    return replace(outcome, function=partial(attention_of_shard, picks=picks), arguments=arguments)


def attention_of_shard(
    shard: int,
    ways: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    grouped: bool,
    *,
    picks: bool = False,
) -> Tensor:
    """Scaled dot-product attention of the query heads of one shard.
    `key`, `value`: of the shard's own heads; if `picks`, of all heads, which are fewer than the query heads."""
    if picks:
        key, value = (_heads_for(heads, query.shape[-3], shard, ways) for heads in (key, value))
        grouped = key.shape[-3] < query.shape[-3]
    attention = partial(functional.scaled_dot_product_attention, scale=scale, enable_gqa=grouped)
    arguments = (query, key, value, mask, dropout, causal)
    result: Tensor = drawn_by_shard(attention, shard, *arguments) if dropout else attention(*arguments)
    return result


def _heads_for(heads: Tensor, queries: int, shard: int, ways: int) -> Tensor:
    """Key or value heads that the `queries` query heads of this shard read; one per query where groups are torn."""
    group = queries * ways // heads.shape[-3]
    if queries % group == 0 or group % queries == 0:
        return heads.narrow(-3, shard * queries // group, max(1, queries // group))
    numbers = torch.arange(shard * queries, (shard + 1) * queries, device=heads.device) // group
    return heads.index_select(-3, numbers)


# --- torch's multi-head attention as one call (nn.MultiheadAttention, nn.TransformerEncoder) --------------------------


_SIGNATURE = inspect.signature(functional.multi_head_attention_forward)
_UNUSUAL = ("bias_k", "bias_v", "static_k", "static_v", "add_zero_attn", "use_separate_proj_weight")


def _multi_head(step: Step) -> RuleOutcome:
    """Whole, or the input projections by heads and the output projection by rows.
    Every shard does whole, and this leaves out: other widths of keys and values, biases added to them, and masks per head."""
    bound = _SIGNATURE.bind(*step.op.arguments, **dict(step.op.keywords))
    bound.apply_defaults()
    given = bound.arguments
    if step.forms != {FULL}:
        raise Refused("multi-head attention of a tensor that is not full: it projects whole features")
    mask, weight = given["attn_mask"], given["in_proj_weight"]
    is_usual = (
        type(weight) is Ref
        and all(given[name] is None or given[name] is False for name in _UNUSUAL)
        and len(step.shape(given["query"])) == 3
        and (type(mask) is not Ref or len(step.shape(mask)) == 2)
        and (given["average_attn_weights"] or not given["need_weights"])
    )
    if not is_usual or step.decision(weight, [(0, 3)]) is None:
        return step.whole()
    parts = {
        "in_proj_weight": cut_along(0, 3),
        "in_proj_bias": cut_along(0, 3),
        "out_proj_weight": cut_along(1),
        "out_proj_bias": SUMMAND,
    }
    heads = int(given["num_heads"])
    query, key, value = given["query"], given["key"], given["value"]
    return RuleOutcome(
        contents=(SUMMAND,) * len(step.op.outputs),
        converted=_entering(*((given[name], content) for name, content in parts.items())),
        function=heads_of_shard,
        arguments=(
            ShardNumber(),
            step.ways,
            heads // step.ways,
            (1 + (query != key)) if key == value else 3,
            query,
            key,
            value,
            *(given[name] for name in parts),
            given["dropout_p"] if given["training"] else 0.0,
            given["key_padding_mask"],
            mask,
            given["is_causal"],
            given["need_weights"],
        ),
        label="heads+row",
        limit=heads,
    )


def heads_of_shard(
    shard: int,
    ways: int,
    heads: int,
    products: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    in_weight: Tensor,
    in_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    dropout: float,
    padding: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """`torch.nn.functional.multi_head_attention_forward` for the `heads` of one shard: summands of its results.
    `products`: 1 if query, key and value are one tensor, 2 if key and value are; the projections are as many products."""
    length, samples, _ = query.shape
    width = in_weight.shape[0] // 3
    query, key, value = (
        part.view(part.shape[0], samples * heads, width // heads).transpose(0, 1).view(samples, heads, part.shape[0], -1)
        for part in _projected(products, (query, key, value), in_weight, in_bias)
    )
    if causal and padding is None and not need_weights:
        mask = None
    elif padding is not None:
        causal = False
    mask = _joined(mask, padding, query.dtype)
    averaged: Tensor | None = None
    if need_weights:  # attention as torch does it where the weights are asked for
        scores = (query * math.sqrt(1.0 / query.shape[-1])) @ key.transpose(-2, -1)
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
        if dropout:
            weights = drawn_by_shard(functional.dropout, shard, weights, dropout)
        made = weights @ value
        averaged = weights.mean(1) / ways
    else:
        arguments = (query, key, value, mask, dropout, causal)
        attention = functional.scaled_dot_product_attention
        made = drawn_by_shard(attention, shard, *arguments) if dropout else attention(*arguments)
    rows = made.permute(2, 0, 1, 3).contiguous().view(samples * length, width)
    out = functional.linear(rows, out_weight, out_bias)
    return out.view(length, samples, out.shape[1]), averaged


def _projected(products: int, given: tuple[Tensor, Tensor, Tensor], weight: Tensor, bias: Tensor | None) -> list[Tensor]:
    """Queries, keys and values, by as many products as torch makes."""
    width = weight.shape[0] // 3
    sizes = {1: [3], 2: [1, 2], 3: [1, 1, 1]}[products]
    rows = [width * size for size in sizes]
    weights = torch.split(weight, rows)
    biases = [None] * len(sizes) if bias is None else list(torch.split(bias, rows))
    projected: list[Tensor] = []
    for tensor, size, part, added in zip(given, sizes, weights, biases, strict=False):
        made = functional.linear(tensor, part, added)
        if size == 1:
            projected.append(made)
        else:
            apart = made.view(*made.shape[:-1], size, width).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()
            projected += apart.unbind(0)
    return projected


def _joined(mask: Tensor | None, padding: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """What is added to the scores [samples, heads, length, keys]; of boolean masks what is True counts nothing."""

    def added(mask: Tensor) -> Tensor:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf) if mask.dtype == torch.bool else mask

    per_score = None if mask is None else added(mask)[None, None]
    per_key = None if padding is None else added(padding)[:, None, None]
    if per_score is None or per_key is None:
        return per_key if per_score is None else per_score
    return per_score + per_key


# --- vocabulary: tables cut by rows, the largest of cut logits, the sums of a cross-entropy ---------------------------


def _embedding(step: Step) -> RuleOutcome:
    """Whole, by rows of the table (a shard looks up the tokens it has, zeros for others), or by features."""
    tokens, table = step.given("input", 0), step.given("weight", 1)
    if step.content(tokens).form != FULL or step.content(table).form != FULL:
        raise Refused("an embedding of tokens or from a table that are not full")
    if step.given("max_norm", 3) is not None or step.given("scale_grad_by_freq", 5, False) or step.given("sparse", 6, False):
        return step.whole()
    part = step.decision(table, [(0, 1), (1, 1)])
    if part is None:
        return step.whole()
    converted = {table.slot: cut_along(part.dim)}
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
    Row `padding` of the whole table gets no gradient."""
    rows = table.shape[0]
    local = tokens - shard * rows
    foreign = (local < 0) | (local >= rows)
    local_padding = None if padding is None or padding // rows != shard else padding % rows
    return functional.embedding(local.masked_fill(foreign, 0), table, local_padding).masked_fill(foreign.unsqueeze(-1), 0)


def _largest(step: Step) -> RuleOutcome:
    """amax: over a cut dim each shard has the largest of its part."""
    given = step.given("input", 0)
    content, dims = step.content(given), step.given("dim", 1, ())
    if content.form == PARTIAL:
        raise Refused("amax of a partial tensor is not linear")
    if content.form == FULL:
        return step.same(WHOLE)
    rank = len(step.shape(given))
    over = {dim % rank for dim in ((dims,) if isinstance(dims, int) else dims)} or set(range(rank))
    if content.dim not in over:
        return reduced(step, content)
    if step.tensors[step.op.outputs[0][1]].differentiable:
        raise Refused(f"amax runs over dim {content.dim}, which is cut, and has a gradient")
    classes = step.shape(given)[content.dim]
    arguments = (given, dims, bool(step.given("keepdim", 2, False)), content.dim, classes, ShardNumber())
    return RuleOutcome(contents=(LARGEST_OF_PART,), function=largest_of_shard, arguments=arguments, label="vocabulary")


def largest_of_shard(logits: Tensor, dims: Any, keepdim: bool, cut: int, classes: int, shard: int) -> Tensor:
    """amax over the entries [shard * n, ...) of dim `cut` that there are of `classes`: the last shard may end in padding."""
    size = logits.shape[cut]
    return torch.amax(logits.narrow(cut, 0, min(size, classes - shard * size)), dims, keepdim)


def _class_sums_of_shard(step: Step) -> RuleOutcome:
    """The sums of a cross-entropy over the classes that a shard has."""
    logits, maximum, target = step.op.arguments[:3]
    contents = [step.content(operand) for operand in (logits, maximum, target)]
    if contents == [WHOLE] * 3:
        return step.same(WHOLE)
    if contents != [cut_along(len(step.shape(logits)) - 1), WHOLE, WHOLE]:
        raise Refused("the sums of a cross-entropy over logits that are cut, but not by classes")
    arguments = (logits, maximum, target, ShardNumber(), step.shape(logits)[-1])
    return RuleOutcome(contents=(SUMMAND,), function=class_sums, arguments=arguments, label="vocabulary")


# --- the table --------------------------------------------------------------------------------------------------------


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
    functional.multi_head_attention_forward: _multi_head,
    functional.embedding: _embedding,
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), _convolution),
    functional.batch_norm: _batch_norm,
    **dict.fromkeys((functional.layer_norm, functional.rms_norm), _layer_norm),
    **dict.fromkeys((functional.softmax, torch.softmax, Tensor.softmax), _softmax),
    **dict.fromkeys((torch.amax, Tensor.amax), _largest),
    class_sums: _class_sums_of_shard,
    **dict.fromkeys((functional.max_pool1d, torch.max_pool1d), _pool(1, linear=False)),
    **dict.fromkeys((functional.max_pool2d, torch.max_pool2d), _pool(2, linear=False)),
    **dict.fromkeys((functional.max_pool3d, torch.max_pool3d), _pool(3, linear=False)),
    **dict.fromkeys((functional.avg_pool1d, functional.adaptive_avg_pool1d), _pool(1, linear=True)),
    **dict.fromkeys((functional.avg_pool2d, functional.adaptive_avg_pool2d), _pool(2, linear=True)),
    **dict.fromkeys((functional.avg_pool3d, functional.adaptive_avg_pool3d), _pool(3, linear=True)),
    **dict.fromkeys(_SUMS, _sum),
    **dict.fromkeys(PRODUCTS, _product),
    **dict.fromkeys(QUOTIENTS, _quotient),
    **dict.fromkeys(_POINTWISE, _pointwise),
    **dict.fromkeys(DROPOUTS, _dropout),
    **dict.fromkeys(SAME, moving(Step.same)),
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten), moving(reshaped)),
    **dict.fromkeys((Tensor.unflatten, torch.unflatten, Tensor.view_as, Tensor.reshape_as), moving(reshaped)),
    **dict.fromkeys((Tensor.squeeze, torch.squeeze, Tensor.unsqueeze, torch.unsqueeze), moving(reshaped)),
    **dict.fromkeys((Tensor.permute, torch.permute, Tensor.transpose, torch.transpose), _transposed),
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


OPERATORS: dict[str, Rule] = {**dict.fromkeys(EXPERT_PRODUCTS, grouped_product), "parsim::selective_scan": scanned}
"""Rules of operators without a Python function of their own."""


def rule_of(function: Callable[..., Any]) -> Rule | None:
    """The rule of a recorded function; None if it has none of its own."""
    if function not in RULES and isinstance(function, OpOverload | OpOverloadPacket):
        packet = function.overloadpacket if isinstance(function, OpOverload) else function
        return OPERATORS.get(packet._qualified_op_name)
    return RULES.get(function)
