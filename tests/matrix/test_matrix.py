"""The matrix of models against its committed results: what held must hold, what is refused or fails keeps its reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the torch extra")
pytest.importorskip("transformers", reason="needs the hf extra")

from tests.matrix.catalogue import catalogue
from tests.matrix.checks import run_checks
from tests.matrix.table import BEGIN, COLUMNS, DOCUMENT, END, RESULTS, table_text
from tests.quick import some_quick

pytestmark = pytest.mark.hf
COMMITTED: dict[str, dict[str, str]] = json.loads(RESULTS.read_text())
SAMPLE = ("plain CNN", "U-Net", "diffusion net", "LSTM", "experts, loop in Python", "LoRA", "triplet", "gpt_small", "gpt2")


def _held(cell: str) -> bool:
    return not cell.startswith(("refused", "FAILS"))


@pytest.mark.parametrize("name", some_quick(COMMITTED, *SAMPLE))
def test_a_model_does_what_the_matrix_says(name: str, tmp_path: Path) -> None:
    row = next(row for row in catalogue(tmp_path) if row.name == name)
    found = run_checks(row.spec)
    for column in COLUMNS:
        committed = COMMITTED[name][column]
        assert _held(found[column]) == _held(committed), f"{column}: {found[column]}; committed: {committed}"


def test_the_table_is_that_of_the_results(tmp_path: Path) -> None:
    text = DOCUMENT.read_text()
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip() == table_text().strip()
    assert [row.name for row in catalogue(tmp_path)] == list(COMMITTED)
    assert len(COMMITTED) >= 60
