"""A question: a run file, or a model with a cluster and a batch, as a checked Question.

The model and the cluster may also be values (an nn.Module, a Model, a Cluster). The tables then hold their names alone.

Keys that are left out take defaults. Two of them depend on the model and the device (`with_usual`): a transformer takes half
precision and a fused Adam. On this machine, which was calibrated with the precision and the optimizer of the run file, models
of the library transformers (a config.json, `t5-large`) take those of every other model.

What is one component follows from the plans that are asked for (`with_components`): model.granularity counts where plans
have no tensor parallelism, or where the question names components.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from parsim.app.config import (
    INNER_AXES,
    THIS_MACHINE,
    ModelSection,
    PlanSection,
    Question,
    cluster_section,
    load_config,
    question_from,
)
from parsim.app.config_text import changes_of, holds, put_on_path, references, root_of
from parsim.app.load import check_untuned, cluster_of, is_saved_model
from parsim.app.sections import OPERATION, check_widths
from parsim.errors import ConfigError, ModelError
from parsim.formats.configs import is_framework_file, read_recipe
from parsim.formats.recipe import GENERIC, flat_table, whole_number
from parsim.hardware.cluster import Cluster
from parsim.hardware.parts import is_shorthand, machines_of
from parsim.hardware.records import ConfigSection
from parsim.model.catalogue.names import OWN, is_transformer, named, sequence_of, shape_of
from parsim.model.catalogue.zoo import ZOO
from parsim.model.formats import recorded_weights
from parsim.model.load import model_from_module
from parsim.model.model import ADDED_UP, COUPLED, MIXING, SUBLAYER, Model
from parsim.model.spec import is_config, is_known, resolve, takes_usual, zoo_row
from parsim.model.tuning import tuned
from parsim.plans.plan import ZERO_STAGES
from parsim.units import nearest_divisors

if TYPE_CHECKING:
    from torch import nn


EXAMPLE = "parsim plan llama3-8b --gpus 8xh100-sxm --batch 64"
FILE_SUFFIX = ".toml"
DEVICES = "cluster.devices"
BATCH = "training.global_batch"
FRAMEWORK, UNKNOWN = "software.framework", "unknown"
NETWORK = "cluster.network"
MODULE_KEYS = {"name", "input_shape", "inputs", "granularity", "loss", "output", "classes_dim", "target", "control_flow"}
"""Keys of [model] that say more about an nn.Module."""
USUAL_OPTIMIZER = "adamw_fused"
USUAL_PRECISIONS = ("bf16", "amp_fp16", "amp_bf16")
"""Of a transformer: the first that the device has a peak for."""

_PREDICTED_FROM = {
    BATCH: "global_batch {}",
    "training.precision": "precision {}",
    "training.optimizer": "optimizer {}",
    "cluster.nodes": "{} node",
    NETWORK: "network {}",
    "model.granularity": "granularity {}",
    "plan.strategy": "strategy {}",
    "plan.zero_stage": "zero_stage {}",
    "plan.recompute": "recompute {}",
    FRAMEWORK: "framework {}",
}
"""Keys whose defaults change what is predicted, and how they are shown."""


def assumed_text(assumed: Mapping[str, Any]) -> str:
    """`assumed: precision fp32, optimizer sgd_momentum, ...`; empty where nothing was left open."""
    texts = []
    for key, value in assumed.items():
        if key == DEVICES:
            texts.append(f"all {value} devices" if value != 1 else "1 device")
        elif key == "model.input_shape":
            texts.append(f"input_shape {list(value)}")
        elif key.startswith("model.args."):
            texts.append(f"{key.removeprefix('model.args.')} {value}")
        else:
            texts.append(_PREDICTED_FROM[key].format(value))
    return f"assumed: {', '.join(texts)}" if texts else ""


def left_out_text(question: Question) -> str:
    """What a search did not propose because the framework cannot run it; empty where none is named."""
    row = question.software.row
    if row is None or question.plan.plan_path is not None or question.plan.strategy == "custom":
        return ""
    lacking = [axis for axis in INNER_AXES if axis not in row.axes]
    stages = [str(stage) for stage in ZERO_STAGES if stage not in row.zero_stages]
    parts = [
        f"a mesh with {', '.join(lacking)}" if lacking else "",
        f"ZeRO {', '.join(stages)}" if stages else "",
        f"pipeline orders but {', '.join(row.orders)}" if row.orders and "pp" in row.axes else "",
        "layers that lie or are recomputed otherwise than others",
    ]
    return f"not proposed, since {row.name} does not run it: {'; '.join(filter(None, parts))}"


def precision_text(assumed: Mapping[str, Any], peak_flop_per_s: Mapping[str, float]) -> str:
    """What the default fp32 leaves unused of a device with bf16; empty otherwise.

    Args: assumed: keys with the defaults that were taken. peak_flop_per_s: of the device, by precision.
    """
    full, half = peak_flop_per_s.get("fp32"), peak_flop_per_s.get("bf16")
    if assumed.get("training.precision") != "fp32" or not full or not half or half < 2 * full:
        return ""
    return f"precision fp32 was assumed; training.precision = amp_bf16 has {half / full:.0f} times its peak on this device"


def loss_text(model: Model) -> str:
    """`loss: cross_entropy`, with what was assumed of a loss that is the user's own."""
    note = loss_note(model)
    return f"loss: {model.loss or 'as the saved Model was traced'}{f' ({note})' if note else ''}"


_LOSS_NOTES = {
    COUPLED: "not a sum over samples: the loss of a batch, or its gradient, is not the mean of those of its samples, so data "
    "parallelism and microbatches change it",
    ADDED_UP: "a scalar that is the sum over the batch, and a scalar is taken as the mean: replicas and microbatches make its "
    "gradients smaller; return the mean, or one number per sample",
    MIXING: "the module mixes the samples of a batch: its loss changes where the batch is divided, so data parallelism and "
    "microbatches train another model than one process",
}


def loss_note(model: Model) -> str:
    """What is assumed of a loss that is the user's own; empty for parsim's, which are sums over samples."""
    if model.loss_form in _LOSS_NOTES:
        return _LOSS_NOTES[model.loss_form]
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


def question_from_file(path: Path, overrides: Sequence[str] = (), *, settings: Mapping[str, object] | None = None) -> Question:
    """Read a run file; `overrides` and `settings` as `question_of` takes them. Raises ConfigError."""
    question = importable(load_config(path, overrides, settings=settings), path.resolve().parent)
    return with_components(with_usual(with_batch(question.sourced(name=path.stem))))


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
        global_batch: samples per step over all replicas; None: `with_batch`.
        settings: further keys of a run file, such as {"plan.strategy": "dp"}. overrides: the same as texts of `--set`.
        example_inputs: of an nn.Module: a batch as the module takes it; left out: `settings["model.input_shape"]` counts.
    Raises: ConfigError: the cluster is missing, or it or a batch stands beside a run file; a wrong key or value. ModelError: an
        unknown model.
    """
    if isinstance(model, str | Path) and not is_known(str(model)) and is_framework_file(Path(model)):
        return _question_of_recipe(Path(model), cluster, global_batch, settings, overrides)
    if isinstance(model, str | Path) and is_run_file(model):
        _check_alone(Path(model), cluster, global_batch)
        return question_from_file(Path(model), overrides, settings=settings)
    if example_inputs is not None and isinstance(model, str | Path | Model):
        raise ConfigError(f"example_inputs are for an nn.Module, and {model!r} is none; drop them")
    form: Literal["name", "module", "model"] = "module"
    if isinstance(model, Model):
        form, name = "model", model.name
    elif isinstance(model, str | Path):
        form, name = "name", str(model)
        if ":" not in name and not is_config(name) and not is_known(name):
            try:
                zoo_row(name)
            except ModelError as error:
                raise ModelError(f"{error}, or a run file (RUN{FILE_SUFFIX})") from error
    else:
        name = type(model).__name__
    if cluster is None:
        raise ConfigError(
            f"{name} alone is not a question: --gpus COUNTxGPU or --on CLUSTER (cluster=) is missing; for example `{EXAMPLE}`, "
            "or give a run file"
        )
    if isinstance(cluster, Cluster):
        profile, table = cluster.profile.name, {"profile": cluster.profile.name}
    else:
        profile, table = str(cluster), _cluster_table(str(cluster), changes_of(settings, overrides))
    training = {} if global_batch is None else {"global_batch": global_batch}
    document: dict[str, Any] = {"model": {"name": name}, "cluster": table, "training": training}
    question = question_from(document, overrides, settings=settings, where=f"{name} on {profile}")
    stem = Path(name).stem if name.endswith(".json") else name
    question = importable(question, Path.cwd()).sourced(
        name=re.sub(r"[^A-Za-z0-9._-]+", "-", stem), cluster=cluster if isinstance(cluster, Cluster) else None, form=form
    )
    if isinstance(cluster, Cluster):
        _check_untouched("cluster", question.cluster.model_fields_set - {"profile"} - OPERATION, "was given as a Cluster")
    question = with_batch(question)
    if isinstance(model, str | Path):
        return with_components(with_usual(question))
    if isinstance(model, Model):
        _check_untouched("model", question.model.model_fields_set - {"name"}, "was given as a finished Model")
        check_untuned(question)
        return question.sourced(model=model)
    _check_untouched("model", question.model.model_fields_set - MODULE_KEYS, "was given as a module")
    question = with_components(question)
    return question.sourced(model=_traced_model(model, example_inputs, question))


AXES = frozenset({"tp", "pp", "cp", "ep"})
"""Axes of the mesh that a file may lack or --set may change; the replicas follow from the devices."""


def _question_of_recipe(
    path: Path,
    cluster: str | Path | Cluster | None,
    global_batch: int | None,
    settings: Mapping[str, object] | None,
    overrides: Sequence[str],
) -> Question:
    recipe = read_recipe(path)
    given = flat_table(changes_of(settings, overrides))
    if global_batch is not None:
        given["training.global_batch"] = global_batch
    if "model.name" in given:  # the sizes are then those of the name
        if recipe.model == GENERIC:
            recipe.args = {key: value for key, value in recipe.args.items() if key in OWN}
            recipe.missing = {key: why for key, why in recipe.missing.items() if not key.startswith("model.args.")}
        recipe.model = str(given["model.name"])
    if lacking := [(key, why) for key, why in recipe.missing.items() if key not in given]:
        hint = " ".join(f"--set {key}={'NAME' if key == 'model.name' else 'N'}" for key, _ in lacking)
        raise ConfigError(
            f"{path}: {recipe.framework}: {'; '.join(why for _, why in lacking)}; complete the file, or give {hint}"
        )
    for axis in AXES & {key.removeprefix("plan.mesh.") for key in given}:  # what is set beside the file counts more
        setattr(recipe, axis, whole_number(recipe.framework, f"plan.mesh.{axis}", given[f"plan.mesh.{axis}"]))
    if "model.args.layers" in given and recipe.model:
        layers = whole_number(recipe.framework, "model.args.layers", given["model.args.layers"], least=1)
        recipe.args["layers"] = layers
        recipe.stage_layers = recipe.stage_layers if sum(recipe.stage_layers) == layers else ()
    if "training.global_batch" in given:
        recipe.training["global_batch"] = whole_number(recipe.framework, "batch", given["training.global_batch"])
    if cluster is None:
        starts = f"starts {recipe.processes} processes and " if recipe.processes else ""
        count = recipe.processes or 64
        raise ConfigError(f"{path} {starts}does not say on which GPUs; add --gpus {count}xh100-sxm (cluster=)")
    if isinstance(cluster, str | Path):
        table = _cluster_table(str(cluster), changes_of(settings, overrides))
        devices = cluster_of(cluster_section(table, overrides, settings=settings, where=str(cluster))).size
    else:
        devices = cluster.size
    keys = recipe.settings(devices) | dict(settings or {})
    batch = int(str(keys.pop("training.global_batch")))
    question = question_of(recipe.model, cluster=cluster, global_batch=batch, settings=keys, overrides=overrides)
    return question.sourced(recipe=recipe, name=re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem))


def per_node_of(changes: Mapping[str, Any]) -> int | None:
    """The GPUs of a node that changes set, where the number of nodes follows from it; None where they do not.

    Args: changes: nested tables, as `parsim.app.config_text.changes_of` returns them.
    """
    table = changes.get("cluster")
    per_node = table.get("gpus_per_node") if isinstance(table, dict) and "nodes" not in table else None
    return per_node if isinstance(per_node, int) and per_node > 0 else None


def _cluster_table(text: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    if not is_shorthand(text):
        return {"profile": text}
    machines = machines_of(text, per_node_of(changes))
    if machines.instance is not None:
        return {"instance": machines.instance.name, "nodes": machines.nodes}
    table: dict[str, Any] = {"gpu": machines.gpu, "gpus_per_node": machines.gpus_per_node, "nodes": machines.nodes}
    return table | ({"link": machines.link} if machines.link else {})


def is_run_file(name: str | Path) -> bool:
    """Whether a first argument means a run file and not a model: it ends in .toml, or is there and no JSON."""
    path = Path(name)
    if is_known(str(name)) or ":" in str(name):
        return False
    return path.suffix == FILE_SUFFIX or path.is_dir() or (path.is_file() and path.suffix != ".json")


def _traced_model(module: Any, example_inputs: Any, question: Question) -> Model:
    """The Model of an nn.Module, with its loss, from example inputs or model.input_shape.

    Raises ModelError, TraceError; ConfigError for weights of another type than the precision has, as they are recorded.
    """
    spec, precision = question.model_spec, question.training.precision
    if spec.tune is not None:
        from parsim.model.adapters import adapt

        module = adapt(copy.deepcopy(module), spec.tune)
    model = model_from_module(
        module,
        example_inputs,
        input_shape=spec.input_shape,
        inputs=spec.inputs,
        granularity=question.model.granularity,
        loss=spec.objective(),
        output=spec.output,
        control_flow=spec.control_flow,
    )
    weights = recorded_weights(precision)
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in module.parameters() if tensor.is_floating_point()}
    if dtypes - {weights}:
        raise ConfigError(
            f"training.precision = {precision!r} keeps weights in {weights}, and the module has them in "
            f"{', '.join(sorted(dtypes - {weights}))}; give module.to(torch.{weights}), or another precision"
        )
    return tuned(model, spec.tune)


def taken_defaults(question: Question, devices: int | None = None) -> dict[str, Any]:
    """The keys that a question left open and that a prediction depends on, with the values taken for them.

    Args: devices: how many the loaded cluster has, for a question that names none.
    """
    source = question.source
    values = {"plan": question.plan.plan_path, "model": source.model, "cluster": source.cluster}
    taken: dict[str, Any] = {}
    if source.cluster is None and question.cluster.devices is None:
        taken[DEVICES] = devices
    for path in _PREDICTED_FROM:
        table, key = path.split(".")
        section = getattr(question, table)
        if path not in (FRAMEWORK, NETWORK) and values.get(table) is None and key not in section.model_fields_set:
            taken[path] = getattr(section, key)
    if source.cluster is None and question.cluster.network is None and (between := question.cluster.between) is not None:
        taken[NETWORK] = between
    name = question.model.name
    if source.model is None and is_transformer(name) and question.software.framework is None:
        taken[FRAMEWORK] = UNKNOWN if (guess := question.guess) is None else guess.frameworks[0].version
    if source.model is None and (name in ZOO or is_transformer(name)):
        spec = resolve(question.model_spec)
        stated = question.priced_software.kernels | dict(question.model.args)
        taken |= {f"model.args.{key}": value for key, value in spec.args if key not in stated}
        if question.model.input_shape is None and name in ZOO:
            taken["model.input_shape"] = spec.input_shape
    return taken


def importable(question: Question, folder: Path) -> Question:
    """Put the folder that holds the module of a name "package.module:ROW" first on the import path.

    Args: folder: of the run file, or the current directory; it becomes `model.import_folder` if it holds such a module.
    Raises: ConfigError: another module of that name was imported before, so this process would use it instead.
    """
    names = references(question.to_dict())
    if question.model.import_folder is None:
        if not any(holds(folder, name) for name in names.values()):
            return question
        question = question.changed(model=question.model.model_copy(update={"import_folder": str(folder.resolve())}))
    chosen = Path(str(question.model.import_folder))
    if names and not any(holds(chosen, name) for name in names.values()):
        key, name = next(iter(names.items()))
        raise ConfigError(
            f"model.import_folder = {str(chosen)!r} holds no {root_of(name)}.py, which {key} = {name!r} needs; name its folder"
        )
    put_on_path(question.to_dict(), chosen)
    return question


USUAL_TOKENS, USUAL_SAMPLES = 2**20, 32
"""Of a step where no batch is given: tokens of a transformer in all, a round number of the size that language models are
trained with; samples of any other model per device, as torchvision's recipes have it (references/classification)."""


def with_batch(question: Question) -> Question:
    """The question with a batch where none is given: as many samples as are usual, and at least one per device.

    The devices, and the replicas and microbatches that are asked for, divide it.

    Raises: ProfileError: the cluster that the question names cannot be read.
    """
    training, plan = question.training, question.plan
    if training.names_batch:
        return question
    devices = question.cluster.devices if isinstance(question.cluster.devices, int) else 1
    if question.source.cluster is not None or question.cluster.profile != THIS_MACHINE:
        devices = (question.source.cluster or cluster_of(question.cluster)).size
    samples = USUAL_SAMPLES * devices
    if is_transformer(question.model.name):
        shape, args = question.model.input_shape, dict(question.model.args)
        samples = USUAL_TOKENS // (shape[0] if shape else sequence_of(question.model.name, args))
    parts = math.lcm(devices, ((plan.mesh and plan.mesh.dp) or 1) * (plan.microbatches or 1))
    return question.changed(training=_filled(training, global_batch=max(1, -(-samples // parts)) * parts))


def with_usual(question: Question) -> Question:
    """The question with the defaults of a transformer, which still count as left open; itself for any other model.

    Raises: ProfileError: the cluster that the question names cannot be read. ConfigError: an axis of plan.mesh does not divide
        the model, or a key belongs to another precision.
    """
    name, training = question.model.name, question.training
    row = named(name)
    by_name = row is not None and row.shape is not None
    if by_name:
        check_splits(question)
    if by_name or (takes_usual(name) and not (is_config(name) and is_saved_model(Path(name)))):
        device = None  # this machine may not have been calibrated yet
        if (cluster := question.source.cluster) is not None or question.cluster.machine != "this-machine":
            device = (cluster or cluster_of(question.cluster)).devices[0].type
        if by_name or (device is not None and device.kind != "cpu"):
            precision = training.precision
            if device is not None and training.dtype == "float32":
                precision = next((name for name in USUAL_PRECISIONS if name in device.peak_flop_per_s), precision)
            question = question.changed(training=_filled(training, optimizer=USUAL_OPTIMIZER, precision=precision))
    check_widths(question.training)
    return question


def with_components(question: Question) -> Question:
    """The question with blocks cut into attention and feed-forward where its plans may be tensor-parallel.

    A rank communicates between components alone, and tensor parallelism sums after each half of a layer. So blocks and single
    layers would be priced as other plans than those that frameworks run. A granularity that is replaced counts as left open.

    Raises: ProfileError: the cluster that the question names cannot be read.
    """
    name = question.model.name
    if _names_components(question.plan) or (name.endswith(".json") and is_saved_model(Path(name))):
        row = named(name)
        by_name = row is not None and row.shape is not None and _may_shard(question)
        return question.changed(model=_filled(question.model, granularity="sublayer")) if by_name else question
    if not _may_shard(question):
        return question
    kept = question.model.model_fields_set - {"granularity"}
    section = ModelSection.model_construct(_fields_set=kept, **{**dict(question.model), "granularity": SUBLAYER})
    return question.changed(model=section)


def _names_components(plan: PlanSection) -> bool:
    """Whether keys of [plan] hold names of components, which are those of one granularity."""
    forbids = any(pattern != "*" for pattern in plan.forbid)
    lists = isinstance(plan.recompute, tuple) or isinstance(plan.activation_offload, tuple)
    return bool(plan.placements or plan.pin) or forbids or lists or plan.plan_path is not None or ":" in plan.strategy


def _may_shard(question: Question) -> bool:
    """Whether plans may be tensor-parallel: tp is asked for, or a search on GPUs is free to choose it.

    A machine without GPUs is calibrated for the components of a question, and a profile of it prices no others.
    """
    plan, cluster = question.plan, question.source.cluster
    tp = None if plan.mesh is None else plan.mesh.tp
    if tp is not None or plan.is_uncut or plan.strategy == "custom":
        return (tp or 1) > 1 and not plan.is_uncut
    if (row := named(question.model.name)) is not None and row.shape is not None:
        return True
    if cluster is None and question.cluster.machine == "this-machine":
        return False
    return (cluster or cluster_of(question.cluster)).devices[0].type.kind != "cpu"


def _filled(section: ConfigSection, **values: Any) -> ConfigSection:
    """A section with values for keys that were left out; they stay left out for whoever asks what was given."""
    left_out = {key: value for key, value in values.items() if key not in section.model_fields_set}
    return type(section).model_construct(_fields_set=set(section.model_fields_set), **{**dict(section), **left_out})


def check_splits(question: Question) -> None:
    """Raise ConfigError where an axis of plan.mesh does not divide a transformer by name; any other model passes."""
    name, mesh = question.model.name, question.plan.mesh
    row = named(name)
    if row is None or row.shape is None or mesh is None:
        return
    args = dict(question.model.args)
    shape, input_shape = shape_of(name, args), question.model.input_shape
    tokens = input_shape[0] if input_shape else sequence_of(name, args)
    chunks = question.plan.chunks or 1
    if mesh.pp is not None and mesh.pp * chunks > shape.layers:
        raise ConfigError(
            f"plan.mesh.pp = {mesh.pp} with {chunks} chunks are {mesh.pp * chunks} stages, and {name} has "
            f"{shape.layers} layers; the nearest: pp * chunks <= {shape.layers}"
        )
    divided = [("tp", "heads", shape.heads), ("tp", "inside of the MLP", shape.inner), ("ep", "experts", shape.experts)]
    if question.plan.sequence_parallel is not False and args.get("sequence_parallel", True):
        divided.append(("tp", "tokens of a sample", tokens))
    divided.append(("cp", "tokens of a sample", tokens))
    for axis, what, size in divided:
        ways = getattr(mesh, axis) or 1
        if size % ways:
            raise ConfigError(
                f"plan.mesh.{axis} = {ways} must divide the {what} ({size:,}) of {name}; the nearest that do: "
                f"{nearest_divisors(size, ways)}"
            )


def _check_alone(path: Path, cluster: object, global_batch: object) -> None:
    """A run file says its cluster and batch itself, where there is one."""
    if not path.exists():
        return  # said where it is read
    if path.is_dir() and (config := path / "config.json").is_file():
        raise ConfigError(f"{path} is a folder; for the Hugging Face model in it give {config}")
    for option, key, value, how in (
        ("--on or --gpus (cluster=)", "[cluster]", cluster, "cluster.profile=... (or cluster.gpu, cluster.nodes)"),
        ("--batch (global_batch=)", "training.global_batch", global_batch, f"training.global_batch={global_batch}"),
    ):
        if value is not None:
            raise ConfigError(
                f"{option} is for a question without a file, but {path} is a run file, which says {key} itself; drop it, or "
                f"override the file: --set {how}"
            )


def _check_untouched(table: str, keys: set[str], what: str) -> None:
    if keys:
        raise ConfigError(f"the {table} {what}: {table}.{min(keys)} cannot change it; drop it")
