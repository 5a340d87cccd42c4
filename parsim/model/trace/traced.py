"""A traced module: its Model (numbers per sample) and its runnable components."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_unflatten

from parsim.errors import ModelError, TraceError
from parsim.model.inputs import IGNORED, INTEGERS, ModelInput
from parsim.model.model import COUPLED, MIXING, Model
from parsim.model.objective import TARGET, OpenLoss, Settled
from parsim.model.runnable import Nested, Ref, Runnable
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
from parsim.model.trace.cut import CallInterval, cut, runnables, value_names
from parsim.model.trace.data_dependent import collapse
from parsim.model.trace.record import carried, flatten_inputs, kept_note, run_recorded
from parsim.model.trace.recorder import RecordedOp, Recording, storage_key
from parsim.numeric import rare_collections

# Declared integers that a table has no row for: an input, as it was given, is an index beyond what it looks up.
#
# A forward on fake tensors looks up any index, so a plan would be made for a model that fails in its first step. Only an
# input that reaches the lookup with its own values counts: what a forward computes of it (masked, shifted, clamped) may be in
# range.


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


BATCHES = (2, 3)


class Traced:
    """Calling it runs the components in order; returns what the module returns (or the loss, if one was asked for).

    Attributes:
        model: numbers per sample. components: for the batch, mode, dtype and device of the example inputs; a call with
            other shapes is an error of torch: trace again.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        model: Model,
        recording: Recording,
        components: tuple[Runnable, ...],
        names: Mapping[int, str],
    ) -> None:
        self.module = module
        self.model = model
        self.components = components
        self._recording = recording
        self._names = names

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Inputs as the module takes them (a single dict stands for keyword inputs); with a loss, the target comes last."""
        if not kwargs and isinstance(args[:1], tuple) and args and isinstance(args[0], Mapping):
            kwargs, args = dict(args[0]), args[1:]
        recording = self._recording
        leaves = [leaf for leaf in flatten_inputs(args, kwargs)[0] if isinstance(leaf, Tensor)]
        names = [name for name, _ in recording.inputs]
        if len(leaves) != len(names):
            raise TraceError(f"{self.model.name} was traced with {len(names)} tensors ({', '.join(names)}), got {len(leaves)}")
        values = dict(zip(names, leaves, strict=True))
        for component in self.components:
            made = component([values[name] for name in component.input_names])
            values.update(zip(component.output_names, made, strict=True))
        if recording.loss_value is not None:
            return values[self._names[recording.loss_value]]
        assert recording.output_spec is not None
        out = [self._leaf(leaf, values) for leaf in recording.output_leaves]
        return tree_unflatten(out, recording.output_spec)

    def _leaf(self, leaf: Any, values: dict[str, Tensor]) -> Any:
        if type(leaf) is not Ref:
            return leaf
        if leaf.slot in self._names:
            return values[self._names[leaf.slot]]
        if leaf.slot in self._recording.constants:
            return self._recording.constants[leaf.slot]
        key = self._recording.state[leaf.slot]
        return self.module.get_parameter(key.name) if key.kind == "parameter" else self.module.get_buffer(key.name)


def trace_module(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    granularity: str,
    name: str | None,
    loss: str | None,
    example: bool = False,
) -> Traced:
    """See `parsim.model.trace.trace.trace`."""
    recording, intervals = run_cut(module, args, kwargs, granularity=granularity, loss=loss, example=example)
    model = model_of(module, args, kwargs, granularity=granularity, name=name, loss=loss, example=example)
    return Traced(
        module=module,
        model=model,
        recording=recording,
        components=runnables(recording, intervals, module),
        names=value_names(recording, intervals),
    )


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
    recording = collapse(recording, whole, module).recording
    return recording, cut(recording, module, granularity, whole)


def model_of(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], **settings: Any) -> Model:
    """The Model of a module; `settings`: as `settled_model` takes them."""
    return settled_model(module, args, kwargs, **settings)[0]


@rare_collections()
def settled_model(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    granularity: str,
    name: str | None = None,
    loss: str | OpenLoss | None = None,
    source: str = "",
    example: bool = False,
    declared: Sequence[ModelInput | None] = (),
) -> tuple[Model, Settled | None]:
    """The Model of a module in training mode, whatever the batch of the example inputs; and the loss that its forward settled.

    `example`: code that depends on data does what it does with the example inputs; not with an OpenLoss. `declared`: what is
    known of each input, in the order of the forward's arguments; integers that no table has rows for are a ModelError.
    """
    kind = type(module).__name__
    modes = [(part, part.training) for part in module.modules()]
    if not module.training:
        module.train()
    largest: TracedForward | None = None
    try:
        if example:
            assert not isinstance(loss, OpenLoss)
            small, large, halves = _followed(module, args, kwargs, granularity, loss)
        else:
            first = measure(module, *with_batch(args, kwargs, BATCHES[0]), granularity=granularity, loss=loss)
            if isinstance(loss, OpenLoss):
                assert first.recording.settled is not None, "a recording with a loss settles it"
                loss = str(first.recording.settled.objective)
            batches = tuple(first.even_batches * batch for batch in BATCHES)

            def forward(batch: int, autocast: torch.dtype | None) -> TracedForward:
                inputs = with_batch(args, kwargs, batch)
                return measure(module, *inputs, granularity=granularity, loss=loss, autocast=autocast)

            small, large = (first if batch == first.batch else forward(batch, None) for batch in batches)
            halves = _under_autocast(lambda: (forward(batches[0], HALF), forward(batches[1], HALF)))
            if has_pairs(small, large):
                largest = forward(2 * batches[1] - batches[0], None)
        later = _state_of_later_steps(module, args, kwargs, loss, small.recording, example=example)
    finally:
        for part, mode in modes:
            part.training = mode
    if loss is not None:
        check_trained(small.recording, name or kind)
    check_index_ranges(small.recording, large.recording, declared, name or kind)
    about = {"name": name or kind, "granularity": granularity, "source": source or f"trace of {kind}"}
    model = combine(small, large, **about, largest=largest, untrained=later.untrained)
    model = replace(model, assumptions=(*model.assumptions, *later.notes))
    form = small.recording.loss_form if largest is None else COUPLED
    if form != COUPLED and later.mixes:
        form = MIXING
    assert not isinstance(loss, OpenLoss)
    found = replace(_with_halves(model, halves), loss=loss or "", loss_form="" if form == SUM else form)
    return found, small.recording.settled


class _LaterSteps(NamedTuple):
    """The parameters that a step leaves as they are, what the answer says of those and of what a step hands on, and whether
    that is computed from the samples of a batch."""

    untrained: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    mixes: bool = False


def _state_of_later_steps(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss: str | OpenLoss | None,
    recording: Recording,
    *,
    example: bool,
) -> _LaterSteps:
    """What a step leaves to the steps after it; of a model without a loss nothing."""
    if loss is None:
        return _LaterSteps()
    assert not isinstance(loss, OpenLoss)
    handed = carried(recording)
    notes = [*handed.notes]
    still = untrained(recording)
    notes += [untrained_note(still)] if still else []
    if recording.kept_tensors and not recording.decisions:
        again = run_recorded(module, args, kwargs, loss=None, twice=True)
        notes += [kept_note(again.read_again)] if again.read_again else []
    return _LaterSteps(frozenset(still), tuple(notes), mixes=bool(handed.from_samples))


def check_trained(recording: Recording, name: str) -> None:
    """Refuse a loss through which no gradient reaches a parameter.

    Args:
        recording: with its loss. name: of the model, for messages.

    Raises:
        ModelError: with what to look for.
    """
    tensors = recording.tensors
    parameters = [number for number, key in recording.state.items() if key.kind == "parameter"]
    assert recording.loss_value is not None
    if tensors[recording.loss_value].requires_grad and any(tensors[number].requires_grad for number in parameters):
        return
    frozen = f"all {len(parameters)} of its parameters are frozen (requires_grad is False)"
    why = "it has no parameters" if not parameters else frozen
    if any(tensors[number].requires_grad for number in parameters):
        why = "no gradient of its loss reaches its parameters (detach, no_grad, argmax, a constant)"
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


def _with_halves(model: Model, halves: ForwardsInHalf) -> Model:
    """The model with what was recorded under autocast, or with the reason why nothing was."""
    try:
        if isinstance(halves, TraceError):
            raise halves
        return with_half_precision(model, *halves)
    except TraceError as error:
        assumed = f"no autocast (amp_fp16, amp_bf16, fp8): {error}"
        return replace(model, half_refused=str(error), assumptions=(*model.assumptions, assumed))


def _followed(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], granularity: str, loss: str | None
) -> tuple[TracedForward, TracedForward, ForwardsInHalf]:
    """Forwards on the example batch, and on it twice, each without and with autocast; all take the branches of the first."""
    twice = repeated(args, kwargs)
    first = measure(module, args, kwargs, granularity=granularity, loss=loss, example=True)
    answers = first.recording.answers

    def again(inputs: tuple[tuple[Any, ...], Mapping[str, Any]], autocast: torch.dtype | None) -> TracedForward:
        return measure(module, *inputs, granularity=granularity, loss=loss, autocast=autocast, example=True, answers=answers)

    return first, again(twice, None), _under_autocast(lambda: (again((args, kwargs), HALF), again(twice, HALF)))


def repeated(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs with their samples twice."""
    leaves, spec = flatten_inputs(args, kwargs)
    samples = next(leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim())
    twice = [
        torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == samples else leaf
        for leaf in leaves
    ]
    new_args, new_kwargs = spec.unflatten(twice)
    return new_args, new_kwargs


def with_batch(args: tuple[Any, ...], kwargs: Mapping[str, Any], batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs with `batch` samples: every tensor whose dim 0 is that of the first tensor. Values are zeros."""
    leaves, spec = flatten_inputs(args, kwargs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors or tensors[0].dim() == 0:
        raise TraceError("example_inputs need a tensor whose dim 0 is the batch; got none")
    samples = tensors[0].shape[0]

    def resized(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape[0] != samples:
            return leaf
        shape = (batch, *leaf.shape[1:])
        return torch.zeros(shape, dtype=leaf.dtype, device=leaf.device, requires_grad=leaf.requires_grad)

    new_args, new_kwargs = spec.unflatten([resized(leaf) for leaf in leaves])
    return new_args, new_kwargs
