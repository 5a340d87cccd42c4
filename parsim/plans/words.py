"""A plan in words, as people call it; `Plan.summary` is its exact short form."""

from __future__ import annotations

from parsim.plans.plan import Plan


def plan_in_words(plan: Plan) -> str:
    """`2 pipeline stages of 4-way data parallelism with ZeRO 3, 8 microbatches of 32`.

    Args:
        plan: of any mesh and placements. Bucket sizes, pipeline order and single placements are left out.
    """
    pp, dp, tp = plan.mesh.pp, plan.mesh.dp, plan.mesh.tp
    axes = [f"{dp}-way data parallelism"] if dp > 1 else []
    if tp > 1:
        axes.append(f"mixed placements on {tp} ranks" if _is_mixed(plan) else f"{tp}-way tensor parallelism")
    if plan.mesh.cp > 1:
        axes.append(f"{plan.mesh.cp}-way context parallelism")
    if plan.mesh.ep > 1:
        axes.append(f"{plan.mesh.ep}-way expert parallelism")
    words = " x ".join(axes)
    if pp > 1:
        words = f"{pp} pipeline stages of {words}" if words else f"{pp} pipeline stages"
    words = words or "one device"
    if plan.zero_stage:
        words += f" with ZeRO {plan.zero_stage}"
        words += f" within groups of {plan.mesh.dp_shard}" if plan.mesh.dp_shard else ""
    if plan.microbatches > 1:
        words += f", {plan.microbatches} microbatches of {plan.microbatch_samples}"
    if plan.recomputed:
        words += ", recomputing activations"
    elif plan.recomputes:
        words += ", recomputing some activations"
    if plan.optimizer_offload:
        words += ", the optimizer on the host"
    if plan.activation_offload:
        words += f", {'' if plan.activation_offload is True else 'some '}activations in the host's memory"
    if plan.synchronisation.is_relaxed:
        words += f", {synchronisation_in_words(plan)}"
    return words


def synchronisation_in_words(plan: Plan) -> str:
    """`averaging weights every 8 steps with an outer nesterov optimizer`; "" for synchronous training.

    Args:
        plan: of any synchronisation.
    """
    rule = plan.synchronisation
    every = "after every step" if rule.period_steps == 1 else f"every {rule.period_steps} steps"
    match rule.kind:
        case "average":
            words = f"averaging weights {every}"
            if rule.participation < 1:
                words += f" over {rule.participation:.0%} of the replicas"
            return words + (f" with an outer {rule.outer_optimizer} optimizer" if rule.outer is not None else "")
        case "gossip":
            return f"mixing weights with neighbours ({rule.graph or 'given weights'}) {every}"
        case "merge":
            return f"merging weights one after another ({rule.merge}) {every}"
        case "stale":
            late = [rule.delay_of(stage, plan.mesh.pp) for stage in range(plan.mesh.pp)]
            return f"with gradients up to {max(late)} steps late and no stage waiting for another"
    return ""


def _is_mixed(plan: Plan) -> bool:
    """Whether some components are cut by features and others by samples, or one runs on a single rank."""
    kinds = {placement.kind for stage in plan.stages for _, placement in stage.placed()}
    return "place" in kinds or {"batch", "shard"} <= kinds
