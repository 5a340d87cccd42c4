"""Pieces of parameters and buffers as a ParameterShard cuts them, and the whole again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parsim.errors import ModelError
from parsim.model.component import ParameterShard


def piece(tensor: Tensor, part: ParameterShard, shard: int, ways: int) -> Tensor:
    """Shard `shard` of `ways`: from each of the runs of dim `part.dim` its piece; a copy.

    Raises ModelError if the dim does not divide.
    """
    if part.size:
        return padded_piece(tensor, part.dim, shard, ways)
    entries = tensor.shape[part.dim]
    if part.runs:
        if sum(part.runs) != entries or any(size % ways for size in part.runs):
            raise ModelError(
                f"{part.name}: dim {part.dim} has {entries} entries in runs of {part.runs}, not all of which divide by {ways}"
            )
        runs = torch.split(tensor, list(part.runs), part.dim)
        return torch.cat([run.chunk(ways, part.dim)[shard] for run in runs], part.dim)
    size, rest = divmod(entries, part.blocks * ways)
    if rest:
        raise ModelError(f"{part.name}: dim {part.dim} has {entries} entries, which do not divide into {part.blocks} x {ways}")
    blocks = _split(tensor, part.dim, (part.blocks, ways, size))
    return blocks.select(part.dim + 1, shard).flatten(part.dim, part.dim + 1).clone()


def padded_piece(tensor: Tensor, dim: int, shard: int, ways: int) -> Tensor:
    """Piece `shard` of `ways` equal ones along `dim`; zeros where the tensor ends before the last piece does. A copy."""
    size = tensor.shape[dim]
    most = -(-size // ways)
    start = min(shard * most, size)
    stop = min(start + most, size)
    entries = tensor.narrow(dim, start, stop - start)
    if stop - start == most:
        return entries.clone(memory_format=torch.contiguous_format)
    padding = entries.new_zeros((*entries.shape[:dim], most - (stop - start), *entries.shape[dim + 1 :]))
    return torch.cat([entries, padding], dim)


def assemble(pieces: Sequence[Tensor], part: ParameterShard) -> Tensor:
    """The whole from the pieces of all shards in order: inverse of `piece`."""
    if part.runs:
        local = [torch.split(entry, [size // len(pieces) for size in part.runs], part.dim) for entry in pieces]
        return torch.cat([torch.cat(run, part.dim) for run in zip(*local, strict=True)], part.dim)
    if part.size:
        return torch.cat(list(pieces), part.dim).narrow(part.dim, 0, part.size)
    runs = [_split(entry, part.dim, (part.blocks, entry.shape[part.dim] // part.blocks)) for entry in pieces]
    return torch.stack(runs, dim=part.dim + 1).flatten(part.dim, part.dim + 2)


def _split(tensor: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
    return tensor.reshape(*tensor.shape[:dim], *sizes, *tensor.shape[dim + 1 :])
