"""What is read from the calls of a component beside their rules: calls without a rule, and tensors taken apart in runs.

Any function may be done whole by every shard on three conditions. It is given full tensors only, is linear in the gradient (as
all of torch's own are) and draws no random numbers. Operators of torch say by a tag whether they draw.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parsim.model.component import FULL
from parsim.model.runnable import CallProgram, Nested, Op, Ref, run_op
from parsim.model.shard.calls.experts import grouped_product, tables_of
from parsim.model.shard.content import WHOLE, Refused, RuleOutcome, Step, operands_of
from parsim.model.shard.rules import DROPOUTS, rule_of


def whole_call(step: Step) -> RuleOutcome:
    """The rule of calls that have none of their own."""
    name = str(getattr(step.op.function, "__qualname__", step.op.function))
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


def _is_plain(program: CallProgram, op: Op) -> bool:
    if isinstance(getattr(op.function, "__self__", None), type):  # a torch.autograd.Function: its backward may do anything
        return False
    # Calls recorded under autocast may read floats of several types, which autocast casts and the meta device refuses.
    return any(_plain_of_types(program, op, half) for half in (None, torch.float32))


def _plain_of_types(program: CallProgram, op: Op, half: torch.dtype | None) -> bool:
    """Whether the call is plain on the meta device. half: the type in place of half-precision ones; None: as recorded."""
    environment: list[Any] = [None] * program.slots
    for slot in operands_of(op):
        kind = program.tensors[slot]
        dtype = half if half is not None and kind.dtype in (torch.bfloat16, torch.float16) else kind.dtype
        environment[slot] = torch.empty_strided(kind.shape, kind.stride, dtype=dtype, device="meta")
    watch = _Tags()
    try:
        with torch.no_grad(), watch:
            run_op(_on_meta(op), environment)
    except Exception:  # not on the meta device: nothing is known of it
        return False
    return watch.plain


def _on_meta(op: Op) -> Op:
    keywords = tuple((name, torch.device("meta") if name == "device" else value) for name, value in op.keywords)
    return replace(op, keywords=keywords, drop=())


class _Tags(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Whether all operators are torch's own and draw nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.plain = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = func.namespace in ("aten", "prims", "prim")
        self.plain &= own and torch.Tag.nondeterministic_seeded not in func.tags
        return func(*args, **(kwargs or {}))


@lru_cache(maxsize=8)
def tables_of_experts(program: CallProgram) -> frozenset[int]:
    """Slots that products with experts read as their tables."""
    return tables_of(program, frozenset(n for n, op in enumerate(program.ops) if rule_of(op.function) is grouped_product))


@lru_cache(maxsize=8)
def consumed_in_runs(program: CallProgram) -> dict[int, tuple[int, ...]]:
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
