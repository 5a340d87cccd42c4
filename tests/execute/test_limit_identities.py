"""The limits in which the policies (partition, staleness, mixing, period) meet, on random sizes, graphs, seeds and optimizers.

Everything here compares weights to 1e-12 in float64.
"""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parsim.algorithms.periods import Period, at_end, every_epochs, every_steps
from parsim.plans.mixing import GRAPHS, Ada, ada_graphs, mixing_graph
from parsim.relaxed.problems import LearningProblem, load_problem, perceptron
from parsim.relaxed.replicas import LocalOptimizer, LocalTraining, stack_batches
from parsim.virtual.agent import TickRule, cut_sequential
from parsim.virtual.gossip import GossipRule, train_on_graph
from parsim.virtual.rounds import Partition, RoundRule, train_in_rounds
from parsim.virtual.ticks import TickEngine

F64 = torch.float64
few = settings(max_examples=12, deadline=None)
workers = st.integers(1, 6)
seeds = st.integers(0, 999)
optimizers = st.sampled_from(["sgd", "sgd_momentum"])
graphs = st.sampled_from(sorted(set(GRAPHS) - {"alone"}))


def problem() -> LearningProblem:
    return load_problem("generated", dtype=F64, samples=120, features=5, classes=3)


def model(seed: int) -> torch.nn.Sequential:
    return perceptron(problem(), (6, 5), seed=seed, dtype=F64, activation="tanh")


def training(seed: int, optimizer: str = "sgd") -> LocalTraining:
    return LocalTraining(model(seed), problem(), LocalOptimizer(kind=optimizer, learning_rate=0.1))


def partition(n: int, seed: int, **changes: int) -> Partition:
    return Partition(**{"workers": n, "epochs": 2, "batch": 4, "seed": seed, **changes})


def apart(first: Tensor, second: Tensor) -> float:
    return (first - second).abs().max().item()


def rows(part: Partition) -> list[np.ndarray]:
    """The samples [n, batch] of every step."""
    shards = part.shards(problem().targets.numpy())
    epochs = (
        stack_batches([part.batches(shard, worker, epoch) for worker, shard in enumerate(shards)])
        for epoch in range(part.epochs)
    )
    return [samples for epoch in epochs for samples in epoch]


def synchronous(part: Partition, seed: int, momentum: float) -> Tensor:
    """torch.optim.SGD on the mean of the workers' losses."""
    data, net = problem(), model(seed)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=momentum)
    for samples in rows(part):
        optimizer.zero_grad()
        losses = [data.loss(net(data.inputs[own]), data.targets[own]) for own in samples]
        torch.stack(losses).mean().backward()
        optimizer.step()
    return torch.cat([value.detach().flatten() for value in net.parameters()])


def ticked(part: Partition, seed: int, modules: int, rule: TickRule, mixing: object = None) -> Tensor:
    """The tick engine's weights [groups, D] on the same samples."""
    data = problem()
    engine = TickEngine(cut_sequential(model(seed), modules), data.loss, rule, groups=part.workers, mixing=mixing)
    engine.run([(data.inputs[own], data.targets[own]) for own in samples] for samples in rows(part))
    return torch.stack(
        [torch.cat([weight.detach().flatten() for agent in group for weight in agent.live]) for group in engine.agents]
    )


@few
@given(workers, seeds, optimizers, st.integers(1, 3))
def test_period_1_complete_and_nothing_stale_is_synchronous_sgd(n: int, seed: int, optimizer: str, modules: int) -> None:
    """By all three drivers, and for any partition into modules where backpropagation is locked."""
    part, momentum = partition(n, seed), 0.9 if optimizer == "sgd_momentum" else 0.0
    wanted = synchronous(part, seed, momentum)
    gossip = train_on_graph(training(seed, optimizer), part, GossipRule(graph=mixing_graph("complete", n)))
    averaged = train_in_rounds(training(seed, optimizer), part, RoundRule(period=every_steps(1)))
    locked = ticked(part, seed, modules, TickRule(schedule="bp", learning_rate=0.1, momentum=momentum))
    for found in (gossip.replicas.workers.weights, averaged.workers, locked):
        assert apart(found, wanted) <= 1e-12


@few
@given(workers, seeds, optimizers)
def test_epoch_averaging_is_the_complete_graph_once_per_epoch(n: int, seed: int, optimizer: str) -> None:
    part = partition(n, seed)
    period = every_epochs(1, part.steps_per_epoch(problem()))
    averaged = train_in_rounds(training(seed, optimizer), part, RoundRule(period=period))
    mixed = train_on_graph(training(seed, optimizer), part, GossipRule(graph=mixing_graph("complete", n), period=period))
    assert apart(averaged.workers, mixed.replicas.workers.weights) <= 1e-12


@few
@given(st.integers(2, 6), seeds, graphs, st.integers(1, 3))
def test_consensus_of_groups_is_gossip_block_by_block(n: int, seed: int, name: str, modules: int) -> None:
    """Mixing every module of S pipelines by A is gossip on the whole model by A, while nothing is stale."""
    part, graph = partition(n, seed), mixing_graph(name, n)
    whole = train_on_graph(training(seed, "sgd_momentum"), part, GossipRule(graph=graph))
    rule = TickRule(schedule="bp", learning_rate=0.1, momentum=0.9)
    assert apart(ticked(part, seed, modules, rule, graph), whole.replicas.workers.weights) <= 1e-12


@few
@given(st.integers(2, 6), seeds, st.sampled_from(["ddg", "fdg"]), st.sampled_from(["stash", "replay"]))
def test_complete_consensus_of_stale_groups_is_gradient_averaging(n: int, seed: int, schedule: str, mode: str) -> None:
    part = partition(n, seed)
    rule = TickRule(schedule=schedule, mode=mode, learning_rate=0.1, momentum=0.9)
    averaged, mixed = (ticked(part, seed, 3, rule, mixing) for mixing in (None, mixing_graph("complete", n)))
    assert apart(averaged, mixed) <= 1e-12


@few
@given(st.integers(4, 8), seeds, st.sampled_from(["linear", "exponential", "step"]))
def test_ada_is_a_matrix_that_varies_in_time(n: int, seed: int, kind: str) -> None:
    part = partition(n, seed, epochs=3)
    ada = Ada(n=n, kind=kind, rate=0.6, milestones=(1,))
    lattices, steps = ada_graphs(ada, 3), part.steps_per_epoch(problem())
    found = train_on_graph(training(seed), part, GossipRule(graph=ada))
    varying = train_in_rounds(training(seed), part, RoundRule(period=every_steps(1), mixing=lambda t: lattices[t // steps](t)))
    assert apart(found.replicas.workers.weights, varying.workers) <= 1e-12


@few
@given(st.integers(2, 6), seeds, optimizers, st.integers(1, 9))
def test_no_links_is_independent_training_and_one_worker_is_sgd(n: int, seed: int, optimizer: str, period: int) -> None:
    part, momentum = partition(n, seed), 0.9 if optimizer == "sgd_momentum" else 0.0
    alone = train_on_graph(
        training(seed, optimizer), part, GossipRule(graph=mixing_graph("alone", n), period=every_steps(period))
    ).replicas.workers.weights
    never = train_in_rounds(training(seed, optimizer), part, RoundRule(period=at_end(), mixing=mixing_graph("alone", n)))
    assert apart(alone, never.workers) <= 1e-12
    one = partition(1, seed)
    for graph in ("ring", "complete", "exponential"):
        rule = GossipRule(graph=mixing_graph(graph, 1), period=every_steps(period))
        found = train_on_graph(training(seed, optimizer), one, rule)
        assert apart(found.weights, synchronous(one, seed, momentum)) <= 1e-12


@few
@given(st.integers(2, 6), seeds, graphs, st.integers(1, 4), st.integers(0, 6))
def test_two_drivers_read_one_schedule(n: int, seed: int, name: str, steps: int, warmup: int) -> None:
    part, period, graph = partition(n, seed), Period(steps=steps, warmup_steps=warmup), mixing_graph(name, n)
    gossip = train_on_graph(training(seed), part, GossipRule(graph=graph, period=period))
    rounds = train_in_rounds(training(seed), part, RoundRule(period=period, mixing=graph))
    assert gossip.exchanges == rounds.synchronisations
    assert apart(gossip.replicas.workers.weights, rounds.workers) <= 1e-12
