"""The ranks that own blocks, and which of them this process is.

Without a process group, one process plays all ranks and holds all blocks. With one, each process holds the blocks of its rank.
Every operation on block tensors is the same in both cases; in a group, every rank calls it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from parsim.errors import DataError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """Ranks 0 .. ranks-1. `rank` is this process's; None where it plays all of them. `device` is where blocks lie."""

    ranks: int
    rank: int | None = None
    group: ProcessGroup | None = field(default=None, repr=False)
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise DataError(f"blocks need at least 1 rank to own them, got {self.ranks}")

    def holds(self, owner: int) -> bool:
        """Whether the blocks of rank `owner` are in this process."""
        return self.rank is None or owner == self.rank

    def gather(self, value: Any) -> list[Any]:
        """The small values of all ranks, by rank; [value] where one process plays them all.

        They travel as JSON, never as a pickle: tuples arrive as lists.
        """
        if self.rank is None:
            return [json.loads(json.dumps(value))]
        import torch
        import torch.distributed as dist

        text = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=self.device)
        lengths = torch.zeros(self.ranks, dtype=torch.int64, device=self.device)
        lengths[self.rank] = len(text)
        dist.all_reduce(lengths, group=self.group)
        padded = torch.zeros(int(lengths.max()), dtype=torch.uint8, device=self.device)
        padded[: len(text)] = text
        everyone = [torch.empty_like(padded) for _ in range(self.ranks)]
        dist.all_gather(everyone, padded, group=self.group)
        return [json.loads(bytes(found[:length].tolist())) for found, length in zip(everyone, lengths.tolist(), strict=True)]


def in_one_process(ranks: int = 1, *, device: str = "cpu") -> Processes:
    """All blocks in this process. `ranks` is the number of owners: workers that one process plays, for instance."""
    return Processes(ranks=ranks, device=device)


def on_process_group(group: ProcessGroup | None = None, *, device: str = "cpu") -> Processes:
    """One rank per process of a torch.distributed group; left out, the default group.

    Raises:
        DataError: no process group, or one that this process is not in.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise DataError("no process group; call torch.distributed.init_process_group first, or use in_one_process()")
    rank = dist.get_rank(group)
    if rank < 0:
        raise DataError(f"rank {dist.get_rank()} is not in this process group; only its members may hold blocks of it")
    return Processes(ranks=dist.get_world_size(group), rank=rank, group=group, device=device)
