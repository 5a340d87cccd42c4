"""The Model of a spec: a shipped preset, or a trace of its module."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

from parsim.errors import ModelError
from parsim.model.build import build_fake, build_module, cast_module, content_of, shared_fake
from parsim.model.component import Component
from parsim.model.hugging_face.config import assumptions, left_out
from parsim.model.inputs import ModelInput
from parsim.model.interface import (
    checked_form,
    drawn_batch,
    example_module,
    interface_of,
    keep_interface,
    known_interface,
    loss_of,
    open_interface,
    zero_batch,
)
from parsim.model.model import GRANULARITIES, Model
from parsim.model.named.names import is_transformer, named_model
from parsim.model.objective.objective import naming_coupled_losses
from parsim.model.presets import PRESETS, load_preset
from parsim.model.spec import EXAMPLE, ModelSpec, is_config, resolve
from parsim.model.stored import described, folder, key_of, user_sources
from parsim.model.stored import read as read_stored
from parsim.model.stored import write as write_stored
from parsim.model.tracing.trace import require_torch
from parsim.model.zoo import ZOO


def load_model(spec: ModelSpec, *, granularity: str = "block", weights: str = "float32") -> Model:
    """The Model of a spec, with the loss as its last component; the same object within one process.

    A matching shipped preset is used; otherwise the module is traced on fake tensors. With "bfloat16" weights it is always
    traced: the sizes of values, weights and saved activations are those of bfloat16. Operators stay in fp32, as costs take
    them.

    Args:
        spec: of the model. granularity: "block" or "layer". weights: torch's name of their type.

    Raises:
        ModelError: an unknown name, argument, shape or granularity, or integers declared that no table has rows for.
        TraceError: a module that cannot be cut.
        MissingDependencyError: no preset matches and torch is not installed.
    """
    if granularity not in GRANULARITIES:
        raise ModelError(f"granularity must be one of {', '.join(GRANULARITIES)}, got {granularity!r}")
    spec = resolve(spec)
    if is_transformer(spec.name):
        return named_model(spec.name, dict(spec.args), granularity=granularity, weights=weights)
    content = content_of(spec)
    if weights == "float32":
        return _load(spec, granularity, content)
    return _load_as(spec, granularity, weights, content)


@lru_cache(maxsize=64)
def _load(spec: ModelSpec, granularity: str, content: str) -> Model:
    for stem, (name, args) in PRESETS.items():
        if name == spec.name and resolve(ModelSpec(name=name, args=tuple(args.items()))) == spec:
            return replace(load_preset(stem, granularity), loss=loss_of(spec))
    return _stored_or_traced(spec, granularity, "float32", content)


def _stored_or_traced(spec: ModelSpec, granularity: str, weights: str, content: str) -> Model:
    """The Model kept from an earlier trace of the same content, or a new one, which is kept."""
    if folder() is None:
        return trace_spec(spec, granularity, weights=weights)
    what = {**spec.to_dict(), "config": content if is_config(spec.name) else "", "granularity": granularity, "weights": weights}
    if is_config(spec.name):
        del what["name"]
    elif ":" in spec.name:
        require_torch(f"build {spec.name}")
        what["module"] = described(shared_fake(spec, content))
    if objective := spec.objective():
        _ = objective.row  # imports a loss of the user's own, whose source is then seen
    what["sources"] = user_sources()
    key = key_of(what)
    name, begins = _model_name(spec), f"trace of {spec.name}("
    if found := read_stored(key):
        return replace(found, name=name, source=begins + found.source)
    traced = trace_spec(spec, granularity, weights=weights)
    write_stored(key, replace(traced, source=traced.source.removeprefix(begins)))
    return traced


def _model_name(spec: ModelSpec) -> str:
    return Path(spec.name).stem if is_config(spec.name) else spec.name


@lru_cache(maxsize=16)
def _load_as(spec: ModelSpec, granularity: str, weights: str, content: str) -> Model:
    """The Model traced with other weights, its operators as in fp32."""
    full = _load(spec, granularity, content)
    traced = _stored_or_traced(spec, granularity, weights, content)

    def priced(component: Component) -> Component:
        whole = full.component(component.name)
        shardings = tuple(
            replace(entry, operators=whole.sharding(entry.rule).operators, half=None) for entry in component.shardings
        )
        selective = component.selective
        if selective is not None:
            selective = None if whole.selective is None else replace(selective, operators=whole.selective.operators)
        return replace(component, operators=whole.operators, shardings=shardings, half=None, selective=selective)

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

    from parsim.model.tracing.traced import settled_model

    spec = resolve(spec)
    content = content_of(spec)
    example = spec.control_flow == EXAMPLE
    unknown = spec.name not in ZOO and not example and weights == "float32" and known_interface(spec, content) is None
    asked = open_interface(spec, content) if unknown else None
    kind = interface_of(spec) if asked is None else asked.kind
    build = build_fake if weights != "float32" else partial(shared_fake, content=content)
    module = example_module(spec) if example else build(spec)
    if weights != "float32":
        cast_module(module, getattr(torch, weights))
    batch = drawn_batch if example else zero_batch
    args, kwargs = kind.arguments(batch(kind.inputs, weights))
    arguments = ", ".join(f"{name}={value}" for name, value in spec.args)
    chosen = f"; {assumptions(spec, module)}" if is_config(spec.name) else ""
    with naming_coupled_losses():
        model, settled = settled_model(
            module,
            args,
            kwargs,
            granularity=granularity,
            name=_model_name(spec),
            loss=kind.loss if asked is None else asked.loss,
            example=example,
            declared=kind.inputs_in_order,
            source=f"trace of {spec.name}({arguments}), one sample {inputs_text(spec, kind.inputs)}{chosen}",
        )
    if asked is not None and settled is not None:
        kind = asked.with_output(settled)
        keep_interface(spec, content, kind)
    told = (*model.assumptions, *(left_out(spec) if is_config(spec.name) else ()))
    known = (spec.name in ZOO or is_config(spec.name)) and kind.objective.adds_up
    form = model.loss_form if known else checked_form(model, lambda: build_module(spec), kind)
    return replace(model, loss_form=form, assumptions=told)


def inputs_text(spec: ModelSpec, inputs: tuple[ModelInput, ...]) -> str:
    """`[3, 224, 224]`, or `x [3, 32, 32], t [] int64` for inputs by name.

    Args:
        spec: of the model. inputs: of its interface.
    """
    if spec.inputs is None and not is_config(spec.name):
        return str(list(inputs[0].shape))
    return ", ".join(f"{entry.name} {list(entry.shape)}{'' if entry.is_number else f' {entry.dtype}'}" for entry in inputs)
