"""The module of a model spec, real or without memory for its weights; what it takes and gives, and batches of that."""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import json
import sys
import sysconfig
import traceback
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parsim.errors import FactoryError, MissingDependencyError, ModelError, TraceError
from parsim.model.catalogue.hugging_face import default_inputs, default_loss, module_from_config, read_config
from parsim.model.catalogue.names import is_transformer
from parsim.model.catalogue.zoo import ZOO
from parsim.model.inputs import InputLeaf, ModelInput, arguments, module_inputs
from parsim.model.model import COUPLED, MIXING, Model
from parsim.model.objective import BINARY, Objective, OutputKind, Settled, parse_objective, settle
from parsim.model.spec import CONTROL_FLOW, EXAMPLE, ModelSpec, is_config, resolve

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from parsim.model.runnable import Runnable
    from parsim.model.trace.repeats import Stack


def require_torch(purpose: str) -> None:
    """Raises MissingDependencyError that says how to get torch."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f"torch is needed to {purpose}, and it is not installed; install parsim[torch], or use a preset or saved Model"
        ) from error


def build_module(spec: ModelSpec) -> nn.Module:
    """A new module; its initial weights follow torch's random state (torch.manual_seed).
    Raises ModelError: the factory cannot be found or refuses its arguments, or no layer is among the targets of adapters.
    MissingDependencyError: torch is not installed."""
    require_torch(f"build {spec.name}")
    from parsim.model.adapters import adapt

    spec = resolve(spec)
    return adapt(_built(spec), spec.tune)


def _built(spec: ModelSpec) -> nn.Module:
    """The module as its source makes it."""
    if is_config(spec.name):
        return module_from_config(spec)
    if ":" in spec.name:
        return _from_factory(spec)
    row, arguments = ZOO[spec.name], dict(spec.args)
    shape = {"input_shape": spec.input_shape} if row.inputs == "image" else {}
    try:
        module: nn.Module = getattr(importlib.import_module("parsim.model.catalogue.networks"), row.factory)(
            **shape, **arguments
        )
    except (ArithmeticError, AssertionError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise FactoryError(
            f"{spec.name} cannot be built with {arguments} and input_shape {list(spec.input_shape or ())}: {reason}; "
            "correct model.args or model.input_shape"
        ) from error
    return module


def _from_factory(spec: ModelSpec) -> nn.Module:
    from torch import nn

    package, _, function = spec.name.partition(":")
    try:
        factory = getattr(importlib.import_module(package), function)
    except (ImportError, AttributeError) as error:
        fix = "give package.module:factory with the package on the Python path"
        if package.endswith(".py"):
            file = Path(package)
            fix = f"a module is named without .py: start in {file.parent} and give {file.stem}:{function}"
        raise ModelError(f"cannot import {spec.name!r}: {error}; {fix}") from error
    except Exception as error:  # of the user's own module, while it was imported
        raise FactoryError(f"importing {package} for {spec.name} {_raised(error, package)}") from error
    _check_factory(spec.name, factory)
    try:
        module = factory(**dict(spec.args))
    except Exception as error:  # the user's own fault, which their own traceback explains best
        if isinstance(error, TypeError) and error.__traceback__ is not None and error.__traceback__.tb_next is None:
            raise ModelError(f"{spec.name} refuses its arguments {dict(spec.args)}: {error}") from error
        raise FactoryError(f"{spec.name} with the arguments {dict(spec.args)} {_raised(error, package)}") from error
    if not isinstance(module, nn.Module):
        raise ModelError(f"{spec.name} returned a {type(module).__name__}, not a torch module; return an nn.Module")
    return module


def _check_factory(name: str, factory: object) -> None:
    """Raise ModelError for what makes no module, before it is called: a call may do anything.
    A class must be an nn.Module. A function must be one of Python, and either the user's own or annotated to return an
    nn.Module. Those of the standard library and of installed packages do all kinds of things."""
    from torch import nn

    inner = inspect.unwrap(factory) if callable(factory) else factory
    while isinstance(inner, functools.partial):
        inner = inspect.unwrap(inner.func)
    if isinstance(inner, type):
        if issubclass(inner, nn.Module):
            return
        raise ModelError(f"{name} is the class {inner.__qualname__}, no nn.Module; name one, or a function that makes one")
    code = getattr(inner, "__code__", getattr(type(inner).__call__, "__code__", None) if callable(inner) else None)
    if code is None or isinstance(inner, nn.Module):
        raise ModelError(
            f"{name} is of the type {type(inner).__name__}, and no factory of an nn.Module; name a class or a Python function "
            "that makes one"
        )
    places = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    file = code.co_filename
    installed = file.startswith("<frozen") or any(Path(file).is_relative_to(place) for place in places)
    if installed and not _returns_module(inner):
        raise ModelError(
            f"{name} is a function of an installed package that is not annotated to return an nn.Module, so it is not called; "
            "write a function of your own that calls it"
        )


def _returns_module(function: object) -> bool:
    from torch import nn

    try:
        hint = typing.get_type_hints(function).get("return")
    except Exception:  # annotations are the package's own code
        return False
    return isinstance(hint, type) and issubclass(hint, nn.Module)


def _raised(error: Exception, package: str) -> str:
    """What the user's code raised, with its traceback from the first frame outside parsim and the import system."""
    imports = ("<frozen importlib", importlib.__file__)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)[1:] if not frame.filename.startswith(imports)]
    lines = "".join(traceback.format_list(frames) + traceback.format_exception_only(error))
    return f"raised {type(error).__name__}; fix {package}:\nTraceback (most recent call last):\n{lines.rstrip()}"


def build_fake(spec: ModelSpec) -> nn.Module:
    """Built without memory for its weights where the factory allows it."""
    from parsim.model.trace.fakes import QuickFakeMode
    from parsim.private import without_rejection

    try:
        with warnings.catch_warnings(), QuickFakeMode(), without_rejection():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # by deepcopy, which only compares it
            module = build_module(spec)
    except (FactoryError, RuntimeError):  # perhaps it looks at its weights' values: build it for real
        return _build_with_memory(spec)
    return _build_with_memory(spec) if not is_config(spec.name) and _has_fake_attributes(module) else module


def _build_with_memory(spec: ModelSpec) -> nn.Module:
    """`build_module`, where torch's own refusal of sizes is one message."""
    try:
        return build_module(spec)
    except RuntimeError as error:
        raise ModelError(f"{spec.name} cannot be built: {str(error).strip().splitlines()[0]}; correct the sizes") from error


def _has_fake_attributes(module: nn.Module) -> bool:
    """Whether a part has a fake tensor that is no parameter or buffer, such as a table of angles: a forward needs its data."""
    from parsim.private import FakeTensor, tree_leaves

    state = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    return any(
        isinstance(leaf, FakeTensor) and id(leaf) not in state
        for part in module.modules()
        for name, value in part.__dict__.items()
        if name not in ("_parameters", "_buffers", "_modules")
        for leaf in tree_leaves(value)
    )


_kept_fake: dict[tuple[ModelSpec, str], nn.Module] = {}
_factories: dict[str, list[tuple[object, str]]] = {}


def shared_fake(spec: ModelSpec, content: str) -> nn.Module:
    """`build_fake` of a resolved spec, or the module of the last call if that was for the same content: leave it unchanged.
    One load asks several times. A module that has memory for its weights is not kept."""
    from parsim.private import FakeTensor

    if (spec, content) in _kept_fake:
        return _kept_fake[spec, content]
    module = build_fake(spec)
    if all(isinstance(tensor, FakeTensor) for tensor in (*module.parameters(), *module.buffers())):
        _kept_fake.clear()
        _kept_fake[spec, content] = module
    return module


def content_of(spec: ModelSpec) -> str:
    """What the name of a spec stands for now: the text of a config, the source of a factory's file, "" for the zoo.
    Raises ModelError: the file of a factory has changed since this process imported it."""
    if is_config(spec.name):
        return json.dumps(read_config(spec), sort_keys=True)
    package, colon, function = spec.name.partition(":")
    if not colon:
        return ""
    try:
        factory = getattr(importlib.import_module(package), function)
        source = Path(str(sys.modules[package].__file__)).read_bytes()
    except Exception:  # building it says what is wrong
        return ""
    digest = hashlib.sha256(source).hexdigest()
    seen = _factories.setdefault(spec.name, [])
    for place, (imported, imported_digest) in enumerate(seen):
        if imported is factory:
            if imported_digest != digest:
                raise ModelError(
                    f"{sys.modules[package].__file__} has changed since it was imported here, so {spec.name} would be that of "
                    f"the old file; start Python again, or importlib.reload({package})"
                )
            return f"{digest} {place}"
    seen.append((factory, digest))
    return f"{digest} {len(seen) - 1}"


def check_real(module: nn.Module) -> None:
    """Raise ModelError for complex parameters: gradients are summed and divided in flat arrays of real numbers."""
    for name, parameter in module.named_parameters():
        if parameter.is_complex() and parameter.requires_grad:
            raise ModelError(
                f"parameter {name} of {type(module).__name__} is complex ({parameter.dtype}), and a run sums and divides real "
                f"ones: keep its real form (nn.Parameter(torch.view_as_real(weight))) and write torch.view_as_complex(self."
                f"{name.rpartition('.')[2]}) in forward, which computes the same"
            )


def move_hollow(module: nn.Module, device: torch.device) -> None:
    """Move the module to a device whose memory its parameters and buffers do not take: they have no data from then on.
    Shapes, strides and types stay, and so does every tensor's identity. That is all that a recording looks at."""
    import torch

    state = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    for tensor in state.values():
        if tensor.layout is torch.strided:
            hollow = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            hollow.untyped_storage().resize_(0)
            tensor.data = hollow
    module._apply(lambda tensor: tensor.to(device))  # type: ignore[no-untyped-call]  # what its own `_apply` moves beside them


def cast_module(module: nn.Module, dtype: torch.dtype) -> None:
    """`module.to(dtype)` for one that may be fake: numbers that are not whole change their type, tied weights stay tied."""
    from torch import nn

    cast: dict[int, Tensor] = {}
    holders: list[dict[str, Any]] = [held for owner in module.modules() for held in (owner._parameters, owner._buffers)]
    for holder in holders:
        for key, value in holder.items():
            if value is not None and value.is_floating_point():
                if id(value) not in cast:
                    narrow = value.detach().to(dtype)
                    cast[id(value)] = nn.Parameter(narrow, value.requires_grad) if isinstance(value, nn.Parameter) else narrow
                holder[key] = cast[id(value)]


# What the model of a spec takes and gives: inputs, output, loss, and batches made of them.


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """What a model takes and gives, for one sample.

    Attributes:
        inputs: by the names of the arguments of `forward`, those with a batch first.
        output: shape of what the loss reads; () where it reads all that is returned.
        loss: text of an `Objective`, such as "cross_entropy". target: the targets; None where the inputs hold them.
        positional: the only input has no name: `forward` takes *args alone.
        stacks: lists of layers that repeat, which a trace takes once.
    """

    inputs: tuple[ModelInput, ...]
    output: tuple[int, ...]
    loss: str
    target: ModelInput | None
    positional: bool = False
    stacks: tuple[Stack, ...] = ()

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
    Raises ModelError: inputs that the module does not take, or an output that leaves the loss open."""
    spec = resolve(spec)
    if is_transformer(spec.name):
        raise ModelError(
            f"{spec.name} is planned and simulated from its sizes, and parsim holds no module of it to train; give the path of "
            "its Hugging Face config.json"
        )
    return _zoo_interface(spec) if spec.name in ZOO else _settled_interface(spec, content_of(spec))


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


@functools.lru_cache(maxsize=64)
def _settled_interface(spec: ModelSpec, content: str) -> Interface:
    """What a module takes, and what one forward says of its output; unless the spec says, the loss is that of its output.
    `spec`: resolved, not of the zoo. `content`: of `content_of`."""
    example = spec.control_flow == EXAMPLE
    module = example_module(spec) if example else shared_fake(spec, content)
    described, usual = spec.inputs, None
    if is_config(spec.name):
        described = spec.inputs or default_inputs(spec, module)
        usual = None if spec.loss else default_loss(spec, module)
    objective = spec.objective(usual)
    inputs, positional = module_inputs(module, described, spec.input_shape, spec.name)
    kind = Interface(inputs=inputs, output=(), loss="", target=None, positional=positional)
    batch = kind.arguments(drawn_batch(inputs) if example else zero_batch(inputs))
    settled, stacks = settle_module(
        module, *batch, name=spec.name, objective=objective, tokens=kind.takes_tokens, output=spec.output, example=example
    )
    return replace(kind, output=settled.output, loss=str(settled.objective), target=settled.target, stacks=stacks)


def settle_module(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    name: str,
    objective: Objective | None,
    tokens: bool,
    output: str | None,
    example: bool,
) -> tuple[Settled, tuple[Stack, ...]]:
    """What a module trains by, found by one fake forward of a batch, which code that depends on data follows if `example`;
    and the lists of layers that repeat.
    Raises ModelError: as `settle`, which has the other arguments. TraceError: the forward fails."""
    from parsim.model.total_loss import output_kinds
    from parsim.model.trace.record import run_recorded
    from parsim.model.trace.repeats import stacks_of

    recording = run_recorded(module, args, kwargs, loss=None, example=example)
    samples = int(recording.tensors[recording.inputs[0][1]].shape[0])
    kinds = output_kinds({name: recording.tensors[number] for name, number in recording.outputs.items()})
    return settle(name, kinds, samples, objective, tokens=tokens, output=output), stacks_of(recording, module)


def zero_batch(inputs: tuple[ModelInput, ...], weights: str = "float32") -> dict[str, Tensor]:
    """A batch of zeros by input name, for tracing; `weights`: torch's name of their type.
    No dim 0 of a constant equals its number of samples."""
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
    Images and other float inputs are standard normal of `dtype` (None: float32); tokens and classes are uniform int64. Returns
    (inputs by name, target), the first dim of each is `samples`. `Interface.arguments` makes arguments of them. The target is
    None where the inputs hold it."""
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
    `model`: as traced. `module`: gives it with real weights. `kind`: its interface."""
    from parsim.model.total_loss import MOST_ELEMENTS, MOST_FLOP, UNCHECKED, loss_form, samples_judged

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


# The components of a module as it is: what the executor runs.


def record(
    module: nn.Module,
    example_inputs: Any,
    *,
    granularity: str = "block",
    loss: str | None = None,
    control_flow: str = "refuse",
) -> tuple[Runnable, ...]:
    """Cut `module` into runnable components, for the batch, training mode, dtype and device of now.

    Running them in order equals `module(*inputs)` bitwise: outputs, gradients, buffers. Nothing is computed here, and the
    module is unchanged.

    Args:
        example_inputs: a Tensor, a tuple of positional or a dict of keyword inputs; dim 0 is the batch.
        granularity: "block" (to execute), "sublayer" (blocks in parts that can be tensor-sharded) or "layer" (to explain).
        loss: a row of `parsim.model.objective` ("cross_entropy", "package.module:ROW"): adds a last component "loss" on the
            logits and an input "target".
        control_flow: "refuse" code that depends on the values of tensors, or follow the "example" inputs and say so in the
            Model's `assumptions`. Experts that a topk or argmax chooses need neither: they are taken as balanced.

    Raises:
        TraceError: if the forward depends on tensor values, or fails.
        MissingDependencyError: without torch.
    """
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


def split_inputs(example_inputs: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Positional and keyword arguments of the module."""
    if isinstance(example_inputs, Mapping):
        return (), example_inputs
    if isinstance(example_inputs, Sequence):
        return tuple(example_inputs), {}
    return (example_inputs,), {}
