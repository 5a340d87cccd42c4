"""Cases in order of value within a budget of time: each runs at most once, leaves one row, and never stops the others.

A case begins if its estimated time fits into the remaining budget. One that does not fit is passed over, and a later,
shorter one may still run. A case that raises, or runs out of memory, leaves a row that says so. The next call goes on
with the cases that have no row, and once more with those that failed as the budget ended.
"""

from __future__ import annotations

import gc
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.gpu.device import SpoiledProcessError, UnsupportedError
from tools.gpu.journal import AGAIN, CASE, DONE, FAILED, SKIPPED, STATUS, Journal, JournalRow

FAILURE_KEYS = ("error", "message", "out_of_memory", "traceback")
"""What `failure` tells."""

TRACEBACK_LINES = 12
"""Kept of a traceback: its last lines, where the fault is, and its first, where it came from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkCase:
    """One measurement.

    Attributes:
        name: unique; by it a later call knows that it is done.
        estimate_s: upper estimate of its seconds, which decides whether it begins.
        measure: called with the rows so far and the seconds left; returns plain JSON.
        needs: names of cases that must be done before; where one failed or was skipped, this one is skipped.
        after: names of cases that must have a row before, whatever came of them.
        again: it can do without what left a process unfit for others. Then it runs once more, and finds its row of before.
    """

    name: str
    estimate_s: float
    measure: Callable[[Mapping[str, JournalRow], float], dict[str, Any]]
    needs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Names of the cases of one call: that ran, that were done before, and that are left for the next call.

    Attributes: lost_device: the last case left a device that answers no more, or a process unfit for others.
    """

    ran: tuple[str, ...]
    known: tuple[str, ...]
    left: tuple[str, ...]
    lost_device: bool = False


def run_programme(
    cases: Sequence[BenchmarkCase],
    journal: Journal,
    *,
    budget_s: float,
    clock: Callable[[], float],
    begin_s: float | None = None,
    say: Callable[[str], None],
    around: Callable[[Callable[[], dict[str, Any]]], dict[str, Any]] | None = None,
    begins: Callable[[BenchmarkCase], None] = lambda _: None,
    healthy: Callable[[], bool] = lambda: True,
) -> Outcome:
    """Run every case without a row that fits into the budget.

    Args:
        clock: monotonic seconds. begin_s: when the budget began; None: now.
        around: runs a case's function, and may extend its result (with clocks and power).
        begins: called right before each case.
        healthy: asked after a case that failed. If the device answers no more, no further case begins: all would fail.
    """
    start_s = clock() if begin_s is None else begin_s
    ran: list[str] = []
    known = tuple(case.name for case in cases if journal.counts(case.name))
    left: list[str] = []
    lost = False
    for case in cases:
        if journal.counts(case.name):
            continue
        if lost:
            left.append(case.name)
            continue
        remaining_s = budget_s - (clock() - start_s)
        waits = [name for name in (*case.needs, *case.after) if not journal.counts(name)]
        if waits or case.estimate_s > remaining_s:
            left.append(case.name)
            continue
        begins(case)
        case_begin_s = clock()
        row, spoiled = _row_of(case, journal.rows, remaining_s, around)
        over = clock() - start_s >= budget_s
        if row[STATUS] == FAILED and (over or (spoiled and case.again)):
            row[AGAIN] = not journal.rows.get(case.name, {}).get(AGAIN, False)
        row["seconds"] = round(clock() - case_begin_s, 6)
        journal.append(row)
        ran.append(case.name)
        say(line_of(row))
        lost = spoiled or (row[STATUS] == FAILED and not healthy())
    return Outcome(ran=tuple(ran), known=known, left=tuple(left), lost_device=lost)


def _row_of(
    case: BenchmarkCase,
    rows: Mapping[str, JournalRow],
    remaining_s: float,
    around: Callable[[Callable[[], dict[str, Any]]], dict[str, Any]] | None,
) -> tuple[JournalRow, bool]:
    """What the case measured, or why it did not; and whether it has spoiled this process."""
    missing = [name for name in case.needs if rows[name][STATUS] != DONE]
    if missing:
        return {CASE: case.name, STATUS: SKIPPED, "reason": f"needs {', '.join(missing)}, which gave no result"}, False

    def measure() -> dict[str, Any]:
        return case.measure(rows, remaining_s)

    try:
        found = measure() if around is None else around(measure)
    except UnsupportedError as error:
        return {CASE: case.name, STATUS: SKIPPED, "reason": str(error)}, False
    except Exception as error:
        row = {CASE: case.name, STATUS: FAILED, **failure(error)}
        spoiled = isinstance(error, SpoiledProcessError)
        error.__traceback__ = None  # its frames hold the arrays of the case
        gc.collect()
        return row, spoiled
    return {CASE: case.name, STATUS: DONE, **found}, False


def failure(error: BaseException) -> dict[str, Any]:
    """Type, message, whether memory ran out, and the ends of the traceback."""
    lines = [without_place(line) for line in "".join(traceback.format_exception(error)).splitlines()]
    half = TRACEBACK_LINES // 2
    kept = lines if len(lines) <= TRACEBACK_LINES else [*lines[:half], "...", *lines[-half:]]
    return {
        "error": type(error).__name__,
        "message": str(error)[:2000],
        "out_of_memory": type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError),
        "traceback": kept,
    }


def without_place(line: str) -> str:
    """A line of a traceback with the last three parts of its file's path: rows are published and name no place of a machine."""
    return re.sub(r'File "([^"]+)"', lambda found: f'File "{"/".join(Path(found[1]).parts[-3:]).lstrip("/")}"', line)


def line_of(row: Mapping[str, Any]) -> str:
    """One line for people."""
    if row[STATUS] == FAILED:
        return f"{row[CASE]}: FAILED, {row['error']}: {row['message'].splitlines()[0] if row['message'] else ''}"
    if row[STATUS] == SKIPPED:
        return f"{row[CASE]}: skipped, {row['reason']}"
    return f"{row[CASE]}: {row['seconds']:.1f} s{headline(row)}"


def headline(row: Mapping[str, Any]) -> str:
    """The number a reader looks for first, if the row has one."""
    if "flop_per_s" in row:
        return f", {1e-12 * row['flop_per_s']:.4g} TFLOP/s"
    if "bytes_per_s" in row:
        return f", {1e-9 * row['bytes_per_s']:.4g} GB/s"
    return f", {row['headline']}" if "headline" in row else ""
