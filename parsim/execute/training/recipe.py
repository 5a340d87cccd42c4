"""What goes with an update beside the optimizer's own rule: schedule, weight decay. Plain data, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from parsim.errors import ExecutionError

Argument = bool | int | float | str | tuple[int | float, ...]
"""A value that a schedule or an optimizer takes."""

NORM, BIAS = "norm", "bias"
KINDS = (NORM, BIAS)
"""What no_weight_decay may name beside patterns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The learning rate over the training.

    Attributes:
        name: a row of `parsim.execute.training.schedules.SCHEDULES`. arguments: of it.
        per: when it moves on: after every step, or after every pass over the data.
        warmup: so many of these at the beginning, in which the rate rises linearly (torch's LinearLR).
        warmup_start_factor: of the first rate; None: 1 / (warmup + 1), so that the rate rises from 0 in equal parts.
    """

    name: str = "ConstantLR"
    arguments: tuple[tuple[str, Argument], ...] = ()
    per: Literal["step", "epoch"] = "step"
    warmup: int = 0
    warmup_start_factor: float | None = None

    @property
    def start_factor(self) -> float:
        return 1 / (self.warmup + 1) if self.warmup_start_factor is None else self.warmup_start_factor


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRule:
    """Validation on the way.

    Attributes:
        every: steps between two; 0: once per pass over the data.
        validation: below 1 the share of the training samples that is held out, else how many; None: the dataset's own split
            "validation", or a tenth where it has none.
        metrics: rows of `parsim.execute.training.metrics.METRICS`. monitor: "loss" or one of them, by which the best checkpoint
            is chosen. larger_is_better: of it. min_delta: a gain of at most this much is none.
        patience: validations without a gain after which the training stops; 0: never.
    """

    every: int = 0
    validation: float | None = None
    metrics: tuple[str, ...] = ()
    monitor: str = "loss"
    larger_is_better: bool = False
    min_delta: float = 0.0
    patience: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EmaRule:
    """Moving averages of the weights: decay, in [0, 1], of torch's AveragedModel. evaluate: validations score them."""

    decay: float
    evaluate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateGroup:
    """Parameters with an optimizer of their own: one player of several networks, or a head that learns faster.

    Attributes:
        name: unique. parameters: patterns of their names.
        optimizer: a row of OPTIMIZERS. learning_rate: of it; the recipe's schedule begins or peaks there.
        optimizer_args, weight_decay: as those of a TrainingRecipe.
    """

    name: str
    parameters: tuple[str, ...]
    optimizer: str
    learning_rate: float
    optimizer_args: tuple[tuple[str, Argument], ...] = ()
    weight_decay: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecipe:
    """Attributes:
    groups: parameters that are updated by another optimizer, or at another rate.
    optimizer_args: of torch's optimizer, in place of its defaults.
    weight_decay: of the optimizer; None: its default. no_weight_decay: parameters without: "norm", "bias", or patterns.
    schedule: of the learning rate; None: it stays.
    clip_norm: the largest norm of all gradients together; None: any. evaluation: on the way; None: none.
    ema: moving averages of the weights; None: none. tensorboard: write its event files too.
    """

    groups: tuple[UpdateGroup, ...] = ()
    optimizer_args: tuple[tuple[str, Argument], ...] = ()
    weight_decay: float | None = None
    no_weight_decay: tuple[str, ...] = ()
    schedule: Schedule | None = None
    clip_norm: float | None = None
    evaluation: EvaluationRule | None = None
    ema: EmaRule | None = None
    tensorboard: bool = False

    @property
    def group_settings(self) -> dict[str, Argument]:
        """What every group of parameters of the optimizer has in place of its defaults."""
        settings = dict(self.optimizer_args)
        return settings if self.weight_decay is None else {**settings, "weight_decay": self.weight_decay}

    def of(self, group: str) -> TrainingRecipe:
        """What goes with the updates of one group; "" for the parameters in none."""
        for own in self.groups:
            if own.name == group:
                return replace(self, groups=(), optimizer_args=own.optimizer_args, weight_decay=own.weight_decay)
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> TrainingRecipe:
        """Inverse of `to_dict`. Raises ExecutionError for anything else."""
        try:
            values = dict(document)
            schedule = values.pop("schedule", None)
            looks = values.pop("evaluation", None)
            averages = values.pop("ema", None)
            groups = values.pop("groups", ())
            return cls(
                **{
                    **values,
                    "optimizer_args": pairs(dict(values.get("optimizer_args", ()))),
                    "no_weight_decay": tuple(values.get("no_weight_decay", ())),
                },
                groups=tuple(
                    UpdateGroup(
                        **{
                            **group,
                            "parameters": tuple(group["parameters"]),
                            "optimizer_args": pairs(dict(group.get("optimizer_args", ()))),
                        }
                    )
                    for group in groups
                ),
                evaluation=None if looks is None else EvaluationRule(**{**looks, "metrics": tuple(looks.get("metrics", ()))}),
                ema=None if averages is None else EmaRule(**averages),
                schedule=None
                if schedule is None
                else Schedule(**{**schedule, "arguments": pairs(dict(schedule.get("arguments", ())))}),
            )
        except (TypeError, ValueError, KeyError) as error:
            raise ExecutionError(f"the training recipe of the job cannot be read ({error}); run again") from error


PLAIN = TrainingRecipe()
"""Nothing beside the optimizer's own rule."""


def pairs(arguments: Mapping[str, Any]) -> tuple[tuple[str, Argument], ...]:
    """Arguments in a fixed order, lists as tuples."""
    return tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in sorted(arguments.items()))
