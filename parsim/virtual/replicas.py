"""Replicas: up to about a thousand copies of a model in one process, trained, mixed, averaged and judged as one value.

    replicas = Replicas.begin(LocalTraining(model, problem, optimizer), 64)
    replicas = replicas.local_steps(batches)          # int64 [steps, n, batch], one row of samples per replica
    replicas = replicas.mix(mixing_graph("ring", 64)(0))
    replicas.average(), replicas.consensus(), replicas.evaluate()

How a step and a mixing come together in a round is a row of COMBINATIONS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor

from parsim.algorithms.pushsum import debias
from parsim.errors import AlgorithmError
from parsim.plans.mixing import check_column_stochastic, check_doubly_stochastic
from parsim.relaxed.replicas import LocalTraining, Workers

SPARSE_BELOW = 0.125
"""A mixing matrix with a smaller fraction of entries than this is multiplied as a sparse one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Accuracy or R^2 on the test samples: of the mean of the weights, and each replica's own (None when not asked for)."""

    average: float
    replicas: NDArray[np.float64] | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replicas:
    """n replicas: weights [n, D] and optimizer state in `workers`.

    Attributes:
        training: the model, the problem and the optimizer. workers: weights, moments, steps.
        masses: push-sum's omega [n]; None in every other algorithm. With it, weights are x and the model is x / omega.
        chunk: replicas that are stepped at once: bounds the memory of activations, changes no number.
    """

    training: LocalTraining
    workers: Workers
    masses: Tensor | None = None
    chunk: int = 256

    @classmethod
    def begin(cls, training: LocalTraining, n: int, *, push_sum: bool = False, chunk: int = 256) -> Replicas:
        """n >= 1 replicas with the model's weights and new optimizers."""
        if n < 1 or chunk < 1:
            raise AlgorithmError(f"replicas and their chunk must be at least 1, got {n} and {chunk}")
        workers = Workers.fresh(training.start.repeat(n, 1))
        masses = torch.ones(n, dtype=workers.weights.dtype) if push_sum else None
        return cls(training=training, workers=workers, masses=masses, chunk=chunk)

    def __len__(self) -> int:
        return len(self.workers.weights)

    @property
    def models(self) -> Tensor:
        """The weights [n, D] that gradients and scores are taken at."""
        weights = self.workers.weights
        return weights if self.masses is None else torch.as_tensor(debias(weights, self.masses))

    def local_steps(self, batches: NDArray[np.int64]) -> Replicas:
        """Steps of each replica on its own samples: int64 [steps, n, batch], padded with -1 (a row of -1 makes no step).

        With push-sum the step is taken at x / omega and its change added to x.
        """
        if batches.ndim != 3 or batches.shape[1] != len(self):
            raise AlgorithmError(f"local steps need samples [steps, {len(self)}, batch], got shape {list(batches.shape)}")
        replicas = self
        for samples in batches:
            replicas = replicas._step(samples)
        return replicas

    def _step(self, samples: NDArray[np.int64]) -> Replicas:
        models = self.models
        before = replace(self.workers, weights=models)
        parts = [range(first, min(first + self.chunk, len(self))) for first in range(0, len(self), self.chunk)]
        if len(parts) == 1:
            stepped = self.training.step(before, samples)
        else:
            stepped = joined([self.training.step(before.take(part), samples[part.start : part.stop]) for part in parts])
        if self.masses is not None:
            stepped = replace(stepped, weights=self.workers.weights + (stepped.weights - models))
        return replace(self, workers=stepped)

    def mix(self, matrix: NDArray[np.float64], *, check: bool = True) -> Replicas:
        """w_i <- sum_j W_ij w_j, optimizer state untouched; with push-sum omega is mixed too.

        Args:
            matrix: W [n, n]; doubly stochastic, or with push-sum column-stochastic. check: say so where it is not.

        Raises:
            AlgorithmError: a matrix of another size, or one that is not stochastic as it must be.
        """
        if matrix.shape != (len(self), len(self)):
            raise AlgorithmError(
                f"{len(self)} replicas need a mixing matrix [{len(self)}, {len(self)}], got {list(matrix.shape)}"
            )
        if check:
            (check_doubly_stochastic if self.masses is None else check_column_stochastic)(matrix)
        weights = mixed_rows(matrix, self.workers.weights)
        masses = None if self.masses is None else torch.tensor(matrix, dtype=self.masses.dtype) @ self.masses
        return replace(self, workers=replace(self.workers, weights=weights), masses=masses)

    def average(self) -> Tensor:
        """The mean of the weights [D]. (Of x under push-sum, which is the mean that omega keeps.)"""
        return self.workers.weights.mean(0)

    def averaged(self) -> Replicas:
        """All replicas at the mean: what one all_reduce of the weights leaves."""
        masses = None if self.masses is None else torch.ones_like(self.masses)
        weights = self.average().repeat(len(self), 1)
        return replace(self, workers=replace(self.workers, weights=weights), masses=masses)

    def consensus(self) -> float:
        """(1/n) sum_i |w_i - mean|^2 of the models."""
        models = self.models
        return (models - models.mean(0)).square().sum(1).mean().item()

    def norms(self) -> NDArray[np.float64]:
        """The L2 norm of every parameter tensor of every replica: float64 [n, tensors], in the order of `training.tensors`."""
        pieces = torch.split(self.models, [size for _, size in self.training.tensors], dim=1)
        return np.stack([piece.double().norm(dim=1).numpy() for piece in pieces], axis=1)

    def evaluate(self, *, every: bool = False) -> Scores:
        """The score of the averaged model and, with `every`, of each replica."""
        own = np.array([self.training.score(row) for row in self.models]) if every else None
        return Scores(average=self.training.score(self.average()), replicas=own)


def joined(parts: list[Workers]) -> Workers:
    """Chunks of workers, one after the other, as one."""
    return Workers(
        weights=torch.cat([part.weights for part in parts]),
        moments=tuple(torch.cat(moments) for moments in zip(*(part.moments for part in parts), strict=True)),
        steps=torch.cat([part.steps for part in parts]),
    )


def mixed_rows(matrix: NDArray[np.float64], rows: Tensor) -> Tensor:
    """W @ rows, [n, n] by [n, D], in the precision of the rows; sparse where W is."""
    if np.count_nonzero(matrix) >= SPARSE_BELOW * matrix.size:
        return torch.tensor(matrix, dtype=rows.dtype) @ rows
    sparse = csr_array(matrix.astype(rows.numpy().dtype))
    return torch.from_numpy(sparse @ rows.numpy())


def adapt_combine(before: Replicas, stepped: Replicas, matrix: NDArray[np.float64]) -> Replicas:
    """x <- W (x - eta g): exchange after the step (ATC, D-PSGD)."""
    return stepped.mix(matrix)


def combine_adapt(before: Replicas, stepped: Replicas, matrix: NDArray[np.float64]) -> Replicas:
    """x <- W x - eta g(x): the exchange of x goes on while g(x) is computed (CTA). `before` is x."""
    change = stepped.workers.weights - before.workers.weights
    met = before.mix(matrix)
    return replace(met, workers=replace(stepped.workers, weights=met.workers.weights + change))


COMBINATIONS: dict[str, Callable[[Replicas, Replicas, NDArray[np.float64]], Replicas]] = {
    "adapt_combine": adapt_combine,
    "combine_adapt": combine_adapt,
}
"""The replicas after a round, from those before its local steps, those after, and W."""
