"""A few gloo ranks forked from the process of the test: nothing is imported twice, so they start at once.

A CUDA build of torch starts threads with the first backward, and autograd refuses to work in a fork after that. There the ranks
are forked from a server that has imported everything and differentiated nothing.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.context import ForkContext, ForkServerContext
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.multiprocessing import set_sharing_strategy
from torch.multiprocessing.spawn import start_processes

from parsim.execute.job import Job
from parsim.execute.processes.group import error_path, read_error, worker_main
from parsim.execute.worker import main


def fork_context() -> ForkContext | ForkServerContext:
    """How ranks are forked here."""
    if not torch.backends.cuda.is_built():
        return get_context("fork")
    context = get_context("forkserver")
    context.set_forkserver_preload(["parsim.execute.worker"])
    set_sharing_strategy("file_system")  # the server takes 256 file descriptors, and each tensor would be one
    return context


def run_ranks(work: Callable[..., Any], world_size: int, folder: Path, *arguments: Any) -> list[Any]:
    """What `work(rank, *arguments)` returned on every rank of a gloo group; an exception on a rank is raised here."""
    start_processes(  # type: ignore[no-untyped-call]
        _rank, args=(work, world_size, folder, arguments), nprocs=world_size, start_method=fork_context().get_start_method()
    )
    return [torch.load(folder / f"result-{rank}.pt") for rank in range(world_size)]


def _rank(rank: int, work: Callable[..., Any], world_size: int, folder: Path, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)  # a thread pool does not survive a fork
    store = dist.FileStore(str(folder / "store"), world_size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    torch.save(work(rank, *arguments), folder / f"result-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_job(job_path: Path, *, timeout_s: float = 500.0) -> None:
    """Every rank of the job, as `launch` would run it: the worker's own main function, with the variables that torchrun sets.

    Left out: the launcher, which `test_launch` tests, and 4 s of imports per rank. Raises AssertionError if a rank fails.
    """
    world_size = Job.load(job_path).world_size
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = fork_context()
    # A rank that is forked while the store looks up the address of another inherits the resolver's lock, and waits for ever.
    all_forked = context.Event()
    arguments = [(rank, world_size, store.port, job_path, all_forked) for rank in range(world_size)]
    ranks = [context.Process(target=_worker, args=own) for own in arguments]
    until = time.monotonic() + timeout_s
    try:
        for process in ranks:
            process.start()
        all_forked.set()
        running = list(ranks)
        while running and time.monotonic() < until:
            wait([process.sentinel for process in running], timeout=until - time.monotonic())
            failed = [rank for rank, process in enumerate(ranks) if process.exitcode]
            assert not failed, _failure(job_path, failed[0])
            running = [process for process in running if process.exitcode is None]
        assert not running, f"the ranks did not end within {timeout_s} s"
    finally:
        for process in ranks:
            if process.pid is not None and process.exitcode is None:
                process.kill()
                process.join()
        del store  # a failure keeps this frame; with the store's thread alive, ranks forked later would wait for ever


def _failure(job_path: Path, rank: int) -> str:
    record = read_error(error_path(job_path.parent, rank))
    return f"rank {rank} failed" + ("" if record is None else f": {record.message}\n{record.traceback}")


def _worker(rank: int, world_size: int, port: int, job_path: Path, all_forked: Event) -> NoReturn:
    all_forked.wait()
    torch.set_num_threads(1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "MASTER_PORT": port}
    names = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.update({**{name: str(value) for name, value in place.items()}, **names})
    sys.argv = ["parsim.execute.worker", str(job_path)]
    worker_main(main)
