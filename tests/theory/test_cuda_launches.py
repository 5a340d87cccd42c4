"""What a GPU launches for recorded operators: bytes counted by hand, and the sums that must hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsim.costs.compute.formula import component_kernels
from parsim.costs.compute.launches import (
    PASSES,
    ComputeRequest,
    Launch,
    cuda_backward,
    cuda_forward,
    cuda_lowering,
    cuda_operators,
)
from parsim.model import ModelSpec, load_model
from parsim.model.component import Component, Operator
from parsim.work import Phase

ELEMENTS = 1000


def memory_bound(function: str, arrays: float, *, count: int = 1, batch: str = "batch", parameter_bytes: int = 0) -> Operator:
    return Operator(
        kind="memory_bound",
        shape=(("elements", ELEMENTS),),
        batch=batch,
        forward_flop=0.0,
        activation_bytes=int(4 * arrays * ELEMENTS),
        parameter_bytes=parameter_bytes,
        count=count,
        function=function,
    )


MATMUL = Operator(
    kind="matmul",
    shape=(("m", 4), ("n", 8), ("k", 16)),
    batch="rows",
    forward_flop=2.0 * 4 * 8 * 16,
    activation_bytes=4 * (4 * 16 + 4 * 8),
    parameter_bytes=4 * 8 * 16,
    function="",
)
DROPOUT = (memory_bound("bernoulli_", 2), memory_bound("div_", 2), memory_bound("mul", 3))
NORM = memory_bound("native_layer_norm", 2, parameter_bytes=80)
RESIDUAL = memory_bound("add", 3)


def forward_bytes(operator: Operator, precision: str, **stream: bool) -> float:
    return sum(kernel.size_bytes for kernel in cuda_forward(operator, 2, precision, **stream))


def backward_bytes(operator: Operator, precision: str, **stream: bool) -> float:
    halves = cuda_backward(operator, 2, precision, **stream)
    return sum(kernel.size_bytes for half in halves for kernel in half)


def test_a_dropout_is_one_launch_with_a_byte_of_mask() -> None:
    (only,) = cuda_operators(DROPOUT)
    for precision, width in (("fp32", 4), ("amp_fp16", 2)):
        assert forward_bytes(only, precision) == backward_bytes(only, precision) == 2 * ELEMENTS * (2 * width + 1)


def test_only_the_products_of_dropouts_disappear() -> None:
    scaling, product = memory_bound("mul", 2, count=5), memory_bound("mul", 3, count=3)
    kept = cuda_operators((memory_bound("bernoulli_", 2, count=2), memory_bound("div_", 2, count=2), product, scaling))
    assert {(operator.function, operator.count) for operator in kept} == {("bernoulli_", 2), ("mul", 1), ("mul", 5)}


def test_operators_without_dropout_stay_as_they_are() -> None:
    operators = (MATMUL, memory_bound("div_", 2), memory_bound("mul", 3), NORM)
    assert cuda_operators(operators) == operators


def test_a_residual_adds_gradients_and_a_mask_hands_them_on() -> None:
    assert backward_bytes(RESIDUAL, "fp32") == forward_bytes(RESIDUAL, "fp32") == 2 * ELEMENTS * 3 * 4
    assert cuda_backward(memory_bound("add", 2), 2, "fp32") == ((), ())


def test_autocast_computes_a_layer_norm_in_fp32_and_casts_its_output() -> None:
    assert forward_bytes(NORM, "fp32") == 2 * ELEMENTS * 3 * 4
    assert forward_bytes(NORM, "amp_fp16") == 2 * ELEMENTS * (3 * 4 + 6)
    assert backward_bytes(NORM, "amp_fp16") == 2 * ELEMENTS * (7 * 4 + 6)


def test_autocast_keeps_batch_norm_and_relu_in_half_precision() -> None:
    for function in ("native_batch_norm", "relu", "gelu"):
        operator = memory_bound(function, 2)
        assert forward_bytes(operator, "amp_fp16") == forward_bytes(operator, "fp32") / 2
        assert backward_bytes(operator, "amp_fp16") == backward_bytes(operator, "fp32") / 2


def test_after_a_layer_norm_residuals_are_added_in_fp32() -> None:
    for norm, width in ((NORM, 4 + 2 + 4), (memory_bound("native_batch_norm", 2), 3 * 2)):
        (residual,) = cuda_lowering((MATMUL, norm)).forward(RESIDUAL, 2, "amp_fp16")
        assert residual.size_bytes == 2 * ELEMENTS * width
    assert forward_bytes(RESIDUAL, "amp_fp16", full_stream=True) == 2 * ELEMENTS * (4 + 2 + 4)
    assert forward_bytes(RESIDUAL, "amp_fp16") == 2 * ELEMENTS * 3 * 2


def test_weights_are_cast_once_each_way_whatever_the_samples() -> None:
    for samples in (1, 64):
        forward = cuda_forward(MATMUL, samples, "amp_fp16")
        _, weights = cuda_backward(MATMUL, samples, "amp_fp16")
        assert forward[-1].size_bytes == weights[-1].size_bytes == 6 * 8 * 16
    assert len(cuda_forward(MATMUL, 1, "fp32")) == 1


@given(function=st.sampled_from([*PASSES, "relu", "clone", "add", "mul", ""]), samples=st.integers(1, 512))
def test_autocast_moves_fewer_bytes_only_where_it_computes_in_half(function: str, samples: int) -> None:
    operator = memory_bound(function, 3)
    for launches in (cuda_forward, lambda *given: sum(cuda_backward(*given), ())):
        full = sum(kernel.size_bytes for kernel in launches(operator, samples, "fp32"))
        half = sum(kernel.size_bytes for kernel in launches(operator, samples, "amp_fp16"))
        if function in PASSES and PASSES[function].full:
            assert half >= full
        else:
            assert full / 2 <= half <= full


@pytest.mark.parametrize("name", ["resnet50", "bert", "gpt", "vit_b_16"])
@pytest.mark.parametrize("precision", ["fp32", "amp_fp16"])
def test_the_halves_of_a_backward_are_the_backward_and_flop_do_not_change(name: str, precision: str) -> None:
    for component in load_model(ModelSpec(name=name)).components[:4]:
        whole, first, second = (
            sum(kernel.count * kernel.size_bytes for kernel in on_gpu(component, phase, precision))
            for phase in (Phase.BACKWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)
        )
        assert whole == pytest.approx(first + second, rel=1e-12)
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            recorded = component_kernels(ComputeRequest(component=component, phase=phase, samples=8), precision)
            assert flop(on_gpu(component, phase, precision)) == flop(recorded)


def on_gpu(component: Component, phase: Phase, precision: str) -> tuple[Launch, ...]:
    return component_kernels(ComputeRequest(component=component, phase=phase, samples=8), precision, "cuda")


def flop(kernels: tuple[Launch, ...]) -> float:
    return sum(kernel.count * kernel.flop for kernel in kernels)
