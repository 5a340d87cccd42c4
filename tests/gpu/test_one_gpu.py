"""The experiment: analysis of rows with known answers, wheels and commands, and the rehearsal killed and resumed."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tools.gpu.journal import read_rows

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "one_gpu"


# --- analysis ---------------------------------------------------------------------------------------------------------


def said(question: str, step_s: tuple[float, float, float], tensor_bytes: int = 1000) -> dict[str, Any]:
    return {
        "question": question,
        "model": question.split()[0],
        "precision": "fp32",
        "held_out": True,
        "step_s": list(step_s),
        "kinds_s": {},
        "sources": {"fitted": 1.0},
        "memory_lines": {"parameters": 600, "activations": tensor_bytes - 600, "context": 10**9},
        "memory_tensor_bytes": tensor_bytes,
        "memory_bytes": 2 * tensor_bytes,
        "memory_interval_bytes": [1.5 * tensor_bytes, 2.5 * tensor_bytes],
    }


def step_row(question: str, executor: list[float], eager: list[float], *, predicted: str | None) -> dict[str, Any]:
    return {
        "case": f"step {question}",
        "status": "done",
        "question": question,
        "held_out": True,
        "predicted": predicted,
        "rounds": len(executor),
        "steps": 2,
        "rounds_s": {"executor": executor, "eager": eager, "executor again": executor},
        "losses": {"executor": [2.0, 1.5], "eager": [2.0, 1.5]},
        "not_built": {"cuda graph": {"error": "UnsupportedError", "message": "CUDA graphs need CUDA"}},
        "seconds": 1.0,
    }


def predictions_row(own: Any, entries: list[dict[str, Any]]) -> dict[str, Any]:
    document = own("predictions").frozen(entries)
    return {"case": "predictions fp32", "status": "done", "precision": "fp32", **document, "unpriced": {}, "seconds": 1.0}


def test_a_step_is_compared_with_its_prediction_and_with_eager_torch(own: Any) -> None:
    predicted = predictions_row(own, [said("vit b4", (0.11, 0.09, 0.13)), said("bert b4", (0.05, 0.04, 0.06))])
    executor, eager = [0.09, 0.10, 0.10, 0.11] * 2, [0.045, 0.05, 0.05, 0.055] * 2
    rows = [
        predicted,
        step_row("vit b4", executor, eager, predicted=predicted["sha256"]),
        step_row("bert b4", executor, executor, predicted=predicted["sha256"]),
    ]
    results, text = own("analyse").analyse(rows)
    vit, bert = results["steps"]
    assert vit["measured_s"] == pytest.approx(0.1)
    assert vit["error"] == pytest.approx(0.1)
    assert vit["inside"]
    assert not bert["inside"]
    assert vit["executor_over"]["eager"] == pytest.approx({"ratio": 2.0, "low": 2.0, "high": 2.0})  # paired: no noise is left
    assert bert["executor_over"]["eager"] == pytest.approx({"ratio": 1.0, "low": 1.0, "high": 1.0})
    everything = results["accuracy"]["all"]
    assert everything["cases"] == 2
    assert everything["coverage"] == 0.5
    assert everything["bias"] == pytest.approx((0.1 - 0.5) / 2)
    assert everything["aa_floor_median"] > 0
    assert results["predictions"]["fp32"]["unchanged"]
    assert "+10.0%" in text
    assert "(missed)" in text


def test_the_interval_of_a_ratio_holds_what_it_should(own: Any) -> None:
    """Unpaired noise of 10% over 20 rounds: the 95% interval holds the true ratio in about 95 of 100 draws."""
    import numpy as np

    rng = np.random.default_rng(1)
    held = 0
    for number in range(200):
        over, under = (1.0 + 0.1 * rng.standard_normal(20) for _ in range(2))
        entry = own("analyse").ratio_interval(list(1.5 * over), list(under), seed=number)
        held += entry["low"] <= 1.5 <= entry["high"]
    assert 0.88 * 200 <= held <= 0.99 * 200


def test_what_was_measured_before_any_prediction_is_not_judged(own: Any) -> None:
    predicted = predictions_row(own, [said("vit b4", (0.1, 0.09, 0.11))])
    results, text = own("analyse").analyse([predicted, step_row("vit b4", [0.1] * 6, [0.1] * 6, predicted=None)])
    assert "predicted_s" not in results["steps"][0]
    assert results["accuracy"] == {}
    assert "none" in text


def test_predictions_changed_afterwards_are_noticed(own: Any) -> None:
    row = predictions_row(own, [said("vit b4", (0.1, 0.09, 0.11))])
    assert own("analyse").analyse([row])[0]["predictions"]["fp32"]["unchanged"]
    assert own("cases").frozen_hash({"predictions fp32": row}, "fp32") == row["sha256"]
    row["predictions"][0]["step_s"][0] = 0.2
    assert not own("analyse").analyse([row])[0]["predictions"]["fp32"]["unchanged"]
    with pytest.raises(Exception, match="not those that were frozen"):
        own("cases").frozen_hash({"predictions fp32": row}, "fp32")


def test_memory_is_compared_by_line_and_with_the_allocator(own: Any) -> None:
    row = {
        "case": "memory vit b4",
        "status": "done",
        "question": "vit b4",
        "held_out": True,
        "lines": {"parameters": 600, "activations": 200},
        "counted_bytes": 800,
        "allocated_bytes": 1250,
        "used_bytes": 1600,
        "seconds": 1.0,
    }
    (entry,) = own("analyse").analyse([predictions_row(own, [said("vit b4", (1, 1, 1))]), row])[0]["memory"]
    assert entry["error"] == pytest.approx(0.25)
    assert entry["error_of_allocated"] == pytest.approx(-0.2)
    assert (
        entry["predicted_lines"]["activations and boundary values"] - entry["lines"]["activations and boundary values"] == 200
    )
    assert sum(entry["predicted_lines"].values()) == 1000  # the context is not a tensor
    uncounted = {**row, "lines": {}, "counted_bytes": 0, "counting": {"error": "RuntimeError"}}
    (entry,) = own("analyse").analyse([predictions_row(own, [said("vit b4", (1, 1, 1))]), uncounted])[0]["memory"]
    assert "error" not in entry
    assert entry["error_of_allocated"] == pytest.approx(-0.2)


def test_parts_of_a_step_and_its_kernels_stand_beside_the_prediction(own: Any) -> None:
    predicted = predictions_row(own, [{**said("vit b4", (0.1, 0.09, 0.11)), "kinds_s": {"forward": 0.033, "optimizer": 0.01}}])
    tasks = [("load x4 64 B", 1e-6), ("forward a x4", 0.01), ("forward b x4", 0.02), ("optimizer 100 elements in 2", 0.01)]
    memory = {"case": "memory vit b4", "status": "done", "question": "vit b4", "held_out": True, "lines": {}, "seconds": 1.0}
    profiled = {"question": "vit b4", "kernels": 900, "busy_s": 0.03, "span_s": 0.04, "csv": "count,microseconds,name\n1,2.0,a"}
    kernels = {"case": "kernels fp32", "status": "done", "precision": "fp32", "ended": "", "seconds": 1.0}
    rows = [
        predicted,
        {**memory, "counted_bytes": 0, "counting": {}, "tasks_s": tasks},
        {**kernels, "steps": [profiled, {"question": "bert b4", "error": "OutOfMemoryError: "}]},
    ]
    results, text = own("analyse").analyse(rows)
    (kinds,) = results["kinds"]
    assert kinds["measured_s"] == pytest.approx({"load": 1e-6, "forward": 0.03, "optimizer": 0.01})
    assert results["kernels"] == [{"question": "vit b4", "kernels": 900, "busy_s": 0.03, "span_s": 0.04}]
    assert "+10.0%" in text
    assert "| 900" in text
    assert "75%" in text


def test_programs_that_train_something_else_are_named(own: Any) -> None:
    row = step_row("vit b4", [0.1] * 6, [0.1] * 6, predicted=None)
    results, text = own("analyse").analyse([row])
    assert results["steps"][0]["loss_difference"] == {"eager": 0.0}
    assert "differs" not in text
    row["losses"]["eager"] = [2.0, 1.2]
    results, text = own("analyse").analyse([row])
    assert results["steps"][0]["loss_difference"]["eager"] == pytest.approx(0.25)
    assert "the loss of eager differs by 25%" in text


def test_the_peaks_and_the_context_of_a_profile_are_what_was_measured(own: Any) -> None:
    from parsim.hardware.compose import load_profile

    predictions, shipped = own("predictions"), load_profile("dgx1-v100-32gb")
    ((name, entry),) = shipped.device_types.items()
    done = {"status": "done"}
    rows = [
        {**done, "precision": "bf16", "flop_per_s": 6e14},
        {**done, "precision": "bf16", "flop_per_s": 7e14},
        {**done, "precision": "tf32", "flop_per_s": 3e14},
        {**done, "route": "on_device", "bytes_per_s": 4e12, "beyond_cache": True},
        {**done, "route": "on_device", "bytes_per_s": 9e12, "beyond_cache": False},
        {**done, "route": "to_host", "bytes_per_s": 5e10, "beyond_cache": True},
        {"status": "failed"},
    ]
    found = predictions.with_machine_facts(shipped, rows, command="the command")
    peaks = found.device_types[name].peak_flop_per_s
    assert (peaks["amp_bf16"].value, peaks["tf32"].value) == (7e14, 3e14)
    assert peaks["fp32"] == entry.peak_flop_per_s["fp32"]  # nothing was measured of it
    assert found.device_types[name].memory_bandwidth_bytes_per_s.value == 4e12
    assert predictions.unpacked_profile(predictions.packed_profile(found)) == found
    held = predictions.without_held(found, 10**6).device_types[name].context_bytes.value
    assert held == entry.context_bytes.value - 10**6


def test_a_rate_above_the_roofline_is_called_implausible(own: Any) -> None:
    def product(side: int, rate: float) -> dict[str, Any]:
        flop, size = 2 * side**3, 3 * side**2 * 2
        shape = {
            "rows": side,
            "columns": side,
            "depth": side,
            "origin": "square",
            "precision": "bf16",
            "flop": flop,
            "bytes": size,
        }
        timing = {"median_s": flop / rate, "p05_s": flop / rate, "p95_s": flop / rate, "sustained_s": 1.0, "queued": True}
        return {"case": f"product bf16 {side}", "status": "done", "seconds": 1.0, "flop_per_s": rate, **shape, **timing}

    copy = {"route": "on_device", "size_bytes": 2**30, "bytes_per_s": 1e12, "beyond_cache": True, "sets": 2, "sustained_s": 1.0}
    rows = [product(4096, 7e14), product(256, 8e13), {"case": "copy", "status": "done", "seconds": 1.0, **copy}]
    large, small = own("analyse").analyse(rows)[0]["products"]["bf16"]["shapes"]
    assert large["of_roofline"] == pytest.approx(1.0)
    assert not large["implausible"]
    assert small["of_roofline"] == pytest.approx(8e13 / (1e12 * 256 / 3))  # memory-bound at 1 TB/s: 85 TFLOP/s
    assert not small["implausible"]
    rows[1] = product(256, 2e14)
    assert own("analyse").analyse(rows)[0]["products"]["bf16"]["shapes"][1]["implausible"]


def test_failures_are_listed_and_the_last_row_of_a_case_counts(own: Any) -> None:
    failed = {
        "case": "product fp8 8192x8192x8192",
        "status": "failed",
        "error": "OutOfMemoryError",
        "message": "CUDA out of memory",
        "out_of_memory": True,
        "seconds": 1.0,
    }
    results, text = own("analyse").analyse([failed])
    assert results["failed"] == [
        {"case": failed["case"], "error": "OutOfMemoryError", "message": "CUDA out of memory", "out_of_memory": True}
    ]
    assert "OutOfMemoryError, CUDA out of memory" in text
    skipped = {"case": failed["case"], "status": "skipped", "reason": "fp8 products need CUDA", "seconds": 0.0}
    results, _ = own("analyse").analyse([failed, skipped])
    assert (results["failed"], len(results["skipped"])) == ([], 1)


# --- wheels and commands ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("minutes", [15, 17, 20, 25, 30, 45, 60])
def test_the_commands_fit_into_the_minutes(own: Any, minutes: float) -> None:
    prepare = own("prepare")
    seconds = [prepare.FIRST_S, prepare.SECOND_S, prepare.THIRD_S, *prepare.further_calls(minutes)]
    assert sum(seconds[:3]) <= 9 * 60
    assert sum(seconds) + len(seconds) * prepare.BETWEEN_S + prepare.START_S <= 60 * minutes
    assert max(seconds) <= prepare.CALL_S
    text = "\n".join(prepare.commands(minutes))
    assert all(f"experiments/one_gpu/{script}.py" in text for script in ("smoke", "run", "correct"))
    assert f"--budget $(left {prepare.FIRST_S - prepare.MARGIN_S}) " in text
    assert "copied there with .whl/, which git ignores" in text, "and each command begins with its wheels"


def test_too_few_minutes_are_refused_with_the_least(own: Any) -> None:
    with pytest.raises(ValueError, match="give --minutes 15 or more"):
        own("prepare").further_calls(5)
    assert own("prepare").further_calls(15) == []


def test_what_the_first_command_is_for_fits_into_it_by_the_estimates(own: Any, tmp_path: Path) -> None:
    """Every case up to the held-out steps that a prediction is judged by."""
    from tools.gpu.device import cpu_device

    prepare, scope = own("prepare"), own("questions").ON_A_GPU
    cases = own("cases").Programme(cpu_device(), scope, tmp_path, seed=0, say=print).cases()
    last = next(place for place, case in enumerate(cases) if case.name == f"step {scope.steps_in('amp_bf16')[0].name}")
    budget_s = prepare.FIRST_S - prepare.MARGIN_S - prepare.SMOKE_S
    before_s = sum(case.estimate_s for case in cases[:last]) - cases[last - 2].estimate_s
    assert cases[last - 2].name == "calibration amp_bf16"
    assert cases[last - 2].estimate_s + 60 <= budget_s, "the calibration begins though what is before it takes a minute"
    assert before_s + cases[last - 2].estimate_s <= budget_s + 60, "estimates are upper ones"


PYTHON = """#!/bin/bash
case "$*" in
*pip*) sleep 2 ;;
*run.py*) echo "$@" >> asked ;;
*) echo "$@" >> asked; sleep 60 ;;
esac
"""


@pytest.mark.slow
def test_each_printed_command_ends_within_its_share_whatever_hangs(
    own: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installing the wheels is part of the share: with two seconds for them, and everything else hanging."""
    prepare = own("prepare")
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(PYTHON)
    python.chmod(0o755)
    for name, seconds in {"SMOKE_S": 5, "CHECKS_S": 6, "TESTS_S": 2, "MARGIN_S": 2, "KILL_S": 1, "FLOOR_S": 1}.items():
        monkeypatch.setattr(prepare, name, seconds)
    (tmp_path / ".whl").mkdir()
    environment = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}", "OUT": str(tmp_path)}

    def taken_s(command: str) -> float:
        begin_s = time.monotonic()
        subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, check=False, capture_output=True, timeout=50)
        return time.monotonic() - begin_s

    assert taken_s(prepare.predicted_and_measured(9)) < 5 + 1.5, "without its smoke test nothing is worth beginning"
    assert taken_s(prepare.checked(12)) < 8 + 3.5
    assert taken_s(prepare.went_on(7)) < 7
    asked = (tmp_path / "asked").read_text().splitlines()
    scripts = ["smoke.py", "correct.py", "-m", "run.py", "run.py"]
    assert [line.split()[0].removeprefix("experiments/one_gpu/") for line in asked] == scripts
    budgets = [int(line.split("--budget ")[1].split()[0]) for line in asked if "run.py" in line]
    assert budgets[0] in (1, 2, 3)  # the most where what hangs ends when it is told to, before it is killed
    assert budgets[1] in (2, 3)
    assert asked[2].endswith("-m gpu tests")


def test_every_printed_command_may_be_sent_as_it_is(own: Any) -> None:
    """Machines that are lent take commands of at most 2,000 characters."""
    printed = [line.strip() for line in own("prepare").commands(30) if line.startswith("   ")]
    assert len(printed) == 5
    assert max(map(len, printed)) < 2000


def test_every_package_that_is_carried_is_pinned(own: Any) -> None:
    prepare = own("prepare")
    lock = (FOLDER.parents[1] / "requirements.lock").read_text()
    assert None not in prepare.pinned(prepare.LACKS, lock).values()
    assert prepare.pinned(["Pydantic.Core", "nonsense"], "pydantic_core==1.2\n") == {"Pydantic.Core": "1.2", "nonsense": None}


def test_every_case_has_a_name_of_its_own_and_follows_what_it_needs(own: Any, tmp_path: Path) -> None:
    from tools.gpu.device import cpu_device

    for scope in (own("questions").ON_A_GPU, own("questions").REHEARSED):
        cases = own("cases").Programme(cpu_device(), scope, tmp_path, seed=0, say=print).cases()
        names = [case.name for case in cases]
        assert len(set(names)) == len(names)
        for place, case in enumerate(cases):
            assert {*case.needs, *case.after} <= set(names[:place])
        assert max(case.estimate_s for case in cases) < 400
        assert names[-1].startswith("compile")


@pytest.mark.slow
def test_a_step_that_was_measured_is_not_predicted_any_more(own: Any, tmp_path: Path) -> None:
    from parsim.hardware.compose import load_profile
    from tools.gpu.device import cpu_device

    scope, predictions = own("questions").REHEARSED, own("predictions")
    programme = own("cases").Programme(cpu_device(), scope, tmp_path, seed=0, say=print)
    (case,) = (case for case in programme.cases() if case.name == "predictions fp32")
    v100 = predictions.packed_profile(load_profile("dgx1-v100-32gb"))
    rows: dict[str, Any] = {"calibration fp32": {"status": "done", "profile": v100}}
    measured = scope.questions_in("fp32")[0].name
    found = case.measure({**rows, f"step {measured}": {}}, 100.0)
    assert found["too_late"] == [measured]
    assert [entry["question"] for entry in found["predictions"]] == [entry.name for entry in scope.questions_in("fp32")[1:]]
    assert json.loads((tmp_path / "predictions.json").read_text())["fp32"]["sha256"] == found["sha256"]
    with pytest.raises(Exception, match="predictions come before measurements"):
        case.measure({**rows, **{f"step {question.name}": {} for question in scope.questions_in("fp32")}}, 100.0)


# --- the rehearsal ----------------------------------------------------------------------------------------------------


def rehearse(out: Path, done: Path, *more: str) -> list[str]:
    return [
        *(sys.executable, str(FOLDER / "run.py"), "--device", "cpu", "--quick"),
        *("--out", str(out), "--done", str(done), *more),
    ]


@pytest.fixture
def environment() -> Mapping[str, str]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {**os.environ, **threads, "PYTHONPATH": str(FOLDER.parents[1])}


@pytest.mark.slow
def test_the_rehearsal_killed_and_moved_to_a_fresh_folder_goes_on(tmp_path: Path, environment: Mapping[str, str]) -> None:
    """kill -9 once predictions are frozen; the next call finds FILE alone, as on a fresh machine, and does the rest once."""
    first, second, done = tmp_path / "first", tmp_path / "second", tmp_path / "done"
    command = rehearse(first, done, "--budget", "600", "--skip", "compile")
    running = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 400
    while not (done.is_file() and any(row["case"].startswith("step ") for row in read_rows(done))):
        assert running.poll() is None, "the programme ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.1)
    running.kill()
    running.wait()
    before = read_rows(done)
    shutil.rmtree(first)
    subprocess.run(
        rehearse(second, done, "--budget", "600", "--skip", "compile"), env=environment, check=True, stdout=subprocess.DEVNULL
    )
    rows = read_rows(second / "rows.jsonl")
    names = [row["case"] for row in rows]
    assert len(set(names)) == len(names)
    assert rows[: len(before)] == before
    assert rows == read_rows(done)
    assert [row for row in rows if row["status"] == "failed"] == []
    results = json.loads((second / "results.json").read_text())
    assert results["predictions"]["fp32"]["unchanged"]
    assert len(results["steps"]) == 6
    assert all("predicted_s" in step for step in results["steps"])
    assert len(list(second.iterdir())) <= 8
    again = subprocess.run(
        rehearse(second, done, "--budget", "60", "--skip", "compile"),
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    assert f"0 cases ran, {len(rows)} were done before, 0 are left" in again.stderr


@pytest.mark.slow
def test_the_printed_commands_one_after_the_other_on_a_cpu(own: Any, tmp_path: Path, environment: Mapping[str, str]) -> None:
    """As printed, but for the wheels, the shares of a slow machine and `--device cpu`: each goes on from the rows before."""
    prepare = own("prepare")
    tree = tmp_path / "tree"
    root = FOLDER.parents[1]
    shutil.copytree(FOLDER, tree / "experiments" / "one_gpu")
    for name in ("experiments/__init__.py", "experiments/common", "parsim", "calibration", "tools", "hardware_profiles"):
        if (root / name).exists():
            (tree / name).symlink_to(root / name)
    (tree / ".whl").mkdir()
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(f'#!/bin/bash\ncase "$*" in *"-m pip"*|*"-m pytest"*) ;; *) exec {sys.executable} "$@" ;; esac\n')
    python.chmod(0o755)
    out = tmp_path / "out"
    out.mkdir()
    path = f"{python.parent}:{environment['PATH']}"
    where, kept = " --device cpu --quick --skip compile", tree / prepare.KEPT
    rows: list[list[dict[str, Any]]] = []
    slow = {name: 6 * getattr(prepare, name) for name in ("SMOKE_S", "CHECKS_S")}
    with pytest.MonkeyPatch.context() as patch:
        for name, seconds in slow.items():
            patch.setattr(prepare, name, seconds)
        commands = (
            prepare.predicted_and_measured(900, where, " --device cpu"),
            prepare.checked(900, where, " --device cpu"),
            prepare.went_on(300, where),
        )
    for command in commands:
        subprocess.run(
            ["bash", "-c", command],
            cwd=tree,
            env={**environment, "PATH": path, "OUT": str(out)},
            check=True,
            capture_output=True,
        )
        rows.append(read_rows(kept / "rows.jsonl"))
        assert rows[-1] == read_rows(out / "rows.jsonl")
    assert all(row["status"] != "failed" for row in rows[-1])
    assert {"smoke.json", "correct.json", "results.json", "predictions.json"} <= {path.name for path in out.iterdir()}
    assert json.loads((out / "results.json").read_text())["predictions"]["fp32"]["unchanged"]
    assert rows[0] == rows[1][: len(rows[0])]
    assert rows[1] == rows[2][: len(rows[1])]


@pytest.mark.slow
def test_a_folder_without_rows_is_an_error_and_no_traceback(tmp_path: Path, environment: Mapping[str, str]) -> None:
    for arguments in (["--analyse", str(tmp_path)], ["--device", "cuda", "--out", str(tmp_path)]):
        if "cuda" in arguments and importlib.import_module("torch").cuda.is_available():
            continue
        done = subprocess.run(
            [sys.executable, str(FOLDER / "run.py"), *arguments], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert done.stderr.startswith("error: ")
        assert "Traceback" not in done.stderr
