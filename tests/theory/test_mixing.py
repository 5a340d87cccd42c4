"""Mixing graphs: doubly stochastic, connected, with the spectral gaps of the table and their closed forms; push-sum; Ada."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from experiments.relaxed.clock import TIMINGS, random_stragglers, readings, round_seconds
from experiments.relaxed.learning import spectral_gap
from parsim.errors import AlgorithmError
from parsim.plans.mixing import (
    ADA_SCHEDULES,
    GRAPHS,
    Ada,
    MixingGraph,
    allowed_neighbours,
    check_column_stochastic,
    check_connected,
    check_doubly_stochastic,
    circulant,
    closest_factors,
    connections,
    lattice_gap,
    metropolis_hastings,
    mixing_graph,
    predicted_consensus,
    stochastic_error,
)
from parsim.relaxed.dbench import METRICS, VarianceProfile, gini, mean_ranks

UNDIRECTED = sorted(name for name, family in GRAPHS.items() if not family.directed)

# The specification's table, float64: n, ring, torus, exponential, lattice of 4, 6 and 10 neighbours.
GAPS = """
4 .666667 .666667 .666667 1 1 1
8 .195262 .500000 .500000 .517157 .857143 1
12 .089316 .400000 .400000 .253590 .466850 .909091
16 .050747 .400000 .400000 .147605 .281809 .612548
32 .012810 .117157 .333333 .038134 .075390 .182034
64 .003210 .117157 .285714 .009612 .019168 .047507
96 .001427 .053590 .250000 .004278 .008546 .021283
1008 .000013 .006077 .181818 .000039 .000078 .000194
"""
COLUMNS = (
    ("ring", {}),
    ("torus", {}),
    ("exponential", {}),
    ("lattice", {"neighbours": 4}),
    ("lattice", {"neighbours": 6}),
    ("lattice", {"neighbours": 10}),
)


def contraction(matrix: np.ndarray) -> float:
    """rho = ||W - 11^T/n||_2."""
    return float(np.linalg.norm(matrix - 1.0 / len(matrix), ord=2))


def period_contraction(graph: MixingGraph) -> float:
    """rho of the product W_(p-1) .. W_0 of one period."""
    product = np.eye(graph.n)
    for t in range(graph.period):
        product = graph(t) @ product
    return contraction(product)


@pytest.mark.parametrize("line", GAPS.split("\n")[1:-1])
def test_spectral_gaps_are_those_of_the_table(line: str) -> None:
    n, *wanted = line.split()
    for (name, settings), gap in zip(COLUMNS, wanted, strict=True):
        assert spectral_gap(mixing_graph(name, int(n), **settings)(0)) == pytest.approx(float(gap), abs=1e-6), name


@given(st.sampled_from(UNDIRECTED), st.integers(1, 40), st.integers(0, 20))
def test_every_graph_keeps_the_mean_and_reaches_everyone(name: str, n: int, t: int) -> None:
    graph = mixing_graph(name, n)
    assert graph(t) is graph(t + graph.period), "it repeats"
    check_doubly_stochastic(graph(t), tolerance=1e-12)
    if name != "alone":
        check_connected(graph, period=graph.period)
        assert n == 1 or period_contraction(graph) < 1.0 - 1e-6
    values = np.random.default_rng(n).standard_normal((n, 3))
    assert np.abs((graph(t) @ values).mean(0) - values.mean(0)).max() <= 1e-12


@given(st.integers(4, 60), st.integers(1, 30))
def test_closed_forms_of_circulants_equal_their_eigenvalues(n: int, half: int) -> None:
    ring_gap = 2 / 3 * (1 - np.cos(2 * np.pi / n))
    assert ring_gap == pytest.approx(spectral_gap(mixing_graph("ring", n)(0)), abs=1e-12)
    graph = mixing_graph("lattice", n, neighbours=2 * half)
    assert lattice_gap(n, 2 * half) == pytest.approx(spectral_gap(graph(0)), abs=1e-12)
    general = np.sort(np.abs(np.linalg.eigvals(graph(0))))
    assert spectral_gap(graph(0)) == pytest.approx(1 - general[-2], abs=1e-7)


@pytest.mark.parametrize("tau", range(1, 9))
def test_exponential_graphs_of_powers_of_two(tau: int) -> None:
    n = 2**tau
    assert spectral_gap(mixing_graph("exponential", n)(0)) == pytest.approx(2 / (tau + 1), abs=1e-12)
    peers = mixing_graph("one_peer_exponential", n)
    product = np.eye(n)
    for t in range(tau):
        assert connections(peers(t)) == 1
        product = peers(t) @ product
    assert np.abs(product - 1.0 / n).max() <= 1e-15, "tau rounds average exactly"


def test_one_peer_is_not_exact_for_six() -> None:
    peers = mixing_graph("one_peer_exponential", 6)
    assert np.abs(peers(2) @ peers(1) @ peers(0) - 1 / 6).max() == pytest.approx(1 / 12)


def test_a_ring_of_eight_contracts_as_its_rho_says() -> None:
    matrix = mixing_graph("ring", 8)(0)
    rho = contraction(matrix)
    assert rho == pytest.approx(0.804738, abs=1e-6)
    values = np.random.default_rng(0).standard_normal(8)
    values -= values.mean()
    mixed = np.linalg.matrix_power(matrix, 20) @ values
    assert np.linalg.norm(mixed) <= rho**20 * np.linalg.norm(values) * (1 + 1e-12)
    assert rho**20 == pytest.approx(0.0130, abs=1e-4)
    slowest = np.cos(2 * np.pi * np.arange(8) / 8)
    assert np.linalg.norm(np.linalg.matrix_power(matrix, 20) @ slowest) == pytest.approx(rho**20 * np.linalg.norm(slowest))


@given(st.sampled_from(sorted(set(UNDIRECTED) - {"alone"})), st.integers(2, 24), st.integers(0, 99))
def test_no_mixing_leaves_more_than_rho(name: str, n: int, seed: int) -> None:
    matrix = mixing_graph(name, n)(seed)
    values = np.random.default_rng(seed).standard_normal(n)
    values -= values.mean()
    assert np.linalg.norm(matrix @ values) <= contraction(matrix) * np.linalg.norm(values) + 1e-12


def test_weights_of_each_graph() -> None:
    third = 1 / 3
    assert mixing_graph("ring", 4)(0)[0].tolist() == pytest.approx([third, third, 0, third])
    assert mixing_graph("ring", 2)(0).tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert sorted(mixing_graph("torus", 9)(0)[4].tolist()) == [0.0] * 4 + [0.2] * 5
    assert mixing_graph("torus", 8)(0).max() == 0.25, "with two rows, above and below are one neighbour"
    assert mixing_graph("star", 5)(0)[0].tolist() == pytest.approx([0.2] * 5)
    assert mixing_graph("star", 5)(0)[1].tolist() == pytest.approx([0.2, 0.8, 0, 0, 0])
    corner = mixing_graph("mesh", 9)(0)[0]
    assert corner[[0, 1, 3]].tolist() == [0.5, 0.25, 0.25], "a corner's neighbours have degree 3"
    exponential = mixing_graph("exponential", 8)(0)
    assert np.flatnonzero(exponential[:, 0]).tolist() == [0, 1, 2, 4], "worker 0 sends to 1, 2 and 4"
    machines = mixing_graph("hierarchical_one_peer", 8, per_node=4)
    assert machines.period == 1
    assert np.abs(machines(0) - 1 / 8).max() <= 1e-15
    assert mixing_graph("hierarchical_one_peer", 32, per_node=4).period == 3
    nodes = mixing_graph("hierarchical_ring", 12, per_node=2, every=3)
    inside, between = np.full((2, 2), 0.5), mixing_graph("ring", 6)(0)
    assert nodes.period == 3
    for number, expected in enumerate([np.eye(6), np.eye(6), between]):
        assert np.abs(nodes(number) - np.kron(expected, inside)).max() <= 1e-15
    whole = mixing_graph("hierarchical", 12, per_node=3, every=2)
    assert (whole.connections(0), whole.connections(1)) == (2, 11)
    assert np.abs(whole(1) - 1 / 12).max() <= 1e-15
    assert mixing_graph("hierarchical_one_peer", 32, per_node=4, every=5).period == 15
    assert [closest_factors(n) for n in (12, 1008, 7)] == [(3, 4), (28, 36), (1, 7)]


@given(st.integers(2, 30), st.integers(0, 1000))
def test_metropolis_hastings_makes_any_undirected_graph_doubly_stochastic(n: int, seed: int) -> None:
    links = np.random.default_rng(seed).random((n, n)) < 0.3
    matrix = metropolis_hastings(links | links.T)
    check_doubly_stochastic(matrix, tolerance=1e-12)
    assert np.array_equal(matrix, matrix.T)


def test_denser_graphs_mix_faster_at_equal_size() -> None:
    gaps = [spectral_gap(mixing_graph("lattice", 64, neighbours=k)(0)) for k in range(2, 64, 2)]
    assert gaps == sorted(gaps)
    assert gaps[0] == pytest.approx(lattice_gap(64, 2))
    assert period_contraction(mixing_graph("one_peer_exponential", 64)) <= 1e-12
    assert period_contraction(mixing_graph("ring", 64)) == pytest.approx(1 - lattice_gap(64, 2))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: mixing_graph("rng", 4), r"unknown mixing graph 'rng'; did you mean ring"),
        (lambda: mixing_graph("lattice", 8, k=4), r"no setting 'k'; its settings: neighbours"),
        (lambda: mixing_graph("lattice", 8, neighbours=3), r"even number of neighbours >= 2.*got 3 for 8"),
        (lambda: mixing_graph("hierarchical_one_peer", 8, per_node=3), r"per_node \(3\) must divide the workers \(8\)"),
        (lambda: mixing_graph("hierarchical", 8, per_node=2, every=0), r"every \(0\)"),
        (lambda: check_connected(mixing_graph("alone", 4)), r"not connected: 3 workers .*\(1, 2, 3\)"),
        (lambda: check_connected(lambda t: circulant(6, {0: 0.5, 2: 0.5})), "not connected"),
        (lambda: check_doubly_stochastic(np.array([[0.5, 0.5], [0.6, 0.4]])), r"doubly stochastic.*off by up to 0 and 0\.1\)"),
        (lambda: check_doubly_stochastic(np.array([[1.5, -0.5], [-0.5, 1.5]])), "entries >= 0"),
        (lambda: check_doubly_stochastic(np.ones((2, 3))), "square"),
        (lambda: metropolis_hastings(np.array([[False, True], [False, False]])), "undirected"),
        (lambda: check_column_stochastic(np.array([[0.5, 0.5], [0.4, 0.5]])), "column-stochastic"),
        (lambda: Ada(n=8, kind="liner"), "did you mean linear"),
        (lambda: Ada(n=8, start=2, least=4), "2 <= least <= start"),
        (lambda: Ada(n=8, kind="step", rate=0.5), "step has ascending epochs from 1 on"),
        (lambda: Ada(n=8, kind="step", rate=0.5, milestones=(7, 3)), r"milestones \[7, 3\]"),
        (lambda: Ada(n=8, milestones=(7,)), "no other kind has any"),
        (lambda: mixing_graph("random_directed", 8, links=0), "sends to at least 1 other"),
        (lambda: Ada(n=8, kind="closed_loop"), "target > 0"),
        (lambda: Ada(n=8, target=0.1), "no other kind has one"),
        (lambda: Ada(n=8, kind="closed_loop", target=math.nan), "target nan"),
        (lambda: Ada(n=8, kind="closed_loop", target=0.1, rate=0.5), "no rate"),
    ],
)
def test_bad_graphs_say_what_is_wrong(make: Callable[[], object], words: str) -> None:
    with pytest.raises(AlgorithmError, match=words):
        make()


def random_strongly_connected(n: int, seed: int) -> np.ndarray:
    """bool [n, n]: a directed cycle through all workers in random order, and a fifth of all other links."""
    rng = np.random.default_rng([seed, n])
    order = rng.permutation(n)
    links = rng.random((n, n)) < 0.2
    links[np.roll(order, -1), order] = True
    np.fill_diagonal(links, False)
    return links


@given(st.integers(2, 20), st.integers(0, 200))
def test_push_sum_finds_the_mean_where_plain_mixing_does_not(n: int, seed: int) -> None:
    parts = random_strongly_connected(n, seed) | np.eye(n, dtype=bool)
    matrix = parts / parts.sum(0)
    check_column_stochastic(matrix)
    values = np.random.default_rng(seed).standard_normal((n, 2))
    plain, masses = values, np.ones(n)
    for _ in range(200 if n <= 12 else 600):
        plain, masses = matrix @ plain, matrix @ masses
    assert np.abs(plain / masses[:, None] - values.mean(0)).max() <= 1e-9
    if stochastic_error(matrix)[0] > 0.05:
        assert np.abs(plain - values.mean(0)).max() > 1e-3


@given(st.integers(2, 24), st.integers(1, 30), st.integers(0, 9))
def test_random_directed_graphs_are_connected_and_columns_alone_sum_to_one(n: int, links: int, seed: int) -> None:
    graph = mixing_graph("random_directed", n, links=links, seed=seed)
    check_column_stochastic(graph(0))
    check_connected(graph)
    assert ((graph(0) != 0).sum(0) == min(links, n - 1) + 1).all(), "every worker sends to as many"


def test_ada_goes_from_dense_to_sparse() -> None:
    ada = Ada(n=16, start=14)
    assert [ada.neighbours(epoch) for epoch in range(14)] == [14, 12, 12, 10, 10, 8, 8, 6, 6, 4, 4, 2, 2, 2]
    assert Ada(n=16).neighbours(0) == 15, "n-1 is the complete graph"
    halving = Ada(n=1008, kind="exponential", start=64, rate=0.5)
    assert [halving.neighbours(epoch) for epoch in range(8)] == [64, 32, 16, 8, 4, 2, 2, 2]
    steps = Ada(n=32, kind="step", start=20, rate=0.5, milestones=(2, 5))
    assert [steps.neighbours(epoch) for epoch in range(7)] == [20, 20, 10, 10, 10, 4, 4]
    assert [graph.connections(0) for graph in map(ada.graph, range(3))] == [14, 12, 12]


@given(st.sampled_from([*ADA_SCHEDULES, "closed_loop"]), st.integers(3, 40), st.integers(0, 30), st.floats(0, 10))
def test_every_ada_schedule_gives_a_lattice_that_exists(kind: str, n: int, epoch: int, drift: float) -> None:
    if kind == "closed_loop":
        ada = Ada(n=n, kind=kind, target=0.5)
        graph = ada.graph(ada.place(drift))
    else:
        graph = Ada(n=n, kind=kind, rate=0.7, milestones=(3, 9) if kind == "step" else ()).graph(epoch)
    check_doubly_stochastic(graph(0), tolerance=1e-12)
    check_connected(graph)
    assert 2 <= graph.connections(0) <= n - 1


def test_closed_loop_takes_the_sparsest_lattice_that_keeps_the_target() -> None:
    ada = Ada(n=32, kind="closed_loop", target=0.01)
    assert ada.neighbours(0) == 31
    chosen = {}
    for drift in (1e-5, 1e-3, 1e-2, 1e-1):
        k = ada.neighbours(ada.place(drift))
        chosen[drift] = k
        assert predicted_consensus(drift, 1 - lattice_gap(32, k)) <= 0.01
        if k > 2:
            fewer = k - 2 if k < 31 else 30
            assert predicted_consensus(drift, 1 - lattice_gap(32, fewer)) > 0.01
    assert list(chosen.values()) == sorted(chosen.values())
    assert chosen[1e-5] == 2
    assert chosen[1e-1] > 8


def test_predicted_consensus_is_the_steady_state_of_its_recursion() -> None:
    distance = 0.0
    for _ in range(2000):
        distance = 0.9**2 * (distance + 0.3)
    assert distance == pytest.approx(predicted_consensus(0.3, 0.9), rel=1e-12)


def test_neighbours_are_those_of_a_lattice_that_exists() -> None:
    assert allowed_neighbours(9.7, 64) == 8
    assert [allowed_neighbours(wanted, 16, least=5) for wanted in (1, 5, 7, 8.5, 14, 15)] == [6, 6, 6, 8, 14, 15]
    assert Ada(n=16, start=9, least=5).neighbours(9) == 6, "at least `least`, which lies between two lattices"


# The clock of replicas against its recursion written out, how a delay spreads, and what an exchange costs on machines.


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


# The metrics of DBench against their definitions, and ranks.

positive = arrays(np.float64, st.integers(1, 20), elements=st.floats(0.01, 100))


@given(positive)
def test_gini_is_the_mean_absolute_difference(values: np.ndarray) -> None:
    n = len(values)
    double_sum = np.abs(values[:, None] - values[None, :]).sum() / (2 * n * n * values.mean())
    assert gini(values) == pytest.approx(double_sum, abs=1e-12)
    assert -1e-12 <= gini(values) <= (n - 1) / n
    assert gini(7 * values) == pytest.approx(gini(values), abs=1e-12), "no unit"


@pytest.mark.parametrize("n", [1, 2, 5, 16])
def test_extremes(n: int) -> None:
    one_hot = np.eye(n)[0]
    assert gini(one_hot) == pytest.approx((n - 1) / n)
    for name, metric in METRICS.items():
        assert metric(np.full(n, 3.0)) == pytest.approx(0.0, abs=1e-15), name
        assert metric(np.zeros(n)) == 0.0, name


def test_definitions_on_one_to_eight() -> None:
    values = np.arange(1.0, 9.0)
    assert METRICS["dispersion_index"](values) == pytest.approx(5.25 / 4.5)
    assert METRICS["coefficient_of_variation"](values) == pytest.approx(5.25**0.5 / 4.5)
    assert METRICS["quartile_coefficient"](values) == pytest.approx((6.25 - 2.75) / 9.0)


@given(st.integers(2, 8), st.integers(1, 4), st.integers(0, 99))
def test_metrics_go_tensor_by_tensor(n: int, tensors: int, seed: int) -> None:
    values = np.random.default_rng(seed).random((n, tensors)) + 0.1
    for metric in METRICS.values():
        assert metric(values) == pytest.approx([float(metric(values[:, place])) for place in range(tensors)], abs=1e-12)


def test_norms_can_agree_where_vectors_differ() -> None:
    parameters = np.eye(4)
    assert gini(np.linalg.norm(parameters, axis=1)) == pytest.approx(0.0)


def profile(spread: float) -> VarianceProfile:
    norms = np.ones((3, 4, 2))
    norms[:, 0] += spread * np.array([[1.0], [2.0], [3.0]])
    return VarianceProfile(
        tensors=("a", "b"),
        rounds=np.arange(3),
        norms=norms,
        consensus=np.full(3, spread),
        consensus_after=np.zeros(3),
    )


def test_graphs_are_ranked_by_their_spread() -> None:
    profiles = {"ring": profile(0.5), "complete": profile(0.0), "exponential": profile(0.1)}
    for metric in ("consensus", "gini", "coefficient_of_variation", "dispersion_index", "quartile_coefficient"):
        assert mean_ranks(profiles, metric) == {"ring": 3.0, "complete": 1.0, "exponential": 2.0}, metric
    tied = mean_ranks({"a": profile(0.5), "b": profile(0.5), "c": profile(0.0)}, "consensus")
    assert tied == {"a": 2.5, "b": 2.5, "c": 1.0}
    rarely = replace(profile(0.2), rounds=np.arange(1), norms=profile(0.2).norms[:1], consensus=np.full(1, 0.2))
    for metric in ("consensus", "gini"):
        assert mean_ranks({"ring": profile(0.5), "average/8": rarely}, metric) == {"ring": 2.0, "average/8": 1.0}, metric


def test_bad_questions() -> None:
    with pytest.raises(AlgorithmError, match="unknown metric 'variance'; known: consensus, coefficient_of_variation"):
        profile(0.1).metric("variance")
    other = VarianceProfile(
        tensors=("a",), rounds=np.arange(1), norms=np.ones((1, 4, 1)), consensus=np.ones(1), consensus_after=np.ones(1)
    )
    with pytest.raises(AlgorithmError, match="same tensors"):
        mean_ranks({"a": profile(0.1), "b": other}, "gini")
