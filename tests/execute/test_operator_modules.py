"""Whole modules with kernels beyond torch's counter: flop against the formula, and forward and backward above the roofline."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the torch extra")

import torch

from parsim.costs.compute.compute import ComputeCosts
from parsim.costs.compute.formula import WINOGRAD_REDUCTION
from parsim.errors import TraceError
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.model import Model
from parsim.model.operator_table import TABLE, UNLISTED, OperatorRow
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.predict.evaluate import evaluate
from parsim.predict.problem import PlanningProblem
from parsim.work import Compute, Phase
from tests.execute.operator_modules import (
    CASES,
    FEATURES,
    LENGTH,
    Bag,
    LowRank,
    Recurrent,
)
from tests.traced import trace

SAMPLES = 256


def traced(name: str) -> Model:
    factory, shape, _, _ = CASES[name]
    torch.manual_seed(0)
    return trace(factory(), torch.randn(2, *shape), granularity="block").model


def total_flop(model: Model) -> float:
    return sum(entry.forward_flop * entry.count for component in model.components for entry in component.operators)


def seconds(model: Model, phase: Phase, samples: int = SAMPLES) -> float:
    profile = load_profile("dgx1-v100-32gb")
    device = cluster_from_profile(profile).devices[0]
    costs = ComputeCosts(profile)
    return sum(
        costs.estimate(Compute(component=entry.name, phase=phase, samples=samples), entry, device).median_s
        for entry in model.components
    )


@pytest.mark.parametrize("name", CASES)
def test_flop_of_a_module_follow_the_formula(name: str) -> None:
    assert total_flop(traced(name)) == pytest.approx(CASES[name][2], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward_take_at_least_their_arithmetic(name: str) -> None:
    _, _, flop, backward = CASES[name]
    least_s = SAMPLES * flop / 15.7e12 / (WINOGRAD_REDUCTION if name == "unet" else 1)
    model = traced(name)
    assert seconds(model, Phase.FORWARD) >= least_s
    assert seconds(model, Phase.BACKWARD) >= backward * least_s


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_no_operator_of_these_modules_is_unlisted_or_of_negative_size(name: str) -> None:
    for component in traced(name).components:
        for operator in component.operators:
            assert not operator.function.startswith(UNLISTED)
            assert all(size > 0 for _, size in operator.shape), operator


def test_an_lstm_of_the_size_of_a_device_takes_its_arithmetic() -> None:
    """The case that used to cost 282 us where the peak alone needs 2.2 ms: its flop counted as 0."""
    module = torch.nn.Sequential(torch.nn.Linear(1024, 1024), Stack())
    model = trace(module, torch.randn(2, 64, 1024)).model
    flop = 64 * 2 * 4 * 1024 * 2048 + 64 * 2 * 1024 * 1024
    assert total_flop(model) == flop
    assert seconds(model, Phase.FORWARD, 32) >= 32 * flop / 15.7e12 > 2.2e-3


class Stack(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.LSTM(1024, 1024, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)[0]
        return out


def test_a_bag_reads_the_rows_it_sums_and_not_its_table() -> None:
    model = trace(Bag(), torch.randint(100_000, (2, 16))).model
    moved = sum(entry.activation_bytes + entry.parameter_bytes for entry in model.components[0].operators)
    assert 2 * 4 * 16 * FEATURES <= 2 * moved < 4 * 100_000 * FEATURES / 100


def test_work_on_parameters_alone_is_counted_once_whatever_the_samples() -> None:
    model = trace(LowRank(), torch.randn(2, LENGTH, FEATURES)).model
    (product,) = [entry for entry in model.components[0].operators if entry.batch == "none" and entry.kind == "matmul"]
    assert product.forward_flop == 2 * FEATURES * FEATURES * 8
    growth = seconds(model, Phase.FORWARD, 512) - seconds(model, Phase.FORWARD, 256)
    assert growth < 1e-3


def test_a_failing_line_is_named() -> None:
    class Broken(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.ones(3, 3)

    with pytest.raises(TraceError, match=r"test_operator_modules.py:\d+ `return x @ torch.ones\(3, 3\)`"):
        trace(Broken(), torch.randn(2, 5))


def test_a_sparse_tensor_is_refused_with_the_way_round() -> None:
    class Sparse(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("adjacency", torch.eye(4).to_sparse())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(self.adjacency, x.T).T

    with pytest.raises(TraceError, match=r"Sparse .*sparse_coo.*index_add"):
        trace(Sparse(), torch.randn(2, 4))


@torch.library.custom_op("parsim_tests::mix", mutates_args=())
def mix(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight


@mix.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _mix_backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight = context.saved_tensors
    return gradient @ weight.T, x.flatten(0, -2).T @ gradient.flatten(0, -2)


def _keep_inputs(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


mix.register_autograd(_mix_backward, setup_context=_keep_inputs)


class Mixer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(FEATURES, FEATURES))
        self.head = torch.nn.Linear(FEATURES, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.ops.parsim_tests.mix(x, self.weight).mean(1))
        return out


def mixer_warnings(model: Model) -> tuple[str, ...]:
    cluster = cluster_from_profile(load_profile("dgx1-v100-32gb"), devices=[0])
    problem = PlanningProblem(model=model, cluster=cluster, global_batch=8)
    stage = Stage(components=tuple(component.name for component in model.components), ranks=(0,))
    plan = Plan(strategy="single", mesh=Mesh(), stages=(stage,), global_batch=8)
    return evaluate(problem, plan, samples=0).result.warnings


def test_an_operator_without_a_formula_is_named_with_its_share_and_a_row_gives_it_one(monkeypatch: pytest.MonkeyPatch) -> None:
    example = torch.randn(2, LENGTH, FEATURES)
    before = trace(Mixer(), example, loss="cross_entropy").model
    (warning,) = [text for text in mixer_warnings(before) if "no formula" in text]
    assert "parsim_tests.mix (" in warning
    assert "operator_table.TABLE" in warning
    share = float(warning.removeprefix("at least ").split("%")[0])
    assert 0 < share < 100

    def flop(call: object) -> float:
        return 2.0 * call.tensor("x").numel() * FEATURES  # type: ignore[attr-defined]

    monkeypatch.setitem(TABLE, "parsim_tests.mix", OperatorRow(flop=flop))
    after = trace(Mixer(), example, loss="cross_entropy").model
    assert total_flop(after) - total_flop(before) == 2 * LENGTH * FEATURES**2
    assert not [text for text in mixer_warnings(after) if "no formula" in text]


def test_torchs_own_registration_of_a_formula_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import flop_counter

    monkeypatch.setitem(flop_counter.flop_registry, torch.ops.parsim_tests.mix, lambda x, weight, out_val: 1000 * x.shape[0])
    model = trace(Mixer(), torch.randn(2, LENGTH, FEATURES)).model
    assert total_flop(model) == 1000 + 2 * FEATURES * 10
    assert not any(entry.function.startswith(UNLISTED) for component in model.components for entry in component.operators)


def test_the_flop_of_a_gpu_kernel_of_all_layers_equal_those_layer_by_layer() -> None:
    """aten._cudnn_rnn holds what aten.mkldnn_rnn_layer holds layer by layer; the table sees only shapes."""
    from parsim.model.operator_table import TracedCall

    module = Recurrent(torch.nn.LSTM).stack
    given = torch.randn(3, LENGTH, FEATURES)
    call = TracedCall(
        name="aten._cudnn_rnn",
        arguments={"input": given, "weight": list(module.parameters()), "weight_stride0": 4, "batch_first": True},
        outputs=(torch.empty(3, LENGTH, 128),),
        size_bytes=lambda tensor: tensor.numel() * tensor.element_size(),
        is_state=lambda tensor: True,
    )
    pieces = TABLE["aten._cudnn_rnn"].pieces
    assert pieces is not None
    found = sum(piece.count * (piece.flop or 0) for piece in pieces(call))
    assert found == 3 * (CASES["lstm"][2] - 2 * 128 * 10)
    assert math.isclose(found / 3, total_flop(traced("lstm")) - 2 * 128 * 10)
