"""Samples dealt to workers once and for all: each trains on its own shard, in an order of its own.

The rules are those of `parsim.data.shards`. Other than there, a worker with a small shard waits for those with larger ones, or
makes a short batch. `Partition.order` is what `parsim.relaxed.replicas` reads in place of one order for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from parsim.data.shards import SHARDINGS, Shards, check_enough, shard_sizes
from parsim.errors import AlgorithmError
from parsim.plans.synchronisation import Synchronisation
from parsim.relaxed.problems import LearningProblem
from parsim.relaxed.replicas import LocalTraining, steps_of


def shard_samples(
    kind: str,
    targets: NDArray[np.generic],
    workers: int,
    *,
    seed: int = 0,
    concentration: float = 0.5,
    proportions: Sequence[float] | None = None,
) -> Shards:
    """Deal the samples of `targets` ([n]) to `workers` by a rule of SHARDINGS; concentration: of the Dirichlet rule alone.

    proportions: the relative size of each worker's shard (a mean, for Dirichlet); None for equal ones, which differ by one
    sample where n does not divide. Raises DataError: more workers than samples, an unknown rule, or proportions that are not
    positive and one per worker.
    """
    check_enough(len(targets), workers, "workers")
    sizes = shard_sizes(len(targets), workers, proportions)
    return SHARDINGS[kind].deal(targets, sizes, np.random.default_rng([seed, workers]), concentration)


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

    def order(self, problem: LearningProblem) -> ShardedOrder:
        """The shards of the problem's samples, and the order in which they are read."""
        shards = shard_samples(
            self.sharding,
            problem.targets.flatten().numpy(),
            self.workers,
            seed=self.seed,
            concentration=self.concentration,
            proportions=self.proportions,
        )
        return ShardedOrder(self, shards)


class ShardedOrder:
    """Which samples each step trains on: every worker's batch from its own shard, one worker after another.

    Attributes: shards: sample numbers per worker. steps_per_epoch: of the worker with the largest shard; the others wait.
    """

    def __init__(self, partition: Partition, shards: Shards, first_step: int = 0) -> None:
        self.partition, self.shards, self._first_step = partition, shards, first_step
        batch = partition.batch
        steps = [-(-len(shard) // batch) if partition.keep_remainder else max(1, len(shard) // batch) for shard in shards]
        self.steps_per_epoch = max(steps)
        self.steps_of_worker = tuple(steps)
        self._epoch = lru_cache(maxsize=2)(self._all_batches)

    def batches(self, worker: int, epoch: int) -> NDArray[np.int64]:
        """int64 [steps, batch]: a worker's shard in the order of (seed, worker, epoch), padded with -1.

        A shard smaller than the batch makes one step on all of it.
        """
        shard, batch = self.shards[worker], self.partition.batch
        count = self.steps_of_worker[worker] * batch
        order = shard[np.random.default_rng([self.partition.seed, worker, epoch]).permutation(len(shard))][:count]
        return np.concatenate([order, np.full(count - len(order), -1, dtype=np.int64)]).reshape(-1, batch)

    def _all_batches(self, epoch: int) -> NDArray[np.int64]:
        return stack_batches([self.batches(worker, epoch) for worker in range(len(self.shards))], self.steps_per_epoch)

    def indices(self, step: int) -> NDArray[np.int64]:
        """int64 [workers * batch]: the samples of a step, -1 where a worker has none."""
        epoch, place = divmod(self._first_step + step, self.steps_per_epoch)
        return self._epoch(epoch)[place].ravel()

    def after(self, steps: int) -> ShardedOrder:
        """The order without its first steps."""
        return ShardedOrder(self.partition, self.shards, self._first_step + steps)

    @property
    def sample_weights(self) -> tuple[float, ...]:
        """FedAvg's weights n_j / n of the workers; they sum to 1."""
        counts = np.array([len(shard) for shard in self.shards], dtype=np.float64)
        return tuple((counts / counts.sum()).tolist())


def stack_batches(batches: Sequence[NDArray[np.int64]], steps: int) -> NDArray[np.int64]:
    """[steps_j, batch] of m workers as [steps, m, batch], padded with rows of -1."""
    stacked = np.full((steps, len(batches), batches[0].shape[1]), -1, dtype=np.int64)
    for worker, own in enumerate(batches):
        stacked[: len(own), worker] = own
    return stacked


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Averaged:
    """The mean weights [D] after training by rounds, their score, and the scores after each epoch."""

    weights: Tensor
    score: float
    by_epoch: tuple[float, ...]


def train_averaged(training: LocalTraining, partition: Partition, *phases: tuple[Synchronisation, int]) -> Averaged:
    """Train by rules of plans (average or gossip) for their numbers of steps, one after another; each begins from the mean of
    the one before, with new optimizers."""
    order = partition.order(training.problem)
    weights, done = training.start, 0
    by_epoch: list[float] = []
    for rule, steps in phases:
        begun, later = copy(training), order.after(done)
        begun.start = weights
        for workers, _ in islice(steps_of(rule, partition.workers, begun, later), steps):
            done += 1
            if done % order.steps_per_epoch == 0:
                by_epoch.append(training.score(workers.weights.mean(0)))
        weights = workers.weights.mean(0)
    return Averaged(weights=weights, score=training.score(weights), by_epoch=tuple(by_epoch))
