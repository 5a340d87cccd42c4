"""What the host of a GPU waits for in a step, and what stays on the device between steps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the torch extra")

import torch
from torch import Tensor, nn

from experiments.one_gpu.fake_peers import fake_rank
from parsim.execute import train as logging
from parsim.execute.checkpoint.checkpoint import restore_optimizer
from parsim.execute.cuda.gpu import MemoryCounters
from parsim.execute.cuda.streams import CudaStreams
from parsim.execute.measurement import RankRecord
from parsim.execute.optimizer import make_optimizer
from parsim.execute.streams import Operation
from parsim.execute.train import TrainingLog
from parsim.plans.mesh import Mesh
from parsim.work import LoadBatch, OptimizerStep
from tests.execute.interpreted import CPU, planned
from tests.execute.small_plans import MLP, case
from tests.execute.test_cuda_races import RELAXED
from tests.virtual_cuda import VirtualDriver


class Noted(CudaStreams[Any, Any]):
    """Attributes: launched: tasks in the order of their launches."""

    def __init__(self, driver: VirtualDriver) -> None:
        super().__init__(driver)
        self.launched: list[int] = []

    def _launch(self, task: int, stream: str, operation: Operation, on: Any) -> Any:
        self.launched.append(task)
        return super()._launch(task, stream, operation, on)


@pytest.mark.parametrize("ready", [True, False])
def test_the_next_batch_is_copied_before_the_host_may_wait_in_the_update(ready: bool) -> None:
    """With a scaled loss the host waits for all gradients there. A copy behind that was hidden beside the update alone. Samples
    that nobody has gathered yet are not waited for."""
    streams = Noted(VirtualDriver())
    with fake_rank(planned(case(MLP, Mesh(), microbatches=2)), 0, streams, CPU, torch.clone) as (graph, program, loader):
        for step in range(2):
            streams.launched.clear()
            batch, following = loader.batch(step), loader.following(step + 1)
            loader.settle()
            if not ready:
                following.is_ready = lambda: False  # type: ignore[attr-defined]
            program.step(batch, following)
        kinds = [type(graph.tasks[index].work) for index in streams.launched]
    update, last = kinds.index(OptimizerStep), len(kinds) - 1 - kinds[::-1].index(LoadBatch)
    assert (last < update) == ready
    assert kinds.count(LoadBatch) == 1


def test_losses_of_a_step_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for the device at every read."""
    read: list[Tensor] = []
    monkeypatch.setattr(Tensor, "item", lambda tensor: read.append(tensor) or tensor.tolist())
    with fake_rank(planned(case(MLP, Mesh(), microbatches=4)), 0, Noted(VirtualDriver()), CPU, torch.clone) as fake:
        loss, _ = fake.program.step(fake.loader.batch(0))
    assert loss > 0
    assert not read


def test_counters_begin_without_what_the_allocator_holds_of_other_work() -> None:
    """Rank 0 scores the whole model before its memory is counted; that would be its steps' memory."""
    asked: list[str] = []
    counters = MemoryCounters(torch.device("cuda", 0))
    counters._cuda = SimpleNamespace(  # type: ignore[assignment]
        empty_cache=lambda: asked.append("empty"), reset_peak_memory_stats=lambda _: asked.append("reset")
    )
    counters.forget_peaks()
    assert asked == ["empty", "reset"]


def test_norms_of_gradients_do_not_stay_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is an array of 512 bytes there: half a gigabyte in a million steps without a checkpoint."""
    monkeypatch.setattr(logging, "NORMS", 4)
    monkeypatch.setattr(logging, "gather_values", lambda own: [own])
    recipe = SimpleNamespace(tensorboard=False)
    stage = SimpleNamespace(rank=0, gradient_norm=None)
    entry: Any = SimpleNamespace(
        step_number=0, stage=stage, run=SimpleNamespace(recipe=recipe), learning_rates={"": 0.1}, record=RankRecord(rank=0)
    )
    log = TrainingLog(tmp_path, entry, 10)
    for step in range(10):
        log.begin_step(entry)
        stage.gradient_norm = torch.full((1,), step / 2, dtype=torch.float64)
        entry.record.losses.append(1.0)
        log.end_step(entry)
        assert sum(isinstance(norm, Tensor) for norm in log._norms) < 4
    log.write(entry, SimpleNamespace(rank=0), None)  # type: ignore[arg-type]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [f'"gradient_norm": {step / 2}' in line for step, line in enumerate(lines)] == [True] * 10


def test_decoupled_stages_go_on_with_values_on_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is read into the memory of the host. What waited there ended the first step of a GPU in an error."""
    with fake_rank(planned(RELAXED["stale"]()), 1, Noted(VirtualDriver()), CPU, torch.clone) as (_, program, loader):
        stale = program._stale
        assert stale is not None
        for step in range(8):
            stale.begin_step(step)
            batches = [max(0, stale.batch_of(number)) for number in (step, step + 1)]
            program.step(loader.batch(batches[0]), loader.following(batches[1]), script=program.script(step))
        saved = stale.own_state()
        kinds = {key.split("/")[0] for key in saved} | {key.split("/")[2] for key in saved if key.startswith("waiting/")}
        assert {"arrived", "inputs"} <= kinds
        monkeypatch.setattr(stale._stage, "device", torch.device("meta"))
        given: list[Tensor] = []
        stale.load_own(saved, 8, lambda batch, draw: given.extend(stale.arrived.values()), loader.batch)
        assert {tensor.device.type for tensor in [*given, *stale._arriving.values()]} == {"meta"}
        assert given


def test_nadam_s_product_stays_on_the_host_when_a_training_goes_on() -> None:
    """torch 2.13: `load_state_dict` of NAdam takes its product to the device of the parameter, where every update would wait
    to read it."""
    parameter = nn.Parameter(torch.empty(3, device="meta"))
    optimizer = make_optimizer("nadam", [parameter], 1e-3)
    moment = torch.empty(3, device="meta")
    saved = {"step": torch.tensor(2.0), "mu_product": torch.tensor(0.25), "exp_avg": moment, "exp_avg_sq": moment}
    restore_optimizer(optimizer, {"weight": parameter}, {"weight": saved})
    loaded = optimizer.state[parameter]
    assert loaded["exp_avg"].device.type == "meta"
    assert loaded["mu_product"].device == CPU
    assert float(loaded["mu_product"]) == 0.25
