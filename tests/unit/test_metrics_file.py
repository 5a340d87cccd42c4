"""The losses of a training that went on several times, as its metrics.jsonl and its last part tell them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from parsim.execute.metrics import FILE, loss_curve

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
