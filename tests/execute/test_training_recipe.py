"""Schedules, weight decay with exclusions and torch's arguments: a plan trains as one process with torch's own classes does."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.optim import lr_scheduler

from parsim.data.samples import BatchOrder
from parsim.errors import ConfigError
from parsim.execute.job import Schedule, TrainingRecipe
from parsim.execute.learning_rate import LearningRate, check_schedule
from parsim.execute.optimizer import check_exempt, exempt_names
from parsim.execute.stage import seeded_module
from parsim.hardware.records import sorted_pairs
from parsim.plans.mesh import Mesh
from tests.execute.equality import Case
from tests.execute.test_equality import GPT, MLP, VIT, assert_equal_to_one_process, case

COSINE = TrainingRecipe(
    optimizer_args=(("betas", (0.8, 0.95)), ("eps", 1e-6)),
    weight_decay=0.3,
    no_weight_decay=("norm", "bias"),
    schedule=Schedule(name="CosineAnnealingLR", warmup=5),
)
ONE_CYCLE = TrainingRecipe(weight_decay=0.1, no_weight_decay=("*bias",), schedule=Schedule(name="OneCycleLR"))
STEPS = TrainingRecipe(
    optimizer_args=(("momentum", 0.8), ("nesterov", True)),
    schedule=Schedule(name="MultiStepLR", arguments=(("gamma", 0.3), ("milestones", (4, 9))), warmup=3),
)


def with_recipe(item: Case, recipe: TrainingRecipe) -> Case:
    return replace(item, recipe=recipe)


EPOCHS_OF_TEN = BatchOrder(n=40, global_batch=4)
ADAMW = {"optimizer": "adamw", "learning_rate": 2e-3}
CASES = [
    with_recipe(case(VIT, Mesh(dp=2), zero_stage=2, bucket_bytes=2**12, **ADAMW), COSINE),
    with_recipe(case(MLP, Mesh(dp=2), zero_stage=3, bucket_bytes=2**13, **ADAMW), ONE_CYCLE),
    with_recipe(case(GPT, Mesh(dp=2), zero_stage=1), STEPS),
    with_recipe(case(GPT, Mesh(pp=2), microbatches=2, **ADAMW), COSINE),
]


@pytest.mark.xdist_group("launch")
def test_plans_equal_torchs_own_schedulers_and_groups(tmp_path: Path) -> None:
    assert_equal_to_one_process(CASES, tmp_path, steps=12)


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_half_precision_and_masters_follow_the_schedule(tmp_path: Path) -> None:
    """bf16 with copies in fp32: the copies are what decays."""
    item = with_recipe(case(MLP, Mesh(dp=2), zero_stage=1, dtype="float32", precision="bf16", **ADAMW), COSINE)
    from tests.execute.equality import compare_case, run_cases

    (run,) = run_cases([item], tmp_path, steps=15)
    assert compare_case(item, run, tmp_path, steps=15).parameters <= 0.02


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("CosineAnnealingLR", {"T_max": 30}),
        ("OneCycleLR", {"max_lr": 0.5, "total_steps": 30}),
        ("CyclicLR", {"base_lr": 0.01, "max_lr": 0.2, "step_size_up": 4}),
        ("PolynomialLR", {"total_iters": 30, "power": 2.0}),
        ("CosineAnnealingWarmRestarts", {"T_0": 7}),
        ("MultiStepLR", {"milestones": [3, 11]}),
        ("StepLR", {"step_size": 4}),
        ("ExponentialLR", {"gamma": 0.9}),
        ("LinearLR", {"start_factor": 0.1, "total_iters": 9}),
        ("ConstantLR", {"factor": 0.5}),
    ],
)
def test_rates_and_momenta_are_torchs(name: str, arguments: dict[str, object]) -> None:
    """Asked in any order: what a resumed training replays is what one that was never stopped has."""
    schedule = Schedule(name=name, arguments=sorted_pairs(arguments))
    rate = LearningRate("sgd_momentum", 0.1, TrainingRecipe(schedule=schedule), steps=30, order=EPOCHS_OF_TEN)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    expected = getattr(lr_scheduler, name)(optimizer, **arguments)
    wanted = []
    for _ in range(30):
        wanted.append({key: optimizer.param_groups[0][key] for key in ("lr", "momentum")})
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if len(wanted) < 30:
                expected.step()
    assert [rate.of(step) for step in range(30)] == wanted
    assert rate.of(12) == wanted[12]
    assert rate.of(5) == wanted[5]


def test_warm_up_rises_in_equal_parts_and_counts_epochs() -> None:
    recipe = TrainingRecipe(
        schedule=Schedule(name="StepLR", arguments=(("gamma", 0.5), ("step_size", 2)), warmup=3, per="epoch")
    )
    rate = LearningRate("adam", 1.0, recipe, steps=80, order=EPOCHS_OF_TEN)
    assert [rate.of(10 * epoch)["lr"] for epoch in range(8)] == pytest.approx([0.25, 0.5, 0.75, 1, 1, 0.5, 0.5, 0.25])
    assert rate.of(19) == rate.of(10)


def test_reduce_on_plateau_keeps_its_state() -> None:
    recipe = TrainingRecipe(schedule=Schedule(name="ReduceLROnPlateau", arguments=(("factor", 0.5), ("patience", 1)), warmup=2))
    rate = LearningRate("sgd", 0.4, recipe, steps=50, order=EPOCHS_OF_TEN)
    other = LearningRate("sgd", 0.4, recipe, steps=50, order=EPOCHS_OF_TEN)
    assert rate.of(0)["lr"] == pytest.approx(0.4 / 3)
    rate.saw(9.0, 1)  # within the warm-up: not followed
    for step, score in enumerate([1.0, 1.1]):
        rate.saw(score, 10 + step)
    other.load(rate.state())
    rate.saw(1.2, 20)
    other.saw(1.2, 20)
    assert rate.of(20)["lr"] == other.of(20)["lr"] == pytest.approx(0.2)


def test_norms_and_biases_are_found_by_their_modules() -> None:
    module = seeded_module(VIT, 0, torch.float32, torch.device("cpu"))
    exempt = exempt_names(module, ("norm", "bias"))
    for name, parameter in module.named_parameters():
        assert (name in exempt) == (name.endswith("bias") or "ln" in name), name
        assert name in exempt or parameter.dim() > 1
    with pytest.raises(ConfigError, match=r"no parameter matches 'nrom'; did you mean norm"):
        check_exempt(dict(module.named_parameters()), ["nrom"])


def test_torch_names_what_is_wrong_with_a_schedule() -> None:
    recipe = TrainingRecipe(schedule=Schedule(name="PolynomialLR", arguments=(("total_iters", "ten"),)))
    with pytest.raises(ConfigError, match=r"training\.schedule"):
        check_schedule("sgd", 0.1, recipe, steps=10, order=EPOCHS_OF_TEN)
    short = TrainingRecipe(schedule=Schedule(name="OneCycleLR", arguments=(("total_steps", 5),)))
    with pytest.raises(ConfigError, match="OneCycleLR fails before step 10"):
        check_schedule("sgd_momentum", 0.1, short, steps=10, order=EPOCHS_OF_TEN)
