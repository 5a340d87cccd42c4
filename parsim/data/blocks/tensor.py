"""BlockTensor: an array in blocks, each owned by a rank. A value: operations make new ones, and nothing is changed in place.

The methods are short names for the functions below, where each is explained. On a process group every rank calls them.
"""

from __future__ import annotations

import itertools
import math
import operator
from bisect import bisect_left, bisect_right
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
from parsim.data.samples import permutation
from parsim.errors import DataError, near_matches
from parsim.numeric import Floats, Ints

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

Owners = Sequence[int] | None
"""The rank of each block by number; None for `contiguous_owners`."""

Method = Callable[["BlockTensor", Any], "BlockTensor"]


def _binary(function: Callable[..., Any]) -> tuple[Method, Method]:
    """The methods for `self op other` and for `other op self`."""
    return lambda self, other: elementwise(function, self, other), lambda self, other: elementwise(function, other, self)


def _reduction(kind: str) -> Callable[..., BlockTensor]:
    """The method for a kind of reduction, with the arguments of `reduce_blocks`."""

    def reduction(self: BlockTensor, dim: int | Sequence[int] | None = None, *, keepdim: bool = False) -> BlockTensor:
        return reduce_blocks(self, kind, dim, keepdim=keepdim)

    return reduction


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockTensor:
    """An array cut by `grid`. owners: the rank of each block, by its number. dtype: of every block. blocks: those that this
    process holds, by number; do not change them in place."""

    __array_ufunc__ = None  # so that array + blocks asks the blocks

    grid: BlockGrid
    owners: tuple[int, ...]
    dtype: torch.dtype
    processes: Processes
    blocks: Mapping[int, Tensor] = field(repr=False)

    def __post_init__(self) -> None:
        _owners(self.grid, self.owners, self.processes)
        held = {number for number, owner in enumerate(self.owners) if self.processes.holds(owner)}
        if held != set(self.blocks):
            raise DataError(f"this process owns the blocks {sorted(held)} and was given {sorted(self.blocks)}")
        for number, block in self.blocks.items():
            shape = self.grid.block_shape(self.grid.place(number))
            if tuple(block.shape) != shape or block.dtype != self.dtype:
                raise DataError(
                    f"block {self.grid.place(number)} must be {self.dtype} of shape {list(shape)}, got {block.dtype} of shape "
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
        """Whether the only element is true, on every rank, as in NumPy."""
        if math.prod(self.shape) != 1:
            raise DataError(f"an array of shape {list(self.shape)} is neither true nor false; use x.any() or x.all()")
        return bool(self.item())

    def __contains__(self, value: Any) -> bool:
        """Whether any element is equal to a value, on every rank."""
        return bool(self.equal(value).any())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        array = self.collect().numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def block(self, *place: int) -> Tensor:
        """The block at a place of the grid. Raises DataError: there is no such block, or another rank has it."""
        if len(place) != self.ndim or not all(0 <= p < count for p, count in zip(place, self.grid.counts, strict=True)):
            raise DataError(f"there is no block {list(place)} in a grid of {list(self.grid.counts)} blocks, counted from 0")
        number = self.grid.number(place)
        if number not in self.blocks:
            raise DataError(f"block {list(place)} is on rank {self.owners[number]}; ask there, or collect()")
        return self.blocks[number]

    def to(self, dtype: torch.dtype) -> BlockTensor:
        return replace(self, dtype=dtype, blocks={number: block.to(dtype) for number, block in self.blocks.items()})

    def item(self) -> Any:
        if math.prod(self.shape) != 1:
            raise DataError(f"item() needs exactly one element, and the shape is {list(self.shape)}; reduce or index first")
        return self.collect().item()

    def __getitem__(self, key: Any) -> BlockTensor:
        return select(self, key)

    def take(self, order: Sequence[int], **settings: Any) -> BlockTensor:
        return take(self, order, **settings)

    def shuffle(self, seed: int, **settings: Any) -> BlockTensor:
        return shuffle(self, seed=seed, **settings)[0]

    def rechunk(self, grid: BlockGrid | Sequence[int], **settings: Any) -> BlockTensor:
        return rechunk(self, grid, **settings)

    def collect(self) -> Tensor:
        return collect(self)

    def collect_on(self, rank: int) -> Tensor | None:
        return collect_on(self, rank)

    def to_dtensor(self, mesh: DeviceMesh, placements: Sequence[Placement] | None = None) -> DTensor:
        return to_dtensor(self, mesh, placements)

    def apply(self, function: Callable[..., Tensor], *others: BlockTensor) -> BlockTensor:
        return apply(function, self, *others)

    def equal(self, other: Any) -> BlockTensor:
        """Where elements are equal, as bool. (`==` compares the values as objects, so that they can be keys.)"""
        return elementwise(operator.eq, self, other)

    def __neg__(self) -> BlockTensor:
        return elementwise(operator.neg, self)

    def __abs__(self) -> BlockTensor:
        return elementwise(operator.abs, self)

    __add__, __radd__ = _binary(operator.add)
    __sub__, __rsub__ = _binary(operator.sub)
    __mul__, __rmul__ = _binary(operator.mul)
    __truediv__, __rtruediv__ = _binary(operator.truediv)
    __floordiv__, __rfloordiv__ = _binary(operator.floordiv)
    __mod__, __rmod__ = _binary(operator.mod)
    __pow__, __rpow__ = _binary(operator.pow)
    __lt__, __le__ = _binary(operator.lt)[0], _binary(operator.le)[0]
    __gt__, __ge__ = _binary(operator.gt)[0], _binary(operator.ge)[0]

    # over dims, or over all; parts add up in the order of the blocks, for any number of ranks
    sum, mean, prod = _reduction("sum"), _reduction("mean"), _reduction("prod")
    min, max = _reduction("min"), _reduction("max")
    any, all = _reduction("any"), _reduction("all")


def _owners(grid: BlockGrid, owners: Owners, processes: Processes) -> tuple[int, ...]:
    if owners is None:
        return contiguous_owners(len(grid), processes.ranks)
    if len(owners) != len(grid) or not all(0 <= owner < processes.ranks for owner in owners):
        raise DataError(f"{len(grid)} blocks need as many owners from 0 to {processes.ranks - 1}, got {list(owners)}")
    return tuple(owners)


# New block tensors: of one value, from an array, from blocks, at random.


RANDOM: dict[str, Callable[[int, NDArray[np.uint64]], Floats]] = {"uniform": uniform_at, "normal": normal_at}
"""Distributions: uniform in [0, 1), standard normal."""


def full(
    shape: Sequence[int],
    value: complex,
    *,
    grid: BlockGrid | Sequence[int],
    dtype: torch.dtype = torch.float32,
    owners: Owners = None,
    processes: Processes | None = None,
) -> BlockTensor:
    """An array of one value. grid: a BlockGrid, or counts of equal blocks along the dims. Raises DataError: a grid that does
    not divide or is of another shape, wrong owners, more than there is memory for."""

    def fill(extent: tuple[slice, ...]) -> Tensor:
        return torch.full([along.stop - along.start for along in extent], value, dtype=dtype)

    return _made("full", _grid(shape, grid), dtype, owners, processes, fill)


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
    """Random numbers of a row of RANDOM, drawn in float64 and rounded to `dtype`: the same array for a seed, whatever the grid,
    the owners and the number of processes. Raises DataError as `full`."""
    if distribution not in RANDOM:
        raise DataError(f"unknown distribution {distribution!r}{near_matches(distribution, RANDOM)}")
    if seed < 0 or not dtype.is_floating_point:
        raise DataError(f"random blocks need a seed >= 0 and a floating-point dtype, got {seed} and {dtype}")
    blocks_of = _grid(shape, grid)
    strides = np.cumprod([1, *blocks_of.shape[:0:-1]], dtype=np.uint64)[::-1]

    def draw(extent: tuple[slice, ...]) -> Tensor:
        position = np.zeros((1,) * len(extent), dtype=np.uint64)
        for dim, (along, stride) in enumerate(zip(extent, strides, strict=bool(extent))):
            steps = np.arange(along.start, along.stop, dtype=np.uint64) * stride
            position = position + steps.reshape([-1 if place == dim else 1 for place in range(len(extent))])
        drawn = np.asarray(RANDOM[distribution](seed, position))
        if distribution == "uniform":
            drawn = np.minimum(drawn, 1.0 - torch.finfo(dtype).eps / 2)  # rounding would make the largest ones 1
        return torch.from_numpy(np.asarray(drawn)).to(dtype)

    return _made("random", blocks_of, dtype, owners, processes, draw)


def from_array(
    array: NDArray[Any] | Tensor | None,
    *,
    grid: BlockGrid | Sequence[int],
    owners: Owners = None,
    processes: Processes | None = None,
    source: int | None = None,
) -> BlockTensor:
    """An array as blocks. Every rank passes the same array and copies its own blocks of it, so a memory-mapped file is read in
    part. With `source`, only that rank passes the array (the others None), and the blocks are sent from there.

    Raises DataError: as `full`; an array that torch has no dtype for; no array where one is needed.
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
    """The blocks that this process owns, by place: read from files of its own, for instance. Raises DataError: a block that is
    missing, not owned here, or of another shape or dtype."""
    processes = processes or in_one_process()
    numbered = {grid.number(place): block for place, block in blocks.items()}
    return BlockTensor(grid=grid, owners=_owners(grid, owners, processes), dtype=dtype, blocks=numbered, processes=processes)


def _from_one_rank(
    array: Any, grid: BlockGrid | Sequence[int], owners: Owners, processes: Processes, source: int
) -> BlockTensor:
    if not 0 <= source < processes.ranks:
        raise DataError(f"source must be a rank from 0 to {processes.ranks - 1}, got {source}")
    description, problem, blocks = None, "", {}
    if array is not None and processes.holds(source):
        try:
            description = [int(size) for size in array.shape], str(_dtype_of(array)).removeprefix("torch.")
            blocks[0] = array if isinstance(array, Tensor) else torch.from_numpy(np.asarray(array, dtype=_native(array)))
        except DataError as error:  # the others wait for what this rank tells them
            problem = str(error)
    description, problem = processes.gather((description, problem))[source if processes.rank is not None else 0]
    if problem:
        raise DataError(problem)
    if description is None:
        raise DataError(f"rank {source} is the source and passed no array")
    shape, dtype = description
    one = BlockTensor(
        grid=BlockGrid.even(tuple(shape), ()),
        owners=(source,),
        dtype=getattr(torch, dtype),
        blocks=blocks,
        processes=processes,
    )
    return rechunk(one, _grid(shape, grid), owners=owners)


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


# The same array in other blocks, and the whole array in one place.


def rechunk(
    tensor: BlockTensor,
    grid: BlockGrid | Sequence[int],
    *,
    owners: Owners = None,
    room_bytes: int = ROOM_BYTES,
) -> BlockTensor:
    """The array cut by `grid` (a BlockGrid, or counts of equal blocks). Without `owners`, neighbouring blocks are on one rank.

    Each pair of ranks exchanges what the old and new blocks have in common. A rank holds its old and new blocks, and at most
    `room_bytes` on their way out and as much on their way in. Raises DataError as `full`.
    """
    target = _grid(tensor.shape, grid)
    dealt = _owners(target, owners, tensor.processes)
    if target == tensor.grid and dealt == tensor.owners:
        return tensor
    return _moved("rechunk", tensor, target, dealt, overlaps(tensor, target, [(owner,) for owner in dealt]), room_bytes)


def _moved(
    what: str, tensor: BlockTensor, grid: BlockGrid, owners: tuple[int, ...], moves: Sequence[Move], room_bytes: int
) -> BlockTensor:
    """A tensor in new blocks, which the moves fill."""
    processes, dtype = tensor.processes, tensor.dtype
    check_room(f"{what} to shape {list(grid.shape)} in {dtype}", grid, owners, dtype.itemsize, processes)
    blocks = {
        number: torch.empty(grid.block_shape(place), dtype=dtype, device=processes.device)
        for number, place in enumerate(grid.places())
        if processes.holds(owners[number])
    }
    exchange(moves, tensor.blocks, blocks, processes, dtype=dtype, room_bytes=room_bytes)
    return replace(tensor, grid=grid, owners=owners, blocks=blocks)


def overlaps(tensor: BlockTensor, target: BlockGrid, receivers: Sequence[Iterable[int]]) -> list[Move]:
    """What the blocks of `tensor` and those of `target` have in common; block k of the target is made on ranks receivers[k]."""
    along = [_common(tensor.grid, target, dim) for dim in range(tensor.ndim)]
    moves = []
    for number, place in enumerate(target.places()):
        for pieces in itertools.product(*(common[piece] for common, piece in zip(along, place, strict=True))):
            source = tensor.grid.number([piece for piece, _, _ in pieces])
            read, write = tuple(part for _, part, _ in pieces), tuple(part for _, _, part in pieces)
            shape = tuple(part.stop - part.start for part in read)
            for rank in receivers[number]:
                moves.append(Move(source, read, tensor.owners[source], number, write, rank, shape))
    return moves


def _common(old: BlockGrid, new: BlockGrid, dim: int) -> list[list[tuple[int, slice, slice]]]:
    """By piece of the new grid: the pieces of the old one that share elements with it, and where in both."""
    before, by_piece = old.starts(dim), []
    for first, last in itertools.pairwise(new.starts(dim)):
        shared = []
        for piece in range(bisect_right(before, first) - 1, bisect_left(before, last)):
            begin, end = max(first, before[piece]), min(last, before[piece + 1])
            shared.append((piece, slice(begin - before[piece], end - before[piece]), slice(begin - first, end - first)))
        by_piece.append(shared)
    return by_piece


def collect(tensor: BlockTensor, *, room_bytes: int = ROOM_BYTES) -> Tensor:
    """The whole array on every rank, in messages of at most `room_bytes`. Raises DataError: it does not fit into the memory of
    a machine, once per rank there."""
    array = _collected(tensor, range(tensor.processes.ranks), room_bytes)
    assert array is not None
    return array


def collect_on(tensor: BlockTensor, rank: int, *, room_bytes: int = ROOM_BYTES) -> Tensor | None:
    """The whole array on one rank, None on the others. Raises DataError as `collect`."""
    if not 0 <= rank < tensor.processes.ranks:
        raise DataError(f"collect_on needs a rank from 0 to {tensor.processes.ranks - 1}, got {rank}")
    return _collected(tensor, (rank,), room_bytes)


def _collected(tensor: BlockTensor, ranks: Sequence[int], room_bytes: int) -> Tensor | None:
    processes, dtype = tensor.processes, tensor.dtype
    receivers = ranks[:1] if processes.rank is None else ranks
    size = math.prod(tensor.shape) * dtype.itemsize
    needed = [size if rank in receivers else 0 for rank in range(processes.ranks)]
    check_bytes(f"collecting an array of shape {list(tensor.shape)}", needed, processes, rows=(tensor.shape or (None,))[0])
    here = processes.rank is None or processes.rank in ranks
    blocks = {0: torch.empty(tensor.shape, dtype=dtype, device=processes.device)} if here else {}
    moves = overlaps(tensor, BlockGrid.even(tensor.shape, ()), [receivers])
    exchange(moves, tensor.blocks, blocks, processes, dtype=dtype, room_bytes=room_bytes)
    return blocks.get(0)


# Arithmetic with broadcasting, and any function of blocks.
#
# Types promote as in torch: an int64 tensor divided by an int is float32, unless torch's default dtype is another.


DIVISIONS = (operator.floordiv, operator.mod)
"""Of integers they fail where a block of the divisor has a zero, and other blocks may have none."""


def elementwise(function: Callable[..., Tensor], *operands: Any) -> BlockTensor:
    """`function`, element by element, of corresponding blocks, broadcast as in NumPy.

    Operands are block tensors, numbers, and arrays, which every rank passes alike. Where block tensors are cut differently, the
    later ones are cut as the first. Raises DataError: shapes that do not broadcast, block tensors on different processes; on
    every rank, integers divided by zero.
    """
    aligned = _Aligned(operands)
    grid, processes = aligned.grid, aligned.processes
    samples = [  # one element with as many dims: enough for torch to tell the dtype of the result
        torch.ones((1,) * operand.ndim, dtype=operand.dtype) if isinstance(operand, BlockTensor | Tensor) else operand
        for operand in aligned.operands
    ]
    try:
        dtype = function(*samples).dtype
    except (TypeError, RuntimeError) as error:
        types = [str(operand.dtype) if isinstance(operand, BlockTensor) else repr(operand) for operand in aligned.operands]
        raise DataError(f"torch cannot do this with {' and '.join(types)}: {error}") from error
    check_room(f"a result of shape {list(grid.shape)}", grid, aligned.owners, dtype.itemsize, processes)
    try:
        blocks, problem = {number: function(*aligned.inputs(number)) for number in aligned.owned()}, ""
    except RuntimeError as error:
        if function not in DIVISIONS:
            raise
        blocks, problem = {}, str(error)
    if function in DIVISIONS and not (dtype.is_floating_point or dtype.is_complex):
        problem = next(filter(None, processes.gather(problem)), "")
    if problem:
        raise DataError(f"torch cannot divide these integers ({problem}); divide x.to(torch.float64), or only where y is not 0")
    return BlockTensor(grid=grid, owners=aligned.owners, dtype=dtype, blocks=blocks, processes=processes)


def apply(function: Callable[..., Tensor], *operands: Any) -> BlockTensor:
    """`function(block, ...)` for every block; the result may have other shapes and another dtype.

    Operands are as for `elementwise`. The results must fit together to a grid: blocks of one row of blocks have equally many
    rows, and so on. The function must not communicate. Raises DataError: on every rank, if the function raised on one, or if
    the results are no grid.
    """
    aligned = _Aligned(operands)
    blocks, failed, cause = {}, "", None
    for number in aligned.owned():
        try:
            blocks[number] = torch.as_tensor(function(*aligned.inputs(number)))
        except Exception as error:
            failed, cause = f"block {list(aligned.grid.place(number))}: {type(error).__name__}: {error}", error
            break
    results = [(number, list(block.shape), str(block.dtype).removeprefix("torch.")) for number, block in blocks.items()]
    shapes: dict[int, tuple[int, ...]] = {}
    dtypes: set[torch.dtype] = set()
    for rank, (made, problem) in enumerate(aligned.processes.gather((results, failed))):
        if problem:
            where = "" if aligned.processes.rank is None else f" on rank {rank}"
            raise DataError(f"the applied function failed{where} at {problem}") from cause
        shapes |= {number: tuple(shape) for number, shape, _ in made}
        dtypes |= {getattr(torch, dtype) for _, _, dtype in made}
    grid = _grid_of_shapes(aligned.grid, shapes)
    if len(dtypes) > 1:
        raise DataError(f"the applied function returned several dtypes: {', '.join(sorted(map(str, dtypes)))}; convert to one")
    return BlockTensor(grid=grid, owners=aligned.owners, dtype=dtypes.pop(), blocks=blocks, processes=aligned.processes)


class _Aligned:
    """Operands cut as the first one that fills a dim, and the grid of the result with where each of its blocks is computed."""

    def __init__(self, operands: Sequence[Any]) -> None:
        self.operands = [_operand(operand) for operand in operands]
        tensors = [operand for operand in self.operands if isinstance(operand, BlockTensor)]
        self.processes = tensors[0].processes
        for other in tensors[1:]:
            if other.processes != self.processes:
                raise DataError(
                    f"the block tensors are on different processes: {self.processes} and {other.processes}; make both alike"
                )
        shapes = [tuple(operand.shape) for operand in self.operands if isinstance(operand, BlockTensor | Tensor)]
        try:
            shape = np.broadcast_shapes(*shapes)
        except ValueError as error:
            raise DataError(
                f"shapes {' and '.join(map(str, map(list, shapes)))} do not broadcast: counted from the last dim, sizes must "
                "be equal or 1; add a dim with x[:, None], or index"
            ) from error
        sizes = []
        for size, dim in zip(shape, range(-len(shape), 0), strict=True):
            filled = (tensor.grid.sizes[dim] for tensor in tensors if -dim <= tensor.ndim and tensor.shape[dim] == size)
            sizes.append(next(filled, (size,)))
        self.grid = BlockGrid(tuple(sizes))
        self.operands = [self._cut(operand) if isinstance(operand, BlockTensor) else operand for operand in self.operands]
        tensors = [operand for operand in self.operands if isinstance(operand, BlockTensor)]
        leading = max(tensors, key=lambda operand: len(operand.grid))
        self.owners = tuple(leading.owners[_number_in(leading.grid, place)] for place in self.grid.places())
        self._blocks = [self._fetched(operand) if isinstance(operand, BlockTensor) else {} for operand in self.operands]

    def owned(self) -> list[int]:
        return [number for number, owner in enumerate(self.owners) if self.processes.holds(owner)]

    def inputs(self, number: int) -> list[Any]:
        place = self.grid.place(number)
        parts = []
        for operand, blocks in zip(self.operands, self._blocks, strict=True):
            if isinstance(operand, BlockTensor):
                parts.append(blocks[_number_in(operand.grid, place)])
            elif isinstance(operand, Tensor) and operand.ndim:
                extent = self.grid.extent(place)[-operand.ndim :]
                sizes = zip(operand.shape, extent, strict=True)
                parts.append(operand[tuple(slice(None) if size == 1 else part for size, part in sizes)])
            else:
                parts.append(operand)
        return parts

    def _cut(self, tensor: BlockTensor) -> BlockTensor:
        """The tensor cut as the result along the dims that it fills."""
        pairs = zip(tensor.grid.sizes, self.grid.sizes[len(self.grid.sizes) - tensor.ndim :], strict=True)
        sizes = tuple(theirs if sum(theirs) != sum(result) else result for theirs, result in pairs)
        return tensor if sizes == tensor.grid.sizes else rechunk(tensor, BlockGrid(sizes))

    def _fetched(self, operand: BlockTensor) -> dict[int, Tensor]:
        """The operand's blocks that this rank needs: its own, and those of others that are broadcast or lie elsewhere."""
        needed = {
            (_number_in(operand.grid, place), owner) for place, owner in zip(self.grid.places(), self.owners, strict=True)
        }
        moves = [
            whole_block(number, operand.owners[number], rank, operand.grid.block_shape(operand.grid.place(number)))
            for number, rank in sorted(needed)
        ]
        return _with_others(moves, operand.blocks, self.processes, operand.dtype)


def _with_others(
    moves: Iterable[Move], blocks: Mapping[int, Tensor], processes: Processes, dtype: torch.dtype, room_bytes: int = ROOM_BYTES
) -> dict[int, Tensor]:
    """The blocks of this rank, and those that the moves bring here from other ranks."""
    between = [move for move in moves if move.sender != move.receiver]
    if processes.rank is None or not between:
        return dict(blocks)
    arriving = {
        move.target: torch.empty(move.shape, dtype=dtype, device=processes.device)
        for move in between
        if move.receiver == processes.rank
    }
    exchange(between, blocks, arriving, processes, dtype=dtype, room_bytes=room_bytes)
    return {**blocks, **arriving}


def _operand(operand: Any) -> Any:
    if isinstance(operand, BlockTensor | Tensor | int | float | complex):
        return operand
    try:
        return torch.as_tensor(operand)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"an operand is a block tensor, an array or a number; got {type(operand).__name__}") from error


def _number_in(grid: BlockGrid, place: tuple[int, ...]) -> int:
    """The block of an operand that a block of the result reads: piece 0 along the dims in which the operand is one piece."""
    pieces = place[len(place) - len(grid.counts) :]
    return grid.number([piece if count > 1 else 0 for count, piece in zip(grid.counts, pieces, strict=True)])


def _grid_of_shapes(grid: BlockGrid, shapes: Mapping[int, tuple[int, ...]]) -> BlockGrid:
    """The grid that blocks of these shapes make, at the places of `grid`."""
    dims = {len(shape) for shape in shapes.values()}
    if dims != {len(grid.sizes)}:
        raise DataError(
            f"applied functions must keep the {len(grid.sizes)} dims of a block, and one returned {sorted(dims)} dims; "
            "keep reduced dims with keepdim=True"
        )
    sizes = []
    for dim, count in enumerate(grid.counts):
        lengths: list[set[int]] = [set() for _ in range(count)]
        for number, shape in shapes.items():
            lengths[grid.place(number)[dim]].add(shape[dim])
        for piece, several in enumerate(lengths):
            if len(several) > 1:
                raise DataError(
                    f"the applied function returned blocks that are no grid: piece {piece} of dim {dim} has sizes "
                    f"{sorted(several)}; return equal sizes along a row of blocks"
                )
        sizes.append(tuple(length for (length,) in lengths))
    return BlockGrid(tuple(sizes))


# Reductions: each block is reduced by its rank, and one rank per result block joins the parts in the order of the blocks.
#
# So a result is the same, bit for bit, for any number of processes and any owners. Between grids the last digits may differ.


@dataclass(frozen=True, slots=True)
class Reduction:
    """part: a block reduced over dims, which stay as size 1. join: two parts. of_nothing: whether empty dims have a result."""

    part: Callable[[Tensor, tuple[int, ...]], Tensor]
    join: Callable[[Tensor, Tensor], Tensor]
    of_nothing: bool = True


def _product(block: Tensor, dims: tuple[int, ...]) -> Tensor:
    for dim in dims:  # torch multiplies along one dim at a time
        block = block.prod(dim, keepdim=True)
    return block


REDUCTIONS: dict[str, Reduction] = {
    "sum": Reduction(lambda block, dims: block.sum(dims, keepdim=True), torch.add),
    "prod": Reduction(_product, torch.mul),
    "min": Reduction(lambda block, dims: block.amin(dims, keepdim=True), torch.minimum, of_nothing=False),
    "max": Reduction(lambda block, dims: block.amax(dims, keepdim=True), torch.maximum, of_nothing=False),
    "any": Reduction(lambda block, dims: block.bool().any(dims, keepdim=True), torch.logical_or),
    "all": Reduction(lambda block, dims: block.bool().all(dims, keepdim=True), torch.logical_and),
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
    Raises DataError: no such dim or kind, minimum, maximum or mean of nothing, a dtype torch cannot reduce.
    """
    if kind not in REDUCTIONS and kind != "mean":
        raise DataError(f"unknown reduction {kind!r}{near_matches(kind, [*REDUCTIONS, 'mean'])}")
    listed = range(tensor.ndim) if dim is None else tuple(dim) if isinstance(dim, Iterable) else (operator.index(dim),)
    for number in listed:
        if not -tensor.ndim <= number < tensor.ndim:
            raise DataError(f"there is no dim {number} in shape {list(tensor.shape)}")
    dims = tuple(sorted({number % tensor.ndim for number in listed}))
    if len(dims) < len(listed):
        raise DataError(f"each dim is reduced once, got dims {list(listed)}")
    row = REDUCTIONS["sum" if kind == "mean" else kind]
    elements = math.prod(tensor.shape[number] for number in dims)
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
    if keepdim:
        return result
    grid = BlockGrid(tuple(pieces for place, pieces in enumerate(result.grid.sizes) if place not in dims))
    blocks = {number: block.reshape(grid.block_shape(grid.place(number))) for number, block in result.blocks.items()}
    return replace(result, grid=grid, blocks=blocks)


def _reduced(tensor: BlockTensor, row: Reduction, dims: tuple[int, ...], room_bytes: int) -> BlockTensor:
    """With the reduced dims as size 1. The parts for a result block are fetched a few at a time, and joined in order."""
    try:
        dtype = row.part(torch.ones(1, dtype=tensor.dtype), (0,)).dtype
    except (RuntimeError, TypeError) as error:
        raise DataError(f"torch cannot reduce {tensor.dtype} in this way: {error}") from error
    if not dims:
        return tensor.to(dtype)
    processes, old = tensor.processes, tensor.grid
    grid = BlockGrid(tuple((1,) if dim in dims else pieces for dim, pieces in enumerate(old.sizes)))
    owners = tuple(tensor.owners[old.number(place)] for place in grid.places())
    at_once = max(1, room_bytes // max(1, *bytes_by_owner(grid, owners, processes.ranks, dtype.itemsize)))
    runs = list(itertools.product(*(range(old.counts[dim]) for dim in dims)))
    joined: dict[int, Tensor] = {}
    for first in range(0, len(runs), at_once):
        moves, results = [], []
        for number, place in enumerate(grid.places()):
            for run in runs[first : first + at_once]:
                along = dict(zip(dims, run, strict=True))
                source = old.number([along.get(dim, piece) for dim, piece in enumerate(place)])
                moves.append(whole_block(source, tensor.owners[source], owners[number], grid.block_shape(place)))
                results.append(number)
        parts = {move.source: row.part(tensor.blocks[move.source], dims) for move in moves if processes.holds(move.sender)}
        parts = _with_others(moves, parts, processes, dtype, room_bytes)
        for number, move in zip(results, moves, strict=True):
            if processes.holds(move.receiver):
                part = parts[move.source]
                joined[number] = row.join(joined[number], part) if number in joined else part
    return BlockTensor(grid=grid, owners=owners, dtype=dtype, blocks=joined, processes=processes)


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
    owners: Owners = None,
    room_bytes: int = ROOM_BYTES,
) -> BlockTensor:
    """The rows `order` (positions along `dim`, repeats allowed; or bools, one per row) in this order.

    sizes: of the result's pieces along `dim`; None for as many as now, of equal size up to one. owners: of the result's blocks;
    None for neighbouring blocks on one rank. Raises DataError: a position outside, sizes that do not sum to the rows, more than
    there is memory for.
    """
    rows = _positions(tensor, order, dim)
    if sizes is None:
        sizes = balanced_sizes(len(rows), max(1, min(len(rows), tensor.grid.counts[dim])))
    if sum(sizes) != len(rows):
        raise DataError(f"the sizes {list(sizes)} sum to {sum(sizes)}, and {len(rows)} rows are taken; they must be equal")
    grid = BlockGrid((*tensor.grid.sizes[:dim], tuple(sizes), *tensor.grid.sizes[dim + 1 :]))
    dealt = _owners(grid, owners, tensor.processes)
    return _moved("taking rows", tensor, grid, dealt, _row_moves(tensor, grid, dealt, rows, dim), room_bytes)


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
    for new_piece, (first, last) in enumerate(itertools.pairwise(grid.starts(dim))):
        inside = pieces[first:last]
        by_source = np.argsort(inside, kind="stable")
        edges = np.flatnonzero(np.diff(inside[by_source])) + 1
        for written in np.split(by_source, edges) if len(inside) else ():
            old_piece = int(inside[written[0]])
            read_rows, write_rows = torch.from_numpy(rows[first + written] - starts[old_piece]), torch.from_numpy(written)
            for place in itertools.product(*others):
                old, new = ((*place[:dim], piece, *place[dim + 1 :]) for piece in (old_piece, new_piece))
                source, target, sizes = tensor.grid.number(old), grid.number(new), grid.block_shape(new)
                read, write = (
                    tuple(positions if along == dim else slice(0, size) for along, size in enumerate(sizes))
                    for positions in (read_rows, write_rows)
                )
                shape = (*sizes[:dim], len(written), *sizes[dim + 1 :])
                moves.append(Move(source, read, tensor.owners[source], target, write, owners[target], shape))
    return moves


def full_order(sizes: Sequence[int], seed: int) -> Ints:
    return permutation(sum(sizes), seed)


def block_order(sizes: Sequence[int], seed: int) -> Ints:
    """Whole blocks in random order, the rows of each as they are: cheap, and far from uniform."""
    starts = np.cumsum([0, *sizes])
    return np.concatenate([np.arange(starts[block], starts[block + 1]) for block in full_order([1] * len(sizes), seed)])


def pair_order(sizes: Sequence[int], seed: int) -> Ints:
    """Random pairs of blocks, the rows of each pair permuted among both; an odd block is permuted by itself. Each rank
    exchanges rows with few others. Not uniform: the rows of a block come from two blocks at most. Source: the pairwise shuffle
    of dislib's ds-tensor."""
    starts = np.cumsum([0, *sizes])
    blocks = full_order([1] * len(sizes), seed)
    order = np.empty(sum(sizes), dtype=np.int64)
    for first in range(0, len(blocks), 2):
        pair = blocks[first : first + 2]
        rows = np.concatenate([np.arange(starts[block], starts[block + 1]) for block in pair])
        order[rows] = rows[permutation(len(rows), seed, int(pair[0]))]
    return order


ORDERS: dict[str, Callable[[Sequence[int], int], Ints]] = {"full": full_order, "blocks": block_order, "pairs": pair_order}
"""Kinds of shuffling: the new order of the rows, from the sizes of the pieces and a seed."""


def shuffle(*tensors: BlockTensor, seed: int, kind: str = "full", room_bytes: int = ROOM_BYTES) -> tuple[BlockTensor, ...]:
    """The rows (dim 0) of all tensors in one random order, so that samples and targets stay paired. Pieces keep their sizes and
    ranks.

    The order depends on the seed and, for `full`, on the number of rows alone; for the other kinds on the pieces of the first
    tensor too. It never depends on the number of processes. Raises DataError: different lengths, an unknown kind, a seed below
    0.
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
# between ranks (`take`).


def select(tensor: BlockTensor, key: Any) -> BlockTensor:
    """`tensor[key]` by NumPy's rules. Blocks of which nothing is selected are left out. Raises DataError: a position outside,
    too many dims, two lists, a list separated from an int by other dims, a step of 0."""
    indices = _complete(tensor, key if isinstance(key, tuple) else (key,))
    lists = [place for place, index in enumerate(indices) if isinstance(index, np.ndarray)]
    if len(lists) > 1:
        raise DataError(f"index with one list at a time: x[list][:, list]; got {len(lists)} lists")
    if lists:
        places = [place for place, index in enumerate(indices) if isinstance(index, int | np.ndarray)]
        if places != list(range(places[0], places[-1] + 1)):
            raise DataError(
                "a list and an int with other dims between them are ambiguous; index in two steps: x[int][..., list]"
            )
        dim = sum(index is not None for index in indices[: lists[0]])
        tensor = take(tensor, indices[lists[0]], dim=dim)
        indices[lists[0]] = slice(None)
    return _basic(tensor, indices)


def _complete(tensor: BlockTensor, key: tuple[Any, ...]) -> list[Any]:
    """One index (int, slice or array) per dim, and None where a dim is added."""
    indices = [_index(index) for index in key]
    dots = [place for place, index in enumerate(indices) if index is Ellipsis]
    used = sum(index is not None and index is not Ellipsis for index in indices)
    if len(dots) > 1 or used > tensor.ndim:
        raise DataError(f"an index of {used} dims (and {len(dots)} times '...') for a tensor of shape {list(tensor.shape)}")
    missing: list[Any] = [slice(None)] * (tensor.ndim - used)
    place = dots[0] if dots else len(indices)
    return [*indices[:place], *missing, *indices[place + 1 :]]


def _index(index: Any) -> Any:
    if index is None or index is Ellipsis or isinstance(index, slice):
        return index
    if isinstance(index, BlockTensor):
        raise DataError("block tensors cannot be indices; collect() the index first")
    if isinstance(index, list | range | np.ndarray | Tensor):
        index = np.asarray(index)
        if index.ndim == 1:
            return index
        if index.ndim or index.dtype == np.bool_:
            raise DataError(f"a list of positions has one dim, got shape {list(index.shape)}")
    if isinstance(index, bool | np.bool_):
        raise DataError(f"a single {index} is not an index; use a list of bools, one per element of the dim")
    try:
        return operator.index(index)
    except TypeError as error:
        raise DataError(f"an index is an int, a slice, '...', None or a list of positions; got {index!r}") from error


Selected = tuple[int, range]
"""What is selected of one piece of a dim: the piece, and the positions in it."""


def _basic(tensor: BlockTensor, indices: list[Any]) -> BlockTensor:
    """What ints, slices and None select: local."""
    parts: list[list[Selected]] = []
    dims: list[int | None] = []  # of the tensor, by dim of the result; None: a new one
    for index in indices:
        if index is None:
            dims.append(None)
            continue
        if not isinstance(index, int):
            dims.append(len(parts))
        parts.append(_parts(tensor.grid, len(parts), index))
    grid = BlockGrid(tuple((1,) if dim is None else tuple(len(rows) for _, rows in parts[dim]) for dim in dims))
    owners, blocks = [], {}
    for number, place in enumerate(grid.places()):
        chosen = [along[0] for along in parts]
        for dim, piece in zip(dims, place, strict=True):
            if dim is not None:
                chosen[dim] = parts[dim][piece]
        source = tensor.grid.number([piece for piece, _ in chosen])
        owners.append(tensor.owners[source])
        if source in tensor.blocks:
            backwards = [dim for dim, (_, rows) in enumerate(chosen) if rows.step < 0]  # torch has no negative steps
            rising = [rows[::-1] if rows.step < 0 else rows for _, rows in chosen]
            block = tensor.blocks[source][tuple(slice(rows.start, rows.stop, rows.step) for rows in rising)]
            blocks[number] = (block.flip(backwards) if backwards else block).reshape(grid.block_shape(place))
    return replace(tensor, grid=grid, owners=tuple(owners), blocks=blocks)


def _parts(grid: BlockGrid, dim: int, index: int | slice) -> list[Selected]:
    """The pieces of a dim with something selected, in the order of the result; for nothing, one empty part."""
    size = grid.shape[dim]
    if isinstance(index, int):
        if not -size <= index < size:
            raise DataError(f"position {index} is outside dim {dim}, which has {size} elements")
        index = slice(index % size, index % size + 1)
    if index.step == 0:
        raise DataError("the step of a slice must not be 0")
    selected = range(*index.indices(size))
    rising = selected if selected.step > 0 else selected[::-1]
    parts = []
    for piece, (first, last) in enumerate(itertools.pairwise(grid.starts(dim))):
        inside = rising[bisect_left(rising, first) : bisect_left(rising, last)]
        if inside:
            parts.append((piece, range(inside.start - first, inside[-1] - first + 1, inside.step)))
    if not parts:
        return [(0, range(0))]
    return parts if selected.step > 0 else [(piece, rows[::-1]) for piece, rows in reversed(parts)]


def concatenate(tensors: list[BlockTensor], dim: int = 0) -> BlockTensor:
    """One after the other along a dim; blocks stay where they are, if all are cut alike along the other dims; else they are cut
    as the first one. Raises DataError for shapes or dtypes that do not go together."""
    if not tensors:
        raise DataError("concatenate needs at least one block tensor, got none")
    first = tensors[0]
    if not -first.ndim <= dim < first.ndim:
        raise DataError(f"there is no dim {dim} in shape {list(first.shape)}")
    dim %= first.ndim
    parts = []
    for other in tensors:
        shape = (*first.shape[:dim], *other.shape[dim : dim + 1], *first.shape[dim + 1 :])
        if other.shape != shape or other.dtype != first.dtype:
            raise DataError(
                f"along dim {dim}, {list(first.shape)} in {first.dtype} and {list(other.shape)} in {other.dtype} do not go "
                "together; the other dims and the dtype must be equal"
            )
        grid = BlockGrid((*first.grid.sizes[:dim], other.grid.sizes[dim], *first.grid.sizes[dim + 1 :]))
        parts.append(other if other.grid == grid else other.rechunk(grid))
    parts = [part for part in parts if part.shape[dim]] or parts[:1]
    pieces = tuple(size for part in parts for size in part.grid.sizes[dim])
    grid = BlockGrid((*first.grid.sizes[:dim], pieces, *first.grid.sizes[dim + 1 :]))
    owners, blocks, begun = [0] * len(grid), {}, 0
    for part in parts:
        for number, place in enumerate(part.grid.places()):
            target = grid.number([*place[:dim], place[dim] + begun, *place[dim + 1 :]])
            owners[target] = part.owners[number]
            if number in part.blocks:
                blocks[target] = part.blocks[number]
        begun += part.grid.counts[dim]
    return replace(first, grid=grid, owners=tuple(owners), blocks=blocks)


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

    placements: Shard(dim) or Replicate() per mesh dim, each tensor dim on one mesh dim at most; None for Shard(0), Shard(1),
    ... over the dims of the mesh. Raises DataError: other ranks, a placement of another kind, a dim that is not there or
    sharded twice.
    """
    from torch.distributed.tensor import DTensor, Shard

    chosen = tuple(map(Shard, range(mesh.ndim))) if placements is None else tuple(placements)
    dims = _sharded_dims(mesh, chosen, tensor.ndim)
    ranks = _ranks_of(mesh, tensor.processes)
    grid = _chunked(tensor.shape, mesh, dims)
    receivers: list[list[int]] = [[] for _ in range(len(grid))]
    needed = [0] * tensor.processes.ranks
    here: tuple[int, ...] = (0,) * mesh.ndim
    for coordinate, rank in ranks.items():
        number, shape = _shard(grid, dims, coordinate)
        if number is not None:
            receivers[number].append(rank)
        needed[rank] = math.prod(shape) * tensor.dtype.itemsize
        if tensor.processes.holds(rank):
            here = coordinate
    check_bytes(f"a DTensor of shape {list(tensor.shape)}", needed, tensor.processes)
    number, shape = _shard(grid, dims, here)
    local = torch.empty(shape, dtype=tensor.dtype, device=tensor.processes.device)
    targets = {} if number is None else {number: local}
    moves = overlaps(tensor, grid, receivers)
    exchange(moves, tensor.blocks, targets, tensor.processes, dtype=tensor.dtype, room_bytes=room_bytes)
    strides = tuple(math.prod(tensor.shape[dim + 1 :]) for dim in range(tensor.ndim))
    return DTensor.from_local(local, mesh, chosen, run_check=False, shape=torch.Size(tensor.shape), stride=strides)


def from_dtensor(dtensor: DTensor, *, group: ProcessGroup | None = None) -> BlockTensor:
    """The local shards of a DTensor as blocks, without a copy. What is replicated belongs to the first rank that holds it.
    group: the ranks of the mesh, left out for the default group.

    Raises DataError: a placement other than Shard and Replicate, a dim sharded twice, or a mesh of other ranks.
    """
    mesh, local = dtensor.device_mesh, dtensor.to_local()
    dims = _sharded_dims(mesh, dtensor.placements, dtensor.ndim)
    processes = on_process_group(group, device=str(local.device))
    grid = _chunked(tuple(dtensor.shape), mesh, dims)
    owner_of: dict[int, int] = {}
    for coordinate, rank in _ranks_of(mesh, processes).items():
        number, _ = _shard(grid, dims, coordinate)
        if number is not None:
            owner_of.setdefault(number, rank)
    owners = tuple(owner_of[number] for number in range(len(grid)))
    blocks = {number: local.detach() for number, owner in enumerate(owners) if owner == processes.rank}
    return BlockTensor(grid=grid, owners=owners, dtype=dtensor.dtype, blocks=blocks, processes=processes)


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
        places = {dist.get_rank(): 0} if processes.ranks == 1 else {}
    else:
        group = dist.get_process_group_ranks(processes.group or dist.group.WORLD)
        places = {rank: place for place, rank in enumerate(group)}
    if sorted(members) != sorted(places):
        where = f"ranks {sorted(places)}" if places else f"{processes.ranks} ranks of one process"
        raise DataError(
            f"the mesh has the ranks {sorted(members)} and the blocks are on {where}; "
            "both must be the same ranks of one process group"
        )
    coordinates = itertools.product(*map(range, mesh.mesh.shape))
    return {coordinate: places[rank] for coordinate, rank in zip(coordinates, members, strict=True)}


def _chunked(shape: Sequence[int], mesh: DeviceMesh, dims: Sequence[int | None]) -> BlockGrid:
    """The grid of the shards that are not empty."""
    block_shape = [max(1, size) for size in shape]
    for place, dim in enumerate(dims):
        if dim is not None:
            block_shape[dim] = max(1, -(-shape[dim] // mesh.size(place)))
    return BlockGrid.of_blocks(shape, block_shape)


def _shard(grid: BlockGrid, dims: Sequence[int | None], coordinate: Sequence[int]) -> tuple[int | None, tuple[int, ...]]:
    """The block of the rank at a coordinate of the mesh, None where its shard is empty; and the shape of the shard: 0 along the
    dims in which it lies behind the last block, and along no other."""
    places = {dim: index for dim, index in zip(dims, coordinate, strict=True) if dim is not None}
    place = [places.get(dim, 0) for dim in range(len(grid.counts))]
    shape = tuple(pieces[piece] if piece < len(pieces) else 0 for pieces, piece in zip(grid.sizes, place, strict=True))
    inside = all(piece < count for piece, count in zip(place, grid.counts, strict=True))
    return grid.number(place) if inside else None, shape
