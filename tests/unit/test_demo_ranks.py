"""Where `parsim demo` trains: on every GPU that torch sees, if it has NCCL, else on the CPU. Told GPUs stand for real ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import distributed

from calibration.rounds import calibrate
from calibration.rounds.request import CalibrationRequest
from parsim.app import demo
from parsim.app.calibration import ChosenRanks, choose_ranks
from parsim.commands.run import demo as demo_command
from parsim.errors import ConfigError
from parsim.execute.job import Job
from parsim.hardware.compose import load_profile
from parsim.hardware.profile import Profile, save_profile

See = Callable[..., None]


@pytest.fixture
def see(monkeypatch: pytest.MonkeyPatch) -> See:
    """Lets torch see so many GPUs, with or without NCCL."""

    def told(gpus: int, *, nccl: bool = True) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(distributed, "is_nccl_available", lambda: nccl)

    return told


@pytest.mark.parametrize(
    ("gpus", "nccl", "asked", "kind", "count", "text"),
    [
        (0, False, None, "cpu", 2, "2 CPU processes (gloo; torch sees no GPU)"),
        (0, True, 1, "cpu", 1, "1 CPU process (gloo; torch sees no GPU)"),
        (2, False, None, "cpu", 2, "2 CPU processes (gloo; torch sees 2 GPUs but was built without NCCL)"),
        (1, True, None, "cuda", 1, "1 GPU (NCCL; torch sees 1)"),
        (4, True, None, "cuda", 4, "4 GPUs (NCCL; torch sees 4)"),
        (16, True, None, "cuda", 8, "8 GPUs (NCCL; torch sees 16)"),
        (4, True, 3, "cuda", 3, "3 GPUs (NCCL; torch sees 4)"),
    ],
)
def test_gpus_come_first(see: See, gpus: int, nccl: bool, asked: int | None, kind: str, count: int, text: str) -> None:
    see(gpus, nccl=nccl)
    found = choose_ranks(asked, most=8, cpu_ranks=2)
    assert (found.kind, found.count, str(found)) == (kind, count, text)


def test_more_ranks_than_gpus_are_refused(see: See) -> None:
    see(2)
    with pytest.raises(ConfigError, match="3 ranks need a GPU each, and torch sees 2; ask for at most 2"):
        choose_ranks(3, most=8, cpu_ranks=2)


@pytest.mark.parametrize(("kind", "count"), [("cuda", 1), ("cuda", 4), ("cpu", 2)])
def test_the_calibration_measures_those_ranks(kind: Any, count: int) -> None:
    request = demo.calibration_of_demo(ChosenRanks(kind=kind, count=count, why=""))
    assert (request.device, request.nproc, request.precision) == (kind, count, "fp32")
    assert [spec.name for spec, _ in request.models] == ["resnet_small", "vit_small"]


class Told(Exception):
    """Ends the demo where training would begin."""


@pytest.mark.parametrize("gpus", [1, 2])
def test_the_demo_calibrates_and_trains_on_the_gpus_it_finds(
    see: See, gpus: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The calibration gives V100s; the first job is kept instead of being launched."""
    see(gpus)
    requests: list[CalibrationRequest] = []
    jobs: list[Job] = []

    def calibrated(request: CalibrationRequest, path: Path, **_: object) -> Profile:
        requests.append(request)
        save_profile(load_profile("dgx1-v100-32gb"), path)
        return load_profile(str(path))

    def kept(job: Job, *_: object) -> None:
        jobs.append(job)
        raise Told

    monkeypatch.setattr(calibrate, "calibrate", calibrated)
    monkeypatch.setattr(demo, "launch_job", kept)
    monkeypatch.setattr(demo, "WHAT_IF_MODELS", {})
    with pytest.raises(Told):
        demo_command(out=tmp_path, nproc=None, full=gpus == 2, as_json=True)
    assert [(request.device, request.nproc, request.quick) for request in requests] == [("cuda", gpus, gpus == 1)]
    (job,) = jobs
    assert job.rounds == (demo.QUICK if gpus == 1 else demo.FULL).rounds
    assert (job.device, job.world_size) == ("cuda", gpus)
    names = [run.name for run in job.runs]
    assert len(set(names)) == len(names) >= 2
    if gpus == 1:
        assert sorted(run.plan.microbatches for run in job.runs) == [1, 2, 4]
        assert all(run.plan.world_size == 1 for run in job.runs)
    said = capsys.readouterr().err
    assert f"Training for real on {gpus} GPU" in said
    assert ("the calibration is a quick one" in said) == (gpus == 1)
    assert said.count(" left, longer on a busy machine") == 3


def _run(name: str, predicted_s: float, measured_s: float) -> Any:
    from types import SimpleNamespace

    error = predicted_s / measured_s - 1
    step = SimpleNamespace(predicted_s=predicted_s, measured_s=measured_s, relative_error=error)
    return SimpleNamespace(name=name, comparison=SimpleNamespace(step=step))


def test_the_demo_says_whether_its_choice_was_the_fastest() -> None:
    right = demo.measured_sentence([_run("dp", 0.1, 0.125), _run("mp", 0.2, 0.2)])
    assert (
        right == "dp was predicted fastest, and was: 125 ms per step measured. Step times of 2 plans were off by 0.0% to 20.0%."
    )
    wrong = demo.measured_sentence([_run("dp", 0.1, 0.3), _run("mp", 0.2, 0.2)])
    assert wrong.startswith("dp was predicted fastest; measured, mp was, and dp took 50% longer.")
