"""Write docs/readers.md: what is read of each tool's files, by the rows of `parsim.formats`, and how many of ours are right.

python tools/reader_matrix.py
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parsim.errors import ParsimError
from parsim.formats.configs import format_name, read_recipe
from parsim.formats.recipe import Recipe
from parsim.formats.source import file_formats

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "readers.md"
SAMPLES = ROOT / "tests" / "frameworks"
BECOMES = {
    "machine": "links, slots or collectives of a profile or a network (`parsim import`)",
    "run": "keys of a run file (`parsim import`)",
    "trace": "a timeline and the ledger of its step (`parsim import`)",
    "recipe": "a whole question (`--config`)",
}
HEAD = """# What is read of each tool

`python tools/reader_matrix.py` writes this page from the readers themselves. A file is recognised by its content. What changes
neither time nor memory (rates, seeds, logging, checkpoints) is counted and ignored. What changes either and is not modelled is
listed with what is done instead. Keys that parsim does not know are listed, the likeliest to matter first. A degree of
parallelism that is not understood is an error.

| format | files | becomes | layouts | refused | of our own files, read right |
|---|---|---|---|---|---|
"""


def samples() -> tuple[Counter[str], Counter[str]]:
    """By format: files of tests/frameworks, and those that are read, or refused, as tests/frameworks/expected.json has it."""
    all_files: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for name, expected in json.loads((SAMPLES / "expected.json").read_text(encoding="utf-8")).items():
        kind = format_name(SAMPLES / name)
        all_files[kind] += 1
        try:
            recipe = read_recipe(SAMPLES / name)
        except ParsimError as error:
            right[kind] += expected.get("refused", "?") in str(error)
            continue
        right[kind] += not differences(recipe, expected)
    return all_files, right


def differences(recipe: Recipe, expected: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What a recipe says and what it should say, by key, where they differ; of tables only the expected keys count."""
    found: dict[str, Any] = {key: getattr(recipe, key, None) for key in expected}
    for key, value in expected.items():
        table = found[key]
        if isinstance(value, Mapping) and isinstance(table, Mapping):
            found[key] = {inner: table.get(inner) for inner in value}
    return {key: (found[key], value) for key, value in expected.items() if found[key] != value}


def page() -> str:
    """The text of docs/readers.md."""
    all_files, right = samples()
    rows = [
        f"| `{name}` | {row.what} | {BECOMES[row.reads]} | {row.layouts} | {row.refuses} | "
        f"{f'{right[name]} of {all_files[name]}' if all_files[name] else ''} |"
        for name, row in sorted(file_formats().items())
        if row.reads is not None
    ]
    return HEAD + "\n".join(rows) + f"\n\nTogether: {right.total()} of {all_files.total()} files of tests/frameworks.\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
