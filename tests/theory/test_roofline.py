"""No price from operators is below what arithmetic and memory allow, whatever the operators, the fits and the surfaces say."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parsim.costs.compute.compute import ComputeCosts
from parsim.costs.compute.formula import CACHED_BYTES, WINOGRAD_REDUCTION, KernelModel, kernel_roofline_s
from parsim.costs.compute.launches import (
    ComputeRequest,
    Launch,
    component_launches,
    cuda_backward,
    cuda_forward,
    forward_launches,
)
from parsim.costs.compute.surfaces import LaunchModel, SurfaceModel
from parsim.costs.estimate import Estimate
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile, profile_from_parts
from parsim.hardware.devices import DeviceType
from parsim.hardware.parts import load_gpu
from parsim.hardware.profile import Profile
from parsim.hardware.records import OperatorSurface
from parsim.model.catalogue.frameworks import ConvolutionSoftware, run_by
from parsim.model.component import CHANNELS_LAST, NORM_ADD_RELU, NORM_RELU, NORM_RELU_OF_SUMS, Component, Operator
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.work import Phase

PROFILES = ("dgx1-v100-32gb", "pcie-8xv100", "summit-v100")


@cache
def machine(name: str) -> tuple[Profile, DeviceType]:
    profile = load_profile(name)
    return profile, cluster_from_profile(profile).devices[0].type


COUNTS = st.integers(1, 4)
SIZES = st.integers(0, 13).map(lambda power: 2**power) | st.integers(1, 9000)
EPSILON = 1e-12


@st.composite
def products(draw: st.DrawFn) -> Operator:
    m, n, k, problems = draw(SIZES), draw(SIZES), draw(SIZES), draw(st.integers(0, 16))
    batch = draw(st.sampled_from(["rows", "batch", "none"]))
    shape = (("m", m), ("n", n), ("k", k), *((("problems", problems),) if problems else ()))
    times = max(1, problems)
    return Operator(
        kind="matmul",
        shape=shape,
        batch=batch if problems or batch != "batch" else "rows",
        forward_flop=2.0 * m * n * k * times,
        activation_bytes=4 * times * m * (n + k),
        parameter_bytes=draw(st.sampled_from([0, 4 * n * k * times])),
        count=draw(COUNTS),
    )


@st.composite
def convolutions(draw: st.DrawFn) -> Operator:
    groups = draw(st.sampled_from([1, 2, 8]))
    c, k = (groups * draw(st.integers(1, 128)) for _ in range(2))
    r, stride, size = draw(st.sampled_from([1, 3, 5, 7])), draw(st.integers(1, 2)), draw(st.integers(7, 120))
    out = max(1, size // stride)
    sizes = {"c": c, "h": size, "w": size, "k": k, "r": r, "s": r, "stride_h": stride, "stride_w": stride}
    sizes |= {"groups": groups, "out_h": out, "out_w": out}
    return Operator(
        kind="convolution",
        shape=tuple(sizes.items()),
        batch="batch",
        forward_flop=2.0 * out * out * k * (c // groups) * r * r,
        activation_bytes=4 * (c * size * size + k * out * out),
        parameter_bytes=4 * k * (c // groups) * r * r,
        count=draw(COUNTS),
    )


@st.composite
def others(draw: st.DrawFn) -> Operator:
    elements = draw(SIZES) * draw(SIZES)
    kind = draw(st.sampled_from(["memory_bound", "embedding", "attention"]))
    if kind == "memory_bound":
        shape: tuple[tuple[str, int], ...] = (("elements", elements),)
        flop = float(draw(st.sampled_from([0, 5, 1000, 100_000])) * elements)
        function = draw(st.sampled_from(["_fft_c2c", "linalg_matrix_exp", "unlisted:mylib.op", "mysterious"]))
        moved = 8 * elements
    elif kind == "embedding":
        rows, width = draw(SIZES), draw(SIZES)
        shape, flop, function, moved = (("rows", rows), ("width", width)), 0.0, "", 8 * rows * width
    else:
        heads, q, d = draw(st.integers(1, 32)), draw(st.integers(1, 2048)), draw(st.integers(1, 128))
        shape, flop = (("heads", heads), ("q", q), ("kv", q), ("d", d)), 4.0 * heads * q * q * d
        function, moved = draw(st.sampled_from(["", "causal"])), 16 * heads * q * d
    return Operator(
        kind=kind,
        shape=shape,
        batch="rows" if kind == "embedding" else "batch",
        forward_flop=flop,
        activation_bytes=moved,
        parameter_bytes=0,
        count=draw(COUNTS),
        function=function,
    )


def least_s(operator: Operator, samples: int, phase: Phase, peak: float, vector_peak: float, bandwidth: float) -> float:
    """By hand. A forward computes its flop; a backward at least as much again, and twice where a product has two operands."""
    times = operator.count * (1 if operator.batch == "none" else samples)
    flop = operator.forward_flop * times * (2 if phase is Phase.BACKWARD and operator.kind in ("matmul", "convolution") else 1)
    if operator.kind == "convolution" and dict(operator.shape)["r"] > 1:
        flop /= WINOGRAD_REDUCTION
    moved = operator.activation_bytes * times + operator.parameter_bytes * operator.count
    arithmetic = flop / (vector_peak if operator.kind == "memory_bound" else peak)
    return max(arithmetic, 0.0 if bandwidth == float("inf") else moved / bandwidth)


@settings(max_examples=300, deadline=None)
@given(
    operator=products() | convolutions() | others(),
    samples=st.integers(1, 512),
    phase=st.sampled_from([Phase.FORWARD, Phase.BACKWARD]),
    name=st.sampled_from(PROFILES),
)
def test_a_fitted_or_published_price_is_not_below_the_roofline(
    operator: Operator, samples: int, phase: Phase, name: str
) -> None:
    profile, device = machine(name)
    if phase is Phase.BACKWARD and operator.batch == "none" and operator.kind == "memory_bound":
        return  # work on parameters alone that nothing differentiates
    component = Component(name="c", inputs=("x",), outputs=("y",), operators=(operator,))
    request = ComputeRequest(component=component, phase=phase, samples=samples)
    estimate = KernelModel(profile, device, "fp32").estimate(request)
    peak = device.peak_flop_per_s["fp32"]
    bound = least_s(operator, samples, phase, peak, peak, device.memory_bandwidth_bytes_per_s)
    assert estimate.median_s >= bound * (1 - EPSILON)


def free_surfaces(component: Component, samples: int) -> SurfaceModel:
    """A machine on which every launch takes no time to speak of."""
    keys = {
        (launch.kind, launch.function, launch.phase)
        for phase in Phase
        if phase in (Phase.FORWARD, Phase.BACKWARD)
        for launch in component_launches(component, phase, samples)
    }
    surfaces = tuple(
        OperatorSurface(
            kind=kind,  # type: ignore[arg-type]
            function=function,
            phase=phase,  # type: ignore[arg-type]
            device_type="cpu",
            precision="fp32",
            seconds_per_term={"launch": 1e-15},
            relative_sigma=0.1,
            reach_doublings=1.0,
            sigma_per_doubling=0.1,
            points=1,
            source="s",
        )
        for kind, function, phase in keys
    )
    return SurfaceModel(surfaces=surfaces, points=())


def surface_estimate(operator: Operator, samples: int, phase: Phase) -> Estimate:
    profile, device = machine("dgx1-v100-32gb")
    component = Component(name="c", inputs=("x",), outputs=("y",), operators=(operator,))
    model = LaunchModel(profile, device, "fp32", free_surfaces(component, samples))
    request = ComputeRequest(component=component, phase=phase, samples=samples)
    estimate = model.estimate(request)
    assert model.seconds(request) == estimate.median_s
    return estimate


@settings(max_examples=200, deadline=None)
@given(
    operator=products() | convolutions() | others(),
    samples=st.integers(1, 512),
    phase=st.sampled_from([Phase.FORWARD, Phase.BACKWARD]),
)
def test_a_price_from_surfaces_is_not_below_the_roofline_of_what_no_cache_holds(
    operator: Operator, samples: int, phase: Phase
) -> None:
    if phase is Phase.BACKWARD and operator.batch == "none" and operator.kind == "memory_bound":
        return
    _, device = machine("dgx1-v100-32gb")
    peak = device.peak_flop_per_s["fp32"]
    estimate = surface_estimate(operator, samples, phase)
    hidden = 0.0
    if operator.function == "causal":  # a fused kernel skips what the mask hides; of one query it hides nothing
        q = dict(operator.shape)["q"]
        hidden = 1.0 - max(1, q // 2) / q
    times = 1 if operator.batch == "none" else samples
    beyond = max(0.0, operator.activation_bytes * times + operator.parameter_bytes - CACHED_BYTES) * operator.count
    bound = max(
        (1 - hidden) * least_s(operator, samples, phase, peak, peak, float("inf")),
        beyond / device.memory_bandwidth_bytes_per_s,
    )
    assert estimate.median_s >= bound * (1 - EPSILON)
    assert not estimate.host_bound


def test_the_term_of_the_roofline_stands_only_where_it_decides() -> None:
    large = Operator(
        kind="matmul",
        shape=(("m", 4096), ("n", 4096), ("k", 4096)),
        batch="rows",
        forward_flop=2.0 * 4096**3,
        activation_bytes=4 * 2 * 4096**2,
        parameter_bytes=4 * 4096**2,
    )
    lifted = surface_estimate(large, 8, Phase.FORWARD)
    assert [term.name for term in lifted.terms][-1] == "roofline"
    assert lifted.median_s == pytest.approx(8 * 2 * 4096**3 / 15.7e12, rel=1e-9)
    profile, device = machine("dgx1-v100-32gb")
    component = Component(name="c", inputs=("x",), outputs=("y",), operators=(large,))
    fitted = (
        ComputeCosts(profile)
        .operator_model(device)
        .estimate(ComputeRequest(component=component, phase=Phase.FORWARD, samples=8))
    )
    assert "roofline" not in [term.name for term in fitted.terms]


@pytest.mark.parametrize(("flop", "size_bytes"), [(1e12, 1e6), (1e6, 1e9)])
def test_a_launch_takes_the_longer_of_its_arithmetic_and_its_bytes(flop: float, size_bytes: float) -> None:
    """Both go on at once, so the bound is no sum."""
    _, device = machine(PROFILES[0])
    shape = (("problems", 1.0), ("rows", 1024.0), ("columns", 1024.0), ("depth", 1024.0))
    launch = Launch(kind="matmul", function="", phase="forward", sizes=shape, flop=flop, size_bytes=size_bytes)
    arithmetic_s, bytes_s = flop / device.peak_flop_per_s["fp32"], size_bytes / device.memory_bandwidth_bytes_per_s
    assert kernel_roofline_s(launch, device, "fp32") == pytest.approx(max(arithmetic_s, bytes_s), rel=1e-12)


# Convolutions without a fit as the products they are, arrays in the other order, and norms that are one kernel with ReLU.


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
