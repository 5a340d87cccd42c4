"""Decentralised training of virtual replicas: local steps, a mixing graph that may change every round, a clock per replica.

One round: `period` local steps, then W_t by a row of COMBINATIONS (or push-sum). The centralised counterpart, one step on the
mean gradient of all samples in the batches, is `centralised=True`: the same samples, optimizer and clock, an all_reduce in
place of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from parsim.algorithms.dbench import VarianceProfile
from parsim.algorithms.periods import Period, every_steps, warn_if_not_synchronous
from parsim.errors import AlgorithmError, near_matches
from parsim.plans.mixing import (
    Ada,
    ConsensusMeasured,
    MixingGraph,
    check_column_stochastic,
    check_connected,
    check_connected_within,
    check_doubly_stochastic,
    connections,
)
from parsim.relaxed.replicas import LocalTraining, stack_batches
from parsim.virtual.clock import ReplicaClock
from parsim.virtual.replicas import COMBINATIONS, Replicas
from parsim.virtual.rounds import Partition

Graph = MixingGraph | Ada | Callable[[int], NDArray[np.float64]]
"""W of round t: a graph of GRAPHS, Ada's lattice of the epoch, or any function of t (push-sum's rotating or failing links)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipRule:
    """How replicas meet.

    Attributes:
        graph: who takes what of whom. combination: a row of COMBINATIONS. period: after which local steps they mix.
        push_sum: for matrices that are only column-stochastic. centralised: one step on the mean gradient instead of mixing.
        final_average: all take the mean once training is over, before the last scores.
    """

    graph: Graph
    combination: str = "adapt_combine"
    period: Period = field(default_factory=lambda: every_steps(1))
    push_sum: bool = False
    centralised: bool = False
    final_average: bool = False

    def __post_init__(self) -> None:
        if self.combination not in COMBINATIONS:
            raise AlgorithmError(f"unknown combination {self.combination!r}{near_matches(self.combination, COMBINATIONS)}")
        if self.push_sum and self.combination != "adapt_combine":
            raise AlgorithmError("push-sum mixes after the step: use adapt_combine with it")
        if self.combination == "combine_adapt" and self.period.steps != 1:
            raise AlgorithmError("combine_adapt overlaps each step with an exchange: its period is every_steps(1)")
        if isinstance(self.graph, MixingGraph) and self.graph.name != "alone" and self.graph.n > 1:
            check_connected(self.graph, period=self.graph.period)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticsRecording:
    """What DBench records: norms of every tensor and the consensus distance, every so many exchanges."""

    every: int = 1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise AlgorithmError(f"recording needs every >= 1 exchanges, got {self.every}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipEpoch:
    """The state after an epoch.

    Attributes:
        epoch: counted from 1. seconds: of the slowest replica's clock. score: of the mean of the weights.
        mean_score: the mean of the replicas' own scores (None when not asked for).
        consensus: (1/n) sum_i |x_i - mean|^2 now; measured: its means over the epoch's exchanges (before, after).
        connections: the most messages one replica sent in an exchange of the epoch. sent_bytes: by it, so far.
    """

    epoch: int
    seconds: float
    score: float
    mean_score: float | None
    consensus: float
    measured: ConsensusMeasured | None
    connections: int
    sent_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GossipRun:
    """What training made: the replicas, the clock, each epoch's state, and DBench's profile where it was asked for."""

    replicas: Replicas
    clock: ReplicaClock
    epochs: tuple[GossipEpoch, ...]
    exchanges: int
    profile: VarianceProfile | None

    @property
    def weights(self) -> Tensor:
        """The mean of the weights [D]."""
        return self.replicas.average()

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
    every_replica: bool = False,
    recording: StatisticsRecording | None = None,
    chunk: int = 256,
) -> GossipRun:
    """Train `partition.workers` replicas.

    Args:
        step_s: simulated seconds of local step number t, one number or [n]. exchange_s: of an exchange over W (the
            all_reduce, of a matrix 11^T/n, when centralised).
        every_replica: score each replica at each epoch's end. recording: make a DBench profile.

    Raises:
        AlgorithmError: a graph of another size, not doubly stochastic (not column-stochastic, with push-sum) or not
            connected; more workers than samples.
    """
    if rule.centralised or (isinstance(rule.graph, MixingGraph) and rule.graph.name == "complete"):
        warn_if_not_synchronous(rule.period, "sgd" if rule.centralised else training.optimizer.kind)
    state = _Training(training, partition, rule, step_s, exchange_s, recording, chunk)
    epochs: list[GossipEpoch] = []
    for epoch in range(partition.epochs):
        last = epoch + 1 == partition.epochs
        epochs.append(state.epoch(epoch, epochs[-1].measured if epochs else None, every_replica, last))
    return GossipRun(
        replicas=state.replicas,
        clock=state.clock,
        epochs=tuple(epochs),
        exchanges=state.exchanges,
        profile=state.profile() if recording is not None else None,
    )


@dataclass(slots=True, eq=False)
class _Training:
    """The state of `train_on_graph` between rounds."""

    training: LocalTraining
    partition: Partition
    rule: GossipRule
    step_s: Callable[[int], ArrayLike]
    exchange_s: Callable[[NDArray[np.float64]], ArrayLike]
    recording: StatisticsRecording | None
    chunk: int
    replicas: Replicas = field(init=False)
    clock: ReplicaClock = field(init=False)
    steps: int = 0
    exchanges: int = 0
    sent_bytes: float = 0.0
    recorded: list[tuple[int, NDArray[np.float64], float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        n = self.partition.workers
        held = 1 if self.rule.centralised else n
        self.replicas = Replicas.begin(self.training, held, push_sum=self.rule.push_sum, chunk=self.chunk)
        self.clock = ReplicaClock.begin(n)
        wanted = self.rule.graph.n if isinstance(self.rule.graph, MixingGraph | Ada) else n
        if wanted != n:
            raise AlgorithmError(f"the mixing graph is of {wanted} workers and the partition of {n}; give both the same number")
        if not isinstance(self.rule.graph, MixingGraph | Ada) and not self.rule.centralised:
            steps = self.partition.epochs * self.partition.steps_per_epoch(self.training.problem)
            self._check_matrix(self.rule.graph(0), n)
            check_connected_within(self.rule.graph, self.rule.period.count(steps))

    def _check_matrix(self, matrix: NDArray[np.float64], n: int) -> None:
        if matrix.shape != (n, n):
            raise AlgorithmError(f"{n} replicas need a mixing matrix [{n}, {n}], got {list(matrix.shape)}")
        (check_column_stochastic if self.rule.push_sum else check_doubly_stochastic)(matrix)

    def epoch(self, epoch: int, measured: ConsensusMeasured | None, every: bool, last: bool) -> GossipEpoch:
        graph = self.rule.graph.graph(epoch, measured) if isinstance(self.rule.graph, Ada) else self.rule.graph
        distances: list[tuple[float, float]] = []
        widest = 0
        for samples in stack_batches(self._batches(epoch)):
            matrix = graph(self.exchanges)
            widest = max(widest, self._round(samples, matrix, distances))
        if last and self.rule.final_average and not self.rule.centralised:
            self.replicas = self.replicas.averaged()
        scores = self.replicas.evaluate(every=every)
        before, after = np.mean(distances, axis=0) if distances else (0.0, 0.0)
        return GossipEpoch(
            epoch=epoch + 1,
            seconds=self.clock.now_s,
            score=scores.average,
            mean_score=None if scores.replicas is None else float(scores.replicas.mean()),
            consensus=self.replicas.consensus(),
            measured=ConsensusMeasured(before=float(before), after=float(after), neighbours=widest) if distances else None,
            connections=widest,
            sent_bytes=self.sent_bytes,
        )

    def _batches(self, epoch: int) -> list[NDArray[np.int64]]:
        shards = self.partition.shards(self.training.problem.targets.flatten().numpy())
        return [self.partition.batches(shard, worker, epoch) for worker, shard in enumerate(shards)]

    def _round(self, samples: NDArray[np.int64], matrix: NDArray[np.float64], distances: list[tuple[float, float]]) -> int:
        """One local step of all, and the exchange if it is due; how many messages the busiest replica sent."""
        seconds = np.where((samples >= 0).any(1), np.asarray(self.step_s(self.steps), dtype=np.float64), 0.0)
        due = self.rule.period.due(self.steps)
        self.steps += 1
        if self.rule.centralised:
            self.replicas = self.replicas.local_steps(samples.reshape(1, 1, -1))
            self.clock = self.clock.round("all_reduce", seconds, matrix != 0, self.exchange_s(matrix))
            self.sent_bytes += 2.0 * (len(matrix) - 1) / len(matrix) * self.training.weight_bytes
            self._record(self.replicas, distances)
            self.exchanges += 1
            return len(matrix) - 1
        before = self.replicas
        stepped = before.local_steps(samples[None])
        if not due:
            self.replicas, self.clock = stepped, self.clock.compute(seconds)
            return 0
        self.replicas = COMBINATIONS[self.rule.combination](before, stepped, matrix)
        self.clock = self.clock.round(self.rule.combination, seconds, matrix != 0, self.exchange_s(matrix))
        self._record(stepped, distances)
        sent = connections(matrix)
        self.sent_bytes += sent * self.training.weight_bytes
        self.exchanges += 1
        return sent

    def _record(self, stepped: Replicas, distances: list[tuple[float, float]]) -> None:
        """Distances that Ada's closed loop and DBench look at, where one of them is there.

        Centralised replicas are n equal copies of the one that is kept.
        """
        wanted = self.recording is not None and self.exchanges % self.recording.every == 0
        closed_loop = isinstance(self.rule.graph, Ada) and self.rule.graph.kind == "closed_loop"
        if not (wanted or closed_loop):
            return
        distance = (stepped.consensus(), self.replicas.consensus())
        distances.append(distance)
        if wanted:
            copies = self.partition.workers // len(stepped)
            self.recorded.append((self.exchanges, stepped.norms().repeat(copies, axis=0), *distance))

    def profile(self) -> VarianceProfile:
        rounds, norms, before, after = zip(*self.recorded, strict=True)
        return VarianceProfile(
            tensors=tuple(name for name, _ in self.training.tensors),
            rounds=np.array(rounds, dtype=np.int64),
            norms=np.stack(norms),
            consensus=np.array(before),
            consensus_after=np.array(after),
        )
