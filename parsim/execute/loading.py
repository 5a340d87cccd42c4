"""Where a rank's batches come from, step by step: its part of every microbatch, as tensors on its device.

A CPU rank reads a batch when its turn comes. On a GPU a thread gathers the samples of the next step into pinned memory
while this step is issued. The copy engine then copies them, in parallel with the computation (`RankProgram.step`).

Between two steps no thread reads: a dataset of the user's own uses the generators whose states a checkpoint keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from parsim.data import Order, Samples, part
from parsim.data.own.samples import MapSamples, StreamSamples
from parsim.data.splits import ChosenSamples
from parsim.execute.cuda.gather_thread import GatherThread
from parsim.execute.load_workers import WorkerBatches
from parsim.execute.processes.supervise.heartbeat import Doing, pulse
from parsim.graph.plan_index import PlanIndex

Pin = Callable[[Tensor], Tensor]


def host_values(
    data: Samples, indices: NDArray[np.int64], wanted: Sequence[str] | None, dtype: torch.dtype, epoch: int = 0
) -> dict[str, Tensor]:
    """The values a stage reads of one microbatch: "input:0", ... and "target", as far as wanted, in the host's memory.

    Args:
        wanted: their names; None: all. dtype: of numbers that have no type of their own. epoch: the pass over the data.
    """
    arrays = data.values(indices, epoch)
    return {name: _typed(arrays[name], data.types.get(name), dtype) for name in (arrays if wanted is None else wanted)}


def _typed(array: NDArray[np.generic], own: str | None, dtype: torch.dtype) -> Tensor:
    tensor = torch.from_numpy(array)
    if own is not None:
        return tensor.to(getattr(torch, own))
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def batch_values(
    data: Samples, indices: NDArray[np.int64], wanted: Sequence[str] | None, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """The same on the device."""
    return {name: tensor.to(device) for name, tensor in host_values(data, indices, wanted, dtype).items()}


def batch_to_score(
    data: Samples, indices: NDArray[np.int64], dtype: torch.dtype, device: torch.device, *, doing: str
) -> dict[str, Tensor]:
    """All values of some samples on the device, for a forward that scores. Reading them has more time than other work: of
    a dataset of one's own a sample may take seconds, in which the rank waits and computes nothing.

    Args:
        doing: what the rank is at from then on, for messages.
    """
    pulse().begin(Doing.PREPARING, f"{doing}: reading samples")
    values = batch_values(data, indices, None, dtype, device)
    pulse().begin(Doing.WORKING, doing)
    return values


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
    """The batches of `rank` under the plan of `layout`.

    Args:
        dtype: of inputs that are numbers.
        pin: copies a tensor to memory from which the device copies by itself, for one that loads ahead; None for one that
            reads in its turn.
        workers: processes that read ahead.
    """

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
        reads_ahead = pin is not None and bool(self._wanted)
        self._thread = GatherThread(self._begin_thread) if reads_ahead else None
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

    def _begin_thread(self) -> None:
        """Pinning must not open another GPU: a thread begins on the first."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

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
        own = part(indices, replica=replica, dp=plan.mesh.dp, microbatch=microbatch, microbatches=plan.microbatches)
        ways = self._layout.batch_ways(self._rank)
        size = len(own) * ways // plan.mesh.tp
        first = plan.shard_of_rank(self._rank) // ways * size
        # samples of one's own may be views of a tensor with all of them, which the memory of a step leaves out
        data = self._data.base if isinstance(self._data, ChosenSamples) else self._data
        with _disable_current_modes() if isinstance(data, MapSamples | StreamSamples) else nullcontext():
            return host_values(self._data, own[first : first + size], self._wanted, self._dtype, self._order.epoch_of(step))
