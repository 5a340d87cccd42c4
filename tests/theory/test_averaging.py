"""Merges, means and the outer optimizer against their closed forms."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.relaxed.arrivals import merge_events, pairwise_merge_s, ring_synchronisation_s
from experiments.relaxed.sharded import shard_samples
from parsim.data.shards import shard_sizes
from parsim.errors import AlgorithmError, DataError
from parsim.plans.mixing import (
    MERGES,
    Arrival,
    Merged,
    MergeRule,
    OuterOptimizer,
    arrival_weights,
    averaging_matrix,
    effective_workers,
    merge,
    merged_in_turn,
    participation_weights,
    turn_weight,
)


def merged_models(
    rule: MergeRule, start: np.ndarray, models: list[np.ndarray], shares: list[float] | None = None
) -> np.ndarray:
    state = Merged(weights=start)
    for number, model in enumerate(models):
        share = 1.0 if shares is None else shares[number]
        state = merge(state, Arrival(weights=model, start=start, staleness=number, share=share), rule)
    return state.weights


def test_half_gives_the_last_arrival_a_half_exactly() -> None:
    """So of one worker it halves the progress, and counts about three of however many there are."""
    assert arrival_weights(MergeRule(kind="half", workers=4), 4).tolist() == [1 / 16, 1 / 16, 1 / 8, 1 / 4, 1 / 2]
    assert arrival_weights(MergeRule(kind="half", workers=1), 1).tolist() == [0.5, 0.5]
    assert effective_workers(arrival_weights(MergeRule(kind="half", workers=40), 40)) == pytest.approx(3.0, rel=1e-9)
    assert effective_workers(np.full(40, 1 / 40)) == pytest.approx(40.0)


def test_a_round_of_turns_is_the_merges_one_after_another() -> None:
    model, *workers = np.eye(5)
    starts = [model] * 4
    half, after = merged_in_turn(MergeRule(kind="half", workers=4), Merged(weights=model), workers, starts, 3)
    assert half.weights.tolist() == after[-1].tolist() == [1 / 16, 1 / 16, 1 / 8, 1 / 4, 1 / 2]
    assert after[0].tolist() == [1 / 2, 1 / 2, 0, 0, 0]
    running, _ = merged_in_turn(MergeRule(kind="running", workers=4), Merged(weights=model), workers, starts, 3)
    np.testing.assert_allclose(running.weights, [0, 1 / 4, 1 / 4, 1 / 4, 1 / 4], atol=1e-15)


def test_buffered_changes_move_the_model_when_the_buffer_is_full() -> None:
    """FedBuff of 2 of 3 workers: in round 0 the second arrival moves the model, in round 1 the first and the third."""
    model, *workers = np.eye(4)
    rule = MergeRule(kind="buffered", workers=3, buffer=2, rate=0.5)
    state, after = merged_in_turn(rule, Merged(weights=model), workers, [model] * 3, 0)
    moved = model + 0.25 * (workers[0] + workers[1] - 2 * model)
    for goes_on, expected in zip(after, (model, moved, moved), strict=True):
        np.testing.assert_allclose(goes_on, expected, atol=1e-15)
    state, after = merged_in_turn(rule, state, workers, after, 1)
    first = moved + 0.25 * ((workers[2] - model) + (workers[0] - model))
    np.testing.assert_allclose(after[0], first, atol=1e-15)
    np.testing.assert_allclose(after[2], first + 0.25 * ((workers[1] - moved) + (workers[2] - moved)), atol=1e-15)
    weights = [turn_weight(rule, number, worker) for number in range(2) for worker in range(3)]
    assert weights == [0.0, 0.25, 0.0, 0.25, 0.0, 0.25]


@pytest.mark.parametrize("kind", ["half", "running", "staleness"])
def test_turns_are_what_equal_workers_do_by_arrival(kind: str) -> None:
    """The event queue of workers that are equally fast: their order, and how late their work is, round after round."""
    rule = MergeRule(kind=kind, workers=3, rate=0.6, exponent=0.5)
    state, units = Merged(weights=np.eye(13)[0]), np.eye(13)[1:]
    for place, event in enumerate(merge_events(lambda worker, epoch: 1.0, 3, merge_s=0.01, epochs=4)):
        number, worker = divmod(place, 3)
        assert (event.epoch, event.worker) == (number, worker)
        arrival = Arrival(weights=units[place], start=units[0], staleness=place - event.read)
        before, state = state.weights, merge(state, arrival, rule)
        weight = turn_weight(rule, number, worker)
        np.testing.assert_allclose(state.weights, before + weight * (units[place] - before), atol=1e-15)


@given(st.permutations(range(5)))
def test_order_of_arrival_permutes_the_weights_of_half(order: list[int]) -> None:
    unit = np.eye(5)
    weights = merged_models(MergeRule(kind="half", workers=5), np.zeros(5), [unit[worker] for worker in order])
    assert weights[list(order)].tolist() == [2.0 ** (place - 5) for place in range(5)]


@given(st.integers(1, 20), st.integers(0, 1000))
def test_running_is_the_mean_of_the_round(workers: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    models = list(rng.standard_normal((workers, 7)))
    got = merged_models(MergeRule(kind="running", workers=workers), rng.standard_normal(7), models)
    assert np.abs(got - np.mean(models, axis=0)).max() <= 1e-12
    again = merged_models(MergeRule(kind="running", workers=workers), got, models + models)
    assert np.abs(again - np.mean(models, axis=0)).max() <= 1e-12, "each round begins anew"


@given(st.lists(st.integers(1, 100), min_size=1, max_size=12), st.integers(0, 1000))
def test_running_and_buffered_weigh_by_samples(samples: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    models, start = list(rng.standard_normal((len(samples), 3))), rng.standard_normal(3)
    shares = (np.array(samples) / np.mean(samples)).tolist()
    wanted = np.array(samples) / sum(samples) @ np.array(models)
    for kind in ("running", "buffered"):
        rule = MergeRule(kind=kind, workers=len(samples), buffer=len(samples))
        assert np.abs(merged_models(rule, start, models, shares) - wanted).max() <= 1e-11


def test_running_is_exact_in_fractions() -> None:
    """The rules use + - * by a number alone: with exact numbers the mean is exact."""
    models = [Fraction(3), Fraction(5), Fraction(10)]
    state = Merged(weights=Fraction(7))
    for model in models:
        state = merge(state, Arrival(weights=model, start=Fraction(7), share=Fraction(1)), MergeRule(kind="running", workers=3))
    assert state.weights == Fraction(6)


def test_staleness_lowers_the_weight_of_late_work() -> None:
    rule = MergeRule(kind="staleness", workers=4, rate=0.8, exponent=0.5)
    for staleness in (0, 3, 8):
        arrival = Arrival(weights=np.ones(1), start=np.zeros(1), staleness=staleness)
        assert merge(Merged(weights=np.zeros(1)), arrival, rule).weights[0] == pytest.approx(0.8 * (1 + staleness) ** -0.5)
    for share, weight in ((0.5, 0.4), (1.25, 1.0), (2.0, 1.0)):  # of samples; never more than all of what arrives
        arrival = Arrival(weights=np.ones(1), start=np.zeros(1), share=share)
        assert merge(Merged(weights=np.zeros(1)), arrival, rule).weights[0] == pytest.approx(weight)


def test_a_full_buffer_is_the_mean_weighted_by_samples() -> None:
    """Whatever the shares of the arrivals that fill it add up to."""
    rule, state = MergeRule(kind="buffered", workers=4, buffer=2, rate=0.5), Merged(weights=np.array([10.0]))
    for weights, share in ((16.0, 1.5), (4.0, 0.25)):
        state = merge(state, Arrival(weights=np.array([weights]), start=np.array([8.0]), share=share), rule)
    assert state.weights[0] == pytest.approx(10 + 0.5 * (8 * 1.5 - 4 * 0.25) / 1.75)


def test_buffered_waits_for_its_buffer() -> None:
    rule = MergeRule(kind="buffered", workers=4, buffer=2)
    state = Merged(weights=np.array([10.0]))
    state = merge(state, Arrival(weights=np.array([4.0]), start=np.array([2.0])), rule)
    assert state.weights.tolist() == [10.0]
    state = merge(state, Arrival(weights=np.array([7.0]), start=np.array([3.0])), rule)
    assert state.weights.tolist() == [13.0], "10 plus the mean of the changes 2 and 4"
    assert state.buffered is None


@pytest.mark.parametrize("kind", MERGES)
@given(arrivals=st.integers(1, 12))
def test_weights_of_every_merge_sum_to_one(kind: str, arrivals: int) -> None:
    weights = arrival_weights(MergeRule(kind=kind, workers=arrivals), arrivals)
    assert weights.sum() == pytest.approx(1.0, abs=1e-12)
    assert weights.min() >= (-1e-12 if kind != "buffered" else -float(arrivals)), "buffered adds whole changes: g_0 may be < 0"


@given(st.integers(0, 1000))
def test_outer_sgd_of_rate_one_is_averaging(seed: int) -> None:
    previous, mean = np.random.default_rng(seed).standard_normal((2, 5))
    moved, velocity = OuterOptimizer(lr=1.0, momentum=0.0, nesterov=False).step(previous, mean, None)
    assert np.abs(moved - mean).max() <= 1e-15
    assert np.array_equal(velocity, previous - mean)


def test_outer_optimizer_is_torchs_sgd() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    weight = torch.nn.Parameter(torch.tensor(rng.standard_normal(4)))
    reference = torch.optim.SGD([weight], lr=0.7, momentum=0.9, nesterov=True)
    ours, velocity = weight.detach().numpy().copy(), None
    for _ in range(6):
        mean = ours + rng.standard_normal(4)
        weight.grad = torch.tensor(ours - mean)
        reference.step()
        ours, velocity = OuterOptimizer().step(ours, mean, velocity)
        assert np.abs(ours - weight.detach().numpy()).max() <= 1e-13


def test_participation_is_a_pure_function_and_averages_the_drawn() -> None:
    first, again = (participation_weights(10, 0.3, 4, seed=1) for _ in range(2))
    assert np.array_equal(first, again)
    assert sorted(first.tolist())[-3:] == pytest.approx([1 / 3] * 3)
    assert np.count_nonzero(first) == 3
    assert any(not np.array_equal(first, participation_weights(10, 0.3, r, seed=1)) for r in range(5))
    weighted = participation_weights(4, 1.0, 0, weights=np.array([0.1, 0.2, 0.3, 0.4]))
    assert weighted == pytest.approx([0.1, 0.2, 0.3, 0.4])
    counts = sum(participation_weights(8, 0.25, r) > 0 for r in range(400))
    assert counts.min() > 60, "every worker is drawn about a quarter of the time"


def test_replicas_that_count_for_nothing_are_not_drawn() -> None:
    """Before, a round that drew them alone divided by 0, and weights became NaN."""
    weights = np.array([1.0, 0.0, 0.0, 0.0])
    for number in range(20):
        assert participation_weights(4, 0.25, number, weights=weights).tolist() == weights.tolist()


def test_averaging_matrix() -> None:
    assert np.array_equal(averaging_matrix(4), np.full((4, 4), 0.25))
    assert np.array_equal(averaging_matrix(2, np.array([0.25, 0.75])), [[0.25, 0.75], [0.25, 0.75]])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MergeRule(kind="halve", workers=2), "did you mean half"),
        (lambda: MergeRule(kind="buffered", workers=2, buffer=3), "buffer"),
        (lambda: participation_weights(4, 0.0, 0), "fraction"),
        (lambda: OuterOptimizer(momentum=1.0), "outer"),
        (lambda: averaging_matrix(4, np.array([0.5, 0.3, 0.1, 0.2])), "the sum of .* is 1.1"),
        (lambda: averaging_matrix(4, np.array([0.5, 0.5])), "4 weights, one per replica, got 2"),
        (lambda: averaging_matrix(4, np.array([float("nan"), 0.5, 0.25, 0.25])), "weights >= 0"),
        (lambda: averaging_matrix(4, np.array([1.5, -0.5, 0.0, 0.0])), "weights >= 0"),
    ],
)
def test_bad_input(make: Callable[[], object], words: str) -> None:
    with pytest.raises(AlgorithmError, match=words):
        make()


# Shards, the event queue of asynchronous arrivals, and the epoch times of epoch averaging.

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
