"""Every benchmark starts and prints its table: with --quick in seconds, on sizes that say nothing about speed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SAYS = {
    "bench_engines": "| dynamic |",
    "bench_plan": "| ranks simulated |",
    "bench_scale": "Lowering every rank",
    "bench_sweep": "searched, half dp",
    "bench_search": "plans considered",
    "bench_large_search": "not tried",
    "bench_screening": "rank correlation",
    "bench_virtual": "exponential",
}
"""Per benchmark something of the last thing it prints."""


def test_every_benchmark_is_tested() -> None:
    assert sorted(SAYS) == sorted(path.stem for path in BENCHMARKS.glob("bench_*.py"))


@pytest.mark.parametrize("name", sorted(SAYS))
def test_a_quick_benchmark_runs_to_its_end(name: str) -> None:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert SAYS[name] in done.stdout
    assert "--quick" in done.stdout, "nobody takes the figures for a measurement"
