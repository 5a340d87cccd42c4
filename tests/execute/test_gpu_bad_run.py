"""`parsim run` where a GPU fails, by the real command: errors of CUDA raised on a CPU, and GPUs that are not there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.execute.test_bad_run import cpu_profile, parsim, processes_that_name

pytest.importorskip("torch")

RUN_TOML = """
[model]
name = "failing:Failing"
input_shape = [1, 32, 32]
[cluster]
profile = "profile.json"
devices = 2
[training]
global_batch = 8
steps = 8
learning_rate = 0.0123
dataset = "synthetic"
[plan]
strategy = "{strategy}"
"""

FAILING = '''
"""A model, and an optimizer that fails in the fourth step of rank 1, as CUDA would."""
import os, torch
from torch import nn

class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(1024, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x):
        return self.layers(x)

if os.environ.get("RANK") == "1":
    made, steps = torch.optim.SGD.step, []

    def step(self, *arguments, **options):
        if self.param_groups[0]["lr"] == 0.0123:  # that of the run, not of a probe
            steps.append(1)
        if len(steps) == 4:
            raise {error}
        return made(self, *arguments, **options)

    torch.optim.SGD.step = step
'''

ERRORS = {
    "memory": (
        "torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')",
        r"rank 1 ran out of memory in step 3 .*The checkpoint of step 2 is kept.*--resume",
    ),
    "memory of a library": (
        "RuntimeError('CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`')",
        r"rank 1 ran out of memory in step 3 .*The checkpoint of step 2 is kept.*--resume",
    ),
    "lost": (
        "torch.AcceleratorError('CUDA error: unspecified launch failure')",
        r"rank 1 lost cpu in step 3: CUDA error: unspecified launch failure\. The checkpoint of step 2 is kept",
    ),
}


def written(folder: Path, error: str, *, kind: str = "cpu", strategy: str = "dp") -> None:
    profile = cpu_profile()
    profile["device_types"]["core"]["kind"] = kind
    (folder / "profile.json").write_text(json.dumps(profile))
    (folder / "failing.py").write_text(FAILING.format(error=error))
    (folder / "RUN.toml").write_text(RUN_TOML.format(strategy=strategy))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are looked up in /proc")
@pytest.mark.parametrize("name", ERRORS)
def test_a_gpu_that_fails_is_one_message_and_the_checkpoint_is_kept(tmp_path: Path, name: str) -> None:
    error, message = ERRORS[name]
    written(tmp_path, error)
    done = parsim(tmp_path, "run", "RUN.toml", "--nproc", "2", "--out", "out", "--checkpoint-every", "2", timeout_s=900)
    told = " ".join(done.stderr.split())
    assert done.returncode == 1, told
    assert re.search(message, told), told
    assert "Traceback" not in told
    if name != "lost":
        assert "nearest plan" in told or "None of the plans" in told, told
    assert not processes_that_name(str(tmp_path))
    assert any("2" in path.name for path in (tmp_path / "out").rglob("checkpoints/*"))


@pytest.mark.slow
def test_a_plan_for_gpus_on_a_machine_without_says_why(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has GPUs")
    written(tmp_path, "ValueError()", kind="cuda")
    profile = json.loads((tmp_path / "profile.json").read_text())
    profile["communication"].update(backend="nccl", uses_cores=False)
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    done = parsim(tmp_path, "run", "RUN.toml", "--nproc", "2", "--out", "out", timeout_s=900)
    told = " ".join(done.stderr.split())
    assert done.returncode == 1
    assert re.search(
        r"2 ranks, one GPU each, and this host has none\. torch \S+ was built without CUDA: install a CUDA build", told
    )
    assert "Traceback" not in told
