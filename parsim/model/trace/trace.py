"""`trace` and `record`: from any torch module to components that can be run and counted.

This file loads no torch; the work is in `record` (what a module does), `cut` (into components), `measure` (what they
cost per sample) and `runnable`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from parsim.errors import MissingDependencyError, TraceError
from parsim.model.spec import CONTROL_FLOW, EXAMPLE

if TYPE_CHECKING:
    from torch import nn

    from parsim.model.runnable import Runnable
    from parsim.model.trace.traced import Traced


Inputs = Any  # a Tensor, a sequence of positional inputs, or a mapping of keyword inputs


def trace(
    module: nn.Module,
    example_inputs: Inputs,
    *,
    granularity: str = "block",
    name: str | None = None,
    loss: str | None = None,
    control_flow: str = "refuse",
) -> Traced:
    """Cut `module` into runnable components and count what each costs per sample.

    Running the components in order equals `module(*inputs)` bitwise: outputs, gradients, buffers. Nothing is computed
    here (two forwards on fake tensors, at batches 2 and 3, tell what grows with the batch), and the module is unchanged.

    Args:
        example_inputs: a Tensor, a tuple of positional or a dict of keyword inputs; dim 0 is the batch.
        granularity: "block" (to execute), "sublayer" (blocks in parts that can be tensor-sharded) or "layer" (to explain).
        loss: a row of `parsim.model.objective` ("cross_entropy", "package.module:ROW"): adds a last component "loss" on the
            logits and an input "target".
        control_flow: "refuse" code that depends on the values of tensors, or follow the "example" inputs and say so in the
            Model's `assumptions`. Experts that a topk or argmax chooses need neither: they are taken as balanced.

    Raises:
        TraceError: if the forward depends on tensor values, fails, or is not linear in the batch.
        MissingDependencyError: without torch.
    """
    require_torch("trace a module")
    from parsim.model.trace.traced import trace_module

    args, kwargs = split_inputs(example_inputs)
    example = follows_example(control_flow)
    return trace_module(module, args, kwargs, granularity=granularity, name=name, loss=loss, example=example)


def record(
    module: nn.Module,
    example_inputs: Inputs,
    *,
    granularity: str = "block",
    loss: str | None = None,
    control_flow: str = "refuse",
) -> tuple[Runnable, ...]:
    """Only the runnable components, for the batch, training mode, dtype and device of now. Arguments as for `trace`."""
    require_torch("record a module")
    from parsim.model.trace.cut import runnables
    from parsim.model.trace.traced import run_cut

    args, kwargs = split_inputs(example_inputs)
    example = follows_example(control_flow)
    return runnables(*run_cut(module, args, kwargs, granularity=granularity, loss=loss, example=example), module)


def follows_example(control_flow: str) -> bool:
    """Whether code that depends on data follows the example. Raises TraceError for an unknown word."""
    if control_flow not in CONTROL_FLOW:
        raise TraceError(f"control_flow must be one of {', '.join(CONTROL_FLOW)}, got {control_flow!r}")
    return control_flow == EXAMPLE


def split_inputs(example_inputs: Inputs) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Positional and keyword arguments of the module."""
    if isinstance(example_inputs, Mapping):
        return (), example_inputs
    if isinstance(example_inputs, Sequence):
        return tuple(example_inputs), {}
    return (example_inputs,), {}


def require_torch(purpose: str) -> None:
    """Raises MissingDependencyError that says how to get torch."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f"torch is needed to {purpose}, and it is not installed; install parsim[torch], or use a preset or saved Model"
        ) from error
