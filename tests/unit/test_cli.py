"""What the commands print: one JSON document with the promised keys, text for people, progress on stderr only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parsim.app.calibration import calibration_request, local_batches
from parsim.app.config import parse_config
from parsim.cli import COMMANDS, _endings_told
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.plans.plan import Plan
from parsim.search.tree import is_tie
from tests.commands import Told

RUN_TOML = """
[model]
name = "resnet50"
args = { num_classes = 100 }
[cluster]
profile = "dgx1-v100-32gb"
devices = 4
[training]
global_batch = 64
"""

RESULT_KEYS = {
    *("strategy", "step_s", "throughput_samples_per_s", "communication_fraction", "communication_busy_fraction"),
    *("exposed_communication_s", "bubble_fraction", "peak_memory_bytes", "fits", "fit_probability", "cost_sources"),
    *("plan", "warnings"),
}

Call = Callable[..., tuple[str, str]]


@pytest.fixture
def call(told: Told, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """Call `parsim ARGS` in a folder that holds RUN.toml; returns stdout and stderr of a call that ends with 0."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "RUN.toml").write_text(RUN_TOML)

    def run(*arguments: str) -> tuple[str, str]:
        status, out, err = told(*arguments)
        assert not status, err
        return out, err

    return run


def result_of(call: Call, *arguments: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(call(*arguments, "--json")[0])
    return document


def assert_is_result(document: dict[str, Any]) -> None:
    assert document.keys() >= RESULT_KEYS
    for key in ("step_s", "throughput_samples_per_s"):
        interval = document[key]
        assert interval["p05"] <= interval["median"] <= interval["p95"]
    assert sum(document["cost_sources"].values()) == pytest.approx(1)


def test_help_names_every_command(call: Call) -> None:
    out, _ = call("--help")
    assert call("--version")[0].startswith("parsim 0.")
    assert all(name in out for name in COMMANDS)
    for name in COMMANDS:
        assert name == "mcp" or "--json" in call(name, "--help")[0]  # an agent gets both


def test_doctor(call: Call) -> None:
    document = result_of(call, "doctor")
    assert document["environment"]["versions"]["python"] == sys.version.split()[0]
    for check in document["checks"]:
        assert check["ok"] or check["fix"], f"{check['name']} is missing and nothing says how to get it"
    text, progress = call("doctor")
    assert all(check["name"] in text for check in document["checks"])
    assert "Examining" in progress
    assert "Looking" not in text


def test_plan_ranks_the_families_and_keeps_the_chosen_one(call: Call, tmp_path: Path) -> None:
    document = result_of(call, "plan", "RUN.toml", "--out", "plan.json")
    assert [candidate["fits"] for candidate in document["candidates"]] == [True] * len(document["candidates"])
    medians = [candidate["step_s"]["median"] for candidate in document["candidates"]]
    assert medians == sorted(medians)
    assert {candidate["strategy"] for candidate in document["candidates"]} == {"single", "dp", "mp", "hp", "adaptive"}
    for candidate in document["candidates"]:
        assert_is_result(candidate)
        assert candidate["reason"]
    assert document["fastest"]["step_s"]["median"] == medians[0]
    assert document["chosen"]["step_s"]["median"] in medians
    assert is_tie(document["chosen"]["step_s"]["median"], medians[0])
    assert document["status"] in ("best_of_candidates", "optimal")
    assert 0 <= document["gap"] <= 1
    assert json.loads(Plan.load(tmp_path / "plan.json").to_json()) == document["chosen"]["plan"]
    text, progress = call("plan", "RUN.toml", "--top", "3")
    assert "Chosen: " in text
    assert "slower by" in text
    assert "Chosen" not in progress


@pytest.mark.slow
def test_simulating_the_plan_that_was_kept_gives_its_prediction_again(call: Call) -> None:
    chosen = result_of(call, "plan", "RUN.toml", "--set", "plan.strategy=hp", "--out", "plan.json")["chosen"]
    again = result_of(call, "simulate", "RUN.toml", "--strategy", "./plan.json")
    assert_is_result(again)
    assert again["step_s"] == chosen["step_s"]
    assert again["plan"] == chosen["plan"]


@pytest.mark.parametrize("strategy", ["single", "dp", "mp", "hp", "adaptive"])
def test_simulate_breaks_the_step_down(call: Call, strategy: str) -> None:
    document = result_of(call, "simulate", "RUN.toml", "--strategy", strategy)
    assert_is_result(document)
    assert document["strategy"] == strategy or strategy == "adaptive"  # then it names the family of what it recommends
    ranks = len(document["peak_memory_bytes"])
    assert [rank["rank"] for rank in document["breakdown"]] == list(range(ranks))
    for rank in document["breakdown"]:
        categories = ("compute_s", "load_s", "host_s", "exposed_communication_s", "bubble_s", "idle_s")
        assert sum(rank[category] for category in categories) == pytest.approx(rank["step_s"])
    for rank, peak in zip(document["memory"], document["peak_memory_bytes"], strict=True):
        assert sum(rank["lines"].values()) == rank["total_bytes"] == peak
    assert document["critical_path"]


def test_a_plan_by_hand(call: Call) -> None:
    changes = ("plan.strategy=custom", "plan.mesh={ pp = 2, dp = 2 }", "plan.microbatches=4", "plan.pipeline_order=gpipe")
    arguments = [part for change in changes for part in ("--set", change)]
    document = result_of(call, "simulate", "RUN.toml", *arguments)
    plan = document["plan"]
    assert (plan["strategy"], plan["mesh"], plan["microbatches"]) == ("custom", {"pp": 2, "dp": 2, "tp": 1}, 4)
    assert plan["pipeline_order"] == "gpipe"
    assert result_of(call, "plan", "RUN.toml", *arguments)["chosen"]["plan"] == plan


def without_torch(folder: Path, *arguments: str) -> dict[str, Any]:
    """The JSON of `parsim ARGS` in a process where torch, scikit-learn and transformers cannot be imported."""
    absent = "sys.modules.update(dict.fromkeys(('torch', 'sklearn', 'transformers')))"
    code = f"import sys; {absent}; sys.argv = {['parsim', *arguments, '--json']!r}; from parsim.cli import main; main()"
    run = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    document: dict[str, Any] = json.loads(run.stdout)
    return document


@pytest.mark.slow
def test_a_preset_and_a_model_saved_as_json_plan_without_torch(tmp_path: Path) -> None:
    (tmp_path / "RUN.toml").write_text(RUN_TOML)
    chosen = without_torch(tmp_path, "plan", "RUN.toml")["chosen"]
    assert_is_result(chosen)
    load_model(ModelSpec(name="resnet50", args=(("num_classes", 100),))).save(tmp_path / "mine.json")
    (tmp_path / "MINE.toml").write_text(RUN_TOML.replace('"resnet50"', '"mine.json"').replace("args", "# args"))
    assert without_torch(tmp_path, "plan", "MINE.toml")["chosen"] == chosen
    assert_is_result(without_torch(tmp_path, "simulate", "MINE.toml", "--strategy", "hp"))


def test_simulate_keeps_a_folder_that_report_draws_again(call: Call, tmp_path: Path) -> None:
    call("simulate", "RUN.toml", "--strategy", "dp", "--out", "kept")
    folder = tmp_path / "kept"
    trace = (folder / "trace.json").read_text()
    assert json.loads(trace)["traceEvents"]
    result = json.loads((folder / "result.json").read_text())
    assert_is_result(result)
    for name in ("trace.json", "report.html"):
        (folder / name).unlink()
    call("report", "kept")
    assert (folder / "trace.json").read_text() == trace
    page = (folder / "report.html").read_text()
    assert "resnet50" in page
    assert list(folder.rglob("*.partial")) == []


def test_cost_of_shards(call: Call) -> None:
    """Each rule that divides has its own rows behind the whole component's, and is no slower than the whole."""
    rows = result_of(call, "cost", "dgx1-v100-32gb", "--model", "gpt_small", "--batch", "32", "--ways", "4")["rows"]
    shards = [row for row in rows if "rule" in row]
    assert {row["ways"] for row in shards} == {4}
    assert {row["rule"] for row in shards} >= {"vocabulary", "column", "row"}
    whole = {(row["component"], row["phase"]): row["seconds"]["median"] for row in rows if "rule" not in row}
    assert all(row["seconds"]["median"] <= whole[row["component"], row["phase"]] for row in shards)


def test_calibration_measures_each_model_once_at_every_local_batch_a_plan_may_use() -> None:
    text = RUN_TOML.replace("resnet50", "mlp").replace("num_classes = 100", "")
    configs = [parse_config(text), parse_config(text, ["training.global_batch=24"])]
    assert calibration_request(configs, ["vit_small", "vit_small"], batches=(4, 2)).models == (
        (ModelSpec(name="mlp"), (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)),
        (ModelSpec(name="vit_small"), (2, 4)),
    )
    assert local_batches(7) == {7}


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_while_modules_are_loaded_ends_in_one_line(name: str) -> None:
    loading = f"""
import os, signal, sys, time, types
number = signal.{name}
signal.signal(number, signal.SIG_DFL)  # a shell's background job ignores some

class Loading(types.ModuleType):
    def __getattr__(self, name):
        if name == "main":
            os.kill(os.getpid(), number)
            time.sleep(30)
        raise AttributeError(name)

sys.modules["parsim.cli"] = Loading("parsim.cli")
from parsim.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", loading], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == f"parsim: ended by {name} before the command had begun. Give it again\n"
    assert done.returncode == 128 + getattr(signal, name)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_ends_a_command_in_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    number = getattr(signal, name)
    usual = signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL
    before = signal.signal(number, usual)  # a shell's background job ignores some

    def command(*, told: bool) -> None:
        try:
            os.kill(os.getpid(), number)
            time.sleep(30)
        except BaseException as ending:
            if told:
                ending.add_note("it has said where it stands")
            raise

    try:
        for told in (False, True):
            with pytest.raises(SystemExit) as caught:
                _endings_told("plan", command)(told=told)
            assert caught.value.code == 128 + number
            line = f"parsim: ended by {name} before `parsim plan` had a result; nothing is left running. Give the same command"
            assert capsys.readouterr().err == ("" if told else f"{line} again\n")
    finally:
        assert signal.getsignal(number) == usual
        signal.signal(number, before)
    with pytest.raises(SystemExit, match="7"):
        _endings_told("plan", sys.exit)(7)
