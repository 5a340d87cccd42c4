"""The launches of a component on a device whose operators were measured: kernels by function, phase and sizes.

One launch is one call that the framework makes, with the sizes its time depends on:

    matmul        linear (with a bias, weights [columns, depth]) or batched (independent problems): problems, rows, columns,
                  depth of the product at hand. The backward of a linear one is two products, backward_input and
                  backward_weight, each with its own fit. The backward of a batched one is two batched products.
    convolution   pointwise (1x1), 3x3, grouped or other: images, inputs and outputs (channels of one group), groups, taps,
                  pixels_in and pixels_out of one image.
    attention     plain or causal, fused: problems (heads x samples), queries, keys, depth.
    embedding     rows gathered, width.
    memory_bound  by what it does (see FUNCTIONS): elements, and width, the length of a normalised or summed row, else 1.

What a forward does not show is added to the backward: the sum over rows that is a bias' gradient, and per parameter its
accumulation into `.grad`.

Leaves out: the zeroed table behind an embedding's gradient, and that a backward adds gradients that meet at a fork inside one
component (an addition is given one such sum).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parsim.costs.compute.operators import operator_size, operator_times
from parsim.model.component import GRADIENT_SUM, Component, Operator
from parsim.work import Phase

ELEMENTWISE = "elementwise"
FUNCTIONS: Mapping[str, str] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    **dict.fromkeys(("tanh", "sigmoid", "silu", "exp", "log", "erf", "pow", "mish", "elu"), "transcendental"),
    **dict.fromkeys(("clone", "cat", "copy", "copy_", "_to_copy", "stack", "where", "select_backward"), "copy"),
    **dict.fromkeys(("zeros", "ones", "zeros_like", "ones_like", "arange", "full", "fill_", "zero_", "scalar_tensor"), "fill"),
    **dict.fromkeys(("bernoulli_", "native_dropout"), "random"),
    **dict.fromkeys(("native_layer_norm", "native_group_norm", "_fused_rms_norm"), "layer_norm"),
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm"), "batch_norm"),
    **dict.fromkeys(("max_pool2d_with_indices", "avg_pool2d"), "pool"),
    **dict.fromkeys(("mean", "sum", "_adaptive_avg_pool2d", "amax", "var_mean"), "mean"),
    **dict.fromkeys(("_softmax", "_safe_softmax", "_log_softmax", "logsumexp"), "softmax"),
    "nll_loss_forward": "pick",
}
"""What a function of aten does, by the kernel measured for it; what is not listed passes over its elements once."""

USUAL_WIDTH = 256.0
WITHOUT_BACKWARD = ("fill", "random")

LaunchSizes = tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One call, `count` times. `kind`, `function` and `phase` name the fit that prices it."""

    kind: str
    function: str
    phase: str
    sizes: LaunchSizes
    count: int = 1


def component_launches(component: Component, phase: Phase, samples: int, *, input_gradient: bool = True) -> tuple[Launch, ...]:
    """All launches of a component's forward, backward, or half of a backward.

    Args:
        component: whole or a shard. phase: forward, backward or a half of it. samples: of one microbatch.
        input_gradient: False for a component whose inputs need no gradient: its first operator makes none.
    """
    launches = [
        launch
        for number, operator in enumerate(component.operators)
        for launch in operator_launches(operator, phase, samples, input_gradient=input_gradient or number > 0)
    ]
    return (*launches, *accumulations(component, phase))


def operator_launches(operator: Operator, phase: Phase, samples: int, *, input_gradient: bool = True) -> tuple[Launch, ...]:
    """The launches of one operator in a phase of its component.

    Args:
        operator: as traced. phase, samples: as for `component_launches`. input_gradient: something asks for that of its input.
    """
    if operator.function == GRADIENT_SUM:
        return ()
    if phase is Phase.FORWARD:
        return forward_launches(operator, samples)
    inputs, weights = backward_launches(operator, samples, input_gradient=input_gradient)
    towards_input = inputs if phase in (Phase.BACKWARD, Phase.BACKWARD_INPUT) else ()
    return (*towards_input, *(weights if phase in (Phase.BACKWARD, Phase.BACKWARD_WEIGHT) else ()))


def accumulations(component: Component, phase: Phase) -> tuple[Launch, ...]:
    """Of the gradients of parameters, in the phases that make them.

    Args:
        component: whole or a shard. phase: of it.
    """
    if phase not in (Phase.BACKWARD, Phase.BACKWARD_WEIGHT):
        return ()
    return tuple(_memory("accumulate", "backward", parameter.elements) for parameter in component.trainable_parameters)


def forward_launches(operator: Operator, samples: int) -> tuple[Launch, ...]:
    """The launches of an operator's forward.

    Args:
        operator: as traced. samples: of one microbatch.
    """
    if operator.kind == "memory_bound":
        return (_memory_bound(operator, "forward", samples),)
    if operator.kind == "embedding":
        return (_embedding(operator, "forward", samples),)
    if operator.kind == "attention":
        return (_attention(operator, "forward", samples),)
    return (_convolution(operator, "forward", samples) if operator.kind == "convolution" else _matmul(operator, samples),)


def backward_launches(
    operator: Operator, samples: int, *, input_gradient: bool = True
) -> tuple[tuple[Launch, ...], tuple[Launch, ...]]:
    """The launches of an operator's backward: towards its input, and towards its parameters alone.

    Args:
        operator: as traced. samples: of one microbatch.
        input_gradient: False if nothing asks for the gradient of the input.

    Returns:
        Two tuples. A normalisation makes both gradients at once and is counted in the first. Frozen operands have none.
    """
    if operator.gradients == "none":
        return (), ()
    inputs, weights = _all_backward_launches(operator, samples, input_gradient=input_gradient)
    if operator.gradients == "input":
        return inputs, weights if operator.kind == "memory_bound" else ()
    return (inputs if operator.gradients != "weight" or operator.kind in ("memory_bound", "attention") else ()), weights


def _all_backward_launches(
    operator: Operator, samples: int, *, input_gradient: bool
) -> tuple[tuple[Launch, ...], tuple[Launch, ...]]:
    """As if nothing were frozen."""
    if operator.kind == "memory_bound":
        launch = _memory_bound(operator, "backward", samples)
        return (() if operator.batch == "none" or launch.function in WITHOUT_BACKWARD else (launch,)), ()
    if operator.kind == "embedding":
        return (), (_embedding(operator, "backward", samples),)
    if operator.kind == "attention":
        return (_attention(operator, "backward", samples),), ()
    if operator.kind == "convolution":
        inputs = (_convolution(operator, "backward_input", samples),) if input_gradient else ()
        return inputs, (_convolution(operator, "backward_weight", samples),)
    product = _matmul(operator, samples)
    problems, rows, columns, depth = (size for _, size in product.sizes)
    towards_input = _product(operator, product.function, "backward_input", problems, rows, depth, columns)
    if product.function == "batched":
        return (towards_input, _product(operator, "batched", "backward_weight", problems, depth, columns, rows)), ()
    towards_weight = [_product(operator, "linear", "backward_weight", problems, columns, depth, rows)]
    if has_bias(operator):
        towards_weight.append(_memory("bias_gradient", "backward", rows * columns, columns, operator.count))
    return ((towards_input,) if input_gradient else ()), tuple(towards_weight)


def has_bias(operator: Operator) -> bool:
    """Whether a matmul reads more parameters than its weights.

    Args:
        operator: a matmul.
    """
    return operator.parameter_bytes > 4 * operator_size(operator, "n") * operator_size(operator, "k")


def _matmul(operator: Operator, samples: int) -> Launch:
    m, n, k = (operator_size(operator, name) for name in ("m", "n", "k"))
    sizes = dict(operator.shape)
    if "problems" in sizes:
        problems = sizes["problems"] * (samples if operator.batch == "batch" else 1)
        return _product(operator, "batched", "forward", problems, m, n, k)
    return _product(operator, "linear", "forward", 1, m * samples if operator.batch == "rows" else m, n, k)


def _product(
    operator: Operator, function: str, phase: str, problems: float, rows: float, columns: float, depth: float
) -> Launch:
    sizes = (("problems", problems), ("rows", rows), ("columns", columns), ("depth", depth))
    return Launch(
        kind="matmul", function=function, phase="forward" if function == "batched" else phase, sizes=sizes, count=operator.count
    )


def _convolution(operator: Operator, phase: str, samples: int) -> Launch:
    names = ("c", "h", "w", "k", "r", "s", "groups", "out_h", "out_w")
    c, h, w, k, r, s, groups, out_h, out_w = (operator_size(operator, name) for name in names)
    sizes = {
        "images": samples,
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
        phase=phase,
        sizes=tuple(sizes.items()),
        count=operator.count,
    )


def convolution_family(groups: float, height: float, width: float) -> str:
    """Name the group of kernels a library has for a convolution: "grouped", "pointwise", "3x3" or "other".

    Args:
        groups: of channels. height, width: of the filter.
    """
    if groups > 1:
        return "grouped"
    return {(1, 1): "pointwise", (3, 3): "3x3"}.get((int(height), int(width)), "other")


def _attention(operator: Operator, phase: str, samples: int) -> Launch:
    heads, queries, keys, depth = (operator_size(operator, name) for name in ("heads", "q", "kv", "d"))
    sizes = (("problems", heads * samples), ("queries", queries), ("keys", keys), ("depth", depth))
    return Launch(kind="attention", function=operator.function or "plain", phase=phase, sizes=sizes, count=operator.count)


def _embedding(operator: Operator, phase: str, samples: int) -> Launch:
    rows = operator_size(operator, "rows") * operator_times(operator, samples)
    sizes = (("rows", rows), ("width", operator_size(operator, "width")))
    return Launch(kind="embedding", function="gather", phase=phase, sizes=sizes, count=operator.count)


def _memory_bound(operator: Operator, phase: str, samples: int) -> Launch:
    """A normalisation's row follows from its parameters: weight and bias, with batch norm also its running mean and variance.
    That of a loss' pick follows from the int64 target it reads; that of a softmax is not known and taken to be USUAL_WIDTH.
    """
    function = FUNCTIONS.get(operator.function, ELEMENTWISE)
    elements = operator_size(operator, "elements") * operator_times(operator, samples)
    width = 1.0
    if function == "layer_norm":
        width = max(1.0, operator.parameter_bytes / 8)
    elif function == "batch_norm":
        width = max(1.0, operator.parameter_bytes / 16)
    elif function == "pick":
        size = operator_size(operator, "elements")
        width = size / max(1.0, (operator.activation_bytes - 4 * size) / 8)
    elif function == "softmax":
        width = min(USUAL_WIDTH, operator_size(operator, "elements"))
    return _memory(function, phase, elements, width, operator.count)


def _memory(function: str, phase: str, elements: float, width: float = 1.0, count: int = 1) -> Launch:
    sizes = (("elements", float(elements)), ("width", float(width)))
    return Launch(kind="memory_bound", function=function, phase=phase, sizes=sizes, count=count)
