"""How a component can be sharded: contents carried through its calls by the rules, and a search over what may be cut.

Calls without a rule: any function may be done whole by every shard on three conditions. It is given full tensors only, is
linear in the gradient (as all of torch's own are) and draws no random numbers. Operators of torch say by a tag whether they
draw.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from parsim.model.component import FULL, MAXIMUM, PARTIAL, ParameterShard
from parsim.model.runnable import CallProgram, Nested, Op, Ref, run_op
from parsim.model.shard.content import (
    SHARD,
    WHOLE,
    Content,
    Refused,
    RuleOutcome,
    Step,
    Undecided,
    cut_along,
    operands_of,
)
from parsim.model.shard.rules import DROPOUTS, PRODUCTS, QUOTIENTS, SAME, Functions, grouped_product, rule_of
from parsim.model.total_loss import class_sums
from parsim.private import TorchDispatchMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Propagation:
    """A component done in shards.

    Attributes:
        outcomes: per call. contents: by slot. parts: how parameters and buffers are cut, by name; the others stay whole.
        outputs: per output its content at the boundary: "partial", "maximum", "shard:d" or "full" (shard 0 takes its gradient).
        limit: what the number of shards must divide. rule: its name, as in `Sharding.rule`.
        whole_weights: matrices, kernels and tables that every shard applies whole.
        only_pieces: slots of the full inputs that are used piece by piece alone (they might as well come cut).
    """

    outcomes: tuple[RuleOutcome, ...]
    contents: Mapping[int, Content]
    parts: Mapping[str, ParameterShard]
    outputs: tuple[str, ...]
    limit: int
    rule: str
    whole_weights: int
    only_pieces: frozenset[int]


def propagate(
    program: CallProgram, inputs: Sequence[Content], decided: Mapping[str, ParameterShard | None], ways: int = 1
) -> Propagation:
    """Run the rules over the calls of `program`.
    `inputs`: content per input. `decided`: per weight met with a full input how it is cut, None for not at all. `ways`: the
    number of shards, which the arguments of rewritten calls are for. Raises Refused: if the component cannot be done so.
    Undecided: if a weight is met that `decided` does not name."""
    state = {slot: key.name for key, slot in program.state}
    contents: dict[int, Content] = dict.fromkeys((*state, *(slot for _, slot in program.constants)), WHOLE)
    contents.update({slot: content for (_, slot, _), content in zip(program.inputs, inputs, strict=True)})
    outcomes: list[RuleOutcome] = []
    uses: dict[str, ParameterShard | None] = {}
    drawing, runs, tables = drawing_calls(program), _consumed_in_runs(program), _tables_of_experts(program)
    for number, op in enumerate(program.ops):
        step = Step(
            op=op,
            contents=contents,
            tensors=program.tensors,
            state=state,
            decided=decided,
            ways=ways,
            runs=runs,
            tables=tables,
            draws=number in drawing,
        )
        if MAXIMUM in step.forms:
            raise Refused(f"{step.name} of the maximum of a part")
        outcome = (rule_of(op.function) or _whole_call)(step)
        if len(outcome.contents) != len(op.outputs):
            raise Refused(f"{step.name} makes {len(op.outputs)} tensors, and its rule describes {len(outcome.contents)}")
        for slot in operands_of(op):
            if slot in state:
                name, part = state[slot], None
                if (cut := outcome.converted.get(slot, WHOLE)).form == SHARD:
                    part = ParameterShard(name=name, dim=cut.dim, blocks=cut.blocks, runs=cut.runs)
                if uses.setdefault(name, part) != part:
                    raise Refused(f"{name} is used in two ways: {uses[name]} and {part}")
        for (_, slot), content in zip(op.outputs, outcome.contents, strict=True):
            if contents.get(slot, content) != content:
                raise Refused(f"{step.name} changes in place what was {contents[slot].form} and becomes {content.form}")
            contents[slot] = content
        outcomes.append(outcome)
    if any(contents[slot].form != FULL for _, slot in program.buffer_writes):
        raise Refused("a buffer is assigned a tensor that is not full")
    for name, slot, _ in program.outputs:
        content = contents[slot]
        if content.form == SHARD and (content.blocks > 1 or content.runs or content.dim == 0):
            raise Refused(f"output {name} is cut in several runs or along dim 0")
    return Propagation(
        outcomes=tuple(outcomes),
        contents=contents,
        parts={name: part for name, part in uses.items() if part is not None},
        outputs=tuple(contents[slot].text for _, slot, _ in program.outputs),
        limit=_limit(program, contents, outcomes),
        rule=_rule_name([outcome.label for outcome in outcomes]),
        whole_weights=sum(outcome.whole_weight for outcome in outcomes),
        only_pieces=_only_pieces(program, contents, outcomes),
    )


def _limit(program: CallProgram, contents: Mapping[int, Content], outcomes: Sequence[RuleOutcome]) -> int:
    """What the number of shards must divide: the sizes of all runs that are cut, and what rules ask for beyond."""
    converted = [pair for outcome in outcomes for pair in outcome.converted.items()]
    return math.gcd(
        *(
            size
            for slot, cut in (*contents.items(), *converted)
            if cut.form == SHARD
            for size in cut.runs or (program.tensors[slot].shape[cut.dim] // cut.blocks,)
        ),
        *(outcome.limit for outcome in outcomes),
    )


def _only_pieces(program: CallProgram, contents: Mapping[int, Content], outcomes: Sequence[RuleOutcome]) -> frozenset[int]:
    uses: dict[int, set[str]] = {}
    for op, outcome in zip(program.ops, outcomes, strict=True):
        for slot in operands_of(op):
            uses.setdefault(slot, set()).add(outcome.converted.get(slot, WHOLE).form)
    flowing = (slot for _, slot, flows in program.inputs if flows)
    return frozenset(slot for slot in flowing if contents[slot].form == FULL and uses.get(slot) == {SHARD})


def _rule_name(labels: Sequence[str]) -> str:
    """In order, repetitions dropped; columns before an attention over own heads are "heads", over own queries "queries"."""
    names: list[str] = []
    for label in labels:
        if label in ("attention", "queries"):
            names = [("heads" if label == "attention" else label) if name == "column" else name for name in names]
        elif label:
            names.append(label)
    return "+".join(name for name, _ in groupby(names)) or "follow"


# --- calls without a rule, and tensors taken apart in runs ------------------------------------------------------------


def _whole_call(step: Step) -> RuleOutcome:
    """The rule of calls that have none of their own."""
    if not step.forms <= {FULL}:
        raise Refused(f"{step.name} is not in the table of sharding rules, and not all that it reads is full")
    if step.draws:
        raise Refused(
            f"{step.name} is not in the table of sharding rules, and may draw random numbers or do what torch does not see"
        )
    return step.whole(weight=any(slot in step.state and len(step.tensors[slot].shape) > 1 for slot in step.operands()))


@lru_cache(maxsize=8)
def drawing_calls(program: CallProgram) -> frozenset[int]:
    """Numbers of the calls without a rule that draw random numbers, or may draw them, for all that is known."""
    return frozenset(
        number for number, op in enumerate(program.ops) if rule_of(op.function) is None and not _is_plain(program, op)
    )


def draws(program: CallProgram) -> bool:
    """Whether the component draws random numbers, as far as can be seen: what cannot be seen counts as drawing."""
    return bool(drawing_calls(program)) or any(rule_of(op.function) is not None and _drops(op) for op in program.ops)


def _drops(op: Op) -> bool:
    if op.function is functional.scaled_dot_product_attention:
        return bool(op.argument("dropout_p", 4, 0.0))
    if op.function is functional.multi_head_attention_forward:
        return bool(op.argument("training", 13, True) and op.argument("dropout_p", 10, 0.0))
    return op.function in DROPOUTS and bool(op.argument("p", 1, 0.5) and op.argument("training", 2, True))


def may_draw_on_host(program: CallProgram) -> bool:
    """Whether a component of a GPU may draw from the generator of the host, as `torch.rand(3).to(x.device)` does.
    What torch does not see may. Masks of dropout are drawn where the values are, which is on the GPU."""
    watches = (_on_meta(program, program.ops[number], on_gpu=True) for number in drawing_calls(program))
    return any(watch is None or watch.hidden or watch.drew_on_host for watch in watches)


def _is_plain(program: CallProgram, op: Op) -> bool:
    """Whether all operators of a call are torch's own and draw nothing."""
    if isinstance(getattr(op.function, "__self__", None), type):  # a torch.autograd.Function: its backward may do anything
        return False
    # Calls recorded under autocast may read floats of several types, which autocast casts and the meta device refuses.
    watches = (_on_meta(program, op, half=half) for half in (None, torch.float32))
    return any(watch is not None and not watch.hidden and not watch.drew for watch in watches)


def _on_meta(program: CallProgram, op: Op, *, half: torch.dtype | None = None, on_gpu: bool = False) -> _Draws | None:
    """A call on the meta device; None where it cannot run there, and nothing is known of it.
    `half`: the type in place of half-precision ones; None: as recorded. `on_gpu`: meta tensors stand for those of a GPU, so a
    call that makes a tensor on the host makes it there."""
    environment: list[Any] = [None] * program.slots
    for slot in operands_of(op):
        kind = program.tensors[slot]
        dtype = half if half is not None and kind.dtype in (torch.bfloat16, torch.float16) else kind.dtype
        environment[slot] = torch.empty_strided(kind.shape, kind.stride, dtype=dtype, device="meta")

    def device(value: Any) -> Any:
        return value if on_gpu and (value is None or torch.device(value).type == "cpu") else torch.device("meta")

    keywords = tuple((name, device(value) if name == "device" else value) for name, value in op.keywords)
    watch = _Draws()
    try:
        with torch.no_grad(), watch:
            run_op(replace(op, keywords=keywords, drop=()), environment)
    except Exception:
        return None
    return watch


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Whether operators draw random numbers, for a tensor of the host, or do what torch does not see (`hidden`)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drew = self.drew_on_host = self.hidden = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [entry for entry in (result if isinstance(result, list | tuple) else [result]) if isinstance(entry, Tensor)]
        draws = torch.Tag.nondeterministic_seeded in func.tags
        self.drew |= draws
        self.drew_on_host |= draws and any(entry.device.type == "cpu" for entry in made)
        self.hidden |= func.namespace not in ("aten", "prims", "prim")
        return result


@lru_cache(maxsize=8)
def _tables_of_experts(program: CallProgram) -> frozenset[int]:
    """Slots that products with experts read as their tables."""
    tables = (op.arguments[1] for op in program.ops if rule_of(op.function) is grouped_product)
    return frozenset(table.slot for table in tables if type(table) is Ref)


@lru_cache(maxsize=8)
def _consumed_in_runs(program: CallProgram) -> dict[int, tuple[int, ...]]:
    """Slots whose last dim later calls take apart in unequal parts (split, or slices that cover it), with the sizes."""
    runs: dict[int, tuple[int, ...]] = {}
    slices: dict[int, set[tuple[int, int]]] = {}
    for op in program.ops:
        given = op.arguments[0] if op.arguments else None
        if type(given) is not Ref:
            continue
        shape = program.tensors[given.slot].shape
        if op.function in (Tensor.split, torch.split) and len(op.outputs) > 1:
            sizes = [program.tensors[slot].shape for _, slot in op.outputs]
            if all(size[:-1] == shape[:-1] for size in sizes):
                runs[given.slot] = tuple(size[-1] for size in sizes)
        elif op.function is Tensor.__getitem__ and (taken := _last_slice(op, len(shape))) is not None:
            start, stop, stride = taken.indices(shape[-1])
            if stride == 1:
                slices.setdefault(given.slot, set()).add((start, stop))
    for slot, parts in slices.items():
        ordered = sorted(parts)
        edges = [start for start, _ in ordered] + [program.tensors[slot].shape[-1]]
        if edges[0] == 0 and [stop for _, stop in ordered] == edges[1:] and len(ordered) > 1:
            runs[slot] = tuple(stop - start for start, stop in ordered)
    return {slot: sizes for slot, sizes in runs.items() if len(set(sizes)) > 1}


def _last_slice(op: Op, rank: int) -> slice | None:
    """The slice of x[..., a:b], else None."""
    index = op.arguments[1]
    if type(index) is Nested or not isinstance(index, tuple) or not index or not isinstance(index[-1], slice):
        return None
    is_last = len(index) == rank or index[0] is Ellipsis
    return index[-1] if is_last and all(item in (Ellipsis, slice(None)) for item in index[:-1]) else None


# --- the ways worth offering ------------------------------------------------------------------------------------------


TRIES = 512
"""Propagations per component, after which the search has looked long enough (a block needs about fifty)."""
SLACK = 0.9
"""Of two variants with the same boundary, one that cuts at least this share of the other's parameters is as good."""

SHARE = 0.5
"""A variant that cuts less than this share of what another one cuts is not offered."""


QUERIES = "queries"
"""In the name of a rule: attention cut by heads of queries, with all heads of keys and values in every shard."""


class Variant(NamedTuple):
    """One way: contents of the inputs, what was decided on weights, and what follows."""

    inputs: tuple[Content, ...]
    decided: dict[str, ParameterShard | None]
    result: Propagation


def variants(program: CallProgram, cuttable: Sequence[bool]) -> tuple[Variant, ...]:
    """The shardings worth offering, one per rule name, in the order found.
    `cuttable`: per input whether its dim 0 is the batch; of others only biases per head may come in pieces."""
    shapes = {key.name: program.tensors[slot].shape for key, slot in program.state}

    def elements(variant: Variant) -> int:
        """Elements of the parameters and buffers that are cut."""
        return sum(math.prod(shapes[name]) for name in variant.result.parts)

    def best_of(group: Sequence[Variant]) -> Variant:
        """The variant with the most shards among those that cut about the most; the first of equals."""
        most = max(map(elements, group))
        return max((variant for variant in group if elements(variant) >= SLACK * most), key=lambda v: v.result.limit)

    def worth(variant: Variant) -> tuple[int, int]:
        return elements(variant), sum(content.form != FULL for content in variant.inputs)

    groups: dict[tuple[tuple[Content, ...], tuple[str, ...]], list[Variant]] = {}
    for variant in _all(program, cuttable):
        groups.setdefault((variant.inputs, variant.result.outputs), []).append(variant)
    named: dict[str, Variant] = {}
    for group in groups.values():
        offered = [best_of(group)]
        limit, rule = offered[0].result.limit, offered[0].result.rule
        # with keys and values whole in every shard more shards may be possible: fewer heads have those than queries
        whole_keys = [
            variant
            for variant in group
            if QUERIES in variant.result.rule.split("+") and limit % variant.result.limit and variant.result.rule != rule
        ]
        offered += [best_of(whole_keys)] if whole_keys else []
        for variant in offered:
            rule = variant.result.rule
            if rule not in named or worth(variant) > worth(named[rule]):
                named[rule] = variant
    most = max(map(elements, named.values()), default=0)
    return tuple(variant for variant in named.values() if elements(variant) >= SHARE * most)


def _all(program: CallProgram, cuttable: Sequence[bool]) -> Iterator[Variant]:
    tries = 0
    given = zip(program.inputs, cuttable, strict=True)
    sizes = frozenset(size for _, slot in program.state for size in program.tensors[slot].shape)
    choices = [_choices(program, slot, may, flows, sizes) for (_, slot, flows), may in given]
    free = frozenset(slot for (_, slot, _), possible in zip(program.inputs, choices, strict=True) if len(possible) > 1)
    for inputs in product(*choices):
        open_: list[dict[str, ParameterShard | None]] = [{}]
        while open_ and tries < TRIES:
            decided = open_.pop()
            tries += 1
            try:
                result = propagate(program, inputs, decided)
            except Undecided as question:
                open_ += [{**decided, question.name: option} for option in reversed(question.options)]
                continue
            except Refused:
                continue
            if _is_useful(program, inputs, result) and result.only_pieces.isdisjoint(free):
                yield Variant(inputs, decided, result)


def _choices(program: CallProgram, slot: int, cuttable: bool, flows: bool, sizes: frozenset[int]) -> tuple[Content, ...]:
    """Full; or cut by channels (dim 1 of images), heads (of biases) or features (the last dim of rows and sequences).
    `sizes`: of the dims of parameters. A sequence whose dim 1 is one of them, and its last none, has its features there."""
    kind = program.tensors[slot]
    dim = 2 if len(kind.shape) == 3 and (kind.shape[2] in sizes or kind.shape[1] not in sizes) else 1
    if not cuttable and not (flows and len(kind.shape) == 4):
        return (WHOLE,)
    if not kind.dtype.is_floating_point or len(kind.shape) < 2 or kind.shape[dim] == 1:
        return (WHOLE,)
    return (WHOLE, cut_along(dim))


def _is_useful(program: CallProgram, inputs: Sequence[Content], result: Propagation) -> bool:
    if result.limit < 2:
        return False
    if result.rule == "follow":
        flowing = [content for content, (_, _, flows) in zip(inputs, program.inputs, strict=True) if flows]
        return result.whole_weights == 0 and bool(flowing) and all(content.form == SHARD for content in flowing)
    return any(made != FULL for made in result.outputs)


# --- vocabularies that the shards do not divide -----------------------------------------------------------------------


_VOCABULARY: Functions = (functional.embedding, functional.linear, torch.addmm, torch.amax, Tensor.amax, class_sums)
_KNOWN: Functions = (*_VOCABULARY, *SAME, *PRODUCTS, *QUOTIENTS, torch.tanh, Tensor.tanh)
"""What may be done to padding: zeros stay zeros, and so do their gradients. The rules of the others know nothing of it."""


def vocabulary_size(program: CallProgram, result: Propagation, logits: Collection[str]) -> int:
    """Rows of the vocabulary, if a sharding cuts nothing else and so may cut it into pieces that do not divide it; else 0.

    As in Megatron-LM, pieces are equal and the last one ends in rows that stand for no token. The rows are zeros. No token
    looks them up, and the parts of the loss leave their logits out. So their gradients are zeros as well, and no optimizer
    moves them. `program`: of the whole component. `result`: what the sharding does. `logits`: the values that the parts of the
    loss read.
    """
    state = {slot for _, slot in program.state}
    sizes: set[int] = set()
    for op, outcome in zip(program.ops, result.outcomes, strict=True):
        slots = (*operands_of(op), *(slot for _, slot in op.outputs))
        pieces = {slot: cut for slot, cut in outcome.converted.items() if cut.form == SHARD}
        cuts = [(slot, result.contents[slot]) for slot in slots if result.contents[slot].form == SHARD]
        cuts += pieces.items()
        if not cuts:
            continue
        if op.function not in _KNOWN or outcome.limit:
            return 0
        if op.function in QUOTIENTS and any(result.contents[slot].form == SHARD for slot in operands_of(op)[1:]):
            return 0  # divided by zero
        if not pieces.keys() <= state or any(cut.blocks > 1 or cut.runs for _, cut in cuts):
            return 0
        sizes.update(program.tensors[slot].shape[cut.dim] for slot, cut in cuts)
    if len(sizes) != 1 or result.rule not in ("vocabulary", "column"):
        return 0
    outputs = zip(program.outputs, result.outputs, strict=True)
    made = {name for (name, _, _), form in outputs if form not in (FULL, PARTIAL, MAXIMUM)}
    if (result.rule == "column" and not made) or not made <= set(logits):
        return 0
    return sizes.pop()
