"""Gossip that no plan has a key for: combine-then-adapt, push-sum, graphs that depend on what training measures, a clock per
replica, and what DBench records.

One step: every replica trains on its own samples, then W_t by a row of COMBINATIONS (or push-sum). The centralised counterpart,
one step on the mean gradient of all samples in the batches, is `centralised=True`: the same samples, optimizer and clock, an
all_reduce in place of the graph. Plain gossip, averaging and Ada's linear and exponential lattices are plans:
`parsim.relaxed.replicas` trains those.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from experiments.relaxed.clock import ReplicaClock
from experiments.relaxed.graphs import debias
from experiments.relaxed.sharded import Partition
from parsim.errors import AlgorithmError, near_matches
from parsim.plans.mixing import (
    CLOSED_LOOP,
    Ada,
    MixingGraph,
    check_column_stochastic,
    check_connected,
    check_doubly_stochastic,
    connections,
)
from parsim.relaxed.dbench import VarianceProfile
from parsim.relaxed.replicas import LocalTraining, Workers

Graph = MixingGraph | Ada | Callable[[int], NDArray[np.float64]]
"""W of step t: a graph of GRAPHS, Ada's lattice of the epoch, or any function of t (push-sum's rotating or failing links)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replicas:
    """Weights [n, D] and optimizer state of n replicas; with push-sum, masses omega [n] and the model x / omega."""

    training: LocalTraining
    workers: Workers
    masses: Tensor | None = None

    @property
    def models(self) -> Tensor:
        """The weights [n, D] that gradients and scores are taken at."""
        weights = self.workers.weights
        return weights if self.masses is None else torch.as_tensor(debias(weights, self.masses))

    def step(self, samples: NDArray[np.int64]) -> Replicas:
        """One step on int64 [n, batch]. With push-sum it is taken at x / omega, and its change is added to x."""
        models = self.models
        stepped = self.training.step(replace(self.workers, weights=models), samples)
        if self.masses is not None:
            stepped = replace(stepped, weights=self.workers.weights + (stepped.weights - models))
        return replace(self, workers=stepped)

    def mix(self, matrix: NDArray[np.float64]) -> Replicas:
        """w_i <- sum_j W_ij w_j, optimizer state untouched; with push-sum omega is mixed too.

        Raises:
            AlgorithmError: a matrix that is not doubly stochastic, or with push-sum not column-stochastic.
        """
        (check_doubly_stochastic if self.masses is None else check_column_stochastic)(matrix)
        weights = torch.tensor(matrix, dtype=self.workers.weights.dtype)
        masses = None if self.masses is None else weights @ self.masses
        return replace(self, workers=replace(self.workers, weights=weights @ self.workers.weights), masses=masses)

    def consensus(self) -> float:
        """(1/n) sum_i |w_i - mean|^2 of the models."""
        models = self.models
        return (models - models.mean(0)).square().sum(1).mean().item()

    def norms(self) -> NDArray[np.float64]:
        """The L2 norm of every parameter tensor of every replica: float64 [n, tensors], in the order of `training.tensors`."""
        pieces = torch.split(self.models, [size for _, size in self.training.tensors], dim=1)
        return np.stack([piece.double().norm(dim=1).numpy() for piece in pieces], axis=1)

    @property
    def mean_score(self) -> float:
        """The mean of the replicas' own scores."""
        return float(np.mean([self.training.score(row) for row in self.models]))


def adapt_combine(before: Replicas, stepped: Replicas, matrix: NDArray[np.float64]) -> Replicas:
    """x <- W (x - eta g): exchange after the step (ATC, D-PSGD)."""
    return stepped.mix(matrix)


def combine_adapt(before: Replicas, stepped: Replicas, matrix: NDArray[np.float64]) -> Replicas:
    """x <- W x - eta g(x): the exchange of x goes on while g(x) is computed (CTA). `before` is x."""
    change = stepped.workers.weights - before.workers.weights
    mixed = before.mix(matrix).workers.weights
    return replace(stepped, workers=replace(stepped.workers, weights=mixed + change))


COMBINATIONS: dict[str, Callable[[Replicas, Replicas, NDArray[np.float64]], Replicas]] = {
    "adapt_combine": adapt_combine,
    "combine_adapt": combine_adapt,
}
"""The replicas after an exchange, from those before the local step, those after, and W."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipRule:
    """How replicas meet.

    Attributes:
        graph: who takes what of whom. combination: a row of COMBINATIONS.
        push_sum: for matrices that are only column-stochastic. centralised: one step on the mean gradient instead of mixing.
    """

    graph: Graph
    combination: str = "adapt_combine"
    push_sum: bool = False
    centralised: bool = False

    def __post_init__(self) -> None:
        if self.combination not in COMBINATIONS:
            raise AlgorithmError(f"unknown combination {self.combination!r}{near_matches(self.combination, COMBINATIONS)}")
        if self.push_sum and self.combination != "adapt_combine":
            raise AlgorithmError("push-sum mixes after the step: use adapt_combine with it")
        if isinstance(self.graph, MixingGraph) and self.graph.name != "alone" and self.graph.n > 1:
            check_connected(self.graph, period=self.graph.period)


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipEpoch:
    """The state after an epoch.

    Attributes:
        epoch: counted from 1. seconds: of the slowest replica's clock. score: of the mean of the weights.
        consensus: (1/n) sum_i |x_i - mean|^2 now; measured: its means over the epoch's exchanges (before, after).
        connections: the most messages one replica sent in an exchange of the epoch. sent_bytes: by it, so far.
    """

    epoch: int
    seconds: float
    score: float
    consensus: float
    measured: tuple[float, float] | None
    connections: int
    sent_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GossipRun:
    """What training made: the replicas, the clock, each epoch's state, and DBench's profile where it was asked for."""

    replicas: Replicas
    clock: ReplicaClock
    epochs: tuple[GossipEpoch, ...]
    profile: VarianceProfile | None

    @property
    def weights(self) -> Tensor:
        """The mean of the weights [D] (of x under push-sum, which is the mean that omega keeps)."""
        return self.replicas.workers.weights.mean(0)

    @property
    def score(self) -> float:
        return self.epochs[-1].score


def train_on_graph(
    training: LocalTraining,
    partition: Partition,
    rule: GossipRule,
    *,
    step_s: Callable[[int], ArrayLike] = lambda step: 1.0,
    exchange_s: Callable[[NDArray[np.float64]], ArrayLike] = lambda matrix: 0.0,
    record_every: int = 0,
) -> GossipRun:
    """Train `partition.workers` replicas, with an exchange after every step.

    Args:
        step_s: simulated seconds of local step number t, one number or [n]. exchange_s: of an exchange over W (the
            all_reduce, of a matrix 11^T/n, when centralised). record_every: exchanges from one record of the profile to the
            next; 0: no profile.

    Raises:
        AlgorithmError: a graph of another size, not doubly stochastic (not column-stochastic, with push-sum) or not
            connected; more workers than samples.
    """
    n = partition.workers
    if isinstance(rule.graph, MixingGraph | Ada) and rule.graph.n != n:
        raise AlgorithmError(f"the mixing graph is of {rule.graph.n} workers and the partition of {n}; use the same number")
    order = partition.order(training.problem)
    state = Replicas(
        training=training,
        workers=Workers.fresh(training.start.repeat(1 if rule.centralised else n, 1)),
        masses=torch.ones(n, dtype=training.start.dtype) if rule.push_sum else None,
    )
    closed_loop = rule.graph if isinstance(rule.graph, Ada) and rule.graph.kind == CLOSED_LOOP else None
    timing = "all_reduce" if rule.centralised else rule.combination
    clock, step, sent_bytes = ReplicaClock.begin(n), 0, 0.0
    epochs: list[GossipEpoch] = []
    records: list[tuple[int, NDArray[np.float64], float, float]] = []
    for epoch in range(partition.epochs):
        if closed_loop is not None:
            before, after = epochs[-1].measured or (0.0, 0.0) if epochs else (math.inf, 0.0)
            graph = closed_loop.graph(closed_loop.place(before - after))
        else:
            graph = rule.graph.graph(epoch) if isinstance(rule.graph, Ada) else rule.graph
        distances: list[tuple[float, float]] = []
        widest = 0
        for _ in range(order.steps_per_epoch):
            samples, matrix = order.indices(step).reshape(n, -1), graph(step)
            seconds = np.where((samples >= 0).any(1), np.asarray(step_s(step), dtype=np.float64), 0.0)
            clock = clock.round(timing, seconds, matrix != 0, exchange_s(matrix))
            if rule.centralised:
                state = stepped = state.step(samples.reshape(1, -1))
                sent, messages = 2.0 * (n - 1) / n, n - 1
            else:
                stepped = state.step(samples)
                state = COMBINATIONS[rule.combination](state, stepped, matrix)
                sent = messages = connections(matrix)
            sent_bytes += sent * training.weight_bytes
            widest = max(widest, messages)
            recorded = bool(record_every) and step % record_every == 0
            if recorded or closed_loop is not None:
                distances.append((stepped.consensus(), state.consensus()))
            if recorded:  # centralised replicas are n equal copies of the one that is kept
                norms = stepped.norms().repeat(n // len(stepped.workers.weights), axis=0)
                records.append((step, norms, *distances[-1]))
            step += 1
        before, after = np.mean(distances, axis=0) if distances else (0.0, 0.0)
        epochs.append(
            GossipEpoch(
                epoch=epoch + 1,
                seconds=clock.now_s,
                score=training.score(state.workers.weights.mean(0)),
                consensus=state.consensus(),
                measured=(float(before), float(after)) if distances else None,
                connections=widest,
                sent_bytes=sent_bytes,
            )
        )
    profile = VarianceProfile.of(training, records) if records else None
    return GossipRun(replicas=state, clock=clock, epochs=tuple(epochs), profile=profile)
