"""Frozen parameters: no gradient, no optimizer state, no communication, and no flop of their gradients."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra")

from experiments.common.equality import Case, even_plan  # noqa: E402
from parsim.costs.compute.launches import backward_launches  # noqa: E402
from parsim.hardware.cluster import cluster_from_profile  # noqa: E402
from parsim.hardware.compose import load_profile  # noqa: E402
from parsim.model.formats import Numerics  # noqa: E402
from parsim.model.load import load_model  # noqa: E402
from parsim.model.model import Model  # noqa: E402
from parsim.model.spec import ModelSpec  # noqa: E402
from parsim.plans.mesh import Mesh  # noqa: E402
from parsim.predict.memory import plan_memory  # noqa: E402
from parsim.program.lower import lower  # noqa: E402
from parsim.program.placed import PlanIndex  # noqa: E402
from parsim.work import Collective  # noqa: E402
from tests.execute import frozen_modules  # noqa: E402
from tests.execute.bitwise import assert_equal_to_module, bytes_kept  # noqa: E402
from tests.execute.test_equality import assert_equal_to_one_process  # noqa: E402
from tests.traced import trace  # noqa: E402

KINDS = ("adapters", "parametrized_adapters", "frozen_start", "frozen_middle", "biases_only")


def spec(kind: str) -> ModelSpec:
    return ModelSpec(name=f"tests.execute.frozen_modules:{kind}", input_shape=(1, 8, 8))


def backward_flop(model: Model, samples: int) -> float:
    """Of all products, by the launches that the price is made of."""
    total = 0.0
    for component in model.components:
        for operator in component.operators:
            if operator.kind == "matmul":
                for launch in sum(backward_launches(operator, samples), ()):
                    if launch.kind == "matmul":
                        total += launch.count * 2 * math.prod(size for _, size in launch.sizes)
    return total


def counted_backward_flop(kind: str, samples: int) -> float:
    """By torch's counter around a real backward."""
    from torch.utils.flop_counter import FlopCounterMode

    torch.manual_seed(0)
    module = getattr(frozen_modules, kind)()
    loss = module(torch.randn(samples, 8, 8)).sum()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    return float(counter.get_total_flops())


@pytest.mark.parametrize("kind", KINDS)
def test_bitwise(kind: str) -> None:
    torch.manual_seed(0)
    for batch in (2, 5):
        assert_equal_to_module(getattr(frozen_modules, kind)(), (torch.randn(batch, 8, 8),), "layer")


@pytest.mark.parametrize("kind", KINDS)
def test_backward_flop_are_those_of_torch(kind: str) -> None:
    """A frozen weight has no product for its gradient, and what nothing trains before has no backward."""
    model = trace(getattr(frozen_modules, kind)(), torch.randn(2, 8, 8), loss="cross_entropy").model
    assert backward_flop(model, 32) == counted_backward_flop(kind, 32)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_bytes_are_those_of_torch(kind: str) -> None:
    """torch 2.13: autograd keeps fewer values where parameters are frozen: its hooks in a real forward, weights apart."""
    torch.manual_seed(0)
    module = getattr(frozen_modules, kind)()
    kept = bytes_kept(lambda: module(torch.randn(6, 8, 8)), module.parameters())
    model = trace(module, torch.randn(2, 8, 8)).model
    fixed = sum(component.saved_fixed_bytes for component in model.components)
    assert 6 * model.saved_activation_bytes + fixed == kept


def test_a_model_keeps_what_is_frozen_and_one_without_is_written_as_before() -> None:
    frozen = load_model(spec("adapters"))
    again = Model.from_json(frozen.to_json())
    assert again == frozen
    ends = {"1.weight", "1.bias", "9.weight", "9.bias"}
    assert {p.name for p in again.trainable_parameters} == {p.name for p in again.parameters if ".base." not in p.name} - ends
    plain = json.loads(load_model(ModelSpec(name="mlp")).to_json())
    assert all("trainable" not in entry for component in plain["components"] for entry in component.get("parameters", ()))
    assert all("gradients" not in entry for component in plain["components"] for entry in component.get("operators", ()))


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_memory_and_communication_count_what_is_trained(zero_stage: int) -> None:
    model = load_model(spec("adapters"))
    trained = sum(parameter.size_bytes for parameter in model.trainable_parameters)
    frozen = model.parameter_bytes - trained
    plan = even_plan(spec("adapters"), Mesh(dp=2), strategy="dp", batch=8, zero_stage=zero_stage)
    layout = PlanIndex(plan, model)
    assert sum(bucket.size_bytes for bucket in layout.buckets) == trained
    assert sum(bucket.size_bytes for bucket in layout.frozen_buckets) == frozen
    cluster = cluster_from_profile(load_profile("dgx1-v100-32gb"), devices=[0, 1])
    lines = dict(plan_memory(layout, cluster, Numerics(optimizer="adam"))[0].lines)
    assert lines["parameters"] == (frozen + trained if zero_stage < 3 else (frozen + trained) // 2)
    works = [task.work for task in lower(plan, model).tasks]
    gathered = sum(work.size_bytes for work in works if isinstance(work, Collective) and work.operation == "all_gather")
    assert gathered >= frozen if zero_stage == 3 else gathered == (trained if zero_stage else 0)
    assert lines["gradients"] == (trained if zero_stage < 2 else trained // 2)
    assert lines["optimizer_state"] == 2 * (trained if zero_stage < 1 else trained // 2)


def test_a_frozen_layer_has_another_fingerprint_and_a_trained_one_that_of_before() -> None:
    (layer,) = trace(torch.nn.Linear(4, 4), torch.randn(2, 4)).model.components
    assert layer.fingerprint == "5ffaf91bbe7db5cf"
    frozen = replace(layer, parameters=tuple(replace(parameter, trainable=False) for parameter in layer.parameters))
    assert frozen.fingerprint != layer.fingerprint


def quick_cases() -> list[Case]:
    return [
        Case(
            spec=spec(kind),
            plan=even_plan(spec(kind), mesh, strategy="hp", batch=8, microbatches=microbatches, zero_stage=zero, order=order),
            optimizer="adamw",
            learning_rate=1e-2,
        )
        for kind, mesh, microbatches, zero, order in (
            ("adapters", Mesh(dp=2), 1, 0, "1f1b"),
            ("adapters", Mesh(dp=2), 2, 3, "1f1b"),
            ("frozen_start", Mesh(pp=2), 2, 0, "1f1b"),
            ("frozen_start", Mesh(dp=2), 2, 3, "1f1b"),
            ("frozen_middle", Mesh(pp=2), 4, 0, "zero-bubble"),
            ("biases_only", Mesh(dp=2), 2, 2, "1f1b"),
            ("parametrized_adapters", Mesh(dp=2), 1, 1, "1f1b"),
        )
    ]


@pytest.mark.slow
def test_two_ranks_train_what_one_process_trains(tmp_path: Path) -> None:
    assert_equal_to_one_process(quick_cases(), tmp_path, steps=10)
