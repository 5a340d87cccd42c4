"""What every launch configuration needs of a plan: its mesh as frameworks count it, and what no framework's file can say."""

from __future__ import annotations

from dataclasses import dataclass

from parsim.errors import ConfigError
from parsim.plans.plan import Plan
from parsim.workflow.exporting.request import ExportRequest

OWN_SCRIPT = "your training script has them"
CUTS = {"pp": "a pipeline", "tp": "tensor shards", "cp": "pieces of the sequence", "ep": "divided experts"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkMesh:
    """The axes of a plan as other frameworks count them.

    Attributes:
        pp, dp, tp, cp, ep: a tp axis on which every component divides its samples is counted among the replicas.
        dp_shard: the replicas of a sharding group.
        samples: of a microbatch on one replica.
    """

    pp: int
    dp: int
    tp: int
    cp: int
    ep: int
    dp_shard: int
    samples: int


def framework_mesh(plan: Plan, format: str) -> FrameworkMesh:
    """The mesh of a plan.

    Args:
        plan: to export. format: for the message.

    Raises:
        ConfigError: the ranks of a replica share fewer samples than they are.
    """
    mesh, samples = plan.mesh, plan.microbatch_samples
    group = mesh.dp_shard or mesh.dp
    if plan.is_mixed or mesh.tp == 1:
        return FrameworkMesh(pp=mesh.pp, dp=mesh.dp, tp=mesh.tp, cp=mesh.cp, ep=mesh.ep, dp_shard=group, samples=samples)
    if samples % mesh.tp:
        raise ConfigError(
            f"{format}: {mesh.tp} ranks share a microbatch of {samples} samples unevenly; plan with mesh = {{ dp = "
            f"{mesh.dp * mesh.tp}, tp = 1 }}"
        )
    return FrameworkMesh(
        pp=mesh.pp,
        dp=mesh.dp * mesh.tp,
        tp=1,
        cp=mesh.cp,
        ep=mesh.ep,
        dp_shard=group * mesh.tp,
        samples=samples // mesh.tp,
    )


def check_synchronous(plan: Plan, format: str) -> None:
    """Raises ConfigError for a plan whose replicas do not come together in every step."""
    if plan.synchronisation.is_relaxed:
        raise ConfigError(
            f"{format} trains synchronously, and the plan synchronises by {plan.synchronisation}; train it with `parsim run`, "
            "or plan without plan.synchronisation"
        )


def check_uncut(plan: Plan, mesh: FrameworkMesh, format: str) -> None:
    """Raises ConfigError unless the plan is data parallelism, with or without ZeRO."""
    for axis, what in CUTS.items():
        if (ways := getattr(mesh, axis)) > 1:
            raise ConfigError(
                f"{format} describes data parallelism and ZeRO, and the plan has {what} ({axis} = {ways}: {plan.summary()}); "
                "export it as megatron or torchtitan, or plan with --set plan.strategy=dp"
            )


def left_out_of_plan(plan: Plan) -> dict[str, str]:
    """Keys of a plan that steer parsim's own program and have no counterpart in any framework's file."""
    found: dict[str, str] = {}
    if plan.blocking_transfers:
        found["plan.blocking_transfers"] = "frameworks overlap transfers between stages with computation where they can"
    if plan.scatter_gather:
        found["plan.scatter_gather"] = "each tensor rank sends values between stages whole"
    if not plan.backward_prefetch:
        found["plan.backward_prefetch"] = "parameters are gathered while the backward before runs, which is faster"
    if plan.tensor_overlap or plan.tensor_backward_overlap:
        found["plan.tensor_overlap"] = "communication of tensor parallelism runs as the framework's own options say"
    if plan.gather_ahead:
        found["plan.gather_ahead"] = "when ZeRO 1 gathers parameters is the framework's choice"
    if plan.offloads:
        found["plan.optimizer_offload, plan.activation_offload"] = "set the framework's own options of offload by hand"
    if plan.context_exchange != "ring":
        found["plan.context_exchange"] = "how keys and values are exchanged is the framework's choice"
    return found


def left_out_of_training(request: ExportRequest, *, clips: bool = True) -> dict[str, str]:
    """Keys of [training] that belong into the user's script.

    Args:
        request: the export. clips: the format has a key for clip_norm.
    """
    training = request.config.training
    found: dict[str, str] = {"model, data and length of the training": OWN_SCRIPT}
    if training.schedule is not None:
        found["training.schedule"] = f"{training.schedule.name} is set in your training script"
    if training.no_weight_decay:
        found["training.no_weight_decay"] = "parameter groups without weight decay are made in your training script"
    if training.groups:
        found["training.groups"] = "parameters with optimizers of their own are grouped in your training script"
    if training.clip_norm is not None and not clips:
        found["training.clip_norm"] = f"clip gradients to {training.clip_norm:g} in your training script"
    if training.dtype != "float32":
        found["training.dtype"] = f"weights in {training.dtype} are made in your training script"
    return found
