"""A few gloo ranks forked from the process of the test: nothing is imported twice, so they start at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes


def run_ranks(work: Callable[..., Any], world_size: int, folder: Path, *arguments: Any) -> list[Any]:
    """What `work(rank, *arguments)` returned on every rank of a gloo group; an exception on a rank is raised here."""
    start_processes(  # type: ignore[no-untyped-call]
        _rank, args=(work, world_size, folder, arguments), nprocs=world_size, start_method="fork"
    )
    return [torch.load(folder / f"result-{rank}.pt") for rank in range(world_size)]


def _rank(rank: int, work: Callable[..., Any], world_size: int, folder: Path, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)  # a thread pool does not survive a fork
    store = dist.FileStore(str(folder / "store"), world_size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    torch.save(work(rank, *arguments), folder / f"result-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
