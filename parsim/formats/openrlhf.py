"""OpenRLHF: scripts that start its supervised training, read. Key names are those of openrlhf/cli/train_sft.py."""

from __future__ import annotations

import re

from parsim.errors import ConfigError
from parsim.formats.megatron import note_hanging, option_values
from parsim.formats.recipe import SCRIPTS, FileKeys, Recipe, stored_base, take_adapters
from parsim.formats.source import FileFormat, SourceFile

NAME = "OpenRLHF"
PROGRAM = re.compile(r"\bopenrlhf\.cli\.(train_\w+)")
SUPERVISED = "train_sft"
PRECISIONS = {"bf16": "bf16", "fp16": "amp_fp16", "fp32": "fp32"}
SWITCHES = {"bf16", "gradient_checkpointing", "adam_offload", "load_in_4bit", "packing_samples"}
HANGING = {
    "train_batch_size": "training.global_batch",
    "micro_train_batch_size": "plan.microbatches",
    "max_len": "model.args.seq",
    "zero_stage": "plan.zero_stage",
}
"""Options whose value counts, and the key that supplies it where a script computes it."""
SAME_TIME = re.compile(
    r"(save|logging|eval|use_tensorboard|ckpt|load_checkpoint|max_(samples|norm|ckpt|epochs)|learning_rate|lr_|l2|adam_betas|"
    r"dataset|input|output|tokenizer|apply_chat|multiturn|pretrain_mode|use_wandb|wandb|seed|local_rank|disable_fast|module|"
    r"aux_loss|lora_dropout|flash_attn|attn_implementation|include|num_gpus|num_nodes|hostfile|master|prompt|label|zpg|"
    r"disable_trace|full_determinism)"
)
LEFT_OUT = {
    "packing_samples": "every sample has all its tokens",
    "zpg": "parameters are divided over all replicas",
    "use_liger_kernel": "losses and norms are those of the eager model",
}


def read_openrlhf(source: SourceFile) -> Recipe:
    """A script. Raises ConfigError for a training with rollouts or with a second model."""
    programs = set(PROGRAM.findall(source.text))
    if programs != {SUPERVISED}:
        raise ConfigError(
            f"{NAME}: it starts {', '.join(sorted(programs))}, with rollouts or beside a second model, which no plan of parsim "
            f"has; {SUPERVISED} is read"
        )
    values = option_values(source.text, hanging=HANGING)
    keys = FileKeys(NAME, values | dict.fromkeys(SWITCHES & values.keys(), True))  # which no value follows
    recipe = Recipe(framework=NAME, software={"framework": "deepspeed"})
    note_hanging(keys, recipe, HANGING)
    recipe.name_model("pretrain", keys.text("pretrain", default="(none)"))
    recipe.args["seq"] = keys.number("max_len", default=2048)
    recipe.training["global_batch"] = keys.number("train_batch_size", default=128)
    recipe.micro_batch = 0 if "plan.microbatches" in recipe.missing else keys.number("micro_train_batch_size", default=8)
    recipe.zero = keys.number("zero_stage", default=2)
    recipe.optimizer_offload = keys.flag("adam_offload")
    recipe.recompute = "full" if keys.flag("gradient_checkpointing") else "none"
    precision = keys.text("param_dtype", default="bf16" if keys.flag("bf16", default=True) else "fp32")
    if precision not in PRECISIONS:
        raise ConfigError(f"{NAME}: param_dtype = {precision!r} must be one of {', '.join(PRECISIONS)}")
    recipe.training |= {"precision": PRECISIONS[precision], "optimizer": "adamw_fused"}
    recipe.tp = keys.number("ds_tensor_parallel_size", default=1)
    recipe.cp = keys.number("ring_attn_size", default=1)
    keys.number("ring_head_stride", default=1)
    if rank := keys.number("lora_rank", default=0):
        take_adapters(
            *(recipe, keys, "lora_rank", "lora"),
            r=rank,
            alpha=keys.rate("lora_alpha"),
            dropout=keys.rate("lora_dropout"),
            targets=keys.words("target_modules") or ["all"],
            **stored_base(keys),
        )
    keys.sort(recipe, left_out=LEFT_OUT, ignored=SAME_TIME)
    return recipe


FORMATS = {
    "openrlhf": FileFormat(
        layouts="scripts that start train_sft, by deepspeed or torchrun",
        refuses="train_ppo_ray, train_dpo and others with rollouts or a second model",
        what="a script that starts OpenRLHF",
        tool=NAME,
        reads="recipe",
        sniff=lambda source: source.path.suffix in SCRIPTS and bool(PROGRAM.search(source.text)),
        read=read_openrlhf,
    )
}
