"""What Megatron-LM before 2023 runs beside fused kernels: kernels of biases, copies of gradients, passes of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parsim.costs.compute.compute import ComputeCosts
from parsim.costs.compute.formula import component_kernels
from parsim.costs.compute.launches import ComputeRequest
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import profile_from_parts
from parsim.hardware.profile import Profile
from parsim.model.catalogue.sublayers import COMPILED, UNFUSED, SamplePart, softmax_is_fused
from parsim.model.catalogue.transformer import transformer
from parsim.model.component import Component, narrow
from parsim.model.formats import Numerics
from parsim.model.model import Model
from parsim.work import NORM, SCALE, ClipGradients, Mix, OptimizerStep, Phase
from tests.models import gpt

HIDDEN, TOKENS, SAMPLES, HALF = 512, 128, 4, 2
STREAM = TOKENS * SAMPLES * HIDDEN * HALF
"""Bytes of the residual stream of a microbatch."""


def layers(granularity: str, *, bias: bool = True, kernels: bool = True, selective: bool = False) -> Model:
    shape = replace(gpt("gpt", 1, HIDDEN, 8, 1024), bias=bias)
    software = replace(UNFUSED, bias_kernels=kernels, selective=selective)
    return transformer(shape, software, SamplePart(tokens=TOKENS, context=TOKENS), granularity)


def moved_bytes(components: list[Component], phase: Phase) -> float:
    requests = [ComputeRequest(component=component, phase=phase, samples=SAMPLES) for component in components]
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


ELEMENTS = 2**31


@pytest.mark.parametrize(("precision", "accesses"), [("fp32", 8), ("bf16", 11), ("amp_bf16", 8), ("amp_fp16", 10)])
def test_clipping_moves_four_bytes_of_an_element_per_access(precision: str, accesses: int) -> None:
    """Whatever else the step of that precision moves: casts of master weights, a scaled loss."""
    priced = costs(precision)
    device = cluster_from_profile(priced.profile, [0]).devices[0]
    step = priced.optimizer(OptimizerStep(elements=ELEMENTS, tensors=1), device).median_s
    for part, own in ((NORM, 1), (SCALE, 2)):
        clip = priced.arithmetic(ClipGradients(part=part, elements=ELEMENTS, tensors=1), device).median_s
        assert clip / step == pytest.approx(own / accesses, rel=1e-6)


@pytest.mark.parametrize(("precision", "accesses"), [("fp32", 8), ("bf16", 11), ("amp_bf16", 8), ("amp_fp16", 10)])
def test_averages_and_mixing_move_four_bytes_of_an_element_per_access(precision: str, accesses: int) -> None:
    """Likewise: 5 accesses of mixing, 3 of moving averages of the weights."""
    priced = costs(precision)
    device = cluster_from_profile(priced.profile, [0]).devices[0]
    work = OptimizerStep(elements=ELEMENTS, tensors=1)
    step = priced.optimizer(work, device).median_s
    mixed = priced.arithmetic(Mix(elements=ELEMENTS, copies=2, accesses=5), device)
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
        steps[precision] = priced.optimizer(OptimizerStep(elements=ELEMENTS, tensors=1), device).median_s
    assert steps["fp16"] / steps["bf16"] == pytest.approx(13 / 11, rel=1e-4)
