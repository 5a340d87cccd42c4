"""Processes that read batches ahead of the training, by torch's DataLoader. They change when samples are read, never which."""

from __future__ import annotations

import gc
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from parsim.errors import ExecutionError
from parsim.execute.processes.pinning import cores_before_pinning
from parsim.execute.processes.processes import die_with_parent
from parsim.units import format_bytes

Read = Callable[[int, int], dict[str, Tensor]]
AHEAD = 2
"""Microbatches that each worker holds ready; torch's default."""
SHARED = Path("/dev/shm")
"""Where torch puts what a worker hands over."""


class _Microbatches(Dataset[dict[str, Tensor]]):
    """`read` as a dataset whose sample (step, microbatch) is a rank's part of one microbatch."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def __getitem__(self, place: tuple[int, int]) -> dict[str, Tensor]:
        return self._read(*place)


class _Places:
    """(step, microbatch) from a step on, without end."""

    def __init__(self, first: int, microbatches: int) -> None:
        self._first, self._microbatches = first, microbatches

    def __iter__(self) -> Iterator[tuple[int, int]]:
        step = self._first
        while True:
            yield from ((step, microbatch) for microbatch in range(self._microbatches))
            step += 1


class WorkerBatches:
    """A rank's microbatches in the order of training, read by `workers` processes.

    Args:
        read: (step, microbatch) -> values, in the host's memory. microbatches: of a step. workers: at least one.
    """

    def __init__(self, read: Read, microbatches: int, workers: int) -> None:
        self._data, self._microbatches, self._count = _Microbatches(read), microbatches, workers
        self._batches: Iterator[dict[str, Tensor]] | None = None
        self._next = (0, 0)

    def read(self, step: int, microbatch: int) -> dict[str, Tensor]:
        """The next microbatch; any other one makes the workers begin anew there.

        Raises:
            ExecutionError: a worker was killed, as it is where shared memory ends.
        """
        if self._batches is None or self._next != (step, microbatch):
            self.close()
            self._begin(step)
            for place in range(microbatch):
                self._next = (step, place + 1)
                self._read_next()
        values = self._read_next()
        last = microbatch + 1 == self._microbatches
        self._next = (step + 1, 0) if last else (step, microbatch + 1)
        return values

    def _read_next(self) -> dict[str, Tensor]:
        assert self._batches is not None
        try:
            return next(self._batches)
        except RuntimeError as error:
            codes = [worker.exitcode for worker in getattr(self._batches, "_workers", ())]
            killed = next((-code for code in codes if code is not None and code < 0), None)
            if killed is None:
                raise
            raise ExecutionError(_about_killed(killed)) from error

    def close(self) -> None:
        """End the workers, which the thread that began them must outlive: the kernel kills them at its end."""
        batches, self._batches = self._batches, None
        shutdown = getattr(batches, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()

    def _begin(self, step: int) -> None:
        places: Any = _Places(step, self._microbatches)
        self._batches = iter(
            DataLoader(
                self._data,
                sampler=places,
                batch_size=None,
                num_workers=self._count,
                prefetch_factor=AHEAD,
                collate_fn=_as_it_is,
                worker_init_fn=partial(_begin_worker, parent=os.getpid()),
                multiprocessing_context="fork",
                generator=torch.Generator(),  # else it draws the seeds of workers from that of the process, which others use
            )
        )


def _as_it_is(values: Any) -> Any:
    return values


def _about_killed(number: int) -> str:
    """Why a worker may have been killed by a signal, and what to do."""
    name = signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
    said = f"a process that reads samples was killed by {name}"
    if number != signal.SIGBUS or not SHARED.is_dir():
        return f"{said}; set training.workers = 0 to read them in the rank itself"
    room = format_bytes(shutil.disk_usage(SHARED).total)
    return (
        f"{said}: workers hand batches over in {SHARED}, which has {room}, and each holds {AHEAD} microbatches there. Give the "
        "container more (docker run --shm-size=8g, or --ipc=host), or set fewer training.workers, or 0"
    )


def _begin_worker(number: int, *, parent: int) -> None:
    """A worker ends when the rank does. It leaves alone what it has from the rank: garbage among that may lie on a GPU, where a
    fork can free nothing."""
    gc.freeze()
    die_with_parent(parent)
    prepare_worker()


def prepare_worker() -> None:
    """A process that reads has one thread, all cores that the rank might choose from, and no priority over it."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores_before_pinning())
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
