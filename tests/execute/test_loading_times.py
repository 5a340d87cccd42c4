"""Reading a dataset of the user's own is timed before the prediction: how long it takes, who waits for it, and what stays."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from parsim.app.functions import plan
from parsim.app.train import open_run, run
from parsim.costs.loading import MeasuredLoading, UnmeasuredLoading, own_loading_from
from parsim.data.datasets import dataset_for
from parsim.data.samples import Order, Samples, order_of
from parsim.errors import DataError
from parsim.execute.load_timing import BUDGET_S, ReaderRequest, merged, timed_loading
from parsim.model.spec import ModelSpec
from parsim.work import LoadBatch
from tests.execute import own_data
from tests.execute.own_data import SLEEP_S
from tests.execute.small_plans import MLP
from tests.execute.test_bad_run import cpu_profile

SPEC: ModelSpec = MLP.model_copy(update={"input_shape": (1, 8, 8)})
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
        data = dataset_for(SPEC, f"tests.execute.own_data:{name}", root=None, split="train", seed=3)
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


LOADING = MeasuredLoading(
    first_s=1e-3,
    again_s=1e-3,
    sample_s=2e-3,
    passing_s=0.0,
    handover_s=1e-4,
    workers=2,
    cores=4,
    core_share=0.5,
    sigma=0.05,
    repeat_sigma=0.0,
    global_batch=BATCH,
    batch=8,
    batches=30,
    samples=200,
    readers=2,
    taken_s=0.5,
    prepared_s=0.0,
    warm_up_s=0.0,
)


@pytest.mark.parametrize(("cores", "share"), [(2, 1.0), (3, 0.5), (4, 0.0), (64, 0.0)])
def test_workers_take_the_ranks_time_where_no_core_is_left(cores: int, share: float) -> None:
    assert replace(LOADING, cores=cores).crowding(2) == pytest.approx(share)


def test_what_was_measured_can_be_read_back() -> None:
    for found in (LOADING, UnmeasuredLoading(reason="so")):
        assert own_loading_from(json.loads(json.dumps(found.to_dict()))) == found


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "profile.json").write_text(json.dumps(cpu_profile()))
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
