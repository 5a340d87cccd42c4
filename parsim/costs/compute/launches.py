"""The fitted time of one kernel, as a function of its shape; evaluated with plain arithmetic.

A matrix product of `problems` independent (rows x depth) by (depth x columns), and a convolution seen as one (its filter
`taps` repeat it), take

    t = floor_s + (c^4 + m^4)^(1/4)
    c = 2 taps (depth + half_depth) (problems (rows + half_rows) (columns + half_columns) + wave_outputs)
          / (peak_flop_per_s * efficiency_<family>)   [* strided_factor]
    m = size_bytes / (memory_bandwidth_bytes_per_s * bandwidth_fraction)

so that a size of `half_x` halves the efficiency, a product with fewer outputs than `wave_outputs` does not fill the device,
and t grows with every size within a family. Families: "dense" (matmul, 1x1 filters), "3x3" (3x3 at stride 1, where Winograd
kernels exceed the peak's count of multiplications), "other". Memory-bound kernels have c = 0. No kernel is
priced below its roofline (`parsim.costs.compute.formula`).

The sizes of each kind: a convolution's forward has rows = samples x output pixels, columns = output channels and depth =
input channels. Its backward_input exchanges the channels. Its backward_weight has the channels as rows and columns, and
the pixels as depth. A matmul's backward is two matmuls, priced with the forward fit. Attention is its two batched matmuls
and three kernels over the scores, not fused. An embedding is a memory-bound gather.

Bytes of a memory-bound operator: the backward reads the saved input and the gradient and writes a gradient, three arrays
where the forward moved two. One with parameters is a normalisation: its forward reads the input twice (statistics, then
values: three arrays) and its backward reads input and gradient twice (five). One that does not grow with the samples (a
counter, a table of positions) has no backward.

Leaves out: tile quantisation and the discrete choice of algorithm, cache reuse, clock changes, fused attention kernels, and
the dense gradient of an embedding's table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from parsim.costs.estimate import Estimate
from parsim.errors import CostError
from parsim.hardware.profile import Profile
from parsim.model.component import GRADIENT_SUM, UNALIGNED, Component, Operator
from parsim.model.formats import number_format
from parsim.model.operator_table import backward_flop_of
from parsim.work import Phase

FAMILIES = ("dense", "3x3", "other")
BACKWARD_BYTES = 3 / 2
NORMALISATION_FORWARD_BYTES = 3 / 2
NORMALISATION_BACKWARD_BYTES = 5 / 2
"""Bytes moved against one read and one write of the array, see above."""

SCORE_KERNELS = 3
SCORE_ARRAYS = 7
"""Between the two matmuls of attention: scale and mask (2 arrays), softmax (3: it reads twice), dropout (2)."""

FUSED_BACKWARD_FLOP = 2.5

NORM = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One launch: what it computes and moves, and the sizes its efficiency depends on.

    Attributes:
        kind: "matmul", "convolution", "memory_bound", or "attention" (fused). phase: the fit it is priced with: "forward", for
            convolutions also "backward_input" and "backward_weight", for attention "backward".
        flop, size_bytes: of the whole launch.
        causal: of fused attention: its rows (queries) see no later column (key).
        aligned: of a product: False if it runs without tensor cores. low: False if it does not run in a precision that only
            products run in (`NumberFormat.beside`).
    """

    kind: str
    phase: str
    flop: float
    size_bytes: float
    count: int = 1
    rows: float = 0.0
    columns: float = 0.0
    depth: float = 0.0
    problems: float = 1.0
    taps: float = 1.0
    family: str = "dense"
    strided: bool = False
    causal: bool = False
    aligned: bool = True
    low: bool = True


def kernel_seconds(kernel: Kernel, coefficients: Mapping[str, float]) -> float:
    """Seconds of one launch by the formula of this module.

    Args:
        kernel: sizes, flop and bytes of the launch.
        coefficients: of the fit of its kind and phase, in SI units.

    Raises:
        CostError: a coefficient is missing.
    """
    try:
        bandwidth = coefficients["memory_bandwidth_bytes_per_s"] * coefficients["bandwidth_fraction"]
        memory = kernel.size_bytes / bandwidth
        if kernel.flop == 0 or kernel.kind == "memory_bound":
            return coefficients["floor_s"] + memory
        outputs = (
            kernel.problems * (kernel.rows + coefficients["half_rows"]) * (kernel.columns + coefficients["half_columns"])
            + coefficients["wave_outputs"]
        )
        rate = coefficients["peak_flop_per_s"] * coefficients[f"efficiency_{kernel.family}"]
        compute = 2.0 * kernel.taps * (kernel.depth + coefficients["half_depth"]) * outputs / rate
        if kernel.strided:
            compute *= coefficients["strided_factor"]
    except KeyError as error:
        raise CostError(
            f"the fit for {kernel.kind} {kernel.phase} has no coefficient {error}; refit the profile's operator points"
        ) from error
    larger = max(compute, memory)
    ratio: float = min(compute, memory) / larger
    return coefficients["floor_s"] + larger * float((1.0 + ratio**NORM) ** (1.0 / NORM))


def forward_kernels(operator: Operator, samples: int, precision: str) -> tuple[Kernel, ...]:
    """The launches of an operator's forward.

    Args:
        operator: as traced. samples: of one microbatch. precision: such as "fp32".
    """
    size_bytes = _operand_bytes(operator, samples, precision)
    if operator.kind == "matmul":
        return (_matmul(operator, samples, size_bytes),)
    if operator.kind == "convolution":
        return (_convolution(operator, samples, size_bytes),)
    if operator.kind == "attention":
        return _attention(operator, samples, element_bytes(precision))
    if operator.kind == "embedding":
        return (
            _moved(
                operator.count, element_bytes(precision) / 4 * operator.activation_bytes * operator_times(operator, samples)
            ),
        )
    passes = NORMALISATION_FORWARD_BYTES if operator.parameter_bytes else 1
    return (_moved(operator.count, passes * size_bytes, operator.forward_flop * operator_times(operator, samples)),)


def halved_backward_kernels(
    operator: Operator, samples: int, precision: str, *, input_gradient: bool = True
) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    """The launches of an operator's backward: towards the gradient of its input, and towards parameters alone.

    The second operand of a matmul or convolution with parameters is a weight; so is an embedding's table. A normalisation
    makes both gradients in one launch, counted in the first half. Both operands of attention count there too. Of a frozen
    operand nothing is computed (`Operator.gradients`).

    Args:
        operator, samples, precision: as for `forward_kernels`.
        input_gradient: False if nothing asks for the gradient of the input.
    """
    kernels = backward_kernels(operator, samples, precision, input_gradient=input_gradient)
    if operator.kind == "embedding" or operator.gradients == "weight":
        return (), kernels
    if operator.kind not in ("matmul", "convolution") or not operator.parameter_bytes or operator.gradients:
        return kernels, ()
    first = len(kernels) - 1
    return kernels[:first], kernels[first:]


def backward_kernels(operator: Operator, samples: int, precision: str, *, input_gradient: bool = True) -> tuple[Kernel, ...]:
    """The launches of an operator's backward: the gradients of the input and of the other operand, if they are wanted.

    Args:
        operator, samples, precision: as for `forward_kernels`.
        input_gradient: False if nothing asks for the gradient of the input.
    """
    if operator.gradients == "none":
        return ()
    input_gradient = input_gradient and operator.gradients != "weight"
    weight_gradient = operator.gradients != "input"
    if operator.kind == "memory_bound":
        if operator.batch == "none":
            return ()
        arrays = NORMALISATION_BACKWARD_BYTES if operator.parameter_bytes else BACKWARD_BYTES
        flop = operator.forward_flop * operator_times(operator, samples)
        if flop:
            flop *= backward_flop_of(operator.function)
        return (_moved(operator.count, arrays * _operand_bytes(operator, samples, precision), flop),)
    kernels: list[Kernel] = []
    for kernel in forward_kernels(operator, samples, precision):
        if kernel.kind == "memory_bound":
            kernels.append(replace(kernel, size_bytes=BACKWARD_BYTES * kernel.size_bytes))
        elif kernel.kind == "matmul":
            if input_gradient:
                kernels.append(replace(kernel, columns=kernel.depth, depth=kernel.columns))
            if weight_gradient or operator.kind == "attention":
                kernels.append(replace(kernel, rows=kernel.depth, depth=kernel.rows))
        else:
            if input_gradient:
                kernels.append(replace(kernel, phase="backward_input", columns=kernel.depth, depth=kernel.columns))
            if weight_gradient:
                kernels.append(
                    replace(kernel, phase="backward_weight", rows=kernel.columns, columns=kernel.depth, depth=kernel.rows)
                )
    return tuple(kernels)


def fused_attention_kernel(operator: Operator, samples: int, precision: str, *, backward: bool) -> Kernel:
    """The one launch of fused attention, which keeps no scores in memory and computes none that a causal mask hides.

    The backward computes five products where the forward computes two, and moves twice the arrays.

    Args:
        operator: of kind "attention", as traced. samples: of one microbatch. precision: such as "bf16".
        backward: the gradients of queries, keys and values.
    """
    heads, queries, keys, d = (operator_size(operator, name) for name in ("heads", "q", "kv", "d"))
    problems, causal = heads * samples, operator.function == "causal"
    flop = 4.0 * problems * queries * keys * d * (0.5 if causal else 1.0)
    return Kernel(
        kind="attention",
        phase="backward" if backward else "forward",
        count=operator.count,
        flop=FUSED_BACKWARD_FLOP * flop if backward else flop,
        size_bytes=(2.0 if backward else 1.0) * 2.0 * element_bytes(precision) * problems * (queries + keys) * d,
        rows=queries,
        columns=keys,
        depth=d,
        problems=problems,
        causal=causal,
    )


def element_bytes(precision: str) -> int:
    """Bytes of an activation in a kernel.

    Args:
        precision: such as "fp32".

    Raises:
        CostError: an unknown precision.
    """
    return number_format(precision).element_bytes


def _matmul(operator: Operator, samples: int, size_bytes: float) -> Kernel:
    m, n, k = (operator_size(operator, name) for name in ("m", "n", "k"))
    problems = dict(operator.shape).get("problems", 1) * (samples if operator.batch == "batch" else 1)
    rows = m * samples if operator.batch == "rows" else m
    return Kernel(
        kind="matmul",
        phase="forward",
        count=operator.count,
        flop=operator.forward_flop * operator_times(operator, samples),
        size_bytes=size_bytes,
        rows=rows,
        columns=n,
        depth=k,
        problems=problems,
        aligned=operator.function != UNALIGNED,
        low=operator.low,
    )


def _convolution(operator: Operator, samples: int, size_bytes: float) -> Kernel:
    c, k, r, s, groups, out_h, out_w = (
        operator_size(operator, name) for name in ("c", "k", "r", "s", "groups", "out_h", "out_w")
    )
    stride = max(operator_size(operator, "stride_h"), operator_size(operator, "stride_w"))
    return Kernel(
        kind="convolution",
        phase="forward",
        count=operator.count,
        flop=operator.forward_flop * operator_times(operator, samples),
        size_bytes=size_bytes,
        rows=operator_times(operator, samples) * out_h * out_w,
        columns=k / groups,
        depth=c / groups,
        problems=groups,
        taps=r * s,
        family="dense" if r == s == 1 else "3x3" if r == s == 3 and stride == 1 else "other",
        strided=stride > 1,
    )


def _attention(operator: Operator, samples: int, width: int) -> tuple[Kernel, ...]:
    heads, queries, keys, d = (operator_size(operator, name) for name in ("heads", "q", "kv", "d"))
    problems = heads * samples
    half_flop = 2.0 * problems * queries * keys * d
    elements = problems * (queries * keys + (queries + keys) * d)
    scores = Kernel(
        kind="matmul",
        phase="forward",
        count=operator.count,
        flop=half_flop,
        size_bytes=width * elements,
        rows=queries,
        columns=keys,
        depth=d,
        problems=problems,
        low=False,
    )
    passes = _moved(SCORE_KERNELS * operator.count, SCORE_ARRAYS / SCORE_KERNELS * width * problems * queries * keys)
    return (scores, passes, replace(scores, columns=d, depth=keys))


def _moved(count: int, size_bytes: float, flop: float = 0.0) -> Kernel:
    return Kernel(kind="memory_bound", phase="forward", count=count, flop=flop, size_bytes=size_bytes)


def _operand_bytes(operator: Operator, samples: int, precision: str) -> float:
    """Every operand and result once; the Model counts four bytes per element."""
    return (
        element_bytes(precision)
        / 4
        * (operator.activation_bytes * operator_times(operator, samples) + operator.parameter_bytes)
    )


def operator_times(operator: Operator, samples: int) -> int:
    """How often an operator does its per-sample work: once for work on parameters alone, else once per sample.

    Args:
        operator: as traced. samples: of one microbatch.
    """
    return 1 if operator.batch == "none" else samples


def operator_size(operator: Operator, name: str) -> int:
    """One size of an operator's shape.

    Args:
        operator: as traced. name: such as "m" (`parsim.model.component.Operator`).

    Raises:
        CostError: the shape has no such size.
    """
    for key, size in operator.shape:
        if key == name:
            return size
    known = ", ".join(key for key, _ in operator.shape)
    raise CostError(f"a {operator.kind} operator has no size {name!r} in its shape ({known}); trace the model again")


# The launches of a component on a device whose operators were measured: kernels by function, phase and sizes.
#
# One launch is one call that the framework makes, with the sizes its time depends on:
#
#     matmul        linear (with a bias, weights [columns, depth]) or batched (independent problems): problems, rows, columns,
#                   depth of the product at hand. The backward of a linear one is two products, backward_input and
#                   backward_weight, each with its own fit. The backward of a batched one is two batched products.
#     convolution   pointwise (1x1), 3x3, grouped or other: images, inputs and outputs (channels of one group), groups, taps,
#                   pixels_in and pixels_out of one image.
#     attention     plain or causal, fused: problems (heads x samples), queries, keys, depth.
#     embedding     rows gathered, width.
#     memory_bound  by what it does (see FUNCTIONS): elements, and width, the length of a normalised or summed row, else 1.
#
# What a forward does not show is added to the backward: the sum over rows that is a bias' gradient, and per parameter its
# accumulation into `.grad`.
#
# Leaves out: the zeroed table behind an embedding's gradient, and that a backward adds gradients that meet at a fork inside
# one
# component (an addition is given one such sum).


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
        return (_attention_launches(operator, "forward", samples),)
    return (
        _convolution_launches(operator, "forward", samples)
        if operator.kind == "convolution"
        else _matmul_launches(operator, samples),
    )


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
        return (_attention_launches(operator, "backward", samples),), ()
    if operator.kind == "convolution":
        inputs = (_convolution_launches(operator, "backward_input", samples),) if input_gradient else ()
        return inputs, (_convolution_launches(operator, "backward_weight", samples),)
    product = _matmul_launches(operator, samples)
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


def _matmul_launches(operator: Operator, samples: int) -> Launch:
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


def _convolution_launches(operator: Operator, phase: str, samples: int) -> Launch:
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


def _attention_launches(operator: Operator, phase: str, samples: int) -> Launch:
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


# Prices of computation that was never measured, from its operators: the request, and the protocol of models that answer
# it.


DEFAULT_DRIFT_SIGMA = 0.05
"""Assumed relative spread of a machine from run to run where the profile states none."""

EXTRAPOLATED_SHARE = 0.1
"""An estimate from operators counts as extrapolated when more than this share of it lies outside the fitted sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeRequest:
    """The computation to price: a component, or a shard of one (`parsim.model.shard.narrow`), in one phase over some
    samples.

    Attributes:
        input_gradient: False for a component whose inputs want no gradient (the model's first one): the backward of its first
            operator then computes the gradient of the weight alone.
    """

    component: Component
    phase: Phase
    samples: int
    input_gradient: bool = True


class OperatorModel(Protocol):
    """Prices components from their operators, on one type of device in one precision.

    Two implementations: `parsim.costs.compute.formula.KernelModel` (a formula fitted to published kernels, or a roofline)
    and `parsim.costs.compute.surfaces.LaunchModel` (surfaces measured on the machine, and what components add to them).
    """

    def seconds(self, request: ComputeRequest) -> float:
        """Seconds for comparing parts of one component; a common factor may be left out.

        Raises CostError where an operator has no price.
        """

    def estimate(self, request: ComputeRequest) -> Estimate:
        """The price, its terms, and its uncertain parameters.

        Raises CostError where an operator has no price.
        """


def drift_of(profile: Profile) -> tuple[str, float]:
    """Name and relative sigma of the cost parameter that all computation of a machine shares.

    Args:
        profile: of the machine; without a measured noise it takes the default sigma.
    """
    return "drift", DEFAULT_DRIFT_SIGMA if profile.noise is None else profile.noise.drift_sigma
