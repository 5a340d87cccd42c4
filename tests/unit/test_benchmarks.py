"""Every benchmark starts and prints its table: with --quick in seconds, on sizes that say nothing about speed."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.quick import some_quick

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SAYS = {
    "bench_engines": "| dynamic |",
    "bench_plan": "| ranks simulated |",
    "bench_scale": "Lowering every rank",
    "bench_sweep": "searched, half dp",
    "bench_search": "plans considered",
    "bench_questions": "plans considered",
    "bench_screening": "rank correlation",
    "bench_virtual": "exponential",
    "bench_limits": "| complete | 18 |",
}
"""Per benchmark something of the last thing it prints."""


def test_every_benchmark_is_tested() -> None:
    assert sorted(SAYS) == sorted(path.stem for path in BENCHMARKS.glob("bench_*.py"))


@pytest.mark.parametrize("name", some_quick(sorted(SAYS), "bench_engines"))
def test_a_quick_benchmark_runs_to_its_end(name: str) -> None:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert SAYS[name] in done.stdout
    assert "--quick" in done.stdout, "nobody takes the figures for a measurement"


@pytest.fixture
def limits_page(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module beside the benchmarks, which import one another by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("limits_page")


def test_the_page_of_scale_is_what_was_measured(limits_page: Any) -> None:
    """`python benchmarks/bench_limits.py --page` writes it."""
    record = json.loads((BENCHMARKS / "limits.json").read_text(encoding="utf-8"))
    page = (BENCHMARKS.parent / "docs" / "scale.md").read_text(encoding="utf-8")
    assert set(record["cases"]) == {row.case for row in limits_page.ROWS}
    assert limits_page.page_of(page, record) == page


def test_a_quantity_is_carried_on_by_its_last_powers(limits_page: Any) -> None:
    growth = limits_page.growth_of([1, 10, 20, 40], [7.0, 1.0, 2.0, 8.0])
    assert (growth.low, growth.high) == (pytest.approx(1), pytest.approx(2))
    assert growth.at(80) == (pytest.approx(16), pytest.approx(32))
    lines = [{"size": size, "cpu_s": 0.5 * size, "bytes": 2.0**20 * size**2} for size in (10, 100, 1000)]
    row = limits_page.Row(case="x", name="it", unit="GPUs", target=100_000, memory=True)
    said = "| it | 1,000 GPUs: 8.3 min, 980 GiB | 1.00 | 14 h | 9,500 TiB |"
    assert limits_page.line_of(row, {"measured": lines}) == said
    assert math.isclose(limits_page.growth_of([10, 20], [1, 4]).high, 2)
    lines[-1]["cpu_s"] = 1000
    swept = limits_page.line_of(
        limits_page.Row(case="x", name="it", unit="points", target=10**6, memory=False), {"measured": lines}
    )
    assert swept == "| it | 1,000 points: 17 min | 1: each point by itself | 5.8 to 12 days | – |"
    lines[-1]["cpu_s"] = 500
    there = limits_page.Row(case="x", name="it", unit="GPUs", target=900, memory=False)
    assert (
        limits_page.line_of(there, {"measured": lines})
        == "| it | 1,000 GPUs: 8.3 min | 1.00 | 8.3 min at 1,000, measured | – |"
    )
