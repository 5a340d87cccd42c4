"""Training in every precision a CPU can run equals one process that trains in the same precision; and differs from fp32."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from experiments.common.reference import largest_difference, train_reference
from parsim.errors import CostError, ExecutionError
from parsim.execute.checkpoint.checkpoint import latest_checkpoint, load_state
from parsim.execute.job import PLAIN, RunSpec, TrainingRecipe, UpdateGroup
from parsim.execute.numerics import LossScale, check_switches, numerics_of, overflow_flag, set_switches, switches
from parsim.execute.optimizer import MasterWeights
from parsim.execute.rank_run import run_dataset
from parsim.execute.stage import StageReplica
from parsim.model.formats import FORMATS, check_executable, number_format
from parsim.model.trace.memory import LiveBytes
from parsim.plans.mesh import Mesh
from parsim.program.placed import PlanIndex
from tests.execute.equality import Case, compare_case, run_cases
from tests.execute.test_equality import BERT, GPT, MLP, VGG, VIT, case

STEPS = 8
CPU = torch.device("cpu")


def inexact(spec: object, mesh: Mesh, precision: str, **options: object) -> Case:
    own = {key: options.pop(key) for key in ("loss_scale", "loss_scale_growth_steps", "master_weights") if key in options}
    made = case(spec, mesh, dtype="float32", **options)  # type: ignore[arg-type]
    return dataclasses.replace(made, precision=precision, **own)  # type: ignore[arg-type]


# The scale falls from 2^24 in steps that are skipped, and grows every third good one.
SCALING = {"loss_scale": 2.0**24, "loss_scale_growth_steps": 3}
ADAM = {"optimizer": "adam", "learning_rate": 1e-3}
BIASES = UpdateGroup(name="biases", parameters=("*.bias",), optimizer="sgd_momentum", learning_rate=0.02)
TWO_OPTIMIZERS = TrainingRecipe(groups=(BIASES,))
CASES = [
    inexact(MLP, Mesh(), "amp_bf16"),
    inexact(VIT, Mesh(dp=2), "amp_bf16", **ADAM),
    inexact(GPT, Mesh(pp=2), "amp_bf16", microbatches=4),
    inexact(BERT, Mesh(pp=2), "amp_bf16", microbatches=2, order="zero-bubble"),
    inexact(VGG, Mesh(dp=2), "amp_bf16", microbatches=2),
    inexact(VIT, Mesh(pp=2), "amp_bf16", microbatches=2, recompute="full"),
    inexact(VIT, Mesh(dp=2), "amp_fp16", **SCALING, **ADAM),
    inexact(GPT, Mesh(pp=2), "amp_fp16", microbatches=2, **SCALING),
    inexact(VIT, Mesh(dp=2), "amp_fp16", zero_stage=1, **SCALING, **ADAM),
    inexact(VIT, Mesh(dp=2), "amp_fp16", zero_stage=2, microbatches=2, **SCALING),
    inexact(GPT, Mesh(dp=2), "amp_fp16", zero_stage=3, **SCALING),
    inexact(MLP, Mesh(dp=2), "bf16", **ADAM),
    inexact(VIT, Mesh(dp=2), "bf16"),
    inexact(GPT, Mesh(pp=2), "bf16", microbatches=2, **ADAM),
    inexact(VIT, Mesh(pp=2), "bf16", master_weights=False, microbatches=2),
    inexact(MLP, Mesh(dp=2), "bf16", master_weights=False, **ADAM),
    inexact(VIT, Mesh(dp=2), "bf16", zero_stage=1, **ADAM),
    inexact(VIT, Mesh(dp=2), "bf16", zero_stage=3, **ADAM),
    dataclasses.replace(inexact(MLP, Mesh(dp=2), "bf16", **ADAM), recipe=TWO_OPTIMIZERS),
    dataclasses.replace(inexact(MLP, Mesh(dp=2), "bf16", zero_stage=3, **ADAM), recipe=TWO_OPTIMIZERS),
]
# Half precision rounds at 2^-8 (bf16) and 2^-11 (fp16); where kernels add up in another order, a value moves by its last digit.
# Plans that add up in the same order as one process are compared exactly.
EXACT = 1e-6
TOLERANCE = {"amp_bf16": 5e-3, "amp_fp16": 1e-3, "bf16": 0.05}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[RunSpec]]:
    path = tmp_path_factory.mktemp("precision")
    return path, run_cases(CASES, path, steps=STEPS)


def tolerance(of: Case) -> float:
    return EXACT if of.spec == MLP else TOLERANCE[of.precision]


@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(entry) for entry in CASES])
def test_every_precision_equals_one_process_in_it(number: int, runs: tuple[Path, list[RunSpec]]) -> None:
    path, specs = runs
    difference = compare_case(CASES[number], specs[number], path, steps=STEPS)
    print(CASES[number], difference)
    assert difference.worst < tolerance(CASES[number]), difference


@pytest.mark.parametrize("number", [0, 1, 6], ids=str)
def test_mixed_precision_is_not_fp32(number: int, runs: tuple[Path, list[RunSpec]]) -> None:
    """The plan lies far nearer to one process in its precision than that lies to fp32."""
    path, specs = runs
    run, of = specs[number], CASES[number]
    found = latest_checkpoint(path / run.name / "checkpoints")
    assert found is not None
    weights = dict(load_state(found).weights)
    trained = [
        train_reference(
            of.spec,
            of.plan,
            run_dataset(run, "train"),
            optimizer=of.optimizer,
            learning_rate=of.learning_rate,
            dtype=torch.float32,
            seed=run.seed,
            steps=STEPS,
            numerics=numerics,
        ).parameters
        for numerics in (numerics_of(run, CPU), None)
    ]
    own, full = (largest_difference(parameters, weights) for parameters in trained)
    assert full > 20 * own


def test_bf16_keeps_weights_in_bf16_and_masters_in_fp32(runs: tuple[Path, list[RunSpec]]) -> None:
    path, specs = runs
    for number, of in enumerate(CASES):
        if of.precision != "bf16":
            continue
        found = latest_checkpoint(path / specs[number].name / "checkpoints")
        assert found is not None
        state = load_state(found)
        assert {tensor.dtype for tensor in state.weights.values()} == {torch.bfloat16}
        for name, entry in state.optimizer.items():
            assert ("master" in entry) == of.master_weights
            if of.master_weights:
                assert entry["master"].dtype == torch.float32
                assert torch.equal(entry["master"].to(torch.bfloat16), state.weights[name])


def test_the_scale_fell_and_grew_again(runs: tuple[Path, list[RunSpec]]) -> None:
    path, specs = runs
    scales = set()
    for run, of in zip(specs, CASES, strict=True):
        if of.precision == "amp_fp16":
            found = latest_checkpoint(path / run.name / "checkpoints")
            assert found is not None
            scales.add(float(load_state(found).progress["loss_scale"][0]))
    assert scales
    assert max(scales) < SCALING["loss_scale"]


# --- the parts --------------------------------------------------------------------------------------------------------


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
    of = dataclasses.replace(CASES[0], recipe=recipe)
    run = RunSpec(
        name="x",
        model=of.spec,
        model_path="",
        plan=of.plan,
        optimizer="adam",
        learning_rate=1e-3,
        dataset="digits",
        precision=precision,
    )
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
    """Whichever group comes first. torch's GradScaler skips only the optimizer whose gradients overflowed."""
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
