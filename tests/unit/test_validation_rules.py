"""What follows from validation scores, what the metrics add up, and what is held out."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parsim.data import load_dataset
from parsim.data.samples import Target, hold_out
from parsim.errors import ConfigError, DataError, ExecutionError
from parsim.execute.evaluation import BestSoFar
from parsim.execute.job import EmaRule, EvaluationRule, Schedule, TrainingRecipe, UpdateGroup
from parsim.execute.metrics import METRICS, Metric, mean_ratio
from tests.unit.test_training_section import config_of

DIGITS = load_dataset("digits", input_shape=(1, 8, 8), target=Target())


def followed(scores: list[float], rule: EvaluationRule) -> list[BestSoFar]:
    best, seen = BestSoFar(), []
    for step, score in enumerate(scores, 1):
        best = BestSoFar.from_tensor(best.after(score, step, rule).to_tensor())  # as through a checkpoint
        seen.append(best)
    return seen


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([0.1, 0.2, 0.3, math.nan]), min_size=1, max_size=12), st.booleans())
def test_the_best_is_the_first_that_no_other_beats(scores: list[float], larger: bool) -> None:
    last = followed(scores, EvaluationRule(mode="max" if larger else "min"))[-1]
    finite = [score for score in scores if not math.isnan(score)]
    if not finite:
        assert last.step == 0
        return
    best = max(finite) if larger else min(finite)
    assert (last.score, last.step) == (best, scores.index(best) + 1)
    assert last.since == len(scores) - last.step


def test_it_stops_after_so_many_without_a_gain() -> None:
    rule = EvaluationRule(patience=2, min_delta=0.05)
    stops = [best.stops(rule) for best in followed([1.0, 0.9, 0.88, 0.8, 0.79, 0.78], rule)]
    assert stops == [False, False, False, False, False, True]
    assert not followed([1.0] * 50, EvaluationRule())[-1].stops(EvaluationRule())


def added(metric: Metric, output: torch.Tensor, target: torch.Tensor, batch: int, dim: int) -> float:
    sums = [metric.sums(output[n : n + batch], target[n : n + batch], dim) for n in range(0, len(output), batch)]
    above, below = (torch.stack([part[place].double().reshape(-1) for part in sums]).sum(0).tolist() for place in (0, 1))
    return metric.value(above, below)


@pytest.mark.parametrize("batch", [1, 4, 12])
def test_metrics_add_up_over_batches(batch: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, target = torch.randn(12, 3, 5, generator=generator), torch.randint(3, (12, 5), generator=generator)
    target[2, 1] = -100
    seen = target != -100
    found = logits.argmax(1)
    assert added(METRICS["accuracy"], logits, target, batch, 1) == pytest.approx(float((found == target)[seen].double().mean()))
    entropy = torch.nn.functional.cross_entropy(logits, target)
    assert added(METRICS["perplexity"], logits, target, batch, 1) == pytest.approx(math.exp(entropy), rel=1e-5)
    ious = [float(((found == c) & (target == c))[seen].sum() / ((found == c) | (target == c))[seen].sum()) for c in range(3)]
    assert added(METRICS["mean_iou"], logits, target, batch, 1) == pytest.approx(sum(ious) / 3)
    numbers, wanted = torch.randn(12, 2, generator=generator), torch.randn(12, 2, generator=generator)
    error = float((numbers - wanted).abs().mean())
    assert added(METRICS["mean_absolute_error"], numbers, wanted, batch, -1) == pytest.approx(error, rel=1e-6)


def median_error(output: torch.Tensor, target: torch.Tensor) -> dict[str, float]:
    return {}


def test_a_metric_that_returns_something_else_is_named() -> None:
    own = METRICS[f"{__name__}:median_error"]
    with pytest.raises(ExecutionError, match="metric median_error returned dict; return the mean over the batch"):
        own.sums(torch.zeros(2), torch.zeros(2), -1)
    assert math.isnan(mean_ratio([0.0], [0.0]))


@settings(max_examples=20, deadline=None)
@given(st.one_of(st.floats(0.01, 0.9), st.integers(1, 1000).map(float)), st.integers(0, 5))
def test_what_is_held_out_is_never_trained_on(share: float, seed: int) -> None:
    train, validation = hold_out(DIGITS, share, seed)
    assert len(validation) == (round(share * len(DIGITS)) if share < 1 else share)
    assert sorted([*train.chosen, *validation.chosen]) == list(range(len(DIGITS)))
    again = hold_out(DIGITS, share, seed)[1]
    assert (again.chosen == validation.chosen).all()
    values = validation.values(np.array([0]))
    assert (values["input:0"] == DIGITS.values(validation.chosen[:1])["input:0"]).all()


@pytest.mark.parametrize("share", [1e-6, 0.99999, 10**6])
def test_a_validation_split_of_nothing_is_refused(share: float) -> None:
    with pytest.raises(DataError, match=r"training\.evaluation\.validation = .* holds out .*; between 1 and"):
        hold_out(DIGITS, share, 0)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ('metrics = ["acuracy"]', "did you mean accuracy"),
        ('monitor = "accuracy"', "neither loss nor one of metrics"),
        ('metrics = ["parsim.units:format_bytes"]\nmonitor = "parsim.units:format_bytes"', 'set mode = "min" or mode = "max"'),
        ("validation = 0", "must be > 0"),
        ("validation = 2.5", "a whole number of samples"),
        ("patience = -1", "must be >= 0"),
    ],
)
def test_wrong_keys_of_the_evaluation(more: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(f"[training.evaluation]\n{more}")
    assert said in str(caught.value)


def test_the_recipe_of_a_job_is_read_as_it_was_written() -> None:
    critic = UpdateGroup(name="critic", parameters=("critic.*",), optimizer="adam", learning_rate=0.1)
    recipe = TrainingRecipe(
        groups=(critic,),
        optimizer_args=(("betas", (0.9, 0.95)),),
        weight_decay=0.1,
        no_weight_decay=("norm",),
        schedule=Schedule(name="StepLR", arguments=(("step_size", 3),), warmup=2),
        clip_norm=1.0,
        evaluation=EvaluationRule(every=3, metrics=("accuracy",), monitor="accuracy"),
        ema=EmaRule(decay=0.5, evaluate=True),
        tensorboard=True,
    )
    assert TrainingRecipe.model_validate(json.loads(json.dumps(recipe.model_dump(mode="json")))) == recipe


def test_a_schedule_that_follows_scores_needs_some() -> None:
    with pytest.raises(ConfigError, match=r"add \[training\.evaluation\]"):
        config_of('[training.schedule]\nname = "ReduceLROnPlateau"')
