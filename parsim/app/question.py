"""A question: a run file, or a model with a cluster and a batch, as a checked RunConfig and the defaults that it took.

The model and the cluster may also be values (an nn.Module, a Model, a Cluster). The config then holds their names alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from parsim.app.config import RunConfig, load_config, parse_config
from parsim.app.config_text import holds, parse_overrides, put_on_path, references, root_of
from parsim.app.sections import OPERATION, ConfigSection, check_widths
from parsim.errors import ConfigError, ModelError
from parsim.files import document_text, value_text
from parsim.formats.recipe import Recipe, is_framework_file, read_recipe
from parsim.model.catalogue.names import is_transformer, named, sequence_of, shape_of
from parsim.model.catalogue.zoo import ZOO
from parsim.model.model import ADDED_UP, COUPLED, MIXING, Model
from parsim.model.spec import is_config, is_known, takes_usual
from parsim.units import nearest_divisors

if TYPE_CHECKING:
    from torch import nn

    from parsim.hardware.cluster import Cluster
    from parsim.hardware.devices import DeviceType


# Splits that a named transformer does not have: axes of plan.mesh that divide neither heads, nor layers, nor experts.


def check_splits(config: RunConfig) -> None:
    """Check the axes that the question gives against the sizes of the model.

    Args:
        config: of a question; any other model passes.

    Raises:
        ConfigError: with the nearest axis that divides.
    """
    row, mesh = named(config.model.name), config.plan.mesh
    if row is None or row.shape is None or mesh is None:
        return
    args = dict(config.model.args)
    shape, name = shape_of(config.model.name, args), config.model.name
    if mesh.tp is not None:
        _divides("tp", mesh.tp, "heads", shape.heads, name)
        _divides("tp", mesh.tp, "inside of the MLP", shape.inner, name)
        if config.plan.sequence_parallel is not False and args.get("sequence_parallel", True):
            _divides("tp", mesh.tp, "tokens of a sample", _tokens(config, args), name)
    if mesh.pp is not None:
        stages = mesh.pp * (config.plan.chunks or 1)
        if stages > shape.layers:
            raise ConfigError(
                f"plan.mesh.pp = {mesh.pp} with {config.plan.chunks or 1} chunks are {stages} stages, and {name} has "
                f"{shape.layers} layers; the nearest: pp * chunks <= {shape.layers}"
            )
    if mesh.ep is not None and shape.experts:
        _divides("ep", mesh.ep, "experts", shape.experts, name)
    if mesh.cp is not None:
        _divides("cp", mesh.cp, "tokens of a sample", _tokens(config, args), name)


def _tokens(config: RunConfig, args: Mapping[str, object]) -> int:
    shape = config.model.input_shape
    return shape[0] if shape else sequence_of(config.model.name, dict(args))


def _divides(axis: str, ways: int, what: str, size: int, name: str) -> None:
    if size % ways:
        raise ConfigError(
            f"plan.mesh.{axis} = {ways} must divide the {what} ({size:,}) of {name}; the nearest that do: "
            f"{nearest_divisors(size, ways)}"
        )


# What a question about a transformer takes where it does not say: half precision and a fused Adam, and a named one components
# that tensor parallelism can cut.
#
# So do models of the library transformers (a config.json, `t5-large`) on GPUs. On this machine, which was calibrated with the
# precision and the optimizer of the run file, they take those of every other model.


OPTIMIZER = "adamw_fused"
PRECISIONS = ("bf16", "amp_fp16", "amp_bf16")
"""The first that the device has a peak for."""


def with_usual(config: RunConfig, cluster: Cluster | None = None) -> RunConfig:
    """The config with these defaults, which still count as left open; the same config for any other model.

    Args:
        config: of a question. cluster: where it was given as a value.

    Raises:
        ProfileError: the cluster that the config names cannot be read.
        ConfigError: an axis of plan.mesh does not divide the model, or a key belongs to another precision.
    """
    found = _filled_in(config, cluster)
    check_widths(found.training)
    return found


def _filled_in(config: RunConfig, cluster: Cluster | None) -> RunConfig:
    row = named(config.model.name)
    if row is None or row.shape is None:
        return _of_transformers(config, cluster) if takes_usual(config.model.name) and not _is_saved(config) else config
    check_splits(config)
    training: dict[str, Any] = {"optimizer": OPTIMIZER, "precision": _precision(config, cluster)}
    table = config.plan.mesh
    cut = config.plan.strategy not in ("single", "dp") and (table is None or table.tp != 1)
    model = {"granularity": "sublayer" if cut else "block"}
    return config.model_copy(update={"training": _filled(config.training, training), "model": _filled(config.model, model)})


def _is_saved(config: RunConfig) -> bool:
    """A finished Model, of any architecture and with weights of one width."""
    from parsim.app.load import is_saved_model

    return is_config(config.model.name) and is_saved_model(Path(config.model.name))


def _of_transformers(config: RunConfig, cluster: Cluster | None) -> RunConfig:
    device = _device(config, cluster)
    if device is None or device.kind == "cpu":
        return config
    training = {"optimizer": OPTIMIZER, "precision": _precision(config, cluster)}
    return config.model_copy(update={"training": _filled(config.training, training)})


def _precision(config: RunConfig, cluster: Cluster | None) -> str:
    if "precision" in config.training.model_fields_set or config.training.dtype != "float32":
        return config.training.precision
    device = _device(config, cluster)
    peaks = device.peak_flop_per_s if device is not None else {}
    return next((name for name in PRECISIONS if name in peaks), config.training.precision)


def _device(config: RunConfig, cluster: Cluster | None) -> DeviceType | None:
    """The first device's type; None for this machine, which may not have been calibrated yet."""
    if cluster is None and config.cluster.machine == "this-machine":
        return None
    from parsim.app.load import cluster_of

    return (cluster or cluster_of(config)).devices[0].type


def _filled(section: Any, values: dict[str, Any]) -> ConfigSection:
    """A section with values for keys that were left out; they stay left out for whoever asks what was given."""
    given = set(section.model_fields_set)
    new = {key: value for key, value in values.items() if key not in given}
    found: ConfigSection = type(section).model_construct(_fields_set=given, **{**dict(section), **new})
    return found


# The folder of a run file is on the import path: `name = "mymodel:factory"`, or any other "package.module:ROW", finds a
# mymodel.py beside the file.


def importable(config: RunConfig, folder: Path) -> RunConfig:
    """Put the folder that holds the module of a name "package.module:ROW" first on the import path.

    Args:
        folder: of the run file, or the current directory for a question without a file.

    Returns:
        The config, with `model.import_folder` filled in where `folder` holds the module of one of its names.

    Raises:
        ConfigError: another module of that name was imported before, so this process would use it instead.
    """
    named = references(config.to_dict())
    if config.model.import_folder is None:
        if not any(holds(folder, name) for name in named.values()):
            return config
        model = config.model.model_copy(update={"import_folder": str(folder.resolve())})
        config = config.model_copy(update={"model": model})
    chosen = Path(str(config.model.import_folder))
    if named and not any(holds(chosen, name) for name in named.values()):
        key, name = next(iter(named.items()))
        raise ConfigError(
            f"model.import_folder = {str(chosen)!r} holds no {root_of(name)}.py, which {key} = {name!r} needs; name its folder"
        )
    put_on_path(config.to_dict(), chosen)
    return config


Given = Literal["name", "module", "model"]
"""What the model was given as: by name (zoo, factory, config, run file), as an nn.Module, or as a Model."""

EXAMPLE = "parsim plan resnet50 --on dgx1-v100-32gb --batch 1024"
FILE_SUFFIX = ".toml"
DEVICES = "cluster.devices"
MODULE_KEYS = {"name", "input_shape", "inputs", "granularity", "loss", "output", "classes_dim", "target", "control_flow"}
"""Keys of [model] that say more about an nn.Module."""

_PREDICTED_FROM: tuple[tuple[str, str, str], ...] = (
    ("training", "precision", "precision {}"),
    ("training", "optimizer", "optimizer {}"),
    ("cluster", "nodes", "{} node"),
    ("model", "granularity", "granularity {}"),
    ("plan", "strategy", "strategy {}"),
    ("plan", "zero_stage", "zero_stage {}"),
    ("plan", "recompute", "recompute {}"),
)
"""Keys whose defaults change what is predicted, and how they are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked.

    Attributes:
        config: every key, with its default filled in.
        assumed: (key, value) of the defaults that were taken, of those keys that a prediction depends on.
        name: for a folder: the stem of the run file, or the model's name.
        model, cluster: where they were given as values. given: what the model was given as.
        recipe: what was made of a framework's file; None without one.
    """

    config: RunConfig
    assumed: tuple[tuple[str, Any], ...]
    name: str
    model: Model | None = None
    cluster: Cluster | None = None
    given: Given = "name"
    recipe: Recipe | None = None

    def on_devices(self, count: int) -> Question:
        """The same with the number of devices filled in, if the question left it open; it is known once the cluster is
        loaded.
        """
        told = tuple((key, count if key == DEVICES else value) for key, value in self.assumed)
        return replace(self, assumed=told)


def assumed_text(assumed: Sequence[tuple[str, Any]]) -> str:
    """`assumed: precision fp32, optimizer sgd_momentum, ...`; empty where nothing was left open."""
    texts = {f"{table}.{key}": text for table, key, text in _PREDICTED_FROM}
    told = [_told(key, value, texts) for key, value in assumed]
    return f"assumed: {', '.join(told)}" if told else ""


def precision_text(assumed: Sequence[tuple[str, Any]], peak_flop_per_s: Mapping[str, float]) -> str:
    """What the default fp32 leaves unused of a device with bf16; empty otherwise.

    Args:
        assumed: keys with the defaults that were taken. peak_flop_per_s: of the device, by precision.
    """
    full, half = peak_flop_per_s.get("fp32"), peak_flop_per_s.get("bf16")
    if ("training.precision", "fp32") not in assumed or not full or not half or half < 2 * full:
        return ""
    return f"precision fp32 was assumed; training.precision = amp_bf16 has {half / full:.0f} times its peak on this device"


def loss_text(model: Model) -> str:
    """`loss: cross_entropy`, with what was assumed of a loss that is the user's own."""
    note = loss_note(model)
    return f"loss: {model.loss or 'as the saved Model was traced'}{f' ({note})' if note else ''}"


def loss_note(model: Model) -> str:
    """What is assumed of a loss that is the user's own; empty for parsim's, which are sums over samples."""
    if model.loss_form == COUPLED:
        return (
            "not a sum over samples: the loss of a batch, or its gradient, is not the mean of those of its samples, so data "
            "parallelism and microbatches change it"
        )
    if model.loss_form == ADDED_UP:
        return (
            "a scalar that is the sum over the batch, and a scalar is taken as the mean: replicas and microbatches make its "
            "gradients smaller; return the mean, or one number per sample"
        )
    if model.loss_form == MIXING:
        return (
            "the module mixes the samples of a batch: its loss changes where the batch is divided, so data parallelism and "
            "microbatches train another model than one process"
        )
    form = model.loss_form.removesuffix("unchecked").strip()
    text = {"mean": "a scalar, taken as the mean over the batch", "per sample": "one number per sample, added up"}.get(form, "")
    if model.loss_form.endswith("unchecked"):
        return f"{text}; not checked whether batches add up".removeprefix("; ")
    return f"{text}; checked on a few samples" if text else ""


def constant_text(model: Model) -> str:
    """`constant inputs: input:2`, which were taken for the same in every batch; empty without any."""
    values = [model.value[name] for name in model.inputs if name in model.value]
    names = [value.name for value in values if not value.bytes_per_sample and value.fixed_bytes]
    return f"constant inputs: {', '.join(names)} (dim 0 is not the batch)" if names else ""


def _told(key: str, value: Any, texts: Mapping[str, str]) -> str:
    if key == DEVICES:
        return f"all {value} devices" if value != 1 else "1 device"
    if key == "model.input_shape":
        return f"input_shape {list(value)}"
    if key.startswith("model.args."):
        return f"{key.removeprefix('model.args.')} {value}"
    return texts[key].format(value)


def question_from_file(path: Path, overrides: Sequence[str] = ()) -> Question:
    """Read a run file; `overrides` as `--set` takes them. Raises ConfigError."""
    config = with_usual(importable(load_config(path, overrides), path.resolve().parent))
    return Question(config=config, assumed=taken_defaults(config), name=path.stem)


def question_of(
    model: str | Path | Model | nn.Module,
    *,
    cluster: str | Path | Cluster | None = None,
    global_batch: int | None = None,
    settings: Mapping[str, object] | None = None,
    overrides: Sequence[str] = (),
    example_inputs: Any = None,
) -> Question:
    """A run file, or a model on a cluster with a batch.

    Args:
        model: the path of a run file; the name of a model of the zoo; "package.module:factory"; the path of a Hugging Face
            config.json or of a saved Model; a Model; or an nn.Module.
        cluster: a shipped profile by name, the path of one, "this-machine", or a Cluster.
        global_batch: samples per step over all replicas.
        settings: further keys of a run file, such as {"plan.strategy": "dp"}. overrides: the same as texts of `--set`.
        example_inputs: of an nn.Module: a batch as the module takes it; left out: `settings["model.input_shape"]` counts.

    Raises:
        ConfigError: cluster or batch is missing, or stands beside a run file; a wrong key or value.
        ModelError: an unknown model.
    """
    if isinstance(model, str | Path) and not is_known(str(model)) and is_framework_file(Path(model)):
        return _question_of_recipe(Path(model), cluster, global_batch, settings, overrides)
    changes = [*(f"{key}={value_text(value)}" for key, value in (settings or {}).items() if value is not None), *overrides]
    if isinstance(model, str | Path) and is_run_file(model):
        _check_alone(Path(model), cluster, global_batch)
        return question_from_file(Path(model), changes)
    given: Given = "name"
    value: Model | None = None
    if example_inputs is not None and isinstance(model, str | Path | Model):
        raise ConfigError(f"example_inputs are for an nn.Module, and {model!r} is none; drop them")
    if isinstance(model, Model):
        given, value, name = "model", model, model.name
    elif isinstance(model, str | Path):
        name = str(model)
        _check_known(name)
    else:
        given, name = "module", type(model).__name__
    if cluster is None or global_batch is None:
        raise ConfigError(_missing_text(name, cluster, global_batch))
    held = None if isinstance(cluster, str | Path) else cluster
    profile = str(cluster) if held is None else held.profile.name
    document: dict[str, dict[str, Any]] = {
        "model": {"name": name},
        "cluster": {"profile": profile} if held is not None else _cluster_table(profile, changes),
        "training": {"global_batch": global_batch},
    }
    config = importable(parse_config(document_text(document), changes, where=f"{name} on {profile}"), Path.cwd())
    config = with_usual(config, held) if given == "name" else config
    if held is not None:
        _check_untouched("cluster", config.cluster.model_fields_set - {"profile"} - OPERATION, "was given as a Cluster")
    if given == "module":
        _check_untouched("model", config.model.model_fields_set - MODULE_KEYS, "was given as a module")
        value = traced_model(model, example_inputs, config)
        _check_weights(model, config.training.precision)
    elif given == "model":
        _check_untouched("model", config.model.model_fields_set - {"name"}, "was given as a finished Model")
    return Question(
        config=config,
        assumed=taken_defaults(config, model=value, cluster=held),
        name=re.sub(r"[^A-Za-z0-9._-]+", "-", Path(name).stem if name.endswith(".json") else name),
        model=value,
        cluster=held,
        given=given,
    )


def _question_of_recipe(
    path: Path,
    cluster: str | Path | Cluster | None,
    global_batch: int | None,
    settings: Mapping[str, object] | None,
    overrides: Sequence[str],
) -> Question:
    """The question that a file of Megatron-LM, NeMo or torchtitan asks; what is given beside it counts more."""
    recipe = read_recipe(path)
    if cluster is None:
        starts = f"starts {recipe.processes} processes and " if recipe.processes else ""
        count = recipe.processes or 64
        raise ConfigError(f"{path} {starts}does not say on which GPUs; add --gpus {count}xh100-sxm (cluster=)")
    if global_batch is not None:
        recipe.training["global_batch"] = global_batch
    given = recipe.settings(_devices(cluster, settings, overrides)) | dict(settings or {})
    batch = given.pop("training.global_batch")
    found = question_of(recipe.model, cluster=cluster, global_batch=int(str(batch)), settings=given, overrides=overrides)
    return replace(found, recipe=recipe, name=re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem))


def _devices(cluster: str | Path | Cluster, settings: Mapping[str, object] | None, overrides: Sequence[str]) -> int:
    """Of a cluster, with the keys that change it. Raises ConfigError, ProfileError."""
    from parsim.app.load import devices_of

    if not isinstance(cluster, str | Path):
        return cluster.size
    keys = [f"{key}={value_text(value)}" for key, value in (settings or {}).items() if key.startswith("cluster.")]
    keys += [text for text in overrides if text.startswith("cluster.")]
    return devices_of(_cluster_table(str(cluster), keys), keys, where=str(cluster))


def per_node_of(changes: Sequence[str]) -> int | None:
    """The GPUs of a node that overrides set, where the number of nodes follows from it; None where they do not.

    Args:
        changes: as `--set` takes them.
    """
    table = parse_overrides(changes).get("cluster")
    per_node = table.get("gpus_per_node") if isinstance(table, dict) and "nodes" not in table else None
    return per_node if isinstance(per_node, int) and per_node > 0 else None


def _cluster_table(text: str, changes: Sequence[str]) -> dict[str, Any]:
    """The table [cluster] of a profile, or of GPUs such as "1024xh100-sxm" in nodes as the changes say."""
    from parsim.hardware.parts import is_shorthand, machines_of

    if not is_shorthand(text):
        return {"profile": text}
    found = machines_of(text, per_node_of(changes))
    table: dict[str, Any] = {"gpu": found.gpu, "gpus_per_node": found.gpus_per_node, "nodes": found.nodes}
    return table | ({"link": found.link} if found.link else {})


def is_run_file(name: str | Path) -> bool:
    """Whether a first argument means a run file and not a model: it ends in .toml, or is there and no JSON."""
    path = Path(name)
    if is_known(str(name)) or ":" in str(name):
        return False
    return path.suffix == FILE_SUFFIX or path.is_dir() or (path.is_file() and path.suffix != ".json")


def traced_model(module: Any, example_inputs: Any, config: RunConfig) -> Model:
    """The Model of an nn.Module, with its loss, from example inputs or model.input_shape. Raises ModelError, TraceError."""
    from parsim.model.load import model_from_module

    spec = config.model_spec
    return model_from_module(
        module,
        example_inputs,
        input_shape=spec.input_shape,
        inputs=spec.inputs,
        granularity=config.model.granularity,
        loss=spec.objective(),
        output=spec.output,
        control_flow=spec.control_flow,
    )


def _check_weights(module: Any, precision: str) -> None:
    """A module is recorded with its weights in the type it has them in. Raises ConfigError for a precision of another one."""
    from parsim.model.formats import recorded_weights

    wanted = recorded_weights(precision)
    other = {str(tensor.dtype).removeprefix("torch.") for tensor in module.parameters() if tensor.is_floating_point()} - {
        wanted
    }
    if other:
        raise ConfigError(
            f"training.precision = {precision!r} keeps weights in {wanted}, and the module has them in "
            f"{', '.join(sorted(other))}; give module.to(torch.{wanted}), or another precision"
        )


def taken_defaults(
    config: RunConfig, *, model: Model | None = None, cluster: Cluster | None = None
) -> tuple[tuple[str, Any], ...]:
    """The keys that the question left open and that a prediction depends on, with the values taken for them."""
    found: list[tuple[str, Any]] = []
    if cluster is None and config.cluster.devices is None:
        found.append((DEVICES, None))
    for table, key, _ in _PREDICTED_FROM:
        section = getattr(config, table)
        if table == "plan" and config.plan.plan_path is not None:
            continue
        if (table == "model" and model is not None) or (table == "cluster" and cluster is not None):
            continue
        if key not in section.model_fields_set:
            found.append((f"{table}.{key}", getattr(section, key)))
    if model is None and (config.model.name in ZOO or is_transformer(config.model.name)):
        from parsim.model.spec import resolve

        whole = resolve(config.model_spec)
        given = dict(config.model.args)
        found += [(f"model.args.{key}", value) for key, value in whole.args if key not in given]
        if config.model.input_shape is None and config.model.name in ZOO:
            found.append(("model.input_shape", whole.input_shape))
    return tuple(found)


def _check_alone(path: Path, cluster: object, global_batch: object) -> None:
    """A run file says its cluster and batch itself, where there is one."""
    if not path.exists():
        return  # said where it is read
    if path.is_dir() and (config := path / "config.json").is_file():
        raise ConfigError(f"{path} is a folder; for the Hugging Face model in it give {config}")
    given = [
        (option, key, value)
        for option, key, value in (
            ("--on or --gpus (cluster=)", "[cluster]", cluster),
            ("--batch (global_batch=)", "training.global_batch", global_batch),
        )
        if value is not None
    ]
    if given:
        option, key, value = given[0]
        how = f"--set {key}={value}" if key != "[cluster]" else "--set cluster.profile=... (or cluster.gpu, cluster.nodes)"
        raise ConfigError(
            f"{option} is for a question without a file, but {path} is a run file, which says {key} itself; drop it, or "
            f"override the file: {how}"
        )


def _check_known(name: str) -> None:
    """A name without a colon or a .json at its end is one of the zoo."""
    from parsim.model.spec import is_config, zoo_row

    if ":" not in name and not is_config(name) and not is_known(name):
        try:
            zoo_row(name)
        except ModelError as error:
            raise ModelError(f"{error}, or a run file (RUN{FILE_SUFFIX})") from error


def _missing_text(name: str, cluster: object, global_batch: object) -> str:
    missing = [
        text
        for text, value in (("--on CLUSTER (cluster=)", cluster), ("--batch N (global_batch=)", global_batch))
        if value is None
    ]
    return (
        f"{name} alone is not a question: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; for example "
        f"`{EXAMPLE}`, or give a run file"
    )


def _check_untouched(table: str, keys: set[str], what: str) -> None:
    if keys:
        raise ConfigError(f"the {table} {what}: {table}.{min(keys)} cannot change it; drop it")
