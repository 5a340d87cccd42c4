"""A DeepSpeed JSON config as keys of a run file, and what becomes of every key that has none.

ZeRO, precision, batch, optimizer and bucket have keys here. Each other key is named, with whether it changes the time or the
memory of a step: one that does is a warning, since the prediction is of a run without it.

Source: deepspeed.ai, "DeepSpeed Configuration JSON" (keys, meanings, defaults); bucket sizes count elements there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from parsim.errors import ImportedFileError
from parsim.importers.source_file import SourceFile, finite, listed, shown

AUTO = "auto"
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
OPTIMIZERS: Mapping[str, tuple[str, str]] = {"adam": ("adam_fused", "adam"), "adamw": ("adamw_fused", "adamw")}
"""By type: with DeepSpeed's own fused kernel, and with torch's."""
MOST_BATCH = 10**9
DEPTH = 3

HARMLESS: Mapping[str, str] = {
    "steps_per_print": "prints",
    "wall_clock_breakdown": "prints times; it synchronises, which slows a step by little",
    "dump_state": "prints",
    "scheduler": "the learning rate over time",
    "gradient_clipping": "one small all_reduce per step",
    "prescale_gradients": "a scaling",
    "gradient_predivide_factor": "a scaling",
    "zero_allow_untested_optimizer": "a permission",
    "zero_force_ds_cpu_optimizer": "a permission",
    "fp16.loss_scale": "a scaling",
    "fp16.loss_scale_window": "a scaling",
    "fp16.initial_scale_power": "a scaling",
    "fp16.hysteresis": "a scaling",
    "fp16.min_loss_scale": "a scaling",
    "fp16.consecutive_hysteresis": "a scaling",
    "optimizer.params.betas": "a number of the optimizer",
    "optimizer.params.eps": "a number of the optimizer",
    "optimizer.params.weight_decay": "a number of the optimizer",
    "optimizer.params.bias_correction": "a number of the optimizer",
    "zero_optimization.contiguous_gradients": "parsim's buckets are contiguous",
    "zero_optimization.reduce_scatter": "parsim scatters gradients under ZeRO 2 and 3",
    "zero_optimization.allgather_partitions": "parsim gathers whole buckets",
    "zero_optimization.round_robin_gradients": "an order of copies",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "saving only",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "saving only",
    "zero_optimization.ignore_unused_parameters": "a permission",
    "zero_optimization.cpu_offload": "read as offload_optimizer",
    "tensorboard": "logs",
    "wandb": "logs",
    "csv_monitor": "logs",
    "comet": "logs",
    "comms_logger": "logs",
    "flops_profiler": "profiles",
    "autotuning": "a search before the run",
    "aio": "disks",
    "checkpoint": "saving only",
    "seed": "randomness",
    "dataloader_drop_last": "the last batch",
}
"""Keys that change a step's time and memory by nothing worth pricing, and why."""

MATTERS: Mapping[str, str] = {
    "zero_optimization.offload_optimizer": "part of the optimizer's state is on the host, or on a disk",
    "zero_optimization.offload_param": "parameters are on the host or a disk: less memory, and every layer waits for PCIe",
    "zero_optimization.overlap_comm": "false: communication does not overlap; parsim overlaps as much as possible",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedKeys:
    """Attributes:
    keys: of the run file, such as {"plan.zero_stage": 3}.
    ranks: data-parallel ranks that the three batch keys imply (None: they do not say). needs_ranks: the batch or the
    microbatches follow only with the number of ranks, which was not given.
    warnings: keys that matter and are not priced. harmless, auto: keys that change nothing, and that the framework fills in.
    """

    keys: Mapping[str, Any]
    ranks: int | None
    needs_ranks: bool
    warnings: tuple[str, ...]
    harmless: tuple[str, ...]
    auto: tuple[str, ...]


@dataclass(slots=True)
class _Reading:
    where: str
    keys: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    needs_ranks: bool = False
    used: set[str] = field(default_factory=set)


def is_deepspeed(document: object) -> bool:
    """Whether a JSON document looks like a DeepSpeed config."""
    known = {*BATCH_KEYS, "zero_optimization", "fp16", "bf16", "zero_allow_untested_optimizer", "steps_per_print"}
    return isinstance(document, dict) and bool(known & set(document))


def read_deepspeed(source: SourceFile, *, ranks: int | None = None) -> DeepSpeedKeys:
    """Read a config.

    Args:
        source: the file. ranks: data-parallel ranks, where the batch needs them (None: not known).

    Raises:
        ImportedFileError: no config, a value of the wrong kind, or batch keys that contradict one another.
    """
    document = source.json("a DeepSpeed config")
    if not isinstance(document, dict) or not document:
        raise ImportedFileError(
            f"{source.path} is not a DeepSpeed config: it must be a JSON table with keys such as {listed(BATCH_KEYS)}"
        )
    reading = _Reading(str(source.path))
    auto = tuple(shown(path) for path, value in _leaves(document) if value == AUTO)
    implied = _batch(document, reading, ranks)
    width = _precision(document, reading)
    _zero(document, reading, width)
    _optimizer(document, reading)
    harmless: list[str] = []
    for path, value in _leaves(document):
        if path in reading.used or value == AUTO:
            continue
        _judge(path, value, reading, harmless)
    if not reading.keys:
        raise ImportedFileError(
            f'{source.path} sets nothing that a run file has ({len(auto)} keys are "auto"); expected {listed(BATCH_KEYS)}, '
            "zero_optimization, fp16, bf16 or optimizer with values"
        )
    return DeepSpeedKeys(
        keys=reading.keys,
        ranks=implied,
        needs_ranks=reading.needs_ranks,
        warnings=tuple(dict.fromkeys(reading.warnings)),
        harmless=tuple(harmless),
        auto=auto,
    )


def _leaves(node: Mapping[str, Any], path: str = "", depth: int = 1) -> Iterator[tuple[str, Any]]:
    """Keys and values; tables deeper than DEPTH count as one value."""
    for key, value in node.items():
        here = f"{path}{key}"
        if isinstance(value, dict) and value and depth < DEPTH and here not in MATTERS and here not in HARMLESS:
            yield from _leaves(value, f"{here}.", depth + 1)
        else:
            yield here, value


def _whole(document: Mapping[str, Any], key: str, reading: _Reading, most: int) -> int | None:
    value = document.get(key)
    reading.used.add(key)
    if value is None or value == AUTO:
        return None
    number = finite(value)
    if number is None or number != int(number) or not 1 <= number <= most:
        raise ImportedFileError(f"{reading.where}: {key} = {shown(value)} must be a whole number from 1 to {most:,}")
    return int(number)


def _batch(document: Mapping[str, Any], reading: _Reading, ranks: int | None) -> int | None:
    total, micro, accumulated = (_whole(document, key, reading, MOST_BATCH) for key in BATCH_KEYS)
    implied: int | None = None
    if total and micro:
        each = micro * (accumulated or 1)
        if total % each:
            raise ImportedFileError(
                f"{reading.where}: train_batch_size = {total} must be train_micro_batch_size_per_gpu ({micro}) * "
                f"gradient_accumulation_steps ({accumulated or 1}) * ranks"
            )
        implied = total // each if accumulated else None
        if ranks is not None and implied is not None and ranks != implied:
            raise ImportedFileError(
                f"{reading.where}: train_batch_size = {total} of {micro} * {accumulated} per rank needs {implied} ranks, "
                f"and {ranks} were given"
            )
        if ranks and accumulated is None:
            if total % (micro * ranks):
                raise ImportedFileError(
                    f"{reading.where}: train_batch_size = {total} must be a multiple of {micro} samples * {ranks} ranks"
                )
            accumulated = total // (micro * ranks)
        elif accumulated is None:
            reading.needs_ranks = True
            reading.warnings.append(
                f"train_micro_batch_size_per_gpu = {micro} is not used: the number of microbatches needs that of ranks; give "
                "--world-size N, or --set plan.microbatches=N"
            )
    elif micro and ranks:
        total = micro * (accumulated or 1) * ranks
        if total > MOST_BATCH:
            raise ImportedFileError(
                f"{reading.where}: {micro} * {accumulated or 1} * {ranks} samples are more than {MOST_BATCH:,}"
            )
    elif micro:
        reading.needs_ranks = True
        reading.warnings.append(
            "train_micro_batch_size_per_gpu: the batch needs the number of ranks; give --world-size N, or "
            "--set training.global_batch=N"
        )
    if total:
        reading.keys["training.global_batch"] = total
    if accumulated:
        reading.keys["plan.microbatches"] = accumulated
    return implied or ranks


def _enabled(document: Mapping[str, Any], key: str, reading: _Reading) -> bool:
    table = document.get(key)
    reading.used.add(f"{key}.enabled")
    if table is None:
        return False
    if not isinstance(table, dict):
        raise ImportedFileError(f'{reading.where}: {key} = {shown(table)} must be a table such as {{"enabled": true}}')
    value = table.get("enabled", key in ("fp16", "bf16") and bool(table) and None)
    if value in (None, AUTO, False, True):
        return value is True
    raise ImportedFileError(f"{reading.where}: {key}.enabled = {shown(value)} must be true or false")


def _precision(document: Mapping[str, Any], reading: _Reading) -> int:
    """Sets training.precision; returns bytes of a gradient's element."""
    half, brain = (
        _enabled(document, "fp16", reading),
        _enabled(document, "bf16", reading) or _enabled(document, "bfloat16", reading),
    )
    apex = _enabled(document, "amp", reading)
    if half and brain:
        raise ImportedFileError(f"{reading.where}: fp16 and bf16 are both enabled; DeepSpeed takes one of them")
    if brain:
        reading.keys["training.precision"] = "bf16"
        return 2
    if half:
        reading.keys["training.precision"] = "bf16"
        reading.warnings.append(
            "fp16: weights of 2 bytes with fp32 copies are priced as bf16, whose sizes and peaks are the same"
        )
        return 2
    if apex:
        reading.keys["training.precision"] = "amp_fp16"
        return 4
    if _enabled(document, "torch_autocast", reading):
        half_type = document["torch_autocast"].get("dtype", "bfloat16")
        reading.used.add("torch_autocast.dtype")
        reading.keys["training.precision"] = "amp_fp16" if "float16" in str(half_type).replace("bfloat16", "") else "amp_bf16"
        return 4
    states = [document.get(key) for key in ("fp16", "bf16", "bfloat16")]
    if not any(isinstance(state, dict) and state.get("enabled") == AUTO for state in states):
        reading.keys["training.precision"] = "fp32"
    return 4


def _zero(document: Mapping[str, Any], reading: _Reading, width: int) -> None:
    table = document.get("zero_optimization")
    if table is None:
        reading.keys["plan.zero_stage"] = 0
        reading.keys["plan.strategy"] = "dp"
        return
    if not isinstance(table, dict):
        raise ImportedFileError(f'{reading.where}: zero_optimization = {shown(table)} must be a table such as {{"stage": 2}}')
    stage = table.get("stage", 0)
    reading.used.update({"zero_optimization.stage", "zero_optimization.reduce_bucket_size"})
    if stage != AUTO:
        if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
            raise ImportedFileError(f"{reading.where}: zero_optimization.stage = {shown(stage)} must be 0, 1, 2 or 3")
        reading.keys["plan.zero_stage"] = int(stage)
        reading.keys["plan.strategy"] = "dp"
    elements = table.get("reduce_bucket_size")
    if elements is not None and elements != AUTO:
        number = finite(elements)
        if number is None or not 1 <= number <= 1e12:
            raise ImportedFileError(
                f"{reading.where}: zero_optimization.reduce_bucket_size = {shown(elements)} must be a number of elements"
            )
        reading.keys["plan.bucket_bytes"] = int(number) * width
    _offload(table, reading)


def _offload(table: Mapping[str, Any], reading: _Reading) -> None:
    """The optimizer's state in the host's memory; a part of it, or a disk, is told and not priced."""
    asked = table.get("offload_optimizer")
    whole = isinstance(asked, dict) and asked.get("device") == "cpu" and finite(asked.get("ratio", 1.0)) == 1.0
    if not whole and table.get("cpu_offload") is not True:
        return
    if whole:
        reading.used.add("zero_optimization.offload_optimizer")
    reading.keys["plan.optimizer_offload"] = True
    reading.warnings.append(
        "offload_optimizer: gradients are accumulated on the device and copied once per step, and the host's memory bounds the "
        "update: set cluster.host_memory_bandwidth_bytes_per_s"
    )


def _optimizer(document: Mapping[str, Any], reading: _Reading) -> None:
    table = document.get("optimizer")
    if table is None:
        return
    if not isinstance(table, dict):
        raise ImportedFileError(f"{reading.where}: optimizer = {shown(table)} must be a table with a type")
    reading.used.update({"optimizer.type", "optimizer.params.lr"})
    stated = table.get("params")
    params: dict[str, Any] = stated if isinstance(stated, dict) else {}
    kind = str(table.get("type", "")).lower()
    if kind in OPTIMIZERS:
        decoupled = kind == "adamw" or params.get("adam_w_mode", True) is not False
        own = params.get("torch_adam", False) is not True
        reading.used.update({"optimizer.params.torch_adam", "optimizer.params.adam_w_mode"})
        reading.keys["training.optimizer"] = OPTIMIZERS["adamw" if decoupled else "adam"][0 if own else 1]
    elif kind == "sgd":
        momentum = finite(params.get("momentum")) or 0.0
        reading.used.add("optimizer.params.momentum")
        reading.keys["training.optimizer"] = "sgd_momentum" if momentum else "sgd"
    else:
        reading.warnings.append(
            f"optimizer.type = {shown(table.get('type'))!r} matters: parsim has no such optimizer; set training.optimizer to "
            "the one with as much state (adamw: two numbers per parameter), or write a row (docs/extending.md)"
        )
    rate = params.get("lr")
    if rate is not None and rate != AUTO:
        number = finite(rate)
        if number is None or not 0 < number < 1e6:
            raise ImportedFileError(f"{reading.where}: optimizer.params.lr = {shown(rate)} must be a number above 0")
        reading.keys["training.learning_rate"] = number


def _judge(path: str, value: object, reading: _Reading, harmless: list[str]) -> None:
    """Name a key that has none here: nothing worth pricing, something that matters, or unknown."""
    parts = path.split(".")
    prefixes = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    known = next((prefix for prefix in prefixes if prefix in HARMLESS), None)
    if known is not None:
        harmless.append(shown(path))
        return
    known = next((prefix for prefix in prefixes if prefix in MATTERS), None)
    inner = value if isinstance(value, dict) else {}
    off = value in (None, False, {}, 0) or inner.get("enabled") is False or inner.get("device") == "none"
    if known is None:
        reading.warnings.append(f"{shown(path)} = {shown(value)} is not known to parsim, and may matter")
    elif off != (known == "zero_optimization.overlap_comm"):
        harmless.append(shown(path))  # a feature that is off, or an overlap that is on
    else:
        reading.warnings.append(f"{shown(path)} matters: {MATTERS[known]}")
