"""Files of earlier versions load, say the same numbers, and go on; files of later ones are refused with what to do.

The samples lie in folders named after the commit whose code wrote them (make_samples.py), with what that code made of them.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parsim.cli import main
from parsim.costs.history import history_path, read_history
from parsim.errors import ParsimError
from parsim.execute.job import Job
from parsim.execute.measurement import RankRecord
from parsim.hardware.network import parse_network
from parsim.hardware.profile import load_profile, parse_profile
from parsim.model.model import Model
from parsim.moved import MOVED
from parsim.plans.plan import Plan
from parsim.timeline import Timeline

HERE = Path(__file__).parent
COMMITS = sorted(path.name for path in HERE.iterdir() if path.is_dir() and (path / "golden.json").is_file())
PLANS = ("single", "dp", "mp", "hp", "adaptive", "custom")

Ask = Callable[..., dict[str, Any]]


@pytest.fixture(params=COMMITS)
def samples(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The samples of one version as they lay on the disk of whoever made them."""
    source = HERE / request.param
    for path in source.iterdir():
        if path.name.endswith(".json.gz") and not path.name.endswith(".raw.json.gz"):
            (tmp_path / path.name.removesuffix(".gz")).write_bytes(gzip.decompress(path.read_bytes()))
        elif path.name != "kept.tar.gz":
            shutil.copy(path, tmp_path)
    with tarfile.open(source / "kept.tar.gz") as archive:
        if hasattr(tarfile, "data_filter"):  # Python 3.11.4 and newer
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(tmp_path)
    return tmp_path


@pytest.fixture
def golden(samples: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((samples / "golden.json").read_text())
    return document


@pytest.fixture
def ask(samples: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Call `parsim ARGS --json` among the samples."""
    monkeypatch.chdir(samples)

    def call(*arguments: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["parsim", *arguments, "--json"])
        try:
            main()
        except SystemExit as ending:
            if ending.code:
                pytest.fail(capsys.readouterr().err)
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        return document

    return call


def assert_told(result: dict[str, Any], golden: dict[str, Any]) -> None:
    assert result["step_s"]["median"] == pytest.approx(golden["step_s"], rel=1e-9)
    assert result["peak_memory_bytes"] == pytest.approx(golden["peak_memory_bytes"], rel=1e-9)
    assert result["fits"] == golden["fits"]


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_on_a_profile_and_a_model_is_predicted_as_before(ask: Ask, golden: dict[str, Any], name: str) -> None:
    assert_told(ask("simulate", "QUESTION.toml", "--set", f"plan.strategy=plan-{name}.json"), golden["plans"][name])


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_and_a_model_are_written_as_they_were_read(samples: Path, name: str) -> None:
    plan = Plan.load(samples / f"plan-{name}.json")
    assert Plan.from_json(plan.to_json()) == plan
    model = Model.load(samples / "model.json")
    assert Model.from_json(model.to_json()) == model


def test_a_scenario_plays_as_before(ask: Ask, golden: dict[str, Any]) -> None:
    changes = ("--engine", "dynamic", "--scenario", "scenario.toml", "--set", "plan.strategy=plan-hp.json")
    played, before = ask("simulate", "QUESTION.toml", *changes)["scenario"], golden["scenario"]
    assert played["one_step_s"] == pytest.approx(before["one_step_s"], rel=1e-9)
    assert [state["step_s"] for state in played["states"]] == pytest.approx(
        [state["step_s"] for state in before["states"]], rel=1e-9
    )


def test_a_history_is_still_that_of_its_profile(samples: Path, golden: dict[str, Any]) -> None:
    """Its lines name the profile by a fingerprint, which fields that are new since must not change."""
    profile = str(samples / "here.json")
    history = read_history(history_path(profile), load_profile(profile))
    assert not history.left_out
    assert len(history.records) == golden["history"]["records"] > 0


def test_raw_points_are_fitted_anew(samples: Path) -> None:
    from calibration.fit.build_profile import build_profile
    from calibration.rounds.raw_points import load_raw

    points = load_raw(samples / "here.raw.json.gz")
    again = build_profile(points)
    before = load_profile(str(samples / "here.json"))
    assert len(again.compute.components) == len(before.compute.components)
    assert again.provenance.command == before.provenance.command


def test_a_run_folder_is_predicted_validated_and_reported_as_before(ask: Ask, samples: Path, golden: dict[str, Any]) -> None:
    judged = ask("validate", "kept")
    assert judged["predicted"] == pytest.approx(golden["validated"]["predicted"], rel=1e-9)
    ask("report", "kept")
    assert (samples / "kept" / "report.html").is_file()


def test_the_files_inside_a_run_folder_load(samples: Path) -> None:
    folder = samples / "kept"
    job = Job.load(folder.joinpath("job.json"))
    assert job.runs[0].plan == Plan.load(folder / "plan.json")
    for name in ("timeline.json.gz", "predicted-timeline.json.gz"):
        assert Timeline.load(folder / name).makespan_s > 0
    assert RankRecord.load(folder / "run", 0).rank == 0


def test_training_goes_on_from_a_checkpoint(ask: Ask, golden: dict[str, Any]) -> None:
    """The losses that the old code had, in float64: weights, momentum, random state and order of the data are as they were."""
    arguments = ("--nproc", "2", "--resume", "--out", "kept", "--set", "training.steps=12")
    assert ask("run", "RUN.toml", *arguments)["losses"] == pytest.approx(golden["resumed"]["losses"], rel=1e-9)


def edited(path: Path, version: int) -> Path:
    """The file as a version of parsim to come would write it."""
    if path.name.endswith(".gz"):
        document = json.loads(gzip.decompress(path.read_bytes()))
        path.write_bytes(gzip.compress(json.dumps({**document, "schema_version": version}).encode()))
    else:
        path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": version}))
    return path


def _raw(path: Path) -> object:
    from calibration.rounds.raw_points import load_raw

    return load_raw(path)


READERS: dict[str, Callable[[Path], object]] = {
    "here.json": lambda path: parse_profile(path.read_text(), str(path)),
    "model.json": Model.load,
    "plan-dp.json": Plan.load,
    "kept/job.json": Job.load,
    "kept/timeline.json.gz": Timeline.load,
    "kept/run/rank0.json": lambda path: RankRecord.load(path.parent, 0),
    "here.raw.json.gz": _raw,
}


@pytest.mark.parametrize("name", sorted(READERS))
def test_a_file_of_a_later_version_says_what_to_do(samples: Path, name: str) -> None:
    READERS[name](samples / name)
    path = edited(samples / name, 99)
    with pytest.raises(ParsimError, match=r"schema_version must be \d, got 99; a newer parsim wrote it: upgrade.*again"):
        READERS[name](path)


def test_a_network_of_a_later_version_says_what_to_do() -> None:
    with pytest.raises(ParsimError, match="network net: schema_version must be 1, got 99; a newer parsim wrote it"):
        parse_network('{"schema_version": 99}', "net")


def test_a_history_line_of_a_later_version_is_left_out_and_named(samples: Path) -> None:
    profile = samples / "here.json"
    path = samples / "here.history.jsonl"
    first, *others = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps({**json.loads(first), "schema_version": 99}), *others]) + "\n")
    history = read_history(path, load_profile(str(profile)))
    assert len(history.records) == len(others)
    assert "line 1: schema_version must be 1, got 99; a newer parsim wrote it: upgrade parsim" in history.left_out[0]


def test_a_checkpoint_of_a_later_version_is_refused_and_not_begun_anew(samples: Path) -> None:
    from parsim.execute.checkpoint.checkpoint import latest_checkpoint

    assert latest_checkpoint(samples / "kept" / "checkpoints") is not None
    for path in (samples / "kept" / "checkpoints").rglob("rank-*.json"):
        edited(path, 99)
    with pytest.raises(ParsimError, match=r"step-00000003: schema_version must be 3, got 99; a newer parsim wrote it"):
        latest_checkpoint(samples / "kept" / "checkpoints")


@pytest.mark.parametrize("old", sorted(MOVED))
def test_every_moved_module_is_where_the_table_says(old: str) -> None:
    assert importlib.util.find_spec(MOVED[old]) is not None, f"{old} is not at {MOVED[old]} any more: mend parsim/moved.py"
    parent = old.rpartition(".")[0]
    named = parent if parent in MOVED else old  # Python asks for the package first
    with pytest.raises(ModuleNotFoundError, match=f"^{named} is now {MOVED[named]}; import it by that name$"):
        importlib.import_module(old)


def test_a_command_by_its_old_module_says_the_new_one() -> None:
    command = [sys.executable, "-m", "calibration.v100", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "calibration.v100 is now tools.published.v100" in done.stderr
    assert "Traceback" not in done.stderr
    script = "from parsim.plan.plan import Plan"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "parsim.plan is now parsim.plans" in done.stderr


def test_names_that_never_were_fail_as_ever() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'parsim\.nonsense'$"):
        importlib.import_module("parsim.nonsense")
