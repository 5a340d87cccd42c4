"""The Model of a spec: a shipped preset, or a trace of its module."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import sys
import sysconfig
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parsim.errors import ModelError
from parsim.files import cache_folder
from parsim.model.build import (
    Interface,
    build_fake,
    build_module,
    cast_module,
    checked_form,
    content_of,
    drawn_batch,
    example_module,
    follows_example,
    interface_of,
    loss_of,
    require_torch,
    settle_module,
    shared_fake,
    split_inputs,
    zero_batch,
)
from parsim.model.catalogue.hugging_face import assumptions, left_out
from parsim.model.catalogue.names import is_transformer, named_model
from parsim.model.catalogue.zoo import PRESETS, ZOO, load_preset
from parsim.model.component import Component
from parsim.model.inputs import ModelInput, module_inputs, ordered
from parsim.model.model import AUTOCAST, COUNTED, COUPLED, GRANULARITIES, MEMORY, MIXING, OPERATORS, Model
from parsim.model.objective import Objective, Settled, naming_coupled_losses, parse_objective
from parsim.model.spec import EXAMPLE, ModelSpec, is_config, resolve
from parsim.model.tuning import tuned

if TYPE_CHECKING:
    from torch import nn


# Models that were traced before, kept in the user's cache folder by the content they were traced from.
#
# A key covers the content of a config, or the built module of a factory and the source of the user's modules. It also covers
# arguments, inputs, granularity, the type of the weights, and the versions of Python, parsim (its source), torch and
# transformers. A file that cannot be read, or whose digest is wrong, is ignored, and the model is traced anew. A file appears
# under its name only when it is complete, so processes may write at once.
#
# Left out: files that a forward reads while it runs.


SWITCH = "PARSIM_MODEL_CACHE"
"""Environment variable: "off" keeps nothing and reads nothing, a path is the folder to use."""

MOST_FILES = 256
"""Files that are kept; the ones used longest ago go first."""


def folder() -> Path | None:
    """Where Models are kept: $PARSIM_MODEL_CACHE, else the cache folder of models; None where the switch is off."""
    chosen = os.environ.get(SWITCH, "")
    if chosen.lower() in ("off", "0", "no", "false"):
        return None
    return Path(chosen).expanduser() if chosen else cache_folder("models")


def key_of(content: Mapping[str, Any]) -> str:
    """The name under which a Model is kept, from plain JSON values that tell its module, its inputs and how it was traced."""
    document = {"content": content, "versions": _versions()}
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


@lru_cache(maxsize=1)
def _versions() -> dict[str, str]:
    """Versions of all that decides about a trace: parsim by its source."""
    versions = {"python": sys.version}
    for name in ("torch", "transformers", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    root = Path(__file__).parent
    files = sorted((*root.rglob("*.py"), root.parent / "errors.py", root.parent / "registry.py"))
    versions["parsim"] = _digest_of_files(files)
    return versions


def _digest_of_files(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with contextlib.suppress(OSError):
            text = path.read_bytes()
            digest.update(f"{path.name} {len(text)}\n".encode())
            digest.update(text)
    return digest.hexdigest()


def user_sources() -> str:
    """A digest of the source of every imported module that belongs to neither Python nor an installed package."""
    installed = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    parsim = f"{Path(__file__).parent.parent}{os.sep}"
    files = {str(getattr(module, "__file__", None)) for module in list(sys.modules.values())}
    sources = (file for file in files if file.endswith(".py") and not file.startswith((*installed, parsim)))
    return _digest_of_files(sorted(map(Path, sources)))


def described(module: nn.Module) -> str:
    """A digest of a built module: classes, plain attributes, parameters and buffers, without their values."""
    digest = hashlib.sha256()
    for path, part in module.named_modules():
        kind = type(part)
        plain = {name: repr(value) for name, value in sorted(part.__dict__.items()) if _is_plain(value)}
        kinds = [
            (name, None if tensor is None else (tuple(tensor.shape), tensor.stride(), str(tensor.dtype), tensor.requires_grad))
            for held in (part._parameters, part._buffers)
            for name, tensor in held.items()
        ]
        digest.update(repr((path, kind.__module__, kind.__qualname__, plain, kinds)).encode())
    return digest.hexdigest()


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def read(key: str) -> Model | None:
    """The Model kept under a key; None if there is none that can be trusted."""
    place = folder()
    if place is None:
        return None
    path = place / f"{key}.model"
    try:
        digest, _, packed = path.read_bytes().partition(b"\n")
        if digest.decode() != hashlib.sha256(packed).hexdigest():
            return None
        model = Model.from_json(zlib.decompress(packed).decode())
    except (OSError, ValueError, zlib.error, ModelError):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return model


def write(key: str, model: Model) -> None:
    """Keep a Model. A folder that cannot be written is not an error: the Model is traced again next time."""
    place = folder()
    if place is None:
        return
    packed = zlib.compress(model.to_json().encode(), 1)
    with contextlib.suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(suffix=".partial", dir=place)  # of this process alone
        os.close(handle)
        try:
            Path(name).write_bytes(hashlib.sha256(packed).hexdigest().encode() + b"\n" + packed)
            Path(name).replace(place / f"{key}.model")
        finally:
            Path(name).unlink(missing_ok=True)
        newest_first = sorted(place.glob("*.model"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in newest_first[MOST_FILES:]:
            path.unlink(missing_ok=True)


def load_model(spec: ModelSpec, *, granularity: str = "block", weights: str = "float32", sharded: bool = True) -> Model:
    """The Model of a spec, with the loss as its last component; the same object within one process.

    A matching shipped preset is used; otherwise the module is traced on fake tensors. With "bfloat16" weights it is always
    traced: the sizes of values, weights and saved activations are those of bfloat16. Operators stay in fp32, as costs take
    them.

    Args:
        granularity: "block" or "layer". weights: torch's name of their type. sharded: with how operators can be divided, which
            plans without tensor parallelism need not know, and which takes up to half of a trace.

    Raises:
        ModelError: an unknown name, argument, shape or granularity, or integers declared that no table has rows for.
        TraceError: a module that cannot be cut.
        MissingDependencyError: no preset matches and torch is not installed.
    """
    if granularity not in GRANULARITIES:
        raise ModelError(f"granularity must be one of {', '.join(GRANULARITIES)}, got {granularity!r}")
    spec = resolve(spec)
    if is_transformer(spec.name):
        return named_model(spec.name, dict(spec.args), granularity=granularity, weights=weights, tuning=spec.tune)
    content = content_of(spec)
    if weights == "float32":
        return tuned(_load(spec, granularity, content, sharded), spec.tune)
    return tuned(_load_as(spec, granularity, weights, content, sharded), spec.tune)


@lru_cache(maxsize=64)
def _load(spec: ModelSpec, granularity: str, content: str, sharded: bool, *, counted: str = AUTOCAST) -> Model:
    """`counted`: of COUNTED; a preset has all."""
    for stem, (name, args) in PRESETS.items():
        if name == spec.name and resolve(ModelSpec(name=name, args=tuple(args.items()))) == spec:
            return replace(load_preset(stem, granularity), loss=loss_of(spec))
    return _stored_or_traced(spec, granularity, "float32", content, counted=counted, sharded=sharded)


def _stored_or_traced(spec: ModelSpec, granularity: str, weights: str, content: str, *, counted: str, sharded: bool) -> Model:
    """The Model kept from an earlier trace of the same content, or a new one, which is kept."""
    if folder() is None:
        return trace_spec(spec, granularity, weights=weights, counted=counted, sharded=sharded)
    what = {**spec.to_dict(), "granularity": granularity, "weights": weights}
    if is_config(spec.name):
        del what["name"]
        what["config"] = content
    elif ":" in spec.name:
        require_torch(f"build {spec.name}")
        what["module"] = described(shared_fake(spec, content))
    if objective := spec.objective():
        _ = objective.row  # imports a loss of the user's own, whose source is then seen
    what["sources"] = user_sources()
    serve = product(COUNTED[COUNTED.index(counted) :], dict.fromkeys((sharded, True)))  # more serves as well
    keys = [key_of({**what, "counted": more, "sharded": cut}) for more, cut in serve]
    begins = f"trace of {spec.name}("
    if kept := next(filter(None, map(read, keys)), None):
        return replace(kept, name=_model_name(spec), source=begins + kept.source)
    traced = trace_spec(spec, granularity, weights=weights, counted=counted, sharded=sharded)
    write(keys[0], replace(traced, source=traced.source.removeprefix(begins)))
    return traced


def _model_name(spec: ModelSpec) -> str:
    return Path(spec.name).stem if is_config(spec.name) else spec.name


@lru_cache(maxsize=16)
def _load_as(spec: ModelSpec, granularity: str, weights: str, content: str, sharded: bool) -> Model:
    """The Model traced with other weights, its operators as in fp32."""
    full = _load(spec, granularity, content, sharded, counted=OPERATORS)
    traced = _stored_or_traced(spec, granularity, weights, content, counted=MEMORY, sharded=sharded)

    def priced(component: Component) -> Component:
        whole = full.component(component.name)
        rows = {entry.rule: entry.operators for entry in whole.shardings}  # a rule that fp32 has not, as of Jamba, has no price
        shardings = tuple(replace(entry, operators=rows[entry.rule]) for entry in component.shardings if entry.rule in rows)
        selective = component.selective
        if selective is not None:
            selective = None if whole.selective is None else replace(selective, operators=whole.selective.operators)
        return replace(component, operators=whole.operators, shardings=shardings, selective=selective)

    return replace(traced, components=tuple(priced(component) for component in traced.components))


def trace_spec(
    spec: ModelSpec, granularity: str, *, weights: str = "float32", counted: str = AUTOCAST, sharded: bool = True
) -> Model:
    """Trace the module of a spec with its loss; needs torch. Granularity, weights and sharded as of `load_model`.
    `counted`: of COUNTED.
    Raises TraceError: a module that cannot be cut. MissingDependencyError: torch is not installed."""
    require_torch(f"trace {spec.name}, which has no preset for these arguments")
    import torch

    from parsim.model.trace.traced import model_of

    spec = resolve(spec)
    example = spec.control_flow == EXAMPLE
    in_zoo = spec.name in ZOO
    kind = interface_of(spec)
    build = build_fake if weights != "float32" else partial(shared_fake, content=content_of(spec))
    module = example_module(spec) if example else build(spec)
    if weights != "float32":
        cast_module(module, getattr(torch, weights))
    batch = drawn_batch if example else zero_batch
    args, kwargs = kind.arguments(batch(kind.inputs, weights))
    arguments = ", ".join(f"{name}={value}" for name, value in spec.args)
    chosen = f"; {assumptions(spec, module)}" if is_config(spec.name) else ""
    if spec.inputs is None and not is_config(spec.name):
        shapes = str(list(kind.input_shape))
    else:
        shapes = ", ".join(
            f"{each.name} {list(each.shape)}{'' if each.is_number else f' {each.dtype}'}" for each in kind.inputs
        )
    with naming_coupled_losses():
        model = model_of(
            module,
            args,
            kwargs,
            granularity=granularity,
            name=_model_name(spec),
            loss=kind.loss,
            example=example,
            declared=kind.inputs_in_order,
            counted=counted,
            sharded=sharded,
            stacks=kind.stacks,
            source=f"trace of {spec.name}({arguments}), one sample {shapes}{chosen}",
        )
    notes = (*model.assumptions, *(left_out(spec, module) if is_config(spec.name) else ()))
    divisible = (in_zoo or is_config(spec.name)) and kind.objective.adds_up
    form = model.loss_form if divisible else checked_form(model, lambda: build_module(spec), kind)
    return replace(model, loss_form=form, assumptions=notes)


# The Model of an nn.Module that the caller already has, with its loss, as `parsim.plan(module, ...)` uses it.


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
        loss: a row of `parsim.model.objective.LOSSES`, an Objective or its text; left out: the usual one of such an output.
        output: which output a loss that is left out reads.
        control_flow: "refuse" or "example", as for `record`; without `example_inputs` the example is drawn.

    Raises:
        ModelError: not a module, neither inputs nor a shape, an output that leaves the loss open, or integers that no table has
            rows for. TraceError: the module cannot be cut into components.
        MissingDependencyError: without torch.
    """
    require_torch("trace a module")
    from torch import Tensor, nn

    from parsim.model.trace.record import flatten_inputs
    from parsim.model.trace.traced import model_of, seen_ranges

    if not isinstance(module, nn.Module):
        if isinstance(module, type) and issubclass(module, nn.Module):
            raise ModelError(f"{module.__name__} is a class and not a model: give an instance, such as {module.__name__}()")
        raise ModelError(
            f"{type(module).__name__} is not a model: give the name of one, a run file, a parsim.Model or a torch.nn.Module"
        )
    called, example = name or type(module).__name__, follows_example(control_flow)
    declared: tuple[ModelInput | None, ...]
    if example_inputs is not None:
        args, kwargs = split_inputs(example_inputs)
        tensors = [leaf for leaf in flatten_inputs(args, kwargs)[0] if isinstance(leaf, Tensor)]
        declared, tokens = seen_ranges(args, kwargs), bool(tensors) and not tensors[0].is_floating_point()
    elif input_shape is None and inputs is None:
        raise ModelError(
            f"{called} needs an input: give input_shape, the shape of one sample such as (3, 224, 224), inputs by name, or "
            "example_inputs, a batch as the module takes it"
        )
    else:
        takes, positional = module_inputs(module, None if inputs is None else ordered(inputs), input_shape, called)
        kind = Interface(inputs=takes, output=(), loss="", target=None, positional=positional)
        args, kwargs = kind.arguments(drawn_batch(takes) if example else zero_batch(takes))
        declared, tokens = kind.inputs_in_order, kind.takes_tokens
    objective = parse_objective(loss) if isinstance(loss, str) else loss
    settled, stacks = settle_module(
        module, args, kwargs, name=called, objective=objective, tokens=tokens, output=output, example=example
    )
    with naming_coupled_losses():
        text = str(settled.objective)
        model = model_of(
            module,
            args,
            kwargs,
            granularity=granularity,
            name=name,
            loss=text,
            example=example,
            declared=declared,
            stacks=stacks,
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

    from parsim.model.total_loss import MOST_ELEMENTS, MOST_FLOP, SAMPLES, loss_form, samples_judged
    from parsim.model.trace.record import flatten_inputs

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
    inputs = {name: tensor if name in constants else tensor[:samples] for name, tensor in tensors.items()}
    generator = torch.Generator().manual_seed(0)
    target = None if settled.target is None else settled.target.tensor(samples, generator, torch.float32)

    def call(values: Mapping[str, Tensor]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        filled = [values.get(str(place), leaf) for place, leaf in enumerate(leaves)]
        arguments: tuple[tuple[Any, ...], Mapping[str, Any]] = structure.unflatten(filled)
        return arguments

    return loss_form(module, objective, model.loss_form, inputs, target, constants=constants, call=call)
