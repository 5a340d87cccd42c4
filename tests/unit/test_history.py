"""The file of validations: what is appended is read back, and what does not belong is said and left out."""

from __future__ import annotations

import json
import math
import multiprocessing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from parsim.commands.run import history
from parsim.costs.history import (
    NO_HISTORY,
    History,
    ValidationRecord,
    append_record,
    fingerprint,
    history_lines,
    history_path,
    read_history,
)
from parsim.errors import ProfileError
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.profile import Noise, Profile, save_profile
from parsim.predict.evaluate import evaluate
from parsim.predict.problem import PlanningProblem
from parsim.report.figures import coverage_figures
from parsim.search.families import FAMILIES
from tests.commands import Told
from tests.models import chain_model

PROFILE = load_profile("dgx1-v100-32gb")
OWN = fingerprint(PROFILE)


def record(number: int, *, ratio: float = 1.0, profile: str = OWN, machine: str = "m, 2 cores") -> ValidationRecord:
    return ValidationRecord(
        model=f"model {number % 3}",
        run=f"run {number % 4}",
        predicted_s=0.1,
        low_s=0.09,
        high_s=0.11,
        measured_s=0.1 * ratio,
        profile=profile,
        machine=machine,
        measurement=str(number),
    )


def history_of(path: Path, records: list[ValidationRecord]) -> History:
    for entry in records:
        append_record(path, entry)
    return read_history(path, PROFILE)


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "p.history.jsonl"
    written = [replace(record(number), aa_floor=0.02, versions={"torch": "2"}, batch=8, plan="dp") for number in range(3)]
    known = history_of(path, written)
    assert list(known.records) == written
    assert (known.left_out, known.notes) == ((), ())
    assert known.correction.describe() == "not corrected: 3 of the 9 validations needed"
    copy = tmp_path / "copy.jsonl"
    known.save(copy)
    assert copy.read_text() == path.read_text()


def test_a_record_a_hundred_times_off_its_prediction_is_kept_apart_and_told(tmp_path: Path) -> None:
    """Milliseconds taken for seconds: with them, every interval would say nothing."""
    path = tmp_path / "p.history.jsonl"
    honest = [record(number, ratio=1 + number / 100) for number in range(12)]
    alone = history_of(path, honest)
    known = history_of(path, [record(20 + number, ratio=ratio) for number, ratio in enumerate((1e3, 1e-3, 101, 99))])
    assert known.records == (*honest, record(23, ratio=99))
    assert len(known.left_out) == 3
    assert known.left_out[0].startswith("line 13: measured more than 100 times off its prediction (1.67 min, not 100 ms")
    assert "3 lines are left out" in known.notes[-1]
    all_off = history_of(tmp_path / "off.jsonl", [record(number, ratio=1e3) for number in range(12)])
    assert all_off.records == ()
    assert all_off.correction.factor is None
    assert alone.correction.factor is not None
    assert alone.correction.factor < 2


def test_a_history_that_makes_intervals_say_nothing_is_told(tmp_path: Path) -> None:
    """Each record is less than a hundred times off, so none is kept apart."""
    known = history_of(tmp_path / "p.history.jsonl", [record(number, ratio=90) for number in range(12)])
    assert len(known.records) == 12
    assert any("times as wide, on the log scale" in note and "parsim history" in note for note in known.notes)


def test_lines_are_listed_and_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, profile = tmp_path / "p.history.jsonl", tmp_path / "p.json"
    save_profile(PROFILE, profile)
    history_of(path, [record(0), record(1, ratio=1e3), record(2)])
    with path.open("a") as file:
        file.write("half a li")
    lines = history_lines(path, PROFILE)
    assert [(line.number, bool(line.why)) for line in lines] == [(1, False), (2, True), (3, False), (4, True)]
    history(str(profile), remove=None)
    assert "measured more than 100 times off" in capsys.readouterr().out
    history(str(profile), remove=[2, 4], as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert [(line["line"], line["used"], line["measurement"]) for line in document["lines"]] == [(1, True, "0"), (2, True, "2")]
    with pytest.raises(ProfileError, match=r"has no line 3: it has 2"):
        history(str(profile), remove=[3])


def test_where_a_history_lies() -> None:
    assert history_path("some/here.json") == Path("some/here.history.jsonl")
    assert history_path("dgx1-v100-32gb") is None
    assert history_path("dgx1-v100-32gb", "there.jsonl") == Path("there.jsonl")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{half a li", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1, 2]", "not an object"),
        (json.dumps({"schema_version": 2, "model": "m"}), "no run"),
        (json.dumps({"schema_version": 2, **asdict(record(0)), "measured_s": True}), "no measured_s"),
        (json.dumps({"schema_version": 2, **asdict(record(0)), "measured_s": math.nan}), "not JSON"),
        (json.dumps({"schema_version": 2, **asdict(record(0)), "measured_s": 10**400}), "not JSON"),
        (json.dumps({"schema_version": 2, **asdict(record(0)), "low_s": 0.2}), "a record needs p05 <= median <= p95"),
        (json.dumps({"schema_version": 2, **asdict(record(0)), "machine": 3}), "machine is not a string"),
        (json.dumps({"schema_version": 2, **asdict(record(0)), "profile": "f00"}), "of another profile or version (f00, not"),
        (
            json.dumps({"schema_version": 2, **asdict(record(0)), "machine": "other, 64 cores"}),
            "of other hardware (other, 64 cores)",
        ),
    ],
)
def test_a_line_that_does_not_belong_is_named_and_left_out(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "h.jsonl"
    path.write_text(line + "\n")
    known = history_of(path, [record(1), record(2)])
    assert [entry.measurement for entry in known.records] == ["1", "2"]
    assert len(known.left_out) == 1
    assert known.left_out[0].startswith("line 1: ")
    assert why in known.left_out[0]
    assert "1 line is left out" in known.notes[0]


def test_a_line_that_a_killed_writer_left_half_does_not_eat_the_next(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    append_record(path, record(1))
    path.write_text(path.read_text() + json.dumps(asdict(record(2)))[:40])
    known = history_of(path, [record(3)])
    assert [entry.measurement for entry in known.records] == ["1", "3"]
    assert known.left_out == ("line 2: not JSON",)


def test_empty_missing_and_binary_files(tmp_path: Path) -> None:
    assert read_history(None, PROFILE) == NO_HISTORY
    assert read_history(tmp_path / "none.jsonl", PROFILE).records == ()
    (tmp_path / "empty").write_text("\n\n")
    assert read_history(tmp_path / "empty", PROFILE).left_out == ()
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\n")
    assert read_history(tmp_path / "binary", PROFILE).left_out == ("line 1: not JSON",)
    with pytest.raises(ProfileError, match="cannot read history"):
        read_history(tmp_path, PROFILE)


def _append_many(path: Path, first: int) -> None:
    for number in range(first, first + 200):
        append_record(path, record(number))


def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    writers = [multiprocessing.get_context("fork").Process(target=_append_many, args=(path, first)) for first in (0, 200)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    known = read_history(path, PROFILE)
    assert sorted(int(entry.measurement) for entry in known.records) == list(range(400))
    assert known.left_out == ()


def test_a_fingerprint_knows_numbers_not_words() -> None:
    words = PROFILE.model_copy(update={"name": "other", "description": "other"})
    assert fingerprint(words) == OWN
    assert fingerprint(Profile.model_validate(PROFILE.model_dump())) == OWN
    noisier = PROFILE.model_copy(update={"noise": Noise(drift_sigma=0.031, source="drift")})
    assert fingerprint(noisier) != OWN


def test_stale_is_said_and_only_then(tmp_path: Path) -> None:
    """Of one model and run alone, intervals are judged as predicted: all miss."""
    off = history_of(tmp_path / "off", [replace(record(number, ratio=1.5), model="m", run="r") for number in range(20)])
    assert "the profile is stale: of its 90% intervals 0 of 20 inside" in off.notes[0]
    fine = history_of(tmp_path / "fine", [record(number, ratio=1 + 0.01 * (number % 5)) for number in range(20)])
    assert fine.coverage is not None
    assert fine.notes == ()


def test_intervals_of_a_profile_with_a_history_are_corrected(tmp_path: Path) -> None:
    """Twelve measurements 1.5 half-widths off: every interval grows to that, medians stay."""
    problem = PlanningProblem(model=chain_model(), cluster=cluster_from_profile(PROFILE, 2), global_batch=8)
    plan = next(iter(FAMILIES["dp"](problem)))
    before = evaluate(problem, plan).result
    assert before.interval_correction is not None
    assert before.interval_correction.to_dict()["text"] == "not corrected: 0 of the 9 validations needed"
    known = history_of(tmp_path / "h", [record(number, ratio=1.1**1.5) for number in range(12)])
    after = evaluate(PlanningProblem(model=chain_model(), cluster=problem.cluster, global_batch=8, history=known), plan).result
    assert known.correction.factor == pytest.approx(1.5)
    assert after.step_s.median == before.step_s.median
    assert math.log(after.step_s.p95 / after.step_s.median) == pytest.approx(
        1.5 * math.log(before.step_s.p95 / before.step_s.median)
    )
    assert after.throughput_samples_per_s.p05 == pytest.approx(8 / after.step_s.p95)
    document = after.to_dict()["interval_correction"]
    assert document["text"] == "x1.50 from 12 validations"
    assert document["uncorrected_step_s"] == before.step_s.to_dict()


# `parsim coverage`, what a history changes in the other commands, and what is refused.

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
def call(told: Told, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Call `parsim ARGS` in a folder with RUN.toml; returns stdout, or raises Ended with stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "RUN.toml").write_text(RUN_TOML)

    def run(*arguments: str) -> str:
        status, out, err = told(*arguments)
        if status:
            raise Ended(err)
        return out

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
