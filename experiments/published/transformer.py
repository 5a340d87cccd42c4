"""Models of transformers from their Shape, without torch: a layer is written once and repeated.

Granularity, by how tensor parallelism runs:

    "layer"      one component per layer (no tensor parallelism)
    "sublayer"   attention and MLP, each with its norm and its residual: input whole, output a sum over the shards
    "sequence"   norms and residuals are components of their own, divided along the sequence; attention and MLP read the whole

What the framework fuses is in `Software`. Bytes saved per token follow Korthikanti et al. (2022), section 4.

Leaves out: biases of norms in memory, rotary tables, the two small sums of a vocabulary-parallel loss, router losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from operators import FULL_BYTES, Layer
from shapes import Shape

from parsim.model.component import Component, Operator, Parameter, Sharding, ShardPeak, Value
from parsim.model.model import Model

HALF = 2
RULE = "tensor"
SEQUENCE = "sequence"


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """What a framework runs besides the products.

    Attributes:
        flash: attention is one kernel. dropout: after attention, after the two sublayers and inside attention.
        activation_arrays: moved by the activation function's kernels per element of the MLP's inside, gated or not.
        residual_arrays: moved by the addition of the residual. activation_saved: copies of the MLP's inside that are kept.
        norm_arrays: moved by a norm. selective: the inside of attention is computed again.
        loss_bytes: kept per logit. loss_peak: of gradients per logit at the fullest moment.
        loss_arrays: of 2 bytes per logit that the loss moves in its forward.
        attention_work: seconds of its flash attention over those of the kernel that parts know (FlashAttention-2, cuDNN).
        casts: inputs of products are cast to 8 bits, in both orders.
    """

    flash: bool = False
    dropout: bool = True
    residual_arrays: float = 3.5
    activation_arrays: float = 2.0
    activation_saved: float = 2.0
    rope_arrays: float = 2.0
    norm_arrays: float = 2.0
    attention_work: float = 1.0
    casts: bool = False
    selective: bool = False
    loss_bytes: int = 6
    loss_peak: int = 4
    loss_arrays: float = 8.0

    @property
    def operand_bytes(self) -> int:
        """Of an input of a product that is kept for the backward."""
        return 1 if self.casts else HALF


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The tokens that a rank sees of a sample.

    Attributes:
        tokens: of a sample. context: keys that attention sees.
    """

    tokens: int
    context: int


@lru_cache(maxsize=256)
def transformer(shape: Shape, software: Software, part: Part, granularity: str) -> Model:
    """The Model of a shape. Its parameters and activations have 2 bytes per element."""
    builder = {"layer": _by_layer, "sublayer": _by_sublayer, "sequence": _by_sequence}[granularity]
    components, values = builder(shape, software, part)
    tokens = Value(name="tokens", producer=None, bytes_per_sample=8 * part.tokens, differentiable=False, savers=("embed",))
    target = Value(name="target", producer=None, bytes_per_sample=8 * part.tokens, differentiable=False, savers=("head",))
    loss = Value(name="loss", producer="head", bytes_per_sample=FULL_BYTES, savers=())
    return Model(
        name=shape.name,
        granularity="sublayer" if granularity != "layer" else "block",
        components=tuple(components),
        values=(tokens, target, *values, loss),
        inputs=("tokens", "target"),
        outputs=("loss",),
        source=f"experiments.published.transformer of {shape}",
        loss="cross_entropy",
    )


# --- layers -----------------------------------------------------------------------------------------------------------


def _attention(layer: Layer, shape: Shape, software: Software, part: Part, *, norm: bool, residual: bool) -> None:
    """From the stream to the product after attention; with the norm before and the residual after it, if they belong here."""
    n, h, d = part.tokens, shape.hidden, shape.dim
    queries, keys = shape.heads * d, shape.keys * d
    if norm:
        layer.norm("norm1", n, h, divided=False, kind=shape.norm, arrays=software.norm_arrays)
        layer.keep((HALF + software.operand_bytes) * n * h, divided=False)
    if shape.key_rank:
        _latent_products(layer, shape, part)
        width = shape.heads * (d + shape.rope_dim)
        layer.keep(HALF * n * (2 * width + 2 * queries + shape.query_rank + shape.key_rank), divided=True)
    else:
        layer.linear("qkv", n, queries + 2 * keys, h, split="column", bias=shape.bias)
        layer.keep(HALF * n * (2 * queries + 2 * keys), divided=True)
        width = queries
    if shape.rotary:
        layer.moved(n * (queries + keys), software.rope_arrays, divided=True)
    _scores(layer, shape, software, part, width // shape.heads)
    layer.linear("proj", n, h, queries, split="row", bias=shape.bias)
    layer.peak, layer.peak_divided = HALF * n * h, HALF * n * (queries + 2 * keys)
    if residual:
        _residual(layer, software, n * h, divided=False)


def _latent_products(layer: Layer, shape: Shape, part: Part) -> None:
    """Multi-head latent attention: low-rank queries, and keys and values from one latent array."""
    n, h, d = part.tokens, shape.hidden, shape.dim
    layer.linear("q_down", n, shape.query_rank, h, split="")
    layer.linear("q_up", n, shape.heads * (d + shape.rope_dim), shape.query_rank, split="column")
    layer.linear("kv_down", n, shape.key_rank + shape.rope_dim, h, split="")
    layer.linear("kv_up", n, 2 * shape.heads * d, shape.key_rank, split="column")


def _scores(layer: Layer, shape: Shape, software: Software, part: Part, dim: int) -> None:
    n, keys, heads = part.tokens, part.context, shape.heads
    scores = heads * n * keys
    if software.flash:
        heads = round(heads * software.attention_work)
        scores = heads * n * keys
        operator = Operator(
            kind="attention",
            shape=(("heads", heads), ("q", n), ("kv", keys), ("d", dim), ("kv_heads", shape.keys)),
            batch="batch",
            forward_flop=4.0 * scores * dim,
            activation_bytes=FULL_BYTES * heads * dim * 2 * (n + keys),
            parameter_bytes=0,
            function="causal" if shape.causal else "",
        )
        layer.add(operator, "heads", operator.activation_bytes)
        layer.keep(FULL_BYTES * shape.heads * n, divided=True)
        return
    first = _batched(heads, n, keys, dim)
    layer.add(first, "problems", first.activation_bytes)
    layer.moved(scores, 2, divided=True)
    if software.dropout:
        layer.moved(scores, 2.5, divided=True)
    second = _batched(heads, n, dim, keys)
    layer.add(second, "problems", second.activation_bytes)
    layer.moved(heads * n * dim, 2, divided=True)
    layer.keep((5 if software.dropout else 2) * scores, divided=True)
    layer.peak_divided = HALF * 2 * scores


def _batched(problems: int, m: int, n: int, k: int) -> Operator:
    return Operator(
        kind="matmul",
        shape=(("problems", problems), ("m", m), ("n", n), ("k", k)),
        batch="batch",
        forward_flop=2.0 * problems * m * n * k,
        activation_bytes=FULL_BYTES * problems * (m * n + m * k + n * k),
        parameter_bytes=0,
    )


def _residual(layer: Layer, software: Software, elements: int, *, divided: bool) -> None:
    layer.moved(elements, software.residual_arrays, divided=divided)
    if software.dropout:
        layer.keep(elements, divided=divided)


def _mlp(layer: Layer, shape: Shape, software: Software, part: Part, *, experts: bool, norm: bool, residual: bool) -> None:
    """From the stream to the product after the MLP; likewise."""
    n, h = part.tokens, shape.hidden
    if norm:
        layer.norm("norm2", n, h, divided=False, kind=shape.norm, arrays=software.norm_arrays)
        layer.keep((HALF + software.operand_bytes) * n * h, divided=False)
    if experts:
        layer.linear("router", n, shape.experts, h, split="")
        visits = n * shape.active
        layer.moved(visits * h, 4, divided=False)
        _feed(layer, shape, software, max(1, visits // shape.experts), shape.expert_ffn, "experts", shape.experts)
        layer.keep(2 * HALF * visits * h, divided=False)
        if shape.shared_ffn:
            _feed(layer, shape, software, n, shape.shared_ffn, "shared", 1)
    else:
        _feed(layer, shape, software, n, shape.inner, "mlp", 1)
    if residual:
        _residual(layer, software, n * h, divided=False)


def _feed(layer: Layer, shape: Shape, software: Software, rows: int, inner: int, name: str, problems: int) -> None:
    arms = 2 if shape.gated else 1
    layer.linear(
        f"{name}.up", rows, arms * inner, shape.hidden, split="column", bias=shape.bias and problems == 1, problems=problems
    )
    arrays = software.activation_arrays + (1 if shape.gated else 0)
    layer.moved(problems * rows * inner, arrays, divided=True)
    layer.linear(f"{name}.down", rows, shape.hidden, inner, split="row", bias=shape.bias and problems == 1, problems=problems)
    saved = software.activation_saved - 1 + (1 if shape.gated else 0)
    layer.keep(round(problems * rows * inner * (HALF * saved + software.operand_bytes)), divided=True)
    layer.peak = max(layer.peak, HALF * problems * rows * shape.hidden)
    layer.peak_divided = max(layer.peak_divided, HALF * problems * rows * inner * (arms + 1))


def _embed(shape: Shape, software: Software, part: Part) -> Component:
    n, h = part.tokens, shape.hidden
    layer = Layer("wte" if shape.tied else "embed")
    lookup = Operator(
        kind="embedding",
        shape=(("rows", n), ("width", h)),
        batch="batch",
        forward_flop=0.0,
        activation_bytes=FULL_BYTES * 2 * n * h,
        parameter_bytes=0,
    )
    layer.add(lookup)
    layer.weight("weight", shape.vocab * h, 0)
    if not shape.rotary:
        layer.parameters.append(Parameter(name="wpe.weight", elements=n * h, element_bytes=HALF))
        layer.moved(n * h, 3, divided=False)
    if software.dropout:
        layer.moved(n * h, 2.5, divided=False)
        layer.keep(n * h, divided=False)
    layer.peak_fixed_divided = HALF * shape.vocab * h
    return _component("embed", layer, ("tokens",), ("x0",), {RULE: (("full",), ("partial",))}, limit=_even(shape.vocab))


def _head(shape: Shape, software: Software, part: Part, reads: str, *, norm: bool) -> Component:
    n, h, v = part.tokens, shape.hidden, shape.vocab
    layer = Layer("wte" if shape.tied else "lm_head")
    layer.linear("", n, v, h, split="column")
    layer.parameters.clear()
    layer.cut_parameters.clear()
    layer.weight("weight", v * h, 0)
    if norm:
        layer.norm("norm", n, h, divided=False, kind=shape.norm, arrays=software.norm_arrays)
        layer.keep(HALF * n * h, divided=False)
    layer.keep(HALF * n * h, divided=False)
    layer.moved(n * v, software.loss_arrays, divided=True)
    layer.keep(software.loss_bytes * n * v, divided=True)
    layer.peak, layer.peak_divided = HALF * n * h, software.loss_peak * n * v
    return _component(
        "head", layer, (reads, "target"), ("loss",), {RULE: (("full", "full"), ("partial",))}, limit=_even(shape.vocab)
    )


def _even(vocab: int) -> int:
    """Frameworks pad the vocabulary so that it divides; every power of two up to 128 does."""
    return vocab * 128


def _component(
    name: str,
    layer: Layer,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    rules: dict[str, tuple[tuple[str, ...], tuple[str, ...]]],
    *,
    limit: int,
) -> Component:
    peak = (layer.peak + layer.peak_divided, layer.peak_fixed + layer.peak_fixed_divided)
    forward = (layer.saved + layer.peak + layer.peak_divided, 0)
    shardings = tuple(
        Sharding(
            rule=rule,
            limit=limit,
            inputs=needs,
            outputs=makes,
            parameters=tuple(layer.cut_parameters) if rule == RULE else (),
            operators=tuple(layer.cut),
            saved_activation_bytes=layer.saved_divided,
            forward_peaks=(
                _shard_peak(layer.saved - layer.saved_divided + layer.peak, 0, layer.saved_divided + layer.peak_divided, 0),
            ),
            backward_peaks=(_shard_peak(layer.peak, layer.peak_fixed, layer.peak_divided, layer.peak_fixed_divided),),
        )
        for rule, (needs, makes) in rules.items()
    )
    return Component(
        name=name,
        inputs=inputs,
        outputs=outputs,
        parameters=tuple(layer.parameters),
        saved_activation_bytes=layer.saved,
        forward_peaks=(forward,),
        backward_peaks=(peak,),
        operators=tuple(layer.operators),
        shardings=shardings,
    )


def _shard_peak(rate: int, fixed: int, divided: int, divided_fixed: int) -> ShardPeak:
    return ShardPeak(rate, fixed, divided, divided_fixed)


def _limit(shape: Shape) -> int:
    return shape.heads * 128 if shape.experts else shape.heads


def _stream(name: str, producer: str, shape: Shape, part: Part, savers: Sequence[str]) -> Value:
    return Value(name=name, producer=producer, bytes_per_sample=HALF * part.tokens * shape.hidden, savers=tuple(savers))


def _is_mixture(shape: Shape, number: int) -> bool:
    return bool(shape.experts) and number >= shape.dense_layers


# --- granularities ----------------------------------------------------------------------------------------------------


def _by_layer(shape: Shape, software: Software, part: Part) -> tuple[list[Component], list[Value]]:
    made: dict[bool, Component] = {}
    for mixture in {_is_mixture(shape, number) for number in range(shape.layers)}:
        layer = Layer("h", casts=software.casts)
        _attention(layer, shape, software, part, norm=True, residual=True)
        _mlp(layer, shape, software, part, experts=mixture, norm=True, residual=True)
        made[mixture] = _component("h", layer, ("x",), ("y",), {}, limit=_limit(shape))
    components, values = [_embed(shape, software, part)], []
    for number in range(shape.layers):
        components.append(_renamed(made[_is_mixture(shape, number)], f"h.{number}", (f"x{number}",), (f"x{number + 1}",)))
    components.append(_head(shape, software, part, f"x{shape.layers}", norm=True))
    for number in range(shape.layers + 1):
        reader = f"h.{number}" if number < shape.layers else "head"
        values.append(_stream(f"x{number}", f"h.{number - 1}" if number else "embed", shape, part, (reader,)))
    return components, values


def _by_sublayer(shape: Shape, software: Software, part: Part) -> tuple[list[Component], list[Value]]:
    ends = {RULE: (("full",), ("partial",))}
    first = Layer("h", casts=software.casts)
    _attention(first, shape, software, part, norm=True, residual=True)
    attention = _component("h", first, ("x",), ("y",), ends, limit=_limit(shape))
    feeds: dict[bool, Component] = {}
    for mixture in {_is_mixture(shape, number) for number in range(shape.layers)}:
        layer = Layer("h", casts=software.casts)
        _mlp(layer, shape, software, part, experts=mixture, norm=True, residual=True)
        feeds[mixture] = _component("h", layer, ("y",), ("z",), ends, limit=_limit(shape))
    components, values = [_embed(shape, software, part)], [_stream("x0", "embed", shape, part, ("h.0.attn",))]
    for number in range(shape.layers):
        here = f"h.{number}"
        components.append(_renamed(attention, f"{here}.attn", (f"x{number}",), (f"y{number}",)))
        components.append(_renamed(feeds[_is_mixture(shape, number)], f"{here}.mlp", (f"y{number}",), (f"x{number + 1}",)))
        reader = f"h.{number + 1}.attn" if number + 1 < shape.layers else "head"
        values.append(_stream(f"y{number}", f"{here}.attn", shape, part, (f"{here}.mlp",)))
        values.append(_stream(f"x{number + 1}", f"{here}.mlp", shape, part, (reader,)))
    components.append(_head(shape, software, part, f"x{shape.layers}", norm=True))
    return components, values


def _by_sequence(shape: Shape, software: Software, part: Part) -> tuple[list[Component], list[Value]]:
    """x: the stream; n: normalised; a: the sum that attention makes; y, m, p: the same of the MLP."""
    ends = {RULE: (("full",), ("partial",))}
    sublayer, kept = _attention_parts(shape, software, part)
    feeds: dict[bool, Component] = {}
    for mixture in {_is_mixture(shape, number) for number in range(shape.layers)}:
        layer = Layer("h", casts=software.casts)
        _mlp(layer, shape, software, part, experts=mixture, norm=False, residual=False)
        feeds[mixture] = _component("h", layer, ("m",), ("p",), ends, limit=_limit(shape))
    start = _norm_component(shape, software, part, joins=False)
    join = _norm_component(shape, software, part, joins=True)
    components = [_embed(shape, software, part)]
    values = [_stream("x0", "embed", shape, part, ("h.0.norm1",))]
    stream, added = "x0", ""
    for number in range(shape.layers):
        here = f"h.{number}"
        if number == 0:
            components.append(_renamed(start, f"{here}.norm1", (stream,), (f"n{number}",)))
        else:
            components.append(_renamed(join, f"{here}.norm1", (stream, added), (f"s{number}", f"n{number}")))
            values.append(_stream(f"s{number}", f"{here}.norm1", shape, part, (f"{here}.norm1",)))
            stream = f"s{number}"
        values.append(_stream(f"n{number}", f"{here}.norm1", shape, part, (f"{here}.norm1",)))
        components += [_renamed(*args) for args in sublayer(here, f"n{number}", f"a{number}")]
        values += kept(here, f"a{number}")
        components.append(_renamed(join, f"{here}.norm2", (stream, f"a{number}"), (f"t{number}", f"m{number}")))
        values.append(_stream(f"t{number}", f"{here}.norm2", shape, part, (f"{here}.norm2",)))
        values.append(_stream(f"m{number}", f"{here}.norm2", shape, part, (f"{here}.norm2",)))
        components.append(_renamed(feeds[_is_mixture(shape, number)], f"{here}.mlp", (f"m{number}",), (f"p{number}",)))
        values.append(_stream(f"p{number}", f"{here}.mlp", shape, part, ()))
        stream, added = f"t{number}", f"p{number}"
    components.append(_renamed(join, "final.norm", (stream, added), ("final", "normed")))
    values.append(_stream("final", "final.norm", shape, part, ("final.norm",)))
    values.append(_stream("normed", "final.norm", shape, part, ("final.norm",)))
    components.append(_head(shape, software, part, "normed", norm=False))
    return components, values


_Renaming = tuple[Component, str, tuple[str, ...], tuple[str, ...]]


def _attention_parts(
    shape: Shape, software: Software, part: Part
) -> tuple[Callable[[str, str, str], list[_Renaming]], Callable[[str, str], list[Value]]]:
    """Attention as one component; or as three where its inside alone is computed again: products, scores, product."""
    ends = {RULE: (("full",), ("partial",))}
    limit = _limit(shape)
    if not software.selective or software.flash:
        layer = Layer("h", casts=software.casts)
        _attention(layer, shape, software, part, norm=False, residual=False)
        whole = _component("h", layer, ("n",), ("a",), ends, limit=limit)
        return (
            lambda here, reads, makes: [(whole, f"{here}.attn", (reads,), (makes,))],
            lambda here, makes: [_stream(makes, f"{here}.attn", shape, part, ())],
        )
    n, h, d = part.tokens, shape.hidden, shape.dim
    queries, keys = shape.heads * d, shape.keys * d
    before, inside, after = (Layer("h", casts=software.casts) for _ in range(3))
    before.linear("qkv", n, queries + 2 * keys, h, split="column", bias=shape.bias)
    _scores(inside, shape, software, part, d)
    after.linear("proj", n, h, queries, split="row", bias=shape.bias)
    inside.keep(HALF * n * (queries + 2 * keys), divided=True)
    after.keep(HALF * n * queries, divided=True)
    first = _component("h", before, ("n",), ("q",), {RULE: (("full",), ("shard:2",))}, limit=limit)
    second = _component("h", inside, ("q",), ("c",), {RULE: (("shard:2",), ("shard:2",))}, limit=limit)
    third = _component("h", after, ("c",), ("a",), {RULE: (("shard:2",), ("partial",))}, limit=limit)

    def sublayer(here: str, reads: str, makes: str) -> list[_Renaming]:
        return [
            (first, f"{here}.qkv", (reads,), (f"{here}.q",)),
            (second, f"{here}.core", (f"{here}.q",), (f"{here}.c",)),
            (third, f"{here}.proj", (f"{here}.c",), (makes,)),
        ]

    def values(here: str, makes: str) -> list[Value]:
        inner = replace(
            _stream(f"{here}.q", f"{here}.qkv", shape, part, (f"{here}.core",)),
            bytes_per_sample=HALF * n * (queries + 2 * keys),
        )
        outer = replace(
            _stream(f"{here}.c", f"{here}.core", shape, part, (f"{here}.proj",)), bytes_per_sample=HALF * n * queries
        )
        return [inner, outer, _stream(makes, f"{here}.proj", shape, part, ())]

    return sublayer, values


def _norm_component(shape: Shape, software: Software, part: Part, *, joins: bool) -> Component:
    """A norm, after the addition of what a sublayer made where it joins the stream. All of it is divided."""
    n, h = part.tokens, shape.hidden
    layer = Layer("h", casts=software.casts)
    if joins:
        _residual(layer, software, n * h, divided=True)
    layer.norm("norm", n, h, divided=True, kind=shape.norm, arrays=software.norm_arrays)
    layer.keep((HALF + software.operand_bytes) * n * h, divided=True)
    layer.peak_divided = 2 * HALF * n * h
    needs = ("shard:1", "shard:1") if joins else ("shard:1",)
    makes = ("shard:1", "shard:1") if joins else ("shard:1",)
    names = ("a", "b") if joins else ("a",)
    return _component("h", layer, names, tuple(f"{name}'" for name in names), {SEQUENCE: (needs, makes)}, limit=part.tokens)


def _renamed(component: Component, name: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Component:
    """The same layer at another place, with parameters of its own."""
    swap = {parameter.name: f"{name}.{parameter.name}" for parameter in component.parameters}
    return replace(
        component,
        name=name,
        inputs=inputs,
        outputs=outputs,
        parameters=tuple(replace(parameter, name=swap[parameter.name]) for parameter in component.parameters),
        shardings=tuple(
            replace(entry, parameters=tuple(replace(part, name=swap[part.name]) for part in entry.parameters))
            for entry in component.shardings
        ),
    )
