"""A process group that communicates copies in the host's memory by gloo, and copies what arrived back to the device.

For ranks that share a GPU where NCCL refuses them. Every call has ended when it returns. It reads what was launched on the
current stream before, and what is launched behind it reads what arrived.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parsim.execute.cuda.gpu import STAGED
from parsim.private import c10d

Copies = list[Tensor]


_Base: Any = dist.ProcessGroup  # whose methods have other names and types in every version of torch


class StagedGroup(_Base):  # type: ignore[misc]
    """The operations that parsim's ranks ask for, each by gloo's of the same name."""

    def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, size)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return STAGED

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        return _staged(tensors, tensors, lambda read, written: self._gloo.allreduce(written, opts))

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        return _staged(tensors, tensors, lambda read, written: self._gloo.broadcast(written, opts))

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> Any:
        (parts,) = outputs
        return _staged(inputs, parts, lambda read, written: self._gloo.allgather([written], read, opts))

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any) -> Any:
        parts = list(output.view(-1).chunk(self.size()))
        return _staged(
            [own.reshape(-1)], parts, lambda read, written: self._gloo.allgather([written], read, c10d.AllgatherOptions())
        )

    def reduce_scatter_single(self, own: Tensor, whole: Tensor, opts: Any) -> Any:
        """Gloo sums the whole on every rank, of which each keeps its part."""
        summed = whole.detach().to("cpu", copy=True)
        options = c10d.AllreduceOptions()
        options.reduceOp = opts.reduceOp
        self._gloo.allreduce([summed], options).wait()
        own.copy_(summed.view(-1).chunk(self.size())[self.rank()].view(own.shape))
        return _ended([own])

    def all_to_all_single(self, received: Tensor, sent: Tensor, received_sizes: Any, sent_sizes: Any, opts: Any) -> Any:
        every = getattr(self._gloo, "all_to_all_single", None) or self._gloo.alltoall_base

        def exchange(read: Copies, written: Copies) -> Any:
            return every(written[0], read[0], received_sizes, sent_sizes, opts)

        return _staged([sent], [received], exchange)

    def send(self, tensors: Sequence[Tensor], destination: int, tag: int) -> Any:
        return _staged(tensors, [], lambda read, written: self._gloo.send(read, destination, tag))

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Any:
        return _staged([], tensors, lambda read, written: self._gloo.recv(written, source, tag))

    def barrier(self, opts: Any) -> Any:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        self._gloo.barrier(c10d.BarrierOptions()).wait()
        return _ended([])

    _allgather_base = all_gather_single  # torch 2.11's names of the same
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


def register_staged() -> None:
    if STAGED not in dist.Backend.backend_list:
        dist.Backend.register_backend(STAGED, StagedGroup, devices=["cpu", "cuda"])


def _staged(read: Sequence[Tensor], written: Sequence[Tensor], call: Callable[[Copies, Copies], Any]) -> Any:
    from_device = [tensor.detach().to("cpu", copy=True).contiguous() for tensor in read]
    to_device = from_device if written is read else [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in written]
    call(from_device, to_device).wait()
    for tensor, copy in zip(written, to_device, strict=True):
        tensor.copy_(copy)
    return _ended(list(written))


def _ended(tensors: list[Tensor]) -> Any:
    done: torch.futures.Future[Any] = torch.futures.Future()
    done.set_result(tensors)
    return c10d._create_work_from_future(done)
