"""Ranks of a host build their modules at once, or in turns where the memory of the host does not hold all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from parsim.data.blocks.room import available_bytes
from parsim.execute.processes.exchange import gather_values, meet
from parsim.execute.processes.group import ProcessPlace

T = TypeVar("T")


def built_at_once(free_bytes: int | None, *, whole_bytes: int, kept_bytes: int, ranks: int) -> int:
    """How many ranks of a host may build at once; at least one, which is all that can be tried.

    Args:
        free_bytes: of the host; None: unknown, so all ranks may.
        whole_bytes: of the whole module, which a rank has while it builds. kept_bytes: what a rank keeps of it on the host.
        ranks: of this host.
    """
    if free_bytes is None or whole_bytes <= 0:
        return ranks
    return max(1, min(ranks, (free_bytes - ranks * kept_bytes) // whole_bytes))


def in_turns(place: ProcessPlace, build: Callable[[], T], *, whole_bytes: int, kept_bytes: int) -> T:
    """What `build` returns. Every rank calls it; `build` calls no collective.

    Args:
        whole_bytes, kept_bytes: as of `built_at_once`.
    """
    if place.world_size == 1:
        return build()
    ranks = place.local_world_size
    own = built_at_once(available_bytes(), whole_bytes=whole_bytes, kept_bytes=kept_bytes, ranks=ranks)
    told = gather_values([own, ranks])
    at_once = min(entry[0] for entry in told)
    turns = -(-max(entry[1] for entry in told) // at_once)
    if turns == 1:
        return build()
    built: list[T] = []
    for turn in range(turns):
        if place.local_rank // at_once == turn:
            built.append(build())
        meet()
    return built[0]
