"""What is installed: the wheel, its extras, its bill of materials, and a numba that refuses numpy."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.special import log_ndtr, ndtri_exp
from strategies import task_graphs

from parsim.app.doctor import examine
from parsim.engines import kernels, noise
from parsim.engines.static import compile_graph
from parsim.errors import EXTRA_OF, MissingDependencyError, require
from tools.sbom import document

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


# The bill of materials holds what the lock pins, with its digests, and torch.


def texts() -> list[str]:
    return [(ROOT / name).read_text() for name in ("requirements.lock", ".ci/install", "pyproject.toml")]


def test_every_pin_is_a_component_with_its_digests() -> None:
    found = document(*texts())
    lock = texts()[0]
    pins = [line for line in lock.splitlines() if "==" in line and not line.startswith("#")]
    assert len(found["components"]) == len(pins) + 1
    hashes = [entry for part in found["components"] for kept in part.get("externalReferences", ()) for entry in kept["hashes"]]
    assert len(hashes) == lock.count("--hash=sha256:")
    bare = [part["name"] for part in found["components"] if "externalReferences" not in part]
    assert bare == ["torch"], "every wheel but that of torch has digests"
    assert document(*texts()) == found


def test_names_are_normalised_and_markers_dropped() -> None:
    lock = f"A_b.c==1.0 ; sys_platform == 'win32' \\\n    --hash=sha256:{'0' * 64}\n"
    (part, _) = document(lock, texts()[1], texts()[2])["components"]
    assert (part["purl"], part["version"]) == ("pkg:pypi/a-b-c@1.0", "1.0")


# What planning needs is little: compiled loops, solvers and pages are extras, each named where it is missing.

FOLDER = Path(__file__).parents[2]
LARGE = ("numba", "scipy", "cvxpy", "plotly", "torch", "pandas")


def test_each_extra_brings_its_package() -> None:
    extras = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package, extra in EXTRA_OF.items():
        assert any(re.split(r"[<>=\[]", line)[0] == package for line in extras[extra]), (package, extra)


def test_what_is_missing_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for package, extra in EXTRA_OF.items():
        with pytest.raises(MissingDependencyError, match=re.escape(f"pip install 'parsim[{extra}]'")):
            require(package, "this")


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
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(FOLDER), *sys.path))}
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


# A numba that cannot be imported, since its versions refuse newer ones of NumPy: one message, and `doctor` says so.

REPOSITORY = Path(__file__).parents[2]
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
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(refusing), str(REPOSITORY), *sys.path))}
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
