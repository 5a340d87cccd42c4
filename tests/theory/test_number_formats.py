"""What a precision means for prices and memory: none is silently taken for fp32, and none changes what others cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parsim.costs.compute.formula import component_kernels
from parsim.costs.compute.launches import ComputeRequest, element_bytes
from parsim.costs.costs import Costs
from parsim.errors import ConfigError, CostError
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.profile import Profile, Sourced
from parsim.model.catalogue.zoo import load_preset
from parsim.model.formats import FORMATS, Numerics, is_half
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from parsim.predict.evaluate import evaluate
from parsim.predict.problem import PlanningProblem
from parsim.search.families import FAMILIES
from parsim.search.stages import balanced_plan
from parsim.work import Compute, Phase
from tests.measured_points import component_point
from tests.models import chain_model

SPEC = ModelSpec(name="gpt_small")
PROFILE = "dgx1-v100-32gb"


def with_peak(precision: str, flop_per_s: float) -> Profile:
    """The V100's profile with a datasheet peak of one more precision."""
    profile = load_profile(PROFILE)
    (name,) = profile.device_types
    entry = profile.device_types[name]
    source = next(iter(entry.peak_flop_per_s.values())).source
    peaks = {**entry.peak_flop_per_s, precision: Sourced(value=flop_per_s, source=source)}
    types = {name: entry.model_copy(update={"peak_flop_per_s": peaks})}
    return profile.model_copy(update={"device_types": types})


def one_gpu(profile: Profile | None = None) -> Cluster:
    return cluster_from_profile(profile or load_profile(PROFILE), 1)


def asked(precision: str, cluster: Cluster, *, weights: str = "float32", master_weights: bool = True) -> PlanningProblem:
    model = load_model(SPEC, weights=weights)
    numerics = Numerics(precision=precision, optimizer="adam", master_weights=master_weights)
    return PlanningProblem(model=model, cluster=cluster, global_batch=8, numerics=numerics)


def single_step_s(problem: PlanningProblem) -> float:
    plan = next(iter(FAMILIES["single"](problem)))
    layout = problem.layout(plan)
    from parsim.program.lower import lower

    costs = problem.costs(1)
    return sum(costs.estimate(task.work, 0).median_s for task in lower(plan, layout.model).tasks)


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp8", "nvfp4"])
def test_what_a_profile_does_not_know_is_refused_by_name(precision: str) -> None:
    weights = "bfloat16" if FORMATS[precision].weight_bytes == 2 else "float32"
    with pytest.raises(CostError, match=rf"{precision}.*precisions of the device: .*amp_fp16"):
        single_step_s(asked(precision, one_gpu(), weights=weights))


def test_tf32_is_priced_by_its_own_peak() -> None:
    slow, fast = (single_step_s(asked("tf32", one_gpu(with_peak("tf32", peak)))) for peak in (5e12, 100e12))
    assert slow > 1.5 * fast
    full = asked("tf32", one_gpu(with_peak("tf32", 1e13)))
    plan = next(iter(FAMILIES["single"](full)))
    assert full.memory(plan) == asked("fp32", one_gpu()).memory(plan), "TF32 stores what fp32 stores"


def test_a_model_recorded_in_fp32_is_no_model_for_bf16() -> None:
    with pytest.raises(CostError, match="recorded with 4 bytes each"):
        asked("bf16", one_gpu())


@pytest.mark.parametrize("master_weights", [True, False])
def test_bf16_stores_weights_gradients_and_activations_in_two_bytes(master_weights: bool) -> None:
    cluster = one_gpu(with_peak("bf16", 1e14))
    half = asked("bf16", cluster, weights="bfloat16", master_weights=master_weights)
    full = asked("fp32", cluster)
    plan = next(iter(FAMILIES["single"](half)))
    (own,), (other,) = half.memory(plan), full.memory(plan)
    elements = sum(parameter.elements for parameter in half.model.parameters)
    assert own.line("parameters") == own.line("gradients") == 2 * elements
    assert own.line("optimizer_state") == (12 if master_weights else 4) * elements
    assert own.line("casts") == 0
    assert own.line("activations") == pytest.approx(other.line("activations") / 2, rel=0.02)  # masks and tokens stay as large
    assert single_step_s(half) > 0


def test_operators_are_those_of_fp32() -> None:
    half, full = load_model(SPEC, weights="bfloat16"), load_model(SPEC)
    assert [entry.operators for entry in half.components] == [entry.operators for entry in full.components]
    assert load_model(SPEC, weights="bfloat16") is half


def test_the_optimizer_s_bytes_by_precision() -> None:
    for optimizer, state in (("sgd", 0), ("sgd_momentum", 4), ("adamw", 8)):
        for precision in ("fp32", "tf32", "amp_bf16", "amp_fp16"):
            assert Numerics(optimizer=optimizer, precision=precision).optimizer_bytes()[0] == state
        assert Numerics(optimizer=optimizer, precision="bf16").optimizer_bytes()[0] == state + 4
        assert Numerics(optimizer=optimizer, precision="bf16", master_weights=False).optimizer_bytes()[0] == state // 2
    with pytest.raises(ConfigError, match="unknown optimizer"):
        Numerics(optimizer="lion")


def test_sizes_of_every_precision() -> None:
    assert {name: element_bytes(name) for name in FORMATS} == {
        "fp32": 4, "fp64": 8, "tf32": 4, "amp_fp16": 2, "amp_bf16": 2, "bf16": 2, "fp16": 2, "fp8": 1, "nvfp4": 1,
    }  # fmt: skip
    assert [name for name in FORMATS if is_half(name)] == ["amp_fp16", "amp_bf16"]
    with pytest.raises(CostError, match="unknown precision 'half'"):
        is_half("half")


@pytest.mark.parametrize(("state", "width"), [("fp32", 4), ("bf16", 2), ("fp8", 1), ("int8", 1)])
def test_a_state_has_its_own_width_whatever_the_weights_have(state: str, width: int) -> None:
    """Adam has two arrays; master weights add a copy of the weights, and one of gradients that are not in fp32."""
    for precision, master, stays, passes in (
        ("fp32", True, 2 * width, 0),
        ("bf16", True, 2 * width + 4, 4),
        ("bf16", False, 2 * width, 0),
    ):
        numerics = Numerics(optimizer="adamw_fused", precision=precision, master_weights=master, state_dtype=state)
        assert numerics.optimizer_bytes() == (stays, passes)
    kept = Numerics(optimizer="adamw_fused", precision="bf16", gradient_dtype="fp32")
    assert kept.optimizer_bytes() == (12, 0)
    assert kept.gradient_bytes(2) == 4


# Costs and memory of backwards in halves: the halves add up, and what waits between them is held.

HALVES = (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)


def machine(devices: int = 4) -> Cluster:
    return cluster_from_profile(load_profile("dgx1-v100-32gb"), devices)


@pytest.mark.parametrize("name", ["resnet50", "gpt", "vit_b_16", "vgg16"])
def test_the_halves_launch_the_kernels_of_the_whole(name: str) -> None:
    """Every launch is in one half, and only matmuls, convolutions and embeddings with parameters are in the second."""
    model = load_preset(name, "block")
    costs = Costs(model=model, cluster=machine())
    second = 0
    for component in model.components:
        request = ComputeRequest(component=component, phase=Phase.BACKWARD, samples=4)
        whole, into_inputs, into_weights = (
            component_kernels(replace(request, phase=phase), "fp32") for phase in (Phase.BACKWARD, *HALVES)
        )
        assert sorted(map(repr, whole)) == sorted(map(repr, (*into_inputs, *into_weights)))
        second += len(into_weights)
        if not component.parameters:
            assert not into_weights
        seconds = [
            costs.estimate(Compute(component=component.name, phase=phase, samples=4), 0).median_s
            for phase in (Phase.BACKWARD, *HALVES)
        ]
        assert seconds[1] + seconds[2] == pytest.approx(seconds[0], rel=1e-12)
    assert second > 5


def test_halves_of_a_measured_backward_add_up_to_it_and_say_what_they_rest_on() -> None:
    model = chain_model()
    component = model.component("c2")
    point = component_point(component, 3e-3, phase="backward", device_type=machine().devices[0].type.name, spread=0.02)
    profile = machine().profile
    known = profile.model_copy(update={"compute": profile.compute.model_copy(update={"components": (point,)})})
    costs = Costs(model=model, cluster=replace(machine(), profile=known))
    whole = costs.estimate(Compute(component="c2", phase=Phase.BACKWARD, samples=8), 0)
    halves = [costs.estimate(Compute(component="c2", phase=phase, samples=8), 0) for phase in HALVES]
    assert whole.source == "measured"
    assert sum(half.median_s for half in halves) == pytest.approx(whole.median_s, rel=1e-12)
    for half in halves:
        assert (half.source, half.extrapolated) == ("measured", True)
        assert 0 < half.median_s < whole.median_s
        assert "% of the backward" in half.detail
        assert ("backward_halves", 0.2) in half.parameters


def test_orders_hold_what_their_microbatches_in_flight_ask_for() -> None:
    """Four ranks, sixteen microbatches: gpipe holds all, 1f1b S - s, zero-bubble S everywhere, interleaved its warm-up.

    Under zero-bubble s halves for weights wait on rank s, each with gradients that are here as large as what is kept.
    """
    model = chain_model(tuple(2e9 for _ in range(15)), elements=1000)
    problem = PlanningProblem(model=model, cluster=machine(), global_batch=64)
    held: dict[str, list[int]] = {}
    for order, chunks in (("gpipe", 1), ("1f1b", 1), ("zero-bubble", 1), ("interleaved", 2), ("zero-bubble-v", 2)):
        plan = balanced_plan(problem, "mp", Mesh(pp=4), microbatches=16, pipeline_order=order, chunks=chunks)
        evaluation = evaluate(problem, plan, samples=2)
        sizes = [dict(entry.lines)["activations"] for entry in evaluation.memory]
        per_microbatch = [
            sum(4 * model.component(name).saved_activation_bytes for name in problem.layout(plan).rank_components(rank))
            for rank in range(4)
        ]
        held[order] = [round(chunks * size / one) for size, one in zip(sizes, per_microbatch, strict=True)]
    assert held["gpipe"] == [16] * 4
    assert held["1f1b"] == [4, 3, 2, 1]
    assert held["zero-bubble"] == [4 + rank for rank in range(4)]
    assert all(7 <= size <= 8 for size in held["zero-bubble-v"]), "2 S chunks, and so S microbatches"
    assert held["interleaved"][0] > held["interleaved"][-1] >= 5
    assert held["interleaved"][0] == pytest.approx(4 + 2 * 3 + 1, abs=1)
