"""The limits in which the policies (partition, staleness, mixing, period) meet, on random sizes, graphs, seeds and optimizers.

Everything here compares weights to 1e-12 in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from experiments.relaxed.decoupled import TickEngine, TickRule, cut_sequential
from experiments.relaxed.sharded import Partition
from parsim.plans.mixing import GRAPHS, Ada, mixing_graph
from parsim.plans.synchronisation import Synchronisation
from parsim.relaxed.problems import LearningProblem, load_problem, perceptron
from parsim.relaxed.replicas import LocalOptimizer, LocalTraining, Workers, steps_of

F64 = torch.float64
few = settings(max_examples=12, deadline=None)
workers = st.integers(1, 6)
seeds = st.integers(0, 999)
optimizers = st.sampled_from(["sgd", "sgd_momentum"])
graphs = st.sampled_from([name for name, family in sorted(GRAPHS.items()) if name != "alone" and not family.directed])


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


def distance(weights: Tensor) -> float:
    """(1/n) sum_i |x_i - mean|^2."""
    return (weights - weights.mean(0)).square().sum(1).mean().item()


def rows(part: Partition) -> list[np.ndarray]:
    """The samples [n, batch] of every step."""
    order = part.order(problem())
    return [order.indices(step).reshape(part.workers, -1) for step in range(part.epochs * order.steps_per_epoch)]


def planned(part: Partition, seed: int, optimizer: str = "sgd", **rule: object) -> Tensor:
    """Weights [n, D] of virtual replicas that train by the rule of a plan."""
    order = part.order(problem())
    steps = steps_of(Synchronisation(**rule), part.workers, training(seed, optimizer), order)
    return next(islice(steps, part.epochs * order.steps_per_epoch - 1, None))[0].weights


def by_hand(part: Partition, seed: int, optimizer: str, graph: Callable[[int], np.ndarray]) -> Tensor:
    """Weights [n, D] of replicas that all make a step and mix by the matrix of that step."""
    own = training(seed, optimizer)
    state = Workers.fresh(own.start.repeat(part.workers, 1))
    for step, samples in enumerate(rows(part)):
        state = own.step(state, samples)
        state = replace(state, weights=torch.tensor(graph(step)) @ state.weights)
    return state.weights


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
    gossip = by_hand(part, seed, optimizer, mixing_graph("complete", n))
    averaged = planned(part, seed, optimizer, kind="average")
    locked = ticked(part, seed, modules, TickRule(schedule="bp", learning_rate=0.1, momentum=momentum))
    for found in (gossip, averaged, locked):
        assert apart(found, wanted) <= 1e-12


@few
@given(st.integers(2, 6), seeds, optimizers)
def test_epoch_averaging_is_the_complete_graph_once_per_epoch(n: int, seed: int, optimizer: str) -> None:
    part = partition(n, seed)
    steps = part.order(problem()).steps_per_epoch
    averaged = planned(part, seed, optimizer, kind="average", period_steps=steps)
    mixed = planned(part, seed, optimizer, kind="gossip", graph="complete", period_steps=steps)
    assert apart(averaged, mixed) <= 1e-12


@few
@given(st.integers(2, 6), seeds, graphs, st.integers(1, 3))
def test_consensus_of_groups_is_gossip_block_by_block(n: int, seed: int, name: str, modules: int) -> None:
    """Mixing every module of S pipelines by A is gossip on the whole model by A, while nothing is stale."""
    part, graph = partition(n, seed), mixing_graph(name, n)
    whole = by_hand(part, seed, "sgd_momentum", graph)
    rule = TickRule(schedule="bp", learning_rate=0.1, momentum=0.9)
    assert apart(ticked(part, seed, modules, rule, graph), whole) <= 1e-12


@few
@given(st.integers(2, 6), seeds, st.sampled_from(["ddg", "fdg"]), st.sampled_from(["stash", "fresh", "replay"]))
def test_complete_consensus_of_stale_groups_is_gradient_averaging(n: int, seed: int, schedule: str, mode: str) -> None:
    part = partition(n, seed)
    rule = TickRule(schedule=schedule, mode=mode, learning_rate=0.1, momentum=0.9)
    averaged, mixed = (ticked(part, seed, 3, rule, mixing) for mixing in (None, mixing_graph("complete", n)))
    assert apart(averaged, mixed) <= 1e-12


@few
@given(st.integers(4, 8), seeds, st.sampled_from(["linear", "exponential"]))
def test_ada_is_a_matrix_that_varies_in_time(n: int, seed: int, kind: str) -> None:
    part = partition(n, seed, epochs=3)
    ada = Ada(n=n, kind=kind, rate=0.6)
    lattices, steps = [ada.graph(epoch) for epoch in range(3)], part.order(problem()).steps_per_epoch
    varying = by_hand(part, seed, "sgd", lambda t: lattices[t // steps](t))
    of_a_plan = planned(part, seed, kind="gossip", graph=f"ada(kind={kind}, rate=0.6, rounds={steps}, epochs=3)")
    assert apart(varying, of_a_plan) <= 1e-12


@few
@given(st.integers(4, 8), seeds, st.sampled_from([1e-5, 1e-4, 1e-3, 1e-2]))
def test_a_closed_loop_of_a_plan_is_one_that_measures_the_consensus_distance(n: int, seed: int, target: float) -> None:
    """The plan's replicas measure norms before and behind a mixing; the others |x_i - mean|^2."""
    part = partition(n, seed, epochs=4)
    ada, steps = Ada(n=n, kind="closed_loop", target=target), part.order(problem()).steps_per_epoch
    own, taken = training(seed), [math.inf]
    state = Workers.fresh(own.start.repeat(n, 1))
    for step, samples in enumerate(rows(part)):
        if step % steps == 0:
            graph, taken = ada.graph(ada.place(float(np.mean(taken)))), []
        stepped = own.step(state, samples).weights
        state = Workers.fresh(torch.tensor(graph(step)) @ stepped)
        taken.append(distance(stepped) - distance(state.weights))
    of_a_plan = planned(part, seed, kind="gossip", graph=f"ada(kind=closed_loop, target={target}, rounds={steps})")
    assert apart(state.weights, of_a_plan) <= 1e-12


@few
@given(st.integers(2, 6), seeds, graphs)
def test_gossip_on_a_graph_is_the_rule_of_a_plan(n: int, seed: int, name: str) -> None:
    part, graph = partition(n, seed), mixing_graph(name, n)
    assert apart(by_hand(part, seed, "sgd", graph), planned(part, seed, kind="gossip", graph=name)) <= 1e-12
