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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parsim.errors import CostError
from parsim.model.component import (
    CHANNELS_LAST,
    DEQUANTISE,
    GRADIENT_SUM,
    NORM_ADD_RELU,
    NORM_RELU,
    NORM_RELU_OF_SUMS,
    UNALIGNED,
    Component,
    Operator,
)
from parsim.model.formats import number_format, operator_precision
from parsim.model.operator_table import backward_flop_of
from parsim.work import Phase

HALVES = (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)

ELEMENTWISE, COPY, ACCUMULATE, BIAS_GRADIENT = "elementwise", "copy", "accumulate", "bias_gradient"
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


def component_launches(
    component: Component, phase: Phase, samples: int, precision: str = "fp32", *, input_gradient: bool = True
) -> tuple[Launch, ...]:
    """All launches of a component on a CPU, with the accumulation of its gradients; arguments as for `launches_of`."""
    operators = [operator for operator in component.operators if operator.function != GRADIENT_SUM]
    launches = launches_of(operators, phase, samples, precision, AS_TRACED, input_gradient=input_gradient)
    return (*launches, *accumulations(component, phase))


def accumulations(component: Component, phase: Phase) -> tuple[Launch, ...]:
    """The launches that accumulate gradients of parameters, in the phases that make them."""
    if phase not in (Phase.BACKWARD, Phase.BACKWARD_WEIGHT):
        return ()
    return tuple(memory_launch(ACCUMULATE, "backward", parameter.elements) for parameter in component.trainable_parameters)


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
    return towards_input, (towards_weight, memory_launch(BIAS_GRADIENT, "backward", rows * columns, columns, operator.count))


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
