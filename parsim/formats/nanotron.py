"""nanotron: its YAML files, read. Key names are those of src/nanotron/config (huggingface/nanotron)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from parsim.errors import ConfigError
from parsim.formats.recipe import YAML, Recipe, whole_number, yaml_table
from parsim.formats.source import FileFormat, SourceFile
from parsim.model.catalogue.names import SEQUENCE_PARALLEL

NAME = "nanotron"
MARK = re.compile(r"^\s+batch_accumulation_per_replica:", re.MULTILINE)
"""A key that every such file has, and no other tool's."""

AXES = {
    "tp": "parallelism.tp",
    "pp": "parallelism.pp",
    "cp": "parallelism.context_parallel_size",
    "ep": "parallelism.expert_parallel_size",
}
SHAPE = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
}
FAMILIES = {"is_llama_config": {}, "is_qwen2_config": {"qkv_bias": True}}
"""Kinds of model_config, and what sets them apart from a Llama."""
ORDERS = {"1f1b": "1f1b", "afab": "gpipe"}
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
SAME_TIME = (
    "checkpoints",
    "data_stages",
    "general",
    "logging",
    "tokenizer",
    "profiler",
    "lighteval",
    "s3_upload",
    "metrics_logging",
)
IGNORED = frozenset(
    """
    model.ddp_bucket_cap_mb model.init_method model.model_config.max_position_embeddings model.model_config.rope_theta
    model.model_config.bos_token_id model.model_config.eos_token_id model.model_config.pad_token_id
    model.model_config.initializer_range model.model_config.rms_norm_eps model.model_config.use_cache
    model.model_config.hidden_act model.model_config.pretraining_tp model.model_config.rope_scaling
    model.model_config.rope_interleaved parallelism.pp_engine optimizer.accumulate_grad_in_fp32 optimizer.clip_grad
    optimizer.weight_decay optimizer.weight_decay_exclude_named_params tokens.train_steps tokens.val_check_interval
    tokens.limit_test_batches tokens.limit_val_batches
    """.split()  # noqa: SIM905
)
LEFT_OUT = {"parallelism.tp_linear_async_communication": "tensor-parallel communication is not hidden behind products"}


def read_nanotron(document: Mapping[str, Any]) -> Recipe:
    """A file of nanotron. Raises ConfigError for a family that is not known, or sizes that are missing or cannot be."""
    flat = _flat(document)
    recipe = Recipe(framework=NAME)

    def text(key: str, default: str) -> str:
        if flat.get(key) is None:
            return default
        recipe.taken[key] = flat[key]
        return str(flat[key])

    def number(key: str, default: int | None = None) -> int:
        found = text(key, "" if default is None else str(default))
        if not found:
            raise ConfigError(f"{NAME}: {key} is missing; add it")
        return whole_number(NAME, key, found)

    families = [name for name in FAMILIES if flat.get(f"model.model_config.{name}")]
    if len(families) != 1:
        raise ConfigError(f"{NAME}: model.model_config must have one of {', '.join(FAMILIES)} = true")
    text(f"model.model_config.{families[0]}", "")
    for axis, key in AXES.items():
        setattr(recipe, axis, number(key, 1))
    recipe.dp = number("parallelism.dp")
    args = {name: number(f"model.model_config.{key}") for name, key in SHAPE.items()}
    step = number("model.make_vocab_size_divisible_by", 1) * recipe.tp
    args["vocab"] = math.ceil(args["vocab"] / step) * step
    args["kv_heads"] = number("model.model_config.num_key_value_heads", args["heads"])
    tied = text("model.model_config.tie_word_embeddings", "False") == "True"
    sequence = text("parallelism.tp_mode", "REDUCE_SCATTER").upper() == "REDUCE_SCATTER"
    recipe.args = {
        **args,
        "gated": True,
        "norm": "rms",
        "rotary": True,
        "bias": False,
        "tied": tied,
        SEQUENCE_PARALLEL: sequence,
        **FAMILIES[families[0]],
        "seq": number("tokens.sequence_length"),
    }
    recipe.micro_batch = number("tokens.micro_batch_size")
    recipe.local_batch = recipe.micro_batch * number("tokens.batch_accumulation_per_replica")
    recipe.zero = number("optimizer.zero_stage", 0)
    recipe.recompute = "full" if text("parallelism.recompute_layer", "False") == "True" else "none"
    engine = text("parallelism.pp_engine", "1f1b").lower()
    if engine not in ORDERS or (dtype := text("model.dtype", "bfloat16")) not in PRECISIONS:
        raise ConfigError(
            f"{NAME}: parallelism.pp_engine must be one of {', '.join(ORDERS)} and model.dtype one of {', '.join(PRECISIONS)}"
        )
    recipe.order = ORDERS[engine] if recipe.pp > 1 else ""
    recipe.training["precision"] = PRECISIONS[dtype]
    fused = text("optimizer.optimizer_factory.torch_adam_is_fused", "True") == "True"
    adam = text("optimizer.optimizer_factory.name", "adamW").lower().startswith("adam")
    recipe.training["optimizer"] = ("adamw_fused" if fused else "adamw") if adam else "sgd_momentum"
    recipe.processes = recipe.dp * recipe.tp * recipe.pp * recipe.cp
    for key, value in flat.items():
        if key in recipe.taken:
            continue
        if key in LEFT_OUT and value:
            recipe.left_out[key] = LEFT_OUT[key]
        elif key.startswith("parallelism.") and isinstance(value, int) and not isinstance(value, bool) and value > 1:
            raise ConfigError(f"{NAME}: {key} = {value} is a degree of parallelism that parsim does not know; set it to 1")
        elif key.partition(".")[0] in SAME_TIME or key in IGNORED or key in LEFT_OUT or _is_rate(key):
            recipe.ignored.append(key)
        else:
            recipe.unknown.append(key)
    return recipe


def _is_rate(key: str) -> bool:
    return key.startswith(("optimizer.learning_rate_scheduler.", "optimizer.optimizer_factory.", "model.init_method."))


def _flat(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by their keys with dots between; empty ones are left out."""
    found: dict[str, Any] = {}
    for key, value in node.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= _flat(value, f"{name}.")
        elif value is not None:
            found[name] = value
    return found


def is_nanotron(source: SourceFile) -> bool:
    """Whether a file is one of nanotron."""
    return source.path.suffix in YAML and bool(MARK.search(source.text))


FORMATS = {
    "nanotron": FileFormat(
        what="a YAML file of nanotron",
        tool=NAME,
        reads="recipe",
        sniff=is_nanotron,
        read=lambda source: read_nanotron(yaml_table(source)),
    )
}
