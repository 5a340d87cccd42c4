"""Local steps of many workers at once: their weights as rows of one matrix, their gradients by torch.func.

Worker i's weights are row i, all parameters flattened in the module's order, so mixing is a matrix product and averaging a mean
over rows. Batches of different sizes are padded with samples of weight 0.
"""

from __future__ import annotations

import itertools
import math
import statistics
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
from parsim.execute.mixing import restored, rounded, squared_norm
from parsim.plans.mixing import FIRST_LOOP, LoopState, Merged, merged_in_turn
from parsim.plans.plan import Plan
from parsim.plans.synchronisation import STALE, Synchronisation
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
    """Weights [m, D] and optimizer state of m workers: moments of shape [m, D] (none before the first step), steps made [m].
    buffers: running statistics, each [m, ...], in the order of the module's; none before the first step."""

    weights: Tensor
    moments: tuple[Tensor, ...] = ()
    buffers: tuple[Tensor, ...] = ()
    steps: Tensor

    @classmethod
    def fresh(cls, weights: Tensor) -> Workers:
        """Workers with these weights [m, D], new optimizers and the module's running statistics."""
        return cls(weights=weights, steps=torch.zeros(len(weights), dtype=torch.int64))

    def take(self, rows: Sequence[int]) -> Workers:
        index = torch.tensor(list(rows))
        moments, buffers = (tuple(each[index] for each in held) for held in (self.moments, self.buffers))
        return Workers(weights=self.weights[index], moments=moments, buffers=buffers, steps=self.steps[index])

    @property
    def mean_buffers(self) -> tuple[Tensor, ...]:
        """[1, ...] each: running statistics averaged over the workers; counts, which are equal, those of the first."""
        return tuple(each.mean(0, keepdim=True) if each.is_floating_point() else each[:1] for each in self.buffers)


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
    """Gradients and steps of workers that all train `model` (its structure; its weights are the start) on `problem`. The module
    must be a function of its parameters and buffers: no randomness. Every worker has running statistics of its own."""

    def __init__(self, model: nn.Module, problem: LearningProblem, optimizer: LocalOptimizer) -> None:
        self.problem, self.optimizer, self.model = problem, optimizer, model
        self._shapes = [(name, value.shape) for name, value in model.named_parameters()]
        self.start = torch.cat([value.detach().flatten() for value in model.parameters()])
        self._buffers = {name: value.detach().clone() for name, value in model.named_buffers()}
        self._gradient = vmap(grad_and_value(self._loss, has_aux=True))

    @property
    def tensors(self) -> tuple[tuple[str, int], ...]:
        """Name and size of each parameter tensor, in the order of a row of weights."""
        return tuple((name, shape.numel()) for name, shape in self._shapes)

    @property
    def weight_bytes(self) -> int:
        """|w|: bytes of one worker's parameters."""
        return self.start.numel() * self.start.element_size()

    def outputs(self, weights: Tensor, inputs: Tensor, buffers: Sequence[Tensor] = ()) -> Tensor:
        """The model's outputs for one row of weights [D]. buffers: in the order of the module's, which training changes."""
        pieces = torch.split(weights, [shape.numel() for _, shape in self._shapes])
        named = {name: piece.view(shape) for (name, shape), piece in zip(self._shapes, pieces, strict=True)}
        held = dict(zip(self._buffers, buffers, strict=True)) if self._buffers else {}
        result: Tensor = functional_call(self.model, {**named, **held}, (inputs,))
        return result

    def score(self, weights: Tensor, held: Sequence[Tensor] = ()) -> float:
        """Accuracy or R^2 of one row of weights on the test samples. held: running statistics [m, ...], of which the first
        row counts; none: those that the module began with."""
        buffers = [value[0].clone() for value in held] or [value.clone() for value in self._buffers.values()]
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                return self.problem.score(self.outputs(weights, self.problem.test_inputs, buffers))
        finally:
            self.model.train(training)

    def _loss(
        self, weights: Tensor, buffers: tuple[Tensor, ...], inputs: Tensor, targets: Tensor, share: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The mean loss of one worker, and its running statistics afterwards."""
        moved = tuple(value.clone() for value in buffers)
        return (self.problem.losses(self.outputs(weights, inputs, moved), targets) * share).sum(), moved

    def step(self, workers: Workers, samples: NDArray[np.int64]) -> Workers:
        """One local step of each worker on its own samples: int64 [m, batch], padded with -1; a row of -1 makes no step."""
        held = workers.buffers or tuple(value.expand(len(workers.weights), *value.shape) for value in self._buffers.values())
        gradient, buffers = self._gradients(workers.weights, held, samples)
        moved = replace(self.updated(workers, gradient), buffers=buffers)
        steps = torch.from_numpy((samples >= 0).any(1)).to(torch.int64)
        if bool(steps.all()):
            return moved
        before = workers.moments or tuple(torch.zeros_like(moment) for moment in moved.moments)

        def kept(old: Tensor, new: Tensor) -> Tensor:
            return torch.where((steps == 0).view(-1, *[1] * (new.dim() - 1)), old, new)

        return Workers(
            weights=kept(workers.weights, moved.weights),
            moments=tuple(map(kept, before, moved.moments)),
            buffers=tuple(map(kept, held, buffers)),
            steps=workers.steps + steps,
        )

    def gradient(self, weights: Tensor, samples: NDArray[np.int64]) -> Tensor:
        """Gradient of the mean loss, [m, D], for weights [m, D] on samples int64 [m, batch], padded with -1. Raises
        AlgorithmError: the model has running statistics, which stages that are late take of other weights."""
        if self._buffers:
            raise AlgorithmError(
                "virtual stages need a model without buffers (no BatchNorm): one gradient of the whole model stands for those "
                "of all stages; run the plan, or use average or gossip"
            )
        return self._gradients(weights, (), samples)[0]

    def _gradients(
        self, weights: Tensor, buffers: tuple[Tensor, ...], samples: NDArray[np.int64]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The gradients of `gradient`, and the running statistics behind the forward."""
        numbers = torch.tensor(samples)
        real, index = numbers >= 0, numbers.clamp(min=0)
        if buffers and bool((real.any(1) & ~real.all(1)).any()):
            raise AlgorithmError(
                "replicas of unequal batches are padded, and BatchNorm would count the padding; use shards of equal sizes"
            )
        share = real.to(weights.dtype) / real.sum(1).clamp(min=1)[:, None]
        gradient, (_, moved) = self._gradient(weights, buffers, self.problem.inputs[index], self.problem.targets[index], share)
        return gradient, moved

    def curvature(self, weights: Tensor, samples: NDArray[np.int64], *, iterations: int = 30) -> float:
        """L, the largest |eigenvalue| of the Hessian of the mean loss over samples at one row of weights [D], by power
        iteration: at most the true one."""
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
        return replace(workers, weights=weights, moments=moments, steps=workers.steps + 1)


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


# Decoupled stages with gradients that are late, on rows of weights (`parsim.program.passes.rounds` says when what runs).
#
# Where a batch that waits keeps its weights, the gradient of stage k for batch b is block k of the ordinary gradient at the
# weights with which batch b ran forward on each stage. So one gradient of the whole model per step is enough. Otherwise the
# model is cut at its stages, and each runs its own forward and backward: that takes a chain of modules (nn.Sequential).
#
# Replicas sum gradients in every step: one stands for all. BatchNorm is refused; dropout is left out.


class _WholeGradients:
    """The gradients of stages that stash weights, out of one gradient of the model."""

    def __init__(
        self, training: LocalTraining, order: SampleOrder, places: Sequence[Tensor], beta: float, replicas: int
    ) -> None:
        self._training, self._order, self._places, self._replicas = training, order, places, replicas
        self._shrunk = [beta ** (len(places) - 1 - stage) for stage in range(len(places))]
        self._weights: dict[int, Tensor] = {}
        self._gradients: dict[int, Tensor] = {}

    def forward(self, stage: int, batch: int, weights: Tensor) -> None:
        """weights: [replicas, D of the stage], as they are now."""
        row = self._weights.setdefault(batch, self._training.start.repeat(self._replicas, 1))
        row[:, self._places[stage]] = weights
        if stage == len(self._places) - 1:
            samples = samples_of(self._order, batch, self._replicas)
            self._gradients[batch] = self._training.gradient(self._weights.pop(batch), samples)

    def backward(self, stage: int, batch: int, weights: Tensor) -> Tensor:
        whole = self._gradients[batch] if stage else self._gradients.pop(batch)
        return whole[:, self._places[stage]] * self._shrunk[stage]


class _CutGradients:
    """The gradients of stages that run backward with the weights of now, with old activations (fresh) or new ones (replay).
    Raises AlgorithmError: the model is no chain of modules, or a stage begins within one."""

    def __init__(
        self, training: LocalTraining, order: SampleOrder, stages: Sequence[Sequence[str]], rule: Synchronisation
    ) -> None:
        self._problem, self._order, self._beta, self._replays = training.problem, order, rule.beta, rule.replays
        self._pieces = _pieces(training.model, stages)
        self._shapes = [dict(piece.named_parameters()) for piece in self._pieces]
        self._values: dict[tuple[int, int], Tensor] = {}
        self._gradients: dict[tuple[int, int], Tensor] = {}
        self._held: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def forward(self, stage: int, batch: int, weights: Tensor) -> None:
        """weights: [1, D of the stage]; where they change in place before the backward, it sees that."""
        problem, last, numbers = self._problem, len(self._pieces) - 1, torch.tensor(self._order.indices(batch))
        value = self._values.pop((stage, batch)) if stage else problem.inputs[numbers]
        self._held[stage, batch] = held = self._run(stage, value, weights)
        if self._replays:
            self._held[stage, batch] = (*held[:2], held[2].detach())
        if stage < last:
            self._values[stage + 1, batch] = held[2].detach()
            return
        output = held[2].detach().requires_grad_()
        (self._gradients[stage, batch],) = torch.autograd.grad(problem.loss(output, problem.targets[numbers]), output)

    def backward(self, stage: int, batch: int, weights: Tensor) -> Tensor:
        """The gradient [1, D of the stage] of a batch; where it is replayed, its forward runs again on these weights."""
        row, value, output = self._held.pop((stage, batch))
        if self._replays:
            row, value, output = self._run(stage, value, weights)
        gradient = self._gradients.pop((stage, batch))
        own, below = torch.autograd.grad(output, (row, value), gradient, allow_unused=True)
        if stage:
            self._gradients[stage - 1, batch] = below * self._beta
        return torch.zeros_like(row) if own is None else own

    def _run(self, stage: int, value: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The weights and the input as autograd knows them, and the output."""
        row, value = torch.empty(0, dtype=weights.dtype), value.detach().requires_grad_()
        row.data = weights.data  # the same memory: a change of it escapes autograd
        row.requires_grad_()
        parts = torch.split(row[0], [held.numel() for held in self._shapes[stage].values()])
        named = {name: part.view(held.shape) for (name, held), part in zip(self._shapes[stage].items(), parts, strict=True)}
        output: Tensor = functional_call(self._pieces[stage], named, (value,))
        return row, value, output


def _pieces(model: nn.Module, stages: Sequence[Sequence[str]]) -> list[nn.Sequential]:
    """The modules of each stage: the children that hold its parameters, with those behind them that hold none."""
    stage_of = {name: number for number, names in enumerate(stages) for name in names}
    children = list(model.named_children()) if isinstance(model, nn.Sequential) else []
    if not children:
        raise AlgorithmError(
            f'backward = "fresh" and "replay" cut the model at its stages, and {type(model).__name__} is no nn.Sequential; use '
            'backward = "stash"'
        )
    pieces: list[list[nn.Module]] = [[] for _ in stages]
    stage = 0
    for name, child in children:
        held = {stage_of[f"{name}.{inside}"] for inside, _ in child.named_parameters()}
        if len(held) > 1 or (held and min(held) < stage):
            raise AlgorithmError(f"stages have to divide the modules of the nn.Sequential in order, and {name} is in {held}")
        stage = max([stage, *held])
        pieces[stage].append(child)
    return [nn.Sequential(*parts) for parts in pieces]


def stale_steps(
    training: LocalTraining,
    order: SampleOrder,
    stages: Sequence[Sequence[str]],
    rule: Synchronisation = STALE,
    replicas: int = 1,
) -> Iterator[Workers]:
    """Step after step without end: the weights of all stages behind each, a worker per replica. Changes of them are taken over.
    stages: names of the parameters of each. Raises AlgorithmError: they do not divide the parameters, or cannot be cut so."""
    places, count = _places(training, stages), len(stages)
    live = [Workers.fresh(training.start[place].repeat(replicas, 1)) for place in places]
    forward_lags = [rule.forward_lag(stage, count) for stage in range(count)]
    backward_lags = [rule.backward_lag(stage, count) for stage in range(count)]
    if replicas > 1 and not rule.stashes:
        raise AlgorithmError(f'virtual replicas of stages keep backward = "stash", and {rule} has another; run the plan')
    whole = _WholeGradients(training, order, places, rule.beta, replicas) if rule.stashes else None
    found = whole or _CutGradients(training, order, stages, rule)
    for step in itertools.count():
        for stage in range(count):
            if step >= forward_lags[stage]:
                found.forward(stage, step - forward_lags[stage], live[stage].weights)
        gradients: dict[int, Tensor] = {}
        for stage in reversed(range(count)):
            if (batch := step - backward_lags[stage]) >= 0:
                gradients[stage] = found.backward(stage, batch, live[stage].weights)
        for stage, gradient in gradients.items():
            moved = training.updated(live[stage], gradient)
            live[stage] = replace(moved, weights=live[stage].weights.copy_(moved.weights))
        weights = training.start.repeat(replicas, 1)
        for stage, place in enumerate(places):
            weights[:, place] = live[stage].weights
        yield Workers(weights=weights, steps=torch.full((replicas,), step + 1, dtype=torch.int64))
        for stage, place in enumerate(places):
            live[stage].weights.copy_(weights[:, place])


def samples_of(order: SampleOrder, step: int, replicas: int) -> NDArray[np.int64]:
    """int64 [replicas, batch]: what each of them trains on in a step."""
    indices = order.indices(step)
    return np.stack([part(indices, replica=replica, dp=replicas) for replica in range(replicas)])


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
    """What the replicas of a plan learnt: weights of every replica [P, D], their mean [D] (which a checkpoint of the real run
    holds), simulated seconds, rounds, (step, score of the mean weights), and running statistics of every replica, each [P,
    ...]."""

    workers: Tensor
    weights: Tensor
    seconds: float
    rounds: int
    scores: tuple[tuple[int, float], ...] = ()
    buffers: tuple[Tensor, ...] = ()


def train_planned(
    plan: Plan,
    training: LocalTraining,
    order: Order,
    steps: int,
    *,
    fragments: Sequence[Sequence[str]] = (),
    step_s: float = 0.0,
    score_every: int = 0,
    on_step: Callable[[int, Tensor], None] | None = None,
) -> PlannedOutcome:
    """Train one virtual replica per replica of a plan that mixes, as the executor would, for so many steps.

    fragments: names of the parameters of each (`parsim.program.passes.rounds.fragments_of`), where the rule has some. step_s:
    seconds of the plan's mean step, as simulated. score_every: steps between two scores; 0: none. on_step: sees (steps done,
    weights [P, D]).

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
    for step, state in enumerate(itertools.islice(steps_of(rule, replicas, training, order, fragments), steps), 1):
        workers, kept = state
        if on_step is not None:
            on_step(step, workers.weights)
        if score_every and step % score_every == 0:
            scores.append((step, training.score(kept.mean(workers.weights), workers.buffers)))
    return PlannedOutcome(
        workers=workers.weights,
        weights=kept.mean(workers.weights),
        seconds=steps * step_s,
        rounds=kept.rounds,
        scores=tuple(scores),
        buffers=workers.buffers,
    )


def steps_of(
    rule: Synchronisation,
    replicas: int,
    training: LocalTraining,
    order: SampleOrder,
    parts: Sequence[Sequence[str]] = (),
    *,
    before_round: Callable[[int, Tensor], None] | None = None,
) -> Iterator[tuple[Workers, RoundState]]:
    """Step after step without end: the replicas behind each, and what they keep from round to round.

    replicas: that mix; 1 under all_reduce and stale, where one takes the whole batch and learns the same. parts: names of the
    parameters of every stage (stale) or fragment. before_round: sees the number of every round and the weights [P, D] before
    it. Raises AlgorithmError: so many replicas do not fit, or parts do not.
    """
    check_room(replicas * (len(parts) if rule.is_stale else 1), training.weight_bytes)  # batches that wait keep weights too
    workers = Workers.fresh(training.start.repeat(replicas, 1))
    late = stale_steps(training, order, parts, rule, replicas) if rule.is_stale else None
    parts = () if late else parts
    places = _places(training, parts) if parts else [slice(None)]
    if len(places) != rule.fragments:
        raise AlgorithmError(f"{rule} has {rule.fragments} fragments, and parameters were named of {len(places)}; name each")
    size_of = dict(training.tensors)
    sizes = [[size_of[name] for name in part] for part in parts] or [list(size_of.values())]
    kept = RoundState.fresh(workers.weights)
    states = [kept] if len(places) == 1 else [RoundState.fresh(workers.weights[:, place]) for place in places]
    for step in itertools.count():
        samples = samples_of(order, step, replicas)
        if rule.mixes:
            samples[~np.array(rule.takes_part(kept.rounds, replicas))] = -1
        before = workers.weights
        workers = training.step(workers, samples) if late is None else next(late)
        if rule.mixes and rule.due(step):
            if before_round is not None:
                before_round(kept.rounds, workers.weights)
            turn = kept.rounds % len(places)
            sent = before[:, places[turn]], workers.weights[:, places[turn]]
            mixed, states[turn] = mixed_weights(rule, *sent, states[turn], sizes[turn])
            workers.weights[:, places[turn]] = mixed
            kept = replace(states[turn], rounds=kept.rounds + 1)
        yield workers, kept


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundState:
    """What replicas keep from round to round. previous: the model behind the last round: [D], or every replica's own [P, D] of
    push-sum and merge. masses: of push-sum [P]. merged: of merge, the global model. loop: of Ada's closed loop."""

    previous: Tensor
    masses: Tensor
    merged: Merged[Tensor]
    velocity: Tensor | None = None
    rounds: int = 0
    loop: LoopState = FIRST_LOOP

    @classmethod
    def fresh(cls, weights: Tensor) -> RoundState:
        """Before the first round: all replicas begin with the same weights [P, D]."""
        ones = torch.ones(len(weights), dtype=torch.float64)
        return cls(previous=weights[0].clone(), masses=ones, merged=Merged(weights=weights[0]))

    def round_of(self, rule: Synchronisation) -> int:
        """The round that comes next; of a closed loop the place of its lattice."""
        return self.loop.place if rule.is_closed_loop else self.rounds

    def mean(self, weights: Tensor) -> Tensor:
        """The model [D] that replicas with these weights [P, D] stand for: of push-sum the mean of x, and not of x / w."""
        beside = (self.masses - 1.0).to(weights.dtype)
        return (weights + beside[:, None] * self.previous if beside.any() else weights).mean(0)


def mixed_weights(
    rule: Synchronisation, before: Tensor, weights: Tensor, kept: RoundState, sizes: Sequence[int] = ()
) -> tuple[Tensor, RoundState]:
    """One round: the weights [P, D] of all replicas behind it, from those before the last step and those after it. sizes: of
    the parameter tensors, where changes are rounded tensor by tensor."""
    replicas = len(weights)
    if rule.kind == "merge":
        starts = kept.previous.expand(weights.shape)
        merged, after = merged_in_turn(rule.merge_rule(replicas), kept.merged, weights.unbind(), starts.unbind(), kept.rounds)
        goes_on = torch.stack(after)
        return goes_on, replace(kept, previous=goes_on, merged=merged, rounds=kept.rounds + 1)
    matrix = torch.tensor(rule.matrix(kept.round_of(rule), replicas), dtype=torch.float64)
    sparse = matrix.count_nonzero() < SPARSE * matrix.numel()
    product = (matrix.to_sparse() if sparse else matrix).to(weights.dtype)
    previous, velocity, masses, loop = kept.previous, kept.velocity, kept.masses, kept.loop
    if rule.push_sum:
        pushed = weights + (masses - 1.0).to(weights.dtype)[:, None] * previous
        masses = matrix @ masses
        mixed = previous = (product @ pushed) / masses.to(weights.dtype)[:, None]
    else:
        sent = before if rule.combines_first else weights
        if rule.message_format:
            sent_as = rule.message_format
            changes = [restored(rounded(row, sizes, sent_as), sizes, sent_as, row.dtype) for row in sent - previous]
            mixed = previous + product @ torch.stack(changes)
            previous = mixed[0] if rule.outer is None else previous
        else:
            mixed = product @ sent
        if rule.is_closed_loop:
            taken = float(squared_norm(sent) - squared_norm(mixed)) / replicas
            loop = LoopState(loop.place, loop.taken + taken, loop.rounds + 1)
            loop = rule.mixing.chosen(loop, replicas) if rule.mixing.chooses(kept.rounds + 1) else loop
    if rule.outer is not None:
        previous, velocity = rule.outer.step(previous, mixed[0], velocity)
        mixed = previous.repeat(replicas, 1)
    if rule.combines_first:
        mixed = mixed + (weights - before)
    return mixed, replace(kept, previous=previous, masses=masses, velocity=velocity, rounds=kept.rounds + 1, loop=loop)


# How many steps a way of synchronising takes to a score, at the scale that is asked about.


SCORED_EVERY = 5
"""Steps between two scores. So the steps to a target are known to so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningCourse:
    """One training until it reached a score, or as long as it was let. steps: to the target; None: it was not reached. scores:
    (step, score of the mean weights), in order; best, best_step: the highest."""

    steps: int | None
    best: float
    best_step: int
    scores: tuple[tuple[int, float], ...]


def course_to(
    target: float,
    rule: Synchronisation,
    replicas: int,
    training: LocalTraining,
    order: SampleOrder,
    *,
    most_steps: int,
    parts: Sequence[Sequence[str]] = (),
) -> LearningCourse:
    """Train until the mean weights score `target` (accuracy, or R^2), or for `most_steps`. replicas, parts: see `steps_of`.
    Raises AlgorithmError: so many replicas do not fit, or `most_steps` has no score in it."""
    if most_steps < SCORED_EVERY:
        raise AlgorithmError(f"a target is checked every {SCORED_EVERY} steps, got {most_steps} at most; allow more")
    scores: list[tuple[int, float]] = []
    for step, (workers, kept) in enumerate(steps_of(rule, replicas, training, order, parts), 1):
        if step % SCORED_EVERY == 0:
            scores.append((step, training.score(kept.mean(workers.weights), workers.buffers)))
            if scores[-1][1] >= target or step + SCORED_EVERY > most_steps:
                break
    best_step, best = max(scores, key=lambda entry: entry[1])
    return LearningCourse(
        steps=scores[-1][0] if scores[-1][1] >= target else None, best=best, best_step=best_step, scores=tuple(scores)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LearntSteps:
    """Courses, one per seed, at the learning rate that is best for this way of synchronising."""

    learning_rate: float
    courses: tuple[LearningCourse, ...]

    @property
    def steps(self) -> float | None:
        """The median over seeds; None where half of them or more do not reach the target."""
        reached = [float("inf") if course.steps is None else float(course.steps) for course in self.courses]
        middle = statistics.median(reached)
        return None if middle == float("inf") else middle

    @property
    def best(self) -> LearningCourse:
        """The seed in the middle by its highest score: what was learnt where the target is not reached."""
        ranked = sorted(self.courses, key=lambda course: course.best)
        return ranked[len(ranked) // 2]

    @property
    def spread(self) -> tuple[int | None, int | None]:
        """The fewest and the most steps; None: not reached."""
        steps = [course.steps for course in self.courses]
        reached = [count for count in steps if count is not None]
        return min(reached, default=None), None if None in steps else max(reached)


def learnt_steps(
    course: Callable[[float, int, int], LearningCourse], learning_rates: Sequence[float], seeds: Sequence[int], most_steps: int
) -> LearntSteps:
    """The best of several learning rates: the one that reaches the target first, or comes nearest. course: of a rate, a seed
    and the most steps. A rate is given up where the best one so far had reached the target; of the best one every seed trains
    as long as it may."""
    best: LearntSteps | None = None
    for rate in learning_rates:
        most = most_steps if best is None or best.steps is None else math.ceil(best.steps)
        tried = LearntSteps(learning_rate=rate, courses=tuple(course(rate, seed, most) for seed in seeds))
        if best is None or _order(tried) < _order(best):
            courses = (
                course(rate, seed, most_steps) if short.steps is None and most < most_steps else short
                for seed, short in zip(seeds, tried.courses, strict=True)
            )
            best = LearntSteps(learning_rate=rate, courses=tuple(courses))
    assert best is not None
    return best


def _order(tried: LearntSteps) -> tuple[bool, float, float]:
    return tried.steps is None, tried.steps or 0.0, -tried.best.best
