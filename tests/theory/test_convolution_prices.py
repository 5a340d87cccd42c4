"""Convolutions without a fit as the products they are, arrays in the other order, and norms that are one kernel with ReLU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsim.costs.compute.formula import KernelModel, kernel_roofline_s
from parsim.costs.compute.gpu import cuda_backward, cuda_forward
from parsim.costs.compute.launches import Launch, forward_launches
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import profile_from_parts
from parsim.hardware.parts import load_gpu
from parsim.model.catalogue.frameworks import ConvolutionSoftware, run_by
from parsim.model.component import CHANNELS_LAST, NORM_ADD_RELU, NORM_RELU, NORM_RELU_OF_SUMS, Operator
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec


def kernel_model(gpu: str, precision: str) -> KernelModel:
    profile = profile_from_parts(load_gpu(gpu), 1)
    return KernelModel(profile, cluster_from_profile(profile, 1).devices[0].type, precision)


def convolution(channels: int, outputs: int, taps: int, pixels: int, stride: int = 1, function: str = "") -> Operator:
    out = -(-pixels // stride)
    shape = {"c": channels, "h": pixels, "w": pixels, "k": outputs, "r": taps, "s": taps}
    shape |= {"stride_h": stride, "stride_w": stride, "groups": 1, "out_h": out, "out_w": out}
    return Operator(
        kind="convolution",
        shape=tuple(shape.items()),
        batch="batch",
        forward_flop=2.0 * channels * outputs * taps**2 * out**2,
        activation_bytes=4 * (channels * pixels**2 + outputs * out**2),
        parameter_bytes=4 * channels * outputs * taps**2,
        function=function,
    )


def seconds(model: KernelModel, operator: Operator, samples: int, precision: str) -> float:
    (launch,) = forward_launches(operator, samples, precision)
    return model.price(launch).seconds


@given(
    channels=st.integers(1, 512),
    outputs=st.integers(1, 512),
    pixels=st.integers(1, 56),
    samples=st.integers(1, 64),
    gpu=st.sampled_from(["a100-sxm-80gb", "l40s", "mi300x"]),
)
def test_a_pointwise_convolution_is_the_product_that_it_is(
    channels: int, outputs: int, pixels: int, samples: int, gpu: str
) -> None:
    model = kernel_model(gpu, "bf16")
    operator = convolution(channels, outputs, 1, pixels, function=CHANNELS_LAST)
    product = Operator(
        kind="matmul",
        shape=(("m", pixels**2), ("n", outputs), ("k", channels)),
        batch="rows",
        forward_flop=operator.forward_flop,
        activation_bytes=operator.activation_bytes,
        parameter_bytes=operator.parameter_bytes,
    )
    assert seconds(model, operator, samples, "bf16") == pytest.approx(seconds(model, product, samples, "bf16"), rel=1e-12)


@given(
    channels=st.integers(1, 256),
    outputs=st.integers(1, 256),
    taps=st.sampled_from([1, 3, 7]),
    stride=st.integers(1, 2),
    samples=st.integers(1, 64),
    precision=st.sampled_from(["amp_fp16", "tf32", "fp32"]),
)
def test_no_convolution_is_faster_than_its_roofline(
    channels: int, outputs: int, taps: int, stride: int, samples: int, precision: str
) -> None:
    """Nor is one whose arrays must be brought into the order of matrix units faster than one whose arrays lie so."""
    model = kernel_model("a100-sxm-80gb", precision)
    plain, last = (
        forward_launches(convolution(channels, outputs, taps, 28, stride, function), samples, precision)[0]
        for function in ("", CHANNELS_LAST)
    )
    assert kernel_roofline_s(last, model.device, precision) <= model.price(last).seconds <= model.price(plain).seconds
    if precision == "fp32":
        assert model.price(last).seconds == model.price(plain).seconds


def test_other_orders_cost_a_pass_over_every_array_there_and_back() -> None:
    model = kernel_model("a100-sxm-80gb", "tf32")
    plain, last = (convolution(64, 256, 1, 56, function=function) for function in ("", CHANNELS_LAST))
    arrays = 2.0 * forward_launches(plain, 32, "tf32")[0].size_bytes
    copies = model.price(Launch(kind="memory_bound", function="copy", phase="forward", sizes=(), size_bytes=arrays)).seconds
    added = seconds(model, plain, 32, "tf32") - seconds(model, last, 32, "tf32")
    assert added == pytest.approx(copies, rel=1e-9)


def test_a_measured_convolution_keeps_its_own_fit() -> None:
    """DeepBench's rows of the V100 were measured as (samples, channels, height, width), and in fp32 the order is alike."""
    plain, last = (convolution(64, 256, 3, 56, function=function) for function in ("", CHANNELS_LAST))
    mixed, full = (kernel_model("v100-sxm-16gb", precision) for precision in ("amp_fp16", "fp32"))
    assert seconds(full, plain, 32, "fp32") == seconds(full, last, 32, "fp32")
    fits = [mixed._fit_of(forward_launches(each, 32, "amp_fp16")[0]) for each in (plain, last)]
    assert [fit.kind for fit in fits if fit is not None] == ["convolution", "matmul"]


def test_fused_norms_take_one_relu_each_and_the_additions() -> None:
    """ResNet-50: 53 norms, 49 with ReLU, of which 16 follow an addition; 4 of shortcuts have none."""
    model = load_model(ModelSpec(name="resnet50"))
    fused = run_by(model, ConvolutionSoftware(fused_norms=True), "fp32")

    def counted(name: str) -> int:
        return sum(each.count for part in fused.components for each in part.operators if each.function == name)

    assert [counted(name) for name in (NORM_RELU, NORM_ADD_RELU, "native_batch_norm", "relu", "add", "add_")] == [
        33, 16, 4, 0, 0, 0,
    ]  # fmt: skip
    products = [each for part in model.components for each in part.operators if each.kind != "memory_bound"]
    assert products == [each for part in fused.components for each in part.operators if each.kind != "memory_bound"]
    assert [part.parameters for part in fused.components] == [part.parameters for part in model.components]


def test_a_fused_norm_moves_what_its_passes_say() -> None:
    """Forward: reads its input twice, writes once; ReLU would read and write once more, an addition read two and write one."""
    norm = next(
        each
        for part in load_model(ModelSpec(name="resnet50")).components
        for each in part.operators
        if each.function == "native_batch_norm"
    )
    elements, fp16 = dict(norm.shape)["elements"], 2

    def moved(name: str) -> tuple[float, float]:
        operator = replace(norm, function=name)
        forward, backward = cuda_forward(operator, 1, "fp16"), cuda_backward(operator, 1, "fp16")[0]
        return tuple(sum(launch.size_bytes for launch in launches) / elements / fp16 for launches in (forward, backward))  # type: ignore[return-value]

    mask = 1 / 8 / fp16
    assert moved("native_batch_norm") == pytest.approx((3, 5))
    assert moved(NORM_RELU) == pytest.approx((3 + mask, 5 + mask))
    assert moved(NORM_ADD_RELU) == pytest.approx((4 + mask, 7 + mask))
    summed = run_by(load_model(ModelSpec(name="resnet50")), ConvolutionSoftware(fused_norms=True, summed=True), "fp16")
    names = {each.function for part in summed.components for each in part.operators}
    assert names >= {NORM_RELU_OF_SUMS, NORM_ADD_RELU, "native_batch_norm"}
    assert NORM_RELU not in names
    assert moved(NORM_RELU_OF_SUMS) == pytest.approx((2 + mask, 5 + mask))
