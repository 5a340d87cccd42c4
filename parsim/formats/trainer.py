"""Hugging Face: TrainingArguments (JSON, YAML of TRL and LLaMA-Factory, options of a script) and Accelerate's YAML, read.

Key names are those of transformers' TrainingArguments, of TRL's and LLaMA-Factory's additions, and of `accelerate config`. The
model comes by `model_name_or_path`; a DeepSpeed config is read where it lies beside the file, or inside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parsim.errors import ConfigError, ImportedFileError
from parsim.files import parse_json, read_text
from parsim.formats.deepspeed import is_deepspeed, read_deepspeed
from parsim.formats.recipe import (
    LARGEST_BYTES,
    PROGRAMS,
    SCRIPTS,
    YAML,
    FileKeys,
    Recipe,
    file_named,
    opened,
    stored_base,
    take_adapters,
    yaml_table,
)
from parsim.formats.scripts import UNKNOWN, Script, note_hanging, option_values, walk, words_of
from parsim.formats.source import FileFormat, SourceFile, marked
from parsim.model.catalogue.names import is_transformer
from parsim.units import printable

NAME, ACCELERATE, DEEPSPEED = "Hugging Face Trainer", "Accelerate", "DeepSpeed"
MARK = re.compile(r"^per_device_train_batch_size\s*:|[\"']per_device_train_batch_size[\"']\s*:", re.MULTILINE)
SWIFT_MARK = re.compile(r"\bswift\s+(sft|pt|rlhf)\b|\bllm_sft\.py\b")
ALPACA_MARKS = re.compile(r"--base_model\b"), re.compile(r"--micro_batch_size\b")
"""Of scripts that start alpaca-lora's finetune.py, or one of its many forks, which have both. One pattern for both would look
through the rest of the text behind each."""
SCRIPT_MARK = re.compile(rf"--per[-_]device[-_]train[-_]batch[-_]size\b|{SWIFT_MARK.pattern}")
PYTHON_MARK = re.compile(r"\b(Seq2Seq)?TrainingArguments\(|\b(SFT|DPO|ORPO|KTO|GRPO|PPO|Reward|CPO)Config\(")
ACCELERATE_MARK = re.compile(r"^distributed_type\s*:|^compute_environment\s*:", re.MULTILINE)

SAME_TIME = re.compile(
    r"(output_dir|overwrite|do_|eval_|evaluation_|per_device_eval|learning_rate|weight_decay|adam_|max_grad_norm|num_train_epochs|"
    r"max_steps|lr_|warmup|log|save_|seed|data_seed|run_name|report_to|push_to|hub_|resume|load_best|metric_|greater_|dataset|"
    r"dataloader|remove_unused|label|disable_tqdm|prediction_loss|include_|local_rank|ddp_(backend|timeout|find)|past_index|"
    r"length_column|no_cuda|use_cpu|jit_|skip_memory|ignore_data|debug|template|stage|preprocessing|plot_|val_size|trust_remote|"
    r"overwrite_cache|max_samples|chat_|tokenizer|block_size|text_|neftune|accelerator_config|restore_callback|torchdynamo|"
    r"prompt|response|image_|video_|model_revision|attn_implementation|flash_attn|use_mps|full_determinism|save_safetensors|"
    r"gradient_checkpointing_kwargs|compute_environment|debug|downcast|enable_cpu_affinity|machine_rank|main_|rdzv|same_network|"
    r"tpu|use_cpu|gpu_ids|fp8_config|quantization_method|lora_module_name|task_name|bias$|random_state|commands|command_file|dynamo_config\.dynamo_(mode|use)|fsdp_config\.fsdp_(auto_wrap|backward|cpu_ram|"
    r"forward|state_dict|sync|transformer_layer|use_orig|limit)|fsdp_config\.(auto_wrap|backward|cpu_ram|forward|limit|"
    r"state_dict|sync|transformer_layer|use_orig|xla)|deepspeed_config\.(deepspeed_multinode|zero3_(init|save))|finetuning_type|"
    r"max_length|torch_empty|tf32|fsdp_transformer_layer|use_flash|use_slow|train_file|data_path|version$|lazy|dataset|nproc|"
    r"nnodes|node_rank|master|num_machines|num_processes|use_deepspeed|use_fsdp|multi_gpu|num_gpus|hostfile|include$|split$|"
    r"input_dir|fuse_|to_static|min_learning|distributed_dataloader|continue_training|unified_checkpoint|sharding_parallel_config|"
    r"tensor_parallel_config|pipeline_parallel_config|amp_|scale_loss|lora_dropout|nodes$|ntasks|gres|freeze_vit|pref_|use_reentrant|bnb_4bit_compute|"
    r"streaming|attn_impl|model_author|model_name$|with_tracking|eos_token|assistant_only|packing_strategy|use_v1|fp8_backend|galore_|apollo_|badam_|"
    r"mm_(use|vision_select|patch|projector_type)|torch_empty|batch_eval|optim_args|deepspeed_config\.(gradient_clipping|deepspeed_config_file))"
)
LEFT_OUT = {
    "packing": "every sample has all its tokens",
    "group_by_length": "every sample has all its tokens",
    "use_liger_kernel": "losses and norms are those of the eager model",
    "enable_liger_kernel": "losses and norms are those of the eager model",
    "torch_compile_backend": "torch.compile fuses as Inductor does",
    "fsdp_config.fsdp_offload_params": "parameters stay on the device",
    "fsdp_config.offload_params": "parameters stay on the device",
    "deepspeed_config.offload_param_device": "parameters stay on the device",
    "deepspeed_config.zero_hpz_partition_size": "parameters are divided over all replicas",
    "auto_find_batch_size": "the batch is the one of the file",
    "ddp_bucket_cap_mb": "buckets are those of the plan",
    **dict.fromkeys(
        ("galore_target_modules", "use_galore", "use_apollo", "use_badam"),
        "the optimizer's state is that of AdamW for all weights",
    ),
    "activation_cpu_offload": "kept activations stay on the device",
    "vision_tower": "the vision tower is not in the model: it trains the language model on text",
    **dict.fromkeys(
        ("config_file", "accelerate_config"),
        "the YAML of accelerate is not there, which may divide states: give --set plan.zero_stage=3",
    ),
    "use_liger": "losses and norms are those of the eager model",
    "fp8_enable_fsdp_float8_all_gather": "parameters are gathered in 16 bits",
    "average_tokens_across_devices": "the loss is that of each replica",
}
STAGES = {"full_shard": 3, "shard_grad_op": 2, "hybrid_shard": 3, "hybrid_shard_zero2": 2, "no_shard": 0}
OLDER_STAGES = {"1": "full_shard", "2": "shard_grad_op", "3": "no_shard", "4": "hybrid_shard", "5": "hybrid_shard_zero2"}
"""Numbers that Accelerate's older files have for the names."""
EIGHT_BITS = ("8bit", "bnb", "4bit")


def read_arguments(source: SourceFile) -> Recipe:
    """TrainingArguments. Raises ConfigError for adapters that are not LoRA's, or for a DeepSpeed config that is not there."""
    document = _document(source)
    if not isinstance(document, Mapping):
        raise ConfigError("it holds no table of keys")
    plugin = _accelerated(source, document)
    config = document.get("deepspeed")
    inside = config if isinstance(config, Mapping) else None
    keys = FileKeys(NAME, {key: value for key, value in document.items() if not (key == "deepspeed" and inside)})
    recipe = Recipe(framework=NAME, software={"framework": "hf-trainer"})
    note_hanging(keys, recipe, HANGING)
    _refuse_other_losses(keys)
    factory = "finetuning_type" in keys.values or {"stage", "template"} <= keys.values.keys()
    name, kind = keys.text("model_name_or_path", "model_name"), keys.text("model_type")
    if not is_transformer(name) and is_transformer(kind):
        name = kind  # of a folder; ms-swift's names are those of models
    recipe.name_model("model_name_or_path", name)
    cutoff = 2048 if factory and source.path.suffix in YAML else 0
    if seq := keys.number("cutoff_len", "max_seq_length", "max_length", "model_max_length", "block_size", default=cutoff):
        recipe.args["seq"] = seq
    elif recipe.model:
        recipe.left_out["max_length"] = "no length of samples is in the file: they have as many tokens as the model by its name"
    recipe.micro_batch = keys.number("per_device_train_batch_size", default=8)
    recipe.local_batch = recipe.micro_batch * keys.number("gradient_accumulation_steps", default=1)
    if total := keys.number("batch", default=0):  # of alpaca-lora, over all ranks
        recipe.training["global_batch"] = total
    again = factory and not keys.flag("disable_gradient_checkpointing")  # LLaMA-Factory's default
    recipe.recompute = "full" if keys.flag("gradient_checkpointing", default=again) else "none"
    recipe.software["compiled"] = keys.flag("torch_compile") or bool(plugin and plugin.software["compiled"])
    loaded = keys.text("torch_dtype", "dtype").removeprefix("torch.")
    if in_half := loaded in ("bfloat16", "bf16") or keys.flag("pure_bf16"):
        keys.text("bf16")
        keys.text("fp16")
        recipe.training["precision"] = "bf16"
    else:
        half = "amp_bf16" if keys.flag("bf16") else "amp_fp16" if keys.flag("fp16") else ""
        usual = plugin.training["precision"] if plugin is not None else "fp32"
        recipe.training["precision"] = half or ("tf32" if usual == "fp32" and keys.flag("tf32") else usual)
    if keys.flag("fp8"):
        recipe.training["precision"] = "fp8"
    _take_adapters(recipe, keys, factory=factory)
    take_optimizer(keys.text("optim", default="adamw_torch_fused"), recipe)
    fsdp = keys.text("fsdp").replace("[", " ").replace("]", " ").replace("'", " ").replace(",", " ").split()
    if stage := next((word for word in fsdp if word in STAGES), None):
        recipe.zero = STAGES[stage]
        _note_hybrid(recipe, "fsdp", stage)
    elif fsdp and fsdp[0].lower() not in ("false", "none"):
        recipe.zero = 3
    if "offload" in fsdp:
        recipe.left_out["fsdp"] = "parameters and states stay on the device"
    if keys.flag("fsdp_config.activation_checkpointing", "fsdp_config.fsdp_activation_checkpointing"):
        recipe.recompute = "full"
    if inside is not None:
        _take_deepspeed(json.dumps(inside), source.path, recipe)
    elif path := keys.text("deepspeed"):
        take_deepspeed_file(path, source.path, recipe)
    if plugin is not None:
        _take_plugin(plugin, recipe, divided=bool(fsdp or inside is not None or keys.values.get("deepspeed")))
    if in_half and not recipe.zero and recipe.software["framework"] == "hf-trainer" and "tune" not in recipe.training:
        recipe.training["master_weights"] = False  # FSDP and DeepSpeed keep weights in fp32 beside those that compute
    _read_paddle(keys, recipe)
    _read_degrees(keys, recipe)
    keys.sort(recipe, left_out=LEFT_OUT, ignored=SAME_TIME)
    return recipe


def _document(source: SourceFile) -> Any:
    if source.path.suffix in SCRIPTS:
        options = _options_of_script(source)
        file = _arguments_of(source)
        return options if file is None else _document(file) | options
    if source.path.suffix in PROGRAMS:
        script = walk(source, Script())
        return _keys_of_xtuner(script) if XTUNER.search(source.text) else _keys_of_calls(script)
    return source.json("TrainingArguments") if source.path.suffix == ".json" else yaml_table(source)


STARTS = re.compile(r"\b(accelerate\s+launch|llamafactory-cli\s+train|trl\s+(sft|dpo|grpo|kto|orpo|reward))\b")
"""Of a script that starts a Trainer, whose arguments may be in a file that it names."""


def _arguments_of(source: SourceFile) -> SourceFile | None:
    """The file of arguments that a script names beside its own options."""
    if not STARTS.search(source.text):
        return None
    words = [word.rpartition("=")[2] for word in words_of(source.text)]
    files = (file_named(word, source.path) for word in words if word.endswith((*YAML, ".json")))
    sources = (opened(file) for file in files if file is not None)
    return next((file for file in sources if is_arguments(file)), None)


def _accelerated(source: SourceFile, document: Mapping[str, Any]) -> Recipe | None:
    """What the YAML of Accelerate says that a script names, or that lies beside the file, each alone of its kind."""
    named = document.get("config_file") if "accelerate" in source.text else None
    by_script = source.path.suffix in SCRIPTS
    if isinstance(named, str):
        file = file_named(named, source.path)
    elif by_script and not STARTS.search(source.text):  # torchrun and deepspeed read no such file
        return None
    else:
        others = _beside(source.path)
        files = [other.path for other in others if is_accelerate(other)]
        file = files[0] if len(files) == 1 and not any(is_arguments(other) for other in others) else None
    if file is None:
        return _by_its_name(str(named or document.get("accelerate_config") or ""))
    plugin = read_accelerate(yaml_table(opened(file)), file)
    plugin.taken["config_file"] = file.name
    if not isinstance(named, str):
        plugin.left_out["config_file"] = f"{file.name} lies beside it and was read with it: move it away if it is not used"
    return plugin


BY_NAME = re.compile(r"(deepspeed_?)?(?:zero|stage)_?([0-3])|(fsdp|fsdp[12])(?=$|[_.-]|\d)|(multi_gpu|ddp|single_gpu)")


def _by_its_name(name: str) -> Recipe | None:
    """What a YAML of Accelerate that is not there has by the name that TRL, among others, gives it (`fsdp2`, `zero3`)."""
    if (match := BY_NAME.search(Path(name).stem.lower())) is None:
        return None
    stage, fsdp = match[2], match[3]
    recipe = Recipe(framework=ACCELERATE, model="", zero=int(stage) if stage else 3 if fsdp else 0)
    recipe.software = {"framework": "deepspeed" if stage else "hf-trainer", "compiled": False}
    recipe.training["precision"] = "fp32"
    recipe.optimizer_offload = "offload" in name
    recipe.taken["config_file"] = recipe.taken["accelerate_config"] = name
    recipe.left_out["config_file"] = f"{printable(name)} is not there: taken as ZeRO {recipe.zero}, by its name"
    return recipe


MOST_BESIDE = 100
"""Files of a folder that are looked at."""


def _beside(path: Path) -> list[SourceFile]:
    """The other files of its folder that may be of this module; none of a folder that holds many."""
    files = [file for file in path.absolute().parent.glob("*") if file.suffix in (*SCRIPTS, *PROGRAMS, *YAML, ".json")]
    small = [file for file in files if file.is_file() and file.stat().st_size < LARGEST_BYTES and file.name != path.name]
    return [SourceFile(file, file.read_bytes()) for file in small] if len(small) < MOST_BESIDE else []


def _take_plugin(plugin: Recipe, recipe: Recipe, *, divided: bool) -> None:
    """What the launcher's YAML adds; where both say something, the arguments count, as the Trainer has it.

    Source: transformers, training_args.py: __post_init__ sets ACCELERATE_MIXED_PRECISION and the plugins' variables.
    """
    file, wide = plugin.taken["config_file"], {"bf16": "amp_bf16", "fp16": "amp_fp16"}
    again = str(recipe.local_batch // max(1, recipe.micro_batch))
    for field, mine, other in (
        ("mixed_precision", wide.get(recipe.training["precision"], recipe.training["precision"]), plugin.training["precision"]),
        ("ZeRO stage", recipe.zero if divided else plugin.zero, plugin.zero),
        ("gradient_accumulation_steps", again, plugin.taken.get("deepspeed_config.gradient_accumulation_steps", "auto")),
    ):
        if str(other) not in (str(mine), "fp32", "0", "auto"):
            recipe.left_out[f"{file}: {field}"] = f"it is {other}, and the arguments say {mine}: {mine} was taken"
    if not divided:
        recipe.zero, recipe.optimizer_offload, recipe.replicate = plugin.zero, plugin.optimizer_offload, plugin.replicate
        recipe.software["framework"] = plugin.software["framework"]
        recipe.tp, recipe.pp, recipe.cp, recipe.dp = plugin.tp, plugin.pp, plugin.cp, plugin.dp
        recipe.args |= plugin.args
    recipe.recompute = plugin.recompute if recipe.recompute == "none" else recipe.recompute
    recipe.processes = plugin.processes
    recipe.missing |= {key: why for key, why in plugin.missing.items() if key not in (*BARE, *recipe.missing)}
    recipe.left_out |= plugin.left_out
    recipe.unknown += plugin.unknown
    recipe.taken |= plugin.taken


MODEL_KEYS: dict[str | int, str] = {
    "model_name": "model_name_or_path",
    "pretrained_model_name_or_path": "model_name_or_path",
    0: "model_name_or_path",
    **{key: key for key in ("load_in_4bit", "load_in_8bit", "max_seq_length", "torch_dtype", "dtype")},
}
ADAPTER_KEYS: dict[str | int, str] = {
    "r": "lora_r",
    **{key: key for key in ("lora_alpha", "lora_dropout", "target_modules", "use_dora", "use_rslora")},
}
QUANTISED_KEYS: dict[str | int, str] = {
    "bnb_4bit_use_double_quant": "use_bnb_nested_quant",
    "bnb_4bit_compute_dtype": "torch_dtype",
    "load_in_4bit": "load_in_4bit",
    "load_in_8bit": "load_in_8bit",
}
TRAINER_KEYS: dict[str | int, str] = {
    "model": "model_name_or_path",
    **{key: key for key in ("max_length", "max_seq_length", "packing")},
}
CALLS: tuple[tuple[re.Pattern[str], Mapping[str | int, str]], ...] = (
    (re.compile(r"(AutoModel\w*|Fast\w*Model|\w+For\w+)\.from_pretrained"), MODEL_KEYS),
    (re.compile(r"(\w+\.)*LoraConfig|Fast\w*Model\.get_peft_model"), ADAPTER_KEYS),
    (re.compile(r"(\w+\.)*BitsAndBytesConfig"), QUANTISED_KEYS),
    (re.compile(r"(\w+\.)*(SFTTrainer|tokenizer)"), TRAINER_KEYS),
)
"""Calls of a script in Python, and which of their arguments are keys here."""
ARGUMENTS = re.compile(r"(\w+\.)*(\w*TrainingArguments|ModelConfig|(SFT|DPO|ORPO|KTO|GRPO|PPO|Reward|CPO)Config)")
CHECKPOINTING = re.compile(r"\w+\.gradient_checkpointing_enable|(\w+\.)*prepare_model_for_kbit_training")


def _keys_of_calls(script: Script) -> dict[str, Any]:
    """Keys of TrainingArguments, and of TRL's ModelConfig, by the calls of a script; UNKNOWN: what the script computes."""
    keys_of_file: dict[str, Any] = {}
    for name, given, computed in script.calls:
        if form := ARGUMENTS.fullmatch(name):
            keys_of_file |= {str(key): value for key, value in given.items() if isinstance(key, str) and value is not None}
            keys_of_file |= {key: UNKNOWN for key in computed if key in HANGING}
            keys_of_file |= {key: True for key in computed if key == "bf16"}  # where the GPU can
            if form[3] not in (None, "SFT"):
                keys_of_file["stage"] = form[3].lower()
        elif CHECKPOINTING.fullmatch(name):
            keys_of_file["gradient_checkpointing"] = given.get("use_gradient_checkpointing", True)
        for pattern, keys in CALLS:
            if not pattern.fullmatch(name):
                continue
            for key, value in given.items():
                if key in keys and value is not None:
                    keys_of_file.setdefault(keys[key], value)
            if keys is ADAPTER_KEYS:
                keys_of_file["use_peft"] = True
        if name.startswith("Fast"):  # Unsloth computes in 16 bits, whatever is said
            keys_of_file.setdefault("torch_dtype", "bfloat16")
        if name.startswith("Fast") and name.endswith("get_peft_model"):
            parts = [part for part in ("attention", "mlp") if given.get(f"finetune_{part}_modules", True)]
            keys_of_file.setdefault("target_modules", parts)
            keys_of_file["gradient_checkpointing"] = bool(given.get("use_gradient_checkpointing", True))
    stored = str(keys_of_file.get("model_name_or_path", ""))
    if stored.endswith("-bnb-4bit"):
        keys_of_file["model_name_or_path"], keys_of_file["load_in_4bit"] = re.sub(r"(-unsloth)?-bnb-4bit$", "", stored), True
    return keys_of_file


XTUNER = re.compile(r"^(from|import) xtuner\b", re.MULTILINE)
XTUNER_KEYS = {
    "pretrained_model_name_or_path": "model_name_or_path",
    "max_length": "max_length",
    "batch_size": "per_device_train_batch_size",
    "sequence_parallel_size": "sequence_parallel_size",
}


def _keys_of_xtuner(script: Script) -> dict[str, Any]:
    """Keys by the constants of a configuration of XTuner and the tables `dict(type=LoraConfig, r=64)`.

    It recomputes layers unless told otherwise, and runs as many passes more as ranks share a sequence.
    """
    constants = {key: value for key, value in script.constants.items() if value is not None}
    keys: dict[str, Any] = {name: constants[key] for key, name in XTUNER_KEYS.items() if key in constants}
    keys = {"per_device_train_batch_size": 1, "gradient_checkpointing": True, "bf16": True} | keys
    counts = constants.get("accumulative_counts", 1), constants.get("sequence_parallel_size", 1)
    keys["gradient_accumulation_steps"] = counts[0] * counts[1] if all(type(count) is int for count in counts) else UNKNOWN
    for _, given, _ in script.calls:
        if "lora_alpha" in given:
            keys |= {"use_peft": True, "lora_r": given.get("r", 8), "lora_alpha": given["lora_alpha"], "target_modules": "all"}
        if given.get("load_in_4bit") is True:
            keys |= {"load_in_4bit": True, "use_bnb_nested_quant": given.get("bnb_4bit_use_double_quant", False)}
    return keys


def _take_adapters(recipe: Recipe, keys: FileKeys, *, factory: bool) -> None:
    """factory: it is a file of LLaMA-Factory, which trains LoRA unless it says otherwise."""
    method = keys.text("finetuning_type", default="lora" if factory else "").lower()
    factory = factory and method != "full"
    if not factory and not keys.flag("use_peft") and not keys.text("lora_r", "lora_rank", "lora_target", "lora_alpha"):
        return
    nested = keys.flag("double_quantization", default=True) if factory else keys.flag("use_bnb_nested_quant")
    take_adapters(
        *(recipe, keys, "finetuning_type" if factory else "use_peft", method if factory else "lora"),
        r=keys.number("lora_rank", "lora_r", default=8 if factory else 16),
        alpha=keys.rate("lora_alpha"),
        dropout=keys.rate("lora_dropout"),
        targets=[word.lower() for word in keys.words("lora_target", "lora_target_modules", "target_modules") or ()]
        or (["all"] if factory else ["q_proj", "v_proj"]),
        **stored_base(keys, nested=nested),
    )


def _options_of_script(source: SourceFile) -> dict[str, Any]:
    found = option_values(source.text, SCRIPT_NAMES, HANGING)
    if _is_alpaca(source.text):
        _of_alpaca(found)
    if SWIFT_MARK.search(source.text):
        if size := found.pop("batch_size", None):
            found["per_device_train_batch_size"] = size
        if dtype := str(found.pop("dtype", "")):
            found["torch_dtype"] = SWIFT_DTYPES.get(dtype, dtype)
        kinds = [found.pop(name) for name in ("train_type", "tuner_type", "sft_type") if name in found]
        if (kind := (*kinds, "lora")[0]) != "full":
            found["finetuning_type"] = kind
        found = {"gradient_checkpointing": True, "per_device_train_batch_size": 1} | found
        if (half := SWIFT_TYPES.get(str(found.get("torch_dtype", "bfloat16")))) is not None:
            found.setdefault(half, True)  # it trains in the type that it loads, which is that of the checkpoint
    if found.get("deepspeed") is True and "zero_stage" in found:  # of DeepSpeed-Chat, whose program writes the config
        stage, offload = found.pop("zero_stage"), found.pop("offload", False)
        found["deepspeed"] = f"--stage{stage}{'_offload' if offload else ''}"
        if rank := found.pop("lora_dim", 0):
            found |= {"use_peft": True, "lora_r": rank, "target_modules": "all"}
    if UNSLOTH.search(source.text):
        found["lora_r"], found["torch_dtype"] = found.pop("r", 16), "bfloat16"
        again = found.pop("use_gradient_checkpointing", "unsloth")
        found = {"use_peft": True, "target_modules": "all", "gradient_checkpointing": bool(again)} | found
    if found.pop("lora_enable", False) is True:  # of LLaVA, with its defaults
        found = {"use_peft": True, "lora_r": 64, "lora_alpha": 16, "target_modules": "all"} | found
    if (mixed := found.pop("mixed_precision", "no")) in ("bf16", "fp16"):
        found.setdefault(str(mixed), True)
    if isinstance(config := found.get("deepspeed"), str) and re.fullmatch(r"(default-)?zero\d(_offload)?", config):
        found["deepspeed"] = f"{config}.json"  # swift's own files, by name
    return found


def _is_alpaca(text: str) -> bool:
    return all(mark.search(text) for mark in ALPACA_MARKS)


def _of_alpaca(found: dict[str, Any]) -> None:
    """Options of alpaca-lora's finetune.py, with its defaults: LoRA on a model in 8 bits, in fp16."""
    found["per_device_train_batch_size"], found["batch"] = found.pop("micro_batch_size", 4), found.pop("batch_size", 128)
    found.setdefault("model_name_or_path", found.pop("base_model", ""))
    usual = {"use_peft": True, "lora_r": 8, "lora_alpha": 16, "cutoff_len": 256, "fp16": True, "load_in_8bit": True}
    found.update(usual | found)


UNSLOTH = re.compile(r"\bunsloth[-_]cli\.py\b")
SWIFT_TYPES = {"bfloat16": "bf16", "float16": "fp16"}
SWIFT_DTYPES = {"AUTO": "bfloat16", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
HANGING = {
    "per_device_train_batch_size": "training.global_batch",
    "gradient_accumulation_steps": "training.global_batch",
    "max_length": "model.args.seq",
    "max_seq_length": "model.args.seq",
}
"""Options whose value counts, and the key that supplies it where a script computes it."""
SCRIPT_NAMES = {
    "deepspeed_config_file": "deepspeed",
    "deepspeed_config": "deepspeed",
    "max_seq_len": "max_length",
    "use_peft_lora": "use_peft",
    "use_4bit_quantization": "load_in_4bit",
    "use_8bit_quantization": "load_in_8bit",
    "use_nested_quant": "use_bnb_nested_quant",
    "model": "model_name_or_path",
    "model_id_or_path": "model_name_or_path",
    "output_router_logits": "include_router",
    "model_max_length": "max_length",
}
"""Options of launchers, of ms-swift and of peft's examples/sft: TrainingArguments'."""
OTHER_LOSSES = (
    "reward_funcs",
    "num_generations",
    "reward_model",
    "ref_model",
    "max_completion_length",
    "response_length",
    "pref_loss",
    "max_prompt_length",
)
"""Keys of trainings that generate, or that run a second model."""


def _refuse_other_losses(keys: FileKeys) -> None:
    """Raise ConfigError for a file whose step is more than a forward and a backward of one model."""
    stage = str(keys.values.get("stage", keys.values.get("rlhf_type", "sft"))).lower()
    found = next((key for key in OTHER_LOSSES if keys.values.get(key)), "" if stage in ("sft", "pt") else "stage")
    if found:
        raise ConfigError(
            f"{NAME}: {found} = {printable(str(keys.values.get(found, stage)))} trains by rollouts or beside a second model, "
            "which no plan of parsim has; drop it to price the supervised training of the model alone"
        )


def _read_degrees(keys: FileKeys, recipe: Recipe) -> None:
    """Axes beside the replicas: of ms-swift and LLaMA-Factory, which cut a sequence by heads, and of the latter's Megatron."""
    keys.degrees(recipe, tp="tp_size", cp=("sequence_parallel_size", "sp_size", "parallelism_config.sp_size"))
    if recipe.cp > 1:
        recipe.left_out["sequence_parallel_size"] = "attention exchanges keys and values in a ring, and not its heads"
    if not keys.flag("use_mca"):
        return
    keys.degrees(recipe, tp="tensor_model_parallel_size", pp="pipeline_model_parallel_size", ep="expert_model_parallel_size")
    keys.degrees(recipe, cp="context_parallel_size")
    recipe.software = {"framework": "megatron"}
    recipe.args["sequence_parallel"] = keys.flag("sequence_parallel")
    recipe.zero = 1 if keys.flag("use_distributed_optimizer") else 0
    recipe.recompute = {"full": "full", "selective": "selective"}.get(keys.text("recompute_granularity"), "none")
    if (stages := keys.number("virtual_pipeline_model_parallel_size", default=1)) > 1:
        recipe.chunks = stages


def _read_paddle(keys: FileKeys, recipe: Recipe) -> None:
    """What PaddleNLP's TrainingArguments have beyond the ones that they were made after."""
    keys.degrees(recipe, tp="tensor_parallel_degree", pp="pipeline_parallel_degree", ep="expert_parallel_degree")
    keys.degrees(recipe, cp=("context_parallel_degree", "sep_parallel_degree"))
    if recipe.pp > 1:
        recipe.chunks = keys.number("virtual_pp_degree", default=1) or 1
    if stage := re.search(r"stage([123])", keys.text("sharding")):
        recipe.zero = int(stage[1])
    if keys.text("sequence_parallel"):
        recipe.args["sequence_parallel"] = keys.flag("sequence_parallel")
    if keys.flag("recompute"):
        recipe.recompute = "full"
        if (part := keys.text("recompute_granularity", default="full")) != "full":
            recipe.left_out["recompute_granularity"] = f"{part} is not modelled: whole layers are computed again"
    if keys.text("fp16_opt_level") == "O2" and recipe.training["precision"] == "amp_bf16":
        recipe.training["precision"] = "bf16"
    sharded = keys.number("sharding_parallel_degree", default=0)
    if recipe.zero and sharded > 1:
        recipe.missing["plan.dp_shard"] = f"states are divided over sharding_parallel_degree = {sharded} replicas"


BARE = {
    "model.name": "the model is in the training script",
    "training.global_batch": "the batch is in the training script",
}
"""What the YAML of Accelerate always lacks."""


def _read_accelerated(source: SourceFile) -> Recipe:
    """The YAML of Accelerate, with the one file of arguments that lies beside it."""
    starts = [file for file in _beside(source.path) if is_arguments(file)]
    if len(starts) != 1:
        return read_accelerate(yaml_table(source), source.path)
    recipe = read_arguments(starts[0])
    recipe.left_out["arguments"] = f"{starts[0].path.name} lies beside it and was read with it: move it away if it is another's"
    return recipe


def read_accelerate(document: Mapping[str, Any], path: Path) -> Recipe:
    """The YAML of `accelerate config`, which holds neither model nor batch. Raises ConfigError as `read_arguments`."""
    keys = FileKeys(ACCELERATE, document)
    recipe = Recipe(framework=ACCELERATE, model="", software={"framework": "hf-trainer"})
    recipe.missing |= BARE
    recipe.processes = keys.number("num_processes", default=0)
    keys.number("num_machines", default=1)
    kind = keys.text("distributed_type", default="NO").upper()
    formats = {"no": "fp32", "bf16": "amp_bf16", "fp16": "amp_fp16", "fp8": "fp8"}
    recipe.training["precision"] = keys.choice(formats, "mixed_precision", default="no")
    recipe.software["compiled"] = keys.text("dynamo_config.dynamo_backend", default="NO").upper() != "NO"
    if kind == "FSDP":
        stage = keys.text("fsdp_config.fsdp_sharding_strategy").lower()
        stage = OLDER_STAGES.get(stage, stage)
        again = keys.text("fsdp_config.fsdp_reshard_after_forward", default="true").lower()
        newer = keys.number("fsdp_config.fsdp_version", default=1) > 1
        recipe.zero = (2 if again == "false" else 3) if newer or not stage else STAGES.get(stage, 3)
        _note_hybrid(recipe, "fsdp_sharding_strategy", stage)
        if keys.flag("fsdp_config.fsdp_activation_checkpointing"):
            recipe.recompute = "full"
    elif kind == "DEEPSPEED":
        if path_text := keys.text("deepspeed_config.deepspeed_config_file"):
            take_deepspeed_file(path_text, path, recipe)
        else:
            recipe.zero = keys.number("deepspeed_config.zero_stage", default=2)
        recipe.software["framework"] = "deepspeed"
        recipe.optimizer_offload = keys.text("deepspeed_config.offload_optimizer_device", default="none").lower() == "cpu"
        keys.text("deepspeed_config.gradient_accumulation_steps")
    elif kind == "MEGATRON_LM":
        recipe.software = {"framework": "megatron"}
        keys.degrees(recipe, tp="megatron_lm_config.megatron_lm_tp_degree", pp="megatron_lm_config.megatron_lm_pp_degree")
        recipe.args["sequence_parallel"] = keys.flag("megatron_lm_config.megatron_lm_sequence_parallelism")
        recipe.zero = 1 if keys.flag("megatron_lm_config.megatron_lm_use_distributed_optimizer") else 0
        again = keys.text("megatron_lm_config.megatron_lm_recompute_activations", default="false").lower()
        recipe.recompute = {"full": "full", "true": "selective", "selective": "selective"}.get(again, "none")
        for name in ("num_micro_batches", "gradient_clipping"):
            keys.text(f"megatron_lm_config.megatron_lm_{name}")
    elif kind not in ("NO", "MULTI_GPU"):
        raise ConfigError(f"{ACCELERATE}: distributed_type = {kind} is no training on GPUs that parsim prices")
    table = "parallelism_config.parallelism_config"
    keys.degrees(recipe, tp=f"{table}_tp_size", cp=f"{table}_cp_size", replicate=f"{table}_dp_replicate_size")
    if (shard := keys.number(f"{table}_dp_shard_size", default=1)) > 1:
        recipe.dp, recipe.zero = shard * recipe.replicate, recipe.zero or 3
    keys.sort(recipe, left_out=LEFT_OUT, ignored=SAME_TIME)
    return recipe


def _note_hybrid(recipe: Recipe, key: str, stage: str) -> None:
    if stage.startswith("hybrid"):
        recipe.missing["plan.dp_shard"] = f"{key} = {stage} divides states within a node, and the file has no size of one"


def take_optimizer(name: str, recipe: Recipe) -> None:
    """Sets the optimizer, and the bytes of its state."""
    low = name.lower()
    if any(word in low for word in EIGHT_BITS):
        recipe.training["state_dtype"] = "int8"
    if low.startswith("sgd"):
        recipe.training["optimizer"] = "sgd_momentum"
    else:
        recipe.training["optimizer"] = "adamw_fused" if "fused" in low or low in ("adamw_torch", "adamw") else "adamw"
    if "adam" not in low and not low.startswith("sgd"):
        recipe.left_out["optim"] = f"{name} is not modelled: time and state are those of AdamW"


def take_deepspeed_file(name: str, beside: Path, recipe: Recipe) -> None:
    """A DeepSpeed config by its path; one that is not there is known by the name that its project gives it, or missing."""
    if (file := file_named(name, beside)) is not None:
        _take_deepspeed(read_text(file, LARGEST_BYTES), file, recipe)
        return
    stage = re.search(r"(?:zero|stage|z)_?([0-3])", Path(name).stem.lower())
    if stage is None:
        recipe.missing["plan.zero_stage"] = f"the DeepSpeed config {name} is not beside it"
        return
    recipe.zero, recipe.software["framework"] = int(stage[1]), "deepspeed"
    recipe.optimizer_offload = "offload" in name and "no_offload" not in name
    if not name.startswith("--"):
        recipe.left_out["deepspeed"] = f"{name} is not beside it: taken as ZeRO {recipe.zero}, by its name"


def _take_deepspeed(text: str, path: Path, recipe: Recipe) -> None:
    """What a DeepSpeed config says of precision, ZeRO and offload; what it says of the batch is "auto" under the Trainer."""
    document = parse_json(text)
    if isinstance(document, dict):
        document = {key: value for key, value in document.items() if key not in BATCH}
        document.setdefault("zero_optimization", {"stage": 0})
    try:
        run = read_deepspeed(SourceFile(path, json.dumps(document).encode()))
    except ImportedFileError as error:
        raise ConfigError(str(error)) from error
    recipe.software["framework"] = "deepspeed"
    recipe.zero = int(run.keys.get("plan.zero_stage", 0))
    recipe.optimizer_offload = bool(run.keys.get("plan.optimizer_offload", False))
    taken = {key.removeprefix("training."): value for key, value in run.keys.items() if key.startswith("training.")}
    recipe.training |= {key: value for key, value in taken.items() if key in ("precision", "gradient_dtype", "clip_norm")}
    recipe.taken["deepspeed"] = str(path)
    if run.warnings:
        recipe.left_out["deepspeed"] = "; ".join(run.warnings)


BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _read_deepspeed_alone(source: SourceFile) -> Recipe:
    """A DeepSpeed config by itself, which holds no model, and a batch only where it is not "auto"."""
    document = source.json("a DeepSpeed config")
    recipe = Recipe(framework=DEEPSPEED, model="", missing=dict(BARE))
    _take_deepspeed(source.text, source.path, recipe)
    keys = FileKeys(DEEPSPEED, {key: document[key] for key in BATCH if document.get(key, "auto") != "auto"})
    micro = keys.number("train_micro_batch_size_per_gpu", default=0)
    again = keys.number("gradient_accumulation_steps", default=1)
    recipe.micro_batch, recipe.local_batch = micro or 1, micro * again
    if not micro:
        why = "it is set by the script: microbatches of one sample are taken (--set plan.microbatches=N)"
        recipe.left_out["train_micro_batch_size_per_gpu"] = why
    if total := keys.number("train_batch_size", default=0):
        recipe.training["global_batch"] = total
    if total or micro:
        del recipe.missing["training.global_batch"]
    recipe.taken |= keys.read
    return recipe


is_accelerate = marked(YAML, ACCELERATE_MARK)


def is_arguments(source: SourceFile) -> bool:
    """Whether a file holds TrainingArguments, or starts a program that takes them."""
    if source.path.suffix in SCRIPTS:
        return bool(SCRIPT_MARK.search(source.text)) or _is_alpaca(source.text) or _arguments_of(source) is not None
    if source.path.suffix in PROGRAMS:
        if XTUNER.search(source.text) and "accumulative_counts" in source.text:
            return True
        return bool(PYTHON_MARK.search(source.text)) and not re.search(r"\b(argparse|HfArgumentParser)\b", source.text)
    return source.path.suffix in (*YAML, ".json") and bool(MARK.search(source.text))


FORMATS = {
    "hf-trainer": FileFormat(
        layouts="JSON, YAML of TRL and of LLaMA-Factory, scripts that give them as options (also by accelerate, deepspeed and "
        "ms-swift) or name such a file, scripts in Python and notebooks that give them as literals (peft, TRL, Unsloth), "
        "configurations of XTuner, "
        "PaddleNLP's, DeepSpeed configs beside or inside",
        refuses="other adapters than LoRA; rollouts and losses with a second model; states divided within a node of unknown "
        "size; a DeepSpeed config that is not there",
        what="TrainingArguments of Hugging Face, as JSON, YAML, options of a script or Python",
        tool=NAME,
        reads="recipe",
        sniff=is_arguments,
        read=read_arguments,
    ),
    "accelerate": FileFormat(
        layouts="fsdp_config, deepspeed_config, megatron_lm_config, parallelism_config; with the script or the arguments "
        "that name it or lie beside it",
        refuses="a model and a batch, until --set and --batch; TPUs",
        what="a YAML file of accelerate config",
        tool=ACCELERATE,
        reads="recipe",
        sniff=is_accelerate,
        read=_read_accelerated,
    ),
    "deepspeed-alone": FileFormat(
        layouts="keys of 0.19, as docs/import.md has them",
        refuses='a model, and a batch that is "auto", until --set and --batch',
        what="a DeepSpeed JSON config without its script",
        tool=DEEPSPEED,
        reads="recipe",
        sniff=is_deepspeed,
        read=_read_deepspeed_alone,
    ),
}
