"""experiments/reference: the executor beside native DDP, FSDP2 and torch pipelining."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "experiments" / "reference"


@pytest.fixture
def experiment(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The experiment's modules, whose plain names other experiments have too."""
    for name in ("run", "readme", "cases"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    module = importlib.import_module("run")
    yield module
    for name in ("run", "readme", "cases"):
        sys.modules.pop(name, None)


def test_the_page_is_made_from_the_results(experiment: Any) -> None:
    results = json.loads((FOLDER / "results.json").read_text(encoding="utf-8"))
    assert experiment.readme(results) == (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [row["case"] for row in results["rows"]] == [case.name for case in experiment.CASES]
    assert results["rounds"] >= 20
    assert all(row["difference"] <= 1e-10 for row in results["rows"])


def test_a_step_takes_as_long_as_on_its_slowest_rank(experiment: Any) -> None:
    names = ("parsim", "native", "native again")
    cpu_s = {**{name: [0.5, 0.5, 0.5] for name in names}, "parsim": [0.5, 0.6, 0.6]}
    same = [[[1.0, 1.0], [1.0, 1.0]]] * 3
    ranks = [
        {"difference": 0.0, "switched": same, "seconds": {name: [1.0, 2.0, 3.0] for name in names}, "cpu_s": cpu_s},
        {
            "difference": 1e-12,
            "switched": [[[1.1, 1.1], [1.0, 1.0]]] * 3,
            "seconds": {**{name: [2.0, 1.0, 1.0] for name in names}, "parsim": [2.2, 1.0, 1.0]},
            "cpu_s": cpu_s,
        },
    ]
    row = experiment.row_of(experiment.CASES[0], ranks)
    assert row["difference"] == 1e-12
    assert row["native_ms"] == 2000.0
    assert row["floor"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert row["ratio"]["median"] == 1.0
    assert row["ratio"]["high"] == pytest.approx(1.1)
    assert row["cpu_ratio"]["median"] == pytest.approx(1.2)
    assert row["recording"] == {"median": 1.1, "low": 1.1, "high": 1.1}


def test_the_interval_of_many_rounds_holds_their_median(experiment: Any) -> None:
    ratios = 1.03 * np.exp(0.05 * np.random.default_rng(1).standard_normal(400))
    found = experiment.interval(ratios)
    assert found["low"] < 1.03 < found["high"]
    assert found["high"] - found["low"] < 0.03


def test_pairs_of_steps_tell_what_recording_costs(experiment: Any) -> None:
    """Rounds drift by half of a step, and recording takes 1% of it: the pairs see that, each within its round."""
    rng = np.random.default_rng(2)
    drift = np.exp(0.5 * rng.standard_normal((24, 1, 1)))
    seconds = drift * np.exp(0.03 * rng.standard_normal((24, 2, 20)))
    seconds[:, 0] *= 1.01
    found = experiment.pooled(seconds)
    assert found["low"] < 1.01 < found["high"]
    assert found["high"] - found["low"] < 0.015


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
@pytest.mark.parametrize("case", ["mlp ddp", "vit_small fsdp2", "vit_small pipelining 1f1b"])
def test_weights_equal_those_of_the_native_module(case: str) -> None:
    done = subprocess.run(
        [sys.executable, FOLDER / "run.py", "--quick", "--only", f"^{case}$", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row["difference"] <= 1e-10
