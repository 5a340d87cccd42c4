"""Synchronous rounds: every worker makes local steps on its shard; when the period says, all weights are mixed at once.

One engine for synchronous training (period 1), local SGD, epoch averaging, post-local SGD, FedAvg with partial participation,
DiLoCo (an outer optimizer) and gossip (a mixing matrix per round). It keeps the workers' simulated clocks: a round ends for all
when its slowest participant is done and the weights are exchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from parsim.algorithms.periods import Period, warn_if_not_synchronous
from parsim.errors import AlgorithmError
from parsim.plans.averaging import (
    OuterOptimizer,
    Shards,
    averaging_matrix,
    participation_weights,
    sample_weights,
    shard_samples,
)
from parsim.plans.mixing import MixingGraph, check_connected_within, check_doubly_stochastic
from parsim.relaxed.problems import LearningProblem
from parsim.relaxed.replicas import (
    Feed,
    LocalTraining,
    Workers,
    batches_in,
    check_room,
    epoch_batches,
    feed_problem,
    stack_batches,
)

Mixing = Callable[[int], NDArray[np.float64]]
"""The matrix [P, P] of round number t: row i holds what worker i takes of each."""

StepSeconds = Callable[[int, int], float]
"""Seconds of one local step of (worker, epoch)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Who trains on what: workers, the rule of SHARDINGS, batch per worker, epochs over its shard, and the seed of it all.

    `keep_remainder` makes a short last batch of the samples left over at the end of a worker's epoch; else they are dropped.
    """

    workers: int
    epochs: int
    batch: int = 16
    sharding: str = "iid"
    concentration: float = 0.5
    proportions: tuple[float, ...] | None = None
    keep_remainder: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch < 1:
            raise AlgorithmError(f"training needs epochs >= 1 and a batch >= 1, got {self.epochs} and {self.batch}")

    def shards(self, targets: NDArray[np.generic]) -> Shards:
        """The sample numbers of each worker."""
        return shard_samples(
            self.sharding,
            targets,
            self.workers,
            seed=self.seed,
            concentration=self.concentration,
            proportions=self.proportions,
        )

    def batches(self, shard: NDArray[np.int64], worker: int, epoch: int) -> NDArray[np.int64]:
        """The samples of each step of a worker's epoch: int64 [steps, batch], padded with -1."""
        return epoch_batches(shard, self.batch, seed=self.seed, worker=worker, epoch=epoch, keep_remainder=self.keep_remainder)

    def steps_per_epoch(self, problem: LearningProblem) -> int:
        """Steps of the worker with the largest shard: what one epoch is, for a period counted in epochs."""
        shards = self.shards(problem.targets.flatten().numpy())
        return max(batches_in(len(shard), self.batch, self.keep_remainder) for shard in shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRule:
    """How synchronous workers come together.

    Attributes:
        period: after which steps; see `Partition.steps_per_epoch` for periods in epochs.
        weighted: average by samples per worker (FedAvg) rather than equally.
        participation: the fraction of workers drawn for each round. outer: applied to the change of each round.
        mixing: a matrix per round instead of the average; then weighted, participation and outer do not apply.
        new_optimizer: local optimizers begin anew at every epoch. The reference of epoch averaging does so at every block of
            samples, of which a worker here has one.
    """

    period: Period
    weighted: bool = False
    participation: float = 1.0
    outer: OuterOptimizer | None = None
    mixing: Mixing | None = None
    new_optimizer: bool = False

    def __post_init__(self) -> None:
        if self.mixing is not None and (self.weighted or self.outer is not None or self.participation < 1.0):
            raise AlgorithmError(
                "a mixing matrix defines the mixing: weighted, participation and outer apply to averaging alone"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingProgress:
    """The state after an epoch (or as many merges as there are workers).

    Attributes:
        epoch: counted from 1. seconds: on the simulated clock. score: of the mean of the workers' weights.
        mean_score: the mean of the workers' own scores (None when not asked for).
        consensus: (1/P) sum_i |w_i - mean|^2. sent_bytes: by one worker so far.
    """

    epoch: int
    seconds: float
    score: float
    mean_score: float | None
    consensus: float
    sent_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingOutcome:
    """What training made: the final average [D], every worker's last weights [P, D], and the way there."""

    weights: Tensor
    workers: Tensor
    progress: tuple[TrainingProgress, ...]
    synchronisations: int

    @property
    def score(self) -> float:
        return self.progress[-1].score


def train_in_rounds(
    training: LocalTraining,
    partition: Partition,
    rule: RoundRule,
    *,
    step_s: StepSeconds = lambda worker, epoch: 1.0,
    exchange_s: float = 0.0,
    exchange_bytes: float | None = None,
    every_worker: bool = False,
    on_round: Callable[[int, Tensor], None] | None = None,
) -> TrainingOutcome:
    """Train; the last round always averages.

    Args:
        step_s: simulated seconds of a local step. exchange_s: of each synchronisation, after its slowest worker.
        exchange_bytes: sent by a worker per synchronisation; None for a ring all_reduce, 2 (P-1)/P |w|.
        every_worker: score each worker's own weights as well. on_round: sees (round, weights [P, D]) after each exchange.

    Raises:
        AlgorithmError: more workers than samples, a mixing matrix that is not doubly stochastic or never connects all workers,
            and what the rule and partition say.
    """
    warn_if_not_synchronous(rule.period, training.optimizer.kind)
    count = partition.workers
    if rule.mixing is not None and not isinstance(rule.mixing, MixingGraph):
        check_doubly_stochastic(rule.mixing(0))
        exchanges = rule.period.count(partition.epochs * partition.steps_per_epoch(training.problem))
        check_connected_within(rule.mixing, exchanges)
    rounds = _Rounds(training, partition, rule, exchange_s, _ring_bytes(training, count, exchange_bytes), on_round)
    progress = []
    for epoch in range(partition.epochs):
        if rule.new_optimizer:
            rounds.workers = Workers.fresh(rounds.workers.weights)
        seconds = np.array([step_s(worker, epoch) for worker in range(count)])
        batches = [partition.batches(rounds.feed.rows(worker), worker, epoch) for worker in range(count)]
        for samples in stack_batches(batches):
            rounds.step(samples, seconds)
        if epoch + 1 == partition.epochs and rule.mixing is None and rounds.since:
            rounds.exchange()
        progress.append(rounds.progress(epoch + 1, every_worker))
    weights = rounds.workers.weights
    return TrainingOutcome(weights=weights.mean(0), workers=weights, progress=tuple(progress), synchronisations=rounds.number)


def _ring_bytes(training: LocalTraining, workers: int, given: float | None) -> float:
    return 2.0 * (workers - 1) / workers * training.weight_bytes if given is None else given


@dataclass(slots=True, eq=False)
class _Rounds:
    """The state of `train_in_rounds` between steps."""

    training: LocalTraining
    partition: Partition
    rule: RoundRule
    exchange_s: float
    exchange_bytes: float
    on_round: Callable[[int, Tensor], None] | None
    workers: Workers = field(init=False)
    feed: Feed = field(init=False)
    clock_s: NDArray[np.float64] = field(init=False)
    number: int = 0
    taken: int = 0
    since: int = 0
    velocity: Tensor | None = None
    previous: Tensor = field(init=False)
    drawn: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        count = self.partition.workers
        problem = self.training.problem
        self.feed = feed_problem(problem, self.partition.shards(problem.targets.flatten().numpy()))
        check_room(count, self.training.weight_bytes)
        self.workers = Workers.fresh(self.training.start.repeat(count, 1))
        self.previous = self.training.start.clone()
        self.clock_s = np.zeros(count)
        self.drawn = self._draw()

    def _draw(self) -> NDArray[np.float64]:
        """The averaging weights of the current round; 0 for workers that do not take part."""
        weights = sample_weights(self.feed.sizes) if self.rule.weighted else None
        return participation_weights(
            self.partition.workers, self.rule.participation, self.number, seed=self.partition.seed, weights=weights
        )

    def step(self, samples: NDArray[np.int64], seconds: NDArray[np.float64]) -> None:
        """One local step of those who take part on rows of their own shards, and the exchange if it is due."""
        if self.rule.mixing is None:
            samples[self.drawn == 0] = -1
        self.workers = self.training.step_on(self.workers, self.feed.batch(range(self.partition.workers), samples))
        self.clock_s += np.where((samples >= 0).any(1), seconds, 0.0)
        self.since += 1
        if self.rule.period.due(self.taken):
            self.exchange()
        self.taken += 1

    def exchange(self) -> None:
        """Mix by the round's matrix, or average and let the outer optimizer move the global model."""
        weights, count = self.workers.weights, self.partition.workers
        if self.rule.mixing is not None:
            matrix = self.rule.mixing(self.number)
            check_doubly_stochastic(matrix)
            mixed = torch.tensor(matrix, dtype=weights.dtype) @ weights
        elif self.rule.outer is None:
            mixed = torch.tensor(averaging_matrix(count, self.drawn), dtype=weights.dtype) @ weights
        else:
            mean = torch.tensor(self.drawn, dtype=weights.dtype) @ weights
            self.previous, self.velocity = self.rule.outer.step(self.previous, mean, self.velocity)
            mixed = self.previous.repeat(count, 1)
        self.workers = Workers(weights=mixed, moments=self.workers.moments, steps=self.workers.steps)
        self.clock_s[:] = self.clock_s.max() + self.exchange_s
        self.number += 1
        self.since = 0
        if self.on_round is not None:
            self.on_round(self.number, mixed)
        self.drawn = self._draw()

    def progress(self, epoch: int, every_worker: bool) -> TrainingProgress:
        weights = self.workers.weights
        mean = weights.mean(0)
        return TrainingProgress(
            epoch=epoch,
            seconds=float(self.clock_s.max()),
            score=self.training.score(mean),
            mean_score=float(np.mean([self.training.score(row) for row in weights])) if every_worker else None,
            consensus=(weights - mean).square().sum(1).mean().item(),
            sent_bytes=self.number * self.exchange_bytes,
        )
