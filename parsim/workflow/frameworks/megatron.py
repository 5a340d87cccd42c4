"""Megatron-LM: the options of its training scripts, and the YAML files of Megatron-LM and NeMo.

Option names are those of megatron/training/arguments.py (NVIDIA/Megatron-LM) and of NeMo's megatron_gpt_config.yaml; NeMo's
spellings are translated to Megatron's first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from parsim.errors import ConfigError
from parsim.model.formats import number_format
from parsim.workflow.frameworks.recipe import Recipe, whole_number
from parsim.workflow.frameworks.shell import UNKNOWN, options_of

NAME = "Megatron-LM"
NEMO = "NeMo (Megatron)"

SAME_TIME = re.compile(
    r"(adam-|sgd-|lr|min-lr|weight-decay|start-weight|end-weight|clip-grad|seed|init-method|log-|tensorboard|wandb|save|load|"
    r"data-|train-data|valid-data|test-data|split|eval-|num-workers|tokenizer|merge-file|vocab-file|exit-|timing|distributed-|"
    r"master|rdzv|node-rank|no-load|no-save|ckpt|dist-ckpt|async-save|use-dist-ckpt|finetune|train-iters|train-samples|"
    r"decay-|warmup|loss-scale|initial-loss|min-loss|hysteresis|norm-epsilon|layernorm-epsilon|rotary-base|rotary-percent|"
    r"use-rope-scaling|rope-|moe-aux|moe-z|moe-router-load|moe-router-dtype|moe-router-score|moe-router-bias|moe-router-enable|"
    r"moe-router-topk-scaling|moe-router-pre|moe-router-num-groups|moe-router-group|moe-router-force|moe-token-dispatcher|"
    r"mock-data|dataloader|reset-|eod|override-opt|use-checkpoint|check-for|manual-gc|no-check|check-weight|hidden-dropout|"
    r"attention-dropout|apply-layernorm-1p|attention-softmax|no-query|query-key|config-path|config-name|trainer-log|"
    r"auto-detect|yaml-cfg|straggler|enable-one|legacy|use-legacy|transformer-impl|use-mcore|mscale|beta|multi-latent|"
    r"use-cpu-init|deterministic|no-initialization|use-pytorch-profiler|profile|record-memory|kv-lora-rank$^)"
)
"""Beginnings of options that change neither the time nor the memory of a step."""

LEFT_OUT = {
    "tp-comm-overlap": "tensor-parallel communication is not hidden behind products",
    "overlap-moe-expert-parallel-comm": "the exchange of experts is not hidden",
    "cpu-offloading": "activations stay on the device: --cpu-offloading-num-layers says of how many layers they do not",
    "cpu-offloading-weights": "weights stay on the device",
    "optimizer-cpu-offload": "the optimizer's state stays on the device: only all of it can be in the host's memory",
    "optimizer-offload-fraction": "all of the optimizer's state lies in one place",
    "cuda-graph-impl": "the host's launches are not modelled for parts",
    "enable-cuda-graph": "the host's launches are not modelled for parts",
    "external-cuda-graph": "the host's launches are not modelled for parts",
    "grad-reduce-in-bf16": "gradients are reduced in the width that the precision gives them",
    "accumulate-allreduce-grads-in-fp32": "gradients are reduced in the width that the precision gives them",
    "moe-expert-capacity-factor": "experts are visited evenly, and no token is dropped",
    "recompute-modules": "selective recomputation is that of attention's inside",
    "recompute-num-layers": "full recomputation is that of every layer",
    "reset-attention-mask": "attention computes scores between documents too; see model.args.document_tokens",
    "rampup-batch-size": "the batch is the full one from the start",
    "account-for-embedding-in-pipeline-split": "stages are cut by their cost",
    "decoder-first-pipeline-num-layers": "stages are cut by their cost",
    "decoder-last-pipeline-num-layers": "stages are cut by their cost",
    "pipeline-model-parallel-layout": "stages are cut by their cost",
    "mtp-num-layers": "the layers that predict further tokens are not in the model",
    "delay-wgrad-compute": "weights' gradients are computed with inputs'",
    "expert-tensor-parallel-size": "experts are cut as the rest is",
    "main-grads-dtype": "gradients have the width of the weights",
    "exp-avg-dtype": "the optimizer's state is in fp32",
    "exp-avg-sq-dtype": "the optimizer's state is in fp32",
}
HARMLESS = frozenset(
    """
    overlap-grad-reduce overlap-param-gather no-overlap-p2p-communication overlap-p2p-communication bias-swiglu-fusion
    no-bias-swiglu-fusion no-masked-softmax-fusion no-gradient-accumulation-fusion no-bias-gelu-fusion no-bias-dropout-fusion
    no-rope-fusion cross-entropy-loss-fusion cross-entropy-fusion-impl use-flash-attn attention-backend
    moe-grouped-gemm moe-permute-fusion moe-router-fusion moe-use-upcycling moe-per-layer-logging moe-layer-recompute
    use-rotary-position-embeddings position-embedding-type group-query-attention disable-bias-linear swiglu normalization
    no-position-embedding make-vocab-size-divisible-by recompute-method
    no-async-tensor-parallel-allreduce squared-relu qk-layernorm no-persist-layer-norm bf16 fp16 nnodes nproc-per-node
    use-distributed-optimizer sequence-parallel untie-embeddings-and-output-weights max-position-embeddings add-qkv-bias
    init-model-with-meta-device calculate-per-token-loss use-precision-aware-optimizer fp8-amax-history-len
    fp8-amax-compute-algo fp8-margin fp8-interval fp8-recipe fp8-param-gather fp4-recipe openai-gelu add-bias-linear
    apply-query-key-layer-scaling ddp-bucket-size ddp-num-buckets ddp-average-in-collective
    """.split()  # noqa: SIM905
)
"""Options that were read elsewhere here, or that say what parsim assumes anyway."""

NEMO_NAMES = {
    "encoder-seq-length": "seq-length",
    "sequence-length": "seq-length",
    "num-layers": "num-layers",
    "activations-checkpoint-granularity": "recompute-granularity",
    "activations-checkpoint-method": "recompute-method",
    "activations-checkpoint-num-layers": "recompute-num-layers",
    "virtual-pipeline-model-parallel-size": "num-virtual-stages",
    "share-embeddings-and-output-weights": "share-embeddings",
    "num-moe-experts": "num-experts",
    "tensor-model-parallel-size": "tensor-model-parallel-size",
    "bias": "add-bias-linear",
    "moe-router-topk": "moe-router-topk",
}


def read_script(text: str) -> Recipe:
    """The options of a shell script or of a list of arguments. Raises ConfigError for sizes that are missing or cannot be."""
    return _recipe(NAME, options_of(text))


def read_yaml(document: Mapping[str, Any]) -> Recipe:
    """A YAML file of Megatron-LM or NeMo, its tables flattened. Raises ConfigError as `read_script`."""
    flat: dict[str, Any] = {}
    _flatten(document, flat)
    nemo = any(key.startswith("activations-checkpoint") or key == "encoder-seq-length" for key in flat) or "trainer" in document
    options: dict[str, list[str]] = {}
    for key, value in flat.items():
        name = NEMO_NAMES.get(key, key)
        if value is None or value is False:
            if name == "share-embeddings" and value is False:
                options["untie-embeddings-and-output-weights"] = []
            elif name == "add-bias-linear" and value is False:
                options["disable-bias-linear"] = []
            continue
        options[name] = [] if value is True else [str(value)]
    if nemo:
        _nemo_words(options)
    return _recipe(NEMO if nemo else NAME, options)


MOST_TABLES = 1_000
"""Of a YAML file, counted as often as they are named."""


def _flatten(node: Mapping[str, Any], into: dict[str, Any], seen: list[int] | None = None) -> None:
    seen = [0] if seen is None else seen
    seen[0] += 1
    if seen[0] > MOST_TABLES:
        raise ConfigError(f"more than {MOST_TABLES:,} tables; write one without anchors that repeat one another")
    for key, value in node.items():
        if isinstance(value, Mapping):
            _flatten(value, into, seen)
        elif not (isinstance(value, str) and "${" in value):
            into.setdefault(str(key).replace("_", "-"), value)


def _nemo_words(options: dict[str, list[str]]) -> None:
    """Values of NeMo that are options of Megatron."""
    activation = " ".join(options.pop("activation", []))
    if "swiglu" in activation or "gated-linear-unit" in options:
        options.setdefault("swiglu", [])
    options.pop("gated-linear-unit", None)
    if "norm" in " ".join(options.get("normalization", [])).lower():
        rms = "rms" in options["normalization"][0].lower()
        options["normalization"] = ["RMSNorm" if rms else "LayerNorm"]
    if "distributed_fused_adam" in options.pop("name", []):
        options["use-distributed-optimizer"] = []
    for key in NEMO_SAME_TIME & set(options):
        del options[key]
    precision = " ".join(options.pop("precision", []))
    if precision:
        options.setdefault("bf16" if "bf16" in precision else "fp16" if "16" in precision else "fp32", [])
    if "devices" in options and "num-nodes" in options:
        options["nproc-per-node"], options["nnodes"] = options.pop("devices"), options.pop("num-nodes")


NEMO_SAME_TIME = frozenset({"max-steps", "max-epochs", "max-time", "accelerator", "logger", "pre-process", "post-process"})


class _Options:
    """Options by name; those that were read are noted."""

    def __init__(self, framework: str, found: Mapping[str, list[str]]) -> None:
        self.framework, self.found = framework, found
        self.read: dict[str, Any] = {}

    def flag(self, name: str) -> bool:
        if name in self.found and not (self.found[name] and self.found[name][0].lower() in ("false", "0")):
            self.read[name] = True
            return True
        return False

    def text(self, name: str, default: str = "") -> str:
        words = self.found.get(name)
        if not words:
            return default
        self.read[name] = words[0]
        return words[0]

    def number(self, name: str, default: int | None = None) -> int:
        text = self.text(name)
        if text and UNKNOWN in text:
            self.read.pop(name)
            text = ""
            if default is None:
                raise ConfigError(f"{self.framework}: --{name} depends on a value that the file lacks; write its number")
        if not text:
            if default is None:
                raise ConfigError(f"{self.framework}: --{name} is missing; add it")
            return default
        self.read[name] = whole_number(self.framework, f"--{name}", text)
        return int(self.read[name])


def _recipe(framework: str, found: Mapping[str, list[str]]) -> Recipe:
    options = _Options(framework, found)
    recipe = Recipe(framework=framework, args=_shape(options))
    args, training = recipe.args, recipe.training
    args["seq"] = options.number("seq-length")
    recipe.tp = options.number("tensor-model-parallel-size", 1)
    recipe.pp = options.number("pipeline-model-parallel-size", 1)
    recipe.cp = options.number("context-parallel-size", 1)
    recipe.ep = options.number("expert-model-parallel-size", 1)
    recipe.micro_batch = options.number("micro-batch-size", 1)
    if (batch := options.number("global-batch-size", 0)) > 0:
        training["global_batch"] = batch
    recipe.processes = options.number("nproc-per-node", 0) * options.number("nnodes", 1)
    training["precision"] = _precision(options)
    if number_format(training["precision"]).beside:
        args["fp8_casts"] = True
    optimizer = options.text("optimizer", "adam")
    training["optimizer"] = "sgd_momentum" if optimizer == "sgd" else "adamw_fused"
    recipe.zero = 1 if options.flag("use-distributed-optimizer") else 0
    recipe.replicate = max(1, options.number("num-distributed-optimizer-instances", 1))
    strategy = options.text("data-parallel-sharding-strategy")
    if options.flag("use-megatron-fsdp") or options.flag("use-custom-fsdp") or options.flag("use-torch-fsdp2"):
        recipe.zero = {"no_shard": 0, "optim": 1, "optim_grads": 2}.get(strategy, 3)
    args["sequence_parallel"] = options.flag("sequence-parallel")
    _recompute(options, recipe)
    _chunks(options, recipe)
    _offload(options, recipe)
    recipe.taken = dict(options.read)
    if "fp16" in options.read and training["precision"] == "amp_fp16":
        recipe.left_out["--fp16"] = "taken as amp_fp16: weights and gradients of 4 bytes, and Megatron's have 2 and copies of 4"
    every = "uniform" in found.get("recompute-method", [])
    for name in found:
        if name in options.read or name in HARMLESS or (every and name == "recompute-num-layers"):
            recipe.ignored += [] if name in options.read else [f"--{name}"]
        elif name in LEFT_OUT:
            recipe.left_out[f"--{name}"] = LEFT_OUT[name]
        elif SAME_TIME.match(name):
            recipe.ignored.append(f"--{name}")
        else:
            recipe.unknown.append(f"--{name}")
    return recipe


def _shape(options: _Options) -> dict[str, Any]:
    """Arguments of the model `transformer`."""
    hidden, heads = options.number("hidden-size"), options.number("num-attention-heads")
    gated = options.flag("swiglu")
    latent = options.flag("multi-latent-attention")
    ffn = options.number("ffn-hidden-size", 0) or (_gated_ffn(hidden) if gated else 4 * hidden)
    rotary = options.text("position-embedding-type") == "rope" or options.flag("use-rotary-position-embeddings")
    args: dict[str, Any] = {
        "layers": options.number("num-layers"),
        "hidden": hidden,
        "heads": heads,
        "ffn": ffn,
        "gated": gated,
        "norm": "rms" if options.text("normalization", "LayerNorm").lower() == "rmsnorm" else "layer",
        "bias": not options.flag("disable-bias-linear"),
        "qkv_bias": options.flag("add-qkv-bias"),
        "qk_norm": options.flag("qk-layernorm"),
        "rotary": rotary,
        "tied": not options.flag("untie-embeddings-and-output-weights"),
        "vocab": _vocabulary(options),
    }
    if not rotary and (positions := options.number("max-position-embeddings", 0)):
        args["positions"] = positions
    if options.number("kv-channels", 0):
        args["head_dim"] = options.number("kv-channels")
    groups = options.number("num-query-groups", 0)
    if groups and (options.flag("group-query-attention") or groups != heads):
        args["kv_heads"] = groups
    if experts := options.number("num-experts", 0):
        args |= {"experts": experts, "active": options.number("moe-router-topk", 2)}
        args["expert_ffn"] = options.number("moe-ffn-hidden-size", 0) or ffn
        args["shared_ffn"] = options.number("moe-shared-expert-intermediate-size", 0)
        args["dense_layers"] = _dense_layers(options, args["layers"])
    if latent:
        args |= {
            "query_rank": options.number("q-lora-rank", 0) or hidden,
            "key_rank": options.number("kv-lora-rank", 512),
            "rope_dim": options.number("qk-pos-emb-head-dim", 64),
            "head_dim": options.number("qk-head-dim", 128),
        }
    return args


def _gated_ffn(hidden: int) -> int:
    """Megatron's default with --swiglu: two thirds of four times the hidden size, in whole steps of 64."""
    return int(4 * hidden * 2 / 3 / 64) * 64


def _dense_layers(options: _Options, layers: int) -> int:
    """Layers without experts, which parsim has first; of other patterns their number."""
    text = options.text("moe-layer-freq", "1")
    if text.isdigit():
        return layers - math.ceil(layers / int(text))
    zeros = sum(int(count or 1) for count in re.findall(r"\[0\](?:\s*\*\s*(\d+))?", text))
    return min(zeros, layers - 1)


def _vocabulary(options: _Options) -> int:
    """Padded as Megatron pads it: to a multiple of 128 times tp."""
    size = options.number("vocab-size", 0) or options.number("padded-vocab-size", 0)
    if not size:
        raise ConfigError(f"{options.framework}: the size of the vocabulary follows from a tokenizer file; add --vocab-size N")
    step = options.number("make-vocab-size-divisible-by", 128) * options.number("tensor-model-parallel-size", 1)
    return math.ceil(size / step) * step


def _precision(options: _Options) -> str:
    four, eight = (options.text(name) for name in ("fp4-format", "fp8-format"))
    if any([eight, *(options.flag(name) for name in ("fp8", "fp8-hybrid", "fp8-e4m3"))]) and not four:
        return "fp8"
    if four:
        return "nvfp4"
    if options.flag("bf16"):
        return "bf16"
    return "amp_fp16" if options.flag("fp16") else "fp32"


def _recompute(options: _Options, recipe: Recipe) -> None:
    granularity = options.text("recompute-granularity")
    if options.flag("recompute-activations") or options.flag("checkpoint-activations"):
        granularity = granularity or ("full" if "checkpoint-activations" in options.read else "selective")
    unfused = options.text("attention-backend") == "unfused" or options.text("transformer-impl") == "local"
    if unfused:
        recipe.args["kernels"] = "unfused-attention"
    if granularity == "full":
        recipe.recompute = "full"
    elif granularity == "selective" and unfused:
        recipe.recompute, recipe.args["selective"] = "selective", True
    elif granularity == "selective":
        recipe.left_out["--recompute-granularity"] = "fused attention keeps no scores, so there is nothing to compute again"


def _offload(options: _Options, recipe: Recipe) -> None:
    """The optimizer's state, if all of it, and the activations of the first layers."""
    if "optimizer-cpu-offload" in options.found and _is_one(options.found.get("optimizer-offload-fraction", ["1"])):
        recipe.optimizer_offload = options.flag("optimizer-cpu-offload")
        options.text("optimizer-offload-fraction")
    recipe.offloaded_layers = options.number("cpu-offloading-num-layers", 0)
    if recipe.offloaded_layers:
        options.flag("cpu-offloading")


def _is_one(words: list[str]) -> bool:
    try:
        return float(words[0]) == 1.0 if words else False
    except ValueError:
        return False


def _chunks(options: _Options, recipe: Recipe) -> None:
    layers, pp = recipe.args["layers"], recipe.pp
    each = options.number("num-layers-per-virtual-pipeline-stage", 0)
    recipe.chunks = options.number("num-virtual-stages-per-pipeline-rank", 0) or options.number("num-virtual-stages", 0) or 1
    if each:
        if layers % (pp * each):
            raise ConfigError(
                f"{recipe.framework}: {layers} layers must be divisible by pp {pp} x {each} layers per virtual stage; the "
                f"nearest that are: {max(1, round(layers / (pp * each))) * pp * each}"
            )
        recipe.chunks = layers // pp // each
    if pp == 1:
        recipe.chunks = 1
