"""The matrix as a table of docs/models.md, made from its results."""

from __future__ import annotations

import json
from pathlib import Path

from experiments.common.markdown import replaced

RESULTS = Path(__file__).parent / "results.json"
DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"
COLUMNS = ("trace", "bitwise", "shards", "flop", "memory", "simulate")
WIDEST = 44


def _short(text: str) -> str:
    """A cell; what is longer is cut, and stands whole under the table."""
    return text if len(text) <= WIDEST else text.partition(":")[0] + " (see below)"


def _columns(keys: list[str]) -> str:
    return "all" if len(keys) == len(COLUMNS) else ", ".join(keys)


def table_text() -> str:
    """The table and the reasons of every cell that is refused or fails."""
    results: dict[str, dict[str, str]] = json.loads(RESULTS.read_text())
    cells = [cell for row in results.values() for key, cell in row.items() if key in COLUMNS]
    refused, failing = (sum(cell.startswith(word) for cell in cells) for word in ("refused", "FAILS"))
    lines = [
        f"{len(results)} models, {len(cells)} cells: {len(cells) - refused - failing} hold, "
        f"{refused} are refused, {failing} fail.",
        "",
        f"| model | {' | '.join(COLUMNS)} |",
        f"|---|{'---|' * len(COLUMNS)}",
    ]
    reasons: dict[str, dict[str, list[str]]] = {}
    for name, row in results.items():
        lines.append(f"| {name} | " + " | ".join(_short(row[key]).replace("|", "\\|") for key in COLUMNS) + " |")
        for key in COLUMNS:
            if row[key].startswith(("refused", "FAILS")):
                reasons.setdefault(row[key], {}).setdefault(name, []).append(key)
    lines += ["", "Refused and failing:", ""]
    for reason, where in reasons.items():
        lines.append(f"- {', '.join(f'{name} ({_columns(keys)})' for name, keys in where.items())}: {' '.join(reason.split())}")
    return "\n".join(lines)


def write_table() -> None:
    """Put the matrix into docs/models.md."""
    put_table(BEGIN, END, table_text())


def put_table(begin: str, end: str, table: str) -> None:
    """Put a table between its markers in docs/models.md."""
    DOCUMENT.write_text(replaced(DOCUMENT.read_text(), begin, end, table))
