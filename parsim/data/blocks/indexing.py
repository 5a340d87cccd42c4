"""Indexing as in NumPy: ints, slices of any step, `...`, None, and one list of positions or of bools.

Ints, slices and None need no communication: every block keeps what is selected of it, on its rank. A list moves elements
between ranks (`shuffling.take`).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from parsim.data.blocks.grid import BlockGrid
from parsim.data.blocks.shuffling import take
from parsim.data.blocks.tensor import BlockTensor
from parsim.errors import DataError


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
