"""What the model of a spec takes and gives: inputs, output, loss, and batches made of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from parsim.errors import ModelError, near_matches
from parsim.model.build import build_fake
from parsim.model.hugging_face.config import default_inputs, default_loss
from parsim.model.inputs import InputLeaf, ModelInput, arguments, with_bound
from parsim.model.losses import BINARY, LOSSES
from parsim.model.model import Model
from parsim.model.named.names import is_transformer
from parsim.model.objective.objective import Objective, parse_objective
from parsim.model.objective.settle import OutputKind, Settled, settle
from parsim.model.spec import ModelSpec, is_config, resolve
from parsim.model.tracing.trace import require_torch
from parsim.model.zoo import ZOO

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """What a model takes and gives, for one sample.

    Attributes:
        inputs: by the names of the arguments of `forward`, those with a batch first.
        output: shape of what the loss reads; () where it reads all that is returned.
        loss: text of an `Objective`, such as "cross_entropy". target: the targets; None where the inputs hold them.
        positional: the only input has no name: `forward` takes *args alone.
    """

    inputs: tuple[ModelInput, ...]
    output: tuple[int, ...]
    loss: str
    target: ModelInput | None
    positional: bool = False

    @property
    def objective(self) -> Objective:
        return parse_objective(self.loss)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of the first input."""
        return self.inputs[0].shape

    @property
    def takes_tokens(self) -> bool:
        """Whether a sample is one row of token numbers."""
        return len(self.inputs) == 1 and self.inputs[0].is_integer and len(self.input_shape) == 1

    def arguments(self, values: Mapping[str, InputLeaf]) -> tuple[tuple[InputLeaf, ...], dict[str, Any]]:
        """Positional and keyword arguments of the module.

        Args:
            values: by input name.
        """
        return (tuple(values.values()), {}) if self.positional else ((), arguments(values))


@lru_cache(maxsize=64)
def interface_of(spec: ModelSpec) -> Interface:
    """Inputs and output of one sample, and the loss. Needs torch for a factory or a Hugging Face config.

    Args:
        spec: of the model.

    Raises:
        ModelError: inputs that the module does not take, or an output that leaves the loss open.
    """
    spec = resolve(spec)
    if is_transformer(spec.name):
        raise ModelError(
            f"{spec.name} is planned and simulated from its sizes, and parsim holds no module of it to train; give the path of "
            "its Hugging Face config.json"
        )
    if spec.name not in ZOO:
        return _foreign_interface(spec)
    row, args = ZOO[spec.name], dict(spec.args)
    shape: tuple[int, ...] = spec.input_shape or row.input_shape
    classes = int(str(args[row.classes]))
    if row.inputs == "image":
        entry = ModelInput("x", shape)
        output: tuple[int, ...] = (2, classes)
    else:
        entry, output = ModelInput("tokens", shape, dtype="int64", high=classes), (2, *shape, classes)
    settled = settle(spec.name, {"": OutputKind(output, "float32")}, 2, spec.objective(row.loss), tokens=False)
    return Interface(inputs=(entry,), output=settled.output, loss=str(settled.objective), target=settled.target)


def _foreign_interface(spec: ModelSpec) -> Interface:
    """One fake forward tells the output.

    Unless the spec says, the loss is the usual one of such an output. Raises ModelError where the output leaves it open.
    """
    module = build_fake(spec)
    given, usual = spec.inputs, None
    if is_config(spec.name):
        given = spec.inputs or default_inputs(spec, module)
        usual = None if spec.loss else default_loss(spec, module)
    objective = spec.objective(usual)
    inputs, positional = module_inputs(module, given, spec.input_shape, spec.name)
    kind = Interface(inputs=inputs, output=(), loss="", target=None, positional=positional)
    args, kwargs = kind.arguments(zero_batch(inputs))
    settled = settle_module(module, args, kwargs, objective, name=spec.name, tokens=kind.takes_tokens, output=spec.output)
    return replace(kind, output=settled.output, loss=str(settled.objective), target=settled.target)


def settle_module(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    objective: Objective | None,
    *,
    name: str,
    tokens: bool | None = None,
    output: str | None = None,
    example: bool = False,
) -> Settled:
    """What a module trains by, told by one fake forward.

    Args:
        args, kwargs: a batch. objective, output: the choice, see `settle`. name: for messages.
        tokens: whether a sample is a row of token numbers; None: if the first tensor holds integers.
        example: code that depends on data follows the batch.

    Raises:
        ModelError: as `settle`. TraceError: the forward fails.
    """
    from parsim.model.objective.total import output_kinds
    from parsim.model.tracing.recording import run_recorded

    recording = run_recorded(module, args, kwargs, loss=None, example=example, repeats=True)
    first = recording.tensors[recording.inputs[0][1]]
    kinds = output_kinds({entry: recording.tensors[number] for entry, number in recording.outputs.items()})
    tokens = not first.is_floating_point() if tokens is None else tokens
    return settle(name, kinds, int(first.shape[0]), objective, tokens=tokens, output=output)


def module_inputs(
    module: nn.Module, inputs: tuple[ModelInput, ...] | None, shape: tuple[int, ...] | None, name: str
) -> tuple[tuple[ModelInput, ...], bool]:
    """What a module takes, checked against its forward, with the range of integers filled in from its embeddings.

    Args:
        inputs: as described; None: the one input of `shape`, which is a row of tokens where the sample has one dim and the
            module an nn.Embedding. name: of the model, for messages.

    Returns:
        (inputs, whether the only one is positional).

    Raises:
        ModelError: neither inputs nor a shape; a name that forward does not take; an argument that is missing; integers whose
            range nothing tells.
    """
    from torch import nn

    tables = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
    vocabulary = getattr(getattr(module, "config", None), "vocab_size", None)
    if inputs is None:
        if shape is None:
            raise ModelError(f"{name} needs an input_shape: the shape of one sample, e.g. [3, 224, 224] or [seq]")
        named = _first_argument(module)
        first = named or "input"
        if len(shape) == 1 and tables:
            return (ModelInput(first, shape, dtype="int64", high=vocabulary or tables[0]),), named is None
        return (ModelInput(first, shape),), named is None
    _check_arguments(module, inputs, name)
    bound = vocabulary or min(tables, default=None)
    whole = tuple(with_bound(entry, bound) for entry in inputs)
    for entry in whole:
        if entry.is_integer and entry.high is None:
            raise ModelError(
                f"{name}: input {entry.name} holds integers and no embedding tells their range; give high, which they stay "
                f'below, for example {entry.name} = {{ shape = {list(entry.shape)}, dtype = "{entry.dtype}", high = 1000 }}'
            )
    return whole, False


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _parameters(module: nn.Module) -> list[inspect.Parameter]:
    return list(inspect.signature(module.forward).parameters.values())


def _first_argument(module: nn.Module) -> str | None:
    """The name of the first argument of its forward; None if it takes *args alone."""
    first = next(iter(_parameters(module)), None)
    return first.name if first is not None and first.kind in _NAMED else None


def _check_arguments(module: nn.Module, inputs: tuple[ModelInput, ...], name: str) -> None:
    parameters = _parameters(module)
    takes = [parameter.name for parameter in parameters if parameter.kind in _NAMED]
    given = list(dict.fromkeys(entry.name.split(".")[0] for entry in inputs))
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        for argument in given:
            if argument not in takes:
                known = f" (it takes {', '.join(takes)})" if takes else " (it takes no argument by name)"
                near = near_matches(argument, takes)
                raise ModelError(
                    f"{name}: forward of {type(module).__name__} has no argument {argument!r}"
                    f"{'' if near.startswith('; known') else near}{known}"
                )
    for parameter in parameters:
        if parameter.kind in _NAMED and parameter.default is inspect.Parameter.empty and parameter.name not in given:
            raise ModelError(
                f"{name}: forward of {type(module).__name__} needs {parameter.name!r}, which inputs do not give; it takes "
                f"{', '.join(takes)}, and inputs give {', '.join(given)}; add {parameter.name} = {{ shape = [...] }}"
            )


def zero_batch(inputs: tuple[ModelInput, ...], weights: str = "float32") -> dict[str, Tensor]:
    """A batch of zeros by input name, for tracing. No dim 0 of a constant equals its number of samples.

    Args:
        inputs: of the model. weights: torch's name of their type.
    """
    import torch

    constants = {entry.shape[0] for entry in inputs if entry.constant and entry.shape}
    samples = next(count for count in range(2, 3 + len(constants)) if count not in constants)
    return {entry.name: entry.zeros(samples, getattr(torch, weights)) for entry in inputs}


def example_batch(
    spec: ModelSpec, samples: int, seed: int = 0, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> tuple[dict[str, Tensor], Tensor | None]:
    """A random batch, the same for the same seed on every device.

    Images and other float inputs are standard normal of `dtype`; tokens and classes are uniform int64.

    Args:
        spec: of the model. samples: B. seed: of the generator.
        dtype: of float32 inputs (None: float32). device: of the result.

    Returns:
        (inputs by name, target), the first dim of each is B. `Interface.arguments` makes arguments of them. The target is None
        where the inputs hold it.
    """
    require_torch("make an example batch")
    return random_batch(interface_of(resolve(spec)), samples, seed=seed, dtype=dtype, device=device)


def random_batch(
    kind: Interface, samples: int, *, seed: int = 0, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> tuple[dict[str, Tensor], Tensor | None]:
    """As `example_batch`, for an interface."""
    import torch

    dtype = dtype or torch.float32
    generator = torch.Generator().manual_seed(seed)
    given = {entry.name: entry.tensor(samples, generator, dtype).to(device) for entry in kind.inputs}
    if kind.target is None:
        return given, None
    target = kind.target.tensor(samples, generator, dtype)
    if kind.objective.row.targets == BINARY:
        target = (target > 0).to(dtype)
    return given, target.to(device)


def loss_of(spec: ModelSpec) -> str:
    """The loss with which a model trains, as the text of an `Objective`.

    Args:
        spec: of the model.
    """
    if spec.name in ZOO:
        return str(spec.objective(ZOO[spec.name].loss))
    return interface_of(resolve(spec)).loss


def checked_form(model: Model, module: Callable[[], nn.Module], kind: Interface) -> str:
    """`Model.loss_form`, after comparing a batch with its samples where the loss is not one of parsim's own.

    Args:
        model: as traced. module: gives it with real weights. kind: its interface.
    """
    from parsim.model.objective.coupling import MOST_ELEMENTS, SAMPLES, UNCHECKED, loss_form

    objective = kind.objective
    if objective.loss in LOSSES and not objective.row.plain:
        return model.loss_form
    if model.parameter_count > MOST_ELEMENTS:
        return f"{model.loss_form} {UNCHECKED}".strip()
    inputs, target = random_batch(kind, SAMPLES)
    constants = frozenset(entry.name for entry in kind.inputs if entry.constant)
    return loss_form(module(), objective, model.loss_form, inputs, target, constants=constants, call=kind.arguments)
