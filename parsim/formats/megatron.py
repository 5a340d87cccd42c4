"""Megatron-LM: the options of its training scripts, read and written, and the YAML files of Megatron-LM and NeMo.

Option names are those of megatron/training/arguments.py (NVIDIA/Megatron-LM) and of NeMo's megatron_gpt_config.yaml; NeMo's
spellings are translated to Megatron's first, and so are those of Megatron-Bridge.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from parsim.errors import ConfigError, first_few
from parsim.files import write_text_atomically
from parsim.formats.exports import Exported
from parsim.formats.recipe import (
    SCRIPTS,
    VARIABLE,
    YAML,
    FileKeys,
    PlannedRecipe,
    Recipe,
    Transformer,
    cut_in_layers,
    flat_table,
    layers_of_stages,
    opened,
    plain_value,
    read_back,
    take_adapters,
    transformer_of,
    whole_number,
    yaml_table,
)
from parsim.formats.scripts import MOST_LETTERS, UNKNOWN, Script, option_values, options_of, overrides_of, path_of, walk
from parsim.formats.source import NEOX_MARKS, FileFormat, SourceFile, marked
from parsim.model.catalogue.names import KERNEL, LOSS, MODULES_AGAIN, NAMED, OWN, SELECTIVE, SEQUENCE_PARALLEL, named
from parsim.model.catalogue.sublayers import MODULES
from parsim.model.formats import STATE_BYTES
from parsim.plans.stages import with_ends

NAME = "Megatron-LM"
NEMO = "NeMo (Megatron)"
BRIDGE = "Megatron-Bridge"
NEOX = "GPT-NeoX"
FRAMEWORKS = {NAME: "megatron", NEMO: "nemo", BRIDGE: "megatron-bridge", NEOX: "megatron-deepspeed"}
"""Rows of `parsim.model.catalogue.frameworks`, by whose file it is."""

IGNORED = re.compile(
    r"(adam-|sgd-|lr|min-lr|weight-decay|start-weight|end-weight|clip-grad|seed|init-method|log-|tensorboard|wandb|save|load|"
    r"data-|train-data|valid-data|test-data|split|eval-|num-workers|tokenizer|merge-file|vocab-file|exit-|timing|distributed-|"
    r"master|rdzv|node-rank|no-load|no-save|ckpt|dist-ckpt|async-save|use-dist-ckpt|finetune|train-iters|train-samples|"
    r"decay-|warmup|loss-scale|initial-loss|min-loss|hysteresis|norm-epsilon|layernorm-epsilon|rotary-base|rotary-percent|"
    r"use-rope-scaling|rope-|moe-aux|moe-z|moe-router-load|moe-router-dtype|moe-router-score|moe-router-bias|moe-router-enable|"
    r"moe-router-topk-scaling|moe-router-pre|moe-router-num-groups|moe-router-group|moe-router-force|"
    r"mock-data|dataloader|reset-|eod|override-opt|use-checkpoint|check-for|manual-gc|no-check|check-weight|hidden-dropout|"
    r"attention-dropout|apply-layernorm-1p|attention-softmax|no-query|query-key|config-path|config-name|trainer-log|"
    r"auto-detect|yaml-cfg|straggler|enable-one|legacy|use-legacy|transformer-impl|use-mcore|mscale|beta|multi-latent|"
    r"use-cpu-init|rotary-pct|output-layer-|scaled-|bias-gelu|checkpoint-|synchronize-|attention-config|gradient-clip|allgather-|"
    r"enabled|steps-per-print|wall-clock|initial-scale|reduce-|overlap-comm|contiguous-|partition-act|gpt-j-residual|launcher|"
    r"train-tokens|deepspeed|no-pipeline|num-gpus|use-flash-attn-v2|empty-unused|tiktoken|no-create-attention|no-mmap|mtp-loss|"
    r"mlp-type|activation$|fp32-allreduce|stage3-|sub-group|packing|merge-lora|dataset|max-epochs|moe-loss|moe-(train|eval|min)-cap|create-moe|force-multi|num-nodes|hostfile|rms-norm-eps|"
    r"output$|keep-last|extra-save|moe-shared-expert-overlap|sync-cuda|buffer-size|constant-steps|ntasks|kill-switch|abort-on|sync-tp-dup|extra-vocab|patch-tokenizer|rdzv|tee|max-restarts|job|"
    r"use-cpu-init|deterministic|no-initialization|use-pytorch-profiler|profile|record-memory)|"
    r"(tp-comm-overlap|overlap-moe-expert-parallel-comm|delay-wgrad-compute|moe-token-dispatcher-type|moe-enable-deepep|"
    r"moe-flex-dispatcher-backend|overlap-grad-reduce|overlap-param-gather|no-overlap-p2p-communication|"
    r"overlap-p2p-communication|bias-swiglu-fusion|no-bias-swiglu-fusion|no-masked-softmax-fusion|"
    r"no-gradient-accumulation-fusion|no-bias-gelu-fusion|no-bias-dropout-fusion|no-rope-fusion|cross-entropy-loss-fusion|"
    r"cross-entropy-fusion-impl|use-flash-attn|attention-backend|moe-grouped-gemm|moe-permute-fusion|moe-router-fusion|"
    r"moe-use-upcycling|moe-per-layer-logging|moe-layer-recompute|use-rotary-position-embeddings|position-embedding-type|"
    r"group-query-attention|disable-bias-linear|swiglu|normalization|no-position-embedding|make-vocab-size-divisible-by|"
    r"recompute-method|recompute-num-layers|no-async-tensor-parallel-allreduce|squared-relu|qk-layernorm|"
    r"no-persist-layer-norm|bf16|fp16|nnodes|nproc-per-node|use-distributed-optimizer|sequence-parallel|"
    r"untie-embeddings-and-output-weights|max-position-embeddings|add-qkv-bias|init-model-with-meta-device|"
    r"calculate-per-token-loss|use-precision-aware-optimizer|fp8-amax-history-len|fp8-amax-compute-algo|fp8-margin|"
    r"fp8-interval|fp8-recipe|fp8-param-gather|fp4-recipe|openai-gelu|add-bias-linear|apply-query-key-layer-scaling|"
    r"ddp-bucket-size|ddp-num-buckets|ddp-average-in-collective)$"
)
"""Beginnings of options that change neither the time nor the memory of a step; and whole ones that were read elsewhere here, or
that say what parsim assumes anyway."""

LEFT_OUT = {
    "cpu-offloading": "activations stay on the device: --cpu-offloading-num-layers says of how many layers they do not",
    "cpu-offloading-weights": "weights stay on the device",
    "cpu-offload-params": "parameters stay on the device",
    "deepspeed-config": "the file is not read: the ZeRO stage is that of --zero-stage, or 0",
    "optimizer-cpu-offload": "the optimizer's state stays on the device: only all of it can be in the host's memory",
    "optimizer-offload-fraction": "all of the optimizer's state lies in one place",
    "cuda-graph-impl": "the host's launches are not modelled for parts",
    "enable-cuda-graph": "the host's launches are not modelled for parts",
    "external-cuda-graph": "the host's launches are not modelled for parts",
    "grad-reduce-in-bf16": "gradients are reduced in the width that the precision gives them",
    "accumulate-allreduce-grads-in-fp32": "gradients are reduced in the width that the precision gives them, and kept in fp32",
    "moe-expert-capacity-factor": "experts are visited evenly, and no token is dropped",
    "recompute-modules": "these modules keep what they save",
    "recompute-num-layers": "full recomputation is that of every layer, each by itself",
    "reset-attention-mask": "attention computes scores between documents too; see model.args.document_tokens",
    "rampup-batch-size": "the batch is the full one from the start",
    **dict.fromkeys(
        ("ulysses-degree-in-cp", "context-parallel-algo"), "attention exchanges keys and values in a ring over all of the axis"
    ),
    **dict.fromkeys(
        ("use-deltanet", "experimental-attention-variant", "linear-attention-type"), "attention is softmax over all tokens"
    ),
    "main-params-dtype": "copies of the weights are in fp32",
    "ds-sequence-parallel": "attention exchanges keys and values in a ring, where DeepSpeed exchanges heads",
    "mtp-num-layers": "the layers that predict further tokens are not in the model",
    "expert-tensor-parallel-size": "experts are cut as the rest is",
    "main-grads-dtype": "gradients are reduced in the width of the weights, and kept in fp32",
    "exp-avg-dtype": "the two moments have types of their own, and both are taken to be in fp32",
    "exp-avg-sq-dtype": "the two moments have types of their own, and both are taken to be in fp32",
}
NEMO_NAMES = {
    "encoder-seq-length": "seq-length",
    "sequence-length": "seq-length",
    "activations-checkpoint-granularity": "recompute-granularity",
    "activations-checkpoint-method": "recompute-method",
    "activations-checkpoint-num-layers": "recompute-num-layers",
    "virtual-pipeline-model-parallel-size": "num-virtual-stages",
    "share-embeddings-and-output-weights": "share-embeddings",
    "num-moe-experts": "num-experts",
    "ub-tp-comm-overlap": "tp-comm-overlap",
    "bias": "add-bias-linear",
}
NEOX_NAMES = {
    "pipe-parallel-size": "pipeline-model-parallel-size",
    "model-parallel-size": "tensor-model-parallel-size",
    "norm": "normalization",
    "no-weight-tying": "untie-embeddings-and-output-weights",
    "train-micro-batch-size-per-gpu": "micro-batch-size",
    "train-batch-size": "global-batch-size",
    "intermediate-size": "ffn-hidden-size",
    "stage": "zero-stage",
    "num-kv-heads": "num-query-groups",
    "moe-num-experts": "num-experts",
    "moe-top-k": "moe-router-topk",
}
"""Keys of GPT-NeoX (configs/neox_arguments.md) that are options of Megatron-LM under other names."""
NEOX_WORDS = {
    "pos-emb": {"rotary": ("position-embedding-type", "rope"), "none": ("no-position-embedding", "")},
    "activation": {"swiglu": ("swiglu", "")},
    "norm": {"rmsnorm": ("normalization", "RMSNorm"), "te_rmsnorm": ("normalization", "RMSNorm")},
    "precision": {"bfloat16": ("bf16", ""), "fp16": ("fp16", "")},
}
"""Values of GPT-NeoX that are options of Megatron-LM."""
OLDER_NAMES = {
    "moe-expert-parallel-size": "expert-model-parallel-size",
    "model-parallel-size": "tensor-model-parallel-size",
    "batch-size": "micro-batch-size",
    "qk-nope-head-dim": "qk-head-dim",
    "cpu-offload": "optimizer-cpu-offload",
    "qk-rope-head-dim": "qk-pos-emb-head-dim",
    "topk": "moe-router-topk",
    "activations-checkpoint-method": "recompute-method",
    "activations-checkpoint-num-layers": "recompute-num-layers",
    "num-key-value-heads": "num-query-groups",
    "ds-sequence-parallel-size": "context-parallel-size",
    "pad-vocab-size-to": "padded-vocab-size",
    "override-vocab-size": "vocab-size",
    "expert-interval": "moe-layer-freq",
    "max-length": "seq-length",
}
"""Options of older releases, of Megatron-DeepSpeed and of Pai-Megatron-Patch: today's."""
STATED_OFF = frozenset({"tp-comm-overlap", "overlap-param-gather"})
"""Options that are on where the file of Megatron-Bridge does not have them."""
SWITCHED_OFF = {"share-embeddings": "untie-embeddings-and-output-weights", "add-bias-linear": "disable-bias-linear"}
"""Options of a YAML file whose `false` is another option."""


def read_script(text: str) -> Recipe:
    """The options of a shell script or of a list of arguments.

    Raises: ConfigError: sizes that are missing or cannot be, or a model that is no stack of alike layers.
    """
    if (encoder := ENCODERS.search(text)) and encoder[1] != "bert":
        raise ConfigError(
            f"{NAME}: pretrain_{encoder[1]}.py trains no stack of alike layers, which these options describe; give such a "
            "model by name or as an nn.Module (`parsim models` lists t5-3b and vit-l-16)"
        )
    options = options_of(text)
    if found := next((name for name in options if name in HYBRID), ""):
        raise ConfigError(
            f"{NAME}: --{found} mixes layers of state spaces with those of a transformer, which these options do not size for "
            "parsim; give the model as a config.json of Hugging Face"
        )
    if "num-rollout" in options or "rollout-batch-size" in options:
        raise ConfigError(
            f"{NAME}: --rollout-batch-size trains by rollouts, which no plan of parsim has; drop it to price the training alone"
        )
    if swift := SWIFT.search(text):
        return _read_swift(swift[1], options, text)
    recipe = _recipe(NAME, options)
    return replace(recipe, args=recipe.args | {"causal": False}) if encoder else recipe


HYBRID = {"is-hybrid-model", "hybrid-override-pattern", "hybrid-layer-pattern", "hybrid-attention-ratio", "mamba-num-heads"}
SWIFT = re.compile(r"\bmegatron\s+(sft|pt|rlhf|export)\b")
"""Of a script that starts Megatron-SWIFT."""


def _read_swift(task: str, options: dict[str, list[str]], text: str) -> Recipe:
    """ms-swift's own starter of Megatron-Core, by its defaults: the model by name, 16 bits, ZeRO 1, LoRA where it is asked for.

    Source: modelscope/ms-swift, swift/megatron/arguments.
    """
    if task not in ("sft", "pt"):
        raise ConfigError(f"{NAME}: megatron {task} is no supervised training; only megatron sft and megatron pt are read")
    if options.get("torch-dtype", ["bfloat16"])[0] == "bfloat16":
        options.setdefault("bf16", [])
    options.setdefault("use-distributed-optimizer", [])
    model = " ".join(options.pop("model", options.pop("mcore-model", [])))
    kind = (options.pop("tuner-type", None) or options.pop("train-type", None) or ["full"])[0]
    keys = FileKeys(NAME, option_values(text))
    recipe = _recipe(NAME, options, model)
    if kind != "full":
        take_adapters(
            *(recipe, keys, "tuner_type", kind),
            r=keys.number("lora_rank", default=8),
            alpha=keys.rate("lora_alpha"),
            targets=options.get("target-modules") or ["all"],
        )
        recipe.unknown = [key for key in recipe.unknown if key.removeprefix("--").partition("-")[0] not in ("lora", "target")]
    return recipe


def read_yaml(document: Mapping[str, Any], model: str = "") -> Recipe:
    """A YAML file of Megatron-LM, NeMo or Megatron-Bridge, its tables flattened.

    Args: document: its keys. model: the name that a wrapper gives it; "": sizes are in the file.
    Raises: ConfigError: as `read_script`, or a table of several settings, of which one must be written out.
    """
    if isinstance(matrix := document.get("perf_matrix"), Mapping):
        rows = [" ".join(path.split(".")[:3]) for path in flat_table(matrix)]
        raise ConfigError(
            f"{BRIDGE}: perf_matrix holds several settings ({first_few(list(dict.fromkeys(rows)), 4)}); write one of "
            "them out as tensor_model_parallel_size, micro_batch_size and so on, without perf_matrix"
        )
    if any(key.replace("-", "_") in NEOX_MARKS for key in document):
        return _read_neox(document)
    options_table = document.get("MODEL_ARGS")
    flat, contradicted = _options_of_table(options_table if isinstance(options_table, Mapping) else document)
    bridge = "ConfigContainer" in document or "megatron.bridge" in str(document.get("_target_", "")) or "dist" in document
    nemo = any(key.startswith(("activations-checkpoint", "encoder-seq-length", "use-mcore")) for key in flat)
    nemo = nemo or any(key.partition(".")[0] == "trainer" for key in document)
    options: dict[str, list[str]] = {}
    if flat.pop("optim.name", "") == "distributed_fused_adam":
        options["use-distributed-optimizer"] = []
    if flat.get("fp8") is False:  # the formats that stand beside it are for when it is on
        flat = {key: value for key, value in flat.items() if not key.startswith("fp8")}
    for key, value in flat.items():
        name = NEMO_NAMES.get(key, key)
        if value is False and name in SWITCHED_OFF:
            options[SWITCHED_OFF[name]] = []
        elif value is False and name in STATED_OFF:
            options[name] = ["false"]
        elif value is not None and value is not False:
            options[name] = [] if value is True else [str(value)]
    if nemo or bridge or "gated-linear-unit" in options:
        _nemo_words(options)
    framework = BRIDGE if bridge else NEMO if nemo else NAME
    assumed = bool(model or bridge) and not options.keys() & {"bf16", "fp16", "fp32", "precision"}
    if assumed:
        options["bf16"] = []
    recipe = _recipe(framework, options, model)
    recipe.left_out |= contradicted
    if assumed:
        recipe.left_out["--bf16"] = "no precision is in the file: taken as bf16, which the defaults of its framework have"
    return recipe


def _read_neox(document: Mapping[str, Any]) -> Recipe:
    """A YAML file of GPT-NeoX: options of Megatron-LM beside tables of DeepSpeed. Raises ConfigError as `read_script`."""
    flat, _ = _options_of_table({key: value for key, value in document.items() if key not in ("optimizer", "scheduler")})
    attention = str(document.get("attention_config", document.get("attention-config", "")))
    if other := re.search(r"mamba|rwkv|gmlp|sparse", attention):
        raise ConfigError(
            f"{NEOX}: attention_config holds layers of {other[0]}, which parsim does not size by these keys; give such a model "
            "as a config.json of Hugging Face"
        )
    table = document.get("optimizer")
    kind = str(table.get("type", "adam")) if isinstance(table, Mapping) else "adam"
    options: dict[str, list[str]] = {"optimizer": ["sgd" if kind.lower() == "sgd" else "adam"]}
    if str(flat.get("pipe-parallel-size")) == "0":  # no pipeline engine
        del flat["pipe-parallel-size"]
    if flat.get("mlp-type") == "llama":  # three products without biases; megatron/model/transformer.py, LLaMAParallelMLP
        inner = 256 * math.ceil(8 * whole_number(NEOX, "hidden_size", flat.get("hidden-size", 0)) // 3 / 256)
        flat = {"swiglu": True, "disable-bias-linear": True, "intermediate-size": inner} | flat
    for key, value in flat.items():
        name, text = NEOX_WORDS.get(key, {}).get(str(value).lower(), (NEOX_NAMES.get(key, key), str(value)))
        if value is not False and value is not None:
            options.setdefault(name, [] if value is True or not text else [text])
    for name in ("bf16", "fp16"):
        half = document.get(name)
        if isinstance(half, Mapping):
            options |= {name: []} if half.get("enabled", half.get(name)) else {}
    again = options.pop("gradient-accumulation-steps", ["1"])[0]
    recipe = _recipe(NEOX, options)
    recipe.local_batch = recipe.micro_batch * whole_number(NEOX, "gradient_accumulation_steps", again, least=1)
    if not flat.keys() & {"train-micro-batch-size-per-gpu", "train-batch-size"}:
        recipe.missing["training.global_batch"] = "no batch is in the file, which GPT-NeoX reads together with others"
    if not options.keys() & {"fp16", "bf16", "precision"}:
        recipe.left_out["precision"] = "none is in the file: fp32 is taken"
    if flat.get("gpt-j-residual"):
        recipe.left_out["gpt_j_residual"] = "attention and the MLP of a layer run one after the other"
    return recipe


def _options_of_table(document: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Values of all tables by the last word of their key, as Megatron's options are spelt; the first counts.

    Also those that stand twice with different sizes, with which was taken.
    """
    found: dict[str, Any] = {}
    contradicted: dict[str, str] = {}
    for key, value in flat_table(document).items():
        if key.endswith("optim.name"):
            found["optim.name"] = value
        if isinstance(value, str) and "${" in value:
            value = VARIABLE.sub(r"\1", value).strip("\"'")
            if "${" in value or not value:
                continue
        name = key.rpartition(".")[2].lstrip("-").replace("_", "-")  # Megatron's own tests write the dashes
        first = found.setdefault(name, value)
        if type(first) is type(value) is int and first != value and DEPENDS.search(name):
            contradicted[key] = f"it is {value}, and {first} stands before it: {first} was taken"
    return found, contradicted


DEPENDS = re.compile(r"size|length|layers|degree|batch")
"""Words of options whose number matters."""


def _nemo_words(options: dict[str, list[str]]) -> None:
    activation = " ".join(options.pop("activation", []))
    if "swiglu" in activation or "gated-linear-unit" in options:
        options.setdefault("swiglu", [])
    options.pop("gated-linear-unit", None)
    if "norm" in " ".join(options.get("normalization", [])).lower():
        rms = "rms" in options["normalization"][0].lower()
        options["normalization"] = ["RMSNorm" if rms else "LayerNorm"]
    for key in [key for key in options if NEMO_SAME_TIME.match(key)]:
        del options[key]
    precision = " ".join(options.pop("precision", []))
    if precision:
        options.setdefault("bf16" if "bf16" in precision else "fp16" if "16" in precision else "fp32", [])
    if "devices" in options and "num-nodes" in options:
        options["nproc-per-node"], options["nnodes"] = options.pop("devices"), options.pop("num-nodes")


NEMO_SAME_TIME = re.compile(
    r"(max-(steps|epochs|time)|accelerator|logger|pre-process|post-process|-target-|-partial-|name|library|val-check|limit-|"
    r"accumulate-grad-batches|gradient-(clip-val|as-bucket)|mcore-gpt|use-scaled-init|ffn-dropout|persist-layer|headscale|"
    r"transformer-(block-type|engine)|normalize-attention|attention-type|megatron-amp|native-amp|grad-(allreduce-chunk|div)|"
    r"bias-(activation|dropout-add)|masked-softmax|get-attention-mask|gradient-accumulation-fusion|onnx|apex|sync-batch-comm|"
    r"enable-checkpointing|use-distributed-sampler|benchmark|explicit-log|create-|enabled|start-step|end-step|betas|lr|"
    r"overlap-grad-sync|contiguous-grad|time-limit|dependency|results-dir|use-flash-attention|splits-string|index-mapping|"
    r"data-impl|skip-warmup|num-workers|type$|restore-from|do-layer-norm|sentencepiece|exp-manager|use-emha|fp32-residual|"
    r"fp16-lm|resume|warmup|min-lr|monitor|mode$|save-|model-parallel-size$|num-micro-batches-with|replace-sampler|"
    r"val-size|precision-plugin|dir$|model$|log-every|checkpoint-callback|always-save|filename|ub-tp-comm-overlap-cfg)"
)
"""Keys of NeMo that change neither the time nor the memory of a step."""


AXES = {
    "tp": "tensor-model-parallel-size",
    "pp": "pipeline-model-parallel-size",
    "cp": "context-parallel-size",
    "ep": "expert-model-parallel-size",
}
"""Options by axis of the mesh."""
SWITCHES = {
    "swiglu": ("gated", True),
    "disable-bias-linear": ("bias", False),
    "add-qkv-bias": ("qkv_bias", True),
    "qk-layernorm": ("qk_norm", True),
    "untie-embeddings-and-output-weights": ("tied", False),
}
"""Options without a value: the argument of the model, and what it is where the option is given."""
SIZES = {"layers": "num-layers", "hidden": "hidden-size", "heads": "num-attention-heads"}
"""Options that every model by its sizes has, by argument of the model."""
RESIZED = {
    "num-layers": "layers",
    "hidden-size": "hidden",
    "num-attention-heads": "heads",
    "ffn-hidden-size": "ffn",
    "num-query-groups": "kv_heads",
    "num-experts": "experts",
    "moe-router-topk": "active",
    "moe-ffn-hidden-size": "expert_ffn",
}
"""Options that change a model by name."""
TOKENIZERS = {"GPT2BPETokenizer": 50257, "20B_tokenizer.json": 50277}
"""Vocabularies of tokenizers that have one file alone, by type or by the name of the file."""
USUAL_TOKENS = {"Llama2Tokenizer": 32_000, "Llama3Tokenizer": 128_256}
"""Vocabularies of the models that tokenizers of a type are named for; their file may be another's."""
MERGED = "GPT2BPETokenizer"
"""The tokenizer of a script that names a file of merges and no other tokenizer."""
LATENT = {"query_rank": "q-lora-rank", "key_rank": "kv-lora-rank", "rope_dim": "qk-pos-emb-head-dim", "head_dim": "qk-head-dim"}
"""Options of multi-latent attention by argument of the model."""
LAYOUT = "pipeline-model-parallel-layout"
ROUNDS = "microbatch-group-size-per-virtual-pipeline-stage"
MOST_STAGES = 4096
ENDS = ("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers")
ENDS_COUNT = ("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split")
"""Options that cut the layers otherwise than evenly: layers of the first and last ranks, and that an end counts as a layer."""
PARTITION = "pp-partition-method"
"""Of Megatron-DeepSpeed: what counts as a layer, \'type:transformer|embedding\' (DeepSpeed\'s PipelineModule)."""
VOCABULARY_STEP = 128
"""Megatron-LM pads the vocabulary to a multiple of this times tp, unless it is given another number."""


class _Options(FileKeys):
    """Options by name, with the words behind each.

    Attributes: given: options and words. hanging: those that were asked for a number, and have one that the script computes.
    """

    prefix = "--"

    def __init__(self, framework: str, given: Mapping[str, list[str]]) -> None:
        super().__init__(framework, {name: plain_value(words[0]) if words else True for name, words in given.items()})
        self.given = given
        self.hanging: list[str] = []

    def flag(self, *keys: str, default: bool = False) -> bool:
        """Whether it stands there, with nothing behind it that says no."""
        (name,) = keys
        if name not in self.given or str(self.values[name]).lower() in ("false", "0"):
            return default
        self.read[name] = True
        return True

    def text(self, *keys: str, default: str = "") -> str:
        """The first word behind it; the default where there is none."""
        return super().text(*keys, default=default) if self.given.get(keys[0]) else default

    def number(self, *keys: str, default: int | None = None, least: int = 0) -> int:
        """As of `FileKeys`; the default where the number hangs on what the file lacks (`hanging`)."""
        if UNKNOWN in self.text(*keys):
            self.read.pop(keys[0])
            self.hanging.append(keys[0])
            return default or 0
        return super().number(*keys, default=default, least=least)


def _recipe(framework: str, given: Mapping[str, list[str]], model: str = "") -> Recipe:
    words = {OLDER_NAMES.get(name, name): value for name, value in given.items() if OLDER_NAMES.get(name) not in given}
    if "activations-checkpoint-method" in given:  # it recomputed whole layers
        words.setdefault("recompute-granularity", ["full"])
    options = _Options(framework, words)
    recipe = Recipe(framework=framework, software={"framework": FRAMEWORKS[framework]})
    if model:
        recipe.name_model("model", model)
        recipe.args = {key: options.number(name, default=0) for name, key in RESIZED.items() if name in words}
    elif not words.keys() & {*SIZES.values(), "vocab-size"}:
        recipe.model = ""
        recipe.missing["model.name"] = "the sizes of the model are in a checkpoint or in a recipe of Python"
    else:
        recipe.args = _shape(options)
        for key, name in SIZES.items():
            if not recipe.args[key]:
                del recipe.args[key]
                recipe.missing[f"model.args.{key}"] = _lacking(name, options)
        usual = USUAL_TOKENS.get(options.text("tokenizer-type"), 0)
        if "vocab" not in recipe.args and (vocab := usual or _tokens_of_sizes(recipe.args)):
            recipe.args["vocab"] = _padded(vocab, options)
            whose = "such tokenizers usually have" if usual else "models of these sizes have"
            recipe.left_out["--vocab-size"] = f"it follows from a tokenizer file: {vocab:,} are taken, as {whose}"
        if "vocab" not in recipe.args:
            why = "the size of the vocabulary follows from a tokenizer file; add --vocab-size N"
            recipe.missing["model.args.vocab"] = why
    args, training = recipe.args, recipe.training
    if not (seq := options.number("seq-length", default=0)) and not model:
        recipe.missing["model.args.seq"] = _lacking("seq-length", options)
    args |= {"seq": seq} if seq else {}
    for axis, name in AXES.items():
        setattr(recipe, axis, options.number(name, default=1, least=1))
        if name in options.hanging:
            recipe.missing[f"plan.mesh.{axis}"] = _lacking(name, options)
    recipe.micro_batch = options.number("micro-batch-size", default=1, least=1)
    if (batch := options.number("global-batch-size", default=0)) > 0:
        training["global_batch"] = batch
    if "global-batch-size" in options.hanging:
        recipe.missing["training.global_batch"] = _lacking("global-batch-size", options)
    recipe.processes = options.number("nproc-per-node", default=0) * options.number("nnodes", default=1)
    low = any([options.text("fp8-format"), *(options.flag(name) for name in ("fp8", "fp8-hybrid", "fp8-e4m3"))])
    high = "bf16" if options.flag("bf16") else "amp_fp16" if options.flag("fp16") else "fp32"
    training["precision"] = "nvfp4" if options.text("fp4-format") else "fp8" if low else high
    optimizer = options.text("optimizer", default="adam")
    training["optimizer"] = "sgd_momentum" if optimizer == "sgd" else "adamw_fused"
    if optimizer not in ("sgd", "adam", "adamw"):
        recipe.left_out["--optimizer"] = f"{optimizer} is not modelled: time and state are those of AdamW"
    moments = {options.given.get(name, [""])[0] for name in ("exp-avg-dtype", "exp-avg-sq-dtype")}
    if len(moments) == 1 and moments <= set(STATE_BYTES):
        training["state_dtype"] = options.text("exp-avg-dtype")
        options.text("exp-avg-sq-dtype")
    kept = options.text("main-grads-dtype") or ("bf16" if options.flag("grad-reduce-in-bf16") else "fp32")
    if training["precision"] in ("bf16", "fp8", "nvfp4") and kept == "fp32":
        training["gradient_dtype"] = "fp32"
    if training["precision"] == "fp8" and options.flag("fp8-param-gather"):
        training["weight_dtype"] = "fp8"
    recipe.zero = 1 if options.flag("use-distributed-optimizer") else 0
    recipe.zero = options.number("zero-stage", default=0) or recipe.zero
    recipe.replicate = max(1, options.number("num-distributed-optimizer-instances", default=1))
    strategy = options.text("data-parallel-sharding-strategy")
    if options.flag("use-megatron-fsdp") or options.flag("use-custom-fsdp") or options.flag("use-torch-fsdp2"):
        recipe.zero = {"no_shard": 0, "optim": 1, "optim_grads": 2}.get(strategy, 3)
    args["sequence_parallel"] = options.flag("sequence-parallel")
    _read_recompute(options, recipe)
    _read_chunks(options, recipe)
    _read_overlap(options, recipe)
    if options.flag("cross-entropy-loss-fusion") and options.text("cross-entropy-fusion-impl") == "te":
        args[LOSS] = "fused"
    if "optimizer-cpu-offload" in words and _is_one(words.get("optimizer-offload-fraction", ["1"])):
        recipe.optimizer_offload = options.flag("optimizer-cpu-offload")  # all of the state, or it stays
        options.text("optimizer-offload-fraction")
    if len(set(words.get("num-experts", []))) > 1:
        recipe.left_out["--num-experts"] = f"layers have {' '.join(words['num-experts'])}: all have the first number"
    if offloaded := options.number("cpu-offloading-num-layers", default=0):
        recipe.offloaded_layers = offloaded
        options.flag("cpu-offloading")
    for name in options.hanging:
        if name not in (*SIZES.values(), *AXES.values(), "global-batch-size", "seq-length"):
            recipe.left_out[f"--{name}"] = "it hangs on a value that the file lacks: taken as where it is not given"
    if "fp16" in options.read and training["precision"] == "amp_fp16":
        recipe.left_out["--fp16"] = "taken as amp_fp16: weights and gradients of 4 bytes, and Megatron's have 2 and copies of 4"
    left_out = dict(LEFT_OUT)
    if "uniform" in words.get("recompute-method", []):
        del left_out["recompute-num-layers"]
    for name in options.hanging:
        options.values.pop(name, None)
    options.sort(recipe, left_out=left_out, ignored=IGNORED)
    return recipe


def _read_overlap(options: _Options, recipe: Recipe) -> None:
    """What runs beside what. Where the file says nothing it is off, but in Megatron-Bridge, whose recipes turn it on."""
    if recipe.framework == NEOX and recipe.zero > 1:  # the row of Megatron-DeepSpeed has ZeRO 1 at most
        recipe.software.clear()
    usual_off = recipe.framework != BRIDGE
    overlapped = options.flag("tp-comm-overlap")
    if overlapped and (recipe.tp == 1 or not recipe.args["sequence_parallel"]):
        overlapped = False  # there is nothing to overlap
    if recipe.tp > 1 and (overlapped or usual_off or "tp-comm-overlap" in options.given):
        recipe.plan_keys["tensor_overlap"] = overlapped
    ahead = options.flag("overlap-param-gather")
    if recipe.zero == 1 and (usual_off or "overlap-param-gather" in options.given):
        recipe.plan_keys["gather_ahead"] = ahead
    row = named(recipe.model) if recipe.model else None
    experts = recipe.args.get("experts") or (row.shape.experts if row is not None and row.shape is not None else 0)
    if not experts:
        return
    dispatcher = options.text("moe-token-dispatcher-type")
    backend = "deepep" if options.flag("moe-enable-deepep") else options.text("moe-flex-dispatcher-backend", default="deepep")
    if dispatcher == "allgather":
        recipe.left_out["--moe-token-dispatcher-type"] = "tokens reach experts by all_to_all"
    if dispatcher and recipe.ep > 1:
        recipe.software["dispatcher"] = backend if dispatcher == "flex" else "all_to_all"
    if options.flag("moe-permute-fusion"):
        recipe.software["fused_permutation"] = True
    if recipe.ep == 1:
        return
    if options.flag("overlap-moe-expert-parallel-comm"):
        recipe.software["expert_overlap"] = True
        if options.flag("delay-wgrad-compute"):
            recipe.software["delay_weight_gradients"] = True


def _lacking(name: str, options: _Options) -> str:
    if name in options.hanging:
        return f"--{name} depends on a value that the file lacks; write its number"
    return f"--{name} is missing; add it"


def _shape(options: _Options) -> dict[str, Any]:
    args: dict[str, Any] = {key: options.flag(name) == value for name, (key, value) in SWITCHES.items()}
    layers, hidden, heads = (options.number(name, default=0) for name in SIZES.values())
    # Megatron's default with --swiglu is two thirds of four times the hidden size, in whole steps of 64.
    ffn = options.number("ffn-hidden-size", default=0) or (int(4 * hidden * 2 / 3 / 64) * 64 if args["gated"] else 4 * hidden)
    rotary = options.text("position-embedding-type") == "rope" or options.flag("use-rotary-position-embeddings")
    vocab = options.number("vocab-size", default=0) or options.number("padded-vocab-size", default=0) or _tokens_known(options)
    alibi = options.text("position-embedding-type") == "alibi"
    args |= {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "ffn": ffn,
        "norm": "rms" if options.text("normalization", default="LayerNorm").lower() == "rmsnorm" else "layer",
        "rotary": rotary,
        "vocab": _padded(vocab, options),
    }
    if not vocab:
        del args["vocab"]
    if not hidden and "ffn-hidden-size" not in options.read:
        del args["ffn"]  # it follows from the hidden size that --set gives, but for SwiGLU in whole steps of 64
    if options.flag("embed-layernorm"):
        args["embedding_norm"] = True
    if alibi:
        args["alibi"] = True
    elif (
        not rotary
        and not options.flag("no-position-embedding")
        and (positions := options.number("max-position-embeddings", default=0))
    ):
        args["positions"] = positions
    if head_dim := options.number("kv-channels", default=0):
        args["head_dim"] = head_dim
    groups = options.number("num-query-groups", default=0)
    if groups and (options.flag("group-query-attention") or groups != heads):
        args["kv_heads"] = groups
    if (experts := options.number("num-experts", default=0)) > 1:
        by_deepspeed = options.framework == NEOX or "deepspeed" in options.given  # which routes to one, in every second layer
        args |= {"experts": experts, "active": options.number("moe-router-topk", default=1 if by_deepspeed else 2)}
        args["expert_ffn"] = options.number("moe-ffn-hidden-size", default=0) or ffn
        layers = max(layers, 1)
        shared = options.number("num-shared-experts", default=0) * args["expert_ffn"]
        args["shared_ffn"] = options.number("moe-shared-expert-intermediate-size", default=shared)
        # Layers without experts, which parsim has first; of other patterns their number.
        usual = "2" if by_deepspeed else "1"
        pattern = options.text("moe-layer-freq", default=usual)
        counts = re.findall(r"\[0\](?:\s*\*\s*(\d+))?", pattern)
        dense = sum(whole_number(options.framework, "--moe-layer-freq", count or 1) for count in counts)
        every = options.number("moe-layer-freq", default=int(usual), least=1) if pattern.isdigit() else 0
        args["dense_layers"] = layers - math.ceil(layers / every) if every else min(dense, layers - 1)
    if options.flag("multi-latent-attention") or LATENT["key_rank"] in options.given:
        defaults = {"query_rank": 0, "key_rank": 512, "rope_dim": 64, "head_dim": 128}
        args |= {key: options.number(name, default=defaults[key]) for key, name in LATENT.items()}
    return args


def _padded(vocab: int, options: _Options) -> int:
    step = options.number("make-vocab-size-divisible-by", default=VOCABULARY_STEP, least=1)
    step *= options.number(AXES["tp"], default=1, least=1)
    return math.ceil(vocab / step) * step


def _tokens_of_sizes(args: Mapping[str, Any]) -> int:
    """The vocabulary of the models that have these layers, width, heads and MLP; 0: none has, or they differ."""
    shapes = [row.shape for row in NAMED.values() if row.shape is not None]
    sizes = tuple(args.get(key) for key in ("layers", "hidden", "heads", "ffn"))
    tokens = {shape.vocab for shape in shapes if (shape.layers, shape.hidden, shape.heads, shape.inner) == sizes}
    return tokens.pop() if len(tokens) == 1 else 0


def _tokens_known(options: _Options) -> int:
    """The vocabulary of a tokenizer that has one alone, or that is named as a model which ships; 0: not known."""
    default = MERGED if "merge-file" in options.given else ""
    file = Path(" ".join(options.given.get("vocab-file", []))).name
    if tokens := TOKENIZERS.get(file) or TOKENIZERS.get(options.text("tokenizer-type") or default, 0):
        return tokens
    for name in ("tokenizer-model", "tokenizer-name-or-path"):
        row = named(" ".join(options.given.get(name, [])))
        if row is not None and row.shape is not None:
            options.text(name)
            return row.shape.vocab
    return 0


def _is_one(words: list[str]) -> bool:
    try:
        return float(words[0]) == 1.0 if words else False
    except ValueError:
        return False


def _read_recompute(options: _Options, recipe: Recipe) -> None:
    granularity = options.text("recompute-granularity")
    if options.flag("recompute-activations") or options.flag("checkpoint-activations"):
        granularity = granularity or ("full" if "checkpoint-activations" in options.read else "selective")
    flash = options.flag("use-flash-attn") or recipe.cp > 1  # which needs it
    unfused = options.text("attention-backend") == "unfused" or (options.text("transformer-impl") == "local" and not flash)
    if unfused:
        recipe.args["kernels"] = "unfused-attention"
    modules = [word for word in options.given.get("recompute-modules", []) if word in MODULES]
    if (
        granularity == "full"
        and "block" in options.given.get("recompute-method", [])
        and "recompute-num-layers" in options.given
    ):
        recipe.recompute, recipe.every = "first", options.number("recompute-num-layers", default=1)
    elif granularity == "full":
        recipe.recompute = "full"
    elif granularity == "selective" and unfused:
        recipe.recompute, recipe.args["selective"] = "selective", True
    elif granularity == "selective" and modules and set(modules) == set(options.given["recompute-modules"]):
        recipe.recompute, recipe.args[MODULES_AGAIN] = "selective", " ".join(modules)
        options.text("recompute-modules")
    elif granularity == "selective":
        recipe.left_out["--recompute-granularity"] = "fused attention keeps no scores, so there is nothing to compute again"


def _read_chunks(options: _Options, recipe: Recipe) -> None:
    row = named(recipe.model)
    layers, pp = recipe.args.get("layers") or (row.shape.layers if row is not None and row.shape is not None else 0), recipe.pp
    each = options.number("num-layers-per-virtual-pipeline-stage", default=0)
    recipe.chunks = (
        options.number("num-virtual-stages-per-pipeline-rank", default=0)
        or options.number("num-virtual-stages", default=0)
        or 1
    )
    if each and layers:
        if layers % (pp * each):
            raise ConfigError(
                f"{recipe.framework}: {layers} layers must be divisible by pp {pp} x {each} layers per virtual stage; the "
                f"nearest that are: {max(1, round(layers / (pp * each))) * pp * each}"
            )
        recipe.chunks = layers // pp // each
    layout = "".join(options.given.get(LAYOUT, ()))
    if layout:
        options.text(LAYOUT)
        recipe.stage_layers = _stages_of_layout(layout)
        recipe.chunks = max(1, len(recipe.stage_layers) // pp)
    if pp == 1:
        recipe.chunks, recipe.stage_layers = 1, ()
    if recipe.chunks > 1:
        recipe.rounds_of = options.number(ROUNDS, default=pp)
        if recipe.rounds_of != pp:
            recipe.left_out[f"--{ROUNDS}"] = f"a rank turns to its next chunk after pp = {pp} microbatches"
    if pp > 1 and layers and not recipe.stage_layers:
        recipe.stage_layers = _stages_of_ends(options, recipe, layers)


def _stages_of_ends(options: _Options, recipe: Recipe, layers: int) -> tuple[int, ...]:
    """Layers of each stage, evenly but for what is said of the first and last ranks, or that an end counts as a layer.

    Source: Megatron-LM, megatron/core/transformer/transformer_block.py, get_num_layers_to_build.
    """
    pp, chunks = recipe.pp, recipe.chunks
    first, last = (options.number(name, default=0, least=1) for name in ENDS)
    weighed = "embedding" in options.text(PARTITION).lower()
    ends = [options.flag(name) or weighed for name in ENDS_COUNT]
    rest, inner = layers - first - last, pp - bool(first) - bool(last)
    if not first and not last and not (layers + sum(ends)) % (pp * chunks):
        return tuple(with_ends(layers, pp * chunks, *ends) or ())
    ranks = [first] * bool(first) + [rest // max(1, inner)] * inner + [last] * bool(last)
    if (not first and not last) or sum(ranks) != layers or any(count % chunks for count in ranks):
        between = f", here {rest} by the {inner} ranks that have no number of their own" if first or last else ""
        raise ConfigError(
            f"{recipe.framework}: {layers} layers must be divisible by pp {pp} x {chunks} stages per rank{between}; change one "
            f"of them, or give --{LAYOUT}"
        )
    return tuple(count // chunks for _ in range(chunks) for count in ranks)


def _stages_of_layout(text: str) -> tuple[int, ...]:
    """Layers of each stage of a layout such as "Et*2|(t|)*3tL", as PipelineParallelLayerLayout of Megatron-Core reads it."""
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(\w)\*(\d+)"):
        text = re.sub(pattern, lambda repeat: repeat[1] * min(int(repeat[2]), MOST_STAGES), text[:MOST_LETTERS])
    return tuple(stage.count("t") for stage in text[:MOST_LETTERS].split("|"))


PRECISIONS = {
    "fp32": [],
    "bf16": ["--bf16"],
    "amp_fp16": ["--fp16"],
    "fp8": ["--bf16", "--fp8-format hybrid"],
    "nvfp4": ["--bf16", "--fp4-format e2m1", "--fp4-recipe nvfp4"],
}
OPTIMIZERS = {"adamw_fused": "adam", "sgd_momentum": "sgd"}
FSDP = {2: "optim_grads", 3: "optim_grads_params"}
NOT_THERE = ("alibi", "embedding_norm", "sinks", "expert_bias")
ORDERS = ("1f1b", "interleaved")


def write_megatron(recipe: PlannedRecipe, file: Path) -> Exported:
    """The plan as a script of Megatron-LM. Raises ConfigError: it has no such model, order, precision or optimizer."""
    model, plan = transformer_of(recipe), recipe.plan
    options = [*_sizes(recipe, model), *_division(recipe, model), *_training(recipe, model), *_recompute(recipe, model)]
    rendezvous = '--rdzv-backend c10d --rdzv-endpoint "${MASTER_ADDR:-localhost}:29500"'
    lines = [f"{recipe.torchrun()} {rendezvous} pretrain_gpt.py", *options, '"$@"']
    text = "\n".join(
        [
            "#!/bin/bash",
            f"# Written by parsim export: {plan.summary()}",
            "# Give data and tokenizer behind it: megatron.sh --data-path ... --tokenizer-type ...",
            " \\\n  ".join(lines),
            "",
        ]
    )
    read_back(recipe, model, read_script(text))
    write_text_atomically(file, text)
    return Exported(
        format="megatron",
        file=file,
        summary=f"Megatron-LM script of {plan.summary()}: {file}; on every node: `bash {file.name} --data-path ...`",
        left_out=recipe.left_out,
        found={"ranks": plan.world_size, "launch": f"bash {file.name}"},
    )


def _sizes(recipe: PlannedRecipe, model: Transformer) -> list[str]:
    shape = model.shape
    if lacking := [key for key in NOT_THERE if getattr(shape, key)]:
        raise ConfigError(f"{NAME} cannot express {', '.join(lacking)} of {recipe.model}")
    if not shape.causal:
        raise ConfigError(f"{NAME}'s pretrain_gpt.py trains decoders, and {recipe.model} is an encoder")
    options = [
        f"--num-layers {shape.layers}",
        f"--hidden-size {shape.hidden}",
        f"--ffn-hidden-size {shape.ffn}",
        f"--num-attention-heads {shape.heads}",
        f"--kv-channels {shape.head_dim}",
        f"--seq-length {model.seq}",
        f"--max-position-embeddings {shape.positions or model.seq}",
        f"--normalization {'RMSNorm' if shape.norm == 'rms' else 'LayerNorm'}",
        f"--position-embedding-type {'rope' if shape.rotary else 'learned_absolute'}",
        *(f"--{name}" for name, (key, value) in SWITCHES.items() if bool(getattr(shape, key)) == value),
        f"--vocab-size {shape.vocab}",
    ]
    if shape.vocab % (VOCABULARY_STEP * recipe.tp) and shape.vocab % recipe.tp == 0:  # the largest step that does not pad it
        options.append(f"--make-vocab-size-divisible-by {math.gcd(shape.vocab // recipe.tp, VOCABULARY_STEP)}")
    if shape.kv_heads != shape.heads:
        options += ["--group-query-attention", f"--num-query-groups {shape.kv_heads}"]
    if shape.experts:
        options += [f"--num-experts {shape.experts}", f"--moe-router-topk {shape.active}"]
        options += [f"--moe-ffn-hidden-size {shape.expert_ffn or shape.ffn}", "--moe-grouped-gemm"]
        if shape.shared_ffn:
            options.append(f"--moe-shared-expert-intermediate-size {shape.shared_ffn}")
        if shape.dense_layers:
            options.append(f"--moe-layer-freq '([0]*{shape.dense_layers}+[1]*{shape.layers - shape.dense_layers})'")
    if shape.key_rank:
        sizes = {name: getattr(shape, key) for key, name in LATENT.items()}
        options += ["--multi-latent-attention", *(f"--{name} {size}" for name, size in sizes.items() if size)]
    return options


def _division(recipe: PlannedRecipe, model: Transformer) -> list[str]:
    plan = recipe.plan
    ways = {axis: getattr(recipe, axis) for axis in AXES}
    options = [f"--{name} {ways[axis]}" for axis, name in AXES.items() if axis in ("tp", "pp") or ways[axis] > 1]
    if recipe.tp > 1 and model.others[SEQUENCE_PARALLEL]:
        options.append("--sequence-parallel")
    if recipe.pp > 1:
        if plan.pipeline_order not in ORDERS:
            raise ConfigError(
                f"{NAME} has the pipeline orders {' and '.join(ORDERS)}, and the plan has {plan.pipeline_order}; plan with "
                "--set plan.pipeline_order=1f1b"
            )
        options += _stages(recipe, model)
    if recipe.zero == 1:
        options += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    elif recipe.zero:
        options += ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy {FSDP[recipe.zero]}", "--overlap-grad-reduce"]
    elif recipe.dp > 1:
        options.append("--overlap-grad-reduce")
    if recipe.zero and recipe.replicate > 1:
        options.append(f"--num-distributed-optimizer-instances {recipe.replicate}")
    return options


def _stages(recipe: PlannedRecipe, model: Transformer) -> list[str]:
    """How the layers are cut: evenly, or as the plan has them. A layout also says how many stages a rank has."""
    plan, every = recipe.plan, model.shape.layers
    even, rest = divmod(every, len(plan.stages))
    layers = layers_of_stages(plan)
    if layers is None and not rest:
        recipe.left_out["plan.stages"] = cut_in_layers(recipe, [even] * len(plan.stages))
    elif layers is None:
        raise ConfigError(
            f"{NAME} cuts {every} layers evenly or between layers, not into {len(plan.stages)} stages that begin inside a "
            f"layer; plan with a number of stages that divides {every}"
        )
    elif any(len(stage) != even for stage in layers):
        parts = [f"t*{len(stage)}" if stage else "" for stage in layers]
        return [f"--{LAYOUT} '{'|'.join(['E' + parts[0], *parts[1:-1], parts[-1] + 'L'])}'"]
    return [] if plan.chunks == 1 else [f"--num-virtual-stages-per-pipeline-rank {plan.chunks}"]


def _training(recipe: PlannedRecipe, model: Transformer) -> list[str]:
    training = recipe.training
    kernels = model.others[KERNEL]
    if kernels == "eager":
        recipe.left_out[f"model.args.{KERNEL}"] = "Megatron-LM runs fused kernels"
    for key in training["optimizer_args"]:
        recipe.left_out[f"training.optimizer_args.{key}"] = "give Megatron-LM's own option, such as --adam-beta2"
    return [
        f"--micro-batch-size {recipe.micro_batch}",
        f"--global-batch-size {recipe.plan.global_batch}",
        *recipe.choose("precision", PRECISIONS),
        f"--optimizer {recipe.choose('optimizer', OPTIMIZERS)}",
        f"--lr {training['learning_rate']!r}",
        f"--clip-grad {training['clip_norm'] or 0.0!r}",
        f"--weight-decay {training['weight_decay']!r}",
        *([] if training["steps"] is None else [f"--train-iters {training['steps']}"]),
        f"--attention-backend {'unfused' if kernels == 'unfused-attention' else 'flash'}",
    ]


def _recompute(recipe: PlannedRecipe, model: Transformer) -> list[str]:
    match recipe.recompute:
        case "full":
            return ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
        case "selective" if model.others[SELECTIVE]:
            return ["--recompute-granularity selective"]
        case "none" if not model.others[SELECTIVE]:
            return []
    raise ConfigError(
        f"{NAME} recomputes all layers, or the inside of unfused attention, and the plan recomputes otherwise "
        f"({recipe.plan.summary()}); plan with --set plan.recompute=none or full"
    )


LISTS = (".args", ".txt")
"""Plain lists of options, which other texts may be too."""
MARK = re.compile(
    r"(tensor|pipeline)[-_]model[-_]parallel[-_]size|^MODEL_ARGS\s*:|^ConfigContainer\s*:|encoder_seq_length|megatron|"
    r"^[ \t\"-]*num[-_]attention[-_]heads[\"]?\s*:",
    re.MULTILINE,
)
"""Of a YAML file that is Megatron's, NeMo's or Bridge's."""
OTHERS = re.compile(
    r"\bbatch_accumulation_per_replica:|^actor_rollout_ref\s*:|"
    r"^[ \t]+framework\s*:|^[ \t]*distributed_type\s*:|^base_model\s*:|^[ \t\"']*per_device_",
    re.MULTILINE,
)
"""Of one that is another tool's, which may name Megatron."""
STARTS_OTHERS = re.compile(
    r"\bverl\.trainer\b|\baxolotl\b|\blitgpt\b|\btune run\b|"
    r"\btorchtitan\.train\b|--job\.config_file|torchtitan.*--module[= ]|--per[-_]device[-_]train|per_device_batch_size=|"
    r"--base_model\b"
)
"""Of a script that starts torchtitan, a Trainer of Hugging Face, alpaca-lora, MaxText, verl and others."""
STARTS = re.compile(
    r"--(num[-_]layers|(tensor|pipeline)[-_]model[-_]parallel[-_]size|(micro|global)[-_]batch[-_]size|hidden[-_]size)\b|"
    r"\bpretrain_\w+\.py|\bmegatron\s+(sft|pt|rlhf)\b"
)
"""Of a script that gives the options of Megatron-LM."""
ENCODERS = re.compile(r"\bpretrain_(bert|t5|ict|retro|vision\w*|vlm)\.py")


def _sniff(source: SourceFile) -> bool:
    suffix, text = source.path.suffix, source.text
    if suffix in YAML:
        return bool(MARK.search(text)) and not OTHERS.search(text)
    if suffix in SCRIPTS:
        return bool(STARTS.search(text) or re.search(r"model_parallel_size=|megatron", text)) and not STARTS_OTHERS.search(text)
    return suffix in LISTS and "--num-layers" in text


def _read(source: SourceFile) -> Recipe:
    if source.path.suffix in YAML:
        return read_yaml(yaml_table(source))
    keys = {key: value for key, value in overrides_of(source.text).items() if "." in key}
    return read_script(source.text) if STARTS.search(source.text) or not keys else _read_overrides(source, keys)


def _read_overrides(source: SourceFile, keys: Mapping[str, Any]) -> Recipe:
    """A script that starts NeMo 1 with keys in Hydra's form, which count more than the YAML file that it names.

    Raises: ConfigError: as `read_script`; `missing` notes a file that is not beside the script.
    """
    name = next(iter(options_of(source.text).get("config-name", [])), "")
    file = source.path.with_name(f"{name.removesuffix('.yaml')}.yaml")
    if name and file.is_file():
        return read_yaml(flat_table(yaml_table(opened(file))) | dict(keys))
    recipe = read_yaml(keys)
    if name:
        recipe.model, recipe.args = "", {key: value for key, value in recipe.args.items() if key in OWN or key == "seq"}
        recipe.missing = {key: why for key, why in recipe.missing.items() if not key.startswith("model.args.")}
        recipe.missing["model.name"] = f"the model is in {file.name}, which is not beside the script"
    return recipe


# Scripts in Python that take a recipe of NeMo 2 or Megatron-Bridge by name and change it. They are read and not run.
#
# What the recipe itself sets is in its package: what the script does not set is named as missing. Names are those of
# nemo.collections.llm and of megatron.bridge.recipes.


NEMO2 = "NeMo 2"
RECIPE_MARK = re.compile(r"\b\w+\.(pretrain|finetune)_recipe\(|\b\w+_(pretrain|finetune|sft)_config\(")
"""Of a script that takes a recipe of NeMo 2, or of Megatron-Bridge."""
RECIPE = re.compile(r"(?:.*\.)?(\w+)\.(?:pretrain|finetune)_recipe|(?:.*\.)?(\w+)_(?:pretrain|finetune|sft)_config")
RENAMED = {"num_gpus_per_node": "devices", "sequence_length": "seq_length", "max_length": "seq_length"}
NEEDED = (
    ("tensor_model_parallel_size", "plan.mesh.tp"),
    ("pipeline_model_parallel_size", "plan.mesh.pp"),
    ("context_parallel_size", "plan.mesh.cp"),
    ("global_batch_size", "training.global_batch"),
    ("seq_length", "model.args.seq"),
)
"""What a recipe sets, and the key that supplies it."""


class _RecipeReader(Script):
    def __init__(self) -> None:
        super().__init__()
        self.name = ""
        self.keys: dict[str, Any] = {}
        self.unknown: list[str] = []

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            path = path_of(target)
            if not isinstance(target, ast.Name) and "." in path:
                self._note(path.partition(".")[2], node.value)
        super().visit_Assign(node)

    def visit_Call(self, node: ast.Call) -> None:
        if (form := RECIPE.fullmatch(path_of(node.func))) is not None:
            self.name = form[1] or form[2]
            for keyword in node.keywords:
                if keyword.arg is not None:
                    self._note(keyword.arg, keyword.value)
        super().visit_Call(node)

    def _note(self, path: str, node: ast.expr) -> None:
        head, _, last = path.rpartition(".")
        last = RENAMED.get(last, last)
        value = self.value(node)
        if value is None and not (isinstance(node, ast.Constant) and node.value is None):
            self.unknown.append(last)
        elif isinstance(value, bool | int | float | str):
            self.keys = {key: old for key, old in self.keys.items() if key.rpartition(".")[2] != last}
            self.keys[f"{head}.{last}" if head else last] = value


def read_nemo(source: SourceFile) -> Recipe:
    """A script that takes a recipe. Raises ConfigError: it is no Python, or takes none."""
    reader = _RecipeReader()
    walk(source, reader)
    if not reader.name:
        raise ConfigError("it takes no recipe such as llm.llama3_8b.pretrain_recipe(...) or llama3_8b_pretrain_config(...)")
    bridge = bool(re.search(r"\bmegatron\.bridge\b", source.text))
    framework = BRIDGE if bridge else NEMO2
    name = re.sub(r"^(llama|qwen|phi)(\d)(\d)(?=_)", r"\1\2.\3", re.sub(r"_performance.*|_\d+k$", "", reader.name))
    recipe = read_yaml({**reader.keys, **({"dist": {}} if bridge else {"trainer.accelerator": "gpu"})}, name.replace("_", "-"))
    recipe.framework = framework
    set_keys = {key.rpartition(".")[2] for key in reader.keys}
    for own, key in NEEDED:
        if own not in set_keys:
            where = "what the script computes" if own in reader.unknown else f"the recipe {reader.name} of {framework}"
            recipe.missing[key] = f"{own} hangs on {where}, which is Python and not run"
    if "use_distributed_optimizer" not in set_keys:  # all recipes of both have it
        recipe.zero = 1
    if "micro_batch_size" not in set_keys:
        recipe.left_out["micro_batch_size"] = f"it is in the recipe {reader.name}: one sample is taken"
    return recipe


CARD_MARK = re.compile(r"\bWorkloadBaseConfig\(")
"""Of a table of the settings by which Megatron-Bridge measures its recipes."""
CARD = re.compile(r"(?P<model>[A-Z0-9_]+?)_(?P<kind>PRETRAIN|SFT|LORA)_CONFIG_(\w+_)?(?P<form>BF16|FP8|NVFP4)(_\w+)?")
CARD_FORMS: Mapping[str, Mapping[str, Any]] = {"BF16": {}, "FP8": {"fp8": "hybrid"}, "NVFP4": {"fp4_format": "e2m1"}}


class _CardReader(Script):
    """`NAME = replace(OTHER, key=value)`: what each name has in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.cards: dict[str, dict[str, Any]] = {}

    def visit_Assign(self, node: ast.Assign) -> None:
        target, value = node.targets[0], node.value
        if isinstance(target, ast.Name) and isinstance(value, ast.Name) and value.id in self.cards:
            self.cards[target.id] = self.cards[value.id]
        if isinstance(target, ast.Name) and isinstance(value, ast.Call):
            base = next((each.id for each in value.args if isinstance(each, ast.Name)), "")
            own = {each.arg: self.value(each.value) for each in value.keywords if each.arg is not None}
            self.cards[target.id] = self.cards.get(base, {}) | own


def read_card(source: SourceFile) -> Recipe:
    """The one setting that a table has. Raises ConfigError: it has none or several."""
    reader = _CardReader()
    walk(source, reader)
    named = {name: form for name in reader.cards if (form := CARD.fullmatch(name)) is not None}
    if len(named) != 1:
        listed = first_few(tuple(named)) or "a setting is named MODEL_PRETRAIN_CONFIG_GPU_FORM"
        raise ConfigError(
            f"{BRIDGE}: it holds {len(named)} settings ({listed}); keep one of them, with those that it is made of"
        )
    ((name, form),) = named.items()
    keys = {key: value for key, value in reader.cards[name].items() if value is not None}
    processes, model = keys.pop("num_gpus", 0), form["model"].lower().replace("_", "-")
    if keys.pop("peft", "none") != "none":
        raise ConfigError(
            f"{BRIDGE}: {name} trains adapters, whose rank is in the recipe; ask for {model} with --tune lora:r=N"
        )
    divided = keys.get("tensor_model_parallel_size", 1) > 1
    table = {"dist": {}, "bf16": True, "sequence_parallel": divided, **CARD_FORMS[form["form"]], **keys}
    recipe = read_yaml(table, model)
    recipe.framework, recipe.processes, recipe.zero = BRIDGE, processes, max(1, recipe.zero)
    recipe.missing["model.args.seq"] = f"the length of a sample is in the recipe of {model}"
    return recipe


FORMATS = {
    "bridge": FileFormat(
        layouts="tables of WorkloadBaseConfig with one setting",
        refuses="several settings in one table: keep one; the length of a sample, until --set",
        what="a table of settings by which Megatron-Bridge measures",
        tool=BRIDGE,
        reads="recipe",
        sniff=marked((".py",), CARD_MARK),
        read=read_card,
    ),
    "megatron": FileFormat(
        layouts="scripts with branches, Megatron-SWIFT, MODEL_ARGS tables, NeMo 1, Megatron-Bridge, older names of options",
        refuses="a table of several settings (perf_matrix); sizes that hang on the environment, until --set; unknown degrees",
        what="a script with the arguments of Megatron-LM",
        tool=NAME,
        reads="recipe",
        sniff=_sniff,
        read=_read,
        writes="recipe",
        write=write_megatron,
        file="megatron.sh",
    ),
    "nemo": FileFormat(
        layouts="recipes of NeMo 2 and of Megatron-Bridge, by the name of the recipe and what the script sets",
        refuses="what the recipe sets and the script does not, until --set",
        what="a script in Python that takes a recipe of NeMo 2 or Megatron-Bridge",
        tool=NEMO2,
        reads="recipe",
        sniff=marked((".py",), RECIPE_MARK),
        read=read_nemo,
    ),
}
