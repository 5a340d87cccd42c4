"""How fast a mixing graph brings workers together: spectral gap, contraction, and closed forms of circulant graphs.

One mixing shrinks the distance from the mean, |X - mean|, by at least rho = ||W - 11^T/n||_2. The gap is 1 - |lambda_2|, the
second largest modulus of an eigenvalue; for symmetric and for circulant W, rho = 1 - gap.
"""

from __future__ import annotations

import math

import numpy as np

from parsim.algorithms.graphs import Matrix, MixingGraph
from parsim.errors import AlgorithmError


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
