"""[training] of a run file: data, optimizer and schedule, whatever the plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, field_validator, model_validator
from pydantic_core import PydanticCustomError

from parsim.data import DATASETS
from parsim.errors import ConfigError, PlanError, near_matches
from parsim.execute.job import (
    PLATEAU,
    SCHEDULES,
    EmaRule,
    EvaluationRule,
    Schedule,
    TrainingRecipe,
    UpdateGroup,
    check_arguments,
    pairs,
)
from parsim.execute.metrics import LOSS_NAME, METRICS
from parsim.hardware.network import CardCount
from parsim.hardware.records import Count
from parsim.model.formats import FORMATS, check_planned
from parsim.model.optimizers import OPTIMIZERS
from parsim.plans.synchronisation import Synchronisation, mixing_text, parse_synchronisation
from parsim.registry import RowOf

# [cluster] of a run file: a profile or GPUs by name, how many nodes, and what joins them.


Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Name = Annotated[str, Field(strict=True, min_length=1)]


class ConfigSection(BaseModel):
    """Base of all tables: unknown keys are errors, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


HostAmount = Annotated[float, Field(gt=0, le=1e16, allow_inf_nan=False)]

MOST_NODES = 2**16
"""Of a cluster: four times the largest that is known to train one model; a million nodes are a slip of the pen."""


class NodeGroupSection(ConfigSection):
    """[[cluster.group]]: nodes with GPUs of one kind, beside nodes with others."""

    gpu: Name
    """A shipped GPU by name, or the path of one."""
    nodes: Annotated[int, Field(strict=True, ge=1, le=MOST_NODES)] = 1
    gpus_per_node: Count | None = None
    """Left out: as many as the usual machine has; the same in all groups."""


class ClusterSection(ConfigSection):
    """[cluster]: the devices that train."""

    profile: Name | None = None
    """A shipped hardware profile by name, or the path of one; or `gpu`, which needs none."""
    gpu: Name | None = None
    """A shipped GPU by name ("h100-sxm"), or the path of one: a machine made of parts."""
    group: tuple[NodeGroupSection, ...] | None = None
    """Instead of `gpu`: nodes with different GPUs; `nodes` is then their sum."""
    gpus_per_node: Count | None = None
    """With `gpu`: of each node; left out: as many as the usual machine has."""
    link: Name | None = None
    """With `gpu`: what joins the GPUs of a node, by name or path; left out: what the usual machine has."""
    cards_per_node: CardCount | None = None
    """Network cards of each node; left out: as the network says, usually one for each slot of the machine."""
    history: Name | None = None
    """Path of the profile's validations; left out: beside a profile that is a file, none for a shipped one."""
    devices: Count | tuple[Annotated[int, Field(strict=True, ge=0)], ...] | None = None
    """The first N devices of every node, or a list of device numbers, which count through the nodes; left out: all."""
    nodes: Annotated[int, Field(strict=True, ge=1, le=MOST_NODES)] = 1
    """So many machines of the profile, joined by `network`."""
    network: Name | None = None
    """A shipped network by name, or the path of one; needed for nodes > 1, and without meaning for one node."""
    host_link_bytes_per_s: HostAmount | None = None
    """Between one device and its host, in one direction, for plans that offload; left out: by the links of the machine."""
    host_memory_bytes: HostAmount | None = None
    """Memory of a node's host, which offloaded state and activations must fit; left out: not checked."""
    host_memory_bandwidth_bytes_per_s: HostAmount | None = None
    """Of a node's host, all sockets together: what an update on the host is bound by."""
    usd_per_hour: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Price of one device; left out: the dated price of the part that it is."""
    busy_power_w: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Power of one device while it trains; left out: that of the part that it is, where it is known."""
    device_mtbf_hours: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Mean hours between failures that stop the job, per device; left out: a published figure for H100."""
    checkpoint_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    """The training stands so long while a checkpoint is written."""
    restart_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 600.0
    """From a failure until the last checkpoint is back."""

    @model_validator(mode="before")
    @classmethod
    def _nodes_of_groups(cls, document: Any) -> Any:
        groups = document.get("group") if isinstance(document, dict) else None
        if not isinstance(groups, (list, tuple)) or not groups:
            return document
        counts = [entry.get("nodes", 1) if isinstance(entry, dict) else getattr(entry, "nodes", 1) for entry in groups]
        if not all(isinstance(count, int) and 1 <= count <= MOST_NODES for count in counts):
            return document
        if document.get("nodes", sum(counts)) != sum(counts):
            rule = f"the groups have {sum(counts)} nodes, and nodes = {document['nodes']}; drop nodes"
            raise PydanticCustomError("described", "{rule}", {"rule": rule})
        return {**document, "nodes": sum(counts)}

    @property
    def machine(self) -> str:
        """The profile, or the node of `gpu` as a shorthand: what `parsim.hardware.compose.load_profile` takes. Of groups their
        names."""
        if self.profile is not None:
            return self.profile
        if self.group is not None:
            return " + ".join(f"{group.nodes} nodes of {group.gpu}" for group in self.group)
        from parsim.hardware.parts import Machines, load_gpu

        gpu = str(self.gpu)
        return Machines(gpu, self.gpus_per_node or load_gpu(gpu).gpus_per_node, self.nodes, self.link).node

    @property
    def in_words(self) -> str:
        """`4 x 8xh100-sxm`: the machine, and how many of it."""
        return self.machine if self.nodes == 1 or self.group is not None else f"{self.nodes} x {self.machine}"


OPERATION = frozenset({"usd_per_hour", "busy_power_w", "device_mtbf_hours", "checkpoint_s", "restart_s"})
"""Keys that change no plan, and may stand beside a cluster that was given as a value."""


def check_machine(cluster: ClusterSection) -> None:
    """Exactly one of profile, gpu and groups, and the keys that belong to parts."""
    if cluster.group is not None:
        beside = [key for key in ("profile", "gpu", "gpus_per_node") if getattr(cluster, key) is not None]
        if beside or not cluster.group:
            what = f"has cluster.{beside[0]} beside it; drop one of them" if beside else "is empty; name a GPU in each group"
            raise ConfigError(f"[[cluster.group]] {what}")
        return
    if (cluster.profile is None) == (cluster.gpu is None):
        given = "neither is given" if cluster.profile is None else f"profile = {cluster.profile!r} and gpu = {cluster.gpu!r}"
        raise ConfigError(
            f'[cluster] needs exactly one of profile and gpu, and {given}: profile = "dgx1-v100-32gb" names a machine, '
            'gpu = "h100-sxm" makes one of parts'
        )
    for key in ("gpus_per_node", "link"):
        if cluster.gpu is None and (value := getattr(cluster, key)) is not None:
            raise ConfigError(f"cluster.{key} = {value!r} belongs to cluster.gpu, and a profile says it itself; drop {key}")
    if cluster.cards_per_node is not None and cluster.network is None:
        raise ConfigError(f"cluster.cards_per_node = {cluster.cards_per_node} needs cluster.network; add it, or drop the cards")


MOST_SAMPLES = 10**9
"""In a batch."""
MOST_TRAINED = 1e18
"""Tokens or samples of a whole training; the largest so far took less than 1e14."""
Whole = Annotated[int, Field(strict=True, ge=0)]
ArgumentValue = StrictBool | StrictInt | Number | StrictStr | tuple[StrictInt | Number, ...]
GroupName = Annotated[str, Field(strict=True, pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$")]
Dtype = Literal["float32", "float64"]

TORCH_NAMES = {
    "SGD": "sgd",
    "Adam": "adam",
    "AdamW": "adamw",
    "RMSprop": "rmsprop",
    "Adagrad": "adagrad",
    "RAdam": "radam",
    "Adamax": "adamax",
    "Adadelta": "adadelta",
    "NAdam": "nadam",
    "ASGD": "asgd",
}
"""Optimizers by torch's names; with a momentum, those that take one are the row of that name with "_momentum"."""
OWN_ROW = "write a row of your own (docs/extending.md) where you need it, or take another optimizer"
NOT_BY_ELEMENT = "and ZeRO and tensor parallelism give a rank only some of its elements; take AdamW"
REFUSED = {
    "Adafactor": f"keeps means over the rows and columns of whole matrices, {NOT_BY_ELEMENT}",
    "Muon": f"makes whole matrices orthogonal, {NOT_BY_ELEMENT}",
    "LBFGS": "computes the loss several times within a step, and a plan does so once; take Adam",
    "SparseAdam": "takes sparse gradients, and buckets of gradients are dense; take Adam",
    "Rprop": f"makes masks array by array, which parsim does not price; {OWN_ROW}",
}
"""Optimizers of torch that no plan runs, and why."""


class ScheduleSection(ConfigSection):
    """[training.schedule]: the learning rate over the training; further keys are the arguments of torch's schedule."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[Name, RowOf(SCHEDULES)] = "ConstantLR"
    """A class of torch.optim.lr_scheduler, or "package.module:ROW"."""
    per: Literal["step", "epoch"] = "step"
    """When the rate moves on, and what warmup and the arguments of the schedule count."""
    warmup: Whole = 0
    """Steps (or epochs) at the beginning in which the rate rises linearly; the schedule follows."""
    warmup_start_factor: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    """Of the first rate; left out: 1 / (warmup + 1)."""

    @model_validator(mode="after")
    def _takes(self) -> ScheduleSection:
        try:
            check_arguments(self.name, self.arguments)
        except ConfigError as error:
            raise PydanticCustomError("described", "{rule}", {"rule": str(error)}) from error
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        found = dict(self.model_extra or {})
        if self.name == "ConstantLR" and not found:
            return {"factor": 1.0}
        return found

    @property
    def schedule(self) -> Schedule:
        return Schedule(
            name=self.name,
            arguments=pairs(self.arguments),
            per=self.per,
            warmup=self.warmup,
            warmup_start_factor=self.warmup_start_factor,
        )


class EvaluationSection(ConfigSection):
    """[training.evaluation]: validation on the way, on all ranks."""

    every: Whole = 0
    """Steps between two validations; 0 or left out: once per epoch. The last step always has one."""
    validation: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Below 1: the share of the training samples that is held out; else how many. Left out: the dataset's own split
    "validation", or 0.1 where it has none."""
    metrics: tuple[Annotated[Name, RowOf(METRICS)], ...] = ()
    """Rows of `parsim.execute.metrics`, or "package.module:function" (output, target)."""
    monitor: Name = LOSS_NAME
    """ "loss" or one of the metrics: what the best checkpoint, early stop and ReduceLROnPlateau follow."""
    mode: Literal["min", "max"] | None = None
    """Whether less or more of `monitor` is better; left out: as its metric says."""
    patience: Whole = 0
    """The training stops after so many validations without a gain; 0: never."""
    min_delta: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """A gain of at most this much is none."""

    @model_validator(mode="after")
    def _follows(self) -> EvaluationSection:
        if self.monitor not in (LOSS_NAME, *self.metrics):
            near = near_matches(self.monitor, (LOSS_NAME, *self.metrics))
            raise _rule(f"monitor = {self.monitor!r} is neither loss nor one of metrics{near}")
        if self.validation is not None and self.validation >= 1 and not self.validation.is_integer():
            raise _rule(f"validation = {self.validation:g}: give a share below 1, or a whole number of samples")
        if self.larger_is_better is None:
            raise _rule(f'monitor = {self.monitor!r} is a function of your own: set mode = "min" or mode = "max" beside it')
        return self

    @property
    def larger_is_better(self) -> bool | None:
        if self.mode is not None:
            return self.mode == "max"
        return False if self.monitor == LOSS_NAME else METRICS[self.monitor].larger_is_better

    @property
    def evaluation(self) -> EvaluationRule:
        return EvaluationRule(
            every=self.every,
            validation=self.validation,
            metrics=self.metrics,
            monitor=self.monitor,
            larger_is_better=bool(self.larger_is_better),
            min_delta=self.min_delta,
            patience=self.patience,
        )


class EmaSection(ConfigSection):
    """training.ema: exponential moving averages of the weights, as torch.optim.swa_utils keeps them."""

    decay: Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)] = 0.999
    """ema = decay * ema + (1 - decay) * weight after every update."""
    evaluate: StrictBool = False
    """[training.evaluation] scores the averages in place of the weights."""


class GroupSection(ConfigSection):
    """[training.groups.NAME]: parameters that another optimizer updates, or the same at another rate."""

    parameters: Annotated[tuple[Name, ...], Field(min_length=1)]
    """Patterns of their names, such as "discriminator.*"."""
    optimizer: Annotated[Name, RowOf(OPTIMIZERS)] | None = None
    """Left out: that of [training], with its arguments and rate where these are left out too."""
    optimizer_args: dict[Name, ArgumentValue] | None = None
    """Left out beside another optimizer: its own defaults."""
    learning_rate: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] | None = None
    """Left out beside another optimizer: what its row says."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Left out: that of [training]."""

    @model_validator(mode="before")
    @classmethod
    def _by_torchs_names(cls, document: Any) -> Any:
        return _named_as_rows(document)

    @model_validator(mode="after")
    def _agree(self) -> GroupSection:
        if self.optimizer_args and "weight_decay" in self.optimizer_args:
            raise _rule("optimizer_args.weight_decay: weight decay has a key of its own; set weight_decay of the group")
        return self


class TrainingSection(ConfigSection):
    """[training]: how it is trained, whatever the plan."""

    global_batch: Annotated[int, Field(strict=True, ge=1, le=MOST_SAMPLES)]
    """Samples per step over all replicas."""
    precision: Annotated[Name, RowOf(FORMATS, check_planned)] = "fp32"
    """A row of `parsim.model.formats`, or "package.module:ROW". Priced only: fp16, fp8, nvfp4."""
    master_weights: StrictBool | None = None
    """With precision = "bf16": whether the optimizer updates copies of the weights in fp32; left out: it does."""
    optimizer: Annotated[Name, RowOf(OPTIMIZERS)] = "sgd_momentum"
    """A row of `parsim.model.optimizers`, or "package.module:ROW"."""
    optimizer_args: dict[Name, ArgumentValue] = {}
    """Of torch's optimizer in place of its defaults: betas = [0.9, 0.95], eps = 1e-6, nesterov = true."""
    groups: dict[GroupName, GroupSection] = {}
    """By name: parameters with an optimizer or a rate of their own, such as the two players of a GAN."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Left out: the optimizer's own default (0.01 for adamw, else 0)."""
    no_weight_decay: tuple[Name, ...] = ()
    """Parameters without weight decay: "norm", "bias", or patterns of their names ("*.position*")."""
    clip_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """The largest norm of all gradients together, over all ranks, as torch.nn.utils.clip_grad_norm_ takes it; left out: any."""
    ema: EmaSection | None = None
    """Moving averages of the weights (`parsim export --weights ema`); left out: none are kept."""
    tensorboard: StrictBool = False
    """Write what metrics.jsonl has for TensorBoard too, into RUN_DIR/tensorboard."""
    evaluation: EvaluationSection | None = None
    """On the way; left out: only the test samples are scored, at the end."""
    schedule: ScheduleSection | None = None
    """Of the learning rate; left out: it stays."""
    learning_rate: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] | None = None
    """Left out: what the optimizer's row says."""
    dataset: Annotated[Name, RowOf(DATASETS)] = "digits"
    """A row of `parsim.data.DATASETS`, or "package.module:factory" of a dataset of one's own (docs/training.md)."""
    data_root: Annotated[str, Field(strict=True, min_length=1)] | None = None
    """Folder with the files of cifar10 or cifar100."""
    workers: Annotated[int, Field(strict=True, ge=0, le=256)] = 0
    """Processes of each rank that read samples ahead; 0: the rank reads them in their turn (on a GPU, a thread of it does)."""
    pin_memory: StrictBool = True
    """On a GPU: batches are gathered in pinned memory."""
    epochs: Count = 1
    steps: Count | None = None
    """Steps to train; left out: as many as `epochs` takes."""
    tokens: Annotated[float, Field(gt=0, le=MOST_TRAINED, allow_inf_nan=False)] | None = None
    """Tokens to train on, for days and price of a language model; no key of a real run."""
    samples: Annotated[float, Field(gt=0, le=MOST_TRAINED, allow_inf_nan=False)] | None = None
    """Samples to train on over all epochs, for days and price of any model; no key of a real run."""
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**63)] = 0
    dtype: Dtype = "float32"
    """Of the weights of a real run."""
    allow_coupled_loss: StrictBool = False
    """Train by a loss that is not a sum over samples even where the plan divides the batch, which makes it another loss."""

    @field_validator("precision", mode="before")
    @classmethod
    def _four_bits_by_name(cls, value: Any) -> Any:
        if isinstance(value, str) and "fp4" in value.lower() and value != "nvfp4":
            rule = (
                "of products in 4 bits, only those of NVIDIA's format with a scale for every 16 elements are priced; set "
                'precision = "nvfp4"'
            )
            raise PydanticCustomError("unknown_row", "{rule}", {"rule": rule})
        return value

    @model_validator(mode="before")
    @classmethod
    def _by_torchs_names(cls, document: Any) -> Any:
        return _named_as_rows(document)

    @model_validator(mode="after")
    def _agree(self) -> TrainingSection:
        decays = self.weight_decay is not None or any(group.weight_decay is not None for group in self.groups.values())
        if self.no_weight_decay and not decays:
            raise _rule(
                f"no_weight_decay = {list(self.no_weight_decay)} excludes from a weight decay that is not given; set "
                "weight_decay too, for example weight_decay = 0.1"
            )
        if "weight_decay" in self.optimizer_args:
            raise _rule("optimizer_args.weight_decay: weight decay has a key of its own; set training.weight_decay")
        if self.ema is not None and self.ema.evaluate and self.evaluation is None:
            raise _rule("ema.evaluate scores the averages at every validation; add [training.evaluation]")
        if self.schedule is not None and self.schedule.name == PLATEAU and self.evaluation is None:
            raise _rule(f"schedule {PLATEAU} follows the validation; add [training.evaluation] with every = 100")
        return self

    @property
    def recipe(self) -> TrainingRecipe:
        """What the executor does beside the optimizer's own rule."""
        return TrainingRecipe(
            groups=tuple(self._group(name, group) for name, group in sorted(self.groups.items())),
            optimizer_args=pairs(self.optimizer_args),
            weight_decay=self.weight_decay,
            no_weight_decay=self.no_weight_decay,
            clip_norm=self.clip_norm,
            evaluation=None if self.evaluation is None else self.evaluation.evaluation,
            schedule=None if self.schedule is None else self.schedule.schedule,
            ema=None if self.ema is None else EmaRule(decay=self.ema.decay, evaluate=self.ema.evaluate),
            tensorboard=self.tensorboard,
        )

    def _group(self, name: str, group: GroupSection) -> UpdateGroup:
        same = group.optimizer in (None, self.optimizer)
        optimizer = self.optimizer if group.optimizer is None else group.optimizer
        rate = self.resolved_learning_rate if same else OPTIMIZERS[optimizer].learning_rate
        usual = self.optimizer_args if same else {}
        return UpdateGroup(
            name=name,
            parameters=group.parameters,
            optimizer=optimizer,
            learning_rate=rate if group.learning_rate is None else group.learning_rate,
            optimizer_args=pairs(usual if group.optimizer_args is None else group.optimizer_args),
            weight_decay=self.weight_decay if group.weight_decay is None else group.weight_decay,
        )

    @property
    def optimizer_of_group(self) -> dict[str, tuple[tuple[str, ...], str]]:
        """By group its patterns and its optimizer: with others, another training begins."""
        return {group.name: (group.parameters, group.optimizer) for group in self.recipe.groups}

    @property
    def optimizers(self) -> tuple[str, ...]:
        """Every row of OPTIMIZERS that updates some parameter, the usual one first."""
        return tuple(dict.fromkeys((self.optimizer, *(group.optimizer for group in self.recipe.groups))))

    @property
    def keeps_master_weights(self) -> bool:
        return self.master_weights is not False

    @property
    def resolved_weight_decay(self) -> float:
        """Where none is given, that of torch's Adam, AdamW and SGD."""
        if self.weight_decay is not None:
            return self.weight_decay
        return 0.01 if self.optimizer.startswith("adamw") else 0.0

    @property
    def resolved_learning_rate(self) -> float:
        if self.learning_rate is not None:
            return self.learning_rate
        return OPTIMIZERS[self.optimizer].learning_rate


def check_widths(training: TrainingSection) -> None:
    """Raise ConfigError where other keys contradict the precision. Args: training: with the precision that it ends up with."""
    if training.master_weights is not None and training.precision != "bf16":
        raise ConfigError(
            f'training.master_weights = {str(training.master_weights).lower()} belongs to precision = "bf16" alone, and '
            f'training.precision = {training.precision!r}: drop master_weights, or set precision = "bf16"'
        )
    if training.dtype != "float32" and training.precision != "fp32":
        raise ConfigError(
            f"training.dtype = {training.dtype!r} and training.precision = {training.precision!r} contradict each other; drop "
            "one of them"
        )


def _named_as_rows(document: Any) -> Any:
    """torch's name of an optimizer as that of a row. One of REFUSED raises the reason."""
    asked = document.get("optimizer") if isinstance(document, Mapping) else None
    if isinstance(asked, str) and asked in REFUSED:
        raise _rule(f"optimizer = {asked!r}: torch's {asked} {REFUSED[asked]}")
    if not isinstance(document, Mapping) or document.get("optimizer") not in TORCH_NAMES:
        return document
    name = TORCH_NAMES[document["optimizer"]]
    arguments = document.get("optimizer_args")
    has_momentum = isinstance(arguments, Mapping) and bool(arguments.get("momentum"))
    with_momentum = f"{name}_momentum"
    return {**document, "optimizer": with_momentum if has_momentum and with_momentum in OPTIMIZERS else name}


def _rule(text: str) -> PydanticCustomError:
    return PydanticCustomError("described", "{rule}", {"rule": text})


# [plan.synchronisation] of a run file: a table, or its text form in one line.


class SynchronisationTable(ConfigSection):
    """plan.synchronisation: how and when replicas come together; left out, gradients are summed in every step."""

    kind: Name
    """all_reduce, average, gossip, merge or stale."""
    period_steps: Count | None = None
    """Local steps before each round of average, gossip and merge; left out: 1."""
    graph: Name | dict[Name, StrictInt | Number | StrictStr] | None = None
    """Of gossip: "ring", or a table { name = "lattice", neighbours = 4 }; Ada: { name = "ada", rounds = 50, epochs = 4 }."""
    weights: tuple[Number, ...] | tuple[tuple[Number, ...], ...] | None = None
    """Of average: one per replica, which sum to 1. Of gossip: a row per replica, in place of a graph."""
    outer_optimizer: Name | None = None
    """Of average: "sgd", "momentum" or "nesterov" takes the change of the mean as its gradient."""
    outer_learning_rate: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] | None = None
    outer_momentum: Annotated[float, Field(strict=True, ge=0, lt=1)] | None = None
    participation: Number | None = None
    """Of average: the fraction of replicas drawn for every round."""
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**63)] | None = None
    """Of the draws of participation."""
    merge: Name | None = None
    """Of merge: "half" (left out), "running" or "staleness"."""
    merge_rate: Annotated[float, Field(strict=True, gt=0, le=1)] | None = None
    """Of "staleness": how much of weights that are not late counts; left out: 1."""
    merge_exponent: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] | None = None
    """Of "staleness": how fast late weights lose; left out: 0.5."""
    delays: tuple[Annotated[int, Field(strict=True, ge=0)], ...] | None = None
    """Of stale: steps by which each stage's gradients are late; left out: 2 (K - 1), ..., 2, 0."""

    def value(self) -> Synchronisation:
        """The same as plans take it. Raises PlanError for what contradicts itself."""
        table: dict[str, Any] = self.model_dump(exclude_none=True)
        if "graph" in table:
            table["graph"] = mixing_text(table["graph"])
        rows = table.get("weights", ())
        if rows and not isinstance(rows[0], tuple | list):
            table["weights"] = (tuple(rows),)
        return Synchronisation.from_dict(table)


def as_table(value: Any) -> Any:
    """The table of a text such as "average/8"; anything else as it is, for whoever checks it next.

    Args:
        value: of plan.synchronisation.
    """
    if not isinstance(value, str):
        return value
    try:
        return parse_synchronisation(value).to_dict()
    except PlanError as error:
        raise PydanticCustomError("described", "{rule}", {"rule": str(error)}) from error


def checked(value: SynchronisationTable | None) -> SynchronisationTable | None:
    """The table itself. Raises what pydantic reports for a key that contradicts another.

    Args:
        value: of plan.synchronisation, with keys of the right types.
    """
    if value is not None:
        try:
            value.value()
        except PlanError as error:
            raise PydanticCustomError("described", "{rule}", {"rule": str(error)}) from error
    return value
