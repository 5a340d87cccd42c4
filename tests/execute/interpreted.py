"""One rank of a plan, run in this process on a virtual GPU: real computation on the CPU, communication that brings nothing.

The process group is torch's "fake" one: collectives and transfers return at once and leave their buffers as they are. So the
numbers mean nothing; the order of launches, waits and records is that of a GPU rank.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from parsim.data import BatchOrder
from parsim.data.for_model import dataset_for
from parsim.execute.cuda.streams import CudaStreams
from parsim.execute.loading import Loader
from parsim.execute.runtime import RankProgram, required_groups
from parsim.execute.stage import StageReplica
from parsim.graph.lower import lower
from parsim.graph.plan_index import PlanIndex
from tests.execute.equality import Case
from tests.virtual_cuda import VirtualDriver

CPU = torch.device("cpu")


@contextlib.contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def interpret(case: Case, rank: int, driver: VirtualDriver, *, steps: int = 2) -> None:
    """`steps` steps of `rank`, every torch call of which is a launch on the driver's current stream."""
    model = case.model
    layout = PlanIndex(case.plan, model)
    graph = lower(case.plan, model)
    with fake_group(rank, case.plan.world_size):
        groups = {entry: dist.new_group(list(entry[1])) for entry in required_groups(graph)}
        stage = StageReplica(
            case.spec,
            layout,
            rank,
            optimizer=case.optimizer,
            learning_rate=case.learning_rate,
            dtype=torch.float32,
            seed=0,
            device=CPU,
        )
        data = dataset_for(case.spec, case.dataset, root=None, seed=0)
        order = BatchOrder(n=len(data), global_batch=case.plan.global_batch, seed=0)
        loader = Loader(data, order, layout, rank, dtype=torch.float32, device=CPU, pin=torch.clone)
        program = RankProgram(graph, stage, CudaStreams(driver), groups)
        with driver.watch_tensors(), contextlib.closing(loader):
            for step in range(steps):
                program.step(loader.batch(step), loader.following(step + 1))


def seeded(seed: int) -> random.Random:
    return random.Random(seed)
