"""The launches of a component: every call that the framework makes, with the sizes that its time depends on.

    matmul        linear (with a bias, weights [columns, depth]) or batched (independent problems): problems, rows, columns,
                  depth of the product at hand. The backward of a linear one is two products, backward_input and
                  backward_weight. The backward of a batched one is two batched products.
    convolution   pointwise (1x1), 3x3, grouped or other: images, inputs and outputs (channels of one group), groups, taps,
                  pixels_in and pixels_out of one image.
    attention     plain or causal, fused: problems (heads x samples), queries, keys, depth. Not fused it is two products
                  around passes over the scores.
    embedding     rows gathered, width.
    memory_bound  by what it does (see FUNCTIONS): elements, and width, the length of a normalised or summed row, else 1.

A launch also says how much it computes and moves. Bytes of a memory-bound operator: the backward reads the saved input and the
gradient and writes a gradient, three arrays where the forward moved two. One with parameters is a normalisation: its forward
reads the input twice (statistics, then values: three arrays) and its backward reads input and gradient twice (five). One that
does not grow with the samples (a counter, a table of positions) has no backward.

What a forward does not show is added to the backward: the sum over rows that is a bias' gradient, and per parameter its
accumulation into `.grad`. Surfaces measured on a machine price these two; fits to published kernels have none of them.

Leaves out: the dense gradient of an embedding's table, and that a backward adds gradients that meet at a fork inside one
component (an addition is given one such sum).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

from parsim.errors import CostError
from parsim.model.component import (
    BIAS,
    BIAS_GRADIENT,
    CHANNELS_LAST,
    DEQUANTISE,
    FULL_BYTES,
    GRADIENT_SUM,
    NORM_ADD_RELU,
    NORM_RELU,
    NORM_RELU_OF_SUMS,
    PARTS,
    UNALIGNED,
    Component,
    Operator,
)
from parsim.model.formats import number_format, operator_precision
from parsim.model.operator_table import backward_flop_of
from parsim.work import Phase

HALVES = (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)

ELEMENTWISE, COPY, ACCUMULATE, BIAS_SUM = "elementwise", "copy", "accumulate", "bias_gradient"
FUNCTIONS: Mapping[str, str] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    **dict.fromkeys(("tanh", "sigmoid", "silu", "exp", "log", "erf", "pow", "mish", "elu"), "transcendental"),
    **dict.fromkeys(("clone", "cat", "copy", "copy_", "_to_copy", "stack", "where", "select_backward"), COPY),
    **dict.fromkeys(("zeros", "ones", "zeros_like", "ones_like", "arange", "full", "fill_", "zero_", "scalar_tensor"), "fill"),
    **dict.fromkeys(("bernoulli_", "native_dropout"), "random"),
    **dict.fromkeys(("native_layer_norm", "native_group_norm", "_fused_rms_norm"), "layer_norm"),
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm"), "batch_norm"),
    **dict.fromkeys((NORM_RELU, NORM_ADD_RELU, NORM_RELU_OF_SUMS), "batch_norm"),
    **dict.fromkeys(("max_pool2d_with_indices", "avg_pool2d"), "pool"),
    **dict.fromkeys(("mean", "sum", "_adaptive_avg_pool2d", "amax", "var_mean"), "mean"),
    **dict.fromkeys(("_softmax", "_safe_softmax", "_log_softmax", "logsumexp"), "softmax"),
    "nll_loss_forward": "pick",
}
"""What a function of aten does, by the kernel measured for it; what is not listed passes over its elements once."""

USUAL_WIDTH = 256.0
WITHOUT_BACKWARD = ("fill", "random")

BACKWARD_BYTES = 3 / 2
NORMALISATION_FORWARD_BYTES = 3 / 2
NORMALISATION_BACKWARD_BYTES = 5 / 2
"""Bytes moved against one read and one write of the array, see above."""

SCORE_LAUNCHES = 3
SCORE_ARRAYS = 7
"""Between the two products of attention: scale and mask (2 arrays), softmax (3: it reads twice), dropout (2)."""

FUSED_BACKWARD_FLOP = 2.5
"""Products of a fused backward (scores again, and four gradients) over those of the forward."""

LaunchSizes = tuple[tuple[str, float], ...]


class Launch(NamedTuple):
    """One call, `count` times: what it is, its sizes, and what it computes and moves.

    Attributes:
        kind, function, phase: name the surface or the fit that prices it.
        flop, size_bytes: of one call; 0 where a launch stands for its sizes alone.
        strided: a convolution with a stride above 1. channels_last: one whose arrays lie as matrix units read them.
        aligned: of a product: False if it runs without tensor cores. low: False if it does not run in a precision that only
            products run in (`NumberFormat.beside`).
    """

    kind: str
    function: str
    phase: str
    sizes: LaunchSizes
    count: int = 1  # type: ignore[assignment]  # hides tuple.count, which nobody asks a launch
    flop: float = 0.0
    size_bytes: float = 0.0
    strided: bool = False
    channels_last: bool = False
    aligned: bool = True
    low: bool = True


Halves = tuple[tuple[Launch, ...], tuple[Launch, ...]]
"""Of a backward: the launches towards the gradient of the input, and those towards parameters alone."""


class Lowering(NamedTuple):
    """How a device launches an operator; both take the operator, the samples and the precision, and the backward whether
    something asks for the gradient of the input.
    """

    forward: Callable[..., tuple[Launch, ...]]
    backward: Callable[..., Halves]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeRequest:
    """The computation to price: a component, or a shard of one (`narrow`), in one phase over some samples.

    Attributes:
        input_gradient: False for a component whose inputs want no gradient (the model's first one): the backward of its first
            operator then computes the gradient of the weight alone.
    """

    component: Component
    phase: Phase
    samples: int
    input_gradient: bool = True


def launches_of(
    operators: Sequence[Operator],
    phase: Phase,
    samples: int,
    precision: str,
    lowering: Lowering,
    *,
    input_gradient: bool = True,
) -> tuple[Launch, ...]:
    """All launches of operators in a phase of their component, operator by operator.

    Without `input_gradient` no input needs a gradient: the backward of the first operator makes none.
    """
    return tuple(
        launch
        for number, operator in enumerate(operators)
        for launch in operator_launches(
            operator, phase, samples, precision, lowering, input_gradient=input_gradient or number > 0
        )
    )


def operator_launches(
    operator: Operator, phase: Phase, samples: int, precision: str, lowering: Lowering, *, input_gradient: bool = True
) -> tuple[Launch, ...]:
    """The launches of one operator in a phase of its component; arguments as for `launches_of`."""
    runs_in = operator_precision(precision, operator.kind, low=operator.low)
    if phase is Phase.FORWARD:
        return () if operator.function == GRADIENT_SUM else lowering.forward(operator, samples, runs_in)
    halves = lowering.backward(operator, samples, runs_in, input_gradient=input_gradient)
    return halves[HALVES.index(phase)] if phase in HALVES else (*halves[0], *halves[1])


def forward_launches(operator: Operator, samples: int, precision: str = "fp32") -> tuple[Launch, ...]:
    """The launch of an operator's forward; an attention is fused.

    Raises CostError if the operator's shape lacks a size, or for an unknown precision.
    """
    return (LAUNCHES.get(operator.kind, _memory_bound)(operator, samples, precision),)


def backward_launches(operator: Operator, samples: int, precision: str = "fp32", *, input_gradient: bool = True) -> Halves:
    """The launches of an operator's backward. Of a frozen operand nothing is computed (`Operator.gradients`).

    The second operand of a matmul or convolution with parameters is a weight; so is an embedding's table. A normalisation makes
    both gradients in one launch, counted in the first half. Both operands of other products and of attention count there too.
    Without `input_gradient` nothing asks for the gradient of the input.
    """
    if operator.gradients == "none":
        return (), ()
    (forward,) = forward_launches(operator, samples, precision)
    if operator.function == DEQUANTISE:
        return (forward,), ()
    weight_alone = operator.gradients == "weight"
    match operator.kind:
        case "matmul" | "convolution":
            towards_input, towards_weight = _product_backward(operator, forward)
            inputs = (towards_input,) if input_gradient and not weight_alone else ()
            weights = towards_weight if operator.gradients != "input" else ()
            return (inputs, weights) if operator.parameter_bytes or weight_alone else ((*inputs, *weights), ())
        case "attention":
            size_bytes = 2.0 * forward.size_bytes
            backward = forward._replace(phase="backward", flop=FUSED_BACKWARD_FLOP * forward.flop, size_bytes=size_bytes)
        case "embedding":
            return (), (forward._replace(phase="backward", size_bytes=BACKWARD_BYTES * forward.size_bytes),)
        case _:
            if operator.batch == "none" or forward.function in WITHOUT_BACKWARD:
                return (), ()
            arrays = NORMALISATION_BACKWARD_BYTES if operator.parameter_bytes else BACKWARD_BYTES
            flop = forward.flop * backward_flop_of(operator.function) if forward.flop else 0.0
            size_bytes = arrays * operand_bytes(operator, samples, precision)
            backward = forward._replace(phase="backward", flop=flop, size_bytes=size_bytes)
    return ((), (backward,)) if weight_alone else ((backward,), ())


AS_TRACED = Lowering(forward_launches, backward_launches)
"""Of a device that launches the operators as they were recorded, on a CPU."""


def _product_backward(operator: Operator, forward: Launch) -> tuple[Launch, tuple[Launch, ...]]:
    """Towards the input, and towards the other operand."""
    if operator.kind == "convolution":
        return forward._replace(phase="backward_input"), (forward._replace(phase="backward_weight"),)
    problems, rows, columns, depth = (size for _, size in forward.sizes)
    if forward.function == "batched":
        return (
            forward._replace(sizes=product_sizes(problems, rows, depth, columns)),
            (forward._replace(sizes=product_sizes(problems, depth, columns, rows)),),
        )
    towards_input = forward._replace(phase="backward_input", sizes=product_sizes(problems, rows, depth, columns))
    towards_weight = forward._replace(phase="backward_weight", sizes=product_sizes(problems, columns, depth, rows))
    if operator.parameter_bytes <= 4 * operator_size(operator, "n") * operator_size(operator, "k"):
        return towards_input, (towards_weight,)
    return towards_input, (towards_weight, memory_launch(BIAS_SUM, "backward", rows * columns, columns, operator.count))


def unfused_attention(operator: Operator, samples: int, precision: str) -> tuple[Launch, Launch, Launch]:
    """Attention as a library without a fused kernel runs it: a product, passes over the scores, and another product."""
    heads, queries, keys, depth = (operator_size(operator, name) for name in ("heads", "q", "kv", "d"))
    problems, width = heads * samples, element_bytes(precision)
    scores = Launch(
        kind="matmul",
        function="batched",
        phase="forward",
        sizes=product_sizes(problems, queries, keys, depth),
        count=operator.count,
        flop=2.0 * problems * queries * keys * depth,
        size_bytes=width * (problems * (queries * keys + (queries + keys) * depth)),
        low=False,
    )
    passes = memory_launch("softmax", "forward", problems * queries * keys, keys, SCORE_LAUNCHES * operator.count)
    return (
        scores,
        passes._replace(size_bytes=SCORE_ARRAYS / SCORE_LAUNCHES * width * problems * queries * keys),
        scores._replace(sizes=product_sizes(problems, queries, depth, keys)),
    )


def unfused_attention_backward(operator: Operator, samples: int, precision: str, *, input_gradient: bool) -> Halves:
    """The backward of `unfused_attention`: two products for each of the forward."""
    if operator.gradients == "none":
        return (), ()
    launches: list[Launch] = []
    for forward in unfused_attention(operator, samples, precision):
        if forward.kind == "memory_bound":
            launches.append(forward._replace(size_bytes=BACKWARD_BYTES * forward.size_bytes))
            continue
        problems, rows, columns, depth = (size for _, size in forward.sizes)
        if input_gradient and operator.gradients != "weight":
            launches.append(forward._replace(sizes=product_sizes(problems, rows, depth, columns)))
        launches.append(forward._replace(sizes=product_sizes(problems, depth, columns, rows)))
    return ((), tuple(launches)) if operator.gradients == "weight" else (tuple(launches), ())


def product_sizes(problems: float, rows: float, columns: float, depth: float) -> LaunchSizes:
    """The sizes of `problems` independent products of (rows x depth) by (depth x columns)."""
    return (("problems", problems), ("rows", rows), ("columns", columns), ("depth", depth))


def memory_launch(function: str, phase: str, elements: float, width: float = 1.0, count: int = 1) -> Launch:
    """A launch that passes over elements, by its sizes alone."""
    sizes = (("elements", float(elements)), ("width", float(width)))
    return Launch(kind="memory_bound", function=function, phase=phase, sizes=sizes, count=count)


def _product(operator: Operator, samples: int, precision: str) -> Launch:
    m, n, k = (operator_size(operator, name) for name in ("m", "n", "k"))
    sizes = dict(operator.shape)
    problems = sizes.get("problems", 1) * (samples if operator.batch == "batch" else 1)
    return Launch(
        kind="matmul",
        function="batched" if "problems" in sizes else "linear",
        phase="forward",
        sizes=product_sizes(problems, m * samples if operator.batch == "rows" else m, n, k),
        count=operator.count,
        flop=operator.forward_flop * operator_times(operator, samples),
        size_bytes=operand_bytes(operator, samples, precision),
        aligned=operator.function != UNALIGNED,
        low=operator.low,
    )


def _convolution(operator: Operator, samples: int, precision: str) -> Launch:
    names = ("c", "h", "w", "k", "r", "s", "groups", "out_h", "out_w")
    c, h, w, k, r, s, groups, out_h, out_w = (operator_size(operator, name) for name in names)
    sizes = {
        "images": operator_times(operator, samples),
        "inputs": c / groups,
        "outputs": k / groups,
        "groups": groups,
        "taps": r * s,
        "pixels_in": h * w,
        "pixels_out": out_h * out_w,
    }
    return Launch(
        kind="convolution",
        function=convolution_family(groups, r, s),
        phase="forward",
        sizes=tuple(sizes.items()),
        count=operator.count,
        flop=operator.forward_flop * operator_times(operator, samples),
        size_bytes=operand_bytes(operator, samples, precision),
        strided=max(operator_size(operator, "stride_h"), operator_size(operator, "stride_w")) > 1,
        channels_last=operator.function == CHANNELS_LAST,
    )


def convolution_family(groups: float, height: float, width: float) -> str:
    """The group of kernels a library has for a convolution with such a filter: "grouped", "pointwise", "3x3" or "other"."""
    if groups > 1:
        return "grouped"
    return {(1, 1): "pointwise", (3, 3): "3x3"}.get((int(height), int(width)), "other")


def _attention(operator: Operator, samples: int, precision: str) -> Launch:
    """Fused: it keeps no scores in memory and computes none that a causal mask hides."""
    heads, queries, keys, depth = (operator_size(operator, name) for name in ("heads", "q", "kv", "d"))
    problems = heads * samples
    return Launch(
        kind="attention",
        function=operator.function or "plain",
        phase="forward",
        sizes=(("problems", problems), ("queries", queries), ("keys", keys), ("depth", depth)),
        count=operator.count,
        flop=4.0 * problems * queries * keys * depth * (0.5 if operator.function == "causal" else 1.0),
        size_bytes=2.0 * element_bytes(precision) * problems * (queries + keys) * depth,
    )


def _embedding(operator: Operator, samples: int, precision: str) -> Launch:
    times = operator_times(operator, samples)
    return Launch(
        kind="embedding",
        function="gather",
        phase="forward",
        sizes=(("rows", operator_size(operator, "rows") * times), ("width", operator_size(operator, "width"))),
        count=operator.count,
        size_bytes=element_bytes(precision) / 4 * operator.activation_bytes * times,
    )


def _memory_bound(operator: Operator, samples: int, precision: str) -> Launch:
    """A normalisation's row follows from its parameters: weight and bias, with batch norm also its running mean and variance.
    That of a loss' pick follows from the int64 target it reads; that of a softmax is not known and taken to be USUAL_WIDTH.
    """
    function, size = FUNCTIONS.get(operator.function, ELEMENTWISE), operator_size(operator, "elements")
    width = 1.0
    if function == "layer_norm":
        width = max(1.0, operator.parameter_bytes / 8)
    elif function == "batch_norm":
        width = max(1.0, operator.parameter_bytes / 16)
    elif function == "pick":
        width = size / max(1.0, (operator.activation_bytes - 4 * size) / 8)
    elif function == "softmax":
        width = min(USUAL_WIDTH, size)
    times, passes = operator_times(operator, samples), NORMALISATION_FORWARD_BYTES if operator.parameter_bytes else 1
    return Launch(
        kind="memory_bound",
        function=function,
        phase="forward",
        sizes=(("elements", float(size * times)), ("width", float(width))),
        count=operator.count,
        flop=operator.forward_flop * times,
        size_bytes=passes * operand_bytes(operator, samples, precision),
    )


LAUNCHES = {"matmul": _product, "convolution": _convolution, "attention": _attention, "embedding": _embedding}
"""By kind of operator: the launch of its forward; others pass over memory."""


def operand_bytes(operator: Operator, samples: int, precision: str) -> float:
    """Every operand and result once; the Model counts four bytes per element."""
    width = element_bytes(precision) / 4
    return width * (operator.activation_bytes * operator_times(operator, samples) + operator.parameter_bytes)


def element_bytes(precision: str) -> int:
    """Bytes of an activation in a launch. Raises CostError for an unknown precision."""
    return number_format(precision).element_bytes


def operator_times(operator: Operator, samples: int) -> int:
    """How often an operator does its per-sample work: once for work on parameters alone, else once per sample."""
    return 1 if operator.batch == "none" else samples


def operator_size(operator: Operator, name: str) -> int:
    """One size of an operator's shape, such as "m". Raises CostError where the shape has no such size."""
    for key, size in operator.shape:
        if key == name:
            return size
    sizes = ", ".join(key for key, _ in operator.shape)
    raise CostError(f"a {operator.kind} operator has no size {name!r} in its shape ({sizes}); trace the model again")


# --- on a GPU ---------------------------------------------------------------------------------------------------------
#
# The launches of torch on a GPU for operators that were recorded on a CPU, and those that autocast adds. A trace knows each
# memory-bound operator by its aten name. On a GPU some of them are other kernels, and each has a backward of its own; `PASSES`
# says how often the launch reads or writes its array.
#
#     dropout              one launch with a mask of one byte per element; the CPU draws, scales and multiplies in three
#     add                  of two whole arrays is a residual: its backward adds the two gradients that meet there. Of an array
#                          and a broadcast one (a mask, a table of positions) it hands the gradient on
#     scaling and copies   have a backward like their forward
#
# Under autocast matmuls and convolutions take half-precision copies of their weights (read 4 bytes, write 2), made once per
# forward, and their gradients are widened again. Layer norm, group norm and the loss are computed in fp32: the norm's output is
# cast for the matmul that follows, the loss's input for the loss, and in the backward the gradients. What a residual adds to is
# the norm's fp32 stream. Batch norm, ReLU, GELU, dropout and the inside of scaled_dot_product_attention keep the width of their
# input. Loss scaling and its check for infinities are in the optimizer's step (`parsim.costs.compute.compute`).
#
# Sources: torch's list "CUDA Ops that can autocast" (torch.amp documentation); the passes of the norms and softmax as their
# CUDA kernels make them (aten/src/ATen/native/cuda: layer_norm_kernel, SoftMax, Dropout), rounded to what NeuSight's V100
# timings show for the forward: 2.6 to 3.6 of softmax and 3 to 4.5 of layer norm, at the bandwidth of an addition.
#
# Leaves out: casts of biases and of a batch of images, the dense gradient of an embedding's table, the host's time per launch,
# and kernels that a framework other than eager torch fuses (bias with GELU, scale with mask and softmax).


CAST_BYTES = 6
"""Of an element between fp32 and half precision: four read and two written, or the other way round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """How often the launches of a memory-bound function read or write each element of its array.

    Attributes:
        mask_bytes: moved besides, whatever the precision. full: autocast computes it in fp32. cast: and its input or output is
            cast, in the forward and in the backward.
    """

    forward: float
    backward: float
    mask_bytes: float = 0.0
    full: bool = False
    cast: bool = False


NORMALISED_ROWS = Passes(forward=3, backward=7, full=True, cast=True)
"""Statistics and values; in the backward its sums, the gradient of the input, and that of weight and bias."""
SOFTMAX = Passes(forward=3, backward=4)
DROPOUT = Passes(forward=2, backward=2, mask_bytes=1)

RELU_MASK_BYTES = 1 / 8
NORM_WITH_RELU = Passes(forward=3, backward=5, mask_bytes=RELU_MASK_BYTES)
NORM_WITH_SUM = Passes(forward=4, backward=7, mask_bytes=RELU_MASK_BYTES)
"""Its backward writes the residual's gradient too, and the convolution beside it adds its own to that: one more read."""

PASSES: Mapping[str, Passes] = {
    "native_batch_norm": Passes(forward=3, backward=5),
    NORM_RELU: NORM_WITH_RELU,
    NORM_ADD_RELU: NORM_WITH_SUM,
    NORM_RELU_OF_SUMS: replace(NORM_WITH_RELU, forward=2),
    "native_layer_norm": NORMALISED_ROWS,
    "native_group_norm": NORMALISED_ROWS,
    "_softmax": SOFTMAX,
    "_safe_softmax": SOFTMAX,
    "_log_softmax": Passes(forward=4, backward=4, full=True, cast=True),
    "nll_loss_forward": Passes(forward=0, backward=1, full=True),
    "bernoulli_": DROPOUT,
    "native_dropout": DROPOUT,
    BIAS: Passes(forward=2, backward=1),
    BIAS_GRADIENT: Passes(forward=0, backward=1),
    PARTS: Passes(forward=0, backward=2),
}
LIKE_FORWARD = frozenset({"clone", "copy_", "_to_copy", "mul", "div", "neg"})
"""Their backward is the same again."""
CREATIONS = frozenset({"arange", "full", "ones", "scalar_tensor", "tril", "zeros", "zeros_like"})
STREAM_NORMS = frozenset({"native_layer_norm", "native_group_norm"})

RESIDUAL_ARRAYS = 2.5
"""An addition that moves more arrays than this has two whole operands."""

UNIFORM = {"bfloat16": "bf16", "float16": "fp16"}
"""By the type autocast computes in: the precision in which everything is of that type."""

COPY_BYTES = 4.0
"""That a copy moves per element of a half-precision type."""


def cuda_operators(operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
    """The operators of a component without the scaling and the product that belong to a dropout recorded on a CPU."""
    spare: dict[tuple[str, object], int] = {}
    for operator in operators:
        if operator.function == "bernoulli_":
            for part in ("div_", "mul"):
                key = part, dict(operator.shape).get("elements")
                spare[key] = spare.get(key, 0) + operator.count
    kept: list[Operator] = []
    for operator in operators:
        key = operator.function, dict(operator.shape).get("elements")
        is_part = operator.function == "div_" or (operator.function == "mul" and _has_whole_operands(operator))
        fused = min(operator.count, spare.get(key, 0)) if is_part else 0
        if fused:
            spare[key] -= fused
        if operator.count > fused:
            kept.append(replace(operator, count=operator.count - fused) if fused else operator)
    return tuple(kept)


def cuda_forward(operator: Operator, samples: int, precision: str, *, full_stream: bool = False) -> tuple[Launch, ...]:
    """The launches of an operator's forward on a GPU. With `full_stream` autocast adds residuals in fp32."""
    (launch,) = forward_launches(operator, samples, precision)
    if operator.kind != "memory_bound":
        return (launch, *_weight_casts(operator, precision))
    passes = PASSES.get(operator.function)
    if passes is not None:
        return _passes_of(launch, operator, samples, precision, passes, passes.forward)
    if full_stream and _is_autocast(precision) and _is_residual(operator):
        return (launch._replace(size_bytes=(FULL_BYTES + 2 + FULL_BYTES) * _elements(operator, samples)),)
    return (launch,)


def cuda_backward(
    operator: Operator, samples: int, precision: str, *, input_gradient: bool = True, full_stream: bool = False
) -> Halves:
    """The launches of an operator's backward on a GPU: towards the gradient of its input, and towards parameters alone.

    Without `input_gradient` nothing asks for the gradient of the input; `full_stream` as for `cuda_forward`.
    """
    first, second = backward_launches(operator, samples, precision, input_gradient=input_gradient)
    if operator.kind != "memory_bound":
        return first, (*second, *(() if operator.gradients in ("input", "none") else _weight_casts(operator, precision)))
    (forward,) = forward_launches(operator, samples, precision)
    if operator.function == GRADIENT_SUM:
        return (), (forward,)
    if operator.function == DEQUANTISE:
        return first, second
    if operator.batch == "none" or operator.function in CREATIONS or operator.gradients == "none":
        return (), ()
    passes = PASSES.get(operator.function)
    if passes is not None:
        launches = _passes_of(forward._replace(phase="backward"), operator, samples, precision, passes, passes.backward)
    elif operator.function in LIKE_FORWARD:
        launches = (forward,)
    elif operator.function not in ("add", "add_"):
        return first, second
    elif not _is_residual(operator):
        launches = ()
    elif full_stream and _is_autocast(precision):
        launches = (forward._replace(size_bytes=(3 * FULL_BYTES + CAST_BYTES) * _elements(operator, samples)),)
    else:
        launches = (forward,)
    return ((), launches) if operator.gradients == "weight" else (launches, ())


def cuda_lowering(operators: Sequence[Operator]) -> Lowering:
    """How a GPU launches the operators of one component, whose residuals a layer (or group) norm makes fp32 under autocast."""
    return _cuda_lowering(any(operator.function in STREAM_NORMS for operator in operators))


@cache
def _cuda_lowering(full_stream: bool) -> Lowering:
    return Lowering(partial(cuda_forward, full_stream=full_stream), partial(cuda_backward, full_stream=full_stream))


def component_launches(
    component: Component,
    phase: Phase,
    samples: int,
    precision: str = "fp32",
    *,
    on_gpu: bool = False,
    input_gradient: bool = True,
) -> tuple[Launch, ...]:
    """All launches of a component on a machine whose operators were measured, with the accumulation of its gradients.

    On a GPU operators are measured on arrays of the type in which products run. Under autocast others run in fp32: norms, the
    additions that follow them, softmax and loss. These count with as many elements as their bytes are of the measured type.
    Casts of weights, biases, activations and gradients are launches of their own, priced as copies.
    """
    recorded, lowering = component.operators, AS_TRACED
    if on_gpu:
        recorded = cuda_operators(recorded)
        if uniform := UNIFORM.get(number_format(precision).autocast):
            lowering = _autocast_lowering(cuda_lowering(recorded), uniform)
    operators = [operator for operator in recorded if operator.function != GRADIENT_SUM]
    launches = launches_of(operators, phase, samples, precision, lowering, input_gradient=input_gradient)
    if phase not in (Phase.BACKWARD, Phase.BACKWARD_WEIGHT):
        return launches
    gradients = (memory_launch(ACCUMULATE, "backward", parameter.elements) for parameter in component.trainable_parameters)
    return (*launches, *gradients)


def _autocast_lowering(cuda: Lowering, uniform: str) -> Lowering:
    """The recorded launches, widened and with casts as `cuda` has them; `uniform` is the precision without any cast."""

    def forward(operator: Operator, samples: int, precision: str) -> tuple[Launch, ...]:
        launches, alike = forward_launches(operator, samples, precision), cuda_forward(operator, samples, uniform)
        return _with_casts(operator, launches, cuda.forward(operator, samples, precision), alike)

    def backward(operator: Operator, samples: int, precision: str, *, input_gradient: bool = True) -> Halves:
        first, second = (
            _with_casts(operator, *halves)
            for halves in zip(
                backward_launches(operator, samples, precision, input_gradient=input_gradient),
                cuda.backward(operator, samples, precision, input_gradient=input_gradient),
                cuda_backward(operator, samples, uniform, input_gradient=input_gradient),
                strict=True,
            )
        )
        return first, second

    return Lowering(forward, backward)


def _with_casts(
    operator: Operator, launches: tuple[Launch, ...], cuda: tuple[Launch, ...], uniform: tuple[Launch, ...]
) -> tuple[Launch, ...]:
    """Launches with as many elements as their bytes under autocast are of the measured type, and the casts as copies."""
    if operator.kind in ("matmul", "convolution"):
        casts = tuple(launch for launch in cuda if launch.function == COPY)
        return (*launches, *casts, *(_bias_cast(operator) if casts else ()))
    if operator.kind != "memory_bound":
        return launches
    if cuda and uniform and uniform[0].size_bytes:
        ratio = cuda[0].size_bytes / uniform[0].size_bytes
        launches = tuple(
            launch._replace(sizes=tuple((name, size * ratio if name == "elements" else size) for name, size in launch.sizes))
            for launch in launches
        )
    return (*launches, *cuda[len(uniform) :])


def _copy(size_bytes: float, count: int) -> Launch:
    """A copy of arrays of the type in which products run."""
    return Launch(
        kind="memory_bound",
        function=COPY,
        phase="forward",
        sizes=(("elements", max(1.0, size_bytes / COPY_BYTES)), ("width", 1.0)),
        count=count,
        size_bytes=size_bytes,
    )


def _bias_cast(operator: Operator) -> tuple[Launch, ...]:
    """Beside that of the weights, whose bytes hold the bias; it is a launch of its own."""
    names = ("n", "k") if operator.kind == "matmul" else ("c", "k", "r", "s")
    weights = float(math.prod(operator_size(operator, name) for name in names))
    if operator.kind == "convolution":
        weights /= operator_size(operator, "groups")
    bias = operator.parameter_bytes / 4 - weights
    return (_copy(CAST_BYTES * bias, operator.count),) if bias > 0 else ()


def _passes_of(
    launch: Launch, operator: Operator, samples: int, precision: str, passes: Passes, times: float
) -> tuple[Launch, ...]:
    half = element_bytes(precision)
    width = max(half, FULL_BYTES) if passes.full and _is_autocast(precision) else half
    elements = _elements(operator, samples)
    launches = [launch._replace(flop=0.0, size_bytes=(times * width + passes.mask_bytes) * elements)] if times else []
    if passes.cast and half < FULL_BYTES and _is_autocast(precision):
        launches.append(_copy(CAST_BYTES * elements, operator.count))
    return tuple(launches)


def _is_autocast(precision: str) -> bool:
    """Whether autocast chooses the operators computed in fp32, call by call. In pure bf16 nothing is cast."""
    return bool(number_format(precision).autocast)


def _weight_casts(operator: Operator, precision: str) -> tuple[Launch, ...]:
    """To half precision in the forward, of the gradient to fp32 in the backward: as many bytes."""
    if operator.kind not in ("matmul", "convolution") or not operator.parameter_bytes or not _is_autocast(precision):
        return ()
    return (_copy(CAST_BYTES / FULL_BYTES * operator.parameter_bytes, operator.count),)


def _is_residual(operator: Operator) -> bool:
    return operator.function in ("add", "add_") and _has_whole_operands(operator)


def _has_whole_operands(operator: Operator) -> bool:
    elements = dict(operator.shape).get("elements", 0)
    return operator.activation_bytes > RESIDUAL_ARRAYS * FULL_BYTES * elements


def _elements(operator: Operator, samples: int) -> int:
    return operator_size(operator, "elements") * operator_times(operator, samples)
