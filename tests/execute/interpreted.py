"""One rank of a plan, run in this process on a virtual GPU: real computation on the CPU, communication that brings nothing.

See `experiments/one_gpu/fake_peers.py`: numbers mean nothing; the order of launches, waits and records is that of a GPU rank.
"""

from __future__ import annotations

import torch

from experiments.common.equality import Case
from experiments.one_gpu.fake_peers import PlannedRun, fake_rank
from parsim.execute.cuda.streams import CudaStreams
from parsim.execute.loading import Loader
from parsim.execute.runtime import RankProgram
from tests.virtual_cuda import VirtualDriver

CPU = torch.device("cpu")


def planned(case: Case) -> PlannedRun:
    return PlannedRun(
        spec=case.spec,
        model=case.model,
        plan=case.plan,
        dataset=case.dataset,
        optimizer=case.optimizer,
        learning_rate=case.learning_rate,
    )


def interpret(case: Case, rank: int, driver: VirtualDriver, *, steps: int = 2) -> None:
    """`steps` steps of `rank`, every torch call of which is a launch on the driver's current stream."""
    with (
        fake_rank(planned(case), rank, CudaStreams(driver), CPU, torch.clone) as (_, program, loader),
        driver.watch_tensors(),
    ):
        run_steps(program, loader, steps)


def run_steps(program: RankProgram, loader: Loader, steps: int) -> None:
    """The first `steps` steps of a rank, each with the next batch loaded ahead."""
    stale = program._stale
    for step in range(steps):
        batches = [step, step + 1]
        if stale is not None:
            stale.begin_step(step)
            batches = [max(0, stale.batch_of(number)) for number in batches]
        program.step(loader.batch(batches[0]), loader.following(batches[1]), script=program.script(step))
