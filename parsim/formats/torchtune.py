"""torchtune: the YAML files of its recipes, read. Key names are those of recipes/configs (pytorch/torchtune)."""

from __future__ import annotations

import re

from parsim.errors import ConfigError
from parsim.formats.recipe import YAML, FileKeys, Recipe, take_adapters, yaml_table
from parsim.formats.source import FileFormat, SourceFile
from parsim.formats.trainer import take_optimizer

NAME = "torchtune"
MARK = re.compile(r"_component_\s*:\s*[\"']?torchtune\.")
SAME_TIME = re.compile(
    r"(output_dir|tokenizer|checkpointer|resume_from|dataset|seed|shuffle|epochs|max_steps|optimizer\.|lr_scheduler|loss|"
    r"clip_grad|device$|log_|metric_logger|profiler|save_|recipe_checkpoint|enable_async_checkpoint|model\.(attn_|max_seq)|"
    r"collate|num_output_chunks|run_val|dataset_val|cudnn|custom_sharded)"
)
LEFT_OUT = {
    "enable_activation_offloading": "kept activations stay on the device",
    "activation_offloading_use_streams": "kept activations stay on the device",
    "fsdp_cpu_offload": "parameters and states stay on the device",
    "optimizer_in_bwd": "gradients are kept until all are there",
    "custom_sharded_layers": "layers are divided alike",
    "dataset.packed": "every sample has all its tokens",
    "enable_fp8_training": "products are in 16 bits",
    "fp8_recipe_name": "products are in 16 bits",
}


def read_torchtune(source: SourceFile) -> Recipe:
    """A file of torchtune. Raises ConfigError for DoRA, distillation, or a model that must be named beside it."""
    keys = FileKeys(NAME, yaml_table(source))
    recipe = Recipe(framework=NAME, software={"framework": "torchtune"})
    component = keys.text("model._component_", default="(none)").rpartition(".")[2]
    adapted = re.match(r"(q?[ld]ora)_", component)
    component = component.removeprefix(adapted[0] if adapted else "")
    if "teacher_model._component_" in keys.values or "ref_checkpointer._component_" in keys.values:
        raise ConfigError(f"{NAME}: it runs a second model beside the first, which is not priced")
    recipe.name_model("model._component_", re.sub(r"(?<=\d)_(?=\d_)", ".", component))
    seq = keys.number("tokenizer.max_seq_len", "dataset.max_seq_len", default=0)
    if seq:
        recipe.args["seq"] = seq
    else:
        recipe.missing["model.args.seq"] = "tokenizer.max_seq_len is not set: samples are as long as the data"
    recipe.micro_batch = keys.number("batch_size", default=2)
    recipe.local_batch = recipe.micro_batch * keys.number("gradient_accumulation_steps", default=1)
    recipe.recompute = "full" if keys.flag("enable_activation_checkpointing") else "none"
    if mode := keys.text("ac_mode"):
        option = keys.number("ac_option", default=1)
        recipe.recompute, recipe.every = ("alternate", option) if mode == "selective" and option > 1 else ("full", 1)
    dtype = keys.text("dtype", default="bf16")
    if dtype not in ("bf16", "fp32", "fp16"):
        raise ConfigError(f"{NAME}: dtype = {dtype!r} must be bf16, fp16 or fp32")
    recipe.training["precision"] = {"fp16": "amp_fp16"}.get(dtype, dtype)
    if dtype == "bf16":  # weights, gradients and states alike, without copies in fp32
        recipe.training["master_weights"] = False
    if adapted is not None:
        targets = keys.words("model.lora_attn_modules") or []
        targets += ["mlp"] * keys.flag("model.apply_lora_to_mlp") + ["lm_head"] * keys.flag("model.apply_lora_to_output")
        method = "qlora" if keys.flag("model.quantize_base") else adapted[1]
        take_adapters(
            *(recipe, keys, "model._component_", method),
            r=keys.number("model.lora_rank", default=8),
            alpha=keys.rate("model.lora_alpha"),
            dropout=keys.rate("model.lora_dropout"),
            targets=targets or ["q_proj", "v_proj"],
        )
    name = keys.text("optimizer._component_", default="torch.optim.AdamW").rpartition(".")[2]
    take_optimizer(f"{name}_fused" if keys.flag("optimizer.fused") else name, recipe)
    recipe.software["compiled"] = keys.flag("compile")
    recipe.tp = keys.number("tensor_parallel_dim", default=1)
    recipe.cp = keys.number("context_parallel_dim", default=1)
    recipe.ep = keys.number("expert_parallel_dim", default=1)
    recipe.replicate = keys.number("data_parallel_replicate_dim", default=1)
    shard = keys.text("data_parallel_shard_dim", default="-1")
    if shard not in ("-1", "0"):
        recipe.dp = keys.number("data_parallel_shard_dim") * recipe.replicate
    recipe.zero = 0 if shard == "1" else 2 if keys.text("fsdp_reshard_after_forward").lower() == "false" else 3
    keys.sort(recipe, left_out=LEFT_OUT, ignored=SAME_TIME)
    return recipe


FORMATS = {
    "torchtune": FileFormat(
        layouts="recipes for one and for several GPUs",
        refuses="DoRA; distillation, which runs a second model",
        what="a YAML file of torchtune",
        tool=NAME,
        reads="recipe",
        sniff=lambda source: source.path.suffix in YAML and bool(MARK.search(source.text)),
        read=read_torchtune,
    )
}
