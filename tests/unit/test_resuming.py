"""Whether a training can go on as it is asked to, and what is told of one that is ended. Nothing is launched here."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parsim.app.config import Question, load_config
from parsim.app.run_folder import RunFolder, ending_told, resumption
from parsim.app.train import check_options
from parsim.data import load_dataset
from parsim.data.samples import Target, hold_out
from parsim.errors import ConfigError, DataError, ExecutionError
from parsim.execute.evaluation import BestSoFar
from parsim.execute.job import EmaRule, EvaluationRule, Schedule, TrainingRecipe, UpdateGroup
from parsim.execute.metrics import FILE, METRICS, Metric, loss_curve, mean_ratio
from tests.unit.test_config import config_of as training_config

RUN = """\
[model]
name = "mlp"
[cluster]
profile = "dgx1-v100-32gb"
devices = 2
[training]
global_batch = 16
{training}
[plan]
strategy = "dp"
"""
COSINE = 'steps = 20\n[training.schedule]\nname = "CosineAnnealingLR"'
LOOKS = 'steps = 20\n[training.evaluation]\nmetrics = ["accuracy"]'


def config_of(folder: Path, training: str) -> Question:
    file = folder / "RUN.toml"
    file.write_text(RUN.format(training=training))
    return load_config(file)


def going_on(folder: Path, before: str, after: str) -> str:
    """What is told of a training that goes on with other keys."""
    kept = RunFolder(folder / "kept")
    kept.path.mkdir()
    kept.config.write_text(config_of(folder, before).to_toml())
    return "\n".join(resumption(kept, config_of(folder, after), 20).warnings)


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (COSINE, COSINE.replace("20", "40"), "T_max is left out: CosineAnnealingLR was over 20 steps, and is over 40 steps"),
        (COSINE, COSINE.replace("steps = 20", "epochs = 3"), "was over 20 steps, and is over 3 epochs from here on"),
        (COSINE, COSINE, ""),
        (f"{COSINE}\nT_max = 20", f"{COSINE}\nT_max = 20".replace("steps = 20", "steps = 40"), ""),
        ("steps = 20", "steps = 40", ""),
    ],
)
def test_a_schedule_over_the_whole_training_changes_with_its_length(tmp_path: Path, before: str, after: str, told: str) -> None:
    found = going_on(tmp_path, before, after)
    assert told in found
    assert bool(told) == ("training.schedule" in found)


@pytest.mark.parametrize(
    ("after", "told"),
    [
        (f'{LOOKS}\nmonitor = "accuracy"', r"was 'loss \(min\)', now 'accuracy \(max\)'"),
        (f'{LOOKS}\nmode = "max"', r"was 'loss \(min\)', now 'loss \(max\)'"),
        (
            f"ema = {{ decay = 0.9, evaluate = true }}\n{LOOKS}",
            r"was 'loss .*', now 'loss \(min, of the averaged weights\)'",
        ),
    ],
)
def test_scores_of_two_kinds_are_never_compared(tmp_path: Path, after: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"training.evaluation.monitor {told}"):
        going_on(tmp_path, LOOKS, after)


def test_another_model_of_the_same_name_is_refused_with_what_differs(tmp_path: Path) -> None:
    """Before, the message said "model was mlp, now mlp"."""
    with pytest.raises(ConfigError, match=r"\(model.args was \{'width': 64\}, now \{\}\)"):
        going_on(tmp_path, "steps = 20\n[model.args]\nwidth = 64", "steps = 20")


def test_a_negative_distance_of_checkpoints_is_refused() -> None:
    with pytest.raises(ConfigError, match="checkpoint_every = -1: must be >= 0"):
        check_options(adaptive=False, resume=False, out=None, checkpoint_every=-1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda number: number.name)
def test_a_training_that_is_ended_between_two_launches_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    """While another plan is searched, or the results are written: no rank runs then."""
    given = signal.getsignal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and stays so
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    expected = KeyboardInterrupt if number == signal.SIGINT else SystemExit
    with pytest.raises(expected), ending_told(RunFolder(tmp_path), 20):
        os.kill(os.getpid(), number)
    after = {each: signal.getsignal(each) for each in before}
    signal.signal(signal.SIGHUP, given)
    assert capsys.readouterr().err.startswith(f"parsim: ended by {number.name}. No checkpoint was written")
    assert after == before


# What follows from validation scores, what the metrics add up, and what is held out.

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
        training_config(f"[training.evaluation]\n{more}")
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
        training_config('[training.schedule]\nname = "ReduceLROnPlateau"')


# The losses of a training that went on several times, as its metrics.jsonl and its last part tell them.

LOSSES = (2.0, 1.5, 1.0, 0.5)


def write(folder: Path, *lines: dict[str, Any] | str) -> None:
    (folder / FILE).write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))


def steps(first: int = 1) -> list[dict[str, Any]]:
    return [{"step": number, "loss": loss} for number, loss in enumerate(LOSSES[first - 1 :], first)]


def test_earlier_parts_are_there_too(tmp_path: Path) -> None:
    lines = steps()
    lines[1] |= {"validation": {"loss": 3.0}, "gradient_norm": float("inf")}
    write(tmp_path, *lines)
    found = loss_curve(tmp_path, LOSSES[2:], 4)
    assert (found.first_step, found.losses, found.validation) == (1, LOSSES, ({"step": 2, "loss": 3.0},))
    assert loss_curve(tmp_path, (), 4).losses == LOSSES  # it ended after its last checkpoint, before its result


def test_steps_without_a_loss_belong_to_it(tmp_path: Path) -> None:
    """The first of decoupled stages, before a batch has come through all of them."""
    write(tmp_path, {"step": 1}, *steps(2))
    found = loss_curve(tmp_path, LOSSES[2:], 4)
    assert (found.first_step, found.losses) == (2, LOSSES[1:])


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param((), id="none"),
        pytest.param(steps(3), id="earlier ones are missing"),
        pytest.param(steps()[:3], id="the last one is missing"),
        pytest.param([*steps()[:3], {"step": 4, "loss": 0.6}], id="of another training"),
        pytest.param([*steps()[:3], '{"step": 4, "lo'], id="cut"),
        pytest.param([*steps()[:3], {"step": 4, "loss": "0.5"}], id="no number"),
        pytest.param([*steps()[:3], {"step": 4, "loss": 0.5, "validation": 3}, {"step": 5}], id="one too many"),
    ],
)
def test_a_file_that_does_not_fit_gives_the_last_part_alone(tmp_path: Path, lines: list[Any]) -> None:
    write(tmp_path, *lines)
    found = loss_curve(tmp_path, LOSSES[2:], 4)
    assert (found.first_step, found.losses, found.validation) == (3, LOSSES[2:], None)


def test_without_the_file_there_is_the_last_part(tmp_path: Path) -> None:
    assert loss_curve(tmp_path, LOSSES[1:], 4).first_step == 2


def test_numbers_that_are_not_finite_are_null(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient norm in fp16 that overflowed, and a metric without a value: JSON has no words for either."""
    torch = pytest.importorskip("torch")
    from parsim.execute import train as log

    monkeypatch.setattr(log, "gather_values", lambda value: [value])
    recipe = SimpleNamespace(tensorboard=False)
    entry: Any = SimpleNamespace(
        step_number=0,
        learning_rates={"": 0.1},
        record=SimpleNamespace(losses=[2.0]),
        run=SimpleNamespace(recipe=recipe),
        stage=SimpleNamespace(rank=0, gradient_norm=torch.tensor([math.inf])),
    )
    made = log.TrainingLog(tmp_path, entry, 1)
    made.begin_step(entry)
    made.end_step(entry)
    made.write(entry, SimpleNamespace(rank=0), {"step": 1, "loss": 1.5, "mean_iou": math.nan})  # type: ignore[arg-type]
    (text,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    line = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} in metrics.jsonl"))
    assert (line["loss"], line["gradient_norm"], line["validation"]) == (2.0, None, {"loss": 1.5, "mean_iou": None})
    curve = loss_curve(tmp_path, [2.0], 1)
    assert curve.validation == ({"step": 1, "loss": 1.5, "mean_iou": None},)
