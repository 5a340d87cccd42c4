"""Gossip as task graphs: both engines give the seconds of the replicas' clock; the messages are the links of W."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parsim.algorithms.gossip_program import ROUNDS, GossipModel, gossip_durations_s, gossip_program
from parsim.algorithms.graphs import connections, mixing_graph
from parsim.errors import AlgorithmError
from parsim.simulate import dynamic, static
from parsim.virtual.clock import ReplicaClock
from parsim.work import Collective, SendRecv

MODEL = GossipModel(elements=1000, samples=8)


@pytest.mark.parametrize("combination", ROUNDS)
@settings(max_examples=25)
@given(
    name=st.sampled_from(["ring", "exponential", "one_peer_exponential", "star", "torus", "complete"]),
    n=st.integers(2, 9),
    seed=st.integers(0, 999),
)
def test_engines_and_the_clock_agree(combination: str, name: str, n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rounds, exchange_s = 5, float(rng.random())
    steps, graph = rng.random((rounds, n)) + 0.01, mixing_graph(name, n)
    program = gossip_program(combination, graph, MODEL, workers=n, rounds=rounds)
    durations = gossip_durations_s(program, step_s=lambda worker, t: steps[t, worker], exchange_s=exchange_s)
    clock = ReplicaClock.begin(n)
    for t in range(rounds):
        clock = clock.round(combination, steps[t], graph(t) != 0, exchange_s)
    assert static.simulate(program, durations).makespan_s == pytest.approx(clock.now_s, rel=1e-12)
    assert dynamic.simulate(program, durations).makespan_s == pytest.approx(clock.now_s, rel=1e-12)


def test_messages_are_the_links_and_carry_the_weights() -> None:
    graph = mixing_graph("one_peer_exponential", 8)
    program = gossip_program("adapt_combine", graph, MODEL, workers=8, rounds=3)
    sent = [task.work for task in program.tasks if isinstance(task.work, SendRecv)]
    assert len(sent) == 3 * 8 * connections(graph(0))
    assert {work.size_bytes for work in sent} == {4000}
    assert [(work.source, work.destination) for work in sent[16:]] == [((to - 4) % 8, to) for to in range(8)]
    collective = gossip_program("all_reduce", graph, MODEL, workers=8, rounds=2)
    assert [task.work.group for task in collective.tasks if isinstance(task.work, Collective)] == [tuple(range(8))] * 2


def test_one_worker_exchanges_nothing() -> None:
    for combination in ROUNDS:
        program = gossip_program(combination, mixing_graph("ring", 1), MODEL, workers=1, rounds=3)
        durations = gossip_durations_s(program, step_s=lambda worker, t: 2.0, exchange_s=9.0)
        assert static.simulate(program, durations).makespan_s == pytest.approx(6.0)


def test_bad_input() -> None:
    with pytest.raises(AlgorithmError, match="unknown combination 'gossip'"):
        gossip_program("gossip", mixing_graph("ring", 4), MODEL, workers=4, rounds=1)
    with pytest.raises(AlgorithmError, match=r"need a mixing matrix \[5, 5\]"):
        gossip_program("adapt_combine", mixing_graph("ring", 4), MODEL, workers=5, rounds=1)
    with pytest.raises(AlgorithmError, match="rounds >= 1"):
        gossip_program("adapt_combine", mixing_graph("ring", 4), MODEL, workers=4, rounds=0)
