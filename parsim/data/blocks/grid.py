"""How an array is cut into blocks, and which rank owns each block. Plain numbers: no torch, no data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parsim.errors import DataError

BlockPlace = tuple[int, ...]
"""The place of a block: its piece along every dim, counted from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGrid:
    """The sizes of the pieces along every dim; block (i, j, ...) has the i-th piece of dim 0, the j-th of dim 1, and so on.

    Blocks are numbered row by row. Every piece has at least one element, except that a dim of size 0 is one piece of size 0.
    """

    sizes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for dim, pieces in enumerate(self.sizes):
            if pieces != (0,) and (not pieces or min(pieces) < 1):
                raise DataError(f"the pieces of dim {dim} must be at least 1 each, got {list(pieces)}; leave out empty pieces")

    @classmethod
    def even(cls, shape: Sequence[int], counts: Sequence[int]) -> BlockGrid:
        """Equal blocks, `counts` of them along each dim; dims that `counts` leaves out are not cut.

        Raises:
            DataError: a count that does not divide its dim.
        """
        whole = _one_per_dim(shape, counts)
        for dim, (size, count) in enumerate(zip(shape, whole, strict=True)):
            if count < 1 or size % count:
                raise DataError(
                    f"{count} equal blocks need dim {dim} to be a multiple of {count}, and it has {size} elements; "
                    f"use {_divisors_near(size, count)} blocks, or BlockGrid.balanced, whose blocks differ by one"
                )
        return cls(sizes=tuple((size // count,) * count for size, count in zip(shape, whole, strict=True)))

    @classmethod
    def balanced(cls, shape: Sequence[int], counts: Sequence[int]) -> BlockGrid:
        """As `even`, but sizes may differ by one: the first blocks of a dim are the larger ones.

        Raises:
            DataError: more blocks than elements along a dim.
        """
        whole = _one_per_dim(shape, counts)
        for dim, (size, count) in enumerate(zip(shape, whole, strict=True)):
            if not 1 <= count <= max(1, size):
                raise DataError(f"dim {dim} has {size} elements, which make 1 to {max(1, size)} blocks; got {count}")
        return cls(sizes=tuple(balanced_sizes(size, count) for size, count in zip(shape, whole, strict=True)))

    @classmethod
    def of_blocks(cls, shape: Sequence[int], block_shape: Sequence[int]) -> BlockGrid:
        """Blocks of one shape, the last of each dim short where it does not divide."""
        if len(block_shape) > len(shape) or (block_shape and min(block_shape) < 1):
            raise DataError(
                f"a block shape needs at most {len(shape)} sizes, each at least 1; got {list(block_shape)} for {list(shape)}"
            )
        sizes = (*block_shape, *(max(1, size) for size in shape[len(block_shape) :]))
        return cls(
            sizes=tuple(
                tuple(min(size, whole - start) for start in range(0, whole, size)) or (0,)
                for whole, size in zip(shape, sizes, strict=True)
            )
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole array."""
        return tuple(map(sum, self.sizes))

    @property
    def counts(self) -> tuple[int, ...]:
        """Blocks along every dim."""
        return tuple(map(len, self.sizes))

    def __len__(self) -> int:
        return math.prod(self.counts)

    def places(self) -> Iterator[BlockPlace]:
        """The places of all blocks, in the order of their numbers."""
        return itertools.product(*map(range, self.counts))

    def number(self, place: Sequence[int]) -> int:
        """The number of the block at a place."""
        found = 0
        for count, piece in zip(self.counts, place, strict=True):
            found = found * count + piece
        return found

    def place(self, number: int) -> BlockPlace:
        """The place of a block."""
        found = []
        for count in reversed(self.counts):
            number, piece = divmod(number, count)
            found.append(piece)
        return tuple(reversed(found))

    def block_shape(self, place: Sequence[int]) -> tuple[int, ...]:
        return tuple(pieces[piece] for pieces, piece in zip(self.sizes, place, strict=True))

    def starts(self, dim: int) -> list[int]:
        """Where each piece of a dim begins, and at the end the size of the dim."""
        return [0, *itertools.accumulate(self.sizes[dim])]

    def extent(self, place: Sequence[int]) -> tuple[slice, ...]:
        """The elements of the whole array that a block holds."""
        first = [sum(pieces[:piece]) for pieces, piece in zip(self.sizes, place, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(first, self.block_shape(place), strict=True))


def balanced_sizes(size: int, count: int) -> tuple[int, ...]:
    """`size` as `count` sizes that differ by one at most, the larger ones first."""
    least, longer = divmod(size, count)
    return (least + 1,) * longer + (least,) * (count - longer)


def _divisors_near(size: int, count: int) -> str:
    """The next counts below and above that divide."""
    below = next((near for near in range(min(count, size), 0, -1) if size % near == 0), 1)
    above = next((near for near in range(max(1, count), min(size, 2 * abs(count) + 1000) + 1) if size % near == 0), None)
    return " or ".join(map(str, dict.fromkeys(entry for entry in (below, above) if entry is not None)))


def _one_per_dim(shape: Sequence[int], counts: Sequence[int]) -> tuple[int, ...]:
    if len(counts) > len(shape) or any(size < 0 for size in shape):
        raise DataError(f"a block grid has at most one count per dim of the array: got {list(counts)} for shape {list(shape)}")
    return (*counts, *(1,) * (len(shape) - len(counts)))


def contiguous_owners(count: int, ranks: int) -> tuple[int, ...]:
    """Neighbouring blocks on one rank, as evenly as possible: block k belongs to rank floor(k * ranks / count)."""
    return tuple(number * ranks // count for number in range(count))


def round_robin_owners(count: int, ranks: int) -> tuple[int, ...]:
    """Block k belongs to rank k modulo ranks."""
    return tuple(number % ranks for number in range(count))


def bytes_by_owner(grid: BlockGrid, owners: Sequence[int], ranks: int, itemsize: int) -> list[int]:
    """What the blocks of each rank take."""
    found = [0] * ranks
    for place, owner in zip(grid.places(), owners, strict=True):
        found[owner] += math.prod(grid.block_shape(place)) * itemsize
    return found


def shared_owners(count: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Neighbouring blocks on one rank, in numbers proportional to the shares; rank r gets shares[r] / sum(shares) of them.

    Raises:
        DataError: a share below 0, or none above 0.
    """
    if not shares or min(shares) < 0 or sum(shares) <= 0:
        raise DataError(f"shares must be at least 0, and one of them above; got {list(shares)}")
    edges = [round(count * part / sum(shares)) for part in itertools.accumulate(shares)]
    return tuple(rank for rank, (first, last) in enumerate(itertools.pairwise([0, *edges])) for _ in range(first, last))
