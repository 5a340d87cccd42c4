"""What a plan makes use of: by these its kind is counted, so that a check over drawn plans cannot pass over one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from experiments.executor.drawing import DrawnPlan
from experiments.executor.models import SUBJECTS
from parsim.plans.pipeline import PIPELINE_ORDERS
from parsim.plans.plan import ZERO_STAGES
from parsim.program.placed import PlanIndex

ORDERS = tuple(f"order {name}" for name in PIPELINE_ORDERS)
ZERO = tuple(f"zero {stage}" for stage in ZERO_STAGES)
PLACEMENTS = ("batch-sharded", "sharded", "replicated", "placed on one rank")
FEATURES = (
    *ORDERS,
    *ZERO,
    *PLACEMENTS,
    "axis dp",
    "axis tp",
    "axis pp",
    "placements mixed in a stage",
    "uneven stages",
    "several stages per rank",
    "several microbatches",
    "several buckets",
    "idle devices",
    "recomputed: none",
    "recomputed: whole",
    "recomputed: by operator",
    "recomputed: some components",
    "recomputed to fit",
    "gradients clipped",
    "adam",
    "adamw",
    "sgd_momentum",
    "two axes or more",
    "shards in groups",
)
"""What is counted; the last two take four processes."""


def features_of(drawn: DrawnPlan) -> list[str]:
    """Those of FEATURES that a plan has.

    Args:
        drawn: with its model's name and granularity.
    """
    plan, layout = drawn.plan, PlanIndex(drawn.plan, SUBJECTS[drawn.subject].model(drawn.granularity))
    placed = [[placement for _, placement in stage.placed()] for stage in plan.stages]
    every = [placement for stage in placed for placement in stage]
    kinds = {placement.kind for placement in every} if plan.mesh.tp > 1 else set()
    sizes = {len(stage.components) for stage in plan.stages}
    whole, some = plan.recomputed, {name for name in plan.recomputed_by_operator if layout.recomputes_by_operator(name)}
    axes = {name for name in ("dp", "tp", "pp") if getattr(plan.mesh, name) > 1}
    divided = [bucket for bucket in layout.buckets if len(bucket.group) > 1]
    stages = {layout.zero_stage_of(bucket) if plan.zero_stage else 0 for bucket in divided} or {0}
    has = {
        f"order {plan.pipeline_order}": plan.mesh.pp > 1,
        **{f"zero {stage}": True for stage in stages},
        **{name: kind in kinds for name, kind in zip(PLACEMENTS, ("batch", "shard", "replicate", "place"), strict=True)},
        **{f"axis {name}": True for name in axes},
        "two axes or more": len(axes) > 1,
        "placements mixed in a stage": plan.mesh.tp > 1 and any(len(set(stage)) > 1 for stage in placed),
        "shards in groups": any(placement.kind == "shard" and placement.ways < plan.mesh.tp for placement in every),
        "uneven stages": len(sizes) > 1,
        "several stages per rank": plan.chunks > 1,
        "several microbatches": plan.microbatches > 1,
        "several buckets": any(sum(rank in bucket.group for bucket in divided) > 1 for rank in range(plan.world_size)),
        "idle devices": plan.world_size < drawn.processes,
        "recomputed: none": not whole and not some,
        "recomputed: whole": bool(whole),
        "recomputed: by operator": bool(some),
        "recomputed: some components": isinstance(plan.recompute, tuple),
        "recomputed to fit": drawn.tight and bool(whole or some),
        "gradients clipped": plan.clip_gradients,
        drawn.optimizer: True,
    }
    return [name for name in FEATURES if has.get(name)]


def counted(plans: Iterable[DrawnPlan]) -> dict[str, int]:
    """How many of the plans have each feature, in the order of FEATURES."""
    found = Counter(name for drawn in plans for name in features_of(drawn))
    return {name: found[name] for name in FEATURES}
