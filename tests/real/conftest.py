"""Contracts with real packages, each pinned, in a temporary folder of its own. They need a network and minutes.

`pytest -m real tests/real` runs them; nothing else collects them. A test gives a script and the packages it imports. The script
prints one JSON document, which the test holds against what parsim says. All environments share one interpreter with torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BASE = ("torch==2.13.0", "numpy==2.4.1", "setuptools==80.9.0", "wheel==0.45.1")
Script = Callable[..., Any]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if "real" in str(config.getoption("markexpr")).split() else True


@pytest.fixture(scope="session")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with BASE alone, apart from the one that runs the tests. PARSIM_REAL_PYTHON names one that is there already."""
    if given := os.environ.get("PARSIM_REAL_PYTHON"):
        return Path(given)
    folder = tmp_path_factory.mktemp("interpreter")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([folder / "bin" / "pip", "install", "-q", *BASE], check=True)
    return folder / "bin" / "python"


@pytest.fixture(scope="session")
def run_script(interpreter: Path, tmp_path_factory: pytest.TempPathFactory) -> Script:
    """`run_script(text, *arguments, packages="name==version ...")` is what the script prints last, read as JSON.

    `packages` are installed without their dependencies: list what the script imports.
    """
    installed: dict[str, Path] = {}

    def run(text: str, *arguments: object, packages: str = "") -> Any:
        if packages not in installed:
            installed[packages] = tmp_path_factory.mktemp("packages")
            command: list[str | Path] = [interpreter, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
            if packages:
                environment = {**os.environ, "DS_BUILD_OPS": "0"}
                subprocess.run([*command, "--target", installed[packages], *packages.split()], check=True, env=environment)
        file = tmp_path_factory.mktemp("script") / "script.py"
        file.write_text(text, encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": str(installed[packages]), "OMP_NUM_THREADS": "1"}
        words = [str(interpreter), str(file), *map(str, arguments)]
        done = subprocess.run(words, cwd=file.parent, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{packages}\n{done.stderr[-4000:]}"
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def installed(interpreter: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`installed("name==version", ...)` is a Python with parsim, these packages and all that they depend on, and torch of
    `interpreter`. PARSIM_REAL_INSTALLED names one that has them already."""
    made: dict[tuple[str, ...], Path] = {}

    def install(*packages: str) -> Path:
        if given := os.environ.get("PARSIM_REAL_INSTALLED"):
            return Path(given)
        if packages not in made:
            folder = tmp_path_factory.mktemp("installed")
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            where = "import sysconfig; print(sysconfig.get_path('purelib'))"
            shared, own = (
                subprocess.check_output([python, "-c", where], text=True) for python in (interpreter, folder / "bin" / "python")
            )
            Path(own.strip(), "torch.pth").write_text(shared)
            subprocess.run([folder / "bin" / "pip", "install", "-q", ROOT, *packages], check=True)
            made[packages] = folder / "bin" / "python"
        return made[packages]

    return install


def environment_of(home: Path) -> dict[str, str]:
    """Of a process that writes nothing outside `home` and asks nobody."""
    offline = {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "HF_HUB_OFFLINE": "1",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "TRACKIO_DIR": str(home / "trackio"),
    }
    return {**os.environ, **offline, "HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
