"""The learning rate of every step, by torch's own schedulers.

The scheduler moves an optimizer of one number beside the real one, and every update takes its rate (and momentum, where a
schedule cycles it) over. So the rate is a function of the step alone: a resumed training, or one that goes on under another
plan, replays it. Only ReduceLROnPlateau has a state, which a checkpoint keeps.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LinearLR, LRScheduler, ReduceLROnPlateau, SequentialLR

from parsim.data.samples import Order
from parsim.errors import ConfigError
from parsim.execute.job import PLATEAU, SCHEDULES, Schedule, TrainingRecipe
from parsim.execute.optimizer import make_optimizer

FOLLOWED = ("lr", "momentum", "betas")
"""What a scheduler changes of a group of parameters."""
_PLATEAU_STATE = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")


class LearningRate:
    """What the optimizer's groups have in each step.

    Args:
        optimizer: a row of OPTIMIZERS. learning_rate: the highest, or first. recipe: with a schedule.
        steps: of the whole training. order: of the samples, which says what an epoch is.

    Raises:
        ConfigError: torch refuses the arguments of the schedule.
    """

    def __init__(self, optimizer: str, learning_rate: float, recipe: TrainingRecipe, *, steps: int, order: Order) -> None:
        assert recipe.schedule is not None
        self._schedule = recipe.schedule
        self._made = optimizer, learning_rate, recipe
        self._epoch_steps = 1 if recipe.schedule.per == "step" else order.steps_per_epoch
        self._length = max(1, (self._unit(steps - 1) + 1) - self._schedule.warmup)
        self._plateau: tuple[float, dict[str, float]] | None = None
        self._begin()

    def of(self, step: int) -> dict[str, Any]:
        """What an optimizer's groups have in the step of that number, counted from 0."""
        unit = self._unit(step)
        if unit < self._at:
            self._begin()
        while self._at < unit:
            self._at += 1
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of schedulers in a row, about the order of calls
                if self._steps is not None:
                    self._steps.step()
        (group,) = self._optimizer.param_groups
        found = {key: group[key] for key in FOLLOWED if key in group}
        if self._follows is not None:
            found["lr"] = found["lr"] * self._warm_factor(unit)
        return found

    def apply(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        """Give every group of an optimizer what it has in that step."""
        for group in optimizer.param_groups:
            group.update(self.of(step))

    def saw(self, score: float, step: int) -> None:
        """A validation score after `step` steps; ReduceLROnPlateau follows it once the warm-up is over."""
        if self._follows is not None and self._unit(step) >= self._schedule.warmup:
            self._follows.step(score)

    def state(self) -> Tensor | None:
        """For a checkpoint; None where the step says all."""
        if self._follows is None:
            return None
        values = [self._optimizer.param_groups[0]["lr"], *(getattr(self._follows, key) for key in _PLATEAU_STATE)]
        return torch.tensor([float(value) for value in values], dtype=torch.float64)

    def load(self, state: Tensor | None) -> None:
        """Inverse of `state`."""
        if self._follows is None or state is None:
            return
        rate, best, *counts = state.tolist()
        self._optimizer.param_groups[0]["lr"] = rate
        self._follows.best = best
        for key, count in zip(_PLATEAU_STATE[1:], counts, strict=True):
            setattr(self._follows, key, int(count))

    def _unit(self, step: int) -> int:
        return step // self._epoch_steps

    def _warm_factor(self, unit: int) -> float:
        first, warmup = self._schedule.start_factor, self._schedule.warmup
        return 1.0 if unit >= warmup else first + (1 - first) * unit / warmup

    def _begin(self) -> None:
        name, learning_rate, recipe = self._made
        self._optimizer = make_optimizer(name, [torch.nn.Parameter(torch.zeros(1))], learning_rate, recipe=recipe)
        self._optimizer.step()  # schedulers warn of one that has made no step
        self._at = 0
        self._steps: LRScheduler | None = None
        self._follows: ReduceLROnPlateau | None = None
        if self._schedule.name == PLATEAU:
            self._follows = made_schedule(self._optimizer, PLATEAU, dict(self._schedule.arguments))
        else:
            self._steps = scheduler(self._optimizer, self._schedule, learning_rate, self._length)


class LearningRates:
    """Those of all groups of parameters: each follows the recipe's schedule with its own optimizer and rate.

    Args: as those of LearningRate, for parameters in no group.
    """

    def __init__(self, optimizer: str, learning_rate: float, recipe: TrainingRecipe, *, steps: int, order: Order) -> None:
        rules = [("", optimizer, learning_rate)]
        rules += [(group.name, group.optimizer, group.learning_rate) for group in recipe.update_groups]
        self._by_group = {name: LearningRate(own, rate, recipe.of(name), steps=steps, order=order) for name, own, rate in rules}

    def of(self, step: int) -> dict[str, float]:
        """The rate of every group in the step of that number; "" for parameters in none."""
        return {name: float(rate.of(step)["lr"]) for name, rate in self._by_group.items()}

    def apply(self, step: int, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        """Give optimizers, by group, what they have in that step."""
        for name, optimizer in optimizers.items():
            self._by_group[name].apply(step, optimizer)

    def saw(self, score: float, step: int) -> None:
        """Show every group a validation score after `step` steps."""
        for rate in self._by_group.values():
            rate.saw(score, step)

    def state(self) -> Tensor | None:
        """For a checkpoint; None where the step says all."""
        states = [state for rate in self._by_group.values() if (state := rate.state()) is not None]
        return torch.cat(states) if states else None

    def load(self, state: Tensor | None) -> None:
        """Inverse of `state`."""
        if state is not None:
            for rate, own in zip(self._by_group.values(), state.chunk(len(self._by_group)), strict=True):
                rate.load(own)


def scheduler(optimizer: torch.optim.Optimizer, schedule: Schedule, learning_rate: float, length: int) -> LRScheduler:
    """torch's scheduler of an optimizer: the schedule, behind its warm-up.

    Args:
        learning_rate: of the run file. length: updates of the rate in the whole training, without the warm-up.

    Raises:
        ConfigError: torch refuses the arguments.
    """
    row, arguments = SCHEDULES[schedule.name], dict(schedule.arguments)
    if row.length:
        arguments.setdefault(row.length, length)
    if row.peak:
        arguments.setdefault(row.peak, learning_rate)
    if not schedule.warmup:
        only: LRScheduler = made_schedule(optimizer, schedule.name, arguments)
        return only
    warm = LinearLR(optimizer, start_factor=schedule.start_factor, total_iters=schedule.warmup)
    then: LRScheduler = made_schedule(optimizer, schedule.name, arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return SequentialLR(optimizer, [warm, then], milestones=[schedule.warmup])


def made_schedule(optimizer: torch.optim.Optimizer, name: str, arguments: dict[str, Any]) -> Any:
    """A row's scheduler. Raises ConfigError with torch's own message."""
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in arguments.items()}
    try:
        return SCHEDULES[name].make(optimizer, **values)
    except (TypeError, ValueError, KeyError, AssertionError, ZeroDivisionError) as error:
        raise ConfigError(f"training.schedule: torch refuses the arguments of {name}: {error}") from error


def check_schedule(optimizer: str, learning_rate: float, recipe: TrainingRecipe, *, steps: int, order: Order) -> None:
    """Raise ConfigError for a schedule that cannot go through the training: its last step too."""
    if recipe.schedule is None:
        return
    if recipe.schedule.warmup > 0 and recipe.schedule.start_factor <= 0:
        raise ConfigError("training.schedule.warmup_start_factor must be above 0; for example 0.001")
    rate = LearningRate(optimizer, learning_rate, recipe, steps=steps, order=order)
    try:
        rate.of(steps - 1)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"training.schedule: {recipe.schedule.name} fails before step {steps}: {error}") from error
