"""The Model of a module, and its calls cut into components: what a forward says of them at two batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from parsim.errors import ModelError, TraceError
from parsim.model.inputs import IGNORED, INTEGERS, ModelInput
from parsim.model.model import AUTOCAST, COUPLED, MIXING, OPERATORS, Model
from parsim.model.objective import TARGET
from parsim.model.runnable import Nested, Ref
from parsim.model.total_loss import SUM
from parsim.model.trace.checks import without_log
from parsim.model.trace.count import (
    HALF,
    TracedForward,
    combine,
    has_pairs,
    measure,
    recorded_in_parts,
    untrained,
    untrained_note,
    with_half_precision,
)
from parsim.model.trace.cut import CallInterval, cut
from parsim.model.trace.data_dependent import collapse
from parsim.model.trace.record import carried, flatten_inputs, kept_note, run_recorded
from parsim.model.trace.recorder import RecordedOp, Recording, storage_key
from parsim.model.trace.repeats import Stack, lengthened, shortened
from parsim.numeric import rare_collections
from parsim.private import FakeTensor

# Declared integers that a table has no row for: an input, as it was given, is an index beyond what it looks up.
#
# A forward on fake tensors looks up any index, so a plan would be made for a model that fails in its first step. Only an
# input that reaches the lookup with its own values counts: what a forward computes of it (masked, shifted, clamped) may be in
# range.


class Lookup(NamedTuple):
    """An input as an index.
    `rows`: what the index stays below. `what`: of the table, in words. `lowest`: what it may be at least. `ignored`: an index
    beyond the rows that is allowed; None: there is none. `name`: of the input. `where`: the module."""

    rows: int
    what: str
    lowest: int = 0
    ignored: int | None = None
    name: str = ""
    where: str = ""


_EMBEDDINGS = {
    functional.embedding: (("input", 0), ("weight", 1)),
    functional.embedding_bag: (("input", 0), ("weight", 1)),
    torch.embedding: (("indices", 1), ("weight", 0)),
}
"""Names and places of indices and table among the arguments."""
_ALONG_A_DIM = (torch.gather, Tensor.gather, torch.index_select, Tensor.index_select)
_OF_CLASSES = (functional.cross_entropy, functional.nll_loss)


def _indices(op: RecordedOp, tensors: Sequence[Tensor]) -> Iterator[tuple[Any, Lookup]]:
    """The arguments of a call that are indices, and of what."""
    if op.function in _EMBEDDINGS:
        index, table = _EMBEDDINGS[op.function]
        if type(weight := op.argument(*table)) is Ref:
            yield op.argument(*index), Lookup(int(tensors[weight.slot].shape[0]), "an embedding of")
    elif op.function in _ALONG_A_DIM:
        given, dim = op.argument("input", 0), op.argument("dim", 1)
        if type(given) is Ref and isinstance(dim, int) and tensors[given.slot].dim():
            yield op.argument("index", 2), Lookup(int(tensors[given.slot].shape[dim]), f"dim {dim} of a tensor with")
    elif op.function is functional.one_hot:
        classes = op.argument("num_classes", 1, -1)
        if isinstance(classes, int) and classes > 0:
            yield op.argument("tensor", 0), Lookup(classes, "one_hot of")
    elif op.function in _OF_CLASSES:  # where targets are numbers of classes
        given, target = op.argument("input", 0), op.argument("target", 1)
        if type(given) is Ref and type(target) is Ref and not tensors[target.slot].is_floating_point():
            logits, ignored = tensors[given.slot], op.argument("ignore_index", 4, IGNORED)
            classes = int(logits.shape[1 if logits.dim() > 1 else 0])
            yield target, Lookup(classes, "the classes of a loss,", ignored=ignored)
    elif op.function is Tensor.__getitem__ and type(op.arguments[0]) is Ref:
        yield from _indexed(tensors[op.arguments[0].slot], op.arguments[1], tensors)


def _indexed(table: Tensor, index: Any, tensors: Sequence[Tensor]) -> Iterator[tuple[Any, Lookup]]:
    """`table[index]`, also with slices beside; an index may count from the end."""

    def is_mask(item: Any) -> bool:
        return type(item) is Ref and tensors[item.slot].dtype in (torch.bool, torch.uint8)

    items = list(index.items) if type(index) is Nested and index.rebuild is tuple else [index]
    taken = [
        0 if item is None or item is Ellipsis else tensors[item.slot].dim() if is_mask(item) else 1 for item in items
    ]  # dims of the table per item
    dim = 0
    for item, dims in zip(items, taken, strict=True):
        if item is Ellipsis:
            dim += table.dim() - sum(taken)
        elif type(item) is Ref and not is_mask(item):
            rows = int(table.shape[dim])
            yield item, Lookup(rows, f"dim {dim} of a tensor with", lowest=-rows)
        dim += dims


_KEEPING = frozenset(
    function
    for name in (
        *("view", "reshape", "flatten", "squeeze", "unsqueeze", "contiguous", "transpose", "permute", "t", "clone", "detach"),
        *("long", "int", "to"),
    )
    for function in (getattr(Tensor, name, None), getattr(torch, name, None))
    if callable(function)
)
"""All values of their first argument, in another order, shape or type at most."""


def lookups(recording: Recording) -> set[Lookup]:
    """Where an input, with its own values, is an index."""
    tensors, found = recording.tensors, set[Lookup]()
    inputs = {number: name for name, number in recording.inputs if not tensors[number].is_floating_point()}
    for op in recording.ops:
        if not inputs:
            break
        for index, lookup in _indices(op, tensors):
            if type(index) is Ref and index.slot in inputs:
                where = "" if op.call is None else recording.calls[op.call].module
                found.add(lookup._replace(name=inputs[index.slot], where=where))
        if op.mutated:
            changed = {storage_key(tensors[number]) for number in op.mutated}
            inputs = {number: name for number, name in inputs.items() if storage_key(tensors[number]) not in changed}
        elif op.function in _KEEPING and type(op.arguments[0]) is Ref and op.arguments[0].slot in inputs:
            made = [number for _, number in op.outputs if tensors[number].dtype in (torch.int64, torch.int32)]
            inputs.update(dict.fromkeys(made, inputs[op.arguments[0].slot]))
    return found


def seen_ranges(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[ModelInput | None, ...]:
    """What the integers of an example batch are, as if they had been declared; None where it has no values.
    Nothing is known of a batch that holds one tensor twice."""
    tensors = [leaf for leaf in flatten_inputs(args, kwargs)[0] if isinstance(leaf, Tensor)]
    names = {id(value): key for key, value in kwargs.items()}
    if len({id(tensor) for tensor in tensors}) < len(tensors):
        return ()
    ranges: list[ModelInput | None] = []
    for place, tensor in enumerate(tensors):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in INTEGERS or isinstance(tensor, FakeTensor) or tensor.is_meta or not tensor.numel():
            ranges.append(None)
            continue
        name, low, high = names.get(id(tensor), str(place)), int(tensor.min()), int(tensor.max()) + 1
        ranges.append(ModelInput(name, tuple(tensor.shape[1:]), dtype=dtype, high=high, low=low))
    return tuple(ranges)


def check_index_ranges(small: Recording, large: Recording, declared: Sequence[ModelInput | None], name: str) -> None:
    """Refuse an input whose declared integers no table has rows for.
    `small`, `large`: recordings at two batches: a table that grows with the batch has no bound. `declared`: the inputs in the
    order of the recording; None: nothing is known of one. `name`: of the model, for messages. Raises ModelError: with the
    input, both ranges, the module and the fix."""
    ranges = dict(zip((name for name, _ in small.inputs if name != TARGET), declared, strict=False))
    if small.settled is not None:
        ranges[TARGET] = small.settled.target
    for lookup in sorted(lookups(small) & lookups(large), key=lambda lookup: lookup.rows):
        given = ranges.get(lookup.name)
        if given is None or given.high is None:
            continue
        beyond = given.high > lookup.rows and (lookup.ignored is None or not lookup.rows <= lookup.ignored < given.high)
        below = given.low < lookup.lowest and lookup.ignored != given.low
        if beyond or below:
            where = f"module {lookup.where}" if lookup.where else "its forward"
            low = f" and low = {max(given.low, lookup.lowest)}" if given.low < lookup.lowest else ""
            raise ModelError(
                f"{name}: input {given.name} holds integers from {given.low} to {given.high - 1}, and {where} uses it as an "
                f"index into {lookup.what} {lookup.rows} entries, so an index must lie from {lookup.lowest} to "
                f"{lookup.rows - 1}; give {given.name} high = {min(given.high, lookup.rows)}{low} (or example inputs within), "
                "or the module more entries"
            )


BATCHES = (2, 3)


def run_cut(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    granularity: str,
    loss: str | None,
    example: bool = False,
) -> tuple[Recording, list[CallInterval]]:
    """One forward as it is run: modules that depend on the data are called as a whole."""
    recording, whole = recorded_in_parts(module, args, kwargs, granularity=granularity, loss=loss, example=example)
    recording, _ = collapse(recording, whole, module)
    return recording, cut(recording, module, granularity, whole)


@rare_collections()
def model_of(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    granularity: str,
    name: str | None = None,
    loss: str | None = None,
    source: str = "",
    example: bool = False,
    declared: Sequence[ModelInput | None] = (),
    counted: str = AUTOCAST,
    sharded: bool = True,
    stacks: Sequence[Stack] = (),
) -> Model:
    """The Model of a module in training mode, whatever the batch of the example inputs.
    `counted`: of `parsim.model.model.COUNTED`. `sharded`: with how operators can be divided.
    `example`: code that depends on data does what it does with the example inputs. `declared`: what is known of each input, in
    the order of the forward's arguments; integers that no table has rows for are a ModelError. `stacks`: layers that repeat."""
    kind = type(module).__name__
    if stacks:
        with shortened(module, stacks):
            short = model_of(
                module,
                args,
                kwargs,
                granularity=granularity,
                name=name,
                loss=loss,
                source=source,
                declared=declared,
                counted=counted,
                sharded=sharded,
            )
        return lengthened(short, stacks)
    name = name or kind
    modes = [(part, part.training) for part in module.modules()]
    if not module.training:
        module.train()
    largest: TracedForward | None = None
    under_autocast: ForwardsInHalf | None = None
    try:
        if example:
            small, large, under_autocast = _followed(module, args, kwargs, granularity, loss, halves=counted == AUTOCAST)
        else:
            first = measure(module, *with_batch(args, kwargs, BATCHES[0]), granularity=granularity, loss=loss)
            batches = tuple(first.even_batches * batch for batch in BATCHES)

            def forward(batch: int, autocast: torch.dtype | None) -> TracedForward:
                inputs = with_batch(args, kwargs, batch)
                return measure(module, *inputs, granularity=granularity, loss=loss, autocast=autocast)

            small, large = (first if batch == first.batch else forward(batch, None) for batch in batches)
            if counted == AUTOCAST:
                under_autocast = _under_autocast(lambda: (forward(batches[0], HALF), forward(batches[1], HALF)))
            if has_pairs(small, large):
                largest = forward(2 * batches[1] - batches[0], None)
        notes: list[str] = []
        still: tuple[str, ...] = ()  # parameters that a step leaves as they are
        mixes = False  # whether what a step hands on is computed from the samples of a batch
        if loss is not None:
            handed = carried(small.recording)
            still, mixes = untrained(small.recording), bool(handed.from_samples)
            notes += [*handed.notes, *([untrained_note(still)] if still else [])]
            if small.recording.kept_tensors and not small.recording.decisions:
                again = run_recorded(module, args, kwargs, loss=None, twice=True)
                notes += [kept_note(again.read_again)] if again.read_again else []
    finally:
        for part, mode in modes:
            part.training = mode
    if loss is not None:
        _check_trained(small.recording, name)
    check_index_ranges(small.recording, large.recording, declared, name)
    about = {"name": name, "granularity": granularity, "source": source or f"trace of {kind}"}
    still_ones, memory = frozenset(still), counted != OPERATORS
    model = combine(small, large, **about, largest=largest, untrained=still_ones, memory=memory, sharded=sharded)
    form = small.recording.loss_form if largest is None else COUPLED
    if form != COUPLED and mixes:
        form = MIXING
    model = replace(
        model,
        assumptions=(*model.assumptions, *notes),
        loss=loss or "",
        loss_form="" if form == SUM else form,
    )
    if under_autocast is None:
        return model
    try:
        if isinstance(under_autocast, TraceError):
            raise under_autocast
        model = with_half_precision(model, *under_autocast)
    except TraceError as error:
        assumed = f"no autocast (amp_fp16, amp_bf16, fp8): {error}"
        model = replace(model, half_refused=str(error), assumptions=(*model.assumptions, assumed))
    return model


def _check_trained(recording: Recording, name: str) -> None:
    """Refuse a loss through which no gradient reaches a parameter: a ModelError that says what to look for.
    `recording`: with its loss. `name`: of the model, for messages."""
    tensors = recording.tensors
    parameters = [tensors[number] for number, key in recording.state.items() if key.kind == "parameter"]
    trained = any(parameter.requires_grad for parameter in parameters)
    assert recording.loss_value is not None
    if trained and tensors[recording.loss_value].requires_grad:
        return
    if trained:
        why = "no gradient of its loss reaches its parameters (detach, no_grad, argmax, a constant)"
    elif parameters:
        why = f"all {len(parameters)} of its parameters are frozen (requires_grad is False)"
    else:
        why = "it has no parameters"
    raise ModelError(f"{name} has nothing to train: {why}; a plan of training needs a gradient for at least one parameter")


ForwardsInHalf = tuple[TracedForward, TracedForward] | TraceError
"""Two forwards under autocast, or why there are none."""


def _under_autocast(forwards: Callable[[], tuple[TracedForward, TracedForward]]) -> ForwardsInHalf:
    """A forward that fails under autocast alone can still be trained without it; torch's log of the failure is left out."""
    try:
        with without_log():
            return forwards()
    except TraceError as error:
        return error


def _followed(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], granularity: str, loss: str | None, *, halves: bool
) -> tuple[TracedForward, TracedForward, ForwardsInHalf | None]:
    """Forwards on the example batch, and on it twice, each without and with autocast; all take the branches of the first."""
    once = args, kwargs
    twice = _resized(args, kwargs, lambda leaf: torch.cat([leaf, leaf]))
    first = measure(module, args, kwargs, granularity=granularity, loss=loss, example=True)
    answers = first.recording.answers

    def again(inputs: tuple[tuple[Any, ...], Mapping[str, Any]], autocast: torch.dtype | None) -> TracedForward:
        return measure(module, *inputs, granularity=granularity, loss=loss, autocast=autocast, example=True, answers=answers)

    second = again(twice, None)
    return first, second, _under_autocast(lambda: (again(once, HALF), again(twice, HALF))) if halves else None


def with_batch(args: tuple[Any, ...], kwargs: Mapping[str, Any], batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs with `batch` samples: every tensor whose dim 0 is that of the first tensor. Values are zeros."""

    def zeros(leaf: Tensor) -> Tensor:
        shape = (batch, *leaf.shape[1:])
        return torch.zeros(shape, dtype=leaf.dtype, device=leaf.device, requires_grad=leaf.requires_grad)

    return _resized(args, kwargs, zeros)


def _resized(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], other: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs with another tensor for every one with samples: those whose dim 0 is that of the first tensor."""
    leaves, spec = flatten_inputs(args, kwargs)
    first = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
    if first is None or first.dim() == 0:
        raise TraceError("example_inputs need a tensor whose dim 0 is the batch; got none")
    new_args, new_kwargs = spec.unflatten(
        [
            other(leaf) if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == first.shape[0] else leaf
            for leaf in leaves
        ]
    )
    return new_args, new_kwargs
