"""Samples dealt to workers once and for all: each trains on its own shard, in an order of its own.

A shard rule returns one int64 array of sample numbers per worker. Together they hold every sample exactly once. A new rule is a
function and a row of SHARDINGS. `Partition.order` is what `parsim.relaxed.replicas` reads in place of one order for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from parsim.errors import AlgorithmError, near_matches
from parsim.plans.synchronisation import Synchronisation
from parsim.relaxed.problems import LearningProblem
from parsim.relaxed.replicas import LocalTraining, steps_of

Shards = tuple[NDArray[np.int64], ...]


def iid_shards(targets: NDArray[np.generic], sizes: NDArray[np.int64], rng: np.random.Generator, _: float) -> Shards:
    """A random permutation cut into pieces of `sizes`: every worker sees the same distribution."""
    return _cut(rng.permutation(len(targets)).astype(np.int64), sizes)


def label_sorted_shards(targets: NDArray[np.generic], sizes: NDArray[np.int64], _: np.random.Generator, __: float) -> Shards:
    """Samples sorted by target (stable), cut into pieces of `sizes`: each worker sees one or two classes, the hardest case."""
    return _cut(np.argsort(targets, kind="stable").astype(np.int64), sizes)


def dirichlet_shards(
    targets: NDArray[np.generic], sizes: NDArray[np.int64], rng: np.random.Generator, concentration: float
) -> Shards:
    """Each class is dealt out in proportions drawn from Dirichlet(concentration * sizes/mean size): unequal sizes follow.

    Large concentrations approach IID, small ones give each class to one worker. A worker that would stay empty takes one
    sample of the largest shard, so every worker can train. Needs classes, not real-valued targets: a value that occurs once
    goes whole to one worker.
    """
    if concentration <= 0:
        raise AlgorithmError(
            f"the Dirichlet concentration must be > 0, got {concentration}; 0.1 is very uneven, 100 nearly even"
        )
    prior = concentration * sizes / sizes.mean()
    pieces: list[list[NDArray[np.int64]]] = [[] for _ in sizes]
    for value in np.unique(targets):
        members = rng.permutation(np.flatnonzero(targets == value))
        edges = np.round(np.cumsum(rng.dirichlet(prior))[:-1] * len(members)).astype(np.int64)
        for worker, piece in enumerate(np.split(members, edges)):
            pieces[worker].append(piece.astype(np.int64))
    shards = [rng.permutation(np.concatenate(piece)) for piece in pieces]
    while min(map(len, shards)) == 0:
        empty, largest = int(np.argmin([*map(len, shards)])), int(np.argmax([*map(len, shards)]))
        shards[empty], shards[largest] = shards[largest][:1], shards[largest][1:]
    return tuple(shards)


ShardingRule = Callable[[NDArray[np.generic], NDArray[np.int64], np.random.Generator, float], Shards]

SHARDINGS: dict[str, ShardingRule] = {
    "iid": iid_shards,
    "label_sorted": label_sorted_shards,
    "dirichlet": dirichlet_shards,
}


def shard_samples(
    kind: str,
    targets: NDArray[np.generic],
    workers: int,
    *,
    seed: int = 0,
    concentration: float = 0.5,
    proportions: Sequence[float] | None = None,
) -> Shards:
    """Deal the samples of `targets` ([n]) to `workers` by the rule `kind` of SHARDINGS.

    Args:
        concentration: of the Dirichlet rule alone.
        proportions: the relative size of each worker's shard (a mean, for Dirichlet); None for equal ones, which differ
            by one sample where n does not divide.

    Raises:
        AlgorithmError: more workers than samples, an unknown rule, proportions that are not positive or not one per worker.
    """
    if kind not in SHARDINGS:
        raise AlgorithmError(f"unknown sharding {kind!r}{near_matches(kind, SHARDINGS)}")
    if not 1 <= workers <= len(targets):
        raise AlgorithmError(
            f"{workers} workers cannot share {len(targets)} samples; use between 1 and {len(targets)} workers, or more samples"
        )
    sizes = shard_sizes(len(targets), workers, proportions)
    return SHARDINGS[kind](targets, sizes, np.random.default_rng([seed, workers]), concentration)


def shard_sizes(samples: int, workers: int, proportions: Sequence[float] | None = None) -> NDArray[np.int64]:
    """int64 [workers], each >= 1, summing to `samples`, as near to the proportions as whole samples allow."""
    share = np.full(workers, 1.0) if proportions is None else np.asarray(proportions, dtype=np.float64)
    if share.shape != (workers,) or not (share > 0).all():
        raise AlgorithmError(f"proportions must be {workers} positive numbers, one per worker; got {proportions}")
    exact = share / share.sum() * samples
    sizes: NDArray[np.int64] = np.maximum(np.floor(exact).astype(np.int64), 1)
    by_need = np.argsort(-(exact - sizes), kind="stable")
    short = samples - int(sizes.sum())
    if short >= 0:
        sizes[by_need[:short]] += 1
    while sizes.sum() > samples:
        sizes[np.argmax(sizes)] -= 1
    return sizes


def _cut(order: NDArray[np.int64], sizes: NDArray[np.int64]) -> Shards:
    return tuple(np.split(order, np.cumsum(sizes)[:-1]))


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
    """Train by the rules of plans, one after another; each begins from the mean of the one before, with new optimizers.

    Args:
        phases: a rule of kind average or gossip, and its number of steps.
    """
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
