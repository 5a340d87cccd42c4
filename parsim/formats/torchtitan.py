"""torchtitan: its TOML files, read and written. Key names are those of torchtitan/config (pytorch/torchtitan), old and new."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parsim.errors import ConfigError, PlanError, near_matches
from parsim.files import document_text, parse_toml, read_text, write_text_atomically
from parsim.formats.exports import Exported
from parsim.formats.recipe import (
    GENERIC,
    LARGEST_BYTES,
    SCRIPTS,
    FileKeys,
    PlannedRecipe,
    Recipe,
    cut_in_layers,
    layers_of_stages,
    plain_value,
    read_back,
    transformer_of,
    whole_number,
)
from parsim.formats.scripts import options_of
from parsim.formats.source import FileFormat, SourceFile
from parsim.model.catalogue.names import KERNEL, SEQUENCE_PARALLEL, is_transformer, known_names, normalised, shape_of
from parsim.plans.pipeline import check_torch_schedule
from parsim.plans.stages import with_ends

NAME = "torchtitan"
TABLES = frozenset({"parallelism", "activation_checkpoint", "job", "lr_scheduler", "float8", "metrics", "profiling"})
"""Any of them marks a torchtitan file; none is a table of a run file."""

FLAVORS = {
    ("llama3", "8B"): "llama3-8b",
    ("llama3", "70B"): "llama3-70b",
    ("llama3", "405B"): "llama3-405b",
    ("llama2", "7B"): "llama2-7b",
    ("llama2", "13B"): "llama2-13b",
    ("llama2", "70B"): "llama2-70b",
    ("deepseek_v3", "16B"): "deepseek-v2-lite",
    ("deepseek_v3", "236B"): "deepseek-v2",
    ("deepseek_v3", "671B"): "deepseek-v3",
    ("qwen3", "0.6B"): "qwen3-0.6b",
    ("qwen3", "1.7B"): "qwen3-1.7b",
    ("qwen3", "4B"): "qwen3-4b",
    ("qwen3", "8B"): "qwen3-8b",
    ("qwen3", "14B"): "qwen3-14b",
    ("qwen3", "32B"): "qwen3-32b",
    ("qwen3", "30B-A3B"): "qwen3-30b-a3b",
    ("qwen3", "235B-A22B"): "qwen3-235b-a22b",
    ("llama4", "17bx16e"): "llama4-scout",
    ("llama4", "17bx128e"): "llama4-maverick",
}
"""By model.name and model.flavor."""
DEBUG: dict[str, dict[str, Any]] = {
    "llama3": {"layers": 6, "hidden": 256, "heads": 16, "ffn": 768},
    "qwen3": {"layers": 8, "hidden": 256, "heads": 16, "kv_heads": 8, "head_dim": 128, "ffn": 3072, "qk_norm": True},
    "deepseek_v3": {"layers": 6, "hidden": 256, "heads": 16, "ffn": 1024, "experts": 8, "active": 3, "expert_ffn": 256}
    | {"shared_ffn": 512, "dense_layers": 1, "query_rank": 0, "key_rank": 512, "rope_dim": 64, "head_dim": 128},
}
"""Sizes of the flavor `debugmodel` in release 0.2, beside those that all have."""
OF_DEBUG = {"vocab": 2048, "gated": True, "norm": "rms", "rotary": True, "bias": False, "tied": False}
VARIANT = re.compile(r"^(simple_fsdp|compiler_toolkit|auto_parallel|graph_trainer)\.|_(simple_fsdp|ft|auto_parallel|mx)$")
"""Around the name of a model whose sizes an experiment of torchtitan leaves as they are."""
FLAVOR_VARIANT = re.compile(r"[_-](flex|varlen)(_attn)?$|_irope$")

AXES = {"tp": "tensor_parallel", "pp": "pipeline_parallel", "cp": "context_parallel", "ep": "expert_parallel"}
"""How keys of degrees begin, by axis of the mesh."""
OLDER_TABLES = ("training", "experimental")
"""That held the keys of [parallelism] before it was a table of its own (releases of 2024)."""
PARALLELISM = re.compile(
    r"(tensor|pipeline|context|expert|data)_parallel|enable_async_tensor_parallel|enable_compiled_autograd"
)
OLDER_NAMES = {
    "data_parallel_degree": "data_parallel_shard_degree",
    "fp8_linear": "enable_float8_linear",
    "enable_fp8_linear": "enable_float8_linear",
}

SCHEDULES: dict[str, tuple[str, int]] = {
    "1F1B": ("1f1b", 1),
    "GPipe": ("gpipe", 1),
    "Interleaved1F1B": ("interleaved", 2),
    "InterleavedZeroBubble": ("zero-bubble", 2),
    "ZBVZeroBubble": ("zero-bubble-v", 2),
    "DualPipeV": ("dualpipe-v", 2),
}
"""torch's names of pipeline orders: parsim's, and stages per rank where the file gives no layers per stage."""

IGNORED = re.compile(
    r"(job|profiling|metrics|lr_scheduler|checkpoint|comm|fault_tolerance|validation|debug|dataset|infra|experimental)\.|model\.(converters|tokenizer_path|"
    r"hf_assets_path|norm_type|print_after)|optimizer\.(name|lr|eps|beta|weight_decay|implementation|fused|foreach|state_dtype)|"
    r"training\.(max_norm|steps|dataset|seed|deterministic|gc_|data_parallel_replicate|warmup|dtype|compile|mixed_precision|"
    r"global_batch_size)|activation_checkpoint\.(mode|selective_ac_option|per_op_sac)|compile\.(enable|components)|float8\.|"
    r"parallelism\.(fsdp_reshard_after_forward|disable_loss_parallel|pipeline_parallel_)"
)
"""Keys that were read elsewhere here, or that change neither the time nor the memory of a step."""
CUT = re.compile(r"parallelism\.pipeline_parallel_")
ASYNC_TENSOR = "parallelism.enable_async_tensor_parallel"
LEFT_OUT = {
    ASYNC_TENSOR: "tensor-parallel communication is not hidden behind products",
    "parallelism.enable_compiled_autograd": "autograd runs eagerly",
    "optimizer.early_step_in_backward": "gradients are kept until all are there",
    "training.enable_cpu_offload": "all stays on the device; plan.optimizer_offload moves the states, not the parameters",
    "activation_checkpoint.early_stop": "a recomputed forward runs to its end",
    "training.mixed_precision_reduce": "gradients are reduced in the width of the weights",
    "float8.enable_fsdp_float8_all_gather": "parameters are gathered in 16 bits",
}


class _Tables(FileKeys):
    def divides(self, key: str, value: Any) -> bool:
        """As of `FileKeys`; every degree but 1 too, for -1 stands for all ranks that are left."""
        return super().divides(key, value) or (key.endswith("_degree") and value != 1)


def read_toml(document: Mapping[str, Any], wrapped: str = "") -> Recipe:
    """A file of torchtitan.

    Args: document: its tables. wrapped: the model by the name of a file around it, where the tables name none.
    Raises: ConfigError: a model that is not known, or sizes that cannot be.
    """
    tables = {name: table for name, table in document.items() if isinstance(table, Mapping)}
    flat = {f"{name}.{key}": value for name, table in tables.items() for key, value in table.items()}
    float8 = document
    for table in ("quantize", "linear", "float8"):
        float8 = float8.get(table, {}) if isinstance(float8, Mapping) else {}
    float8 = float8 if isinstance(float8, Mapping) else {}
    flat |= {f"float8.{key}": value for key, value in float8.items()}
    keys = _Tables(NAME, _newer({key: value for key, value in flat.items() if not isinstance(value, Mapping)}))
    flat, number = keys.values, keys.number
    name, flavor = str(flat.get("model.name") or wrapped), str(flat.get("model.flavor") or "")
    family, size = VARIANT.sub("", name.lower()), FLAVOR_VARIANT.sub("", flavor)
    model = FLAVORS.get((family, size)) or FLAVORS.get((family, size.upper()))
    model = model or next((word for word in (f"{name}-{flavor}" if flavor else name, flavor) if is_transformer(word)), None)
    recipe = Recipe(framework=NAME, model=normalised(model or f"{name}-{flavor}"), software={"framework": "torchtitan"})
    if model is None and size == "debugmodel" and family in DEBUG:
        recipe.model, recipe.args = GENERIC, DEBUG[family] | OF_DEBUG
        recipe.left_out["model.flavor"] = "a vocabulary of 2,048 and the layers of release 0.2 are taken"
    elif model is None:
        near = near_matches(recipe.model.lower(), known_names())
        known = near if "did you mean" in near else " (`parsim models` lists those that are)"
        recipe.missing["model.name"] = f"model.name = {name!r} with flavor = {flavor!r} is not known{known}"
        recipe.model = ""

    recipe.args["seq"] = number("training.seq_len", default=2048)
    recipe.micro_batch = number("training.local_batch_size", default=0) or number("training.batch_size", default=8)
    for axis, key in AXES.items():
        setattr(recipe, axis, number(f"parallelism.{key}_degree", default=1, least=1))
    if number("parallelism.expert_tensor_parallel_degree", default=1, least=1) not in (1, recipe.tp):
        raise ConfigError(
            f"{NAME}: expert_tensor_parallel_degree = {flat['parallelism.expert_tensor_parallel_degree']} is neither 1 nor "
            f"tensor_parallel_degree ({recipe.tp}); set it to one of them"
        )
    if recipe.tp > 1 and recipe.ep > 1 and flat.get("parallelism.expert_tensor_parallel_degree", 1) == 1:
        recipe.left_out["parallelism.expert_tensor_parallel_degree"] = "experts are cut over the tensor shards as the rest is"
    _read_data_parallel(keys, recipe)
    if flat.get("training.global_batch_size", -1) != -1:
        recipe.training["global_batch"] = number("training.global_batch_size", default=1)
    _read_pipeline(keys, recipe)
    if recipe.pp > 1 and recipe.model:
        _read_cut(keys, recipe)
    compiled = bool(flat.get("compile.enable", flat.get("training.compile", False)))
    recipe.software["compiled"] = compiled
    if compiled and recipe.tp > 1 and flat.get(ASYNC_TENSOR):  # torchtitan refuses it without torch.compile
        recipe.taken[ASYNC_TENSOR] = recipe.plan_keys["tensor_overlap"] = True
    recipe.args["sequence_parallel"] = True
    converters = flat.get("model.converters", [])
    words = " ".join(map(str, converters if isinstance(converters, list) else [converters])).lower()
    blocks = re.search(r"nvfp4|\bmx|\.mx\b", words)
    if blocks or "fp8" in words or "float8" in words or flat.get("float8.enable_float8_linear"):
        recipe.training["precision"] = "nvfp4" if "nvfp4" in words else "fp8"
        if blocks:
            recipe.left_out["model.converters"] = f"{words} of all products in the layers, with the scales of whole tensors"
    else:
        bf16 = flat.get("training.mixed_precision_param", "bfloat16") == "bfloat16"
        recipe.training["precision"] = "bf16" if bf16 else "fp32"
    if flat.get("training.dtype") == "bfloat16":  # the weights themselves, without copies in fp32
        recipe.training["master_weights"] = False
    if (state := {"bfloat16": "bf16"}.get(str(flat.get("optimizer.state_dtype")))) is not None:
        recipe.training["state_dtype"] = state
    kind = str(flat.get("optimizer.name", "AdamW"))
    fused = flat.get("optimizer.implementation", "fused") not in ("foreach", "for-loop")
    recipe.training["optimizer"] = ("adam" if kind.lower() == "adam" else "adamw") + "_fused" * fused
    if kind.lower() not in ("adam", "adamw"):
        recipe.left_out["optimizer.name"] = f"{kind} is not modelled: time and state are those of AdamW"
    _read_recompute(flat, recipe)
    recipe.taken |= {"model.name": flat.get("model.name"), "model.flavor": flat.get("model.flavor")}
    low = recipe.training["precision"] == "fp8"
    left_out = {key: why for key, why in LEFT_OUT.items() if low or not key.startswith("float8.")}
    if recipe.pp > 1:
        left_out |= dict.fromkeys((key for key in flat if CUT.match(key)), "layers are cut as torchtitan counts them out")
    keys.sort(recipe, left_out=left_out, ignored=IGNORED)
    return recipe


def _newer(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of older releases by the names and tables of newer ones. Raises ConfigError where both stand and differ."""
    moved: dict[str, Any] = {}
    for key, value in flat.items():
        table, _, name = key.partition(".")
        newer = OLDER_NAMES.get(name, name)
        if table in OLDER_TABLES and PARALLELISM.match(newer):
            newer = f"parallelism.{newer}"
        elif table in OLDER_TABLES and newer != name:
            newer = f"float8.{newer}"
        else:
            newer = key
        if moved.setdefault(newer, value) != value:
            raise ConfigError(f"{NAME}: {newer} is both {moved[newer]!r} and {value!r} ({key}); keep one")
    return moved


def _read_data_parallel(keys: FileKeys, recipe: Recipe) -> None:
    flat, number = keys.values, keys.number
    shard = flat.get("parallelism.data_parallel_shard_degree", -1)
    replicate = number("parallelism.data_parallel_replicate_degree", default=1, least=1)
    recipe.taken["parallelism.data_parallel_shard_degree"] = shard
    recipe.zero = 0 if shard == 1 else 3
    if shard not in (-1, 1) or (replicate > 1 and shard != -1):
        recipe.dp = whole_number(NAME, "parallelism.data_parallel_shard_degree", shard, least=1) * replicate
    recipe.replicate = max(1, replicate)
    if flat.get("parallelism.fsdp_reshard_after_forward") == "never" and recipe.zero == 3:
        recipe.zero = 2
    if recipe.pp > 1 and recipe.zero == 3 and flat.get("parallelism.fsdp_reshard_after_forward") != "always":
        recipe.left_out["parallelism.fsdp_reshard_after_forward"] = "parameters are whole for a step under a pipeline: ZeRO 1"
        recipe.zero = 1


def _read_pipeline(keys: FileKeys, recipe: Recipe) -> None:
    number = keys.number
    schedule = keys.text("parallelism.pipeline_parallel_schedule", default="1F1B")
    micro = number("parallelism.pipeline_parallel_microbatch_size", default=0)
    if recipe.pp == 1:
        return
    if count := number("parallelism.pipeline_parallel_microbatches", default=0):  # releases of 2024 count them
        micro = max(1, recipe.micro_batch // count)
    recipe.local_batch, recipe.micro_batch = recipe.micro_batch, micro or 1
    orders = {name.lower(): row for name, row in SCHEDULES.items()}
    if schedule.lower() not in orders:
        recipe.left_out["parallelism.pipeline_parallel_schedule"] = f"{schedule} is not known, and 1F1B is taken"
    recipe.order, recipe.chunks = orders.get(schedule.lower(), ("1f1b", 1))


def _read_cut(keys: FileKeys, recipe: Recipe) -> None:
    """The stages, as torchtitan 0.2.2 cuts them, and whether torch's schedule takes the microbatches.

    Source: torchtitan/distributed/pipeline_parallel.py: pipeline_llm, build_pipeline_schedule.
    """
    number, layers = keys.number, shape_of(recipe.model, recipe.args).layers
    less = [number(f"parallelism.pipeline_parallel_{place}_stage_less_layers", default=1) for place in ("first", "last")]
    listed = keys.values.get("parallelism.module_fqns_per_model_part")
    if isinstance(listed, list) and all(isinstance(part, list) for part in listed):
        recipe.taken["parallelism.module_fqns_per_model_part"] = listed
        counts = [sum(str(name).startswith("layers.") for name in part) for part in listed]
        if len(counts) % recipe.pp or sum(counts) != layers:
            raise ConfigError(
                f"{NAME}: module_fqns_per_model_part has {len(counts)} parts with {sum(counts)} layers, and the model {layers} "
                f"on pipeline_parallel_degree = {recipe.pp}; list every layer once, in a multiple of {recipe.pp} parts"
            )
    else:
        per_stage = number("parallelism.pipeline_parallel_layers_per_stage", default=0)
        stages = -(-(layers + sum(less)) // per_stage) if per_stage else recipe.pp * recipe.chunks
        if stages % recipe.pp or (stages > recipe.pp) != (recipe.chunks > 1):
            raise ConfigError(
                f"{NAME}: pipeline_parallel_layers_per_stage = {per_stage} makes {stages} stages of {layers} layers, and "
                f"pipeline_parallel_schedule on pipeline_parallel_degree = {recipe.pp} takes "
                + (f"a multiple of {recipe.pp} from {2 * recipe.pp} on" if recipe.chunks > 1 else f"{recipe.pp}")
                + "; change the layers per stage"
            )
        counts = _counted_out(layers, stages, *less)
    recipe.chunks = len(counts) // recipe.pp
    recipe.stage_layers = tuple(counts)
    micro, local = recipe.micro_batch, recipe.local_batch
    if local % micro:
        raise ConfigError(
            f"{NAME}: local_batch_size = {local} must be divisible by pipeline_parallel_microbatch_size = {micro}; the nearest "
            f"that is: {max(1, round(local / micro)) * micro}"
        )
    try:
        check_torch_schedule(recipe.order, recipe.pp, local // micro, recipe.chunks)
    except PlanError as error:
        raise ConfigError(
            f"{NAME} does not start with {local // micro} microbatches (local_batch_size = {local} by "
            f"pipeline_parallel_microbatch_size = {micro}): {error}"
        ) from error


def _counted_out(layers: int, stages: int, first: int, last: int) -> list[int]:
    """Layers of each stage (`with_ends`). Raises ConfigError: an end alone would fill a stage."""
    if (counts := with_ends(layers, stages, first, last)) is not None:
        return counts
    every, heaviest = layers + first + last, max(1, first, last)
    raise ConfigError(
        f"{NAME} cannot cut {layers} layers into {stages} stages: each has {every // stages}, and the embedding counts as "
        f"{first} and the head as {last}; use at most {every // heaviest} stages"
    )


def _read_recompute(flat: Mapping[str, Any], recipe: Recipe) -> None:
    mode = str(flat.get("activation_checkpoint.mode", "selective"))
    if mode == "full":
        recipe.recompute = "full"
    elif mode == "selective":
        option = str(flat.get("activation_checkpoint.selective_ac_option", "2"))
        if option.isdigit():
            key = "activation_checkpoint.selective_ac_option"
            recipe.recompute, recipe.every = "alternate", whole_number(NAME, key, option, least=1)
        else:
            recipe.recompute = "selective"
            why = "torchtitan also computes every second product again, and parsim keeps the outputs of all products"
            recipe.left_out["activation_checkpoint.selective_ac_option"] = why
    elif mode not in ("none", "memory_budget"):
        raise ConfigError(f"{NAME}: activation_checkpoint.mode = {mode!r} must be none, selective or full")


RELEASE = "0.2"
"""The last releases that read TOML, whose keys are written."""
COMPILED = {"fused": True, "eager": False}
OPTIMIZERS = {
    "adamw_fused": ("AdamW", "fused"),
    "adamw": ("AdamW", "foreach"),
    "adam_fused": ("Adam", "fused"),
    "adam": ("Adam", "foreach"),
}
PRECISIONS = {"bf16": "bfloat16", "fp8": "bfloat16", "fp32": "float32"}
BETAS, EPS = (0.9, 0.999), 1e-8
"""Defaults of torch's Adam and AdamW; torchtitan has a beta2 of 0.95 where its file gives none."""
SAMPLE_STEPS = 1000
"""Steps of a question that does not say for how long it trains."""


def write_torchtitan(recipe: PlannedRecipe, file: Path) -> Exported:
    """The plan as a file of torchtitan. Raises ConfigError: torchtitan has no such model, mesh, ZeRO stage or precision."""
    model = transformer_of(recipe)
    plan, training, left_out = recipe.plan, recipe.training, recipe.left_out
    precision, (optimizer, implementation) = recipe.choose("precision", PRECISIONS), recipe.choose("optimizer", OPTIMIZERS)
    flavors = {name: flavor for flavor, name in FLAVORS.items()}
    if (flavor := flavors.get(normalised(recipe.model))) is None:
        raise ConfigError(f"{NAME} has no model {recipe.model!r}; it has {', '.join(sorted(flavors))}")
    if model.others[KERNEL] not in COMPILED:
        raise ConfigError(f"{NAME} runs kernels {' or '.join(COMPILED)}, and model.args.kernels = {model.others[KERNEL]!r}")
    converters = ["float8"] if training["precision"] == "fp8" else []
    arguments = dict(training["optimizer_args"])
    betas = arguments.pop("betas", BETAS)
    document: dict[str, Mapping[str, object]] = {
        "job": {"description": f"written by parsim export: {plan.summary()}"},
        "model": {"name": flavor[0], "flavor": flavor[1], "converters": converters},
        "optimizer": {
            "name": optimizer,
            "lr": training["learning_rate"],
            "implementation": implementation,
            **({"beta1": float(betas[0]), "beta2": float(betas[1])} if isinstance(betas, list | tuple) else {}),
            "eps": arguments.pop("eps", EPS),
            "weight_decay": training["weight_decay"],
        },
        "training": {
            "local_batch_size": recipe.micro_batch * (plan.microbatches if recipe.pp > 1 else 1),
            "global_batch_size": plan.global_batch,
            "seq_len": model.seq,
            "steps": training["steps"] or SAMPLE_STEPS,
            "max_norm": training["clip_norm"] or 1e9,
            "mixed_precision_param": precision,
        },
        "parallelism": _parallelism(recipe),
        "activation_checkpoint": {"mode": recipe.recompute},
        "compile": {"enable": COMPILED[model.others[KERNEL]]},
    }
    for key in arguments:
        left_out[f"training.optimizer_args.{key}"] = "torchtitan has no such key"
    if training["clip_norm"] is None:
        left_out["training.clip_norm"] = "torchtitan always takes the norm of the gradients; max_norm = 1e9 clips nothing"
    if recipe.recompute == "selective":
        left_out["plan.recompute"] = "torchtitan also computes every second product again"
        document["activation_checkpoint"] = {"mode": "selective", "selective_ac_option": "op"}
    elif recipe.recompute == "alternate":
        document["activation_checkpoint"] = {"mode": "selective", "selective_ac_option": str(recipe.every)}
    if training["schedule"] is None:
        left_out["training.schedule"] = (
            "torchtitan raises the learning rate over 200 steps and then lowers it to 0, unless [lr_scheduler] says otherwise"
        )
    if recipe.tp > 1 and not model.others[SEQUENCE_PARALLEL]:
        left_out[f"model.args.{SEQUENCE_PARALLEL}"] = "torchtitan divides norms along the sequence all the same"
    text = document_text(document)
    read_back(recipe, model, read_toml(parse_toml(text)))
    write_text_atomically(file, text)
    launch = f"{recipe.torchrun()} -m torchtitan.train --job.config_file {file.name}"
    left_out["release"] = f"the file is for torchtitan {RELEASE}: later ones have presets in Python and read no TOML"
    return Exported(
        format="torchtitan",
        file=file,
        summary=f"torchtitan {RELEASE} file of {plan.summary()}: {file}; start it with `{launch}`",
        left_out=left_out,
        found={"ranks": plan.world_size, "launch": launch},
    )


def _parallelism(recipe: PlannedRecipe) -> dict[str, Any]:
    plan = recipe.plan
    table: dict[str, Any] = {
        **{f"{name}_degree": getattr(recipe, axis) for axis, name in AXES.items()},
        "data_parallel_replicate_degree": recipe.replicate if recipe.zero else recipe.dp,
        "data_parallel_shard_degree": recipe.dp // recipe.replicate if recipe.zero else 1,
    }
    if recipe.zero == 1 and recipe.pp == 1:
        raise ConfigError(
            f"{NAME} divides parameters and gradients together with the optimizer state, and the plan divides the state alone "
            "(ZeRO 1); plan with --set plan.zero_stage=2 or 3"
        )
    if recipe.zero:
        table["fsdp_reshard_after_forward"] = {1: "default", 2: "never", 3: "always"}[recipe.zero]
    if recipe.pp > 1:
        names = {order: name for name, (order, _) in SCHEDULES.items()}
        if (schedule := names.get(plan.pipeline_order)) is None:
            raise ConfigError(f"{NAME} has no pipeline order {plan.pipeline_order}; it has {', '.join(names)}")
        table |= {"pipeline_parallel_schedule": schedule, "pipeline_parallel_microbatch_size": recipe.micro_batch}
        if (layers := layers_of_stages(plan)) is None:
            counts = _counted_out(shape_of(recipe.model, recipe.args).layers, len(plan.stages), 1, 1)
            recipe.left_out["plan.stages"] = cut_in_layers(recipe, counts)
            ends = list(itertools.accumulate(counts, initial=0))
            layers = [list(range(*ends_of_stage)) for ends_of_stage in itertools.pairwise(ends)]
        parts = [[f"layers.{layer}" for layer in stage] for stage in layers]
        table["module_fqns_per_model_part"] = [["tok_embeddings", *parts[0]], *parts[1:-1], [*parts[-1], "norm", "output"]]
    return table


PRESET = re.compile(r"(?:^|[\s\"'])--module[= ]|\btorchtitan\.train\b|--job\.config_file")
"""Of a script that starts torchtitan."""
OTHERS = re.compile(r"pretrain_gpt|\bopenrlhf\b")
"""Of one that starts another program by a module's name."""


def read_launch(source: SourceFile) -> Recipe:
    """A script that starts torchtitan: with a TOML file beside it, or, from release 0.3 on, with a preset of its registry.

    Presets are Python, which is not run: those of an installed torchtitan are read. Of others what the script does not set
    itself is named as missing.
    """
    options, read = options_of(source.text), False
    given = {key.replace("-", "_"): words[0] if words else "true" for key, words in options.items()}
    if (file := given.get("job.config_file", "")) and not UNKNOWN_WORD.search(file):
        toml = source.path.parent / file
        toml = toml if toml.is_file() else source.path.parent / Path(file).name
        if not toml.is_file():
            raise ConfigError(f"{NAME}: {file} is not beside the script; give it instead, or put it there")
        document = parse_toml(read_text(toml, LARGEST_BYTES))
    elif given.get("config"):
        module = given.get("module", "").rpartition(".")[2] or given["config"].partition("_")[0]
        flavor = re.sub(r"(?<=\d)_(?=\d)", ".", given["config"].removeprefix(f"{module}_")).replace("_", "-")
        document = {"model": {"name": module, "flavor": flavor}, "activation_checkpoint": {"mode": "none"}}
        if (registered := preset_tables(module, given["config"])) is not None:
            document, read = registered, True
    else:
        raise ConfigError(f"{NAME}: the script names neither --job.config_file nor --module and --config")
    tables: dict[str, dict[str, Any]] = {table: dict(keys) for table, keys in document.items() if isinstance(keys, Mapping)}
    for key, text in given.items():
        table, dot, inner = key.partition(".")
        if dot and table in SECTIONS:
            tables.setdefault(table, {})[inner] = plain_value(text)
    recipe = read_toml(tables)
    if "config" in given and not file and not read:
        preset = f"{given.get('module', '')} {given['config']}".strip()
        for key, inner, what in PRESET_KEYS:
            if inner not in tables.get(key.partition(".")[0], {}) and inner not in tables.get("parallelism", {}):
                recipe.missing[what] = f"{inner} is in the preset {preset}, which is Python and not run"
        recipe.left_out["activation_checkpoint"] = f"what the preset {preset} recomputes is not known: nothing is taken"
    return recipe


def preset_tables(module: str, name: str) -> dict[str, dict[str, Any]] | None:
    """The tables of a preset, from the registry of an installed torchtitan, which is read and not run; None: there is none.

    Args: module, name: as --module and --config give them.

    Source: torchtitan 0.3.0, torchtitan/models/NAME/config_registry.py: functions that return a Trainer.Config.
    """
    spec = importlib.util.find_spec("torchtitan")
    places = (spec.submodule_search_locations or ()) if spec is not None else ()
    files = [Path(place, "models", module, "config_registry.py") for place in places]
    file = next((place for place in files if place.is_file()), None)
    if file is None or not re.fullmatch(r"\w+", module):
        return None
    tree = ast.parse(read_text(file, LARGEST_BYTES))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    tables = _preset(functions, name, 0)
    return None if tables is None else tables | {"model": {"name": module} | tables.get("model", {})}


def _preset(functions: Mapping[str, ast.FunctionDef], name: str, depth: int) -> dict[str, dict[str, Any]] | None:
    """What one function of a registry returns; another preset that it changes is read first."""
    if name not in functions or depth > MOST_PRESETS:
        return None
    tables: dict[str, dict[str, Any]] = {"activation_checkpoint": {"mode": "none"}}
    for node in ast.walk(functions[name]):
        if isinstance(node, ast.Assign | ast.Return) and isinstance(node.value, ast.Call):
            _take_call(node.value, functions, tables, depth)
        if isinstance(node, ast.Assign):
            path = ast.unparse(node.targets[0]).split(".")
            if len(path) == 3:
                _take(tables, path[1], path[2], node.value)
            elif len(path) == 2 and isinstance(node.value, ast.Call):
                _take_call(ast.Call(ast.Name("config"), [], [ast.keyword(path[1], node.value)]), functions, tables, depth)
    return tables


def _take_call(call: ast.Call, functions: Mapping[str, ast.FunctionDef], tables: dict[str, dict[str, Any]], depth: int) -> None:
    called = ast.unparse(call.func)
    if called in functions and (base := _preset(functions, called, depth + 1)) is not None:
        tables |= base
    if called == "model_registry" and call.args:
        _take(tables, "model", "flavor", call.args[0])
        low = next((word.value for word in call.keywords if word.arg == "converters"), None)
        tables["model"]["converters"] = re.findall(r"float8|mxfp8|nvfp4", ast.unparse(low).lower()) if low is not None else []
    for word in call.keywords:
        if word.arg == "activation_checkpoint":
            kind = ast.unparse(word.value)
            mode = "full" if "FullAC" in kind else "selective" if "SelectiveAC" in kind else "memory_budget"
            tables["activation_checkpoint"] = {"mode": "none" if kind == "None" else mode}
            tables["activation_checkpoint"] |= {"selective_ac_option": "op"} if mode == "selective" else {}
        elif word.arg == "model_spec" and isinstance(word.value, ast.Call):
            _take_call(word.value, functions, tables, depth)
        elif word.arg in SECTIONS and isinstance(word.value, ast.Call):
            for inner in word.value.keywords:
                _take(tables, word.arg, str(inner.arg), inner.value)


def _take(tables: dict[str, dict[str, Any]], table: str, key: str, node: ast.expr) -> None:
    if isinstance(node, ast.Constant | ast.List | ast.UnaryOp):
        with contextlib.suppress(ValueError):  # what is computed keeps torchtitan's default
            tables.setdefault(table, {})[key] = ast.literal_eval(node)


MOST_PRESETS = 8
"""Presets made of one another."""
UNKNOWN_WORD = re.compile(r"[?$`]")
PRESET_KEYS = (
    ("training", "seq_len", "model.args.seq"),
    ("training", "local_batch_size", "training.global_batch"),
    ("parallelism", "tensor_parallel_degree", "plan.mesh.tp"),
    ("parallelism", "pipeline_parallel_degree", "plan.mesh.pp"),
)
"""What a preset sets, and the key that supplies it."""
SECTIONS = frozenset({"training", "parallelism", "activation_checkpoint", "compile", "optimizer", "model", "float8"})


def is_launch(source: SourceFile) -> bool:
    """Whether a script starts torchtitan."""
    return source.path.suffix in SCRIPTS and bool(PRESET.search(source.text)) and not OTHERS.search(source.text)


def _sniff(source: SourceFile) -> bool:
    """By its tables, whether it is TOML or not: whoever reads it says what is wrong with it."""
    tables = set(re.findall(r"^[ \t]*\[(\w+)", source.text, re.MULTILINE)) if source.path.suffix == ".toml" else set()
    return bool(TABLES & tables) and "cluster" not in tables


FORMATS = {
    "torchtitan": FileFormat(
        layouts="TOML of 2024 and of 0.2; scripts that name a file, or a preset of 0.3 (read where torchtitan is installed)",
        refuses="degrees that are not known; what a preset of 0.3 sets, until --set",
        what="a TOML file of torchtitan, or a script that starts it",
        tool=NAME,
        reads="recipe",
        sniff=lambda source: is_launch(source) or _sniff(source),
        read=lambda source: read_launch(source) if source.path.suffix in SCRIPTS else read_toml(parse_toml(source.text)),
        writes="recipe",
        write=write_torchtitan,
        file="torchtitan.toml",
    )
}
