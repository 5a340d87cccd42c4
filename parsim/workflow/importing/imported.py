"""Imported: what an import found, where it went, and what was left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parsim.report.tables import ReportTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The result of `parsim.import_file`.

    Attributes:
        kind: of the file. source: its path. into: what was written (None: nothing).
        summary: one sentence. found: what was read, as the JSON of `parsim import` has it.
        skipped: why parts of the file were left out, and how many. warnings: what to know before using the result.
        tables: for people.
    """

    kind: str
    source: Path
    into: Path | None
    summary: str
    found: Mapping[str, Any]
    skipped: Mapping[str, int]
    warnings: tuple[str, ...]
    tables: tuple[ReportTable, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "source": str(self.source),
            "into": None if self.into is None else str(self.into),
            "summary": self.summary,
            "found": dict(self.found),
            "skipped": dict(self.skipped),
            "warnings": list(self.warnings),
        }

    def __str__(self) -> str:
        from parsim.report.tables import to_text

        return "\n".join([self.summary, *(to_text(table) for table in self.tables), *self.notes()]).rstrip()

    def notes(self) -> list[str]:
        """What was left out, and the warnings, one line each."""
        left = ", ".join(f"{count} {why}" for why, count in self.skipped.items())
        return [*([f"Left out: {left}"] if left else []), *(f"Note: {warning}" for warning in self.warnings)]
