"""Local steps of many workers at once: their weights as rows of one matrix, their gradients by torch.func.

Worker i's weights are row i, all parameters flattened in the module's order, so mixing is a matrix product and averaging a mean
over rows. Batches of different sizes are padded with samples of weight 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from parsim.data.blocks.room import available_bytes
from parsim.errors import AlgorithmError, near_matches
from parsim.units import format_bytes
from parsim.virtual.feed import WorkerBatch
from parsim.virtual.problems import LearningProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptimizer:
    """What a worker does with its gradient: a row of LOCAL_OPTIMIZERS and its numbers (as in torch.optim)."""

    kind: str = "sgd"
    learning_rate: float = 0.1
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        if self.kind not in LOCAL_OPTIMIZERS:
            raise AlgorithmError(f"unknown local optimizer {self.kind!r}{near_matches(self.kind, LOCAL_OPTIMIZERS)}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workers:
    """Weights [m, D] and optimizer state of m workers: moments of shape [m, D] (none before the first step), steps made [m]."""

    weights: Tensor
    moments: tuple[Tensor, ...] = ()
    steps: Tensor

    @classmethod
    def fresh(cls, weights: Tensor) -> Workers:
        """Workers with these weights [m, D] and new optimizers."""
        return cls(weights=weights, steps=torch.zeros(len(weights), dtype=torch.int64))

    def take(self, rows: Sequence[int]) -> Workers:
        """The workers of these rows."""
        index = torch.tensor(list(rows))
        moments = tuple(moment[index] for moment in self.moments)
        return Workers(weights=self.weights[index], moments=moments, steps=self.steps[index])


def sgd(workers: Workers, gradient: Tensor, optimizer: LocalOptimizer) -> tuple[Tensor, tuple[Tensor, ...]]:
    """w - lr g."""
    return workers.weights - optimizer.learning_rate * gradient, ()


def sgd_momentum(workers: Workers, gradient: Tensor, optimizer: LocalOptimizer) -> tuple[Tensor, tuple[Tensor, ...]]:
    """v <- momentum v + g; w - lr v."""
    velocity = workers.moments[0] * optimizer.momentum + gradient if workers.moments else gradient
    return workers.weights - optimizer.learning_rate * velocity, (velocity,)


def adam(workers: Workers, gradient: Tensor, optimizer: LocalOptimizer) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Adam with bias correction by each worker's own count of steps."""
    first, second = workers.moments or (torch.zeros_like(gradient), torch.zeros_like(gradient))
    beta1, beta2 = optimizer.betas
    first, second = first.lerp(gradient, 1 - beta1), second.lerp(gradient * gradient, 1 - beta2)
    count = (workers.steps + 1).to(gradient.dtype)[:, None]
    scale = (second / (1 - beta2**count)).sqrt() + optimizer.epsilon
    return workers.weights - optimizer.learning_rate * (first / (1 - beta1**count)) / scale, (first, second)


LOCAL_OPTIMIZERS: dict[str, Callable[[Workers, Tensor, LocalOptimizer], tuple[Tensor, tuple[Tensor, ...]]]] = {
    "sgd": sgd,
    "sgd_momentum": sgd_momentum,
    "adam": adam,
}


class LocalTraining:
    """Gradients and steps of workers that all train `model` (its structure; its weights are the start) on `problem`.

    The module must be a pure function of its parameters: no buffers that training changes, no randomness.
    """

    def __init__(self, model: nn.Module, problem: LearningProblem, optimizer: LocalOptimizer) -> None:
        if any(True for _ in model.buffers()):
            raise AlgorithmError("virtual workers need a model without buffers (no BatchNorm): rows hold parameters alone")
        self.problem, self.optimizer, self._model = problem, optimizer, model
        self._shapes = [(name, value.shape) for name, value in model.named_parameters()]
        self.start = torch.cat([value.detach().flatten() for value in model.parameters()])
        self._gradient = vmap(grad_and_value(self._loss))

    @property
    def tensors(self) -> tuple[tuple[str, int], ...]:
        """Name and size of each parameter tensor, in the order of a row of weights."""
        return tuple((name, shape.numel()) for name, shape in self._shapes)

    @property
    def weight_bytes(self) -> int:
        """|w|: bytes of one worker's parameters."""
        return self.start.numel() * self.start.element_size()

    def outputs(self, weights: Tensor, inputs: Tensor) -> Tensor:
        """The model's outputs for one row of weights [D]."""
        pieces = torch.split(weights, [shape.numel() for _, shape in self._shapes])
        named = {name: piece.view(shape) for (name, shape), piece in zip(self._shapes, pieces, strict=True)}
        result: Tensor = functional_call(self._model, named, (inputs,))
        return result

    def score(self, weights: Tensor) -> float:
        """Of one row of weights on the test samples: accuracy or R^2."""
        with torch.no_grad():
            return self.problem.score(self.outputs(weights, self.problem.test_inputs))

    def _loss(self, weights: Tensor, inputs: Tensor, targets: Tensor, share: Tensor) -> Tensor:
        return (self.problem.losses(self.outputs(weights, inputs), targets) * share).sum()

    def step(self, workers: Workers, samples: NDArray[np.int64]) -> Workers:
        """One local step of each worker on its own samples: int64 [m, batch], padded with -1; a row of -1 makes no step."""
        wanted = torch.from_numpy(samples)
        index = wanted.clamp(min=0)
        return self.step_on(
            workers, WorkerBatch(inputs=self.problem.inputs[index], targets=self.problem.targets[index], real=wanted >= 0)
        )

    def step_on(self, workers: Workers, batch: WorkerBatch) -> Workers:
        """One local step of each worker on its samples of the batch; a worker without a real sample makes no step."""
        count = batch.real.sum(1)
        moved = self.updated(workers, self._gradient_on(workers.weights, batch))
        steps = (count > 0).to(torch.int64)
        if bool(steps.all()):
            return moved
        still = (steps == 0)[:, None]
        before = workers.moments or tuple(torch.zeros_like(moment) for moment in moved.moments)
        return Workers(
            weights=torch.where(still, workers.weights, moved.weights),
            moments=tuple(torch.where(still, old, new) for old, new in zip(before, moved.moments, strict=True)),
            steps=workers.steps + steps,
        )

    def gradient(self, weights: Tensor, samples: NDArray[np.int64]) -> Tensor:
        """Of the mean loss, [m, D], for weights [m, D] on samples int64 [m, batch]."""
        index = torch.tensor(samples)
        real = torch.ones(index.shape, dtype=torch.bool)
        return self._gradient_on(
            weights, WorkerBatch(inputs=self.problem.inputs[index], targets=self.problem.targets[index], real=real)
        )

    def updated(self, workers: Workers, gradient: Tensor) -> Workers:
        """Every worker after one update of its optimizer by a gradient [m, D]."""
        weights, moments = LOCAL_OPTIMIZERS[self.optimizer.kind](workers, gradient, self.optimizer)
        return Workers(weights=weights, moments=moments, steps=workers.steps + 1)

    def _gradient_on(self, weights: Tensor, batch: WorkerBatch) -> Tensor:
        share = batch.real.to(weights.dtype) / batch.real.sum(1).clamp(min=1)[:, None]
        gradient: Tensor = self._gradient(weights, batch.inputs, batch.targets, share)[0]
        return gradient


COPIES = 6
"""Arrays as large as all weights that a step holds at once: weights, gradients, two moments, what is mixed, a temporary."""


def check_room(replicas: int, weight_bytes: int) -> None:
    """Raise AlgorithmError with how many replicas fit, where so many do not.

    Args:
        replicas: whose weights and states are held at once. weight_bytes: of one. Leaves out activations.
    """
    available = available_bytes()
    each = COPIES * weight_bytes
    if available is not None and replicas * each > available:
        raise AlgorithmError(
            f"{replicas} virtual replicas of {format_bytes(weight_bytes)} need {format_bytes(replicas * each)}, and "
            f"{format_bytes(available)} are free: {available // each} fit; use fewer replicas or a smaller model"
        )


def epoch_batches(
    shard: NDArray[np.int64], batch: int, *, seed: int, worker: int, epoch: int, keep_remainder: bool = False
) -> NDArray[np.int64]:
    """int64 [steps, batch]: a worker's shard in the order of (seed, worker, epoch).

    The samples left over are dropped, or make a last short batch (padded with -1). A shard smaller than the batch makes
    one step on all of it.
    """
    order = shard[np.random.default_rng([seed, worker, epoch]).permutation(len(shard))]
    steps = batches_in(len(order), batch, keep_remainder)
    order = order[: steps * batch]
    padding = np.full(steps * batch - len(order), -1, dtype=np.int64)
    return np.concatenate([order, padding]).reshape(steps, batch)


def batches_in(samples: int, batch: int, keep_remainder: bool) -> int:
    """Steps of one epoch over a shard: samples / batch, rounded up with the remainder, else down but at least one."""
    return -(-samples // batch) if keep_remainder else max(1, samples // batch)


def stack_batches(batches: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """[steps_j, batch] of m workers as [max steps, m, batch], padded with rows of -1."""
    longest = max(len(entry) for entry in batches)
    stacked = np.full((longest, len(batches), batches[0].shape[1]), -1, dtype=np.int64)
    for worker, entry in enumerate(batches):
        stacked[: len(entry), worker] = entry
    return stacked
