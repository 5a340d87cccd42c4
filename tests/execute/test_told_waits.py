"""A rank that waits for others between steps says so: the launcher would take it for one that hangs, and end the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from parsim.execute import evaluation as validation
from parsim.execute import mixing, rank_run
from parsim.execute.checkpoint import reshard
from parsim.execute.evaluation import Validation
from parsim.execute.job import EvaluationRule
from parsim.execute.mixing import MEAN, MixingRounds
from parsim.execute.processes import heartbeat
from parsim.execute.processes.heartbeat import Doing, Pulse, create_beats, read_beats
from parsim.execute.rank_run import RankRun, agreeing


@pytest.fixture
def doing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Doing]:
    """What this rank, which trains, tells the launcher at this moment."""
    path = tmp_path / "beats"
    create_beats(path, 1)
    own = Pulse(path, 0)
    monkeypatch.setattr(heartbeat, "_pulses", [own])
    own.begin(Doing.WORKING, "training", 3)
    return lambda: read_beats(path, 1)[0].doing


def test_a_rank_that_takes_weights_of_another_plan_waits(doing: Callable[[], Doing], monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights may take minutes over the slow link for which the plan is changed."""
    seen: list[Doing] = []
    monkeypatch.setattr(dist, "broadcast", lambda tensor, holder: seen.append(doing()))
    reshard._sent(reshard._Kind((2,), torch.float32), None, 1, torch.device("cpu"))
    assert seen == [Doing.WAITING]
    assert doing() is Doing.WORKING


def test_ranks_that_agree_on_an_overflow_wait(doing: Callable[[], Doing], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Doing] = []
    monkeypatch.setattr(dist, "all_reduce", lambda flag, op, group: seen.append(doing()))
    agreeing(None)(torch.zeros(1))  # type: ignore[arg-type]
    assert seen == [Doing.WAITING]


def test_replicas_that_take_the_mean_of_their_weights_wait(doing: Callable[[], Doing], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Doing] = []
    rounds: Any = MixingRounds.__new__(MixingRounds)
    rounds._stage, rounds._replicas = SimpleNamespace(layout=None, rank=0, parameters={}), 2
    rounds._groups, rounds.masses = {(MEAN, (0, 1)): None}, {}
    monkeypatch.setattr(mixing, "mixing_peers", lambda *_: [(0, 1)])
    monkeypatch.setattr(MixingRounds, "_buckets", lambda self: [SimpleNamespace(number=0, parameters=())])
    monkeypatch.setattr(MixingRounds, "_packed", lambda self, bucket: torch.zeros(1))
    monkeypatch.setattr(dist, "all_reduce", lambda flat, group: seen.append(doing()))
    assert rounds.mean_weights() == {}
    assert seen == [Doing.WAITING]


class Reached(Exception):
    """The rank has come so far."""


def test_what_comes_between_steps_has_more_time_than_a_step(
    doing: Callable[[], Doing], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To build another plan, and to make the samples of the validation, a rank may read files for longer than it may hang."""
    seen: list[Doing] = []

    def reached(*_: object) -> NoReturn:
        seen.append(doing())
        raise Reached

    entry: Any = SimpleNamespace(layout=SimpleNamespace(model=None), run=None)
    place: Any = SimpleNamespace(rank=0)
    monkeypatch.setattr(rank_run, "PlanIndex", reached)
    with pytest.raises(Reached):
        RankRun.switched(entry, None, place, None)  # type: ignore[arg-type]
    heartbeat.pulse().begin(Doing.WORKING, "training", 4)
    monkeypatch.setattr(validation, "run_dataset", reached)
    with pytest.raises(Reached):
        Validation(rule=EvaluationRule(), folder=Path("best"), every=1, steps=9).look(entry, place)
    assert seen == [Doing.PREPARING, Doing.PREPARING]
