"""The Model of an nn.Module that the caller already has, with its loss, as `parsim.plan(module, ...)` uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from parsim.errors import ModelError
from parsim.model.losses import usual_loss
from parsim.model.model import Model
from parsim.model.tracing.trace import require_torch, split_inputs

if TYPE_CHECKING:
    from torch import Tensor, nn


def model_from_module(
    module: nn.Module,
    example_inputs: Any = None,
    *,
    input_shape: tuple[int, ...] | None = None,
    granularity: str = "block",
    loss: str | None = None,
    name: str | None = None,
) -> Model:
    """Trace a module on fake tensors, and add its loss as the last component.

    Args:
        example_inputs: a batch as the module takes it (a Tensor, a tuple or a dict; dim 0 is the batch).
        input_shape: of one sample, instead of `example_inputs`; integers below the table's size where the sample has one dim
            and the module an nn.Embedding, else floats.
        loss: a row of `parsim.model.losses.LOSSES`; left out: the usual one of such an output (`usual_loss`).

    Raises:
        ModelError: not a module, neither inputs nor a shape, or an output that leaves the loss open. TraceError: the module
            cannot be cut into components.
        MissingDependencyError: without torch.
    """
    require_torch("trace a module")
    from torch import nn

    from parsim.model.tracing.recording import run_recorded
    from parsim.model.tracing.traced import model_of

    if not isinstance(module, nn.Module):
        raise ModelError(
            f"{type(module).__name__} is no model: give the name of one, a run file, a parsim.Model or a torch.nn.Module"
        )
    if example_inputs is None:
        if input_shape is None:
            raise ModelError(
                f"{type(module).__name__} needs an input: give input_shape, the shape of one sample such as (3, 224, 224), or "
                "example_inputs, a batch as the module takes it"
            )
        example_inputs = _zeros(module, input_shape)
    args, kwargs = split_inputs(example_inputs)
    if loss is None:
        recording = run_recorded(module, args, kwargs, loss="mse", repeats=True)
        assert recording.logits_value is not None, "a recording with a loss has logits"
        output = tuple(recording.tensors[recording.logits_value].shape[1:])
        tokens = not recording.tensors[recording.inputs[0][1]].is_floating_point()
        loss = usual_loss(name or type(module).__name__, output, tokens=tokens)
    return model_of(module, args, kwargs, granularity=granularity, name=name, loss=loss)


def _zeros(module: nn.Module, input_shape: tuple[int, ...]) -> Tensor:
    """A batch of two samples."""
    import torch
    from torch import nn

    tokens = len(input_shape) == 1 and any(isinstance(part, nn.Embedding) for part in module.modules())
    return torch.zeros((2, *input_shape), dtype=torch.long if tokens else torch.float32)
