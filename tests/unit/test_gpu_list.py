"""The list of what was fixed for GPUs names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_test_of_the_list_exists() -> None:
    text = (ROOT / "docs" / "gpu.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith(("| fixed", "| fault"))]
    assert len(rows) > 25
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, f"no test stands beside: {row}"
        for path, name in named:
            assert f"def {name}(" in (ROOT / path).read_text(), f"{path} has no {name}"
