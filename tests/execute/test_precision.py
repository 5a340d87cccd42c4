"""The parts of training in half precision: loss scales, masters, switches. `test_equality` trains in every precision."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from parsim.errors import CostError, ExecutionError
from parsim.execute.job import PLAIN, TrainingRecipe
from parsim.execute.numerics import LossScale, check_switches, numerics_of, overflow_flag, set_switches, switches
from parsim.execute.optimizer import MasterWeights
from parsim.execute.stage import StageReplica
from parsim.model.formats import FORMATS, check_executable, number_format
from parsim.model.trace.memory import LiveBytes
from parsim.plans.mesh import Mesh
from parsim.program.placed import PlanIndex
from tests.execute.small_plans import MLP, run_spec
from tests.execute.test_equality import TWO_OPTIMIZERS, inexact

CPU = torch.device("cpu")


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 5), st.sampled_from([2.0**16, 2.0**127, 1.0]))
def test_the_scale_follows_torch_s_own_rule(overflows: list[bool], growth_steps: int, first: float) -> None:
    scale, ours = torch.tensor([first]), LossScale(scale=first, growth_steps=growth_steps)
    tracker = torch.zeros(1, dtype=torch.int32)
    for overflowed in overflows:
        torch._amp_update_scale_(scale, tracker, torch.tensor([float(overflowed)]), 2.0, 0.5, growth_steps)
        ours = ours.after(overflowed)
        assert ours.scale == scale.item()
        assert ours.good_steps == tracker.item()
    assert LossScale(growth_steps=growth_steps).from_tensor(ours.to_tensor()) == ours


def test_an_overflow_anywhere_is_seen() -> None:
    fine, small = torch.ones(5), torch.ones(3)
    assert overflow_flag([fine, small], CPU).item() == 0
    for bad in (float("inf"), -float("inf"), float("nan")):
        small[1] = bad
        assert overflow_flag([fine, small, torch.ones(0)], CPU).item() > 0


def test_looking_for_overflows_takes_no_memory() -> None:
    """`isfinite` of all gradients took as much again as they do: 13% of a step that was predicted without."""
    gradient = torch.ones(100_000)
    with LiveBytes() as live:
        overflow_flag([gradient], CPU)
    assert live.peak_bytes < 100


def test_masters_add_up_what_bf16_would_round_away() -> None:
    """1000 updates of 1e-4 on a weight of 1: its last digit in bf16 is 2^-7."""
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    masters = MasterWeights([weight])
    optimizer = torch.optim.SGD(masters.copies, lr=1e-4)
    for _ in range(1000):
        weight.grad = torch.ones_like(weight)
        masters.step(optimizer)
    assert torch.allclose(masters.of(weight), torch.full((4,), 0.9), atol=1e-4)
    assert torch.equal(weight, masters.of(weight).to(torch.bfloat16))
    alone = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    plain = torch.optim.SGD([alone], lr=1e-4)
    for _ in range(1000):
        alone.grad = torch.ones_like(alone)
        plain.step()
    assert torch.equal(alone, torch.ones(4, dtype=torch.bfloat16)), "why masters are kept"


@pytest.mark.parametrize("tf32", [True, False])
def test_switches_are_set_and_read_back(tf32: bool) -> None:
    before = switches()
    try:
        set_switches(tf32=tf32)
        found = switches()
        assert found["matmul_allow_tf32"] is found["cudnn_allow_tf32"] is tf32
        assert found["float32_matmul_precision"] == ("high" if tf32 else "highest")
        assert found["cudnn_benchmark"] is found["cudnn_deterministic"] is False
    finally:
        set_switches(tf32=before["matmul_allow_tf32"])


NEWER_SETTINGS = [
    "torch.backends.fp32_precision",
    "torch.backends.cuda.matmul.fp32_precision",
    "torch.backends.cudnn.fp32_precision",
    "torch.backends.cudnn.conv.fp32_precision",
    "torch.backends.cudnn.rnn.fp32_precision",
]


@pytest.mark.parametrize("name", NEWER_SETTINGS)
@pytest.mark.parametrize("tf32", [True, False])
def test_switches_hold_where_somebody_used_the_newer_settings(name: str, tf32: bool) -> None:
    """By the older settings alone, IEEE convolutions stayed in TF32, and reading back failed."""
    places = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)
    try:
        for value in ("tf32", "ieee"):
            exec(f"{name} = {value!r}", {"torch": torch})
            assert isinstance(switches()["matmul_allow_tf32"], bool)
            set_switches(tf32=tf32)
            assert [place.fp32_precision for place in places] == ["tf32" if tf32 else "ieee"] * 3
            assert switches()["matmul_allow_tf32"] is switches()["cudnn_allow_tf32"] is tf32
            assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is tf32, "compilers read these"
            assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
    finally:
        torch.backends.fp32_precision = "none"
        set_switches(tf32=False)


@pytest.mark.parametrize(("tf32", "forced"), [(True, "0"), (False, "1")])
def test_an_environment_that_overrides_tf32_is_refused(monkeypatch: pytest.MonkeyPatch, tf32: bool, forced: str) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", forced)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ExecutionError, match=f"NVIDIA_TF32_OVERRIDE={forced} .* unset NVIDIA_TF32_OVERRIDE"):
        set_switches(tf32=tf32)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1" if tf32 else "0")
    set_switches(tf32=tf32)


def test_a_model_that_sets_switches_while_it_runs_is_named() -> None:
    set_switches(tf32=False)
    asked = switches()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_switches(asked)
    try:
        torch.backends.cudnn.benchmark = True
        with pytest.warns(UserWarning, match="cudnn_benchmark False to True"):
            check_switches(asked)
    finally:
        set_switches(tf32=False)


def test_what_cannot_run_is_refused_with_the_way_out() -> None:
    for precision in ("fp32", "amp_bf16", "amp_fp16", "bf16"):
        check_executable(precision, "float32", "cpu")
    check_executable("tf32", "float32", "cuda")
    check_executable("fp32", "float64", "cpu")
    for precision, dtype, kind, message in (
        ("fp8", "float32", "cuda", "'fp8' can be priced, not run"),
        ("fp16", "float32", "cuda", "'fp16' can be priced, not run"),
        ("nvfp4", "float32", "cuda", "'nvfp4' can be priced, not run"),
        ("tf32", "float32", "cpu", "'tf32' needs a device of kind cuda, and the ranks compute on cpu"),
        ("amp_bf16", "float64", "cpu", "contradict each other"),
    ):
        with pytest.raises(ExecutionError, match=message):
            check_executable(precision, dtype, kind)
    with pytest.raises(CostError, match="unknown precision 'fp15'"):
        number_format("fp15")
    assert set(FORMATS) == {"fp32", "fp64", "tf32", "amp_fp16", "amp_bf16", "bf16", "fp16", "fp8", "nvfp4"}


def stage(precision: str, recipe: TrainingRecipe = PLAIN) -> StageReplica:
    """The MLP on one process."""
    of = replace(inexact(MLP, Mesh(), "amp_bf16"), recipe=recipe)
    run = run_spec(of, optimizer="adam", learning_rate=1e-3, dataset="digits", precision=precision)
    numerics = numerics_of(run, CPU)
    return StageReplica(
        of.spec,
        PlanIndex(of.plan, of.model),
        0,
        optimizer="adam",
        learning_rate=1e-3,
        dtype=numerics.weights,
        seed=3,
        device=CPU,
        numerics=numerics,
        recipe=recipe,
    )


@pytest.mark.parametrize("overflowing", ["", "biases"])
def test_an_overflow_in_one_group_skips_the_step_of_all(overflowing: str) -> None:
    """torch 2.13: GradScaler skips only the optimizer whose gradients overflowed. Here all groups skip, whichever comes
    first."""
    scaled = stage("amp_fp16", TWO_OPTIMIZERS)
    for held in (False, True):
        before = {name: weight.detach().clone() for name, weight in scaled.parameters.items()}
        for name, parameter in scaled.parameters.items():
            assert parameter.grad is not None
            parameter.grad.fill_(float("inf") if not held and name.endswith("bias") == bool(overflowing) else 1.0)
        for group in scaled.updates.optimizers:
            scaled.optimizer_step(group)
        moved = {name for name, weight in scaled.parameters.items() if not torch.equal(weight, before[name])}
        assert moved == (set(scaled.parameters) if held else set())
        assert not any(flat.any() for flat in scaled.buckets.values())


def test_state_goes_from_any_precision_to_any_other() -> None:
    """Masters become weights where there are none, and weights masters; the loss scale stays."""
    full = stage("fp32")
    for flat in full.buckets.values():
        flat.fill_(0.01)
    full.optimizer_step()
    half = stage("bf16")
    half.load(full.state())
    back = stage("fp32")
    back.load(half.state())
    for name, weight in full.parameters.items():
        assert torch.equal(back.parameters[name], weight)
        assert half.parameters[name].dtype == torch.bfloat16
    scaled, again = stage("amp_fp16"), stage("amp_fp16")
    scaled.loss_scale = LossScale(scale=4.0, good_steps=7)
    again.load(scaled.state())
    assert again.loss_scale == scaled.loss_scale
    again.load(full.state())  # nothing said of it: it stays
    assert again.loss_scale == scaled.loss_scale
