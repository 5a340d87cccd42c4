"""What the model of a spec takes and gives: inputs, output, loss, and batches made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from parsim.errors import ModelError
from parsim.model.build import build_module, content_of, shared_fake
from parsim.model.catalogue.hugging_face import default_inputs, default_loss
from parsim.model.catalogue.names import is_transformer
from parsim.model.catalogue.zoo import ZOO
from parsim.model.inputs import InputLeaf, ModelInput, arguments, module_inputs
from parsim.model.model import COUPLED, MIXING, Model
from parsim.model.objective import BINARY, Objective, OpenLoss, OutputKind, Settled, parse_objective, settle
from parsim.model.spec import EXAMPLE, ModelSpec, is_config, resolve
from parsim.model.trace.trace import require_torch

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
        """Shape of one sample of the first input."""
        return self.inputs[0].shape

    @property
    def takes_tokens(self) -> bool:
        """Whether a sample is one row of token numbers."""
        return len(self.inputs) == 1 and self.inputs[0].is_integer and len(self.input_shape) == 1

    @property
    def inputs_in_order(self) -> tuple[ModelInput, ...]:
        """Inputs in the order in which a forward is given them. Needs torch."""
        from parsim.model.trace.record import flatten_inputs

        by_name = {each.name: each for each in self.inputs}
        names, _ = flatten_inputs(*self.arguments({name: name for name in by_name}))
        return tuple(by_name[name] for name in names)

    def arguments(self, values: Mapping[str, InputLeaf]) -> tuple[tuple[InputLeaf, ...], dict[str, Any]]:
        """Positional and keyword arguments of the module from values by input name."""
        return (tuple(values.values()), {}) if self.positional else ((), arguments(values))


def interface_of(spec: ModelSpec) -> Interface:
    """Inputs and output of one sample, and the loss. Needs torch for a factory or a Hugging Face config.

    Raises:
        ModelError: inputs that the module does not take, or an output that leaves the loss open.
    """
    spec = resolve(spec)
    if is_transformer(spec.name):
        raise ModelError(
            f"{spec.name} is planned and simulated from its sizes, and parsim holds no module of it to train; give the path of "
            "its Hugging Face config.json"
        )
    content = "" if spec.name in ZOO else content_of(spec)
    interface = known_interface(spec, content)
    if interface is None:
        interface = _zoo_interface(spec) if spec.name in ZOO else open_interface(spec, content).settled()
        keep_interface(spec, content, interface)
    return interface


_kept: dict[tuple[ModelSpec, str], Interface] = {}
MOST_KEPT = 64


def known_interface(spec: ModelSpec, content: str) -> Interface | None:
    """What an earlier forward has settled for this `parsim.model.build.content_of` a resolved spec, if one has."""
    return _kept.get((spec, content))


def keep_interface(spec: ModelSpec, content: str, interface: Interface) -> None:
    """For `known_interface`; the oldest are forgotten."""
    while len(_kept) >= MOST_KEPT:
        del _kept[next(iter(_kept))]
    _kept[spec, content] = interface


def _zoo_interface(spec: ModelSpec) -> Interface:
    row, args = ZOO[spec.name], dict(spec.args)
    shape: tuple[int, ...] = spec.input_shape or row.input_shape
    classes = int(str(args[row.classes]))
    if row.inputs == "image":
        takes, output = ModelInput("x", shape), OutputKind((2, classes), "float32")
    else:
        takes = ModelInput("tokens", shape, dtype="int64", high=classes)
        output = OutputKind((2, *shape, classes), "float32")
    settled = settle(spec.name, {"": output}, 2, spec.objective(row.loss), tokens=False)
    return Interface(inputs=(takes,), output=settled.output, loss=str(settled.objective), target=settled.target)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenInterface:
    """An interface whose output and targets one forward of `module` has to tell.

    Attributes:
        kind: without them. args, kwargs: for that forward. loss: what is known of the loss.
    """

    module: nn.Module
    kind: Interface
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: OpenLoss
    example: bool

    def settled(self) -> Interface:
        """The interface by a forward. Raises ModelError where the output leaves the loss open."""
        return self.with_output(settle_module(self.module, self.args, self.kwargs, self.loss, example=self.example))

    def with_output(self, settled: Settled) -> Interface:
        """The interface with what a forward has settled."""
        return replace(self.kind, output=settled.output, loss=str(settled.objective), target=settled.target)


def open_interface(spec: ModelSpec, content: str) -> OpenInterface:
    """The module of a spec, what it takes, and what is asked for; unless the spec says, the loss is that of its output.

    Args:
        spec: resolved, not of the zoo. content: of `parsim.model.build.content_of`.

    Raises:
        ModelError: inputs that the module does not take.
    """
    example = spec.control_flow == EXAMPLE
    module = example_module(spec) if example else shared_fake(spec, content)
    described, usual = spec.inputs, None
    if is_config(spec.name):
        described = spec.inputs or default_inputs(spec, module)
        usual = None if spec.loss else default_loss(spec, module)
    objective = spec.objective(usual)
    inputs, positional = module_inputs(module, described, spec.input_shape, spec.name)
    kind = Interface(inputs=inputs, output=(), loss="", target=None, positional=positional)
    args, kwargs = kind.arguments(drawn_batch(inputs) if example else zero_batch(inputs))
    loss = OpenLoss(name=spec.name, objective=objective, tokens=kind.takes_tokens, output=spec.output)
    return OpenInterface(module=module, kind=kind, args=args, kwargs=kwargs, loss=loss, example=example)


def settle_module(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: OpenLoss, *, example: bool = False
) -> Settled:
    """What a module trains by, found by one fake forward of a batch.

    Args:
        example: code that depends on data follows the batch.

    Raises:
        ModelError: as `settle`. TraceError: the forward fails.
    """
    from parsim.model.total_loss import output_kinds
    from parsim.model.trace.record import run_recorded

    recording = run_recorded(module, args, kwargs, loss=None, example=example)
    samples = int(recording.tensors[recording.inputs[0][1]].shape[0])
    kinds = output_kinds({name: recording.tensors[number] for name, number in recording.outputs.items()})
    return settle(loss.name, kinds, samples, loss.objective, tokens=loss.tokens, output=loss.output)


def zero_batch(inputs: tuple[ModelInput, ...], weights: str = "float32") -> dict[str, Tensor]:
    """A batch of zeros by input name, for tracing; `weights`: torch's name of their type.

    No dim 0 of a constant equals its number of samples.
    """
    import torch

    return {entry.name: entry.zeros(_samples(inputs), getattr(torch, weights)) for entry in inputs}


def drawn_batch(inputs: tuple[ModelInput, ...], weights: str = "float32") -> dict[str, Tensor]:
    """`zero_batch` with random data of seed 0: the example that `control_flow` follows."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return {entry.name: entry.tensor(_samples(inputs), generator, getattr(torch, weights)) for entry in inputs}


def _samples(inputs: tuple[ModelInput, ...]) -> int:
    """Two, or the next number that is not a dim 0 of a constant."""
    constants = {entry.shape[0] for entry in inputs if entry.constant and entry.shape}
    return next(count for count in range(2, 3 + len(constants)) if count not in constants)


def example_module(spec: ModelSpec) -> nn.Module:
    """The module with real weights of seed 0, as the executor records it; torch's random state stays as it is."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build_module(spec)


def example_batch(
    spec: ModelSpec, samples: int, seed: int = 0, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> tuple[dict[str, Tensor], Tensor | None]:
    """A random batch, the same for the same seed on every device.

    Images and other float inputs are standard normal of `dtype` (None: float32); tokens and classes are uniform int64.

    Returns:
        (inputs by name, target), the first dim of each is `samples`. `Interface.arguments` makes arguments of them. The target
        is None where the inputs hold it.
    """
    require_torch("make an example batch")
    return random_batch(interface_of(resolve(spec)), samples, seed=seed, dtype=dtype, device=device)


def random_batch(
    kind: Interface, samples: int, *, seed: int = 0, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> tuple[dict[str, Tensor], Tensor | None]:
    """`example_batch` for an interface."""
    import torch

    dtype = dtype or torch.float32
    generator = torch.Generator().manual_seed(seed)
    inputs = {each.name: each.tensor(samples, generator, dtype).to(device) for each in kind.inputs}
    if kind.target is None:
        return inputs, None
    target = kind.target.tensor(samples, generator, dtype)
    if kind.objective.row.targets == BINARY:
        target = (target > 0).to(dtype)
    return inputs, target.to(device)


def loss_of(spec: ModelSpec) -> str:
    """The loss with which a model trains, as the text of an `Objective`."""
    if spec.name in ZOO:
        return str(spec.objective(ZOO[spec.name].loss))
    return interface_of(resolve(spec)).loss


def checked_form(model: Model, module: Callable[[], nn.Module], kind: Interface) -> str:
    """`Model.loss_form`, after comparing a batch with its samples.

    Args:
        model: as traced. module: gives it with real weights. kind: its interface.
    """
    from parsim.model.coupling import MOST_ELEMENTS, MOST_FLOP, UNCHECKED, loss_form, samples_judged

    objective = kind.objective
    if model.loss_form in (COUPLED, MIXING):
        return model.loss_form
    if objective.adds_up and (model.parameter_count > MOST_ELEMENTS or model.forward_flop > MOST_FLOP):
        return model.loss_form
    if model.parameter_count > MOST_ELEMENTS:
        return f"{model.loss_form} {UNCHECKED}".strip()
    inputs, target = random_batch(kind, samples_judged(model.forward_flop))
    constants = frozenset(entry.name for entry in kind.inputs if entry.constant)
    return loss_form(module(), objective, model.loss_form, inputs, target, constants=constants, call=kind.arguments)
