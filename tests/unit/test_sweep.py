"""A sweep: its rows are the answers of `parsim.plan`; it goes on where it stopped; what fails is a row; where it runs."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import parsim as ps
from parsim.app.sweep import executing
from parsim.app.sweep.executing import CATEGORIES
from parsim.app.sweep.sweep import Sweep, open_sweep
from parsim.errors import ConfigError, ExecutionError

GIVEN: dict[str, object] = {"plan.strategy": "custom", "plan.mesh": {"dp": 2}, "cluster.devices": 2}
QUESTION: dict[str, Any] = {"cluster": "dgx1-v100-32gb", "global_batch": 64, "settings": GIVEN}
BATCHES = {"training.global_batch": [64, 128, 192]}
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}


def swept(over: Any = BATCHES, **changes: Any) -> Sweep:
    return ps.sweep("mlp", over, **{**QUESTION, "jobs": 1, **changes})


@pytest.mark.slow
def test_the_title_names_the_nodes_that_all_points_have() -> None:
    network = {"plan.strategy": "dp", "cluster.network": "infiniband-100g"}
    two = swept(settings={**network, "cluster.nodes": 2})
    assert two.title == "mlp on 2 x dgx1-v100-32gb"
    assert swept({"cluster.nodes": [1, 2]}, settings=network).title == "mlp on dgx1-v100-32gb"


def test_a_row_is_the_answer_of_plan() -> None:
    found = swept({"training.global_batch": [64, 96], "plan.zero_stage": [0, 1]})
    points = [(row["training.global_batch"], row["plan.zero_stage"]) for row in found.rows]
    assert points == [(64, 0), (64, 1), (96, 0), (96, 1)]
    for row in found.rows:
        settings = {**GIVEN, "plan.zero_stage": row["plan.zero_stage"]}
        asked = ps.plan("mlp", cluster="dgx1-v100-32gb", global_batch=row["training.global_batch"], settings=settings)
        predicted = asked.chosen
        assert row["step_s"] == predicted.step_s.median
        assert (row["step_p05_s"], row["step_p95_s"]) == (predicted.step_s.p05, predicted.step_s.p95)
        assert row["plan"] == predicted.plan.summary()
        assert row["peak_memory_bytes"] == max(predicted.peak_memory_bytes)
        breakdown = predicted.breakdown()
        for name in CATEGORIES:
            assert row[name] == pytest.approx(breakdown[name].mean(), rel=1e-12)
        assert row["one_step_s"] == pytest.approx(breakdown.step_s.mean(), rel=1e-12)
        lines = [value for name, value in row.items() if name.startswith("memory_") and name != "memory_limit_bytes"]
        assert sum(lines) == row["peak_memory_bytes"]


def test_a_point_that_fails_is_a_row_with_the_reason() -> None:
    found = swept({"cluster.devices": [2, 99], "training.global_batch": [64, 65]})
    assert [row["status"] for row in found.rows] == ["ok", "failed", "failed", "failed"]
    assert "must be divisible" in found.rows[1]["reason"]
    assert "must equal the devices (99)" in found.rows[2]["reason"]
    assert found.failed == 3
    assert "3 failed" in found.sentence()
    unequal, uneven = (line for line in found.lines() if line.startswith("failed"))
    assert unequal.startswith("failed (2 points")
    assert uneven.startswith("failed (1 point): ")
    nothing = swept({"cluster.devices": [99]})
    assert (nothing.failed, nothing.best()) == (1, None)
    assert "no point meets it" in nothing.picked()


def test_faster_hardware_is_faster_by_its_factor() -> None:
    found = swept({"scale.compute": [1, 2], "scale.links": [1, 4], "scale.memory": [1, 1e-3]})
    row = {(entry["scale.compute"], entry["scale.links"], entry["scale.memory"]): entry for entry in found.rows}
    assert row[2, 1, 1]["compute_s"] == pytest.approx(row[1, 1, 1]["compute_s"] / 2, rel=1e-9)
    assert row[1, 4, 1]["compute_s"] == pytest.approx(row[1, 1, 1]["compute_s"], rel=1e-9)
    assert row[1, 4, 1]["exposed_communication_s"] < row[1, 1, 1]["exposed_communication_s"]
    assert row[2, 4, 1]["step_s"] < min(row[2, 1, 1]["step_s"], row[1, 4, 1]["step_s"])
    assert row[1, 1, 1e-3]["status"] == "does_not_fit"
    assert row[1, 1, 1e-3]["step_s"] == row[1, 1, 1]["step_s"]
    assert "does not fit" in row[1, 1, 1e-3]["reason"]


def test_goals_price_and_energy() -> None:
    priced = {**QUESTION, "settings": {**GIVEN, "cluster.usd_per_hour": 3.0, "cluster.busy_power_w": 250.0}}
    found = ps.sweep("mlp", BATCHES, **priced, jobs=1, goal="min cost where epoch < 1h", samples_per_epoch=1000)
    for row in found.rows:
        steps = -(-1000 // row["training.global_batch"])
        assert row["epoch_s"] == pytest.approx(steps * row["step_s"])
        assert row["usd_per_epoch"] == pytest.approx(row["epoch_s"] / 3600 * 3.0 * 2)
        assert row["kwh_per_epoch"] == pytest.approx(row["epoch_s"] / 3600 * 0.25 * 2)
        assert row["usd_per_million_samples"] == pytest.approx(1e6 / row["throughput_samples_per_s"] * 6.0 / 3600)
    best = found.best()
    assert best is not None
    assert best["usd_per_epoch"] == min(row["usd_per_epoch"] for row in found.rows)
    unpowered = ps.sweep("mlp", BATCHES, cluster="8xa100-sxm-80gb", global_batch=64, settings=GIVEN, jobs=1, goal="min energy")
    assert "set cluster.busy_power_w" in unpowered.picked()
    unknown = swept(goal="min epoch")
    assert "give --samples-per-epoch" in unknown.picked()
    with pytest.raises(ConfigError, match="samples-per-epoch"):
        unknown.best()
    with pytest.raises(ConfigError, match="did you mean"):
        swept(goal="min stap")


def test_values_are_swept_too_unless_the_sweep_would_change_them() -> None:
    cluster = ps.load_cluster("dgx1-v100-32gb", devices=2)
    model = ps.plan("mlp", cluster=cluster, global_batch=64, strategy="dp").problem.model
    settings = {"plan.strategy": "custom", "plan.mesh": {"dp": 2}}
    found = ps.sweep(model, BATCHES, cluster=cluster, global_batch=64, settings=settings, jobs=1)
    assert [row["step_s"] for row in found.rows] == [row["step_s"] for row in swept().rows]
    with pytest.raises(ConfigError, match="was given as a value"):
        ps.sweep(model, {"cluster.devices": [1]}, cluster=cluster, global_batch=64)


def test_it_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "sweep"
    first = swept(out=out)
    lines = (out / "points.jsonl").read_text().splitlines()
    assert len(lines) == 4
    assert sorted(path.name for path in out.iterdir()) == ["points.csv", "points.jsonl", "points.parquet", "sweep.json"]
    table = pd.read_csv(out / "points.csv", float_precision="round_trip")  # the default of pandas before 3 rounds
    assert table.step_s.tolist() == first.table().step_s.tolist()
    columns = ["step_s", "plan"]
    pd.testing.assert_frame_equal(pd.read_parquet(out / "points.parquet")[columns], first.table()[columns])
    whole, half = lines[:3], lines[3]
    (out / "points.jsonl").write_text("\n".join(whole) + "\n" + half[: len(half) // 2])
    asked: list[int] = []
    real = executing.evaluate_point
    monkeypatch.setattr(executing, "evaluate_point", lambda point: (asked.append(point.number), real(point))[1])
    again = swept(out=out)
    assert asked == [2]
    assert again.reused == 2
    assert again.rows == first.rows
    assert (out / "points.jsonl").read_text().splitlines() == lines, "the half line is gone"
    more = swept({"training.global_batch": [64, 128, 192, 256]}, out=out)
    assert asked == [2, 3]
    assert more.rows[:3] == first.rows
    lines[1] = lines[1][:20] + "damaged" + lines[1][20:]
    (out / "points.jsonl").write_text("\n".join(lines) + "\n")
    assert swept(out=out).rows == first.rows
    assert open_sweep(out).rows == first.rows


@pytest.mark.slow
def test_points_that_differ_in_the_strategy_share_a_search_and_answer_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order of the fields: what one search works out is there for the next, and changes no answer."""
    asked: list[str] = []
    problems: list[object] = []
    real, answer = executing.evaluate_point, executing.answer_of

    def evaluate_point(point: Any) -> dict[str, Any]:
        asked.append(point.settings["plan.strategy"])
        return real(point)

    def answer_of(question: Any, problem: Any) -> Any:
        problems.append(problem)
        return answer(question, problem)

    monkeypatch.setattr(executing, "evaluate_point", evaluate_point)
    monkeypatch.setattr(executing, "answer_of", answer_of)
    over = {"plan.strategy": ["hp", "adaptive"], "training.global_batch": [64, 256]}
    found = ps.sweep("mlp", over, cluster="dgx1-v100-32gb", global_batch=64, jobs=1)
    assert asked == ["hp", "adaptive"] * 2
    assert len({id(problem) for problem in problems}) == 2
    for row in found.rows:
        executing._LAST.clear()
        alone = ps.sweep("mlp", {key: [row[key]] for key in over}, cluster="dgx1-v100-32gb", global_batch=64, jobs=1)
        assert {**alone.rows[0], "point": row["point"]} == row


def test_another_question_is_asked_anew(tmp_path: Path) -> None:
    """The key covers the content of files, not their names."""
    run = tmp_path / "run.toml"
    text = '[model]\nname="mlp"\n[cluster]\nprofile="dgx1-v100-32gb"\ndevices=2\n[training]\nglobal_batch=64\n'
    text += '[plan]\nstrategy="custom"\nmesh={dp=2}\n'
    run.write_text(text)
    first = ps.sweep(run, BATCHES, jobs=1, out=tmp_path / "s")
    assert first.rows[0]["step_s"] == swept().rows[0]["step_s"]
    assert ps.sweep(run, BATCHES, jobs=1, out=tmp_path / "s").reused == 3
    run.write_text(text.replace("[training]", '[training]\noptimizer="adam"'))
    assert ps.sweep(run, BATCHES, jobs=1, out=tmp_path / "s").reused == 0
    run.write_text(text)
    assert ps.sweep(run, BATCHES, jobs=1, out=tmp_path / "s").reused == 3


def test_a_full_disk_keeps_what_is_known(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the write in the middle fails, perhaps half way through a line."""
    out = tmp_path / "sweep"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2600, limits[1]))
    try:
        with pytest.raises(ExecutionError, match="make room and give the same command again"):
            swept(out=out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    again = swept(out=out)
    assert 0 < again.reused < 3
    assert again.rows == swept().rows


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is neither empty nor a folder of a sweep"):
        swept(out=tmp_path)
    with pytest.raises(ConfigError, match="is a file"):
        swept(out=tmp_path / "notes.txt")
    with pytest.raises(ConfigError, match="is not a folder of a sweep"):
        open_sweep(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "points.jsonl").write_text('{"schema_version": 99}\n')
    with pytest.raises(ConfigError, match="is not a log of a sweep"):
        swept(out=tmp_path / "other")
    busy = executing.SweepFolder(tmp_path / "busy")
    with busy.writing(), pytest.raises(ConfigError, match="another sweep writes"):
        swept(out=tmp_path / "busy")


def test_without_pyarrow_the_csv_is_said_to_be_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    found = swept(out=tmp_path / "s")
    assert found.notes == (executing.NO_PARQUET,)
    assert not (tmp_path / "s" / "points.parquet").exists()


def test_where_it_runs_is_checked() -> None:
    with pytest.raises(ConfigError, match="at least one process"):
        swept(jobs=0)
    with pytest.raises(ConfigError, match="has its own workers"):
        swept(on="tcp://127.0.0.1:1")
    with pytest.raises(ConfigError, match="both choose the points"):
        swept(sample=4, sensitivity=4)


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "parsim", *arguments]
    return subprocess.run(words, capture_output=True, text=True, check=False, cwd=cwd, env=ENVIRONMENT, timeout=200)


MLP = ("mlp", "--on", "dgx1-v100-32gb", "--batch", "64", "--set", "plan.mesh={dp=2}", "--set", "cluster.devices=2")
OVER = ("--over", "training.global_batch=64:192:+64", "--over", "plan.strategy=custom")


def test_the_command(tmp_path: Path) -> None:
    done = command("sweep", *MLP, *OVER, "--goal", "max throughput", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [row["step_s"] for row in document["points"]] == [row["step_s"] for row in swept().rows]
    assert document["best"]["point"] == 2
    assert document["folder"] == "runs/mlp-sweep"
    refused = command("sweep", *MLP, "--over", "cluster.nods=1", cwd=tmp_path)
    assert refused.returncode == 1
    assert refused.stderr.startswith("parsim: --over cluster.nods: ")
    assert "Traceback" not in refused.stderr
    told = command("compare", "runs/mlp-sweep:0", "runs/mlp-sweep:2", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert "training.global_batch: 64 -> 192" in told.stdout


@pytest.mark.slow
def test_processes_give_the_same_rows_and_outlive_a_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One point kills its worker, always; all others are answered."""
    monkeypatch.setattr(executing, "_in_worker", _deadly)
    over = {"training.global_batch": [64, 96, 128, 160, 192, 224]}
    found = swept(over, jobs=2)
    expected = swept(over)
    for row, right in zip(found.rows, expected.rows, strict=True):
        if row["training.global_batch"] == 128:
            assert row["status"] == "failed"
            assert "its worker process died twice" in row["reason"]
        else:
            assert row == right


def _deadly(points: Any) -> Any:
    from parsim.app.sweep.executing import _SHARED, evaluate_points

    if any(point.settings["training.global_batch"] == 128 for point in points):
        os._exit(9)
    return evaluate_points(points, _SHARED)


@pytest.mark.slow
def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "parsim", "sweep", *MLP, "--over", "training.global_batch=64:32000:+64", "--jobs", "2"]
    arguments += ["--set", "plan.strategy=custom"]
    quiet = subprocess.DEVNULL
    begun = subprocess.Popen(arguments, cwd=tmp_path, env=ENVIRONMENT, stdout=quiet, stderr=quiet)
    log = tmp_path / "runs" / "mlp-sweep" / "points.jsonl"
    until = time.monotonic() + 100
    while time.monotonic() < until and not (log.is_file() and len(log.read_bytes().splitlines()) > 3):
        time.sleep(0.02)
    tasks = Path(f"/proc/{begun.pid}/task").glob("*/children")
    children = [child for task in tasks for child in task.read_text().split()]
    assert len(children) >= 2
    begun.send_signal(signal.SIGKILL)
    begun.wait()
    until = time.monotonic() + 30
    while time.monotonic() < until and any(Path(f"/proc/{child}").exists() for child in children):
        time.sleep(0.1)
    assert not [child for child in children if Path(f"/proc/{child}").exists()]


@pytest.mark.slow
def test_killed_and_resumed(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    over = ("--over", "training.global_batch=64:3200:+64", "--over", "plan.strategy=custom")
    arguments = [sys.executable, "-m", "parsim", "sweep", *MLP, *over, "--jobs", "1", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    begun = subprocess.Popen(arguments, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = tmp_path / "runs" / "mlp-sweep" / "points.jsonl"
    until = time.monotonic() + 100
    while time.monotonic() < until and not (log.is_file() and len(log.read_bytes().splitlines()) > 3):
        time.sleep(0.01)
    begun.send_signal(signal.SIGKILL)
    begun.wait()
    done = command("sweep", *MLP, *over, "--jobs", "1", "--json", cwd=tmp_path)
    document = json.loads(done.stdout)
    assert 2 <= document["reused"] <= 50
    assert [row["status"] for row in document["points"]] == ["ok"] * 50
