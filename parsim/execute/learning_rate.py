"""The learning rate of every step, by torch's own schedulers.

The schedulers move optimizers of one number beside the real ones, and every update takes their rate (and momentum, where a
schedule cycles it) over. So the rate is a function of the step alone: a resumed training, or one that goes on under another
plan, replays it. Only ReduceLROnPlateau has a state, which a checkpoint keeps.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler, ReduceLROnPlateau, SequentialLR

from parsim.data.samples import Order
from parsim.errors import ConfigError
from parsim.execute.job import PLATEAU, SCHEDULES, Schedule, TrainingRecipe
from parsim.execute.optimizer import make_optimizer

FOLLOWED = ("lr", "momentum", "betas")
"""What a scheduler changes of a group of parameters."""
_PLATEAU_STATE = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")


class LearningRates:
    """What the optimizers of all groups of parameters have in each step: each follows the schedule from its own rate.

    Args:
        optimizer, learning_rate: of parameters in no group: a row of OPTIMIZERS, and the highest or first rate.
        recipe: with a schedule. steps: of the whole training. order: of the samples, which says what an epoch is.

    Raises ConfigError: torch refuses the arguments of the schedule.
    """

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
        """Everything as it is in the first step."""
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
        """The schedulers, if they follow the validation score."""
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
        """Give optimizers, by group of parameters, what they have in that step."""
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
        """Inverse of `state`."""
        if state is None or not self._followers:
            return
        for follower, values in zip(self._followers, state.chunk(len(self._followers)), strict=True):
            rate, follower.best, *counts = values.tolist()
            follower.optimizer.param_groups[0]["lr"] = rate
            for key, count in zip(_PLATEAU_STATE[1:], counts, strict=True):
                setattr(follower, key, int(count))


def scheduler(optimizer: Optimizer, schedule: Schedule, learning_rate: float, length: int) -> LRScheduler:
    """torch's scheduler of an optimizer: the schedule, behind its warm-up. ReduceLROnPlateau has none: its caller warms up.

    learning_rate: of the run file. length: updates of the rate in the whole training, without the warm-up.

    Raises ConfigError: torch refuses the arguments.
    """
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
