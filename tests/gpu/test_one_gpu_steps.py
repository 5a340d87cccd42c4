"""Programs train the same, and rounds time each of them exactly on a virtual device."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.virtual_cuda import VirtualDriver
from tools.gpu.device import SpoiledProcessError, UnsupportedError, cpu_device
from tools.gpu.journal import Journal
from tools.gpu.launches import capturing
from tools.gpu.programme import run_programme

CPU = torch.device("cpu")


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
@pytest.mark.parametrize("change", [{}, {"microbatches": 2}, {"recompute": "full"}])
def test_the_executor_trains_what_eager_torch_trains(own: Any, precision: str, change: dict[str, Any]) -> None:
    """So that their times are of the same work: losses of three steps, the later two of updated weights."""
    question = replace(own("questions").REHEARSED.held_out[0], precision=precision, **change)
    executor, eager = own("programs").ExecutorStep(question, CPU), own("programs").EagerStep(question, CPU)
    for _ in range(3):
        executor.step()
        eager.step()
        assert executor.last_loss == pytest.approx(eager.loss(), rel=1e-5 if precision == "fp32" else 2e-3)
    executor.streams.close()


@pytest.mark.parametrize("number", [0, 3])
def test_a_graph_begins_to_train_where_the_other_programs_do(own: Any, number: int) -> None:
    """The steps before its capture train, too, and its losses are compared with those of the executor's first steps."""
    question = own("questions").REHEARSED.held_out[number]
    assert question.optimizer == {0: "adamw", 3: "sgd_momentum"}[number]

    def losses(eager: Any) -> list[float]:
        found = []
        for _ in range(3):
            eager.step()
            found.append(eager.loss())
        return found

    plain, warm = (own("programs").EagerStep(question, CPU) for _ in range(2))
    own("programs").warm_up(warm)
    expected = losses(plain)
    assert abs(expected[2] / expected[0] - 1) > 1e-3, "a step changes the loss"
    assert losses(warm) == pytest.approx(expected, rel=1e-5)


def test_the_executor_tells_how_long_each_of_its_tasks_takes(own: Any) -> None:
    executor = own("programs").ExecutorStep(own("questions").REHEARSED.held_out[0], CPU)
    seconds = executor.task_seconds(steps=2)
    assert [text.split()[0] for text, _ in seconds] == ["load", *["forward"] * 7, *["backward"] * 7, "optimizer"]
    assert all(value > 0 for _, value in seconds)
    executor.streams.close()


def test_memory_is_counted_beside_the_seconds_of_every_task(own: Any, tmp_path: Path) -> None:
    programme = own("cases").Programme(cpu_device(), own("questions").REHEARSED, tmp_path, seed=0, say=print)
    (case, *_) = (case for case in programme.cases() if case.name.startswith("memory "))
    row = json.loads(json.dumps(case.measure({}, 100.0)))
    assert row["counted_bytes"] == sum(row["lines"].values()) > 0
    assert len(row["tasks_s"]) == 16


def test_what_needs_cuda_says_so(own: Any) -> None:
    with pytest.raises(UnsupportedError, match="CUDA graphs need CUDA"):
        own("programs").graphed(own("questions").REHEARSED.held_out[0], CPU)


class Capture:
    """In place of torch.cuda.graph: a step that cannot be captured, as CUDA says at its end."""

    def __init__(self, graph: object) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *args: object) -> None:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


def test_a_capture_that_fails_is_told_from_a_program_that_cannot_be_built(monkeypatch: pytest.MonkeyPatch, own: Any) -> None:
    """torch leaves the stream of the capture current: nothing that this process measures afterwards counts."""
    monkeypatch.setattr(torch.cuda, "graph", Capture)

    def captured() -> Any:
        with capturing(object()):
            pass

    with pytest.raises(SpoiledProcessError, match="could not be captured: RuntimeError: CUDA error"):
        captured()
    with pytest.raises(SpoiledProcessError):
        own("programs").build_all([("executor", lambda: "built"), ("cuda graph", captured)])


@pytest.mark.slow
def test_a_step_whose_capture_failed_is_measured_without_it(own: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = own("cases")
    built: list[list[str]] = []

    def spoiled(question: object, device: object) -> Any:
        raise SpoiledProcessError("a CUDA graph could not be captured")

    def rounds(clock: object, programs: list[Any], *_: Any, **__: Any) -> dict[str, Any]:
        built.append([entry.name for entry in programs])
        return {"rounds_s": {entry.name: [1.0] for entry in programs}}

    monkeypatch.setattr(cases, "graphed", spoiled)
    monkeypatch.setattr(cases, "interleaved", rounds)
    programme = cases.Programme(cpu_device(), own("questions").REHEARSED, tmp_path, seed=0, say=print)
    (case, *_) = (case for case in programme.cases() if case.name.startswith("step "))
    journal = Journal(tmp_path / "rows.jsonl")
    journal.append({"case": case.after[0], "status": "failed"})
    for _ in range(2):
        run_programme([case], journal, budget_s=1e4, clock=time.monotonic, say=print)
    row = journal.rows[case.name]
    assert (row["status"], built) == ("done", [["executor", "eager"]])
    assert row["not_built"]["cuda graph"]["message"] == "a CUDA graph could not be captured"


def program(own: Any, device: VirtualDriver, name: str, seconds: float, steps: list[str]) -> Any:
    kernel = device.kernel(seconds)

    def step() -> None:
        steps.append(name)
        kernel()

    return own("programs").Program(name=name, step=step, loss=lambda: 1.0)


@pytest.mark.parametrize("slow_s", [0.01, 0.3])
def test_rounds_time_every_program_for_itself(own: Any, slow_s: float) -> None:
    device, steps = VirtualDriver(launch_s=10e-6, record_s=1e-6), list[str]()
    scope = own("questions").ON_A_GPU
    programs = [program(own, device, "executor", slow_s, steps), program(own, device, "eager", 0.005, steps)]
    begin_s = device.host_s()
    found = own("programs").interleaved(device, programs, scope, seed=1, remaining_s=1000.0)
    taken_s = device.host_s() - begin_s
    least, most = scope.rounds
    assert least <= found["rounds"] <= most
    assert taken_s < 1.5 * scope.round_budget_s
    assert {name: len(values) for name, values in found["rounds_s"].items()} == dict.fromkeys(
        ("executor", "eager", "executor again"), found["rounds"]
    )
    for name, seconds in (("executor", slow_s), ("executor again", slow_s), ("eager", 0.005)):
        assert found["rounds_s"][name] == pytest.approx([seconds] * found["rounds"], rel=0.01)
    assert found["steps"] == (scope.steps if slow_s < 0.1 else 2)
    timed = found["rounds"] * (found["steps"] + found["untimed"])
    assert steps.count("executor") == 2 * timed + 3 + 1
    assert steps.count("eager") == timed + 3 + 1


def test_the_order_of_turns_is_drawn_anew_for_every_round(own: Any) -> None:
    device, steps = VirtualDriver(launch_s=10e-6, record_s=1e-6), list[str]()
    programs = [program(own, device, name, 0.01, steps) for name in ("executor", "eager", "cuda graph")]
    found = own("programs").interleaved(device, programs, own("questions").ON_A_GPU, seed=1, remaining_s=1000.0)
    each = found["steps"] + found["untimed"]
    turns = steps[len(programs) * 4 :: each]
    rounds = [tuple(turns[first : first + 4]) for first in range(0, len(turns), 4)]
    assert len(rounds) == found["rounds"]
    assert len(set(rounds)) > 3
    assert all(sorted(order) == ["cuda graph", "eager", "executor", "executor"] for order in rounds)


def test_a_program_that_cannot_be_built_leaves_the_others(own: Any) -> None:
    def fails() -> Any:
        raise UnsupportedError("needs CUDA")

    programs, failed = own("programs").build_all([("executor", lambda: "built"), ("cuda graph", fails)])
    assert programs == ["built"]
    assert (failed["cuda graph"]["error"], failed["cuda graph"]["message"]) == ("UnsupportedError", "needs CUDA")
    with pytest.raises(UnsupportedError):
        own("programs").build_all([("executor", fails), ("eager", lambda: "built")])
