"""Schedules and exclusions from weight decay, against torch's own classes. `test_equality` trains with them."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.optim import lr_scheduler

from parsim.data.samples import BatchOrder
from parsim.errors import ConfigError
from parsim.execute.job import Schedule, TrainingRecipe
from parsim.execute.optimizer import LearningRates, check_exempt, check_schedule, exempt_names
from parsim.execute.stage import seeded_module
from parsim.hardware.records import sorted_pairs
from tests.execute.small_plans import VIT

EPOCHS_OF_TEN = BatchOrder(n=40, global_batch=4)


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
    rate = LearningRates("sgd_momentum", 0.1, TrainingRecipe(schedule=schedule), steps=30, order=EPOCHS_OF_TEN)
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
    assert [rate.settings(step)[""] for step in range(30)] == wanted
    assert rate.settings(12)[""] == wanted[12]
    assert rate.settings(5)[""] == wanted[5]


def test_warm_up_rises_in_equal_parts_and_counts_epochs() -> None:
    recipe = TrainingRecipe(
        schedule=Schedule(name="StepLR", arguments=(("gamma", 0.5), ("step_size", 2)), warmup=3, per="epoch")
    )
    rate = LearningRates("adam", 1.0, recipe, steps=80, order=EPOCHS_OF_TEN)
    assert [rate.of(10 * epoch)[""] for epoch in range(8)] == pytest.approx([0.25, 0.5, 0.75, 1, 1, 0.5, 0.5, 0.25])
    assert rate.of(19) == rate.of(10)


def test_reduce_on_plateau_keeps_its_state() -> None:
    recipe = TrainingRecipe(schedule=Schedule(name="ReduceLROnPlateau", arguments=(("factor", 0.5), ("patience", 1)), warmup=2))
    rate = LearningRates("sgd", 0.4, recipe, steps=50, order=EPOCHS_OF_TEN)
    other = LearningRates("sgd", 0.4, recipe, steps=50, order=EPOCHS_OF_TEN)
    assert rate.of(0)[""] == pytest.approx(0.4 / 3)
    rate.saw(9.0, 1)  # within the warm-up: not followed
    for step, score in enumerate([1.0, 1.1]):
        rate.saw(score, 10 + step)
    other.load(rate.state())
    rate.saw(1.2, 20)
    other.saw(1.2, 20)
    assert rate.of(20)[""] == other.of(20)[""] == pytest.approx(0.2)


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
