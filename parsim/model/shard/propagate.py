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
from torch.utils._python_dispatch import TorchDispatchMode

from parsim.model.component import FULL, MAXIMUM, PARTIAL, ParameterShard
from parsim.model.runnable import CallProgram, Nested, Op, Ref, run_op
from parsim.model.shard.content import (
    SHARD,
    WHOLE,
    Content,
    First,
    Piece,
    Refused,
    RuleOutcome,
    Step,
    Undecided,
    call_name,
    cut_along,
    operands_of,
)
from parsim.model.shard.rules import DROPOUTS, PRODUCTS, QUOTIENTS, SAME, Functions, grouped_product, rule_of
from parsim.model.total_loss import class_sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Propagation:
    """A component done in shards.

    Attributes:
        outcomes: per call. contents: by slot. parts: how parameters and buffers are cut, by name; the others stay whole.
        outputs: per output its content at the boundary: "partial", "maximum", "shard:d" or "full" (shard 0 takes its gradient).
        limit: what the number of shards must divide. rule: its name, as in `Sharding.rule`.
        whole_weights: matrices, kernels and tables that every shard applies whole.
        only_pieces: whether some full input is used piece by piece alone (it might as well come cut).
    """

    outcomes: tuple[RuleOutcome, ...]
    contents: Mapping[int, Content]
    parts: Mapping[str, ParameterShard]
    outputs: tuple[str, ...]
    limit: int
    rule: str
    whole_weights: int
    only_pieces: bool


def propagate(
    program: CallProgram, inputs: Sequence[Content], decided: Mapping[str, ParameterShard | None], ways: int = 1
) -> Propagation:
    """Run the rules over the calls of `program`.

    Args:
        inputs: content per input. decided: per weight met with a full input how it is cut, None for not at all.
        ways: the number of shards, which the arguments of rewritten calls are for.

    Raises:
        Refused: if the component cannot be done so. Undecided: if a weight is met that `decided` does not name.
    """
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
        outcome = _answer(step)
        for slot in operands_of(op):
            if slot in state:
                name, part = state[slot], None
                if type(how := outcome.converted.get(slot)) is Piece:
                    part = ParameterShard(name=name, dim=how.dim, blocks=how.blocks, runs=how.runs)
                if uses.setdefault(name, part) != part:
                    raise Refused(f"{name} is used in two ways: {uses[name]} and {part}")
        for (_, slot), content in zip(op.outputs, outcome.contents, strict=True):
            if contents.get(slot, content) != content:
                raise Refused(f"{call_name(op)} changes in place what was {contents[slot].form} and becomes {content.form}")
            contents[slot] = content
        outcomes.append(outcome)
    if any(contents[slot].form != FULL for _, slot in program.buffer_writes):
        raise Refused("a buffer is assigned a tensor that is not full")
    outputs = _outputs(program, contents)
    return Propagation(
        outcomes=tuple(outcomes),
        contents=contents,
        parts={name: part for name, part in uses.items() if part is not None},
        outputs=outputs,
        limit=_limit(program, contents, outcomes),
        rule=_rule_name([outcome.label for outcome in outcomes]),
        whole_weights=sum(outcome.whole_weight for outcome in outcomes),
        only_pieces=_only_pieces(program, contents, outcomes),
    )


def _answer(step: Step) -> RuleOutcome:
    if any(step.contents[slot].form == MAXIMUM for slot in step.operands()):
        raise Refused(f"{step.name} of the maximum of a part")
    outcome = (rule_of(step.op.function) or _whole_call)(step)
    if len(outcome.contents) != len(step.op.outputs):
        raise Refused(f"{step.name} makes {len(step.op.outputs)} tensors, and its rule describes {len(outcome.contents)}")
    return outcome


def _outputs(program: CallProgram, contents: Mapping[int, Content]) -> tuple[str, ...]:
    found = []
    for name, slot, _ in program.outputs:
        content = contents[slot]
        if content.form == SHARD:
            if content.blocks > 1 or content.runs or content.dim == 0:
                raise Refused(f"output {name} is cut in several runs or along dim 0")
            found.append(f"{SHARD}:{content.dim}")
            continue
        found.append(content.form)
    return tuple(found)


def _limit(program: CallProgram, contents: Mapping[int, Content], outcomes: Sequence[RuleOutcome]) -> int:
    cuts = [(slot, *content[1:]) for slot, content in contents.items() if content.form == SHARD]
    for outcome in outcomes:
        cuts += [(slot, *how) for slot, how in outcome.converted.items() if type(how) is Piece]
    return math.gcd(
        *(size for slot, dim, blocks, runs in cuts for size in runs or (program.tensors[slot].shape[dim] // blocks,)),
        *(outcome.limit for outcome in outcomes),
    )


def _only_pieces(program: CallProgram, contents: Mapping[int, Content], outcomes: Sequence[RuleOutcome]) -> bool:
    uses: dict[int, set[type[First | Piece | None]]] = {}
    for op, outcome in zip(program.ops, outcomes, strict=True):
        for slot in operands_of(op):
            uses.setdefault(slot, set()).add(type(outcome.converted.get(slot)))
    return any(contents[slot].form == FULL and uses.get(slot) == {Piece} for _, slot, flows in program.inputs if flows)


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
    name = step.name
    if any(step.contents[slot].form != FULL for slot in step.operands()):
        raise Refused(f"{name} is not in the table of sharding rules, and not all that it reads is full")
    if step.draws:
        raise Refused(
            f"{name} is not in the table of sharding rules, and may draw random numbers or do what torch does not see"
        )
    heavy = any(slot in step.state and len(step.tensors[slot].shape) > 1 for slot in step.operands())
    return RuleOutcome(contents=(WHOLE,) * len(step.op.outputs), whole_weight=heavy)


@lru_cache(maxsize=8)
def drawing_calls(program: CallProgram) -> frozenset[int]:
    """Numbers of the calls without a rule that draw random numbers, or may draw them, for all that is known."""
    return frozenset(
        number for number, op in enumerate(program.ops) if rule_of(op.function) is None and not _is_plain(program, op)
    )


def draws(program: CallProgram) -> bool:
    """Whether the component draws random numbers, as far as can be seen: what cannot be seen counts as drawing."""
    listed = any(rule_of(op.function) is not None and _drops(op) for op in program.ops)
    return listed or bool(drawing_calls(program))


def _drops(op: Op) -> bool:
    keywords = dict(op.keywords)
    if op.function is functional.scaled_dot_product_attention:
        return bool(keywords.get("dropout_p", op.arguments[4] if len(op.arguments) > 4 else 0.0))
    if op.function is functional.multi_head_attention_forward:
        return bool(keywords.get("training", True) and op.arguments[10])
    if op.function not in DROPOUTS:
        return False
    p, training = (op.arguments[place] if len(op.arguments) > place else other for place, other in ((1, 0.5), (2, True)))
    return bool(keywords.get("p", p) and keywords.get("training", training))


def may_draw_on_host(program: CallProgram) -> bool:
    """Whether a component of a GPU may draw from the generator of the host, as `torch.rand(3).to(x.device)` does.

    What torch does not see may. Masks of dropout are drawn where the values are, which is on the GPU.
    """
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

    Args:
        half: the type in place of half-precision ones; None: as recorded. on_gpu: meta tensors stand for those of a GPU, so a
            call that makes a tensor on the host makes it there.
    """
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
    found: dict[int, tuple[int, ...]] = {}
    slices: dict[int, set[tuple[int, int]]] = {}
    for op in program.ops:
        given = op.arguments[0] if op.arguments else None
        if type(given) is not Ref:
            continue
        shape = program.tensors[given.slot].shape
        if op.function in (Tensor.split, torch.split) and len(op.outputs) > 1:
            sizes = [program.tensors[slot].shape for _, slot in op.outputs]
            if all(size[:-1] == shape[:-1] for size in sizes):
                found[given.slot] = tuple(size[-1] for size in sizes)
        elif op.function is Tensor.__getitem__ and (taken := _last_slice(op, len(shape))) is not None:
            start, stop, stride = taken.indices(shape[-1])
            if stride == 1:
                slices.setdefault(given.slot, set()).add((start, stop))
    for slot, parts in slices.items():
        ordered = sorted(parts)
        edges = [start for start, _ in ordered] + [program.tensors[slot].shape[-1]]
        if edges[0] == 0 and [stop for _, stop in ordered] == edges[1:] and len(ordered) > 1:
            found[slot] = tuple(stop - start for start, stop in ordered)
    return {slot: sizes for slot, sizes in found.items() if len(set(sizes)) > 1}


def _last_slice(op: Op, rank: int) -> slice | None:
    """The slice of x[..., a:b], else None."""
    index = op.arguments[1]
    if type(index) is Nested or not isinstance(index, tuple) or not index or not isinstance(index[-1], slice):
        return None
    whole = len(index) == rank or index[0] is Ellipsis
    return index[-1] if whole and all(entry in (Ellipsis, slice(None)) for entry in index[:-1]) else None


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
    found: Propagation


def variants(program: CallProgram, cuttable: Sequence[bool]) -> tuple[Variant, ...]:
    """The shardings worth offering, one per rule name, in the order found.

    Args:
        cuttable: per input whether its dim 0 is the batch; of others only biases per head may come in pieces.
    """
    groups: dict[tuple[tuple[Content, ...], tuple[str, ...]], list[Variant]] = {}
    for variant in _all(program, cuttable):
        groups.setdefault((variant.inputs, variant.found.outputs), []).append(variant)
    named: dict[str, Variant] = {}
    for group in groups.values():
        best = _best(program, group)
        for each in (best, *_for_more_ways(program, group, best)):
            known = named.get(each.found.rule)
            if known is None or _worth(program, each) > _worth(program, known):
                named[each.found.rule] = each
    most = max((_elements(program, variant) for variant in named.values()), default=0)
    return tuple(variant for variant in named.values() if _elements(program, variant) >= SHARE * most)


def _all(program: CallProgram, cuttable: Sequence[bool]) -> Iterator[Variant]:
    tries = 0
    given = zip(program.inputs, cuttable, strict=True)
    sizes = frozenset(size for _, slot in program.state for size in program.tensors[slot].shape)
    for inputs in product(*(_choices(program, slot, may, flows, sizes) for (_, slot, flows), may in given)):
        open_: list[dict[str, ParameterShard | None]] = [{}]
        while open_ and tries < TRIES:
            decided = open_.pop()
            tries += 1
            try:
                found = propagate(program, inputs, decided)
            except Undecided as question:
                open_ += [{**decided, question.name: option} for option in reversed(question.options)]
                continue
            except Refused:
                continue
            if _useful(program, inputs, found):
                yield Variant(inputs, decided, found)


def _choices(program: CallProgram, slot: int, cuttable: bool, flows: bool, sizes: frozenset[int]) -> tuple[Content, ...]:
    """Full; or cut by channels (dim 1 of images), heads (of biases) or features (the last dim of rows and sequences).

    Args:
        sizes: of the dims of parameters. A sequence whose dim 1 is one of them, and its last none, has its features there.
    """
    kind = program.tensors[slot]
    dim = 2 if len(kind.shape) == 3 and (kind.shape[2] in sizes or kind.shape[1] not in sizes) else 1
    if not cuttable and not (flows and len(kind.shape) == 4):
        return (WHOLE,)
    if not kind.dtype.is_floating_point or len(kind.shape) < 2 or kind.shape[dim] == 1:
        return (WHOLE,)
    return (WHOLE, cut_along(dim))


def _useful(program: CallProgram, inputs: Sequence[Content], found: Propagation) -> bool:
    if found.limit < 2 or found.only_pieces:
        return False
    if found.rule == "follow":
        given = [content for content, (_, _, flows) in zip(inputs, program.inputs, strict=True) if flows]
        return found.whole_weights == 0 and bool(given) and all(content.form == SHARD for content in given)
    return any(made != FULL for made in found.outputs)


def _elements(program: CallProgram, variant: Variant) -> int:
    """Elements of the parameters and buffers that are cut."""
    shapes = {key.name: program.tensors[slot].shape for key, slot in program.state}
    return sum(math.prod(shapes[name]) for name in variant.found.parts)


def _best(program: CallProgram, group: Sequence[Variant]) -> Variant:
    """The variant with the most shards among those that cut about the most; the first of equals."""
    most = max(_elements(program, variant) for variant in group)
    close = [variant for variant in group if _elements(program, variant) >= SLACK * most]
    return max(close, key=lambda variant: variant.found.limit)


def _for_more_ways(program: CallProgram, group: Sequence[Variant], best: Variant) -> list[Variant]:
    """The one with keys and values whole in every shard, if it allows more shards: fewer heads have those than queries."""
    whole_keys = [
        variant
        for variant in group
        if QUERIES in variant.found.rule.split("+")
        and best.found.limit % variant.found.limit
        and variant.found.rule != best.found.rule
    ]
    return [] if not whole_keys else [_best(program, whole_keys)]


def _worth(program: CallProgram, variant: Variant) -> tuple[int, int]:
    return _elements(program, variant), sum(content.form != FULL for content in variant.inputs)


# --- vocabularies that the shards do not divide -----------------------------------------------------------------------


_VOCABULARY: Functions = (functional.embedding, functional.linear, torch.addmm, torch.amax, Tensor.amax, class_sums)
_KNOWN: Functions = (*_VOCABULARY, *SAME, *PRODUCTS, *QUOTIENTS, torch.tanh, Tensor.tanh)
"""What may be done to padding: zeros stay zeros, and so do their gradients. The rules of the others know nothing of it."""


def vocabulary_size(program: CallProgram, found: Propagation, logits: Collection[str]) -> int:
    """Rows of the vocabulary, if a sharding cuts nothing else and so may cut it into pieces that do not divide it; else 0.

    As in Megatron-LM, pieces are equal and the last one ends in rows that stand for no token. The rows are zeros. No token
    looks them up, and the parts of the loss leave their logits out. So their gradients are zeros as well, and no optimizer
    moves them.

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
