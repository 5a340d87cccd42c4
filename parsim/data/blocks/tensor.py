"""BlockTensor: an array in blocks, each owned by a rank. A value: operations make new ones, and nothing is changed in place.

The methods are short names for the functions of this folder, where each is explained. On a process group every rank calls them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from parsim.data.blocks.grid import BlockGrid, bytes_by_owner
from parsim.data.blocks.processes import Processes
from parsim.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray
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
        from parsim.data.blocks.indexing import select

        return select(self, key)

    def take(self, order: Sequence[int], **settings: Any) -> BlockTensor:
        """Rows `order` in this order; see `shuffling.take`."""
        from parsim.data.blocks.shuffling import take

        return take(self, order, **settings)

    def shuffle(self, seed: int, **settings: Any) -> BlockTensor:
        """Rows in random order; see `shuffling.shuffle`."""
        from parsim.data.blocks.shuffling import shuffle

        return shuffle(self, seed=seed, **settings)[0]

    def rechunk(self, grid: BlockGrid | Sequence[int], **settings: Any) -> BlockTensor:
        """The same array in other blocks; see `rechunking.rechunk`."""
        from parsim.data.blocks.rechunking import rechunk

        return rechunk(self, grid, **settings)

    def collect(self) -> Tensor:
        """The whole array, on every rank; see `rechunking.collect`."""
        from parsim.data.blocks.rechunking import collect

        return collect(self)

    def collect_on(self, rank: int) -> Tensor | None:
        """The whole array on one rank, None on the others."""
        from parsim.data.blocks.rechunking import collect_on

        return collect_on(self, rank)

    def item(self) -> Any:
        """The only element, on every rank."""
        if math.prod(self.shape) != 1:
            raise DataError(f"item() needs exactly one element, and the shape is {list(self.shape)}; reduce or index first")
        return self.collect().item()

    def to_dtensor(self, mesh: DeviceMesh, placements: Sequence[Placement] | None = None) -> DTensor:
        """As torch's DTensor on a mesh of the same ranks; see `dtensors.to_dtensor`."""
        from parsim.data.blocks.dtensors import to_dtensor

        return to_dtensor(self, mesh, placements)

    def apply(self, function: Callable[..., Tensor], *others: BlockTensor) -> BlockTensor:
        """`function(block, ...)` for every block; see `elementwise.apply`."""
        from parsim.data.blocks.elementwise import apply

        return apply(function, self, *others)

    def _with(self, function: Callable[..., Any], *others: Any, reverse: bool = False) -> BlockTensor:
        from parsim.data.blocks.elementwise import elementwise

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
        from parsim.data.blocks.reducing import reduce_blocks

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
