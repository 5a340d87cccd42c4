"""The same array in other blocks, and the whole array in one place."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from parsim.data.blocks.exchange import ROOM_BYTES, Move, exchange
from parsim.data.blocks.grid import BlockGrid, contiguous_owners
from parsim.data.blocks.room import check_bytes, check_room
from parsim.data.blocks.tensor import BlockTensor
from parsim.errors import DataError


def rechunk(
    tensor: BlockTensor,
    grid: BlockGrid | Sequence[int],
    *,
    owners: Sequence[int] | None = None,
    room_bytes: int = ROOM_BYTES,
) -> BlockTensor:
    """The array cut by `grid` (a BlockGrid, or counts of equal blocks). Without `owners`, neighbouring blocks are on one rank.

    Each pair of ranks exchanges what the old and new blocks have in common. A rank holds its old and new blocks, and at most
    `room_bytes` on their way out and as much on their way in.

    Raises:
        DataError: a grid of another shape or that does not divide, wrong owners, more than there is memory for.
    """
    target = grid if isinstance(grid, BlockGrid) else BlockGrid.even(tensor.shape, tuple(grid))
    if target.shape != tensor.shape:
        raise DataError(f"the new grid cuts an array of shape {list(target.shape)}, and this one is {list(tensor.shape)}")
    dealt = contiguous_owners(len(target), tensor.processes.ranks) if owners is None else tuple(owners)
    if target == tensor.grid and dealt == tensor.owners:
        return tensor
    blocks = new_blocks("rechunk", tensor, target, dealt)
    receivers = [(owner,) for owner in dealt]
    exchange(
        overlaps(tensor, target, receivers),
        tensor.blocks,
        blocks,
        tensor.processes,
        dtype=tensor.dtype,
        room_bytes=room_bytes,
    )
    return BlockTensor(grid=target, owners=dealt, dtype=tensor.dtype, blocks=blocks, processes=tensor.processes)


def new_blocks(what: str, tensor: BlockTensor, grid: BlockGrid, owners: Sequence[int]) -> dict[int, Tensor]:
    """Room for this process's blocks of a result that has the type of `tensor`."""
    processes = tensor.processes
    if len(owners) != len(grid) or not all(0 <= owner < processes.ranks for owner in owners):
        raise DataError(f"{len(grid)} blocks need as many owners from 0 to {processes.ranks - 1}, got {list(owners)}")
    check_room(f"{what} to shape {list(grid.shape)} in {tensor.dtype}", grid, owners, tensor.dtype.itemsize, processes)
    return {
        number: torch.empty(grid.block_shape(place), dtype=tensor.dtype, device=processes.device)
        for number, place in enumerate(grid.places())
        if processes.holds(owners[number])
    }


def overlaps(tensor: BlockTensor, target: BlockGrid, receivers: Sequence[Iterable[int]]) -> list[Move]:
    """What the blocks of `tensor` and those of `target` have in common; block k of the target is made on ranks receivers[k]."""
    along = [_common(tensor.grid, target, dim) for dim in range(tensor.ndim)]
    moves = []
    for number, place in enumerate(target.places()):
        for pieces in itertools.product(*(common[piece] for common, piece in zip(along, place, strict=True))):
            source = tensor.grid.number([piece for piece, _, _ in pieces])
            read = tuple(part for _, part, _ in pieces)
            write = tuple(part for _, _, part in pieces)
            shape = tuple(part.stop - part.start for part in read)
            moves += [
                Move(
                    source=source,
                    read=read,
                    sender=tensor.owners[source],
                    target=number,
                    write=write,
                    receiver=receiver,
                    shape=shape,
                )
                for receiver in receivers[number]
            ]
    return moves


def _common(old: BlockGrid, new: BlockGrid, dim: int) -> list[list[tuple[int, slice, slice]]]:
    """By piece of the new grid: the pieces of the old one that share elements with it, and where in both."""
    before, after = old.starts(dim), new.starts(dim)
    found: list[list[tuple[int, slice, slice]]] = []
    for first, last in itertools.pairwise(after):
        shared = []
        piece = bisect_right(before, first) - 1
        while piece < len(before) - 1 and before[piece] < last:
            begin, end = max(first, before[piece]), min(last, before[piece + 1])
            shared.append((piece, slice(begin - before[piece], end - before[piece]), slice(begin - first, end - first)))
            piece += 1
        found.append(shared)
    return found


def collect(tensor: BlockTensor, *, room_bytes: int = ROOM_BYTES) -> Tensor:
    """The whole array on every rank, in messages of at most `room_bytes`.

    Raises:
        DataError: it does not fit into the memory of a machine, once per rank there.
    """
    whole = _collected(tensor, range(tensor.processes.ranks), room_bytes)
    assert whole is not None
    return whole


def collect_on(tensor: BlockTensor, rank: int, *, room_bytes: int = ROOM_BYTES) -> Tensor | None:
    """The whole array on one rank, None on the others. Raises DataError as `collect`."""
    if not 0 <= rank < tensor.processes.ranks:
        raise DataError(f"collect_on needs a rank from 0 to {tensor.processes.ranks - 1}, got {rank}")
    return _collected(tensor, (rank,), room_bytes)


def _collected(tensor: BlockTensor, ranks: Sequence[int], room_bytes: int) -> Tensor | None:
    processes = tensor.processes
    receivers = ranks[:1] if processes.rank is None else ranks
    size = sum(tensor.bytes_by_rank())
    needed = [size if rank in receivers else 0 for rank in range(processes.ranks)]
    check_bytes(f"collecting an array of shape {list(tensor.shape)}", needed, processes, rows=(tensor.shape or (None,))[0])
    grid = BlockGrid.even(tensor.shape, ())
    here = processes.rank is None or processes.rank in ranks
    blocks = {0: torch.empty(tensor.shape, dtype=tensor.dtype, device=processes.device)} if here else {}
    moves = overlaps(tensor, grid, [receivers])
    exchange(moves, tensor.blocks, blocks, processes, dtype=tensor.dtype, room_bytes=room_bytes)
    return blocks.get(0)
