"""What a rank of a plan exchanges with others, and the buffers that this takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from parsim.costs.memory.records import Traffic
from parsim.graph.hops import hop_groups, hop_pairs
from parsim.graph.passes.convert import POINT_TO_POINT_HOPS
from parsim.graph.passes.replica_sums import replica_sum_work
from parsim.graph.plan_index import PlanIndex
from parsim.graph.stage_links import Message, messages
from parsim.model.component import Value
from parsim.plans.redistribution import LOCAL_HOPS, Hop, ValueLayout, conversion
from parsim.plans.stage_transfers import StageLink
from parsim.predict.kept_activations import VIEWS, KeptActivations


def local_bytes(layout: PlanIndex, value: Value, how: ValueLayout) -> float:
    """Bytes of one microbatch of a value on a rank that holds any of it.

    Args:
        layout: the plan and its model. value: of the model. how: the layout of the value.
    """
    return value.bytes_per_sample * layout.microbatch_samples * layout.local_share(how) + value.fixed_bytes


def rank_traffic(kept: KeptActivations, rank: int, backend: str) -> Traffic:
    """Communicators and buffers of a rank.

    Args:
        kept: values under the plan. rank: global number. backend: that communicates.
    """
    sent = _messages(kept.layout, kept.values, rank)
    return Traffic(
        backend=backend,
        communicators=len({message.group for message in sent}),
        largest_message_bytes=round(max((message.size_bytes for message in sent), default=0.0)),
        posted_bytes=_posted_bytes(kept, rank),
    )


def _posted_bytes(kept: KeptActivations, rank: int) -> float:
    """Of stages that are not synchronised: room for the gradient of a step, from its beginning."""
    plan = kept.layout.plan
    if plan.synchronisation.kind != "stale":
        return 0.0
    place = plan.stage_of_rank(rank)
    found = messages_by_link(kept, rank).items()
    return sum(size for link, size in found if link.source > link.target and plan.stage_places[link.target] == place)


def next_step_bytes(kept: KeptActivations, rank: int) -> float:
    """Of decoupled stages: room for what arrives during a step and is read in the next one.

    Args:
        kept: values under the plan. rank: global number.
    """
    plan = kept.layout.plan
    place = plan.stage_of_rank(rank)
    return sum(size for link, size in messages_by_link(kept, rank).items() if plan.stage_places[link.target] == place)


def messages_by_link(kept: KeptActivations, rank: int) -> dict[StageLink, float]:
    """Bytes of one microbatch on every link that begins or ends on a rank, as they count there.

    A value that is sent as it is kept for a backward here takes no memory of its own.

    Args:
        kept: values under the plan. rank: global number.
    """
    layout, plan = kept.layout, kept.layout.plan
    place = plan.stage_of_rank(rank)
    found: dict[StageLink, float] = {}
    for message in messages(layout, layout.values_at[place], plan.shard_of_rank(rank)):
        if place in (plan.stage_places[message.link.source], plan.stage_places[message.link.target]):
            found[message.link] = found.get(message.link, 0.0) + _message_bytes(kept, rank, message)
    return found


def _message_bytes(kept: KeptActivations, rank: int, message: Message) -> float:
    layout, (link, name, reading) = kept.layout, message
    if link.source > link.target:
        return local_bytes(layout, kept.values[name], reading.ends.gradient)
    value, how = kept.values[name], reading.ends.value
    sends = layout.plan.stage_places[link.source] == layout.plan.stage_of_rank(rank)
    return 0.0 if sends and _is_kept(layout, value, how, rank) else local_bytes(layout, value, how)


def made_before(kept: KeptActivations, rank: int, names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """By component of a rank the bytes that its action has made for other stages before it: in a forward, in a backward.

    What a component here still reads is left out: it waits for that one.

    Args:
        kept: values under the plan. rank: global number. names: components of the rank, in order.
    """
    layout, plan = kept.layout, kept.layout.plan
    number = {name: count for count, name in enumerate(names)}
    place = plan.stage_of_rank(rank)
    forward, backward = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    for message in messages(layout, layout.values_at[place], plan.shard_of_rank(rank)):
        if plan.stage_places[message.link.source] != place:
            continue
        size = _message_bytes(kept, rank, message)
        if message.link.source < message.link.target:
            users = (layout.model.value[message.value].producer, *layout.consumers[message.value])
            last = max((number[name] for name in users if name in number), default=len(names))
            later, found = [name for name in names if number[name] > last], forward
        else:
            first = min((number[name] for name in message.reading.components if name in number), default=0)
            later, found = [name for name in names if number[name] < first], backward
        for name in later:
            if layout.chunk_of[name] == message.link.source:
                found[name] += size
    return {name: (forward[name], backward[name]) for name in names}


def _is_kept(layout: PlanIndex, value: Value, how: ValueLayout, rank: int) -> bool:
    """Whether a value lies here, in the layout in which it is sent, until the backward of its microbatch."""
    made = layout.source[value.name].value
    if any(hop.operation not in VIEWS for hop in conversion(made, how, layout.plan.mesh.tp)):
        return False
    return value.savers is None or any(layout.runs_on(rank, name) for name in value.savers)


# --- messages ---------------------------------------------------------------------------------------------------------


class _Message(NamedTuple):
    """What a rank sends, receives or reduces, and the process group it does it in."""

    group: tuple[object, ...]
    size_bytes: float


def _messages(layout: PlanIndex, values: Mapping[str, Value], rank: int) -> list[_Message]:
    """Every kind of message of one step: gradient buckets, conversions, transfers between stages.

    Of buckets of the same ranks the largest, and values that are as large and laid out alike count once.
    """
    plan = layout.plan
    stage, shard = plan.stage_of_rank(rank), plan.shard_of_rank(rank)
    found = _bucket_messages(layout, rank)
    seen: set[object] = set()
    for value in (values[name] for name in layout.values_at[stage]):
        home = layout.stage_of_value[value.name]
        if home is None:
            continue
        made, readings = layout.source[value.name], layout.readings[value.name]
        size = value.bytes_per_sample, value.fixed_bytes, value.differentiable
        alike = (home, made, size, tuple([(reading.stage, reading.ends) for reading in readings]))
        if alike in seen:
            continue
        seen.add(alike)
        for reading in readings:
            ways = [(home, reading.stage, made.value, reading.ends.value, reading.ends.value)]
            if value.differentiable:
                ways.append((reading.stage, home, reading.ends.gradient, made.gradient, reading.ends.gradient))
            for source, target, begin, end, moved in ways:
                if source != target and stage in (source, target) and shard in moved.holders(plan.mesh.tp):
                    found.append(_Message((source, target), local_bytes(layout, value, moved)))
                if stage == home:
                    for hop in conversion(begin, end, plan.mesh.tp):
                        found += _hop_messages(layout, value, hop, shard)
    return found


def _bucket_messages(layout: PlanIndex, rank: int) -> list[_Message]:
    """The largest gradient bucket of every group of ranks, and the largest part that sharding groups sum."""
    largest: dict[int, _Message] = {}
    for bucket in layout.rank_buckets(rank):
        size = bucket.padded_bytes if layout.is_divided(bucket) else bucket.size_bytes
        group = id(bucket.group)  # buckets of the same ranks share one tuple
        if len(bucket.group) > 1 and (group not in largest or size > largest[group].size_bytes):
            largest[group] = _Message(("dp", bucket.group), size)
        if (work := replica_sum_work(layout, bucket, rank)) is not None:
            known = largest.get(key := -1 - group)
            if known is None or work.size_bytes > known.size_bytes:
                largest[key] = _Message(("dp", work.group), work.size_bytes)
    return list(largest.values())


def _hop_messages(layout: PlanIndex, value: Value, hop: Hop, shard: int) -> list[_Message]:
    tp = layout.plan.mesh.tp
    if hop.operation in LOCAL_HOPS:
        return []
    size_bytes = max(local_bytes(layout, value, hop.source), local_bytes(layout, value, hop.target))
    if hop.operation in POINT_TO_POINT_HOPS:
        pairs = [tuple(sorted(pair)) for pair in hop_pairs(hop, tp) if shard in pair]
        return [_Message(("tp", pair), size_bytes / (1 if hop.operation == "move" else tp)) for pair in pairs]
    return [_Message(("tp", group), size_bytes) for group in hop_groups(hop, tp) if shard in group]
