"""The simulated clock of replicas that wait for nobody but their neighbours: one reading per replica, advanced by rounds.

A round of replica i in seconds: compute step_i, exchange x_i (the exchange takes the same time for all, or one per replica).
Which of the others it waits for, and what hides behind what, is a row of TIMINGS. A delay travels one hop per round on a
graph, and reaches everyone at once through an all_reduce.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from parsim.errors import AlgorithmError, near_matches
from parsim.numeric import Bools, Floats


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
    """max over i itself and every j that i takes from (links[i, j]): [n]."""
    others: Floats = np.where(links, values[None, :], -np.inf).max(1)
    return np.maximum(values, others)


def readings(
    timing: str,
    graph: Callable[[int], NDArray[np.float64]],
    step_s: Callable[[int], ArrayLike],
    exchange_s: Callable[[NDArray[np.float64]], ArrayLike],
    n: int,
) -> Iterator[tuple[Floats, Floats]]:
    """Round after round without end, from a common start: when each replica is ready, and how long it has computed [n].

    Args:
        step_s: seconds of the local step of round t, a number or [n]. exchange_s: of a matrix W_t, a number or [n].
    """
    if timing not in TIMINGS:
        raise AlgorithmError(f"unknown timing {timing!r}{near_matches(timing, TIMINGS)}")
    ready, computed = np.zeros(n), np.zeros(n)
    for t in itertools.count():
        matrix = graph(t)
        step = _per_replica(step_s(t), n, "step")
        ready = TIMINGS[timing](ready, step, matrix != 0, _per_replica(exchange_s(matrix), n, "exchange"))
        computed = computed + step
        yield ready, computed


def round_seconds(
    timing: str,
    graph: Callable[[int], NDArray[np.float64]],
    step_s: Callable[[int], ArrayLike],
    exchange_s: Callable[[NDArray[np.float64]], ArrayLike],
    *,
    n: int,
    rounds: int,
) -> float:
    """Mean seconds per round over `rounds` rounds: the latest of the `readings` over their number."""
    if rounds < 1:
        raise AlgorithmError(f"a mean over rounds needs at least one, got {rounds}")
    ready, _ = next(itertools.islice(readings(timing, graph, step_s, exchange_s, n), rounds - 1, None))
    return float(ready.max()) / rounds


def random_stragglers(
    n: int, *, probability: float, factor: float, seconds: float = 1.0, seed: int = 0
) -> Callable[[int], Floats]:
    """Seconds per step [n] of round t: each replica is `factor` times slower with this probability, anew each round."""
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
