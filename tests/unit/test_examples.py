"""The scripts of `examples/`: all are listed, and all run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))

PRINTS = {
    "hugging_face.py": "tokens/s; fits with probability",
    "kueue.py": '"kueue.x-k8s.io/queue-name": "gpus"',
    "large_models.py": (EXAMPLES.parent / "docs" / "large-models.md").read_text(encoding="utf-8"),
    "own_module.py": "optimizer_state",
    "run_and_compare.py": "loss:",
    "skypilot.py": "8 x H100: ",
    "watch_training.py": "measured",
    "what_if.py": "ms disturbed",
    "which_cluster.py": "samples/s per GPU",
    "which_plan.py": "Where the",
}


def test_the_readme_lists_every_script_and_the_tests_run_it() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    assert sorted(PRINTS) == SCRIPTS
    assert [name for name in SCRIPTS if f"`{name}`" not in listed] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_prints_its_answer(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs the torch extra")
    if name == "hugging_face.py":
        pytest.importorskip("transformers", reason="needs the hf extra")
    environment = {**os.environ, "PARSIM_HOME": str(tmp_path / "home"), "PARSIM_MODEL_CACHE": "off"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=900, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert PRINTS[name] in done.stdout
