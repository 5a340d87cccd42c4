"""axolotl: its YAML files, read. Key names are those of axolotl's schemas (axolotl-ai-cloud/axolotl)."""

from __future__ import annotations

import re

from parsim.formats.recipe import YAML, FileKeys, Recipe, stored_base, take_adapters, yaml_table
from parsim.formats.source import FileFormat, SourceFile
from parsim.formats.trainer import STAGES, take_deepspeed_file, take_optimizer

NAME = "axolotl"
MARK = re.compile(r"^base_model\s*:", re.MULTILINE)
SAME_TIME = re.compile(
    r"(base_model_|model_type|tokenizer|trust_remote|is_|dataset|datasets|test_datasets|shuffle|val_set|output_dir|wandb|mlflow|"
    r"num_epochs|max_steps|learning_rate|lr_|cosine|warmup|weight_decay|adam_|max_grad_norm|logging|eval|save|saves|early_|"
    r"resume|auto_resume|local_rank|seed|special_tokens|tokens|chat_|train_on|hub_|debug|strict|push_|load_in|dataloader|"
    r"fsdp_config\.(fsdp_)?(auto_wrap|backward|cpu_ram|forward|limit|state_dict|sync|transformer_layer|use_orig|"
    r"final_state|version|reshard)|fsdp_version|flash_attention|sdp_attention|xformers|attn_|gradient_checkpointing_kwargs|"
    r"ddp_|plugins|loss_watchdog|bos_|pad_to|strict|axolotl_config|use_tensorboard|comet|overrides_of_model|"
    r"remove_unused|dataset_|skip_|sample_packing_|multipack|micro_batch_|include_)"
)
LEFT_OUT = {
    "sample_packing": "every sample has all its tokens, and attention reaches over the whole of it",
    "group_by_length": "every sample has all its tokens",
    "unfrozen_parameters": "all parameters train",
    "liger_rope": "kernels are those of the eager model",
    "liger_rms_norm": "kernels are those of the eager model",
    "liger_glu_activation": "kernels are those of the eager model",
    "liger_fused_linear_cross_entropy": "the loss is that of the eager model",
    "fsdp_config.offload_params": "parameters stay on the device",
    "fsdp_config.fsdp_offload_params": "parameters stay on the device",
    "rl": "one model trains by the next token: no rollouts, no second model",
}


def read_axolotl(source: SourceFile) -> Recipe:
    """A file of axolotl. Raises ConfigError for adapters that are not LoRA's, or a model that must be named beside it."""
    keys = FileKeys(NAME, yaml_table(source))
    recipe = Recipe(framework=NAME, software={"framework": "hf-trainer"})
    recipe.name_model("base_model", keys.text("base_model"))
    if seq := keys.number("sequence_len", default=0):
        recipe.args["seq"] = seq
    recipe.micro_batch = keys.number("micro_batch_size", default=1)
    recipe.local_batch = recipe.micro_batch * keys.number("gradient_accumulation_steps", default=1)
    if total := keys.number("batch_size", default=0):
        recipe.local_batch = total
    recipe.recompute = "none" if keys.text("gradient_checkpointing", default="false").lower() == "false" else "full"
    if keys.text("gradient_checkpointing").lower() in ("offload", "offload_disk"):
        recipe.left_out["gradient_checkpointing"] = "kept activations stay on the device"
    bf16 = keys.text("bf16", default="false").lower() in ("true", "auto", "full") or keys.flag("bfloat16")
    pure = keys.flag("bfloat16") or keys.text("bf16").lower() == "full"
    half = "bf16" if pure else "amp_bf16" if bf16 else "amp_fp16" if keys.flag("fp16", "float16") else ""
    recipe.training["precision"] = half or ("tf32" if keys.flag("tf32") else "fp32")
    if keys.flag("fp8"):
        recipe.training["precision"] = "fp8"
    keys.flag("tf32")
    if adapter := keys.text("adapter"):
        linear = ["all"] if keys.flag("lora_target_linear") else None
        base = stored_base(keys, nested=True)  # axolotl/loaders/model.py sets bnb_4bit_use_double_quant
        if adapter == "qlora" and base.get("base") == "int8":
            adapter = "lora"
        take_adapters(
            *(recipe, keys, "adapter", adapter),
            r=keys.number("lora_r", default=8),
            alpha=keys.rate("lora_alpha"),
            dropout=keys.rate("lora_dropout"),
            targets=linear or keys.words("lora_target_modules"),
            **base,
        )
    take_optimizer(keys.text("optimizer", default="adamw_torch_fused"), recipe)
    recipe.software["compiled"] = keys.flag("torch_compile")
    fsdp = keys.text("fsdp").strip("[]").replace("'", "").replace(",", " ").split()
    words = (*fsdp, keys.text("fsdp_config.fsdp_sharding_strategy", "fsdp_config.sharding_strategy").lower())
    if any(key.startswith("fsdp_config") for key in keys.values) or fsdp:
        recipe.zero = next((STAGES[word] for word in words if word in STAGES), 3)
        if keys.text("fsdp_config.reshard_after_forward", "fsdp_config.fsdp_reshard_after_forward").lower() == "false":
            recipe.zero = 2
    if keys.flag("fsdp_config.activation_checkpointing", "fsdp_config.fsdp_activation_checkpointing"):
        recipe.recompute = "full"
    recipe.tp = keys.number("tensor_parallel_size", default=1)
    recipe.cp = keys.number("context_parallel_size", "sequence_parallel_degree", default=1)
    recipe.ep = keys.number("expert_parallel_size", default=1)
    recipe.replicate = keys.number("dp_replicate_size", default=1)
    if shard := keys.number("dp_shard_size", default=0):
        recipe.dp, recipe.zero = shard * recipe.replicate, recipe.zero or 3
    if config := keys.text("deepspeed"):
        take_deepspeed_file(config, source.path, recipe)
    keys.sort(recipe, left_out=LEFT_OUT, ignored=SAME_TIME)
    return recipe


def is_axolotl(source: SourceFile) -> bool:
    """Whether a file is one of axolotl."""
    return source.path.suffix in YAML and bool(MARK.search(source.text))


FORMATS = {
    "axolotl": FileFormat(
        layouts="fsdp and fsdp_config, DeepSpeed by file or name, parallel sizes",
        refuses="other adapters than LoRA; a model that does not ship, until --set model.name",
        what="a YAML file of axolotl",
        tool=NAME,
        reads="recipe",
        sniff=is_axolotl,
        read=read_axolotl,
    )
}
