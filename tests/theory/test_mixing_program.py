"""Gossip as task graphs: both engines give the seconds of the replicas' clock; the messages are the links of W."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parsim.algorithms.periods import at_end, every_steps, post_local
from parsim.engines import dynamic, static
from parsim.engines.program import Part, unrolled
from parsim.engines.relaxed.gossip_program import ROUNDS, GossipModel, ada_program, gossip_durations_s, gossip_program
from parsim.engines.repeated import simulate_program
from parsim.errors import AlgorithmError
from parsim.plans.mixing import Ada, connections, mixing_graph
from parsim.virtual.clock import ReplicaClock
from parsim.work import Collective, Mix, SendRecv

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

    def durations_s(part: Part, t: int) -> np.ndarray:
        return gossip_durations_s(part.graph, step_s=lambda worker, _: steps[t, worker], exchange_s=exchange_s)

    clock = ReplicaClock.begin(n)
    for t in range(rounds):
        clock = clock.round(combination, steps[t], graph(t) != 0, exchange_s)
    for engine in (static.simulate, dynamic.simulate):
        times = simulate_program(program, durations_s, varying=True, engine=engine)
        assert times.makespan_s == pytest.approx(clock.now_s, rel=1e-12)
    durations = np.concatenate([durations_s(part, t) for t, part in enumerate(program.walk())])
    assert static.simulate(unrolled(program), durations).makespan_s == times.makespan_s


def test_messages_are_the_links_and_carry_the_weights() -> None:
    graph = mixing_graph("one_peer_exponential", 8)
    program = gossip_program("adapt_combine", graph, MODEL, workers=8, rounds=3)
    whole = unrolled(program)
    sent = [task.work for task in whole.tasks if isinstance(task.work, SendRecv)]
    assert len(sent) == 3 * 8 * connections(graph(0))
    assert {task.work.copies for task in whole.tasks if isinstance(task.work, Mix)} == {2}
    assert {work.size_bytes for work in sent} == {4000}
    assert [(work.source, work.destination) for work in sent[16:]] == [((to - 4) % 8, to) for to in range(8)]
    collective = gossip_program("all_reduce", graph, MODEL, workers=8, rounds=2)
    assert [task.work.group for task in unrolled(collective).tasks if isinstance(task.work, Collective)] == [
        tuple(range(8))
    ] * 2


def test_one_worker_exchanges_nothing() -> None:
    for combination in ROUNDS:
        program = gossip_program(combination, mixing_graph("ring", 1), MODEL, workers=1, rounds=3)
        times = simulate_program(
            program, lambda part, t: gossip_durations_s(part.graph, step_s=lambda worker, t: 2.0, exchange_s=9.0)
        )
        assert times.makespan_s == pytest.approx(6.0)


@pytest.mark.parametrize("combination", ROUNDS)
@given(
    name=st.sampled_from(["ring", "exponential", "one_peer_exponential", "hierarchical_one_peer"]),
    n=st.integers(2, 9),
    rounds=st.integers(1, 40),
)
def test_the_program_and_the_weights_read_one_schedule(combination: str, name: str, n: int, rounds: int) -> None:
    """The messages of exchange t are the links of W_t = parameters(t), however the rounds are folded into repeats."""
    program = gossip_program(combination, mixing_graph(name, n), MODEL, workers=n, rounds=rounds)
    assert program.rounds == program.repeats == rounds
    assert program.parameters is not None
    if combination == "all_reduce":
        return
    for t, part in enumerate(program.walk()):
        links = {(task.work.destination, task.work.source) for task in part.graph.tasks if isinstance(task.work, SendRecv)}
        assert links == {(i, j) for i, j in np.argwhere(program.parameters(t)).tolist() if i != j}


def test_a_period_is_local_steps_and_an_exchange() -> None:
    graph = mixing_graph("one_peer_exponential", 8)
    program = gossip_program("adapt_combine", graph, MODEL, workers=8, rounds=300, period=post_local(2, 5))
    assert program.rounds == 300
    assert program.repeats == 2 + 298 * 5
    clock = ReplicaClock.begin(8)
    exchanges = 0
    for step in range(program.repeats):
        if post_local(2, 5).due(step):
            clock = clock.round("adapt_combine", 1.0, graph(exchanges) != 0, 0.5)
            exchanges += 1
        else:
            clock = clock.compute(1.0)
    times = simulate_program(
        program, lambda part, t: gossip_durations_s(part.graph, step_s=lambda worker, _: 1.0, exchange_s=0.5)
    )
    assert exchanges == 300
    assert times.makespan_s == pytest.approx(clock.now_s, rel=1e-12)
    assert times.simulated < 100
    assert program.written_tasks <= 10 * 8 * 8, "eight workers, four kinds of step, however long training is"


def test_ada_is_one_part_per_density() -> None:
    ada = Ada(n=16, start=14)
    program = ada_program("adapt_combine", ada, MODEL, epochs=20, rounds_per_epoch=11)
    assert program.rounds == 220
    assert [part.repeat for part in program.walk_once()] == [11] * 20
    assert len({id(part) for part in program.walk_once()}) == 7
    sent = [sum(isinstance(task.work, SendRecv) for task in part.graph.tasks) // 16 for part in program.walk_once()]
    assert sent == [ada.neighbours(epoch) for epoch in range(20)]
    assert program.parameters is not None
    assert connections(program.parameters(0)) == 14
    assert connections(program.parameters(219)) == 2


def test_bad_input() -> None:
    with pytest.raises(AlgorithmError, match="unknown combination 'gossip'"):
        gossip_program("gossip", mixing_graph("ring", 4), MODEL, workers=4, rounds=1)
    with pytest.raises(AlgorithmError, match=r"need a mixing matrix \[5, 5\]"):
        gossip_program("adapt_combine", mixing_graph("ring", 4), MODEL, workers=5, rounds=1)
    with pytest.raises(AlgorithmError, match="needs a period"):
        gossip_program("adapt_combine", mixing_graph("ring", 4), MODEL, workers=4, rounds=1, period=at_end())
    with pytest.raises(AlgorithmError, match=r"period is every_steps\(1\)"):
        gossip_program("combine_adapt", mixing_graph("ring", 4), MODEL, workers=4, rounds=1, period=every_steps(2))
    with pytest.raises(AlgorithmError, match="rounds >= 1"):
        gossip_program("adapt_combine", mixing_graph("ring", 4), MODEL, workers=4, rounds=0)
