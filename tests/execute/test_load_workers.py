"""Processes that read samples for a rank: how they begin, how they end, and what is said of one that is killed."""

from __future__ import annotations

import gc
import multiprocessing.util
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the torch extra")

import torch
from numpy.typing import NDArray
from torch import Tensor

from parsim.data import dataset_for
from parsim.data.samples import order_of
from parsim.errors import ExecutionError
from parsim.execute.loading import GatherThread, Loader, WorkerBatches
from parsim.execute.processes import setup as pinning
from parsim.model.load import load_model
from parsim.plans.mesh import Mesh
from parsim.program.placed import PlanIndex
from tests.execute.small_plans import case
from tests.execute.test_loading import SPEC
from tests.quick import some_quick

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


class Goodbye:
    """Samples whose reader leaves a file when it ends by itself."""

    def __init__(self, path: Path) -> None:
        self.samples = dataset_for(SPEC, "synthetic", root=None, split="train", seed=0)
        self.types, self.path, self._known = self.samples.types, path, False

    def __len__(self) -> int:
        return len(self.samples)

    def values(self, indices: NDArray[np.int64], epoch: int = 0) -> dict[str, NDArray[np.generic]]:
        if not self._known:
            multiprocessing.util.Finalize(None, self.path.touch, exitpriority=1)
            self._known = True
        return self.samples.values(indices, epoch)


def test_workers_of_a_gpu_rank_end_by_themselves(tmp_path: Path) -> None:
    """A thread begins them there. They were killed when it ended, and what a dataset had opened stayed."""
    of, data = case(SPEC, Mesh(), batch=4), Goodbye(tmp_path / "ended")
    loader = Loader(
        data,  # type: ignore[arg-type]
        order_of(data, 4, 0),  # type: ignore[arg-type]
        PlanIndex(of.plan, load_model(SPEC)),
        0,
        dtype=torch.float32,
        device=torch.device("cpu"),
        pin=torch.clone,
        workers=1,
    )
    assert loader.batch(0)(0)["input:0"].shape[0] == 4
    assert loader._workers is not None
    workers = loader._workers._batches._workers  # type: ignore[union-attr]
    loader.close()
    assert data.path.exists()
    assert [worker.exitcode for worker in workers] == [0]


def test_a_thread_that_cannot_begin_fails_in_what_is_asked_of_it() -> None:
    """As where its GPU cannot be taken."""

    def begin() -> None:
        raise RuntimeError("no GPU")

    thread = GatherThread(begin)
    with pytest.raises(RuntimeError, match="no GPU"):
        thread.submit(list).result(20)
    thread.close()


def test_a_worker_leaves_alone_what_it_has_from_the_rank() -> None:
    batches = WorkerBatches(lambda step, microbatch: {"frozen": torch.tensor(gc.get_freeze_count())}, 1, 1)
    assert int(batches.read(0, 0)["frozen"]) > gc.get_freeze_count()
    batches.close()


def test_workers_begin_without_a_number_of_the_process() -> None:
    """torch 2.13: a DataLoader draws its workers' seeds from the process's own generator, where a component may draw at that
    moment. Samples are seeded one by one."""
    before = torch.get_rng_state()
    batches = WorkerBatches(lambda step, microbatch: {"step": torch.tensor(step)}, 1, 1)
    assert int(batches.read(3, 0)["step"]) == 3
    batches.close()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity") or (os.cpu_count() or 1) < 2, reason="needs two cores")
@pytest.mark.parametrize("pinned", [False, True], ids=["on a GPU", "on a core"])
def test_a_worker_takes_no_core_that_the_run_was_not_given(pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `taskset`, or `numactl` for the processors beside a GPU."""
    before = os.sched_getaffinity(0)
    given = {max(before)}
    monkeypatch.setattr(pinning, "_before_pinning", [])

    def cores(step: int, microbatch: int) -> dict[str, Tensor]:
        return {"cores": torch.tensor(sorted(os.sched_getaffinity(0)))}

    try:
        os.sched_setaffinity(0, given)
        if pinned:
            monkeypatch.setattr(pinning, "keep_freed_memory", lambda: True)
            pinning.prepare_rank(0, 1)
        batches = WorkerBatches(cores, 1, 1)
        assert batches.read(0, 0)["cores"].tolist() == sorted(given)
        batches.close()
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize("in_thread", some_quick([False, True], False))
@pytest.mark.parametrize(
    ("number", "wanted"),
    [(signal.SIGBUS, "docker run --shm-size"), (signal.SIGKILL, "killed by SIGKILL; set training.workers")],
)
def test_a_worker_that_is_killed_is_named_with_what_to_do(number: signal.Signals, wanted: str, in_thread: bool) -> None:
    """torch 2.13: a container has 64 MB of shared memory unless told otherwise. torch says why where the main thread reads;
    another thread, as on a GPU, was told "exited unexpectedly"."""

    def killed(step: int, microbatch: int) -> dict[str, Tensor]:
        os.kill(os.getpid(), number)
        return {}

    found: list[BaseException] = []
    batches = WorkerBatches(killed, 1, 1)

    def read() -> None:
        try:
            batches.read(0, 0)
        except ExecutionError as error:
            found.append(error)

    if in_thread:
        reader = threading.Thread(target=read)
        reader.start()
        reader.join(60)
    else:
        read()
    batches.close()
    assert found, "an ExecutionError"
    assert wanted in str(found[0])
