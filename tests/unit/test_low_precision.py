"""Training in 8 and 4 bits: which products run in them, and what they cost."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from torch import nn

from parsim.costs.compute.formula import component_kernels, kernel_roofline_s
from parsim.costs.compute.launches import ComputeRequest, Launch
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import profile_from_parts
from parsim.model.catalogue.names import named_model
from parsim.model.formats import Numerics, model_in
from parsim.model.model import Model
from parsim.predict.problem import PlanningProblem
from parsim.work import Phase
from tests.traced import trace
from tests.unit.test_parts import model_of, product

LOW = ("fp8", "nvfp4")


@lru_cache(maxsize=1)
def mixtral() -> Model:
    own = {"seq": 2048, "kernels": "unfused-attention", "fp8_casts": True}
    return named_model("mixtral-8x7b", own, granularity="block", weights="bfloat16")


def kernels(component: str, precision: str, phase: Phase) -> tuple[Launch, ...]:
    request = ComputeRequest(component=mixtral().component(component), phase=phase, samples=2)
    return component_kernels(request, precision, "cuda", fused_attention=True)


@pytest.mark.parametrize("name", ["b200", "gb200", "gb300", "b300"])
def test_four_bits_multiply_faster_than_eight(name: str) -> None:
    """Medians of published products above 1e12 FLOP: GB200 3,435 and 2,328 to 2,656 TFLOP/s, GB300 4,721 and 2,982."""
    eight, four = (
        model_of(name, precision).price(product(16384, 8192, 8192, precision=precision)).seconds for precision in LOW
    )
    assert 1.2 < eight / four < 2.2
    small = (product(128, 128, 128, precision=precision) for precision in LOW)
    eight, four = (model_of(name, precision).price(launch).seconds for precision, launch in zip(LOW, small, strict=True))
    assert four > 0.3 * eight, "no peak shortens a launch"


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
def test_the_head_costs_what_it_does_in_bf16(precision: str, phase: Phase) -> None:
    own, half = kernels("head", precision, phase), kernels("head", "bf16", phase)
    assert [model_of("b200", precision).price(entry).seconds for entry in own] == [
        model_of("b200", "bf16").price(entry).seconds for entry in half
    ]


@pytest.mark.parametrize("precision", LOW)
def test_products_without_a_weight_and_the_router_stay_in_bf16(precision: str) -> None:
    found = [entry for entry in kernels("h.0", precision, Phase.FORWARD) if entry.kind == "matmul"]
    assert [entry.low for entry in found] == [True, False, False, True, False, True, True], (
        "queries, keys and values; two of scores; what attention puts out; router; up and down of the experts"
    )
    kept = product(4096, 4096, 128, precision="bf16", low=False)
    own, half = model_of("b200", precision), model_of("b200", "bf16")
    assert own.price(kept) == half.price(kept._replace(low=True))
    assert own.price(kept._replace(low=True)).seconds != own.price(kept).seconds


@pytest.mark.parametrize("precision", LOW)
def test_nothing_is_priced_below_the_roofline_of_its_own_precision(precision: str) -> None:
    model = model_of("b200", precision)
    for component in ("head", "h.0"):
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            for entry in kernels(component, precision, phase):
                own = precision if entry.kind == "matmul" and entry.low else "bf16"
                assert model.price(entry).seconds >= entry.count * kernel_roofline_s(entry, model.device, own)


def test_without_low_precision_nothing_is_left_out_of_it() -> None:
    """All products of a bf16 training have one price, whatever training in 8 bits would do with them."""
    kept = product(4096, 32000, 4096, precision="bf16", low=False)
    assert model_of("h100-sxm", "bf16").price(kept) == model_of("h100-sxm", "bf16").price(kept._replace(low=True))


@lru_cache(maxsize=1)
def convolutional() -> Model:
    """Two layers, of which the second is the head, behind a convolution."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(16, 64, 3, padding=1), nn.Flatten(), nn.Linear(64 * 64, 2048), nn.GELU(), nn.Linear(2048, 1000)
    ).to(torch.bfloat16)
    return trace(module, (torch.zeros(2, 16, 8, 8, dtype=torch.bfloat16),), loss="cross_entropy").model


def products_of(model: Model, precision: str, kind: str) -> list[Launch]:
    """Launches of a kind in all forwards."""
    requests = [ComputeRequest(component=entry, phase=Phase.FORWARD, samples=64) for entry in model.components]
    return [entry for request in requests for entry in component_kernels(request, precision, "cuda") if entry.kind == kind]


@pytest.mark.parametrize("precision", LOW)
def test_a_traced_head_and_convolutions_cost_what_they_do_in_bf16(precision: str) -> None:
    cluster = cluster_from_profile(profile_from_parts("b200", 1))
    planned = PlanningProblem(
        model=convolutional(), cluster=cluster, global_batch=64, numerics=Numerics(precision=precision)
    ).model
    assert [entry.low for entry in products_of(planned, precision, "matmul")] == [True, False]
    low, half = model_of("b200", precision), model_of("b200", "bf16")
    own = [low.price(entry).seconds for entry in products_of(planned, precision, "convolution")]
    assert own == [half.price(entry).seconds for entry in products_of(convolutional(), "bf16", "convolution")]
    assert own


def test_the_head_is_left_as_traced_where_nothing_is_in_low_precision() -> None:
    assert model_in(convolutional(), "bf16") is convolutional()


@pytest.mark.parametrize("precision", LOW)
def test_a_model_keeps_the_head_that_it_was_given(precision: str) -> None:
    """A described transformer says itself which products stay in 16 bits; and a Model that was changed is not changed again."""
    assert model_in(mixtral(), precision) is mixtral()
    once = model_in(convolutional(), precision)
    assert once is not convolutional()
    assert model_in(once, precision) is once
