"""What a calibration refuses before it starts a rank on GPUs, on machines that are not this one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from calibration.rounds.calibrate import calibrate
from calibration.rounds.environment import check_gpus, check_room, doubts, held_bytes, look_apart
from calibration.rounds.request import CalibrationRequest
from parsim.app.doctor import Found, Gpu
from parsim.errors import ConfigError
from parsim.execute.processes.launch import import_folders
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.units import GIB

MLP = ModelSpec(name="mlp")
V100 = Gpu(name="Tesla V100", free_bytes=31 * GIB, total_bytes=32 * GIB, capability=(7, 0))
A100 = replace(V100, name="NVIDIA A100", capability=(8, 0))
FOUND = Found(torch="2.11.0", cuda_build="13.0", backends=("gloo", "nccl"), gpus=(A100,))


def asked(**change: object) -> CalibrationRequest:
    return CalibrationRequest(**{"models": ((MLP, (4, 8)),), "device": "cuda", "nproc": 1, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "change", "words", "other"),
    [
        (replace(FOUND, cuda_build=""), {}, "built without CUDA", {}),
        (replace(FOUND, gpus=()), {}, "sees no GPU", {}),
        (FOUND, {"nproc": 2}, "2 ranks need a GPU each, this machine has 1; use --nproc 1", {"nproc": 1}),
        (
            replace(FOUND, gpus=(V100, V100)),
            {"precision": "tf32"},
            r"tf32 needs compute capability 8.0, a Tesla V100 has 7.0; measure fp32 or amp_fp16",
            {"precision": "amp_fp16"},
        ),
        (replace(FOUND, gpus=(replace(A100, free_bytes=GIB),)), {}, "less than 4 GiB free", {}),
    ],
)
def test_gpus_that_cannot_are_refused_and_what_the_message_says_is_taken(
    found: Found, change: dict[str, object], words: str, other: dict[str, object]
) -> None:
    """What the message says: another machine, or the same one with other arguments."""
    with pytest.raises(ConfigError, match=words):
        check_gpus(asked(**change), found)
    check_gpus(asked(**change | other), found if other else FOUND)


def test_models_are_held_once_per_batch_and_must_fit_side_by_side() -> None:
    model = load_model(MLP)
    arrays = 4 * model.parameter_count
    request = asked(optimizers=("sgd_momentum", "adam"))
    # two batches of weights, gradients and three states; two and a half arrays of parts with theirs
    assert held_bytes([model], request) == arrays * 2 * 5 + 5 * arrays * (3 + 4) // 2
    assert held_bytes([model], asked(optimizers=("sgd_momentum", "adamw_fused"))) == held_bytes([model], request)
    assert held_bytes([model], asked(precision="fp64")) == 2 * held_bytes([model], asked())
    # in bf16 half of it, but for copies of the weights in fp32 and their states
    elements = model.parameter_count
    cases, parts = 2 * (2 * 2 + 4 + 3 * 4), 5 * 2 * (3 + 4) // 2
    assert held_bytes([model], asked(optimizers=("sgd_momentum", "adam"), precision="bf16")) == elements * (cases + parts)
    check_room([model], request, FOUND)
    with pytest.raises(ConfigError, match="name fewer --batches"):
        check_room([model], request, replace(FOUND, gpus=(replace(A100, free_bytes=held_bytes([model], request)),)))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="here are GPUs")
def test_without_a_gpu_nothing_is_started_and_nothing_is_left(tmp_path: Path) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("no rank may be started")

    with pytest.raises(ConfigError, match="cannot calibrate with --device cuda"):
        calibrate(asked(), tmp_path / "mine.json", launcher=never)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_launches_that_were_not_hidden_cast_doubt() -> None:
    steps = [{"cpu_s": 1.0, "wall_s": 1.0, "hidden": number % 4 > 0} for number in range(8)]
    raw = {"ranks": [{"sweeps": steps, "operators": [{"hidden": True}], "pinning": {}}], "environment": {}}
    (warning,) = doubts(raw, asked())
    assert "25.0% of the training steps" in warning
    quiet = [{**step, "hidden": True} for step in steps]
    assert doubts({**raw, "ranks": [{"sweeps": quiet}]}, asked()) == []


@pytest.mark.slow
def test_a_script_without_a_guard_can_look_at_the_machine(tmp_path: Path) -> None:
    """`parsim.run` in a plain script calibrates this machine. A process that imported the script again would begin anew."""
    script = tmp_path / "plain.py"
    script.write_text("from calibration.rounds.environment import look_apart\nprint('torch', look_apart().torch)\n")
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(import_folders())},
    )
    assert done.stdout.split() == ["torch", torch.__version__], done.stderr


def test_a_look_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("calibration.rounds.environment.LOOK", "raise OSError('no driver')")
    with pytest.raises(ConfigError, match=r"failed: OSError: no driver; `parsim doctor`"):
        look_apart()


def test_what_another_process_found_comes_back_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    look = f"""
import sys
from calibration.rounds import environment
from parsim.app.doctor import Found, Gpu
environment.look = lambda environment: {FOUND!r}
environment.keep_look(sys.argv[1])
"""
    monkeypatch.setattr("calibration.rounds.environment.LOOK", look)
    assert look_apart() == FOUND
