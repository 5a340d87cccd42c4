"""Four gloo ranks that stay for a whole test file and do what the test asks, so that Hypothesis can drive a process group."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from experiments.common.forked import fork_context

WAIT_S = 120
"""Starting four processes that import torch takes more than 20 s where much else runs."""


class RankPool:
    """`call(work, *arguments)`: what `work(*arguments)` returned on every rank. Work is a function of a module."""

    def __init__(self, ranks: int, folder: Path) -> None:
        self._stuck = ""  # why nothing more can be asked
        context = fork_context()
        pipes = [context.Pipe() for _ in range(ranks)]
        self._pipes: list[Connection] = [mine for mine, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(rank, ranks, folder, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def call(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        assert not self._stuck, self._stuck
        for pipe in self._pipes:
            pipe.send((work, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if pipe.poll(WAIT_S):
                answers.append(pipe.recv())
            else:
                self._stuck = f"rank {rank} did not answer within {WAIT_S} s"
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        assert not self._stuck, self._stuck
        return answers

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(0 if self._stuck else 10)
            if process.is_alive():
                process.kill()


def _serve(rank: int, ranks: int, folder: Path, pipe: Connection) -> None:
    torch.set_num_threads(1)  # a thread pool does not survive a fork
    store = dist.FileStore(str(folder / "store"), ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    while (asked := pipe.recv()) is not None:
        work, arguments = asked
        try:
            answer = work(*arguments)
        except Exception as error:
            answer = error
        pipe.send(answer)
    dist.barrier()
    os._exit(0)
