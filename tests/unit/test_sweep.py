"""Sweeps: axes and goals; rows are the answers of `parsim.plan`; what stopped goes on; one process, several, or a cluster."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import parsim as ps
from parsim.app.sweep import executing
from parsim.app.sweep.executing import CATEGORIES, COLUMNS
from parsim.app.sweep.goal import Goal, parse_goal, sensitivity
from parsim.app.sweep.points import (
    Axis,
    axes_of,
    axis_of,
    check_field,
    grid,
    is_whole,
    known_fields,
    parse_axis,
    saltelli,
    sobol_sample,
)
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


# What is swept: fields, ranges, samples, and goals; each error teaches.


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("cluster.nodes=1,2,4,8", (1, 2, 4, 8)),
        ("training.global_batch=256:4096:x2", (256, 512, 1024, 2048, 4096)),
        ("training.global_batch=256:4000:x2", (256, 512, 1024, 2048)),
        ("cluster.devices=2:8:+2", (2, 4, 6, 8)),
        ("cluster.devices=3:3:+1", (3,)),
        ("plan.strategy=dp,adaptive", ("dp", "adaptive")),
        ("plan.mesh={pp=1, dp=8}, {pp=2, dp=4}", ({"pp": 1, "dp": 8}, {"pp": 2, "dp": 4})),
        ("model.args.hidden=128,256", (128, 256)),
        ("scale.links=0.5:2:x2", (0.5, 1.0, 2.0)),
        ("cluster.profile=dgx1-v100-32gb,dgx2-v100", ("dgx1-v100-32gb", "dgx2-v100")),
        ('cluster.network="infiniband-100g"', ("infiniband-100g",)),
    ],
)
def test_values_of_an_axis(text: str, values: tuple[object, ...]) -> None:
    axis = parse_axis(text)
    assert axis.values == values
    assert [type(value) for value in axis.values] == [type(value) for value in values]
    assert axes_of({axis.key: text.partition("=")[2]})[0].values == values, "a mapping takes the same texts"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cluster.nods=1", "did you mean cluster.nodes"),
        ("nodes=1", "did you mean cluster.nodes"),
        ("scale.memori=2", "did you mean scale.memory"),
        ("cluster.nodes", "KEY=1,2,4"),
        ("cluster.nodes=", "KEY=1,2,4"),
        ("cluster.nodes=8:1:x2", "the range is empty, since 8 > 1"),
        ("cluster.nodes=1:8:x1", "never arrive"),
        ("cluster.nodes=0:8:x2", "never arrive"),
        ("cluster.nodes=1:8:+0", "never arrive"),
        ("cluster.nodes=1:8:twice", "neither x2, +8 nor log"),
        ("cluster.nodes=1:many", "both ends of a range are numbers"),
        ("cluster.nodes=1,,2", "a value between two commas is missing"),
        ("cluster.nodes=1,2,1", "appears twice"),
        ("scale.links=0:1:log", "a factor from 1e-06"),
        ("scale.links=fast", "a factor from 1e-06"),
        ("training.global_batch=1:1000000000:+1", "more than the 100,000"),
    ],
)
def test_an_axis_that_cannot_be_says_why(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_axis(text)
    assert said in str(refused.value)


def test_axes_together() -> None:
    with pytest.raises(ConfigError, match="was given twice"):
        axes_of(["cluster.nodes=1", "cluster.nodes=2"])
    with pytest.raises(ConfigError, match="a key to vary"):
        axes_of([])
    with pytest.raises(ConfigError, match="the list of values is empty"):
        axis_of("cluster.nodes", [])
    with pytest.raises(ConfigError, match="has no step: add one"):
        grid(axes_of(["scale.links=0.5:2"]))
    with pytest.raises(ConfigError, match="1,000,000 of one sweep"):
        grid([Axis(key=key, values=tuple(range(200))) for key in ("a", "b", "c")])


def test_every_key_of_a_run_file_is_a_field() -> None:
    fields = known_fields()
    assert {"cluster.nodes", "training.global_batch", "plan.mesh.tp", "plan.zero_stage", "model.args.*"} <= set(fields)
    for field in fields:
        check_field(field.replace("*", "anything"))
    assert is_whole("training.global_batch")
    assert is_whole("plan.mesh.dp")
    assert not is_whole("training.learning_rate")
    assert not is_whole("scale.links")


def test_a_grid_has_every_combination_the_last_axis_fastest() -> None:
    designed = grid(axes_of({"cluster.nodes": [1, 2], "plan.strategy": ["dp", "mp"]}))
    assert [tuple(entry.values()) for entry in designed] == [(1, "dp"), (1, "mp"), (2, "dp"), (2, "mp")]


@given(low=st.integers(1, 50), span=st.integers(0, 50), seed=st.integers(0, 5), log=st.booleans())
def test_samples_stay_between_the_ends(low: int, span: int, seed: int, log: bool) -> None:
    whole = parse_axis(f"training.global_batch={low}:{low + span}{':log' if log else ''}")
    listed = parse_axis("plan.strategy=dp,mp,hp")
    for entry in sobol_sample([whole, listed], 16, seed):
        assert low <= entry["training.global_batch"] <= low + span
        assert isinstance(entry["training.global_batch"], int)
        assert entry["plan.strategy"] in ("dp", "mp", "hp")


def test_samples_are_even_and_follow_their_seed() -> None:
    axes = axes_of(["cluster.devices=1:4", "plan.strategy=dp,mp", "scale.links=0.25:4:log"])
    first = sobol_sample(axes, 256, 7)
    assert first == sobol_sample(axes, 256, 7)
    assert first != sobol_sample(axes, 256, 8)
    assert set(Counter(entry["cluster.devices"] for entry in first).values()) == {64}
    assert set(Counter(entry["plan.strategy"] for entry in first).values()) == {128}
    assert sum(entry["scale.links"] < 1 for entry in first) == 128, "uniform in the logarithm"


def test_designs_that_cannot_be() -> None:
    one = axes_of(["cluster.devices=1:4"])
    with pytest.raises(ConfigError, match="at least one point"):
        sobol_sample(one, 0, 0)
    with pytest.raises(ConfigError, match="a second --over"):
        saltelli(one, 8, 0)
    pytest.importorskip("SALib")
    with pytest.raises(ConfigError, match="a power of two; use 8"):
        saltelli(axes_of(["scale.links=0.5:2", "scale.compute=0.5:2"]), 10, 0)


def test_sobol_indices_of_a_function_that_is_known() -> None:
    """y = 3 a + b over the unit square: a explains 9 tenths of the variance, alone and in all; a third field nothing."""
    pytest.importorskip("SALib")
    axes = axes_of(["scale.compute=1:2", "scale.links=1:2", "scale.memory=1:2"])
    designed = saltelli(axes, 512, 3)
    assert len(designed) == 512 * 5
    rows = [{"status": "ok", "y": 3 * entry["scale.compute"] + entry["scale.links"]} for entry in designed]
    found = sensitivity(axes, rows, "y", 0)
    assert [share.key for share in found.shares] == ["scale.compute", "scale.links", "scale.memory"]
    assert [share.total for share in found.shares] == pytest.approx([0.9, 0.1, 0.0], abs=0.03)
    assert [share.first for share in found.shares] == pytest.approx([0.9, 0.1, 0.0], abs=0.03)
    broken = [{"status": "failed"} if number == 7 else row for number, row in enumerate(rows)]
    assert sensitivity(axes, broken, "y", 0).left_out == 5
    with pytest.raises(ConfigError, match="only 0 of 512 blocks"):
        sensitivity(axes, [{"status": "failed"}] * len(rows), "y", 0)
    assert sensitivity(axes, [{"status": "ok", "y": 1.0}] * len(rows), "y", 0).shares == ()


ROWS = [
    {"status": "ok", "step_s": 2.0, "epoch_s": 7000.0, "usd_per_epoch": 5.0, "peak_memory_bytes": 2**30, "strategy": "dp"},
    {"status": "ok", "step_s": 1.0, "epoch_s": 7300.0, "usd_per_epoch": 1.0, "peak_memory_bytes": 2**34, "strategy": "mp"},
    {
        "status": "does_not_fit",
        "step_s": 0.5,
        "epoch_s": 10.0,
        "usd_per_epoch": 0.1,
        "peak_memory_bytes": 2**40,
        "strategy": "dp",
    },
    {"status": "failed", "reason": "no"},
]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("min cost where epoch < 2h", 0),
        ("min cost where epoch < 122min", 1),
        ("min cost", 1),
        ("max step_s", 0),
        ("min step where strategy = dp", 0),
        ("min step where strategy != dp and memory < 20 GiB", 1),
        ("min step where status != failed", 2),
        ("min epoch where memory<=1GiB", 0),
        ("min cost where epoch < 1s", None),
        ("minimize price where cost >= 5$", 0),
    ],
)
def test_goals(text: str, number: int | None) -> None:
    assert parse_goal(text, ROWS, list(ROWS[0])).best(ROWS) == number


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must begin with min or max"),
        ("cheapest", "must begin with min or max"),
        ("min", "must begin with min or max"),
        ("min cots", "did you mean cost"),
        ("min cost when epoch < 2h", "after the column comes `where`"),
        ("min cost where", "nothing follows `where`"),
        ("min cost where epoch", "is not a condition"),
        ("min cost where epoch < 2h and", "nothing follows the last `and`"),
        ("min cost where epoch < 2GiB", "'GiB' is not a unit of epoch_s"),
        ("min cost where epoch < soon", "'soon' is not a number with a unit"),
        ("min cost where strategy < dp", "is a text"),
        ("min energy", "the power of the devices is not known"),
        ("min mfu", "no point has a value of mfu"),
        ("min run", "set training.tokens"),
        ("min __import__('os')", "there is no column"),
        ("min cost where 'epoch < 2h", "cannot read"),
        ("min " + "a" * 2000, "characters"),
    ],
)
def test_goals_that_cannot_be_read_teach(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_goal(text, ROWS, list(ROWS[0]))
    assert said in str(refused.value)


@given(
    st.text(max_size=60)
    | st.lists(st.sampled_from(["min", "max", "cost", "where", "and", "<", "=", "2h", "'", "%"])).map(" ".join)
)
def test_any_text_is_a_goal_or_a_message(text: str) -> None:
    said = ""
    try:
        assert isinstance(parse_goal(text, ROWS, list(COLUMNS)), Goal)
    except ConfigError as error:
        said = str(error)
    assert said.startswith("--goal") or not said


def test_points_that_a_measurement_cannot_tell_apart_are_ties() -> None:
    rows = [{"status": status, "step_s": step_s, "memory_limit_bytes": 1} for status, step_s in (
        ("ok", 1.03), ("ok", 1.0), ("ok", 1.04), ("does_not_fit", 1.0), ("ok", 1.0)
    )]  # fmt: skip
    assert parse_goal("min step", rows, ["step_s"]).ties(rows) == [0, 4]
    assert parse_goal("max memory_limit_bytes", rows, ["memory_limit_bytes"]).ties(rows) == [], "not a time"


# A sweep on a Dask cluster of two workers: the same rows, also when the sweep or a worker is killed on the way.


@pytest.fixture(scope="module")
def dask_cluster() -> Iterator[str]:
    """Two workers in this process: the same protocol as on a network, without the seconds that processes take to start."""
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=False, protocol="tcp", dashboard_address=None, host="127.0.0.1"
    ) as cluster:
        yield str(cluster.scheduler_address)


def test_a_dask_cluster_gives_the_same_rows(dask_cluster: str) -> None:
    over = {"training.global_batch": [64, 96, 128, 65]}
    assert swept(over, jobs=None, on=dask_cluster).rows == swept(over).rows


def test_a_dask_cluster_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed")
    monkeypatch.setattr(executing, "CONNECT_S", 0.3)
    with pytest.raises(ConfigError, match="no Dask scheduler answers at"):
        swept(jobs=None, on="tcp://127.0.0.1:9")


@pytest.mark.slow
def test_a_dask_worker_that_dies_costs_no_row() -> None:
    """Two workers in processes of their own; one is killed in the middle, and Dask starts it again."""
    distributed = pytest.importorskip("distributed")
    over = {"training.global_batch": [64 + 32 * number for number in range(40)]}
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        address = str(cluster.scheduler_address)
        with distributed.Client(address, set_as_default=False) as client:
            (victim, *_) = client.run(os.getpid).values()
        stop = threading.Timer(2.0, os.kill, (victim, signal.SIGKILL))
        stop.start()
        found = swept(over, jobs=None, on=address)
        stop.join()
    assert [row["status"] for row in found.rows] == ["ok"] * 40
    assert not Path(f"/proc/{victim}").exists()


@pytest.mark.slow
def test_a_killed_sweep_goes_on_where_it_stopped_and_loses_a_worker_on_the_way(tmp_path: Path) -> None:
    """Scheduler, workers and sweep are processes of their own, as on a cluster. No worker is started again."""
    distributed = pytest.importorskip("distributed")
    over = ("--over", "training.global_batch=64:2560:+16", "--over", "plan.strategy=custom")
    log = tmp_path / "runs" / "mlp-sweep" / "points.jsonl"

    def lines() -> int:
        return len(log.read_bytes().splitlines()) if log.is_file() else 0

    def await_lines(least: int) -> int:
        until = time.monotonic() + 100
        while time.monotonic() < until and lines() < least:
            time.sleep(0.01)
        return lines()

    with distributed.LocalCluster(n_workers=0, dashboard_address=None, host="127.0.0.1") as scheduler:
        address = str(scheduler.scheduler_address)
        worker = [sys.executable, "-m", "distributed.cli.dask_worker", address]
        worker += ["--nthreads", "1", "--no-nanny", "--no-dashboard"]
        sweep = [sys.executable, "-m", "parsim", "sweep", *MLP, *over, "--on", address, "--json"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        workers = [
            subprocess.Popen([*worker, "--local-directory", str(tmp_path / name)], cwd=tmp_path, env=ENVIRONMENT, **quiet)
            for name in ("first", "second")
        ]
        try:
            begun = subprocess.Popen(sweep, cwd=tmp_path, env=ENVIRONMENT, **quiet)
            await_lines(10)
            begun.send_signal(signal.SIGKILL)
            begun.wait()
            known = lines() - 1
            stop = threading.Thread(target=lambda: (await_lines(known + 10), workers[0].kill()))
            stop.start()
            done = command("sweep", *MLP, *over, "--on", address, "--json", cwd=tmp_path)
            stop.join()
        finally:
            for each in workers:
                each.kill()
                each.wait()
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert 9 <= document["reused"] < 157
    assert [row["status"] for row in document["points"]] == ["ok"] * 157
