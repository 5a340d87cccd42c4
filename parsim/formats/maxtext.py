"""MaxText's YAML files, read, and those of Primus, whose experiments name a framework for each module.

Key names are those of src/MaxText/configs/base.yml (AI-Hypercomputer/maxtext) and of AMD-AGI/Primus.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Any

from parsim.errors import ConfigError
from parsim.formats.megatron import overrides_of, read_yaml
from parsim.formats.recipe import SCRIPTS, VARIABLE, YAML, FileKeys, Recipe, plain_value, yaml_table
from parsim.formats.source import FileFormat, SourceFile
from parsim.formats.torchtitan import read_toml

NAME = "MaxText"
MARK = re.compile(r"^[ \t]*(ici|dcn)_\w+_parallelism\s*:|^[ \t]*per_device_batch_size\s*:", re.MULTILINE)
STARTS = re.compile(r"\bmaxtext[./]", re.IGNORECASE)
AXES = {
    "tp": ("tensor", "tensor_transpose", "tensor_sequence"),
    "pp": ("pipeline",),
    "cp": ("context", "sequence", "context_autoregressive"),
    "ep": ("expert",),
}
SHARDED, REPLICATED = ("fsdp", "fsdp_transpose"), ("data",)
SHAPE = {
    "layers": "base_num_decoder_layers",
    "hidden": "base_emb_dim",
    "heads": "base_num_query_heads",
    "kv_heads": "base_num_kv_heads",
    "ffn": "base_mlp_dim",
    "head_dim": "head_dim",
    "vocab": "vocab_size",
    "experts": "num_experts",
    "active": "num_experts_per_tok",
    "expert_ffn": "base_moe_mlp_dim",
}
KEPT = ("minimal", "save_qkv_proj", "save_dot_except_mlp", "save_dot_except_mlpwi", "save_dot_with_context_except_mlp")
SAME_TIME = re.compile(
    r"(run_name|base_output|steps|log_|profiler|skip_first|dataset|hf_|tokenizer|enable_checkpointing|async_|checkpoint|"
    r"learning_rate|warmup|cosine|adam_|gradient_clip|eval|save_|load_|data_shuffle|enable_goodput|monitor|packing|use_iota|"
    r"mu_dtype|hardware|jax_|compile|metrics|gcs_|tensorboard|init_|dropout|rope_|normalization|mlp_activations|"
    r"logits_|attention$|attention_type|scan_layers|shard_mode|num_slices|expansion|grain|remat_policy|megablox|sparse_matmul|"
    r"base_config|model_name|sa_|reuse_|dump_|upload_|enable_jax|use_vertex|vertex|hide_profiler|"
    r"allow_split|mesh_axes|logical_axis|data_sharding|custom_mesh|decoder_block|wo_tile|wi_tile|gmm_)"
)
LEFT_OUT = {
    "capacity_factor": "experts are visited evenly, and no token is dropped",
    "optimizer_memory_host_offload": "the optimizer's state stays on the device",
    "parameter_memory_host_offload": "parameters stay on the device",
    "packing": "every sample has all its tokens",
}


def read_maxtext(document: Mapping[str, Any], model: str = "") -> Recipe:
    """A file of MaxText.

    Args: document: its keys. model: the name that a wrapper gives it; "": the file's own.
    Raises: ConfigError: a batch that is no whole number per device, or sizes that are missing.
    """
    keys = FileKeys(NAME, document)
    recipe = Recipe(framework=NAME, software={"framework": "maxtext"})
    name = model or keys.text("model_name", default="default")
    own = {arg: keys.number(key, default=0) for arg, key in SHAPE.items() if key in keys.values}
    if name == "default":
        recipe.args = {"gated": True, "norm": "rms", "rotary": True, "bias": False, "tied": False, **own}
        for arg in ("layers", "hidden", "heads", "vocab"):
            if arg not in own:
                recipe.missing[f"model.args.{arg}"] = f"neither model_name nor {SHAPE[arg]} is set"
    else:
        recipe.name_model("model_name", name)
        recipe.args = own
    if seq := keys.number("max_target_length", default=0):
        recipe.args["seq"] = seq
    for axis, words in AXES.items():
        setattr(recipe, axis, _degree(keys, words))
    recipe.zero = 0
    sharded = _degree(keys, SHARDED, free=-1)
    if sharded != 1:
        recipe.zero = 3
    replicated = _degree(keys, REPLICATED, free=-1)
    if sharded > 1 and replicated > 1:
        recipe.dp, recipe.replicate = sharded * replicated, replicated
    elif recipe.zero == 0 and not any("parallelism" in key for key in keys.values):
        recipe.zero = 3  # the file of defaults divides over all devices
    batch = keys.text("per_device_batch_size", default="12")
    shards = recipe.tp * recipe.pp * recipe.cp
    local = float(batch) * shards if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", batch) else 0.0
    if local != int(local) or local < 1:
        raise ConfigError(
            f"{NAME}: per_device_batch_size = {batch} on {shards} devices per replica is no whole number of samples"
        )
    again = keys.number("gradient_accumulation_steps", default=1)
    recipe.micro_batch, recipe.local_batch = int(local), int(local) * again
    if recipe.pp > 1:
        parts = keys.number("num_pipeline_microbatches", default=recipe.pp)
        recipe.micro_batch = max(1, int(local) // max(1, parts if parts > 0 else recipe.pp))
    policy = keys.text("remat_policy", default="full")
    recipe.recompute = "full" if policy == "full" else "selective" if policy in KEPT else "none"
    if policy not in ("full", "none", *KEPT):
        what = "custom policies are" if policy == "custom" else f"{policy} is"
        recipe.left_out["remat_policy"] = f"{what} not modelled: nothing is computed again"
    weights, dtype = keys.text("weight_dtype", default="float32"), keys.text("dtype", default="bfloat16")
    low = keys.text("quantization").lower()
    recipe.training["precision"] = "fp32" if dtype == "float32" else "bf16" if weights == "bfloat16" else "amp_bf16"
    if "fp8" in low:
        recipe.training["precision"] = "fp8"
    elif low:
        recipe.left_out["quantization"] = f"{low} is not modelled: products are in 16 bits"
    kind = keys.text("opt_type", default="adamw").lower()
    recipe.training["optimizer"] = "sgd_momentum" if kind == "sgd" else "adamw_fused"
    keys.sort(recipe, left_out=LEFT_OUT, ignored=SAME_TIME)
    return recipe


def _degree(keys: FileKeys, words: tuple[str, ...], free: int = 1) -> int:
    """Ranks of these axes, inside and between slices together; `free`: for an axis that takes what is left (-1)."""
    found = [keys.text(f"{place}_{word}_parallelism", default="1") for word in words for place in ("ici", "dcn")]
    if "-1" in found:
        return free
    return prod(max(1, int(text)) if text.lstrip("-").isdigit() else 1 for text in found)


def is_maxtext(source: SourceFile) -> bool:
    """Whether a file is one of MaxText, or a script that starts it with keys of its own."""
    if source.path.suffix in SCRIPTS:
        return "per_device_batch_size=" in source.text and bool(STARTS.search(source.text))
    return source.path.suffix in YAML and "framework:" not in source.text and bool(MARK.search(source.text))


# Primus. The module that trains is read by the reader of its framework, with the model by name.


PRIMUS = "Primus"
PRIMUS_MARKS = (re.compile(r"^modules *:", re.MULTILINE), re.compile(r"\bframework *:"))


def read_primus(document: Mapping[str, Any]) -> Recipe:
    """The module that trains. Raises ConfigError: no such module, or a framework that is not known."""
    modules = document.get("modules")
    rows = list(modules.values()) if isinstance(modules, Mapping) else modules if isinstance(modules, list) else []
    row = next((row for row in rows if isinstance(row, Mapping) and row.get("framework")), None)
    if row is None:
        raise ConfigError(f"{PRIMUS}: modules holds none with a framework")
    framework = str(row["framework"]).lower()
    tables = [row[key] for key in ("params", "overrides") if row.get(key) is not None]
    if not all(isinstance(table, Mapping) for table in tables):
        raise ConfigError(f"{PRIMUS}: params and overrides of a module must be tables of keys")
    overrides = {str(key): _default(value) for table in tables for key, value in table.items()}
    model = row.get("model")
    name = re.sub(r"\.ya?ml$", "", str(model)) if isinstance(model, str) else ""
    name = re.sub(r"(?i)[-_](bf16|fp8)$", "", name)
    if framework == "maxtext":
        recipe = read_maxtext(overrides, name)
    elif framework == "torchtitan":
        table = {"name": "", "flavor": ""} | (dict(model) if isinstance(model, Mapping) else {})
        own = overrides.pop("model", None)
        overrides["model"] = {**table, **(own if isinstance(own, Mapping) else {})}
        recipe = read_toml(overrides, name)
    elif framework in ("megatron", "megatron_bridge"):
        recipe = read_yaml(overrides, name)
    else:
        raise ConfigError(f"{PRIMUS}: framework = {framework!r} must be megatron, torchtitan or maxtext")
    recipe.framework = f"{PRIMUS} ({recipe.framework})"
    return recipe


def _default(value: object) -> object:
    """`${PRIMUS:8}` is 8 where the environment does not say; tables are looked into."""
    if isinstance(value, Mapping):
        return {key: _default(entry) for key, entry in value.items()}
    if isinstance(value, str) and (form := VARIABLE.fullmatch(value)):
        text = form[1].strip("\"'")
        return plain_value(text) if text else None
    return value


def is_primus(source: SourceFile) -> bool:
    """Whether a file is one of Primus."""
    return source.path.suffix in YAML and all(mark.search(source.text) for mark in PRIMUS_MARKS)


FORMATS = {
    "maxtext": FileFormat(
        layouts="sizes by name or one by one; scripts that set the keys",
        refuses="a batch per device that is no whole number of samples",
        what="a YAML file of MaxText",
        tool=NAME,
        reads="recipe",
        sniff=is_maxtext,
        read=lambda source: read_maxtext(overrides_of(source.text) if source.path.suffix in SCRIPTS else yaml_table(source)),
    ),
    "primus": FileFormat(
        layouts="modules as tables or as a list",
        refuses="frameworks other than Megatron-LM, torchtitan and MaxText",
        what="a YAML file of Primus",
        tool=PRIMUS,
        reads="recipe",
        sniff=is_primus,
        read=lambda source: read_primus(yaml_table(source)),
    ),
}
