"""A share of `make chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.chaos.chaos import play, table


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are looked up in /proc")
@pytest.mark.xdist_group("launch")
def test_twenty_disturbed_trainings_lose_nothing(tmp_path: Path) -> None:
    found = play(tmp_path, 20, seed=1)
    assert [outcome for outcome in found if outcome.problems] == [], table(found)
