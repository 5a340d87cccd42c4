"""A training in parsim's words, between the config files of frameworks: read from a file, or made of a plan to be written.

A reader takes a file of a framework as it is, and says what became of every key (`configs.read_recipe`). `recipe_of_plan` is
the other way: the mesh as frameworks count it, with what no framework's file can say. What is written is read back, and
compared.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from parsim.errors import ConfigError, MissingDependencyError, first_few
from parsim.files import read_text
from parsim.formats.source import SourceFile
from parsim.model.catalogue.frameworks import FRAMEWORKS
from parsim.model.catalogue.names import (
    CASTS,
    DOCUMENT,
    OWN,
    is_transformer,
    model_within,
    named,
    normalised,
    sequence_of,
    shape_of,
)
from parsim.model.catalogue.sublayers import Shape
from parsim.model.formats import number_format
from parsim.model.model import LAYER
from parsim.plans.plan import Plan
from parsim.plans.stages import counted_out
from parsim.units import nearest_divisors, printable

Choice = TypeVar("Choice")
LARGEST_BYTES = 2**20
"""Size of a file that people write by hand, at most."""
SCRIPTS, YAML = (".sh", ".bash", ".slurm", ".sbatch"), (".yaml", ".yml")
PROGRAMS = (".py", ".ipynb")
"""How names of files end that no run file and no model has."""
LAYERS = "h.*"
AXES = ("tp", "pp", "cp", "ep")
GENERIC = "transformer"
"""The named model whose sizes a file gives one by one."""


@dataclass(kw_only=True)
class Recipe:
    """A file, read.

    Attributes:
        framework: whose file it is. model: a name of the table, "" where the file has none; args: its arguments.
        input_shape: of a sample of a model that takes images, where it is not the usual one.
        training, software, plan_keys: keys of [training] and [software], and those of [plan] that the others do not give.
        tp, pp, cp, ep: of the mesh. dp: replicas; 0: as many as the devices make.
        replicate: how often divided states are kept (HSDP). micro_batch: samples of a replica at once; 0: all of them.
        local_batch: samples of a replica per step where the file gives no global batch; 0: one microbatch.
        rounds_of: microbatches that a rank runs of one chunk in a row, where a rest of fewer than pp is refused; 0: none is.
        zero: stage. recompute: "none", "full", "alternate" (each `every`th layer), "first" (`every` layers of each stage) or
            "selective" (by operator).
        chunks: stages per rank. order: of the pipeline; "": 1f1b, or interleaved with several stages per rank. stage_layers:
            layers of each stage; none: as the framework counts them out.
        optimizer_offload: the optimizer's state lies in the host's memory. offloaded_layers: so do activations of these first.
        processes: that the file starts; 0: it does not say.
        missing: keys of a run file that the file does not say and --set may, with why.
        taken: keys that entered, with their values. left_out: keys that change time or memory and that parsim does not model,
        with what it does instead. ignored: keys that change neither. unknown: keys that parsim does not know.
    """

    framework: str
    model: str = GENERIC
    args: dict[str, Any] = field(default_factory=dict)
    input_shape: tuple[int, ...] = ()
    training: dict[str, Any] = field(default_factory=dict)
    software: dict[str, Any] = field(default_factory=dict)
    plan_keys: dict[str, Any] = field(default_factory=dict)
    tp: int = 1
    pp: int = 1
    dp: int = 0
    cp: int = 1
    ep: int = 1
    replicate: int = 1
    micro_batch: int = 1
    local_batch: int = 0
    zero: int = 0
    recompute: str = "none"
    every: int = 2
    chunks: int = 1
    rounds_of: int = 0
    order: str = ""
    stage_layers: tuple[int, ...] = ()
    processes: int = 0
    optimizer_offload: bool = False
    offloaded_layers: int = 0
    missing: dict[str, str] = field(default_factory=dict)
    taken: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def settings(self, devices: int) -> dict[str, object]:
        """Keys of a run file, for so many devices.

        Raises: ConfigError: the devices do not divide by the mesh, or the batch not by replicas and microbatches.
        """
        for key in ("tp", "pp", "cp", "ep", "replicate", "chunks"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{self.framework}: {key} = {getattr(self, key)} of the file must be at least 1")
        shard = self.tp * self.pp * self.cp
        if devices % shard:
            raise ConfigError(
                f"{self.framework}: tp {self.tp} x pp {self.pp} x cp {self.cp} = {shard} must divide the devices ({devices}); "
                f"ask for {f'{devices // shard * shard} or ' if devices > shard else ''}{(devices // shard + 1) * shard}"
            )
        dp = devices // shard
        if self.dp and self.dp != dp:
            raise ConfigError(
                f"{self.framework}: the file asks for {self.dp} replicas x {shard} = {self.dp * shard} devices, and the "
                f"cluster has {devices}; ask for {self.dp * shard}"
            )
        if self.processes not in (0, devices):
            by_device = "" if "global_batch" in self.training else ", and the batch, which the file gives per device,"
            self.left_out["processes"] = (
                f"the file starts {self.processes}, and the cluster has {devices} devices: replicas{by_device} follow it"
            )
        mesh = {"pp": self.pp, "dp": dp, "tp": self.tp, "cp": self.cp, "ep": self.ep}
        microbatches = self._microbatches(dp)
        settings: dict[str, object] = {f"training.{key}": value for key, value in self.training.items()}
        settings |= {f"software.{key}": value for key, value in self._software().items()}
        settings |= {f"plan.{key}": value for key, value in self.plan_keys.items()}
        casts = {CASTS: True} if self._is_low() else {}
        settings |= {"model.args": casts | self.args, "plan.mesh": mesh, **self._states(dp)}
        settings["plan.microbatches"] = microbatches
        if self.input_shape:
            settings["model.input_shape"] = list(self.input_shape)
        uncut = self.tp == 1 and self.pp == 1
        settings["plan.recompute"] = self._recomputed(by_layer=uncut)
        if self.optimizer_offload:
            settings["plan.optimizer_offload"] = True
        if self.offloaded_layers:
            each = "" if uncut else ".*"
            settings["plan.activation_offload"] = [f"h.{layer}{each}" for layer in range(self.offloaded_layers)]
        if self.pp > 1:
            settings["plan.pipeline_order"] = self.order or ("interleaved" if self.chunks > 1 else "1f1b")
            settings["plan.chunks"] = self.chunks
            if (cut := self._cut()) and cut != counted_out(self._rule(), sum(cut), len(cut)):
                settings["plan.stage_layers"] = cut
        settings["plan.strategy"] = "single" if devices == 1 else "dp" if uncut else "hp" if dp > 1 else "mp"
        return settings

    def _is_low(self) -> bool:
        """Whether inputs of products are cast to a lower format."""
        precision = self.training.get("precision")
        return is_transformer(self.model) and precision is not None and bool(number_format(precision).beside)

    def _software(self) -> dict[str, Any]:
        """Keys of [software]; none where the framework is known without an axis that the file has."""
        row = dict(FRAMEWORKS.items()).get(self.software.get("framework", ""))
        axes = [] if row is None else [axis for axis in AXES if getattr(self, axis) > 1 and axis not in row.axes]
        if not axes:
            return self.software
        self.left_out["software.framework"] = f"effects of {self.framework} with {', '.join(axes)} above 1 are not known"
        return {}

    def _layers(self) -> int:
        """Of the model; 0: it is not known."""
        row = named(self.model)
        return int(self.args.get("layers") or (row.shape.layers if row is not None and row.shape is not None else 0))

    def _cut(self) -> list[int]:
        """Layers of each stage: as many in each where a framework without a rule of its own does not say, and they divide."""
        if self.stage_layers:
            return list(self.stage_layers)
        each, rest = divmod(self._layers(), self.pp * self.chunks)
        return [] if rest or not each or self._rule() else [each] * (self.pp * self.chunks)

    def _rule(self) -> str:
        name = str(self.software.get("framework", ""))
        return FRAMEWORKS[name].cut if name in FRAMEWORKS else ""

    def _states(self, dp: int) -> dict[str, object]:
        if not self.zero or (dp == 1 and self.replicate == 1):
            return {"plan.zero_stage": self.zero}
        if dp % self.replicate:
            raise ConfigError(
                f"{self.framework}: the file keeps states {self.replicate} times, which must divide the {dp} replicas; the "
                f"nearest that do: {nearest_divisors(dp, self.replicate)}"
            )
        size = dp // self.replicate
        return {"plan.zero_stage": self.zero, "plan.dp_shard": size} if size * self.cp > 1 else {"plan.zero_stage": 0}

    def _recomputed(self, *, by_layer: bool) -> str | list[str]:
        """Patterns of components; `by_layer`: a layer is one component."""
        if self.recompute in ("alternate", "first"):
            layers = self._layers()
            stage = -(-layers // (self.pp * self.chunks))
            first = [layer for layer in range(layers) if layer % stage < self.every]
            chosen = first if self.recompute == "first" else range(self.every - 1, layers, self.every)
            return [f"h.{layer}" if by_layer else f"h.{layer}.*" for layer in chosen]
        patterns: dict[str, str | list[str]] = {"none": "none", "full": [LAYERS], "selective": "selective"}
        return patterns[self.recompute]

    def _microbatches(self, dp: int) -> int:
        batch = self.training.setdefault("global_batch", dp * (self.local_batch or self.micro_batch))
        if not self.micro_batch and batch and batch % dp == 0:
            return 1
        parts = dp * (self.micro_batch or 1)
        if batch % parts:
            raise ConfigError(
                f"{self.framework}: the global batch ({batch}) must be divisible by {dp} replicas x micro-batch "
                f"{self.micro_batch} = {parts}; the nearest that is: {max(1, round(batch / parts)) * parts}"
            )
        microbatches, size = int(batch) // parts, self.rounds_of
        if size and (microbatches < size or 0 < microbatches % size < self.pp):
            raise ConfigError(
                f"{self.framework} runs an interleaved pipeline in rounds of {size} microbatches, and a rest of at least pp = "
                f"{self.pp}: {microbatches} per replica are refused at the start; the nearest that are taken: "
                f"{max(1, microbatches // size) * size} or {(microbatches // size + 1) * size}"
            )
        return microbatches

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, under `config_file`."""
        return {
            "framework": self.framework,
            "taken": self.taken,
            "left_out": self.left_out,
            "ignored": sorted(self.ignored),
            "unknown": by_weight(self.unknown),
        }

    def lines(self) -> list[str]:
        """What was made of the file, for people."""
        lines = [
            f"read as {self.framework}: {len(self.taken)} keys taken, {len(self.ignored)} that change neither time nor memory"
        ]
        lines += [f"  {key}: matters and is left out: {why}" for key, why in self.left_out.items()]
        if self.unknown:
            lines.append(f"  unknown, may matter: {', '.join(by_weight(self.unknown))}")
        return lines

    def name_model(self, key: str, name: str) -> None:
        """Take the model by the name that a file gives it; `missing` notes a name that no shipped shape has."""
        if not name:
            self.model, self.missing["model.name"] = "", f"no {key} is in the file"
            return
        self.taken[key] = name
        if is_transformer(name):
            self.model = normalised(name)
        elif inner := model_within(name):
            self.model, self.left_out[key] = inner, f"{printable(name)} is taken as {inner}, whose name it holds"
        else:
            self.model = ""
            self.missing["model.name"] = f"{key} = {printable(name)!r} is no model whose sizes ship (see `parsim models`)"

    def assume_length(self, key: str) -> None:
        """Take USUAL_LENGTH tokens, or as many as the model has at most, where no key of the file says how many."""
        most = sequence_of(self.model, {}) if self.model else USUAL_LENGTH
        self.args["seq"] = min(USUAL_LENGTH, most)
        self.left_out[key] = (
            f"it is not set, samples are as long as the data: {self.args['seq']:,} tokens are taken (--set model.args.seq=N)"
        )


USUAL_LENGTH = 2048
"""Tokens of a sample that most files of fine-tuning set."""
HEAVY = re.compile(
    r"parallel|shard|zero|fsdp|tp_|pp_|degree|world|nodes|batch|accumulat|seq|length|layers|hidden|heads|expert|vocab|"
    r"checkpointing|recompute|remat|offload|precision|dtype|fp8|fp4|quant|lora|adapter|optim|compile|packing"
)
"""Words in keys that change time or memory more often than not."""


def by_weight(keys: Iterable[str]) -> list[str]:
    """Keys that parsim does not know, those first whose words change time or memory more often than not."""
    return sorted(keys, key=lambda key: (HEAVY.search(key.lower()) is None, key))


DEGREE = re.compile(
    r"((tensor|pipeline|context|expert|sequence|model|data|fsdp|ulysses|ring)[a-z]*_?(model_)?parallel[a-z]*(_(size|degree|dim))?"
    r"|(^|\.)parallelism\.[a-z_]+|(^|[._])(tp|pp|cp|ep|etp|sp)(_(size|degree))?)$"
)
"""How a key ends that counts ranks of an axis of the mesh."""


class FileKeys:
    """The values of a file by key, with dots between tables; those that were read are noted.

    Attributes: prefix: of keys in what is said of them.
    """

    prefix = ""

    def __init__(self, framework: str, document: Mapping[str, Any]) -> None:
        self.framework = framework
        self.values = flat_table(document)
        self.read: dict[str, Any] = {}

    def text(self, *keys: str, default: str = "") -> str:
        """The first of these keys that is there."""
        for key in keys:
            if key in self.values:
                self.read[key] = self.values[key]
                return str(self.values[key])
        return default

    def number(self, *keys: str, default: int | None = None, least: int = 0) -> int:
        """A whole number, from `least` on. Raises ConfigError: another value, or none and no default."""
        if self.text(*keys):
            key = next(key for key in keys if key in self.values)
            return whole_number(self.framework, f"{self.prefix}{key}", self.values[key], least)
        if default is None:
            raise ConfigError(f"{self.framework}: {keys[0]} is missing; add it")
        return default

    def choice(self, rows: Mapping[str, Choice], *keys: str, default: str) -> Choice:
        """The row that the first of these keys names. Raises ConfigError for a name of none."""
        text = self.text(*keys, default=default)
        if text not in rows and (text := text.lower()) not in rows:
            raise ConfigError(f"{self.framework}: {keys[0].rpartition('.')[2]} = {text!r} must be one of {', '.join(rows)}")
        return rows[text]

    def degrees(self, recipe: Recipe, **keys: str | Sequence[str]) -> None:
        """Set fields of the recipe (tp, pp, cp, ep, replicate) by the keys of each; one without a key keeps what it has."""
        for name, of_field in keys.items():
            of_field = (of_field,) if isinstance(of_field, str) else of_field
            setattr(recipe, name, self.number(*of_field, default=getattr(recipe, name)))

    def flag(self, *keys: str, default: bool = False) -> bool:
        return self.text(*keys, default=str(default)).lower() in ("true", "1", "yes", "on")

    def words(self, *keys: str) -> list[str] | None:
        """A list, or a text with commas or spaces between; None: no such key."""
        text = self.text(*keys)
        return re.sub(r"[\[\]'\",]", " ", text).split() or None

    def rate(self, *keys: str) -> float | None:
        """A number; None: no such key. Raises ConfigError for another value."""
        text = self.text(*keys)
        try:
            return float(text) if text else None
        except ValueError as error:
            raise ConfigError(f"{self.framework}: {keys[0]} = {text!r} must be a number") from error

    def divides(self, key: str, value: Any) -> bool:
        """Whether a key that is not read counts ranks of an axis, more than one."""
        count = str(value).lstrip("0")
        return bool(DEGREE.search(key.lower().replace("-", "_"))) and count.isdecimal() and count != "1"

    def sort(self, recipe: Recipe, *, left_out: Mapping[str, str], ignored: re.Pattern[str]) -> None:
        """Say in the recipe what became of every key.

        Args: left_out: keys that matter and are not modelled, with what is done instead. ignored: matches those that change
            neither time nor memory.
        Raises: ConfigError: a degree of parallelism above 1 that nobody read.
        """
        recipe.taken |= self.read
        for key, value in self.values.items():
            name = f"{self.prefix}{key}"
            if key in recipe.taken:
                continue
            if key in left_out and value not in (False, "", 0, "none", "None"):
                recipe.left_out[name] = left_out[key]
            elif key in left_out or ignored.match(key):
                recipe.ignored.append(name)
            elif self.divides(key, value):
                raise ConfigError(
                    f"{self.framework}: {name} = {value!r} is a degree of parallelism that parsim does not know; set it to 1"
                )
            else:
                recipe.unknown.append(name)


def flat_table(document: Mapping[str, Any]) -> dict[str, Any]:
    """Values by their keys with dots between; empty ones are left out."""
    found: dict[str, Any] = {}
    tables: list[tuple[str, Mapping[str, Any]]] = [("", document)]
    for prefix, node in tables:  # which grows: outer tables before inner ones, in the order of the file
        for key, value in node.items():
            if isinstance(value, Mapping):
                tables.append((f"{prefix}{key}.", value))
            elif value is not None:
                found[f"{prefix}{key}"] = value
    return found


VARIABLE = re.compile(r"\$\{\w+:([^{}]*)\}")
"""`${NAME:8}`, which is 8 where the environment does not say."""


def plain_value(text: str) -> bool | int | str:
    """A word of a command line or of the environment, as a table would hold it."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if re.fullmatch(r"-?\d{1,18}", text) else text


ADAPTERS = ("lora", "qlora")


def take_adapters(recipe: Recipe, keys: FileKeys, key: str, method: str, **found: Any) -> None:
    """Sets training.tune by what a file says of adapters, and the precision of frozen weights that it loads in 16 bits.

    Trained weights are in fp32 beside 16 bits, or in 16 bits with a copy in fp32: both take 16 bytes each with AdamW.

    Args: key, method: of the file. found: keys of training.tune; those that are None are left out.
    Raises: ConfigError: another way of training a few added weights: priced as LoRA or as full training it would be wrong.
    """
    if method.lower() not in ADAPTERS:
        raise ConfigError(
            f"{recipe.framework}: {key} = {method} trains weights that are not those of LoRA; set lora or qlora, drop the key "
            "to price full training, or give an nn.Module with its frozen parameters"
        )
    for variant in ("use_dora", "use_rslora", "peft_use_dora", "peft_use_rslora"):
        if keys.flag(variant):
            recipe.left_out[variant] = "adapters are priced as those of LoRA"
    recipe.training["tune"] = {"method": method.lower()} | {name: value for name, value in found.items() if value is not None}
    if recipe.training.get("precision") == "amp_fp16":
        recipe.left_out["fp16"] = "16-bit weights are taken as bf16, which is as wide and as fast"
    if recipe.training.get("precision") in ("amp_bf16", "amp_fp16"):
        recipe.training["precision"] = "bf16"


def stored_base(keys: FileKeys, *, nested: bool = False) -> dict[str, Any]:
    """`base` and `double_quantisation` of training.tune by the keys of bitsandbytes; `nested`: scales are kept in 8 bits."""
    bits, four, eight = keys.text("quantization_bit"), keys.flag("load_in_4bit"), keys.flag("load_in_8bit")
    if four or bits == "4":
        return {"base": "nf4", "double_quantisation": nested}
    return {"base": "int8"} if eight or bits == "8" else {}


LONGEST_NAME = 200
"""Letters of a file's name."""


def file_named(name: str, path: Path) -> Path | None:
    """The file that another one names: as it is, below a folder around that one, or beside it by its last name."""
    if any(len(part) > LONGEST_NAME for part in Path(name).parts):
        return None
    places = [Path(name), *(folder / name for folder in path.parents), path.parent / Path(name).name]
    return next((place for place in places if place.is_file()), None)


def opened(path: Path) -> SourceFile:
    """A file of settings, for its reader. Raises OSError, ValueError: it cannot be read, or is larger than LARGEST_BYTES."""
    return SourceFile(path, read_text(path, LARGEST_BYTES).encode())


LARGEST_COUNT = 10**12
LONGEST_SHOWN = 100
MOST_YAML_NODES = 100_000
"""Values of a YAML file, an alias counted as all that it stands for."""


def whole_number(framework: str, key: str, value: object, least: int = 0) -> int:
    """A count of a file, from `least` to LARGEST_COUNT. Raises ConfigError."""
    try:
        number = float(str(value).replace("_", ""))
    except ValueError:
        number = math.nan
    if not least <= number <= LARGEST_COUNT or number != int(number):
        shown = repr(value) if len(repr(value)) <= LONGEST_SHOWN else f"{repr(value)[:LONGEST_SHOWN]}..."
        raise ConfigError(f"{framework}: {key} = {shown} must be a whole number from {least} to {LARGEST_COUNT:,}")
    return int(number)


def yaml_table(source: SourceFile) -> dict[str, Any]:
    """The document of a YAML file. Raises: ConfigError: it is not YAML, or no table. MissingDependencyError: without PyYAML."""
    try:
        import yaml  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise MissingDependencyError(
            f"PyYAML is needed to read {source.path}; pip install pyyaml (parsim[hf] brings it)"
        ) from error
    try:
        loader = type("Loader", (yaml.SafeLoader,), {})(source.text)
        loader.add_multi_constructor("!", lambda _, tag, node: f"!{tag}")  # `!include x`: what it stands for is not here
        node = loader.get_single_node()
        if node is not None and _yaml_nodes(node, {}) > MOST_YAML_NODES:
            raise ConfigError(f"its aliases (*name) stand for more than {MOST_YAML_NODES:,} values; write it without them")
        document = None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"it is not YAML that can be read: {' '.join(str(error).split())[:300]}") from error
    if not isinstance(document, dict):
        raise ConfigError("it holds no table of keys")
    known = flat_table(document)
    return {key: _referred(value, known, (key,)) for key, value in document.items()}


REFERENCE = re.compile(r"\$\{(\.*)([\w.]+)\}")
"""`${model.seq}`, and `${.seq}` of the same table, as OmegaConf writes them."""


def _referred(value: Any, known: Mapping[str, Any], place: tuple[str, ...]) -> Any:
    """A value of YAML, with the values that it names in place of their names; `place`: its keys."""
    if isinstance(value, dict):
        return {key: _referred(inner, known, (*place, str(key))) for key, inner in value.items()}
    for _ in range(8):
        if not isinstance(value, str) or (match := REFERENCE.fullmatch(value)) is None:
            break
        outer = place[: len(place) - len(match[1])] if match[1] else ()
        value = known.get(".".join((*outer, match[2])), None if match[1] else value)
        if value == match[0]:
            break
    return value


def _yaml_nodes(node: Any, known: dict[int, float]) -> float:
    """How many values a node of YAML has, each alias counted anew; infinitely many where it holds itself."""
    if id(node) not in known:
        known[id(node)] = math.inf  # until it is counted
        parts = [part for pair in node.value for part in (pair if isinstance(pair, tuple) else (pair,))]
        known[id(node)] = 1 + sum(_yaml_nodes(part, known) for part in parts if not isinstance(part, str))
    return known[id(node)]


@dataclass(kw_only=True)
class PlannedRecipe(Recipe):
    """A recipe made of a plan, to be written. `training` has every key of [training], with learning rate and decay filled in.

    Attributes: plan: what the recipe does not hold is read from it. nodes: machines.
    """

    plan: Plan
    nodes: int

    def torchrun(self) -> str:
        """The launcher's command, up to what it starts on every node."""
        return f"torchrun --nnodes {self.nodes} --nproc-per-node {self.plan.world_size // self.nodes}"

    def choose(self, key: str, rows: Mapping[str, Any]) -> Any:
        """What a framework calls the value of a key of [training]. Raises ConfigError: it has no such thing."""
        if (value := self.training[key]) not in rows:
            raise ConfigError(f"{self.framework} has {', '.join(rows)}, and training.{key} = {value!r}")
        return rows[value]


def recipe_of_plan(
    framework: str, plan: Plan, *, model: str, args: Mapping[str, Any], training: Mapping[str, Any], nodes: int
) -> PlannedRecipe:
    """The recipe of a plan, for the file of a framework.

    Args: framework: for messages. plan: with a mesh of its own. model, args: as in a run file, with the plan's arguments.
        training: keys of [training]; learning_rate and weight_decay as they are used. nodes: machines.
    Raises: ConfigError: replicas do not come together in every step, or ranks of a replica share samples unevenly.
    """
    if plan.synchronisation.is_relaxed:
        raise ConfigError(
            f"{framework} trains synchronously, and the plan synchronises by {plan.synchronisation}; train it with `parsim "
            "run`, or plan without plan.synchronisation"
        )
    mesh, samples = plan.mesh, plan.microbatch_samples
    dp, tp, group = mesh.dp, mesh.tp, mesh.dp_shard or mesh.dp
    if not plan.is_mixed and tp > 1:  # every component divides its samples over tp: more replicas
        if samples % tp:
            raise ConfigError(
                f"{framework}: {tp} ranks share a microbatch of {samples} samples unevenly; plan with mesh = {{ dp = "
                f"{dp * tp}, tp = 1 }}"
            )
        dp, tp, group, samples = dp * tp, 1, group * tp, samples // tp
    return PlannedRecipe(
        framework=framework,
        model=model,
        args=dict(args),
        training=dict(training) | {"global_batch": plan.global_batch},
        tp=tp,
        pp=mesh.pp,
        dp=dp,
        cp=mesh.cp,
        ep=mesh.ep,
        replicate=dp // group,
        micro_batch=samples,
        zero=plan.zero_stage,
        chunks=plan.chunks,
        order=plan.pipeline_order,
        left_out=_left_out(plan, training),
        plan=plan,
        nodes=nodes,
    )


def _left_out(plan: Plan, training: Mapping[str, Any]) -> dict[str, str]:
    """Keys that belong into the user's script, and keys that steer parsim's own program, which no framework's file has."""
    left_out = {"model, data and length of the training": "your training script has them"}
    if (schedule := training["schedule"]) is not None:
        left_out["training.schedule"] = f"{schedule['name']} is set in your training script"
    if training["no_weight_decay"]:
        left_out["training.no_weight_decay"] = "parameter groups without weight decay are made in your training script"
    if training["groups"]:
        left_out["training.groups"] = "parameters with optimizers of their own are grouped in your training script"
    if training["dtype"] != "float32":
        left_out["training.dtype"] = f"weights in {training['dtype']} are made in your training script"
    for is_set, key, why in (
        (plan.blocking_transfers, "blocking_transfers", "frameworks overlap transfers between stages with computation"),
        (plan.scatter_gather, "scatter_gather", "each tensor rank sends values between stages whole"),
        (
            not plan.backward_prefetch,
            "backward_prefetch",
            "parameters are gathered while the backward before runs",
        ),
        (
            plan.tensor_overlap or plan.tensor_backward_overlap,
            "tensor_overlap",
            "communication of tensor parallelism runs as the framework's own options say",
        ),
        (plan.gather_ahead, "gather_ahead", "when ZeRO 1 gathers parameters is the framework's choice"),
        (plan.offloads, "optimizer_offload, plan.activation_offload", "set the framework's own options of offload by hand"),
        (plan.context_exchange != "ring", "context_exchange", "how keys and values are exchanged is the framework's choice"),
    ):
        if is_set:
            left_out[f"plan.{key}"] = why
    return left_out


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """Attributes: shape: sizes, every default filled in. seq: tokens of a sample. others: the other arguments of the model."""

    shape: Shape
    seq: int
    others: Mapping[str, Any]


def transformer_of(recipe: PlannedRecipe) -> Transformer:
    """The model by its sizes, as Megatron-LM and torchtitan describe one. Fills in what of all layers is recomputed.

    Raises: ConfigError: the model is not a transformer by its sizes, a placement is none that the frameworks have, or what is
        recomputed differs from layer to layer.
    """
    framework, plan, args = recipe.framework, recipe.plan, recipe.args
    if not is_transformer(recipe.model):
        raise ConfigError(
            f"{framework} describes a transformer by its sizes, and model.name = {recipe.model!r} is none by name; "
            "export it as deepspeed or state_dict, or plan a model of parsim/model/catalogue/models.csv"
        )
    if DOCUMENT in args:
        recipe.left_out[f"model.args.{DOCUMENT}"] = "the mask of documents is set where your data and attention are"
    _check_placements(recipe)
    recipe.recompute, recipe.every = _recomputed_layers(framework, plan)
    others = {key: args.get(key, value) for key, value in OWN.items()}
    seq = sequence_of(recipe.model, args)
    return Transformer(shape=written_out(shape_of(recipe.model, args), seq), seq=seq, others=others)


def layers_of_stages(plan: Plan) -> list[list[int]] | None:
    """The layers of each stage; None: one is in two stages, which frameworks that cut between layers cannot express."""
    found = [sorted({int(layer[1]) for name in stage.components if (layer := LAYER.match(name))}) for stage in plan.stages]
    every = [layer for layers in found for layer in layers]
    return found if len(every) == len(set(every)) else None


def cut_in_layers(recipe: PlannedRecipe, counts: Sequence[int]) -> str:
    """What is left out of stages that begin inside a layer, with the layers that the framework puts into each."""
    plan = recipe.plan
    first = [stage.components[0] for stage in plan.stages[1:] if LAYER.match(stage.components[0])]
    return (
        f"{recipe.framework} cuts between layers, here into {' + '.join(map(str, counts))}; stages of the plan begin at "
        f"{first_few(first)}. Plan with --set model.granularity=block and tp = 1 for whole layers"
    )


def written_out(shape: Shape, seq: int) -> Shape:
    """The sizes without a name, and with every default written out, so that two spellings of one model are equal."""
    return replace(
        shape,
        name="",
        ffn=shape.inner,
        kv_heads=shape.keys,
        head_dim=shape.dim,
        positions=(shape.positions or seq) if shape.learned_positions else 0,
    )


def _check_placements(recipe: PlannedRecipe) -> None:
    """Under tensor parallelism every layer is cut in tp ways; what lies otherwise beside the layers is named."""
    framework, tp = recipe.framework, recipe.tp
    others: list[str] = []
    for name, placement in (entry for stage in recipe.plan.stages for entry in stage.placed() if tp > 1):
        if placement.kind == "shard" and placement.ways == tp:
            continue
        if LAYER.match(name) and placement.kind in ("shard", "place"):
            raise ConfigError(
                f"{framework} cuts every layer in tp = {tp} ways, and the plan has {name} {placement}; plan with "
                f"--set plan.strategy=hp and a mesh, which cuts all layers alike"
            )
        others.append(f"{name} {placement}")
    if others:
        few = first_few(others)
        recipe.left_out["plan.placements"] = f"{framework} cuts in its own way what the plan does not cut in {tp}: {few}"


def _recomputed_layers(framework: str, plan: Plan) -> tuple[str, int]:
    layers: dict[int, set[str]] = {}
    for name in plan.components:
        if (layer := LAYER.match(name)) is not None:
            kind = "full" if name in plan.recomputed else "selective" if name in plan.recomputed_by_operator else "none"
            layers.setdefault(int(layer[1]), set()).add(kind)
    kinds = [next(iter(kind)) if len(kind) == 1 else "mixed" for _, kind in sorted(layers.items())]
    for word in ("none", "full", "selective"):
        if all(kind == word for kind in kinds):
            return word, 0
    first = next((place for place, kind in enumerate(kinds) if kind == "full"), 0)
    if kinds == ["full" if place % (first + 1) == first else "none" for place in range(len(kinds))]:
        return "alternate", first + 1
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    raise ConfigError(
        f"{framework} recomputes all layers in one way, and the plan has {counts}; plan with --set plan.recompute=none or full"
    )


_COMPARED = (
    "plan.mesh",
    "plan.zero_stage",
    "plan.microbatches",
    "training.global_batch",
    "training.precision",
    "training.optimizer",
    "plan.dp_shard",
    "plan.pipeline_order",
    "plan.chunks",
)


def read_back(recipe: PlannedRecipe, model: Transformer, read: Recipe) -> None:
    """Note in `left_out` what parsim's own reader of a file understands otherwise than the plan has it.

    Args: recipe, model: what was written. read: the file, read.
    Raises: ConfigError: the reader finds other sizes of the model: the format cannot express the model.
    """
    low = bool(number_format(recipe.training["precision"]).beside)
    if bool(model.others[CASTS]) != low:
        recipe.left_out[f"model.args.{CASTS}"] = "the framework casts inputs of products exactly if it trains in fp8 or nvfp4"
    shape = written_out(shape_of(read.model, read.args), sequence_of(read.model, read.args))
    differ = [key for key in Shape.__dataclass_fields__ if getattr(shape, key) != getattr(model.shape, key)]
    if differ == ["vocab"]:
        recipe.left_out["model.args.vocab"] = f"{read.framework} pads the vocabulary of {model.shape.vocab} to {shape.vocab}"
    elif differ:
        texts = ", ".join(f"{key} = {getattr(model.shape, key)!r}" for key in differ)
        values = ", ".join(f"{getattr(shape, key)!r}" for key in differ)
        raise ConfigError(f"{read.framework} cannot express this model: {texts} would be read as {values}")
    written, settings = (each.settings(recipe.plan.world_size) for each in (recipe, read))
    for key in _COMPARED:
        if key in written and settings.get(key) != written[key]:
            recipe.left_out[key] = f"the file says {settings.get(key)!r}, the plan {written[key]!r}"
