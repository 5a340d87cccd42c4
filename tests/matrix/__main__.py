"""Run the matrix: `python -m tests.matrix [--only NAME] [--write]`. With --write it renews results.json and docs/models.md."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from tests.matrix.catalogue import catalogue
from tests.matrix.checks import run_checks
from tests.matrix.table import DOCUMENT, RESULTS, write_table

ROOT = f"{Path(__file__).parents[2]}/"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", help="rows whose name contains this")
    parser.add_argument("--write", action="store_true", help=f"renew {RESULTS.name} and {DOCUMENT.name}")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for row in catalogue(Path(folder)) if not asked.only or any(text in row.name for text in asked.only)]
        found = {}
        for row in rows:
            cells = run_checks(row.spec)
            found[row.name] = {
                "group": row.group,
                **{key: text.replace(folder, "...").replace(ROOT, "") for key, text in cells.items()},
            }
            print(f"{row.name}: " + "; ".join(f"{key} {text}" for key, text in cells.items()), flush=True)
    if asked.write:
        known = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
        names = [row.name for row in catalogue(Path(tempfile.mkdtemp()))]
        merged = {**known, **found}
        RESULTS.write_text(json.dumps({name: merged[name] for name in names if name in merged}, indent=1) + "\n")
        write_table()


if __name__ == "__main__":
    main()
