"""Rows in another order: chosen rows, and random orders that pair inputs with their targets.

An order is one int64 array of row numbers, known to every rank (about 24 bytes per row with what is derived from it). Rows go
straight from their old rank to their new one, in messages of bounded size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from parsim.arrays import Ints
from parsim.data.blocks.exchange import ROOM_BYTES, Move, Selection, exchange
from parsim.data.blocks.grid import BlockGrid, balanced_sizes, contiguous_owners
from parsim.data.blocks.rechunking import new_blocks
from parsim.data.blocks.tensor import BlockTensor
from parsim.errors import DataError, near_matches


def take(
    tensor: BlockTensor,
    order: Sequence[int] | NDArray[Any],
    *,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    owners: Sequence[int] | None = None,
    room_bytes: int = ROOM_BYTES,
) -> BlockTensor:
    """The rows `order` (positions along `dim`, repeats allowed; or bools, one per row) in this order.

    Args:
        sizes: of the result's pieces along `dim`; None for as many pieces as now, of equal size up to one.
        owners: of the result's blocks; None for neighbouring blocks on one rank.
        room_bytes: of the largest message of a round.

    Raises:
        DataError: a position outside, sizes that do not sum to the rows, more than there is memory for.
    """
    rows = _positions(tensor, order, dim)
    if sizes is None:
        sizes = balanced_sizes(len(rows), max(1, min(len(rows), tensor.grid.counts[dim])))
    if sum(sizes) != len(rows):
        raise DataError(f"the sizes {list(sizes)} sum to {sum(sizes)}, and {len(rows)} rows are taken; they must be equal")
    grid = BlockGrid(sizes=(*tensor.grid.sizes[:dim], tuple(sizes), *tensor.grid.sizes[dim + 1 :]))
    dealt = contiguous_owners(len(grid), tensor.processes.ranks) if owners is None else tuple(owners)
    blocks = new_blocks("taking rows", tensor, grid, dealt)
    moves = _row_moves(tensor, grid, dealt, rows, dim)
    exchange(moves, tensor.blocks, blocks, tensor.processes, dtype=tensor.dtype, room_bytes=room_bytes)
    return BlockTensor(grid=grid, owners=dealt, dtype=tensor.dtype, blocks=blocks, processes=tensor.processes)


def _positions(tensor: BlockTensor, order: Sequence[int] | NDArray[Any], dim: int) -> Ints:
    if not 0 <= dim < tensor.ndim:
        raise DataError(f"there is no dim {dim} in shape {list(tensor.shape)}; count from 0")
    rows, size = np.asarray(order), tensor.shape[dim]
    if rows.dtype == np.bool_:
        if rows.shape != (size,):
            raise DataError(f"a mask needs one bool per element of dim {dim} ({size}), got shape {list(rows.shape)}")
        rows = np.flatnonzero(rows)
    if rows.ndim != 1 or (len(rows) and not np.issubdtype(rows.dtype, np.integer)):
        raise DataError(f"rows are chosen by a list of ints, got {rows.dtype} of shape {list(rows.shape)}")
    rows = rows.astype(np.int64)
    if len(rows) and not (-size <= rows.min() and rows.max() < size):
        outside = int(rows.min() if rows.min() < -size else rows.max())
        raise DataError(f"position {outside} is outside dim {dim}, which has {size} elements")
    return np.where(rows < 0, rows + size, rows)


def _row_moves(tensor: BlockTensor, grid: BlockGrid, owners: Sequence[int], rows: Ints, dim: int) -> list[Move]:
    """For each piece of the result and each old piece: the rows of the one that come from the other, in all their blocks."""
    starts = np.array(tensor.grid.starts(dim))
    pieces = np.searchsorted(starts, rows, side="right") - 1
    others = [range(count) if place != dim else (0,) for place, count in enumerate(grid.counts)]
    moves = []
    for target, (first, last) in enumerate(itertools.pairwise(grid.starts(dim))):
        inside = pieces[first:last]
        by_source = np.argsort(inside, kind="stable")
        edges = np.flatnonzero(np.diff(inside[by_source])) + 1
        for written in np.split(by_source, edges) if len(inside) else ():
            source = int(inside[written[0]])
            read = torch.from_numpy(rows[first + written] - starts[source])
            write = torch.from_numpy(written)
            for place in itertools.product(*others):
                old, new = ([*place[:dim], piece, *place[dim + 1 :]] for piece in (source, target))
                shape = [*grid.block_shape(new)]
                shape[dim] = len(written)
                source_number, target_number = tensor.grid.number(old), grid.number(new)
                moves.append(
                    Move(
                        source=source_number,
                        read=_along(dim, shape, read),
                        sender=tensor.owners[source_number],
                        target=target_number,
                        write=_along(dim, shape, write),
                        receiver=owners[target_number],
                        shape=tuple(shape),
                    )
                )
    return moves


def _along(dim: int, shape: Sequence[int], positions: torch.Tensor) -> Selection:
    return tuple(positions if place == dim else slice(0, size) for place, size in enumerate(shape))


def full_order(sizes: Sequence[int], seed: int) -> Ints:
    """A uniformly random permutation of the rows. It sorts raw outputs of PCG64, a stream that numpy keeps fixed."""
    keys = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(sum(sizes))
    return np.argsort(keys, kind="stable").astype(np.int64)


def block_order(sizes: Sequence[int], seed: int) -> Ints:
    """Whole blocks in random order, the rows of each as they are: cheap, and far from uniform."""
    starts = np.cumsum([0, *sizes])
    chosen = full_order([1] * len(sizes), seed)
    return np.concatenate([np.arange(starts[block], starts[block + 1]) for block in chosen])


def pair_order(sizes: Sequence[int], seed: int) -> Ints:
    """Random pairs of blocks, the rows of each pair permuted among both; an odd block is permuted by itself.

    Each rank exchanges rows with few others. It is not uniform: the rows of a block come from two blocks at most.

    Source: the pairwise shuffle of dislib's ds-tensor.
    """
    starts = np.cumsum([0, *sizes])
    chosen = full_order([1] * len(sizes), seed)
    found = np.empty(sum(sizes), dtype=np.int64)
    for pair in (chosen[place : place + 2] for place in range(0, len(chosen), 2)):
        members = np.concatenate([np.arange(starts[block], starts[block + 1]) for block in pair])
        keys = np.random.PCG64(np.random.SeedSequence([seed, int(pair[0])])).random_raw(len(members))
        found[members] = members[np.argsort(keys, kind="stable")]
    return found


ORDERS: dict[str, Callable[[Sequence[int], int], Ints]] = {"full": full_order, "blocks": block_order, "pairs": pair_order}
"""Kinds of shuffling: the new order of the rows, from the sizes of the pieces and a seed."""


def shuffle(*tensors: BlockTensor, seed: int, kind: str = "full", room_bytes: int = ROOM_BYTES) -> tuple[BlockTensor, ...]:
    """The rows (dim 0) of all tensors in one random order, so that samples and targets stay paired.

    The order depends on the seed and, for `full`, on the number of rows alone; for the other kinds on the pieces of the first
    tensor too. It never depends on the number of processes. Pieces keep their sizes and ranks.

    Raises:
        DataError: tensors of different lengths, an unknown kind, a seed below 0.
    """
    if kind not in ORDERS:
        raise DataError(f"unknown kind of shuffle {kind!r}{near_matches(kind, ORDERS)}")
    lengths = [tensor.shape[0] if tensor.shape else None for tensor in tensors]
    if not tensors or seed < 0 or None in lengths or len(set(lengths)) > 1:
        raise DataError(f"a shuffle needs a seed >= 0 and tensors of equally many rows; got seed {seed} and rows {lengths}")
    order = ORDERS[kind](tensors[0].grid.sizes[0], seed)
    return tuple(
        take(tensor, order, sizes=tensor.grid.sizes[0], owners=tensor.owners, room_bytes=room_bytes) for tensor in tensors
    )
