"""`parsim run` in other precisions than fp32: priced from a profile that knows them, trained, and written down."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SHIPPED = Path(__file__).resolve().parents[2] / "hardware_profiles" / "dgx1-v100-32gb.json"

RUN = """\
[model]
name = "mlp"
args = {{ width = 32 }}
[cluster]
profile = "{profile}"
devices = 2
[training]
global_batch = 16
learning_rate = 0.02
steps = 4
precision = "{precision}"
[plan]
strategy = "dp"
"""


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """The shipped machine as if its devices were processors that know every precision: prices do not matter here."""
    document = json.loads(SHIPPED.read_text())
    for device in document["device_types"].values():
        device["kind"] = "cpu"
        for precision in ("amp_bf16", "bf16", "tf32", "fp8"):
            device["peak_flop_per_s"][precision] = device["peak_flop_per_s"]["amp_fp16"]
    document["communication"]["backend"] = "gloo"
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(document).replace("gpu", "cpu"))
    return path


def run(profile: Path, precision: str, *options: str) -> subprocess.CompletedProcess[str]:
    file = profile.parent / "run.toml"
    file.write_text(RUN.format(profile=profile, precision=precision))
    command = [sys.executable, "-m", "parsim", "run", str(file), "--nproc", "2", "--out", str(profile.parent / "out"), "--json"]
    return subprocess.run([*command, *options], capture_output=True, text=True, timeout=200)


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
@pytest.mark.parametrize(
    ("precision", "options", "numbers"),
    [
        ("amp_fp16", (), {"weights": "float32", "autocast": "float16", "master_weights": False, "first_loss_scale": 65536.0}),
        (
            "bf16",
            ("--set", "training.master_weights=false"),
            {"weights": "bfloat16", "autocast": None, "master_weights": False, "first_loss_scale": None},
        ),
    ],
)
def test_a_run_in_half_precision_trains_and_says_in_which_numbers(
    profile: Path, precision: str, options: tuple[str, ...], numbers: dict[str, object]
) -> None:
    done = run(profile, precision, *options)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert len(document["losses"]) == 4
    assert {row["level"] for row in document["memory_levels"]} == {"live"}
    execution = json.loads((profile.parent / "out" / "environment.json").read_text())["execution"]
    assert execution["device"] == "cpu"
    assert execution["runs"]["run"] == {"precision": precision, **numbers}
    assert execution["switches"]["matmul_allow_tf32"] is execution["switches"]["cudnn_allow_tf32"] is False
    assert execution["switches"]["float32_matmul_precision"] == "highest"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "message"),
    [("tf32", "'tf32' needs a device of kind cuda"), ("fp8", "can be priced, not run")],
)
def test_what_cannot_run_here_is_refused_in_one_message(profile: Path, precision: str, message: str) -> None:
    done = run(profile, precision)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert message in done.stderr
