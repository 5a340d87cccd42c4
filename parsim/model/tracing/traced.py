"""A traced module: its Model (numbers per sample) and its runnable components."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from parsim.errors import TraceError
from parsim.model.model import Model
from parsim.model.objective.total import SUM
from parsim.model.runnable import Ref, Runnable
from parsim.model.tracing.cut import cut, runnables, value_names
from parsim.model.tracing.half_precision import HALF, with_half_precision
from parsim.model.tracing.measure import combine, measure
from parsim.model.tracing.recorder import Recording
from parsim.model.tracing.recording import flatten_inputs, run_recorded

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
) -> Traced:
    """See `parsim.model.tracing.trace.trace`."""
    recording = run_recorded(module, args, kwargs, loss=loss)
    intervals = cut(recording, module, granularity)
    model = model_of(module, args, kwargs, granularity=granularity, name=name, loss=loss)
    return Traced(
        module=module,
        model=model,
        recording=recording,
        components=runnables(recording, intervals, module),
        names=value_names(recording, intervals),
    )


def model_of(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    granularity: str,
    name: str | None = None,
    loss: str | None = None,
    source: str = "",
) -> Model:
    """The Model of a module in training mode, independent of the batch of the example inputs."""
    kind = type(module).__name__
    modes = [(part, part.training) for part in module.modules()]
    if not module.training:
        module.train()
    try:
        (small, large), (small_half, large_half) = (
            [
                measure(module, *with_batch(args, kwargs, batch), granularity=granularity, loss=loss, autocast=autocast)
                for batch in BATCHES
            ]
            for autocast in (None, HALF)
        )
    finally:
        for part, mode in modes:
            part.training = mode
    model = combine(small, large, name=name or kind, granularity=granularity, source=source or f"trace of {kind}")
    form = small.recording.loss_form
    return replace(with_half_precision(model, small_half, large_half), loss=loss or "", loss_form="" if form == SUM else form)


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
