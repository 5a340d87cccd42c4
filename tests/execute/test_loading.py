"""Datasets of one's own and names that stand for files: what is read, by whom, when, and how long it takes."""

from __future__ import annotations

import contextlib
import importlib
import json
import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parsim
from experiments.common.equality import even_plan
from parsim.app.functions import plan
from parsim.app.train import open_run, run
from parsim.costs.loading import MeasuredLoading, UnmeasuredLoading, own_loading_from
from parsim.data import dataset_for
from parsim.data.samples import MapSamples, Order, Samples, StreamSamples, order_of
from parsim.errors import DataError, FactoryError, NoSplitError
from parsim.execute.load_timing import BUDGET_S, ReaderRequest, merged, timed_loading
from parsim.execute.loading import Loader, WorkerBatches, batch_to_score
from parsim.execute.processes import heartbeat
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.model.trace.memory import LiveBytes
from parsim.plans.mesh import Mesh
from parsim.program.placed import PlanIndex
from parsim.work import LoadBatch
from tests.execute import own_data
from tests.execute.own_data import SLEEP_S, Noisy
from tests.execute.small_plans import MLP, case
from tests.execute.test_bad_run import cpu_profile, write_profile
from tests.execute.test_equality import assert_equal_to_one_process

pytest.importorskip("torch", reason="needs the torch extra")

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from parsim.app.config import parse_config
from parsim.errors import ConfigError, CostError, ModelError, TraceError
from parsim.execute import rank_run
from parsim.execute.cuda.streams import CudaStreams
from parsim.execute.job import RunSpec
from parsim.execute.processes.group import ProcessPlace
from parsim.execute.rank_run import RankRun
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model import build as build_file
from parsim.model.autograd import recompute as recomputing
from parsim.model.build import interface_of
from parsim.model.formats import Numerics
from parsim.model.model import Model
from parsim.predict.problem import PlanningProblem
from parsim.program.lower import lower
from tests.execute.interpreted import interpret
from tests.execute.small_plans import VIT
from tests.unit.test_loading_prices import LOADING
from tests.virtual_cuda import VirtualDriver

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


# What a name stands for is read anew, a forward that fails under autocast alone is kept, and examples are followed.

WIDTH = 4


class Scatters(nn.Module):
    """Adds what autocast makes in half precision to what is in single."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.zeros_like(x, dtype=torch.int64)
        return x.new_zeros(x.shape).scatter_add(1, places, self.linear(x))


class Gated(nn.Module):
    """One of two ways, by the data."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.one(x) if x.sum() > 1e6 else torch.relu(self.two(x)))


def spec(name: str, **more: object) -> ModelSpec:
    return ModelSpec(name=f"{__name__}:{name}", input_shape=(WIDTH,), **more)  # type: ignore[arg-type]


def test_a_forward_that_fails_under_autocast_is_planned_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARSIM_MODEL_CACHE", "off")
    model = load_model(spec("Scatters", loss="mse"))
    assert all(component.half is None for component in model.components)
    assert "test_loading.py" in model.half_refused
    assert any("no autocast" in text for text in model.assumptions)
    assert Model.from_json(model.to_json()) == model
    cluster = cluster_from_profile(load_profile("dgx1-v100-32gb"))
    PlanningProblem(model=model, cluster=cluster, global_batch=8)
    with pytest.raises(CostError, match=r"'amp_bf16' runs the forward under autocast.*scatter.*set precision = \"fp32\""):
        PlanningProblem(model=model, cluster=cluster, global_batch=8, numerics=Numerics(precision="amp_bf16"))


def test_control_flow_is_a_key_of_the_run_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Model says which line follows the example; left out, the line is refused."""
    monkeypatch.setenv("PARSIM_MODEL_CACHE", "off")
    with pytest.raises(TraceError, match='control_flow="example"'):
        load_model(spec("Gated"))
    text = f"""
[model]
name = "{__name__}:Gated"
input_shape = [{WIDTH}]
control_flow = "example"
[cluster]
profile = "dgx1-v100-32gb"
[training]
global_batch = 8
"""
    config = parse_config(text)
    assert config.model_spec == spec("Gated", control_flow="example")
    assert ModelSpec.from_dict(config.model_spec.to_dict()) == config.model_spec
    assert parse_config(config.to_toml()).model_spec == config.model_spec
    model = load_model(config.model_spec)
    assert any("follows the example" in text and "test_loading.py" in text for text in model.assumptions)
    assert model.loss == "cross_entropy"
    with pytest.raises(ConfigError, match=r"model\.control_flow"):
        parse_config(text.replace('"example"', '"guess"'))
    with pytest.raises(ValueError, match="'refuse' or 'example'"):
        spec("Gated", control_flow="guess")


def test_a_changed_config_is_read_again(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the hf extra")
    from tests.hugging_face_configs import SMALL

    path = tmp_path / "config.json"
    outputs = []
    for vocabulary in (50, 60):
        path.write_text(json.dumps({**SMALL["gpt2"], "n_layer": 1, "vocab_size": vocabulary}))
        outputs.append(interface_of(ModelSpec(name=str(path))).output)
    assert outputs == [(16, 50), (16, 60)]


def test_a_changed_file_is_not_taken_for_what_was_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "nets_that_change.py"
    text = "from torch import nn\n\n\ndef net():\n    return nn.Sequential(nn.Linear(4, {}))\n"
    path.write_text(text.format(3))
    monkeypatch.syspath_prepend(str(tmp_path))
    net = ModelSpec(name="nets_that_change:net", input_shape=(4,))
    assert interface_of(net).output == (3,)
    path.write_text(text.format(55))
    with pytest.raises(ModelError, match=r"nets_that_change.py has changed since it was imported here.*importlib.reload"):
        load_model(net)
    importlib.invalidate_caches()
    importlib.reload(importlib.import_module("nets_that_change"))
    assert interface_of(net).output == (55,)


def test_one_load_builds_the_module_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PARSIM_MODEL_CACHE", str(tmp_path))
    built = []
    original = build_file.build_fake
    monkeypatch.setattr(build_file, "build_fake", lambda entry: (built.append(entry), original(entry))[1])
    build_file._kept_fake.clear()
    load_model(spec("Counted"))
    assert len(built) == 1


def test_a_load_in_bf16_leaves_what_one_for_autocast_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Weights in bf16 need no forward under autocast, and take a Model that has one where it is kept."""
    monkeypatch.setenv("PARSIM_MODEL_CACHE", str(tmp_path))
    narrow = load_model(spec("Counted"), weights="bfloat16")
    wide = load_model(spec("Counted"))
    assert all(component.half is None for component in narrow.components)
    assert all(component.half is not None for component in wide.components)
    assert [component.operators for component in narrow.components] == [component.operators for component in wide.components]


class Counted(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 6), nn.ReLU(), nn.Linear(6, 2))


# Reading a dataset of the user's own is timed before the prediction: how long it takes, who waits for it, and what stays.

TIMED_SPEC: ModelSpec = MLP.model_copy(update={"input_shape": (1, 8, 8)})
BATCH = 16

FILE = """\
[model]
name = "mlp"
input_shape = [1, 8, 8]
args = {{ width = 16, depth = 1 }}
[cluster]
profile = "profile.json"
devices = 2
[training]
dataset = "tests.execute.own_data:{dataset}"
global_batch = 16
steps = 12
workers = {workers}
[plan]
strategy = "custom"
mesh = {{ dp = 2 }}
"""


def request(name: str, **changes: Any) -> ReaderRequest:
    def load() -> tuple[Samples, Order]:
        data = dataset_for(TIMED_SPEC, f"tests.execute.own_data:{name}", root=None, split="train", seed=3)
        return data, order_of(data, BATCH, 3)

    usual = ReaderRequest(load=load, dtype=torch.float32, global_batch=BATCH, readers=1, workers=0, device="cpu")
    return replace(usual, **changes)


def work(samples: int, parts: int = 1) -> LoadBatch:
    return LoadBatch(samples=samples, size_bytes=0, parts=parts)


def test_a_read_takes_what_its_samples_sleep() -> None:
    """A sleep takes its time and, on a busy machine, somewhat more."""
    found = timed_loading(request("slow"))
    for samples in (1, 8, 16):
        assert SLEEP_S * samples <= found.read_s(work(samples)) <= 1.5 * SLEEP_S * samples + 0.02
    assert found.core_share < 0.5
    assert found.passing_s == 0
    assert found.taken_s < 2 * BUDGET_S


def test_every_rank_reads_all_of_an_iterable_dataset() -> None:
    found = timed_loading(request("slow_stream", readers=2))
    for samples in (4, 8):
        assert SLEEP_S * BATCH <= found.read_s(work(samples)) <= 1.5 * SLEEP_S * BATCH + 0.02
    assert found.passing_s > 3 * found.sample_s


def test_the_first_sample_is_named_and_counts_in_no_mean() -> None:
    found = timed_loading(request("slow_first"))
    assert found.warm_up_s >= 0.25
    assert found.read_s(work(BATCH)) <= 1.5 * SLEEP_S * BATCH + 0.02
    assert "; first sample 2" in found.text()


def test_nothing_of_this_process_changes() -> None:
    before = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist(), torch.get_num_threads()  # noqa: NPY002
    data = own_data.Noisy("train")
    timed_loading(replace(request("Noisy"), load=lambda: _made(data)))
    after = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist(), torch.get_num_threads()  # noqa: NPY002
    assert after[0] == before[0]
    assert torch.equal(after[1], before[1])
    assert after[2:] == before[2:]


def test_an_iterable_dataset_begins_anew_after_it_was_timed() -> None:
    load = request("stream").load
    timed_loading(request("stream"))
    data, order = load()
    fresh, _ = load()
    timed_loading(replace(request("stream"), load=lambda: (data, order)))
    assert (data.values(order.indices(0))["input:0"] == fresh.values(order.indices(0))["input:0"]).all()


def _made(dataset: own_data.Noisy) -> tuple[Samples, Order]:
    from parsim.data.samples import MapSamples

    described = request("Noisy").load()[0].described  # type: ignore[union-attr]
    data = MapSamples(dataset, described, split="train", seed=3)
    return data, order_of(data, BATCH, 3)


@pytest.mark.slow
def test_a_dataset_that_is_slower_than_the_time_there_is_has_a_wide_interval() -> None:
    found = timed_loading(request("glacial"))
    assert found.read_s(work(1)) >= 0.7
    assert found.sigma >= 0.25
    assert "few of them" in found.text()


@pytest.mark.parametrize(
    ("name", "said"),
    [("fatal", "it ended the process that read it"), ("raises", "raised FileNotFoundError: no such folder /data")],
)
def test_what_cannot_be_read_is_a_reason(name: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        timed_loading(request(name))


def entry(kind: str, samples: int, seconds: float, *, disturbed: bool = False) -> dict[str, Any]:
    return {"kind": kind, "samples": samples, "seconds": seconds, "cpu_s": seconds / 2, "disturbed": disturbed}


def test_the_line_through_the_reads_is_exact() -> None:
    """1 ms a read, 0.5 ms right behind another, 0.2 ms a sample; reads that were interrupted count nothing."""

    def reader(slowness: float) -> list[dict[str, Any]]:
        rows = [entry("whole", 8, 2.6e-3), entry("part", 1, 1.2e-3), entry("again", 1, 0.7e-3)] * 3
        rows = [{**row, "seconds": slowness * row["seconds"], "cpu_s": slowness * row["cpu_s"]} for row in rows]
        return [{"prepared_s": 0.1}, {"warm_up_s": 0.3}, *rows, entry("whole", 8, 1.0, disturbed=True)]

    found = merged([reader(0.9), reader(1.1)], global_batch=BATCH, workers=0)
    assert found.read_s(work(8)) == pytest.approx(2.6e-3)
    assert found.read_s(work(24, parts=3)) == pytest.approx(1e-3 + 2 * 0.5e-3 + 24 * 0.2e-3)
    assert found.core_share == pytest.approx(0.5)
    assert found.sigma == pytest.approx((0.05**2 + 0.1**2) ** 0.5)
    assert (found.batches, found.readers, found.warm_up_s) == (8, 2, 0.3)


@pytest.mark.parametrize(("cores", "share"), [(2, 1.0), (3, 0.5), (4, 0.0), (64, 0.0)])
def test_workers_take_the_ranks_time_where_no_core_is_left(cores: int, share: float) -> None:
    assert replace(LOADING, workers=2, cores=cores).crowding(2) == pytest.approx(share)


def test_what_was_measured_can_be_read_back() -> None:
    for found in (LOADING, UnmeasuredLoading(reason="so")):
        assert own_loading_from(json.loads(json.dumps(found.to_dict()))) == found


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_profile(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PARSIM_ALLOW_CODE", "1")
    return tmp_path


def test_a_plan_for_another_machine_reads_nothing(here: Path) -> None:
    (here / "run.toml").write_text(FILE.format(dataset="slow", workers=0))
    answer = plan(here / "run.toml")
    assert answer.problem.loading == UnmeasuredLoading(reason="profile two-cores is of another machine")
    assert "loading not measured: profile two-cores is of another machine" in str(answer)
    assert answer.to_dict()["loading"]["measured"] is False


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
@pytest.mark.parametrize(("workers", "expected_s"), [(0, 8 * SLEEP_S), (2, 4 * SLEEP_S)])
def test_a_step_takes_as_long_as_reading_was_timed_to_take(workers: int, expected_s: float, here: Path) -> None:
    """Nearly all of the step is reading, so its prediction is that of reading. Two workers of a rank halve it."""
    (here / "run.toml").write_text(FILE.format(dataset="slow", workers=workers))
    done = run(here / "run.toml", out=here / "out")
    predicted = done.prediction.step_s
    loading = done.prediction.problem.loading
    assert isinstance(loading, MeasuredLoading)
    assert predicted.median >= expected_s
    measured_s = done.comparison.step.measured_s
    assert 0.8 * predicted.median <= measured_s <= 1.2 * predicted.median + 0.015, "other work aside"
    assert done.document["loading"]["text"].startswith("loading measured: ")
    assert "loading" not in {finding["kind"] for finding in done.document["diagnosis"]["findings"]}
    again = open_run(here / "out")
    assert again.prediction.problem.loading == loading
    assert again.prediction.step_s.median == predicted.median


# A thread that reads the next samples, as on a GPU, leaves alone what the training draws from, and reads what is wanted.

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


class CountedStream:
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
    data = CountedStream()
    layout = PlanIndex(of.plan, load_model(SPEC))
    order = order_of(data, 4, 0)  # type: ignore[arg-type]
    loader = Loader(data, order, layout, rank, dtype=torch.float32, device=CPU, pin=torch.clone)  # type: ignore[arg-type]
    loader.following(1)
    loader.settle()
    assert data.read == (0 if rank == 1 else 4), "what is read ahead has been read when nothing reads any more"
    assert bool(layout.batch_layouts(rank)) == (rank != 1)
    loader.close()
