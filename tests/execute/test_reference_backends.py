"""experiments/executor/reference: the executor beside native DDP, FSDP2 and torch pipelining."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from experiments.common.catalogue import ROOT, recorded
from experiments.executor.reference import interval, row_of
from experiments.executor.reference_cases import CASES


def test_the_committed_results_are_of_every_case() -> None:
    results = recorded("reference")
    assert results is not None
    assert [row["case"] for row in results["rows"]] == [case.name for case in CASES]
    assert results["rounds"] >= 20
    assert all(row["difference"] <= 1e-10 for row in results["rows"])


def test_a_step_takes_as_long_as_on_its_slowest_rank() -> None:
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
    row = row_of(CASES[0], ranks)
    assert row["difference"] == 1e-12
    assert row["native_ms"] == 2000.0
    assert row["floor"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert row["ratio"]["median"] == 1.0
    assert row["ratio"]["high"] == pytest.approx(1.1)
    assert row["cpu_ratio"]["median"] == pytest.approx(1.2)
    assert row["recording"] == {"median": 1.1, "low": 1.1, "high": 1.1}


def test_the_interval_of_many_rounds_holds_their_median() -> None:
    ratios = 1.03 * np.exp(0.05 * np.random.default_rng(1).standard_normal(400))
    found = interval(ratios)
    assert found["low"] < 1.03 < found["high"]
    assert found["high"] - found["low"] < 0.03


def test_pairs_of_steps_tell_what_recording_costs() -> None:
    """Rounds drift by half of a step, and recording takes 1% of it: the pairs see that, each within its round."""
    rng = np.random.default_rng(2)
    drift = np.exp(0.5 * rng.standard_normal((24, 1, 1)))
    seconds = drift * np.exp(0.03 * rng.standard_normal((24, 2, 20)))
    seconds[:, 0] *= 1.01
    found = interval(seconds[:, 0] / seconds[:, 1])
    assert found["low"] < 1.01 < found["high"]
    assert found["high"] - found["low"] < 0.015


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_weights_equal_those_of_the_native_module() -> None:
    command = [sys.executable, "-m", "experiments.executor.reference", "--quick", "--only", "^mlp ddp$", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row["difference"] <= 1e-10
