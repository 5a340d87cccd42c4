"""Arithmetic with broadcasting, and any function of blocks.

Types promote as in torch: an int64 tensor divided by an int is float32, unless torch's default dtype is another.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parsim.data.blocks.exchange import exchange, whole_block
from parsim.data.blocks.grid import BlockGrid
from parsim.data.blocks.processes import Processes
from parsim.data.blocks.rechunking import rechunk
from parsim.data.blocks.room import check_room
from parsim.data.blocks.tensor import BlockTensor
from parsim.errors import DataError

DIVISIONS = (operator.floordiv, operator.mod)
"""Of integers they fail where a block of the divisor has a zero, and other blocks may have none."""


def elementwise(function: Callable[..., Tensor], *operands: Any) -> BlockTensor:
    """`function` of corresponding elements, broadcast as in NumPy.

    Operands are block tensors, numbers, and arrays, which every rank passes alike. Where block tensors are cut differently, the
    later ones are cut as the first. The function is called with blocks, and must work element by element.

    Raises:
        DataError: shapes that do not broadcast, block tensors on different processes; on every rank, integers divided by zero.
    """
    plan = _aligned(operands)
    try:
        dtype = function(*(_sample(operand) for operand in plan.operands)).dtype
    except (TypeError, RuntimeError) as error:
        types = [str(operand.dtype) if isinstance(operand, BlockTensor) else repr(operand) for operand in plan.operands]
        raise DataError(f"torch cannot do this with {' and '.join(types)}: {error}") from error
    check_room(f"a result of shape {list(plan.grid.shape)}", plan.grid, plan.owners, dtype.itemsize, plan.processes)
    try:
        blocks, problem = {number: function(*plan.inputs(number)) for number in plan.owned}, ""
    except RuntimeError as error:
        if function not in DIVISIONS:
            raise
        blocks, problem = {}, str(error)
    if function in DIVISIONS and not (dtype.is_floating_point or dtype.is_complex):
        problem = next(filter(None, plan.processes.gather(problem)), "")
    if problem:
        raise DataError(f"torch cannot divide these integers ({problem}); divide x.to(torch.float64), or only where y is not 0")
    return BlockTensor(grid=plan.grid, owners=plan.owners, dtype=dtype, blocks=blocks, processes=plan.processes)


def apply(function: Callable[..., Tensor], *operands: Any) -> BlockTensor:
    """`function(block, ...)` for every block; the result may have other shapes and another dtype.

    Operands are as for `elementwise`. The results must fit together to a grid: blocks of one row of blocks have equally many
    rows, and so on. The function must not communicate.

    Raises:
        DataError: on every rank, if the function raised on one, or if the results are no grid.
    """
    plan = _aligned(operands)
    blocks, failed, cause = {}, "", None
    for number in plan.owned:
        try:
            blocks[number] = torch.as_tensor(function(*plan.inputs(number)))
        except Exception as error:
            failed, cause = f"block {list(plan.grid.place(number))}: {type(error).__name__}: {error}", error
            break
    described = [(number, list(block.shape), str(block.dtype).removeprefix("torch.")) for number, block in blocks.items()]
    known: dict[int, tuple[tuple[int, ...], torch.dtype]] = {}
    for rank, (made, problem) in enumerate(plan.processes.gather((described, failed))):
        if problem:
            where = "" if plan.processes.rank is None else f" on rank {rank}"
            raise DataError(f"the applied function failed{where} at {problem}") from cause
        known |= {number: (tuple(shape), getattr(torch, dtype)) for number, shape, dtype in made}
    grid = _grid_of_shapes(plan.grid, {number: shape for number, (shape, _) in known.items()})
    dtypes = {dtype for _, dtype in known.values()}
    if len(dtypes) > 1:
        raise DataError(f"the applied function returned several dtypes: {', '.join(sorted(map(str, dtypes)))}; convert to one")
    return BlockTensor(grid=grid, owners=plan.owners, dtype=dtypes.pop(), blocks=blocks, processes=plan.processes)


class _Aligned:
    """Operands cut alike: what `function` gets for each block of the result."""

    def __init__(self, grid: BlockGrid, owners: tuple[int, ...], operands: list[Any], processes: Processes) -> None:
        self.grid, self.owners, self.operands, self.processes = grid, owners, operands, processes
        self.owned = [number for number, owner in enumerate(owners) if processes.holds(owner)]
        self._held = [self._fetched(operand) if isinstance(operand, BlockTensor) else operand for operand in operands]

    def inputs(self, number: int) -> list[Any]:
        """The operands' parts for one block of the result."""
        place = self.grid.place(number)
        return [self._part(operand, held, place) for operand, held in zip(self.operands, self._held, strict=True)]

    def _part(self, operand: Any, held: Any, place: tuple[int, ...]) -> Any:
        if isinstance(operand, BlockTensor):
            return held[_number_in(operand.grid, place)]
        if not isinstance(operand, Tensor) or operand.ndim == 0:
            return operand
        extent = self.grid.extent(place)[self.grid_dims - operand.ndim :]
        return operand[tuple(slice(None) if size == 1 else part for size, part in zip(operand.shape, extent, strict=True))]

    @property
    def grid_dims(self) -> int:
        return len(self.grid.sizes)

    def _fetched(self, operand: BlockTensor) -> dict[int, Tensor]:
        """The operand's blocks that this rank needs: its own, and those of others that are broadcast or lie elsewhere."""
        if self.processes.rank is None:
            return dict(operand.blocks)
        needed = {
            (_number_in(operand.grid, place), owner) for place, owner in zip(self.grid.places(), self.owners, strict=True)
        }
        moves = [
            whole_block(block, operand.owners[block], rank, operand.grid.block_shape(operand.grid.place(block)))
            for block, rank in sorted(needed)
            if operand.owners[block] != rank
        ]
        if not moves:
            return dict(operand.blocks)
        arriving = {
            move.target: torch.empty(move.shape, dtype=operand.dtype, device=self.processes.device)
            for move in moves
            if move.receiver == self.processes.rank
        }
        exchange(moves, operand.blocks, arriving, self.processes, dtype=operand.dtype)
        return {**operand.blocks, **arriving}


def _aligned(operands: Sequence[Any]) -> _Aligned:
    """Cut all block tensors as the first one that fills a dim, and find where each block of the result is computed."""
    known = [_operand(operand) for operand in operands]
    tensors = [operand for operand in known if isinstance(operand, BlockTensor)]
    processes = tensors[0].processes
    for other in tensors[1:]:
        if (other.processes.ranks, other.processes.rank, other.processes.group) != (
            processes.ranks,
            processes.rank,
            processes.group,
        ):
            raise DataError(f"the block tensors are on different processes: {processes} and {other.processes}; make both alike")
    shapes = [tuple(operand.shape) for operand in known if isinstance(operand, BlockTensor | Tensor)]
    try:
        shape = np.broadcast_shapes(*shapes)
    except ValueError as error:
        listed = " and ".join(str(list(entry)) for entry in shapes)
        raise DataError(
            f"shapes {listed} do not broadcast: counted from the last dim, sizes must be equal or 1; "
            "add a dim with x[:, None], or index"
        ) from error
    grid = BlockGrid(sizes=tuple(_pieces(tensors, dim - len(shape), size) for dim, size in enumerate(shape)))
    cut = [_cut(operand, grid) if isinstance(operand, BlockTensor) else operand for operand in known]
    leading = max((operand for operand in cut if isinstance(operand, BlockTensor)), key=lambda operand: len(operand.grid))
    owners = tuple(leading.owners[_number_in(leading.grid, place)] for place in grid.places())
    return _Aligned(grid, owners, cut, processes)


def _operand(operand: Any) -> Any:
    if isinstance(operand, BlockTensor | Tensor | int | float | complex):
        return operand
    try:
        return torch.as_tensor(operand)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"an operand is a block tensor, an array or a number; got {type(operand).__name__}") from error


def _pieces(tensors: list[BlockTensor], dim: int, size: int) -> tuple[int, ...]:
    """The cuts of a result's dim (counted from the last): those of the first tensor that fills it."""
    filled = (tensor.grid.sizes[dim] for tensor in tensors if -dim <= tensor.ndim and tensor.shape[dim] == size)
    return next(filled, (size,))


def _cut(tensor: BlockTensor, grid: BlockGrid) -> BlockTensor:
    """The tensor cut as the result along the dims that it fills."""
    theirs = grid.sizes[len(grid.sizes) - tensor.ndim :]
    sizes = tuple(own if sum(own) != sum(other) else other for own, other in zip(tensor.grid.sizes, theirs, strict=True))
    return tensor if sizes == tensor.grid.sizes else rechunk(tensor, BlockGrid(sizes=sizes))


def _number_in(grid: BlockGrid, place: tuple[int, ...]) -> int:
    """The block of an operand that a block of the result reads: piece 0 along the dims in which the operand is one piece."""
    own = place[len(place) - len(grid.counts) :]
    return grid.number([piece if count > 1 else 0 for count, piece in zip(grid.counts, own, strict=True)])


def _sample(operand: Any) -> Any:
    """One element with as many dims: enough for torch to tell the dtype of the result."""
    if isinstance(operand, BlockTensor | Tensor):
        return torch.ones((1,) * operand.ndim, dtype=operand.dtype)
    return operand


def _grid_of_shapes(grid: BlockGrid, shapes: dict[int, tuple[int, ...]]) -> BlockGrid:
    """The grid that blocks of these shapes make, at the places of `grid`."""
    dims = {len(shape) for shape in shapes.values()}
    if dims != {len(grid.sizes)}:
        raise DataError(
            f"applied functions must keep the {len(grid.sizes)} dims of a block, and one returned {sorted(dims)} dims; "
            "keep reduced dims with keepdim=True"
        )
    sizes = []
    for dim, count in enumerate(grid.counts):
        found: list[int] = []
        for piece in range(count):
            same = {shape[dim] for number, shape in shapes.items() if grid.place(number)[dim] == piece}
            if len(same) > 1:
                raise DataError(
                    f"the applied function returned blocks that are no grid: piece {piece} of dim {dim} has sizes "
                    f"{sorted(same)}; return equal sizes along a row of blocks"
                )
            found += same
        sizes.append(tuple(found))
    made = math.prod(len(pieces) for pieces in sizes)
    assert made == len(shapes)
    return BlockGrid(sizes=tuple(sizes))
