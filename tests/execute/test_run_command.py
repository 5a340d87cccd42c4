"""The whole way on this machine, through the command line: calibrate, run, resume, validate, look at the files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parsim.hardware.compose import load_profile

RUN = """\
[model]
name = "mlp"
args = {{ width = 64 }}
[cluster]
profile = "{profile}"
devices = 2
[training]
global_batch = 16
learning_rate = 0.02
steps = {steps}
[plan]
strategy = "dp"
"""


def parsim(*arguments: str | Path) -> dict[str, Any]:
    """Run a command with --json in a process of its own; it must succeed and print one document."""
    done = subprocess.run(
        [sys.executable, "-m", "parsim", *map(str, arguments), "--json"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_calibrate_run_resume_validate(tmp_path: Path) -> None:
    profile, file, folder = tmp_path / "here.json", tmp_path / "run.toml", tmp_path / "out"
    file.write_text(RUN.format(profile=profile, steps=12))
    parsim("calibrate", file, "--out", profile, "--quick", "--nproc", "2")
    first = parsim("run", file, "--nproc", "2", "--out", folder, "--checkpoint-every", "5")
    assert first["comparison"]["measured"] > 0
    assert first["diagnosis"]["as_predicted"] in (True, False)
    assert first["history"]["text"] == "not recorded: 9 timed steps are fewer than the 20 that an interval is for"
    assert first["comparison"]["kinds"].keys() >= {"forward", "backward", "all_reduce", "optimizer", "load"}
    assert len(first["losses"]) == 12
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.toml", "plan.json", "result.json", "environment.json", "checkpoints"}
    assert names >= {"timeline.json.gz", "trace.json", "report.html"}
    assert not [name for name in names if name.endswith(".partial")]
    trace = json.loads((folder / "trace.json").read_text())
    assert {event["ph"] for event in trace["traceEvents"]} >= {"M", "X"}

    longer = tmp_path / "longer.toml"
    longer.write_text(RUN.format(profile=profile, steps=20))
    resumed = parsim("run", longer, "--nproc", "2", "--out", folder, "--resume")
    straight = parsim("run", longer, "--nproc", "2", "--out", tmp_path / "straight")
    assert len(resumed["losses"]) == 20
    assert resumed["losses"] == pytest.approx(straight["losses"], abs=1e-6)
    assert resumed["test_accuracy"] == pytest.approx(straight["test_accuracy"])

    for stage in (3, 2):  # the one resumes from whole replicas, the other from parts of everything
        part = tmp_path / f"{24 + 4 * (3 - stage)}.toml"
        part.write_text(RUN.format(profile=profile, steps=24 + 4 * (3 - stage)) + f"zero_stage = {stage}\n")
        resumed = parsim("run", part, "--nproc", "2", "--out", folder, "--resume")
        assert (len(resumed["losses"]), resumed["losses_from_step"]) == (24 + 4 * (3 - stage), 1)
    whole = tmp_path / "whole.toml"
    whole.write_text(RUN.format(profile=profile, steps=28))
    assert resumed["losses"] == pytest.approx(
        parsim("run", whole, "--nproc", "2", "--out", tmp_path / "whole")["losses"], abs=1e-5
    )

    again = parsim("validate", tmp_path / "straight")
    assert again["relative_error"] == pytest.approx((again["predicted"] - again["measured"]) / again["measured"])
    assert {"predicted", "measured", "relative_error", "within_interval"} <= again["kinds"]["forward"].keys()
    assert again["history"] == {
        "path": str(tmp_path / "here.history.jsonl"),
        "recorded": True,
        "text": f"recorded in {tmp_path / 'here.history.jsonl'}",
    }
    twice = parsim("validate", tmp_path / "straight", "--update")
    assert twice["history"]["recorded"] is False
    changed = load_profile(str(profile))
    assert len(changed.updates) == (1 if twice["update"]["changes"] else 0)
    assert abs(twice["update"]["relative_error_after"]) <= max(abs(twice["relative_error"]), twice["aa_floor"]["median"]) + 1e-9
    assert again["at_pace"]["slowness"] > 0  # looked at before and after the training
    measured = parsim("validate", longer, "--rounds", "4", "--out", tmp_path / "measured")
    speed = measured["at_pace"]
    assert speed["slowness"] > 0
    assert speed["relative_error"] == pytest.approx(speed["predicted"] / measured["measured"] - 1)
    known = parsim("coverage", profile, "--history", tmp_path / "here.history.jsonl")
    assert known["records"] == (1 if changed.updates else 3)  # the training of 25 timed steps, and both validations


BY_TURNS = """\
[model]
name = "vit_small"
args = {{ hidden = 32, layers = 2, patch = 8 }}
granularity = "sublayer"
[cluster]
profile = "{profile}"
devices = 2
[training]
global_batch = 64
optimizer = "adam"
learning_rate = 0.001
dtype = "float64"
epochs = 40
[plan]
strategy = "custom"
mesh = {{ tp = 2 }}
placements = {{ "*attention*" = "place:1", "*" = "place:0" }}
"""


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_an_adaptive_run_leaves_a_bad_plan_and_trains_as_without(tmp_path: Path) -> None:
    """Attention on rank 1, all else on rank 0, never both at work: the search knows better however busy the machine is, and no
    loss tells that the plan changed."""
    profile, file = tmp_path / "here.json", tmp_path / "run.toml"
    file.write_text(BY_TURNS.format(profile=profile))
    parsim("calibrate", file, "--out", profile, "--quick", "--nproc", "2")
    straight = parsim("run", file, "--nproc", "2", "--out", tmp_path / "straight")
    adaptive = parsim("run", file, "--nproc", "2", "--out", tmp_path / "adaptive", "--adaptive", "--window", "8")
    assert straight["decisions"] == []
    changed = [decision for decision in adaptive["decisions"] if decision["plan"] is not None]
    assert changed, adaptive["decisions"]
    assert all(decision["reason"] for decision in adaptive["decisions"])
    assert len(adaptive["losses"]) == len(straight["losses"]) > changed[0]["step"]
    compared = changed[0]["step"] + 200  # in a thousand steps of Adam the order of summation alone makes 1e-10
    assert adaptive["losses"][:compared] == pytest.approx(straight["losses"][:compared], abs=1e-10)
    assert adaptive["losses"] == pytest.approx(straight["losses"], abs=1e-7)
    assert adaptive["losses"][-1] < adaptive["losses"][0]
