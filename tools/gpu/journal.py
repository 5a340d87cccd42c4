"""Rows of finished cases: one JSON line each, forced to the disk before the next case begins. A killed programme loses
only its current case.

A journal is read back whole. A last line that was cut off is dropped, and the case it belonged to runs again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from parsim.errors import ConfigError

JournalRow = dict[str, Any]

CASE, STATUS = "case", "status"
DONE, SKIPPED, FAILED = "done", "skipped", "failed"
AGAIN = "again"
"""In a row of a case that failed: it is to run once more. Until then the row does not count."""


class Journal:
    """The rows of a file, and what is appended to it.

    Attributes: rows: by case, in the order of the file.
    """

    def __init__(self, path: Path) -> None:
        """Reads what is there. Raises ConfigError for a file that is not a journal."""
        self.path = path
        self.rows: dict[str, JournalRow] = {row[CASE]: row for row in read_rows(path)} if path.is_file() else {}
        _drop_cut_line(path)

    def append(self, row: Mapping[str, Any]) -> None:
        """Append the row of one case and force it to the disk."""
        line = json.dumps(dict(row), sort_keys=False) + "\n"
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self.rows[row[CASE]] = dict(row)

    def counts(self, case: str) -> bool:
        """Whether a case has a row, and is not to run once more."""
        return case in self.rows and not self.rows[case].get(AGAIN, False)

    def forget(self, cases: Iterable[str]) -> None:
        """Let these cases run again. Their rows stay in the file; of several rows of a case the last counts."""
        for case in list(cases):
            del self.rows[case]

    def add_missing(self, rows: Iterable[JournalRow]) -> None:
        """Append those whose cases are not there yet, or are to run once more."""
        for row in rows:
            if row[CASE] not in self.rows or not (self.counts(row[CASE]) or row.get(AGAIN, False)):
                self.append(row)


def read_rows(path: Path) -> list[JournalRow]:
    """The whole lines of a journal. Raises ConfigError for a line that is not a row."""
    rows = []
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        if number == len(lines) and not text.endswith("\n"):
            break  # cut off: its case runs again
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(
                f"line {number} of {path} is not JSON ({error}); give the rows.jsonl of an earlier call"
            ) from error
        if not isinstance(row, dict) or not isinstance(row.get(CASE), str):
            raise ConfigError(f"line {number} of {path} names no case; give the rows.jsonl of an earlier call")
        rows.append(row)
    return rows


def _drop_cut_line(path: Path) -> None:
    """Take away a last line without its end: what follows would be glued to it."""
    if not path.is_file():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with path.open("r+b") as file:
            file.truncate(whole)
