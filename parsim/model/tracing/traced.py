"""A traced module: its Model (numbers per sample) and its runnable components."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from parsim.errors import ModelError, TraceError
from parsim.garbage import rare_collections
from parsim.model.inputs import ModelInput
from parsim.model.model import COUPLED, MIXING, SUBLAYER, Model
from parsim.model.objective.settle import OpenLoss, Settled
from parsim.model.objective.total import SUM
from parsim.model.runnable import Ref, Runnable
from parsim.model.tracing.carried import carried, kept_note
from parsim.model.tracing.cut import cut, runnables, value_names
from parsim.model.tracing.half_precision import HALF, with_half_precision
from parsim.model.tracing.measure import TracedForward, combine, has_pairs, measure
from parsim.model.tracing.recorder import Recording
from parsim.model.tracing.recording import flatten_inputs, run_recorded
from parsim.model.tracing.refused.index_ranges import check_index_ranges
from parsim.model.tracing.refused.unsupported import without_log
from parsim.model.tracing.sublayers import CallInterval
from parsim.model.tracing.untrained import may_be_untrained, untrained, untrained_note
from parsim.model.tracing.whole_calls import collapse, whole_modules

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
    """See `parsim.model.tracing.trace.trace`."""
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
    parts = granularity == SUBLAYER
    recording = run_recorded(module, args, kwargs, loss=loss, loss_in_parts=parts, example=example)
    whole: frozenset[str] = frozenset()
    if recording.decisions:
        other = run_recorded(module, args, kwargs, loss=loss, loss_in_parts=parts, skew=True, example=example)
        whole = whole_modules(recording, other, module)
    recording = collapse(recording, whole, module).recording
    return recording, cut(recording, module, granularity, whole)


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
) -> Model:
    """The Model of a module in training mode, independent of the batch of the example inputs.

    `example`: code that depends on data does what it does with the example inputs. `declared`: what is known of each input, in
    the order of the forward's arguments; integers that no table has rows for are a ModelError.
    """
    given = {
        "granularity": granularity,
        "name": name,
        "loss": loss,
        "source": source,
        "example": example,
        "declared": declared,
    }
    return settled_model(module, args, kwargs, **given)[0]  # type: ignore[arg-type]


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
    """As `model_of`, with the loss that the first forward settled; an OpenLoss cannot follow an example."""
    with rare_collections():
        return _settled_model(module, args, kwargs, granularity, name, loss, source, example, declared)


def _settled_model(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    granularity: str,
    name: str | None,
    loss: str | OpenLoss | None,
    source: str,
    example: bool,
    declared: Sequence[ModelInput | None],
) -> tuple[Model, Settled | None]:
    """As `settled_model`."""
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
                loss = str(_settled(first).objective)
            batches = tuple(first.even_batches * batch for batch in BATCHES)

            def forward(batch: int, autocast: torch.dtype | None) -> TracedForward:
                inputs = with_batch(args, kwargs, batch)
                trusted = first.recording.confirmed
                return measure(module, *inputs, granularity=granularity, loss=loss, autocast=autocast, trusted=trusted)

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
    still: tuple[str, ...] = ()
    if may_be_untrained(recording):
        whole = recording if not recording.copies else run_recorded(module, args, kwargs, loss=loss, example=example)
        still = untrained(whole)
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


def _settled(run: TracedForward) -> Settled:
    assert run.recording.settled is not None, "a recording with a loss settles it"
    return run.recording.settled


Halves = tuple[TracedForward, TracedForward] | TraceError
"""Two forwards under autocast, or why there are none."""


def _under_autocast(forwards: Callable[[], tuple[TracedForward, TracedForward]]) -> Halves:
    """A forward that fails under autocast alone can still be trained without it; torch's log of the failure is left out."""
    try:
        with without_log():
            return forwards()
    except TraceError as error:
        return error


def _with_halves(model: Model, halves: Halves) -> Model:
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
) -> tuple[TracedForward, TracedForward, Halves]:
    """Forwards on the example batch, and on it twice, each without and with autocast; all take the branches of the first."""
    twice = repeated(args, kwargs)
    first = measure(module, args, kwargs, granularity=granularity, loss=loss, example=True)
    answers = first.recording.answers

    def again(inputs: tuple[tuple[Any, ...], Mapping[str, Any]], autocast: torch.dtype | None) -> TracedForward:
        return measure(module, *inputs, granularity=granularity, loss=loss, autocast=autocast, example=True, answers=answers)

    return first, again(twice, None), _under_autocast(lambda: (again((args, kwargs), HALF), again(twice, HALF)))


def repeated(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same samples twice."""
    leaves, spec = flatten_inputs(args, kwargs)
    samples = next(leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim())
    twice = [
        torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == samples else leaf
        for leaf in leaves
    ]
    new_args, new_kwargs = spec.unflatten(twice)
    return new_args, new_kwargs


def with_batch(args: tuple[Any, ...], kwargs: Mapping[str, Any], batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same inputs with `batch` samples: every tensor whose dim 0 is that of the first tensor. Values are zeros."""
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
