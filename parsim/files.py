"""Writing files: texts so that a stopped process leaves the old one or the new one, never half of one; tables as CSV."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path


def write_text_atomically(path: Path, text: str) -> None:
    """Write UTF-8 beside `path`, as NAME.partial, then rename.

    Holds against a killed process, not against a power cut: nothing is forced to disk.
    """
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """At least one row; the keys of the first are the columns."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, fieldnames=list(rows[0]))
        table.writeheader()
        table.writerows(rows)
