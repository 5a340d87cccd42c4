"""The Model of an nn.Module that the caller already has, with its loss, as `parsim.plan(module, ...)` uses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from parsim.errors import ModelError
from parsim.model.inputs import ModelInput, module_inputs, ordered
from parsim.model.interface import Interface, checked_form, drawn_batch, settle_module, zero_batch
from parsim.model.model import COUPLED, MIXING, Model
from parsim.model.objective.objective import Objective, naming_coupled_losses, parse_objective
from parsim.model.objective.settle import Settled
from parsim.model.tracing.trace import follows_example, require_torch, split_inputs

if TYPE_CHECKING:
    from torch import nn


def model_from_module(
    module: nn.Module,
    example_inputs: Any = None,
    *,
    input_shape: tuple[int, ...] | None = None,
    inputs: tuple[ModelInput, ...] | None = None,
    granularity: str = "block",
    loss: str | Objective | None = None,
    output: str | None = None,
    name: str | None = None,
    control_flow: str = "refuse",
) -> Model:
    """Trace a module on fake tensors, and add its loss as the last component.

    Args:
        example_inputs: a batch as the module takes it (a Tensor, a tuple or a dict). Dim 0 of the first tensor is the batch;
            a tensor with another dim 0 is constant.
        input_shape: of one sample, instead of `example_inputs`; integers below the table's size where the sample has one dim
            and the module an nn.Embedding, else floats.
        inputs: by the names of the arguments of its forward, instead of both.
        loss: a row of `parsim.model.losses.LOSSES`, an Objective or its text; left out: the usual one of such an output.
        output: which output a loss that is left out reads.
        control_flow: "refuse" or "example", as for `parsim.model.trace`; without `example_inputs` the example is drawn.

    Raises:
        ModelError: not a module, neither inputs nor a shape, an output that leaves the loss open, or integers that no table has
            rows for. TraceError: the module cannot be cut into components.
        MissingDependencyError: without torch.
    """
    require_torch("trace a module")
    from torch import nn

    from parsim.model.tracing.refused.index_ranges import seen_ranges
    from parsim.model.tracing.traced import model_of

    if not isinstance(module, nn.Module):
        if isinstance(module, type) and issubclass(module, nn.Module):
            raise ModelError(f"{module.__name__} is a class and not a model: give an instance, such as {module.__name__}()")
        raise ModelError(
            f"{type(module).__name__} is not a model: give the name of one, a run file, a parsim.Model or a torch.nn.Module"
        )
    called, tokens = name or type(module).__name__, None
    declared: tuple[ModelInput | None, ...]
    if example_inputs is not None:
        args, kwargs = split_inputs(example_inputs)
        declared = seen_ranges(args, kwargs)
    elif input_shape is None and inputs is None:
        raise ModelError(
            f"{called} needs an input: give input_shape, the shape of one sample such as (3, 224, 224), inputs by name, or "
            "example_inputs, a batch as the module takes it"
        )
    else:
        described = None if inputs is None else ordered(inputs)
        whole, positional = module_inputs(module, described, input_shape, called)
        kind = Interface(inputs=whole, output=(), loss="", target=None, positional=positional)
        args, kwargs = kind.arguments(drawn_batch(whole) if follows_example(control_flow) else zero_batch(whole))
        tokens, declared = kind.takes_tokens, kind.inputs_in_order
    objective = parse_objective(loss) if isinstance(loss, str) else loss
    example = follows_example(control_flow)
    settled = settle_module(module, args, kwargs, objective, name=called, tokens=tokens, output=output, example=example)
    with naming_coupled_losses():
        text = str(settled.objective)
        model = model_of(
            module, args, kwargs, granularity=granularity, name=name, loss=text, example=example, declared=declared
        )
    if example_inputs is None:
        kind = replace(kind, output=settled.output, loss=model.loss, target=settled.target)
        return replace(model, loss_form=checked_form(model, lambda: module, kind))
    return replace(model, loss_form=_form_of_examples(model, module, args, kwargs, settled))


def _form_of_examples(
    model: Model, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], settled: Settled
) -> str:
    """`checked_form` on the batch that was given: its first samples."""
    import torch
    from torch import Tensor

    from parsim.model.objective.coupling import MOST_ELEMENTS, MOST_FLOP, SAMPLES, loss_form, samples_judged
    from parsim.model.tracing.recording import flatten_inputs

    objective = settled.objective
    if model.loss_form in (COUPLED, MIXING) or (objective.adds_up and model.parameter_count > MOST_ELEMENTS):
        return model.loss_form
    leaves, structure = flatten_inputs(args, kwargs)
    tensors = {str(place): leaf for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    batch = next(iter(tensors.values())).shape[0]
    constants = frozenset(name for name, tensor in tensors.items() if tensor.dim() == 0 or tensor.shape[0] != batch)
    # a constant may number the samples of the whole batch, as edges do nodes
    samples = batch if objective.adds_up and constants else min(batch, samples_judged(model.forward_flop))
    if objective.adds_up and model.forward_flop * samples > MOST_FLOP * SAMPLES:
        return model.loss_form
    given = {name: tensor if name in constants else tensor[:samples] for name, tensor in tensors.items()}
    generator = torch.Generator().manual_seed(0)
    target = None if settled.target is None else settled.target.tensor(samples, generator, torch.float32)

    def call(values: Mapping[str, Tensor]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        filled = [values.get(str(place), leaf) for place, leaf in enumerate(leaves)]
        found: tuple[tuple[Any, ...], Mapping[str, Any]] = structure.unflatten(filled)
        return found

    return loss_form(module, objective, model.loss_form, given, target, constants=constants, call=call)
