"""The run files of docs/relaxed.md: all are listed, planned and simulated."""

from __future__ import annotations

from pathlib import Path

import pytest

import parsim
from parsim.app.config import load_config

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "relaxed"
FILES = sorted(FOLDER.glob("*.toml"))


def test_every_kind_has_a_run_file_that_the_page_names() -> None:
    page = (FOLDER.parent / "relaxed.md").read_text(encoding="utf-8")
    assert [path.stem for path in FILES] == ["all_reduce", "average", "gossip", "merge", "stale"]
    assert all(f"(relaxed/{path.name})" in page for path in FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_run_file_is_planned(path: Path) -> None:
    answer = parsim.plan(path)
    rule = answer.prediction.plan.synchronisation
    assert rule.kind == path.stem == load_config(path).plan.relaxed.kind
    assert answer.fits
    document = answer.to_dict()
    told = [text for text in document["chosen"]["warnings"] if "not synchronous training" in text]
    assert bool(told) == rule.is_relaxed
    assert document["chosen"]["plan"].get("executable", True)
    if rule.kind != "all_reduce":
        assert document["chosen"]["plan"]["synchronisation"]["kind"] == rule.kind
    found = {
        "average": "averaging weights every 8 steps",
        "gossip": "neighbours (ring)",
        "merge": "one after another (staleness) every 4 steps",
        "stale": "2 steps late",
    }
    assert found.get(rule.kind, "data parallelism") in answer.sentence()
