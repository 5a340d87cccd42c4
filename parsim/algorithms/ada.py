"""Ada: the mixing graph adapts during training, dense early and sparse late, as a ring lattice of k_e neighbours in epoch e.

A schedule says k for an epoch, from the epoch alone (linear, exponential, step) or from what was measured (closed_loop). A new
one is a function and a row of ADA_SCHEDULES. k is rounded to even and kept between k_min and n-1 (complete).

Source: the idea is the Ada paper's (arXiv 2509.12213, abstract); its schedule and constants could not be obtained. So the
schedules and the controller are ours, as this project's specification states them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from parsim.algorithms.graphs import MixingGraph, mixing_graph
from parsim.algorithms.spectral import lattice_gap
from parsim.errors import AlgorithmError, near_matches


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsensusMeasured:
    """Means over an epoch of the distance D = (1/n) sum_i |x_i - mean|^2, before and after each mixing; and k then."""

    before: float
    after: float
    neighbours: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ada:
    """A row of ADA_SCHEDULES with its numbers.

    Attributes:
        kind: linear, exponential, step or closed_loop. n: workers.
        start: k_0. least: k_min. rate: gamma; neighbours less per epoch (linear), factor per epoch (exponential),
            factor at each of `milestones` (step).
        target: of closed_loop, the D after mixing that it keeps below.
    """

    n: int
    kind: str = "linear"
    start: int | None = None
    least: int = 2
    rate: float = 1.0
    milestones: tuple[int, ...] = ()
    target: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ADA_SCHEDULES:
            raise AlgorithmError(f"unknown Ada schedule {self.kind!r}{near_matches(self.kind, ADA_SCHEDULES)}")
        if self.n < 3 or self.least < 2 or self.first < self.least:
            raise AlgorithmError(
                f"Ada needs n >= 3 workers and 2 <= least <= start, got n {self.n}, least {self.least}, start {self.first}"
            )
        if not 0 <= self.rate < math.inf or (self.kind in ("exponential", "step") and not 0 < self.rate <= 1):
            raise AlgorithmError(
                f"rate must be >= 0 neighbours per epoch (linear) or a factor in (0, 1] (exponential, step), got {self.rate}"
            )
        if self.kind == "closed_loop" and self.target <= 0:
            raise AlgorithmError(f"closed_loop needs a target > 0 for the consensus distance, got {self.target}")

    @property
    def first(self) -> int:
        """k_0; n-1 when `start` is None."""
        return self.n - 1 if self.start is None else self.start

    def neighbours(self, epoch: int, measured: ConsensusMeasured | None = None) -> int:
        """k for `epoch` (from 0), given what the epoch before measured: even, or n-1."""
        return allowed_neighbours(ADA_SCHEDULES[self.kind](self, epoch, measured), self.n, self.least)

    def graph(self, epoch: int, measured: ConsensusMeasured | None = None) -> MixingGraph:
        """The ring lattice of `neighbours`."""
        return mixing_graph("lattice", self.n, neighbours=self.neighbours(epoch, measured))


def linear(ada: Ada, epoch: int, measured: ConsensusMeasured | None) -> float:
    """k_0 - floor(gamma e)."""
    return ada.first - math.floor(ada.rate * epoch)


def exponential(ada: Ada, epoch: int, measured: ConsensusMeasured | None) -> float:
    """k_0 gamma^e."""
    return ada.first * ada.rate**epoch


def step(ada: Ada, epoch: int, measured: ConsensusMeasured | None) -> float:
    """k_0 gamma^(milestones passed)."""
    return float(ada.first * ada.rate ** sum(milestone <= epoch for milestone in ada.milestones))


def closed_loop(ada: Ada, epoch: int, measured: ConsensusMeasured | None) -> float:
    """The smallest k whose predicted D stays at or below the target; k_0 before anything was measured."""
    if measured is None:
        return ada.first
    drift = max(measured.before - measured.after, 0.0)
    even = range(ada.least + ada.least % 2, ada.n - 1, 2)
    for k in even:
        if predicted_consensus(drift, 1.0 - lattice_gap(ada.n, k)) <= ada.target:
            return k
    return ada.n - 1


ADA_SCHEDULES: dict[str, Callable[[Ada, int, ConsensusMeasured | None], float]] = {
    "closed_loop": closed_loop,
    "exponential": exponential,
    "linear": linear,
    "step": step,
}


def predicted_consensus(drift: float, rho: float) -> float:
    """D = drift rho^2 / (1 - rho^2) after mixing, in the steady state.

    From D = rho^2 (D + drift): each local step adds `drift`, independent between steps and workers, and each mixing leaves
    rho^2 of the distance. Too high where the distance is spread over modes that mix faster than the slowest; too low where
    the drift points the same way at every step (shards of different distributions).
    """
    if not 0 <= rho < 1 or drift < 0:
        raise AlgorithmError(f"a prediction needs 0 <= rho < 1 and drift >= 0, got {rho} and {drift}")
    return drift * rho**2 / (1.0 - rho**2)


def allowed_neighbours(wanted: float, n: int, least: int = 2) -> int:
    """The largest even k <= wanted, but at least `least`; n-1 (complete) where it reaches that, or no lattice is left."""
    whole = math.floor(wanted)
    even = max(2, whole - whole % 2, least + least % 2)
    return n - 1 if max(whole, even) >= n - 1 else even


def ada_graphs(ada: Ada, epochs: int) -> tuple[MixingGraph, ...]:
    """The graph of each epoch, of a schedule that needs no measurement.

    Raises:
        AlgorithmError: a closed loop, whose graphs are known only as training goes.
    """
    if ada.kind == "closed_loop":
        raise AlgorithmError("the graphs of closed_loop depend on what training measures; ask for one epoch at a time")
    return tuple(ada.graph(epoch) for epoch in range(epochs))
