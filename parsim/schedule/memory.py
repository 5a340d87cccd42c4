"""Peak memory of every rank of a plan."""

from __future__ import annotations

from parsim.costs.memory import RankMemory, rank_memory
from parsim.graph.layout import Layout
from parsim.hardware.cluster import Cluster
from parsim.plan.pipeline import in_flight


def plan_memory(layout: Layout, cluster: Cluster, *, precision: str, optimizer: str) -> tuple[RankMemory, ...]:
    """One RankMemory per rank, in rank order. Ranks of a stage differ only by their device."""
    plan, model = layout.plan, layout.model
    memories = []
    for stage, entry in enumerate(plan.stages):
        components = [model.component(name) for name in entry.components]
        groups, messages = _messages(layout, stage)
        for rank in entry.ranks:
            memories.append(
                rank_memory(
                    rank=rank,
                    components=components,
                    values=model.value,
                    microbatch_samples=plan.microbatch_samples,
                    in_flight=in_flight(plan.pipeline_order, stage, plan.mesh.pp, plan.microbatches),
                    optimizer=optimizer,
                    precision=precision,
                    device=cluster.devices[rank].type,
                    backend=cluster.profile.communication.backend,
                    communicators=groups,
                    largest_message_bytes=max(messages, default=0),
                    loaded_microbatches=plan.microbatches,
                )
            )
    return tuple(memories)


def _messages(layout: Layout, stage: int) -> tuple[int, list[int]]:
    """How many process groups a rank of the stage belongs to, and the sizes of what it sends, receives and reduces."""
    groups: set[tuple[object, ...]] = set()
    sizes = []
    for bucket in layout.buckets:
        if stage in bucket.stages and len(bucket.group) > 1:
            groups.add(("dp", bucket.group))
            sizes.append(bucket.size_bytes)
    for value, targets in layout.remote_stages.items():
        home = layout.stage_of_value[value]
        for target in targets:
            if stage in (home, target):
                groups.add((home, target))
                if layout.model.value[value].differentiable:
                    groups.add((target, home))
                sizes.append(layout.model.value[value].size_bytes(layout.plan.microbatch_samples))
    return len(groups), sizes
