"""A module traced: its Model, and its components as one callable that can be compared with the module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from parsim.errors import TraceError
from parsim.model.build import follows_example, split_inputs
from parsim.model.model import Model
from parsim.model.runnable import Ref, Runnable
from parsim.model.trace.cut import runnables, value_names
from parsim.model.trace.record import flatten_inputs
from parsim.model.trace.recorder import Recording
from parsim.model.trace.traced import model_of, run_cut
from parsim.private import tree_unflatten


class Traced:
    """Calling it runs the components in order; returns what the module returns (or the loss, if one was asked for).
    `model`: numbers per sample. `components`: for the batch, mode, dtype and device of the example inputs; a call with other
    shapes is an error of torch: trace again."""

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
        if not kwargs and args and isinstance(args[0], Mapping):
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
        return tree_unflatten([self._leaf(leaf, values) for leaf in recording.output_leaves], recording.output_spec)

    def _leaf(self, leaf: Any, values: dict[str, Tensor]) -> Any:
        if type(leaf) is not Ref:
            return leaf
        if leaf.slot in self._names:
            return values[self._names[leaf.slot]]
        if leaf.slot in self._recording.constants:
            return self._recording.constants[leaf.slot]
        key = self._recording.state[leaf.slot]
        return self.module.get_parameter(key.name) if key.kind == "parameter" else self.module.get_buffer(key.name)


def trace(
    module: nn.Module,
    example_inputs: Any,
    *,
    granularity: str = "block",
    name: str | None = None,
    loss: str | None = None,
    control_flow: str = "refuse",
) -> Traced:
    """The Model and the components of a module; arguments as for `parsim.model.record`."""
    args, kwargs = split_inputs(example_inputs)
    example = follows_example(control_flow)
    recording, intervals = run_cut(module, args, kwargs, granularity=granularity, loss=loss, example=example)
    return Traced(
        module=module,
        model=model_of(module, args, kwargs, granularity=granularity, name=name, loss=loss, example=example),
        recording=recording,
        components=runnables(recording, intervals, module),
        names=value_names(recording, intervals),
    )
