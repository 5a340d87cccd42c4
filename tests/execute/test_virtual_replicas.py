"""Virtual replicas: on graphs, averaging, merging, and DBench; identities with synchronous training and with real runs."""

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
from scipy.stats import kendalltau
from torch import Tensor, nn

import parsim
from experiments.relaxed.arrivals import merge_events, train_by_arrival
from experiments.relaxed.learning import rule_of, trained
from experiments.relaxed.sharded import Partition, train_averaged
from parsim.errors import AlgorithmError, ConfigError, DataError, PlanError
from parsim.execute.mixing import restored, rounded
from parsim.execute.processes.launch import launch
from parsim.plans.mixing import GRAPHS, MERGES, MergeRule
from parsim.plans.synchronisation import COMBINATIONS, Synchronisation, parse_synchronisation
from parsim.relaxed.dbench import ALL_METRICS, METRICS, BenchRun, ranks, relations, run_bench, summary, tensor_rows
from parsim.relaxed.problems import LearningProblem, generated_problem, load_problem, perceptron
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


def synchronous(problem: LearningProblem, model: nn.Module, partition: Partition, optimizer: str) -> Tensor:
    """torch.optim on the mean of the workers' losses: [D]."""
    model, order = copy.deepcopy(model), partition.order(problem)
    make = {"sgd": torch.optim.SGD, "sgd_momentum": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer]
    rule = make(model.parameters(), lr=RATES[optimizer], **({"momentum": 0.9} if optimizer == "sgd_momentum" else {}))
    for step in range(partition.epochs * order.steps_per_epoch):
        rule.zero_grad()
        samples = order.indices(step).reshape(partition.workers, -1)
        losses = [problem.loss(model(problem.inputs[own]), problem.targets[own]) for own in samples]
        torch.stack(losses).mean().backward()
        rule.step()
    return torch.cat([value.detach().flatten() for value in model.parameters()])


def synchronous_of(n: int, optimizer: str) -> Tensor:
    problem = problem_of(n)
    return synchronous(problem, model_of(problem), partition_of(n), optimizer)


@pytest.mark.parametrize("optimizer", RATES)
def test_centralised_is_synchronous_training_with_every_optimizer(optimizer: str) -> None:
    assert apart(train(6, optimizer, "all_reduce")[0].weights[0], synchronous_of(6, optimizer)) <= 1e-12


def test_one_worker_is_sgd_and_no_rounds_are_independent_training() -> None:
    assert apart(train(1, rule="gossip/1 ring")[0].weights[0], synchronous_of(1, "sgd")) <= 1e-13
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


# Virtual replicas that average or merge on shards: identities with synchronous training and with one another.

F64 = torch.float64


def small_problem() -> LearningProblem:
    return generated_problem(F64, samples=96, features=6, classes=4)


def small_model(problem: LearningProblem) -> nn.Sequential:
    return perceptron(problem, (7, 5, 6), seed=3, dtype=F64, activation="tanh")


def training(kind: str = "sgd", learning_rate: float = 0.1) -> LocalTraining:
    problem = small_problem()
    return LocalTraining(small_model(problem), problem, LocalOptimizer(kind=kind, learning_rate=learning_rate))


def steps_in(partition: Partition) -> int:
    return partition.epochs * partition.order(small_problem()).steps_per_epoch


def averaged(partition: Partition, kind: str = "sgd", **rule: object) -> Tensor:
    """The mean weights after training by a rule of kind average; one round at the end unless the rule says otherwise."""
    rule.setdefault("period_steps", steps_in(partition))
    phase = Synchronisation(kind="average", **rule), steps_in(partition)
    return train_averaged(training(kind), partition, phase).weights


def alone(partition: Partition, kind: str = "sgd") -> Tensor:
    """Weights [workers, D] of workers that never meet."""
    task, order = training(kind), partition.order(small_problem())
    workers = Workers.fresh(task.start.repeat(partition.workers, 1))
    for step in range(steps_in(partition)):
        workers = task.step(workers, order.indices(step).reshape(partition.workers, -1))
    return workers.weights


EVEN = Partition(workers=4, epochs=4, batch=4, seed=5)


def test_an_outer_optimizer_of_rate_one_is_averaging_and_diloco_is_not() -> None:
    epoch = EVEN.order(small_problem()).steps_per_epoch
    plain = averaged(EVEN, "adam", period_steps=epoch)
    outer = averaged(EVEN, "adam", period_steps=epoch, outer_optimizer="sgd", outer_learning_rate=1.0)
    assert (plain - outer).abs().max().item() <= 1e-12
    diloco = averaged(EVEN, "adam", period_steps=epoch, outer_optimizer="nesterov")
    assert (plain - diloco).abs().max().item() > 1e-3


def test_post_local_begins_synchronous_and_ends_local() -> None:
    half = steps_in(EVEN) // 2
    every_step, local = Synchronisation(kind="average"), Synchronisation(kind="average", period_steps=5)
    warm = train_averaged(training(), EVEN, (every_step, half), (every_step, half)).weights
    assert (warm - synchronous(small_problem(), small_model(small_problem()), EVEN, "sgd")).abs().max().item() <= 1e-12, (
        "a phase goes on where the one before ended"
    )
    cold = train_averaged(training(), EVEN, (every_step, half), (local, half)).weights
    assert not torch.equal(cold, warm)


def test_weighted_average_of_unequal_shards() -> None:
    uneven = Partition(workers=3, epochs=1, batch=4, proportions=(1.0, 2.0, 5.0), keep_remainder=True)
    order = uneven.order(small_problem())
    sizes = torch.tensor([len(shard) for shard in order.shards], dtype=F64)
    weighted = averaged(uneven, weights=(order.sample_weights,))
    assert (weighted - (sizes / sizes.sum()) @ alone(uneven)).abs().max().item() <= 1e-14


def test_those_who_do_not_take_part_make_no_step() -> None:
    part = Partition(workers=4, epochs=1, batch=4)
    each, mean = alone(part), averaged(part, participation=0.5)
    pairs = [(each[i] + each[j]) / 2 for i in range(4) for j in range(i)]
    assert min((mean - pair).abs().max().item() for pair in pairs) <= 1e-14


def test_a_drawn_round_of_a_stepping_rule_is_the_rounds_own() -> None:
    part = Partition(workers=4, epochs=2, batch=4)
    rule = Synchronisation(kind="average", period_steps=3, participation=0.5, seed=2)
    order = part.order(small_problem())
    steps = steps_of(rule, 4, training(), order)
    rounds = [next(steps)[1].rounds for _ in range(7)]
    assert rounds == [0, 0, 1, 1, 1, 2, 2]


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
    task, part = training(), Partition(workers=1, epochs=3, batch=4)
    merged = train_by_arrival(task, part, MergeRule(kind="half", workers=1))
    weights = task.start
    for epoch in range(3):
        workers = Workers.fresh(weights[None])
        for samples in part.order(task.problem).batches(0, epoch):
            workers = task.step(workers, samples[None])
        weights = (weights + workers.weights[0]) * 0.5
    assert torch.equal(merged.weights, weights)


@pytest.mark.parametrize("kind", ["running", "buffered"])
def test_first_round_of_exact_merges_is_the_epoch_average(kind: str) -> None:
    part = Partition(workers=4, epochs=1, batch=4)
    merged = train_by_arrival(training(), part, MergeRule(kind=kind, workers=4, buffer=4))
    assert (averaged(part) - merged.weights).abs().max().item() <= 1e-12


def test_half_of_one_round_weighs_by_arrival() -> None:
    part, task = Partition(workers=4, epochs=1, batch=4), training()
    each = alone(part)
    merged = train_by_arrival(
        task, part, MergeRule(kind="half", workers=4), step_s=lambda worker, epoch: [4.0, 2.0, 1.0, 3.0][worker]
    )
    arrived = [task.start, *(each[worker] for worker in (2, 1, 3, 0))]
    wanted = sum(w * x for w, x in zip([1 / 16, 1 / 16, 1 / 8, 1 / 4, 1 / 2], arrived, strict=True))
    assert (merged.workers[0] - wanted).abs().max().item() <= 1e-14, "worker 0 came last and holds the global model"


@pytest.mark.parametrize("kind", MERGES)
def test_a_recorded_order_replays_bitwise(kind: str) -> None:
    part, rule = Partition(workers=3, epochs=3, batch=4), MergeRule(kind=kind, workers=3, buffer=2)

    def step_s(worker: int, epoch: int) -> float:
        return (3.0, 1.0, 1.7)[worker]

    steps = part.order(small_problem()).steps_per_epoch
    order = merge_events(lambda worker, epoch: steps * step_s(worker, epoch), 3, epochs=3)
    asked = train_by_arrival(training(), part, rule, step_s=step_s)
    replayed = train_by_arrival(training(), part, rule, order=order)
    assert torch.equal(asked.weights, replayed.weights)
    another = tuple(sorted(order, key=lambda event: (event.epoch, -event.worker)))
    other = train_by_arrival(training(), part, rule, order=another)
    assert not torch.equal(asked.weights, other.weights), "the order of arrival is part of the algorithm"


def test_regression_learns() -> None:
    problem = load_problem("diabetes", dtype=F64)
    task = LocalTraining(perceptron(problem, (16,), dtype=F64), problem, LocalOptimizer(learning_rate=0.02))
    part = Partition(workers=4, epochs=20, batch=8, keep_remainder=True)
    steps = part.order(problem).steps_per_epoch
    score = train_averaged(task, part, (Synchronisation(kind="average", period_steps=steps), 20 * steps)).score
    assert score > 0.25
    assert score > task.score(task.start)


def test_bad_averaging() -> None:
    with pytest.raises(DataError, match=r"100 workers cannot share 96 samples"):
        Partition(workers=100, epochs=1).order(small_problem())
    normed = LocalTraining(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), small_problem(), LocalOptimizer())
    with pytest.raises(AlgorithmError, match="BatchNorm would count the padding"):
        normed.step(Workers.fresh(normed.start.repeat(2, 1)), np.array([[0, 1], [2, -1]]))
    with pytest.raises(AlgorithmError, match="virtual stages need a model without buffers"):
        normed.gradient(normed.start[None], np.array([[0, 1]]))
    with pytest.raises(AlgorithmError, match="did you mean sgd"):
        LocalOptimizer(kind="sdg")
    with pytest.raises(DataError, match="did you mean digits"):
        load_problem("digit")


@pytest.mark.parametrize(("message_format", "bound"), [("bf16", 2.0**-8), ("int8", 1 / 254)])
def test_rounded_changes_come_back_to_half_a_step(message_format: str, bound: float) -> None:
    """bf16: of each element; int8: of the largest of its tensor. A tensor that has not changed comes back as zeros."""
    sizes = [7, 1, 30, 5]
    change = torch.randn(43, dtype=F64, generator=torch.Generator().manual_seed(0))
    change[8:38] *= 1e-6
    change[38:] = 0.0
    message = rounded(change, sizes, message_format)
    assert message.dtype == torch.uint8
    assert len(message) == Synchronisation(kind="average", message_format=message_format).message_bytes(43, 4)
    back = restored(message, sizes, message_format, F64)
    for part, got in zip(torch.split(change, sizes), torch.split(back, sizes), strict=True):
        scale = part.abs() if message_format == "bf16" else part.abs().max()
        assert bool(((got - part).abs() <= bound * scale * (1 + 1e-6)).all())


# DBench on small problems: what it records, how it ranks, and that ways of training see the same samples.

N = 8
ADA = "ada(start=6, rate=2.0, rounds=8, epochs=3)"
WAYS = ("all_reduce", "ring", "exponential", "complete", ADA)


def bench_training(hidden: tuple[int, ...]) -> object:
    def made(seed: int) -> LocalTraining:
        problem = load_problem("generated", dtype=torch_double(), samples=320, features=6, classes=3)
        model = perceptron(problem, hidden, seed=seed, dtype=torch_double())
        return LocalTraining(model, problem, LocalOptimizer(learning_rate=0.2))

    return made


def torch_double() -> object:
    import torch

    return torch.float64


@pytest.fixture(scope="module")
def runs() -> list[BenchRun]:
    models = {"linear": bench_training(()), "mlp": bench_training((8,))}
    return run_bench(models, WAYS, replicas=(4, N), shards=("iid", "label_sorted"), seeds=(0, 1), epochs=3, batch=5, every=2)


@pytest.mark.slow
def test_every_combination_runs_once(runs: list[BenchRun]) -> None:
    assert len(runs) == len({(*run.setting.values(), run.way, run.seed) for run in runs}) == 2 * 2 * 2 * 2 * len(WAYS)
    assert {len(run.profile.tensors) for run in runs if run.model == "mlp"} == {4}
    assert all(run.profile.norms.shape[1] == (run.n if run.way != "all_reduce" else 1) for run in runs)
    table = summary(runs)
    assert len(table) == 2 * 2 * 2 * len(WAYS)
    assert {row["seeds"] for row in table} == {2}
    tensors = tensor_rows(runs)
    assert len(tensors) == 2 * 2 * len(WAYS) * (2 + 4)
    assert set(METRICS) <= set(tensors[0])


@pytest.mark.slow
def test_centralised_is_the_complete_graph_without_variance(runs: list[BenchRun]) -> None:
    """Plain SGD: averaging gradients is averaging weights, so the scores agree; only the recorded variance differs."""
    found = {(*run.setting.values(), run.seed, run.way): run for run in runs}
    for (*setting, seed, way), run in found.items():
        if way == "all_reduce":
            assert run.score == pytest.approx(found[*setting, seed, "complete"].score, abs=1e-12)
            assert run.mean_score == run.score
            assert all(abs(run.spread(metric)) <= 1e-14 for metric in ALL_METRICS)
            assert found[*setting, seed, "complete"].spread("consensus") > 0.0


@pytest.mark.slow
def test_graphs_are_ranked_and_related(runs: list[BenchRun]) -> None:
    table = {(row["model"], row["n"], row["sharding"], row["metric"]): row for row in ranks(runs)}
    row = table["mlp", N, "label_sorted", "consensus"]
    assert row["all_reduce"] == 1.0
    assert row["complete"] < row["exponential"] < row["ring"] <= len(WAYS)
    assert sum(row[way] for way in WAYS) == pytest.approx(len(WAYS) * (len(WAYS) + 1) / 2)
    setting = {"model": "mlp", "n": N, "sharding": "label_sorted"}
    related = {row["of"]: row for row in relations(runs) if setting.items() <= row.items()}
    group = [run for run in runs if run.setting == setting]
    by_way = {way: [run for run in group if run.way == way] for way in WAYS}
    connections = [np.mean([run.connections for run in found]) for found in by_way.values()]
    scores = [np.mean([run.score for run in found]) for found in by_way.values()]
    assert related["connections"]["tau_with_score"] == pytest.approx(kendalltau(connections, scores).statistic)
    assert set(related) == {"connections", *ALL_METRICS}


@pytest.mark.slow
def test_label_sorted_replicas_are_further_apart(runs: list[BenchRun]) -> None:
    table = {(row["model"], row["n"], row["sharding"], row["way"]): row for row in summary(runs)}
    for model in ("linear", "mlp"):
        apart, alike = (table[model, N, sharding, "ring"] for sharding in ("label_sorted", "iid"))
        assert apart["final_consensus"] > 2 * alike["final_consensus"]
        assert apart["mean_replica_score"] < alike["mean_replica_score"]
        ada = table[model, N, "iid", ADA]
        assert ada["connections"] == pytest.approx((6 + 4 + 2) / 3)


def test_bad_benches() -> None:
    models = {"linear": bench_training(())}
    with pytest.raises(
        AlgorithmError, match="at least one model, graph, number of replicas, kind of shards and seed; got 1, 0, 1, 1 and 1"
    ):
        run_bench(models, (), replicas=(4,))
    with pytest.raises(DataError, match="more samples"):
        run_bench(models, ("ring",), replicas=(1000,))
    one = run_bench(models, ("ring",), replicas=(4,), epochs=1, batch=5)
    with pytest.raises(AlgorithmError, match="at least two of them"):
        relations(one)


def test_the_bench_scores_a_net_by_the_running_statistics_that_it_learnt() -> None:
    """Inputs far from the unit deviation that fresh BatchNorm statistics stand for: scored by those, every class is alike."""
    problem = load_problem("digits")
    moved = replace(problem, inputs=problem.inputs * 9 + 50, test_inputs=problem.test_inputs * 9 + 50)

    def normalised(seed: int) -> LocalTraining:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
        return LocalTraining(model, moved, LocalOptimizer(learning_rate=0.1))

    (run,) = run_bench({"normalised": normalised}, ("complete",), replicas=(4,), epochs=4, batch=16)
    assert min(run.score, run.mean_score) > 0.8


@pytest.mark.slow
def test_the_bench_trains_a_net_with_running_statistics_of_every_replica() -> None:
    """Three replicas of a residual net with BatchNorm, 32 x 32; all_reduce keeps their weights equal."""
    found = parsim.bench_graphs(
        ("all_reduce", "ring"), models=("resnet_small",), replicas=(3,), shards=("iid",), epochs=1, batch=64
    )
    equal, ring = found.tables["dbench"]
    assert equal["consensus"] < 1e-9 < ring["consensus"]
    assert equal["score"] == pytest.approx(equal["mean_replica_score"], abs=0.05)


def test_the_bench_for_users_tells_scores_relations_and_what_cannot_be() -> None:
    found = parsim.bench_graphs(
        ("all_reduce", "ring"), models=("logistic",), replicas=(4,), shards=("iid",), epochs=1, batch=16
    )
    assert [row["way"] for row in found.tables["dbench"]] == ["all_reduce", "ring"]
    assert list(found.table()["n"]) == [4, 4]
    assert found.findings()[-1].startswith("iid: Kendall's tau of accuracy (of the replicas' own accuracy) with connections")
    assert set(found.to_dict()) == {"dbench", "dbench_ranks", "dbench_relations", "dbench_tensors", "findings"}
    with pytest.raises(ConfigError, match=r"unknown model 'mpl' of the graph bench; did you mean mlp\?"):
        parsim.bench_graphs(models=("mpl",))
    with pytest.raises(ConfigError, match="logistic is made for digits of 8 x 8; on cifar10 train resnet_small"):
        parsim.bench_graphs(models=("logistic",), dataset="cifar10")
    with pytest.raises(DataError, match="cifar10"):
        parsim.bench_graphs(models=("resnet_small",), dataset="cifar10", root="nowhere")
    with pytest.raises(DataError, match="gpt_small does not classify images"):
        parsim.bench_graphs(models=("gpt_small",))
    with pytest.raises(ConfigError, match="graphs are compared, and ring is one; add another"):
        parsim.bench_graphs(("ring",))
    with pytest.raises(PlanError, match="unknown mixing graph 'rnig'"):
        parsim.bench_graphs(("ring", "rnig"), replicas=(4,), epochs=1)
    with pytest.raises(AlgorithmError, match="has no round in 11 steps"):
        parsim.bench_graphs(("average/100", "ring"), models=("logistic",), epochs=1)
