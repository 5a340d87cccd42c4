"""Virtual replicas that average or merge on shards: identities with synchronous training and with one another."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from experiments.relaxed.arrivals import merge_events, train_by_arrival
from experiments.relaxed.sharded import Partition, train_averaged
from parsim.errors import AlgorithmError, DataError
from parsim.execute.mixing import restored, rounded
from parsim.plans.mixing import MERGES, MergeRule
from parsim.plans.synchronisation import Synchronisation
from parsim.relaxed.problems import LearningProblem, generated_problem, load_problem, perceptron
from parsim.relaxed.replicas import LocalOptimizer, LocalTraining, Workers, steps_of

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


def data_parallel(partition: Partition, kind: str) -> Tensor:
    """Plain torch: one optimizer, the mean of the workers' gradients at every step."""
    problem = small_problem()
    model = small_model(problem)
    makers = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    }
    optimizer, order = makers[kind](model.parameters()), partition.order(problem)
    for step in range(steps_in(partition)):
        optimizer.zero_grad()
        for samples in torch.from_numpy(order.indices(step).reshape(partition.workers, -1)):
            (problem.loss(model(problem.inputs[samples]), problem.targets[samples]) / partition.workers).backward()
        optimizer.step()
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


EVEN = Partition(workers=4, epochs=4, batch=4, seed=5)


@pytest.mark.parametrize("kind", ["sgd", "sgd_momentum"])
def test_averaging_after_every_step_is_synchronous_training(kind: str) -> None:
    """With momentum too, whose buffers are never averaged: the update is linear in the gradient."""
    assert (averaged(EVEN, kind, period_steps=1) - data_parallel(EVEN, kind)).abs().max().item() <= 1e-12


def test_with_adam_it_is_not() -> None:
    assert (averaged(EVEN, "adam", period_steps=1) - data_parallel(EVEN, "adam")).abs().max().item() > 1e-3


@pytest.mark.parametrize("kind", ["sgd", "sgd_momentum", "adam"])
def test_one_worker_is_sequential_training(kind: str) -> None:
    part = Partition(workers=1, epochs=3, batch=4)
    assert (averaged(part, kind, period_steps=3) - data_parallel(part, kind)).abs().max().item() <= 1e-11


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
    assert (warm - data_parallel(EVEN, "sgd")).abs().max().item() <= 1e-12, "a phase goes on where the one before ended"
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


def test_a_straggler_in_simulated_seconds() -> None:
    """2x slower among 8: merging keeps at least 0.93 of (7 + 0.5)/8 of the throughput, where averaging keeps a half."""
    part, slow = Partition(workers=8, epochs=6, batch=3), [2.0, *[1.0] * 7]
    merged = train_by_arrival(
        training(), part, MergeRule(workers=8), step_s=lambda worker, epoch: slow[worker], total_merges=45
    )
    epoch_s = part.order(small_problem()).steps_per_epoch
    assert (45 / merged.curve[-1][0]) / (8 / epoch_s) >= 0.93 * (7 + 0.5) / 8


def test_regression_learns() -> None:
    problem = load_problem("diabetes", dtype=F64)
    task = LocalTraining(perceptron(problem, (16,), dtype=F64), problem, LocalOptimizer(learning_rate=0.02))
    part = Partition(workers=4, epochs=20, batch=8, keep_remainder=True)
    steps = part.order(problem).steps_per_epoch
    score = train_averaged(task, part, (Synchronisation(kind="average", period_steps=steps), 20 * steps)).score
    assert score > 0.25
    assert score > task.score(task.start)


def test_bad_input() -> None:
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
