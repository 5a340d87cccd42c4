"""Declared integers that a table has no row for: an input, as it was given, is an index beyond what it looks up.

A forward on fake tensors looks up any index, so a plan would be made for a model that fails in its first step. Only an input
that reaches the lookup with its own values counts: what a forward computes of it (masked, shifted, clamped) may be in range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from parsim.errors import ModelError
from parsim.model.inputs import IGNORED, INTEGERS, ModelInput
from parsim.model.objective.objective import TARGET
from parsim.model.runnable import Nested, Ref
from parsim.model.tracing.recorder import RecordedOp, Recording, storage_key
from parsim.model.tracing.recording import flatten_inputs


class Lookup(NamedTuple):
    """An input as an index.

    Attributes:
        name: of the input in the recording. rows: what the index stays below. lowest: what it may be at least.
        what: of the table, in words. where: the module. ignored: an index beyond the rows that is allowed; None: there is none.
    """

    name: str
    rows: int
    lowest: int
    what: str
    where: str
    ignored: int | None = None


def _argument(op: RecordedOp, place: int, name: str, default: Any = None) -> Any:
    return op.arguments[place] if place < len(op.arguments) else dict(op.keywords).get(name, default)


def _table(index: int, table: int, names: tuple[str, str], what: str) -> Callable[[RecordedOp, Sequence[Tensor]], Any]:
    """A lookup in the rows of a table. `index`, `table`: the places of both arguments; `names`: of the same."""

    def read(op: RecordedOp, tensors: Sequence[Tensor]) -> Iterator[tuple[Any, int, int, str, int | None]]:
        rows = _argument(op, table, names[1])
        if type(rows) is Ref:
            yield _argument(op, index, names[0]), tensors[rows.slot].shape[0], 0, what, None

    return read


def _along_dim(op: RecordedOp, tensors: Sequence[Tensor]) -> Iterator[tuple[Any, int, int, str, int | None]]:
    """`gather` and `index_select`."""
    given, dim = _argument(op, 0, "input"), _argument(op, 1, "dim")
    if type(given) is Ref and isinstance(dim, int) and tensors[given.slot].dim():
        yield _argument(op, 2, "index"), tensors[given.slot].shape[dim], 0, f"dim {dim} of a tensor with", None


def _one_hot(op: RecordedOp, tensors: Sequence[Tensor]) -> Iterator[tuple[Any, int, int, str, int | None]]:
    classes = _argument(op, 1, "num_classes", -1)
    if isinstance(classes, int) and classes > 0:
        yield op.arguments[0] if op.arguments else None, classes, 0, "one_hot of", None


def _classes(op: RecordedOp, tensors: Sequence[Tensor]) -> Iterator[tuple[Any, int, int, str, int | None]]:
    """Targets of `cross_entropy` and `nll_loss`, where they are numbers of classes."""
    given, target = _argument(op, 0, "input"), _argument(op, 1, "target")
    if type(given) is Ref and type(target) is Ref and not tensors[target.slot].is_floating_point():
        logits = tensors[given.slot]
        ignored = _argument(op, 4, "ignore_index", IGNORED)
        yield target, logits.shape[1 if logits.dim() > 1 else 0], 0, "the classes of a loss,", ignored


def _indexed(op: RecordedOp, tensors: Sequence[Tensor]) -> Iterator[tuple[Any, int, int, str, int | None]]:
    """`table[index]`, also with slices beside; an index may count from the end."""
    given, index = op.arguments[0], op.arguments[1]
    if type(given) is not Ref:
        return
    table = tensors[given.slot]
    items = list(index.items) if type(index) is Nested and index.rebuild is tuple else [index]
    taken = [_dims(item, tensors) for item in items]
    dim = 0
    for item, dims in zip(items, taken, strict=True):
        if item is Ellipsis:
            dim += table.dim() - sum(taken)
        elif type(item) is Ref and not _is_mask(tensors[item.slot]):
            yield item, table.shape[dim], -table.shape[dim], f"dim {dim} of a tensor with", None
        dim += dims


def _dims(item: Any, tensors: Sequence[Tensor]) -> int:
    """How many dims of a table an index takes."""
    if item is None or item is Ellipsis:
        return 0
    return tensors[item.slot].dim() if type(item) is Ref and _is_mask(tensors[item.slot]) else 1


def _is_mask(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.bool, torch.uint8)


_LOOKUPS: Mapping[Any, Callable[[RecordedOp, Sequence[Tensor]], Any]] = {
    functional.embedding: _table(0, 1, ("input", "weight"), "an embedding of"),
    functional.embedding_bag: _table(0, 1, ("input", "weight"), "an embedding of"),
    torch.embedding: _table(1, 0, ("indices", "weight"), "an embedding of"),
    torch.gather: _along_dim,
    Tensor.gather: _along_dim,
    torch.index_select: _along_dim,
    Tensor.index_select: _along_dim,
    functional.one_hot: _one_hot,
    functional.cross_entropy: _classes,
    functional.nll_loss: _classes,
    Tensor.__getitem__: _indexed,
}
_SAME_VALUES = (
    "view",
    "reshape",
    "flatten",
    "squeeze",
    "unsqueeze",
    "contiguous",
    "transpose",
    "permute",
    "t",
    "clone",
    "detach",
)
_CASTS = ("long", "int", "to")
_KEEPING = frozenset(
    function
    for name in (*_SAME_VALUES, *_CASTS)
    for function in (getattr(Tensor, name, None), getattr(torch, name, None))
    if callable(function)
)
"""All values of their first argument, in another order, shape or type at most."""


def lookups(recording: Recording) -> set[Lookup]:
    """Where an input, with its own values, is an index."""
    tensors, found = recording.tensors, set[Lookup]()
    whole = {number: name for name, number in recording.inputs if not tensors[number].is_floating_point()}
    for op in recording.ops:
        read = _LOOKUPS.get(op.function) if whole else None
        for index, rows, lowest, what, ignored in () if read is None else read(op, tensors):
            if type(index) is Ref and index.slot in whole:
                where = "" if op.call is None else recording.calls[op.call].module
                found.add(Lookup(whole[index.slot], int(rows), lowest, what, where, ignored))
        if op.mutated:
            changed = {storage_key(tensors[number]) for number in op.mutated}
            whole = {number: name for number, name in whole.items() if storage_key(tensors[number]) not in changed}
        elif op.function in _KEEPING and type(op.arguments[0]) is Ref and op.arguments[0].slot in whole:
            made = [number for _, number in op.outputs if tensors[number].dtype in (torch.int64, torch.int32)]
            whole.update(dict.fromkeys(made, whole[op.arguments[0].slot]))
    return found


def seen_ranges(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[ModelInput | None, ...]:
    """What the integers of an example batch are, as if they had been declared; None where it has no values.

    Args:
        args, kwargs: of the module. Nothing is known of a batch that holds one tensor twice.
    """
    tensors = [leaf for leaf in flatten_inputs(args, kwargs)[0] if isinstance(leaf, Tensor)]
    names = {id(value): key for key, value in kwargs.items()}
    if len({id(tensor) for tensor in tensors}) < len(tensors):
        return ()
    return tuple(_seen(tensor, names.get(id(tensor), str(place))) for place, tensor in enumerate(tensors))


def _seen(tensor: Tensor, name: str) -> ModelInput | None:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in INTEGERS or isinstance(tensor, FakeTensor) or tensor.is_meta or not tensor.numel():
        return None
    return ModelInput(name, tuple(tensor.shape[1:]), dtype=dtype, high=int(tensor.max()) + 1, low=int(tensor.min()))


def check_index_ranges(small: Recording, large: Recording, declared: Sequence[ModelInput | None], name: str) -> None:
    """Refuse an input whose declared integers no table has rows for.

    Args:
        small, large: recordings at two batches: a table that grows with the batch has no bound.
        declared: the inputs in the order of the recording; None: nothing is known of one. name: of the model, for messages.

    Raises:
        ModelError: with the input, both ranges, the module and the fix.
    """
    ranges = dict(zip((entry for entry, _ in small.inputs if entry != TARGET), declared, strict=False))
    if small.settled is not None:
        ranges[TARGET] = small.settled.target
    for lookup in sorted(lookups(small) & lookups(large), key=lambda entry: entry.rows):
        entry = ranges.get(lookup.name)
        if entry is None or entry.high is None:
            continue
        beyond = entry.high > lookup.rows and (lookup.ignored is None or not lookup.rows <= lookup.ignored < entry.high)
        below = entry.low < lookup.lowest and lookup.ignored != entry.low
        if beyond or below:
            raise ModelError(_refusal(name, entry, lookup))


def _refusal(name: str, entry: ModelInput, lookup: Lookup) -> str:
    assert entry.high is not None
    where = f"module {lookup.where}" if lookup.where else "its forward"
    lowest = max(entry.low, lookup.lowest)
    bounds = f"high = {min(entry.high, lookup.rows)}" + (f" and low = {lowest}" if entry.low < lookup.lowest else "")
    return (
        f"{name}: input {entry.name} holds integers from {entry.low} to {entry.high - 1}, and {where} uses it as an index into "
        f"{lookup.what} {lookup.rows} entries, so an index must lie from {lookup.lowest} to {lookup.rows - 1}; give "
        f"{entry.name} {bounds} (or example inputs within), or the module more entries"
    )
