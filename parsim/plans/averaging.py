"""Averaging of whole models: means with weights, merges in arrival order, and the outer optimizer.

Written with +, - and * by a float alone, so the same functions take NumPy arrays, torch tensors and, in the tests, exact
fractions. A new merge is a function and a row of MERGES.

Source of `half`: `aggregate_parameters_async` of bsc-wdc/dislib, dislib/pytorch/pytorch_distributed.py. The others are the
rules known as FedAsync (`staleness`), FedBuff (`buffered`) and DiLoCo (`OuterOptimizer`), from
general knowledge of those papers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from parsim.errors import AlgorithmError, near_matches


class Linear(Protocol):
    """What can be added, subtracted and scaled."""

    def __add__(self, other: Any, /) -> Any: ...
    def __sub__(self, other: Any, /) -> Any: ...
    def __mul__(self, other: Any, /) -> Any: ...


V = TypeVar("V", bound=Linear)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeRule:
    """A row of MERGES with its numbers.

    Attributes:
        kind: half, running, staleness or buffered. workers: P, how many arrivals make a round (`running`).
        rate: omega_0 of `staleness`, and what `buffered` multiplies its mean change by. exponent: a of `staleness`.
        buffer: m, the arrivals `buffered` waits for.
    """

    kind: str = "half"
    workers: int
    rate: float = 1.0
    exponent: float = 0.5
    buffer: int = 1

    def __post_init__(self) -> None:
        if self.kind not in MERGES:
            raise AlgorithmError(f"unknown merge {self.kind!r}{near_matches(self.kind, MERGES)}")
        if self.workers < 1 or not 1 <= self.buffer <= self.workers:
            raise AlgorithmError(
                f"a merge needs workers >= 1 and a buffer between 1 and workers, got {self.workers} and {self.buffer}"
            )
        if not 0 < self.rate <= 1 or self.exponent < 0:
            raise AlgorithmError(f"rate must be in (0, 1] and exponent >= 0, got {self.rate} and {self.exponent}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival(Generic[V]):
    """A worker's model as it reaches the global one.

    Attributes:
        weights: w_j. start: the global model it began its local work from.
        staleness: merges of other workers since it read `start`.
        share: its number of samples over the mean of all workers; 1 where shards are equal.
    """

    weights: V
    start: V
    staleness: int = 0
    share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged(Generic[V]):
    """The global model and what its merge remembers: merges so far, shares in the current round or buffer, buffered change."""

    weights: V
    merges: int = 0
    in_round: int = 0
    share_in_round: float = 0.0
    buffered: V | None = None


def merge_half(state: Merged[V], arrival: Arrival[V], rule: MergeRule) -> Merged[V]:
    """g <- (g + w)/2, as the reference does. The last arrival weighs 1/2, the first of P 2^-P: about 3 workers count.

    Knows no sample counts. With one worker it halves every epoch's progress.
    """
    return replace(state, weights=(state.weights + arrival.weights) * 0.5)


def merge_running(state: Merged[V], arrival: Arrival[V], rule: MergeRule) -> Merged[V]:
    """g <- g + s/(S + s) (w - g), s the arrival's share, S the shares before it in this round of P arrivals.

    After a round g is the exact mean of its P arrivals, weighted by samples.
    """
    fresh = state.in_round % rule.workers == 0
    before = 0.0 if fresh else state.share_in_round
    weight = arrival.share / (before + arrival.share)
    merged = arrival.weights if fresh else state.weights + (arrival.weights - state.weights) * weight
    in_round = 1 if fresh else state.in_round + 1
    return replace(state, weights=merged, in_round=in_round, share_in_round=before + arrival.share)


def merge_staleness(state: Merged[V], arrival: Arrival[V], rule: MergeRule) -> Merged[V]:
    """g <- g + omega (w - g), omega = min(1, rate * share * (1 + staleness)^-exponent): late work counts less (FedAsync)."""
    weight = min(1.0, rule.rate * arrival.share * (1.0 + arrival.staleness) ** -rule.exponent)
    return replace(state, weights=state.weights + (arrival.weights - state.weights) * weight)


def merge_buffered(state: Merged[V], arrival: Arrival[V], rule: MergeRule) -> Merged[V]:
    """Collect the changes w - start of m arrivals, then g <- g + rate * their mean weighted by share (FedBuff)."""
    change = (arrival.weights - arrival.start) * arrival.share
    total: V = change if state.buffered is None else state.buffered + change
    shares, count = state.share_in_round + arrival.share, state.in_round + 1
    if count < rule.buffer:
        return replace(state, buffered=total, in_round=count, share_in_round=shares)
    merged = state.weights + total * (rule.rate / shares)
    return replace(state, weights=merged, buffered=None, in_round=0, share_in_round=0.0)


MERGES: dict[str, Callable[[Merged[Any], Arrival[Any], MergeRule], Merged[Any]]] = {
    "half": merge_half,
    "running": merge_running,
    "staleness": merge_staleness,
    "buffered": merge_buffered,
}


def merge(state: Merged[V], arrival: Arrival[V], rule: MergeRule) -> Merged[V]:
    """The global model after one arrival. Order matters; the arrivals are exclusive."""
    after = MERGES[rule.kind](state, arrival, rule)
    return replace(after, merges=state.merges + 1)


def arrival_weights(rule: MergeRule, arrivals: int) -> NDArray[np.float64]:
    """How much of g counts after `arrivals` workers that all began from g_0 merged in turn: float64 [1 + arrivals], of g_0
    and of each arrival in order. Half: 2^-P of g_0, then 2^-P ... 1/4, 1/2. They sum to 1."""
    unit = np.eye(1 + arrivals)
    state = Merged(weights=unit[0])
    for number in range(arrivals):
        state = merge(state, Arrival(weights=unit[1 + number], start=unit[0], staleness=number), rule)
    return np.asarray(state.weights, dtype=np.float64)


def turn_weight(rule: MergeRule, number: int, worker: int) -> float:
    """omega of a turn, where workers 0, 1, ... merge in turn and each goes on from the global model.

    g <- g + omega (w - g); of `buffered` g <- g + omega (sum of the buffered changes), and 0 while the buffer fills.

    Args:
        rule: `workers` take part in every round. number: of the round, from 0. worker: whose turn.
    """
    turn = number * rule.workers + worker
    in_round = turn % rule.buffer if rule.kind == "buffered" else worker
    state = Merged(weights=0.0, in_round=in_round, share_in_round=float(in_round))
    return float(merge(state, Arrival(weights=1.0, start=0.0, staleness=_staleness(rule, number, worker)), rule).weights)


def _staleness(rule: MergeRule, number: int, worker: int) -> int:
    """Merges of others since a worker had its turn; in round 0 since all began."""
    read = 0 if number == 0 else (number - 1) * rule.workers + worker + 1
    return number * rule.workers + worker - read


def merged_in_turn(
    rule: MergeRule, state: Merged[V], weights: Sequence[V], starts: Sequence[V], number: int
) -> tuple[Merged[V], list[V]]:
    """A round in which workers merge in turn: the global model behind it, and the one that each worker goes on from.

    Args:
        weights: of every worker. starts: the models from which they began the round. number: of the round, from 0.
    """
    goes_on: list[V] = []
    for worker, (own, start) in enumerate(zip(weights, starts, strict=True)):
        arrival = Arrival(weights=own, start=start, staleness=_staleness(rule, number, worker))
        state = merge(state, arrival, rule)
        goes_on.append(state.weights)
    return state, goes_on


def effective_workers(weights: NDArray[np.float64]) -> float:
    """1 / sum omega^2 of weights that sum to 1: how many equal workers would average the noise as well."""
    return float(1.0 / np.square(weights).sum())


def averaging_matrix(workers: int, weights: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """Averaging as a mixing matrix [P, P]: each row holds the weights (None: 1/P, the complete graph)."""
    row = np.full(workers, 1.0 / workers) if weights is None else np.asarray(weights, dtype=np.float64)
    if row.shape != (workers,):
        raise AlgorithmError(f"averaging needs {workers} weights, one per replica, got {row.size}: {row.tolist()}")
    if not (row >= 0).all() or not abs(row.sum() - 1.0) <= 1e-12:
        raise AlgorithmError(f"averaging needs weights >= 0 that sum to 1, and the sum of {row.tolist()} is {row.sum():.6g}")
    return np.tile(row, (workers, 1))


def participation_weights(
    workers: int, fraction: float, round_number: int, *, seed: int = 0, weights: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """Partial participation: max(1, round(fraction * P)) workers drawn for this round, their weights scaled to sum to 1.

    A pure function of (seed, round_number). Workers that do not take part have weight 0: they do no local work in the round
    and begin the next from the average, as all do. Those with weight 0 are not drawn: a round needs weights to scale.
    """
    if not 0 < fraction <= 1:
        raise AlgorithmError(f"the participating fraction must be in (0, 1], got {fraction}")
    count = max(1, round(fraction * workers))
    base = np.full(workers, 1.0 / workers) if weights is None else np.asarray(weights, dtype=np.float64)
    order = np.random.default_rng([seed, round_number, workers]).permutation(workers)
    chosen = order[base[order] > 0][:count]
    drawn = np.zeros(workers)
    drawn[chosen] = base[chosen]
    scaled: NDArray[np.float64] = drawn / drawn.sum()
    return scaled


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterOptimizer:
    """SGD over rounds: the change of a round, previous - mean, is its gradient (DiLoCo's usual: lr 0.7, Nesterov 0.9).

    lr 1 and momentum 0 is plain averaging.
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        if self.lr <= 0 or not 0 <= self.momentum < 1:
            raise AlgorithmError(f"an outer optimizer needs lr > 0 and momentum in [0, 1), got {self.lr} and {self.momentum}")

    def step(self, previous: V, mean: V, velocity: V | None) -> tuple[V, V]:
        """The next global model and velocity; `velocity` is None before the first round."""
        gradient: V = previous - mean
        moved: V = gradient if velocity is None else velocity * self.momentum + gradient
        direction = gradient + moved * self.momentum if self.nesterov else moved
        return previous - direction * self.lr, moved
