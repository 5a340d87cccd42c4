"""Everything worth measuring on one GPU, most valuable first, within a budget, row by row.

    python experiments/one_gpu/run.py --budget 540 --out DIR --done FILE          one call on the machine with the GPU
    python experiments/one_gpu/run.py --device cpu --quick --budget 120 --out DIR --done FILE      the rehearsal on any CPU
    python experiments/one_gpu/run.py --analyse DIR                               the tables of what is there

Every finished case is one line of DIR/rows.jsonl, forced to the disk. FILE gets the same lines; on a fresh machine FILE alone
(or the rows.jsonl of an earlier call, copied there) is enough to go on: no case in it runs again. A case that fails leaves a
row with its error, and the programme goes on; --retry runs those that failed once more. Cases run in a process of their own
(`supervise.py`), so one that crashes or hangs costs itself alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

BEGIN_S = time.monotonic()  # what imports take belongs to the budget

from supervise import LOST_DEVICE_STATUS, note_begun, note_moved, own_command, scratch_folder, supervise  # noqa: E402

from parsim.errors import ParsimError  # noqa: E402
from parsim.execute.processes.output import PARENT_VARIABLE, die_with_parent  # noqa: E402
from parsim.files import write_text_atomically  # noqa: E402
from tools.gpu.journal import AGAIN, CASE, DONE, FAILED, SKIPPED, STATUS, Journal, JournalRow, read_rows  # noqa: E402

if TYPE_CHECKING:
    from cases import Programme
    from questions import Scope

    from tools.gpu.device import MeasuredDevice
    from tools.gpu.programme import BenchmarkCase

ROWS_FILE = "rows.jsonl"
RESERVE_S = 10.0
"""Of the budget, for the tables at the end."""


class TwoFiles(Journal):
    """The journal of DIR, whose rows are written to FILE, too."""

    def __init__(self, path: Path, other: Path | None) -> None:
        super().__init__(path)
        if other is not None:
            other.parent.mkdir(parents=True, exist_ok=True)
        self._other = None if other is None or other.resolve() == path.resolve() else Journal(other)
        if self._other is not None:
            self.add_missing(list(self._other.rows.values()))
            self._other.add_missing(list(self.rows.values()))

    def append(self, row: Any) -> None:
        super().append(row)
        if self._other is not None and self._other.rows.get(row[CASE]) != row:
            self._other.append(row)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="small models and sizes: the rehearsal")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds of this call, imports included")
    parser.add_argument("--out", type=Path, default=Path("runs/one_gpu"))
    parser.add_argument("--done", type=Path, help="rows of earlier calls; finished cases are appended")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--skip", help="leave out cases whose names contain this")
    parser.add_argument("--retry", action="store_true", help="run the cases that failed, or needed one that did, once more")
    parser.add_argument("--list", action="store_true", help="the cases with their estimates, without running any")
    parser.add_argument("--analyse", type=Path, metavar="DIR", help="the tables of DIR, without measuring")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="the results as JSON on stdout")
    parser.add_argument("--measuring", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--again", action="append", default=[], help=argparse.SUPPRESS)
    asked = parser.parse_args()
    try:
        if asked.analyse is not None:
            return show(asked.analyse, as_json=asked.json)
        if asked.list:
            return list_cases(asked)
        return measure(asked) if asked.measuring else watched(asked)
    except ParsimError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def watched(asked: argparse.Namespace) -> int:
    """Measure in processes of their own, then make the tables."""
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / ROWS_FILE
    journal = TwoFiles(path, asked.done)
    again = {name: row for name, row in journal.rows.items() if asked.retry and failed(row)}
    given = ["--device", asked.device, "--out", str(asked.out), "--seed", str(asked.seed), f"--only={asked.only}"]
    given += ["--quick"] if asked.quick else []
    given += ["--done", str(asked.done)] if asked.done is not None else []
    given += [f"--skip={asked.skip}"] if asked.skip is not None else []

    def command() -> list[str]:
        now = TwoFiles(path, asked.done).rows
        return own_command([*given, *(f"--again={name}" for name, row in again.items() if now.get(name) == row)])

    status = supervise(
        command,
        scratch_folder(asked.out),
        lambda: TwoFiles(path, asked.done),
        begin_s=BEGIN_S,
        budget_s=asked.budget - RESERVE_S,
        say=progress,
    )
    from analyse import analyse

    rows = list(TwoFiles(path, asked.done).rows.values())
    if not rows:
        return status
    results, text = analyse(rows)
    write_text_atomically(asked.out / "results.json", json.dumps(results, indent=1))
    print(json.dumps(results) if asked.json else text)
    return status


def scope_of(asked: argparse.Namespace) -> Scope:
    from questions import ON_A_GPU, REHEARSED

    return REHEARSED if asked.quick else ON_A_GPU


def measure(asked: argparse.Namespace) -> int:
    """The measuring process: every case that fits into the budget."""
    die_with_parent(int(os.environ[PARENT_VARIABLE]))
    import torch
    from cases import Programme

    from tools.gpu.board import BoardWatch, find_reader
    from tools.gpu.device import open_device
    from tools.gpu.programme import run_programme

    scope = scope_of(asked)
    device = open_device(asked.device)
    if asked.device == "cpu":
        torch.set_num_threads(1)
    asked.out.mkdir(parents=True, exist_ok=True)
    journal = TwoFiles(asked.out / ROWS_FILE, asked.done)
    journal.forget(asked.again)
    restore_files(journal, asked.out, scope)

    def say(line: str) -> None:
        progress(line)
        note_moved(scratch_folder(asked.out))

    programme = Programme(device, scope, asked.out, seed=asked.seed, say=say)
    cases = chosen(programme, asked)
    reader, source = find_reader(device.uuid) if asked.device == "cuda" else (None, "a CPU has no board")

    def beside(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        with BoardWatch(reader, source).open() as watch:
            found = run()
        return {**found, "board": watch.summary()}

    outcome = run_programme(
        cases,
        journal,
        budget_s=asked.budget,
        clock=time.monotonic,
        begin_s=BEGIN_S,
        say=progress,
        around=beside if asked.device == "cuda" else None,
        begins=lambda case: note_begun(scratch_folder(asked.out), case.name, case.estimate_s),
        healthy=lambda: answers(device),
    )
    progress(f"{len(outcome.ran)} cases ran, {len(outcome.known)} were done before, {len(outcome.left)} are left")
    return LOST_DEVICE_STATUS if outcome.lost_device else 0


def answers(device: MeasuredDevice) -> bool:
    """Whether the device still computes for this process. After some errors of CUDA it does not until the process ends."""
    import torch

    try:
        device.clock.synchronize()
        return bool(torch.ones(2, device=device.device).sum().item() == 2.0)
    except torch.OutOfMemoryError:
        return True
    except RuntimeError:
        return False


def chosen(programme: Programme, asked: argparse.Namespace) -> list[BenchmarkCase]:
    """The cases that --only and --skip leave."""
    return [
        case for case in programme.cases() if asked.only in case.name and (asked.skip is None or asked.skip not in case.name)
    ]


def list_cases(asked: argparse.Namespace) -> int:
    """On any machine: nothing is run."""
    from cases import Programme

    from tools.gpu.device import open_device

    scope = scope_of(asked)
    path = asked.out / ROWS_FILE
    files = [file for file in (path, asked.done) if file is not None and file.is_file()]
    known = {row[CASE] for file in files for row in read_rows(file) if not row.get(AGAIN, False)}
    programme = Programme(open_device("cpu"), scope, asked.out, seed=asked.seed, say=progress)
    cases = chosen(programme, asked)
    for case in cases:
        print(f"{case.estimate_s:6.1f} s  {case.name}{'  (done)' if case.name in known else ''}")
    print(f"{sum(case.estimate_s for case in cases if case.name not in known):6.0f} s at most, left to do")
    return 0


def failed(row: JournalRow) -> bool:
    """Whether a case failed, or was skipped for want of one that did; one that needs CUDA is skipped for good."""
    return row[STATUS] == FAILED or (row[STATUS] == SKIPPED and row["reason"].startswith("needs "))


def restore_files(journal: Journal, out: Path, scope: Scope) -> None:
    """The profiles and the predictions of earlier calls, where DIR has them no longer: the rows hold both."""
    from cases import PREDICTIONS_FILE, calibration_name, profile_path, write_predictions
    from predictions import unpacked_profile

    from parsim.hardware.profile import save_profile

    for precision in scope.precisions:
        row, path = journal.rows.get(calibration_name(precision), {}), profile_path(out, scope, precision)
        if row.get(STATUS) == DONE and not path.is_file():
            save_profile(unpacked_profile(row["profile"]), path)
    if not (out / PREDICTIONS_FILE).is_file():
        write_predictions(out, journal.rows)


def show(folder: Path, *, as_json: bool) -> int:
    """Write DIR/results.json and DIR/RESULTS.md from the rows, and print one of them."""
    path = folder / ROWS_FILE
    if not path.is_file():
        print(f"error: there are no rows in {folder}; measure first, with --out {folder}", file=sys.stderr)
        return 1
    from analyse import analyse

    results, text = analyse(read_rows(path))
    write_text_atomically(folder / "results.json", json.dumps(results, indent=1))
    write_text_atomically(folder / "RESULTS.md", text)
    print(json.dumps(results) if as_json else text)
    return 0


def progress(line: str) -> None:
    print(f"[{time.monotonic() - BEGIN_S:6.1f} s] {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
