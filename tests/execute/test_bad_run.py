"""`parsim run` while a rank dies: one message, exit 1, no process left, no half-written file.

What is refused before anything starts is tested in tests/unit/test_bad_input.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import parsim as ps
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.profile import Profile

RUN_TOML = """
[model]
name = "mortal:Mortal"
input_shape = [1, 32, 32]
[cluster]
profile = "profile.json"
devices = 2
[training]
global_batch = 8
steps = 4
[plan]
strategy = "dp"
"""

MORTAL = '''
"""A model whose forward kills rank 1 of a real run."""
import os, signal
from torch import nn

class Mortal(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(1024, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x):
        if os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layers(x)
'''


def cpu_profile() -> dict[str, Any]:
    """Two CPU ranks with datasheet peaks and gloo lines: enough to price any model, and true of no machine."""

    def number(value: float) -> dict[str, Any]:
        return {"value": value, "source": "sheet"}

    def line(operation: str) -> dict[str, Any]:
        return {
            "operation": operation,
            "group_size": 2,
            "algorithm": "ring",
            "regimes": [{"max_size_bytes": None, "latency_s": 1e-4, "seconds_per_byte": 1e-9}],
            "relative_sigma": 0.1,
            "min_size_bytes": 1,
            "max_size_bytes": 10**9,
            "source": "sheet",
        }

    return {
        "schema_version": 1,
        "name": "two-cores",
        "description": "for tests",
        "provenance": {"created": "2026", "command": "by hand", "machine": "none"},
        "sources": {"sheet": {"kind": "datasheet", "text": "made up for a test"}},
        "device_types": {
            "core": {
                "kind": "cpu",
                "memory_bytes": number(8e9),
                "memory_bandwidth_bytes_per_s": number(1e10),
                "context_bytes": number(1e6),
                "peak_flop_per_s": {"fp32": number(5e10)},
            }
        },
        "devices": [{"index": 0, "type": "core"}, {"index": 1, "type": "core"}],
        "communication": {"backend": "gloo", "uses_cores": True, "fits": [line("all_reduce"), line("send_recv")]},
    }


def write_profile(folder: Path, *operations: str) -> None:
    """That profile as profile.json, with lines of further collectives."""
    profile = cpu_profile()
    fits = profile["communication"]["fits"]
    fits += [{**fits[0], "operation": operation} for operation in operations]
    (folder / "profile.json").write_text(json.dumps(profile))


def parsim(folder: Path, *arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "parsim", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)


def processes_that_name(text: str) -> list[str]:
    """Command lines of running processes with `text` in them; zombies have none."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # it ended while we looked
                continue
            if text in command:
                found.append(command)
    return found


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are looked up in /proc")
def test_a_rank_that_dies(tmp_path: Path) -> None:
    (tmp_path / "RUN.toml").write_text(RUN_TOML)
    write_profile(tmp_path)
    (tmp_path / "mortal.py").write_text(MORTAL)
    run = parsim(tmp_path, "run", "RUN.toml", "--nproc", "2", "--out", "kept")
    assert (run.returncode, run.stdout) == (1, ""), run.stderr
    assert "Traceback" not in run.stderr
    messages = re.findall(r"^parsim: .*", run.stderr, re.MULTILINE)
    assert len(messages) == 1
    assert re.search(r"rank 1\b.*(SIGKILL|signal 9|killed)", messages[0]), messages[0]
    deadline = time.monotonic() + 10
    while (left := processes_that_name(str(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
    assert list(tmp_path.rglob("*.partial")) == []
    assert not (tmp_path / "kept" / "result.json").exists()
    for path in (tmp_path / "kept").glob("*.json"):
        json.loads(path.read_text())


def test_a_calibrated_machine_without_links_is_planned() -> None:
    """All of its collectives are measured: its devices say on which node a rank is, and no link is asked for."""
    cluster = cluster_from_profile(Profile.model_validate(cpu_profile()))
    assert cluster.places == ((0, 0), (0, 1))
    assert cluster.most_on_a_node == 2
    answer = ps.plan("resnet_small", cluster=cluster, global_batch=32)
    assert {row.strategy for row in answer.candidates} == {"single", "dp", "mp", "adaptive"}
