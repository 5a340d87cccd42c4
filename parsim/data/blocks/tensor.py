"""BlockTensor: an array in blocks, each owned by a rank. A value: operations make new ones, and nothing is changed in place.

The methods are short names for the functions of this folder, where each is explained. On a process group every rank calls them.
"""

from __future__ import annotations

import itertools
import math
import operator
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from parsim.data.blocks.exchange import (
    ROOM_BYTES,
    BlockGrid,
    BlockPlace,
    Move,
    Processes,
    Selection,
    balanced_sizes,
    bytes_by_owner,
    check_bytes,
    check_room,
    contiguous_owners,
    exchange,
    in_one_process,
    normal_at,
    on_process_group,
    uniform_at,
    whole_block,
)
from parsim.errors import DataError, near_matches
from parsim.numeric import Floats, Ints

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockTensor:
    """An array cut by `grid`.

    Attributes:
        grid: the sizes of the blocks. owners: the rank of each block, by its number. dtype: of every block.
        blocks: those that this process holds, by number; do not change them in place. processes: who the ranks are.
    """

    __array_ufunc__ = None  # so that array + blocks asks the blocks

    grid: BlockGrid
    owners: tuple[int, ...]
    dtype: torch.dtype
    processes: Processes
    blocks: Mapping[int, Tensor] = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.owners) != len(self.grid) or not all(0 <= owner < self.processes.ranks for owner in self.owners):
            raise DataError(
                f"{len(self.grid)} blocks need as many owners from 0 to {self.processes.ranks - 1}, got {list(self.owners)}"
            )
        held = {number for number, owner in enumerate(self.owners) if self.processes.holds(owner)}
        if held != set(self.blocks):
            raise DataError(f"this process owns the blocks {sorted(held)} and was given {sorted(self.blocks)}")
        for number, block in self.blocks.items():
            wanted = self.grid.block_shape(self.grid.place(number))
            if tuple(block.shape) != wanted or block.dtype != self.dtype:
                raise DataError(
                    f"block {self.grid.place(number)} must be {self.dtype} of shape {list(wanted)}, got {block.dtype} of shape "
                    f"{list(block.shape)}"
                )
        object.__setattr__(self, "blocks", MappingProxyType(dict(self.blocks)))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.grid.shape

    @property
    def ndim(self) -> int:
        return len(self.grid.sizes)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a block tensor without dims")
        return self.shape[0]

    def __iter__(self) -> Iterator[BlockTensor]:
        if not self.shape:
            raise TypeError("iteration over a block tensor without dims")
        return (self[row] for row in range(self.shape[0]))

    def __bool__(self) -> bool:
        """Of the only element, on every rank, as in NumPy."""
        if math.prod(self.shape) != 1:
            raise DataError(f"an array of shape {list(self.shape)} is neither true nor false; use x.any() or x.all()")
        return bool(self.item())

    def __contains__(self, value: Any) -> bool:
        """Whether any element is equal to a value, on every rank."""
        return bool(self.equal(value).any())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """The whole array for NumPy, on every rank: `collect`."""
        whole = self.collect().numpy()
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def bytes_by_rank(self) -> list[int]:
        """What the blocks of each rank take."""
        return bytes_by_owner(self.grid, self.owners, self.processes.ranks, self.dtype.itemsize)

    def block(self, *place: int) -> Tensor:
        """The block at a place of the grid, if this process holds it.

        Raises:
            DataError: there is no such block, or another rank has it.
        """
        if len(place) != self.ndim or not all(0 <= p < count for p, count in zip(place, self.grid.counts, strict=True)):
            raise DataError(f"there is no block {list(place)} in a grid of {list(self.grid.counts)} blocks, counted from 0")
        number = self.grid.number(place)
        if number not in self.blocks:
            raise DataError(f"block {list(place)} is on rank {self.owners[number]}; ask there, or collect()")
        return self.blocks[number]

    def with_blocks(self, change: Callable[[Tensor], Tensor], dtype: torch.dtype) -> BlockTensor:
        """Every block changed by a function that keeps its shape and gives it `dtype`."""
        return replace(self, dtype=dtype, blocks={number: change(block) for number, block in self.blocks.items()})

    def to(self, dtype: torch.dtype) -> BlockTensor:
        """The values as another type."""
        return self.with_blocks(lambda block: block.to(dtype), dtype)

    def __getitem__(self, key: Any) -> BlockTensor:

        return select(self, key)

    def take(self, order: Sequence[int], **settings: Any) -> BlockTensor:
        """Rows `order` in this order; see `shuffling.take`."""

        return take(self, order, **settings)

    def shuffle(self, seed: int, **settings: Any) -> BlockTensor:
        """Rows in random order; see `shuffling.shuffle`."""

        return shuffle(self, seed=seed, **settings)[0]

    def rechunk(self, grid: BlockGrid | Sequence[int], **settings: Any) -> BlockTensor:
        """The same array in other blocks; see `rechunking.rechunk`."""

        return rechunk(self, grid, **settings)

    def collect(self) -> Tensor:
        """The whole array, on every rank; see `rechunking.collect`."""

        return collect(self)

    def collect_on(self, rank: int) -> Tensor | None:
        """The whole array on one rank, None on the others."""

        return collect_on(self, rank)

    def item(self) -> Any:
        """The only element, on every rank."""
        if math.prod(self.shape) != 1:
            raise DataError(f"item() needs exactly one element, and the shape is {list(self.shape)}; reduce or index first")
        return self.collect().item()

    def to_dtensor(self, mesh: DeviceMesh, placements: Sequence[Placement] | None = None) -> DTensor:
        """As torch's DTensor on a mesh of the same ranks; see `dtensors.to_dtensor`."""

        return to_dtensor(self, mesh, placements)

    def apply(self, function: Callable[..., Tensor], *others: BlockTensor) -> BlockTensor:
        """`function(block, ...)` for every block; see `elementwise.apply`."""

        return apply(function, self, *others)

    def _with(self, function: Callable[..., Any], *others: Any, reverse: bool = False) -> BlockTensor:

        return elementwise(function, *others, self) if reverse else elementwise(function, self, *others)

    def __add__(self, other: Any) -> BlockTensor:
        return self._with(operator.add, other)

    def __radd__(self, other: Any) -> BlockTensor:
        return self._with(operator.add, other, reverse=True)

    def __sub__(self, other: Any) -> BlockTensor:
        return self._with(operator.sub, other)

    def __rsub__(self, other: Any) -> BlockTensor:
        return self._with(operator.sub, other, reverse=True)

    def __mul__(self, other: Any) -> BlockTensor:
        return self._with(operator.mul, other)

    def __rmul__(self, other: Any) -> BlockTensor:
        return self._with(operator.mul, other, reverse=True)

    def __truediv__(self, other: Any) -> BlockTensor:
        return self._with(operator.truediv, other)

    def __rtruediv__(self, other: Any) -> BlockTensor:
        return self._with(operator.truediv, other, reverse=True)

    def __floordiv__(self, other: Any) -> BlockTensor:
        return self._with(operator.floordiv, other)

    def __rfloordiv__(self, other: Any) -> BlockTensor:
        return self._with(operator.floordiv, other, reverse=True)

    def __mod__(self, other: Any) -> BlockTensor:
        return self._with(operator.mod, other)

    def __rmod__(self, other: Any) -> BlockTensor:
        return self._with(operator.mod, other, reverse=True)

    def __pow__(self, other: Any) -> BlockTensor:
        return self._with(operator.pow, other)

    def __rpow__(self, other: Any) -> BlockTensor:
        return self._with(operator.pow, other, reverse=True)

    def __lt__(self, other: Any) -> BlockTensor:
        return self._with(operator.lt, other)

    def __le__(self, other: Any) -> BlockTensor:
        return self._with(operator.le, other)

    def __gt__(self, other: Any) -> BlockTensor:
        return self._with(operator.gt, other)

    def __ge__(self, other: Any) -> BlockTensor:
        return self._with(operator.ge, other)

    def equal(self, other: Any) -> BlockTensor:
        """Where elements are equal, as bool. (`==` compares the values as objects, so that they can be keys.)"""
        return self._with(operator.eq, other)

    def __neg__(self) -> BlockTensor:
        return self._with(operator.neg)

    def __abs__(self) -> BlockTensor:
        return self._with(operator.abs)

    def _reduce(self, kind: str, dim: int | Sequence[int] | None, keepdim: bool) -> BlockTensor:

        return reduce_blocks(self, kind, dim, keepdim=keepdim)

    def sum(self, dim: int | Sequence[int] | None = None, *, keepdim: bool = False) -> BlockTensor:
        """Over the dims, or over all; this and the next five add up in the order of the blocks, for any number of ranks."""
        return self._reduce("sum", dim, keepdim)

    def mean(self, dim: int | Sequence[int] | None = None, *, keepdim: bool = False) -> BlockTensor:
        return self._reduce("mean", dim, keepdim)

    def min(self, dim: int | Sequence[int] | None = None, *, keepdim: bool = False) -> BlockTensor:
        return self._reduce("min", dim, keepdim)

    def max(self, dim: int | Sequence[int] | None = None, *, keepdim: bool = False) -> BlockTensor:
        return self._reduce("max", dim, keepdim)

    def prod(self, dim: int | Sequence[int] | None = None, *, keepdim: bool = False) -> BlockTensor:
        return self._reduce("prod", dim, keepdim)

    def any(self, dim: int | Sequence[int] | None = None, *, keepdim: bool = False) -> BlockTensor:
        return self._reduce("any", dim, keepdim)

    def all(self, dim: int | Sequence[int] | None = None, *, keepdim: bool = False) -> BlockTensor:
        return self._reduce("all", dim, keepdim)


# Reductions: each block is reduced by its rank, and one rank per result block joins the parts in the order of the blocks.
#
# So a result is the same, bit for bit, for any number of processes and any owners. Between grids the last digits may differ.


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


# The same array in other blocks, and the whole array in one place.


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


# Arithmetic with broadcasting, and any function of blocks.
#
# Types promote as in torch: an int64 tensor divided by an int is float32, unless torch's default dtype is another.


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


# New block tensors: of one value, from an array, from blocks, at random.


RANDOM: dict[str, Callable[[int, NDArray[np.uint64]], Floats]] = {"uniform": uniform_at, "normal": normal_at}
"""Distributions: uniform in [0, 1), standard normal."""

Owners = Sequence[int] | None
"""The rank of each block by number; None for `grid.contiguous_owners`."""


def full(
    shape: Sequence[int],
    value: complex,
    *,
    grid: BlockGrid | Sequence[int],
    dtype: torch.dtype = torch.float32,
    owners: Owners = None,
    processes: Processes | None = None,
) -> BlockTensor:
    """An array of one value. grid: a BlockGrid, or counts of equal blocks along the dims.

    Raises:
        DataError: a grid that does not divide or is of another shape, wrong owners, more than there is memory for.
    """
    return _made(
        "full", _grid(shape, grid), dtype, owners, processes, lambda extent: torch.full(_lengths(extent), value, dtype=dtype)
    )


def random(
    shape: Sequence[int],
    *,
    seed: int,
    grid: BlockGrid | Sequence[int],
    distribution: str = "uniform",
    dtype: torch.dtype = torch.float32,
    owners: Owners = None,
    processes: Processes | None = None,
) -> BlockTensor:
    """Random numbers of a row of RANDOM: the same array for a seed, whatever the grid, the owners and the number of processes.

    Drawn in float64 and rounded to `dtype`. Raises DataError as `full`.
    """
    if distribution not in RANDOM:
        raise DataError(f"unknown distribution {distribution!r}{near_matches(distribution, RANDOM)}")
    if seed < 0 or not dtype.is_floating_point:
        raise DataError(f"random blocks need a seed >= 0 and a floating-point dtype, got {seed} and {dtype}")
    whole = _grid(shape, grid)
    strides = np.cumprod([1, *whole.shape[:0:-1]], dtype=np.uint64)[::-1]

    def draw(extent: tuple[slice, ...]) -> Tensor:
        position = np.zeros((1,) * len(extent), dtype=np.uint64)
        for dim, (along, stride) in enumerate(zip(extent, strides, strict=bool(extent))):
            steps = np.arange(along.start, along.stop, dtype=np.uint64) * stride
            position = position + steps.reshape([-1 if place == dim else 1 for place in range(len(extent))])
        drawn = np.asarray(RANDOM[distribution](seed, position))
        if distribution == "uniform":
            drawn = np.minimum(drawn, 1.0 - torch.finfo(dtype).eps / 2)  # rounding would make the largest ones 1
        return torch.from_numpy(np.asarray(drawn)).to(dtype)

    return _made("random", whole, dtype, owners, processes, draw)


def from_array(
    array: NDArray[Any] | Tensor | None,
    *,
    grid: BlockGrid | Sequence[int],
    owners: Owners = None,
    processes: Processes | None = None,
    source: int | None = None,
) -> BlockTensor:
    """An array as blocks.

    Every rank passes the same array and copies its own blocks of it, so a memory-mapped file is read in part. With `source`,
    only that rank passes the array (the others None), and the blocks are sent from there.

    Raises:
        DataError: as `full`; an array that torch has no dtype for; no array where one is needed.
    """
    processes = processes or in_one_process()
    if source is not None:
        return _from_one_rank(array, grid, owners, processes, source)
    if array is None:
        raise DataError("from_array needs the array on every rank; pass source=RANK if only one rank has it")
    dtype = _dtype_of(array)

    def cut(extent: tuple[slice, ...]) -> Tensor:
        part = array[extent]
        return part.detach().clone() if isinstance(part, Tensor) else torch.from_numpy(np.array(part, dtype=_native(part)))

    return _made("from_array", _grid(array.shape, grid), dtype, owners, processes, cut)


def from_blocks(
    blocks: Mapping[BlockPlace, Tensor],
    *,
    grid: BlockGrid,
    dtype: torch.dtype,
    owners: Owners = None,
    processes: Processes | None = None,
) -> BlockTensor:
    """The blocks that this process owns, by place: read from files of its own, for instance.

    Raises:
        DataError: a block that is missing, not owned here, or of another shape or dtype.
    """
    processes = processes or in_one_process()
    numbered = {grid.number(place): block for place, block in blocks.items()}
    return BlockTensor(grid=grid, owners=_owners(grid, owners, processes), dtype=dtype, blocks=numbered, processes=processes)


def _from_one_rank(
    array: Any, grid: BlockGrid | Sequence[int], owners: Owners, processes: Processes, source: int
) -> BlockTensor:
    if not 0 <= source < processes.ranks:
        raise DataError(f"source must be a rank from 0 to {processes.ranks - 1}, got {source}")
    own, problem = None, ""
    if array is not None and processes.holds(source):
        try:
            own = [int(size) for size in array.shape], str(_dtype_of(array)).removeprefix("torch.")
        except DataError as error:  # the others wait for what this rank tells them
            problem = str(error)
    described, problem = processes.gather((own, problem))[source if processes.rank is not None else 0]
    if problem:
        raise DataError(problem)
    if described is None:
        raise DataError(f"rank {source} is the source and passed no array")
    shape, dtype = tuple(described[0]), getattr(torch, described[1])
    here = {}
    if processes.holds(source):
        here[0] = array if isinstance(array, Tensor) else torch.from_numpy(np.asarray(array, dtype=_native(array)))
    whole = BlockGrid.even(shape, ())
    at_source = BlockTensor(grid=whole, owners=(source,), dtype=dtype, blocks=here, processes=processes)
    target = _grid(shape, grid)
    return rechunk(at_source, target, owners=_owners(target, owners, processes))


def _made(
    what: str,
    grid: BlockGrid,
    dtype: torch.dtype,
    owners: Owners,
    processes: Processes | None,
    make: Callable[[tuple[slice, ...]], Tensor],
) -> BlockTensor:
    """The blocks that this process owns, each made from its extent."""
    processes = processes or in_one_process()
    dealt = _owners(grid, owners, processes)
    check_room(f"{what} of shape {list(grid.shape)} in {dtype}", grid, dealt, dtype.itemsize, processes)
    blocks = {
        number: make(grid.extent(place)).to(processes.device)
        for number, place in enumerate(grid.places())
        if processes.holds(dealt[number])
    }
    return BlockTensor(grid=grid, owners=dealt, dtype=dtype, blocks=blocks, processes=processes)


def _grid(shape: Sequence[int], grid: BlockGrid | Sequence[int]) -> BlockGrid:
    if not isinstance(grid, BlockGrid):
        return BlockGrid.even(tuple(shape), tuple(grid))
    if grid.shape != tuple(shape):
        raise DataError(f"the grid cuts an array of shape {list(grid.shape)}, and this one has shape {list(shape)}")
    return grid


def _owners(grid: BlockGrid, owners: Owners, processes: Processes) -> tuple[int, ...]:
    if owners is None:
        return contiguous_owners(len(grid), processes.ranks)
    if len(owners) != len(grid) or not all(0 <= owner < processes.ranks for owner in owners):
        raise DataError(f"{len(grid)} blocks need as many owners from 0 to {processes.ranks - 1}, got {list(owners)}")
    return tuple(owners)


def _lengths(extent: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(along.stop - along.start for along in extent)


def _native(array: NDArray[Any]) -> np.dtype[Any]:
    """Its type in the byte order of this machine, the only one that torch has."""
    return array.dtype.newbyteorder("=")


def _dtype_of(array: NDArray[Any] | Tensor) -> torch.dtype:
    if isinstance(array, Tensor):
        return array.dtype
    try:
        return torch.from_numpy(np.empty(0, dtype=_native(array))).dtype
    except TypeError as error:
        raise DataError(f"torch has no type for numpy's {array.dtype}; convert the array to numbers or bool first") from error


# To and from torch's DTensor.
#
# DTensor cuts a dim over n ranks in chunks of ceil(size / n), as `torch.chunk` does: the last ranks may hold less, or
# nothing.


def to_dtensor(
    tensor: BlockTensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement] | None = None,
    *,
    room_bytes: int = ROOM_BYTES,
) -> DTensor:
    """The array on a DeviceMesh of the same ranks. Blocks that lie as the DTensor needs them are not sent.

    Args:
        placements: Shard(dim) or Replicate() per mesh dim, each tensor dim on one mesh dim at most; None for Shard(0),
            Shard(1), ... over the dims of the mesh.

    Raises:
        DataError: other ranks, a placement of another kind, a dim that is not there or sharded twice.
    """
    from torch.distributed.tensor import DTensor

    chosen = _shards(mesh.ndim) if placements is None else tuple(placements)
    dims = _sharded_dims(mesh, chosen, tensor.ndim)
    ranks = _ranks_of(mesh, tensor.processes)
    grid = _chunked(tensor.shape, mesh, dims)
    receivers: list[list[int]] = [[] for _ in range(len(grid))]
    needed = [0] * tensor.processes.ranks
    own: int | None = None
    here: tuple[int, ...] = (0,) * mesh.ndim
    for coordinate, rank in ranks.items():
        number = _block_at(grid, dims, coordinate)
        if number is not None:
            receivers[number].append(rank)
            needed[rank] = math.prod(grid.block_shape(grid.place(number))) * tensor.dtype.itemsize
        if tensor.processes.holds(rank):
            own, here = number, coordinate
    check_bytes(f"a DTensor of shape {list(tensor.shape)}", needed, tensor.processes)
    local = torch.empty(_local_shape(grid, dims, here), dtype=tensor.dtype, device=tensor.processes.device)
    targets = {} if own is None else {own: local}
    exchange(
        overlaps(tensor, grid, receivers), tensor.blocks, targets, tensor.processes, dtype=tensor.dtype, room_bytes=room_bytes
    )
    strides = tuple(math.prod(tensor.shape[dim + 1 :]) for dim in range(tensor.ndim))
    return DTensor.from_local(local, mesh, chosen, run_check=False, shape=torch.Size(tensor.shape), stride=strides)


def from_dtensor(dtensor: DTensor, *, group: ProcessGroup | None = None) -> BlockTensor:
    """The local shards of a DTensor as blocks, without a copy. What is replicated belongs to the first rank that holds it.

    Args:
        group: the ranks of the mesh, left out for the default group.

    Raises:
        DataError: a placement other than Shard and Replicate, a dim sharded twice, or a mesh of other ranks.
    """
    mesh = dtensor.device_mesh
    dims = _sharded_dims(mesh, dtensor.placements, dtensor.ndim)
    processes = on_process_group(group, device=str(dtensor.to_local().device))
    ranks = _ranks_of(mesh, processes)
    grid = _chunked(tuple(dtensor.shape), mesh, dims)
    owners = [-1] * len(grid)
    for coordinate, rank in ranks.items():
        number = _block_at(grid, dims, coordinate)
        if number is not None and owners[number] < 0:
            owners[number] = rank
    local: Tensor = dtensor.to_local()
    blocks = {number: local.detach() for number, owner in enumerate(owners) if owner == processes.rank}
    return BlockTensor(grid=grid, owners=tuple(owners), dtype=dtensor.dtype, blocks=blocks, processes=processes)


def _shards(count: int) -> tuple[Placement, ...]:
    from torch.distributed.tensor import Shard

    return tuple(Shard(dim) for dim in range(count))


def _sharded_dims(mesh: DeviceMesh, placements: Sequence[Placement], ndim: int) -> list[int | None]:
    """Per mesh dim: the tensor dim that it cuts, None where it replicates."""
    from torch.distributed.tensor import Replicate, Shard

    if len(placements) != mesh.ndim:
        raise DataError(f"a mesh of {mesh.ndim} dims needs as many placements, got {list(placements)}")
    dims: list[int | None] = []
    for placement in placements:
        if type(placement) is Shard and -ndim <= placement.dim < ndim:
            dims.append(placement.dim % ndim)
        elif isinstance(placement, Replicate):
            dims.append(None)
        else:
            raise DataError(
                f"placement {placement} of a tensor of {ndim} dims is not supported: use Shard(0) to Shard({ndim - 1}) or "
                "Replicate(); redistribute() a DTensor with partial sums first"
            )
    cut = [dim for dim in dims if dim is not None]
    if len(set(cut)) < len(cut):
        raise DataError(f"a tensor dim may be sharded by one mesh dim, got {list(placements)}; flatten the mesh")
    return dims


def _ranks_of(mesh: DeviceMesh, processes: Processes) -> dict[tuple[int, ...], int]:
    """The rank among `processes` at every coordinate of the mesh."""
    import torch.distributed as dist

    members = mesh.mesh.flatten().tolist()
    if processes.rank is None:
        known = {dist.get_rank(): 0} if processes.ranks == 1 else {}
    else:
        known = {rank: place for place, rank in enumerate(dist.get_process_group_ranks(processes.group or dist.group.WORLD))}
    if sorted(members) != sorted(known):
        where = f"ranks {sorted(known)}" if known else f"{processes.ranks} ranks of one process"
        raise DataError(
            f"the mesh has the ranks {sorted(members)} and the blocks are on {where}; "
            "both must be the same ranks of one process group"
        )
    coordinates = itertools.product(*map(range, mesh.mesh.shape))
    return {coordinate: known[rank] for coordinate, rank in zip(coordinates, members, strict=True)}


def _chunked(shape: Sequence[int], mesh: DeviceMesh, dims: Sequence[int | None]) -> BlockGrid:
    """The grid of the shards that are not empty."""
    block_shape = [max(1, size) for size in shape]
    for place, dim in enumerate(dims):
        if dim is not None:
            block_shape[dim] = max(1, -(-shape[dim] // mesh.size(place)))
    return BlockGrid.of_blocks(shape, block_shape)


def _block_at(grid: BlockGrid, dims: Sequence[int | None], coordinate: Sequence[int]) -> int | None:
    """The block of the rank at a coordinate of the mesh; None where its shard is empty."""
    place = [0] * len(grid.counts)
    for dim, index in zip(dims, coordinate, strict=True):
        if dim is not None:
            place[dim] = index
    if any(piece >= count for piece, count in zip(place, grid.counts, strict=True)):
        return None
    return grid.number(place)


def _local_shape(grid: BlockGrid, dims: Sequence[int | None], coordinate: Sequence[int]) -> tuple[int, ...]:
    """Of the shard at a coordinate of the mesh: 0 along the dims in which it lies behind the last block, and along no other."""
    place = {dim: index for dim, index in zip(dims, coordinate, strict=True) if dim is not None}
    return tuple(pieces[place.get(dim, 0)] if place.get(dim, 0) < len(pieces) else 0 for dim, pieces in enumerate(grid.sizes))


# Rows in another order: chosen rows, and random orders that pair inputs with their targets.
#
# An order is one int64 array of row numbers, known to every rank (about 24 bytes per row with what is derived from it). Rows
# go straight from their old rank to their new one, in messages of bounded size.


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


# Indexing as in NumPy: ints, slices of any step, `...`, None, and one list of positions or of bools.
#
# Ints, slices and None need no communication: every block keeps what is selected of it, on its rank. A list moves elements
# between ranks (`shuffling.take`).


@dataclass(frozen=True, slots=True)
class _Part:
    """What is selected of one piece of a dim: `count` positions from `first`, `step` apart; step < 0 counts back."""

    piece: int
    first: int
    count: int
    step: int

    def of(self, block: Tensor, dim: int) -> Tensor:
        if self.step > 0:
            return block[(slice(None),) * dim + (slice(self.first, self.first + self.count * self.step, self.step),)]
        lowest = self.first + (self.count - 1) * self.step
        return block[(slice(None),) * dim + (slice(lowest, self.first + 1, -self.step),)].flip(dim)


def select(tensor: BlockTensor, key: Any) -> BlockTensor:
    """`tensor[key]` by NumPy's rules. Blocks of which nothing is selected are left out.

    Raises:
        DataError: a position outside, too many dims, two lists, a list separated from an int by other dims, a step of 0.
    """
    entries = _complete(tensor, key if isinstance(key, tuple) else (key,))
    lists = [place for place, entry in enumerate(entries) if isinstance(entry, np.ndarray)]
    if len(lists) > 1:
        raise DataError(f"index with one list at a time: x[list][:, list]; got {len(lists)} lists")
    if lists:
        places = [place for place, entry in enumerate(entries) if isinstance(entry, int | np.ndarray)]
        if places != list(range(places[0], places[-1] + 1)):
            raise DataError(
                "a list and an int with other dims between them are ambiguous; index in two steps: x[int][..., list]"
            )
        dim = sum(entry is not None for entry in entries[: lists[0]])
        tensor = take(tensor, entries[lists[0]], dim=dim)
        entries[lists[0]] = slice(None)
    return _basic(tensor, entries)


def _complete(tensor: BlockTensor, key: tuple[Any, ...]) -> list[Any]:
    """One entry (int, slice or array) per dim, and None where a dim is added."""
    entries = [_entry(entry) for entry in key]
    dots = [place for place, entry in enumerate(entries) if entry is Ellipsis]
    used = sum(entry is not None and entry is not Ellipsis for entry in entries)
    if len(dots) > 1 or used > tensor.ndim:
        raise DataError(f"an index of {used} dims (and {len(dots)} times '...') for a tensor of shape {list(tensor.shape)}")
    missing: list[Any] = [slice(None)] * (tensor.ndim - used)
    place = dots[0] if dots else len(entries)
    return [*entries[:place], *missing, *entries[place + 1 :]]


def _entry(entry: Any) -> Any:
    if entry is None or entry is Ellipsis or isinstance(entry, slice):
        return entry
    if isinstance(entry, BlockTensor):
        raise DataError("block tensors cannot be indices; collect() the index first")
    if isinstance(entry, list | range | np.ndarray | Tensor):
        found = np.asarray(entry)
        if found.ndim == 1:
            return found
        if found.ndim or found.dtype == np.bool_:
            raise DataError(f"a list of positions has one dim, got shape {list(found.shape)}")
        entry = found  # an array without dims is its number
    if isinstance(entry, bool | np.bool_):
        raise DataError(f"a single {entry} is not an index; use a list of bools, one per element of the dim")
    try:
        return operator.index(entry)
    except TypeError as error:
        raise DataError(f"an index is an int, a slice, '...', None or a list of positions; got {entry!r}") from error


def _basic(tensor: BlockTensor, entries: list[Any]) -> BlockTensor:
    """Ints, slices and None: local."""
    parts: list[list[_Part]] = []
    kept: list[int] = []
    for entry in entries:
        if entry is None:
            kept.append(-1)
            continue
        dim = len(parts)
        if not isinstance(entry, int):
            kept.append(dim)
        parts.append(_parts(tensor.grid, dim, entry))
    sizes = tuple((1,) if dim < 0 else tuple(part.count for part in parts[dim]) for dim in kept)
    grid, owners, blocks = BlockGrid(sizes=sizes), [], {}
    for number, place in enumerate(grid.places()):
        chosen = [along[0] for along in parts]
        for dim, piece in zip(kept, place, strict=True):
            if dim >= 0:
                chosen[dim] = parts[dim][piece]
        source = tensor.grid.number([part.piece for part in chosen])
        owners.append(tensor.owners[source])
        if source in tensor.blocks:
            block = tensor.blocks[source]
            for dim, part in enumerate(chosen):
                block = part.of(block, dim)
            blocks[number] = block.reshape(grid.block_shape(place))
    return BlockTensor(grid=grid, owners=tuple(owners), dtype=tensor.dtype, blocks=blocks, processes=tensor.processes)


def _parts(grid: BlockGrid, dim: int, entry: int | slice) -> list[_Part]:
    """The pieces of a dim with something selected, in the order of the result; for nothing, one empty part."""
    size = grid.shape[dim]
    if isinstance(entry, int):
        if not -size <= entry < size:
            raise DataError(f"position {entry} is outside dim {dim}, which has {size} elements")
        entry = slice(entry % size, entry % size + 1)
    if entry.step == 0:
        raise DataError("the step of a slice must not be 0")
    selected = range(*entry.indices(size))
    starts = grid.starts(dim)
    found = []
    for piece in range(len(starts) - 1):
        inside = _inside(selected, starts[piece], starts[piece + 1])
        if inside:
            found.append(_Part(piece, inside[0] - starts[piece], len(inside), selected.step))
    if not found:
        return [_Part(0, 0, 0, 1)]
    return found if selected.step > 0 else found[::-1]


def _inside(selected: range, first: int, last: int) -> range:
    """The part of a range that lies in first .. last-1, in its order."""
    step = abs(selected.step)
    rising = selected if selected.step > 0 else selected[::-1]
    begin = max(0, -(-(first - rising.start) // step))
    end = max(begin, min(len(rising), -(-(last - rising.start) // step)))
    part = rising[begin:end]
    return part if selected.step > 0 else part[::-1]


def concatenate(tensors: list[BlockTensor], dim: int = 0) -> BlockTensor:
    """One after the other along a dim; blocks stay where they are, if all are cut alike along the other dims.

    Where they are not, they are cut as the first one. Raises DataError for shapes or dtypes that do not go together.
    """
    if not tensors:
        raise DataError("concatenate needs at least one block tensor, got none")
    first = tensors[0]
    if not -first.ndim <= dim < first.ndim:
        raise DataError(f"there is no dim {dim} in shape {list(first.shape)}")
    dim %= first.ndim
    for other in tensors[1:]:
        others = [size for place, size in enumerate(other.shape) if place != dim]
        if others != [size for place, size in enumerate(first.shape) if place != dim] or other.dtype != first.dtype:
            raise DataError(
                f"along dim {dim}, {list(first.shape)} in {first.dtype} and {list(other.shape)} in {other.dtype} do not go "
                "together; the other dims and the dtype must be equal"
            )
    parts = [first, *(_cut_as(other, first, dim) for other in tensors[1:])]
    pieces = tuple(size for part in parts for size in part.grid.sizes[dim] if size) or (0,)
    grid = BlockGrid(sizes=(*first.grid.sizes[:dim], pieces, *first.grid.sizes[dim + 1 :]))
    owners, blocks = [0] * len(grid), {}
    begun = 0
    for part in parts:
        if not part.shape[dim] and grid.shape[dim]:
            continue
        for number, place in enumerate(part.grid.places()):
            target = grid.number([*place[:dim], place[dim] + begun, *place[dim + 1 :]])
            owners[target] = part.owners[number]
            if number in part.blocks:
                blocks[target] = part.blocks[number]
        begun += part.grid.counts[dim]
        if not grid.shape[dim]:
            break
    return BlockTensor(grid=grid, owners=tuple(owners), dtype=first.dtype, blocks=blocks, processes=first.processes)


def _cut_as(other: BlockTensor, first: BlockTensor, dim: int) -> BlockTensor:
    sizes = [*first.grid.sizes]
    sizes[dim] = other.grid.sizes[dim]
    wanted = BlockGrid(sizes=tuple(sizes))
    return other if other.grid == wanted else other.rechunk(wanted)
