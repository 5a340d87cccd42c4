"""Datasets of one's own: any torch dataset trains under any plan as one process reads it, with and without workers."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import parsim
from experiments.common.equality import even_plan
from parsim.data import dataset_for
from parsim.data.samples import MapSamples, Samples, StreamSamples, order_of
from parsim.errors import DataError, FactoryError, NoSplitError
from parsim.execute.loading import Loader, WorkerBatches, batch_to_score
from parsim.execute.processes import heartbeat
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.model.trace.memory import LiveBytes
from parsim.plans.mesh import Mesh
from parsim.program.placed import PlanIndex
from tests.execute import own_data
from tests.execute.own_data import Noisy
from tests.execute.small_plans import MLP, case
from tests.execute.test_bad_run import cpu_profile
from tests.execute.test_equality import assert_equal_to_one_process

HERE = "tests.execute.own_data"
SPEC = MLP.model_copy(update={"input_shape": (1, 8, 8)})


def load(name: str, split: str = "train", spec: ModelSpec = SPEC) -> Samples:
    return dataset_for(spec, f"{HERE}:{name}", root=None, split=split, seed=3)


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_plans_train_on_any_torch_dataset(tmp_path: Path) -> None:
    """Map-style with random noise, without and with workers; and iterable, over several passes."""
    cases = [
        replace(case(SPEC, Mesh(dp=2), microbatches=2), dataset=f"{HERE}:Noisy", workers=2),
        replace(case(SPEC, Mesh(pp=2), microbatches=2), dataset=f"{HERE}:Noisy"),
        replace(case(SPEC, Mesh(dp=2), zero_stage=2), dataset=f"{HERE}:stream"),
    ]
    assert_equal_to_one_process(cases, tmp_path, steps=8)


def test_a_sample_is_what_the_dataset_gives() -> None:
    data = load("Noisy")
    assert isinstance(data, MapSamples)
    plain = own_data.Noisy("train", seed=3)
    values = data.values(np.array([5, 2]))
    assert values["target"].tolist() == plain.labels[[5, 2]].tolist()
    assert np.abs(values["input:0"] - plain.images[[5, 2]].numpy()).max() < 1


def test_randomness_follows_seed_epoch_and_sample_alone() -> None:
    data = load("Noisy")
    before = random.getstate(), torch.get_rng_state()
    one, other = data.values(np.array([5, 2])), data.values(np.array([2, 5]))
    assert (one["input:0"] == other["input:0"][::-1]).all()
    assert not (one["input:0"] == data.values(np.array([5, 2]), 1)["input:0"]).all()
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_a_stream_goes_on_after_its_end_and_can_go_back() -> None:
    data = load("stream")
    assert isinstance(data, StreamSamples)
    order = order_of(data, 8, 0)
    steps = [data.values(order.indices(step)) for step in range(5)]
    again = data.values(order.indices(1))
    assert (again["input:0"] == steps[1]["input:0"]).all()
    assert (data.values(order.indices(4))["input:0"] == steps[4]["input:0"]).all()
    first, second = ({tuple(image.ravel()) for step in part for image in step["input:0"]} for part in (steps[:2], steps[3:]))
    assert not first & second  # another noise, and another order
    with pytest.raises(DataError, match=r"set training.steps"):
        len(data)
    assert len(data.whole()) == 20


def test_workers_read_in_order_and_begin_anew_elsewhere() -> None:
    def read(step: int, microbatch: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([step, microbatch])}

    batches = WorkerBatches(read, 2, 2)
    asked = [(0, 0), (0, 1), (1, 0), (7, 0), (7, 1), (8, 0), (2, 1), (3, 0)]
    assert [tuple(batches.read(*place)["x"].tolist()) for place in asked] == asked
    batches.close()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wide", r"x of sample 0 has shape \[1, 16, 16\], and the model takes \[1, 8, 8\]"),
        ("bytes_for_numbers", "is uint8, and the model takes float32; convert it"),
        ("class_too_high", "holds 10 to 10, and the model takes 0 to 9"),
        ("bare", r"sample 0 is a Tensor; return a tuple \(x, target\)"),
        ("number", "returned a int; return a dataset"),
        ("empty", "split 'train' has no samples"),
        ("needs_more", "needs the argument 'folder'; parsim gives split, root, seed"),
        ("nothing_there", "cannot be loaded"),
    ],
)
def test_what_is_wrong_is_one_message(name: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        load(name).values(np.array([0]))


def test_a_factory_that_raises_is_named() -> None:
    with pytest.raises(FactoryError, match=r"dataset raises raised FileNotFoundError: no such folder /data"):
        load("raises")


def test_a_generator_cannot_be_read_twice() -> None:
    data = load("spent")
    with pytest.raises(DataError, match="return an object with __iter__, not a generator"):
        data.values(np.arange(6))


def test_a_factory_without_splits_has_training_samples_alone() -> None:
    assert len(load("only_train")) == 48
    with pytest.raises(NoSplitError, match="has no split 'test'; let it take split="):
        load("only_train", "test")


def test_reading_samples_to_score_has_the_patience_of_preparing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a dataset of one's own a batch may take longer than --timeout, in which the rank computes nothing."""
    beats = tmp_path / "beats"
    heartbeat.create_beats(beats, 1)
    monkeypatch.setattr(heartbeat, "_pulses", [heartbeat.Pulse(beats, 0)])
    seen: list[heartbeat.Beat] = []

    class Told(Noisy):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            seen.extend(heartbeat.read_beats(beats, 1))
            return super().__getitem__(index)

    monkeypatch.setattr(own_data, "Told", Told, raising=False)  # a name of its own: datasets that were read once are kept
    values = batch_to_score(load("Told", "test"), np.arange(3), torch.float32, torch.device("cpu"), doing="scoring")
    assert values["input:0"].shape == (3, 1, 8, 8)
    assert {(beat.doing, beat.text) for beat in seen} == {(heartbeat.Doing.PREPARING, "scoring: reading samples")}
    (now,) = heartbeat.read_beats(beats, 1)
    assert (now.doing, now.text) == (heartbeat.Doing.WORKING, "scoring")


SLOW_TO_SCORE = """
[model]
name = "mlp"
args = { width = 16 }
input_shape = [1, 8, 8]
[cluster]
profile = "profile.json"
devices = 2
[training]
global_batch = 16
steps = 4
dataset = "tests.execute.own_data:SlowToScore"
[training.evaluation]
every = 2
[plan]
strategy = "dp"
"""


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_a_training_whose_scores_take_longer_than_the_timeout_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each validation, and the score at the end, reads for four times `--timeout` without computing; --resume does, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PARSIM_ALLOW_CODE", "1")
    Path("profile.json").write_text(json.dumps(cpu_profile()))
    Path("RUN.toml").write_text(SLOW_TO_SCORE)
    first = parsim.run("RUN.toml", out="kept", checkpoint_every=2, timeout_s=1.0)
    assert len(first.losses) == 4
    again = parsim.run("RUN.toml", out="kept", resume=True, timeout_s=1.0, overrides=["training.steps=6"])
    assert len(again.losses) == 6
    assert "test_loss" in json.loads(Path("kept/score.json").read_text())


def test_the_memory_of_a_step_leaves_out_what_a_dataset_keeps() -> None:
    """A sample may be a view of a tensor with all of them, which is alive with or without a step."""
    data = load("views")
    layout = PlanIndex(even_plan(SPEC, Mesh(), strategy="single", batch=16), load_model(SPEC))
    loader = Loader(data, order_of(data, 16, 1), layout, 0, dtype=torch.float32, device=torch.device("cpu"))
    with LiveBytes() as live:
        values = loader.batch(0)(0)
        assert live.peak_bytes < 10 * 16 * 64 * 4
    assert values["input:0"].shape == (16, 1, 8, 8)
