"""The launches of torch on a GPU for operators that were recorded on a CPU, and those that autocast adds.

A trace knows each memory-bound operator by its aten name. On a GPU some of them are other kernels, and each has a backward of
its own; `PASSES` says how often the launch reads or writes its array. Matmuls, convolutions, embeddings and fused attention are
those of `parsim.costs.compute.launches`.

    dropout      one launch with a mask of one byte per element, where the CPU draws, scales and multiplies in three;
    add          of two whole arrays is a residual: its backward adds the two gradients that meet there. Of an array and a
                 broadcast one (a mask, a table of positions) it hands the gradient on;
    scaling and copies   have a backward like their forward.

Under autocast matmuls and convolutions take half-precision copies of their weights (read 4 bytes, write 2), made once per
forward, and their gradients are widened again. Layer norm, group norm and the loss are computed in fp32. The norm's
output is cast for the matmul that follows, and the loss's input for the loss. The backward casts the gradients back. What
a residual adds to is the norm's fp32 stream. Batch norm, ReLU, GELU, dropout and the inside of
scaled_dot_product_attention keep the width of their input. Loss scaling and its check for infinities are in the
optimizer's step (`parsim.costs.compute.compute`).

Sources: torch's list "CUDA Ops that can autocast" (torch.amp documentation); the passes of the norms and softmax as their CUDA
kernels make them (aten/src/ATen/native/cuda: layer_norm_kernel, SoftMax, Dropout). Passes are rounded to what NeuSight's V100
timings show for the forward: 2.6 to 3.6 of softmax and 3 to 4.5 of layer norm, at the bandwidth of an addition.

Leaves out: casts of biases and of a batch of images, the dense gradient of an embedding's table, and the host's time per
launch. Also kernels that a framework other than eager torch fuses (bias with GELU, scale with mask and softmax).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from parsim.costs.compute.launches import (
    AS_TRACED,
    COPY,
    Halves,
    Launch,
    Lowering,
    accumulations,
    backward_launches,
    element_bytes,
    forward_launches,
    launches_of,
    operator_size,
    operator_times,
)
from parsim.model.component import (
    BIAS,
    BIAS_GRADIENT,
    DEQUANTISE,
    FULL_BYTES,
    GRADIENT_SUM,
    NORM_ADD_RELU,
    NORM_RELU,
    NORM_RELU_OF_SUMS,
    PARTS,
    Component,
    Operator,
)
from parsim.model.formats import number_format
from parsim.work import Phase

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
        fused = min(operator.count, spare.get(key, 0)) if _is_part_of_dropout(operator) else 0
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
        return _passes(launch, operator, samples, precision, passes, passes.forward)
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
        launches = _passes(forward._replace(phase="backward"), operator, samples, precision, passes, passes.backward)
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


def gpu_launches(
    component: Component, phase: Phase, samples: int, *, precision: str, input_gradient: bool = True
) -> tuple[Launch, ...]:
    """All launches of a component on a GPU whose operators were measured: those of a CPU, and what autocast adds to them.

    Operators are measured on arrays of the type in which products run. Under autocast others run in fp32: norms, the additions
    that follow them, softmax and loss. These count with as many elements as their bytes are of the measured type. Casts of
    weights, biases, activations and gradients are launches of their own, priced as copies. Without them a loss over a
    vocabulary came out at a third of its bytes, and a transformer block at half of its launches.
    """
    operators = [operator for operator in cuda_operators(component.operators) if operator.function != GRADIENT_SUM]
    uniform = UNIFORM.get(number_format(precision).autocast)
    lowering = AS_TRACED if uniform is None else _autocast_lowering(cuda_lowering(operators), uniform)
    launches = launches_of(operators, phase, samples, precision, lowering, input_gradient=input_gradient)
    return (*launches, *accumulations(component, phase))


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


def _passes(
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


def _is_part_of_dropout(operator: Operator) -> bool:
    """The scaling of the mask, and its product with a whole array."""
    return operator.function == "div_" or (operator.function == "mul" and _has_whole_operands(operator))
