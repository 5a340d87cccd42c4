"""How fast a mixing graph brings workers together, and Ada's schedules that no plan has: by milestones, and by measurement.

One mixing shrinks the distance from the mean, |X - mean|, by at least rho = ||W - 11^T/n||_2. The gap is 1 - |lambda_2|, the
second largest modulus of an eigenvalue; for symmetric and for circulant W, rho = 1 - gap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from parsim.errors import AlgorithmError
from parsim.plans.mixing import Ada, Matrix, MixingGraph, allowed_neighbours, mixing_graph


def is_circulant(matrix: Matrix) -> bool:
    """Whether W_ij depends on (i - j) mod n alone."""
    n = len(matrix)
    index = np.arange(n)
    return bool((matrix == matrix[:, 0][(index[:, None] - index[None, :]) % n]).all())


def eigenvalue_moduli(matrix: Matrix) -> Matrix:
    """|lambda| of every eigenvalue, largest first, float64 [n].

    A circulant's are the FFT of its first column, a symmetric matrix's come from eigvalsh, both exact to rounding. Others come
    from the general solver, which for a defective matrix is good to about the square root of that.
    """
    if is_circulant(matrix):
        values = np.abs(np.fft.fft(matrix[:, 0]))
    elif np.array_equal(matrix, matrix.T):
        values = np.abs(np.linalg.eigvalsh(matrix))
    else:
        values = np.abs(np.linalg.eigvals(matrix))
    moduli: Matrix = np.sort(values)[::-1]
    return moduli


def spectral_gap(matrix: Matrix) -> float:
    """1 - |lambda_2| of a doubly stochastic W; 1 for a single worker and for the complete graph."""
    return 1.0 if len(matrix) == 1 else float(1.0 - eigenvalue_moduli(matrix)[1])


def contraction(matrix: Matrix) -> float:
    """rho = ||W - 11^T/n||_2: the most of the distance from the mean that one mixing leaves."""
    if is_circulant(matrix):
        return 1.0 - spectral_gap(matrix)
    return float(np.linalg.norm(matrix - 1.0 / len(matrix), ord=2))


def period_contraction(graph: MixingGraph) -> float:
    """rho of the product W_(p-1) .. W_0 of one period: 0 for a one-peer exponential graph of 2^tau workers."""
    product = np.eye(graph.n)
    for t in range(graph.period):
        product = graph(t) @ product
    return contraction(product)


def ring_gap(n: int) -> float:
    """(2/3)(1 - cos(2 pi / n)) for n >= 4; n = 2, 3 average exactly, so 1. Theta(1/n^2)."""
    return 1.0 if n <= 3 else 2.0 / 3.0 * (1.0 - math.cos(2.0 * math.pi / n))


def lattice_gap(n: int, neighbours: int) -> float:
    """1 - max_m |1 + 2 sum_(d=1..k/2) cos(2 pi m d / n)| / (k+1), m = 1 .. n-1; 1 when k >= n-1."""
    if neighbours >= n - 1:
        return 1.0
    m = np.arange(1, n)[:, None]
    d = np.arange(1, neighbours // 2 + 1)[None, :]
    values = (1.0 + 2.0 * np.cos(2.0 * np.pi * m * d / n).sum(1)) / (neighbours + 1)
    return float(1.0 - np.abs(values).max())


def exponential_gap(tau: int) -> float:
    """2/(tau+1) of the static exponential graph of n = 2^tau workers (tau >= 1)."""
    if tau < 1:
        raise AlgorithmError(f"the closed form holds for n = 2^tau with tau >= 1, got tau = {tau}")
    return 2.0 / (tau + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAda(Ada):
    """k_0 gamma^(milestones passed). rate: gamma, in (0, 1]."""

    milestones: tuple[int, ...] = ()

    def neighbours(self, epoch: int) -> int:
        passed = sum(milestone <= epoch for milestone in self.milestones)
        return allowed_neighbours(self.first * self.rate**passed, self.n, self.least)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsensusMeasured:
    """Means over an epoch of the distance D = (1/n) sum_i |x_i - mean|^2, before and after each mixing; and k then."""

    before: float
    after: float
    neighbours: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoopAda(Ada):
    """The smallest k whose predicted D after mixing stays at or below `target`; k_0 before anything was measured."""

    target: float

    def __post_init__(self) -> None:
        Ada.__post_init__(self)
        if self.target <= 0:
            raise AlgorithmError(f"closed_loop needs a target > 0 for the consensus distance, got {self.target}")

    def neighbours(self, epoch: int, measured: ConsensusMeasured | None = None) -> int:
        """k for `epoch` (from 0), given what the epoch before measured."""
        if measured is None:
            return allowed_neighbours(self.first, self.n, self.least)
        drift = max(measured.before - measured.after, 0.0)
        even = range(self.least + self.least % 2, self.n - 1, 2)
        fits = (k for k in even if predicted_consensus(drift, 1.0 - lattice_gap(self.n, k)) <= self.target)
        return next(fits, self.n - 1)

    def graph(self, epoch: int, measured: ConsensusMeasured | None = None) -> MixingGraph:
        """The ring lattice of `neighbours`."""
        return mixing_graph("lattice", self.n, neighbours=self.neighbours(epoch, measured))


def predicted_consensus(drift: float, rho: float) -> float:
    """D = drift rho^2 / (1 - rho^2) after mixing, in the steady state.

    From D = rho^2 (D + drift): each local step adds `drift`, independent between steps and workers, and each mixing leaves
    rho^2 of the distance. Too high where the distance is spread over modes that mix faster than the slowest; too low where
    the drift points the same way at every step (shards of different distributions).
    """
    if not 0 <= rho < 1 or drift < 0:
        raise AlgorithmError(f"a prediction needs 0 <= rho < 1 and drift >= 0, got {rho} and {drift}")
    return drift * rho**2 / (1.0 - rho**2)
