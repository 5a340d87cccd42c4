"""Model specs: a name of the zoo, a user's factory, or a Hugging Face config; and their Model, module and batches.

Needs torch only to build a module, to make a batch, and for models without a preset.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parsim.errors import FactoryError, MissingDependencyError, ModelError, near_matches
from parsim.files import parse_json
from parsim.model.component import Component
from parsim.model.losses import LOSSES, NUMBERS, usual_loss
from parsim.model.model import GRANULARITIES, Model
from parsim.model.presets import PRESETS, load_preset
from parsim.model.tracing.trace import require_torch
from parsim.model.zoo import ZOO, Scalar, ZooRow

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Attributes:
    name: a key of the zoo, "package.module:factory", or the path of a Hugging Face config.json.
    args: keyword arguments of the factory (for a config: values that replace its own).
    input_shape: of ONE sample, e.g. (3, 224, 224); tokens: (seq,). None takes the model's default.
    loss: a row of `parsim.model.losses`, or "package.module:ROW". None takes the model's default.
    """

    name: str
    args: tuple[tuple[str, Scalar], ...] = ()
    input_shape: tuple[int, ...] | None = None
    loss: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; the loss only if it is not the model's own."""
        shape = None if self.input_shape is None else list(self.input_shape)
        document = {"name": self.name, "args": dict(self.args), "input_shape": shape}
        return document if self.loss is None else {**document, "loss": self.loss}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> ModelSpec:
        """Inverse of `to_dict`. Raises ModelError if a key is missing or of the wrong kind."""
        try:
            shape = document.get("input_shape")
            args = tuple((str(key), value) for key, value in dict(document.get("args") or {}).items())
            shape = None if shape is None else tuple(int(size) for size in shape)
            loss = document.get("loss")
            return cls(name=str(document["name"]), args=args, input_shape=shape, loss=None if loss is None else str(loss))
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"not a model: {document!r} ({error!r}); give name, args and input_shape") from error


def resolve(spec: ModelSpec) -> ModelSpec:
    """The same model with every argument and the input shape spelled out (zoo), and the arguments in one order.

    Args:
        spec: as given.

    Raises:
        ModelError: an unknown name or argument, or a shape that does not suit the model.
    """
    if ":" in spec.name or is_config(spec.name):
        if any(size < 1 for size in spec.input_shape or ()):
            raise ModelError(f"input_shape sizes must be >= 1, got {spec.input_shape}")
        return replace(spec, args=tuple(sorted(spec.args)))
    row = zoo_row(spec.name)
    defaults, given = dict(row.args), dict(spec.args)
    for name in given:
        if name not in defaults:
            raise ModelError(f"{spec.name} has no argument {name!r}{near_matches(name, defaults)}")
    shape = spec.input_shape or row.input_shape
    if len(shape) != len(row.input_shape) or min(shape) < 1:
        expected = "[channels, height, width]" if row.inputs == "image" else "[seq]"
        raise ModelError(f"input_shape of {spec.name} must be {expected} with sizes >= 1, got {list(shape)}")
    if row.inputs == "tokens":
        seq = given.setdefault("seq", shape[0])
        if spec.input_shape is None:
            shape = (int(str(seq)),)
        if shape[0] > int(str(seq)):
            raise ModelError(f"input_shape [{shape[0]}] exceeds the argument seq ({seq}) of {spec.name}; raise seq")
    for name, value in given.items():
        if type(value) is not type(defaults[name]) and not (isinstance(defaults[name], float) and isinstance(value, int)):
            raise ModelError(f"argument {name} of {spec.name} must be like {defaults[name]!r}, got {value!r}")
        if isinstance(defaults[name], float):
            given[name] = float(str(value))
            if not 0.0 <= float(str(value)) < 1.0:
                raise ModelError(f"argument {name} of {spec.name} must be >= 0 and < 1, got {value!r}")
        elif isinstance(value, int) and value < 1:
            raise ModelError(f"argument {name} of {spec.name} must be >= 1, got {value!r}; for example {defaults[name]}")
    loss = None if spec.loss == row.loss else spec.loss
    return ModelSpec(name=spec.name, args=tuple(sorted({**defaults, **given}.items())), input_shape=shape, loss=loss)


def is_config(name: str) -> bool:
    """Whether a name is the path of a Hugging Face config.

    Args:
        name: of a ModelSpec.
    """
    return name.endswith(".json")


def zoo_row(name: str) -> ZooRow:
    """The row of a model of the zoo.

    Args:
        name: a key of `ZOO`.

    Raises:
        ModelError: an unknown name; the message lists near matches.
    """
    if name not in ZOO:
        raise ModelError(
            f"unknown model {name!r}{near_matches(name, ZOO)}; or give package.module:factory, or a Hugging Face config.json"
        )
    return ZOO[name]


def build_module(spec: ModelSpec) -> nn.Module:
    """A new module; its initial weights follow torch's random state (torch.manual_seed).

    Args:
        spec: of the model.

    Raises:
        ModelError: the factory cannot be found or refuses its arguments.
        MissingDependencyError: torch is not installed.
    """
    require_torch(f"build {spec.name}")
    spec = resolve(spec)
    if is_config(spec.name):
        return _from_config(spec)
    if ":" in spec.name:
        return _from_factory(spec)
    file, _, function = ZOO[spec.name].factory.partition(":")
    factory = getattr(importlib.import_module(f"parsim.model.zoo.{file}"), function)
    module: nn.Module = factory(input_shape=spec.input_shape, **dict(spec.args))
    return module


def _from_factory(spec: ModelSpec) -> nn.Module:
    from torch import nn

    package, _, function = spec.name.partition(":")
    try:
        factory = getattr(importlib.import_module(package), function)
    except (ImportError, AttributeError) as error:
        raise ModelError(
            f"cannot import {spec.name!r}: {error}; give package.module:factory with the package on the Python path"
        ) from error
    except Exception as error:  # of the user's own module, while it was imported
        raise FactoryError(f"importing {package} for {spec.name} {_raised(error, package)}") from error
    try:
        module = factory(**dict(spec.args))
    except Exception as error:  # the user's own fault, which their own traceback explains best
        if isinstance(error, TypeError) and error.__traceback__ is not None and error.__traceback__.tb_next is None:
            raise ModelError(f"{spec.name} refuses its arguments {dict(spec.args)}: {error}") from error
        raise FactoryError(f"{spec.name} with the arguments {dict(spec.args)} {_raised(error, package)}") from error
    if not isinstance(module, nn.Module):
        raise ModelError(f"{spec.name} returned a {type(module).__name__}, not a torch module; return an nn.Module")
    return module


def _raised(error: Exception, package: str) -> str:
    """What the user's code raised, with its traceback from the first frame outside parsim and the import system."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    imports = ("<frozen importlib", importlib.__file__)
    own = [frame for frame in frames if not frame.filename.startswith(imports)]
    lines = "".join(traceback.format_list(own) + traceback.format_exception_only(error))
    return f"raised {type(error).__name__}; mend {package}:\nTraceback (most recent call last):\n{lines.rstrip()}"


_HEADS = {
    "ForImageClassification": "AutoModelForImageClassification",
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
}


def _from_config(spec: ModelSpec) -> nn.Module:
    """From the config alone, without network; randomly initialised."""
    path = Path(spec.name)
    if not path.is_file():
        raise ModelError(f"no Hugging Face config at {path}; give the path of a config.json")
    try:
        import transformers
    except ImportError as error:
        raise MissingDependencyError(f"transformers is needed to build {path}; install parsim[hf]") from error
    try:
        document = {**parse_json(path.read_text()), **dict(spec.args)}
        architecture = str(document["architectures"][0])
        config = transformers.AutoConfig.for_model(**document)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ModelError(f"{path} is not a Hugging Face config with model_type and architectures: {error!r}") from error
    suffix = next((suffix for suffix in _HEADS if architecture.endswith(suffix)), None)
    if suffix is None:
        raise ModelError(f"{path}: architecture {architecture!r} is not one of those supported: *{', *'.join(_HEADS)}")
    if hasattr(config, "use_cache"):
        config.use_cache = False
    module: nn.Module = getattr(transformers, _HEADS[suffix]).from_config(config)
    return module


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """What a model takes and gives, for one sample.

    Attributes:
        inputs: "image" (floats of any shape) or "tokens" (integers below `bound`).
        output: shape of the logits; with a loss over classes its last size is their number.
        loss: a key of `parsim.model.losses.LOSSES`.
    """

    inputs: str
    input_shape: tuple[int, ...]
    bound: int
    output: tuple[int, ...]
    loss: str


@lru_cache(maxsize=64)
def interface_of(spec: ModelSpec) -> Interface:
    """Shapes of one sample and of its output, and the loss. Needs torch for a factory or a Hugging Face config.

    Args:
        spec: of the model.
    """
    spec = resolve(spec)
    if spec.name not in ZOO:
        return _foreign_interface(spec)
    row, args = ZOO[spec.name], dict(spec.args)
    shape = spec.input_shape or row.input_shape
    classes = int(str(args[row.classes]))
    output = (classes,) if row.inputs == "image" else (*shape, classes)
    return Interface(inputs=row.inputs, input_shape=shape, bound=classes, output=output, loss=spec.loss or row.loss)


def _foreign_interface(spec: ModelSpec) -> Interface:
    """One fake forward tells the output. Inputs are tokens if the sample has one dim and the module an nn.Embedding.

    Unless the spec says, the loss is the usual one of such an output. Raises ModelError where the output leaves it open.
    """
    import torch
    from torch import nn

    from parsim.model.tracing.recording import run_recorded

    module = _build_fake(spec)
    shape = spec.input_shape or _config_shape(module)
    if shape is None:
        raise ModelError(f"{spec.name} needs an input_shape: the shape of one sample, e.g. [3, 224, 224] or [seq]")
    tables = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
    tokens = len(shape) == 1 and bool(tables)
    example = torch.zeros((2, *shape), dtype=torch.long if tokens else torch.float32)
    recording = run_recorded(module, (example,), {}, loss="mse")
    assert recording.logits_value is not None
    output = tuple(recording.tensors[recording.logits_value].shape[1:])
    bound = getattr(getattr(module, "config", None), "vocab_size", tables[0] if tables else 0)
    loss = spec.loss or usual_loss(spec.name, output, tokens=tokens)
    return Interface(inputs="tokens" if tokens else "image", input_shape=shape, bound=bound, output=output, loss=loss)


def _config_shape(module: nn.Module) -> tuple[int, ...] | None:
    config = getattr(module, "config", None)
    if hasattr(config, "image_size"):
        size = config.image_size  # type: ignore[union-attr]
        height, width = (size, size) if isinstance(size, int) else size
        return (config.num_channels, height, width)  # type: ignore[union-attr]
    length = getattr(config, "max_position_embeddings", None)
    return None if length is None else (int(length),)


def _build_fake(spec: ModelSpec) -> nn.Module:
    """Built without memory for its weights where the factory allows it."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return build_module(spec)
    except (FactoryError, RuntimeError):  # perhaps it looks at its weights' values: build it for real
        return build_module(spec)


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """`module.to(dtype)` for one that may be fake: numbers that are not whole change their type, tied weights stay tied."""
    from torch import nn

    cast: dict[int, Tensor] = {}
    for owner in module.modules():
        holders: tuple[dict[str, Any], dict[str, Any]] = owner._parameters, owner._buffers
        for holder in holders:
            for key, value in holder.items():
                if value is not None and value.is_floating_point():
                    if id(value) not in cast:
                        own = value.detach().to(dtype)
                        cast[id(value)] = nn.Parameter(own, value.requires_grad) if isinstance(value, nn.Parameter) else own
                    holder[key] = cast[id(value)]


def example_batch(
    spec: ModelSpec, samples: int, seed: int = 0, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> tuple[tuple[Tensor, ...], Tensor]:
    """A random batch, the same for the same seed on every device.

    Images and other float inputs are standard normal of `dtype`; tokens and classes are uniform int64.

    Args:
        spec: of the model. samples: B. seed: of the generator.
        dtype: of float inputs (None: float32). device: of the result.

    Returns:
        (inputs, target), the first dim of each is B.
    """
    require_torch("make an example batch")
    import torch

    kind = interface_of(resolve(spec))
    dtype = dtype or torch.float32
    generator = torch.Generator().manual_seed(seed)
    if kind.inputs == "tokens":
        given = torch.randint(kind.bound, (samples, *kind.input_shape), generator=generator)
    else:
        given = torch.randn((samples, *kind.input_shape), generator=generator, dtype=torch.float64).to(dtype)
    if LOSSES[kind.loss].targets == NUMBERS:
        target = torch.randn((samples, *kind.output), generator=generator, dtype=torch.float64).to(dtype)
    else:
        target = torch.randint(kind.output[-1], (samples, *kind.output[:-1]), generator=generator)
    return (given.to(device),), target.to(device)


def loss_of(spec: ModelSpec) -> str:
    """The key of `parsim.model.losses.LOSSES` with which a model trains.

    Args:
        spec: of the model.
    """
    if spec.name in ZOO:
        return spec.loss or ZOO[spec.name].loss
    return interface_of(resolve(spec)).loss


def load_model(spec: ModelSpec, *, granularity: str = "block", weights: str = "float32") -> Model:
    """The Model of a spec, with the loss as its last component; the same object within one process.

    A matching shipped preset is used; otherwise the module is traced on fake tensors. With "bfloat16" weights it is always
    traced: the sizes of values, weights and saved activations are those of bfloat16. Operators stay in fp32, as costs take
    them.

    Args:
        spec: of the model. granularity: "block" or "layer". weights: torch's name of their type.

    Raises:
        ModelError: an unknown name, argument, shape or granularity.
        TraceError: a module that cannot be cut.
        MissingDependencyError: no preset matches and torch is not installed.
    """
    if weights == "float32":
        return _load(resolve(spec), granularity)
    return _load_as(resolve(spec), granularity, weights)


@lru_cache(maxsize=64)
def _load(spec: ModelSpec, granularity: str) -> Model:
    if granularity not in GRANULARITIES:
        raise ModelError(f"granularity must be one of {', '.join(GRANULARITIES)}, got {granularity!r}")
    for stem, (name, args) in PRESETS.items():
        if name == spec.name and resolve(ModelSpec(name=name, args=tuple(args.items()))) == spec:
            return replace(load_preset(stem, granularity), loss=loss_of(spec))
    return trace_spec(spec, granularity)


@lru_cache(maxsize=16)
def _load_as(spec: ModelSpec, granularity: str, weights: str) -> Model:
    """The Model traced with other weights, its operators as in fp32."""
    full = _load(spec, granularity)
    traced = trace_spec(spec, granularity, weights=weights)

    def priced(component: Component) -> Component:
        whole = full.component(component.name)
        shardings = tuple(
            replace(entry, operators=whole.sharding(entry.rule).operators, half=None) for entry in component.shardings
        )
        return replace(component, operators=whole.operators, shardings=shardings, half=None)

    return replace(
        traced,
        components=tuple(priced(component) for component in traced.components),
        values=tuple(replace(value, half=None) for value in traced.values),
    )


def trace_spec(spec: ModelSpec, granularity: str, *, weights: str = "float32") -> Model:
    """Trace the module of a spec with its loss; needs torch.

    Args:
        spec: of the model. granularity: "block" or "layer". weights: torch's name of their type.

    Raises:
        TraceError: a module that cannot be cut.
        MissingDependencyError: torch is not installed.
    """
    require_torch(f"trace {spec.name}, which has no preset for these arguments")
    import torch

    from parsim.model.tracing.traced import model_of

    spec = resolve(spec)
    kind = interface_of(spec)
    module = _build_fake(spec)
    if weights != "float32":
        _cast(module, getattr(torch, weights))
    example = torch.zeros((2, *kind.input_shape), dtype=torch.long if kind.inputs == "tokens" else getattr(torch, weights))
    arguments = ", ".join(f"{name}={value}" for name, value in spec.args)
    return model_of(
        module,
        (example,),
        {},
        granularity=granularity,
        name=Path(spec.name).stem if is_config(spec.name) else spec.name,
        loss=kind.loss,
        source=f"trace of {spec.name}({arguments}), one sample {list(kind.input_shape)}",
    )
