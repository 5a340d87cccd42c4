"""A case that crashes, hangs or loses the device costs itself alone: the programme of one GPU goes on without it."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tools.gpu.journal import Journal, JournalRow
from tools.gpu.programme import BenchmarkCase, run_programme

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "one_gpu"

MEASURING = """
    import os, signal, sys, time
    from pathlib import Path
    sys.path[:0] = [{folder!r}, str(Path({folder!r}).parents[1])]
    from supervise import LOST_DEVICE_STATUS, note_begun, note_moved
    from tools.gpu.journal import Journal
    out = Path({out!r})
    journal = Journal(out / "rows.jsonl")
    for name, estimate_s in {cases!r}.items():
        if journal.counts(name):
            continue
        earlier = journal.rows.get(name, {{}})
        note_begun(out, name, estimate_s)
        if name.startswith("crash"):
            os.kill(os.getpid(), signal.SIGSEGV)
        if name.startswith("hang"):
            time.sleep(600)
        if name.startswith("slow"):
            for _ in range(20):
                time.sleep(0.1)
                note_moved(out)
        status = "failed" if name.startswith("lose") or (name.startswith("spoil") and not earlier) else "done"
        again = name.startswith("spoil") and not earlier
        journal.append(dict(case=name, status=status, error="", message="", seconds=0.0, again=again))
        if status == "failed":
            sys.exit(LOST_DEVICE_STATUS)
"""


@pytest.fixture
def supervised(own: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, Journal, list[str]]]:
    """Runs a measuring process with these cases, by name, with their estimates."""
    supervise = own("supervise")
    monkeypatch.setattr(supervise, "LEAST_SLACK_S", 3.0)
    monkeypatch.setattr(supervise, "GRACE_S", 0.5)
    monkeypatch.setattr(supervise, "LEAST_S", 0.1)
    monkeypatch.setattr(supervise, "POLL_S", 0.02)

    def run(cases: Mapping[str, float], budget_s: float = 100.0) -> tuple[int, Journal, list[str]]:
        script = tmp_path / "measuring.py"
        script.write_text(textwrap.dedent(MEASURING.format(folder=str(FOLDER), out=str(tmp_path), cases=dict(cases))))
        said: list[str] = []
        status = supervise.supervise(
            lambda: [sys.executable, str(script)],
            tmp_path,
            lambda: Journal(tmp_path / "rows.jsonl"),
            begin_s=time.monotonic(),
            budget_s=budget_s,
            say=said.append,
        )
        assert not (tmp_path / supervise.BEGUN_FILE).exists()
        return status, Journal(tmp_path / "rows.jsonl"), said

    return run


def outcomes(journal: Journal) -> dict[str, str]:
    return {name: row["status"] for name, row in journal.rows.items()}


def test_cases_that_crash_hang_or_lose_the_device_cost_themselves_alone(supervised: Any) -> None:
    status, journal, said = supervised({"a": 1, "crash": 1, "b": 1, "hang": 0.1, "c": 1, "lose": 1, "d": 1})
    assert status == 0
    assert outcomes(journal) == dict.fromkeys("abcd", "done") | dict.fromkeys(("crash", "hang", "lose"), "failed")
    assert journal.rows["crash"]["message"] == "its process was ended by SIGSEGV"
    assert journal.rows["hang"]["message"].endswith("it hangs")
    assert len([line for line in said if "a new process goes on" in line]) == 3


def test_a_case_that_takes_longer_and_says_so_is_left_alone(supervised: Any) -> None:
    _, journal, said = supervised({"slow": 0.1, "b": 0.1})
    assert outcomes(journal) == {"slow": "done", "b": "done"}
    assert said == []


def test_a_case_that_runs_past_the_budget_is_ended_and_leaves_its_row(supervised: Any) -> None:
    begin_s = time.monotonic()
    _, journal, _ = supervised({"a": 1, "hang": 500.0, "b": 1}, budget_s=3.0)
    assert time.monotonic() - begin_s < 20.0
    assert outcomes(journal) == {"a": "done", "hang": "failed"}
    assert journal.rows["hang"]["message"].endswith("the budget is over")


def test_a_case_that_spoils_its_process_runs_again_in_the_next_one(supervised: Any) -> None:
    status, journal, said = supervised({"a": 1, "spoil": 1, "b": 1})
    assert status == 0
    assert outcomes(journal) == {"a": "done", "spoil": "done", "b": "done"}
    assert len([line for line in said if "a new process goes on" in line]) == 1


@pytest.mark.slow
def test_a_case_that_the_budget_cuts_off_runs_again_in_a_later_call_once(supervised: Any) -> None:
    """Not for ever: one that takes far more than its estimate would take the time of all calls."""
    begun = []
    for _ in range(3):
        _, journal, said = supervised({"a": 1, "hang": 500.0}, budget_s=2.0)
        begun.append(any(line.startswith("hang: FAILED") for line in said))
    assert begun == [True, True, False]
    assert journal.counts("hang")
    assert outcomes(journal) == {"a": "done", "hang": "failed"}


def test_a_process_that_hangs_before_its_first_case_is_ended_with_the_budget(
    own: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables of earlier calls are made behind it: a device that does not open must not take their time."""
    said: list[str] = []
    supervise, begin_s = own("supervise"), time.monotonic()
    monkeypatch.setattr(supervise, "GRACE_S", 0.5)
    status = supervise.supervise(
        lambda: [sys.executable, "-c", "import time; time.sleep(25)"],
        tmp_path,
        lambda: Journal(tmp_path / "rows.jsonl"),
        begin_s=begin_s,
        budget_s=1.0,
        say=said.append,
    )
    assert time.monotonic() - begin_s < 20.0
    assert status == 1
    assert said == ["the measuring process was ended by SIGKILL before any case; nothing more can be measured"]


def test_a_process_that_never_gets_to_a_case_is_not_started_for_ever(own: Any, tmp_path: Path) -> None:
    said: list[str] = []
    status = own("supervise").supervise(
        lambda: [sys.executable, "-c", "import sys; sys.exit(75)"],
        tmp_path,
        lambda: Journal(tmp_path / "rows.jsonl"),
        begin_s=time.monotonic(),
        budget_s=60.0,
        say=said.append,
    )
    assert status == 1
    assert said == ["the measuring process lost the device before any case; nothing more can be measured"]


def test_no_case_begins_on_a_device_that_answers_no_more(tmp_path: Path) -> None:
    """An error of CUDA that sticks to the process would fail every later case, and none of them would run again."""

    def fails(rows: Mapping[str, JournalRow], remaining_s: float) -> dict[str, Any]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def works(rows: Mapping[str, JournalRow], remaining_s: float) -> dict[str, Any]:
        return {}

    measured = {"a": works, "broken": fails, "b": works}
    cases = [BenchmarkCase(name=name, estimate_s=1, measure=measure) for name, measure in measured.items()]
    begun: list[str] = []
    journal = Journal(tmp_path / "rows.jsonl")
    outcome = run_programme(
        cases,
        journal,
        budget_s=100,
        clock=time.monotonic,
        say=lambda _: None,
        begins=lambda case: begun.append(case.name),
        healthy=lambda: False,
    )
    assert (outcome.lost_device, outcome.left, begun) == (True, ("b",), ["a", "broken"])
    assert outcomes(journal) == {"a": "done", "broken": "failed"}
    again = run_programme(cases, journal, budget_s=100, clock=time.monotonic, say=lambda _: None, healthy=lambda: True)
    assert (again.ran, again.lost_device) == (("b",), False)
