"""Models of several inputs, with outputs in structures, with their own losses: trained for real they equal one process."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from parsim.errors import PlanError
from parsim.model.inputs import ModelInput, inputs_from
from parsim.model.interface import example_batch, interface_of
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.model.total_loss import total_loss
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.program.placed import PlanIndex
from tests.execute import described_modules as modules
from tests.execute.equality import Case, compare_case, even_plan, run_cases
from tests.plans import choices

HERE = "tests.execute.described_modules"
BATCH, STEPS = 8, 5
IMAGE_AND_STEP = inputs_from({"x": {"shape": [4, 6, 6]}, "t": {"shape": [], "dtype": "int32", "high": modules.STEPS}})
LABELLED = inputs_from(
    {
        "prior": {"shape": [modules.CLASSES], "constant": True},
        "x": {"shape": [6]},
        "labels": {"shape": [], "dtype": "int64", "high": modules.CLASSES},
    }
)
STATE = inputs_from({"state": {"mine": {"shape": [4]}, "theirs": {"shape": [2]}}})

DENOISER = ModelSpec(name=f"{HERE}:Denoiser", inputs=IMAGE_AND_STEP, loss="mse")
SEGMENTER = ModelSpec(name=f"{HERE}:Segmenter", input_shape=(3, 6, 6), loss="cross_entropy", classes_dim=0)
OWN = ModelSpec(name=f"{HERE}:OwnLoss", inputs=LABELLED)
OWN_PER_SAMPLE = ModelSpec(name=f"{HERE}:OwnLoss", args=(("per_sample", True), ("entry", True)), inputs=LABELLED)
POLICY = ModelSpec(name=f"{HERE}:TwoHeads", inputs=STATE, output="policy")
HUBER = ModelSpec(name=f"{HERE}:Denoiser", inputs=IMAGE_AND_STEP, loss=f"{HERE}:squares")
HUBER_PER_SAMPLE = ModelSpec(name=f"{HERE}:Denoiser", inputs=IMAGE_AND_STEP, loss=f"{HERE}:squares_per_sample")
BOTH_HEADS = ModelSpec(
    name=f"{HERE}:TwoHeads", inputs=STATE, loss=f"{HERE}:both_heads", target=ModelInput("target", (), "int64", modules.CLASSES)
)
BINARY = ModelSpec(name=f"{HERE}:TwoHeads", inputs=STATE, loss="bce", output="value")
ALL = (DENOISER, SEGMENTER, OWN, OWN_PER_SAMPLE, POLICY, HUBER, HUBER_PER_SAMPLE, BOTH_HEADS, BINARY)


def case(spec: ModelSpec, mesh: Mesh, microbatches: int = 1, strategy: str = "custom") -> Case:
    plan = even_plan(spec, mesh, strategy=strategy, batch=BATCH, microbatches=microbatches)
    return Case(spec=spec, plan=plan, dataset="synthetic")


FIRST = [
    case(DENOISER, Mesh(dp=2), 2),
    case(DENOISER, Mesh(pp=2), 2),
    case(OWN, Mesh(dp=2), 2),
    case(OWN, Mesh(pp=2), 2),
    case(SEGMENTER, Mesh(), 2),
    case(BOTH_HEADS, Mesh(dp=2)),
    case(OWN_PER_SAMPLE, Mesh(tp=2)),
]
EVERY = [case(spec, mesh, 2) for spec in ALL for mesh in (Mesh(dp=2), Mesh(pp=2), Mesh(tp=2))]


def placed(spec: ModelSpec, seed: int) -> Case:
    """Every component placed by itself on two tp ranks: shards where there are any, as often as everything else."""
    rng = random.Random(seed)
    model = load_model(spec)
    names = tuple(component.name for component in model.components)
    while True:
        placements = []
        for name in names:
            options = choices(model, name, 2)
            shards = [option for option in options if option.kind == "shard"]
            placements.append(rng.choice(shards if shards and rng.random() < 0.7 else options))
        stage = Stage(components=names, ranks=(0, 1), placements=tuple(placements))
        plan = Plan(strategy="custom", mesh=Mesh(tp=2), stages=(stage,), global_batch=BATCH, microbatches=2)
        try:
            PlanIndex(plan, model)
        except PlanError:  # parameters or a scalar held differently: draw again
            continue
        return Case(spec=spec, plan=plan, dataset="synthetic")


def assert_equal_to_one_process(cases: list[Case], folder: Path) -> None:
    runs = run_cases(cases, folder, steps=STEPS)
    for entry, run in zip(cases, runs, strict=True):
        difference = compare_case(entry, run, folder, steps=STEPS)
        assert difference.worst < 1e-10, f"{entry} {entry.spec.loss}: {difference}"


@pytest.mark.xdist_group("launch")
def test_described_models_on_two_processes_equal_one_process(tmp_path: Path) -> None:
    assert_equal_to_one_process(FIRST, tmp_path)


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_every_described_model_on_two_processes_equals_one_process(tmp_path: Path) -> None:
    assert_equal_to_one_process(EVERY, tmp_path)


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_described_models_placed_component_by_component_equal_one_process(tmp_path: Path) -> None:
    cases = [placed(spec, seed) for spec in ALL for seed in range(3)]
    kinds = {placement.kind for entry in cases for placement in entry.plan.stages[0].placements}
    assert kinds >= {"shard", "batch", "replicate", "place"}
    assert_equal_to_one_process(cases, tmp_path)


@pytest.mark.parametrize("spec", ALL, ids=[f"{spec.name.partition(':')[2]} {spec.loss}" for spec in ALL])
def test_losses_add_up_over_microbatches(spec: ModelSpec) -> None:
    """The sum over eight samples is that of two halves, whatever form the loss has; a scalar is the mean of its batch."""
    from parsim.model.build import build_module

    interface = interface_of(spec)
    module = build_module(spec).double()
    inputs, target = example_batch(spec, BATCH, dtype=torch.float64)
    constants = {entry.name for entry in interface.inputs if entry.constant}

    def total(first: int, last: int) -> float:
        given = {name: tensor if name in constants else tensor[first:last] for name, tensor in inputs.items()}
        args, kwargs = interface.arguments(given)
        wanted = None if target is None else target[first:last]
        return float(total_loss(interface.objective, module(*args, **kwargs), wanted, last - first).detach())

    assert total(0, BATCH) == pytest.approx(total(0, 3) + total(3, BATCH), rel=1e-12)
