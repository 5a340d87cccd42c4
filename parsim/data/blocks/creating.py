"""New block tensors: of one value, from an array, from blocks, at random."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from parsim.arrays import Floats
from parsim.data.blocks.grid import BlockGrid, BlockPlace, contiguous_owners
from parsim.data.blocks.processes import Processes, in_one_process
from parsim.data.blocks.random_values import normal_at, uniform_at
from parsim.data.blocks.rechunking import rechunk
from parsim.data.blocks.room import check_room
from parsim.data.blocks.tensor import BlockTensor
from parsim.errors import DataError, near_matches

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
