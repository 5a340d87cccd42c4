"""The job of one launch: one or more plans, trained, or measured in interleaved rounds. JSON between parent and ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer, StrictBool, StrictInt, StrictStr, WrapValidator

from parsim.costs.loading import MeasuredLoading
from parsim.errors import ConfigError, ExecutionError, near_matches
from parsim.execute.metrics import LOSS_NAME, METRICS
from parsim.files import read_json, reading, version_problem, write_text_atomically
from parsim.hardware.records import ConfigSection, Name, Number, PairsOf
from parsim.model.component import Component
from parsim.model.model import Model
from parsim.model.optimizers import OPTIMIZERS
from parsim.model.spec import ModelSpec
from parsim.plans.constraints import UNCONSTRAINED, SearchConstraints
from parsim.plans.plan import Plan
from parsim.predict.memory import FIT_PROBABILITY
from parsim.records import check_types
from parsim.registry import Registry, RowOf, as_key_error

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler


# Learning-rate schedules by torch's names; a new one is one row. Nothing here imports torch: a run file is checked without it.


PLATEAU = "ReduceLROnPlateau"
"""The one schedule that follows the validation score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleKind:
    """One schedule.

    Attributes:
        make: (optimizer, **arguments) -> the torch.optim.lr_scheduler.LRScheduler. arguments: names that it takes beside the
            optimizer. required: those without a default.
        length: the argument that means the whole training; left out, it is that many updates of the rate, without the warm-up.
        peak: the argument that means the highest rate; left out, it is training.learning_rate.
    """

    make: Callable[..., LRScheduler]
    arguments: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    length: str = ""
    peak: str = ""


def _row(name: str, arguments: str, required: str = "", *, length: str = "", peak: str = "") -> ScheduleKind:
    """The schedule of that name in torch; names of arguments stand between blanks."""

    def make(optimizer: Optimizer, **values: Any) -> LRScheduler:
        from torch.optim import lr_scheduler

        schedule: LRScheduler = getattr(lr_scheduler, name)(optimizer, **values)
        return schedule

    return ScheduleKind(
        make=make, arguments=tuple(arguments.split()), required=tuple(required.split()), length=length, peak=peak
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


# What goes with an update beside the optimizer's own rule: schedule, weight decay. Plain data, without torch.
#
# Each record is a table below [training] of a run file too: pydantic checks its annotations where a file is read.


Argument = StrictBool | StrictInt | Number | StrictStr | tuple[StrictInt | Number, ...]
"""A value that a schedule or an optimizer takes."""
Whole = Annotated[int, Field(strict=True, ge=0)]
WeightDecay = Annotated[float, Field(ge=0, allow_inf_nan=False)]

NORM, BIAS = "norm", "bias"
KINDS = (NORM, BIAS)
"""What no_weight_decay may name beside patterns."""


Arguments = Annotated[tuple[tuple[str, Argument], ...], PairsOf(Argument)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """[training.schedule]: the learning rate over the training. In a file the arguments stand among its keys.

    Attributes:
        name: a row of `parsim.execute.job.SCHEDULES` (a class of torch.optim.lr_scheduler), or
            "package.module:ROW". arguments: of it.
        per: when it moves on: after every step, or after every pass over the data. Warmup and arguments count these.
        warmup: so many of these at the beginning, in which the rate rises linearly (torch's LinearLR).
        warmup_start_factor: of the first rate; None: 1 / (warmup + 1), so that the rate rises from 0 in equal parts.
    """

    name: Annotated[Name, RowOf(SCHEDULES)] = "ConstantLR"
    arguments: Arguments = ()
    per: Literal["step", "epoch"] = "step"
    warmup: Whole = 0
    warmup_start_factor: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None

    def __post_init__(self) -> None:
        name, arguments, row = self.name, dict(self.arguments), SCHEDULES[self.name]
        takes = ", ".join(row.arguments)
        for key in arguments:
            if key not in row.arguments:
                near = near_matches(key, row.arguments)
                listing = "" if near.startswith("; known") else f" ({name} takes: {takes})"
                raise ConfigError(f"{name} has no argument {key!r}{near}{listing}")
        for key in row.required:
            if key not in arguments:
                raise ConfigError(f"{name} needs {key}; it takes: {takes}")
        if name == "ConstantLR" and not arguments:
            object.__setattr__(self, "arguments", (("factor", 1.0),))

    @property
    def start_factor(self) -> float:
        return 1 / (self.warmup + 1) if self.warmup_start_factor is None else self.warmup_start_factor

    @staticmethod
    def from_table(table: Any) -> Any:
        """Arguments among the other keys, as a run file has them, put together."""
        if not isinstance(table, Mapping) or "arguments" in table:
            return table
        keys = {field.name for field in fields(Schedule)} & table.keys()
        arguments = {key: value for key, value in table.items() if key not in keys}
        return {**{key: table[key] for key in table if key in keys}, "arguments": arguments}

    def to_table(self) -> dict[str, Any]:
        table = {key: value for key, value in asdict(self).items() if key != "arguments" and value is not None}
        return {**table, **dict(self.arguments)}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRule:
    """[training.evaluation]: validation on the way, on all ranks.

    Attributes:
        every: steps between two; 0: once per pass over the data. The last step always has one.
        validation: below 1 the share of the training samples that is held out, else how many; None: the dataset's own split
            "validation", or a tenth where it has none.
        metrics: rows of `parsim.execute.metrics.METRICS`, or "package.module:function" (output, target).
        monitor: "loss" or one of them, by which the best checkpoint, early stop and ReduceLROnPlateau go.
        mode: whether less or more of `monitor` is better; None: as its metric says.
        patience: validations without a gain after which the training stops; 0: never.
        min_delta: a gain of at most this much is none.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    every: Whole = 0
    validation: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    metrics: tuple[Annotated[Name, RowOf(METRICS)], ...] = ()
    monitor: Name = LOSS_NAME
    mode: Literal["min", "max"] | None = None
    patience: Whole = 0
    min_delta: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0

    def __post_init__(self) -> None:
        if self.monitor not in (LOSS_NAME, *self.metrics):
            near = near_matches(self.monitor, (LOSS_NAME, *self.metrics))
            raise ConfigError(f"monitor = {self.monitor!r} is neither loss nor one of metrics{near}")
        if self.validation is not None and self.validation >= 1 and not float(self.validation).is_integer():
            raise ConfigError(f"validation = {self.validation:g}: give a share below 1, or a whole number of samples")
        if self.mode is None and self.monitor != LOSS_NAME and METRICS[self.monitor].larger_is_better is None:
            raise ConfigError(
                f'monitor = {self.monitor!r} is a function of your own: set mode = "min" or mode = "max" beside it'
            )

    @property
    def larger_is_better(self) -> bool:
        if self.mode is not None:
            return self.mode == "max"
        return self.monitor != LOSS_NAME and bool(METRICS[self.monitor].larger_is_better)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmaRule:
    """training.ema: exponential moving averages of the weights, as torch.optim.swa_utils keeps them.

    Attributes: decay: ema = decay * ema + (1 - decay) * weight after every update. evaluate: validations score the averages.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    decay: Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)] = 0.999
    evaluate: StrictBool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateGroup:
    """[training.groups.NAME]: parameters with an optimizer of their own: one player of several networks, or a faster head.

    Attributes:
        parameters: patterns of their names. name: unique.
        optimizer: a row of OPTIMIZERS; "": that of the training, with its arguments and rate where these are left out too.
        optimizer_args: in place of the optimizer's defaults; None: those of the training beside its optimizer, else none.
        learning_rate: the recipe's schedule begins or peaks there; 0: that of the training beside its optimizer, else what the
            row says. weight_decay: None: that of the training.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    parameters: Annotated[tuple[Name, ...], Field(min_length=1)]
    name: str = ""
    optimizer: Annotated[Name, RowOf(OPTIMIZERS)] = ""
    optimizer_args: Arguments | None = None
    learning_rate: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] = 0.0
    weight_decay: WeightDecay | None = None

    def __post_init__(self) -> None:
        if "weight_decay" in dict(self.optimizer_args or ()):
            raise ConfigError("optimizer_args.weight_decay: weight decay has a key of its own; set weight_decay of the group")

    def to_table(self) -> dict[str, Any]:
        """The keys of a run file that differ from their defaults."""
        table = {entry.name: value for entry in fields(self) if (value := getattr(self, entry.name)) != entry.default}
        return table | ({} if self.optimizer_args is None else {"optimizer_args": dict(self.optimizer_args)})


def _by_name(groups: Any) -> Any:
    return {group.name: group for group in groups} if isinstance(groups, tuple) else groups


class TrainingRecipe(ConfigSection):
    """The keys of [training] that the executor takes beside the optimizer's own rule.

    Attributes:
        groups: by name: parameters that are updated by another optimizer, or at another rate, such as the two players of a GAN.
        optimizer_args: of torch's optimizer, in place of its defaults: betas = [0.9, 0.95], eps = 1e-6, nesterov = true.
        weight_decay: None: the optimizer's own default (0.01 for adamw, else 0).
        no_weight_decay: parameters without weight decay: "norm", "bias", or patterns of their names ("*.position*").
        clip_norm: the largest norm of all gradients together, over all ranks, as torch.nn.utils.clip_grad_norm_ takes it; None:
            any.
        ema: moving averages of the weights (`parsim export --weights ema`); None: none are kept.
        tensorboard: write what metrics.jsonl has for TensorBoard too, into RUN_DIR/tensorboard.
        evaluation: on the way; None: only the test samples are scored, at the end. schedule: of the learning rate; None: it
            stays.
    """

    groups: Annotated[dict[str, UpdateGroup], BeforeValidator(_by_name)] = {}  # noqa: RUF012 - pydantic copies it
    optimizer_args: Arguments = ()
    weight_decay: WeightDecay | None = None
    no_weight_decay: tuple[Name, ...] = ()
    clip_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    ema: EmaRule | None = None
    tensorboard: StrictBool = False
    evaluation: Annotated[EvaluationRule, WrapValidator(as_key_error)] | None = None
    schedule: (
        Annotated[
            Schedule,
            BeforeValidator(Schedule.from_table),
            WrapValidator(as_key_error),
            PlainSerializer(Schedule.to_table),
        ]
        | None
    ) = None

    def __hash__(self) -> int:
        return hash(repr(self))

    @property
    def update_groups(self) -> tuple[UpdateGroup, ...]:
        return tuple(self.groups.values())

    @property
    def group_settings(self) -> dict[str, Argument]:
        """What every group of parameters of the optimizer has in place of its defaults."""
        settings = dict(self.optimizer_args)
        return settings if self.weight_decay is None else {**settings, "weight_decay": self.weight_decay}

    def of(self, group: str) -> TrainingRecipe:
        """What goes with the updates of one group; "" for the parameters in none."""
        rule = self.groups.get(group)
        if rule is None:
            return self
        changes: dict[str, Any] = {"groups": {}, "optimizer_args": rule.optimizer_args or (), "weight_decay": rule.weight_decay}
        return self.model_copy(update=changes)


PLAIN = TrainingRecipe()
"""Nothing beside the optimizer's own rule."""


# Groups of parameters with optimizers of their own: which parameters are whose, in a Model and by torch's names.
#
# A Model with groups says of each parameter its group and optimizer. Buckets, updates, prices and memory follow from that; the
# rates and arguments stay in the recipe, which the executor reads.


def group_of(name: str, groups: Sequence[UpdateGroup]) -> UpdateGroup | None:
    """The group of a parameter; None where no pattern matches its name. Raises ConfigError: it is in two groups."""
    matching = [group for group in groups if any(fnmatchcase(name, pattern) for pattern in group.parameters)]
    if len(matching) > 1:
        raise ConfigError(
            f"parameter {name} is in training.groups.{matching[0].name} and in training.groups.{matching[1].name}; one "
            "optimizer updates a parameter: make the patterns narrower"
        )
    return matching[0] if matching else None


def with_update_groups(model: Model, groups: Sequence[UpdateGroup]) -> Model:
    """The model with the group and optimizer of each trainable parameter, in place of those it had; itself if that is the same.
    Tied weights have their first name in it. Raises ConfigError: a parameter in two groups, or a pattern that matches none."""
    if not groups and not any(parameter.group for parameter in model.parameters):
        return model
    names = [parameter.name for parameter in model.parameters]
    for group in groups:
        for pattern in group.parameters:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(
                    f"training.groups.{group.name}: no parameter matches {pattern!r}{near_matches(pattern, names)}; write a "
                    f'pattern of names, such as "{names[0].partition(".")[0] if names else "generator"}.*"'
                )

    def grouped(component: Component) -> Component:
        changed = []
        for parameter in component.parameters:
            group = group_of(parameter.name, groups) if parameter.trainable else None
            name, optimizer = ("", "") if group is None else (group.name, group.optimizer)
            changed.append(replace(parameter, group=name, optimizer=optimizer))
        return component if tuple(changed) == component.parameters else replace(component, parameters=tuple(changed))

    return replace(model, components=tuple(grouped(component) for component in model.components))


SCHEMA_VERSION = 1
"""Version of job.json."""

SCORE = "score.json"
"""In the job's output, once all steps are made."""

EXECUTION = "execution.json"
"""What rank 0 leaves in the job's output of the numbers it computes in; it becomes a part of environment.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One model under one plan.

    Attributes:
        name: unique in the job; names its files. model_path: the Model JSON the plan was made for. recipe: what else goes with
            the update.
        dtype: "float32" or "float64", of weights and computation in precision fp32. precision: as in RUN.toml
            (`parsim.model.formats`). master_weights: with bf16, the optimizer's copies in fp32.
        loss_scale, loss_scale_growth_steps: with amp_fp16, the first scale and after how many good steps it grows.
        predicted_memory: per rank the lines of tensors, bytes, for whoever explains what was short; empty: not known.
        workers: processes per rank that read samples ahead. pin_memory: as torch's DataLoader, for ranks that load ahead.
        predicted_step_s: mean seconds of a step, shown beside the measured one; 0: not known. seed: of weights and sample
            order.
        shards: which samples each replica reads, a text of `parsim.data.shards`; None: all together.
    """

    name: str
    model: ModelSpec
    model_path: str
    plan: Plan
    optimizer: str
    learning_rate: float
    dataset: str
    data_root: str | None = None
    dtype: str = "float32"
    seed: int = 0
    precision: str = "fp32"
    master_weights: bool = True
    loss_scale: float = 65536.0
    loss_scale_growth_steps: int = 2000
    predicted_memory: tuple[dict[str, int], ...] = ()
    recipe: TrainingRecipe = PLAIN
    workers: int = 0
    pin_memory: bool = True
    predicted_step_s: float = 0.0
    shards: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    step: int
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveSpec:
    """What the controller needs beside the run: the costs of the machine (the profile, as path or name), and how often to look.

    epoch_steps: of one pass over the data. fit_probability: with which the memory of a plan must suffice. loading: of a dataset
    of the user's own, as it was measured. asked: what every plan must keep, the ones changed to included.
    """

    profile: str
    devices: tuple[int, ...] | None
    precision: str
    window_steps: int
    epoch_steps: int
    fit_probability: float = FIT_PROBABILITY
    loading: MeasuredLoading | None = None
    asked: SearchConstraints = UNCONSTRAINED

    def __post_init__(self) -> None:
        if not 0 < self.fit_probability < 1:
            raise ExecutionError(f"fit_probability = {self.fit_probability}: must be above 0 and below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """mode: "train" runs `steps` steps of the only run. "measure" runs `rounds` rounds, and in each of them every run does
    `steps` steps. Both leave the first `warmup_steps` of each run out of the times.
    settle_steps: in mode "measure", steps at the beginning of a run's turn that are left out too: the caches still hold what
    the run before had there. keep_state: leave a checkpoint of every run in its folder at the end.
    checkpoint_every: steps between checkpoints; 0: at the end only; None: by time (`parsim.execute.train.CheckpointTimes`).
    timeout_s: of a collective, where no launcher watches the ranks' heartbeats.
    switches: plans to change to on the way (mode "train"). adaptive: let the controller decide instead.
    """

    output: str
    mode: Literal["train", "measure"]
    runs: tuple[RunSpec, ...]
    steps: int
    rounds: int = 1
    warmup_steps: int = 2
    settle_steps: int = 0
    device: str = "cpu"
    keep_state: bool = False
    checkpoint_every: int | None = 0
    resume: bool = False
    timeout_s: float = 600.0
    switches: tuple[Switch, ...] = ()
    adaptive: AdaptiveSpec | None = None

    def __post_init__(self) -> None:
        if not self.runs or self.steps < 1 or self.rounds < 1:
            raise ExecutionError("a job needs at least one run, one step and one round")
        if self.mode == "train" and len(self.runs) != 1:
            raise ExecutionError(f"mode train takes one run, got {len(self.runs)}; use mode measure to compare plans")
        first = self.runs[0].plan
        if self.switches or self.adaptive is not None:
            for plan in (first, *(switch.plan for switch in self.switches)):
                if plan.synchronisation.is_relaxed:
                    raise ExecutionError(
                        f"a plan with synchronisation {plan.synchronisation} cannot be changed for another on the way: its "
                        "replicas have weights of their own; train without --adaptive"
                    )
        for switch in self.switches:
            if (switch.plan.world_size, switch.plan.global_batch) != (first.world_size, first.global_batch):
                raise ExecutionError(
                    f"a switch keeps ranks and batch: {first.world_size} ranks and global_batch {first.global_batch} cannot "
                    f"become {switch.plan.world_size} and {switch.plan.global_batch}"
                )

    @property
    def total_steps(self) -> int:
        """Steps of every run, those before any is timed included."""
        return self.steps if self.mode == "train" else self.warmup_steps + self.rounds * (self.settle_steps + self.steps) + 1

    @property
    def world_size(self) -> int:
        return max(run.plan.world_size for run in self.runs)

    def save(self, path: Path) -> None:
        document = {"schema_version": SCHEMA_VERSION, **asdict(self)}
        for entry, run in zip(document["runs"], self.runs, strict=True):
            entry["model"] = run.model.to_dict()
            entry["plan"] = run.plan.to_json()
            entry["recipe"] = run.recipe.model_dump(mode="json")
        if self.adaptive is not None:
            document["adaptive"]["asked"] = self.adaptive.asked.to_dict()
        document["switches"] = [{"step": switch.step, "plan": switch.plan.to_json()} for switch in self.switches]
        write_text_atomically(path, json.dumps(document, indent=1))

    @classmethod
    def load(cls, path: Path) -> Job:
        with reading(f"{path} is not a job", ExecutionError, "run again"):
            document: dict[str, Any] = read_json(path)
            if problem := version_problem(document, SCHEMA_VERSION):
                raise ExecutionError(f"{path}: {problem}; or run again")
            document.pop("schema_version", None)
            document["runs"] = tuple(_run_from(run) for run in document["runs"])
            document["switches"] = tuple(
                Switch(step=switch["step"], plan=Plan.from_json(switch["plan"])) for switch in document["switches"]
            )
            adaptive = document["adaptive"]
            if adaptive is not None:
                adaptive["devices"] = None if adaptive["devices"] is None else tuple(adaptive["devices"])
                loading = adaptive.get("loading")
                adaptive["loading"] = None if loading is None else MeasuredLoading.from_dict(loading)
                adaptive["asked"] = SearchConstraints.from_dict(adaptive["asked"])
                document["adaptive"] = AdaptiveSpec(**adaptive)
            job = cls(**document)
            check_types(job, "job")
            return job


def _run_from(document: dict[str, Any]) -> RunSpec:
    with reading("the training recipe of the job cannot be read", ExecutionError, "run again"):
        try:
            recipe = TrainingRecipe.model_validate(document.get("recipe", {}))
        except ConfigError as error:
            raise ValueError(str(error)) from error
    changed = {
        "model": ModelSpec.from_dict(document["model"]),
        "plan": Plan.from_json(document["plan"]),
        "predicted_memory": tuple(document.get("predicted_memory", ())),
        "recipe": recipe,
    }
    return RunSpec(**{**document, **changed})
