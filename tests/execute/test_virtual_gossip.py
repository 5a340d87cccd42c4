"""Virtual replicas on a graph: limit identities with synchronous training, the mean's law, and real gloo runs of the same."""

from __future__ import annotations

import copy
import json
import os
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from gossip_process import model_of, problem_of
from torch import Tensor, nn

from experiments.relaxed.learning import rule_of, trained
from experiments.relaxed.sharded import Partition
from parsim.execute.processes.launch import launch
from parsim.plans.mixing import GRAPHS
from parsim.plans.synchronisation import COMBINATIONS, parse_synchronisation
from parsim.relaxed.dbench import consensus
from parsim.relaxed.replicas import LocalOptimizer, LocalTraining, RoundState, Workers, mixed_weights, steps_of

RATES = {"sgd": 0.1, "sgd_momentum": 0.05, "adam": 0.01}


def training_of(n: int, optimizer: str = "sgd") -> LocalTraining:
    problem = problem_of(n)
    return LocalTraining(model_of(problem), problem, LocalOptimizer(kind=optimizer, learning_rate=RATES[optimizer]))


def partition_of(n: int, **changes: int) -> Partition:
    return Partition(**{"workers": n, "epochs": 2, "batch": 5, "seed": 4, **changes})


def train(n: int, optimizer: str = "sgd", rule: str = "gossip/1 complete") -> tuple[Workers, RoundState]:
    """What two epochs make of n replicas; under all_reduce of the one that stands for all."""
    parsed, training = parse_synchronisation(rule), training_of(n, optimizer)
    order = partition_of(n).order(training.problem)
    states = steps_of(parsed, n if parsed.mixes else 1, training, order)
    return next(islice(states, 2 * order.steps_per_epoch - 1, None))


def apart(first: Tensor, second: Tensor) -> float:
    return (first - second).abs().max().item()


def synchronous(n: int, optimizer: str, *, epochs: int = 2) -> Tensor:
    """torch.optim on the mean of the workers' losses: [D]."""
    problem, partition = problem_of(n), partition_of(n)
    model = copy.deepcopy(model_of(problem))
    make = {"sgd": torch.optim.SGD, "sgd_momentum": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer]
    rule = make(model.parameters(), lr=RATES[optimizer], **({"momentum": 0.9} if optimizer == "sgd_momentum" else {}))
    order = partition.order(problem)
    for step in range(epochs * order.steps_per_epoch):
        rule.zero_grad()
        samples = order.indices(step).reshape(n, -1)
        losses = [nn.functional.cross_entropy(model(problem.inputs[own]), problem.targets[own]) for own in samples]
        torch.stack(losses).mean().backward()
        rule.step()
    return torch.cat([value.detach().flatten() for value in model.parameters()])


@pytest.mark.parametrize("optimizer", ["sgd", "sgd_momentum"])
def test_complete_graph_at_period_one_is_synchronous_training(optimizer: str) -> None:
    weights = train(6, optimizer)[0].weights
    assert apart(weights.mean(0), synchronous(6, optimizer)) <= 1e-12
    assert consensus(weights) <= 1e-24
    overlapped = train(6, optimizer, "gossip/1 complete combination=combine_adapt")[0].weights.mean(0)
    assert apart(overlapped, synchronous(6, optimizer)) > 1e-4, "combine_adapt keeps each one's last step to itself"


@pytest.mark.parametrize("optimizer", RATES)
def test_centralised_is_synchronous_training_with_every_optimizer(optimizer: str) -> None:
    assert apart(train(6, optimizer, "all_reduce")[0].weights[0], synchronous(6, optimizer)) <= 1e-12


def test_one_worker_is_sgd_and_no_rounds_are_independent_training() -> None:
    assert apart(train(1, rule="gossip/1 ring")[0].weights[0], synchronous(1, "sgd")) <= 1e-13
    workers, training = train(4, "sgd_momentum", "average/1000")[0], training_of(4, "sgd_momentum")
    order = partition_of(4).order(problem_of(4))
    for worker in range(4):
        alone = Workers.fresh(training.start[None])
        for epoch in range(2):
            for samples in order.batches(worker, epoch):
                alone = training.step(alone, samples[None])
        assert apart(alone.weights[0], workers.weights[worker]) <= 1e-13


@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("name", [name for name, family in sorted(GRAPHS.items()) if name != "alone" and not family.directed])
def test_the_mean_moves_by_the_mean_gradient(name: str, combination: str) -> None:
    """mean x <- mean x - eta mean g, for any doubly stochastic W and both orders."""
    n, training = 8, training_of(8)
    drawn = training.start + torch.randn(n, len(training.start), dtype=torch.float64)
    stepped = training.step(Workers.fresh(drawn), np.arange(n * 5).reshape(n, 5)).weights
    rule = parse_synchronisation(f"gossip/1 {name} combination={combination}")
    mixed, _ = mixed_weights(rule, drawn, stepped, replace(RoundState.fresh(drawn), rounds=2))
    assert apart(mixed.mean(0), stepped.mean(0)) <= 1e-12


def test_ada_sends_more_than_a_ring_and_less_than_complete() -> None:
    training, partition = training_of(8), Partition(workers=8, epochs=4, batch=5, seed=4)
    rules = (
        rule_of(f"gossip/1 {graph}", partition, training) for graph in ("ring", "ada(start=6, rate=2, {changes})", "complete")
    )
    ring, ada, complete = (trained(rule, partition, training).sent for rule in rules)
    assert ring < ada < complete
    assert ada == (6 + 4 + 2 + 2) * 8, "the sum over epochs of k_e, times exchanges"


def test_push_sum_with_a_doubly_stochastic_matrix_is_plain_gossip() -> None:
    plain, pushed = (train(8, rule=f"gossip/1 exponential{push}")[0].weights for push in ("", " push_sum"))
    assert apart(plain, pushed) <= 1e-12


CASES = {
    f"{way}-{graph}-{optimizer}": {"way": way, "graph": graph, "optimizer": optimizer, "seed": 4, "epochs": 2, "batch": 5}
    | ({"push_sum": True} if GRAPHS[graph].directed else {})
    for way, graph, optimizer in (
        ("adapt_combine", "ring", "sgd"),
        ("adapt_combine", "one_peer_exponential", "sgd_momentum"),
        ("adapt_combine", "star", "adam"),
        ("combine_adapt", "ring", "sgd_momentum"),
        ("adapt_combine", "random_directed", "sgd"),
        ("centralised", "complete", "adam"),
    )
}


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_weights_are_those_of_a_real_run_over_gloo(n: int, tmp_path: Path) -> None:
    job = tmp_path / "JOB.json"
    job.write_text(json.dumps(CASES))
    search = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    launch(job, n, module="gossip_process", timeout_s=120.0, env={"PYTHONPATH": search})
    ranks = [np.load(tmp_path / f"rank{rank}.npz") for rank in range(n)]
    for name, case in CASES.items():
        rule = f"gossip/1 {case['graph']} combination={case['way']}{' push_sum' * case.get('push_sum', False)}"
        models = train(n, case["optimizer"], "all_reduce" if case["way"] == "centralised" else rule)[0].weights.numpy()
        for rank in range(n):
            real = ranks[rank][name]
            assert np.abs(real - models[rank % len(models)]).max() <= 1e-12, f"{name}, rank {rank}"
        assert np.abs(real - training_of(n).start.numpy()).max() > 1e-2, "it trained"
