"""Reductions: each block is reduced by its rank, and one rank per result block joins the parts in the order of the blocks.

So a result is the same, bit for bit, for any number of processes and any owners. Between grids the last digits may differ.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parsim.data.blocks.exchange import ROOM_BYTES, exchange, whole_block
from parsim.data.blocks.grid import BlockGrid, BlockPlace, bytes_by_owner
from parsim.data.blocks.tensor import BlockTensor
from parsim.errors import DataError, near_matches

ReducedDims = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """part: a block reduced over dims, which stay as size 1. join: two parts. of_nothing: whether empty dims have a result."""

    part: Callable[[Tensor, ReducedDims], Tensor]
    join: Callable[[Tensor, Tensor], Tensor]
    of_nothing: bool = True


def _one_by_one(step: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, ReducedDims], Tensor]:
    """A reduction that torch has for one dim at a time."""

    def part(block: Tensor, dims: ReducedDims) -> Tensor:
        for dim in dims:
            block = step(block, dim)
        return block

    return part


REDUCTIONS: dict[str, Reduction] = {
    "sum": Reduction(part=lambda block, dims: block.sum(dims, keepdim=True), join=torch.add),
    "prod": Reduction(part=_one_by_one(lambda block, dim: block.prod(dim, keepdim=True)), join=torch.mul),
    "min": Reduction(part=lambda block, dims: block.amin(dims, keepdim=True), join=torch.minimum, of_nothing=False),
    "max": Reduction(part=lambda block, dims: block.amax(dims, keepdim=True), join=torch.maximum, of_nothing=False),
    "any": Reduction(part=_one_by_one(lambda block, dim: block.bool().any(dim, keepdim=True)), join=torch.logical_or),
    "all": Reduction(part=_one_by_one(lambda block, dim: block.bool().all(dim, keepdim=True)), join=torch.logical_and),
}


def reduce_blocks(
    tensor: BlockTensor,
    kind: str,
    dim: int | Sequence[int] | None = None,
    *,
    keepdim: bool = False,
    room_bytes: int = ROOM_BYTES,
) -> BlockTensor:
    """A row of REDUCTIONS, or "mean", over some dims or all. Integers are summed in int64, and their mean is float64. 16-bit
    floats are added up in float32 and rounded at the end, as in torch: with many blocks they would stand still.

    The minimum or maximum of values with a NaN is NaN, as in NumPy. Result blocks lie where the first block they need lies.

    Raises:
        DataError: a dim that is not there, an unknown kind, minimum, maximum or mean of nothing, a dtype torch cannot reduce.
    """
    if kind not in REDUCTIONS and kind != "mean":
        raise DataError(f"unknown reduction {kind!r}{near_matches(kind, [*REDUCTIONS, 'mean'])}")
    dims = _dims(tensor, dim)
    row = REDUCTIONS["sum" if kind == "mean" else kind]
    elements = 1
    for reduced in dims:
        elements *= tensor.shape[reduced]
    if elements == 0 and (kind == "mean" or not row.of_nothing):
        raise DataError(f"the {kind} over dims {list(dims)} of shape {list(tensor.shape)} is over no elements")
    if kind == "mean" and not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        tensor = tensor.to(torch.float64)
    half = tensor.dtype if kind in ("sum", "mean", "prod") and tensor.dtype in (torch.float16, torch.bfloat16) else None
    result = _reduced(tensor if half is None else tensor.to(torch.float32), row, dims, room_bytes)
    if kind == "mean":
        result = result / elements
    if half is not None:
        result = result.to(half)
    return result if keepdim else _without(result, dims)


def _dims(tensor: BlockTensor, dim: int | Sequence[int] | None) -> ReducedDims:
    wanted = range(tensor.ndim) if dim is None else tuple(dim) if isinstance(dim, Iterable) else (operator.index(dim),)
    for entry in wanted:
        if not -tensor.ndim <= entry < tensor.ndim:
            raise DataError(f"there is no dim {entry} in shape {list(tensor.shape)}")
    found = tuple(entry % tensor.ndim for entry in wanted)
    if len(set(found)) < len(found):
        raise DataError(f"each dim is reduced once, got dims {list(wanted)}")
    return found


def _reduced(tensor: BlockTensor, row: Reduction, dims: ReducedDims, room_bytes: int) -> BlockTensor:
    """With the reduced dims as size 1. The parts for a result block are fetched a few at a time, and joined in order."""
    try:
        dtype = row.part(torch.ones(1, dtype=tensor.dtype), (0,)).dtype
    except (RuntimeError, TypeError) as error:
        raise DataError(f"torch cannot reduce {tensor.dtype} in this way: {error}") from error
    if not dims:
        return tensor.to(dtype)
    grid = BlockGrid(sizes=tuple((1,) if place in dims else pieces for place, pieces in enumerate(tensor.grid.sizes)))
    runs = list(itertools.product(*(range(tensor.grid.counts[place]) for place in sorted(dims))))
    owners = tuple(tensor.owners[tensor.grid.number(place)] for place in grid.places())
    at_once = max(1, room_bytes // max(1, *bytes_by_owner(grid, owners, tensor.processes.ranks, dtype.itemsize)))
    joined: dict[int, Tensor] = {}
    for first in range(0, len(runs), at_once):
        for number, parts in _fetch(tensor, row, dims, grid, owners, runs[first : first + at_once], dtype, room_bytes).items():
            for part in parts:
                joined[number] = row.join(joined[number], part) if number in joined else part
    return BlockTensor(grid=grid, owners=owners, dtype=dtype, blocks=joined, processes=tensor.processes)


def _fetch(
    tensor: BlockTensor,
    row: Reduction,
    dims: ReducedDims,
    grid: BlockGrid,
    owners: Sequence[int],
    runs: Sequence[BlockPlace],
    dtype: torch.dtype,
    room_bytes: int,
) -> dict[int, list[Tensor]]:
    """For each result block of this rank: the parts of some of its blocks, in their order."""
    moves, parts, order = [], {}, []
    for number, place in enumerate(grid.places()):
        for run in runs:
            along = dict(zip(sorted(dims), run, strict=True))
            source = tensor.grid.number([along.get(dim, piece) for dim, piece in enumerate(place)])
            moves.append(whole_block(source, tensor.owners[source], owners[number], grid.block_shape(place)))
            order.append((number, source))
            if source in tensor.blocks:
                parts[source] = row.part(tensor.blocks[source], dims)
    arriving = {
        move.target: torch.empty(move.shape, dtype=dtype, device=tensor.processes.device)
        for move in moves
        if move.target not in parts and tensor.processes.holds(move.receiver)
    }
    between = [move for move in moves if move.sender != move.receiver]
    if tensor.processes.rank is not None and between:
        exchange(between, parts, arriving, tensor.processes, dtype=dtype, room_bytes=room_bytes)
    found: dict[int, list[Tensor]] = {}
    for number, source in order:
        if tensor.processes.holds(owners[number]):
            found.setdefault(number, []).append(parts[source] if source in parts else arriving[source])
    return found


def _without(tensor: BlockTensor, dims: ReducedDims) -> BlockTensor:
    """The tensor without dims of size 1."""
    kept = [dim for dim in range(tensor.ndim) if dim not in dims]
    grid = BlockGrid(sizes=tuple(tensor.grid.sizes[dim] for dim in kept))
    blocks = {
        number: block.reshape([size for dim, size in enumerate(block.shape) if dim in kept])
        for number, block in tensor.blocks.items()
    }
    return BlockTensor(grid=grid, owners=tensor.owners, dtype=tensor.dtype, blocks=blocks, processes=tensor.processes)
