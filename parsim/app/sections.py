"""[training] of a run file: data, optimizer and schedule, whatever the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    StrictBool,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from parsim.data import DATASETS
from parsim.data.shards import parse_shards, shards_text
from parsim.errors import ConfigError, ParsimError, ProfileError, near_matches
from parsim.execute.job import PLATEAU, TrainingRecipe, UpdateGroup
from parsim.hardware.parts import CardCount, Machines, instance_named, instance_names, load_gpu
from parsim.hardware.records import ConfigSection, Count, Name
from parsim.model.catalogue.frameworks import FRAMEWORKS, ConvolutionSoftware, Framework, Guess, framework_of
from parsim.model.catalogue.names import ATTENTION, FUSED_PERMUTATION, KERNEL
from parsim.model.component import FULL_BYTES
from parsim.model.divided import Dispatcher, ExpertRouting
from parsim.model.formats import FORMATS, Numerics, check_planned, number_format
from parsim.model.optimizers import OPTIMIZERS
from parsim.model.tuning import TuningKey
from parsim.registry import RowOf, as_key_error

MOST_SAMPLES = 10**9
"""In a batch."""
MOST_STEP_TOKENS = 2**30
"""In a batch of a language model. The largest published steps take 6e7 (DeepSeek-V3); more means a batch counted in tokens."""
MOST_TRAINED = 1e18
"""Tokens or samples of a whole training; the largest so far took less than 1e14."""
GroupName = Annotated[str, Field(strict=True, pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$")]
Dtype = Literal["float32", "float64"]

_OF_TORCH = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "RAdam", "Adamax", "Adadelta", "NAdam", "ASGD")
TORCH_NAMES = {name: name.lower() for name in _OF_TORCH}
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


def _named_as_rows(document: Any) -> Any:
    """torch's name of an optimizer as that of a row. One of REFUSED raises the reason."""
    optimizer = document.get("optimizer") if isinstance(document, Mapping) else None
    if isinstance(optimizer, str) and optimizer in REFUSED:
        raise _rule(f"optimizer = {optimizer!r}: torch's {optimizer} {REFUSED[optimizer]}")
    if not isinstance(optimizer, str) or optimizer not in TORCH_NAMES:
        return document
    name, arguments = TORCH_NAMES[optimizer], document.get("optimizer_args")
    has_momentum = isinstance(arguments, Mapping) and bool(arguments.get("momentum"))
    with_momentum = f"{name}_momentum"
    return {**document, "optimizer": with_momentum if has_momentum and with_momentum in OPTIMIZERS else name}


def _rule(text: str) -> PydanticCustomError:
    return PydanticCustomError("described", "{rule}", {"rule": text})


def _checked_shards(text: str) -> str:
    try:
        parse_shards(text)
    except ParsimError as error:
        raise _rule(str(error)) from error
    return text


class TrainingSection(TrainingRecipe):
    """[training]: how it is trained, whatever the plan. Groups may leave out what `recipe` fills in."""

    global_batch: Annotated[int, Field(strict=True, ge=1, le=MOST_SAMPLES)] = 1
    """Samples per step over all replicas; left out: about a million tokens of a transformer, 32 samples per device of any other
    model."""
    precision: Annotated[Name, RowOf(FORMATS, check_planned)] = "fp32"
    """A row of `parsim.model.formats`, or "package.module:ROW". Priced only: fp16, fp8, nvfp4."""
    master_weights: StrictBool | None = None
    """With precision = "bf16": whether the optimizer updates copies of the weights in fp32; left out: it does."""
    optimizer: Annotated[Name, RowOf(OPTIMIZERS)] = "sgd_momentum"
    """A row of `parsim.model.optimizers`, or "package.module:ROW"."""
    state_dtype: Literal["fp32", "bf16", "fp16", "fp8", "int8"] | None = None
    """Of the optimizer's state; left out: as wide as the weights that it updates. For memory, and priced as if left out."""
    gradient_dtype: Literal["fp32", "bf16"] | None = None
    """In which gradients of weights in half precision are added up; left out: as the framework of [software] does, or in the
    width of the weights. For memory."""
    weight_dtype: Literal["fp8"] | None = None
    """With precision = "fp8": products keep their weights in 8 bits alone; left out: in 16 bits. For memory."""
    tune: TuningKey | None = None
    """What is trained of a model that was trained before: a table, or its text ("lora:r=16"); left out: every parameter."""
    groups: dict[
        GroupName,
        Annotated[
            UpdateGroup,
            BeforeValidator(_named_as_rows),
            WrapValidator(as_key_error),
            PlainSerializer(UpdateGroup.to_table),
        ],
    ] = {}
    learning_rate: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] | None = None
    """Left out: what the optimizer's row says."""
    dataset: Annotated[Name, RowOf(DATASETS)] = "digits"
    """A row of `parsim.data.DATASETS`, or "package.module:factory" of a dataset of one's own (docs/training.md)."""
    shards: Annotated[str, BeforeValidator(shards_text), AfterValidator(_checked_shards)] | None = None
    """Which samples each replica trains on, a text of `parsim.data.shards` or a list of sizes; left out: batches are drawn from
    all samples together."""
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
    """Type of the weights of a real run."""
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
        if "weight_decay" in dict(self.optimizer_args):
            raise _rule("optimizer_args.weight_decay: weight decay has a key of its own; set training.weight_decay")
        if self.ema is not None and self.ema.evaluate and self.evaluation is None:
            raise _rule("ema.evaluate scores the averages at every validation; add [training.evaluation]")
        if self.schedule is not None and self.schedule.name == PLATEAU and self.evaluation is None:
            raise _rule(f"schedule {PLATEAU} follows the validation; add [training.evaluation] with every = 100")
        return self

    @property
    def names_batch(self) -> bool:
        """Whether a batch is given; the default counts for nothing until `parsim.app.question.with_batch` has filled it in."""
        return "global_batch" in self.model_fields_set

    @property
    def recipe(self) -> TrainingRecipe:
        """What the executor does beside the optimizer's own rule: these keys, with all that groups leave out filled in."""
        keys = {name: getattr(self, name) for name in TrainingRecipe.model_fields}
        groups = {name: self._group(name, group) for name, group in sorted(self.groups.items())}
        return TrainingRecipe.model_construct(**{**keys, "groups": groups})

    def _group(self, name: str, group: UpdateGroup) -> UpdateGroup:
        same = group.optimizer in ("", self.optimizer)
        optimizer = group.optimizer or self.optimizer
        rate = self.resolved_learning_rate if same else OPTIMIZERS[optimizer].learning_rate
        usual = self.optimizer_args if same else ()
        return replace(
            group,
            name=name,
            optimizer=optimizer,
            learning_rate=group.learning_rate or rate,
            optimizer_args=usual if group.optimizer_args is None else group.optimizer_args,
            weight_decay=self.weight_decay if group.weight_decay is None else group.weight_decay,
        )

    @property
    def optimizer_of_group(self) -> dict[str, tuple[tuple[str, ...], str]]:
        """By group its patterns and its optimizer: with others, another training begins."""
        return {name: (group.parameters, group.optimizer) for name, group in self.recipe.groups.items()}

    @property
    def optimizers(self) -> tuple[str, ...]:
        """Every row of OPTIMIZERS that updates some parameter, the usual one first."""
        return tuple(dict.fromkeys((self.optimizer, *(group.optimizer for group in self.recipe.update_groups))))

    @property
    def keeps_master_weights(self) -> bool:
        return self.master_weights is not False

    @property
    def numerics(self) -> Numerics:
        """What the training computes in, and what it keeps of every weight."""
        return Numerics(
            precision=self.precision,
            optimizer=self.optimizer,
            master_weights=self.keeps_master_weights,
            ema=self.ema is not None,
            state_dtype=self.state_dtype or "",
            gradient_dtype=self.gradient_dtype or "",
            weight_dtype=self.weight_dtype or "",
        )

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
    """Raise ConfigError where other keys contradict the precision."""
    if training.master_weights is not None and training.precision != "bf16":
        raise ConfigError(
            f'training.master_weights = {str(training.master_weights).lower()} belongs to precision = "bf16" alone, and '
            f'training.precision = {training.precision!r}: drop master_weights, or set precision = "bf16"'
        )
    if training.gradient_dtype is not None and number_format(training.precision).weight_bytes >= FULL_BYTES:
        raise ConfigError(
            f"training.gradient_dtype = {training.gradient_dtype!r} belongs to weights in half precision (bf16, fp16, fp8, "
            f"nvfp4), and training.precision = {training.precision!r} has gradients in fp32 already; drop gradient_dtype"
        )
    if training.weight_dtype is not None and training.precision != "fp8":
        raise ConfigError(
            f'training.weight_dtype = "fp8" belongs to precision = "fp8", and training.precision = {training.precision!r}: '
            'drop weight_dtype, or set precision = "fp8"'
        )
    if training.dtype != "float32" and training.precision != "fp32":
        raise ConfigError(
            f"training.dtype = {training.dtype!r} and training.precision = {training.precision!r} contradict each other; drop "
            "one of them"
        )


class SoftwareSection(ConfigSection):
    """[software]: who wrote the training loop. Keys that are left out are as the framework has them."""

    framework: Annotated[Name, RowOf(FRAMEWORKS)] | None = None
    """A row of `parsim.model.catalogue.frameworks`, or "package.module:ROW"; left out: transformers by name on shipped GPUs
    are priced as the most likely one runs them, and an answer says which."""
    year: Annotated[int, Field(strict=True, ge=2018, le=2100)] | None = None
    """Of its version; left out: the current one."""
    compiled: StrictBool | None = None
    """Whether torch.compile fuses what lies between products; left out: with products in 8 bits alone, which need it."""
    attention: Literal["flash", "unfused"] | None = None
    """One kernel for attention, or one for each product and the softmax; left out: as the framework has it."""
    dispatcher: Dispatcher | None = None
    """What takes tokens to experts: "all_to_all" once for each visit, "deepep" and "hybridep" once per rank and node."""
    expert_overlap: StrictBool | None = None
    """Whether exchanges of experts run beside the computation of another microbatch."""
    delay_weight_gradients: StrictBool | None = None
    """With expert_overlap: gradients of the experts' weights fill what the exchanges of the backward leave."""
    fused_permutation: StrictBool | None = None
    """Whether tokens are sorted by expert, and added up, in one kernel each."""
    channels_last: StrictBool | None = None
    """Whether arrays of a convolutional network lie as (samples, height, width, channels), so that matrix units read them
    without a conversion: torch.channels_last. Left out: as the framework has it, and PyTorch does not."""

    cuda_graphs: StrictBool | None = None
    """Whether layers are launched as CUDA graphs: the host then takes nothing for each kernel."""

    @model_validator(mode="after")
    def _agree(self) -> SoftwareSection:
        given = [key for key in ("year", "compiled") if getattr(self, key) is not None]
        if self.framework is None and given:
            raise _rule(f"{given[0]} says which version of a framework runs, and no framework is named; set software.framework")
        if self.delay_weight_gradients and not self.routing.overlapped:
            raise _rule(
                "delay_weight_gradients = true fills what exchanges leave that run beside another microbatch, and "
                "expert_overlap is false; set software.expert_overlap = true, or drop delay_weight_gradients"
            )
        return self

    @property
    def routing(self) -> ExpertRouting:
        """How tokens reach experts; "all_to_all" and nothing overlapped where neither the table nor a framework says more."""
        row = self.row
        usual = ExpertRouting() if row is None else row.routing
        overlapped = usual.overlapped if self.expert_overlap is None else self.expert_overlap
        delayed = usual.delayed and overlapped if self.delay_weight_gradients is None else self.delay_weight_gradients
        return replace(usual, dispatcher=self.dispatcher or usual.dispatcher, overlapped=overlapped, delayed=delayed)

    def launches_on(self, gpu: str, *, gathers: bool) -> float:
        """What the host takes for a kernel, over what it takes in eager torch; `gathers`: parameters may be gathered."""
        if self.cuda_graphs:
            return 0.0
        row = self.row if self.cuda_graphs is None or self.row is None else replace(self.row, graphs=())
        return 1.0 if row is None else row.launches_on(gpu, gathers=gathers)

    @property
    def of_experts(self) -> tuple[str, ...]:
        """The keys that are given and that mean nothing without experts."""
        keys = ("dispatcher", "expert_overlap", "delay_weight_gradients", "fused_permutation")
        return tuple(key for key in keys if getattr(self, key) is not None)

    @property
    def row(self) -> Framework | None:
        """The framework in the version that runs; None: not known."""
        return None if self.framework is None else framework_of(self.framework, self.year)

    def guessed(self, guess: Guess) -> SoftwareSection:
        """The table with the most likely framework of a guess in place of none. What it gives itself counts more."""
        row = guess.frameworks[0]
        return self.model_copy(update={"framework": row.name, "year": row.until or None})

    @property
    def kernels(self) -> dict[str, Any]:
        """Arguments of a model by name that say what runs besides its products.

        Leaves out: that a second forward stops early (`Software.early_stop`), with which "selective" is another recomputation.
        """
        row = self.row
        args: dict[str, Any] = {} if row is None else {KERNEL: row.kernels_of(self.compiled is not False)}
        if self.fused_permutation is not None:
            args[FUSED_PERMUTATION] = self.fused_permutation
        return args | ({} if self.attention is None else {ATTENTION: self.attention})

    @property
    def convolution(self) -> ConvolutionSoftware | None:
        """What it does with a convolutional network; None: nothing of that is stated."""
        row = self.row
        if self.channels_last is None and (row is None or row.convolution is None):
            return None
        found = ConvolutionSoftware() if row is None or row.convolution is None else row.convolution
        if self.channels_last is not None:
            found = replace(found, channels_last=self.channels_last, in_full=self.channels_last)
        return replace(found, fused_norms=True) if self.compiled else found


# [cluster] of a run file: a profile or GPUs by name, how many nodes, and what joins them.


HostAmount = Annotated[float, Field(gt=0, le=1e16, allow_inf_nan=False)]

MOST_NODES = 2**16
"""Of a cluster: four times the largest that is known to train one model; a million nodes are a slip of the pen."""


MOST_DEVICES = 2**20
"""Of a node."""
DeviceCount = Annotated[int, Field(strict=True, ge=1, le=MOST_DEVICES)]


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
    instance: Name | None = None
    """Instead of both: an instance type of a cloud by name ("p5.48xlarge"), which sets GPUs, links, network and price; `nodes`
    counts the instances."""
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
    devices: DeviceCount | tuple[Annotated[int, Field(strict=True, ge=0)], ...] | None = None
    """The first N devices of every node, or a list of device numbers, which count through the nodes; left out: all."""
    nodes: Annotated[int, Field(strict=True, ge=1, le=MOST_NODES)] = 1
    """So many machines of the profile, joined by `network`."""
    network: Name | None = None
    """A shipped network by name, or the path of one, without meaning for one node; left out: the usual one of `gpu`, if any."""
    host_link_bytes_per_s: HostAmount | None = None
    """Between one device and its host, in one direction, for plans that offload; left out: by the links of the machine."""
    host_memory_bytes: HostAmount | None = None
    """Memory of a node's host, which offloaded state and activations must fit; left out: not checked."""
    host_memory_bandwidth_bytes_per_s: HostAmount | None = None
    """Rate of a node's host, all sockets together: what an update on the host is bound by."""
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
    def _parts_of_instance(cls, document: Any) -> Any:
        name = document.get("instance") if isinstance(document, dict) else None
        if not isinstance(name, str):
            return document
        try:
            found = instance_named(name)
        except ProfileError as error:
            raise _rule(str(error)) from error
        if found is None:
            near = near_matches(name, instance_names())
            raise _rule(f"no such instance type{near if 'did you mean' in near else ''}; `parsim profile prices` lists them")
        nodes = document.get("nodes", 1)
        table = found.table(nodes if isinstance(nodes, int) else 1)
        for key in ("profile", "gpu", "gpus_per_node", "link", "group"):
            if document.get(key) is not None and document[key] != table.get(key):
                raise _rule(
                    f"{found.name} sets cluster.{key} = {table.get(key)!r}, and {document[key]!r} stands beside it; drop one"
                )
        if nodes != 1 and found.sizes.no_network and document.get("network") is None:
            raise _rule(
                f"{found.name} has {found.sizes.no_network}, which is no shipped network; add cluster.network (--network)"
            )
        if document.get("network") is not None:  # cards of another network are not those of the instance
            table.pop("cards_per_node", None)
        return {**table, **{key: value for key, value in document.items() if value is not None}, "instance": found.name}

    @model_validator(mode="before")
    @classmethod
    def _nodes_of_groups(cls, document: Any) -> Any:
        groups = document.get("group") if isinstance(document, dict) else None
        if not isinstance(groups, (list, tuple)) or not groups:
            return document
        counts = [group.get("nodes", 1) if isinstance(group, dict) else getattr(group, "nodes", 1) for group in groups]
        if not all(isinstance(count, int) and 1 <= count <= MOST_NODES for count in counts):
            return document
        if document.get("nodes", sum(counts)) != sum(counts):
            raise _rule(f"the groups have {sum(counts)} nodes, and nodes = {document['nodes']}; drop nodes")
        return {**document, "nodes": sum(counts)}

    @property
    def machine(self) -> str:
        """The profile, or the node of `gpu` as a shorthand: what `parsim.hardware.compose.load_profile` takes. Of groups their
        names."""
        if self.profile is not None:
            return self.profile
        if self.group is not None:
            return " + ".join(f"{group.nodes} nodes of {group.gpu}" for group in self.group)

        gpu = str(self.gpu)
        return Machines(gpu, self.gpus_per_node or load_gpu(gpu).gpus_per_node, self.nodes, self.link).node

    @property
    def between(self) -> str | None:
        """The network between nodes: the one that is named, or the usual one of the GPU; None: one node, or no usual one."""
        if self.network is not None or self.gpu is None or self.nodes == 1:
            return self.network
        return load_gpu(str(self.gpu)).network

    @property
    def in_words(self) -> str:
        """`4 x 8xh100-sxm`: the machine, and how many of it."""
        machine = f"{self.instance} ({self.machine})" if self.instance else self.machine
        return machine if self.nodes == 1 or self.group is not None else f"{self.nodes} x {machine}"


OPERATION = frozenset({"usd_per_hour", "busy_power_w", "device_mtbf_hours", "checkpoint_s", "restart_s"})
"""Keys that change no plan, and may stand beside a cluster that was given as a value."""


def check_machine(cluster: ClusterSection) -> None:
    """Exactly one of profile, gpu and groups; a network between nodes; and the keys that belong to parts."""
    if cluster.nodes > 1 and cluster.between is None:
        raise ConfigError(
            f"cluster.nodes = {cluster.nodes} needs cluster.network between the nodes, which {cluster.machine} does not tell; "
            'for example network = "infiniband-100g" (`parsim profile list` has all)'
        )
    if isinstance(cluster.devices, tuple) and (not cluster.devices or len(set(cluster.devices)) != len(cluster.devices)):
        raise ConfigError(f"cluster.devices = {list(cluster.devices)}: list every device once, and at least one")
    if cluster.group is not None:
        beside = [key for key in ("profile", "gpu", "gpus_per_node") if getattr(cluster, key) is not None]
        if beside or not cluster.group:
            what = f"has cluster.{beside[0]} beside it; drop one of them" if beside else "is empty; name a GPU in each group"
            raise ConfigError(f"[[cluster.group]] {what}")
        return
    if (cluster.profile is None) == (cluster.gpu is None):
        both = "neither is given" if cluster.profile is None else f"profile = {cluster.profile!r} and gpu = {cluster.gpu!r}"
        raise ConfigError(
            f'[cluster] needs exactly one of profile and gpu, and {both}: profile = "dgx1-v100-32gb" names a machine, '
            'gpu = "h100-sxm" makes one of parts'
        )
    for key in ("gpus_per_node", "link"):
        if cluster.gpu is None and (value := getattr(cluster, key)) is not None:
            raise ConfigError(f"cluster.{key} = {value!r} belongs to cluster.gpu, and a profile says it itself; drop {key}")
    if cluster.cards_per_node is not None and cluster.between is None:
        raise ConfigError(f"cluster.cards_per_node = {cluster.cards_per_node} needs cluster.network; add it, or drop the cards")
