"""A numba that cannot be imported, since its versions refuse newer ones of NumPy: one message, and `doctor` says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from parsim.app.doctor import examine

ROOT = Path(__file__).parents[2]
REFUSAL = "Numba needs NumPy 2.4 or less. Got NumPy 2.5."
WAY_OUT = "pip install --upgrade numba numpy"


@pytest.fixture
def refusing(tmp_path: Path) -> Path:
    """A folder with a numba that refuses."""
    package = tmp_path / "packages" / "numba"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"raise ImportError({REFUSAL!r})\n")
    return package.parent


@pytest.mark.slow
@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_a_command_that_simulates_ends_with_one_message(refusing: Path, tmp_path: Path, command: str) -> None:
    called = [sys.executable, "-m", "parsim", command, "mlp", "--on", "2xh100-sxm", "--batch", "8"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(refusing), str(ROOT), *sys.path))}
    done = subprocess.run(called, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    *_, last = done.stderr.splitlines()
    assert last.startswith(f"parsim: simulating needs numba, which cannot be imported: {REFUSAL.rstrip('.')}; "), done.stderr
    assert WAY_OUT in last
    assert "Traceback" not in done.stderr


def test_doctor_says_which_commands_need_it(refusing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "numba" or name == "parsim.jit"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(refusing))
    findings = examine()
    (check,) = (check for check in findings["checks"] if check["name"] == "simulate and plan")
    assert not check["ok"]
    assert check["found"] == f"simulating needs numba, which cannot be imported: {REFUSAL.rstrip('.')}"
    assert WAY_OUT in check["fix"]
    works = {entry["name"]: entry["ok"] for entry in findings["commands"]}
    assert not any(works[name] for name in works if name.startswith(("plan", "run", "demo")))
    assert works["calibrate --device cpu"]
