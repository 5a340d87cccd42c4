"""nanotron: its YAML files, read. Key names are those of src/nanotron/config (huggingface/nanotron)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from parsim.errors import ConfigError
from parsim.formats.recipe import YAML, FileKeys, Recipe, yaml_table
from parsim.formats.source import FileFormat, SourceFile
from parsim.model.catalogue.names import SEQUENCE_PARALLEL

NAME = "nanotron"
MARK = re.compile(r"\bbatch_accumulation_per_replica:")
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
SAME_TIME = re.compile(
    r"(checkpoints|data_stages|general|logging|tokenizer|profiler|lighteval|s3_upload|metrics_logging)(\.|$)|"
    r"optimizer\.(learning_rate_scheduler|optimizer_factory)\.|model\.init_method\.|model\.ddp_bucket_cap_mb$|"
    r"model\.model_config\.(max_position_embeddings|rope_|.*_token_id|initializer_range|rms_norm_eps|use_cache|hidden_act|"
    r"pretraining_tp)|parallelism\.pp_engine$|optimizer\.(accumulate_grad_in_fp32|clip_grad|weight_decay)|"
    r"tokens\.(train_steps|val_check_interval|limit_)"
)
LEFT_OUT = {"parallelism.tp_linear_async_communication": "tensor-parallel communication is not hidden behind products"}


def read_nanotron(document: Mapping[str, Any]) -> Recipe:
    """A file of nanotron. Raises ConfigError for a family that is not known, or sizes that are missing or cannot be."""
    keys = FileKeys(NAME, document)
    recipe = Recipe(framework=NAME)
    flat, text, number = keys.values, keys.text, keys.number
    families = [name for name in FAMILIES if flat.get(f"model.model_config.{name}")]
    if len(families) != 1:
        raise ConfigError(f"{NAME}: model.model_config must have one of {', '.join(FAMILIES)} = true")
    text(f"model.model_config.{families[0]}")
    for axis, key in AXES.items():
        setattr(recipe, axis, number(key, default=1))
    recipe.dp = number("parallelism.dp")
    args = {name: number(f"model.model_config.{key}") for name, key in SHAPE.items()}
    step = number("model.make_vocab_size_divisible_by", default=1) * recipe.tp
    args["vocab"] = math.ceil(args["vocab"] / step) * step
    args["kv_heads"] = number("model.model_config.num_key_value_heads", default=args["heads"])
    tied = keys.flag("model.model_config.tie_word_embeddings")
    sequence = text("parallelism.tp_mode", default="REDUCE_SCATTER").upper() == "REDUCE_SCATTER"
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
    recipe.zero = number("optimizer.zero_stage", default=0)
    recipe.recompute = "full" if keys.flag("parallelism.recompute_layer") else "none"
    engine = text("parallelism.pp_engine", default="1f1b").lower()
    if engine not in ORDERS or (dtype := text("model.dtype", default="bfloat16")) not in PRECISIONS:
        raise ConfigError(
            f"{NAME}: parallelism.pp_engine must be one of {', '.join(ORDERS)} and model.dtype one of {', '.join(PRECISIONS)}"
        )
    recipe.order = ORDERS[engine] if recipe.pp > 1 else ""
    recipe.training["precision"] = PRECISIONS[dtype]
    fused = keys.flag("optimizer.optimizer_factory.torch_adam_is_fused", default=True)
    adam = text("optimizer.optimizer_factory.name", default="adamW").lower().startswith("adam")
    recipe.training["optimizer"] = ("adamw_fused" if fused else "adamw") if adam else "sgd_momentum"
    recipe.processes = recipe.dp * recipe.tp * recipe.pp * recipe.cp
    keys.sort(recipe, left_out=LEFT_OUT, ignored=SAME_TIME)
    return recipe


def is_nanotron(source: SourceFile) -> bool:
    """Whether a file is one of nanotron."""
    return source.path.suffix in YAML and bool(MARK.search(source.text))


FORMATS = {
    "nanotron": FileFormat(
        layouts="Llama and Qwen2",
        refuses="families other than Llama and Qwen2",
        what="a YAML file of nanotron",
        tool=NAME,
        reads="recipe",
        sniff=is_nanotron,
        read=lambda source: read_nanotron(yaml_table(source)),
    )
}
