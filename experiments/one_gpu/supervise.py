"""The process that watches the one that measures: a case that crashes, hangs or breaks the device costs itself alone.

The measuring process writes which case begins. If it ends without a row for that case, or takes far longer than the estimate, a
row says so, and a new process goes on with the next case. An error of CUDA that sticks to its process ends that process too.
So does a CUDA graph that cannot be captured. A case that the budget cuts off runs again in a later call, once: one that takes
far more than its estimate would take the time of all calls.
torch is not imported here.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from parsim.execute.processes.output import PARENT_VARIABLE
from tools.gpu.journal import AGAIN, CASE, FAILED, STATUS, Journal

BEGUN_FILE = "begun.json"
LOST_DEVICE_STATUS = 75
"""Exit status of a measuring process that can measure no more; the row of the case is written."""

SLACK, LEAST_SLACK_S = 3.0, 60.0
"""A case hangs if it says nothing for so many times its estimate, and so many seconds more."""

GRACE_S = 20.0
"""Behind the end of the budget, until a case that still runs is ended: a command that is killed from outside loses its row."""

LEAST_S = 20.0
"""Of budget that a new process is worth starting for: it imports torch again."""

POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunCase:
    """Attributes: at_s: when it began, on the machine's monotonic clock, which all its processes share. moved_s: when it last
    said something."""

    case: str
    estimate_s: float
    at_s: float
    moved_s: float

    @property
    def limit_s(self) -> float:
        """When it counts as hanging, on that clock."""
        return self.moved_s + SLACK * self.estimate_s + LEAST_SLACK_S


def note_begun(folder: Path, case: str, estimate_s: float) -> None:
    """Write which case begins, whole or not at all."""
    now_s = time.monotonic()
    _write(folder, BegunCase(case=case, estimate_s=estimate_s, at_s=now_s, moved_s=now_s))


def note_moved(folder: Path) -> None:
    """The case that has begun goes on. A calibration takes minutes and tells of every round."""
    begun = read_begun(folder)
    if begun is not None:
        _write(folder, replace(begun, moved_s=time.monotonic()))


def _write(folder: Path, begun: BegunCase) -> None:
    part = folder / f"{BEGUN_FILE}.part"
    part.write_text(json.dumps(asdict(begun)))
    part.replace(folder / BEGUN_FILE)


def read_begun(folder: Path) -> BegunCase | None:
    path = folder / BEGUN_FILE
    return BegunCase(**json.loads(path.read_text())) if path.is_file() else None


def supervise(
    command: Callable[[], list[str]],
    folder: Path,
    open_journal: Callable[[], Journal],
    *,
    begin_s: float,
    budget_s: float,
    say: Callable[[str], None],
) -> int:
    """Run the measuring process until it has done what fits into the budget, as often as it has to be started anew.

    command: of the next process, without its budget. folder: where it says which case begins; no file of it has to travel.
    begin_s: of the budget, on the monotonic clock. Returns the exit status of the last process; 1 where none gets as far as a
    case.
    """
    left_s = budget_s - (time.monotonic() - begin_s)
    while True:
        before = dict(open_journal().rows)
        (folder / BEGUN_FILE).unlink(missing_ok=True)
        status, ended, cut = _one_process([*command(), "--budget", f"{left_s:.1f}"], folder, end_s=begin_s + budget_s + GRACE_S)
        begun, journal = read_begun(folder), open_journal()
        (folder / BEGUN_FILE).unlink(missing_ok=True)
        if begun is not None and journal.rows.get(begun.case) == before.get(begun.case):
            why = ended or f"its process {_end_of(status)}"
            first = cut and not before.get(begun.case, {}).get(AGAIN, False)
            journal.append({**_failed_row(begun, why), **({AGAIN: True} if first else {})})
            say(f"{begun.case}: FAILED, {why}")
        elif status in (0, 1):
            return status
        left_s = budget_s - (time.monotonic() - begin_s)
        if journal.rows == before:
            say(f"the measuring process {_end_of(status)} before any case; nothing more can be measured")
            return 1
        if left_s < LEAST_S:
            return 0
        say(f"a new process goes on, {left_s:.0f} s are left")


def _one_process(command: Sequence[str], folder: Path, *, end_s: float) -> tuple[int, str, bool]:
    """Its exit status; why it was ended, "" if it ended by itself; and whether for the budget alone."""
    environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
    process = subprocess.Popen(list(command), env=environment)
    try:
        while process.poll() is None:
            begun, now_s = read_begun(folder), time.monotonic()
            if begun is None and now_s > end_s:
                process.kill()
                return process.wait(), "ended: the budget is over", True
            if begun is not None and now_s > min(begun.limit_s, end_s):
                hangs = now_s > begun.limit_s
                took = f"after {now_s - begun.at_s:.0f} s, with an estimate of {begun.estimate_s:.0f} s"
                process.kill()
                return process.wait(), f"ended {took}: {'it hangs' if hangs else 'the budget is over'}", not hangs
            time.sleep(POLL_S)
        return process.returncode, "", False
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _end_of(status: int) -> str:
    if status == LOST_DEVICE_STATUS:
        return "lost the device"
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _failed_row(begun: BegunCase, why: str) -> dict[str, Any]:
    return {
        CASE: begun.case,
        STATUS: FAILED,
        "error": "ProcessEnded",
        "message": why,
        "out_of_memory": False,
        "traceback": [],
        "seconds": round(time.monotonic() - begun.at_s, 3),
    }


def own_command(arguments: Sequence[str]) -> list[str]:
    """The measuring process: the same script with the same arguments."""
    return [sys.executable, str(Path(__file__).with_name("run.py")), *arguments, "--measuring"]


def scratch_folder(out: Path) -> Path:
    """Outside DIR, whose files may have to travel, few and small; the same for the same DIR, so that a stopped calibration goes
    on."""
    name = hashlib.sha256(str(out.resolve()).encode()).hexdigest()[:12]
    path = Path(tempfile.gettempdir()) / f"parsim-one-gpu-{name}"
    path.mkdir(exist_ok=True)
    return path
