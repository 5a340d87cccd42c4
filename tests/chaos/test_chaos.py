"""A share of `make chaos`, and the page of its outcomes."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("torch")

from tests.chaos import page
from tests.chaos.chaos import AT_ONCE, FAULTS, PLANS, plan_and_faults, play
from tests.chaos.outcomes import Outcome, add_outcome, recorded, table


def test_nine_faults_hold_every_kind() -> None:
    for turn in range(8):
        plan, faults = plan_and_faults(1, len(FAULTS) * turn)
        rest, others = plan_and_faults(1, len(FAULTS) * turn + AT_ONCE)
        assert rest == plan
        assert sorted([*faults, *others]) == sorted(FAULTS)
        assert plan_and_faults(1, len(FAULTS) * turn + 2) == (plan, faults[2:])
    assert {plan_and_faults(1, len(FAULTS) * turn)[0] for turn in range(4)} == set(PLANS)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are looked up in /proc")
@pytest.mark.xdist_group("launch")
def test_trainings_that_every_fault_disturbs_lose_nothing(tmp_path: Path) -> None:
    found = play(tmp_path, len(FAULTS), seed=1)
    assert [outcome for outcome in found if outcome.problems] == [], table(found)
    assert {outcome.fault for outcome in found} == set(FAULTS)


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
