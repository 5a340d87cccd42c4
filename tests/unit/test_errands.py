"""Errands of docs/extending.md that edit the package, done in a copy of it. test_extending.py adds modules beside it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXTENSIONS = ROOT / "examples" / "extensions"

pytestmark = pytest.mark.slow

Edit = tuple[str, str]
"""A line of a file, and what stands in its place afterwards."""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the wheel holds."""
    folder = tmp_path_factory.mktemp("copy")
    for name in ("parsim", "calibration", "hardware_profiles"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def edited(package: Path, edits: Mapping[str, Edit]) -> dict[str, str]:
    """Do the edits, one per file. Returns what the files held before."""
    before: dict[str, str] = {}
    for name, (line, lines) in edits.items():
        path = package / name
        before[name] = path.read_text(encoding="utf-8")
        assert before[name].count(line) == 1, f"{name}: {line!r}"
        path.write_text(before[name].replace(line, lines), encoding="utf-8")
    return before


def asked(package: Path, *words: str) -> Any:
    """The JSON of `parsim WORDS` by the copy, with the extensions of examples/ on the path."""
    environment = {**os.environ, "PYTHONPATH": f"{package}{os.pathsep}{EXTENSIONS}", "PARSIM_ALLOW_CODE": "1"}
    command = [sys.executable, "-m", "parsim", *words, "--json"]
    run = subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


def settings(*pairs: str) -> list[str]:
    return [word for pair in pairs for word in ("--set", pair)]


HALVING_WORK = (
    '        "halving": CollectiveKind(hops=lambda n: 2 * (n - 1).bit_length(), traffic=lambda n: 2 * (n - 1) / n),\n'
)
HALVING: dict[str, Edit] = {
    "parsim/work.py": ('        "ring_shift": CollectiveKind', HALVING_WORK + '        "ring_shift": CollectiveKind'),
    "parsim/plans/layouts.py": ('HopKind("partial/w -> full/w", "all_reduce")', 'HopKind("partial/w -> full/w", "halving")'),
}
PINNED = 'plan.placements={"classifier.0"="shard:column/4","classifier.6"="shard:row/4","loss"="replicate","*"="batch"}'
TENSOR = ("plan.strategy=custom", "plan.mesh={tp=4}", "cluster.devices=4", PINNED)


def test_a_collective_that_plans_use(package: Path) -> None:
    """A row of work.py and one of plans/layouts.py: tasks, prices and steps follow.

    The third edit is its effect on tensors, a case of `parsim.execute.operations`. Simulation does not need it, and
    tests/execute/test_reshard.py runs every hop.
    """
    question = ("simulate", "vgg16", "--on", "dgx1-v100-32gb", "--batch", "64", *settings(*TENSOR))
    ring = asked(package, *question)
    before = edited(package, HALVING)
    try:
        halving = asked(package, *question)
        price = asked(package, "cost", "dgx1-v100-32gb", "--collective", "halving", "--size-bytes", "1000000")
    finally:
        edited(package, {name: ((package / name).read_text(encoding="utf-8"), text) for name, text in before.items()})
    assert price["operation"] == "halving"
    assert price["seconds"]["median"] > 0
    assert halving["step_s"]["median"] != ring["step_s"]["median"]
    assert halving["peak_memory_bytes"] == ring["peak_memory_bytes"]


def test_a_mixing_graph(package: Path) -> None:
    """One row of plans/mixing.py: plans gossip on it, by its name in a run file."""
    row = '    "ladder": GraphFamily(matrix=lambda n, t, settings: uniform_circulant(n, {-1, 1, n // 2})),\n'
    before = edited(package, {"parsim/plans/mixing.py": ('    "ring": GraphFamily', row + '    "ring": GraphFamily')})
    try:
        question = ("simulate", "resnet_small", "--on", "dgx1-v100-32gb", "--batch", "64", *settings("plan.strategy=dp"))
        steps = {
            graph: asked(package, *question, *settings(f'plan.synchronisation="gossip/1 {graph}"'))["step_s"]["median"]
            for graph in ("ring", "ladder", "complete")
        }
    finally:
        edited(package, {name: ((package / name).read_text(encoding="utf-8"), text) for name, text in before.items()})
    assert steps["ring"] < steps["ladder"] < steps["complete"]
