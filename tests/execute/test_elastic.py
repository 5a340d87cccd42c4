"""`--elastic`: a training whose ranks die goes on by itself, and ends with the weights of one that nothing disturbed."""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch

from parsim.app import train
from parsim.app.ask import ask, with_every_rank
from parsim.app.config import load_config
from parsim.app.measured import Measured
from parsim.app.prediction import Prediction
from parsim.app.run_folder import RunFolder
from parsim.app.train import Survivors, check_options, on_devices, restarting
from parsim.errors import ConfigError, PlanError, RankLostError
from parsim.execute.checkpoint.checkpoint import latest_checkpoint
from parsim.execute.cuda.faults import visible_devices
from parsim.plans.synchronisation import parse_synchronisation
from tests.execute.test_bad_run import cpu_profile

STEPS = 24
RUN = """\
[model]
name = "mlp"
args = {{ width = 24 }}
[cluster]
profile = "profile.json"
devices = {ranks}
[training]
global_batch = 16
dataset = "mortal:MORTAL"
dtype = "float64"
optimizer = "AdamW"
learning_rate = 0.01
steps = 24
[plan]
{plan}
"""
MODULE = '''
"""Digits; rank VICTIM dies when it reads batch number BATCH of an attempt, TIMES times."""
import dataclasses
import os
import signal
from pathlib import Path
from parsim.data import DATASETS, Dataset, DataSource

READ = []
LEFT = Path(__file__).with_name("deaths")

class Mortal(Dataset):
    def values(self, indices, epoch=0):
        if len(indices) < 16 and os.environ.get("RANK") == "VICTIM" and LEFT.is_file():
            READ.append(1)
            left = int(LEFT.read_text())
            if left and len(READ) == BATCH:
                LEFT.write_text(str(left - 1))
                os.kill(os.getpid(), signal.SIGKILL)
        return Dataset.values(self, indices, epoch)

def load(ask):
    found = DATASETS["digits"].load(ask)
    return Mortal(**{field.name: getattr(found, field.name) for field in dataclasses.fields(found)})

MORTAL = DataSource(load=load)
'''
DP = 'strategy = "dp"\nzero_stage = 0'
PIPELINE = 'strategy = "custom"\nmesh = { pp = 2, dp = 2, tp = 1 }\nmicrobatches = 2'


def test_a_device_is_left_out_once_it_is_lost_or_ranks_have_died_on_it_twice() -> None:
    survivors = Survivors((3, 5, 7))
    assert survivors.after([1], device_lost=False) == (3, 5, 7)
    assert survivors.after([0], device_lost=False) == (3, 5, 7)
    assert survivors.after([1], device_lost=False) == (3, 7)
    assert survivors.after([1], device_lost=True) == (3,)
    for _ in range(4):
        assert survivors.after([0], device_lost=True) == (3,)
    hanging = Survivors((0, 1))
    for _ in range(5):
        assert hanging.after([0, 1], device_lost=False) == (0, 1), "a hang of all ranks blames no device"


def test_the_gpus_that_are_left_are_named_as_they_are_visible() -> None:
    assert visible_devices([0, 1, 2]) == ""
    assert visible_devices([0, 2]) == "0,2"
    assert visible_devices([0, 2], "4,5,7") == "4,7"
    assert visible_devices([1], "GPU-a,GPU-b") == "GPU-b"


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prediction:
    return question(tmp_path, monkeypatch, ranks=2, plan=DP)


def question(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, ranks: int, plan: str, victim: int = 1, batch: int = 7
) -> Prediction:
    monkeypatch.setenv("PARSIM_ALLOW_CODE", "1")
    monkeypatch.delitem(sys.modules, "mortal", raising=False)
    profile = cpu_profile()
    profile["devices"] = [{"index": index, "type": "core"} for index in range(ranks)]
    fits = profile["communication"]["fits"]
    profile["communication"]["fits"] = [
        {**fit, "operation": operation, "group_size": size}
        for fit in fits[:1]
        for operation in ("all_reduce", "send_recv", "reduce_scatter", "all_gather")
        for size in ((2,) if operation == "send_recv" else range(2, ranks + 1))
    ]
    (folder / "profile.json").write_text(json.dumps(profile))
    (folder / "mortal.py").write_text(MODULE.replace("VICTIM", str(victim)).replace("BATCH", str(batch)))
    (folder / "run.toml").write_text(RUN.format(ranks=ranks, plan=plan))
    return with_every_rank(ask(load_config(folder / "run.toml")).prediction)


class Attempts:
    """Stands for trainings: each raises its error."""

    def __init__(self, *errors: RankLostError) -> None:
        self.errors = list(errors)
        self.plans: list[Any] = []
        self.resumed: list[bool] = []
        self.told: list[str] = []

    def __call__(self, asked: Prediction, again: bool, told: Sequence[str]) -> Any:
        self.plans.append(asked.plan)
        self.resumed.append(again)
        self.told += told
        raise self.errors.pop(0)


def test_attempts_are_bounded_and_what_repeats_itself_is_not_tried_again(
    asked: Prediction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "resumption", lambda *_: type("Begun", (), {"step": 4, "warnings": ()}))
    folder = RunFolder(tmp_path / "kept")
    killed = RankLostError("rank 1 of 2 was killed. The checkpoint of step 4 of 24 is in x", [1])
    always = Attempts(*[killed] * 9)
    with pytest.raises(RankLostError, match="It was restarted 2 times"):
        restarting(always, asked, folder, steps=STEPS, max_restarts=2)
    assert always.resumed == [False, True, True]
    assert [plan.world_size for plan in always.plans] == [2, 2, 1]
    assert "restart 1 of at most 2" in always.told[0]
    assert "on 1 devices under" in always.told[1]
    warned = "warning: rank 1 of 2 was killed. The training continues automatically from step 4"
    assert capsys.readouterr().err.count(warned) == 2
    raised = Attempts(*[RankLostError("rank 0 of 2 failed: ValueError: x", [0], raised=True)] * 9)
    with pytest.raises(RankLostError, match="failed in the same way"):
        restarting(raised, asked, folder, steps=STEPS, max_restarts=5)
    assert len(raised.plans) == 2


def test_fewer_devices_get_another_plan_of_the_same_batch(asked: Prediction) -> None:
    assert on_devices(asked, (0, 1)) is asked
    found = on_devices(asked, (1,))
    assert [device.index for device in found.problem.cluster.devices] == [1]
    assert (found.plan.world_size, found.plan.global_batch) == (1, asked.plan.global_batch)


@pytest.mark.slow
def test_a_plan_by_hand_gives_way_to_a_search_where_devices_are_fewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = question(tmp_path, monkeypatch, ranks=4, plan=PIPELINE)
    found = on_devices(asked, (0, 1, 3))
    assert found.question.plan.strategy == "adaptive"
    assert found.plan.world_size <= 3


def test_options_that_exclude_one_another_are_refused(asked: Prediction) -> None:
    with pytest.raises(ConfigError, match="drop one of them"):
        check_options(elastic=True, adaptive=True, resume=False, out=None, checkpoint_every=0)
    with pytest.raises(ConfigError, match="max_restarts = -1"):
        check_options(elastic=True, max_restarts=-1, adaptive=False, resume=False, out=None, checkpoint_every=0)
    mixing = replace(asked.plan, synchronisation=parse_synchronisation("average/8"))
    result = replace(asked.evaluation.result, plan=mixing)
    with pytest.raises(PlanError, match="weights of their own"):
        on_devices(replace(asked, evaluation=replace(asked.evaluation, result=result)), (0,))


def reference(asked: Prediction, data: Any) -> dict[str, torch.Tensor]:
    """The weights of a training in one process."""
    from experiments.common.reference import train_reference

    training = asked.question.training
    found = train_reference(
        asked.question.model_spec,
        asked.plan,
        data,
        optimizer=training.optimizer,
        learning_rate=training.resolved_learning_rate,
        dtype=torch.float64,
        seed=training.seed,
        steps=STEPS,
    )
    return found.parameters


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_under_the_same_plan_not_a_bit_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One death, against a training that nothing disturbs: weights and the optimizer's state."""
    from parsim.app.train import run
    from parsim.execute.checkpoint.checkpoint import load_state

    question(tmp_path, monkeypatch, ranks=2, plan=DP, batch=9)
    monkeypatch.chdir(tmp_path)
    run("run.toml", out="whole", checkpoint_every=2, elastic=True)
    (tmp_path / "deaths").write_text("1")
    done = run("run.toml", out="kept", checkpoint_every=2, elastic=True)
    (restart,) = done.document["restarts"]
    assert restart["step"] > 0
    states = []
    for name in ("whole", "kept"):
        last = latest_checkpoint(tmp_path / name / "checkpoints")
        assert last is not None
        states.append(load_state(last))
    for name, value in states[0].weights.items():
        assert torch.equal(value, states[1].weights[name]), name
        for key, entry in states[0].optimizer[name].items():
            assert torch.equal(entry, states[1].optimizer[name][key]), (name, key)


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
@pytest.mark.parametrize(("ranks", "plan", "deaths"), [(2, DP, 2), (4, PIPELINE, 2)], ids=["two ranks", "four ranks"])
def test_ranks_that_die_at_a_random_step_cost_no_digit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, plan: str, deaths: int
) -> None:
    """The first death restarts the same plan, the second leaves a device out and trains under another one."""
    from parsim.app.train import run
    from parsim.data import dataset_for
    from parsim.execute.checkpoint.checkpoint import load_state

    rng = np.random.default_rng(ranks)
    victim = 1 if ranks == 2 else int(rng.integers(0, 2))  # a rank that reads the batch
    batch = int(rng.integers(3, 9))
    asked = question(tmp_path, monkeypatch, ranks=ranks, plan=plan, victim=victim, batch=batch)
    (tmp_path / "deaths").write_text(str(deaths))
    monkeypatch.chdir(tmp_path)
    done: Measured = run("run.toml", out="kept", checkpoint_every=2, elastic=True)
    assert (tmp_path / "deaths").read_text() == "0"
    restarts = done.document["restarts"]
    assert [len(entry["devices"]) for entry in restarts] == [ranks, ranks - 1]
    assert all(re.search(rf"rank {victim} of {ranks} was killed by SIGKILL", entry["failure"]) for entry in restarts)
    assert all(entry["planning_s"] < 60 for entry in restarts)
    assert restarts[0]["plan"] == asked.plan.summary() != restarts[1]["plan"]
    last = latest_checkpoint(tmp_path / "kept" / "checkpoints")
    assert last is not None
    assert last.step == STEPS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = dataset_for(asked.question.model_spec, "digits", root=None, split="train", seed=0)
    weights = load_state(last).weights
    for name, expected in reference(asked, data).items():
        assert torch.allclose(weights[name], expected, rtol=0, atol=1e-10), name
    assert not list((tmp_path / "kept").rglob("*.partial"))
