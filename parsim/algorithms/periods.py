"""Period: after which local steps the workers synchronise.

A Period is a value; the functions below make one. Steps are counted from 0, and "due(step)"
asks whether a synchronisation follows step number `step`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from parsim.errors import AlgorithmError
from parsim.model.optimizers import OPTIMIZERS


class AlgorithmWarning(UserWarning):
    """An algorithm that runs, and is not what it may be taken for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """Synchronise after each of the first `warmup_steps` steps, then after every `steps` steps (None: only at the very end).

    The end of training always synchronises; that one is the driver's, so it is not counted here.
    """

    steps: int | None
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise AlgorithmError(
                f"a period must be at least 1 step, got {self.steps}; use at_end() to synchronise once, at the end of training"
            )
        if self.warmup_steps < 0:
            raise AlgorithmError(f"warmup_steps must be >= 0, got {self.warmup_steps}")

    def due(self, step: int) -> bool:
        """Whether a synchronisation follows step `step` >= 0."""
        if step < self.warmup_steps:
            return True
        return self.steps is not None and (step - self.warmup_steps + 1) % self.steps == 0

    def count(self, total_steps: int) -> int:
        """Synchronisations after the steps 0 .. total_steps-1 (the one at the end of training not counted)."""
        warm = min(self.warmup_steps, total_steps)
        return warm + ((total_steps - warm) // self.steps if self.steps is not None else 0)


def every_steps(steps: int) -> Period:
    """Local SGD: `steps` >= 1 local steps between synchronisations; 1 is synchronous training."""
    return Period(steps=steps)


def every_epochs(epochs: int, steps_per_epoch: int) -> Period:
    """Epoch averaging: after every `epochs` epochs; 0 means only at the end of training."""
    if epochs < 0 or steps_per_epoch < 1:
        raise AlgorithmError(
            f"every_epochs needs epochs >= 0 (0: only at the end) and steps_per_epoch >= 1, got {epochs} and {steps_per_epoch}"
        )
    return Period(steps=epochs * steps_per_epoch if epochs else None)


def post_local(warmup_steps: int, steps: int) -> Period:
    """Post-local SGD: synchronous for `warmup_steps` steps, then every `steps` steps."""
    return Period(steps=steps, warmup_steps=warmup_steps)


def at_end() -> Period:
    """Independent training, averaged once."""
    return Period(steps=None)


def warn_if_not_synchronous(period: Period, optimizer: str) -> None:
    """Warn when period 1 may be taken for synchronous training and is not: with Adam the mean of the workers' steps is not the
    step of the mean gradient. SGD is exact, also with momentum kept per worker, because its step is linear in the gradient."""
    if period.steps == 1 and not OPTIMIZERS[optimizer].linear:
        warnings.warn(
            f"averaging weights after every step of {optimizer} does not equal synchronous {optimizer}: its step is not linear "
            f"in the gradient; average gradients instead, or use one of {', '.join(OPTIMIZERS.where(linear=True))}",
            AlgorithmWarning,
            stacklevel=3,
        )
