"""A thread that reads the next samples, as on a GPU, leaves alone what the training draws from, and reads what is wanted."""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from numpy.typing import NDArray

from parsim.data import dataset_for
from parsim.data.samples import order_of
from parsim.execute import rank_run
from parsim.execute.cuda.streams import CudaStreams
from parsim.execute.job import RunSpec
from parsim.execute.loading import Loader
from parsim.execute.processes.group import ProcessPlace
from parsim.execute.rank_run import RankRun
from parsim.model.autograd import recompute as recomputing
from parsim.model.load import load_model
from parsim.plans.mesh import Mesh
from parsim.program.lower import lower
from parsim.program.placed import PlanIndex
from tests.execute import own_data
from tests.execute.interpreted import interpret
from tests.execute.own_data import Noisy
from tests.execute.small_plans import MLP, VIT, case
from tests.virtual_cuda import VirtualDriver

SPEC = MLP.model_copy(update={"input_shape": (1, 8, 8)})
CPU = torch.device("cpu")
STEPS = 3


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set while a sample of the dataset `Held` is read. Whoever trains draws its number while that is so, if it ever is."""
    event = threading.Event()

    class Held(Noisy):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            event.set()
            time.sleep(0.02)
            found = super().__getitem__(index)
            event.clear()
            return found

    monkeypatch.setattr(own_data, "Held", Held, raising=False)
    drawn = torch.randint

    def drawing(*args: object, **keywords: object) -> torch.Tensor:
        if args[0] == 2**62:
            event.wait(0.1)
        return drawn(*args, **keywords)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(torch, "randint", drawing)
    return event


def trained() -> tuple[list[int], list[torch.Tensor]]:
    """What each of some steps draws, and the state of the CPU's generator behind each."""
    of = case(SPEC, Mesh(), batch=4)
    run = RunSpec(
        name="run",
        model=of.spec,
        model_path="",
        plan=of.plan,
        optimizer="sgd",
        learning_rate=1e-3,
        dataset="tests.execute.own_data:Held",
        pin_memory=False,
    )
    place = ProcessPlace(rank=0, world_size=1, local_rank=0, local_world_size=1, attempt=0)
    entry = RankRun(run, PlanIndex(of.plan, of.model), lower(of.plan, of.model), place, {}, steps=STEPS)
    numbers, states = [], []
    for _ in range(STEPS):
        entry.step(keep=True)
        numbers.append(entry.stage.randomness.draw)
        states.append(torch.get_rng_state())
    entry.close()
    return numbers, states


def test_a_training_draws_the_same_numbers_whether_its_samples_are_read_ahead(
    reading: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dataset of one's own draws from the generators of the process, seeded for each sample."""
    in_turn = trained()
    monkeypatch.setattr(rank_run, "make_streams", lambda _: CudaStreams(VirtualDriver()))
    ahead = trained()
    assert ahead[0] == in_turn[0]
    assert all(torch.equal(one, other) for one, other in zip(ahead[1], in_turn[1], strict=True))


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputing_what_draws_nothing_leaves_generators_alone(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread may read samples meanwhile, whose random transformations would follow from the moment."""
    of = case(VIT, Mesh(), recompute=recompute)

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("the generator is another's")

    def none_kept(kept: recomputing.RecomputeInputs) -> contextlib.AbstractContextManager[None]:
        assert not kept.generators
        return contextlib.nullcontext()

    monkeypatch.setattr(recomputing, "_generators_of", none_kept)
    monkeypatch.setattr(torch.random, "fork_rng", refused)
    interpret(of, 0, VirtualDriver())


class Counted:
    """Samples that are read slowly, and counted."""

    def __init__(self) -> None:
        self.samples = dataset_for(SPEC, "synthetic", root=None, split="train", seed=0)
        self.types = self.samples.types
        self.read = 0

    def __len__(self) -> int:
        return len(self.samples)

    def values(self, indices: NDArray[np.int64], epoch: int = 0) -> dict[str, NDArray[np.generic]]:
        time.sleep(0.05)
        self.read += len(indices)
        return self.samples.values(indices, epoch)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_stage_that_reads_nothing_of_the_batch_gathers_nothing(rank: int) -> None:
    """The first stage reads inputs, the last targets; nobody would wait for what the one between them has read."""
    of = case(SPEC, Mesh(pp=3), batch=4)
    data = Counted()
    layout = PlanIndex(of.plan, load_model(SPEC))
    order = order_of(data, 4, 0)  # type: ignore[arg-type]
    loader = Loader(data, order, layout, rank, dtype=torch.float32, device=CPU, pin=torch.clone)  # type: ignore[arg-type]
    loader.following(1)
    loader.settle()
    assert data.read == (0 if rank == 1 else 4), "what is read ahead has been read when nothing reads any more"
    assert bool(layout.batch_layouts(rank)) == (rank != 1)
    loader.close()
