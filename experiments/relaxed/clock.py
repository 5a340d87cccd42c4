"""The simulated clock of replicas that wait for nobody but their neighbours: one reading per replica, advanced by rounds.

A round of replica i in seconds: compute step_i, exchange x_i (the exchange takes the same time for all, or one per replica).
Which of the others it waits for, and what hides behind what, is a row of TIMINGS. A delay travels one hop per round on a
graph, and reaches everyone at once through an all_reduce.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from parsim.errors import AlgorithmError, near_matches
from parsim.numeric import Bools, Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicaClock:
    """When each replica is ready for its next step, and how its time was spent: float64 [n] each, in seconds.

    ready_s = compute_s + waiting_s: waiting is for neighbours and for the part of the exchange that nothing hides.
    """

    ready_s: Floats
    compute_s: Floats

    @classmethod
    def begin(cls, n: int) -> ReplicaClock:
        """All at 0."""
        return cls(ready_s=np.zeros(n), compute_s=np.zeros(n))

    @property
    def waiting_s(self) -> Floats:
        return self.ready_s - self.compute_s

    @property
    def now_s(self) -> float:
        """The latest reading: everyone has done this round."""
        return float(self.ready_s.max())

    def compute(self, seconds: ArrayLike) -> ReplicaClock:
        """Local steps of `seconds` [n], no exchange."""
        spent = _per_replica(seconds, len(self.ready_s), "step")
        return replace(self, ready_s=self.ready_s + spent, compute_s=self.compute_s + spent)

    def round(self, timing: str, step_s: ArrayLike, links: Bools, exchange_s: ArrayLike = 0.0) -> ReplicaClock:
        """After local steps of step_s [n] and one exchange by a row of TIMINGS.

        Args:
            links: bool [n, n], links[i, j] when i takes from j (W != 0). exchange_s: seconds, a number or [n] of the receiver.
        """
        if timing not in TIMINGS:
            raise AlgorithmError(f"unknown timing {timing!r}{near_matches(timing, TIMINGS)}")
        spent = _per_replica(step_s, len(self.ready_s), "step")
        exchange = _per_replica(exchange_s, len(self.ready_s), "exchange")
        return ReplicaClock(ready_s=TIMINGS[timing](self.ready_s, spent, links, exchange), compute_s=self.compute_s + spent)


def adapt_combine_s(ready: Floats, step: Floats, links: Bools, exchange: Floats) -> Floats:
    """The exchange follows the step: max over i and its in-neighbours of (ready + step), then the exchange."""
    return slowest_neighbour(ready + step, links) + exchange


def combine_adapt_s(ready: Floats, step: Floats, links: Bools, exchange: Floats) -> Floats:
    """The exchange of x goes on during the step: the later of the own step and (slowest in-neighbour ready) + exchange."""
    return np.maximum(ready + step, slowest_neighbour(ready, links) + exchange)


def all_reduce_s(ready: Floats, step: Floats, links: Bools, exchange: Floats) -> Floats:
    """Everyone waits for the slowest of all, then the collective, with nothing hidden; `links` does not matter."""
    return np.full_like(ready, (ready + step).max() + exchange.max())


TIMINGS: dict[str, Callable[[Floats, Floats, Bools, Floats], Floats]] = {
    "adapt_combine": adapt_combine_s,
    "all_reduce": all_reduce_s,
    "combine_adapt": combine_adapt_s,
}


def slowest_neighbour(values: Floats, links: Bools) -> Floats:
    """max over i itself and every j that i takes from: [n]."""
    others: Floats = np.where(links, values[None, :], -np.inf).max(1)
    return np.maximum(values, others)


def round_seconds(
    timing: str,
    graph: Callable[[int], NDArray[np.float64]],
    step_s: Callable[[int], ArrayLike],
    exchange_s: Callable[[NDArray[np.float64]], ArrayLike],
    *,
    n: int,
    rounds: int,
) -> float:
    """Mean seconds per round over `rounds` rounds from a common start (no learning): what `ReplicaClock` says of a graph.

    Args:
        step_s: of round t, a number or [n]. exchange_s: of a matrix W_t, a number or [n].
    """
    if rounds < 1:
        raise AlgorithmError(f"a mean over rounds needs at least one, got {rounds}")
    clock = ReplicaClock.begin(n)
    for t in range(rounds):
        matrix = graph(t)
        clock = clock.round(timing, step_s(t), matrix != 0, exchange_s(matrix))
    return clock.now_s / rounds


def random_stragglers(
    n: int, *, probability: float, factor: float, seconds: float = 1.0, seed: int = 0
) -> Callable[[int], Floats]:
    """Floats per step [n] of round t: each replica is `factor` times slower with this probability, anew each round."""
    if not 0 <= probability <= 1 or factor <= 0:
        raise AlgorithmError(f"stragglers need a probability in [0, 1] and a factor > 0, got {probability} and {factor}")

    def steps(t: int) -> Floats:
        slow = np.random.default_rng([seed, t]).random(n) < probability
        return np.where(slow, seconds * factor, seconds)

    return steps


def _per_replica(seconds: ArrayLike, n: int, what: str) -> Floats:
    values = np.broadcast_to(np.asarray(seconds, dtype=np.float64), (n,))
    if not (np.isfinite(values).all() and (values >= 0).all()):
        raise AlgorithmError(
            f"seconds of a {what} must be finite and >= 0 for each of {n} replicas, got {values.min()} .. {values.max()}"
        )
    return values
