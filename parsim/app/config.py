"""RUN.toml: the user's question, checked at the boundary.

Precedence: `--set a.b=c` on the command line, then the file, then the defaults below. Every wrong key is reported with its
path, its value and the fix, as ConfigError. Inside the library the sections are read-only.

Relative paths (a profile, a plan, a Hugging Face config.json, a data folder) are taken from the file's own folder; those
given with `--set` from the current directory. They are made absolute here, so the resolved config that a run keeps in its
folder works from anywhere.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, PlainSerializer, PrivateAttr, StrictBool, StrictInt, ValidationError, WrapValidator

from parsim.app.config_text import (
    changes_of,
    check_trusted,
    explained,
    is_path,
    key_parts,
    make_paths_absolute,
    merge,
    put_on_path,
)
from parsim.app.sections import ClusterSection, SoftwareSection, TrainingSection, check_machine, check_widths
from parsim.errors import ConfigError, ParsimError, PlanError, near_matches
from parsim.files import NO_CONTROL, control_character_in, document_text, parse_toml, read_text
from parsim.formats.recipe import Recipe
from parsim.hardware.cluster import Cluster
from parsim.hardware.parts import load_gpu, shipped_gpus
from parsim.hardware.records import ConfigSection, Count, Name
from parsim.model.catalogue.frameworks import ONE_NODE, Guess, plausible_frameworks, states_are_whole
from parsim.model.catalogue.names import SEQUENCE_PARALLEL, is_transformer, sequence_of, shape_of
from parsim.model.model import Model
from parsim.model.objective import LOSSES
from parsim.model.spec import ModelKeys, ModelSpec, takes_usual
from parsim.plans.constraints import Layers, PartCount, PlanConstraints, check_sharding_groups
from parsim.plans.layouts import KINDS, parse_placement
from parsim.plans.mesh import Mesh, check_mesh
from parsim.plans.pipeline import PIPELINE_ORDERS, check_chunks
from parsim.plans.plan import AUTO, STRATEGIES, SWITCHES, ZERO_STAGES, ZERO_STAGES_TEXT, Plan
from parsim.plans.plan import WORDS as RECOMPUTE_WORDS
from parsim.plans.synchronisation import ALL_REDUCE, Synchronisation, parse_synchronisation
from parsim.predict.memory import FIT_PROBABILITY
from parsim.registry import RowOf, as_key_error, is_reference
from parsim.units import nearest_divisors

Tables = TypeVar("Tables", bound=ConfigSection)

Granularity = Literal["block", "sublayer", "layer"]
LargestOf = Literal["batch", "seq", "model"]
THIS_MACHINE = "this-machine"

CONSTRAINT_KEYS = ("mesh", "dp_shard", "microbatches", "pipeline_order", "chunks", "stage_layers", "bucket_bytes")
"""Keys that constrain a search, and with strategy = "custom" fix the plan by hand."""
CUSTOM_KEYS = (*CONSTRAINT_KEYS, "placements")
ADAPTIVE_KEYS = ("pin", "forbid")
"""Keys that steer the search of strategy = "adaptive"."""


class ModelSection(ModelKeys):
    """[model]: what is trained."""

    input_shape: tuple[Count, ...] | None = None
    loss: Annotated[Name, RowOf(LOSSES)] | None = None
    granularity: Granularity = "block"
    """What is one component: blocks, their halves (attention, feed-forward), or single layers. Plans with tensor parallelism
    have halves, unless keys of [plan] name components."""
    import_folder: Name | None = None
    """Where the module of "package.module:factory" lies; left out: beside the run file, else on the import path."""


def _from_text(value: Any) -> Any:
    """The rule of a text such as "average/8"; anything else as it is."""
    return parse_synchronisation(value) if isinstance(value, str) else value


class MeshTable(ConfigSection):
    """plan.mesh: pp stages of dp replicas of tp shards; an axis that is left out is free, or 1 with strategy = "custom".

    cp ranks share each replica by the sequence, ep of the dp * cp ranks share the experts; left out, both are 1.
    """

    pp: Count | None = None
    dp: Count | None = None
    tp: Count | None = None
    cp: Count | None = None
    ep: Count | None = None


class PlanSection(ConfigSection):
    """[plan]: how the work is divided. Every key that is given constrains the search; what is left out is free."""

    strategy: Annotated[str, Field(strict=True, min_length=1)] = "adaptive"
    """A family to search (single, dp, mp, hp, adaptive, "package.module:ROW"), "custom", or the path of a plan.json."""
    mesh: MeshTable | None = None
    dp_shard: Count | None = None
    """With zero_stage 1 to 3, over how many neighbouring replicas states are divided (HSDP); left out: all of mesh.dp, and a
    search tries those of a node too."""
    microbatches: PartCount | None = None
    """Per replica."""
    pipeline_order: Annotated[Name, RowOf(PIPELINE_ORDERS)] | None = None
    """A row of `parsim.plans.pipeline`, or "package.module:ROW"."""
    chunks: PartCount | None = None
    """Stages per rank, for orders that take several; left out: the fewest that the order takes."""
    stage_layers: tuple[Layers, ...] | None = None
    """Layers of each stage, in order: mesh.pp x chunks numbers. Left out: as the framework counts them out, else by cost."""
    bucket_bytes: Count | None = None
    """A gradient bucket is closed once it holds this much."""
    placements: dict[Name, Name] | None = None
    """How components lie on the tp axis of the mesh, by pattern ("layers.*"); the first that matches counts, else batch. Left
    out, tensor parallelism cuts every layer."""
    pin: dict[Name, Name] = {}
    """Placements that an adaptive plan must keep, by pattern."""
    forbid: dict[Name, tuple[Name, ...]] = {}
    """Placements, or kinds of them (batch, shard, replicate, place), that an adaptive plan must not use, by pattern."""
    zero_stage: StrictInt | Literal["auto"] = AUTO
    """1 divides the optimizer state over the ranks that hold the same parameters, 2 the gradients too, 3 the parameters too;
    "auto": whichever is fastest among those that fit, 0 in a plan by hand."""
    recompute: Name | tuple[Name, ...] = AUTO
    """Components whose forward runs again before their backward: "auto" (as few as make a searched plan fit, none in a plan by
    hand), "none", "full", "selective" (all by operator: outputs of products, convolutions and fused attention are kept, the
    rest is computed again), or a list of their names, which may be patterns ("layers.*.attention", "selective:layers.*")."""
    fit_probability: Annotated[float, Field(strict=True, ge=FIT_PROBABILITY, le=0.999)] | None = None
    """With which the memory of a plan must suffice. By default a search prefers plans that fit with 0.95, and a plan is refused
    if it is more likely than not to run out; a number stands for both. The verdict beside a plan has its probability."""
    context_exchange: Literal["ring", "all_gather"] | None = None
    """With mesh.cp above 1, in a plan by hand: how keys and values of the other pieces of the sequence arrive."""
    tensor_overlap: StrictBool | None = None
    """Simulated only, in a plan by hand: all_gathers and reduce_scatters on the tp axis run in pieces beside products."""
    tensor_backward_overlap: StrictBool | None = None
    """Likewise: sums of tensor parallelism run beside gradients of weights."""
    gather_ahead: StrictBool | None = None
    """Likewise: with zero_stage 1, parameters are gathered at the beginning of a step."""
    blocking_transfers: StrictBool | None = None
    """Likewise: a rank computes nothing while it sends to another stage."""
    scatter_gather: StrictBool | None = None
    """Likewise: tensor shards send a part each of what all of them have."""
    optimizer_offload: StrictBool | None = None
    """Simulated only, and kept by a search: state and master weights lie in the host's memory, and the host updates."""
    activation_offload: StrictBool | tuple[Name, ...] | None = None
    """Likewise: components whose saved activations wait in the host's memory: true (all), false, or patterns of names."""
    backward_prefetch: StrictBool | None = None
    """With zero_stage 3, in a plan by hand: false gathers parameters behind the backward before, as FSDP's BACKWARD_POST."""
    sequence_parallel: StrictBool | None = None
    """For a transformer by name under mesh.tp: norms and residuals divided along the sequence (left out: true)."""
    capacity_factor: Annotated[float, Field(strict=True, ge=1.0, le=100.0)] | None = None
    """Visits that an expert has room for (and computes, padded) over their mean; left out: as many as come."""
    routing_skew: Annotated[float, Field(strict=True, ge=0.0, le=100.0)] | None = None
    """Standard deviation of the visits of single experts over their mean, beyond chance; left out: 0, balanced."""
    synchronisation: (
        Annotated[
            Synchronisation,
            BeforeValidator(_from_text),
            WrapValidator(as_key_error),
            PlainSerializer(Synchronisation.to_dict),
        ]
        | None
    ) = None
    """How and when replicas come together: a table, or its text ("average/8", "gossip/1 ring"); see docs/relaxed.md. Left out,
    gradients are summed in every step."""

    @property
    def relaxed(self) -> Synchronisation:
        """The synchronisation that is asked for; that of synchronous training where none is."""
        return self.synchronisation or ALL_REDUCE

    @property
    def is_uncut(self) -> bool:
        """Whether no plan that these keys allow divides a component over ranks."""
        return self.strategy in ("single", "dp") or (self.mesh is not None and self.mesh.tp == 1)

    @property
    def plan_path(self) -> Path | None:
        """The plan file that `strategy` names, if it names one."""
        return Path(self.strategy) if is_path(self.strategy) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionSource:
    """What a question was made from beside the keys of a run file.

    Attributes:
        name: names folders: the stem of the run file, or the model's name.
        model, cluster: where they were given as values; the question then holds their names alone.
        form: what the model was given as: by name (zoo, factory, config, run file), as an nn.Module, or as a Model.
        recipe: what was read from a framework's file; None without one.
        guess: who is taken to have written the loop; None: as `Question.guess` finds.
    """

    name: str = ""
    model: Model | None = None
    cluster: Cluster | None = None
    form: Literal["name", "module", "model"] = "name"
    recipe: Recipe | None = None
    guess: Guess | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """What of a plan, or of the plans of a search, tells frameworks apart.

    Attributes: divided: "tp 8, pp 2"; "": nothing. zero_stage: None: open. selective: parts of layers are recomputed.
    is_open: a search may divide more.
    """

    divided: str
    zero_stage: int | None
    selective: bool = False
    is_open: bool = False


def in_words(ways: Mapping[str, int]) -> str:
    """`tp 8, pp 2` of axes that have several ways."""
    return ", ".join(f"{axis} {size}" for axis, size in ways.items() if size > 1)


def facts_of_plan(plan: Plan) -> PlanFacts:
    """Those of a plan."""
    ways = {axis: getattr(plan.mesh, axis) for axis in ("tp", "pp", "cp", "ep")}
    return PlanFacts(divided=in_words(ways), zero_stage=plan.zero_stage, selective=plan.recompute == "selective")


class Question(ConfigSection):
    """What is asked: the tables of a run file, with every default filled in."""

    model: ModelSection
    cluster: ClusterSection
    training: TrainingSection = TrainingSection()
    plan: PlanSection = PlanSection()
    software: SoftwareSection = SoftwareSection()
    _source: QuestionSource = PrivateAttr(default_factory=QuestionSource)

    @property
    def source(self) -> QuestionSource:
        """What it was made from."""
        return self._source

    def sourced(self, **values: Any) -> Question:
        """A question with other fields of its `QuestionSource`."""
        question = self.model_copy()
        question._source = replace(self._source, **values)
        return question

    @property
    def is_judged(self) -> bool:
        """Whether published runs say something of it: a transformer by name, on shipped GPUs of one kind."""
        gpu = self.cluster.gpu
        by_name = self.source.form == "name" and is_transformer(self.model.name)
        return by_name and gpu is not None and load_gpu(gpu).name in shipped_gpus()

    @property
    def guess(self) -> Guess | None:
        """Who may have written the loop, where [software] does not say; None: it does, or published runs say nothing."""
        if self.software.framework is not None or not self.is_judged:
            return None
        return self.source.guess or self.guess_for(self._asked_plan())

    def guess_for(self, facts: PlanFacts) -> Guess:
        """Who may have written the loop that runs such a plan."""
        table = self.cluster
        part = load_gpu(str(table.gpu))
        per_node = table.gpus_per_node or part.gpus_per_node
        devices = table.nodes * (table.devices or per_node) if not isinstance(table.devices, tuple) else len(table.devices)
        shape = shape_of(self.model.name, dict(self.model.args))
        memory_bytes = part.memory_bytes.value
        divided = facts.divided
        if facts.is_open and not divided and devices > ONE_NODE and not states_are_whole(shape, memory_bytes):
            divided = "a search among all ways to divide the model"
        return plausible_frameworks(
            shape,
            part.name,
            devices=devices,
            memory_bytes=memory_bytes,
            divided=divided,
            zero=facts.zero_stage,
            selective=facts.selective,
            low=self.has_low_products,
            keys=sequence_of(self.model.name, dict(self.model.args)),
        )

    def _asked_plan(self) -> PlanFacts:
        plan = self.plan
        if plan.plan_path is not None:
            return facts_of_plan(Plan.load(plan.plan_path))
        mesh = {axis: ways for axis in INNER_AXES if (ways := getattr(plan.mesh or MeshTable(), axis) or 1) > 1}
        by_hand = plan.strategy == "custom"
        words = "" if by_hand or mesh else {"mp": "model parallelism", "hp": "hybrid parallelism"}.get(plan.strategy, "")
        return PlanFacts(
            divided=in_words(mesh) or words,
            zero_stage=plan.zero_stage if plan.zero_stage != AUTO else 0 if by_hand else None,
            selective=plan.recompute == "selective",
            is_open=plan.strategy not in ("custom", "single", "dp"),
        )

    @property
    def priced_software(self) -> SoftwareSection:
        """[software], and where it names no framework the one that is guessed: what prices are of.

        Which plans a search proposes, and what a plan by hand leaves open, does not follow from a guess. Loops of frameworks
        that run with and without torch.compile are taken to be eager, as their defaults are; products in 8 bits are compiled.
        """
        guess = self.guess
        software = self.software if guess is None else self.software.guessed(guess)
        if software.compiled is not None or software.row is None or not software.row.uncompiled:
            return software
        return software.model_copy(update={"compiled": self.has_low_products})

    @property
    def has_low_products(self) -> bool:
        """Whether products are in 8 bits or fewer."""
        return self.training.precision in ("fp8", "nvfp4")

    def changed(self, **tables: Any) -> Question:
        """A question with other tables."""
        return self.model_copy(update=tables)

    @property
    def model_spec(self) -> ModelSpec:
        """The model as it is built: with plan.sequence_parallel and the kernels of [software] among its arguments."""
        keys = {key: getattr(self.model, key) for key in ModelKeys.model_fields}
        args = dict(self.model.args)
        if self.plan.sequence_parallel is not None:
            args[SEQUENCE_PARALLEL] = self.plan.sequence_parallel
        if is_transformer(self.model.name):
            args = self.priced_software.kernels | args
        keys["args"] = tuple(sorted(args.items()))
        return ModelSpec.model_construct(**keys, tune=self.training.tune)

    @property
    def devices(self) -> int | list[int] | None:
        """The first devices of a node, or their numbers, for `parsim.hardware.cluster.cluster_from_profile`."""
        chosen = self.cluster.devices
        return list(chosen) if isinstance(chosen, tuple) else chosen

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; None is left out."""
        document: dict[str, Any] = self.model_dump(mode="json", exclude_none=True)
        return document

    def to_toml(self) -> str:
        """`parse_config` reads it back to an equal question."""
        return document_text(self.to_dict())


TABLES: Mapping[str, type[ConfigSection]] = {
    "plan": PlanSection,
    "training": TrainingSection,
    "model": ModelSection,
    "cluster": ClusterSection,
    "software": SoftwareSection,
}
"""In which the keys that stand without their table are looked for, in this order."""


def keys_by_name() -> dict[str, str]:
    """`{"precision": "training.precision", ...}`: every key of a run file by its name, and `seq`, an argument of models."""
    names = {"seq": "model.args.seq"}
    for table, section in TABLES.items():
        for name in section.model_fields:
            names.setdefault(name, f"{table}.{name}")
    return names


def load_config(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    settings: Mapping[str, Any] | None = None,
    calls_model: bool = True,
) -> Question:
    """Read and check a run file; `overrides` and `settings` as `question_from`, `calls_model` as `check_trusted` takes it.

    Raises ConfigError: no such file, not TOML, or a wrong key; with its path, its value and the fix.
    """
    try:
        text = read_text(path)
    except FileNotFoundError as error:
        raise ConfigError(f"no run file {path}; write one with the tables [model], [cluster] and [training]") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read run file {path}: {error}; it must be a text file in UTF-8") from error
    folder = path.resolve().parent
    return parse_config(text, overrides, settings=settings, where=str(path), folder=folder, calls_model=calls_model)


def parse_config(
    text: str,
    overrides: Sequence[str] = (),
    *,
    settings: Mapping[str, Any] | None = None,
    where: str = "RUN.toml",
    folder: Path | None = None,
    calls_model: bool = True,
) -> Question:
    """Check the text of a run file; relative paths in it start at `folder` (None: the current directory)."""
    try:
        document = parse_toml(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not TOML: {error}; fix that line") from error
    make_paths_absolute(document, folder or Path.cwd())
    if folder is not None:
        check_trusted(document, folder, where, calls_model=calls_model)
    return question_from(document, overrides, settings=settings, where=where, folder=folder)


def question_from(
    document: dict[str, Any],
    overrides: Sequence[str] = (),
    *,
    settings: Mapping[str, Any] | None = None,
    where: str,
    folder: Path | None = None,
) -> Question:
    """Check the tables of a run file, laid under changes.

    Args:
        document: the tables; changed in place.
        overrides: texts "section.key=value", the value as TOML or as a bare word. settings: values by "section.key". An
            override counts more than a setting, and both more than the document. A change of plan.strategy replaces the
            hand-written plan of a document with strategy = "custom" (CUSTOM_KEYS) unless it says "custom" too. It replaces
            what steers the document's search (ADAPTIVE_KEYS) unless it says "adaptive". Constraints of a search stay.
        where: the name of the document in messages. folder: whose modules the question may name.
    Raises: ConfigError: every wrong key, with its path, its value and the fix.
    """
    changes = changes_of(settings, overrides)
    make_paths_absolute(changes, Path.cwd())
    strategy = changes["plan"].get("strategy") if isinstance(changes.get("plan"), dict) else None
    if strategy not in (None, "custom") and isinstance(document.get("plan"), dict):
        by_hand = document["plan"].get("strategy") == "custom" or is_path(str(strategy))
        dropped = (*(CUSTOM_KEYS if by_hand else ()), *(ADAPTIVE_KEYS if strategy != "adaptive" else ()))
        document["plan"] = {key: value for key, value in document["plan"].items() if key not in dropped}
    merge(document, changes, "")
    # What a factory takes as args may be any text, and nothing prints it.
    model = document.get("model")
    shown = {key: value for key, value in model.items() if key != "args"} if isinstance(model, dict) else model
    if problem := control_character_in(document | {"model": shown}):
        raise ConfigError(f"{where}: {problem}: {NO_CONTROL}")
    put_on_path(document, folder or Path.cwd())
    return _validated(Question, document, where, _check_agreement)


def _validated(kind: type[Tables], document: Mapping[str, Any], where: str, check: Callable[[Tables], None]) -> Tables:
    try:
        tables = kind.model_validate(document)
        check(tables)
        return tables
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except ValidationError as error:
        # A union reports every member that did not match: one message per key is enough.
        problems = {
            tuple(key_parts(problem)): explained(problem, kind) for problem in reversed(error.errors(include_url=False))
        }
        raise ConfigError(f"{where}: " + "\n  ".join(reversed(problems.values()))) from error


class _ClusterTable(ConfigSection):
    cluster: ClusterSection


def cluster_section(
    table: Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    settings: Mapping[str, Any] | None = None,
    where: str = "RUN.toml",
    folder: Path | None = None,
) -> ClusterSection:
    """Check a table [cluster] by itself. Raises ConfigError.

    Args: table: by key. overrides, settings: as `question_from`; those of other tables are ignored. where: its name in
        messages. folder: at which relative paths start (None: the current directory).
    """
    document = {"cluster": dict(table)}
    make_paths_absolute(document, folder or Path.cwd())
    changes = {key: value for key, value in changes_of(settings, overrides).items() if key == "cluster"}
    make_paths_absolute(changes, Path.cwd())
    merge(document, changes, "")
    return _validated(_ClusterTable, document, where, lambda tables: check_machine(tables.cluster)).cluster


_OTHER_NAMES = {
    "ddp": 'strategy = "dp", data parallelism',
    **dict.fromkeys(("fsdp", "fsdp2", "zero", "zero3", "zero-3"), 'strategy = "dp" and zero_stage = 3, as FSDP divides all'),
    **dict.fromkeys(("zero1", "zero-1"), 'strategy = "dp" and zero_stage = 1'),
    **dict.fromkeys(("zero2", "zero-2"), 'strategy = "dp" and zero_stage = 2'),
    "hsdp": 'strategy = "dp", zero_stage = 3 and dp_shard = the devices of a node',
    **dict.fromkeys(("pp", "pipeline"), 'strategy = "adaptive" and mesh = { pp = 4 }'),
    **dict.fromkeys(("tp", "tensor", "megatron"), 'strategy = "adaptive" and mesh = { tp = 4 }'),
    "3d": 'strategy = "hp", which combines dp with pp and tp',
}
"""Names that other libraries have for what plan.strategy and plan.zero_stage say here."""


def _check_experts(question: Question) -> None:
    software, plan, model = question.software, question.plan, question.model
    given = [f"software.{key}" for key in software.of_experts] + ["plan.routing_skew"] * (plan.routing_skew is not None)
    if given and is_transformer(model.name) and not shape_of(model.name, dict(model.args)).experts:
        raise ConfigError(f"{given[0]} is about a mixture of experts, and {model.name} has none; drop it")
    if plan.routing_skew and plan.capacity_factor:
        raise ConfigError(
            f"plan.capacity_factor = {plan.capacity_factor:g} pads every expert to as many visits, so plan.routing_skew = "
            f"{plan.routing_skew:g} changes nothing; drop one of them"
        )
    if not software.expert_overlap:
        return
    if plan.recompute == "full":
        raise ConfigError(
            "software.expert_overlap = true runs one microbatch beside another, which frameworks do not do with "
            'plan.recompute = "full"; set recompute = "selective", or expert_overlap = false'
        )
    stages = 1 if plan.mesh is None or plan.strategy != "custom" else plan.mesh.pp or 1
    if stages > 1 and (plan.chunks or 1) == 1 and software.framework in MEGATRONS:
        raise ConfigError(
            f"software.expert_overlap = true needs an interleaved pipeline in {software.framework}, and this plan has "
            f'{stages} stages, 1 per rank; set plan.pipeline_order = "interleaved" and chunks = 2 or more, or expert_overlap '
            "= false"
        )


MEGATRONS = ("megatron", "nemo", "megatron-bridge")
"""Frameworks that refuse --overlap-moe-expert-parallel-comm without a virtual pipeline size (Megatron Bridge's guide)."""


def _check_agreement(question: Question) -> None:
    """What no single key can say: the words of [plan], plans from files and by hand, and the plan against the other tables."""
    plan, training = question.plan, question.training
    if "precision" in training.model_fields_set or not takes_usual(question.model.name):
        check_widths(training)
    _check_words(plan)
    if plan.plan_path is not None:
        beside = [key for key in ("zero_stage", "recompute") if getattr(plan, key) not in (AUTO, 0)]
        keys = ("optimizer_offload", "activation_offload", "synchronisation", *CUSTOM_KEYS, *SWITCHES)
        beside += [key for key in keys if getattr(plan, key) is not None]
        if beside:
            value = getattr(plan, beside[0])
            key = f"{beside[0]} = {value!r}" if isinstance(value, str | int) else beside[0]
            raise ConfigError(f"plan.{key}: the plan is read from {plan.plan_path}; drop {', '.join(beside)}")
    if plan.microbatches is not None and training.names_batch and training.global_batch % plan.microbatches:
        raise ConfigError(
            f"training.global_batch ({training.global_batch}) must be divisible by plan.microbatches ({plan.microbatches}); "
            f"the nearest microbatches that divide it: {nearest_divisors(training.global_batch, plan.microbatches)}"
        )
    _check_replicas(plan)
    check_machine(question.cluster)
    _check_by_hand(question)
    if (wanted := plan.sequence_parallel) is not None:
        name, args = question.model.name, dict(question.model.args)
        if not is_transformer(name):
            raise ConfigError(
                f"plan.sequence_parallel = {str(wanted).lower()} belongs to a transformer by name (llama3-8b), and the model "
                f"is {name}: its components have the rules that were traced; drop it"
            )
        if args.get(SEQUENCE_PARALLEL, wanted) != wanted:
            raise ConfigError(
                f"plan.sequence_parallel and model.args.{SEQUENCE_PARALLEL} contradict each other; drop one of them"
            )
    by_name, software = is_transformer(question.model.name), question.software
    if not by_name and (software.attention or (software.framework and software.convolution is None)):
        key = "attention" if software.attention else "framework"
        raise ConfigError(
            f"software.{key} = {getattr(software, key)!r} belongs to a transformer by name (llama3-8b), and the model is "
            f"{question.model.name}: its operators are those that were traced; drop it"
        )
    if by_name and software.channels_last is not None:
        raise ConfigError(
            f"software.channels_last = {str(software.channels_last).lower()} is of convolutions, and {question.model.name} has "
            "none; drop it"
        )
    _check_experts(question)
    if plan.mesh is not None:
        _check_mesh(plan, plan.mesh, question)
    steering = [key for key in ADAPTIVE_KEYS if getattr(plan, key)]
    if steering and plan.strategy != "adaptive":
        raise ConfigError(
            f"plan.{steering[0]} steers the search for an adaptive plan, but plan.strategy = {plan.strategy!r}; "
            f'set strategy = "adaptive" or drop {", ".join(steering)}'
        )
    _check_placements(plan)


def _check_words(plan: PlanSection) -> None:
    """The strategy, ZeRO stage and recomputation are ones that exist, and the order takes the chunks."""
    if is_reference(plan.strategy):
        from parsim.search.families import FAMILIES  # loads the engines

        try:
            FAMILIES[plan.strategy]
        except ParsimError as error:
            raise ConfigError(f"plan.strategy = {plan.strategy!r}: {error}") from error
    elif plan.plan_path is None and plan.strategy not in STRATEGIES:
        instead = _OTHER_NAMES.get(plan.strategy.lower())
        near = f"; set {instead}" if instead else near_matches(plan.strategy, STRATEGIES)
        raise ConfigError(
            f"plan.strategy = {plan.strategy!r} is unknown{near} "
            "(or the path of a plan.json, or your own as package.module:NAME, see docs/extending.md)"
        )
    if plan.zero_stage not in (AUTO, *ZERO_STAGES):
        raise ConfigError(f'plan.zero_stage = {plan.zero_stage}: {ZERO_STAGES_TEXT}; or "auto"')
    words = (AUTO, *RECOMPUTE_WORDS)
    if isinstance(plan.recompute, str) and plan.recompute not in words:
        raise ConfigError(
            f"plan.recompute = {plan.recompute!r} is unknown{near_matches(plan.recompute, words)} (it is {', '.join(words)}, "
            'or a list of component names, "selective:NAME" for one by operator)'
        )
    chunks, order = plan.chunks, plan.pipeline_order
    _check_stage_layers(plan)
    if chunks is None or (order is None and plan.strategy != "custom"):
        return
    order = order or "1f1b"
    if PIPELINE_ORDERS[order].most_chunks == 1 and chunks > 1:
        several = ", ".join(name for name, row in PIPELINE_ORDERS.items() if row.takes(chunks))
        raise ConfigError(
            f"plan.chunks = {chunks} needs an order with several chunks per rank; set plan.pipeline_order to one of {several}"
        )
    try:
        check_chunks(order, chunks)
    except PlanError as error:
        raise ConfigError(f"plan.chunks = {chunks}: {error}") from error


def _check_stage_layers(plan: PlanSection) -> None:
    layers, pp, chunks = plan.stage_layers, (plan.mesh or MeshTable()).pp or 1, plan.chunks or 1
    if layers is None:
        return
    if len(layers) != pp * chunks:
        raise ConfigError(
            f"plan.stage_layers has {len(layers)} stages, and mesh.pp x chunks is {pp} x {chunks}; give as many numbers, or "
            "another mesh.pp or chunks"
        )
    if not all(layers[1:-1]):
        raise ConfigError(f"plan.stage_layers = {list(layers)} has a stage of nothing; only the first and the last may be 0")


def _check_by_hand(question: Question) -> None:
    """Keys of a plan by hand stand beside strategy = "custom" and the axes that they are about."""
    plan = question.plan
    cp = (plan.mesh or MeshTable()).cp or 1
    by_hand = plan.strategy == "custom"
    if plan.placements is not None and not by_hand:
        raise ConfigError(
            f"plan.placements fixes all placements by hand, but with plan.strategy = {plan.strategy!r} they are searched for; "
            'set strategy = "custom", or name those that must stay in plan.pin (strategy = "adaptive")'
        )
    if plan.context_exchange is not None and (not by_hand or cp == 1):
        raise ConfigError(
            f'plan.context_exchange = "{plan.context_exchange}" belongs to strategy = "custom" with cp > 1; '
            "drop it: a searched plan exchanges in a ring"
        )
    _check_switches(question)
    _check_framework(question)
    if by_hand and plan.mesh is None:
        raise ConfigError('plan.strategy = "custom" needs plan.mesh, for example mesh = { pp = 2, dp = 2, tp = 1 }')


INNER_AXES = ("pp", "tp", "cp", "ep")


def _check_framework(question: Question) -> None:
    plan, row = question.plan, question.software.row
    if row is None:
        return
    what = f"software.framework = {row.name!r}{f' in {question.software.year}' if question.software.year else ''}"
    for axis in INNER_AXES:
        size = getattr(plan.mesh or MeshTable(), axis) or 1
        if size > 1 and axis not in row.axes:
            has = ", ".join(("dp", *row.axes))
            raise ConfigError(f"plan.mesh.{axis} = {size} and {what}, whose plans have {has} alone; drop one of them")
    if plan.zero_stage not in (AUTO, *row.zero_stages):
        has = " or ".join(map(str, row.zero_stages))
        raise ConfigError(f"plan.zero_stage = {plan.zero_stage} and {what}, which has zero_stage {has} alone; drop one of them")
    software, exchanged = question.software, ("dispatcher", "expert_overlap", "delay_weight_gradients")
    given = [key for key in exchanged if getattr(software, key)]
    if given and "ep" not in row.axes:
        raise ConfigError(
            f"software.{given[0]} = {getattr(software, given[0])!r} is of exchanges between ranks that share experts, and "
            f"{what} has no such plans; drop one of them"
        )
    if software.compiled is not None and not row.uncompiled and row.convolution is None:
        raise ConfigError(
            f"software.compiled = {str(software.compiled).lower()} and {what}, which runs the same kernels whether compiled "
            "or not; drop compiled"
        )
    if row.orders and plan.pipeline_order not in (None, *row.orders):
        has = ", ".join(row.orders)
        raise ConfigError(f"plan.pipeline_order = {plan.pipeline_order!r} and {what}, which has {has} alone; drop one of them")


def _check_switches(question: Question) -> None:
    plan, row = question.plan, question.software.row
    by_hand, mesh = plan.strategy == "custom", plan.mesh or MeshTable()
    for key, switch in SWITCHES.items():
        sizes = [getattr(mesh, axis) or (1 if by_hand else None) for axis in switch.axes]
        if getattr(plan, key) and 1 in sizes:
            needs = " and ".join(f"{axis} > 1" for axis in switch.axes)
            raise ConfigError(f"plan.{key} = true belongs to plan.mesh with {needs}; drop it")
    if plan.tensor_overlap and plan.sequence_parallel is False:
        raise ConfigError(
            "plan.tensor_overlap = true hides all_gathers and reduce_scatters, and plan.sequence_parallel = false has "
            "all_reduces in their place; drop one of them"
        )
    usual = 0 if row is None else row.zero
    zero = usual if by_hand and plan.zero_stage == AUTO else plan.zero_stage
    for key, switch in SWITCHES.items():
        stage, value = switch.zero_stage, getattr(plan, key)
        if stage is not None and value == (not switch.usual) and zero not in (AUTO, stage):
            raise ConfigError(
                f"plan.{key} = {str(value).lower()} belongs to zero_stage = {stage}, and the plan has zero_stage = {zero}; set "
                f"zero_stage = {stage}, or drop it"
            )
    both = ("tensor_overlap", "tensor_backward_overlap")
    for key, other in (both, both[::-1]):
        stated = getattr(plan, other)
        if getattr(plan, key) and (stated or (stated is None and row is not None and getattr(row, other))):
            whose = f"plan.{other} = true" if stated else f"software.framework = {row.name!r} has {other}" if row else ""
            raise ConfigError(
                f"plan.{key} = true and {whose}: they are two ways to hide the same communication; set plan.{other} = false"
            )


def _check_replicas(plan: PlanSection) -> None:
    """What sharding groups, relaxed synchronisation and the rest of [plan] say of one another."""
    rule, mesh, zero = plan.relaxed, plan.mesh, 0 if plan.zero_stage == AUTO else int(plan.zero_stage)
    try:
        check_sharding_groups(plan.dp_shard, plan.zero_stage, rule, by_hand=plan.strategy == "custom")
        if mesh is not None and (mesh.dp is not None or plan.strategy == "custom"):
            mesh_of(plan)
    except PlanError as error:
        raise ConfigError(f"plan: {error}") from error
    if not rule.is_relaxed:
        return
    offloading = [key for key in ("optimizer_offload", "activation_offload") if getattr(plan, key)]
    if offloading:
        raise ConfigError(
            f"plan.{offloading[0]} belongs to synchronous training, and plan.synchronisation asks for another; drop one of them"
        )
    whole = () if rule.is_stale and rule.mixes else ("mp",) if rule.is_stale else ("dp",)
    usual = (*whole, "hp", "adaptive", "custom")
    if plan.strategy not in usual:
        raise ConfigError(
            f"plan.synchronisation.kind = {rule.kind!r} has no plan of strategy {plan.strategy!r}; use {', '.join(usual)}"
        )
    if mesh is not None and mesh.dp is not None and (not rule.is_stale or mesh.pp is not None):
        try:
            rule.check(mesh_of(plan), zero_stage=zero)
        except PlanError as error:
            raise ConfigError(f"plan.synchronisation: {error}") from error
    elif zero:
        raise ConfigError(
            f"plan.zero_stage = {zero} shards states over replicas that synchronisation {rule} keeps separate; drop it"
        )


def _check_placements(plan: PlanSection) -> None:
    written = [("placements", *placement) for placement in (plan.placements or {}).items()]
    written += [("pin", *placement) for placement in plan.pin.items()]
    written += [("forbid", pattern, text) for pattern, texts in plan.forbid.items() for text in texts if text not in KINDS]
    for key, pattern, text in written:
        try:
            parse_placement(text)
        except PlanError as error:
            near = near_matches(text, KINDS) if key == "forbid" else ""
            raise ConfigError(f"plan.{key}.{pattern!r} = {text!r}: {error}{near}") from error


def _check_mesh(plan: PlanSection, table: MeshTable, question: Question) -> None:
    """The axes multiply to the devices, or those that are given divide them; the batch divides by replicas and microbatches."""
    chosen = question.cluster.devices
    devices = len(chosen) if isinstance(chosen, tuple) else None if chosen is None else chosen * question.cluster.nodes
    if devices is not None:
        try:
            check_axes(table, devices, by_hand=plan.strategy == "custom")
        except PlanError as error:
            raise ConfigError(f"plan.mesh: {error}") from error
    replicas, microbatches = table.dp or 1, plan.microbatches or 1
    batch, parts = question.training.global_batch, replicas * microbatches
    if batch % parts and question.training.names_batch:
        raise ConfigError(
            f"training.global_batch ({batch}) must be divisible by plan.mesh.dp ({replicas}) * plan.microbatches "
            f"({microbatches}) = {parts}; the nearest that is: {max(1, round(batch / parts)) * parts}"
        )


def check_axes(table: MeshTable, devices: int, *, by_hand: bool) -> None:
    """Raise PlanError where no mesh of so many devices has the axes that are given.

    Args: table: of the run file. devices: of the cluster. by_hand: axes that are left out are 1, otherwise free.
    """
    pp, dp, tp, cp, ep = (getattr(table, axis) or 1 for axis in ("pp", "dp", "tp", "cp", "ep"))
    if by_hand or table.dp is not None:
        copies, what = dp * cp, f"dp ({dp}) * cp ({cp})"
    else:  # experts are divided at most over the devices beside pp and tp
        copies, what = devices // (pp * tp), f"devices ({devices}) / (pp ({pp}) * tp ({tp}))"
    if copies and copies % ep:
        raise PlanError(
            f"mesh ep ({ep}) must divide {what} = {copies}, the ranks that hold the same layers; the nearest that do: "
            f"{nearest_divisors(copies, ep)}"
        )
    sizes = {name: size for name in ("pp", "dp", "tp", "cp") if (size := getattr(table, name)) is not None}
    if by_hand or not {"pp", "dp", "tp"} - sizes.keys() or table == MeshTable(pp=1, dp=1, tp=1):
        check_mesh(_axes_of(table), devices)
        return
    product = math.prod(sizes.values())
    if devices % product:
        what = " * ".join(f"{name} ({size})" for name, size in sizes.items()) + (f" = {product}" if len(sizes) > 1 else "")
        raise PlanError(
            f"mesh {what} must divide the devices ({devices}); the nearest that do: "
            f"{nearest_divisors(devices, product)}; or ask for devices = {-(-devices // product) * product}"
        )


def mesh_of(plan: PlanSection) -> Mesh:
    """The Mesh that [plan] asks for; axes that are left out are 1. Raises PlanError: dp_shard does not divide them."""
    return replace(_axes_of(plan.mesh or MeshTable()), dp_shard=plan.dp_shard or 0)


def _axes_of(table: MeshTable) -> Mesh:
    return Mesh(**{axis: size or 1 for axis, size in table})


def constraints_of(question: Question) -> PlanConstraints:
    """What a search must keep: the keys of [plan], and what the framework of [software] can run."""
    plan, row = question.plan, question.software.row
    kept = {key: getattr(plan, key) for key in CONSTRAINT_KEYS if key != "mesh"} | dict(plan.mesh or MeshTable())
    if plan.stage_layers is not None:
        kept["chunks"] = plan.chunks or 1
    if row is None:
        return PlanConstraints(**kept, synchronisation=plan.relaxed)
    kept |= {axis: 1 for axis in INNER_AXES if axis not in row.axes}
    return PlanConstraints(
        **kept,
        synchronisation=plan.relaxed,
        zero_stages=row.zero_stages,
        orders=row.orders,
        cut=row.cut,
        layers_alike=not (plan.pin or plan.forbid),
        framework=row.name,
    )
