"""Who talks to whom in a hop: groups of tp ranks for the collective ones, pairs for the point-to-point ones."""

from __future__ import annotations

from parsim.errors import GraphError
from parsim.plans.redistribution import Hop


def hop_groups(hop: Hop, tp: int) -> tuple[tuple[int, ...], ...]:
    """The groups of tp ranks that each do one collective; within a group in the order of their pieces.

    all_gather_batch from v to w ways: in each block of w neighbours those that stand at the same place of their v, so that
    their pieces make up the block's. broadcast: everyone. Every other: the blocks of `ways` neighbours.
    """
    small, large = sorted((hop.source.ways, hop.target.ways))
    match hop.operation:
        case "all_gather_batch":
            return tuple(
                tuple(range(start + place, start + large, small)) for start in range(0, tp, large) for place in range(small)
            )
        case "broadcast":
            return (tuple(range(tp)),)
        case (
            "all_gather_dim"
            | "all_reduce"
            | "all_reduce_maximum"
            | "reduce_scatter_batch"
            | "reduce_scatter_dim"
            | "all_to_all"
        ):
            return tuple(tuple(range(start, start + large)) for start in range(0, tp, large))
    raise GraphError(f"hop {hop} is not a collective")


def hop_pairs(hop: Hop, tp: int) -> tuple[tuple[int, int], ...]:
    """(source, destination) tp ranks of every message, in the order they are issued."""
    match hop.operation:
        case "gather":
            return tuple((shard, hop.target.rank) for shard in range(tp) if shard != hop.target.rank)
        case "scatter":
            return tuple((hop.source.rank, shard) for shard in range(tp) if shard != hop.source.rank)
        case "move":
            return ((hop.source.rank, hop.target.rank),)
    raise GraphError(f"hop {hop} sends nothing point to point")
