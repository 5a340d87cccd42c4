"""Where ranks go on from: after they were ended while they wrote, under another plan, and when the training is over."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from parsim.commands.run import training_text
from parsim.execute import train as loop
from parsim.execute import worker
from parsim.execute.checkpoint import checkpoint
from parsim.execute.checkpoint.checkpoint import (
    Checkpoint,
    RankState,
    save_checkpoint,
    step_folders,
    step_of,
)
from parsim.execute.job import SCORE, Job, Switch
from parsim.execute.measurement import RankRecord
from parsim.execute.processes import exchange as clocks
from parsim.execute.processes.exchange import ClockLook
from parsim.execute.processes.group import ProcessPlace
from parsim.execute.processes.setup import Pinning
from parsim.execute.rank_run import RankRun
from parsim.execute.stage import StageReplica
from parsim.model.model import Model
from parsim.numeric import keep_nothing
from parsim.plans.mesh import Mesh
from parsim.program.lower import lower
from parsim.program.placed import PlanIndex
from tests.execute.rank_states import newest
from tests.execute.small_plans import MLP, case, run_spec

PLACE: Any = SimpleNamespace(rank=0)


# --- after ranks were ended while they wrote ---------------------------------------------------------------------------


class Resuming:
    """A rank that takes every checkpoint."""

    def __init__(self) -> None:
        self.step: int | None = None

    def resume(self, found: Checkpoint) -> None:
        self.step = found.step


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "done_by_rank_0", lambda place, work: work())
    monkeypatch.setattr(loop, "value_of_rank_0", lambda value: value)
    monkeypatch.setattr(loop, "gather_values", lambda value: [value])


def write(folder: Path, step: int, *, ranks: int = 2) -> None:
    """The parts of the first ranks of two."""
    for rank in range(ranks):
        save_checkpoint(folder, step, RankState(weights={"w": torch.ones(2)}), seed=0, rank=rank, world_size=2, keep=9)


def test_ranks_that_were_ended_in_their_first_checkpoint_begin_anew(alone: None, tmp_path: Path) -> None:
    """torch 2.13: torchrun starts ranks again that ended in their first checkpoint, and nobody else looks into the folder
    before."""
    write(tmp_path, 4, ranks=1)
    entry: Any = Resuming()
    loop._resume(entry, tmp_path, PLACE)
    assert entry.step is None
    assert step_folders(tmp_path) == []


def test_a_checkpoint_that_lacks_a_part_is_removed_and_the_one_before_counts(alone: None, tmp_path: Path) -> None:
    write(tmp_path, 2)
    write(tmp_path, 4, ranks=1)
    entry: Any = Resuming()
    loop._resume(entry, tmp_path, PLACE)
    assert entry.step == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002"]


def test_a_damaged_checkpoint_is_still_refused(alone: None, tmp_path: Path) -> None:
    from parsim.errors import ExecutionError

    write(tmp_path, 2)
    (tmp_path / "step-00000002" / "rank-0001.pt").write_bytes(b"x")
    entry: Any = Resuming()
    with (
        pytest.warns(UserWarning, match="is not used"),
        pytest.raises(ExecutionError, match=r"no checkpoint in .* can be used"),
    ):
        loop._resume(entry, tmp_path, PLACE)
    assert [step_of(path) for path in step_folders(tmp_path)] == [2]


# --- a training of one rank, in this process ---------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[ProcessPlace]:
    """The place of the only rank."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield ProcessPlace(rank=0, world_size=1, local_rank=0, local_world_size=1, attempt=0)
    dist.destroy_process_group()
    keep_nothing()


def job_of(folder: Path, **settings: Any) -> Job:
    item = case(MLP, Mesh(), microbatches=2)
    run = run_spec(item, folder, optimizer="adam", learning_rate=1e-3, dataset="digits")
    return Job(output=str(folder), mode="train", runs=(run,), warmup_steps=0, **settings)


PINNING = Pinning(core=None, threads=1, shared_by=1, first=False)


@pytest.mark.slow
def test_a_change_of_plan_lets_go_of_what_the_plan_before_held(
    group: ProcessPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights, gradients and optimizer state would fill a GPU that has room for one plan."""
    stages: list[weakref.ref[StageReplica]] = []
    alive: dict[int, int] = {}
    drawn: list[int] = []
    made, stepped = StageReplica.__init__, RankRun.step

    def make(self: StageReplica, *arguments: Any, **settings: Any) -> None:
        stages.append(weakref.ref(self))
        made(self, *arguments, **settings)

    def step(self: RankRun, *, keep: bool) -> None:
        stepped(self, keep=keep)
        alive[self.step_number] = sum(stage() is not None for stage in stages)
        drawn.append(self.stage.randomness.draw)

    monkeypatch.setattr(StageReplica, "__init__", make)
    monkeypatch.setattr(RankRun, "step", step)
    job = job_of(tmp_path, steps=6)
    (run,) = job.runs
    others = [replace(run.plan, microbatches=count) for count in (1, 4)]
    job = replace(job, switches=(Switch(step=2, plan=others[0]), Switch(step=4, plan=others[1])))
    gc.collect()
    worker._work(job, group, PINNING, 60.0)
    assert len(stages) == 3
    assert alive == dict.fromkeys(range(1, max(alive) + 1), 1)
    changing, drawn[:] = list(drawn), []
    keep_nothing()
    worker._work(job_of(tmp_path, steps=6), group, PINNING, 60.0)
    assert changing == drawn, "random numbers go on as without a change"


def test_a_record_holds_the_times_of_rank_0_s_clock(
    group: ProcessPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of this rank's machine is 1,000 s ahead before the training, and 1,003 s behind it."""
    looks = iter([ClockLook(0.0, 1000.0), ClockLook(1e9, 1003.0)])
    monkeypatch.setattr(clocks, "look", lambda: next(looks))
    rounds: list[tuple[float, float, int]] = []
    ended = RankRecord.on_clock

    def on_clock(self: RankRecord, seconds: Callable[[float], float]) -> RankRecord:
        rounds.extend(self.rounds)
        return ended(self, seconds)

    monkeypatch.setattr(RankRecord, "on_clock", on_clock)
    worker._work(job_of(tmp_path, steps=2), group, PINNING, 60.0)
    found = RankRecord.load(tmp_path / "run", 0)
    assert len(rounds) == len(found.rounds) == 2
    for own, other in zip(rounds, found.rounds, strict=True):
        assert other[0] == pytest.approx(own[0] - 1000.0 - 3e-9 * own[0], abs=1e-6)
        assert other[1] - other[0] == pytest.approx(own[1] - own[0], abs=1e-6)
    own_s = [entry.end_s for times in found.steps for entry in times]
    assert all(found.rounds[0][0] <= end_s <= found.rounds[-1][1] for end_s in own_s)


def test_a_checkpoint_holds_where_the_steps_draw_on(group: ProcessPlace, tmp_path: Path) -> None:
    """Whatever state the samples, which are read beside the steps, have left the generators of the process in."""
    (run,) = job_of(tmp_path, steps=4).runs
    layout = PlanIndex(run.plan, Model.load(tmp_path / "model.json"))
    first, second = (RankRun(run, layout, lower(run.plan, layout.model), group, {}, steps=4) for _ in range(2))
    first.step(keep=False)
    torch.manual_seed(11)
    first.save(tmp_path / "checkpoints")
    found = newest(tmp_path / "checkpoints")
    second.resume(found)
    drawn = first.stage.randomness.draw
    for one in (first, second):
        one.step(keep=False)
        one.close()
    assert first.stage.randomness.draw == second.stage.randomness.draw != drawn


# --- the end -----------------------------------------------------------------------------------------------------------


ENTRY: Any = SimpleNamespace(run=None, stage=SimpleNamespace(device=torch.device("cuda", 0)))
NOTHING: Any = None


def test_a_model_that_no_gpu_holds_as_a_whole_is_trained_and_not_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 scores the whole model beside its part of the training; a failure there would end a training that is done."""
    tried: list[int] = []

    def short(run: Any, state: Any, samples: Any, device: torch.device, *, at_once: int) -> dict[str, float]:
        tried.append(at_once)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 28.00 GiB")

    monkeypatch.setattr(loop, "score", short)
    monkeypatch.setattr(checkpoint, "latest_checkpoint", lambda folder: object())
    monkeypatch.setattr(checkpoint, "load_state", lambda found: NOTHING)
    monkeypatch.setattr(loop, "run_dataset", lambda run, split: NOTHING)
    with pytest.warns(UserWarning, match="the test samples were not scored: the whole model with one sample needs more memory"):
        loop._score_last(SimpleNamespace(output=str(tmp_path)), ENTRY, tmp_path, None, {})  # type: ignore[arg-type]
    assert tried == [64, 16, 4, 1]
    found = json.loads((tmp_path / SCORE).read_text())
    assert training_text("digits", {"losses": [], **found}).endswith(
        ", the whole model with one sample needs more memory than cuda:0 has left"
    )
    assert training_text("digits", {"losses": []}) == "no step was left to train, no test samples"


def test_fewer_samples_at_once_are_scored_where_more_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def needs(run: Any, state: Any, samples: Any, device: torch.device, *, at_once: int) -> dict[str, float]:
        if at_once > 4:
            raise RuntimeError("CUDA error: out of memory")
        return {"test_loss": float(at_once)}

    monkeypatch.setattr(loop, "score", needs)
    assert loop._scored_in_memory(ENTRY, NOTHING, NOTHING) == {"test_loss": 4.0}


def test_another_error_of_the_score_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> dict[str, float]:
        raise RuntimeError("expected 3 dimensions")

    monkeypatch.setattr(loop, "score", fails)
    with pytest.raises(RuntimeError, match="expected 3 dimensions"):
        loop._scored_in_memory(ENTRY, NOTHING, NOTHING)
