"""What planning needs is little: compiled loops, solvers and pages are extras, each named where it is missing."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.special import betaincinv, log_ndtr, ndtri_exp
from strategies import task_graphs

from parsim.costs.history import clopper_pearson
from parsim.engines import kernels, noise
from parsim.engines.static import compile_graph
from parsim.errors import EXTRA_OF, MissingDependencyError, require

ROOT = Path(__file__).parents[2]
LARGE = ("numba", "scipy", "cvxpy", "plotly", "torch", "pandas")


def test_each_extra_brings_its_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package, extra in EXTRA_OF.items():
        assert any(re.split(r"[<>=\[]", line)[0] == package for line in extras[extra]), (package, extra)


def test_what_is_missing_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for package, extra in EXTRA_OF.items():
        with pytest.raises(MissingDependencyError, match=re.escape(f"pip install 'parsim[{extra}]'")):
            require(package, "this")


@given(st.integers(0, 60), st.integers(1, 60))
@settings(max_examples=50, deadline=None)
def test_the_exact_interval_of_a_share_is_scipys(successes: int, more: int) -> None:
    trials = successes + more
    low, high = clopper_pearson(successes, trials)
    assert low == pytest.approx(betaincinv(successes, trials - successes + 1, 0.025) if successes else 0.0, rel=1e-9)
    assert high == pytest.approx(betaincinv(successes + 1, trials - successes, 0.975), rel=1e-9)


@pytest.mark.parametrize("ranks", [2, 8, 1000, 10**6])
def test_the_slowest_of_many_ranks_is_scipys(ranks: int) -> None:
    z = np.linspace(-noise.REACH, noise.REACH, noise.POINTS)
    assert noise._table(ranks) == pytest.approx(ndtri_exp(log_ndtr(z) / ranks), rel=1e-9, abs=1e-12)


@given(task_graphs(), st.integers(1, 3), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_plain_loops_give_the_seconds_of_compiled_ones(graph: Any, steps: int, seed: int) -> None:
    assume(len(graph.tasks))
    compiled = compile_graph(graph)
    g, n, resources = compiled.arrays, compiled.size, len(compiled.arrays.last)
    random = np.random.default_rng(seed)
    together, each = random.integers(0, max(1, resources // 2), resources), np.empty(0, dtype=np.int64)
    rows = (g, random.random((9, n)), each, steps, together)
    by_unit = (g, random.random((9, 3)), random.integers(0, 3, n), steps, together)
    for arguments in (rows, by_unit):
        assert np.array_equal(kernels.last_ends_of_rows(*arguments), kernels.last_ends_of_rows_by_numpy(*arguments))
    factors, joins = random.random((4, 2, 3)), random.random(n) < 0.3
    sides = (g, random.random(n), random.integers(-1, 2, n), factors, joins, steps, together)
    assert np.array_equal(kernels.last_ends_side_by_side(*sides), kernels.last_ends_side_by_side_by_numpy(*sides))
    seconds, floor = random.random(n), random.random(resources)
    found = np.zeros((2, 2, n))
    for way, run in enumerate((kernels.run_plain, kernels.run_plain_on_lists)):
        run(g, seconds, floor, *found[way])
    assert np.array_equal(*found)


BLOCKED = """
import importlib.util, sys
class Missing:
    names = set(sys.argv.pop(1).split(","))
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.split(".")[0] in Missing.names else found(name, package)
from parsim.cli import main
main()
"""


def without(packages: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`parsim` with these words, as if the packages were not installed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path))}
    called = [sys.executable, "-c", BLOCKED, packages, *words]
    return subprocess.run(called, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.slow
def test_the_answer_needs_no_large_package(tmp_path: Path) -> None:
    words = ("plan", "resnet50", "--on", "dgx1-v100-32gb", "--batch", "256", "--json")
    little, everything = (without(packages, *words, cwd=tmp_path) for packages in (",".join(LARGE), "nothing"))
    assert little.returncode == 0, little.stderr
    assert json.loads(little.stdout) == json.loads(everything.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "package", "extra"),
    [
        (("simulate", "mlp", "--on", "2xh100-sxm", "--batch", "8", "--out", "found"), "plotly", "pages"),
        (("plan", "mlp", "--on", "2xh100-sxm", "--batch", "8", "--certify"), "cvxpy", "solvers"),
        (
            ("sweep", "mlp", "--on", "2xh100-sxm", "--batch", "8", "--over", "scale.links=0.5:2:log", "--sample", "2"),
            "scipy",
            "solvers",
        ),
    ],
)
def test_a_question_that_needs_more_names_the_extra(words: tuple[str, ...], package: str, extra: str, tmp_path: Path) -> None:
    done = without(package, *words, cwd=tmp_path)
    assert done.returncode == 1
    *_, last = done.stderr.splitlines()
    assert last.startswith("parsim: ")
    assert last.endswith(f"needs {package}, which is not installed; pip install 'parsim[{extra}]'"), done.stderr
