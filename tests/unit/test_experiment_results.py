"""Verdicts of experiments: pure functions of committed results, and never "met" where nothing was compared."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from experiments.common import running  # noqa: E402
from experiments.common.catalogue import CATALOGUE, FOLDER, Experiment, chosen  # noqa: E402
from experiments.common.claims import Claim, claim, counts, of_every, within  # noqa: E402
from experiments.common.page import (  # noqa: E402
    PAGE,
    REFUTED_BY,
    claims_of,
    finding_of,
    judge_of,
    made_anew,
    page,
    quick_page,
    results_of,
)
from experiments.results import lines_of  # noqa: E402

JUDGED = [each for each in CATALOGUE if judge_of(each) is not None]


def names(some: list[Experiment]) -> list[str]:
    return [each.name for each in some]


def test_every_folder_with_a_run_is_in_the_catalogue() -> None:
    folders = {path.parent.name for path in FOLDER.glob("*/run.py")}
    assert folders == {each.name for each in CATALOGUE}


def test_pages_say_what_the_committed_results_say() -> None:
    for path, text in {**made_anew(), PAGE: page()}.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is old; run python experiments/results.py --page"


@pytest.mark.parametrize("each", CATALOGUE, ids=names(list(CATALOGUE)))
def test_a_readme_opens_with_the_finding_and_ends_with_what_would_refute_it(each: Experiment) -> None:
    sentences = re.findall(r"[^.]+?[.](?=\s|$)", re.sub(r"\d[.]\d", "0", finding_of(each)))
    assert 1 <= len(sentences) <= 2, finding_of(each)
    last = (each.folder / "README.md").read_text(encoding="utf-8").rstrip().split("\n\n")[-1]
    assert last.startswith(REFUTED_BY)


@pytest.mark.parametrize("each", JUDGED, ids=names(JUDGED))
def test_without_results_nothing_is_met_or_missed(each: Experiment) -> None:
    judge = judge_of(each)
    assert judge is not None
    assert set(counts(judge.claims({}))) == {"not checked"}


@pytest.mark.parametrize("each", JUDGED, ids=names(JUDGED))
def test_a_small_version_compares_nothing(each: Experiment) -> None:
    document: dict[str, Any] = results_of(each) or {"run": {}}
    small = document | {"run": document["run"] | {"quick": True}}
    assert set(counts(claims_of(each, small))) == {"not checked"}
    assert "not checked" in quick_page([each], {each.name: "ran"}, 1.0)


def test_no_row_is_no_verdict() -> None:
    assert of_every("all", [], lambda row: True).verdict == "not checked"
    assert of_every("all", [1, 2], lambda row: row < 3).verdict == "met"
    missed = of_every("all", [1, 2], lambda row: row < 2)
    assert (missed.verdict, missed.found) == ("missed", "1 of 2; not 2")


def test_seeds_beyond_those_fixed_in_advance_change_no_verdict() -> None:
    five = [0.9, 0.9, 0.9, 0.9, 0.9]
    assert within("near", five, 0.95, 0.02, 5).verdict == "missed"
    assert within("near", five + [1.0] * 5, 0.95, 0.02, 5).verdict == "missed"
    assert within("near", five[:4], 0.9, 0.02, 5).verdict == "not checked"


def test_a_claim_needs_a_verdict_and_what_is_not_checked_a_reason() -> None:
    with pytest.raises(ValueError, match="none of met, missed, unresolved, not checked"):
        Claim(text="t", verdict="true")
    with pytest.raises(ValueError, match="say why"):
        Claim(text="t", verdict="not checked")
    assert claim("t", None).found == "nothing was compared"


def test_an_unknown_experiment_is_named() -> None:
    with pytest.raises(ValueError, match="no experiment nothing; there are adaptive_parallelism"):
        chosen("mixing,nothing")


def test_results_are_json_with_a_line_per_row() -> None:
    document = {"run": {"date": "2026-11-23"}, "rows": [{"a": 1}, {"a": 2}], "none": []}
    assert json.loads(lines_of(document)) == document
    assert '{"a": 1},\n{"a": 2}' in lines_of(document)


def experiment(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = folder / "experiments" / "made_up"
    place.mkdir(parents=True)
    (place / "run.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(running, "ROOT", folder)


def test_results_hold_what_they_were_run_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment(tmp_path, "print('[{\"score\": 1}]')", monkeypatch)
    found = running.documented("made_up", ["--seeds", "5"], quick=False, out=tmp_path)
    assert found["rows"] == [{"score": 1}]
    run = found["run"]
    assert run["command"] == "python experiments/made_up/run.py --seeds 5"
    assert {"machine", "versions", "date", "commit", "load", "quick", "wall_s", "cpu_s"} < set(run)
    assert str(tmp_path) not in json.dumps(run)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise SystemExit('no data')", "made_up ended with status 1: no data"),
        ("print('3 rows')", "printed no JSON document, but '3 rows"),
        ("import time; time.sleep(60)", "made_up was stopped after 0.5 s"),
    ],
)
def test_an_experiment_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    experiment(tmp_path, text, monkeypatch)
    with pytest.raises(running.ExperimentError, match=re.escape(message)):
        running.documented("made_up", [], quick=False, out=tmp_path, limit_s=0.5 if "sleep" in text else 30.0)
