"""The clock of replicas against its recursion written out, how a delay spreads, and what an exchange costs on machines."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsim.algorithms.graphs import mixing_graph
from parsim.costs.communication.alpha_beta import ring_all_reduce_s
from parsim.errors import AlgorithmError
from parsim.virtual.clock import TIMINGS, ReplicaClock, one_straggler, random_stragglers, round_seconds
from parsim.virtual.network import MachineNetwork


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
    clock = ReplicaClock.begin(n)
    for seconds in steps:
        clock = clock.round(timing, seconds, links, exchange)
    assert np.abs(clock.ready_s - written_out(timing, links, steps, exchange)).max() <= 1e-12
    assert np.abs(clock.compute_s - steps.sum(0)).max() <= 1e-12
    assert (clock.waiting_s >= -1e-12).all()


def test_a_delay_spreads_one_hop_per_round() -> None:
    n, links = 16, mixing_graph("ring", 16)(0) != 0
    clock = ReplicaClock.begin(n).round("adapt_combine", one_straggler(n, 5.0), links)
    for hops in range(1, 5):
        late = np.flatnonzero(clock.ready_s > hops)
        assert sorted((late + 8) % 16 - 8) == list(range(-hops, hops + 1))
        clock = clock.round("adapt_combine", np.ones(n), links)
    everyone = ReplicaClock.begin(n).round("all_reduce", one_straggler(n, 5.0), links)
    assert (everyone.ready_s == 5.0).all()


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


def network(n: int = 16, per_node: int = 8, **changes: float) -> MachineNetwork:
    values = {"network_bytes_per_s": 3e9, "network_latency_s": 1e-5, "local_bytes_per_s": 1e11, "local_latency_s": 1e-6}
    return MachineNetwork(n=n, per_node=per_node, **{**values, **changes})


def test_machines_share_their_interface() -> None:
    size = 1e8
    free = network(network_latency_s=0.0, local_latency_s=0.0, local_bytes_per_s=1e15)
    ring = free.mixing_s(mixing_graph("ring", 16)(0), size)
    assert ring == pytest.approx(2 * size / 3e9), "two edges cross between two machines, each direction both ways"
    far = free.mixing_s(mixing_graph("one_peer_exponential", 16)(3), size)
    assert far == pytest.approx(8 * size / 3e9), "offset 8: all eight GPUs of a machine send out of it"
    near = free.mixing_s(mixing_graph("one_peer_exponential", 16)(0), size)
    assert near == pytest.approx(size / 3e9)
    assert free.machine_mixing_s(mixing_graph("one_peer_exponential", 2)(0), size) == pytest.approx(size / 3e9, rel=1e-4)


def test_collectives_of_machines() -> None:
    size, flat = 1e8, network(network_latency_s=0.0, local_latency_s=0.0)
    assert flat.all_reduce_s(size) == pytest.approx(ring_all_reduce_s(size, 16, 0.0, 1 / 3e9))
    inside = ring_all_reduce_s(size, 8, 0.0, 1e-11)
    assert flat.hierarchical_all_reduce_s(size) == pytest.approx(inside + size / 3e9)
    one = network(n=8)
    assert one.all_reduce_s(size) == pytest.approx(ring_all_reduce_s(size, 8, 1e-6, 1e-11))
    equal = network(network_latency_s=1e-6, local_latency_s=1e-6)
    assert equal.all_reduce_s(size) == pytest.approx(ring_all_reduce_s(size, 16, 1e-6, 1 / 3e9))


def test_gossip_saves_latency_not_volume() -> None:
    """A ring gossip sends as much as a ring all_reduce (2|w|); what grows with n is the all_reduce's latency."""
    flat = network(n=256, per_node=1, network_latency_s=0.0)
    ring = mixing_graph("ring", 256)(0)
    assert flat.mixing_s(ring, 1e8) == pytest.approx(flat.all_reduce_s(1e8), rel=0.01)
    slow = network(n=256, per_node=1)
    assert slow.all_reduce_s(0.0) == pytest.approx(510 * 1e-5)
    assert slow.mixing_s(ring, 0.0) == pytest.approx(2 * 1e-5)


def test_bad_input() -> None:
    with pytest.raises(AlgorithmError, match="did you mean adapt_combine"):
        ReplicaClock.begin(2).round("adapt_then_combine", 1.0, np.eye(2, dtype=bool))
    with pytest.raises(AlgorithmError, match="seconds of a step must be finite and >= 0"):
        ReplicaClock.begin(2).compute([1.0, -1.0])
    with pytest.raises(AlgorithmError, match="must divide"):
        network(n=9)
    with pytest.raises(AlgorithmError, match=r"need a mixing matrix \[16, 16\]"):
        network().mixing_s(np.eye(4), 1.0)
    with pytest.raises(AlgorithmError, match="one of 4 replicas"):
        one_straggler(4, 2.0, replica=4)
