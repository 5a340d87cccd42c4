"""What a GPU launches for recorded operators: bytes by hand, casts of autocast, rows that are not aligned, unfused kernels."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration.fit.composition import measured_parts
from calibration.fit.surfaces import consistent_operators, fit_surfaces
from calibration.measure.operator_shapes import CPU_REACH, PRODUCT_PHASES, gpu_reach, operator_launches
from parsim.costs.compute.compute import ComputeCosts
from parsim.costs.compute.formula import component_kernels
from parsim.costs.compute.launches import (
    PASSES,
    ComputeRequest,
    Launch,
    component_launches,
    cuda_backward,
    cuda_forward,
    cuda_lowering,
    cuda_operators,
)
from parsim.costs.compute.surfaces import SurfaceModel, surface_seconds, terms_of
from parsim.errors import CostError, ProfileError
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import profile_from_parts
from parsim.hardware.profile import Profile
from parsim.hardware.records import OperatorPoint
from parsim.model.catalogue.sublayers import COMPILED, UNFUSED, SamplePart, softmax_is_fused
from parsim.model.catalogue.transformer import transformer
from parsim.model.component import Component, Operator, narrow
from parsim.model.formats import Numerics
from parsim.model.load import load_model
from parsim.model.model import Model
from parsim.model.spec import ModelSpec
from parsim.work import NORM as NORM_PART
from parsim.work import SCALE, ClipGradients, Mix, OptimizerStep, Phase
from tests.measured_points import component_point
from tests.models import gpt
from tests.theory.test_operator_surfaces import point

TOKENS, HIDDEN, VOCAB = 16, 32, 70
BERT = ModelSpec(
    name="bert",
    args=(("heads", 2), ("hidden", HIDDEN), ("layers", 1), ("seq", TOKENS), ("vocab", VOCAB)),
    input_shape=(TOKENS,),
)
SAMPLES = 3
GIB = 2**30


@pytest.fixture(scope="module")
def model() -> Model:
    pytest.importorskip("torch")
    return load_model(BERT)


def elements(launches: tuple[Launch, ...], function: str) -> float:
    return sum(launch.count * dict(launch.sizes)["elements"] for launch in launches if launch.function == function)


def functions(launches: tuple[Launch, ...]) -> Counter[str]:
    found: Counter[str] = Counter()
    for launch in launches:
        found[launch.function] += launch.count
    return found


def named(model: Model, name: str) -> Component:
    return model.component(name)


@pytest.mark.parametrize("phase", list(Phase)[:2])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_without_autocast_a_gpu_launches_what_a_cpu_does(model: Model, precision: str, phase: Phase) -> None:
    for component in model.components:
        own = component_launches(component, phase, SAMPLES, precision=precision, on_gpu=True)
        assert own == component_launches(component, phase, SAMPLES, precision)


def test_a_loss_is_in_fp32_and_its_input_is_cast(model: Model) -> None:
    """Counted in elements of two bytes: the logits are read in half precision and written in fp32 (6 bytes each), and softmax
    has arrays of four bytes. So over a vocabulary it is no third of its bytes too short."""
    loss, logits = named(model, "loss"), SAMPLES * TOKENS * VOCAB
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        there, cpu = (
            component_launches(loss, phase, SAMPLES, precision="amp_bf16", on_gpu=True),
            component_launches(loss, phase, SAMPLES),
        )
        assert elements(there, "softmax") == 2 * elements(cpu, "softmax")
        assert elements(there, "copy") == logits * 6 / 4


def test_weights_biases_and_norms_are_cast_launch_by_launch(model: Model) -> None:
    """A layer of BERT: four products, each with a weight and a bias to cast, and two norms whose output a product reads."""
    layer = named(model, "layers.0")
    cpu = component_launches(layer, Phase.FORWARD, SAMPLES)
    there = component_launches(layer, Phase.FORWARD, SAMPLES, precision="amp_bf16", on_gpu=True)
    assert functions(there) == functions(cpu) + Counter(copy=4 + 4 + 2)
    weights, biases = 12 * HIDDEN**2, 9 * HIDDEN
    norms = 2 * SAMPLES * TOKENS * HIDDEN
    assert elements(there, "copy") == pytest.approx(6 / 4 * (weights + 2 * biases + norms))
    assert elements(there, "layer_norm") == 2 * elements(cpu, "layer_norm")
    back = component_launches(layer, Phase.BACKWARD, SAMPLES, precision="amp_bf16", on_gpu=True)
    assert functions(back)["copy"] == 4 + 4 + 2, "gradients of weights and biases are widened, those of norms cast"


def test_halves_of_a_backward_add_up_to_it(model: Model) -> None:
    for component in model.components:
        whole, first, second = (
            functions(component_launches(component, phase, SAMPLES, precision="amp_fp16", on_gpu=True))
            for phase in (Phase.BACKWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)
        )
        assert first + second == whole


# --- rows that are not aligned ----------------------------------------------------------------------------------------


@given(rows=st.integers(1, 4096), columns=st.integers(1, 4096), depth=st.integers(1, 4096))
def test_unaligned_arithmetic_is_all_of_it_or_none(rows: int, columns: int, depth: int) -> None:
    """Rows of memory: of the forward y = x W' those of x and W (depth) and of y (columns), however many rows there are. The
    gradient of weights reads what the forward wrote, so its rows are the forward's columns."""
    sizes = {"problems": 1.0, "rows": float(rows), "columns": float(columns), "depth": float(depth)}
    arithmetic = float(rows) * columns * depth
    for phase, lengths in (
        ("forward", (columns, depth)),
        ("backward_input", (columns, depth)),
        ("backward_weight", (rows, columns)),
    ):
        terms = terms_of("matmul", sizes, gpu_phase=phase)
        assert terms["unaligned"] == (0.0 if all(length % 8 == 0 for length in lengths) else arithmetic)
        assert terms["odd"] == (0.0 if all(length % 2 == 0 for length in lengths) else arithmetic)
        assert terms.items() >= terms_of("matmul", sizes).items()


def gpu_linear_points(phase: str) -> list[OperatorPoint]:
    """A GPU of 400 Tflop/s that runs unaligned rows at half of that, and odd ones at a quarter."""
    found = []
    for launch in operator_launches(quick=False, reach=gpu_reach(50 * GIB, 2)):
        if (launch.function, launch.phase) == ("linear", phase):
            terms = terms_of("matmul", dict(launch.sizes), gpu_phase=phase)
            flop = 2 * (terms["arithmetic"] + terms["unaligned"] + 2 * terms["odd"])
            moved = 2 * (terms["output"] + terms["left"] + terms["right"])
            seconds = 3e-6 + flop / 4e14 + moved / 3e12
            found.append(point(launch, seconds, device_type="gpu", precision="amp_bf16"))
    return found


def vocabulary(phase: str, outputs: int) -> dict[str, float]:
    rows, hidden = 8192.0, 1024.0
    order = {
        "forward": (rows, outputs, hidden),
        "backward_input": (rows, hidden, outputs),
        "backward_weight": (outputs, hidden, rows),
    }
    return {"problems": 1.0, **dict(zip(("rows", "columns", "depth"), map(float, order[phase]), strict=True))}


@pytest.mark.parametrize("phase", PRODUCT_PHASES)
def test_a_vocabulary_that_is_not_aligned_costs_what_such_rows_cost(phase: str) -> None:
    (surface,) = fit_surfaces(gpu_linear_points(phase), "s", on_gpu=True)
    aligned_s, even_s, odd_s = (surface_seconds(surface, vocabulary(phase, n)) for n in (50304, 50258, 50257))
    least_s = 2 * 8192 * 1024 * 50304 / 4e14
    assert aligned_s == pytest.approx(least_s, rel=0.35)
    assert even_s - aligned_s == pytest.approx(least_s, rel=0.05)
    assert odd_s - aligned_s == pytest.approx(3 * least_s, rel=0.05)
    (blind,) = fit_surfaces(gpu_linear_points(phase), "s")
    blind_s = [surface_seconds(blind, vocabulary(phase, n)) for n in (50304, 50257)]
    assert blind_s[1] < 0.6 * odd_s, "what a CPU's terms say of it"


def test_a_gpu_measures_layers_as_models_have_them() -> None:
    """The rows of a batch may be of any number. Those of memory are aligned, but for a share of layers with other outputs."""
    for phase in PRODUCT_PHASES:
        launches = [
            dict(launch.sizes)
            for launch in operator_launches(quick=False, reach=gpu_reach(50 * GIB, 2))
            if (launch.function, launch.phase) == ("linear", phase)
        ]
        terms = [terms_of("matmul", sizes, gpu_phase=phase) for sizes in launches]
        unaligned = [entry["unaligned"] > 0 for entry in terms]
        assert 0.15 < np.mean(unaligned) < 0.35
        assert 0.05 < np.mean([entry["odd"] > 0 for entry in terms]) < 0.2
    on_cpu = [launch for launch in operator_launches(quick=False) if launch.function == "linear"]
    assert [launch.sizes for launch in on_cpu[::3]] == [launch.sizes for launch in on_cpu[2::3]], "as before"
    assert CPU_REACH.unaligned_every == 0


# --- what a GPU refuses, or takes its time for ------------------------------------------------------------------------


def test_a_surface_of_a_gpu_that_has_too_few_launches_is_left_out_with_a_warning(model: Model) -> None:
    """A machine may be there once: what a library refuses must not cost everything else that was measured."""
    few = gpu_linear_points("forward")[:5]
    others = gpu_linear_points("backward_input")
    kept, (warning,) = consistent_operators([*few, *others], on_gpu=True)
    assert kept == others
    assert warning == "left out matmul linear forward: 5 launches, a fit needs 8"
    surfaces = SurfaceModel(tuple(fit_surfaces(kept, "s", on_gpu=True)), tuple(kept))
    component = model.components[1]
    point = component_point(
        component, 1e-3, model=model.name, samples=SAMPLES, device_type="gpu", precision="amp_bf16", repeats=3
    )
    assert measured_parts([point], [model], surfaces, gpu_precision="amp_bf16") == []
    with pytest.raises(CostError, match="there is no fit for"):
        measured_parts([point], [model], surfaces)


def test_kernels_of_a_gpu_may_contradict_one_another_more_often() -> None:
    """Half of the shapes take a thousand times as long: another kernel. The rest is enough for a fit."""
    points = gpu_linear_points("forward")
    odd = [
        point.model_copy(update={"seconds": 1000 * point.seconds}) if number % 2 else point
        for number, point in enumerate(points)
    ]
    with pytest.raises(ProfileError, match="contradict others"):
        consistent_operators(odd)
    kept, warnings = consistent_operators(odd, on_gpu=True)
    assert len(kept) + len(warnings) == len(points)
    assert len(kept) >= len(points) / 2


# What a GPU launches for recorded operators: bytes counted by hand, and the sums that must hold.

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


# What Megatron-LM before 2023 runs beside fused kernels: kernels of biases, copies of gradients, passes of a step.

LAYER_HIDDEN, LAYER_TOKENS, LAYER_SAMPLES, HALF = 512, 128, 4, 2
STREAM = LAYER_TOKENS * LAYER_SAMPLES * LAYER_HIDDEN * HALF
"""Bytes of the residual stream of a microbatch."""


def layers(granularity: str, *, bias: bool = True, kernels: bool = True, selective: bool = False) -> Model:
    shape = replace(gpt("gpt", 1, LAYER_HIDDEN, 8, 1024), bias=bias)
    software = replace(UNFUSED, bias_kernels=kernels, selective=selective)
    return transformer(shape, software, SamplePart(tokens=LAYER_TOKENS, context=LAYER_TOKENS), granularity)


def moved_bytes(components: list[Component], phase: Phase) -> float:
    requests = [ComputeRequest(component=component, phase=phase, samples=LAYER_SAMPLES) for component in components]
    return sum(kernel.size_bytes * kernel.count for asked in requests for kernel in component_kernels(asked, "bf16", "cuda"))


@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize("granularity", ["layer", "sublayer", "sequence"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_sums_gradients_of_its_biases_and_copies_those_of_queries_keys_and_values(
    granularity: str, bias: bool, selective: bool
) -> None:
    """Forward: the bias of 3 h is added, read and written. Backward: 9 h are read for the sums, 3 h copied together."""

    def extra(phase: Phase) -> float:
        with_them, without = (
            moved_bytes(list(layers(granularity, bias=bias, kernels=kernels, selective=selective).components), phase)
            for kernels in (True, False)
        )
        return (with_them - without) / STREAM

    assert extra(Phase.FORWARD) == pytest.approx(2 * 3 if bias else 0)
    assert extra(Phase.BACKWARD) == pytest.approx((9 if bias else 0) + 2 * 3)


def test_a_shard_has_its_part_of_them_and_the_sums_behind_the_residual_whole() -> None:
    """Without sequence parallelism the stream is whole on every shard, so are the gradients of its two biases."""
    added = []
    for kernels in (True, False):
        model = layers("sublayer", kernels=kernels)
        parts = [narrow(model.component(f"h.0.{name}"), "tensor", 4) for name in ("attn", "mlp")]
        added.append(moved_bytes(parts, Phase.BACKWARD) / STREAM)
    assert added[0] - added[1] == pytest.approx((3 + 4 + 2 * 3) / 4 + 2)


def test_newer_kernels_have_none_of_it() -> None:
    assert UNFUSED.bias_kernels
    assert not COMPILED.bias_kernels


@pytest.mark.parametrize(
    ("heads", "keys", "fused"), [(8, 2048, True), (6, 2048, False), (3, 1024, False), (8, 2049, False), (56, 128, True)]
)
def test_the_fused_softmax_takes_heads_by_fours_and_keys_up_to_2048(heads: int, keys: int, fused: bool) -> None:
    assert softmax_is_fused(heads, keys) is fused


def costs(precision: str, profile: Profile | None = None, *, ema: bool = False) -> ComputeCosts:
    numerics = Numerics(precision=precision, optimizer="adam_fused", ema=ema)
    return ComputeCosts(profile or profile_from_parts("a100-sxm-80gb", 1), numerics)


UPDATED = 2**31


@pytest.mark.parametrize(("precision", "accesses"), [("fp32", 8), ("bf16", 11), ("amp_bf16", 8), ("amp_fp16", 10)])
def test_clipping_moves_four_bytes_of_an_element_per_access(precision: str, accesses: int) -> None:
    """Whatever else the step of that precision moves: casts of master weights, a scaled loss."""
    priced = costs(precision)
    device = cluster_from_profile(priced.profile, [0]).devices[0]
    step = priced.optimizer(OptimizerStep(elements=UPDATED, tensors=1), device).median_s
    for part, own in ((NORM_PART, 1), (SCALE, 2)):
        clip = priced.arithmetic(ClipGradients(part=part, elements=UPDATED, tensors=1), device).median_s
        assert clip / step == pytest.approx(own / accesses, rel=1e-6)


@pytest.mark.parametrize(("precision", "accesses"), [("fp32", 8), ("bf16", 11), ("amp_bf16", 8), ("amp_fp16", 10)])
def test_averages_and_mixing_move_four_bytes_of_an_element_per_access(precision: str, accesses: int) -> None:
    """Likewise: 5 accesses of mixing, 3 of moving averages of the weights."""
    priced = costs(precision)
    device = cluster_from_profile(priced.profile, [0]).devices[0]
    work = OptimizerStep(elements=UPDATED, tensors=1)
    step = priced.optimizer(work, device).median_s
    mixed = priced.arithmetic(Mix(elements=UPDATED, copies=2, accesses=5), device)
    assert mixed.median_s / step == pytest.approx(5 / accesses, rel=1e-6)
    assert f"has {accesses}" in mixed.detail
    averaged = costs(precision, ema=True).optimizer(work, device).median_s
    assert averaged / step == pytest.approx(1 + 3 / accesses, rel=1e-6)


def test_fp16_divides_gradients_by_the_scale_where_bf16_does_not() -> None:
    part = profile_from_parts("a100-sxm-80gb", 1)
    (name,) = part.device_types
    entry = part.device_types[name]
    types = {
        name: entry.model_copy(update={"peak_flop_per_s": entry.peak_flop_per_s | {"fp16": entry.peak_flop_per_s["bf16"]}})
    }
    profile = part.model_copy(update={"device_types": types})
    steps = {}
    for precision in ("bf16", "fp16"):
        priced = costs(precision, profile)
        device = cluster_from_profile(profile, [0]).devices[0]
        steps[precision] = priced.optimizer(OptimizerStep(elements=UPDATED, tensors=1), device).median_s
    assert steps["fp16"] / steps["bf16"] == pytest.approx(13 / 11, rel=1e-4)
