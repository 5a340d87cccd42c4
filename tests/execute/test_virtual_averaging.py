"""Virtual workers that average: identities with synchronous training and with one another, clocks, and real gloo runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from parsim.algorithms.arrivals import merge_events
from parsim.algorithms.periods import AlgorithmWarning, at_end, every_epochs, every_steps, post_local
from parsim.errors import AlgorithmError, DataError
from parsim.plans.averaging import MERGES, MergeRule, OuterOptimizer
from parsim.plans.mixing import mixing_graph
from parsim.relaxed.problems import load_problem, perceptron
from parsim.relaxed.replicas import LocalOptimizer, LocalTraining, Workers, stack_batches
from parsim.virtual.agent import TickRule
from parsim.virtual.arrivals import train_by_arrival
from parsim.virtual.gossip import GossipRule, train_on_graph
from parsim.virtual.rounds import Partition, RoundRule, train_in_rounds
from parsim.virtual.ticks import TickEngine
from tests.execute.virtual_processes import F64, flat, small_model, small_problem


def training(kind: str = "sgd", learning_rate: float = 0.1) -> LocalTraining:
    problem = small_problem()
    return LocalTraining(small_model(problem), problem, LocalOptimizer(kind=kind, learning_rate=learning_rate))


def data_parallel(partition: Partition, kind: str) -> Tensor:
    """Plain torch: one optimizer, the mean of the workers' gradients at every step."""
    problem = small_problem()
    model = small_model(problem)
    makers = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    }
    optimizer = makers[kind](model.parameters())
    shards = partition.shards(problem.targets.numpy())
    for epoch in range(partition.epochs):
        for row in stack_batches([partition.batches(shard, worker, epoch) for worker, shard in enumerate(shards)]):
            optimizer.zero_grad()
            for samples in torch.from_numpy(row):
                (problem.loss(model(problem.inputs[samples]), problem.targets[samples]) / len(row)).backward()
            optimizer.step()
    return flat([weight.detach() for weight in model.parameters()])


EVEN = Partition(workers=4, epochs=4, batch=4, seed=5)


@pytest.mark.parametrize("kind", ["sgd", "sgd_momentum"])
def test_averaging_after_every_step_is_synchronous_training(kind: str) -> None:
    """With momentum too, whose buffers are never averaged: the update is linear in the gradient."""
    got = train_in_rounds(training(kind), EVEN, RoundRule(period=every_steps(1)))
    assert (got.workers - data_parallel(EVEN, kind)).abs().max().item() <= 1e-12
    assert got.synchronisations == 4 * EVEN.steps_per_epoch(small_problem())


def test_with_adam_it_is_not_and_says_so() -> None:
    with pytest.warns(AlgorithmWarning, match="adam"):
        got = train_in_rounds(training("adam"), EVEN, RoundRule(period=every_steps(1)))
    assert (got.weights - data_parallel(EVEN, "adam")).abs().max().item() > 1e-3


@pytest.mark.parametrize("kind", ["sgd", "sgd_momentum", "adam"])
def test_one_worker_is_sequential_training(kind: str) -> None:
    alone = Partition(workers=1, epochs=3, batch=4)
    never = train_in_rounds(training(kind), alone, RoundRule(period=at_end()))
    each = train_in_rounds(training(kind), alone, RoundRule(period=every_steps(3)))
    assert torch.equal(never.weights, each.weights)
    assert (never.weights - data_parallel(alone, kind)).abs().max().item() <= 1e-11


def epochs_rule(**settings: object) -> RoundRule:
    return RoundRule(period=every_epochs(1, EVEN.steps_per_epoch(small_problem())), **settings)


@pytest.mark.parametrize("kind", ["sgd_momentum", "adam"])
def test_epoch_averaging_is_complete_mixing_per_epoch_and_outer_sgd_of_rate_one(kind: str) -> None:
    plain = train_in_rounds(training(kind), EVEN, epochs_rule())
    mixed = train_in_rounds(training(kind), EVEN, epochs_rule(mixing=mixing_graph("complete", 4)))
    outer = train_in_rounds(training(kind), EVEN, epochs_rule(outer=OuterOptimizer(lr=1.0, momentum=0.0, nesterov=False)))
    diloco = train_in_rounds(training(kind), EVEN, epochs_rule(outer=OuterOptimizer()))
    assert (plain.weights - mixed.weights).abs().max().item() <= 1e-12
    assert (plain.weights - outer.weights).abs().max().item() <= 1e-12
    assert (plain.weights - diloco.weights).abs().max().item() > 1e-3


@pytest.mark.parametrize("name", ["ring", "complete", "one_peer_exponential"])
def test_rounds_with_a_matrix_are_gossip(name: str) -> None:
    """The two drivers of one engine, given the same graph, period and data, make the same weights."""
    graph = mixing_graph(name, 4)
    rounds = train_in_rounds(training("sgd_momentum"), EVEN, RoundRule(period=every_steps(2), mixing=graph))
    gossip = train_on_graph(training("sgd_momentum"), EVEN, GossipRule(graph=graph, period=every_steps(2)))
    assert (rounds.workers - gossip.replicas.workers.weights).abs().max().item() <= 1e-12


def test_ticks_with_one_module_are_rounds() -> None:
    """K = 1: the tick engine with a mixing matrix makes the same weights as rounds with it."""
    problem, graph = small_problem(), mixing_graph("ring", 4)
    rounds = train_in_rounds(training("sgd_momentum"), EVEN, RoundRule(period=every_steps(1), mixing=graph))
    shards = EVEN.shards(problem.targets.numpy())
    engine = TickEngine([small_model(problem)], problem.loss, TickRule(learning_rate=0.1, momentum=0.9), groups=4, mixing=graph)
    for epoch in range(EVEN.epochs):
        for row in stack_batches([EVEN.batches(shard, worker, epoch) for worker, shard in enumerate(shards)]):
            engine.step([(problem.inputs[samples], problem.targets[samples]) for samples in torch.from_numpy(row)])
    got = torch.stack([flat([weight.detach() for weight in group[0].live]) for group in engine.agents])
    assert (got - rounds.workers).abs().max().item() <= 1e-12


def test_post_local_begins_synchronous_and_ends_local() -> None:
    steps = EVEN.epochs * EVEN.steps_per_epoch(small_problem())
    warm = train_in_rounds(training(), EVEN, RoundRule(period=post_local(steps, 5)))
    assert (warm.weights - data_parallel(EVEN, "sgd")).abs().max().item() <= 1e-12
    cold = train_in_rounds(training(), EVEN, RoundRule(period=post_local(0, 5)))
    local = train_in_rounds(training(), EVEN, RoundRule(period=every_steps(5)))
    assert torch.equal(cold.weights, local.weights)
    assert not torch.equal(cold.weights, warm.weights)


def test_only_at_the_end_is_independent_training_averaged_once() -> None:
    got = train_in_rounds(training(), EVEN, RoundRule(period=at_end()))
    alone = train_in_rounds(training(), EVEN, RoundRule(period=at_end(), mixing=mixing_graph("alone", 4)))
    assert got.synchronisations == 1
    assert (got.weights - alone.workers.mean(0)).abs().max().item() <= 1e-15


@pytest.mark.parametrize("kind", ["sgd_momentum", "adam"])
def test_batches_from_blocks_are_bitwise_those_of_the_samples(kind: str) -> None:
    """Workers that read rows of their own blocks make the weights that they make from sample numbers of the whole problem."""
    part = Partition(workers=3, epochs=2, batch=4, proportions=(1.0, 2.0, 5.0), keep_remainder=True, seed=4)
    got = train_in_rounds(training(kind), part, RoundRule(period=at_end(), mixing=mixing_graph("alone", 3)))
    task = training(kind)
    workers = Workers.fresh(task.start.repeat(3, 1))
    shards = part.shards(task.problem.targets.numpy())
    for epoch in range(part.epochs):
        for samples in stack_batches([part.batches(shard, worker, epoch) for worker, shard in enumerate(shards)]):
            workers = task.step(workers, samples)
    assert torch.equal(got.workers, workers.weights)


def test_weighted_average_of_unequal_shards() -> None:
    uneven = Partition(workers=3, epochs=1, batch=4, proportions=(1.0, 2.0, 5.0), keep_remainder=True)
    alone = train_in_rounds(training(), uneven, RoundRule(period=at_end(), mixing=mixing_graph("alone", 3)))
    got = train_in_rounds(training(), uneven, RoundRule(period=at_end(), weighted=True))
    sizes = torch.tensor([len(shard) for shard in uneven.shards(small_problem().targets.numpy())], dtype=F64)
    assert (got.weights - (sizes / sizes.sum()) @ alone.workers).abs().max().item() <= 1e-14


def test_those_who_do_not_take_part_make_no_step() -> None:
    part = Partition(workers=4, epochs=1, batch=4)
    rule = RoundRule(period=at_end(), participation=0.5)
    alone = train_in_rounds(training(), part, RoundRule(period=at_end(), mixing=mixing_graph("alone", 4)))
    got = train_in_rounds(training(), part, rule)
    pairs = [(alone.workers[i] + alone.workers[j]) / 2 for i in range(4) for j in range(i)]
    assert min((got.weights - pair).abs().max().item() for pair in pairs) <= 1e-14


def test_padding_changes_no_gradient() -> None:
    task = training("sgd_momentum")
    workers = Workers.fresh(task.start.repeat(2, 1))
    padded = task.step(workers, np.array([[0, 1, 2, -1, -1], [3, 4, 5, 6, 7]]))
    alone = task.step(workers.take([0]), np.array([[0, 1, 2]]))
    assert (padded.weights[0] - alone.weights[0]).abs().max().item() <= 1e-15
    idle = task.step(padded, np.array([[-1, -1], [8, 9]]))
    assert torch.equal(idle.weights[0], padded.weights[0])
    assert torch.equal(idle.moments[0][0], padded.moments[0][0])
    assert idle.steps.tolist() == [1, 2]


# Asynchronous arrivals


def test_half_with_one_worker_halves_every_epochs_progress() -> None:
    task = training()
    alone = Partition(workers=1, epochs=3, batch=4)
    got = train_by_arrival(task, alone, MergeRule(kind="half", workers=1))
    weights = task.start
    shard = alone.shards(task.problem.targets.numpy())[0]
    for epoch in range(3):
        workers = Workers.fresh(weights[None])
        for samples in alone.batches(shard, 0, epoch):
            workers = task.step(workers, samples[None])
        weights = (weights + workers.weights[0]) * 0.5
    assert torch.equal(got.weights, weights)


@pytest.mark.parametrize("kind", ["running", "buffered"])
def test_first_round_of_exact_merges_is_the_epoch_average(kind: str) -> None:
    part = Partition(workers=4, epochs=1, batch=4)
    averaged = train_in_rounds(training(), part, RoundRule(period=at_end()))
    merged = train_by_arrival(training(), part, MergeRule(kind=kind, workers=4, buffer=4))
    assert (averaged.weights - merged.weights).abs().max().item() <= 1e-12


def test_half_of_one_round_weighs_by_arrival() -> None:
    part = Partition(workers=4, epochs=1, batch=4)
    task = training()
    alone = train_in_rounds(task, part, RoundRule(period=at_end(), mixing=mixing_graph("alone", 4)))
    merged = train_by_arrival(
        task, part, MergeRule(kind="half", workers=4), step_s=lambda worker, epoch: [4.0, 2.0, 1.0, 3.0][worker]
    )
    arrived = [task.start, *(alone.workers[worker] for worker in (2, 1, 3, 0))]
    running = [sum(w * x for w, x in zip([1 / 16, 1 / 16, 1 / 8, 1 / 4, 1 / 2], arrived, strict=True))]
    assert (merged.workers[0] - running[0]).abs().max().item() <= 1e-14, "worker 0 came last and holds the global model"


@pytest.mark.parametrize("kind", MERGES)
def test_a_recorded_order_replays_bitwise(kind: str) -> None:
    part, rule = Partition(workers=3, epochs=3, batch=4), MergeRule(kind=kind, workers=3, buffer=2)

    def step_s(worker: int, epoch: int) -> float:
        return (3.0, 1.0, 1.7)[worker]

    steps = [part.steps_per_epoch(small_problem())] * 3
    order = merge_events(lambda worker, epoch: steps[worker] * step_s(worker, epoch), 3, epochs=3)
    asked = train_by_arrival(training(), part, rule, step_s=step_s)
    replayed = train_by_arrival(training(), part, rule, order=order)
    assert torch.equal(asked.weights, replayed.weights)
    other = train_by_arrival(
        training(), part, rule, order=order[::-1] and tuple(sorted(order, key=lambda e: (e.epoch, -e.worker)))
    )
    assert not torch.equal(asked.weights, other.weights), "the order of arrival is part of the algorithm"


def test_a_straggler_in_simulated_seconds() -> None:
    """2x slower among 8: synchronous epochs take 2.0x; merging keeps at least 0.93 of (7 + 0.5)/8 of the throughput."""
    part = Partition(workers=8, epochs=6, batch=3)
    problem = small_problem()
    rule = RoundRule(period=every_epochs(1, part.steps_per_epoch(problem)))
    slow = [2.0, *[1.0] * 7]
    even = train_in_rounds(training(), part, rule).progress[-1].seconds
    held_up = train_in_rounds(training(), part, rule, step_s=lambda worker, epoch: slow[worker]).progress[-1].seconds
    assert held_up / even == pytest.approx(2.0, rel=1e-12)
    merged = train_by_arrival(
        training(), part, MergeRule(workers=8), step_s=lambda worker, epoch: slow[worker], total_merges=45
    )
    throughput = 45 / merged.progress[-1].seconds
    assert throughput / (48 / even) >= 0.93 * (7 + 0.5) / 8


def test_bytes_and_clock_of_rounds() -> None:
    got = train_in_rounds(training(), EVEN, epochs_rule(), step_s=lambda worker, epoch: 0.5, exchange_s=2.0)
    steps = EVEN.steps_per_epoch(small_problem())
    assert [p.seconds for p in got.progress] == [e * (steps * 0.5 + 2.0) for e in (1, 2, 3, 4)]
    assert got.progress[-1].sent_bytes == 4 * 1.5 * training().weight_bytes
    assert [p.consensus for p in got.progress] == pytest.approx([0.0] * 4, abs=1e-25)


def test_regression_learns() -> None:
    problem = load_problem("diabetes", dtype=F64)
    task = LocalTraining(perceptron(problem, (16,), dtype=F64), problem, LocalOptimizer(learning_rate=0.02))
    part = Partition(workers=4, epochs=20, batch=8, keep_remainder=True)
    got = train_in_rounds(task, part, RoundRule(period=every_epochs(1, part.steps_per_epoch(problem))))
    assert got.score > 0.25
    assert got.score > task.score(task.start)


def test_bad_input() -> None:
    with pytest.raises(AlgorithmError, match=r"100 workers cannot share 96 samples"):
        train_in_rounds(training(), Partition(workers=100, epochs=1), RoundRule(period=at_end()))
    with pytest.raises(AlgorithmError, match="doubly stochastic"):
        train_in_rounds(training(), EVEN, RoundRule(period=every_steps(1), mixing=lambda t: np.ones((4, 4)) / 3))
    with pytest.raises(AlgorithmError, match="not connected: 3 workers"):
        train_in_rounds(training(), EVEN, RoundRule(period=every_steps(1), mixing=lambda t: np.eye(4)))
    with pytest.raises(AlgorithmError, match=r"at least 1 step, got 0; use at_end\(\)"):
        every_steps(0)
    with pytest.raises(AlgorithmError, match="averaging alone"):
        RoundRule(period=at_end(), mixing=mixing_graph("ring", 4), weighted=True)
    with pytest.raises(AlgorithmError, match="BatchNorm"):
        LocalTraining(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), small_problem(), LocalOptimizer())
    with pytest.raises(AlgorithmError, match="did you mean sgd"):
        LocalOptimizer(kind="sdg")
    with pytest.raises(DataError, match="did you mean digits"):
        load_problem("digit")
