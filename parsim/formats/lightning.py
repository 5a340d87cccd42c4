"""Lightning: the YAML files of its command line and of LitGPT, read. Key names are those of its Trainer and of litgpt."""

from __future__ import annotations

import re

from parsim.errors import ConfigError
from parsim.formats.recipe import YAML, FileKeys, Recipe, take_adapters, yaml_table
from parsim.formats.source import FileFormat, SourceFile
from parsim.formats.trainer import take_optimizer

NAME, LITGPT = "Lightning", "LitGPT"
MARK = re.compile(r"^trainer\s*:", re.MULTILINE)
OWN = re.compile(r"^[ \t]+(strategy|accelerator|precision|accumulate_grad_batches|num_nodes)\s*:", re.MULTILINE)
LITGPT_MARKS = tuple(re.compile(rf"^({key}) *:", re.MULTILINE) for key in ("model_name|checkpoint_dir", "train"))
FORMS = {
    "32": "fp32",
    "32-true": "fp32",
    "16": "amp_fp16",
    "16-mixed": "amp_fp16",
    "bf16": "amp_bf16",
    "bf16-mixed": "amp_bf16",
    "bf16-true": "bf16",
    "transformer-engine": "fp8",
}
STRATEGIES = {
    "auto": 0,
    "ddp": 0,
    "fsdp": 3,
    "fsdpstrategy": 3,
    "ddpstrategy": 0,
    "deepspeed": 2,
    "deepspeedstrategy": 2,
    "singledevicestrategy": 0,
    "modelparallelstrategy": 3,
}
SAME_TIME = re.compile(
    r"(seed|trainer\.(accelerator|logger|callbacks|max_|min_|limit_|val_check|check_val|num_sanity|log_every|enable_|"
    r"deterministic|benchmark|inference|use_dist|profiler|detect|barebones|plugins|sync_batchnorm|reload|default_root|fast_dev|"
    r"overfit|gradient_clip|strategy\.init_args\.(find_unused|static_graph|process_group|timeout|state_dict|auto_wrap|save_dist))|"
    r"data\.|optimizer\.init_args|optimizer\.|lr_scheduler|ckpt_path|out_dir|data$|eval|logger|tokenizer|resume|"
    r"initial_checkpoint|train\.(save|log|lr_|max_|epochs|min_lr|tie|warmup|max_norm|beta|weight_decay)|model_config\.|access_token|"
    r"model\.|precision$|hparams)"
)
LEFT_OUT = {"trainer.strategy.init_args.cpu_offload": "parameters and states stay on the device"}


def read_lightning(source: SourceFile) -> Recipe:
    """A file of Lightning, whose model is a class of the user's, or of LitGPT.

    Raises ConfigError for adapters that are not LoRA's."""
    litgpt = not MARK.search(source.text)
    keys = FileKeys(LITGPT if litgpt else NAME, yaml_table(source))
    where = "" if litgpt else "trainer."
    recipe = Recipe(framework=keys.framework, model="")
    name = keys.text(
        "model_name", "checkpoint_dir", "model.init_args.model_name", "model.init_args.pretrained_model_name_or_path"
    )
    if name:
        recipe.name_model("model_name", re.sub(r"-hf$", "", name))
    else:
        recipe.missing["model.name"] = "the model is a class of your own"
    devices, nodes = keys.text(f"{where}devices", default="auto"), keys.number(f"{where}num_nodes", default=1)
    recipe.processes = int(devices) * nodes if devices.isdigit() else 0
    precision = keys.text(f"{where}precision", default="32-true").lower()
    if precision not in FORMS:
        raise ConfigError(f"{keys.framework}: precision = {precision!r} must be one of {', '.join(FORMS)}")
    recipe.training["precision"] = FORMS[precision]
    if litgpt:
        _take_adapters(recipe, keys)
    strategy = keys.text(f"{where}strategy.class_path", f"{where}strategy", default="fsdp" if litgpt else "auto")
    word = strategy.rpartition(".")[2].lower()
    stage = re.search(r"stage_?(\d)", word)
    if word.removesuffix("_spawn").partition("_")[0] not in STRATEGIES:
        raise ConfigError(f"{keys.framework}: strategy = {strategy!r} must be one of {', '.join(STRATEGIES)}")
    recipe.zero = int(stage[1]) if stage else STRATEGIES[word.partition("_")[0]]
    recipe.zero = keys.number(f"{where}strategy.init_args.stage", default=recipe.zero)
    recipe.optimizer_offload = "offload" in word
    sharding = keys.text(f"{where}strategy.init_args.sharding_strategy").upper()
    recipe.zero = {"SHARD_GRAD_OP": 2, "NO_SHARD": 0, "FULL_SHARD": 3}.get(sharding, recipe.zero)
    recipe.tp = keys.number(f"{where}strategy.init_args.tensor_parallel_size", default=1)
    if keys.text(f"{where}strategy.init_args.activation_checkpointing_policy", default=""):
        recipe.recompute = "full"
    recipe.software = {"framework": "deepspeed" if "deepspeed" in word else "fsdp" if recipe.zero else "ddp"}
    recipe.micro_batch = keys.number(
        "train.micro_batch_size", "data.init_args.batch_size", "data.batch_size", "model.init_args.batch_size", default=0
    )
    recipe.local_batch = recipe.micro_batch * keys.number("trainer.accumulate_grad_batches", default=1)
    if total := keys.number("train.global_batch_size", default=0):
        recipe.training["global_batch"] = total
    elif not recipe.micro_batch:
        recipe.missing["training.global_batch"] = "no batch size is in the file"
    recipe.micro_batch = recipe.micro_batch or 1
    if seq := keys.number("train.max_seq_length", "data.init_args.max_seq_length", "data.init_args.block_size", default=0):
        recipe.args["seq"] = seq
    take_optimizer(keys.text("optimizer.class_path", "optimizer", default="AdamW").rpartition(".")[2], recipe)
    keys.sort(recipe, left_out=LEFT_OUT, ignored=SAME_TIME)
    return recipe


LORA_PARTS = {
    "lora_query": ("q_proj", True),
    "lora_key": ("k_proj", False),
    "lora_value": ("v_proj", True),
    "lora_projection": ("o_proj", False),
    "lora_mlp": ("mlp", False),
    "lora_head": ("lm_head", False),
}
"""Switches of `litgpt finetune_lora` with their defaults."""


def _take_adapters(recipe: Recipe, keys: FileKeys) -> None:
    if keys.text("adapter"):
        take_adapters(recipe, keys, "adapter", "adapter")
    if not keys.text("lora_r", "lora", "lora_query", "lora_alpha"):
        return
    quantize = keys.text("quantize").lower()
    take_adapters(
        *(recipe, keys, "lora_r", "lora"),
        r=keys.number("lora_r", default=8),
        alpha=keys.rate("lora_alpha"),
        dropout=keys.rate("lora_dropout"),
        targets=[part for key, (part, usual) in LORA_PARTS.items() if keys.flag(key, default=usual)],
        base="nf4" if "nf4" in quantize else "int8" if "int8" in quantize else None,
        double_quantisation=quantize.endswith("dq") if "nf4" in quantize else None,
    )


def is_lightning(source: SourceFile) -> bool:
    """Whether a file is one of Lightning or LitGPT; NeMo's have a table `trainer` too, and options of Megatron."""
    text = source.text
    if source.path.suffix not in YAML or "model_parallel_size" in text:
        return False
    return bool((MARK.search(text) and OWN.search(text)) or all(mark.search(text) for mark in LITGPT_MARKS))


FORMATS = {
    "lightning": FileFormat(
        layouts="Lightning's command line, LitGPT",
        refuses="other adapters than LoRA; strategies of other devices; a model class of one's own, until --set model.name",
        what="a YAML file of Lightning or LitGPT",
        tool=NAME,
        reads="recipe",
        sniff=is_lightning,
        read=read_lightning,
    )
}
