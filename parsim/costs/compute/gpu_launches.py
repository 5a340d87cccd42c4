"""The launches of a component on a GPU whose operators were measured: those of `launches`, and what autocast adds to them.

Operators are measured on arrays of the type in which products run. Under autocast others run in fp32: norms, the additions that
follow them, softmax and loss. These count with as many elements as their bytes are of the measured type. Casts of weights,
biases, activations and gradients are launches of their own, priced as copies. Which these are, `cuda_launches` says. Without
them a loss over a vocabulary came out at a third of its bytes, and a transformer block at half of its launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from parsim.costs.compute.cuda_launches import CAST_BYTES, cuda_backward_halves, cuda_forward, cuda_operators, has_full_stream
from parsim.costs.compute.launches import Launch, accumulations, operator_launches
from parsim.costs.compute.operators import Kernel, operator_size
from parsim.model.component import Component, Operator
from parsim.model.number_formats import number_format
from parsim.work import Phase

UNIFORM = {"bfloat16": "bf16", "float16": "fp16"}
"""By the type autocast computes in: the precision in which everything is of that type."""

COPY_BYTES = 4.0
"""That a copy moves per element of a half-precision type."""


def gpu_launches(
    component: Component, phase: Phase, samples: int, *, precision: str, input_gradient: bool = True
) -> tuple[Launch, ...]:
    """All launches of a component's forward, backward, or half of a backward.

    Args:
        component, phase, samples, input_gradient: as for `parsim.costs.compute.launches.component_launches`.
        precision: such as "amp_bf16".
    """
    operators = cuda_operators(component.operators)
    uniform = UNIFORM.get(number_format(precision).autocast)
    full_stream = has_full_stream(operators)
    launches: list[Launch] = []
    for number, operator in enumerate(operators):
        gradient = input_gradient or number > 0
        own = operator_launches(operator, phase, samples, input_gradient=gradient)
        if uniform is None:
            launches += own
            continue
        there = _kernels(operator, phase, samples, precision, gradient, full_stream)
        if operator.kind == "memory_bound":
            alike = _kernels(operator, phase, samples, uniform, gradient, False)
            launches += (*_widened(own, there, alike), *_copies(there[len(alike) :]))
        elif operator.kind in ("matmul", "convolution"):
            casts = [kernel for kernel in there if kernel.kind == "memory_bound"]
            launches += (*own, *_copies(casts), *(_bias_cast(operator) if casts else ()))
        else:
            launches += own
    return (*launches, *accumulations(component, phase))


def _kernels(
    operator: Operator, phase: Phase, samples: int, precision: str, input_gradient: bool, full_stream: bool
) -> tuple[Kernel, ...]:
    if phase is Phase.FORWARD:
        return cuda_forward(operator, samples, precision, full_stream=full_stream)
    inputs, weights = cuda_backward_halves(operator, samples, precision, input_gradient=input_gradient, full_stream=full_stream)
    towards_input = inputs if phase in (Phase.BACKWARD, Phase.BACKWARD_INPUT) else ()
    return (*towards_input, *(weights if phase in (Phase.BACKWARD, Phase.BACKWARD_WEIGHT) else ()))


def _widened(own: Sequence[Launch], there: Sequence[Kernel], alike: Sequence[Kernel]) -> list[Launch]:
    """The launches with as many elements as their bytes under autocast are of the measured type."""
    if not (there and alike and alike[0].size_bytes):
        return list(own)
    ratio = there[0].size_bytes / alike[0].size_bytes
    return [
        replace(launch, sizes=tuple((name, size * ratio if name == "elements" else size) for name, size in launch.sizes))
        for launch in own
    ]


def _copies(kernels: Sequence[Kernel]) -> list[Launch]:
    return [_copy(kernel.size_bytes / COPY_BYTES, kernel.count) for kernel in kernels]


def _bias_cast(operator: Operator) -> tuple[Launch, ...]:
    """Beside that of the weights, whose bytes hold the bias; it is a launch of its own."""
    names = ("n", "k") if operator.kind == "matmul" else ("c", "k", "r", "s")
    weights = 1.0
    for name in names:
        weights *= operator_size(operator, name)
    if operator.kind == "convolution":
        weights /= operator_size(operator, "groups")
    bias = operator.parameter_bytes / 4 - weights
    return (_copy(CAST_BYTES / COPY_BYTES * bias, operator.count),) if bias > 0 else ()


def _copy(elements: float, count: int) -> Launch:
    return Launch(
        kind="memory_bound",
        function="copy",
        phase="forward",
        sizes=(("elements", max(1.0, elements)), ("width", 1.0)),
        count=count,
    )
