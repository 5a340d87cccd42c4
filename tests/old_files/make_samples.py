"""Write a sample of every kind of file that parsim keeps, with whatever version of parsim is on the path.

PYTHONPATH=<that version> python tests/old_files/make_samples.py FOLDER

The samples of a version are never made again: tests/old_files/test_old_files.py holds later versions to them. Takes about two
minutes, of which a quick calibration is one. Names no path of the machine: what a run folder says of its place is written as
/old.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

RUN = """
[model]
name = "mlp"
args = { width = 16, depth = 2 }
input_shape = [1, 8, 8]
[cluster]
profile = "here.json"
devices = 2
[training]
global_batch = 16
dataset = "synthetic"
steps = 3
dtype = "float64"
[plan]
strategy = "custom"
mesh = { pp = 2 }
microbatches = 2
"""

QUESTION = """
[model]
name = "model.json"
[cluster]
profile = "cluster.json"
devices = 4
[training]
global_batch = 64
"""

SCENARIO = """
[jitter]
compute_sigma = 0.05

[[stragglers]]
rank = 1
factor = 1.5
"""

PLANS = {
    "single": ["plan.strategy=single"],
    "dp": ["plan.strategy=dp", "plan.zero_stage=1"],
    "mp": ["plan.strategy=mp"],
    "hp": ["plan.strategy=hp"],
    "adaptive": ["plan.strategy=adaptive"],
    "custom": ["plan.strategy=custom", "plan.mesh={ pp = 2, dp = 2 }", "plan.microbatches=4", "plan.recompute=full"],
}

RESUMED_STEPS = 12


def parsim(*arguments: str, folder: Path) -> dict[str, Any]:
    """The JSON document of `parsim ARGUMENTS --json`."""
    command = [sys.executable, "-m", "parsim", *arguments, "--json"]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def changes(texts: list[str]) -> list[str]:
    """The texts as --set options."""
    return [part for text in texts for part in ("--set", text)]


def told(result: dict[str, Any]) -> dict[str, Any]:
    """What of a prediction later versions must repeat."""
    return {"step_s": result["step_s"]["median"], "peak_memory_bytes": result["peak_memory_bytes"], "fits": result["fits"]}


def make(folder: Path) -> dict[str, Any]:
    """All files below `folder`; returns what this version makes of them."""
    calibration = ("--quick", "--nproc", "2", "--model", "mlp", "--batches", "4,8,16", "--optimizer", "sgd_momentum")
    parsim("calibrate", *calibration, "--out", "here.json", folder=folder)
    (folder / "RUN.toml").write_text(RUN)
    golden: dict[str, Any] = {}
    run = parsim("run", "RUN.toml", "--nproc", "2", "--checkpoint-every", "2", "--out", "kept", folder=folder)
    golden["run"] = told(run) | {"losses": run["losses"]}
    shutil.copytree(folder / "kept", folder / "resumed")
    again = ("--resume", "--out", "resumed", "--set", f"training.steps={RESUMED_STEPS}")
    golden["resumed"] = {"losses": parsim("run", "RUN.toml", "--nproc", "2", *again, folder=folder)["losses"]}
    golden["validated"] = {"predicted": parsim("validate", "kept", folder=folder)["predicted"]}
    parsim("validate", "RUN.toml", "--out", "validation", folder=folder)
    golden["history"] = {"records": len((folder / "here.history.jsonl").read_text().splitlines())}
    saving = "from pathlib import Path; from parsim.model.spec import ModelSpec, load_model; "
    saving += "load_model(ModelSpec(name='resnet_small')).save(Path('model.json'))"
    subprocess.run([sys.executable, "-c", saving], cwd=folder, check=True)
    cluster = files("hardware_profiles").joinpath("dgx1-v100-32gb.json").read_text("utf-8")
    (folder / "cluster.json").write_text(cluster)
    (folder / "QUESTION.toml").write_text(QUESTION)
    golden["plans"] = {}
    for name, texts in PLANS.items():
        chosen = parsim("plan", "QUESTION.toml", "--out", f"plan-{name}.json", *changes(texts), folder=folder)["chosen"]
        golden["plans"][name] = told(chosen)
    (folder / "scenario.toml").write_text(SCENARIO)
    played = ("--engine", "dynamic", "--scenario", "scenario.toml", "--set", "plan.strategy=plan-hp.json")
    golden["scenario"] = parsim("simulate", "QUESTION.toml", *played, folder=folder)["scenario"]
    return golden


def without_place(text: str, folder: Path) -> str:
    """The text with /old for the folder it was made in."""
    return text.replace(str(folder.resolve()), "/old")


def keep(made: Path, target: Path, golden: dict[str, Any]) -> None:
    """Copy what was made, the larger files compressed and the run folder as one archive."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ("here.json", "cluster.json", "model.json", "here.raw.json.gz"):
        text = (made / name).read_bytes() if name.endswith(".gz") else gzip.compress((made / name).read_bytes(), mtime=0)
        (target / (name if name.endswith(".gz") else f"{name}.gz")).write_bytes(text)
    for name in ("RUN.toml", "QUESTION.toml", "scenario.toml", "here.history.jsonl", *(f"plan-{name}.json" for name in PLANS)):
        (target / name).write_text(without_place((made / name).read_text(), made))
    for path in (made / "kept").rglob("*"):
        if path.name in ("report.html", "trace.json"):
            path.unlink()
        elif path.suffix in (".json", ".toml"):
            path.write_text(without_place(path.read_text(), made))
    with tarfile.open(target / "kept.tar.gz", "w:gz") as archive:
        archive.add(made / "kept", arcname="kept", filter=anonymous)
    (target / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")


def anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """An entry of the archive without owner and time."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))
    with tempfile.TemporaryDirectory() as place:
        keep(Path(place), Path(sys.argv[1]), make(Path(place)))
