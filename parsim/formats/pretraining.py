"""Tools that pretrain, read: MaxText and Primus, Levanter, nanotron, nanoGPT, llm-foundry and OLMo, and programs for images.

Key names are those of TrainerConfig and LlamaConfig (stanford-crfm/levanter), src/MaxText/configs/base.yml
(AI-Hypercomputer/maxtext), AMD-AGI/Primus, and src/nanotron/config (huggingface/nanotron). Further ones are those of train.py
and model.py (karpathy/nanoGPT), TrainConfig and MPTConfig (mosaicml/llm-foundry), and OLMo's older trainer (allenai/OLMo,
olmo/config.py). Programs for images are references/classification/train.py (pytorch/vision), train.py
(huggingface/pytorch-image-models) and imagenet/main.py (pytorch/examples).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from parsim.errors import ConfigError
from parsim.formats.megatron import read_yaml
from parsim.formats.recipe import (
    SCRIPTS,
    VARIABLE,
    YAML,
    FileKeys,
    Recipe,
    file_named,
    flat_table,
    opened,
    plain_value,
    take_adapters,
    whole_number,
    yaml_table,
)
from parsim.formats.scripts import Script, note_hanging, option_values, options_of, overrides_of, walk, words_of
from parsim.formats.source import FileFormat, SourceFile, marked
from parsim.formats.torchtitan import read_toml
from parsim.formats.trainer import STAGES, take_optimizer
from parsim.model.catalogue.names import NAMED, SEQUENCE_PARALLEL, named, normalised
from parsim.model.catalogue.zoo import IMAGENET, ZOO
from parsim.units import printable

# nanotron.


NANOTRON = "nanotron"
NANOTRON_MARK = re.compile(r"\bbatch_accumulation_per_replica:")
"""A key that every such file has, and no other tool's."""

NANOTRON_AXES = {
    "tp": "parallelism.tp",
    "pp": "parallelism.pp",
    "cp": "parallelism.context_parallel_size",
    "ep": "parallelism.expert_parallel_size",
}
NANOTRON_SHAPE = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
}
FAMILIES = {"is_llama_config": {}, "is_qwen2_config": {"qkv_bias": True}}
"""Kinds of model_config, and what sets them apart from a Llama."""
ORDERS = {"1f1b": "1f1b", "afab": "gpipe"}
NANOTRON_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
NANOTRON_SAME_TIME = re.compile(
    r"(checkpoints|data_stages|general|logging|tokenizer|profiler|lighteval|s3_upload|metrics_logging)(\.|$)|"
    r"optimizer\.(learning_rate_scheduler|optimizer_factory)\.|model\.init_method\.|model\.ddp_bucket_cap_mb$|"
    r"model\.model_config\.(max_position_embeddings|rope_|.*_token_id|initializer_range|rms_norm_eps|use_cache|hidden_act|"
    r"pretraining_tp)|parallelism\.pp_engine$|optimizer\.(accumulate_grad_in_fp32|clip_grad|weight_decay)|"
    r"tokens\.(train_steps|val_check_interval|limit_)|model\.model_config\.(_|z_loss|moe_config\.(token_disp|router_aux|use_torch))|"
    r"parallelism\.(tp_recompute_allgather|expert_parallel_size)|optimizer\.weight_decay_excl"
)
NANOTRON_LEFT_OUT = {
    "parallelism.tp_linear_async_communication": "tensor-parallel communication is not hidden behind products",
    "model.model_config.sliding_window_size": "attention reaches over the whole sample",
    "model.model_config.moe_config.layers": "all layers have experts",
}


def read_nanotron(document: Mapping[str, Any]) -> Recipe:
    """A file of nanotron. Raises ConfigError for a family that is not known, or sizes that are missing or cannot be."""
    keys = FileKeys(NANOTRON, document)
    recipe = Recipe(framework=NANOTRON)
    flat, text, number = keys.values, keys.text, keys.number
    families = [name for name in FAMILIES if flat.get(f"model.model_config.{name}")]
    if len(families) != 1:
        raise ConfigError(f"{NANOTRON}: model.model_config must have one of {', '.join(FAMILIES)} = true")
    text(f"model.model_config.{families[0]}")
    keys.degrees(recipe, **NANOTRON_AXES)
    recipe.dp = number("parallelism.dp")
    args = {name: number(f"model.model_config.{key}") for name, key in NANOTRON_SHAPE.items()}
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
    if "model.model_config.attention_bias" in flat:
        recipe.args["qkv_bias"] = keys.flag("model.model_config.attention_bias")
    moe = "model.model_config.moe_config"
    if experts := number(f"{moe}.num_experts", default=0):
        inner = number(f"{moe}.moe_intermediate_size", default=args["ffn"])
        recipe.args |= {"experts": experts, "active": number(f"{moe}.top_k", default=1), "expert_ffn": inner}
        if keys.flag(f"{moe}.enable_shared_expert"):
            recipe.args["shared_ffn"] = number(f"{moe}.shared_expert_intermediate_size", default=inner)
    recipe.micro_batch = number("tokens.micro_batch_size")
    recipe.local_batch = recipe.micro_batch * number("tokens.batch_accumulation_per_replica")
    recipe.zero = number("optimizer.zero_stage", default=0)
    recipe.recompute = "full" if keys.flag("parallelism.recompute_layer") else "none"
    engine = text("parallelism.pp_engine", default="1f1b").lower()
    if engine not in ORDERS or (dtype := text("model.dtype", default="bfloat16")) not in NANOTRON_PRECISIONS:
        raise ConfigError(
            f"{NANOTRON}: parallelism.pp_engine must be one of {', '.join(ORDERS)} and model.dtype one of "
            f"{', '.join(NANOTRON_PRECISIONS)}"
        )
    recipe.order = ORDERS[engine] if recipe.pp > 1 else ""
    recipe.training["precision"] = NANOTRON_PRECISIONS[dtype]
    fused = keys.flag("optimizer.optimizer_factory.torch_adam_is_fused", default=True)
    adam = text("optimizer.optimizer_factory.name", default="adamW").lower().startswith("adam")
    recipe.training["optimizer"] = ("adamw_fused" if fused else "adamw") if adam else "sgd_momentum"
    recipe.processes = recipe.dp * recipe.tp * recipe.pp * recipe.cp
    keys.sort(recipe, left_out=NANOTRON_LEFT_OUT, ignored=NANOTRON_SAME_TIME)
    return recipe


# nanoGPT: configurations are assignments in Python, or scripts that name one; read and not run.


NANOGPT = "nanoGPT"
NANOGPT_MARK = re.compile(
    r"^(block_size|gradient_accumulation_steps|init_from|n_layer|always_save_checkpoint|wandb_log)\s*=", re.MULTILINE
)
PROGRAM = re.compile(r"^\s*(def|class|from)\s", re.MULTILINE)
"""Of a script that does more than to assign."""
STARTS = re.compile(r"\btrain\.py\s+(\S*config/\w+\.py)")
NANOGPT_PRECISIONS = {"bfloat16": "amp_bf16", "float16": "amp_fp16", "float32": "tf32"}
NANOGPT_DEFAULTS: dict[str, Any] = {
    "batch_size": 12,
    "block_size": 1024,
    "gradient_accumulation_steps": 40,
    "n_layer": 12,
    "n_head": 12,
    "n_embd": 768,
}
VOCABULARY = 50304
NANOGPT_SAME_TIME = re.compile(
    r"(out_dir|eval_|log_|always_|wandb_|dataset|learning_rate|max_iters|lr_decay|min_lr|warmup|beta|weight_decay|grad_clip|"
    r"decay_lr|dropout|device|backend|nproc|nnodes|node|master|rdzv|standalone|start|seed)"
)


def read_nanogpt(source: SourceFile) -> Recipe:
    """A configuration, or a script that starts train.py with one.

    Raises: ConfigError: it is no Python; the configuration that a script names is not there.
    """
    keys = FileKeys(NANOGPT, NANOGPT_DEFAULTS | _assigned(source))
    recipe = Recipe(framework=NANOGPT, software={"framework": "ddp"})
    begins = keys.text("init_from", default="scratch")
    if begins.startswith("gpt2"):
        recipe.name_model("init_from", begins)
        for key in ("n_layer", "n_head", "n_embd"):
            keys.number(key)
    else:
        recipe.args = {
            name: keys.number(key) for name, key in (("layers", "n_layer"), ("heads", "n_head"), ("hidden", "n_embd"))
        }
        vocabulary = 65 if "char" in keys.text("dataset", default="openwebtext") else VOCABULARY
        recipe.args |= {
            "vocab": keys.number("vocab_size", default=vocabulary),
            "bias": keys.flag("bias"),
            "positions": keys.number("block_size"),
        }
    recipe.args["seq"] = keys.number("block_size")
    recipe.micro_batch = keys.number("batch_size")
    recipe.training["global_batch"] = recipe.micro_batch * keys.number("gradient_accumulation_steps")
    precision = keys.choice(NANOGPT_PRECISIONS, "dtype", default="bfloat16")
    recipe.training |= {"precision": precision, "optimizer": "adamw_fused"}
    recipe.software["compiled"] = keys.flag("compile", default=True)
    recipe.processes = keys.number("nproc_per_node", default=0)
    keys.sort(recipe, left_out={}, ignored=NANOGPT_SAME_TIME)
    return recipe


def _assigned(source: SourceFile) -> dict[str, Any]:
    if source.path.suffix not in SCRIPTS:
        constants = walk(source, Script()).constants
        return {key: value for key, value in constants.items() if value is not None}
    named = STARTS.search(source.text)
    name = named[1] if named is not None else ""
    file = file_named(name, source.path)
    if file is None:
        raise ConfigError(f"{NANOGPT}: the configuration {name} that the script names is not beside it; give that file itself")
    given = {key.replace("-", "_"): plain_value(words[0]) for key, words in options_of(source.text).items() if words}
    return _assigned(opened(file)) | given


def is_nanogpt(source: SourceFile) -> bool:
    """Whether a file is a configuration of nanoGPT, or starts it with one."""
    if source.path.suffix in SCRIPTS:
        return bool(STARTS.search(source.text))
    return source.path.suffix == ".py" and bool(NANOGPT_MARK.search(source.text)) and not PROGRAM.search(source.text)


# llm-foundry and OLMo, which share Composer's words.


FOUNDRY, OLMO = "llm-foundry", "OLMo"
COMPOSER_MARK = re.compile(r"^[ \t]*global_train_batch_size\s*:", re.MULTILINE)
"""A key of every such file, and of no other tool's; in a table `parameters` where the file is for MosaicML's launcher."""
COMPOSER_PRECISIONS = {"amp_bf16": "amp_bf16", "amp_fp16": "amp_fp16", "amp_fp8": "fp8", "fp32": "fp32"}
SIZES = {"layers": "n_layers", "hidden": "d_model", "heads": "n_heads"}
RECOMPUTED = {"one_in_two": 2, "one_in_three": 3, "one_in_four": 4, "one_in_eight": 8}
"""OLMo's strategies that recompute each n-th layer."""
COMPOSER_SAME_TIME = re.compile(
    r"(data|variables\.|train_loader|eval|tokenizer|global_seed|seed|run_name|scheduler|optimizer\.|algorithms|max_duration|"
    r"device_eval|progress|log_|console|python_log|callbacks|loggers|save|load|autoresume|dist_timeout|icl|code_paths|wandb|"
    r"dry_run|time_limit|epoch|stop_at|speed_monitor|max_grad_norm|evaluators|restore|remote|reset|no_pre|canceled|"
    r"extra_steps|hf_datasets|softmax_auxiliary|model\.(name|init|attention_dropout|residual|embedding_dropout|eos|pad|"
    r"precision|layer_norm_(with|eps)|attention_layer_norm_with|bias_for|flash_attention|block_type|rope_|scale_|emb_|"
    r"embedding_layer|pretrained$|use_auth|use_flash|use_pretrained|config_overrides\.(max|attn_config\.attn_)|loss_fn|verbose|resid_pdrop|"
    r"attn_config\.(attn_impl|attn_pdrop|rope_|softmax|clip_qkv|alibi_bias|prefix)|no_bias|max_seq|norm_eps|logit_scale)|"
    r"fsdp(_config)?\.(limit|activation_checkpointing_reent|use_orig|sync_module|state_dict|verbose|backward|forward|"
    r"wrapping|flatten|load_|precision|mixed|cpu_offload)|ddp\.|"
    r"fused_loss|auxiliary_loss|sharded_checkpointer|model\.norm_after|compile\.(mode|fullgraph|dynamic)|gen1_gc|find_unused|canc|module_outputs|max_|new_style|try_load|keep_)"
)
COMPOSER_LEFT_OUT = {
    "fsdp_config.activation_cpu_offload": "kept activations stay on the device",
    "model.attn_config.sliding_window_size": "attention reaches over the whole sample",
}


def read_composer(source: SourceFile) -> Recipe:
    """A file of llm-foundry or OLMo. Raises ConfigError for adapters, or experts of another kind."""
    document = yaml_table(source)
    if isinstance(inner := document.get("parameters"), dict) and "global_train_batch_size" not in document:
        document = inner
    olmo = not (isinstance(document.get("model"), dict) and "name" in document["model"])
    keys = FileKeys(OLMO if olmo else FOUNDRY, document)
    recipe = Recipe(framework=keys.framework)
    if any(key.startswith(("model.peft_config", "peft_config")) for key in keys.values):
        raise ConfigError(f"{FOUNDRY}: peft_config trains adapters; drop the table to price full training")
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
    recipe.training["precision"] = keys.choice(COMPOSER_PRECISIONS, "precision", default="amp_bf16")
    take_optimizer(keys.text("optimizer.name", default="adamw").removeprefix("decoupled_"), recipe)
    _divided(keys, recipe)
    keys.degrees(recipe, tp="tp_config.tensor_parallel_degree")
    if recipe.tp > 1 and (strategy := keys.text("tp_config.strategy", default="ffn")) == "ffn":
        recipe.left_out["tp_config.strategy"] = f"{strategy} cuts the MLPs alone, and parsim cuts attention too"
    again = keys.text("activation_checkpointing", default="none").lower()
    if keys.flag("fsdp_config.activation_checkpointing") or again in ("whole_layer", "true"):
        recipe.recompute = "full"
    elif again in RECOMPUTED:
        recipe.recompute, recipe.every = "alternate", RECOMPUTED[again]
    elif again not in ("none", "false"):
        recipe.left_out["activation_checkpointing"] = f"{again} is not modelled: nothing is computed again"
    compiled = document.get("compile", document.get("compile_config"))
    recipe.software["compiled"] = isinstance(compiled, dict)
    keys.sort(recipe, left_out=COMPOSER_LEFT_OUT, ignored=COMPOSER_SAME_TIME)
    return recipe


def _divided(keys: FileKeys, recipe: Recipe) -> None:
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
    ratio = keys.number("model.expansion_ratio", "model.ffn_config.expansion_ratio", default=4)
    kind = keys.text("model.ffn_config.ffn_type", default="mptmlp")
    if kind not in ("mptmlp", "mptglu"):
        raise ConfigError(
            f"{FOUNDRY}: ffn_type = {kind} is a mixture of experts whose sizes parsim does not read; plan a model by name, or "
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
        "qk_norm": keys.flag("model.attention_layer_norm"),
        **({"alibi": True} if keys.flag("model.alibi") else {"rotary": True} if keys.flag("model.rope") else {}),
    }


# Scripts that start the training programs of images: torchvision's references, timm's train.py and PyTorch's example.


TORCHVISION, TIMM, EXAMPLE = "torchvision", "timm", "PyTorch ImageNet example"
IMAGES_FAMILIES = (
    r"(resnet|resnext|wide_resnet|vgg|vit|deit|beit|eva|swin|convnext|efficientnet|tf_efficientnet|regnet|densenet|mobilenet|"
    r"inception|alexnet|squeezenet|shufflenet|googlenet|mnasnet|maxvit|mixer|coatnet|levit|cait|nfnet|seresnet|ecaresnet|dla|"
    r"hrnet|xception|cspresnet|cspdarknet|rexnet|ghostnet|resmlp|poolformer|edgenext|mobilevit|davit|hiera|fastvit)"
)
IMAGES_MARK = re.compile(rf"\b(train|main)\.py\b[^|;&]*(--model|--arch|-a)[ =]+[\"']?{IMAGES_FAMILIES}", re.DOTALL)
SHORT = {"b": "batch_size", "a": "arch", "j": "workers"}
"""One-letter options of these programs."""
IMAGES_HANGING = {"batch_size": "training.global_batch"}
BUILT = {name: name for name, row in ZOO.items() if row.input_shape == IMAGENET} | {"vit_base_patch16_224": "vit_b_16"}
"""Names of both programs: modules of parsim's own."""
SIZED = [name for name, row in NAMED.items() if row.config and not row.seq]
"""Image models that transformers builds."""
IMAGES_SAME_TIME = re.compile(
    r"(lr|sched|epochs|start_epoch|wd$|warmup|cooldown|decay|auto_augment|aa$|random_erase|reprob|remode|recount|mixup|cutmix|smoothing|"
    r"label_smoothing|weight_decay|norm_weight|bias_weight|transformer_embedding|momentum|nesterov|drop|val_|resize|ra_|"
    r"color_jitter|hflip|scale|ratio|interpolation|mean|std|crop_pct|data|dataset|train_split|workers|print_freq|log|output|"
    r"experiment|resume|checkpoint|eval|seed|dist|world_size|rank|nproc|nnodes|node|master|rdzv|standalone|multiprocessing|"
    r"gpu|pretrained|weights|cache_dataset|test_only|use_deterministic|opt_|clip|num_classes$|pin_mem|no_prefetcher|"
    r"prefetcher|fuser|train_interpolation|backend|save|hub|cooldown|patience|tta|model_ema_(decay|steps|warmup)|jsd|"
    r"bce|use_multi|worker|local|nodes|gpus|ntasks|amp_(dtype|impl)|master_(addr|port))"
)
IMAGES_LEFT_OUT = {
    "model_ema": "no moving average of the weights is kept",
    "sync_bn": "BatchNorm takes the statistics of each replica",
    "sync_batchnorm": "BatchNorm takes the statistics of each replica",
    "grad_checkpointing": "all activations are kept",
    "aug_splits": "every sample is trained once",
    "split_bn": "BatchNorm takes the statistics of each replica",
    "ra_sampler": "every sample is another one",
}


def read_images(source: SourceFile) -> Recipe:
    """A script. Raises ConfigError for a count that is none; `missing` notes a model that does not ship."""
    options = option_values(source.text, SHORT, IMAGES_HANGING)
    example = "arch" in options
    tool = EXAMPLE if example else TIMM if _is_timm(options) else TORCHVISION
    keys = FileKeys(tool, options)
    recipe = Recipe(framework=tool, software={"framework": "ddp"})
    note_hanging(keys, recipe, IMAGES_HANGING)
    name = keys.text("arch", "model", default="resnet18")
    stem = name.split(".")[0]
    sized = normalised(stem) in SIZED
    recipe.model = normalised(stem) if sized else BUILT.get(stem, "")
    if not recipe.model:
        shipped = ", ".join(sorted({*BUILT.values(), *SIZED}))
        recipe.missing["model.name"] = (
            f"{printable(name)!r} is none of the image models that ship ({shipped}); give your module as MODULE:FACTORY"
        )
    batch = keys.number("batch_size", default={TORCHVISION: 32, TIMM: 128, EXAMPLE: 256}[tool])
    if recipe.missing.keys() & IMAGES_HANGING.values():
        recipe.micro_batch = 0
    elif example:  # all GPUs of a node share the batch
        recipe.training["global_batch"] = batch * keys.number("world_size", default=1)
        recipe.micro_batch = 0
    else:
        recipe.micro_batch = batch
        recipe.local_batch = batch * keys.number("grad_accum_steps", default=1)
    recipe.training["precision"] = _precision(keys)
    optimizer = keys.text("opt", default="sgd").lower()
    recipe.training["optimizer"] = "sgd_momentum" if "sgd" in optimizer or optimizer == "momentum" else "adamw"
    if "sgd" not in optimizer and "adam" not in optimizer and optimizer != "momentum":
        recipe.left_out["opt"] = f"{printable(optimizer)} is not modelled: time and state are those of AdamW"
    side = keys.number("train_crop_size", "img_size", default=IMAGENET[1])
    if side != IMAGENET[1] and sized:
        recipe.args["image_size"] = side
    elif side != IMAGENET[1]:
        recipe.input_shape = (IMAGENET[0], side, side)
    if keys.flag("channels_last"):
        recipe.software["channels_last"] = True
    if keys.flag("torchcompile", "compile"):
        recipe.software["compiled"] = True
    recipe.processes = keys.number("nproc_per_node", default=0) * keys.number("nnodes", default=1)
    keys.sort(recipe, left_out=IMAGES_LEFT_OUT, ignored=IMAGES_SAME_TIME)
    return recipe


def _precision(keys: FileKeys) -> str:
    if not keys.flag("amp"):
        return "fp32"
    return "amp_bf16" if "bf" in keys.text("amp_dtype", default="float16") else "amp_fp16"


def _is_timm(options: dict[str, Any]) -> bool:
    return (
        bool({"sched", "aa", "drop_path", "img_size", "amp_dtype", "reprob", "smoothing"} & options.keys())
        or re.search(r"_patch\d|_in\d+k|\.", str(options.get("model", ""))) is not None
    )


# MaxText.


MAXTEXT = "MaxText"
MAXTEXT_MARK = re.compile(r"^[ \t]*(ici|dcn)_\w+_parallelism\s*:|^[ \t]*per_device_batch_size\s*:", re.MULTILINE)
MAXTEXT_KEYS = re.compile(r"\b(per_device_batch_size|(ici|dcn)_\w+_parallelism)=")
MAXTEXT_STARTS = re.compile(r"\bmaxtext[./]", re.IGNORECASE)
MAXTEXT_AXES = {
    "tp": ("tensor", "tensor_transpose", "tensor_sequence"),
    "pp": ("pipeline",),
    "cp": ("context", "sequence", "context_autoregressive"),
    "ep": ("expert",),
}
SHARDED, REPLICATED = ("fsdp", "fsdp_transpose"), ("data",)
MAXTEXT_SHAPE = {
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
MAXTEXT_BASE = {"base_emb_dim": 2048, "base_num_query_heads": 16, "base_num_kv_heads": 16, "base_mlp_dim": 7168}
MAXTEXT_BASE |= {"base_num_decoder_layers": 16, "head_dim": 128, "vocab_size": 32_000, "max_target_length": 2048}
"""Sizes of base.yml, which scripts of MaxText change (src/maxtext/configs/base.yml; releases of 2023 had others)."""
KEPT = ("minimal", "save_qkv_proj", "save_dot_except_mlp", "save_dot_except_mlpwi", "save_dot_with_context_except_mlp")
MAXTEXT_SAME_TIME = re.compile(
    r"(run_name|base_output|steps|log_|profiler|skip_first|dataset|hf_|tokenizer|enable_checkpointing|async_|checkpoint|"
    r"learning_rate|warmup|cosine|adam_|gradient_clip|eval|save_|load_|data_shuffle|enable_goodput|monitor|packing|use_iota|"
    r"mu_dtype|hardware|jax_|compile|metrics|gcs_|tensorboard|init_|dropout|rope_|normalization|mlp_activations|"
    r"logits_|attention$|attention_type|scan_layers|shard_mode|num_slices|expansion|grain|remat_policy|megablox|sparse_matmul|"
    r"max_prefill|base_config|model_name|sa_|reuse_|dump_|upload_|enable_jax|use_vertex|vertex|hide_profiler|"
    r"enable_profiler|[A-Z][A-Z_]+$|allow_split|mesh_axes|logical_axis|data_sharding|custom_mesh|decoder_block|wo_tile|wi_tile|gmm_)"
)
MAXTEXT_LEFT_OUT = {
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
    keys = FileKeys(MAXTEXT, document)
    recipe = Recipe(framework=MAXTEXT, software={"framework": "maxtext"})
    name = model or keys.text("model_name", default="default")
    own = {arg: keys.number(key, default=0) for arg, key in MAXTEXT_SHAPE.items() if key in keys.values}
    if name == "default":
        recipe.args = {"gated": True, "norm": "rms", "rotary": True, "bias": False, "tied": False, **own}
        for arg in ("layers", "hidden", "heads", "vocab"):
            if arg not in own:
                recipe.missing[f"model.args.{arg}"] = f"neither model_name nor {MAXTEXT_SHAPE[arg]} is set"
    else:
        recipe.name_model("model_name", name)
        recipe.args = own
    if seq := keys.number("max_target_length", default=0):
        recipe.args["seq"] = seq
    for axis, words in MAXTEXT_AXES.items():
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
            f"{MAXTEXT}: per_device_batch_size = {batch} on {shards} devices per replica is no whole number of samples"
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
    keys.sort(recipe, left_out=MAXTEXT_LEFT_OUT, ignored=MAXTEXT_SAME_TIME)
    return recipe


def _read_maxtext_script(source: SourceFile) -> Recipe:
    """A script, whose keys count more than those of the file that it names; one that is not there names the model at most."""
    keys, words = overrides_of(source.text), words_of(source.text)
    names = [word for word in words if word.endswith(YAML)]
    name = next((word for word in names if Path(word).stem != "base"), "")
    if (file := file_named(name, source.path)) is not None:
        return read_maxtext(yaml_table(opened(file)) | keys)
    if names and not name and "model_name" not in keys:
        heads = keys.pop("base_num_heads", MAXTEXT_BASE["base_num_query_heads"])
        recipe = read_maxtext(_scaled(MAXTEXT_BASE | {"base_num_query_heads": heads, "base_num_kv_heads": heads} | keys))
        recipe.left_out["base.yml"] = "it is not beside the script: what the script leaves open is as in today's release"
        return recipe
    if not name or "per_device_batch_size" in keys:
        return read_maxtext(keys)
    recipe = read_maxtext(keys, "" if "model_name" in keys else Path(name).stem)
    recipe.missing["training.global_batch"] = (
        f"per_device_batch_size may be in {Path(name).name}, which is not beside the script"
    )
    return recipe


def _scaled(keys: dict[str, Any]) -> dict[str, Any]:
    """Sizes by the one factor that MaxText has for all of them: heads and MLP, then width, then layers are doubled in turn.

    Source: MaxText, pyconfig.get_individual_scales.
    """
    scale = whole_number(MAXTEXT, "global_parameter_scale", keys.pop("scale", keys.pop("global_parameter_scale", 1)), 1)
    whole, rest = divmod(scale.bit_length() - 1, 3)
    doubled = {"base_num_query_heads": rest > 0, "base_num_kv_heads": rest > 0, "base_mlp_dim": rest > 0}
    doubled |= {"base_emb_dim": rest > 1, "base_num_decoder_layers": False}
    sizes = {key: whole_number(MAXTEXT, key, keys[key]) << (whole + again) for key, again in doubled.items()}
    return keys | (sizes if scale > 1 else {})


def _degree(keys: FileKeys, words: tuple[str, ...], free: int = 1) -> int:
    """Ranks of these axes, inside and between slices together; `free`: for an axis that takes what is left (-1)."""
    found = [keys.text(f"{place}_{word}_parallelism", default="1") for word in words for place in ("ici", "dcn")]
    if "-1" in found:
        return free
    return prod(max(1, int(text)) if text.lstrip("-").isdigit() else 1 for text in found)


def is_maxtext(source: SourceFile) -> bool:
    """Whether a file is one of MaxText, or a script that starts it with keys of its own."""
    if source.path.suffix in SCRIPTS:
        return bool(MAXTEXT_KEYS.search(source.text) and MAXTEXT_STARTS.search(source.text))
    return source.path.suffix in YAML and "framework:" not in source.text and bool(MAXTEXT_MARK.search(source.text))


# Levanter.


LEVANTER = "Levanter"
LEVANTER_MARKS = (re.compile(r"^trainer *:", re.MULTILINE), re.compile(r"^[ \t]+mp *: *[\"']?[pcf]", re.MULTILINE))
"""The policy of precision, which no other tool's table `trainer` has."""
LEVANTER_SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"layers": 12, "hidden": 768, "heads": 12, "seq": 1024},
    "llama": {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 11008, "seq": 2048}
    | {"gated": True, "norm": "rms", "rotary": True, "bias": False, "tied": False},
}
"""Defaults by model.type, which is gpt2 where it is not set; mistral and qwen are as llama."""
LEVANTER_SIZES = {
    "layers": "num_layers",
    "hidden": "hidden_dim",
    "heads": "num_heads",
    "ffn": "intermediate_dim",
    "seq": "seq_len",
}
LEVANTER_SIZES |= {"kv_heads": "num_kv_heads"}
LEVANTER_SAME_TIME = re.compile(
    r"(data|optimizer|tokenizer|alpha$|use_hf|initialize_from|hf_|z_loss|epoch|eval|max_(eval|train)|lora_|"
    r"model\.(use_flash|flash_att|scale_attn|upcast|initializer|layer_norm|attn_(pdrop|dropout)|embed_pdrop|resid_pdrop|rope|"
    r"reference|activation|attn_backend|dropout|use_bias)|"
    r"trainer\.(wandb|tracker|num_train|steps_per|learning_rate|weight_decay|min_lr|warmup|checkpoint|load_|ray|id$|seed|"
    r"profiler|batch_axis|tensor_parallel_axes|fsdp_axis|axis_|parameter_axis|replica_|max_|require|log_|distributed|"
    r"initialize_from|per_device_eval|jax|quantization$|allow_))"
)


def read_levanter(source: SourceFile) -> Recipe:
    """A file of Levanter. Raises ConfigError for sizes that cannot be; `missing` notes a tokenizer that another file names."""
    keys = FileKeys(LEVANTER, yaml_table(source))
    recipe = Recipe(framework=LEVANTER)
    kind = keys.text("model.type", default="gpt2")
    if name := keys.text("initialize_from_hf") if keys.flag("use_hf_model_config") else "":
        recipe.name_model("initialize_from_hf", name)
        recipe.args = {"seq": keys.number("model.seq_len")} if "model.seq_len" in keys.values else {}
    else:
        family = "llama" if kind in ("mistral", "qwen", "qwen3") else kind
        if family not in LEVANTER_SHAPES:
            raise ConfigError(f"{LEVANTER}: model.type = {printable(kind)} must be one of gpt2, llama, mistral, qwen and qwen3")
        usual = LEVANTER_SHAPES[family]
        sizes = {arg: keys.number(f"model.{key}", default=usual.get(arg, 0)) for arg, key in LEVANTER_SIZES.items()}
        recipe.args = usual | {arg: size for arg, size in sizes.items() if size}
        if family == "gpt2":
            recipe.args["positions"] = recipe.args["seq"]
        tokenizer = keys.text("data.tokenizer", default="" if isinstance(keys.values.get("data"), str) else "gpt2")
        row = named(tokenizer)
        if row is None or row.shape is None:
            which = printable(tokenizer) or "which another file names"
            recipe.missing["model.args.vocab"] = f"the tokenizer ({which}) is of no model that ships"
        else:
            recipe.args["vocab"] = row.shape.vocab
    recipe.tp = keys.number("trainer.model_axis_size", default=1)
    local = keys.text("trainer.per_device_parallelism", "trainer.per_device_train_batch_size", default="-1")
    recipe.micro_batch = 0 if local == "-1" else whole_number(LEVANTER, "per_device_parallelism", local)
    recipe.training["global_batch"] = keys.number("trainer.train_batch_size", default=512)
    if "trainer.train_batch_size" not in keys.values and recipe.micro_batch:
        del recipe.training["global_batch"]
    policy = keys.text("trainer.mp", default="f32")
    low, weights = "bfloat16" in policy, re.search(r"p(arams)?=b", policy)
    recipe.training |= {"precision": ("bf16" if weights else "amp_bf16") if low else "fp32", "optimizer": "adamw_fused"}
    take_optimizer({"adam": "adamw_fused"}.get(kind := keys.text("optimizer.type", default="adam"), kind), recipe)
    mapped = any(key.startswith(("trainer.axis_mapping", "trainer.parameter_axis")) for key in keys.values)
    embedded = any(key.endswith(("axis_mapping.embed", "axis_resources.embed")) for key in keys.values)
    recipe.zero = 3 if embedded or "trainer.fsdp_axis" in keys.values or not mapped else 0
    recipe.recompute = "full" if keys.flag("model.gradient_checkpointing", default=True) else "none"
    keys.sort(recipe, left_out={}, ignored=LEVANTER_SAME_TIME)
    return recipe


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
    name = re.sub(r"\.ya?ml$", "", VARIABLE.sub(r"\1", model)) if isinstance(model, str) else ""
    name = re.sub(r"(?i)[-_](bf16|fp8)$", "", name)
    if framework == "maxtext":
        recipe = read_maxtext(overrides, name)
    elif framework == "torchtitan":
        table = {"name": "", "flavor": ""} | (dict(model) if isinstance(model, Mapping) else {})
        own = overrides.pop("model", None)
        overrides["model"] = {**table, **(own if isinstance(own, Mapping) else {})}
        recipe = read_toml(overrides, name)
        if given := flat_table({"": overrides.get("model_overrides")}):
            recipe.model, sizes = "", ", ".join(f"{key.lstrip('.')} = {value}" for key, value in given.items())
            recipe.missing["model.name"] = f"model_overrides changes the sizes of a shipped model ({printable(sizes)})"
    elif framework in ("megatron", "megatron_bridge"):
        adapters = FileKeys(PRIMUS, {key: overrides.pop(key) for key in list(overrides) if "lora" in key})
        recipe = read_yaml(overrides, name)
        if adapters.flag("use_lora"):
            take_adapters(
                *(recipe, adapters, "use_lora", "lora"),
                r=adapters.number("lora_rank", default=32),
                alpha=adapters.rate("lora_alpha"),
                dropout=adapters.rate("lora_dropout"),
                targets=adapters.words("lora_target_modules") or ["all"],
            )
            adapters.sort(recipe, left_out={}, ignored=re.compile("save_lora"))
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


FORMATS = {
    "nanotron": FileFormat(
        layouts="Llama and Qwen2",
        refuses="families other than Llama and Qwen2",
        what="a YAML file of nanotron",
        tool=NANOTRON,
        reads="recipe",
        sniff=marked(YAML, NANOTRON_MARK),
        read=lambda source: read_nanotron(yaml_table(source)),
    ),
    "nanogpt": FileFormat(
        layouts="configurations in Python, from scratch or from GPT-2's weights; scripts that start train.py with one",
        refuses="a configuration that a script names and that is not there",
        what="a configuration of nanoGPT",
        tool=NANOGPT,
        reads="recipe",
        sniff=is_nanogpt,
        read=read_nanogpt,
    ),
    "composer": FileFormat(
        layouts="llm-foundry with and without variables or its launcher, sizes or Hugging Face names; OLMo's older trainer",
        refuses="adapters, mixtures of experts; a model or a node's size that the file lacks, until --set",
        what="a YAML file of llm-foundry or OLMo",
        tool=FOUNDRY,
        reads="recipe",
        sniff=marked(YAML, COMPOSER_MARK),
        read=read_composer,
    ),
    "images": FileFormat(
        layouts="scripts that start torchvision's references, timm's train.py or PyTorch's ImageNet example",
        refuses="a model that does not ship, until --set model.name",
        what="a script that starts a training program of images",
        tool=TORCHVISION,
        reads="recipe",
        sniff=marked(SCRIPTS, IMAGES_MARK),
        read=read_images,
    ),
    "maxtext": FileFormat(
        layouts="sizes by name or one by one; scripts that set the keys",
        refuses="a batch per device that is no whole number of samples",
        what="a YAML file of MaxText",
        tool=MAXTEXT,
        reads="recipe",
        sniff=is_maxtext,
        read=lambda source: _read_maxtext_script(source) if source.path.suffix in SCRIPTS else read_maxtext(yaml_table(source)),
    ),
    "levanter": FileFormat(
        layouts="gpt2, llama, mistral and qwen by their sizes, or by the model that weights are from",
        refuses="other types of models; a tokenizer that another file names, until --set",
        what="a YAML file of Levanter",
        tool=LEVANTER,
        reads="recipe",
        sniff=marked(YAML, *LEVANTER_MARKS),
        read=read_levanter,
    ),
    "primus": FileFormat(
        layouts="modules as tables or as a list; LoRA",
        refuses="frameworks other than Megatron-LM, torchtitan and MaxText; model_overrides, until --set model.name",
        what="a YAML file of Primus",
        tool=PRIMUS,
        reads="recipe",
        sniff=marked(YAML, *PRIMUS_MARKS),
        read=lambda source: read_primus(yaml_table(source)),
    ),
}
