"""Processes that read batches ahead of the training, by torch's DataLoader. They change when samples are read, never which."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from parsim.execute.processes.processes import die_with_parent

Read = Callable[[int, int], dict[str, Tensor]]
AHEAD = 2
"""Microbatches that each worker holds ready; torch's default."""


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
        """The next microbatch; any other one makes the workers begin anew there."""
        if self._batches is None or self._next != (step, microbatch):
            self.close()
            self._begin(step)
            for place in range(microbatch):
                self._next = (step, place + 1)
                next(self._running)
        values = next(self._running)
        last = microbatch + 1 == self._microbatches
        self._next = (step + 1, 0) if last else (step, microbatch + 1)
        return values

    def close(self) -> None:
        """End the workers."""
        batches, self._batches = self._batches, None
        shutdown = getattr(batches, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()

    @property
    def _running(self) -> Iterator[dict[str, Tensor]]:
        assert self._batches is not None
        return self._batches

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
            )
        )


def _as_it_is(values: Any) -> Any:
    return values


def _begin_worker(number: int, *, parent: int) -> None:
    """A worker ends when the rank does."""
    die_with_parent(parent)
    prepare_worker()


def prepare_worker() -> None:
    """A process that reads has one thread, no core of the rank's and no priority over it."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
