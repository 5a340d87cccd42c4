"""Virtual replicas on a graph: limit identities with synchronous training, the mean's law, and real gloo runs of the same."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from gossip_process import model_of, problem_of
from torch import Tensor, nn

from experiments.relaxed.gossip import GossipRule, GossipRun, Replicas, train_on_graph
from experiments.relaxed.graphs import failing_links, rotating_peers
from experiments.relaxed.sharded import Partition
from parsim.errors import AlgorithmError, DataError
from parsim.execute.processes.launch import launch
from parsim.plans.mixing import GRAPHS, Ada, mixing_graph
from parsim.relaxed.replicas import LocalOptimizer, LocalTraining, Workers

RATES = {"sgd": 0.1, "sgd_momentum": 0.05, "adam": 0.01}


def training_of(n: int, optimizer: str = "sgd") -> LocalTraining:
    problem = problem_of(n)
    return LocalTraining(model_of(problem), problem, LocalOptimizer(kind=optimizer, learning_rate=RATES[optimizer]))


def partition_of(n: int, **changes: int) -> Partition:
    return Partition(**{"workers": n, "epochs": 2, "batch": 5, "seed": 4, **changes})


def train(n: int, optimizer: str = "sgd", *, epochs: int = 2, **rule: object) -> GossipRun:
    return train_on_graph(training_of(n, optimizer), partition_of(n, epochs=epochs), GossipRule(**rule))


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
    run = train(6, optimizer, graph=mixing_graph("complete", 6))
    assert apart(run.weights, synchronous(6, optimizer)) <= 1e-12
    assert run.replicas.consensus() <= 1e-24
    overlapped = train(6, optimizer, graph=mixing_graph("complete", 6), combination="combine_adapt")
    assert apart(overlapped.weights, synchronous(6, optimizer)) > 1e-4, "combine_adapt keeps each one's last step to itself"


@pytest.mark.parametrize("optimizer", RATES)
def test_centralised_is_synchronous_training_with_every_optimizer(optimizer: str) -> None:
    run = train(6, optimizer, graph=mixing_graph("complete", 6), centralised=True)
    assert apart(run.weights, synchronous(6, optimizer)) <= 1e-12


def test_one_worker_is_sgd_and_no_links_are_independent_training() -> None:
    assert apart(train(1, graph=mixing_graph("ring", 1)).weights, synchronous(1, "sgd")) <= 1e-13
    run, training = train(4, "sgd_momentum", graph=mixing_graph("alone", 4)), training_of(4, "sgd_momentum")
    order = partition_of(4).order(problem_of(4))
    for worker in range(4):
        alone = Workers.fresh(training.start[None])
        for epoch in range(2):
            for samples in order.batches(worker, epoch):
                alone = training.step(alone, samples[None])
        assert apart(alone.weights[0], run.replicas.workers.weights[worker]) <= 1e-13


@pytest.mark.parametrize("name", [name for name, family in sorted(GRAPHS.items()) if name != "alone" and not family.directed])
def test_the_mean_moves_by_the_mean_gradient(name: str) -> None:
    """mean x <- mean x - eta mean g, for any doubly stochastic W and both orders."""
    n, training = 8, training_of(8)
    drawn = training.start + torch.randn(n, len(training.start), dtype=torch.float64)
    replicas = Replicas(training=training, workers=Workers.fresh(drawn))
    matrix = mixing_graph(name, n)(2)
    stepped = replicas.step(np.arange(n * 5).reshape(n, 5))
    moved = stepped.workers.weights.mean(0)
    assert apart(stepped.mix(matrix).workers.weights.mean(0), moved) <= 1e-12
    overlapped = replicas.mix(matrix).workers.weights + (stepped.workers.weights - replicas.workers.weights)
    assert apart(overlapped.mean(0), moved) <= 1e-12


def test_ada_sends_more_than_a_ring_and_less_than_complete() -> None:
    ada, ring, complete = (
        train(8, epochs=4, graph=graph).epochs[-1].sent_bytes
        for graph in (Ada(n=8, start=6, rate=2.0), mixing_graph("ring", 8), mixing_graph("complete", 8))
    )
    assert ring < ada < complete
    assert ada == (6 + 4 + 2 + 2) * 8 * training_of(8).weight_bytes, "the sum over epochs of k_e, times exchanges and |w|"


def test_closed_loop_sees_what_training_measures() -> None:
    run = train(8, epochs=5, graph=Ada(n=8, kind="closed_loop", target=1e-3))
    assert run.epochs[0].connections == 7, "dense before anything is known"
    assert min(epoch.connections for epoch in run.epochs) < 7
    assert all(epoch.measured is not None and epoch.measured[1] <= epoch.measured[0] for epoch in run.epochs)


def test_push_sum_with_a_doubly_stochastic_matrix_is_plain_gossip() -> None:
    plain = train(8, graph=mixing_graph("exponential", 8))
    pushed = train(8, graph=mixing_graph("exponential", 8), push_sum=True)
    assert apart(plain.replicas.models, pushed.replicas.models) <= 1e-12


def test_push_sum_learns_over_failing_links() -> None:
    graph = failing_links(rotating_peers(8), 0.2, seed=2)
    run = train(8, epochs=8, graph=graph, push_sum=True)
    whole = train(8, epochs=8, graph=rotating_peers(8), push_sum=True)
    assert run.replicas.masses is not None
    assert run.replicas.masses.sum().item() == pytest.approx(8.0, abs=1e-12)
    assert not torch.allclose(run.replicas.masses, torch.ones(8, dtype=torch.float64))
    assert run.score >= whole.score - 0.05
    with pytest.raises(AlgorithmError, match="doubly stochastic"):
        train(8, graph=graph)


def test_the_clock_of_a_run() -> None:
    n, steps = 8, 8
    ring = GossipRule(graph=mixing_graph("ring", n))
    run = train_on_graph(training_of(n), partition_of(n, epochs=1), ring, exchange_s=lambda matrix: 0.25)
    assert run.epochs[-1].seconds == steps * 1.25
    slow = train_on_graph(
        training_of(n),
        partition_of(n, epochs=1),
        ring,
        step_s=lambda t: np.where(np.arange(n) == 0, 3.0 if t == 0 else 1.0, 1.0),
    )
    assert slow.epochs[-1].seconds == steps + 2.0
    assert apart(slow.weights, run.weights) == 0.0, "seconds change no weight where everyone waits for its neighbours"


def test_the_profile_of_a_run() -> None:
    rule = GossipRule(graph=mixing_graph("ring", 6))
    run = train_on_graph(training_of(6), partition_of(6), rule, record_every=3)
    profile = run.profile
    assert profile is not None
    assert profile.tensors == ("0.weight", "0.bias", "2.weight", "2.bias")
    assert profile.rounds.tolist() == [0, 3, 6, 9, 12, 15]
    assert profile.norms.shape == (6, 6, 4)
    assert (profile.consensus > profile.consensus_after).all(), "recorded before mixing, and after"
    weights = run.replicas.workers.weights
    assert run.replicas.norms()[:, 0] == pytest.approx(weights[:, : 8 * 6].norm(dim=1).numpy())
    assert run.replicas.mean_score == pytest.approx(np.mean([run.replicas.training.score(row) for row in weights]))


def test_bad_input() -> None:
    with pytest.raises(AlgorithmError, match="of 4 workers and the partition of 6"):
        train(6, graph=mixing_graph("ring", 4))
    with pytest.raises(DataError, match="more samples"):
        train_on_graph(training_of(2), partition_of(200), GossipRule(graph=mixing_graph("ring", 200)))
    with pytest.raises(AlgorithmError, match="did you mean combine_adapt or adapt_combine"):
        GossipRule(graph=mixing_graph("ring", 4), combination="adapt")
    with pytest.raises(AlgorithmError, match="doubly stochastic"):
        train(2, graph=lambda t: np.array([[0.5, 0.5], [0.2, 0.8]]))


CASES = {
    f"{way}-{graph}-{optimizer}": {"way": way, "graph": graph, "optimizer": optimizer, "seed": 4, "epochs": 2, "batch": 5}
    for way, graph, optimizer in (
        ("adapt_combine", "ring", "sgd"),
        ("adapt_combine", "one_peer_exponential", "sgd_momentum"),
        ("adapt_combine", "star", "adam"),
        ("combine_adapt", "ring", "sgd_momentum"),
        ("adapt_combine", "rotating", "sgd"),
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
        pushed = case["graph"] == "rotating"
        rule = GossipRule(
            graph=rotating_peers(n) if pushed else mixing_graph(case["graph"], n),
            combination="combine_adapt" if case["way"] == "combine_adapt" else "adapt_combine",
            centralised=case["way"] == "centralised",
            push_sum=pushed,
        )
        models = train_on_graph(training_of(n, case["optimizer"]), partition_of(n), rule).replicas.models.numpy()
        for rank in range(n):
            real = ranks[rank][name]
            assert np.abs(real - models[rank % len(models)]).max() <= 1e-12, f"{name}, rank {rank}"
        assert np.abs(real - training_of(n).start.numpy()).max() > 1e-2, "it trained"
