"""Push-sum (SGP): averaging over directed or failing links, where no doubly stochastic matrix can be had.

Each worker holds x_i and a weight omega_i that begins at 1. A round multiplies both by a column-stochastic P (what a worker
sends and keeps is all it has); z_i = x_i / omega_i tends to the mean of the x_i(0). Training takes its gradient at z and
applies it to x.

Source: the update of SGP as this project's specification records it from facebookresearch/stochastic_gradient_push.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parsim.errors import AlgorithmError
from parsim.plans.mixing import STOCHASTIC_TOLERANCE, Matrix, circulant, rounds_of_one_peer, stochastic_error


def check_column_stochastic(matrix: Matrix, *, tolerance: float = STOCHASTIC_TOLERANCE) -> None:
    """Raise AlgorithmError unless entries are >= 0 and columns sum to 1: what each worker sends is all it has."""
    columns = stochastic_error(matrix)[1]
    if not columns <= tolerance or (matrix < 0).any():
        raise AlgorithmError(
            f"push-sum needs a column-stochastic matrix: entries >= 0 and columns that sum to 1, off by up to {columns:.3g}; "
            "divide each column by its sum"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PushSum:
    """Values x [n, ...] and weights omega [n] > 0 of n workers."""

    values: NDArray[np.float64]
    weights: NDArray[np.float64]

    @classmethod
    def begin(cls, values: NDArray[np.float64]) -> PushSum:
        """Of these values, with weights 1."""
        return cls(values=values, weights=np.ones(len(values)))

    def mix(self, matrix: Matrix) -> PushSum:
        """x <- P x, omega <- P omega."""
        check_column_stochastic(matrix)
        return PushSum(values=np.tensordot(matrix, self.values, axes=1), weights=matrix @ self.weights)

    @property
    def estimates(self) -> NDArray[np.float64]:
        """z = x / omega: what each worker takes the mean to be."""
        estimates: NDArray[np.float64] = debias(self.values, self.weights)
        return estimates


def debias(values: Any, weights: Any) -> Any:
    """z_i = x_i / omega_i over the first axis, of arrays or tensors alike."""
    return values / weights.reshape(-1, *[1] * (values.ndim - 1))


def column_stochastic(links: NDArray[np.bool_]) -> Matrix:
    """Each worker keeps and sends equal parts: P_ij = 1/(1 + out-degree of j) where j sends to i, and on the diagonal.

    Args:
        links: bool [n, n], links[i, j] when j sends to i; the diagonal does not count.
    """
    parts = links | np.eye(len(links), dtype=bool)
    matrix: Matrix = parts / parts.sum(0)[None, :]
    return matrix


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


def fail_links(matrix: Matrix, failed: NDArray[np.bool_]) -> Matrix:
    """The round in which the messages `failed` (bool [n, n], [to, from]) are not sent: their part stays with the sender.

    Columns still sum to 1, so push-sum keeps the mean. Rows do not, so plain mixing would not.
    """
    lost = np.where(failed & ~np.eye(len(matrix), dtype=bool), matrix, 0.0)
    kept: Matrix = matrix - lost
    kept[np.diag_indices_from(kept)] += lost.sum(0)
    return kept


def failing_links(graph: Callable[[int], Matrix], probability: float, *, seed: int = 0) -> Callable[[int], Matrix]:
    """`graph` with each message of each round lost with this probability; a pure function of (seed, t)."""
    if not 0 <= probability < 1:
        raise AlgorithmError(f"the probability that a link fails must be in [0, 1), got {probability}")

    def matrix(t: int) -> Matrix:
        whole = graph(t)
        return fail_links(whole, np.random.default_rng([seed, t]).random(whole.shape) < probability)

    return matrix
