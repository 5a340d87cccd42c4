"""Optimizers of the table, and all that goes with an update: parameter groups, fp32 copies, moving averages, clipping.

Made in one place for calibration, execution and the single-process reference.

A bucket belongs to one group; a rank has one OptimizerStep per group, and whoever waits for its update waits for the last.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler, ReduceLROnPlateau, SequentialLR
from torch.optim.swa_utils import get_ema_multi_avg_fn

from parsim.data.samples import Order
from parsim.errors import ConfigError, near_matches
from parsim.execute.checkpoint.checkpoint import RankState, restore_optimizer
from parsim.execute.job import BIAS, KINDS, NORM, PLAIN, PLATEAU, SCHEDULES, Schedule, TrainingRecipe
from parsim.model.optimizers import COUNTERS, OPTIMIZERS

FIXED = ("lr", "foreach", "fused", "capturable", "differentiable", "amsgrad")
"""Arguments of torch's optimizers that parsim sets: the rate has its own key, the others change the state or the kernels."""


def make_optimizer(
    name: str, parameters: Iterable[Tensor], lr: float, *, recipe: TrainingRecipe = PLAIN, exempt: Iterable[Tensor] = ()
) -> torch.optim.Optimizer:
    """The optimizer of a row of `parsim.model.optimizers.OPTIMIZERS` (or "package.module:ROW") over these parameters. A tensor
    that occurs twice (tied weights) is updated once.

    recipe: its arguments and weight decay. exempt: those of the parameters without weight decay, in a group of their own.
    Raises ConfigError: an unknown name, arguments that the optimizer does not take, or a row whose state is not what it keeps.
    """
    check_states(name, recipe)
    without = {id(tensor) for tensor in exempt}
    decayed: list[Tensor] = []
    rest: list[Tensor] = []
    for tensor in distinct(parameters):
        (rest if id(tensor) in without else decayed).append(tensor)
    optimizer = OPTIMIZERS[name].make(decayed or rest, lr)
    if decayed and rest:
        optimizer.add_param_group({"params": rest})
    for group in optimizer.param_groups:
        group.update(recipe.group_settings)
    if rest:
        optimizer.param_groups[-1]["weight_decay"] = 0.0
    return optimizer


@lru_cache(maxsize=64)
def check_states(name: str, recipe: TrainingRecipe = PLAIN) -> None:
    """Raise ConfigError unless the optimizer takes the recipe's arguments, and one step of it leaves the state that its row
    lists: memory, ZeRO and checkpoints count on it."""
    row = OPTIMIZERS[name]
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = row.make([parameter], row.learning_rate)
    _check_settings(name, optimizer, recipe.group_settings)
    for group in optimizer.param_groups:
        group.update(recipe.group_settings)
    optimizer.step()
    arrays = {key: value for key, value in optimizer.state[parameter].items() if torch.is_tensor(value) and key not in COUNTERS}
    for key, value in arrays.items():
        if value.shape != parameter.shape:
            raise ConfigError(
                f"optimizer {name!r} keeps {key!r} of shape {tuple(value.shape)} for a parameter of shape (3,). Only arrays "
                f"like it and the counters {', '.join(COUNTERS)} can be divided and resumed: keep others in param_groups"
            )
    if set(arrays) != set(row.states):
        raise ConfigError(
            f"optimizer {name!r} keeps the state {sorted(arrays)}, its row says {sorted(row.states)}; correct Optimizer.states"
        )
    sizes = {value.element_size() for value in arrays.values()}
    if sizes - {row.state_element_bytes}:
        raise ConfigError(
            f"optimizer {name!r} keeps {max(sizes)} bytes per element and state array, its row says {row.state_element_bytes}; "
            "correct Optimizer.state_element_bytes"
        )


def _check_settings(name: str, optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> None:
    """Raise ConfigError for arguments that the optimizer does not take, or refuses."""
    accepted = inspect.signature(type(optimizer)).parameters
    free = [key for key in optimizer.defaults if key not in FIXED and key in accepted]
    for key in settings:
        if key == "weight_decay" and key not in free:
            raise ConfigError(f"optimizer {name!r} has no weight decay; drop training.weight_decay, or take another optimizer")
        if key not in free:
            near = near_matches(key, free)
            listing = "" if near.startswith("; known") else f" ({name} takes: {', '.join(free)})"
            raise ConfigError(f"training.optimizer_args.{key}: optimizer {name!r} has no such argument to set{near}{listing}")
    if not type(optimizer).__module__.startswith("torch.optim"):
        return
    arguments = {**{key: optimizer.defaults[key] for key in free}, **settings}
    make: Any = type(optimizer)
    try:
        make([torch.nn.Parameter(torch.ones(1))], lr=optimizer.defaults["lr"], **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"training.optimizer_args: torch refuses the arguments of {name}: {error}") from error


def distinct(parameters: Iterable[Tensor]) -> list[Tensor]:
    return list({id(parameter): parameter for parameter in parameters}.values())


def flat_gradients(parameters: Sequence[Tensor]) -> Tensor:
    """One zeroed flat array whose consecutive views become the `.grad` of `parameters` (one dtype and device). Autograd
    accumulates into an existing `.grad` in place, so the array is a gradient bucket that needs no copying. Zero it with
    `.zero_()`, never with `optimizer.zero_grad()`, which drops the views."""
    first = parameters[0]
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters), dtype=first.dtype, device=first.device)
    offset = 0
    for parameter in parameters:
        parameter.grad = flat[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
    return flat


EMA = "ema"
"""Entry of the optimizer's state: moving averages of what it updates (parameters, parts of buckets, or their fp32 copies), as
torch's AveragedModel keeps them. They are divided, moved and saved like the optimizer's own arrays. Leaves out: a step that an
overflowing gradient skips is not counted."""


@torch.no_grad()
def update_averages(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """After an update: ema = decay * ema + (1 - decay) * weight; the first time a copy. The optimizer has stepped: Adam takes
    an empty state for that of a first step."""
    averaged: list[Tensor] = []
    weights: list[Tensor] = []
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            state = optimizer.state[tensor]
            if EMA in state:
                averaged.append(state[EMA])
                weights.append(tensor.detach())
            else:
                state[EMA] = tensor.detach().clone(memory_format=torch.preserve_format)
    if averaged:
        make: Any = get_ema_multi_avg_fn  # torch leaves it without types
        make(decay)(averaged, weights, None)


def averaged_state(state: RankState, trained: Collection[str]) -> RankState:
    """The state of one rank, or a whole one, with averages in place of the `trained` weights; frozen weights stay."""
    averages = {name: arrays[EMA] for name, arrays in state.optimizer.items() if EMA in arrays}
    frozen = {name: value for name, value in state.weights.items() if name not in trained}
    fragments = dict(state.fragments)
    if fragments:
        parts = {name: part for name, part in fragments["weights"].items() if name in frozen}
        fragments["weights"] = {**parts, **{name: fragments["optimizer"][name] for name in averages}}
    return replace(state, weights={**frozen, **averages}, fragments=fragments)


def exempt_names(module: nn.Module, exclude: Sequence[str]) -> frozenset[str]:
    """The parameters of a module without weight decay, by every name they have. exclude: "norm" (parameters of normalisations),
    "bias" (names that end so), or patterns of names."""
    if not exclude:
        return frozenset()
    named = dict(module.named_parameters(remove_duplicate=False))
    norms = {
        name
        for name, child in module.named_modules(remove_duplicate=False)
        if isinstance(child, nn.LayerNorm | nn.GroupNorm | nn.modules.batchnorm._NormBase)
        or type(child).__name__.endswith("Norm")  # classes of others: LlamaRMSNorm, T5LayerNorm
    }

    def is_exempt(name: str) -> bool:
        owner, _, last = name.rpartition(".")
        kinds = {NORM: owner in norms, BIAS: last.endswith("bias")}
        return any(kinds[entry] if entry in kinds else fnmatchcase(name, entry) for entry in exclude)

    exempt = {id(parameter) for name, parameter in named.items() if is_exempt(name)}  # one name of tied weights is enough
    return frozenset(name for name, parameter in named.items() if id(parameter) in exempt)


def check_exempt(names: Iterable[str], exclude: Sequence[str]) -> None:
    """Raise ConfigError for a pattern of the run file that matches none of the model's parameters."""
    parameters = list(names)
    for entry in exclude:
        if entry not in KINDS and not any(fnmatchcase(name, entry) for name in parameters):
            raise ConfigError(
                f"training.no_weight_decay: no parameter matches {entry!r}{near_matches(entry, [*KINDS, *parameters])}; "
                f'write "{NORM}", "{BIAS}" or a pattern such as "*.bias"'
            )


MASTER = "master"
"""Entry of a checkpoint's optimizer state: the fp32 copy of a weight."""


class MasterWeights:
    """fp32 copies of half-precision parameters, in their order, which the optimizer knows alone: small updates add up in
    them."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        self.copies: list[Tensor] = [nn.Parameter(parameter.detach().float()) for parameter in parameters]
        self._copy = {id(parameter): copy for parameter, copy in zip(self._parameters, self.copies, strict=True)}

    def of(self, parameter: Tensor) -> Tensor:
        return self._copy[id(parameter)]

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """One update of the copies with the parameters' gradients; the parameters become the copies, rounded."""
        for parameter, copy in zip(self._parameters, self.copies, strict=True):
            copy.grad = None if parameter.grad is None else parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for parameter, copy in zip(self._parameters, self.copies, strict=True):
                parameter.copy_(copy)
                copy.grad = None


class Stepped(NamedTuple):
    """A parameter, or a part of a divided bucket, that an optimizer steps. `exempt`: without weight decay."""

    tensor: Tensor
    exempt: bool


class GroupUpdates:
    """What a rank updates, and its optimizers, by group of parameters; "" is the group of those that the recipe names in none.

    stepped: by group, in the order in which groups are updated; a rank without parameters has none. master_weights: the
    optimizers update copies in fp32.
    """

    def __init__(
        self,
        optimizer: str,
        learning_rate: float,
        recipe: TrainingRecipe,
        stepped: Mapping[str, Sequence[Stepped]],
        *,
        master_weights: bool,
    ) -> None:
        self._recipe, self.has_masters = recipe, master_weights
        self._stepped = dict(stepped)
        self._masters = {
            group: MasterWeights([entry.tensor for entry in entries])
            for group, entries in (stepped.items() if master_weights else ())
        }
        rules = {group.name: (group.optimizer, group.learning_rate) for group in recipe.update_groups}
        self.optimizers = {group: self._made(*rules.get(group, (optimizer, learning_rate)), group) for group in stepped}

    def another(self, name: str, learning_rate: float) -> torch.optim.Optimizer | None:
        """Another optimizer of the parameters in no group, with separate state; None where the rank has none of them."""
        return self._made(name, learning_rate, "") if "" in self._stepped else None

    def _made(self, name: str, learning_rate: float, group: str) -> torch.optim.Optimizer:
        entries = self._stepped[group]
        tensors = [self._updated(entry.tensor, group) for entry in entries]
        exempt = [tensor for tensor, entry in zip(tensors, entries, strict=True) if entry.exempt]
        return make_optimizer(name, tensors, learning_rate, recipe=self._recipe.of(group), exempt=exempt)

    def _updated(self, tensor: Tensor, group: str) -> Tensor:
        """What the optimizer has in place of a parameter: its copy in fp32, if there is one."""
        return self._masters[group].of(tensor) if group in self._masters else tensor

    def step(self, group: str) -> None:
        optimizer = self.optimizers[group]
        if group in self._masters:
            self._masters[group].step(optimizer)
        else:
            optimizer.step()
        if self._recipe.ema is not None:
            update_averages(optimizer, self._recipe.ema.decay)

    def state_of(self, tensor: Tensor, group: str) -> dict[str, Any]:
        """The optimizer's state of a parameter or a part of a bucket, with its copy in fp32 where there is one."""
        updated = self._updated(tensor, group)
        state = dict(self.optimizers[group].state.get(updated) or {})
        return {**state, MASTER: updated.data} if group in self._masters else state

    def restore(self, group: str, named: Mapping[str, Tensor], states: Mapping[str, dict[str, Any]]) -> None:
        """Give the optimizer of a group the states of its parameters and parts of buckets, both by name; one without state
        starts anew. fp32 copies are taken out of `states`."""
        updated = {name: self._updated(tensor, group) for name, tensor in named.items()}
        with torch.no_grad():
            for name, tensor in updated.items():
                if MASTER in states.get(name, {}):  # else nothing but padding
                    tensor.copy_(states[name].pop(MASTER))
        restore_optimizer(self.optimizers[group], updated, {name: states[name] for name in updated if states.get(name)})

    def resident_tensors(self) -> list[Tensor]:
        held = [state for optimizer in self.optimizers.values() for state in optimizer.state.values()]
        tensors = [entry for state in held for entry in state.values() if isinstance(entry, Tensor)]
        return [*tensors, *(copy for masters in self._masters.values() for copy in masters.copies)]


EPSILON = 1e-6
"""Added to the norm of all gradients, as torch.nn.utils.clip_grad_norm_ does."""
HALF_BITS = 16


def squared_norm(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """The sum of squares of flat arrays as one float64 on `device`; half precision is added up in float32. torch's
    clip_grad_norm_ keeps the norm in the gradients' own type (torch 2.13): in fp16 a norm of 80,000 is inf there, and finite
    gradients become 0; in bf16 it has 8 bits. Shards also could not agree on sums that round at every rank."""
    total = torch.zeros(1, dtype=torch.float64, device=device)
    for gradient in gradients:
        wide = torch.float32 if torch.finfo(gradient.dtype).bits == HALF_BITS else gradient.dtype
        total += torch.linalg.vector_norm(gradient, dtype=wide).double().square()
    return total


def scale_to_norm(gradients: Iterable[Tensor], norm: Tensor, most: float) -> None:
    """Multiply by most / norm where the norm is above `most`; else by 1. A norm that is not finite makes all of them NaN, so
    the divergence is seen. torch's clip_grad_norm_ sets finite gradients to 0 there (torch 2.13: an fp32 norm of 1e20 is inf),
    and the training would stand still without a word."""
    factor = torch.where(norm.isfinite(), torch.clamp(most / (norm + EPSILON), max=1.0), torch.nan)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))


# The learning rate of every step, by torch's own schedulers.
#
# The schedulers move optimizers of one number beside the real ones, and every update takes their rate (and momentum, where a
# schedule cycles it) over. So the rate is a function of the step alone: a resumed training, or one that goes on under another
# plan, replays it. Only ReduceLROnPlateau has a state, which a checkpoint keeps.


FOLLOWED = ("lr", "momentum", "betas")
"""What a scheduler changes of a group of parameters."""
_PLATEAU_STATE = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")


class LearningRates:
    """What the optimizers of all groups of parameters have in each step: each follows the schedule from its own rate;
    `learning_rate` is that of parameters in no group. steps: of the whole training. order: of the samples, which says what an
    epoch is. Raises ConfigError: torch refuses the arguments of the schedule."""

    def __init__(self, optimizer: str, learning_rate: float, recipe: TrainingRecipe, *, steps: int, order: Order) -> None:
        assert recipe.schedule is not None
        self._schedule = recipe.schedule
        self._rules = [("", optimizer, learning_rate, recipe)]
        for group in recipe.update_groups:
            self._rules.append((group.name, group.optimizer, group.learning_rate, recipe.of(group.name)))
        self._epoch_steps = 1 if recipe.schedule.per == "step" else order.steps_per_epoch
        self._length = max(1, self._unit(steps - 1) + 1 - self._schedule.warmup)
        self._begin()

    def _begin(self) -> None:
        self._at = 0
        self._optimizers: dict[str, Optimizer] = {}
        self._schedulers: list[LRScheduler] = []
        for name, row, learning_rate, recipe in self._rules:
            optimizer = make_optimizer(row, [torch.nn.Parameter(torch.zeros(1))], learning_rate, recipe=recipe)
            optimizer.step()  # schedulers warn of one that has made no step
            self._optimizers[name] = optimizer
            self._schedulers.append(scheduler(optimizer, self._schedule, learning_rate, self._length))

    def _unit(self, step: int) -> int:
        return step // self._epoch_steps

    @property
    def _followers(self) -> list[ReduceLROnPlateau]:
        return [entry for entry in self._schedulers if isinstance(entry, ReduceLROnPlateau)]

    def settings(self, step: int) -> dict[str, dict[str, Any]]:
        """By group, what its optimizer has in the step of that number, counted from 0."""
        unit, warmup = self._unit(step), self._schedule.warmup
        if not self._followers:
            if unit < self._at:
                self._begin()
            for _ in range(unit - self._at):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)  # of schedulers in a row, about the order of calls
                    for entry in self._schedulers:
                        entry.step()
            self._at = unit
        settings = {
            name: {key: group[key] for key in FOLLOWED if key in group}
            for name, optimizer in self._optimizers.items()
            for group in optimizer.param_groups
        }
        if self._followers and unit < warmup:
            first = self._schedule.start_factor
            for values in settings.values():
                values["lr"] *= first + (1 - first) * unit / warmup
        return settings

    def of(self, step: int) -> dict[str, float]:
        """The rate of every group in the step of that number; "" for parameters in none."""
        return {name: float(values["lr"]) for name, values in self.settings(step).items()}

    def apply(self, step: int, optimizers: Mapping[str, Optimizer]) -> None:
        settings = self.settings(step)
        for name, optimizer in optimizers.items():
            for group in optimizer.param_groups:
                group.update(settings[name])

    def saw(self, score: float, step: int) -> None:
        """A validation score after `step` steps; ReduceLROnPlateau follows it once the warm-up is over."""
        if self._unit(step) >= self._schedule.warmup:
            for follower in self._followers:
                follower.step(score)

    def state(self) -> Tensor | None:
        """For a checkpoint; None where the step says all."""
        values = []
        for follower in self._followers:
            values += [follower.optimizer.param_groups[0]["lr"], *(getattr(follower, key) for key in _PLATEAU_STATE)]
        return torch.tensor([float(value) for value in values], dtype=torch.float64) if values else None

    def load(self, state: Tensor | None) -> None:
        if state is None or not self._followers:
            return
        for follower, values in zip(self._followers, state.chunk(len(self._followers)), strict=True):
            rate, follower.best, *counts = values.tolist()
            follower.optimizer.param_groups[0]["lr"] = rate
            for key, count in zip(_PLATEAU_STATE[1:], counts, strict=True):
                setattr(follower, key, int(count))


def scheduler(optimizer: Optimizer, schedule: Schedule, learning_rate: float, length: int) -> LRScheduler:
    """torch's scheduler of an optimizer: the schedule, behind its warm-up. ReduceLROnPlateau has none: its caller warms up.
    length: updates of the rate in the whole training, without the warm-up. Raises ConfigError: torch refuses the arguments."""
    row, arguments = SCHEDULES[schedule.name], dict(schedule.arguments)
    if row.length:
        arguments.setdefault(row.length, length)
    if row.peak:
        arguments.setdefault(row.peak, learning_rate)
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in arguments.items()}
    warms = schedule.warmup > 0 and schedule.name != PLATEAU
    try:
        warm = [LinearLR(optimizer, start_factor=schedule.start_factor, total_iters=schedule.warmup)] if warms else []
        then = row.make(optimizer, **values)
    except (TypeError, ValueError, KeyError, AssertionError, ZeroDivisionError) as error:
        raise ConfigError(f"training.schedule: torch refuses the arguments of {schedule.name}: {error}") from error
    if not warm:
        return then
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return SequentialLR(optimizer, [*warm, then], milestones=[schedule.warmup])


def check_schedule(optimizer: str, learning_rate: float, recipe: TrainingRecipe, *, steps: int, order: Order) -> None:
    """Raise ConfigError for a schedule that cannot go through the training: its last step too."""
    if recipe.schedule is None:
        return
    rates = LearningRates(optimizer, learning_rate, recipe, steps=steps, order=order)
    try:
        rates.of(steps - 1)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"training.schedule: {recipe.schedule.name} fails before step {steps}: {error}") from error
