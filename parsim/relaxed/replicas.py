"""Local steps of many workers at once: their weights as rows of one matrix, their gradients by torch.func.

Worker i's weights are row i, all parameters flattened in the module's order, so mixing is a matrix product and averaging a mean
over rows. Batches of different sizes are padded with samples of weight 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from parsim.data.blocks.exchange import available_bytes
from parsim.data.samples import Order, part
from parsim.errors import AlgorithmError, near_matches
from parsim.plans.averaging import Merged, merged_in_turn
from parsim.plans.plan import Plan
from parsim.plans.synchronisation import Synchronisation
from parsim.relaxed.problems import LearningProblem
from parsim.units import format_bytes


class SampleOrder(Protocol):
    """Which samples each step trains on: `parsim.data.BatchOrder`, or shards of unequal replicas."""

    def indices(self, step: int) -> NDArray[np.int64]:
        """int64 [global batch], the parts of the replicas one after another; -1 where a replica has no sample."""


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
        """Accuracy or R^2 of one row of weights on the test samples."""
        with torch.no_grad():
            return self.problem.score(self.outputs(weights, self.problem.test_inputs))

    def _loss(self, weights: Tensor, inputs: Tensor, targets: Tensor, share: Tensor) -> Tensor:
        return (self.problem.losses(self.outputs(weights, inputs), targets) * share).sum()

    def step(self, workers: Workers, samples: NDArray[np.int64]) -> Workers:
        """One local step of each worker on its own samples: int64 [m, batch], padded with -1; a row of -1 makes no step."""
        moved = self.updated(workers, self.gradient(workers.weights, samples))
        steps = torch.from_numpy((samples >= 0).any(1)).to(torch.int64)
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
        """Gradient of the mean loss, [m, D], for weights [m, D] on samples int64 [m, batch], padded with -1."""
        numbers = torch.tensor(samples)
        real, index = numbers >= 0, numbers.clamp(min=0)
        share = real.to(weights.dtype) / real.sum(1).clamp(min=1)[:, None]
        gradient: Tensor = self._gradient(weights, self.problem.inputs[index], self.problem.targets[index], share)[0]
        return gradient

    def curvature(self, weights: Tensor, samples: NDArray[np.int64], *, iterations: int = 30) -> float:
        """L, the largest |eigenvalue| of the Hessian of the mean loss at one row of weights [D], by power iteration: at most
        the true one.

        Args: samples: int64 [batch].
        """
        index = torch.tensor(samples)
        inputs, targets = self.problem.inputs[index], self.problem.targets[index]
        at = weights.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self.problem.loss(self.outputs(at, inputs), targets), at, create_graph=True)
        direction = torch.from_numpy(np.random.default_rng(0).standard_normal(len(at))).to(at.dtype)
        largest = 0.0
        for _ in range(iterations):
            (direction,) = torch.autograd.grad(gradient, at, direction / direction.norm(), retain_graph=True)
            largest = float(direction.norm())
            if not largest:
                break
        return largest

    def updated(self, workers: Workers, gradient: Tensor) -> Workers:
        """Every worker after one update of its optimizer by a gradient [m, D]."""
        weights, moments = LOCAL_OPTIMIZERS[self.optimizer.kind](workers, gradient, self.optimizer)
        return Workers(weights=weights, moments=moments, steps=workers.steps + 1)


COPIES = 6
"""Arrays as large as all weights that a step holds at once: weights, gradients, two moments, what is mixed, a temporary."""


def check_room(replicas: int, weight_bytes: int) -> None:
    """Raise AlgorithmError with how many replicas of `weight_bytes` each fit, where so many do not. Leaves out activations."""
    available = available_bytes()
    each = COPIES * weight_bytes
    if available is not None and replicas * each > available:
        raise AlgorithmError(
            f"{replicas} virtual replicas of {format_bytes(weight_bytes)} need {format_bytes(replicas * each)}, and "
            f"{format_bytes(available)} are free: {available // each} fit; use fewer replicas or a smaller model"
        )


# Decoupled stages with gradients that are late, on one row of weights.
#
# The gradient of stage k for batch b is block k of the ordinary gradient at the weights with which batch b ran forward: those
# that stage k had in step b + k. So one gradient of the whole model per step is enough. Its blocks wait until their stage is
# due: stage k of K applies that of batch b in step b + 2 (K - 1) - k. Replicas sum gradients in every step: one stands for all.
#
# Leaves out: BatchNorm and dropout, as all virtual replicas do.


def stale_steps(training: LocalTraining, order: SampleOrder, stages: Sequence[Sequence[str]]) -> Iterator[Workers]:
    """Step after step without end: the weights of all stages behind each, as one worker.

    stages: names of the parameters of each, first to last. Raises AlgorithmError: they do not divide the model's parameters.
    """
    places = _places(training, stages)
    last = len(stages) - 1
    live = [Workers.fresh(training.start[None, place]) for place in places]
    forward: dict[int, Tensor] = {}
    waiting: list[dict[int, Tensor]] = [{} for _ in stages]
    for step in itertools.count():
        forward[step] = torch.empty_like(training.start)[None]
        for stage, place in enumerate(places):
            if step >= stage:
                forward[step - stage][:, place] = live[stage].weights
        if step >= last:
            batch = step - last
            gradient = training.gradient(forward.pop(batch), order.indices(batch)[None])
            for stage, place in enumerate(places):
                waiting[stage][batch + 2 * last - stage] = gradient[:, place]
        for stage, due in enumerate(waiting):
            if step in due:
                live[stage] = training.updated(live[stage], due.pop(step))
        weights = torch.empty_like(training.start)[None]
        for stage, place in enumerate(places):
            weights[:, place] = live[stage].weights
        yield Workers(weights=weights, steps=torch.full((1,), step + 1, dtype=torch.int64))


def _places(training: LocalTraining, stages: Sequence[Sequence[str]]) -> list[Tensor]:
    """Where in a row of weights the parameters of each stage are."""
    names = [name for name, _ in training.tensors]
    ends = np.cumsum([size for _, size in training.tensors])
    divided = [name for stage in stages for name in stage]
    if sorted(divided) != sorted(names):
        odd = sorted(set(names) ^ set(divided)) or sorted({name for name in divided if divided.count(name) > 1})
        raise AlgorithmError(
            f"{len(stages)} stages have to divide all parameters among them, each in one stage; look at {', '.join(odd[:4])}"
        )
    where = {name: torch.arange(end - size, end) for (name, size), end in zip(training.tensors, ends, strict=True)}
    return [torch.cat([where[name] for name in stage] or [torch.arange(0)]) for stage in stages]


# Virtual replicas under a plan: the same rule, samples and order of steps as the real run, and the plan's own seconds.
#
# What the replicas learn is measured here; how long a step takes is what `parsim simulate` says of the plan, from the same
# rounds. So a curve over simulated seconds has one clock.


SPARSE = 0.1
"""Share of mixing weights that are not zero, below which a sparse product is faster: 1,008 replicas on a lattice of six
neighbours have 7,056 of a million."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedOutcome:
    """What the replicas of a plan learnt.

    Attributes:
        workers: weights of every replica [P, D]. weights: their mean [D], which a checkpoint of the real run holds.
        seconds: simulated, of all steps. rounds: in which weights were mixed. scores: (step, score of the mean weights).
    """

    workers: Tensor
    weights: Tensor
    seconds: float
    rounds: int
    scores: tuple[tuple[int, float], ...] = ()


def train_planned(
    plan: Plan,
    training: LocalTraining,
    order: Order,
    steps: int,
    *,
    step_s: float = 0.0,
    score_every: int = 0,
    on_step: Callable[[int, Tensor], None] | None = None,
) -> PlannedOutcome:
    """Train one virtual replica per replica of the plan, as the executor would.

    Args:
        plan: with synchronisation average, gossip or merge. training: of the model; its weights are the start.
        order: of the samples; replicas take equal parts of every global batch. steps: to train.
        step_s: seconds of the plan's mean step, as simulated. score_every: steps between two scores; 0: none.
        on_step: sees (steps done, weights [P, D]).

    Raises AlgorithmError: the plan does not mix, its batches are not those of the order, or so many replicas do not fit.
    """
    rule, replicas = plan.synchronisation, plan.mesh.dp
    if not rule.mixes:
        raise AlgorithmError(
            f"virtual replicas mix in rounds, and the plan has synchronisation {rule}; use average, gossip or merge"
        )
    if order.global_batch != plan.global_batch:
        raise AlgorithmError(f"the plan has batches of {plan.global_batch} samples, and the order of {order.global_batch}")
    if steps < 1:
        raise AlgorithmError(f"virtual replicas train at least one step, got {steps}")
    scores: list[tuple[int, float]] = []
    for step, state in enumerate(itertools.islice(steps_of(rule, replicas, training, order), steps), 1):
        workers, kept = state
        if on_step is not None:
            on_step(step, workers.weights)
        if score_every and step % score_every == 0:
            scores.append((step, training.score(kept.mean(workers.weights))))
    return PlannedOutcome(
        workers=workers.weights,
        weights=kept.mean(workers.weights),
        seconds=steps * step_s,
        rounds=kept.rounds,
        scores=tuple(scores),
    )


def steps_of(
    rule: Synchronisation,
    replicas: int,
    training: LocalTraining,
    order: SampleOrder,
    stages: Sequence[Sequence[str]] = (),
    *,
    before_round: Callable[[int, Tensor], None] | None = None,
) -> Iterator[tuple[Workers, RoundState]]:
    """Step after step without end: the replicas behind each, and what they keep from round to round.

    before_round: sees the number of every round and the weights [P, D] that it will mix.

    replicas: that mix; 1 under all_reduce and stale, where one takes the whole batch and learns the same. stages: of stale, the
    parameters of each. Raises AlgorithmError: so many replicas do not fit.
    """
    if rule.kind == "stale":
        check_room(len(stages), training.weight_bytes)  # waiting batches keep weights and gradients of their own
        kept = RoundState.fresh(training.start[None])
        yield from ((workers, kept) for workers in stale_steps(training, order, stages))
        return
    check_room(replicas, training.weight_bytes)
    workers = Workers.fresh(training.start.repeat(replicas, 1))
    kept = RoundState.fresh(workers.weights)
    for step in itertools.count():
        samples = np.stack([part(order.indices(step), replica=replica, dp=replicas) for replica in range(replicas)])
        if rule.mixes:
            samples[~np.array(rule.takes_part(kept.rounds, replicas))] = -1
        before = workers.weights
        workers = training.step(workers, samples)
        if rule.mixes and rule.due(step):
            if before_round is not None:
                before_round(kept.rounds, workers.weights)
            mixed, kept = mixed_weights(rule, before, workers.weights, kept)
            workers = replace(workers, weights=mixed)
        yield workers, kept


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundState:
    """What replicas keep from round to round.

    Attributes:
        previous: the model behind the last round: [D], or every replica's own [P, D] of push-sum and merge. velocity: of an
            outer optimizer. masses: of push-sum [P]. merged: of merge, the global model. rounds: so far.
    """

    previous: Tensor
    masses: Tensor
    merged: Merged[Tensor]
    velocity: Tensor | None = None
    rounds: int = 0

    @classmethod
    def fresh(cls, weights: Tensor) -> RoundState:
        """Before the first round: all replicas begin with the same weights [P, D]."""
        ones = torch.ones(len(weights), dtype=torch.float64)
        return cls(previous=weights[0].clone(), masses=ones, merged=Merged(weights=weights[0]))

    def mean(self, weights: Tensor) -> Tensor:
        """The model [D] that replicas with these weights [P, D] stand for: of push-sum the mean of x, and not of x / w."""
        beside = (self.masses - 1.0).to(weights.dtype)
        return (weights + beside[:, None] * self.previous if beside.any() else weights).mean(0)


def mixed_weights(rule: Synchronisation, before: Tensor, weights: Tensor, kept: RoundState) -> tuple[Tensor, RoundState]:
    """One round: the weights [P, D] of all replicas behind it, from those before the last step and those after it."""
    replicas = len(weights)
    if rule.kind == "merge":
        starts = kept.previous.expand(weights.shape)
        merged, after = merged_in_turn(rule.merge_rule(replicas), kept.merged, weights.unbind(), starts.unbind(), kept.rounds)
        goes_on = torch.stack(after)
        return goes_on, replace(kept, previous=goes_on, merged=merged, rounds=kept.rounds + 1)
    matrix = torch.tensor(rule.matrix(kept.rounds, replicas), dtype=torch.float64)
    sparse = matrix.count_nonzero() < SPARSE * matrix.numel()
    product = (matrix.to_sparse() if sparse else matrix).to(weights.dtype)
    previous, velocity, masses = kept.previous, kept.velocity, kept.masses
    if rule.combines_first:
        mixed = product @ before + (weights - before)
    elif rule.push_sum:
        pushed = weights + (masses - 1.0).to(weights.dtype)[:, None] * previous
        masses = matrix @ masses
        mixed = previous = (product @ pushed) / masses.to(weights.dtype)[:, None]
    else:
        mixed = product @ weights
    if rule.outer is not None:
        previous, velocity = rule.outer.step(previous, mixed[0], velocity)
        mixed = previous.repeat(replicas, 1)
    return mixed, replace(kept, previous=previous, masses=masses, velocity=velocity, rounds=kept.rounds + 1)
