"""Single-process training that every synchronous plan must equal: plain autograd over the whole batch, one optimizer.

It replays what a plan leaves to choice: microbatches as normalisation groups, and running statistics per replica. If
placements let components see different samples, and the model normalises over them, the forward goes component by
component. Each runs once per group of samples that share statistics, on slices of whole values. There is one autograd
graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from parsim.data.samples import Order, Samples, order_of, part
from parsim.execute.job import PLAIN, Schedule, TrainingRecipe, group_of
from parsim.execute.loading import host_values
from parsim.execute.numerics import TorchNumerics
from parsim.execute.optimizer import EMA, MASTER, MasterWeights, exempt_names, make_optimizer, scheduler
from parsim.execute.stage import recorded_programs, seeded_module
from parsim.model.build import interface_of
from parsim.model.component import Component
from parsim.model.model import Model
from parsim.model.objective import TARGET
from parsim.model.runnable import Runnable
from parsim.model.spec import ModelSpec
from parsim.model.total_loss import total_loss
from parsim.plans.plan import Plan
from parsim.program.placed import PlanIndex

CPU = torch.device("cpu")
HALF_BITS = 16


@dataclass(frozen=True, kw_only=True)
class ReferenceResult:
    """Attributes:
    parameters: by qualified name. optimizer_state: by parameter name, then by torch's key.
    buffers: per rank of the plan, by qualified name, those of its components (without placements: of all), uncut.
    losses: mean over the global batch, per step. loss_scale: after the last step; 1 where the loss is not scaled."""

    parameters: dict[str, Tensor]
    optimizer_state: dict[str, dict[str, Tensor]]
    buffers: tuple[dict[str, Tensor], ...]
    losses: tuple[float, ...]
    loss_scale: float = 1.0


def train_reference(
    spec: ModelSpec,
    plan: Plan,
    data: Samples,
    *,
    optimizer: str,
    learning_rate: float,
    dtype: torch.dtype,
    seed: int,
    steps: int,
    model: Model | None = None,
    numerics: TorchNumerics | None = None,
    recipe: TrainingRecipe = PLAIN,
    rounded_by: int | None = None,
) -> ReferenceResult:
    """`steps` steps in this process, on the same samples in the same order as any plan with this global batch.

    Args:
        spec: of the module. plan: its batch, microbatches and placements are replayed. data: the samples.
        optimizer, learning_rate: of the update. dtype: of the weights. seed: of weights and order.
        model: the Model the plan was made for; needed if placements and normalisation meet.
        numerics: autocast, a scaled loss or master weights; None: everything in `dtype`.
        recipe: done here by torch's own schedulers and groups of parameters.
        rounded_by: a seed: begin with weights that are each up to one unit in the last place away.
    """
    numerics = numerics if numerics is not None else TorchNumerics(weights=dtype)
    module = seeded_module(spec, seed, dtype, torch.device("cpu"))
    if rounded_by is not None:
        _round_otherwise(module, rounded_by)
    named = dict(module.named_parameters())
    trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    order = order_of(data, plan.global_batch, seed)
    exempt = exempt_names(module, recipe.no_weight_decay)
    updater = _Updater(trained, optimizer, learning_rate, numerics, recipe, exempt)
    updater.follow(recipe.schedule, steps=steps, order=order)
    if plan.is_mixed and model is not None and any(True for _ in module.buffers()):
        replay = _Replay(spec, plan, model, module, dtype, updater)
        losses = []
        for step in range(steps):
            updater.zero_grad()
            losses.append(replay.step(data, order.indices(step), order.epoch_of(step)))
            updater.step()
        return ReferenceResult(
            parameters=_clone(named),
            optimizer_state=updater.state(),
            buffers=replay.buffers_by_rank(),
            losses=tuple(losses),
            loss_scale=updater.scale,
        )
    interface = interface_of(spec)
    objective, names = interface.objective, [entry.name for entry in interface.inputs]
    replicas = [_clone(dict(module.named_buffers())) for _ in range(plan.mesh.dp)]
    losses = []
    for step in range(steps):
        indices = order.indices(step)
        updater.zero_grad()
        total = 0.0
        for replica, buffers in enumerate(replicas):
            _load(dict(module.named_buffers()), buffers)
            for microbatch in range(plan.microbatches):
                own = part(indices, replica=replica, dp=plan.mesh.dp, microbatch=microbatch, microbatches=plan.microbatches)
                values = host_values(data, own, None, dtype, order.epoch_of(step))
                target = values.pop(TARGET, None)
                args, kwargs = interface.arguments(dict(zip(names, values.values(), strict=True)))
                with numerics.computing(CPU):
                    loss = total_loss(objective, module(*args, **kwargs), target, len(own))
                total += updater.backward(loss, plan.global_batch)
            updater.end_replica()
            replicas[replica] = _clone(dict(module.named_buffers()))
        updater.step()
        losses.append(total)
    return ReferenceResult(
        parameters=_clone(named),
        optimizer_state=updater.state(),
        buffers=tuple(replicas[plan.replica_of_rank(rank)] for rank in range(plan.world_size)),
        losses=tuple(losses),
        loss_scale=updater.scale,
    )


def _round_otherwise(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            units = torch.randint(-1, 2, parameter.shape, generator=generator).to(parameter.dtype)
            parameter.mul_(1 + torch.finfo(parameter.dtype).eps * units)


class _Updater:
    """Backwards and updates in the numbers of a run: torch's own GradScaler for a scaled loss.

    Gradients that are kept in half precision are added up per replica first, as replicas do: there the order shows.
    """

    def __init__(
        self,
        named: Mapping[str, Tensor],
        optimizer: str,
        learning_rate: float,
        numerics: TorchNumerics,
        recipe: TrainingRecipe,
        exempt: frozenset[str],
    ) -> None:
        self.numerics = numerics
        self._named = named
        self._masters = MasterWeights(list(named.values())) if numerics.master_weights else None
        stepped = self._stepped()
        groups = {name: found.name for name in stepped if (found := group_of(name, recipe.update_groups)) is not None}
        rules = {
            "": (optimizer, learning_rate),
            **{own.name: (own.optimizer, own.learning_rate) for own in recipe.update_groups},
        }
        self._optimizers: list[tuple[torch.optim.Optimizer, float]] = []
        for group, (kind, rate) in rules.items():
            own = [name for name in stepped if groups.get(name, "") == group]
            if own:
                without = [stepped[name] for name in own if name in exempt]
                tensors = [stepped[name] for name in own]
                made = make_optimizer(kind, tensors, rate, recipe=recipe.of(group), exempt=without)
                self._optimizers.append((made, rate))
        self._clip_norm = recipe.clip_norm
        self._weights = nn.ParameterList(stepped.values())
        make: Any = get_ema_multi_avg_fn  # torch leaves it without types
        average = None if recipe.ema is None else make(recipe.ema.decay)
        self._averages = None if average is None else AveragedModel(self._weights, multi_avg_fn=average)
        self._rates: list[LRScheduler] = []
        self._steps, self._every = 0, 1
        first = numerics.loss_scale
        self._scaler = (
            None if first is None else torch.amp.GradScaler("cpu", init_scale=first.scale, growth_interval=first.growth_steps)
        )
        self._replicas: dict[str, Tensor] = {}

    def follow(self, schedule: Schedule | None, *, steps: int, order: Order) -> None:
        """Let the learning rates follow a schedule, moved on after every step or pass over the data."""
        if schedule is None:
            return
        self._every = 1 if schedule.per == "step" else order.steps_per_epoch
        length = max(1, (steps - 1) // self._every + 1 - schedule.warmup)
        self._rates = [scheduler(optimizer, schedule, rate, length) for optimizer, rate in self._optimizers]

    @property
    def scale(self) -> float:
        """Of the loss; 1 where it is not scaled."""
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def _stepped(self) -> dict[str, Tensor]:
        if self._masters is None:
            return dict(self._named)
        return {name: self._masters.of(parameter) for name, parameter in self._named.items()}

    def zero_grad(self) -> None:
        self._replicas = {}
        for parameter in self._named.values():
            parameter.grad = None

    def backward(self, loss: Tensor, global_batch: int) -> float:
        """Of a sum of losses; returns its part of the mean over the global batch."""
        mean = loss / global_batch
        scaled = mean if self._scaler is None else self._scaler.scale(mean)
        scaled.backward()  # type: ignore[no-untyped-call]
        return float(loss.item()) / global_batch

    def end_replica(self) -> None:
        if torch.finfo(self.numerics.weights).bits > HALF_BITS:
            return
        for name, parameter in self._named.items():
            if parameter.grad is not None:
                so_far = self._replicas.get(name)
                self._replicas[name] = parameter.grad if so_far is None else so_far + parameter.grad
                parameter.grad = None

    def step(self) -> None:
        for name, gradient in self._replicas.items():
            self._named[name].grad = gradient
        if self._clip_norm is not None:
            if self._scaler is not None:
                for optimizer, _ in self._optimizers:
                    self._scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(self._named.values(), self._clip_norm)
        for optimizer, _ in self._optimizers:
            if self._masters is not None:
                self._masters.step(optimizer)
            elif self._scaler is not None:
                self._scaler.step(optimizer)
            else:
                optimizer.step()
        if self._scaler is not None:
            self._scaler.update()
        self._steps += 1
        if self._averages is not None:
            self._averages.update_parameters(self._weights)
        for rate in self._rates if self._steps % self._every == 0 else ():
            rate.step()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Of the optimizer, by parameter name; with its copy in fp32, if there is one."""
        found: dict[str, dict[str, Tensor]] = {}
        for name, parameter in self._stepped().items():
            states = (optimizer.state[parameter] for optimizer, _ in self._optimizers if parameter in optimizer.state)
            own: dict[str, Any] = next(states, {})
            found[name] = {key: value.detach().clone() for key, value in own.items() if isinstance(value, Tensor)}
        if self._averages is not None:
            for name, average in zip(self._named, self._averages.module.parameters(), strict=True):
                found.setdefault(name, {})[EMA] = average.detach().clone()
        if self._masters is not None:
            for name, parameter in self._named.items():
                found[name][MASTER] = self._masters.of(parameter).detach().clone()
        return found


class _Replay:
    """One training step component by component, in the groups of samples a mixed plan makes of every microbatch."""

    def __init__(
        self, spec: ModelSpec, plan: Plan, model: Model, module: nn.Module, dtype: torch.dtype, updater: _Updater
    ) -> None:
        self._updater = updater
        self._plan = plan
        self._layout = PlanIndex(plan, model)
        self._module = module
        self._dtype = dtype
        self._runnables = {
            component.name: Runnable(
                recorded_programs(
                    spec,
                    self._layout.local_samples(component.name),
                    model.granularity,
                    dtype,
                    "cpu",
                    updater.numerics.autocast,
                )[component.name],
                module,
            )
            for component in model.components
        }
        self._initial = _clone(dict(module.named_buffers()))
        self._kept: dict[tuple[int, int, str], Tensor] = {}

    def step(self, data: Samples, indices: NDArray[np.int64], epoch: int) -> float:
        """Forward and backward of one global batch; returns its mean loss."""
        plan, total = self._plan, 0.0
        for replica in range(plan.mesh.dp):
            for microbatch in range(plan.microbatches):
                own = part(indices, replica=replica, dp=plan.mesh.dp, microbatch=microbatch, microbatches=plan.microbatches)
                values = host_values(data, own, None, self._dtype, epoch)
                with self._updater.numerics.computing(CPU):
                    loss = self._forward(replica, values)
                total += self._updater.backward(loss, plan.global_batch)
            self._updater.end_replica()
        return total

    def _forward(self, replica: int, values: dict[str, Tensor]) -> Tensor:
        """The sum of the losses of one microbatch."""
        layout = self._layout
        for component in layout.model.components:
            size = layout.local_samples(component.name)
            pieces = layout.plan.microbatch_samples // size
            made = [self._piece(replica, number, component, size, values) for number in range(pieces)]
            for place, name in enumerate(component.outputs):
                parts = [outputs[place] for outputs in made]
                scalar = parts[0].dim() == 0
                values[name] = torch.stack(parts).sum() if scalar else torch.cat(parts) if pieces > 1 else parts[0]
        return values[layout.model.outputs[0]]

    def _piece(
        self, replica: int, number: int, component: Component, size: int, values: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        """One group of samples through one component, with the statistics of that group."""
        whole = self._layout.plan.microbatch_samples
        runnable = self._runnables[component.name]
        for name in runnable.buffer_names:
            key = (replica, number, name)
            if key not in self._kept:
                self._kept[key] = self._initial[name].clone()
            path, _, last = name.rpartition(".")
            self._module.get_submodule(path)._buffers[last] = self._kept[key]
        inputs = [
            values[name][number * size : (number + 1) * size] if size < whole and self._is_cut(name) else values[name]
            for name in runnable.input_names
        ]
        outputs = runnable(inputs)
        for name in runnable.buffer_names:
            path, _, last = name.rpartition(".")
            updated = self._module.get_submodule(path)._buffers[last]
            assert updated is not None
            self._kept[replica, number, name] = updated
        return outputs

    def _is_cut(self, name: str) -> bool:
        value = self._layout.model.value[name]
        return value.batch_first and value.bytes_per_sample > 0

    def buffers_by_rank(self) -> tuple[dict[str, Tensor], ...]:
        """What every rank has of the statistics of its components."""
        plan, found = self._plan, []
        for rank in range(plan.world_size):
            own: dict[str, Tensor] = {}
            for component in self._layout.rank_components(rank):
                ways = self._layout.placement[component].batch_ways(plan.mesh.tp)
                group = 0 if ways == plan.mesh.tp else plan.shard_of_rank(rank) // ways
                for name in self._runnables[component].buffer_names:
                    own[name] = self._kept[plan.replica_of_rank(rank), group, name].detach().clone()
            found.append(own)
        return tuple(found)


def _clone(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _load(live: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(saved[name])


def largest_difference(expected: dict[str, Tensor], actual: dict[str, Tensor], names: Sequence[str] | None = None) -> float:
    """max
    a - b
     over tensors of these names (None: all of `expected`); a missing tensor counts as infinite."""
    worst = 0.0
    for name in names if names is not None else expected:
        if name not in actual:
            return float("inf")
        difference = (expected[name].double() - actual[name].double()).abs()
        worst = max(worst, float(difference.max()) if difference.numel() else 0.0)
    return worst
