"""Learning-rate schedules by torch's names: which arguments each takes. A new one is one row.

Nothing here imports torch, so a run file is checked without it; a row's `make` imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from parsim.errors import ConfigError, near_matches
from parsim.registry import Registry

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

PLATEAU = "ReduceLROnPlateau"
"""The one schedule that follows the validation score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleKind:
    """One schedule.

    Attributes:
        make: (optimizer, **arguments) -> the torch.optim.lr_scheduler.LRScheduler.
        arguments: names that `make` takes beside the optimizer.
        required: those without a default.
        length: the argument that means the whole training; left out, it is that many updates of the rate, without the warm-up.
        peak: the argument that means the highest rate; left out, it is training.learning_rate.
    """

    make: Callable[..., LRScheduler]
    arguments: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    length: str = ""
    peak: str = ""


def _torch_schedule(name: str, optimizer: Optimizer, **arguments: Any) -> LRScheduler:
    from torch.optim import lr_scheduler

    made: LRScheduler = getattr(lr_scheduler, name)(optimizer, **arguments)
    return made


def _row(name: str, arguments: str, required: str = "", *, length: str = "", peak: str = "") -> ScheduleKind:
    return ScheduleKind(
        make=partial(_torch_schedule, name),
        arguments=tuple(arguments.split()),
        required=tuple(required.split()),
        length=length,
        peak=peak,
    )


SCHEDULES: Registry[ScheduleKind] = Registry(
    "schedule",
    ScheduleKind,
    {
        "ConstantLR": _row("ConstantLR", "factor total_iters"),
        "LinearLR": _row("LinearLR", "start_factor end_factor total_iters", length="total_iters"),
        "ExponentialLR": _row("ExponentialLR", "gamma", "gamma"),
        "PolynomialLR": _row("PolynomialLR", "total_iters power", length="total_iters"),
        "StepLR": _row("StepLR", "step_size gamma", "step_size"),
        "MultiStepLR": _row("MultiStepLR", "milestones gamma", "milestones"),
        "CosineAnnealingLR": _row("CosineAnnealingLR", "T_max eta_min", length="T_max"),
        "CosineAnnealingWarmRestarts": _row("CosineAnnealingWarmRestarts", "T_0 T_mult eta_min", "T_0"),
        "OneCycleLR": _row(
            "OneCycleLR",
            "max_lr total_steps pct_start anneal_strategy cycle_momentum base_momentum max_momentum div_factor "
            "final_div_factor three_phase",
            length="total_steps",
            peak="max_lr",
        ),
        "CyclicLR": _row(
            "CyclicLR",
            "base_lr max_lr step_size_up step_size_down mode gamma scale_mode cycle_momentum base_momentum max_momentum",
            "base_lr",
            peak="max_lr",
        ),
        PLATEAU: _row(PLATEAU, "mode factor patience threshold threshold_mode cooldown min_lr eps"),
    },
)


def check_arguments(name: str, arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for arguments that the schedule does not take, or lacks."""
    row = SCHEDULES[name]
    unknown = [key for key in arguments if key not in row.arguments]
    if unknown:
        near = near_matches(unknown[0], row.arguments)
        listing = "" if near.startswith("; known") else f" ({name} takes: {', '.join(row.arguments)})"
        raise ConfigError(f"{name} has no argument {unknown[0]!r}{near}{listing}")
    missing = [key for key in row.required if key not in arguments]
    if missing:
        raise ConfigError(f"{name} needs {missing[0]}; it takes: {', '.join(row.arguments)}")
