"""Peak memory of every rank of a plan.

Where components are placed differently, a value lies on a rank in the layout in which it was made there and in those in
which it is read there. Beyond the saved activations, every copy counts that some component keeps for its backward. The
copy of the first component that saves a value is the exception: it is among its saved activations. Values that only pass
through do not count.

Leaves out: conversions of earlier values that are under way while a later component computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from parsim.costs.memory.chunks import Chunks
from parsim.costs.memory.rank_memory import rank_memory
from parsim.costs.memory.records import Boundary, RankMemory, RankStep, Weights
from parsim.costs.memory.verdict import FIT_PROBABILITY
from parsim.costs.memory.waiting import Wait, waiting_bytes
from parsim.graph.parameter_buckets import Bucket
from parsim.graph.passes.gradients import updates_of
from parsim.graph.placed_model import Reading
from parsim.graph.plan_index import PlanIndex
from parsim.graph.stage_links import pipeline_of
from parsim.hardware.cluster import Cluster
from parsim.model.component import Value
from parsim.plans.held import held_moments, links_of
from parsim.plans.pipeline import PIPELINE_ORDERS, in_flight
from parsim.plans.redistribution import ValueLayout, conversion
from parsim.predict.boundary.alike import AlikeOnRank, CountedKinds
from parsim.predict.boundary.conversions import (
    bytes_here,
    converted_for_others,
    gradient_bytes,
    handed_bytes,
    storage_of,
)
from parsim.predict.boundary.waiting import between_chunks, waiting_gradients, waiting_values
from parsim.predict.host.offloaded import NOTHING, offloaded_by, on_device, with_host_limits, with_offload_lines
from parsim.predict.kept_activations import KeptActivations
from parsim.predict.rank_traffic import local_bytes, made_before, messages_by_link, rank_traffic
from parsim.predict.round_memory import Scored, batches_held, with_evaluation_line, with_relaxed_lines
from parsim.predict.unsharded_memory import unsharded_bytes


def plan_memory(
    layout: PlanIndex,
    cluster: Cluster,
    *,
    precision: str,
    optimizer: str,
    master_weights: bool = True,
    ema: bool = False,
    scored: Scored = "",
    fit_probability: float = FIT_PROBABILITY,
) -> tuple[RankMemory, ...]:
    """Peak memory of every rank of a plan.

    Ranks at one place of different replicas differ only by their device. So do tp ranks of a stage if no component is placed
    on one of them.

    Args:
        layout: the plan and its model. cluster: devices by rank.
        precision, optimizer, master_weights: as in RUN.toml. ema: whether averages of the weights are kept.
        scored: what is validated between steps. fit_probability: with which a rank must fit.

    Returns:
        One RankMemory per rank, in rank order, bytes. Leaves out conversions of earlier values while a later component
        computes.

    Raises:
        ConfigError: an unknown optimizer.
    """
    first = unlike_memory(
        layout,
        cluster,
        precision=precision,
        optimizer=optimizer,
        master_weights=master_weights,
        ema=ema,
        scored=scored,
        fit_probability=fit_probability,
    )
    return of_every_rank(layout, cluster, first)


def of_every_rank(layout: PlanIndex, cluster: Cluster, first: Sequence[RankMemory]) -> tuple[RankMemory, ...]:
    """The memory of all ranks of a plan.

    Args:
        layout: the plan and its model. cluster: devices by rank. first: `unlike_memory`.
    """
    mesh, own, known = layout.plan.mesh, {entry.rank: entry for entry in first}, dict[tuple[int, int, str], RankMemory]()
    shards = 1 if layout.shards_alike else mesh.tp
    memories = []
    for place in range(mesh.pp):
        for rank in mesh.stage_range(place):
            kind = place, rank % shards, cluster.devices[rank].type.name
            if rank in own:
                known[kind] = own[rank]
            memories.append(known[kind].of_rank(rank))
    return tuple(memories)


def unlike_memory(
    layout: PlanIndex,
    cluster: Cluster,
    *,
    precision: str,
    optimizer: str,
    master_weights: bool = True,
    ema: bool = False,
    scored: Scored = "",
    fit_probability: float = FIT_PROBABILITY,
) -> tuple[RankMemory, ...]:
    """Of ranks that hold as much as one another that of the first, as `plan_memory` takes and gives it; in rank order."""
    plan, kept = layout.plan, KeptActivations(layout, precision)
    counted = CountedKinds(layout, kept.values)
    offloaded = offloaded_by(kept) if plan.activation_offload else NOTHING
    found = []
    for rank in (rank for place in range(plan.mesh.pp) for rank in _unlike_ranks(layout, cluster, place)):
        device, names, place = cluster.devices[rank].type, layout.rank_components(rank), plan.stage_of_rank(rank)
        alike = counted.on(rank)
        gradients = waiting_gradients(layout, kept.values, rank, alike)
        weights = rank_weights(layout, rank)
        step = RankStep(
            components=[
                on_device(kept.component(name), layout.local_samples(name), offloaded.away.get(name, 0)) for name in names
            ],
            values=kept.values,
            gradients=gradients,
            microbatch_samples={name: layout.local_samples(name) for name in names}
            if plan.is_mixed
            else plan.microbatch_samples // plan.mesh.tp,
            in_flight=batches_held(layout, place)
            if plan.synchronisation.kind == "stale"
            else in_flight(plan.pipeline_order, place, plan.mesh.pp, plan.microbatches, plan.chunks),
            pipeline=rank_chunks(kept, rank, names),
            loaded_microbatches=plan.microbatches,
            boundary=rank_boundary(layout, kept.values, rank, gradients, alike) if plan.is_mixed else None,
            weights=replace(weights, updates=()) if plan.optimizer_offload else weights,
            recomputed={name: kept.again(name) for name in names if layout.recomputes(name)},
        )
        memory = rank_memory(
            rank,
            step,
            device,
            optimizer=optimizer,
            precision=precision,
            master_weights=master_weights,
            ema=ema,
            traffic=rank_traffic(kept, rank, cluster.profile.communication.backend),
        )
        if plan.offloads:
            memory = with_offload_lines(memory, kept, offloaded, optimizer=optimizer, master_weights=master_weights, ema=ema)
        found.append(replace(memory, wanted_probability=fit_probability))
    if plan.offloads:
        found = with_host_limits(found, of_every_rank(layout, cluster, found), layout, cluster)
    if plan.synchronisation.is_relaxed:
        found = [with_relaxed_lines(own, kept, own.rank) for own in of_every_rank(layout, cluster, found)]
    return tuple(with_evaluation_line(own, kept, scored) for own in found)


def _unlike_ranks(layout: PlanIndex, cluster: Cluster, place: int) -> list[int]:
    """At a place on the pp axis the first rank of each kind of device; of each tp shard, where some components are on one."""
    ranks, tp = layout.plan.mesh.stage_range(place), layout.plan.mesh.tp
    shards = 1 if layout.shards_alike else tp
    return sorted({(rank % shards, cluster.devices[rank].type.name): rank for rank in reversed(ranks)}.values())


def rank_chunks(kept: KeptActivations, rank: int, names: Sequence[str]) -> Chunks | None:
    """What a rank of a pipeline holds at every action; None without a pipeline, and for stages that are not synchronised.

    Args:
        kept: values under the plan. rank: global number. names: components of the rank, in order.
    """
    layout, plan = kept.layout, kept.layout.plan
    if plan.synchronisation.kind == "stale":
        return None
    if plan.mesh.pp == plan.chunks == 1 and not PIPELINE_ORDERS[plan.pipeline_order].halves:
        return None
    place = plan.stage_of_rank(rank)
    chunk_of = {stage: chunk for chunk, stage in enumerate(plan.place_stages(place))}
    pipeline = pipeline_of(layout, plan.shard_of_rank(rank), place)
    inward, outward = links_of(pipeline, place)
    sizes, own = messages_by_link(kept, rank), between_chunks(kept, rank)
    return Chunks(
        chunk_of={name: chunk_of[layout.chunk_of[name]] for name in names},
        moments=held_moments(pipeline, place, apart=plan.zero_stage >= 2, own=tuple(own)),
        halved=frozenset(name for name in names if layout.is_halved(name)),
        for_weights=frozenset(name for name in names if not layout.wants_input_gradient(name)),
        arriving_bytes=[sizes[link] for link in inward],
        leaving_bytes=[sizes[link] for link in outward],
        between_bytes=list(own.values()),
        made_before=made_before(kept, rank, names),
    )


def rank_weights(layout: PlanIndex, rank: int) -> Weights:
    """Bytes of parameters and gradients on a rank.

    With ZeRO they lie in buckets padded to equal parts. This rank updates one part (stage 1), keeps only the gradients of
    that part (stage 2), and only its parameters (stage 3). Frozen parameters are in no bucket: every rank that uses one
    holds it whole, under ZeRO 3 too.

    Args:
        layout: the plan and its model. rank: global number.
    """
    stages = [(bucket, layout.zero_stage_of(bucket)) for bucket in layout.rank_buckets(rank)]
    frozen = 0
    if layout.has_frozen:
        frozen = sum(parameter.size_bytes for parameter in layout.rank_parameters(rank) if not parameter.trainable)
    return Weights(
        parameter_bytes=frozen + sum(_held_of(bucket, whole=stage < 3, padded=stage >= 1) for bucket, stage in stages),
        gradient_bytes=sum(_held_of(bucket, whole=stage < 2, padded=stage >= 1) for bucket, stage in stages),
        updates=updates_of(layout, rank),
        unsharded=unsharded_bytes(layout, rank),
    )


def _held_of(bucket: Bucket, *, whole: bool, padded: bool) -> int:
    if whole:
        return bucket.padded_bytes if padded else bucket.size_bytes
    return bucket.padded_bytes // len(bucket.group)


# --- values -----------------------------------------------------------------------------------------------------------


def rank_boundary(
    layout: PlanIndex,
    values: Mapping[str, Value],
    rank: int,
    gradients: Mapping[str, Sequence[Wait]] | None = None,
    alike: AlikeOnRank | None = None,
) -> Boundary:
    """Bytes of the values that a rank makes or reads, in all layouts in which it does.

    Args:
        layout: the plan and its model. values: by name, as kept under the plan. rank: global number.
        gradients: `waiting_gradients` of the rank, where they are known already.
        alike: what was counted already on the ranks of this plan; None: nothing.
    """
    alike = alike or CountedKinds(layout, values).on(rank)
    loaded_of: dict[str, tuple[float, float]] = {}
    held: dict[str, float] = {}
    batch = ValueLayout("full", layout.batch_ways(rank))
    for name, layouts in layout.batch_layouts(rank).items():
        value = values[name]
        loaded, saved = local_bytes(layout, value, batch), 0.0
        counted = value.saved if value.savers is None else any(layout.runs_on(rank, first) for first in value.savers[:1])
        if value.savers == ():
            saved = loaded
        elif counted and all(entry.form != "shard" for entry in layouts):  # pieces of a dim are copies
            saved = min(local_bytes(layout, value, entry) for entry in layouts)
        reader = next(user for user in layout.consumers[name] if layout.runs_on(rank, user))
        before = loaded_of.get(reader, (0.0, 0.0))
        loaded_of[reader] = before[0] + loaded, before[1] + saved
    for value in (values[name] for name in layout.values_at[layout.plan.stage_of_rank(rank)]):
        if value.producer is None:
            continue
        if size := alike.of_value("held", value, partial(_held_bytes, layout, rank, value)):
            keeper = _keeper(layout, rank, value)
            held[keeper] = held.get(keeper, 0.0) + size
    waiting = waiting_bytes(
        [layout.model.component(name) for name in layout.rank_components(rank)],
        values,
        lambda value: bytes_here(layout, value, ValueLayout("full", layout.batch_ways(rank)), rank),
        waiting_gradients(layout, values, rank, alike) if gradients is None else gradients,
        waiting_values(layout, values, rank, alike),
    )
    gradients_of = {
        name: alike.of_component("gradients", name, partial(_gradients_of, layout, values, name, rank)) for name in alike.place
    }
    return Boundary(
        held_bytes=sum(held.values()),
        held_of=held,
        loaded_bytes=sum(size for size, _ in loaded_of.values()),
        loaded_saved_bytes=sum(size for _, size in loaded_of.values()),
        loaded_of=loaded_of,
        handed_bytes={name: handed for name, (_, _, handed) in gradients_of.items()},
        gradient_bytes={name: max(wanted, most) for name, (wanted, most, _) in gradients_of.items()},
        converted_bytes=converted_for_others(layout, values, rank, waiting.gradients),
        wanted_bytes={name: wanted for name, (wanted, _, _) in gradients_of.items()},
        waiting=waiting,
    )


def _gradients_of(layout: PlanIndex, values: Mapping[str, Value], name: str, rank: int) -> tuple[float, float, float]:
    """See `gradient_bytes`; and those that the component hands on."""
    return *gradient_bytes(layout, values, name, rank), handed_bytes(layout, values, name)


def _keeper(layout: PlanIndex, rank: int, value: Value) -> str:
    """The component on this rank with which a copy begins that no saved activation stands for."""
    assert value.producer is not None
    savers = [name for name in value.savers or () if layout.runs_on(rank, name)]
    if len(savers) > 1 and savers[:1] == list(value.savers or ())[:1]:
        return savers[1]  # the first one's copy is among its saved activations
    users = (*savers, value.producer, *layout.consumers[value.name])
    return next(name for name in users if layout.runs_on(rank, name))


def _held_bytes(layout: PlanIndex, rank: int, value: Value) -> float:
    """Copies of a value on this rank that are kept for a backward and that no saved activation stands for."""
    if value.savers is None:
        return _held_at_most(layout, rank, value)
    here = value.producer is not None and layout.runs_on(rank, value.producer)
    made = layout.source[value.name].value
    layouts = {name: reading.ends.value for reading in layout.readings[value.name] for name in reading.components}
    if value.producer is not None:
        layouts[value.producer] = made
    keepers = [name for name in value.savers if name in layouts and layout.runs_on(rank, name)]
    kept: dict[ValueLayout, float] = {}
    for name in keepers:
        storage = layouts[name]
        if here:
            storage = storage_of(conversion(made, storage, layout.plan.mesh.tp), made, layout.plan.shard_of_rank(rank))
        kept[storage] = local_bytes(layout, value, storage)
    counted = local_bytes(layout, value, layouts[keepers[0]]) if keepers and keepers[:1] == list(value.savers[:1]) else 0.0
    return sum(kept.values()) - counted


def _held_at_most(layout: PlanIndex, rank: int, value: Value) -> float:
    """The same where the Model does not say who keeps the value: as if every reader did."""
    assert value.producer is not None
    stage = layout.plan.stage_of_rank(rank)
    read = list(dict.fromkeys(reading.ends.value for reading in _readings_here(layout, rank, value)))
    if not layout.runs_on(rank, value.producer):
        return sum(local_bytes(layout, value, entry) for entry in read)
    made = layout.source[value.name].value
    elsewhere = all(reading.stage != stage for reading in layout.readings[value.name])
    total = 0.0 if value.saved and not elsewhere else local_bytes(layout, value, made)
    if made.form == "partial":  # no operator that keeps its output can make summands
        total, read = 0.0, read[1:] if value.saved else read
    for entry in read:
        hops = conversion(made, entry, layout.plan.mesh.tp)
        whole = storage_of(hops, made, layout.plan.shard_of_rank(rank))
        if whole == made:
            total += local_bytes(layout, value, whole) - local_bytes(layout, value, entry)
        else:
            total += local_bytes(layout, value, whole)
    return total


def _readings_here(layout: PlanIndex, rank: int, value: Value) -> Iterator[Reading]:
    for reading in layout.readings[value.name]:
        if any(layout.runs_on(rank, name) for name in reading.components):
            yield reading
