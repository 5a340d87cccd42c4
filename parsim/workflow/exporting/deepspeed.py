"""DeepSpeed JSON: data parallelism and ZeRO, as `deepspeed.initialize` takes it.

Read back by `parsim import`, the file gives the keys of the plan again (`parsim.importers.deepspeed_config`).

Source: deepspeed.ai, "DeepSpeed Configuration JSON": keys, meanings and defaults; bucket sizes count elements there.
"""

from __future__ import annotations

import json
from typing import Any

from parsim.app.config import Question
from parsim.errors import ConfigError, first_few
from parsim.files import write_text_atomically
from parsim.plans.plan import NONE, Plan
from parsim.workflow.exporting.expressible import (
    check_synchronous,
    check_uncut,
    framework_mesh,
    left_out_of_plan,
    left_out_of_training,
)
from parsim.workflow.exporting.request import Exported, ExportRequest

NAME = "DeepSpeed JSON"
FILE = "ds_config.json"
GRADIENT_BYTES = {"fp32": 4, "tf32": 4, "amp_fp16": 4, "amp_bf16": 4, "bf16": 2}
"""Of an element of a bucket, by the precisions that DeepSpeed has."""
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("Adam", {"torch_adam": True, "adam_w_mode": False}),
    "adam_fused": ("Adam", {"adam_w_mode": False}),
    "adamw": ("AdamW", {"torch_adam": True}),
    "adamw_fused": ("AdamW", {}),
    "sgd": ("SGD", {}),
    "sgd_momentum": ("SGD", {"momentum": 0.9}),
}
"""Type and parameters by parsim's name; the fused ones are DeepSpeed's own kernel."""
KEPT_ARGUMENTS = ("betas", "eps", "momentum", "nesterov")


def write_deepspeed(request: ExportRequest) -> Exported:
    """The plan as a DeepSpeed config. Raises ConfigError: it is more than data parallelism, or of an unknown precision."""
    plan, config = request.plan, request.config
    check_synchronous(plan, NAME)
    mesh = framework_mesh(plan, NAME)
    check_uncut(plan, mesh, NAME)
    if config.training.precision not in GRADIENT_BYTES:
        raise ConfigError(
            f"{NAME} knows no training.precision = {config.training.precision!r}; it has {', '.join(GRADIENT_BYTES)}"
        )
    left_out = left_out_of_training(request) | left_out_of_plan(plan)
    document: dict[str, Any] = {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": mesh.samples,
        "gradient_accumulation_steps": plan.microbatches,
        **_precision(config, left_out),
        "zero_optimization": _zero(plan, GRADIENT_BYTES[config.training.precision], left_out),
        **_optimizer(config, left_out),
    }
    if config.training.clip_norm is not None:
        document["gradient_clipping"] = config.training.clip_norm
    _name_recomputed(plan, left_out)
    file = request.target(FILE)
    write_text_atomically(file, json.dumps(document, indent=2) + "\n")
    nodes = config.cluster.nodes
    launch = f"deepspeed --num_nodes {nodes} --num_gpus {plan.world_size // nodes} train.py --deepspeed_config {file.name}"
    return Exported(
        format=request.format,
        file=file,
        summary=f"DeepSpeed config of {plan.summary()}: {file}; start it with `{launch}`",
        left_out=left_out,
        found={"ranks": plan.world_size, "launch": launch},
    )


def _precision(config: Question, left_out: dict[str, str]) -> dict[str, Any]:
    training = config.training
    match training.precision:
        case "bf16":
            if not training.keeps_master_weights:
                left_out["training.master_weights"] = (
                    "DeepSpeed keeps copies of the weights in fp32: 4 bytes per parameter more"
                )
            return {"bf16": {"enabled": True}}
        case "amp_fp16":
            return {"amp": {"enabled": True, "opt_level": "O1"}}
        case "amp_bf16":
            return {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
        case "tf32":
            left_out["training.precision"] = "tf32 is switched on in your script: torch.backends.cuda.matmul.allow_tf32 = True"
    return {}


def _zero(plan: Plan, width: int, left_out: dict[str, str]) -> dict[str, Any]:
    if plan.mesh.dp_shard:
        raise ConfigError(
            f"DeepSpeed's ZeRO divides states over all {plan.mesh.dp} replicas, and the plan over groups of "
            f"{plan.mesh.dp_shard}; export it as megatron or torchtitan, or plan with --set plan.dp_shard={plan.mesh.dp}"
        )
    elements, rest = divmod(plan.bucket_bytes, width)
    if rest:
        left_out["plan.bucket_bytes"] = f"{plan.bucket_bytes} bytes are no whole number of elements; the file says {elements}"
    if plan.zero_stage == 0:
        left_out["plan.bucket_bytes"] = (
            "without ZeRO DeepSpeed sums all gradients after the backward, in buffers of its own size, and hides nothing"
        )
    found: dict[str, Any] = {"stage": plan.zero_stage, "reduce_bucket_size": max(1, elements), "overlap_comm": True}
    if plan.zero_stage:
        found |= {"contiguous_gradients": True, "reduce_scatter": True}
    if plan.zero_stage == 3:
        found["stage3_prefetch_bucket_size"] = max(1, elements)
        left_out["plan.zero_stage"] = (
            "DeepSpeed keeps small parameters whole (stage3_param_persistence_threshold), parsim does not"
        )
    elif plan.zero_stage:
        found["allgather_bucket_size"] = max(1, elements)
    return found


def _optimizer(config: Question, left_out: dict[str, str]) -> dict[str, Any]:
    training = config.training
    if training.optimizer not in OPTIMIZERS:
        left_out["training.optimizer"] = f"make {training.optimizer} in your script and give it to deepspeed.initialize"
        return {}
    kind, params = OPTIMIZERS[training.optimizer]
    given = {key: value for key, value in training.optimizer_args.items() if key in KEPT_ARGUMENTS}
    for key in training.optimizer_args:
        if key not in given:
            left_out[f"training.optimizer_args.{key}"] = "DeepSpeed's optimizer has no such argument"
    usual = {"lr": training.resolved_learning_rate, "weight_decay": training.resolved_weight_decay}
    return {"optimizer": {"type": kind, "params": {**usual, **params, **given}}}


def _name_recomputed(plan: Plan, left_out: dict[str, str]) -> None:
    if plan.recompute == NONE and not plan.segments:
        return
    names = [name for name in plan.components if name in plan.recomputed or name in plan.recomputed_by_operator]
    left_out["plan.recompute"] = f"your model's code recomputes: torch.utils.checkpoint around {first_few(names, 4)}"
