"""The parts of training in half precision: loss scales, masters, switches. `test_equality` trains in every precision."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from experiments.memory.ranks import autocast_peak_bytes
from parsim.errors import CostError, ExecutionError
from parsim.execute.job import PLAIN, TrainingRecipe
from parsim.execute.numerics import LossScale, check_switches, numerics_of, overflow_flag, set_switches, switches
from parsim.execute.optimizer import MasterWeights
from parsim.execute.stage import StageReplica
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.devices import NO_ALLOCATOR
from parsim.model.formats import FORMATS, Numerics, check_executable, number_format
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.model.trace.memory import LiveBytes
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.predict.problem import PlanningProblem
from parsim.program.placed import PlanIndex
from tests.execute.small_plans import BERT, GPT, MLP, VGG, VIT, run_spec
from tests.execute.test_equality import TWO_OPTIMIZERS, inexact

pytest.importorskip("torch", reason="needs the torch extra")

import torch
from torch import Tensor

from experiments.common.shards import bytes_of, narrowed, value_piece, values_of
from parsim.model import record
from parsim.model.build import build_module, example_batch, loss_of
from parsim.model.component import Component, narrow, ways_of
from parsim.model.formats import component_in
from parsim.model.load import trace_spec
from parsim.model.shard.apply import shard_runnable
from parsim.model.trace.traced import model_of

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


# What a real step under autocast keeps, byte by byte, against what the Model alone predicts for it.

WIDE = ModelSpec(name="mlp", args=(("width", 256),))


def one_cpu() -> Cluster:
    """One device without context or library workspace: what it holds is tensors."""
    cluster = cluster_from_profile(load_profile("dgx1-v100-32gb"), 1)
    device = cluster.devices[0]
    bare = replace(device.type, kind="cpu", context_bytes=0, allocator=NO_ALLOCATOR)
    return replace(cluster, devices=(replace(device, type=bare),))


def predicted_bytes(spec: ModelSpec, samples: int, precision: str) -> int:
    model = load_model(spec, granularity="layer")
    asked = PlanningProblem(
        model=model, cluster=one_cpu(), global_batch=samples, numerics=Numerics(precision=precision, optimizer="sgd")
    )
    names = tuple(component.name for component in model.components)
    plan = Plan(strategy="single", mesh=Mesh(), global_batch=samples, stages=(Stage(ranks=(0,), components=names),))
    return asked.memory(plan)[0].total_bytes


@pytest.mark.parametrize("spec", [WIDE, VIT, GPT, BERT, VGG], ids=lambda spec: spec.name)
def test_the_peak_of_a_step_under_autocast_is_predicted(spec: ModelSpec) -> None:
    for samples in (8, 32):
        half, full = autocast_peak_bytes(spec, samples), autocast_peak_bytes(spec, samples, autocast=False)
        assert half != full, "autocast was on"
        assert predicted_bytes(spec, samples, "amp_bf16") == pytest.approx(half, rel=0.01)
        assert predicted_bytes(spec, samples, "fp32") == pytest.approx(full, rel=0.01)


# What real components and shards keep under autocast, byte by byte, against what their Model says of them.

SAMPLES = 5
HALF = torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "vit_small", "gpt_small"])
def test_shards_keep_what_the_model_says(name: str) -> None:
    """Saved bytes with the casts of weights, to the byte, of the first shard under every rule.

    A lookup in a piece of a table keeps which tokens it has as well. The whole lookup does not, so no Model lists that.
    """
    spec = ModelSpec(name=name)
    model = trace_spec(spec, "sublayer")
    torch.manual_seed(0)
    inputs, target = example_batch(spec, SAMPLES)
    with torch.autocast("cpu", dtype=HALF):
        runnables = record(build_module(spec), inputs, granularity="sublayer", loss=loss_of(spec))
        values = values_of(runnables, {"input:0": next(iter(inputs.values())), "target": target})
    seen = set()
    for runnable, component in zip(runnables, model.components, strict=True):
        first = [model.value[value].savers[:1] == (component.name,) for value in component.inputs]
        for sharding in component.shardings:
            ways = ways_of(sharding)[0]
            if (component.fingerprint, sharding.rule) in seen:
                continue
            seen.add((component.fingerprint, sharding.rule))
            local = shard_runnable(narrowed(runnable, sharding, 0, ways), sharding, 0, ways)
            pieces = zip(component.inputs, sharding.inputs, strict=True)
            given = [value_piece(values[name], content, 0, ways).clone() for name, content in pieces]
            part = narrow(component_in(component, "amp_bf16"), sharding.rule, ways)
            looks_up = not given[0].is_floating_point() and sharding.rule == "vocabulary"
            kept = bytes_of(local, given, first, autocast=True)[1]
            assert kept_by(part) == kept or (looks_up and kept_by(part) < kept), (component.name, sharding.rule)
    assert seen


def test_a_weight_that_every_step_reads_is_cast_once() -> None:
    """The fullest moments of a GRU, forward and backward, to the byte."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core, self.head = nn.GRU(24, 16, batch_first=True, bidirectional=True), nn.Linear(32, 8)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.head(self.core(x)[0].mean(1))
            return made

    module, x = Gated(), torch.randn(SAMPLES, 7, 24)
    core = component_in(model_of(module, (x,), {}, granularity="block").component("core"), "amp_bf16")
    with torch.autocast("cpu", dtype=HALF):
        runnable = next(entry for entry in record(module, x) if entry.name == "core")
    forward, kept, backward = bytes_of(runnable, [x], [False], autocast=True)
    assert kept == kept_by(core)
    assert forward == max(rate * SAMPLES + fixed for rate, fixed in core.forward_peaks)
    assert backward == max(rate * SAMPLES + fixed for rate, fixed in core.backward_peaks)


def kept_by(component: Component) -> int:
    return component.saved_activation_bytes * SAMPLES + component.saved_fixed_bytes + component.cast_bytes
