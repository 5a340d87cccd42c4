"""Bytes that a plan keeps in the host's memory, and what stays of them on a device for a while.

Of what a component is counted to save, values that another component needs too are copied with the last one that does
(`parsim.plans.host.offload`). While one component computes, a device holds what that one saves, what the one before it saved
and is still being copied away, and what is being fetched for the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from parsim.costs.memory.rank_memory import optimizer_bytes
from parsim.costs.memory.records import RankMemory
from parsim.graph.passes.gradients import updates_of
from parsim.graph.passes.offload import ComponentUses, groups_of
from parsim.graph.passes.unsharded import uses_of
from parsim.graph.plan_index import PlanIndex
from parsim.hardware.cluster import Cluster
from parsim.model.component import Component
from parsim.plans.pipeline import pipeline_actions
from parsim.predict.kept_activations import KeptActivations
from parsim.work import Phase

BUFFERS = "offload_buffers"
"""The line of activations that are on a device while they are copied, or while a component uses them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offloaded:
    """Bytes of one microbatch on a rank that runs the components.

    Attributes:
        copied: by component, what is copied behind its forward and fetched before its backward.
        away: by component, how much of what it is counted to save lies in the host's memory.
        spans: (first, last, bytes) of values that the components from `first` to `last` save: fetched for the last one's
            backward, they stay until the first one's has ended.
    """

    copied: Mapping[str, int]
    away: Mapping[str, int]
    spans: tuple[tuple[str, str, int], ...] = ()


NOTHING = Offloaded(copied={}, away={})


def offloaded_by(kept: KeptActivations) -> Offloaded:
    """What the plan of an index copies to the host.

    Args:
        kept: its activations, under the precision.
    """
    layout, chosen = kept.layout, kept.layout.plan.offloaded & kept.layout.differentiable
    order = layout.model.component_index
    copied, away, spans = dict[str, int](), dict[str, int](), list[tuple[str, str, int]]()
    for name in sorted(chosen, key=order.__getitem__):
        left, later = saved_bytes(kept, name), list[tuple[str, int]]()
        for value, size in kept.counted_values(name):
            together = [other for other in kept.values[value].savers or () if layout.chunk_of[other] == layout.chunk_of[name]]
            last = max(together, key=order.__getitem__)
            if kept.values[value].producer is None or not chosen.issuperset(together):
                left -= size
            elif last != name:
                later.append((last, size))
        away[name] = max(0, left)
        for last, size in later:  # values that share storage are no more than what the component saves
            moved = max(0, min(size, left))
            left -= moved
            copied[last] = copied.get(last, 0) + moved
            spans.append((name, last, moved))
        copied[name] = copied.get(name, 0) + max(0, left)
    return Offloaded(copied=copied, away=away, spans=tuple(spans))


def saved_bytes(kept: KeptActivations, name: str) -> int:
    """What a component is counted to save of one microbatch."""
    own = kept.component(name)
    return own.saved_activation_bytes * kept.layout.local_samples(name) + own.saved_fixed_bytes


def with_offloaded(layout: PlanIndex, precision: str) -> PlanIndex:
    """The index that says how much each component copies to the host; the same one where nothing does.

    Args:
        layout: of a plan. precision: that decides how wide activations are.
    """
    if not layout.plan.activation_offload:
        return layout
    return replace(layout, offloaded=offloaded_by(KeptActivations(layout, precision)).copied)


def on_device(component: Component, samples: int, away: int) -> Component:
    """The component without what lies in the host's memory.

    Args:
        component: of one rank. samples: that it sees. away: bytes of one microbatch.
    """
    if not away:
        return component
    saved = component.saved_activation_bytes * samples + component.saved_fixed_bytes
    return replace(component, saved_activation_bytes=0, saved_fixed_bytes=max(0, saved - away))


def with_offload_lines(
    memory: RankMemory, kept: KeptActivations, found: Offloaded, *, optimizer: str, master_weights: bool, ema: bool
) -> RankMemory:
    """The memory of a rank with the line of what is in flight, and with its lines in the host's memory.

    Args:
        memory: of the rank, without what is offloaded. kept: activations under the plan. found: what of them is offloaded.
        optimizer, master_weights, ema: as `plan_memory` takes them.
    """
    layout, plan = kept.layout, kept.layout.plan
    lines, host = memory.lines, list[tuple[str, int]]()
    if plan.optimizer_offload:
        state = 0
        for step in updates_of(layout, memory.rank):
            name = step.optimizer or optimizer
            each = optimizer_bytes(name, kept.precision, master_weights=master_weights, ema=ema)[0]
            state += each * step.elements
        buckets = layout.rank_buckets(memory.rank)
        copies = sum(layout.updated_bytes(bucket.family, len(bucket.group)) for bucket in buckets)
        host += [("optimizer_state", state), ("gradients", copies), ("parameters", copies)]
    if plan.activation_offload:
        shard = plan.shard_of_rank(memory.rank)
        blocks = _blocks(layout, plan.stage_of_rank(memory.rank), shard)
        lines = (*lines, (BUFFERS, _most_in_flight(blocks, found, layout.model.component_index)))
        host.append(("activations", _most_away(blocks, found.copied)))
    return replace(memory, lines=lines, host_lines=tuple(host))


def _blocks(layout: PlanIndex, place: int, shard: int) -> list[tuple[ComponentUses, ...]]:
    """The computation of a tp rank of a place, action by action, those without any left out. Actions of one stage and phase
    share one tuple, which has the microbatch of the first."""
    plan, known = layout.plan, dict[tuple[int, Phase], tuple[ComponentUses, ...]]()
    actions = pipeline_actions(plan.pipeline_order, place, plan.mesh.pp, plan.microbatches, plan.chunks)
    for action in actions:
        if (action.stage, action.phase) not in known:
            uses = (use for use in uses_of(layout, place, [action]) if layout.placement[use.component].runs_on(shard))
            known[action.stage, action.phase] = tuple(groups_of(list(uses)))
    return [groups for action in actions if (groups := known[action.stage, action.phase])]


def _most_in_flight(blocks: Sequence[tuple[ComponentUses, ...]], found: Offloaded, order: Mapping[str, int]) -> int:
    """Bytes on the device while some component computes: its own, those that are leaving, and those that are being fetched.

    Only what computes right before and after a component counts, so every sequence of three blocks is looked at once.
    """
    beside = {
        name: sum(size for first, last, size in found.spans if order[first] <= number < order[last])
        for name, number in order.items()
    }
    most = 0
    unlike = {tuple(map(id, three)): three for three in zip(((), *blocks), blocks, (*blocks[1:], ()), strict=False)}
    for before, block, after in unlike.values():
        groups = (*before[-1:], *block, *after[:1])
        sizes = [found.copied.get(group.component, 0) for group in groups]
        for number in range(len(before[-1:]), len(before[-1:]) + len(block)):
            here = sizes[number] + beside[groups[number].component]
            if number and groups[number - 1].forward:
                here += sizes[number - 1]
            if number + 1 < len(groups) and not groups[number + 1].forward:
                here += sizes[number + 1]
            most = max(most, here)
    return most


def _most_away(blocks: Sequence[tuple[ComponentUses, ...]], copied: Mapping[str, int]) -> int:
    """Bytes in the host's memory from the forward to the backward, when most are."""
    changes = {id(block): _change(block, copied) for block in {id(block): block for block in blocks}.values()}
    most = now = 0
    for block in blocks:
        within, after = changes[id(block)]
        most = max(most, now + within)
        now += after
    return most


def _change(block: Sequence[ComponentUses], copied: Mapping[str, int]) -> tuple[int, int]:
    """By how much a block exceeds what was in the host's memory before it at most, and afterwards."""
    most = now = 0
    for group in block:
        size = copied.get(group.component, 0)
        now += size if group.forward else 0
        most = max(most, now)
        now -= 0 if group.forward else size
    return most, now


def with_host_limits(
    first: Sequence[RankMemory], every: Sequence[RankMemory], layout: PlanIndex, cluster: Cluster
) -> list[RankMemory]:
    """The memory of ranks with what each may hold of its node's memory, beside the node's other ranks.

    Args:
        first: of ranks that hold as much as one another the first. every: of all ranks. layout: of the plan.
        cluster: devices by rank, and the host's memory, where it is known.
    """
    host = cluster.profile.host_memory
    if host is None or host.memory_bytes is None or not layout.plan.offloads:
        return list(first)
    held: dict[int, int] = {}
    for memory in every:
        node = cluster.devices[memory.rank].node
        held[node] = held.get(node, 0) + memory.host_bytes
    fullest: dict[int, int] = {}  # by lines that ranks have in common, of the fullest node with such a rank
    for memory in every:
        key = id(memory.lines)
        fullest[key] = max(fullest.get(key, 0), held[cluster.devices[memory.rank].node])
    return [
        replace(memory, host_limit_bytes=max(0, int(host.memory_bytes) - fullest[id(memory.lines)] + memory.host_bytes))
        for memory in first
    ]
