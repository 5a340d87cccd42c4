"""What is wrong with a key of a run file, in words: the rule, the value, the fix."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from parsim.app.sections import MOST_DEVICES
from parsim.errors import ConfigError, near_matches
from parsim.files import parse_toml
from parsim.hardware.records import ConfigSection, PairsOf
from parsim.model.spec import is_known
from parsim.registry import is_reference
from parsim.units import parse_count

_RULES = {
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "string_type": "must be text in quotes",
    "bool_type": "must be true or false",
    "model_type": "must be a table",
    "dataclass_type": "must be a table",
    "model_attributes_type": "must be a table",
    "dict_type": "must be a table",
    "tuple_type": "must be a list",
    "finite_number": "must be finite",
    "string_too_short": "must not be empty",
}


def explained(problem: ErrorDetails, sections: type[ConfigSection]) -> str:
    """One wrong key: its path, its value, the rule and the fix."""
    location = key_parts(problem)
    path = ".".join(location)
    table_key = ".".join(location[:2])
    kind, value, context = problem["type"], problem["input"], problem.get("ctx", {})
    if kind == "described":
        return f"{path}: {context['rule']}"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        key, keys = location[-1], fields_of(_section_at(sections, location[:-1]))
        return f"unknown key {path} (= {_short(value)})" + (
            f": {NOT_BUILT[key]}" if key in NOT_BUILT else near_matches(key, keys)
        )
    if kind == "missing":
        place = f"under [{'.'.join(location[:-1])}]" if len(location) > 1 else "to the file"
        return f"{path} is missing; add {EXAMPLES.get(path, path)} {place}"
    if kind == "literal_error" and table_key not in _UNION_RULES:
        annotation = fields_of(_section_at(sections, location[:-1]))[location[-1]]
        allowed = get_args(next((part for part in get_args(annotation) if get_origin(part) is Literal), annotation))
        near = near_matches(value, allowed) if isinstance(value, str) else ""
        listing = "" if near.startswith("; known") else f" (known: {', '.join(allowed)})"
        return f"{path} = {_short(value)} is unknown{near}{listing}"
    if kind == "unknown_row":
        rule = str(context["rule"])
        return f"{path} = {_short(value)}{' ' if rule.startswith('is unknown') else ': '}{rule}"
    if table_key in _UNION_RULES:
        rule = _UNION_RULES[table_key]
    elif kind in _BOUNDS:
        sign, bound = _BOUNDS[kind]
        rule = f"must be {sign} {context[bound]}"
    else:
        rule = _RULES.get(kind, problem["msg"])
    example = EXAMPLES.get(table_key, "")
    return f"{path} = {_short(value)}: {rule}" + (f"; for example {example}" if example else "")


RUN_OPTIONS = ("adaptive", "checkpoint_every", "elastic", "max_restarts", "nproc", "resume", "timeout")
"""Options of `parsim run`, which no run file holds."""

NOT_BUILT = {
    **{name: f"give --{name.replace('_', '-')} to `parsim run`" for name in RUN_OPTIONS},
    **dict.fromkeys(
        ("dp_shard", "dp_replicate", "hsdp"),
        "HSDP is plan.zero_stage = 1, 2 or 3 with plan.dp_shard, over how many of the mesh.dp replicas states are divided; "
        "they are kept dp / dp_shard times",
    ),
    **dict.fromkeys(
        ("offload", "cpu_offload", "enable_cpu_offload", "offload_optimizer", "cpu_offloading"),
        "say what lies in the host's memory: plan.optimizer_offload = true, or plan.activation_offload = true or a list",
    ),
    **dict.fromkeys(
        ("etp", "expert_tensor_parallel_size", "expert_tensor_parallel_degree", "expert_tensor_parallelism"),
        "experts are cut over the ranks of mesh.tp as all layers are; for whole experts (expert tensor parallelism of 1) set "
        "mesh.tp = 1 and give its ranks to mesh.dp or mesh.cp, over which mesh.ep divides experts",
    ),
    "offload_param": "offload of parameters is not supported: they stay on the device; plan.optimizer_offload moves the state",
}
"""Keys of other libraries that no plan has, or not there, and what comes nearest."""

_BOUNDS = {
    "greater_than_equal": (">=", "ge"),
    "greater_than": (">", "gt"),
    "less_than_equal": ("<=", "le"),
    "less_than": ("<", "lt"),
}

_UNION_RULES = {
    "cluster.devices": f"must be a number of devices from 1 to {MOST_DEVICES} or a list of device numbers",
    "plan.activation_offload": "must be true, false or a list of component names",
    "plan.zero_stage": 'must be 0, 1, 2, 3 or "auto"',
    "model.args": "must hold text, finite numbers, true or false",
}

EXAMPLES = {
    "model": "the table [model] with name",
    "cluster": "the table [cluster] with profile or gpu",
    "model.name": 'name = "resnet50"',
    "model.args": "args = { num_classes = 100 }",
    "model.input_shape": "input_shape = [3, 224, 224]",
    "model.inputs": 'inputs = { x = { shape = [3, 32, 32] }, t = { shape = [], dtype = "int64", high = 1000 } }',
    "model.output": 'output = "logits"',
    "model.classes_dim": "classes_dim = 0",
    "model.control_flow": 'control_flow = "example"',
    "model.target": 'target = { shape = [32, 32], dtype = "int64", high = 5 }',
    "cluster.profile": 'profile = "dgx1-v100-32gb"',
    "cluster.gpu": 'gpu = "h100-sxm"',
    "cluster.instance": 'instance = "p5.48xlarge"',
    "cluster.group": '[[cluster.group]] with gpu = "h100-sxm" and nodes = 2',
    "cluster.gpus_per_node": "gpus_per_node = 8",
    "cluster.link": 'link = "nvswitch-4"',
    "cluster.cards_per_node": "cards_per_node = 8",
    "cluster.devices": "devices = 8 or devices = [0, 1, 2, 3]",
    "cluster.nodes": "nodes = 2",
    "cluster.network": 'network = "infiniband-100g"',
    "training.global_batch": "global_batch = 256",
    "training.learning_rate": "learning_rate = 0.05",
    "training.epochs": "epochs = 10",
    "training.steps": "steps = 100",
    "training.master_weights": "master_weights = true",
    "training.seed": "seed = 0",
    "plan.strategy": 'strategy = "adaptive"',
    "plan.mesh": "mesh = { pp = 2, dp = 2, tp = 1 }",
    "plan.dp_shard": "dp_shard = 8",
    "plan.microbatches": "microbatches = 8",
    "plan.pipeline_order": 'pipeline_order = "1f1b"',
    "plan.chunks": "chunks = 2",
    "plan.bucket_bytes": "bucket_bytes = 26214400",
    "plan.context_exchange": 'context_exchange = "all_gather"',
    "plan.capacity_factor": "capacity_factor = 1.25",
    "plan.routing_skew": "routing_skew = 0.3",
    "plan.fit_probability": "fit_probability = 0.95",
    "plan.zero_stage": 'zero_stage = "auto" or zero_stage = 1',
    "plan.activation_offload": 'activation_offload = true or activation_offload = ["h.*"]',
    "plan.placements": 'placements = { "layers.*" = "shard:heads+row/2", "*" = "batch" }',
    "plan.pin": 'pin = { "head" = "place:0" }',
    "plan.forbid": 'forbid = { "layers.*" = ["replicate", "shard"] }',
}


def key_parts(problem: ErrorDetails) -> list[str]:
    """`[cluster, devices, 1]`, without the names of union members that pydantic puts between."""
    tag = re.compile(r"(constrained-)?(int|float|str|bool)|(tuple|literal)\[.*")
    return [str(part) for part in problem["loc"] if not (isinstance(part, str) and tag.fullmatch(part))]


def _section_at(sections: type[ConfigSection], location: Sequence[str]) -> type:
    section, is_name = sections, False
    for key in location:
        if is_name or key.isdigit():  # the place in a list of tables (`cluster.group`)
            is_name = False
            continue
        annotation = fields_of(section)[key]
        (section,) = tables_in(annotation)
        is_name = get_origin(annotation) is dict
    return section


def fields_of(table: type) -> Mapping[str, Any]:
    """The annotations of a table's keys. Args: table: a ConfigSection, or a dataclass."""
    if issubclass(table, BaseModel):
        fields = table.model_fields.items()
        return {
            name: dict if any(isinstance(entry, PairsOf) for entry in field.metadata) else field.annotation
            for name, field in fields
        }
    return get_type_hints(table)


def tables_in(annotation: object) -> list[type]:
    """The tables that a field may hold: itself, or the members of a union."""
    if isinstance(annotation, type) and (issubclass(annotation, BaseModel) or is_dataclass(annotation)):
        return [annotation]
    return [table for member in get_args(annotation) for table in tables_in(member)]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# TOML of a command line: one value, and tables laid over tables.


def changes_of(settings: Mapping[str, Any] | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Settings by "section.key", and overrides laid over them, as nested tables. A setting that is None is left out.

    Raises: ConfigError: a key without a section, or an override of another form.
    """
    document: dict[str, Any] = {}
    for key, value in (settings or {}).items():
        parts = key.split(".")
        if value is None:
            continue
        if len(parts) < 2 or not all(parts):
            raise ConfigError(f"settings[{key!r}] = {value!r}: write the key as section.key, for example cluster.devices")
        merge(document, _nested(parts, _counted(key, plain(value))), "")
    merge(document, parse_overrides(overrides), "")
    return document


THOUSAND = {"model.args.seq": 1024, "training.global_batch": 1024, "training.tokens": 1000, "training.samples": 1000}
"""What k means in a short count ("64k") of these keys: lengths and batches are powers of two, amounts of data are not."""


def _counted(key: str, value: Any) -> Any:
    """The number that a short count of one of THOUSAND stands for; any other value as it is."""
    if key in THOUSAND and isinstance(value, str):
        with contextlib.suppress(ValueError):  # whoever checks the key says what it takes
            return parse_count(value, THOUSAND[key])
    return value


def _nested(keys: Sequence[str], value: Any) -> dict[str, Any]:
    return {keys[0]: _nested(keys[1:], value) if len(keys) > 1 else value}


def plain(value: Any) -> Any:
    """A value of Python as TOML would hold it: paths as texts, sequences as lists, numbers of numpy as Python's own."""
    match value:
        case Path():
            return str(value)
        case Mapping():
            return {str(key): plain(entry) for key, entry in value.items()}
        case str() | bool():
            return value
        case Integral():
            return int(value)
        case Real():
            return float(value)
        case Sequence():
            return [plain(entry) for entry in value]
    return value


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """`["plan.mesh.pp=2", "cluster.devices=[0, 1]"]` as nested tables. Raises ConfigError for a text of another form."""
    document: dict[str, Any] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        parts = [part.strip() for part in key.split(".")]
        if not equals or len(parts) < 2 or not all(parts):
            raise ConfigError(f"--set {text!r}: write it as section.key=value, for example --set cluster.devices=4")
        merge(document, _nested(parts, _counted(".".join(parts), parse_value(value.strip()))), "")
    return document


def parse_value(text: str) -> Any:
    """TOML where it is TOML, otherwise the text itself, so that strings need no quotes."""
    try:
        document = parse_toml(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return document["value"] if len(document) == 1 else text


def merge(base: dict[str, Any], change: Mapping[str, Any], path: str) -> None:
    """Put `change` over `base`, table by table."""
    for key, value in change.items():
        where = f"{path}{key}"
        if isinstance(value, dict) and key in base and value:
            if not isinstance(base[key], dict):
                inner = f"{where}.{next(iter(value))}"
                raise ConfigError(f"{inner} cannot be set, since {where} = {base[key]!r} is not a table; drop one of the two")
            merge(base[key], value, f"{where}.")
        else:
            base[key] = value


def scalar_pairs(texts: Sequence[str]) -> tuple[tuple[str, bool | int | float | str], ...]:
    """`["num_classes=10"]` as the sorted args of a ModelSpec. Raises ConfigError for a text of another form or a table."""
    pairs: dict[str, bool | int | float | str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        parsed = parse_value(value.strip())
        if not equals or not key.strip() or not isinstance(parsed, bool | int | float | str):
            raise ConfigError(f"--arg {text!r}: write it as key=value with one number or word, e.g. num_classes=10")
        pairs[key.strip()] = parsed
    return tuple(sorted(pairs.items()))


def parse_numbers(option: str, text: str) -> tuple[int, ...]:
    """`"0,1,2"` of a command-line option. Raises ConfigError for anything else."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{option} {text!r}: write whole numbers with commas between, e.g. 0,1,2") from error


def is_path(name: str) -> bool:
    """Whether a text is meant as a path and not as a name."""
    return (name.endswith((".json", ".toml")) or os.sep in name) and not is_known(name)


_PATH_KEYS = (
    ("model", "name"),
    ("model", "import_folder"),
    ("cluster", "profile"),
    ("cluster", "history"),
    ("cluster", "gpu"),
    ("cluster", "link"),
    ("cluster", "network"),
    ("plan", "strategy"),
    ("training", "data_root"),
)
_ALWAYS_PATHS = ("data_root", "history", "import_folder")


def make_paths_absolute(document: Mapping[str, Any], folder: Path) -> None:
    """Let the paths in the tables of a run file, which change in place, begin at its folder."""
    for table, key in _PATH_KEYS:
        section = document.get(table)
        value = section.get(key) if isinstance(section, dict) else None
        if isinstance(section, dict) and isinstance(value, str) and value and (key in _ALWAYS_PATHS or is_path(value)):
            section[key] = str(folder / Path(value).expanduser())


# The names "package.module:ROW" of a run file, and the folder in which Python finds their modules.


def references(document: Mapping[str, Any]) -> dict[str, str]:
    """Every "package.module:ROW" of a run file, by its key."""
    return {
        f"{table}.{path}": value
        for table, section in document.items()
        if isinstance(section, dict)
        for path, value in _texts(section, deep=table == "training")
        if is_reference(value)
    }


def _texts(section: Mapping[str, Any], *, deep: bool) -> Iterator[tuple[str, str]]:
    """Every text of a table by its key; `deep`: those of tables and lists in it too."""
    for key, value in section.items():
        if isinstance(value, str):
            yield key, value
        elif deep and isinstance(value, dict):
            yield from ((f"{key}.{path}", text) for path, text in _texts(value, deep=True))
        elif deep and isinstance(value, list | tuple):
            yield from ((f"{key}[{place}]", text) for place, text in enumerate(value) if isinstance(text, str))


def put_on_path(document: Mapping[str, Any], folder: Path) -> None:
    """Make the modules of a run file's names importable, as far as `folder` (or its model.import_folder) holds them.

    Raises ConfigError where another module of that name was imported before.
    """
    folder = _import_folder(document, folder)
    for key, name in references(document).items():
        if not holds(folder, name):
            continue
        module = sys.modules.get(root_of(name))
        if module is not None:
            places = [module.__file__] if getattr(module, "__file__", None) else list(getattr(module, "__path__", ()))
            if not any(Path(str(place)).resolve().is_relative_to(folder.resolve()) for place in places):
                raise ConfigError(
                    f"{key} = {name!r}: {root_of(name)} lies in {folder}, but this process has already imported "
                    f"{', '.join(map(str, places)) or 'a built-in module'} under that name; rename one of them, or start a "
                    "new process"
                )
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
            importlib.invalidate_caches()


def _import_folder(document: Mapping[str, Any], folder: Path) -> Path:
    model = document.get("model")
    named = model.get("import_folder") if isinstance(model, dict) else None
    return Path(named) if isinstance(named, str) else folder


ALLOW_VARIABLE = "PARSIM_ALLOW_CODE"
"""Set to 1: run files may name code outside their own folders. What --allow-code sets for one command."""

_trusted: set[Path] = set()
"""Folders of run files that this process has read: the configs of their run folders name code there."""


def check_trusted(document: Mapping[str, Any], folder: Path, where: str, *, calls_model: bool = True) -> None:
    """Raise ConfigError for a name "package.module:ROW" outside the folder of a run file, unless the user allows code.

    A run file is code as soon as it names some: its own folder is trusted with it, nothing else is.

    Args: document: of the file, without what the user has overridden. folder: of the file. calls_model: False if its model is
        not going to be made: of a run that is only looked at.
    """
    imports = _import_folder(document, folder).resolve()
    if calls_model and imports.is_relative_to(folder.resolve()):
        _trusted.add(imports)
    for key, name in references(document).items():
        trusted = imports in _trusted and holds(imports, name)
        if trusted or (key == "model.name" and not calls_model) or os.environ.get(ALLOW_VARIABLE) == "1":
            continue
        raise ConfigError(
            f"{where}: {key} = {name!r} runs code outside the file's folder ({folder}); if you trust the file and "
            f"that code, give --allow-code (from Python: set {ALLOW_VARIABLE}=1 in the environment)"
        )


def holds(folder: Path, name: str) -> bool:
    """Whether the module of "package.module:ROW" lies in the folder."""
    root = root_of(name)
    return (folder / f"{root}.py").is_file() or (folder / root).is_dir()


def root_of(name: str) -> str:
    """`package` of "package.module:ROW"."""
    return name.partition(":")[0].split(".")[0]
