"""Costs and memory of backwards in halves: the halves add up, and what waits between them is held."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parsim.costs.compute.formula import component_kernels
from parsim.costs.compute.launches import ComputeRequest
from parsim.costs.costs import Costs
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.catalogue.zoo import load_preset
from parsim.plans.mesh import Mesh
from parsim.predict.evaluate import evaluate
from parsim.predict.problem import PlanningProblem
from parsim.search.stages import balanced_plan
from parsim.work import Compute, Phase
from tests.measured_points import component_point
from tests.models import chain_model

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
