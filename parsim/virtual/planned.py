"""Virtual replicas under a plan: the same rule, samples and order of steps as the real run, and the plan's own seconds.

What the replicas learn is measured here; how long a step takes is what `parsim simulate` says of the plan, from the same
rounds. So a curve over simulated seconds has one clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parsim.arrays import Floats
from parsim.data import BatchOrder, part
from parsim.errors import AlgorithmError
from parsim.plans.plan import Plan
from parsim.plans.synchronisation import Synchronisation
from parsim.virtual.local import LocalTraining, Workers, check_room
from parsim.virtual.stale import stale_steps

SPARSE = 0.1
"""Share of weights that are not zero, below which a sparse product is faster."""


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
    order: BatchOrder,
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

    Raises:
        AlgorithmError: the plan does not mix, its batches are not those of the order, or so many replicas do not fit.
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
        workers, rounds = state
        if on_step is not None:
            on_step(step, workers.weights)
        if score_every and step % score_every == 0:
            scores.append((step, training.score(workers.weights.mean(0))))
    return PlannedOutcome(
        workers=workers.weights,
        weights=workers.weights.mean(0),
        seconds=steps * step_s,
        rounds=rounds,
        scores=tuple(scores),
    )


def _mixing(matrix: Floats, dtype: torch.dtype) -> Tensor:
    """W as a tensor, sparse where few replicas mix: 1,008 on a lattice of six neighbours have 7,056 weights of a million."""
    dense = torch.tensor(matrix, dtype=dtype)
    return dense.to_sparse() if np.count_nonzero(matrix) < SPARSE * matrix.size else dense


def steps_of(
    rule: Synchronisation, replicas: int, training: LocalTraining, order: BatchOrder, stages: Sequence[Sequence[str]] = ()
) -> Iterator[tuple[Workers, int]]:
    """Step after step without end: the replicas behind each, and the rounds so far.

    Args:
        rule: any; under all_reduce and stale one replica takes the whole batch, which learns the same.
        replicas: that mix, 1 under all_reduce and stale. training: of the model. order: of the samples.
        stages: of stale, the parameters of each.

    Raises:
        AlgorithmError: so many replicas do not fit.
    """
    if rule.kind == "stale":
        check_room(len(stages), training.weight_bytes)  # waiting batches keep weights and gradients of their own
        yield from ((workers, 0) for workers in stale_steps(training, order, stages))
        return
    check_room(replicas, training.weight_bytes)
    workers = Workers.fresh(training.start.repeat(replicas, 1))
    previous, velocity, rounds = training.start.clone(), None, 0
    for step in itertools.count():
        samples = np.stack([part(order.indices(step), replica=replica, dp=replicas) for replica in range(replicas)])
        if rule.mixes:
            samples[~np.array(rule.takes_part(rounds, replicas))] = -1
        workers = training.step(workers, samples)
        if rule.mixes and rule.due(step):
            matrix = _mixing(rule.matrix(rounds, replicas), workers.weights.dtype)
            if rule.kind == "merge":
                mixed = matrix @ torch.cat([previous[None], workers.weights])
                previous = mixed[-1]
            else:
                mixed = matrix @ workers.weights
            if rule.outer is not None:
                previous, velocity = rule.outer.step(previous, mixed[0], velocity)
                mixed = previous.repeat(replicas, 1)
            workers = Workers(weights=mixed, moments=workers.moments, steps=workers.steps)
            rounds += 1
        yield workers, rounds
