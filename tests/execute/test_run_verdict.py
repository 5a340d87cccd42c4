"""`parsim run` says whether it went as predicted: a rank that is slowed on purpose is named, and the history has the run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from parsim.execute.processes.output import rank_processes
from tests.execute.test_bad_run import write_profile

RUN = """\
[model]
name = "mlp"
args = { width = 128 }
[cluster]
profile = "profile.json"
devices = 2
[training]
global_batch = 64
dataset = "digits"
learning_rate = 0.01
steps = 60
[plan]
strategy = "dp"
"""
STOPPED_S, RUNNING_S = 0.03, 0.01


def limit_rank(rank: int, until: threading.Event) -> None:
    """What cpulimit does to a rank of this process's launch: it runs a quarter of the time."""
    pid = None
    while not until.is_set():
        if pid is None:
            pid = rank_processes(os.getpid()).get(rank)
            time.sleep(0.05)
            continue
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(STOPPED_S)
            os.kill(pid, signal.SIGCONT)
        time.sleep(RUNNING_S)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are looked up in /proc")
@pytest.mark.xdist_group("launch")
def test_a_rank_that_runs_a_quarter_of_the_time_is_named(tmp_path: Path) -> None:
    write_profile(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    ended = threading.Event()
    slower = threading.Thread(target=limit_rank, args=(1, ended), daemon=True)
    slower.start()
    try:
        command = [sys.executable, "-m", "parsim", "run", "run.toml", "--out", "kept"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    finally:
        ended.set()
        slower.join()
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "kept" / "result.json").read_text())
    assert document["diagnosis"]["as_predicted"] is False
    slow = [finding for finding in document["diagnosis"]["findings"] if finding["kind"] == "rank"]
    assert [finding["subject"] for finding in slow] == ["rank 1"], document["diagnosis"]
    assert "The run did not go as predicted" in done.stdout
    assert "rank 1 (cpu1) computes" in done.stdout
    assert document["history"]["recorded"]
    (line,) = (tmp_path / "profile.history.jsonl").read_text().splitlines()
    assert json.loads(line)["steps"] >= 50
