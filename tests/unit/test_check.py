"""Whether a training fits, for a script: verdict, exit status, what would help, and the largest sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import parsim as ps
from parsim.app.answer import LargestOf
from parsim.app.ask import whole
from parsim.app.check import Help, _bisected, _Sizes, changed, check_question, mesh_settings, rate_of, verdict_of
from parsim.app.functions import question_by_name
from parsim.errors import ConfigError, DoesNotFitError
from tests.commands import status_of

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "examples" / "check"
WHOLE: dict[str, Any] = {"strategy": "dp", "mesh": {"pp": 1, "dp": 8, "tp": 1}, "microbatches": 8}
TOO_LARGE = """
[model]
name = "llama3-8b"
[cluster]
gpu = "rtx-4090"
gpus_per_node = 1
[training]
global_batch = 4
[plan]
strategy = "single"
recompute = "none"
microbatches = 4
"""
SMALL = """
[model]
name = "mlp"
[cluster]
profile = "dgx1-v100-32gb"
devices = 2
[training]
global_batch = 64
[plan]
strategy = "dp"
"""


@pytest.mark.parametrize(
    ("probability", "verdict"),
    [(1.0, "fits"), (0.95, "fits"), (0.949, "uncertain"), (0.5, "uncertain"), (0.499, "does not fit"), (0.0, "does not fit")],
)
def test_the_verdict_is_that_of_plans(probability: float, verdict: str) -> None:
    assert verdict_of(probability) == verdict


def test_a_check_says_what_simulate_says_and_each_help_is_what_plan_says() -> None:
    checked = ps.check("llama3-8b", "8xh100-sxm", global_batch=128, recompute="full", zero_stage=3, **WHOLE)
    alone = ps.plan("llama3-8b", "8xh100-sxm", global_batch=128, recompute="full", zero_stage=3, **WHOLE)
    assert checked.verdict == "fits"
    assert checked.prediction.step_s.median == alone.prediction.step_s.median
    assert checked.mfu == pytest.approx(checked.prediction.quoted.mfu if checked.prediction.quoted else 0)
    assert 1 <= len(checked.helps) <= 3
    assert [each.faster for each in checked.helps] == sorted((each.faster for each in checked.helps), reverse=True)
    best = checked.helps[0]
    again = ps.plan(
        "llama3-8b", "8xh100-sxm", global_batch=128, recompute="full", zero_stage=3, **WHOLE, overrides=set_of(best)
    )
    assert again.prediction.step_s.median == best.prediction.step_s.median
    assert best.faster == pytest.approx(rate_of(again.prediction) / rate_of(alone.prediction) - 1)


def set_of(found: Help) -> list[str]:
    """What a help tells to give, as `--set` takes it."""
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in found.settings.items()]


def test_what_does_not_fit_gets_changes_that_need_less() -> None:
    checked = ps.check("llama3-8b", "8xh100-sxm", global_batch=128, recompute="none", zero_stage=0, **WHOLE)
    assert (checked.verdict, checked.exit_status) == ("does not fit", 3)
    document = checked.to_dict()
    assert document["needed_bytes"] > document["limit_bytes"]
    for each in checked.helps:
        assert each.needed_bytes < document["needed_bytes"]
    safe = [each.prediction.is_safe for each in checked.helps]
    assert safe == sorted(safe, reverse=True), "those that fit come first"
    text = str(checked)
    assert text.startswith("Does not fit: the probability that it does is 0.1%.")
    assert "the largest line is optimizer_state" in text
    assert len(text.splitlines()) < 24, "one screen"


def test_the_command_ends_with_the_status_and_prints_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    (tmp_path / "large.toml").write_text(TOO_LARGE)
    monkeypatch.chdir(tmp_path)
    assert status_of(monkeypatch, "check", "small.toml") == 0
    assert capsys.readouterr().out.startswith("Fits, with 99.9%.")
    assert status_of(monkeypatch, "check", "large.toml", "--json") == 3
    document = json.loads(capsys.readouterr().out)
    assert (document["verdict"], document["exit_status"]) == ("does not fit", 3)
    assert status_of(monkeypatch, "check", "small.toml", "large.toml", "--json") == 3
    assert [each["verdict"] for each in json.loads(capsys.readouterr().out)["checks"]] == ["fits", "does not fit"]
    assert status_of(monkeypatch, "check", "nothing.toml") == 1
    assert status_of(monkeypatch, "check", "gpt2", "--gpus=1x4090", "--batch=1", "--seq=256", "--tune=qlora:r=16") == 0
    assert status_of(monkeypatch, "plan", "large.toml") == 0
    assert status_of(monkeypatch, "plan", "large.toml", "--fail-if-nothing-fits") == 3
    assert status_of(monkeypatch, "plan", "small.toml", "--fail-if-nothing-fits", "--explain") == 0
    assert "Where the" in capsys.readouterr().out


def test_a_changed_question_keeps_what_it_was_made_from() -> None:
    question = question_by_name("mlp", "dgx1-v100-32gb", 64, {"cluster.devices": 2, "plan.strategy": "dp"}, {})
    other = changed(question, {"training.global_batch": 128})
    assert other.training.global_batch == 128
    assert other.source == question.source
    assert changed(question, {}).to_dict() == question.to_dict()
    with pytest.raises(ConfigError, match=r"training\.global_batch"):
        changed(question, {"training.global_batch": 0})


def test_a_help_is_priced_as_the_framework_of_what_it_is_compared_with() -> None:
    """Asked for by itself, tensor parallelism would be taken for another framework's, and seem faster or slower by that."""
    open_question = question_by_name("llama3-8b", "2xa100-sxm-80gb", 64, {}, {})
    mesh: dict[str, object] = {"plan.mesh.pp": 1, "plan.mesh.dp": 1, "plan.mesh.tp": 2}
    alone = question_by_name("llama3-8b", "2xa100-sxm-80gb", 64, mesh, {})
    assert open_question.guess is not None
    assert changed(open_question, mesh).guess == open_question.guess != alone.guess


@pytest.mark.slow
@pytest.mark.parametrize("what", ["batch", "seq", "model"])
def test_the_largest_fits_and_the_next_does_not(what: LargestOf) -> None:
    mesh = {"pp": 1, "dp": 8, "tp": 1}
    answer = ps.plan("llama3-8b", "8xh100-sxm", global_batch=64, seq=8192, mesh=mesh, largest=what)
    found = answer.largest
    assert found is not None
    assert answer.prediction.is_safe
    assert found.above is not None
    assert found.above > found.size > 0
    key = {"batch": "training.global_batch", "seq": "model.args.seq", "model": "model.args.layers"}[what]
    more = changed(answer.question, {key: found.above})
    assert not check_question(more).prediction.is_safe
    assert f"{found.size:,}" in answer.heading()[0]
    assert json.loads(json.dumps(answer.to_dict()))["largest"]["size"] == found.size
    mesh_of_answer = mesh_settings(answer.prediction.plan)
    assert mesh_of_answer == {"plan.mesh.pp": 1, "plan.mesh.dp": 8, "plan.mesh.tp": 1}


def test_what_has_no_largest_is_refused() -> None:
    with pytest.raises(ConfigError, match="transformer by name"):
        ps.plan("mlp", "dgx1-v100-32gb", global_batch=64, strategy="dp", largest="seq")
    with pytest.raises(DoesNotFitError, match="no plan fits with 95% at 1 samples"):
        ps.plan("llama3-8b", "1x4090", global_batch=4, strategy="single", largest="batch")


def test_ctrl_c_ends_what_asks_more_than_once_and_says_what_is_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A search that is cut short answers with what it has; a bisection on such answers would be wrong."""
    sizes = _Sizes(noun="samples", step=8, most=1000, at=1, settings=lambda number: {"training.global_batch": 8 * number})

    def does(number: int) -> bool:
        if number == 6:
            raise KeyboardInterrupt
        return number < 6

    with pytest.raises(KeyboardInterrupt) as ending:
        _bisected(sizes, 1, does)
    error = capsys.readouterr().err
    assert "32 samples fit with 95%, and up to 64 not all were tried" in error
    assert "--set training.global_batch=32" in error
    assert ending.value.__notes__
    answer = ps.plan("mlp", "dgx1-v100-32gb", global_batch=64, devices=2, strategy="dp")
    assert answer.search is not None
    cut = replace(answer, search=replace(answer.search, cut_short=True))
    with pytest.raises(KeyboardInterrupt):
        whole(cut)
    assert whole(answer) is answer
    monkeypatch.setattr("parsim.app.functions.ask", lambda *_, **__: cut)
    monkeypatch.setattr("parsim.app.sweep.executing.answer_of", lambda *_: cut)
    asked: dict[str, Any] = {"cluster": "dgx1-v100-32gb", "global_batch": 64, "settings": {"cluster.devices": 2}}
    calls = (
        lambda: ps.simulate("mlp", **asked),
        lambda: ps.run("mlp", **asked),
        lambda: ps.sweep("mlp", {"training.global_batch": [32, 64]}, **asked),
    )
    for call in calls:
        with pytest.raises(KeyboardInterrupt):
            call()


@given(most=st.integers(1, 300), limit=st.integers(1, 300))
def test_bisection_finds_the_largest(most: int, limit: int) -> None:
    sizes = _Sizes(noun="layers", step=1, most=most, at=1, settings=lambda number: {"model.args.layers": number})
    assert _bisected(sizes, 1, lambda number: number <= limit) == max(1, min(most, limit))


# Recipes.


def stub(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder of programs, with this parsim."""
    folder = tmp_path / "bin"
    stub(folder, "parsim", f'exec {sys.executable} -m parsim "$@"')
    (tmp_path / "small.toml").write_text(SMALL)
    (tmp_path / "large.toml").write_text(TOO_LARGE)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("comment", "cancels"), [("parsim: large.toml", True), ("parsim: small.toml", False), ("mine", False)])
def test_the_prolog_cancels_a_job_that_does_not_fit(programs: Path, tmp_path: Path, comment: str, cancels: bool) -> None:
    said = tmp_path / "said"
    job = f"JobId=7 JobName=train Comment={comment} UserId=ann"
    stub(programs, "scontrol", f'[[ $1 == show ]] && echo "{job}" || echo "scontrol $*" >>{said}')
    stub(programs, "scancel", f'echo "scancel $*" >>{said}')
    stub(programs, "logger", f'echo "logger ${{*:1:5}}" >>{said}')
    stub(programs, "runuser", 'while [[ $1 != -- ]]; do shift; done; shift; exec "$@"')
    environment = {**os.environ, "PARSIM_PATH": str(programs), "PARSIM_TIMEOUT_S": "600"}
    environment |= {"SLURM_JOB_ID": "7", "SLURM_JOB_USER": "ann"}
    done = subprocess.run([RECIPES / "prolog.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    text = said.read_text() if said.exists() else ""
    assert ("scancel 7" in text) is cancels
    assert ("AdminComment=parsim: Does not fit" in text) is cancels
    assert ("logger -t parsim job 7:" in text) is (comment != "mine")


@pytest.mark.slow
@pytest.mark.parametrize(("files", "status"), [("small.toml", 0), ("small.toml large.toml", 3)])
def test_the_action_fails_where_a_training_does_not_fit(programs: Path, tmp_path: Path, files: str, status: int) -> None:
    action = yaml.safe_load((RECIPES / "action.yml").read_text())
    step = next(step for step in action["runs"]["steps"] if "parsim check" in step["run"])
    assert set(step["env"]) == {"FILES", "GPUS"}
    summary = tmp_path / "summary.md"
    path = f"{programs}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "FILES": files, "GPUS": "", "GITHUB_STEP_SUMMARY": str(summary)}
    bash = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    done = subprocess.run(bash, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert "Fits, with" in summary.read_text()
    assert ("Does not fit" in summary.read_text()) is (status == 3)


@pytest.mark.slow
def test_the_hook_checks_the_files_that_change(programs: Path, tmp_path: Path) -> None:
    (hook,) = yaml.safe_load((RECIPES / "pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    config = tmp_path / "llama.sh"
    config.write_text(
        "torchrun pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 "
        "--max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 --bf16 --vocab-size 32000 "
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1\n"
    )
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    command = [*hook["entry"].split(), *hook["args"], config.name]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert "Does not fit" in done.stdout
