"""Models of transformers from their Shape, without torch: a layer is written once and repeated.

Granularity, by how tensor parallelism runs:

    "layer"      one component per layer (no tensor parallelism)
    "sublayer"   attention and MLP, each with its norm and its residual: input whole, output a sum over the shards
    "sequence"   norms are components of their own, divided along the sequence; attention and MLP read the whole, and each adds
                 the stream, divided so, to its sum

What the framework fuses is in `Software`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial

from parsim.errors import ModelError
from parsim.model.catalogue.sublayers import (
    ATTENTION_READS,
    MLP_READS,
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
    mlp,
    residual_of,
    scores_of,
    stream_value,
)
from parsim.model.component import (
    FULL_BYTES,
    HALF_BYTES,
    Bytes,
    Component,
    Footprint,
    Parameter,
    Sharding,
    Value,
    ValueFootprint,
)
from parsim.model.model import Model
from parsim.model.tuning import HEAD, Tuning


@lru_cache(maxsize=256)
def transformer(shape: Shape, software: Software, part: SamplePart, granularity: str, tuning: Tuning | None = None) -> Model:
    """The Model of a shape, with `part.element_bytes` per parameter and activation.
    `granularity`: "layer", "sublayer" or "sequence". `tuning`: what is trained of it; None: everything. Raises ModelError:
    sizes that do not go together, or a head that cannot be trained alone."""
    shape.check()
    if tuning is not None and tuning.method == HEAD and shape.tied:
        raise ModelError(
            f"{shape.name}: its head is its embedding, so training it alone would train the first layer too; set "
            'training.tune = "lora" or "full"'
        )
    model = Layer("h", shape, software, part, tuning)
    components, values = _by_sequence(model) if granularity == "sequence" else _by_layer(model, granularity == "sublayer")
    if tuning is not None and tuning.method != "full":
        values = [_unreached(value, tuning, components) for value in values]
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


def _unreached(value: Value, tuning: Tuning, components: Sequence[Component]) -> Value:
    """A value that takes no gradient if nothing before it is trained. The head keeps what it reads straight from such a one."""
    if tuning.has_adapters:
        return replace(value, differentiable=value.producer != "embed")
    reads = value.name in components[-1].inputs and components[-1].saved_activation_bytes and value.savers == ("final.norm",)
    return replace(value, differentiable=False, savers=("head",) if reads else ())


BALANCED = "experts are visited evenly"


@lru_cache(maxsize=64)
def recorded(
    shape: Shape, software: Software, part: SamplePart, granularity: str, weights: str, tuning: Tuning | None = None
) -> Model:
    """A Model as traced ones are: with weights of a type, and in fp32 also with what autocast to half precision keeps.
    `weights`: "float32" or "bfloat16". Raises ModelError: sizes that do not go together."""
    half = transformer(shape, software, replace(part, element_bytes=HALF_BYTES), granularity, tuning)
    if weights != "float32":
        return half
    full = transformer(shape, software, replace(part, element_bytes=FULL_BYTES), granularity, tuning)
    return replace(
        full,
        components=tuple(_with_half(*pair) for pair in zip(full.components, half.components, strict=True)),
        values=tuple(
            replace(value, half=ValueFootprint(bytes_per_sample=narrow.bytes_per_sample, savers=value.savers))
            for value, narrow in zip(full.values, half.values, strict=True)
        ),
    )


def _with_half(full: Component, half: Component) -> Component:
    """A component with what it keeps under autocast: its activations in half precision, and casts of its weights.
    Gradients of parameters stay in fp32."""

    def sharding(divided: Sharding) -> Sharding:
        narrow = half.sharding(divided.rule)
        cut = {parameter.name for parameter in divided.parameters}
        peaks = tuple(
            peak._replace(
                fixed_bytes=peak.fixed_bytes * FULL_BYTES // HALF_BYTES,
                divided_fixed_bytes=peak.divided_fixed_bytes * FULL_BYTES // HALF_BYTES,
            )
            for peak in narrow.backward_peaks
        )
        return replace(divided, half=footprint(narrow, [each for each in half.parameters if each.name in cut], peaks))

    def footprint(narrow: Footprint[Bytes], cast: Sequence[Parameter], peaks: tuple[Bytes, ...]) -> Footprint[Bytes]:
        return Footprint(
            saved_activation_bytes=narrow.saved_activation_bytes,
            cast_bytes=HALF_BYTES * sum(parameter.elements for parameter in cast),
            forward_peaks=narrow.forward_peaks,
            backward_peaks=peaks,
            selective=narrow.selective,
        )

    peaks = tuple((rate, fixed * FULL_BYTES // HALF_BYTES) for rate, fixed in half.backward_peaks)
    return replace(full, shardings=tuple(map(sharding, full.shardings)), half=footprint(half, half.parameters, peaks))


Chain = tuple[list[Component], list[Value]]
ENDS = {RULE: (("full",), ("partial",))}
ADDED = {RULE: (("full", "shard:1"), ("partial",))}
"""Of a sublayer that adds to its sum a stream which is divided along the sequence."""


def _by_layer(model: Layer, sublayers: bool) -> Chain:
    """One component per layer, or one for its attention and one for its MLP, each read by the next alone."""

    def whole(mixture: bool) -> Component:
        layer = model.another()
        attention(layer, norm=True, residual=True)
        mlp(layer, experts=mixture, norm=True, residual=True)
        return component_of("h", layer, ("x",), ("y",), {})

    def feed(mixture: bool) -> Component:
        layer = model.another()
        mlp(layer, experts=mixture, norm=True, residual=True)
        return component_of("h", layer, ("y",), ("z",), ENDS)

    chain: list[tuple[Component, str, str]] = []  # with its name and the value it makes
    if sublayers:
        first = model.another()
        attention(first, norm=True, residual=True)
        half = component_of("h", first, ("x",), ("y",), ENDS)
        for number, component in enumerate(_per_layer(model.shape, feed)):
            chain += [(half, f"h.{number}.attn", f"y{number}"), (component, f"h.{number}.mlp", f"x{number + 1}")]
    else:
        chain += [(layer, f"h.{number}", f"x{number + 1}") for number, layer in enumerate(_per_layer(model.shape, whole))]
    components, values = [embed(model)], []
    value, producer = "x0", "embed"
    for component, name, makes in chain:
        components.append(_renamed(component, name, (value,), (makes,)))
        values.append(stream_value(model, value, producer, (name,)))
        value, producer = makes, name
    components.append(head(model, value, norm=True))
    values.append(stream_value(model, value, producer, ("head",)))
    return components, values


def _per_layer(shape: Shape, build: Callable[[bool], Component]) -> list[Component]:
    """For every layer what `build` makes with or without experts; layers that are alike share it."""
    mixtures = [bool(shape.experts) and number >= shape.dense_layers for number in range(shape.layers)]
    made = {mixture: build(mixture) for mixture in set(mixtures)}
    return [made[mixture] for mixture in mixtures]


def _by_sequence(model: Layer) -> Chain:
    """x: the stream before a layer, y: before its MLP; n, m: normalised. A sublayer adds the stream to its part of the sum, so
    one value joins layers: what a stage sends, and what a layer that runs again keeps."""

    def feed(mixture: bool) -> Component:
        layer = model.another()
        mlp(layer, experts=mixture, norm=False, residual=True)
        return component_of("h", layer, ("m", "y"), ("x",), ADDED)

    steps = _attention_steps(model)
    norm = cache(partial(_norm_component, model))
    components, values = [embed(model)], list[Value]()

    def normed(name: str, stream: str, producer: str, made: str, read_by: tuple[str, ...]) -> None:
        keeps = model.input_bytes(*read_by)
        values.append(stream_value(model, stream, producer, (name,)))
        components.append(_renamed(norm(keeps), name, (stream,), (made,)))
        values.append(stream_value(model, made, name, (name,) if keeps else ()))

    last = "embed"
    for number, mlp_component in enumerate(_per_layer(model.shape, feed)):
        here, stream, added, value = f"h.{number}", f"x{number}", f"y{number}", f"n{number}"
        normed(f"{here}.norm1", stream, last, value, ATTENTION_READS)
        for place, (component, suffix, makes, width) in enumerate(steps):
            name = f"{here}.{suffix}"
            if not makes:
                components.append(_renamed(component, name, (value, stream), (added,)))
                continue
            components.append(_renamed(component, name, (value,), (f"{here}.{makes}",)))
            values.append(stream_value(model, f"{here}.{makes}", name, (f"{here}.{steps[place + 1][1]}",), width))
            value = f"{here}.{makes}"
        normed(f"{here}.norm2", added, f"{here}.{steps[-1][1]}", f"m{number}", MLP_READS)
        last = f"{here}.mlp"
        components.append(_renamed(mlp_component, last, (f"m{number}", added), (f"x{number + 1}",)))
    normed("final.norm", f"x{model.shape.layers}", last, "normed", ("",))
    components.append(head(model, "normed", norm=False))
    return components, values


def _attention_steps(model: Layer) -> list[tuple[Component, str, str, int]]:
    """Attention as one component; or as three where its inside alone is computed again: products, scores, product.
    Each with its name, the name of what it makes ("" for the last) and how wide that is per token."""
    shape, software, part = model.shape, model.software, model.part
    if not software.selective or software.flash:
        layer = model.another()
        attention(layer, norm=False, residual=True)
        return [(component_of("h", layer, ("n", "x"), ("y",), ADDED), "attn", "", shape.hidden)]
    n, h, d = part.tokens, shape.hidden, shape.dim
    queries, keys = shape.heads * d, shape.keys * d
    before, inside, after = (model.another() for _ in range(3))
    before.qkv(n, queries, keys, h, bias=shape.bias or shape.qkv_bias)
    scores_of(inside, d)
    after.linear("proj", n, h, queries, split="row", bias=shape.bias)
    residual_of(after, n * h, divided=True)
    inside.saved.add(part.element_bytes * n * (queries + 2 * keys), divided=True)
    inside.given.add(part.element_bytes * n * (queries + 2 * keys), divided=True)
    after.saved.add(part.element_bytes * n * queries if after.input_bytes("proj") else 0, divided=True)
    first = component_of("h", before, ("n",), ("q",), {RULE: (("full",), ("shard:2",))})
    second = component_of("h", inside, ("q",), ("c",), {RULE: (("shard:2",), ("shard:2",))})
    third = component_of("h", after, ("c", "x"), ("y",), {RULE: (("shard:2", "shard:1"), ("partial",))})
    return [(first, "qkv", "q", queries + 2 * keys), (second, "core", "c", queries), (third, "proj", "", h)]


def _norm_component(model: Layer, keeps: int) -> Component:
    """A norm, all of it divided along the sequence. `keeps`: bytes per element that its reader keeps of what it makes."""
    n, h, size = model.part.tokens, model.shape.hidden, model.part.element_bytes
    layer = model.another()
    layer.norm("norm", n, h, divided=True, kind=model.shape.norm, arrays=model.software.norm_arrays)
    layer.saved.add((size + keeps) * n * h, divided=True)
    layer.peak.divided = 2 * size * n * h
    return component_of("h", layer, ("x",), ("n",), {SEQUENCE: (("shard:1",), ("shard:1",))}, limit=n)


def _renamed(component: Component, name: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Component:
    """A layer at another place, with parameters of its own."""
    places = dict(zip(component.inputs, inputs, strict=True))
    selective = component.selective
    return replace(
        component,
        name=name,
        inputs=inputs,
        outputs=outputs,
        selective=selective and replace(selective, values=tuple(places[value] for value in selective.values)),
        parameters=tuple(replace(parameter, name=f"{name}.{parameter.name}") for parameter in component.parameters),
        shardings=tuple(
            replace(sharding, parameters=tuple(replace(cut, name=f"{name}.{cut.name}") for cut in sharding.parameters))
            for sharding in component.shardings
        ),
    )
