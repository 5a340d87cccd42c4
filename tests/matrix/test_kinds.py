"""The kinds of modules: the page holds what is kept, and parsim still says it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the torch extra")
pytest.importorskip("transformers", reason="needs the hf extra")

from tests.matrix.kinds import BEGIN, END, KINDS, RESULTS, Found, ask, specs, table_text
from tests.matrix.table import DOCUMENT
from tests.quick import some_quick

pytestmark = pytest.mark.hf
COMMITTED = {name: Found(*cells) for name, cells in json.loads(RESULTS.read_text()).items()}
SAMPLE = ("LSTM, GRU, RNN", "mixture of experts", "GAN")


@pytest.mark.parametrize("name", some_quick(COMMITTED, *SAMPLE))
def test_a_kind_is_planned_as_the_page_says(name: str, tmp_path: Path) -> None:
    found, committed = ask(specs(tmp_path)[name]), COMMITTED[name]
    assert found[1:] == committed[1:]
    assert found.plan.split()[0] == committed.plan.split()[0], found.plan


def test_the_page_holds_what_is_kept() -> None:
    text = DOCUMENT.read_text()
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip() == table_text()
    assert [kind.name for kind in KINDS] == list(COMMITTED)
    assert not any(found.plan.startswith("refused") for found in COMMITTED.values())
