"""The three trainings of `examples/tasks`: their run files are answered, and docs/training.md shows what was measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

pytest.importorskip("torch")

import torch

from parsim.app.functions import plan
from tests.execute.test_bad_run import write_profile
from tests.quick import some_quick

TASKS = Path(__file__).resolve().parents[2] / "examples" / "tasks"
NAMES = ("segmentation", "language", "regression")
EQUAL = 1e-5
"""Between the loss that parsim validated with and that of the exported weights: float32, in batches of other sizes."""


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(TASKS))
    for name in ("figures", "training_tasks"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return TASKS


def figures() -> ModuleType:
    import figures

    return figures


def test_the_page_shows_what_was_measured(here: Path) -> None:
    results, made = json.loads((here / "results.json").read_text()), figures()
    assert tuple(results["rows"]) == NAMES
    assert made.shown(results) in made.PAGE.read_text(encoding="utf-8")
    assert made.PICTURE.read_text(encoding="utf-8") == made.picture(results["rows"])
    ElementTree.fromstring(made.picture(results["rows"]))


def test_each_learnt_and_its_exported_weights_score_the_same(here: Path) -> None:
    for name, row in json.loads((here / "results.json").read_text())["rows"].items():
        assert len(row["losses"]) == row["steps"], name
        assert row["best_loss"] < 0.5 * row["losses"][0], name
        assert row["loss_of_exported_weights"] == pytest.approx(row["best_loss"], abs=EQUAL), name


@pytest.mark.parametrize("name", some_quick(NAMES, NAMES[0]))
def test_the_run_file_is_answered(name: str, here: Path, tmp_path: Path) -> None:
    """On a profile by hand: the file asks for this machine, which a calibration would measure first."""
    write_profile(tmp_path, "reduce_scatter", "all_gather")
    answer = plan(here / f"{name}.toml", overrides=[f"cluster.profile={tmp_path}/profile.json"])
    assert answer.chosen.plan.world_size == 2
    assert answer.chosen.fits


def test_the_language_model_sees_no_later_token(here: Path) -> None:
    from training_tasks import LENGTH, VOCABULARY, LanguageModel

    model = LanguageModel().eval()
    first = torch.randint(VOCABULARY, (4, LENGTH))
    other = torch.cat([first[:, :4], (first[:, 4:] + 1) % VOCABULARY], dim=1)
    assert torch.allclose(model(first)[:, :4], model(other)[:, :4], atol=1e-6)
    assert not torch.allclose(model(first)[:, 4:], model(other)[:, 4:], atol=1e-3)
