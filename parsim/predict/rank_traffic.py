"""What a rank of a plan exchanges with others, and the buffers that this takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from parsim.costs.memory.records import Traffic
from parsim.graph.hops import hop_groups, hop_pairs
from parsim.graph.passes.convert import POINT_TO_POINT_HOPS
from parsim.graph.plan_index import PlanIndex
from parsim.model.component import Value
from parsim.plans.pipeline import in_flight
from parsim.plans.redistribution import LOCAL_HOPS, Hop, ValueLayout, conversion
from parsim.predict.kept_activations import KeptActivations


def local_bytes(layout: PlanIndex, value: Value, how: ValueLayout) -> float:
    """Bytes of one microbatch of a value on a rank that holds any of it.

    Args:
        layout: the plan and its model. value: of the model. how: the layout of the value.
    """
    plan = layout.plan
    return value.bytes_per_sample * plan.microbatch_samples * how.local_share(plan.mesh.tp) + value.fixed_bytes


def rank_traffic(kept: KeptActivations, rank: int, backend: str) -> Traffic:
    """Communicators and buffers of a rank.

    Args:
        kept: values under the plan. rank: global number. backend: that communicates.
    """
    messages = _messages(kept.layout, kept.values, rank)
    arriving, unsure = _arriving_bytes(kept, rank)
    return Traffic(
        backend=backend,
        communicators=len({message.group for message in messages}),
        largest_message_bytes=round(max((message.size_bytes for message in messages), default=0.0)),
        arriving_bytes=arriving,
        unsure_arriving_bytes=unsure,
        posted_bytes=_posted_bytes(kept, rank),
    )


def _arriving_bytes(kept: KeptActivations, rank: int) -> tuple[float, float]:
    """Buffers of transfers to this rank that are not wanted yet; and what can be there beside them.

    A receive is posted as soon as the one before it on its stream has ended. So of values and of gradients the next one is
    posted. More can have arrived, if the other stage is as far ahead as the order allows: in the steady state of 1f1b it is
    not. What is sent to a stage that is behind can still lie here. With chunks the values of all chunks come one after
    another, and so do their gradients.
    """
    plan = kept.layout.plan
    alive = in_flight(plan.pipeline_order, plan.stage_of_rank(rank), plan.mesh.pp, plan.microbatches, plan.chunks)
    values_ahead = max(0, min(2, plan.microbatches * plan.chunks - alive))
    gradients_ahead = min(1, plan.microbatches - 1)
    values, gradients = _crossing(kept, rank)
    leaving = max(_leaving(kept, rank), default=0.0) if plan.microbatches > 1 else 0.0
    gradient = max(gradients, default=0.0)
    if plan.chunks > 1:
        sizes = sorted(values, reverse=True)[:values_ahead]
        return sum(sizes[:1]) + gradient, sum(sizes[1:]) + leaving
    certain = min(1, values_ahead) * sum(values) + gradients_ahead * gradient
    return certain, values_ahead * sum(values) + gradients_ahead * sum(gradients) - certain + leaving


def _posted_bytes(kept: KeptActivations, rank: int) -> float:
    """With one microbatch: room for the first gradient from each stage, which is there from the beginning of the step."""
    if kept.layout.plan.microbatches > 1 or kept.layout.plan.chunks > 1:
        return 0.0
    return max(_crossing(kept, rank)[1], default=0.0)


def _leaving(kept: KeptActivations, rank: int) -> list[float]:
    """Bytes of one microbatch of every value that a rank sends to another stage."""
    layout, plan = kept.layout, kept.layout.plan
    stage, shard = plan.stage_of_rank(rank), plan.shard_of_rank(rank)
    return [
        local_bytes(layout, value, reading.ends.value)
        for value in ((kept.values[name] for name in layout.values_at[stage]) if plan.mesh.pp > 1 else ())
        if layout.stage_of_value[value.name] == stage
        for reading in layout.readings[value.name]
        if reading.stage != stage and shard in reading.ends.value.holders(plan.mesh.tp)
    ]


def _crossing(kept: KeptActivations, rank: int) -> tuple[list[float], list[float]]:
    """Bytes of one microbatch of every value, and of every gradient, that a rank receives from another stage."""
    layout, plan = kept.layout, kept.layout.plan
    stage, shard = plan.stage_of_rank(rank), plan.shard_of_rank(rank)
    values: list[float] = []
    gradients: list[float] = []
    for value in (kept.values[name] for name in layout.values_at[stage]) if plan.mesh.pp > 1 else ():
        home = layout.stage_of_value[value.name]
        for reading in layout.readings[value.name]:
            if home is None or home == reading.stage:
                continue
            if reading.stage == stage and shard in reading.ends.value.holders(plan.mesh.tp):
                values.append(local_bytes(layout, value, reading.ends.value))
            if home == stage and value.differentiable and shard in reading.ends.gradient.holders(plan.mesh.tp):
                gradients.append(local_bytes(layout, value, reading.ends.gradient))
    return values, gradients


# --- messages ---------------------------------------------------------------------------------------------------------


class _Message(NamedTuple):
    """What a rank sends, receives or reduces, and the process group it does it in."""

    group: tuple[object, ...]
    size_bytes: float


def _messages(layout: PlanIndex, values: Mapping[str, Value], rank: int) -> list[_Message]:
    """Every kind of message of one step: gradient buckets, conversions, transfers between stages."""
    plan = layout.plan
    stage, shard = plan.stage_of_rank(rank), plan.shard_of_rank(rank)
    found = [
        _Message(("dp", bucket.group), bucket.padded_bytes if layout.is_divided(bucket) else bucket.size_bytes)
        for bucket in layout.rank_buckets(rank)
        if len(bucket.group) > 1
    ]
    for value in (values[name] for name in layout.values_at[stage]):
        home = layout.stage_of_value[value.name]
        if home is None:
            continue
        for reading in layout.readings[value.name]:
            ways = [(home, reading.stage, layout.source[value.name].value, reading.ends.value, reading.ends.value)]
            if value.differentiable:
                ends = (reading.ends.gradient, layout.source[value.name].gradient)
                ways.append((reading.stage, home, *ends, reading.ends.gradient))
            for source, target, begin, end, moved in ways:
                if source != target and stage in (source, target) and shard in moved.holders(plan.mesh.tp):
                    found.append(_Message((source, target), local_bytes(layout, value, moved)))
                if stage == home:
                    for hop in conversion(begin, end, plan.mesh.tp):
                        found += _hop_messages(layout, value, hop, shard)
    return found


def _hop_messages(layout: PlanIndex, value: Value, hop: Hop, shard: int) -> list[_Message]:
    tp = layout.plan.mesh.tp
    if hop.operation in LOCAL_HOPS:
        return []
    size_bytes = max(local_bytes(layout, value, hop.source), local_bytes(layout, value, hop.target))
    if hop.operation in POINT_TO_POINT_HOPS:
        pairs = [tuple(sorted(pair)) for pair in hop_pairs(hop, tp) if shard in pair]
        return [_Message(("tp", pair), size_bytes / (1 if hop.operation == "move" else tp)) for pair in pairs]
    return [_Message(("tp", group), size_bytes) for group in hop_groups(hop, tp) if shard in group]
