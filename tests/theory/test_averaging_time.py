"""Shards, the event queue of asynchronous arrivals, and the epoch times of epoch averaging."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.relaxed.arrivals import (
    merge_events,
    pairwise_merge_s,
    ring_synchronisation_s,
)
from experiments.relaxed.sharded import shard_samples
from parsim.data.shards import shard_sizes
from parsim.errors import AlgorithmError, DataError

KINDS = ("iid", "label_sorted", "dirichlet")


@pytest.mark.parametrize("kind", KINDS)
@given(samples=st.integers(1, 200), workers=st.integers(1, 40), seed=st.integers(0, 50))
def test_shards_hold_every_sample_once_and_none_is_empty(kind: str, samples: int, workers: int, seed: int) -> None:
    targets = np.random.default_rng(seed).integers(0, 10, samples)
    if workers > samples:
        with pytest.raises(DataError, match="cannot share"):
            shard_samples(kind, targets, workers, seed=seed)
        return
    shards = shard_samples(kind, targets, workers, seed=seed, concentration=0.3)
    assert sorted(np.concatenate(shards).tolist()) == list(range(samples))
    assert min(map(len, shards)) >= 1
    assert len(shards) == workers


def test_label_sorted_shards_see_few_classes_and_iid_ones_all() -> None:
    targets = np.repeat(np.arange(10), 100)[np.random.default_rng(0).permutation(1000)]
    classes = {
        kind: np.mean([len(np.unique(targets[shard])) for shard in shard_samples(kind, targets, 10, concentration=0.1)])
        for kind in KINDS
    }
    assert classes["label_sorted"] == 1.0
    assert classes["iid"] == 10.0
    assert 1.0 < classes["dirichlet"] < 8.0


def test_large_concentration_is_nearly_even() -> None:
    targets = np.repeat(np.arange(4), 500)
    sizes = [len(shard) for shard in shard_samples("dirichlet", targets, 5, concentration=1e5)]
    assert max(sizes) - min(sizes) < 20


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=12), st.integers(0, 500))
def test_sizes_follow_proportions(proportions: list[float], more: int) -> None:
    samples = len(proportions) + more
    sizes = shard_sizes(samples, len(proportions), proportions)
    assert sizes.sum() == samples
    assert sizes.min() >= 1
    exact = np.array(proportions) / sum(proportions) * samples
    if exact.min() >= 1:
        assert np.abs(sizes - exact).max() <= 1.0 + 1e-9


def test_bad_proportions() -> None:
    with pytest.raises(DataError, match="one per worker"):
        shard_samples("iid", np.zeros(9), 3, proportions=[1.0, 2.0])
    with pytest.raises(DataError, match="did you mean"):
        shard_samples("labels_sorted", np.zeros(9), 3)


def test_equal_workers_arrive_in_turn() -> None:
    events = merge_events(lambda worker, epoch: 1.0, 3, merge_s=0.0, epochs=2)
    assert [(event.worker, event.epoch) for event in events] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    assert [event.read for event in events] == [0, 0, 0, 1, 2, 3]


def test_merges_are_exclusive_and_queue() -> None:
    events = merge_events(lambda worker, epoch: 1.0, 3, merge_s=0.25, epochs=1)
    assert [(event.ready_s, event.start_s, event.end_s) for event in events] == [(1, 1, 1.25), (1, 1.25, 1.5), (1, 1.5, 1.75)]


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 99), st.floats(0, 0.5))
def test_event_queue_invariants(workers: int, epochs: int, seed: int, merge_s: float) -> None:
    seconds = np.random.default_rng(seed).uniform(0.5, 2.0, (workers, epochs))
    events = merge_events(lambda worker, epoch: seconds[worker, epoch], workers, merge_s=merge_s, epochs=epochs)
    assert len(events) == workers * epochs
    for earlier, later in itertools.pairwise(events):
        assert later.start_s >= earlier.end_s
        assert later.ready_s >= earlier.ready_s, "first come, first served"
    for worker in range(workers):
        own = [event for event in events if event.worker == worker]
        assert [event.epoch for event in own] == list(range(epochs))
        for earlier, later in itertools.pairwise(own):
            assert later.ready_s == pytest.approx(earlier.end_s + seconds[worker, later.epoch])


def test_a_straggler_hardly_slows_merging_workers() -> None:
    """One of eight workers at half speed: the others lose nothing, so (7 + 0.5)/8 of the throughput stay."""
    step_s = np.array([2.0, *[1.0] * 7])
    events = merge_events(lambda worker, epoch: 10 * step_s[worker], 8, merge_s=0.01, total=800)
    until_s = events[-1].end_s
    assert len(events) / until_s / (8 / 10) >= 0.93 * (7 + 0.5) / 8
    counts = np.bincount([event.worker for event in events])
    assert counts[0] == pytest.approx(counts[1] / 2, abs=1.5)


def test_synchronisation_times() -> None:
    merge_s = pairwise_merge_s(4e6, bandwidth_bytes_per_s=1e9, memory_bytes_per_s=1e10)
    assert merge_s == pytest.approx(2 * 4e6 / 1e9 + 4e6 / 1e10)
    assert ring_synchronisation_s(1, 4e6, bandwidth_bytes_per_s=1e9) == 0.0
    assert ring_synchronisation_s(8, 4e6, bandwidth_bytes_per_s=1e9, latency_s=1e-5) == pytest.approx(14e-5 + 1.75 * 4e-3)


def test_bad_queues() -> None:
    with pytest.raises(AlgorithmError, match="either epochs or total"):
        merge_events(lambda worker, epoch: 1.0, 2)
    with pytest.raises(AlgorithmError, match="finite"):
        merge_events(lambda worker, epoch: float("nan"), 2, epochs=1)
