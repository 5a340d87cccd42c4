"""docs/faults.md shows what was recorded."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("torch")

from tests.chaos import page
from tests.chaos.outcomes import Outcome, add_outcome, recorded, table


def test_the_page_shows_what_was_recorded() -> None:
    text, curves = page.PAGE.read_text(encoding="utf-8"), json.loads(page.CURVES.read_text())
    assert page.trainings(curves) in text
    assert page.files() in text
    assert page.PICTURE.read_text(encoding="utf-8") == page.picture(curves)
    ElementTree.fromstring(page.picture(curves))


def test_an_outcome_is_a_line_and_a_curve(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    lost = Outcome("a rank is killed", noticed_s=2.0, problems=["a process is left"])
    fine = Outcome("a rank is killed", noticed_s=1.0, resumed_s=3.0, step=4, losses=[2.0, 1.0])
    for number, outcome in enumerate((lost, fine)):
        add_outcome(path, outcome, [2.0, 1.0], number=number, seed=0)
    assert "| a rank is killed | 2 | 1 | 2.0 (2.0) | 3.0 (3.0) |" in table(recorded(path))
    curves = json.loads((tmp_path / "curves.json").read_text())
    assert curves["disturbed"] == {"a rank is killed": {"step": 4, "losses": [2.0, 1.0]}}
    assert page.picture(curves).count("<circle") == 2
