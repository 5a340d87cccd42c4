"""Tools that fine-tune, read: axolotl, torchtune, NeMo AutoModel, Lightning and LitGPT, OpenRLHF.

Key names are those of axolotl's schemas (axolotl-ai-cloud/axolotl), of recipes/configs (pytorch/torchtune), of nemo_automodel's
components, of Lightning's Trainer and litgpt, and of openrlhf/cli/train_sft.py.
"""

from __future__ import annotations

import re
from itertools import product
from typing import Any

from parsim.errors import ConfigError
from parsim.formats.recipe import (
    GENERIC,
    SCRIPTS,
    YAML,
    FileKeys,
    Recipe,
    flat_table,
    stored_base,
    take_adapters,
    whole_number,
    yaml_table,
)
from parsim.formats.scripts import note_hanging, option_values, overrides_of, words_of
from parsim.formats.source import FileFormat, SourceFile, marked
from parsim.formats.torchtitan import SCHEDULES
from parsim.formats.trainer import STAGES, take_deepspeed_file, take_optimizer
from parsim.model.catalogue.names import is_transformer, shape_of, zoo_name
from parsim.model.catalogue.zoo import ZOO
from parsim.units import printable

# axolotl.


AXOLOTL = "axolotl"
AXOLOTL_MARK = re.compile(r"^base_model\s*:", re.MULTILINE)
AXOLOTL_KEYS = re.compile(
    r"^(micro_batch_size|gradient_accumulation_steps|sequence_len|datasets|sample_packing)\s*:", re.MULTILINE
)
"""Of which Ludwig's and AutoTrain's files, with a base_model too, have none."""
AXOLOTL_SAME_TIME = re.compile(
    r"(base_model_|model_type|tokenizer|trust_remote|is_|dataset|datasets|test_datasets|pretraining_dataset|shuffle|val_set|output_dir|wandb|mlflow|"
    r"num_epochs|max_steps|learning_rate|lr_|cosine|warmup|weight_decay|adam_|max_grad_norm|logging|eval|save|saves|early_|"
    r"resume|auto_resume|local_rank|seed|special_tokens|tokens|chat_|train_on|hub_|debug|strict|push_|load_in|dataloader|"
    r"fsdp_config\.(fsdp_)?(auto_wrap|backward|cpu_ram|forward|limit|state_dict|sync|transformer_layer|use_orig|"
    r"final_state|version|reshard)|fsdp_version|flash_attention|sdp_attention|xformers|attn_|gradient_checkpointing_kwargs|"
    r"ddp_|plugins|loss_watchdog|bos_|pad_to|strict|axolotl_config|use_tensorboard|comet|overrides_of_model|"
    r"flash_attn|flex_att|liger_layer_norm|remove_unused|dataset_|skip_|sample_packing_|multipack|micro_batch_|include_)"
)
AXOLOTL_LEFT_OUT = {
    "sample_packing": "every sample has all its tokens, and attention reaches over the whole of it",
    "group_by_length": "every sample has all its tokens",
    "unfrozen_parameters": "all parameters train",
    "fp8_enable_fsdp_float8_all_gather": "parameters are gathered in 16 bits",
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
    keys = FileKeys(AXOLOTL, yaml_table(source))
    recipe = Recipe(framework=AXOLOTL, software={"framework": "hf-trainer"})
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
    for key in ("tf32", "fp16"):
        keys.flag(key)
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
    keys.degrees(recipe, tp="tensor_parallel_size", ep="expert_parallel_size", replicate="dp_replicate_size")
    keys.degrees(recipe, cp=("context_parallel_size", "sequence_parallel_degree"))
    if shard := keys.number("dp_shard_size", default=0):
        recipe.dp, recipe.zero = shard * recipe.replicate, recipe.zero or 3
    if config := keys.text("deepspeed"):
        take_deepspeed_file(config, source.path, recipe)
    keys.sort(recipe, left_out=AXOLOTL_LEFT_OUT, ignored=AXOLOTL_SAME_TIME)
    return recipe


# torchtune.


TORCHTUNE = "torchtune"
TORCHTUNE_MARK = re.compile(r"_component_\s*:\s*[\"']?torchtune\.")
TORCHTUNE_SAME_TIME = re.compile(
    r"(output_dir|tokenizer|checkpointer|resume_from|dataset|seed|shuffle|epochs|max_steps|optimizer\.|lr_scheduler|loss|"
    r"clip_grad|device$|log_|metric_logger|profiler|save_|recipe_checkpoint|enable_async_checkpoint|model\.(attn_|max_seq)|"
    r"collate|num_output_chunks|run_val|dataset_val|cudnn|custom_sharded)"
)
TORCHTUNE_LEFT_OUT = {
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
    """A file of torchtune, or a script that starts one of its own by name.

    Raises ConfigError for DoRA, distillation, or a model that must be named beside it.
    """
    keys = FileKeys(TORCHTUNE, _named_recipe(source) if source.path.suffix in SCRIPTS else yaml_table(source))
    recipe = Recipe(framework=TORCHTUNE, software={"framework": "torchtune"})
    if config := keys.text("config"):
        recipe.left_out["config"] = (
            f"{printable(config)} is not there: what the script does not set is as torchtune's code has it"
        )
        if "batch_size" not in keys.values:
            recipe.missing["training.global_batch"] = f"batch_size is in {printable(config)}"
    if not any(key.startswith("optimizer") for key in keys.values):
        raise ConfigError(f"{TORCHTUNE}: it has no optimizer, and trains nothing; give the file of a training")
    component = keys.text("model._component_").rpartition(".")[2]
    adapted = re.match(r"(q?[ld]ora)_", component)
    component = component.removeprefix(adapted[0] if adapted else "")
    others = {f"{other}._component_" for other in ("teacher_model", "ref_checkpointer", "policy_model")}
    if ".rlhf." in str(keys.values.get("loss._component_")) or keys.values.keys() & others:
        raise ConfigError(f"{TORCHTUNE}: it runs a second model beside the first, which is not priced")
    recipe.name_model("model._component_", _with_points(component))
    if seq := keys.number("tokenizer.max_seq_len", "dataset.max_seq_len", default=0):
        recipe.args["seq"] = seq
    else:
        recipe.assume_length("tokenizer.max_seq_len")
    recipe.micro_batch = keys.number("batch_size", default=2)
    recipe.local_batch = recipe.micro_batch * keys.number("gradient_accumulation_steps", default=1)
    recipe.recompute = "full" if keys.flag("enable_activation_checkpointing") else "none"
    if mode := keys.text("ac_mode"):
        option = keys.number("ac_option", default=1)
        recipe.recompute, recipe.every = ("alternate", option) if mode == "selective" and option > 1 else ("full", 1)
    dtype = keys.text("dtype", default="bf16")
    if dtype not in ("bf16", "fp32", "fp16"):
        raise ConfigError(f"{TORCHTUNE}: dtype = {dtype!r} must be bf16, fp16 or fp32")
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
    keys.degrees(recipe, tp="tensor_parallel_dim", cp="context_parallel_dim", ep="expert_parallel_dim")
    keys.degrees(recipe, replicate="data_parallel_replicate_dim")
    shard = keys.text("data_parallel_shard_dim", default="-1")
    if shard not in ("-1", "0"):
        recipe.dp = keys.number("data_parallel_shard_dim") * recipe.replicate
    recipe.zero = 0 if shard == "1" else 2 if keys.text("fsdp_reshard_after_forward").lower() == "false" else 3
    keys.sort(recipe, left_out=TORCHTUNE_LEFT_OUT, ignored=TORCHTUNE_SAME_TIME)
    return recipe


TUNE = re.compile(r"\btune\s+run\b")


def _named_recipe(source: SourceFile) -> dict[str, Any]:
    """What `tune run RECIPE --config llama3_1/8B_lora key=value` says; the file of that name is in torchtune's package."""
    given = option_values(source.text)
    keys = overrides_of(source.text) | {"config": given.get("config", "")}
    family, _, rest = str(keys["config"]).partition("/")
    size, _, kind = rest.lower().partition("_")
    method = kind.partition("_")[0] if kind.startswith(("lora", "qlora", "dora", "qdora")) else ""
    name = f"{method}_" * bool(method) + f"{family}_{size}"
    usual: dict[str, Any] = {"model._component_": f"torchtune.models.{family}.{name}"}
    usual["optimizer._component_"] = "torch.optim.AdamW"
    if "single_device" in source.text:
        usual["data_parallel_shard_dim"] = 1
    return usual | keys


def _with_points(name: str) -> str:
    """`qwen2_5_1_5b` is qwen2.5-1.5b: of the underscores between digits those are points with which a model ships."""
    parts = re.split(r"(?<=\d)_(?=\d)", name)
    ways = product("_.", repeat=len(parts) - 1) if len(parts) <= MOST_PARTS else ()
    names = ("".join((parts[0], *(mark + part for mark, part in zip(way, parts[1:], strict=True)))) for way in ways)
    return next(filter(is_transformer, names), name)


MOST_PARTS = 5


# NeMo AutoModel.


AUTOMODEL = "NeMo AutoModel"
AUTOMODEL_MARK = re.compile(r"\bnemo_automodel\.|\bNeMoAutoModel")
AUTOMODEL_SAME_TIME = re.compile(
    r"(recipe|seed|benchmark|ci|wandb|mlflow|comet|slurm|rng|dist_env|checkpoint|loss_fn|(validation_)?data(set|loader)|clip_grad|"
    r"lr_scheduler|optimizer|tokenizer|processor|logging|profil|packed_sequence|autonvtx|step_scheduler|compile|peft|"
    r"quantization|quantized|fp8|model\._target_|model\.(trust_remote|attn_impl|use_cache|text_config|output_hidden|force_hf|"
    r"use_liger|use_sdpa|config\._target_|backend|revision)|"
    r"distributed\.(_target_|strategy|backend|world_size|defer|use_hf_tp|offload_policy$|pipeline|moe|mp_policy)|"
    r"freeze_config)"
)
AUTOMODEL_LEFT_OUT = {
    "fp8.enable_fsdp_float8_all_gather": "parameters are gathered in 16 bits",
    "freeze_config.freeze_language_model": "the language model trains",
    "distributed.cpu_offload": "parameters and states stay on the device",
    "compile.backend": "torch.compile fuses as Inductor does",
}
MANAGERS = {"fsdp2": 3, "fsdp": 3, "megatron_fsdp": 3, "nvfsdp": 3, "ddp": 0}


def read_automodel(source: SourceFile) -> Recipe:
    """A recipe of NeMo AutoModel. Raises ConfigError for distillation, another strategy, or a schedule that is not known.

    Source: nemo_automodel 0.7, components/distributed/config.py, components/training/step_scheduler.py.
    """
    document = yaml_table(source)
    if "teacher_model" in document:
        raise ConfigError(f"{AUTOMODEL}: it runs a second model beside the first, which is not priced")
    keys = FileKeys(AUTOMODEL, {key: value for key, value in flat_table(document).items() if str(value).lower() != "none"})
    recipe = Recipe(framework=AUTOMODEL, software={"framework": "fsdp", "compiled": keys.flag("compile.enabled")})
    place = "pretrained_model_name_or_path"
    recipe.name_model(place, keys.text(f"model.{place}", f"model.config.{place}", "model.config"))
    lengths = ("packed_sequence.packed_sequence_size", "dataset.seq_len", "dataset.seq_length", "dataset.max_length")
    if seq := next((size for key in lengths if (size := keys.number(key, default=0))), 0):
        recipe.args["seq"] = seq
    else:
        recipe.assume_length("dataset.seq_len")
    keys.degrees(recipe, **{axis: f"distributed.{axis}_size" for axis in ("tp", "pp", "cp", "ep")})
    keys.degrees(recipe, replicate="distributed.dp_replicate_size")
    recipe.dp = keys.number("distributed.dp_size", default=0)
    local = keys.number("step_scheduler.local_batch_size", "dataloader.batch_size", default=1)
    recipe.micro_batch, recipe.local_batch = local, local * keys.number("step_scheduler.grad_acc_steps", default=1)
    if total := keys.number("step_scheduler.global_batch_size", default=0):
        recipe.training["global_batch"] = total
    if recipe.pp > 1:
        recipe.micro_batch = keys.number(*_of_pipeline("pp_microbatch_size"), default=1)
        schedules = {name.lower(): row for name, row in SCHEDULES.items()}
        recipe.order, recipe.chunks = keys.choice(schedules, *_of_pipeline("pp_schedule"), default="1f1b")
        if (each := keys.number(*_of_pipeline("layers_per_stage"), default=0)) and recipe.model:
            recipe.chunks = max(1, -(-shape_of(recipe.model, recipe.args).layers // (each * recipe.pp)))
    wide = keys.text("model.torch_dtype", "model.dtype", default="auto").removeprefix("torch.") in ("float32", "fp32")
    low = keys.flag("fp8.enabled", default=any(key.startswith("fp8.") for key in keys.values))
    recipe.training["precision"] = "fp8" if low else "amp_bf16" if wide else "bf16"
    if recipe.training["precision"] == "bf16":  # weights, gradients and states alike, without copies in fp32
        recipe.training["master_weights"] = False
    recipe.recompute = "full" if keys.flag("distributed.activation_checkpointing") else "none"
    if keys.text("distributed.activation_checkpointing").lower() == "selective":
        recipe.recompute = "selective"
    if "peft._target_" in keys.values or "peft.dim" in keys.values:
        table = FileKeys(AUTOMODEL, document.get("quantization") or {})
        base = stored_base(table, nested=table.flag("bnb_4bit_use_double_quant"))
        take_adapters(
            *(recipe, keys, "peft", "qlora" if base.get("base") == "nf4" else "lora"),
            r=keys.number("peft.dim", default=8),
            alpha=keys.rate("peft.alpha"),
            dropout=keys.rate("peft.dropout"),
            targets=["all"]
            if keys.flag("peft.match_all_linear")
            else _last_words(keys.words("peft.target_modules")) or ["all"],
            **base,
        )
    take_optimizer(keys.text("optimizer._target_", default="torch.optim.AdamW").rpartition(".")[2], recipe)
    manager = keys.text("distributed.strategy", "distributed._target_", default="fsdp2").rpartition(".")[2].lower()
    if (manager := manager.removesuffix("manager")) not in MANAGERS:
        raise ConfigError(f"{AUTOMODEL}: distributed.strategy = {manager!r} must be one of {', '.join(MANAGERS)}")
    recipe.zero = MANAGERS[manager]
    if recipe.zero == 3 and recipe.pp > 1:
        recipe.left_out["distributed.strategy"] = "parameters are whole for a step under a pipeline: ZeRO 1"
        recipe.zero = 1
    recipe.software |= {} if recipe.zero else {"framework": "ddp"}
    recipe.args["sequence_parallel"] = keys.flag("distributed.sequence_parallel")
    keys.sort(recipe, left_out=AUTOMODEL_LEFT_OUT, ignored=AUTOMODEL_SAME_TIME)
    return recipe


def _of_pipeline(key: str) -> tuple[str, str, str]:
    """Where releases of NeMo AutoModel have a key of the pipeline."""
    return f"distributed.pipeline.{key}", f"autopipeline.{key}", f"distributed.{key}"


def _last_words(patterns: list[str] | None) -> list[str]:
    """`*.layers.*.q_proj` names q_proj."""
    return [pattern.rpartition(".")[2].strip("*") for pattern in patterns or ()]


# Lightning and LitGPT.


LIGHTNING, LITGPT = "Lightning", "LitGPT"
LIGHTNING_MARK = re.compile(r"^trainer\s*:", re.MULTILINE)
LIGHTNING_KEYS = re.compile(r"^[ \t]+(strategy|accelerator|precision|accumulate_grad_batches|num_nodes)\s*:", re.MULTILINE)
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
LIGHTNING_SAME_TIME = re.compile(
    r"(seed|trainer\.(accelerator|logger|callbacks|max_|min_|limit_|val_check|check_val|num_sanity|log_every|enable_|"
    r"deterministic|benchmark|inference|use_dist|profiler|detect|barebones|plugins|sync_batchnorm|reload|default_root|fast_dev|"
    r"overfit|gradient_clip|strategy\.init_args\.(find_unused|static_graph|process_group|timeout|state_dict|auto_wrap|save_dist))|"
    r"data\.|optimizer\.init_args|optimizer\.|lr_scheduler|ckpt_path|out_dir|data$|eval|logger|tokenizer|resume|"
    r"initial_checkpoint|train\.(save|log|lr_|learning|max_|epochs|min_lr|tie|warmup|max_norm|beta|weight_decay)|model_config\.|access_token|"
    r"model\.|precision$|hparams)"
)
LIGHTNING_LEFT_OUT = {"trainer.strategy.init_args.cpu_offload": "parameters and states stay on the device"}


def read_lightning(source: SourceFile) -> Recipe:
    """A file of Lightning, whose model is a class of the user's, or of LitGPT.

    Raises ConfigError for adapters that are not LoRA's."""
    document = _litgpt_command(source) if source.path.suffix in SCRIPTS else yaml_table(source)
    litgpt = "trainer" not in document
    keys = FileKeys(LITGPT if litgpt else LIGHTNING, document)
    where = "" if litgpt else "trainer."
    recipe = Recipe(framework=keys.framework, model="")
    name = keys.text(
        "model_name", "checkpoint_dir", *(f"model.{table}{key}" for table in ("init_args.", "") for key in OF_MODEL)
    )
    if litgpt and "model_config.n_layer" in keys.values:
        recipe.model, recipe.args = GENERIC, _litgpt_sizes(keys)
    elif zoo_name(name) in ZOO:
        recipe.model = zoo_name(name)
    elif name:
        recipe.name_model("model_name", re.sub(r"-hf$", "", name))
    else:
        recipe.missing["model.name"] = "the model is a class of your own"
    devices, nodes = keys.text(f"{where}devices", default="auto"), keys.number(f"{where}num_nodes", default=1)
    recipe.processes = int(devices) * nodes if devices.isdigit() else 0
    recipe.training["precision"] = keys.choice(FORMS, f"{where}precision", default="32-true")
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
    if word == "modelparallelstrategy":  # replicas over nodes, and tensors within one, where it is left open
        for axis, size, usual in (("dp", "data", str(nodes)), ("tp", "tensor", devices)):
            key = f"{where}strategy.init_args.{size}_parallel_size"
            count = usual if keys.text(key, default="auto") == "auto" else keys.text(key)
            setattr(recipe, axis, whole_number(keys.framework, key, int(count) if count.isdigit() else count, 1))
    if keys.text(f"{where}strategy.init_args.activation_checkpointing_policy", default=""):
        recipe.recompute = "full"
    if litgpt and recipe.processes != 1:
        if "checkpoint_dir" in keys.values:  # its finetune_* recompute blocks under FSDP
            recipe.recompute = "full"
        else:  # its pretrain divides within a machine
            recipe.replicate = nodes
    recipe.software = {"framework": "deepspeed" if "deepspeed" in word else "fsdp" if recipe.zero else "ddp"}
    if recipe.training["precision"] == "bf16" and "deepspeed" not in word and "tune" not in recipe.training:
        recipe.training["master_weights"] = False  # weights, gradients and states alike
    recipe.software |= {"compiled": True} if litgpt and "checkpoint_dir" not in keys.values else {}  # litgpt pretrain
    sizes = (f"{table}.{key}" for table in ("data.init_args", "data", "model.init_args", "model") for key in OF_BATCH)
    recipe.micro_batch = keys.number("train.micro_batch_size", *sizes, default=0)
    recipe.local_batch = recipe.micro_batch * keys.number("trainer.accumulate_grad_batches", default=1)
    if total := keys.number("train.global_batch_size", default=0):
        recipe.training["global_batch"] = total
    elif not recipe.micro_batch:
        recipe.missing["training.global_batch"] = "no batch size is in the file"
    recipe.micro_batch = recipe.micro_batch or 1
    lengths = (f"{table}.{key}" for table in ("train", "data.init_args", "data") for key in OF_LENGTH)
    if seq := keys.number(*lengths, default=0):
        recipe.args["seq"] = seq
    elif "checkpoint_dir" in keys.values:
        recipe.assume_length("train.max_seq_length")
    take_optimizer(keys.text("optimizer.class_path", "optimizer", default="AdamW").rpartition(".")[2], recipe)
    keys.sort(recipe, left_out=LIGHTNING_LEFT_OUT, ignored=LIGHTNING_SAME_TIME)
    return recipe


OF_MODEL = ("model_name_or_path", "pretrained_model_name_or_path", "model_name", "arch", "backbone")
OF_BATCH = ("batch_size", "train_batch_size", "per_device_train_batch_size")
OF_LENGTH = ("max_seq_length", "max_length", "block_size", "seq_length", "seq_len")
"""What classes of users, which Lightning's files name, call these most often."""
LITGPT_COMMAND = re.compile(r"\blitgpt\s+(pretrain|finetune\w*)\s+([^-\s]\S*)?")


def _litgpt_command(source: SourceFile) -> dict[str, Any]:
    """The keys of `litgpt finetune_lora MODEL --train.micro_batch_size 2`, with its defaults."""
    task, name = LITGPT_COMMAND.search(" ".join(words_of(source.text))).groups()  # type: ignore[union-attr]  # by the sniff
    keys = flat_table(option_values(source.text))
    tuned = task != "pretrain"
    usual: dict[str, Any] = {"devices": 1 if tuned else "auto"}
    usual |= {"train.global_batch_size": 16 if tuned else 512, "train.micro_batch_size": 1 if tuned else 4}
    usual |= {"checkpoint_dir" if tuned else "model_name": name or "", **({"lora_r": 8} if task in LORA_TASKS else {})}
    return usual | ({"adapter": task} if "adapter" in task else {}) | keys


LORA_TASKS = ("finetune", "finetune_lora")
LORA_PARTS = {
    "lora_query": ("q_proj", True),
    "lora_key": ("k_proj", False),
    "lora_value": ("v_proj", True),
    "lora_projection": ("o_proj", False),
    "lora_mlp": ("mlp", False),
    "lora_head": ("lm_head", False),
}
"""Switches of `litgpt finetune_lora` with their defaults."""


LITGPT_SIZES = {"layers": "n_layer", "heads": "n_head", "hidden": "n_embd", "vocab": "padded_vocab_size"}


def _litgpt_sizes(keys: FileKeys) -> dict[str, Any]:
    """Sizes of a model_config, by the defaults of litgpt.Config."""
    table = "model_config."
    args: dict[str, Any] = {arg: keys.number(f"{table}{key}") for arg, key in LITGPT_SIZES.items()}
    return args | {
        "ffn": keys.number(f"{table}intermediate_size", default=4 * args["hidden"]),
        "kv_heads": keys.number(f"{table}n_query_groups", default=args["heads"]),
        "gated": "LLaMA" in keys.text(f"{table}mlp_class_name", default="GptNeoxMLP"),
        "norm": "rms" if "RMS" in keys.text(f"{table}norm_class_name", default="LayerNorm") else "layer",
        "bias": keys.flag(f"{table}bias", default=True),
        "rotary": True,
        "tied": keys.flag("train.tie_embeddings"),
    }


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
    if source.path.suffix in SCRIPTS:
        return bool(LITGPT_COMMAND.search(text))
    if source.path.suffix not in YAML or "model_parallel_size" in text:
        return False
    return bool(
        (LIGHTNING_MARK.search(text) and LIGHTNING_KEYS.search(text)) or all(mark.search(text) for mark in LITGPT_MARKS)
    )


# OpenRLHF.


OPENRLHF = "OpenRLHF"
OPENRLHF_PROGRAM = re.compile(r"\bopenrlhf\.cli\.(train_\w+)|\b(train_\w+)\.py\b(?=[^|;&]*--(?:actor_)?micro_train_batch_size)")
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
OPENRLHF_SAME_TIME = re.compile(
    r"(save|logging|eval|use_tensorboard|ckpt|load_checkpoint|max_(samples|norm|ckpt|epochs)|learning_rate|lr_|l2|adam_betas|"
    r"dataset|input|output|tokenizer|apply_chat|multiturn|pretrain_mode|use_wandb|wandb|seed|local_rank|disable_fast|module|"
    r"aux_loss|lora_dropout|flash_attn|attn_implementation|include|num_gpus|num_nodes|hostfile|master|prompt|label|zpg|"
    r"disable_trace|full_determinism)"
)
OPENRLHF_LEFT_OUT = {
    "packing_samples": "every sample has all its tokens",
    "zpg": "parameters are divided over all replicas",
    "use_liger_kernel": "losses and norms are those of the eager model",
}


def read_openrlhf(source: SourceFile) -> Recipe:
    """A script. Raises ConfigError for a training with rollouts or with a second model."""
    programs = {name or older for name, older in OPENRLHF_PROGRAM.findall(source.text)}
    if programs != {SUPERVISED}:
        raise ConfigError(
            f"{OPENRLHF}: it starts {', '.join(sorted(programs))}, with rollouts or beside a second model, which no plan of "
            f"parsim has; {SUPERVISED} is read"
        )
    values = option_values(source.text, hanging=HANGING)
    keys = FileKeys(OPENRLHF, values | dict.fromkeys(SWITCHES & values.keys(), True))  # which no value follows
    recipe = Recipe(framework=OPENRLHF, software={"framework": "deepspeed"})
    note_hanging(keys, recipe, HANGING)
    recipe.name_model("pretrain", keys.text("pretrain"))
    recipe.args["seq"] = keys.number("max_len", default=2048)
    recipe.training["global_batch"] = keys.number("train_batch_size", default=128)
    recipe.micro_batch = 0 if "plan.microbatches" in recipe.missing else keys.number("micro_train_batch_size", default=8)
    recipe.zero = keys.number("zero_stage", default=2)
    recipe.optimizer_offload = keys.flag("adam_offload")
    recipe.recompute = "full" if keys.flag("gradient_checkpointing") else "none"
    usual = "bf16" if keys.flag("bf16", default=True) else "fp32"
    recipe.training |= {"precision": keys.choice(PRECISIONS, "param_dtype", default=usual), "optimizer": "adamw_fused"}
    keys.degrees(recipe, tp="ds_tensor_parallel_size", cp="ring_attn_size")
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
    keys.sort(recipe, left_out=OPENRLHF_LEFT_OUT, ignored=OPENRLHF_SAME_TIME)
    return recipe


FORMATS = {
    "axolotl": FileFormat(
        layouts="fsdp and fsdp_config, DeepSpeed by file or name, parallel sizes",
        refuses="other adapters than LoRA; a model that does not ship, until --set model.name",
        what="a YAML file of axolotl",
        tool=AXOLOTL,
        reads="recipe",
        sniff=marked(YAML, AXOLOTL_MARK, AXOLOTL_KEYS),
        read=read_axolotl,
    ),
    "torchtune": FileFormat(
        layouts="recipes for one and for several GPUs; scripts that start one, by its file or its name",
        refuses="DoRA; what runs a second model, or trains nothing",
        what="a YAML file of torchtune",
        tool=TORCHTUNE,
        reads="recipe",
        sniff=lambda source: marked(YAML, TORCHTUNE_MARK)(source) or marked(SCRIPTS, TUNE)(source),
        read=read_torchtune,
    ),
    "automodel": FileFormat(
        layouts="recipes for language models, from dataloader.batch_size to distributed.strategy",
        refuses="distillation, which runs a second model; a model that does not ship, until --set model.name",
        what="a YAML recipe of NeMo AutoModel",
        tool=AUTOMODEL,
        reads="recipe",
        sniff=marked(YAML, AUTOMODEL_MARK),
        read=read_automodel,
    ),
    "lightning": FileFormat(
        layouts="Lightning's command line, LitGPT by name or by model_config; scripts that start either",
        refuses="other adapters than LoRA; strategies of other devices; a model class of one's own, until --set model.name",
        what="a YAML file of Lightning or LitGPT",
        tool=LIGHTNING,
        reads="recipe",
        sniff=is_lightning,
        read=read_lightning,
    ),
    "openrlhf": FileFormat(
        layouts="scripts that start train_sft, by deepspeed or torchrun",
        refuses="train_ppo_ray, train_dpo and others with rollouts or a second model",
        what="a script that starts OpenRLHF",
        tool=OPENRLHF,
        reads="recipe",
        sniff=marked(SCRIPTS, OPENRLHF_PROGRAM),
        read=read_openrlhf,
    ),
}
