"""A sweep on a Dask cluster of two workers: the same rows, also when the sweep or a worker is killed on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from parsim.app.sweep import executing
from parsim.errors import ConfigError
from tests.unit.test_sweep import ENVIRONMENT, MLP, command, swept


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
