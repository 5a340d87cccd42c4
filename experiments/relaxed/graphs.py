"""Mixing graphs that no plan has: how fast graphs bring workers together, and push-sum.

One mixing shrinks the distance from the mean, |X - mean|, by at least rho = ||W - 11^T/n||_2. The gap is 1 - |lambda_2|, the
second largest modulus of an eigenvalue; for symmetric and for circulant W, rho = 1 - gap.

Push-sum (SGP) averages over directed or failing links, where no doubly stochastic matrix can be had. Each worker holds x_i and
a weight omega_i that begins at 1. A round multiplies both by a column-stochastic P (what a worker sends and keeps is all it
has); z_i = x_i / omega_i tends to the mean of the x_i(0). Training takes its gradient at z and applies it to x.

Source of push-sum: the update of SGP as this project's specification records it from facebookresearch/stochastic_gradient_push.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from parsim.errors import AlgorithmError
from parsim.plans.mixing import Matrix, circulant, eigenvalues, rounds_of_one_peer


def spectral_gap(matrix: Matrix) -> float:
    """1 - |lambda_2| of a doubly stochastic W; 1 for a single worker and for the complete graph."""
    return 1.0 if len(matrix) == 1 else float(1.0 - np.sort(np.abs(eigenvalues(matrix)))[-2])


def debias(values: Any, weights: Any) -> Any:
    """z_i = x_i / omega_i over the first axis, of arrays or tensors alike."""
    return values / weights.reshape(-1, *[1] * (values.ndim - 1))


def rotating_peers(n: int, peers: int = 1) -> Callable[[int], Matrix]:
    """SGP's graph: in round t each worker sends to `peers` others at exponential offsets that rotate with t, equal parts.

    Raises:
        AlgorithmError: fewer than one peer, or more than there are offsets.
    """
    tau = rounds_of_one_peer(n)
    if n < 1 or not 1 <= peers <= tau:
        raise AlgorithmError(f"{n} workers have {tau} exponential offsets; peers must be between 1 and {tau}, got {peers}")
    if n == 1:
        return lambda t: np.eye(1)
    part = 1.0 / (peers + 1)
    return lambda t: circulant(n, {0: part, **{2 ** ((t * peers + p) % tau): part for p in range(peers)}})


def failing_links(graph: Callable[[int], Matrix], probability: float, *, seed: int = 0) -> Callable[[int], Matrix]:
    """`graph` with each message of each round lost with this probability; a pure function of (seed, t).

    The part of a lost message stays with the sender. So columns still sum to 1, and push-sum keeps the mean; rows do not.
    """
    if not 0 <= probability < 1:
        raise AlgorithmError(f"the probability that a link fails must be in [0, 1), got {probability}")

    def matrix(t: int) -> Matrix:
        sent = graph(t)
        failed = np.random.default_rng([seed, t]).random(sent.shape) < probability
        lost = np.where(failed & ~np.eye(len(sent), dtype=bool), sent, 0.0)
        left: Matrix = sent - lost
        left[np.diag_indices_from(left)] += lost.sum(0)
        return left

    return matrix
