"""Models of transformers from their Shape, without torch: a layer is written once and repeated.

Granularity, by how tensor parallelism runs:

    "layer"      one component per layer (no tensor parallelism)
    "sublayer"   attention and MLP, each with its norm and its residual: input whole, output a sum over the shards
    "sequence"   norms and residuals are components of their own, divided along the sequence; attention and MLP read the whole

What the framework fuses is in `Software`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from parsim.model.catalogue.sublayers import (
    FULL_BYTES,
    RULE,
    SEQUENCE,
    Layer,
    SamplePart,
    Shape,
    Software,
    attention,
    component_of,
    embed,
    head,
    is_mixture,
    limit_of,
    mlp,
    residual_of,
    scores_of,
    stream_value,
)
from parsim.model.component import Component, Footprint, Selective, Sharding, Size, Value, ValueFootprint
from parsim.model.model import Model

FULL, HALF = 4, 2


@lru_cache(maxsize=256)
def transformer(shape: Shape, software: Software, part: SamplePart, granularity: str) -> Model:
    """The Model of a shape, with `part.element_bytes` per parameter and activation.

    Args:
        granularity: "layer", "sublayer" or "sequence".

    Raises:
        ModelError: sizes that do not go together.
    """
    shape.check()
    builder = {"layer": _by_layer, "sublayer": _by_sublayer, "sequence": _by_sequence}[granularity]
    components, values = builder(shape, software, part)
    tokens = Value(name="tokens", producer=None, bytes_per_sample=8 * part.tokens, differentiable=False, savers=("embed",))
    target = Value(name="target", producer=None, bytes_per_sample=8 * part.tokens, differentiable=False, savers=("head",))
    loss = Value(name="loss", producer="head", bytes_per_sample=FULL_BYTES, savers=())
    assumed: tuple[str, ...] = (BALANCED,) if shape.experts else ()
    if part.context < part.tokens:
        assumed += (f"documents of {part.context} tokens: attention computes no scores between them, and MFU counts none",)
    return Model(
        name=shape.name,
        granularity="sublayer" if granularity != "layer" else "block",
        components=tuple(components),
        values=(tokens, target, *values, loss),
        inputs=("tokens", "target"),
        outputs=("loss",),
        source=f"parsim.model.transformer of {shape}, {part.tokens} tokens per sample",
        loss="cross_entropy",
        assumptions=assumed,
    )


BALANCED = "experts are visited evenly"


@lru_cache(maxsize=64)
def recorded(shape: Shape, software: Software, part: SamplePart, granularity: str, weights: str) -> Model:
    """A Model as traced ones are: with weights of a type, and in fp32 also with what autocast to half precision keeps.

    Args:
        weights: "float32" or "bfloat16".

    Raises:
        ModelError: sizes that do not go together.
    """
    half = transformer(shape, software, replace(part, element_bytes=HALF), granularity)
    if weights != "float32":
        return half
    full = transformer(shape, software, replace(part, element_bytes=FULL), granularity)
    return replace(
        full,
        components=tuple(_with_half(*pair) for pair in zip(full.components, half.components, strict=True)),
        values=tuple(
            replace(value, half=ValueFootprint(bytes_per_sample=narrow.bytes_per_sample, savers=value.savers))
            for value, narrow in zip(full.values, half.values, strict=True)
        ),
    )


def _with_half(full: Component, half: Component) -> Component:
    """A component with what it keeps under autocast: its activations in half precision, and casts of its weights."""

    def sharding(entry: Sharding) -> Sharding:
        own = half.sharding(entry.rule)
        peaks = tuple(
            peak._replace(
                fixed_bytes=peak.fixed_bytes * FULL // HALF, divided_fixed_bytes=peak.divided_fixed_bytes * FULL // HALF
            )
            for peak in own.backward_peaks
        )
        cut = {part.name for part in entry.parameters}
        half_shards = Footprint(
            saved_activation_bytes=own.saved_activation_bytes,
            cast_bytes=HALF * sum(parameter.elements for parameter in half.parameters if parameter.name in cut),
            forward_peaks=own.forward_peaks,
            backward_peaks=peaks,
            selective=own.selective,
        )
        return replace(entry, half=half_shards)

    peaks = tuple((rate, fixed * FULL // HALF) for rate, fixed in half.backward_peaks)  # gradients of parameters stay in fp32
    return replace(
        full,
        shardings=tuple(sharding(entry) for entry in full.shardings),
        half=Footprint(
            saved_activation_bytes=half.saved_activation_bytes,
            cast_bytes=HALF * sum(parameter.elements for parameter in half.parameters),
            forward_peaks=half.forward_peaks,
            backward_peaks=peaks,
            selective=half.selective,
        ),
    )


def _by_layer(shape: Shape, software: Software, part: SamplePart) -> tuple[list[Component], list[Value]]:
    made: dict[bool, Component] = {}
    for mixture in {is_mixture(shape, number) for number in range(shape.layers)}:
        layer = Layer("h", shape, software, part)
        attention(layer, norm=True, residual=True)
        mlp(layer, experts=mixture, norm=True, residual=True)
        made[mixture] = component_of("h", layer, ("x",), ("y",), {}, limit=limit_of(shape))
    components, values = [embed(shape, software, part)], []
    for number in range(shape.layers):
        components.append(_renamed(made[is_mixture(shape, number)], f"h.{number}", (f"x{number}",), (f"x{number + 1}",)))
    components.append(head(shape, software, part, f"x{shape.layers}", norm=True))
    for number in range(shape.layers + 1):
        reader = f"h.{number}" if number < shape.layers else "head"
        values.append(stream_value(f"x{number}", f"h.{number - 1}" if number else "embed", shape, part, (reader,)))
    return components, values


def _by_sublayer(shape: Shape, software: Software, part: SamplePart) -> tuple[list[Component], list[Value]]:
    ends = {RULE: (("full",), ("partial",))}
    first = Layer("h", shape, software, part)
    attention(first, norm=True, residual=True)
    half = component_of("h", first, ("x",), ("y",), ends, limit=limit_of(shape))
    feeds: dict[bool, Component] = {}
    for mixture in {is_mixture(shape, number) for number in range(shape.layers)}:
        layer = Layer("h", shape, software, part)
        mlp(layer, experts=mixture, norm=True, residual=True)
        feeds[mixture] = component_of("h", layer, ("y",), ("z",), ends, limit=limit_of(shape))
    components, values = [embed(shape, software, part)], [stream_value("x0", "embed", shape, part, ("h.0.attn",))]
    for number in range(shape.layers):
        here = f"h.{number}"
        components.append(_renamed(half, f"{here}.attn", (f"x{number}",), (f"y{number}",)))
        components.append(_renamed(feeds[is_mixture(shape, number)], f"{here}.mlp", (f"y{number}",), (f"x{number + 1}",)))
        reader = f"h.{number + 1}.attn" if number + 1 < shape.layers else "head"
        values.append(stream_value(f"y{number}", f"{here}.attn", shape, part, (f"{here}.mlp",)))
        values.append(stream_value(f"x{number + 1}", f"{here}.mlp", shape, part, (reader,)))
    components.append(head(shape, software, part, f"x{shape.layers}", norm=True))
    return components, values


def _by_sequence(shape: Shape, software: Software, part: SamplePart) -> tuple[list[Component], list[Value]]:
    """x: the stream; n: normalised; a: the sum that attention makes; y, m, p: the same of the MLP."""
    ends = {RULE: (("full",), ("partial",))}
    sublayer, kept = _attention_parts(shape, software, part)
    feeds: dict[bool, Component] = {}
    for mixture in {is_mixture(shape, number) for number in range(shape.layers)}:
        layer = Layer("h", shape, software, part)
        mlp(layer, experts=mixture, norm=False, residual=False)
        feeds[mixture] = component_of("h", layer, ("m",), ("p",), ends, limit=limit_of(shape))
    start = _norm_component(shape, software, part, joins=False)
    join = _norm_component(shape, software, part, joins=True)
    components = [embed(shape, software, part)]
    values = [stream_value("x0", "embed", shape, part, ("h.0.norm1",))]
    stream, added = "x0", ""
    for number in range(shape.layers):
        here = f"h.{number}"
        if number == 0:
            components.append(_renamed(start, f"{here}.norm1", (stream,), (f"n{number}",)))
        else:
            components.append(_renamed(join, f"{here}.norm1", (stream, added), (f"s{number}", f"n{number}")))
            values.append(stream_value(f"s{number}", f"{here}.norm1", shape, part, (f"{here}.norm1",)))
            stream = f"s{number}"
        values.append(stream_value(f"n{number}", f"{here}.norm1", shape, part, (f"{here}.norm1",)))
        components += [_renamed(*args) for args in sublayer(here, f"n{number}", f"a{number}")]
        values += kept(here, f"a{number}")
        components.append(_renamed(join, f"{here}.norm2", (stream, f"a{number}"), (f"t{number}", f"m{number}")))
        values.append(stream_value(f"t{number}", f"{here}.norm2", shape, part, (f"{here}.norm2",)))
        values.append(stream_value(f"m{number}", f"{here}.norm2", shape, part, (f"{here}.norm2",)))
        components.append(_renamed(feeds[is_mixture(shape, number)], f"{here}.mlp", (f"m{number}",), (f"p{number}",)))
        values.append(stream_value(f"p{number}", f"{here}.mlp", shape, part, ()))
        stream, added = f"t{number}", f"p{number}"
    components.append(_renamed(join, "final.norm", (stream, added), ("final", "normed")))
    values.append(stream_value("final", "final.norm", shape, part, ("final.norm",)))
    values.append(stream_value("normed", "final.norm", shape, part, ("final.norm",)))
    components.append(head(shape, software, part, "normed", norm=False))
    return components, values


_Renaming = tuple[Component, str, tuple[str, ...], tuple[str, ...]]


def _attention_parts(
    shape: Shape, software: Software, part: SamplePart
) -> tuple[Callable[[str, str, str], list[_Renaming]], Callable[[str, str], list[Value]]]:
    """Attention as one component; or as three where its inside alone is computed again: products, scores, product."""
    ends = {RULE: (("full",), ("partial",))}
    limit = limit_of(shape)
    if not software.selective or software.flash:
        layer = Layer("h", shape, software, part)
        attention(layer, norm=False, residual=False)
        whole = component_of("h", layer, ("n",), ("a",), ends, limit=limit)
        return (
            lambda here, reads, makes: [(whole, f"{here}.attn", (reads,), (makes,))],
            lambda here, makes: [stream_value(makes, f"{here}.attn", shape, part, ())],
        )
    n, h, d = part.tokens, shape.hidden, shape.dim
    queries, keys = shape.heads * d, shape.keys * d
    before, inside, after = (Layer("h", shape, software, part) for _ in range(3))
    before.qkv(n, queries, keys, h, bias=shape.bias or shape.qkv_bias)
    scores_of(inside, d)
    after.linear("proj", n, h, queries, split="row", bias=shape.bias)
    inside.keep(part.element_bytes * n * (queries + 2 * keys), divided=True)
    inside.reads(part.element_bytes * n * (queries + 2 * keys), divided=True)
    after.keep(part.element_bytes * n * queries, divided=True)
    first = component_of("h", before, ("n",), ("q",), {RULE: (("full",), ("shard:2",))}, limit=limit)
    second = component_of("h", inside, ("q",), ("c",), {RULE: (("shard:2",), ("shard:2",))}, limit=limit)
    third = component_of("h", after, ("c",), ("a",), {RULE: (("shard:2",), ("partial",))}, limit=limit)

    def sublayer(here: str, reads: str, makes: str) -> list[_Renaming]:
        return [
            (first, f"{here}.qkv", (reads,), (f"{here}.q",)),
            (second, f"{here}.core", (f"{here}.q",), (f"{here}.c",)),
            (third, f"{here}.proj", (f"{here}.c",), (makes,)),
        ]

    def values(here: str, makes: str) -> list[Value]:
        inner = replace(
            stream_value(f"{here}.q", f"{here}.qkv", shape, part, (f"{here}.core",)),
            bytes_per_sample=part.element_bytes * n * (queries + 2 * keys),
        )
        outer = replace(
            stream_value(f"{here}.c", f"{here}.core", shape, part, (f"{here}.proj",)),
            bytes_per_sample=part.element_bytes * n * queries,
        )
        return [inner, outer, stream_value(makes, f"{here}.proj", shape, part, ())]

    return sublayer, values


def _norm_component(shape: Shape, software: Software, part: SamplePart, *, joins: bool) -> Component:
    """A norm, after the addition of what a sublayer made where it joins the stream. All of it is divided."""
    n, h = part.tokens, shape.hidden
    layer = Layer("h", shape, software, part)
    if joins:
        residual_of(layer, n * h, divided=True)
    layer.norm("norm", n, h, divided=True, kind=shape.norm, arrays=software.norm_arrays)
    layer.keep((part.element_bytes + part.operand_bytes(software)) * n * h, divided=True)
    layer.peak_divided = 2 * part.element_bytes * n * h
    needs = ("shard:1", "shard:1") if joins else ("shard:1",)
    makes = ("shard:1", "shard:1") if joins else ("shard:1",)
    names = ("a", "b") if joins else ("a",)
    return component_of("h", layer, names, tuple(f"{name}'" for name in names), {SEQUENCE: (needs, makes)}, limit=part.tokens)


def _renamed(component: Component, name: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Component:
    """A layer at another place, with parameters of its own."""
    swap = {parameter.name: f"{name}.{parameter.name}" for parameter in component.parameters}
    places = dict(zip(component.inputs, inputs, strict=True))

    def moved(entry: Selective[Size] | None) -> Selective[Size] | None:
        return None if entry is None else replace(entry, values=tuple(places[value] for value in entry.values))

    return replace(
        component,
        name=name,
        inputs=inputs,
        outputs=outputs,
        selective=moved(component.selective),
        parameters=tuple(replace(parameter, name=swap[parameter.name]) for parameter in component.parameters),
        shardings=tuple(
            replace(entry, parameters=tuple(replace(part, name=swap[part.name]) for part in entry.parameters))
            for entry in component.shardings
        ),
    )
