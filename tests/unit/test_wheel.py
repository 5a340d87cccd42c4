"""The wheel holds all that a user needs: presets, profiles, networks, calibration; and plans without torch."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

BELONGS = ("parsim", "calibration", "hardware_profiles", "pyproject.toml", "README.md")

PLAN = """
import parsim as ps
answer = ps.plan("resnet50", cluster="dgx1-v100-32gb", global_batch=1024)
assert answer.fits and len(answer.table()) == 5, answer
import sys
assert not {"torch", "transformers", "sklearn"} & set(sys.modules)
print(ps.__file__)
"""

WITHOUT_TORCH = """
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "sklearn"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
sys.path.insert(0, sys.argv[1])
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources, so that no build folder is left beside them."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout: what belongs to the sources is not known")
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file() and name.split("/")[0] in BELONGS:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(out), str(source)]
    done = subprocess.run(build, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return next(out.glob("parsim-*.whl"))


def test_the_wheel_holds_code_profiles_networks_presets_and_types(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"parsim/py.typed", "parsim/__init__.py", "calibration/__main__.py"} <= names
    for folder, pattern in (("hardware_profiles", "**/*.json"), ("parsim/model/catalogue/presets", "*.jsonl.gz")):
        expected = {str(path.relative_to(ROOT)) for path in (ROOT / folder).glob(pattern)}
        assert expected
        assert expected <= names, expected - names
    expected = {str(path.relative_to(ROOT)) for package in ("parsim", "calibration") for path in (ROOT / package).rglob("*.py")}
    assert expected <= names, expected - names


@pytest.mark.slow
def test_the_installed_wheel_plans_from_a_preset_without_torch(wheel: Path, tmp_path: Path) -> None:
    """Installed beside the core dependencies, with torch out of reach."""
    place = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(place)
    command = [sys.executable, "-I", "-c", WITHOUT_TORCH + PLAN, str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(place)


@pytest.mark.slow
def test_a_fresh_environment_plans_from_a_preset(wheel: Path, tmp_path: Path) -> None:
    """pip installs the wheel and its dependencies into an empty environment; skipped where no package index answers."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, timeout=200)
    python = venv / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "-q", str(wheel)]
    installed = subprocess.run(pip, capture_output=True, text=True, check=False, timeout=900)
    if installed.returncode != 0 and "No matching distribution" in installed.stderr:
        pytest.skip(f"no package index: {installed.stderr.splitlines()[-1]}")
    assert installed.returncode == 0, installed.stderr
    done = subprocess.run(
        [str(python), "-I", "-c", PLAN], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(venv)
    command = [str(venv / "bin" / "parsim"), "plan", "mlp", "--on", "dgx1-v100-32gb", "--batch", "64", "--json"]
    assert subprocess.run(command, capture_output=True, check=False, cwd=tmp_path, timeout=300).returncode == 0
