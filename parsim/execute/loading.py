"""Where a rank's batches come from, step by step: its part of every microbatch, as tensors on its device.

A CPU rank reads a batch when its turn comes. On a GPU a thread gathers the samples of the next step into pinned memory
while this step is issued. The copy engine then copies them, in parallel with the computation (`RankProgram.step`).

Between two steps no thread reads: a dataset of the user's own uses the generators whose states a checkpoint keeps.
"""

from __future__ import annotations

import gc
import itertools
import os
import queue
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from parsim.data.samples import ChosenSamples, MapSamples, Order, Samples, StreamSamples, part
from parsim.errors import ExecutionError
from parsim.execute.processes.heartbeat import Doing, pulse
from parsim.execute.processes.output import die_with_parent, signal_name
from parsim.execute.processes.setup import cores_before_pinning
from parsim.private import _disable_current_modes
from parsim.program.placed import PlanIndex
from parsim.units import format_bytes

T = TypeVar("T")
Read = Callable[[int, int], dict[str, Tensor]]
Pin = Callable[[Tensor], Tensor]
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


class WorkerBatches:
    """A rank's microbatches in the order of training, read by `workers` processes. read: (step, microbatch) -> values, in the
    host's memory. microbatches: of a step."""

    def __init__(self, read: Read, microbatches: int, workers: int) -> None:
        self._data, self._microbatches, self._count = _Microbatches(read), microbatches, workers
        self._batches: Iterator[dict[str, Tensor]] | None = None
        self._next = (0, 0)

    def read(self, step: int, microbatch: int) -> dict[str, Tensor]:
        """The next microbatch; any other one makes the workers begin anew there. Raises ExecutionError: a worker was killed, as
        it is where shared memory ends."""
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

    def _begin(self, first: int) -> None:
        self._batches = iter(
            DataLoader(
                self._data,
                sampler=((step, microbatch) for step in itertools.count(first) for microbatch in range(self._microbatches)),
                batch_size=None,
                num_workers=self._count,
                prefetch_factor=AHEAD,
                collate_fn=lambda values: values,
                worker_init_fn=partial(_begin_worker, parent=os.getpid()),
                multiprocessing_context="fork",
                generator=torch.Generator(),  # else it draws the seeds of workers from that of the process, which others use
            )
        )


def _about_killed(number: int) -> str:
    event = f"a process that reads samples was killed by {signal_name(number)}"
    if number != signal.SIGBUS or not SHARED.is_dir():
        return f"{event}; set training.workers = 0 to read them in the rank itself"
    room = format_bytes(shutil.disk_usage(SHARED).total)
    return (
        f"{event}: workers hand batches over in {SHARED}, which has {room}, and each holds {AHEAD} microbatches there. Give "
        "the container more (docker run --shm-size=8g, or --ipc=host), or set fewer training.workers, or 0"
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


def host_values(
    data: Samples, indices: NDArray[np.int64], wanted: Sequence[str] | None, dtype: torch.dtype, epoch: int = 0
) -> dict[str, Tensor]:
    """The values a stage reads of one microbatch: "input:0", ... and "target", as far as wanted (None: all), in the host's
    memory. dtype: of numbers that have no type of their own. epoch: the pass over the data."""
    arrays = data.values(indices, epoch)
    values = {}
    for name in arrays if wanted is None else wanted:
        tensor = torch.from_numpy(arrays[name])
        if name in data.types:
            tensor = tensor.to(getattr(torch, data.types[name]))
        elif tensor.is_floating_point():
            tensor = tensor.to(dtype)
        values[name] = tensor
    return values


def batch_values(
    data: Samples, indices: NDArray[np.int64], wanted: Sequence[str] | None, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in host_values(data, indices, wanted, dtype).items()}


def batch_to_score(
    data: Samples, indices: NDArray[np.int64], dtype: torch.dtype, device: torch.device, *, doing: str
) -> dict[str, Tensor]:
    """All values of some samples on the device, for a forward that scores. doing: what the rank is at then, for messages.
    Reading them has more time than other work: of a dataset of one's own a sample may take seconds, in which the rank waits and
    computes nothing."""
    pulse().begin(Doing.PREPARING, f"{doing}: reading samples")
    values = batch_values(data, indices, None, dtype, device)
    pulse().begin(Doing.WORKING, doing)
    return values


class GatherThread:
    """A thread that makes one call after the other, of which workers may be forked: first `begin`. Where it fails, so do all.

    Rejected: ThreadPoolExecutor. A process forked of its thread waits for that thread when it ends, which it is itself.
    """

    def __init__(self, begin: Callable[[], None]) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, args=(begin,), name="parsim gather", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """The call's result, once it is its turn."""
        future: Future[T] = Future()
        self._calls.put((future, call))
        return future

    def close(self) -> None:
        """Wait until all calls are made that were not cancelled."""
        self._calls.put(None)
        self._thread.join()

    def _serve(self, begin: Callable[[], None]) -> None:
        failed: BaseException | None = None
        try:
            begin()
        except BaseException as error:
            failed = error
        while (entry := self._calls.get()) is not None:
            future, call = entry
            if not future.set_running_or_notify_cancel():
                continue
            try:
                if failed is not None:
                    raise failed
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del entry, future, call  # they hold tensors


class GatheredBatch:
    """Microbatch -> its values on the device, of samples that a thread gathers."""

    def __init__(self, gathered: Sequence[Future[dict[str, Tensor]]], device: torch.device) -> None:
        self._gathered, self._device = gathered, device

    def is_ready(self) -> bool:
        """Whether all samples are there, so that nobody waits for them."""
        return all(future.done() for future in self._gathered)

    def __call__(self, microbatch: int) -> dict[str, Tensor]:
        values = self._gathered[microbatch].result()
        return {name: tensor.to(self._device, non_blocking=True) for name, tensor in values.items()}


class Loader:
    """The batches of `rank` under the plan of `layout`. dtype: of inputs that are numbers. workers: processes that read ahead.
    pin: copies a tensor to memory from which the device copies by itself, for one that loads ahead; None for one that reads in
    its turn."""

    def __init__(
        self,
        data: Samples,
        order: Order,
        layout: PlanIndex,
        rank: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        pin: Pin | None = None,
        workers: int = 0,
    ) -> None:
        self._data, self._order, self._layout, self._rank = data, order, layout, rank
        self._dtype, self._device, self._pin = dtype, device, pin
        self._wanted = tuple(layout.batch_layouts(rank))

        def begin_thread() -> None:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # a thread begins on the first GPU, and pinning must not open another

        self._thread = GatherThread(begin_thread) if pin is not None and self._wanted else None
        self._reading: list[Future[dict[str, Tensor]]] = []
        self._workers = WorkerBatches(self._read, layout.plan.microbatches, workers) if workers else None
        self._following: tuple[int, Callable[[int], Mapping[str, Tensor]]] | None = None

    def batch(self, step: int) -> Callable[[int], Mapping[str, Tensor]]:
        """Microbatch -> values. The very object that `following` gave for this step, if it gave one last."""
        following, self._following = self._following, None
        return following[1] if following is not None and following[0] == step else self._source(step)

    def following(self, step: int) -> Callable[[int], Mapping[str, Tensor]]:
        """The batch of a later step, whose samples are gathered from now on."""
        self._following = step, self._source(step)
        return self._following[1]

    def settle(self) -> None:
        """Wait until no thread reads samples, used or not."""
        wait(self._reading)
        self._reading = []

    def close(self) -> None:
        """End what reads: first the workers, whom the thread has begun."""
        for future in self._reading:
            future.cancel()
        self.settle()
        if self._workers is not None:
            self._workers.close()
        if self._thread is not None:
            self._thread.close()

    def _source(self, step: int) -> Callable[[int], Mapping[str, Tensor]]:
        if self._thread is None:
            return lambda microbatch: {
                name: tensor.to(self._device) for name, tensor in self._gathered(step, microbatch).items()
            }
        microbatches = self._layout.plan.microbatches
        gathered: list[Future[dict[str, Tensor]]] = [
            self._thread.submit(partial(self._gathered, step, microbatch)) for microbatch in range(microbatches)
        ]
        self._reading += gathered
        return GatheredBatch(gathered, self._device)

    def _gathered(self, step: int, microbatch: int) -> dict[str, Tensor]:
        read = self._read if self._workers is None else self._workers.read
        values = read(step, microbatch)
        return values if self._pin is None else {name: self._pin(tensor) for name, tensor in values.items()}

    def _read(self, step: int, microbatch: int) -> dict[str, Tensor]:
        """This rank's part of a microbatch, in the host's memory."""
        indices = self._order.indices(step)
        plan = self._layout.plan
        replica = plan.replica_of_rank(self._rank)
        samples = part(indices, replica=replica, dp=plan.mesh.dp, microbatch=microbatch, microbatches=plan.microbatches)
        ways = self._layout.batch_ways(self._rank)
        size = len(samples) * ways // plan.mesh.tp
        first = plan.shard_of_rank(self._rank) // ways * size
        # samples of one's own may be views of a tensor with all of them, which the memory of a step leaves out
        data = self._data.base if isinstance(self._data, ChosenSamples) else self._data
        with _disable_current_modes() if isinstance(data, MapSamples | StreamSamples) else nullcontext():
            return host_values(self._data, samples[first : first + size], self._wanted, self._dtype, self._order.epoch_of(step))
