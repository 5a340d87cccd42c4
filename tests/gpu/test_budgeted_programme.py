"""The programme under a fake clock: budget, order, exactly once, faults that stop nobody, journals cut off in the middle."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsim.errors import ConfigError, ExecutionError
from tools.gpu.board import BoardReading, BoardWatch, find_reader, parse_smi, summarised
from tools.gpu.device import SpoiledProcessError, UnsupportedError, driver_uuid
from tools.gpu.journal import Journal, JournalRow, read_rows
from tools.gpu.programme import BenchmarkCase, Outcome, run_programme

ROOT = Path(__file__).resolve().parents[2]


class Clock:
    """Stands still but for what cases take."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def case(self, name: str, estimate_s: float, seconds: float | None = None, **more: Any) -> BenchmarkCase:
        """One that takes `seconds` (its estimate)."""

        def measure(rows: Mapping[str, JournalRow], remaining_s: float) -> dict[str, Any]:
            self.now_s += estimate_s if seconds is None else seconds
            return {"remaining_s": remaining_s, "before": len(rows)}

        return BenchmarkCase(name=name, estimate_s=estimate_s, measure=measure, **more)


def run(cases: list[BenchmarkCase], journal: Journal, clock: Clock, budget_s: float = 1000.0) -> Outcome:
    return run_programme(cases, journal, budget_s=budget_s, clock=clock, say=lambda _: None)


def failing(error: Exception) -> BenchmarkCase:
    def measure(rows: Mapping[str, JournalRow], remaining_s: float) -> dict[str, Any]:
        raise error

    return BenchmarkCase(name="failing", estimate_s=1.0, measure=measure)


@given(
    estimates=st.lists(st.floats(0.1, 50), min_size=1, max_size=12),
    overrun=st.floats(0.2, 1.0),
    budget_s=st.floats(1, 120),
)
def test_no_call_overruns_its_budget_and_calls_together_do_every_case_once(
    tmp_path_factory: pytest.TempPathFactory, estimates: list[float], overrun: float, budget_s: float
) -> None:
    """Estimates are upper ones: cases take `overrun` <= 1 of them."""
    path, clock = tmp_path_factory.mktemp("rows") / "rows.jsonl", Clock()
    cases = [clock.case(f"case {number}", s, overrun * s) for number, s in enumerate(estimates)]
    fitting = [case for case in cases if case.estimate_s <= budget_s]
    for _ in range(len(cases) + 1):
        begin_s = clock()
        outcome = run(cases, Journal(path), clock, budget_s)
        assert clock() - begin_s <= budget_s + 1e-9
        assert len(outcome.ran) + len(outcome.known) + len(outcome.left) == len(cases)
    names = list(Journal(path).rows)
    assert len(names) == (path.read_text().count("\n") if names else 0)
    assert sorted(names) == sorted(case.name for case in fitting)
    assert outcome.ran == ()


def test_cases_run_in_order_and_a_short_one_fills_what_is_left(tmp_path: Path) -> None:
    clock = Clock()
    cases = [clock.case("first", 60), clock.case("too long", 60), clock.case("short", 10)]
    outcome = run(cases, Journal(tmp_path / "rows.jsonl"), clock, 100.0)
    assert outcome == Outcome(ran=("first", "short"), known=(), left=("too long",))


def test_a_case_that_raises_leaves_a_row_and_the_others_run(tmp_path: Path) -> None:
    clock, journal = Clock(), Journal(tmp_path / "rows.jsonl")
    out_of_memory = type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate 2 GiB")
    for error, out in ((ValueError("a fault\nof two lines"), False), (out_of_memory, True)):
        journal = Journal(tmp_path / f"{type(error).__name__}.jsonl")
        run([failing(error), clock.case("after", 1)], journal, clock)
        row = journal.rows["failing"]
        assert (row["status"], row["error"], row["message"]) == ("failed", type(error).__name__, str(error))
        assert row["out_of_memory"] is out
        assert any('File "tests/gpu/test_budgeted_programme.py"' in line for line in row["traceback"])
        assert str(ROOT) not in json.dumps(row)
        assert journal.rows["after"]["status"] == "done"


@pytest.mark.slow
def test_a_case_that_spoils_its_process_ends_it_and_runs_once_more(tmp_path: Path) -> None:
    """Once: where it fails again, it has failed. Only a case that can do without what failed is worth it."""
    spoiling = replace(failing(SpoiledProcessError("no capture")), again=True)
    clock, path = Clock(), tmp_path / "rows.jsonl"
    cases = [spoiling, clock.case("waits", 1, after=("failing",)), clock.case("later", 1)]
    first = run(cases, Journal(path), clock)
    assert (first.ran, first.left, first.lost_device) == (("failing",), ("waits", "later"), True)
    assert Journal(path).rows["failing"]["status"] == "failed"
    again = run(cases, Journal(path), clock)
    assert (again.ran, again.known, again.lost_device) == (("failing",), (), True)
    last = run(cases, Journal(path), clock)
    assert (last.ran, last.known, last.lost_device) == (("waits", "later"), ("failing",), False)
    once = Journal(tmp_path / "once.jsonl")
    assert run([replace(spoiling, again=False), clock.case("later", 1)], once, clock).left == ("later",)
    assert run([replace(spoiling, again=False), clock.case("later", 1)], once, clock).ran == ("later",)


@pytest.mark.slow
@pytest.mark.parametrize("takes_s", [9.0, 11.0])
def test_a_case_that_fails_as_the_budget_ends_runs_again_in_a_later_call_once(tmp_path: Path, takes_s: float) -> None:
    """A calibration stops its own launch then, and goes on from there in a later call."""
    clock, path = Clock(), tmp_path / "rows.jsonl"

    def stops(rows: Mapping[str, JournalRow], remaining_s: float) -> dict[str, Any]:
        clock.now_s += takes_s
        raise ExecutionError("the calibration did not end in time")

    case = BenchmarkCase(name="calibration", estimate_s=5.0, measure=stops)
    ran = [run([case], Journal(path), clock, 10.0).ran for _ in range(3)]
    assert ran == [("calibration",), ("calibration",) if takes_s > 10.0 else (), ()]


def test_a_row_that_counts_takes_the_place_of_one_that_does_not(tmp_path: Path) -> None:
    """A folder of an earlier call has the cut case, the file of a later one what came of it."""
    cut, done = {"case": "a", "status": "failed", "again": True}, {"case": "a", "status": "done"}
    journal = Journal(tmp_path / "rows.jsonl")
    journal.append(cut)
    assert not journal.counts("a")
    journal.add_missing([done])
    assert journal.counts("a")
    journal.add_missing([cut])
    assert journal.rows["a"] == done


def test_a_case_that_the_device_cannot_run_is_skipped_with_the_reason(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "rows.jsonl")
    run([failing(UnsupportedError("needs CUDA"))], journal, Clock())
    assert journal.rows["failing"]["status"] == "skipped"
    assert journal.rows["failing"]["reason"] == "needs CUDA"


def test_what_needs_a_case_waits_for_it_and_is_skipped_if_it_failed(tmp_path: Path) -> None:
    clock = Clock()
    cases = [clock.case("long", 90), clock.case("needs it", 1, needs=("long",)), clock.case("comes after", 1, after=("long",))]
    journal = Journal(tmp_path / "rows.jsonl")
    assert run(cases, journal, clock, 10.0).left == ("long", "needs it", "comes after")
    assert run(cases, journal, clock, 100.0).ran == ("long", "needs it", "comes after")
    failed = Journal(tmp_path / "failed.jsonl")
    broken = [failing(ValueError("no")), clock.case("needs", 1, needs=("failing",)), clock.case("after", 1, after=("failing",))]
    run(broken, failed, clock)
    assert failed.rows["needs"]["status"] == "skipped"
    assert failed.rows["after"]["status"] == "done"


def test_a_line_cut_off_runs_again_and_spoils_nothing(tmp_path: Path) -> None:
    path, clock = tmp_path / "rows.jsonl", Clock()
    cases = [clock.case(name, 1) for name in "abc"]
    run(cases, Journal(path), clock)
    whole = path.read_text()
    path.write_text(whole[:-5])
    assert run(cases, Journal(path), clock).ran == ("c",)
    assert [row["case"] for row in read_rows(path)] == ["a", "b", "c"]


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for text in ("nonsense\n", '["a list"]\n', '{"no": "case"}\n'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="line 1 of"):
            Journal(path)


def test_rows_are_json_and_carry_what_surrounds_them(tmp_path: Path) -> None:
    def around(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        return {**measure(), "board": {"absent": "here"}}

    path, clock = tmp_path / "rows.jsonl", Clock()
    run_programme([clock.case("a", 2)], Journal(path), budget_s=10, clock=clock, say=lambda _: None, around=around)
    (row,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert row == {"case": "a", "status": "done", "remaining_s": 10.0, "before": 0, "board": {"absent": "here"}, "seconds": 2.0}


# --- clocks and power -------------------------------------------------------------------------------------------------


def test_nvidia_smi_is_read_and_what_it_does_not_tell_is_left_out() -> None:
    read = parse_smi("412.50, 700.00, 1980, 1980, 3201, [N/A]\n")
    assert read == {
        "power_w": 412.5,
        "power_limit_w": 700.0,
        "sm_clock_hz": 1.98e9,
        "sm_clock_max_hz": 1.98e9,
        "memory_clock_hz": 3.201e9,
    }


def test_a_watch_reads_before_during_and_after() -> None:
    powers = iter(range(100, 10000))

    def reader() -> BoardReading:
        return {"power_w": float(next(powers))}

    with BoardWatch(reader, "test", every_s=0.01).open() as watch:
        time.sleep(0.1)
    summary = watch.summary()
    assert summary["readings"] >= 3
    assert summary["power_w"]["least"] == 100.0
    assert summary["power_w"]["most"] == 100.0 + summary["readings"] - 1


class FakeNvml:
    """In place of the package: a board of which the driver tells power alone, and why its clock is low."""

    NVMLError = RuntimeError
    NVML_CLOCK_SM = NVML_CLOCK_MEM = NVML_TEMPERATURE_GPU = 0
    reasons = 0x4 | 0x1

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 650_000

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return self.reasons

    def __getattr__(self, name: str) -> Any:
        def refused(*_: object) -> None:
            raise RuntimeError("not supported")

        if name.startswith("nvmlDeviceGetCurrent"):
            raise AttributeError(name)
        return refused


def test_a_board_says_whether_its_limit_of_power_lowers_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    reader, source = find_reader()
    assert (source, reader is not None) == ("NVML", True)
    assert reader is not None
    assert reader() == {"power_w": 650.0, "power_capped": 1.0}
    nvml.reasons = 0x1
    assert reader() == {"power_w": 650.0, "power_capped": 0.0}
    assert summarised([{"power_capped": 1.0}, {"power_capped": 0.0}, {"power_capped": 1.0}])["power_capped"]["median"] == 1.0
    monkeypatch.delattr(FakeNvml, "nvmlDeviceGetCurrentClocksThrottleReasons")
    reader, _ = find_reader()
    assert reader is not None
    assert reader() == {"power_w": 650.0}, "an older package has no such function"


@pytest.mark.parametrize(("boards", "power_w"), [(1, 100.0), (8, 107.0)])
def test_the_board_that_is_read_is_the_one_that_computes(monkeypatch: pytest.MonkeyPatch, boards: int, power_w: float) -> None:
    """CUDA_VISIBLE_DEVICES=7: torch's first GPU is the driver's eighth, and with one board in sight the first."""

    class Machine(FakeNvml):
        def nvmlDeviceGetCount(self) -> int:
            return boards

        def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
            return {"GPU-0f": 7}[uuid]

        def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
            return 100_000 + 1000 * handle

    monkeypatch.setitem(sys.modules, "pynvml", Machine())
    reader, _ = find_reader(driver_uuid("0f"))
    assert reader is not None
    assert reader()["power_w"] == power_w
    assert (driver_uuid(""), driver_uuid("MIG-0f")) == ("", "MIG-0f")


def test_nvidia_smi_is_asked_for_the_same_board(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ran(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command[1])
        return subprocess.CompletedProcess(command, 0, "350.0, 700, 1980, 1980, 2619, 40", "")

    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr("tools.gpu.board.shutil.which", lambda _: "nvidia-smi")
    monkeypatch.setattr("tools.gpu.board.subprocess.run", ran)
    reader, source = find_reader("GPU-0f")
    assert reader is not None
    assert (source, reader()["power_w"]) == ("nvidia-smi", 350.0)
    assert asked == ["--id=GPU-0f"] * 2


def test_a_board_that_tells_nothing_says_why() -> None:
    with BoardWatch(None, "no package nvidia-ml-py; no nvidia-smi").open() as watch:
        pass
    assert watch.summary() == {"absent": "no package nvidia-ml-py; no nvidia-smi"}
    assert summarised([{"power_w": 1.0}, {}, {"power_w": 3.0}]) == {"power_w": {"least": 1.0, "median": 2.0, "most": 3.0}}
    reader, why = find_reader()
    assert (reader is None) == (why != "NVML" and why != "nvidia-smi")
