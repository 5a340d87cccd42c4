"""The clock of replicas against its recursion written out, how a delay spreads, and what an exchange costs on machines."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.relaxed.clock import TIMINGS, random_stragglers, readings, round_seconds
from parsim.errors import AlgorithmError
from parsim.plans.mixing import mixing_graph


def written_out(timing: str, links: np.ndarray, steps: np.ndarray, exchange: float) -> np.ndarray:
    """The rule of each timing, one replica at a time, from the definition."""
    rounds, n = steps.shape
    ready = [0.0] * n
    for t in range(rounds):
        senders = [{i} | {j for j in range(n) if links[i, j]} for i in range(n)]
        if timing == "adapt_combine":
            ready = [max(ready[j] + steps[t, j] for j in senders[i]) + exchange for i in range(n)]
        elif timing == "combine_adapt":
            ready = [max(ready[i] + steps[t, i], max(ready[j] for j in senders[i]) + exchange) for i in range(n)]
        else:
            ready = [max(ready[j] + steps[t, j] for j in range(n)) + exchange] * n
    return np.array(ready)


@pytest.mark.parametrize("timing", TIMINGS)
@given(st.sampled_from(["ring", "exponential", "star", "complete"]), st.integers(1, 9), st.integers(0, 999))
def test_the_clock_is_its_recursion(timing: str, name: str, n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    links, steps, exchange = mixing_graph(name, n)(0) != 0, rng.random((6, n)), float(rng.random())
    ready, computed = list(islice(readings(timing, lambda t: links, lambda t: steps[t], lambda w: exchange, n), 6))[-1]
    assert np.abs(ready - written_out(timing, links, steps, exchange)).max() <= 1e-12
    assert np.abs(computed - steps.sum(0)).max() <= 1e-12
    assert (ready - computed >= -1e-12).all()


def test_a_delay_spreads_one_hop_per_round() -> None:
    n, ring = 16, mixing_graph("ring", 16)

    def steps(t: int) -> np.ndarray:
        return np.where(np.arange(n) == 0, 1.0 if t else 5.0, 1.0)

    rounds = readings("adapt_combine", ring, steps, lambda w: 0.0, n)
    for hops, (ready, _) in enumerate(islice(rounds, 4), 1):
        late = np.flatnonzero(ready > hops)
        assert sorted((late + 8) % 16 - 8) == list(range(-hops, hops + 1))
    everyone, _ = next(readings("all_reduce", ring, steps, lambda w: 0.0, n))
    assert (everyone == 5.0).all()


def test_combine_adapt_hides_an_exchange_shorter_than_a_step() -> None:
    graph = mixing_graph("exponential", 8)
    hidden = round_seconds("combine_adapt", graph, lambda t: 1.0, lambda w: 0.9, n=8, rounds=10)
    shown = round_seconds("adapt_combine", graph, lambda t: 1.0, lambda w: 0.9, n=8, rounds=10)
    longer = round_seconds("combine_adapt", graph, lambda t: 1.0, lambda w: 1.5, n=8, rounds=10)
    assert (hidden, longer) == (1.0, 1.5)
    assert shown == pytest.approx(1.9)


@given(st.integers(0, 50), st.sampled_from(["ring", "one_peer_exponential", "complete"]))
def test_waiting_for_neighbours_is_never_longer_than_waiting_for_all(seed: int, name: str) -> None:
    steps = random_stragglers(12, probability=0.1, factor=4.0, seed=seed)
    graph = mixing_graph(name, 12)
    times = [
        round_seconds(timing, graph, steps, lambda w: 0.0, n=12, rounds=30)
        for timing in ("combine_adapt", "adapt_combine", "all_reduce")
    ]
    assert times[0] <= times[1] + 1e-12 <= times[2] + 2e-12
    if name == "complete":
        assert times[1] == pytest.approx(times[2])


def test_random_stragglers_cost_a_ring_less_than_a_barrier() -> None:
    steps = random_stragglers(64, probability=0.02, factor=3.0, seed=1)
    ring = round_seconds("adapt_combine", mixing_graph("ring", 64), steps, lambda w: 0.0, n=64, rounds=100)
    barrier = round_seconds("all_reduce", mixing_graph("ring", 64), steps, lambda w: 0.0, n=64, rounds=100)
    assert 1.0 < ring < 0.75 * barrier


def test_bad_input() -> None:
    with pytest.raises(AlgorithmError, match="did you mean adapt_combine"):
        next(readings("adapt_then_combine", lambda t: np.eye(2), lambda t: 1.0, lambda w: 0.0, 2))
    with pytest.raises(AlgorithmError, match="seconds of a step must be finite and >= 0"):
        next(readings("adapt_combine", lambda t: np.eye(2), lambda t: [1.0, -1.0], lambda w: 0.0, 2))
