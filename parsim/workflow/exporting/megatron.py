"""Megatron-LM: a script with its arguments. Read back by parsim's own reader, it asks the same question."""

from __future__ import annotations

import math

from parsim.errors import ConfigError
from parsim.files import write_text_atomically
from parsim.model.catalogue.names import KERNEL, SELECTIVE, SEQUENCE_PARALLEL
from parsim.model.catalogue.sublayers import Shape
from parsim.workflow.exporting.request import Exported, ExportRequest
from parsim.workflow.exporting.transformer_plan import TransformerPlan, check_fp8_casts, read_back, transformer_plan
from parsim.workflow.frameworks.megatron import read_script

NAME = "Megatron-LM"
FILE = "megatron.sh"
VOCABULARY_STEP = 128
"""Megatron-LM pads the vocabulary to a multiple of this times tp, unless it is given another number."""
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


def write_megatron(request: ExportRequest) -> Exported:
    """The plan as a script of Megatron-LM. Raises ConfigError: it has no such model, order, precision or optimizer."""
    wanted = transformer_plan(request, NAME)
    options = [*_sizes(wanted), *_division(wanted), *_training(wanted), *_recompute(wanted)]
    check_fp8_casts(wanted)
    plan, nodes = wanted.plan, request.config.cluster.nodes
    launcher = (
        f"torchrun --nnodes {nodes} --nproc-per-node {plan.world_size // nodes} --rdzv-backend c10d "
        '--rdzv-endpoint "${MASTER_ADDR:-localhost}:29500"'
    )
    lines = [f"{launcher} pretrain_gpt.py", *options, '"$@"']
    text = "\n".join(
        [
            "#!/bin/bash",
            f"# Written by parsim export: {plan.summary()}",
            "# Give data and tokenizer behind it: megatron.sh --data-path ... --tokenizer-type ...",
            " \\\n  ".join(lines),
            "",
        ]
    )
    wanted.left_out |= read_back(wanted, read_script(text))
    file = request.target(FILE)
    write_text_atomically(file, text)
    return Exported(
        format=request.format,
        file=file,
        summary=f"Megatron-LM script of {plan.summary()}: {file}; on every node: `bash {file.name} --data-path ...`",
        left_out=wanted.left_out,
        found={"ranks": plan.world_size, "launch": f"bash {file.name}"},
    )


def _sizes(wanted: TransformerPlan) -> list[str]:
    shape = wanted.shape
    if lacking := [key for key in NOT_THERE if getattr(shape, key)]:
        raise ConfigError(f"{NAME} cannot express {', '.join(lacking)} of {wanted.request.config.model.name}")
    if not shape.causal:
        raise ConfigError(f"{NAME}'s pretrain_gpt.py trains decoders, and {wanted.request.config.model.name} is an encoder")
    found = [
        f"--num-layers {shape.layers}",
        f"--hidden-size {shape.hidden}",
        f"--ffn-hidden-size {shape.ffn}",
        f"--num-attention-heads {shape.heads}",
        f"--kv-channels {shape.head_dim}",
        f"--seq-length {wanted.seq}",
        f"--max-position-embeddings {shape.positions or wanted.seq}",
        f"--normalization {'RMSNorm' if shape.norm == 'rms' else 'LayerNorm'}",
        f"--position-embedding-type {'rope' if shape.rotary else 'learned_absolute'}",
        *(["--swiglu"] if shape.gated else []),
        *([] if shape.bias else ["--disable-bias-linear"]),
        *(["--add-qkv-bias"] if shape.qkv_bias else []),
        *(["--qk-layernorm"] if shape.qk_norm else []),
        *([] if shape.tied else ["--untie-embeddings-and-output-weights"]),
        *_vocabulary(shape.vocab, wanted.mesh.tp),
    ]
    if shape.kv_heads != shape.heads:
        found += ["--group-query-attention", f"--num-query-groups {shape.kv_heads}"]
    return found + _experts(shape) + _latent(shape)


def _vocabulary(size: int, tp: int) -> list[str]:
    """The size, and the largest step that does not pad it."""
    if size % (VOCABULARY_STEP * tp) == 0 or size % tp:
        return [f"--vocab-size {size}"]
    step = math.gcd(size // tp, VOCABULARY_STEP)
    return [f"--vocab-size {size}", f"--make-vocab-size-divisible-by {step}"]


def _experts(shape: Shape) -> list[str]:
    if not shape.experts:
        return []
    found = [f"--num-experts {shape.experts}", f"--moe-router-topk {shape.active}"]
    found += [f"--moe-ffn-hidden-size {shape.expert_ffn or shape.ffn}", "--moe-grouped-gemm"]
    if shape.shared_ffn:
        found.append(f"--moe-shared-expert-intermediate-size {shape.shared_ffn}")
    if shape.dense_layers:
        found.append(f"--moe-layer-freq '([0]*{shape.dense_layers}+[1]*{shape.layers - shape.dense_layers})'")
    return found


def _latent(shape: Shape) -> list[str]:
    if not shape.key_rank:
        return []
    return [
        "--multi-latent-attention",
        *([f"--q-lora-rank {shape.query_rank}"] if shape.query_rank else []),
        f"--kv-lora-rank {shape.key_rank}",
        f"--qk-pos-emb-head-dim {shape.rope_dim}",
        f"--qk-head-dim {shape.head_dim}",
    ]


def _division(wanted: TransformerPlan) -> list[str]:
    plan, mesh = wanted.plan, wanted.mesh
    found = [f"--tensor-model-parallel-size {mesh.tp}", f"--pipeline-model-parallel-size {mesh.pp}"]
    if mesh.tp > 1 and wanted.own[SEQUENCE_PARALLEL]:
        found.append("--sequence-parallel")
    if mesh.cp > 1:
        found.append(f"--context-parallel-size {mesh.cp}")
    if mesh.ep > 1:
        found.append(f"--expert-model-parallel-size {mesh.ep}")
    if mesh.pp > 1:
        if plan.pipeline_order not in ORDERS:
            raise ConfigError(
                f"{NAME} has the pipeline orders {' and '.join(ORDERS)}, and the plan has {plan.pipeline_order}; plan with "
                "--set plan.pipeline_order=1f1b"
            )
        if plan.chunks > 1:
            found.append(f"--num-virtual-stages-per-pipeline-rank {plan.chunks}")
    if plan.zero_stage == 1:
        found += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    elif plan.zero_stage:
        found += ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy {FSDP[plan.zero_stage]}", "--overlap-grad-reduce"]
    elif mesh.dp > 1:
        found.append("--overlap-grad-reduce")
    if plan.zero_stage and mesh.dp_shard < mesh.dp:
        found.append(f"--num-distributed-optimizer-instances {mesh.dp // mesh.dp_shard}")
    return found


def _training(wanted: TransformerPlan) -> list[str]:
    training, plan = wanted.request.config.training, wanted.plan
    if training.precision not in PRECISIONS:
        raise ConfigError(f"{NAME} trains in {', '.join(PRECISIONS)}, and training.precision = {training.precision!r}")
    if training.optimizer not in OPTIMIZERS:
        raise ConfigError(f"{NAME} has {', '.join(OPTIMIZERS)}, and training.optimizer = {training.optimizer!r}")
    kernels = wanted.own[KERNEL]
    if kernels == "eager":
        wanted.left_out[f"model.args.{KERNEL}"] = "Megatron-LM runs fused kernels"
    found = [
        f"--micro-batch-size {wanted.mesh.samples}",
        f"--global-batch-size {plan.global_batch}",
        *PRECISIONS[training.precision],
        f"--optimizer {OPTIMIZERS[training.optimizer]}",
        f"--lr {training.resolved_learning_rate!r}",
        f"--clip-grad {training.clip_norm or 0.0!r}",
        f"--weight-decay {training.resolved_weight_decay!r}",
        *([] if training.steps is None else [f"--train-iters {training.steps}"]),
        f"--attention-backend {'unfused' if kernels == 'unfused-attention' else 'flash'}",
    ]
    for key in training.optimizer_args:
        wanted.left_out[f"training.optimizer_args.{key}"] = "give Megatron-LM's own option, such as --adam-beta2"
    return found


def _recompute(wanted: TransformerPlan) -> list[str]:
    match wanted.recompute:
        case "full":
            return ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
        case "selective" if wanted.own[SELECTIVE]:
            return ["--recompute-granularity selective"]
        case "none" if not wanted.own[SELECTIVE]:
            return []
    raise ConfigError(
        f"{NAME} recomputes all layers, or the inside of unfused attention, and the plan recomputes otherwise "
        f"({wanted.plan.summary()}); plan with --set plan.recompute=none or full"
    )
