"""Every synchronous plan equals single-process training (DESIGN §4): float64, 100 steps, 1e-10; weights, buffers, optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from parsim.execute.stage import seeded_module
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from tests.execute.equality import Case, compare_case, even_plan, launched, run_cases, trained_names

STEPS = 100
TOLERANCE = 1e-10

MLP = ModelSpec(name="mlp", args=(("width", 24),))
VIT = ModelSpec(name="vit_small", args=(("heads", 2), ("hidden", 16), ("layers", 2)))
RESNET = ModelSpec(name="resnet_small", args=(("width", 4),))
GPT = ModelSpec(name="gpt_small", args=(("heads", 2), ("hidden", 16), ("layers", 3), ("seq", 16), ("vocab", 32)))
BERT = ModelSpec(name="bert_small", args=(("heads", 2), ("hidden", 16), ("layers", 2), ("seq", 16), ("vocab", 32)))
VGG = ModelSpec(name="vgg_small")
TOKENS = {"gpt_small", "bert_small"}


def case(spec: ModelSpec, mesh: Mesh, *, batch: int = 8, **options: object) -> Case:
    strategy = "single" if mesh.size == 1 else "dp" if mesh.pp == 1 else "mp" if mesh.dp == 1 else "hp"
    of_plan = ("microbatches", "order", "chunks", "bucket_bytes", "zero_stage", "recompute")
    plan_options = {key: options.pop(key) for key in of_plan if key in options}
    if spec == RESNET:
        # Normalising over two samples amplifies rounding a million times in 100 steps at 0.02: the case would test that.
        batch, options = 4 * batch, {"learning_rate": 2e-3, **options}
    plan = even_plan(spec, mesh, strategy=strategy, batch=batch, **plan_options)  # type: ignore[arg-type]
    return Case(spec=spec, plan=plan, dataset="synthetic" if spec.name in TOKENS else "digits", **options)  # type: ignore[arg-type]


QUICK = [
    case(MLP, Mesh(), microbatches=2),
    case(MLP, Mesh(dp=2), optimizer="adamw", learning_rate=1e-3),
    case(VIT, Mesh(dp=2), optimizer="adam", learning_rate=1e-3),
    case(VIT, Mesh(pp=2), microbatches=4),
    case(GPT, Mesh(pp=2), microbatches=2, order="gpipe"),
    case(RESNET, Mesh(dp=2), batch=4),
    case(GPT, Mesh(pp=2), microbatches=4, order="interleaved", chunks=2),
    case(GPT, Mesh(pp=2), microbatches=4, order="zero-bubble"),
    case(MLP, Mesh(pp=2), microbatches=4, order="zero-bubble", chunks=2, optimizer="adamw", learning_rate=1e-3),
    case(GPT, Mesh(pp=2), microbatches=4, order="zero-bubble-v", chunks=2, optimizer="adamw", learning_rate=1e-3),
    case(GPT, Mesh(pp=2), microbatches=4, order="dualpipe-v", chunks=2, optimizer="adamw", learning_rate=1e-3),
    case(VIT, Mesh(pp=2), microbatches=2, order="interleaved", chunks=2, optimizer="adam", learning_rate=1e-3),
]

TWO_RANKS = [
    item
    for spec in (MLP, VIT, RESNET, GPT, BERT, VGG)
    for item in (
        case(spec, Mesh(dp=2), microbatches=2),
        case(spec, Mesh(pp=2), microbatches=4, order="gpipe"),
        case(spec, Mesh(pp=2), microbatches=4, order="1f1b", optimizer="adam", learning_rate=1e-3),
    )
]

FOUR_RANKS = [
    item
    for spec in (MLP, VIT, RESNET, GPT, BERT, VGG)
    for item in (
        case(spec, Mesh(dp=4)),
        case(spec, Mesh(pp=4), microbatches=4, order="1f1b"),
        case(spec, Mesh(pp=2, dp=2), microbatches=2, order="gpipe"),
        case(spec, Mesh(pp=2, dp=2), microbatches=4, order="interleaved", chunks=2),
        case(spec, Mesh(pp=4), microbatches=8, order="zero-bubble"),
        case(spec, Mesh(pp=2, dp=2), microbatches=4, order="zero-bubble-v", chunks=2),
        case(spec, Mesh(pp=2, dp=2), microbatches=4, order="1f1b", optimizer="adamw", learning_rate=1e-3),
    )
]


def assert_equal_to_one_process(cases: list[Case], folder: Path, *, steps: int = STEPS) -> None:
    runs = run_cases(cases, folder, steps=steps)
    for item, run in zip(cases, runs, strict=True):
        difference = compare_case(item, run, folder, steps=steps)
        assert difference.worst <= TOLERANCE, f"{item}: {difference}"


@pytest.mark.xdist_group("launch")
@pytest.mark.parametrize("steps", [30, pytest.param(100, marks=pytest.mark.slow)])
def test_plans_on_two_processes_equal_one_process(tmp_path: Path, steps: int) -> None:
    assert_equal_to_one_process(QUICK, tmp_path, steps=steps)


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_every_model_and_plan_on_two_processes(tmp_path: Path) -> None:
    assert_equal_to_one_process(TWO_RANKS, tmp_path)


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_every_model_and_plan_on_four_processes(tmp_path: Path) -> None:
    assert_equal_to_one_process(FOUR_RANKS, tmp_path)


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_float32_stays_within_1e_5_for_mlp_vit_and_gpt(tmp_path: Path) -> None:
    """ReLU and BatchNorm networks amplify summation order; their float32 drift is reported, not bounded (DESIGN §4)."""
    cases = [
        case(spec, mesh, microbatches=2, dtype="float32", learning_rate=5e-3, optimizer="sgd")
        for spec in (MLP, VIT, GPT)
        for mesh in (Mesh(dp=2), Mesh(pp=2))
    ]
    runs = run_cases(cases, tmp_path, steps=STEPS)
    for item, run in zip(cases, runs, strict=True):
        difference = compare_case(item, run, tmp_path, steps=STEPS)
        assert difference.parameters <= 1e-5, f"{item}: {difference}"


@pytest.mark.xdist_group("launch")
def test_the_comparison_can_fail(tmp_path: Path) -> None:
    """Training moves the weights by far more than the tolerance, so equality is not that of two untouched copies.

    These ranks are launched as a user's are; those of the other cases are forked.
    """
    item = case(MLP, Mesh(dp=2), microbatches=2)
    (run,) = run_cases([item], tmp_path, steps=5, start=launched)
    assert compare_case(item, run, tmp_path, steps=5).worst <= TOLERANCE
    assert compare_case(item, run, tmp_path, steps=5).losses <= TOLERANCE
    from parsim.execute.checkpoint.checkpoint import latest_checkpoint, load_state

    found = latest_checkpoint(tmp_path / run.name / "checkpoints")
    assert found is not None
    start = dict(seeded_module(MLP, run.seed, torch.float64, torch.device("cpu")).named_parameters())
    after = load_state(found).weights
    moved = [float((after[name] - start[name].detach()).abs().max()) for name in trained_names_of(MLP)]
    assert min(moved) > 1e4 * TOLERANCE


def trained_names_of(spec: ModelSpec) -> list[str]:
    from parsim.model.load import load_model

    return trained_names(load_model(spec))
