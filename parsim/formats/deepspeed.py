"""A DeepSpeed JSON config as keys of a run file, with what becomes of every key that has none; and a plan as such a config.

ZeRO, precision, batch, optimizer and bucket have keys here. Each other key is named, with whether it changes the time or the
memory of a step: one that does is a warning, since the prediction is of a run without it. What is written holds data
parallelism and ZeRO, as `deepspeed.initialize` takes it; read back, it gives the keys of the plan again.

Source: deepspeed.ai, "DeepSpeed Configuration JSON" (keys, meanings, defaults); bucket sizes count elements there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from parsim.errors import ConfigError, ImportedFileError, first_few
from parsim.files import parse_json, write_text_atomically
from parsim.formats.exports import Exported
from parsim.formats.imports import RunKeys
from parsim.formats.recipe import DEGREE, PlannedRecipe
from parsim.formats.source import NEOX_MARKS, SNIFFED, FileFormat, SourceFile, finite, listed, shown
from parsim.plans.plan import NONE

AUTO = "auto"
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
READ_OPTIMIZERS: Mapping[str, tuple[str, str]] = {"adam": ("adam_fused", "adam"), "adamw": ("adamw_fused", "adamw")}
"""By type: with DeepSpeed's own fused kernel, and with torch's."""
MOST_BATCH = 10**9
DEPTH = 3
CLIPPED = 1.0
"""Largest norm of the gradients where a config says nothing, from DeepSpeed 0.19.3 on."""

HARMLESS = frozenset(
    """
    steps_per_print wall_clock_breakdown dump_state scheduler prescale_gradients gradient_predivide_factor
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer fp16.loss_scale fp16.loss_scale_window
    fp16.initial_scale_power fp16.hysteresis fp16.min_loss_scale fp16.consecutive_hysteresis optimizer.params.betas
    optimizer.params.eps optimizer.params.weight_decay optimizer.params.bias_correction
    zero_optimization.contiguous_gradients zero_optimization.reduce_scatter zero_optimization.allgather_partitions
    zero_optimization.round_robin_gradients zero_optimization.stage3_gather_16bit_weights_on_model_save
    zero_optimization.stage3_gather_fp16_weights_on_model_save zero_optimization.ignore_unused_parameters
    zero_optimization.cpu_offload tensorboard wandb csv_monitor comet comms_logger flops_profiler autotuning aio
    checkpoint seed dataloader_drop_last
    """.split()  # noqa: SIM905
)
"""Keys that change a step's time and memory by nothing worth pricing: prints, logs, scalings, permissions, numbers of the
optimizer, saving, and what parsim does anyway (contiguous buckets, whole gathers). `zero_optimization.cpu_offload` is read as
offload_optimizer."""

OVERLAP = "zero_optimization.overlap_comm"
MATTERS: Mapping[str, str] = {
    "zero_optimization.offload_optimizer": "part of the optimizer's state is on the host, or on a disk",
    "zero_optimization.offload_param": "parameters are on the host or a disk: less memory, and every layer waits for PCIe",
    OVERLAP: "false: communication does not overlap; parsim overlaps as much as possible",
    "zero_optimization.allgather_bucket_size": "parsim gathers in the buckets of the gradients",
    "zero_optimization.stage3_prefetch_bucket_size": "parsim gathers one bucket ahead",
    "zero_optimization.stage3_param_persistence_threshold": "small parameters stay whole: a little more memory, fewer messages",
    "zero_optimization.stage3_max_live_parameters": "parsim keeps at most two gathered buckets",
    "zero_optimization.stage3_max_reuse_distance": "parsim gathers again for the backward",
    "zero_optimization.sub_group_size": "the optimizer runs group by group",
    "zero_optimization.zero_hpz_partition_size": "parameters are divided inside a node only",
    "zero_optimization.zero_quantized_weights": "weights are sent in 8 bits: half the bytes",
    "zero_optimization.zero_quantized_gradients": "gradients are sent in fewer bits",
    "zero_optimization.mics_shard_size": "the model is divided over fewer ranks",
    "communication_data_type": "gradients are sent in another type",
    "fp16.auto_cast": "inputs are cast",
    "amp": "Apex: read as amp_fp16",
    "activation_checkpointing": "how to recompute; whether is in the model's code: set plan.recompute",
    "sparse_attention": "another attention",
    "sparse_gradients": "embeddings send less",
    "pipeline": "set plan.mesh = { pp = ... }",
    "tensor_parallel": "set plan.mesh = { tp = ... }",
    "autotp_size": "set plan.mesh = { tp = ... }",
    "curriculum_learning": "sequences change their length",
    "data_efficiency": "samples and layers are left out",
    "compression_training": "another model",
    "progressive_layer_drop": "layers are left out",
    "eigenvalue": "further passes",
    "quantize_training": "another arithmetic",
    "data_types": "gradients are accumulated in another type",
    "elasticity": "the number of ranks and the batch change",
    "hybrid_engine": "inference between the steps",
}
"""Keys that change the time or the memory of a step and have no key here."""


def read_deepspeed(source: SourceFile, *, world_size: int | None = None) -> RunKeys:
    """Read a config.

    Args: source: the file. world_size: data-parallel ranks, where the batch needs them (None: not known).
    Raises: ImportedFileError: no config, a value of the wrong kind, or batch keys that contradict one another.
    """
    document = source.json("a DeepSpeed config")
    if not isinstance(document, dict) or not document:
        raise ImportedFileError(
            f"{source.path} is not a DeepSpeed config: it must be a JSON table with keys such as {listed(BATCH_KEYS)}"
        )
    run = RunKeys(str(source.path))
    leaves = list(_leaves(document))
    run.auto = [shown(path) for path, value in leaves if value == AUTO]
    run.ranks = _read_batch(document, run, world_size)
    width = _read_precision(document, run)
    _read_zero(document, run, width)
    _read_optimizer(document, run)
    if not run.keys:
        raise ImportedFileError(
            f'{source.path} sets nothing that a run file has ({len(run.auto)} keys are "auto"); expected '
            f"{listed(BATCH_KEYS)}, zero_optimization, fp16, bf16 or optimizer with values"
        )
    _read_clipping(document, run)
    for path, value in leaves:
        if path not in run.used and value != AUTO:
            _judge(path, value, run)
    run.warnings = list(dict.fromkeys(run.warnings))
    return run


def _leaves(node: Mapping[str, Any], path: str = "", depth: int = 1) -> Iterator[tuple[str, Any]]:
    """Keys and values; tables deeper than DEPTH count as one value."""
    for key, value in node.items():
        here = f"{path}{key}"
        if isinstance(value, dict) and value and depth < DEPTH and here not in MATTERS and here not in HARMLESS:
            yield from _leaves(value, f"{here}.", depth + 1)
        else:
            yield here, value


def _number(document: Mapping[str, Any], key: str, run: RunKeys, most: int) -> int | None:
    value = document.get(key)
    run.used.add(key)
    if value is None or value == AUTO:
        return None
    number = finite(value)
    if number is None or number != int(number) or not 1 <= number <= most:
        raise ImportedFileError(f"{run.where}: {key} = {shown(value)} must be a whole number from 1 to {most:,}")
    return int(number)


def _read_batch(document: Mapping[str, Any], run: RunKeys, ranks: int | None) -> int | None:
    """Sets the batch and its microbatches; returns data-parallel ranks, where they are known.

    What is left out follows as DeepSpeed has it, and train_batch_size = micro batch * accumulation * ranks must then hold.
    Source: deepspeed/runtime/config.py, _set_batch_related_parameters and _batch_assertion, 0.19.2 to 0.19.8.
    """
    total, micro, accumulated = (_number(document, key, run, MOST_BATCH) for key in BATCH_KEYS)
    is_filled_in = any(document.get(key) == AUTO for key in BATCH_KEYS)
    if accumulated and not total and not micro and not is_filled_in:
        raise ImportedFileError(
            f"{run.where}: gradient_accumulation_steps = {accumulated} alone: DeepSpeed needs train_batch_size or "
            "train_micro_batch_size_per_gpu beside it"
        )
    if ranks is None and total and micro and accumulated:
        ranks = max(1, total // (micro * accumulated))
    if ranks is None:
        run.needs_ranks = bool(total or micro)
        if micro:
            unknown = "is not used: the number of microbatches" if total else "alone does not say the batch, which"
            key = "plan.microbatches" if total else "training.global_batch"
            run.warnings.append(
                f"train_micro_batch_size_per_gpu = {micro} {unknown} needs that of ranks; give --world-size N, or --set {key}=N"
            )
    elif total and micro:
        accumulated = accumulated or max(1, total // micro // ranks)
    elif total:
        accumulated = accumulated or 1
        micro = total // ranks // accumulated
    elif micro:
        accumulated = accumulated or 1
        total = micro * accumulated * ranks
    if total and total > MOST_BATCH:
        raise ImportedFileError(f"{run.where}: {micro} * {accumulated} * {ranks} samples are more than {MOST_BATCH:,}")
    factors = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulated, "ranks": ranks}
    product = prod(value for value in factors.values() if value is not None)
    if total and (total != product if ranks else total % product):
        parts = " * ".join(name if value is None else f"{name} ({value})" for name, value in factors.items())
        raise ImportedFileError(f"{run.where}: train_batch_size = {total} must be {parts}; change one of them")
    if total:
        run.keys["training.global_batch"] = total
    if accumulated:
        run.keys["plan.microbatches"] = accumulated
    return ranks


def _table(document: Mapping[str, Any], key: str, run: RunKeys, example: str) -> dict[str, Any] | None:
    table = document.get(key)
    if table is not None and not isinstance(table, dict):
        raise ImportedFileError(f"{run.where}: {key} = {shown(table)} must be a table such as {example}")
    return table


def _enabled(document: Mapping[str, Any], key: str, run: RunKeys) -> bool:
    run.used.add(f"{key}.enabled")
    if (table := _table(document, key, run, '{"enabled": true}')) is None:
        return False
    value = table.get("enabled", key in ("fp16", "bf16") and bool(table) and None)
    if value in (None, AUTO, False, True):
        return value is True
    raise ImportedFileError(f"{run.where}: {key}.enabled = {shown(value)} must be true or false")


def _read_precision(document: Mapping[str, Any], run: RunKeys) -> int:
    """Sets training.precision; returns bytes of a gradient's element."""
    half = _enabled(document, "fp16", run)
    brain = _enabled(document, "bf16", run) or _enabled(document, "bfloat16", run)
    apex = _enabled(document, "amp", run)
    if half and brain:
        raise ImportedFileError(f"{run.where}: fp16 and bf16 are both enabled; DeepSpeed takes one of them")
    if brain:
        run.keys["training.precision"] = "bf16"
        return 2
    if half:
        run.keys["training.precision"] = "bf16"
        run.warnings.append("fp16: weights of 2 bytes with fp32 copies are priced as bf16, whose sizes and peaks are the same")
        return 2
    if apex:
        run.keys["training.precision"] = "amp_fp16"
        return 4
    if _enabled(document, "torch_autocast", run):
        half_type = document["torch_autocast"].get("dtype", "bfloat16")
        run.used.add("torch_autocast.dtype")
        run.keys["training.precision"] = "amp_fp16" if "float16" in str(half_type).replace("bfloat16", "") else "amp_bf16"
        return 4
    states = [document.get(key) for key in ("fp16", "bf16", "bfloat16")]
    if not any(isinstance(state, dict) and state.get("enabled") == AUTO for state in states):
        run.keys["training.precision"] = "fp32"
    return 4


def _read_zero(document: Mapping[str, Any], run: RunKeys, width: int) -> None:
    table = _table(document, "zero_optimization", run, '{"stage": 2}')
    if table is None:
        run.keys |= {"plan.zero_stage": 0, "plan.strategy": "dp"}
        return
    stage = table.get("stage", 0)
    run.used.update({"zero_optimization.stage", "zero_optimization.reduce_bucket_size"})
    if stage != AUTO:
        if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
            raise ImportedFileError(f"{run.where}: zero_optimization.stage = {shown(stage)} must be 0, 1, 2 or 3")
        run.keys |= {"plan.zero_stage": int(stage), "plan.strategy": "dp"}
    if stage in (1, 2) and "overlap_comm" not in table:
        run.warnings.append(
            f"{OVERLAP} is absent, which DeepSpeed (0.19.2 to 0.19.8) takes for false at stage {int(stage)}: "
            f"{MATTERS[OVERLAP].removeprefix('false: ')}"
        )
    elements = table.get("reduce_bucket_size")
    if elements is not None and elements != AUTO:
        number = finite(elements)
        if number is None or not 1 <= number <= 1e12:
            raise ImportedFileError(
                f"{run.where}: zero_optimization.reduce_bucket_size = {shown(elements)} must be a number of elements"
            )
        run.keys["plan.bucket_bytes"] = int(number) * width
    offload = table.get("offload_optimizer")
    is_all = isinstance(offload, dict) and offload.get("device") == "cpu" and finite(offload.get("ratio", 1.0)) == 1.0
    if is_all:
        run.used.add("zero_optimization.offload_optimizer")
    if is_all or table.get("cpu_offload") is True:  # a part of it, or a disk, is told and not priced
        run.keys["plan.optimizer_offload"] = True
        run.warnings.append(
            "offload_optimizer: gradients are accumulated on the device and copied once per step, and the host's memory bounds "
            "the update: set cluster.host_memory_bandwidth_bytes_per_s"
        )


def _read_optimizer(document: Mapping[str, Any], run: RunKeys) -> None:
    table = _table(document, "optimizer", run, '{"type": "AdamW"}')
    if table is None:
        return
    run.used.update({"optimizer.type", "optimizer.params.lr"})
    params: dict[str, Any] = stated if isinstance(stated := table.get("params"), dict) else {}
    kind = str(table.get("type", "")).lower()
    if kind in READ_OPTIMIZERS:
        decoupled = kind == "adamw" or params.get("adam_w_mode", True) is not False
        fused = params.get("torch_adam", False) is not True
        run.used.update({"optimizer.params.torch_adam", "optimizer.params.adam_w_mode"})
        run.keys["training.optimizer"] = READ_OPTIMIZERS["adamw" if decoupled else "adam"][0 if fused else 1]
    elif kind == "sgd":
        momentum = finite(params.get("momentum")) or 0.0
        run.used.add("optimizer.params.momentum")
        run.keys["training.optimizer"] = "sgd_momentum" if momentum else "sgd"
    else:
        run.warnings.append(
            f"optimizer.type = {shown(table.get('type'))!r} matters: parsim has no such optimizer; set training.optimizer to "
            "the one with as much state (adamw: two numbers per parameter), or write a row (docs/extending.md)"
        )
    rate = params.get("lr")
    if rate is not None and rate != AUTO:
        number = finite(rate)
        if number is None or not 0 < number < 1e6:
            raise ImportedFileError(f"{run.where}: optimizer.params.lr = {shown(rate)} must be a number above 0")
        run.keys["training.learning_rate"] = number


def _read_clipping(document: Mapping[str, Any], run: RunKeys) -> None:
    """Sets training.clip_norm. Source: deepspeed/runtime/constants.py: the default is 0.0 in 0.19.2 and 1.0 in 0.19.3."""
    run.used.add("gradient_clipping")
    stated = document.get("gradient_clipping", CLIPPED)
    if stated == AUTO:
        return
    norm = finite(stated)
    if norm is None or norm < 0:
        raise ImportedFileError(f"{run.where}: gradient_clipping = {shown(stated)} must be a number of at least 0")
    if norm:
        run.keys["training.clip_norm"] = norm
    if "gradient_clipping" not in document:
        run.warnings.append(
            f"gradient_clipping is absent: DeepSpeed clips at {CLIPPED} from 0.19.3 on, which training.clip_norm says now, and "
            "earlier releases do not clip; write gradient_clipping = 0.0 into the config if yours does not"
        )


def _judge(path: str, value: object, run: RunKeys) -> None:
    """Name a key that has none here: nothing worth pricing, something that matters, or unknown."""
    parts = path.split(".")
    prefixes = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    if any(prefix in HARMLESS for prefix in prefixes):
        run.harmless.append(shown(path))
        return
    feature = next((prefix for prefix in prefixes if prefix in MATTERS), None)
    inner = value if isinstance(value, dict) else {}
    is_off = value in (None, False, {}, 0) or inner.get("enabled") is False or inner.get("device") == "none"
    if feature is None and DEGREE.search(path) and isinstance(value, int) and value > 1:
        raise ImportedFileError(
            f"{shown(path)} = {value} is a degree of parallelism that is not read here; set it to 1, and plan.mesh in the run "
            "file"
        )
    if feature is None:
        run.warnings.append(f"{shown(path)} = {shown(value)} is not known to parsim, and may matter")
    elif is_off != (feature == OVERLAP):
        run.harmless.append(shown(path))  # a feature that is off, or an overlap that is on
    else:
        run.warnings.append(f"{shown(path)} matters: {MATTERS[feature]}")


NAME = "DeepSpeed JSON"
CUTS = {"pp": "a pipeline", "tp": "tensor shards", "cp": "pieces of the sequence", "ep": "divided experts"}
GRADIENT_BYTES = {"fp32": 4, "tf32": 4, "amp_fp16": 4, "amp_bf16": 4, "bf16": 2}
"""Bytes of an element of a bucket, by the precisions that DeepSpeed has."""
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("Adam", {"torch_adam": True, "adam_w_mode": False}),
    "adam_fused": ("Adam", {"adam_w_mode": False}),
    "adamw": ("AdamW", {"torch_adam": True}),
    "adamw_fused": ("AdamW", {}),
    "sgd": ("SGD", {}),
    "sgd_momentum": ("SGD", {"momentum": 0.9}),
}
"""Type and parameters by parsim's name; the fused ones are DeepSpeed's own kernel."""
KEPT_ARGUMENTS = ("betas", "eps", "momentum", "nesterov")


def write_deepspeed(recipe: PlannedRecipe, file: Path) -> Exported:
    """The plan as a DeepSpeed config. Raises ConfigError: it is more than data parallelism, or of an unknown precision."""
    plan, training, left_out = recipe.plan, recipe.training, recipe.left_out
    for axis, what in CUTS.items():
        if (ways := getattr(recipe, axis)) > 1:
            raise ConfigError(
                f"{NAME} describes data parallelism and ZeRO, and the plan has {what} ({axis} = {ways}: {plan.summary()}); "
                "export it as megatron or torchtitan, or plan with --set plan.strategy=dp"
            )
    precision, width = training["precision"], recipe.choose("precision", GRADIENT_BYTES)
    document: dict[str, Any] = {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": recipe.micro_batch,
        "gradient_accumulation_steps": plan.microbatches,
    }
    match precision:
        case "bf16":
            document["bf16"] = {"enabled": True}
            if training["master_weights"] is False:
                left_out["training.master_weights"] = (
                    "DeepSpeed keeps copies of the weights in fp32: 4 bytes per parameter more"
                )
        case "amp_fp16":
            document["amp"] = {"enabled": True, "opt_level": "O1"}
        case "amp_bf16":
            document["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
        case "tf32":
            left_out["training.precision"] = "tf32 is switched on in your script: torch.backends.cuda.matmul.allow_tf32 = True"
    document["zero_optimization"] = _zero_table(recipe, width)
    if training["optimizer"] not in OPTIMIZERS:
        left_out["training.optimizer"] = f"make {training['optimizer']} in your script and give it to deepspeed.initialize"
    else:
        kind, params = OPTIMIZERS[training["optimizer"]]
        arguments = {key: value for key, value in training["optimizer_args"].items() if key in KEPT_ARGUMENTS}
        for key in training["optimizer_args"]:
            if key not in arguments:
                left_out[f"training.optimizer_args.{key}"] = "DeepSpeed's optimizer has no such argument"
        usual = {"lr": training["learning_rate"], "weight_decay": training["weight_decay"]}
        document["optimizer"] = {"type": kind, "params": {**usual, **params, **arguments}}
    document["gradient_clipping"] = training["clip_norm"] or 0.0  # left out, DeepSpeed 0.19.3 and later clip at 1.0
    if plan.recompute != NONE or plan.segments:
        names = [name for name in plan.components if name in plan.recomputed or name in plan.recomputed_by_operator]
        left_out["plan.recompute"] = f"your model's code recomputes: torch.utils.checkpoint around {first_few(names, 4)}"
    write_text_atomically(file, json.dumps(document, indent=2) + "\n")
    per_node = plan.world_size // recipe.nodes
    launch = f"deepspeed --num_nodes {recipe.nodes} --num_gpus {per_node} train.py --deepspeed_config {file.name}"
    return Exported(
        format="deepspeed",
        file=file,
        summary=f"DeepSpeed config of {plan.summary()}: {file}; start it with `{launch}`",
        left_out=left_out,
        found={"ranks": plan.world_size, "launch": launch},
    )


def _zero_table(recipe: PlannedRecipe, width: int) -> dict[str, Any]:
    plan, left_out = recipe.plan, recipe.left_out
    if plan.mesh.dp_shard:
        raise ConfigError(
            f"DeepSpeed's ZeRO divides states over all {plan.mesh.dp} replicas, and the plan over groups of "
            f"{plan.mesh.dp_shard}; export it as megatron or torchtitan, or plan with --set plan.dp_shard={plan.mesh.dp}"
        )
    elements, rest = divmod(plan.bucket_bytes, width)
    if rest:
        left_out["plan.bucket_bytes"] = f"{plan.bucket_bytes} bytes are no whole number of elements; the file says {elements}"
    if plan.zero_stage == 0:
        left_out["plan.bucket_bytes"] = (
            "without ZeRO DeepSpeed sums all gradients after the backward, in buffers of its own size, and hides nothing"
        )
    table: dict[str, Any] = {"stage": plan.zero_stage, "reduce_bucket_size": max(1, elements), "overlap_comm": True}
    if plan.zero_stage:
        table |= {"contiguous_gradients": True, "reduce_scatter": True}
    if plan.zero_stage == 3:
        table["stage3_prefetch_bucket_size"] = max(1, elements)
        left_out["plan.zero_stage"] = (
            "DeepSpeed keeps small parameters whole (stage3_param_persistence_threshold), parsim does not"
        )
    elif plan.zero_stage:
        table["allgather_bucket_size"] = max(1, elements)
    return table


def is_deepspeed(source: SourceFile) -> bool:
    if not source.begins("{") or len(source.data) > SNIFFED:
        return False
    try:
        document = parse_json(source.text)
    except ValueError:  # JSONDecodeError is one
        return False
    typical = {*BATCH_KEYS, "zero_optimization", "fp16", "bf16", "zero_allow_untested_optimizer", "steps_per_print"}
    return isinstance(document, dict) and bool(typical & set(document)) and not NEOX_MARKS & set(document)


FORMATS = {
    "deepspeed": FileFormat(
        layouts="keys of 0.19",
        refuses='batch keys that contradict one another; a config in which all is "auto"',
        what="a DeepSpeed JSON config",
        tool=NAME,
        reads="run",
        sniff=is_deepspeed,
        read=read_deepspeed,
        writes="recipe",
        write=write_deepspeed,
        file="ds_config.json",
        options=("world_size",),
    )
}
