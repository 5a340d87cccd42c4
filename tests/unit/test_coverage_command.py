"""`parsim coverage`, what a history changes in the other commands, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from parsim.cli import main
from parsim.costs.history import append_record
from parsim.report.figures import coverage_figures
from tests.unit.test_history import record

RUN_TOML = """
[model]
name = "mlp"
[cluster]
profile = "dgx1-v100-32gb"
devices = 2
history = "known.jsonl"
[training]
global_batch = 64
[plan]
strategy = "dp"
"""


class Ended(Exception):
    """With an exit status other than 0."""


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Call `parsim ARGS` in a folder with RUN.toml; returns stdout, or raises Ended with stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "RUN.toml").write_text(RUN_TOML)

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["parsim", *arguments])
        with pytest.raises(SystemExit) as ending:
            main()
        captured = capsys.readouterr()
        if ending.value.code:
            raise Ended(captured.err)
        return captured.out

    return run


def remember(path: Path, count: int, ratio: float) -> None:
    for number in range(count):
        append_record(path, record(number, ratio=ratio))


def test_coverage_counts_by_model_and_run(call: Any, tmp_path: Path) -> None:
    remember(tmp_path / "h.jsonl", 36, 1.05)
    document = json.loads(call("coverage", "dgx1-v100-32gb", "--history", "h.jsonl", "--json"))
    seen = document["coverage"]
    assert (seen["tested"], seen["covered"], seen["corrected"]) == (36, 36, 36)
    assert 0.9 < seen["low"] < seen["high"] == 1.0
    assert {name: entry["tested"] for name, entry in document["models"].items()} == {f"model {n}": 12 for n in range(3)}
    assert {name: entry["tested"] for name, entry in document["runs"].items()} == {f"run {n}": 9 for n in range(4)}
    text = call("coverage", "dgx1-v100-32gb", "--history", "h.jsonl", "--out", "page.html")
    assert "100.0%" in text
    assert "from 36 validations" in text
    page = (tmp_path / "page.html").read_text()
    assert "Nominal and empirical coverage" in page
    assert "corrected 90% interval" in page


@pytest.mark.parametrize(("count", "figures"), [(1, 0), (2, 1), (9, 2)])
def test_a_figure_needs_enough_validations(count: int, figures: int) -> None:
    assert len(coverage_figures([record(number, ratio=1.05) for number in range(count)])) == figures


def test_coverage_without_a_history_says_what_to_do(call: Any) -> None:
    with pytest.raises(Ended, match="--history FILE"):
        call("coverage", "dgx1-v100-32gb")
    assert "run `parsim validate`" in call("coverage", "dgx1-v100-32gb", "--history", "none.jsonl")
    document = json.loads(call("coverage", "dgx1-v100-32gb", "--history", "none.jsonl", "--json"))
    assert document["coverage"] is None
    assert document["interval_correction"]["text"] == "not corrected: 0 of the 9 validations needed"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_answers_say_how_their_interval_was_corrected(call: Any, tmp_path: Path, command: str) -> None:
    def result() -> Any:
        document = json.loads(call(command, "RUN.toml", "--json"))
        return document["chosen"] if command == "plan" else document

    before = result()
    assert before["interval_correction"]["text"] == "not corrected: 0 of the 9 validations needed"
    remember(tmp_path / "known.jsonl", 12, 1.1**2)
    after = result()
    assert after["interval_correction"]["text"] == "x2.00 from 12 validations"
    assert after["interval_correction"]["uncorrected_step_s"] == before["step_s"]
    assert after["step_s"]["p05"] < before["step_s"]["p05"]
    assert "90% interval: x2.00 from 12 validations" in call(command, "RUN.toml")


def test_a_stale_profile_and_a_broken_line_are_said_by_every_answer(call: Any, tmp_path: Path) -> None:
    for number in range(12):
        append_record(tmp_path / "known.jsonl", record(3 * (4 * number), ratio=2.0))  # one model and one run alone
    with (tmp_path / "known.jsonl").open("a") as file:
        file.write("half a l")
    text = " ".join(call("simulate", "RUN.toml").split())
    assert "the profile is stale: of its 90% intervals 0 of 12 inside" in text
    assert "1 line is left out" in text


def test_only_a_profile_of_ones_own_can_be_updated(call: Any) -> None:
    with pytest.raises(Ended, match="--update writes into the profile, and 'dgx1-v100-32gb' is not a file of yours"):
        call("validate", "RUN.toml", "--update")


def test_a_kept_folder_knows_the_history_it_was_answered_by(call: Any, tmp_path: Path) -> None:
    """Validations that come later do not change what a folder's prediction was."""
    remember(tmp_path / "known.jsonl", 12, 1.1**2)
    call("simulate", "RUN.toml", "--out", "kept")
    copy = (tmp_path / "kept" / "profile.history.jsonl").read_text()
    assert copy == (tmp_path / "known.jsonl").read_text()
    remember(tmp_path / "known.jsonl", 12, 3.0)
    call("report", "kept")
    assert "x2.00 from 12 validations" in (tmp_path / "kept" / "report.html").read_text()
