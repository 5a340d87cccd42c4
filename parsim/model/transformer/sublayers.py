"""Attention, MLP, embedding and head of a transformer, each as a component.

Bytes saved per token follow Korthikanti et al. (2022), section 4. Leaves out: biases of norms in memory, rotary tables, the two
small sums of a vocabulary-parallel loss, router losses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parsim.model.component import (
    ALONE,
    BIAS_GRADIENT,
    UNALIGNED,
    Component,
    Operator,
    Parameter,
    Selective,
    Sharding,
    ShardPeak,
    ShardSelective,
    Value,
)
from parsim.model.transformer.operators import FULL_BYTES, Layer
from parsim.model.transformer.shape import Shape
from parsim.model.transformer.software import Software

RULE = "tensor"
SEQUENCE = "sequence"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePart:
    """The tokens that a rank sees of a sample.

    Attributes:
        tokens: of a sample. context: keys that attention sees, which divides the tokens: of several documents each token
            sees its own. element_bytes: of an activation and of a parameter.
    """

    tokens: int
    context: int
    element_bytes: int = 2

    def operand_bytes(self, software: Software) -> int:
        """Of an input of a product that is kept for the backward."""
        return 1 if software.casts else self.element_bytes


def new_layer(prefix: str, software: Software, part: SamplePart) -> Layer:
    """A component under construction."""
    return Layer(
        prefix,
        weight_bytes=part.element_bytes,
        casts=software.casts,
        gradient_arrays=software.gradient_arrays,
        early_stop=software.early_stop,
        bias_kernels=software.bias_kernels,
    )


def attention(layer: Layer, shape: Shape, software: Software, part: SamplePart, *, norm: bool, residual: bool) -> None:
    """From the stream to the product after attention; with the norm before and the residual after it, if they belong here."""
    n, h, d = part.tokens, shape.hidden, shape.dim
    queries, keys = shape.heads * d, shape.keys * d
    if norm:
        _entering_norm(layer, "norm1", shape, software, part)
    if shape.key_rank:
        _latent_products(layer, shape, part)
        width = shape.heads * (d + shape.rope_dim)
        layer.keep(part.element_bytes * n * (2 * width + 2 * queries + shape.query_rank + shape.key_rank), divided=True)
    else:
        layer.qkv(n, queries, keys, h, bias=shape.bias or shape.qkv_bias)
        layer.keep(part.element_bytes * n * (2 * queries + 2 * keys), divided=True)
        width = queries
    begin = len(layer.operators)
    if shape.qk_norm:
        layer.norm("q_norm", n * shape.heads, d, divided=True, kind="rms", arrays=software.norm_arrays)
        layer.norm("k_norm", n * shape.keys, d, divided=True, kind="rms", arrays=software.norm_arrays)
        layer.keep(part.element_bytes * n * (queries + keys), divided=True)
    if shape.sinks:
        layer.weight("sinks", shape.heads, 0)
    if shape.rotary:
        layer.moved(n * (queries + keys), software.rope_arrays, divided=True)
    if software.flash:
        layer.repeat(begin, part.element_bytes * n * (queries + keys) if shape.qk_norm else 0, divided=True)
    scores_of(layer, shape, software, part, width // shape.heads)
    layer.linear("proj", n, h, queries, split="row", bias=shape.bias)
    layer.peak, layer.peak_divided = part.element_bytes * n * h, part.element_bytes * n * (queries + 2 * keys)
    if residual:
        residual_of(layer, shape, software, n * h, divided=False)


def _entering_norm(layer: Layer, name: str, shape: Shape, software: Software, part: SamplePart) -> None:
    """The norm of the stream before a sublayer; it keeps the stream and what it makes."""
    n, h, begin = part.tokens, shape.hidden, len(layer.operators)
    layer.norm(name, n, h, divided=False, kind=shape.norm, arrays=software.norm_arrays)
    layer.keep((part.element_bytes + part.operand_bytes(software)) * n * h, divided=False)
    if name != "norm2" or not layer.given:  # a layer's second norm reads what its own attention has made
        layer.reads(part.element_bytes * n * h, divided=False)
    if software.flash:
        layer.repeat(begin, part.operand_bytes(software) * n * h, divided=False)


def _latent_products(layer: Layer, shape: Shape, part: SamplePart) -> None:
    """Multi-head latent attention: low-rank queries, and keys and values from one latent array."""
    n, h, d = part.tokens, shape.hidden, shape.dim
    layer.linear("q_down", n, shape.query_rank, h, split="")
    layer.norm("q_norm", n, shape.query_rank, divided=False, kind="rms")
    layer.linear("q_up", n, shape.heads * (d + shape.rope_dim), shape.query_rank, split="column")
    layer.linear("kv_down", n, shape.key_rank + shape.rope_dim, h, split="")
    layer.norm("kv_norm", n, shape.key_rank, divided=False, kind="rms")
    layer.linear("kv_up", n, 2 * shape.heads * d, shape.key_rank, split="column")


def scores_of(layer: Layer, shape: Shape, software: Software, part: SamplePart, dim: int) -> None:
    n, keys, heads = part.tokens, part.context, shape.heads
    scores = heads * n * keys
    if software.flash:
        documents = n // keys
        heads, queries = round(heads * documents * software.attention_work), n // documents
        scores = heads * queries * keys
        operator = Operator(
            kind="attention",
            shape=(("heads", heads), ("q", queries), ("kv", keys), ("d", dim), ("kv_heads", shape.keys * documents)),
            batch="batch",
            forward_flop=4.0 * scores * dim,
            activation_bytes=FULL_BYTES * heads * dim * 2 * (queries + keys),
            parameter_bytes=0,
            function="causal" if shape.causal else "",
        )
        layer.add(operator, "heads", operator.activation_bytes)
        layer.keep(FULL_BYTES * shape.heads * n, divided=True)
        return
    begin = len(layer.operators)
    whole = not software.aligned or dim % software.aligned == 0
    first = _batched(heads, n, keys, dim, whole)
    layer.add(first, "problems", first.activation_bytes)
    layer.moved(scores, software.score_arrays, divided=True)
    if software.dropout:
        layer.moved(scores, 2.5, divided=True)
    second = _batched(heads, n, dim, keys, whole)
    layer.add(second, "problems", second.activation_bytes)
    layer.moved(heads * n * dim, 2, divided=True)
    size = ((2 * part.element_bytes + 1) if software.dropout else part.element_bytes) * scores
    layer.keep(size, divided=True)
    layer.repeat(begin, size, divided=True)
    layer.peak_divided = part.element_bytes * 2 * scores


def _batched(problems: int, m: int, n: int, k: int, aligned: bool) -> Operator:
    return Operator(
        kind="matmul",
        shape=(("problems", problems), ("m", m), ("n", n), ("k", k)),
        batch="batch",
        forward_flop=2.0 * problems * m * n * k,
        activation_bytes=FULL_BYTES * problems * (m * n + m * k + n * k),
        parameter_bytes=0,
        function="" if aligned else UNALIGNED,
    )


def residual_of(layer: Layer, shape: Shape, software: Software, elements: int, *, divided: bool) -> None:
    """The addition to the stream, of the last product's bias too."""
    layer.moved(elements, software.residual_arrays, divided=divided)
    if shape.bias:
        layer.bias_kernel(elements, BIAS_GRADIENT, divided=divided)
    if software.dropout:
        layer.keep(elements, divided=divided)


def mlp(layer: Layer, shape: Shape, software: Software, part: SamplePart, *, experts: bool, norm: bool, residual: bool) -> None:
    """From the stream to the product after the MLP; likewise."""
    n, h = part.tokens, shape.hidden
    if norm:
        _entering_norm(layer, "norm2", shape, software, part)
    if experts:
        layer.linear("router", n, shape.experts, h, split="", bias=shape.expert_bias, low=False)
        visits = n * shape.active
        layer.moved(visits * h, 4, divided=False)
        _feed(layer, shape, software, part, max(1, visits // shape.experts), shape.expert_ffn, "experts", shape.experts)
        layer.keep(2 * part.element_bytes * visits * h, divided=False)
        if shape.shared_ffn:
            _feed(layer, shape, software, part, n, shape.shared_ffn, "shared")
    else:
        _feed(layer, shape, software, part, n, shape.inner, "mlp")
    if residual:
        residual_of(layer, shape, software, n * h, divided=False)


def _feed(
    layer: Layer, shape: Shape, software: Software, part: SamplePart, rows: int, inner: int, name: str, problems: int = 1
) -> None:
    arms = 2 if shape.gated else 1
    bias = shape.expert_bias if name == "experts" else shape.bias
    layer.linear(f"{name}.up", rows, arms * inner, shape.hidden, split="column", bias=bias, problems=problems)
    arrays = software.activation_arrays + (1 if shape.gated else 0)
    begin = len(layer.operators)
    layer.moved(problems * rows * inner, arrays, divided=True)
    activation = range(begin, len(layer.operators))
    layer.linear(f"{name}.down", rows, shape.hidden, inner, split="row", bias=bias, problems=problems)
    saved = software.activation_saved - 1 + (1 if shape.gated else 0)
    size = round(problems * rows * inner * (part.element_bytes * saved + part.operand_bytes(software)))
    layer.keep(size, divided=True)
    if software.flash:
        layer.repeated += activation
        again = max(0, size - problems * rows * inner * part.element_bytes * arms)  # what the product made stays
        layer.again, layer.again_divided = layer.again + again, layer.again_divided + again
    layer.peak = max(layer.peak, part.element_bytes * problems * rows * shape.hidden)
    layer.peak_divided = max(layer.peak_divided, part.element_bytes * problems * rows * inner * (arms + 1))


def embed(shape: Shape, software: Software, part: SamplePart) -> Component:
    n, h = part.tokens, shape.hidden
    layer = new_layer("wte" if shape.tied else "embed", software, part)
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
    if shape.learned_positions:
        positions = (shape.positions or n) * h
        layer.parameters.append(Parameter(name="wpe.weight", elements=positions, element_bytes=part.element_bytes))
        layer.moved(n * h, 3, divided=False)
    if software.dropout:
        layer.moved(n * h, 2.5, divided=False)
        layer.keep(n * h, divided=False)
    if shape.embedding_norm:
        layer.norm("embedding_norm", n, h, divided=False, kind=shape.norm, arrays=software.norm_arrays)
        layer.keep(part.element_bytes * n * h, divided=False)
    layer.peak_fixed_divided = part.element_bytes * shape.vocab * h
    return component_of("embed", layer, ("tokens",), ("x0",), {RULE: (("full",), ("partial",))}, limit=_even(shape.vocab))


def head(shape: Shape, software: Software, part: SamplePart, reads: str, *, norm: bool) -> Component:
    """The last norm, logits and loss.

    Training in 8 bits leaves the product in 16 (`low`). Megatron-LM's head is not a layer of Transformer Engine unless
    `fp8_output_proj` is set (pull request 4825). torchao's example of float8 training leaves the last layer out.
    """
    n, h, v = part.tokens, shape.hidden, shape.vocab
    layer = new_layer("wte" if shape.tied else "lm_head", software, part)
    layer.linear("", n, v, h, split="column", low=False)
    layer.parameters.clear()
    layer.cut_parameters.clear()
    layer.weight("weight", v * h, 0)
    if norm:
        begin = len(layer.operators)
        layer.norm("norm", n, h, divided=False, kind=shape.norm, arrays=software.norm_arrays)
        layer.keep(part.element_bytes * n * h, divided=False)
        layer.reads(part.element_bytes * n * h, divided=False)
        if software.flash:
            layer.repeat(begin, part.element_bytes * n * h, divided=False)
    layer.keep(part.element_bytes * n * h, divided=False)
    layer.moved(n * v, software.loss_arrays, divided=True)
    wider = part.element_bytes - 2  # the sizes of Software are those of half precision
    layer.keep((software.loss_bytes + wider) * n * v, divided=True)
    layer.peak, layer.peak_divided = part.element_bytes * n * h, (software.loss_peak + wider) * n * v
    return component_of(
        "head", layer, (reads, "target"), ("loss",), {RULE: (("full", "full"), ("partial",))}, limit=_even(shape.vocab)
    )


def _even(vocab: int) -> int:
    """Frameworks pad the vocabulary so that it divides; every power of two up to 128 does."""
    return vocab * 128


def component_of(
    name: str,
    layer: Layer,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    rules: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]],
    *,
    limit: int,
) -> Component:
    layer.sum_gradients()
    peak = (layer.peak + layer.peak_divided, layer.peak_fixed + layer.peak_fixed_divided)
    forward = (layer.saved + layer.peak + layer.peak_divided, 0)
    selective, shard_selective = _by_operator(layer, inputs)
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
            selective=shard_selective,
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
        selective=selective,
    )


def _by_operator(layer: Layer, inputs: tuple[str, ...]) -> tuple[Selective | None, ShardSelective | None]:
    """With unfused attention its core runs again, as in Megatron-LM; else norms, activation functions and rotations do.

    A second forward that stops early runs again whole, up to its last product (`Layer.stop_early`).

    Leaves out: gradients beside what the second forward makes, and what it makes and lets go of.
    """
    if layer.early_stop and layer.given:
        layer.stop_early()
    if not layer.again:
        return None, None
    kept = _shard_peak(
        layer.saved - layer.saved_divided - (layer.given - layer.given_divided) - (layer.again - layer.again_divided),
        0,
        layer.saved_divided - layer.given_divided - layer.again_divided,
        0,
    )
    again = _shard_peak(layer.again - layer.again_divided, 0, layer.again_divided, 0)
    first = _shard_peak(kept.bytes_per_sample + layer.peak, 0, kept.divided_bytes_per_sample + layer.peak_divided, 0)
    shard = ShardSelective(kept=kept, again=again, first_peaks=(first,), second_peaks=(again,))
    whole = Selective(
        values=inputs[:1] if layer.given else (),
        kept=kept.at(ALONE),
        again=again.at(ALONE),
        first_peaks=(first.at(ALONE),),
        second_peaks=(again.at(ALONE),),
        operators=tuple((number, 1) for number in sorted(layer.repeated)),
    )
    return whole, shard


def _shard_peak(rate: int, fixed: int, divided: int, divided_fixed: int) -> ShardPeak:
    return ShardPeak(rate, fixed, divided, divided_fixed)


def limit_of(shape: Shape) -> int:
    return shape.heads * 128 if shape.experts else shape.heads


def stream_value(name: str, producer: str, shape: Shape, part: SamplePart, savers: Sequence[str]) -> Value:
    return Value(
        name=name, producer=producer, bytes_per_sample=part.element_bytes * part.tokens * shape.hidden, savers=tuple(savers)
    )


def is_mixture(shape: Shape, number: int) -> bool:
    return bool(shape.experts) and number >= shape.dense_layers
