"""To and from torch's DTensor.

DTensor cuts a dim over n ranks in chunks of ceil(size / n), as `torch.chunk` does: the last ranks may hold less, or nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parsim.data.blocks.exchange import ROOM_BYTES, exchange
from parsim.data.blocks.grid import BlockGrid
from parsim.data.blocks.processes import Processes, on_process_group
from parsim.data.blocks.rechunking import overlaps
from parsim.data.blocks.room import check_bytes
from parsim.data.blocks.tensor import BlockTensor
from parsim.errors import DataError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


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
