"""Sharding rules of calls that only move data: where the cut dim of a tensor goes. Summands pass through all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from parsim.model.component import FULL
from parsim.model.runnable import Nested
from parsim.model.shard.content import SHARD, WHOLE, Content, Refused, Rule, RuleOutcome, Step, cut_along


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
