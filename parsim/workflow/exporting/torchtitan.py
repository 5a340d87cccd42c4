"""torchtitan: its TOML file. Read back by parsim's own reader (`parsim.workflow.frameworks.torchtitan`), it asks the same."""

from __future__ import annotations

from typing import Any

from parsim.app.config_text import document_text
from parsim.errors import ConfigError
from parsim.files import parse_toml, write_text_atomically
from parsim.model.catalogue.names import KERNEL, SEQUENCE_PARALLEL, normalised
from parsim.workflow.exporting.request import Exported, ExportRequest
from parsim.workflow.exporting.transformer_plan import TransformerPlan, check_fp8_casts, read_back, transformer_plan
from parsim.workflow.frameworks.torchtitan import FLAVORS, SCHEDULES, read_toml

NAME = "torchtitan"
FILE = "torchtitan.toml"
COMPILED = {"fused": True, "eager": False}
OPTIMIZERS = {
    "adamw_fused": ("AdamW", "fused"),
    "adamw": ("AdamW", "foreach"),
    "adam_fused": ("Adam", "fused"),
    "adam": ("Adam", "foreach"),
}
PRECISIONS = {"bf16": "bfloat16", "fp8": "bfloat16", "fp32": "float32"}
BETAS, EPS = (0.9, 0.999), 1e-8
"""Of torch's Adam and AdamW; torchtitan has a beta2 of 0.95 where its file gives none."""
SAMPLE_STEPS = 1000
"""Of a question that does not say for how long it trains."""


def write_torchtitan(request: ExportRequest) -> Exported:
    """The plan as a file of torchtitan. Raises ConfigError: torchtitan has no such model, mesh, ZeRO stage or precision."""
    wanted = transformer_plan(request, NAME)
    training = request.config.training
    if training.precision not in PRECISIONS:
        raise ConfigError(f"{NAME} trains in {', '.join(PRECISIONS)}, and training.precision = {training.precision!r}")
    if training.optimizer not in OPTIMIZERS:
        raise ConfigError(f"{NAME} has {', '.join(OPTIMIZERS)}, and training.optimizer = {training.optimizer!r}")
    document = {
        "job": {"description": f"written by parsim export: {wanted.plan.summary()}"},
        "model": _model(wanted),
        "optimizer": _optimizer(wanted),
        "training": _training(wanted),
        "parallelism": _parallelism(wanted),
        "activation_checkpoint": _recompute(wanted),
        "compile": {"enable": COMPILED[wanted.own[KERNEL]]},
    }
    check_fp8_casts(wanted)
    if training.schedule is None:
        wanted.left_out["training.schedule"] = (
            "torchtitan raises the learning rate over 200 steps and then lowers it to 0, unless [lr_scheduler] says otherwise"
        )
    if wanted.mesh.tp > 1 and not wanted.own[SEQUENCE_PARALLEL]:
        wanted.left_out[f"model.args.{SEQUENCE_PARALLEL}"] = "torchtitan divides norms along the sequence all the same"
    text = document_text(document)
    wanted.left_out |= read_back(wanted, read_toml(parse_toml(text)))
    file = request.target(FILE)
    write_text_atomically(file, text)
    nodes = request.config.cluster.nodes
    launch = (
        f"torchrun --nnodes {nodes} --nproc-per-node {wanted.plan.world_size // nodes} -m torchtitan.train "
        f"--job.config_file {file.name}"
    )
    return Exported(
        format=request.format,
        file=file,
        summary=f"torchtitan file of {wanted.plan.summary()}: {file}; start it with `{launch}`",
        left_out=wanted.left_out,
        found={"ranks": wanted.plan.world_size, "launch": launch},
    )


def _model(wanted: TransformerPlan) -> dict[str, Any]:
    model = wanted.request.config.model
    flavors = {name: flavor for flavor, name in FLAVORS.items()}
    if (found := flavors.get(normalised(model.name))) is None:
        raise ConfigError(f"{NAME} has no model {model.name!r}; it has {', '.join(sorted(flavors))}")
    if wanted.own[KERNEL] not in COMPILED:
        raise ConfigError(f"{NAME} runs kernels {' or '.join(COMPILED)}, and model.args.kernels = {wanted.own[KERNEL]!r}")
    converters = ["float8"] if wanted.request.config.training.precision == "fp8" else []
    return {"name": found[0], "flavor": found[1], "converters": converters}


def _optimizer(wanted: TransformerPlan) -> dict[str, Any]:
    training = wanted.request.config.training
    name, implementation = OPTIMIZERS[training.optimizer]
    found: dict[str, Any] = {"name": name, "lr": training.resolved_learning_rate, "implementation": implementation}
    arguments = dict(training.optimizer_args)
    if isinstance(betas := arguments.pop("betas", BETAS), list | tuple):
        found |= {"beta1": float(betas[0]), "beta2": float(betas[1])}
    found |= {"eps": arguments.pop("eps", EPS), "weight_decay": training.resolved_weight_decay}
    for key in arguments:
        wanted.left_out[f"training.optimizer_args.{key}"] = "torchtitan has no such key"
    return found


def _training(wanted: TransformerPlan) -> dict[str, Any]:
    training, plan, mesh = wanted.request.config.training, wanted.plan, wanted.mesh
    if training.clip_norm is None:
        wanted.left_out["training.clip_norm"] = (
            "torchtitan always takes the norm of the gradients; max_norm = 1e9 clips nothing"
        )
    local = mesh.samples * (plan.microbatches if mesh.pp > 1 else 1)
    return {
        "local_batch_size": local,
        "global_batch_size": plan.global_batch,
        "seq_len": wanted.seq,
        "steps": training.steps or SAMPLE_STEPS,
        "max_norm": training.clip_norm or 1e9,
        "mixed_precision_param": PRECISIONS[training.precision],
    }


def _parallelism(wanted: TransformerPlan) -> dict[str, Any]:
    plan, mesh = wanted.plan, wanted.mesh
    found: dict[str, Any] = {
        "tensor_parallel_degree": mesh.tp,
        "pipeline_parallel_degree": mesh.pp,
        "context_parallel_degree": mesh.cp,
        "expert_parallel_degree": mesh.ep,
        "data_parallel_replicate_degree": mesh.dp if plan.zero_stage == 0 else mesh.dp // mesh.dp_shard,
        "data_parallel_shard_degree": 1 if plan.zero_stage == 0 else mesh.dp_shard,
    }
    if plan.zero_stage == 0 and mesh.dp * mesh.cp == 1:
        found["data_parallel_replicate_degree"] = 1
    if plan.zero_stage == 1 and mesh.pp == 1:
        raise ConfigError(
            f"{NAME} divides parameters and gradients together with the optimizer state, and the plan divides the state alone "
            "(ZeRO 1); plan with --set plan.zero_stage=2 or 3"
        )
    if plan.zero_stage:
        found["fsdp_reshard_after_forward"] = {1: "default", 2: "never", 3: "always"}[plan.zero_stage]
    if mesh.pp > 1:
        schedule = next((name for name, row in SCHEDULES.items() if row == (plan.pipeline_order, plan.chunks)), None)
        if schedule is None:
            raise ConfigError(
                f"{NAME} has no pipeline order {plan.pipeline_order} with {plan.chunks} stage(s) per rank; it has "
                + ", ".join(f"{order} with {chunks}" for order, chunks in SCHEDULES.values())
            )
        found |= {"pipeline_parallel_schedule": schedule, "pipeline_parallel_microbatch_size": mesh.samples}
    return found


def _recompute(wanted: TransformerPlan) -> dict[str, Any]:
    match wanted.recompute:
        case "selective":
            wanted.left_out["plan.recompute"] = "torchtitan also computes every second product again"
            return {"mode": "selective", "selective_ac_option": "op"}
        case "alternate":
            return {"mode": "selective", "selective_ac_option": str(wanted.every)}
    return {"mode": wanted.recompute}
