"""llm-foundry and OLMo, which share Composer's words: their YAML files, read.

Key names are those of llm-foundry (mosaicml/llm-foundry, TrainConfig and MPTConfig) and of OLMo's older trainer
(allenai/OLMo, olmo/config.py).
"""

from __future__ import annotations

import re
from typing import Any

from parsim.errors import ConfigError
from parsim.formats.recipe import YAML, FileKeys, Recipe, yaml_table
from parsim.formats.source import FileFormat, SourceFile
from parsim.formats.trainer import STAGES, take_optimizer

NAME, OLMO = "llm-foundry", "OLMo"
MARK = re.compile(r"^global_train_batch_size\s*:", re.MULTILINE)
"""A key of every such file, and of no other tool's."""
PRECISIONS = {"amp_bf16": "amp_bf16", "amp_fp16": "amp_fp16", "amp_fp8": "fp8", "fp32": "fp32"}
SIZES = {"layers": "n_layers", "hidden": "d_model", "heads": "n_heads"}
RECOMPUTED = {"one_in_two": 2, "one_in_three": 3, "one_in_four": 4, "one_in_eight": 8}
"""OLMo's strategies that recompute each n-th layer."""
SAME_TIME = re.compile(
    r"(data|variables\.|train_loader|eval|tokenizer|global_seed|seed|run_name|scheduler|optimizer\.|algorithms|max_duration|"
    r"device_eval|progress|log_|console|python_log|callbacks|loggers|save|load|autoresume|dist_timeout|icl|code_paths|wandb|"
    r"dry_run|time_limit|epoch|stop_at|speed_monitor|max_grad_norm|evaluators|restore|remote|reset|no_pre|canceled|"
    r"extra_steps|hf_datasets|softmax_auxiliary|model\.(name|init|attention_dropout|residual|embedding_dropout|eos|pad|"
    r"precision|layer_norm_(with|eps)|attention_layer_norm_with|bias_for|flash_attention|block_type|rope_|scale_|emb_|"
    r"embedding_layer|pretrained$|use_auth|use_flash|use_pretrained|config_overrides\.max|loss_fn|verbose|resid_pdrop|"
    r"attn_config\.(attn_impl|attn_pdrop|rope_|softmax|clip_qkv|alibi_bias|prefix)|no_bias|max_seq|norm_eps|logit_scale)|"
    r"fsdp(_config)?\.(limit|activation_checkpointing_reent|use_orig|sync_module|state_dict|verbose|backward|forward|"
    r"wrapping|flatten|load_|precision|mixed|cpu_offload)|ddp\.|"
    r"compile\.(mode|fullgraph|dynamic)|gen1_gc|find_unused|canc|module_outputs|max_|new_style|try_load|keep_)"
)
LEFT_OUT = {
    "fsdp_config.activation_cpu_offload": "kept activations stay on the device",
    "model.attention_layer_norm": "queries and keys are not normalised",
    "model.attn_config.sliding_window_size": "attention reaches over the whole sample",
}


def read_composer(source: SourceFile) -> Recipe:
    """A file of llm-foundry or OLMo. Raises ConfigError for adapters, or experts of another kind."""
    document = yaml_table(source)
    olmo = not (isinstance(document.get("model"), dict) and "name" in document["model"])
    keys = FileKeys(OLMO if olmo else NAME, document)
    recipe = Recipe(framework=keys.framework)
    if any(key.startswith(("model.peft_config", "peft_config")) for key in keys.values):
        raise ConfigError(f"{NAME}: peft_config trains adapters; drop the table to price full training")
    if name := keys.text("model.pretrained_model_name_or_path"):
        recipe.name_model("model.pretrained_model_name_or_path", name)
    elif keys.text("model.d_model"):
        recipe.args = _olmo(keys) if olmo else _mpt(keys)
    else:
        recipe.model = ""
        recipe.missing["model.name"] = "the file gives neither sizes nor pretrained_model_name_or_path"
    if seq := keys.number("max_seq_len", "model.max_seq_len", "model.max_sequence_length", default=0):
        recipe.args["seq"] = seq
    recipe.training["global_batch"] = keys.number("global_train_batch_size")
    micro = keys.text("device_train_microbatch_size", "device_train_grad_accum", default="auto")
    if micro == "auto":
        why = "device_train_microbatch_size = auto is found at the start: one sample is taken"
        recipe.left_out["device_train_microbatch_size"] = why
    else:
        recipe.micro_batch = keys.number("device_train_microbatch_size", default=1)
    precision = keys.text("precision", default="amp_bf16").lower()
    if precision not in PRECISIONS:
        raise ConfigError(f"{keys.framework}: precision = {precision!r} must be one of {', '.join(PRECISIONS)}")
    recipe.training["precision"] = PRECISIONS[precision]
    take_optimizer(keys.text("optimizer.name", default="adamw").removeprefix("decoupled_"), recipe)
    _divided(keys, recipe)
    again = keys.text("activation_checkpointing", default="none").lower()
    if keys.flag("fsdp_config.activation_checkpointing") or again in ("whole_layer", "true"):
        recipe.recompute = "full"
    elif again in RECOMPUTED:
        recipe.recompute, recipe.every = "alternate", RECOMPUTED[again]
    elif again not in ("none", "false"):
        recipe.left_out["activation_checkpointing"] = f"{again} is not modelled: nothing is computed again"
    compiled = document.get("compile", document.get("compile_config"))
    recipe.software["compiled"] = isinstance(compiled, dict)
    keys.sort(recipe, left_out=LEFT_OUT, ignored=SAME_TIME)
    return recipe


def _divided(keys: FileKeys, recipe: Recipe) -> None:
    """FSDP where a table of it stands, unless the strategy is DDP."""
    there = any(key.startswith(("fsdp.", "fsdp_config.", "parallelism_config.fsdp")) for key in keys.values)
    there = keys.text("distributed_strategy", default="fsdp").lower() == "fsdp" and there
    recipe.software["framework"] = "fsdp" if there else "ddp"
    if not there:
        return
    word = keys.text("fsdp_config.sharding_strategy", "fsdp.sharding_strategy", default="FULL_SHARD").lower().strip("_")
    if word.startswith("hybrid"):
        recipe.missing["plan.dp_shard"] = f"sharding_strategy = {word} divides within a node, whose size the file lacks"
    recipe.zero = STAGES.get(word, 3)
    recipe.replicate = keys.number(
        "fsdp_config.data_parallel_replicate_degree", "fsdp.hybrid_sharding_num_model_replicas", default=1
    )


def _mpt(keys: FileKeys) -> dict[str, Any]:
    """Sizes of an MPT, by MPTConfig's defaults."""
    args: dict[str, Any] = {name: keys.number(f"model.{key}") for name, key in SIZES.items()}
    ratio = keys.number("model.expansion_ratio", default=4)
    kind = keys.text("model.ffn_config.ffn_type", default="mptmlp")
    if kind not in ("mptmlp", "mptglu"):
        raise ConfigError(
            f"{NAME}: ffn_type = {kind} is a mixture of experts whose sizes parsim does not read; plan a model by name, or "
            "give model.args.experts in a run file"
        )
    bias = not keys.flag("model.no_bias")
    args |= {
        "vocab": keys.number("model.vocab_size", default=50368),
        "ffn": keys.number("model.ffn_config.ffn_hidden_size", default=0) or ratio * args["hidden"],
        "gated": kind == "mptglu",
        "norm": "rms" if "rms" in keys.text("model.norm_type", default="low_precision_layernorm") else "layer",
        "bias": bias,
        "tied": keys.flag("model.tie_word_embeddings", default=True),
        "kv_heads": keys.number("model.attn_config.kv_n_heads", default=0),
        "qk_norm": keys.flag("model.attn_config.qk_ln") or keys.flag("model.attn_config.qk_gn"),
    }
    if keys.text("model.attn_config.attn_type") == "multiquery_attention":
        args["kv_heads"] = 1
    if keys.flag("model.attn_config.alibi"):
        args["alibi"] = True
    elif keys.flag("model.attn_config.rope"):
        args["rotary"] = True
    keys.flag("model.learned_pos_emb")
    return args


def _olmo(keys: FileKeys) -> dict[str, Any]:
    """Sizes of an OLMo. The inside of its MLP counts both arms of SwiGLU."""
    args: dict[str, Any] = {name: keys.number(f"model.{key}") for name, key in SIZES.items()}
    gated = keys.text("model.activation_type", default="swiglu").lower() == "swiglu"
    ratio = keys.number("model.mlp_ratio", default=4)
    inner = keys.number("model.mlp_hidden_size", default=0) or ratio * args["hidden"]
    heads = 1 if keys.flag("model.multi_query_attention") else keys.number("model.n_kv_heads", default=0)
    vocab = keys.number("model.vocab_size", default=50257)
    return args | {
        "vocab": keys.number("model.embedding_size", default=0) or vocab,
        "ffn": inner // 2 if gated else inner,
        "gated": gated,
        "norm": "rms" if "rms" in keys.text("model.layer_norm_type", default="default") else "layer",
        "bias": keys.flag("model.include_bias", default=True),
        "tied": keys.flag("model.weight_tying", default=True),
        "kv_heads": heads,
        **({"alibi": True} if keys.flag("model.alibi") else {"rotary": True} if keys.flag("model.rope") else {}),
    }


FORMATS = {
    "composer": FileFormat(
        layouts="llm-foundry with and without variables, sizes or Hugging Face names; OLMo's older trainer",
        refuses="adapters, mixtures of experts; a model or a node's size that the file lacks, until --set",
        what="a YAML file of llm-foundry or OLMo",
        tool=NAME,
        reads="recipe",
        sniff=lambda source: source.path.suffix in YAML and bool(MARK.search(source.text)),
        read=read_composer,
    )
}
