"""The communicating hops of a conversion, applied to tensors by plain torch.distributed collectives.

Nothing is changed in place: a tensor that comes in may be another's output or gradient as well. Point-to-point hops are sends
and receives of whole tensors or pieces of the batch and need nothing from here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parsim.model.shard.pieces import padded_piece
from parsim.plans.redistribution import Hop, ValueLayout

_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_flat(flat: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `flat` with the equal parts `own` of all ranks, in rank order."""
    _all_gather(flat, own, group=group)


def reduce_scatter_flat(own: Tensor, flat: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `own` with this rank's part of the sum of all ranks' `flat`."""
    _reduce_scatter(own, flat, group=group)


def run_hop(hop: Hop, tensor: Tensor, *, ranks: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """One collective hop on one rank.

    Args:
        tensor: what this rank holds in `hop.source`; for a broadcast on the other ranks, room for the result.
        ranks: the ranks of `group`, ascending, which is the order of their pieces.

    Returns:
        What this rank holds in `hop.target`.
    """
    count = len(ranks)
    match hop.operation:
        case "all_gather_batch":
            own = tensor.contiguous()
            whole = own.new_empty((count * own.shape[0], *own.shape[1:]))
            all_gather_flat(whole.view(-1), own.view(-1), group)
            return whole
        case "all_gather_dim":
            own = tensor.contiguous()
            parts = own.new_empty((count, *own.shape))
            all_gather_flat(parts.view(-1), own.view(-1), group)
            return _unpadded(torch.cat(parts.unbind(), dim=hop.source.dim), hop.source)
        case "all_reduce":
            total = tensor.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total, group=group)
            return total
        case "all_reduce_maximum":
            largest = tensor.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            return largest
        case "reduce_scatter_batch":
            return _reduced(tensor.contiguous(), (tensor.shape[0] // count, *tensor.shape[1:]), group)
        case "reduce_scatter_dim":
            pieces = _pieces(tensor, hop.target)
            return _reduced(pieces, pieces.shape[1:], group)
        case "all_to_all" if hop.source.form == "shard":
            given = tensor.contiguous().view(count, tensor.shape[0] // count, *tensor.shape[1:])
            return _unpadded(torch.cat(_exchanged(given, group).unbind(), dim=hop.source.dim), hop.source)
        case "all_to_all":
            received = _exchanged(_pieces(tensor, hop.target), group)
            return received.view(count * received.shape[1], *received.shape[2:])
        case "broadcast":
            whole = tensor.contiguous()
            dist.broadcast(whole, ranks[hop.source.rank], group=group)
            return whole
    raise ValueError(f"hop {hop} is not a collective")


def _pieces(tensor: Tensor, layout: ValueLayout) -> Tensor:
    """The pieces of all ranks in a layout "shard", one after the other."""
    return torch.stack([padded_piece(tensor, layout.dim, number, layout.ways) for number in range(layout.ways)])


def _unpadded(tensor: Tensor, layout: ValueLayout) -> Tensor:
    """The whole of pieces that lie one after the other."""
    return tensor.narrow(layout.dim, 0, layout.size).contiguous() if layout.size else tensor


def _reduced(pieces: Tensor, shape: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """This rank's piece, of `shape`, of the sum: `pieces` holds those of all ranks one after the other."""
    own = pieces.new_empty(shape)
    reduce_scatter_flat(own.view(-1), pieces.view(-1), group)
    return own


def _exchanged(pieces: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Piece i goes to rank i of the group; the result has what came from each."""
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=group)
    return received
