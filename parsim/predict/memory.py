"""Peak memory of every rank of a plan, line by line: bytes over lifetimes (`parsim.program.lifetimes`), and the fullest moment.

Some actions of a rank run forward; the one at whose end most is held gives the lines of what is kept. The line `workspace` is
by how much the fullest moment of the step exceeds that: a forward, a backward, the forward that runs again before it, or the
update of the parameters, whose temporaries take the place of the activations. `unsharded` is the part of it that buckets take
which are whole for a while. Gradients are views into flat buckets, so they are counted once.

A value between components lives as long as autograd keeps it for a backward, in every layout in which it lies on the rank. If
the Model does not name who keeps it, a value that crosses to another rank, or is among no saved activations, counts as kept: an
upper bound. Between the halves of a backward all saved activations stay, beside the gradient that has arrived at every operator
with a parameter. A component without parameters runs all in the first half, one that hands on no gradient all in the second.

Beside a synchronous step a rank keeps for relaxed synchronisation, for validation and for offload:

    outer_state        of average with an outer optimizer: the weights of the last round, and its momentum; of merge: the
                       global model
    neighbour_buffers  of gossip: what arrives from the neighbours of a round, as far as it exceeds what the step has let go
    receive_buffers    of stale: also what arrives in a step for the next one
    stashed_weights    of stale: a copy of a stage's weights for every batch that it holds, unless it runs backward at once
    evaluation         of [training.evaluation]: whole weights and the batch that is scored, as far as that exceeds what is free
    offload_buffers    of activations that are on a device while they are copied, or while a component uses them

A plan fits by a probability: P(peak <= capacity) from the intervals of the lines that cannot be counted exactly. All uncertain
lines of all ranks are taken at the same quantile q. So the peak at quantile q is the sum of its lines at q, and the probability
that it fits is the q at which the sum reaches the capacity. Between and beyond the known quantiles the spread is that of a
normal distribution, with one width below the median and another one above.

Leaves out: lines that vary independently, whose sum would have a narrower interval; and what lifetimes leave out.

The allocator's interval stays wide: published runs reserve 5% (T5 under FSDP, pytorch#89457) to 35% (Llama 2 7B under FSDP,
llama-cookbook#41 and #165) beyond their tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate
from math import ceil
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np

from parsim.hardware.cluster import Cluster
from parsim.hardware.devices import DeviceType
from parsim.model.component import FULL_BYTES, NOT_LOW, Component, Value
from parsim.model.formats import Numerics, number_format
from parsim.model.model import Model
from parsim.plans.layouts import LOCAL_HOPS, POINT_TO_POINT_HOPS, Hop, conversion, hop_groups, hop_pairs
from parsim.plans.pipeline import pipeline_actions
from parsim.program.lifetimes import (
    HeldMoments,
    KeptActivations,
    Lifetime,
    RankValues,
    alive_bytes,
    bucket_bytes,
    decoupled_moments,
    few_actions,
    fullest_bytes,
    held_moments,
    local_bytes,
    pipeline_of,
)
from parsim.program.passes.gradients import replica_sum_work, updates_of
from parsim.program.passes.offload import ComponentUses, groups_of
from parsim.program.passes.rounds import lateness, message_bytes, most_neighbours, outer_arrays
from parsim.program.passes.unsharded import Use, uses_of
from parsim.program.placed import PlanIndex
from parsim.units import MIB, format_bytes
from parsim.work import Phase

# --- whether it fits --------------------------------------------------------------------------------------------------

FIT_PROBABILITY = 0.5
"""A plan fits if its peak stays within the capacity with at least this probability: the same as its median within the capacity.

So a plan 5% below its limit is not refused, and one 5% above it is, however wide the interval of a profile from datasheets is.
`[plan] fit_probability` asks for another one. What is recommended fits with `SAFE_PROBABILITY`, if any plan does.
"""

SAFE_PROBABILITY = 0.95
"""From this probability on a plan that fits is called safe; below it the answer says so."""

P95 = 0.95
"""The upper quantile that intervals are given at."""

DOUBTFUL = (0.01, 0.99)
"""Between these probabilities a table shows the probability beside the verdict."""


def fit_probability(low_bytes: int, median_bytes: int, high_bytes: int, limit_bytes: int) -> float:
    """P(peak <= limit), from the peak at p05, at the median and at p95, ascending; a side without a spread is exact.

    It is at least 0.5 exactly if `median_bytes` <= `limit_bytes`, and at least 0.95 exactly if `high_bytes` is.
    """
    above = limit_bytes >= median_bytes
    width = high_bytes - median_bytes if above else median_bytes - low_bytes
    if width <= 0:
        return 1.0 if above else 0.0
    if limit_bytes == high_bytes:
        return P95
    return NormalDist().cdf(_deviation(P95) * (limit_bytes - median_bytes) / width)


def bytes_at(low_bytes: int, median_bytes: int, high_bytes: int, probability: float) -> int:
    """What a device must have for a peak to fit with a probability in (0, 1): the inverse of `fit_probability`."""
    quantiles = {0.5: median_bytes, P95: high_bytes}
    if probability in quantiles:
        return quantiles[probability]
    width = high_bytes - median_bytes if probability > 0.5 else median_bytes - low_bytes
    return median_bytes + ceil(width * _deviation(probability) / _deviation(P95))


@cache
def _deviation(probability: float) -> float:
    return NormalDist().inv_cdf(probability)


def verdict_text(fits: bool, probability: float) -> str:
    """ "yes" or "NO", with the probability where it is neither almost 0 nor almost 1."""
    word = "yes" if fits else "NO"
    return f"{word} ({probability:.0%})" if DOUBTFUL[0] < probability < DOUBTFUL[1] else word


# --- the outcome ------------------------------------------------------------------------------------------------------

NOT_TENSORS = ("context", "communication", "allocator")
"""Lines of the framework, of libraries and of what is lost between blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Attributes: lines: (name, bytes), every line once. limit_bytes: what the device has.
    spreads: (name, p05, p95) of the lines that cannot be counted exactly, bytes.
    wanted_probability: with which it must fit.
    host_lines: (name, bytes) of what the plan keeps in the host's memory for this rank.
    host_limit_bytes: what the rank may hold there beside the other ranks of its node; None: the host's memory is not known.
    """

    rank: int
    lines: tuple[tuple[str, int], ...]
    limit_bytes: int
    spreads: tuple[tuple[str, int, int], ...] = ()
    wanted_probability: float = FIT_PROBABILITY
    host_lines: tuple[tuple[str, int], ...] = ()
    host_limit_bytes: int | None = None

    @property
    def host_bytes(self) -> int:
        return sum(size for _, size in self.host_lines)

    @property
    def host_excess_bytes(self) -> int:
        """By how much the ranks of the node hold more than the host's memory; 0 where they do not, or nobody knows."""
        return 0 if self.host_limit_bytes is None else max(0, self.host_bytes - self.host_limit_bytes)

    @property
    def total_bytes(self) -> int:
        return sum(size for _, size in self.lines)

    @property
    def tensor_lines(self) -> dict[str, int]:
        """What an allocator of tensors sees, by line."""
        return {name: size for name, size in self.lines if name not in NOT_TENSORS}

    @property
    def low_bytes(self) -> int:
        """All lines at their p05."""
        return self.total_bytes - sum(self.line(name) - low for name, low, _ in self.spreads)

    @property
    def high_bytes(self) -> int:
        """All lines at their p95."""
        return self.total_bytes + sum(high - self.line(name) for name, _, high in self.spreads)

    @property
    def fit_probability(self) -> float:
        """P(peak <= limit), all uncertain lines at the same quantile."""
        if self.host_excess_bytes:
            return 0.0
        return fit_probability(self.low_bytes, self.total_bytes, self.high_bytes, self.limit_bytes)

    @property
    def needed_bytes(self) -> int:
        """What has to fit: every line at the probability that is wanted, so by default at its median."""
        return self.needed_at(self.wanted_probability)

    def needed_at(self, probability: float) -> int:
        """What has to fit for it to do so with a probability in (0, 1)."""
        return bytes_at(self.low_bytes, self.total_bytes, self.high_bytes, probability)

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.limit_bytes and not self.host_excess_bytes

    @property
    def is_safe(self) -> bool:
        """Whether it fits with `SAFE_PROBABILITY`: the same as with every line at its p95."""
        return self.fit_probability >= SAFE_PROBABILITY

    @property
    def worst(self) -> tuple[str, int]:
        return max(self.lines, key=lambda line: line[1])

    @property
    def excess_bytes(self) -> int:
        """By how much it does not fit, on the device or in the host's memory; 0 where it fits."""
        return self.excess_at(self.wanted_probability)

    def excess_at(self, probability: float) -> int:
        """By how much it does not fit with a probability in (0, 1)."""
        return max(0, self.needed_at(probability) - self.limit_bytes, self.host_excess_bytes)

    def line(self, name: str) -> int:
        return dict(self.lines)[name]

    def describe(self) -> str:
        """`rank 3 needs 34.1 GiB, at p95 34.3 GiB, of 32 GiB (2.3 GiB too much); its largest line is activations, 30 GiB`."""
        name, size = self.worst
        if self.host_excess_bytes:
            return (
                f"the ranks of the node of rank {self.rank} hold {format_bytes(self.host_excess_bytes)} more than its host has "
                f"memory; rank {self.rank} {format_bytes(self.host_bytes)}, mostly "
                f"{max(self.host_lines, key=lambda line: line[1])[0]}"
            )
        upto = f", at p95 {format_bytes(self.high_bytes)}," if self.spreads else ""
        chance = f"; it fits with a probability of {self.fit_probability:.0%}" if self.fit_probability > DOUBTFUL[0] else ""
        over = "" if self.fits else f" ({format_bytes(self.excess_bytes)} too much{chance})"
        if self.fits and not self.is_safe:
            over = f" (it fits with a probability of only {self.fit_probability:.0%})"
        return (
            f"rank {self.rank} needs {format_bytes(self.total_bytes)}{upto} of {format_bytes(self.limit_bytes)}{over}; "
            f"its largest line is {name}, {format_bytes(size)}"
        )


# --- all ranks of a plan ----------------------------------------------------------------------------------------------

Scored = Literal["", "weights", "averages"]
"""What is validated during the training; "": nothing."""


def of_every_rank(layout: PlanIndex, cluster: Cluster, first: Sequence[RankMemory]) -> tuple[RankMemory, ...]:
    """The memory of all ranks, from `unlike_memory`."""
    mesh, by_rank = layout.plan.mesh, {memory.rank: memory for memory in first}
    shards = 1 if layout.shards_alike else mesh.tp
    by_kind: dict[tuple[int, int, str], RankMemory] = {}
    memories = []
    for place in range(mesh.pp):
        for rank in mesh.stage_range(place):
            kind = place, rank % shards, cluster.devices[rank].type.name
            if rank in by_rank:
                by_kind[kind] = by_rank[rank]
            memory = by_kind[kind]
            memories.append(memory if memory.rank == rank else replace(memory, rank=rank))
    return tuple(memories)


def unlike_memory(
    layout: PlanIndex,
    cluster: Cluster,
    numerics: Numerics,
    *,
    scored: Scored = "",
    fit_probability: float = FIT_PROBABILITY,
) -> tuple[RankMemory, ...]:
    """The memory of the first of all ranks that hold as much as one another, in rank order.

    Args:
        scored: what is validated between steps. fit_probability: with which a rank must fit.

    Ranks at one place of different replicas differ only by their device. So do tp ranks of a stage if no component is placed on
    one of them. The lines are `LINES` and those at the head of this module. A value is counted with the component that first
    saves it, and under boundary_values elsewhere. `casts` are half-precision copies under autocast, `allocator`, an interval,
    the memory of the allocator and of libraries.
    """
    plan, kept = layout.plan, KeptActivations(layout, numerics.precision)
    offloaded = offloaded_by(kept) if plan.activation_offload else NOTHING
    backend = cluster.profile.communication.backend
    memories = []
    for rank in (rank for place in range(plan.mesh.pp) for rank in _unlike_ranks(layout, cluster, place)):
        memory = _rank_memory(RankValues(kept, rank), cluster.devices[rank].type, numerics, offloaded.away, backend)
        if plan.offloads:
            memory = _with_offload_lines(memory, kept, offloaded, numerics)
        memories.append(replace(memory, wanted_probability=fit_probability))
    if plan.offloads:
        memories = with_host_limits(memories, of_every_rank(layout, cluster, memories), layout, cluster)
    if plan.synchronisation.is_relaxed:
        memories = [_with_relaxed_lines(memory, kept) for memory in of_every_rank(layout, cluster, memories)]
    return tuple(_with_evaluation_line(memory, kept, scored) for memory in memories)


def _unlike_ranks(layout: PlanIndex, cluster: Cluster, place: int) -> list[int]:
    ranks, tp = layout.plan.mesh.stage_range(place), layout.plan.mesh.tp
    shards = 1 if layout.shards_alike else tp
    return sorted({(rank % shards, cluster.devices[rank].type.name): rank for rank in reversed(ranks)}.values())


# --- one rank ---------------------------------------------------------------------------------------------------------


def _rank_memory(here: RankValues, device: DeviceType, numerics: Numerics, away: Mapping[str, int], backend: str) -> RankMemory:
    """Peak memory of a rank on a device; `away`: by component, how much of what it saves lies in the host's memory."""
    layout, plan, kept, rank = here.layout, here.layout.plan, here.kept, here.rank
    saved = {name: max(0, kept.saved_bytes(name) - away.get(name, 0)) for name in here.names}
    copies = {name: kept.component(name).cast_bytes for name in here.names}
    held_of, loaded_of = here.held_bytes(), here.loaded_bytes()
    pipeline = pipeline_of(layout, here.shard, here.stage)
    inward, outward = pipeline.links_of(here.stage)
    between = here.between_chunks()
    stale = plan.synchronisation.is_stale
    if stale:
        moments = decoupled_moments(batches_held(layout, here.stage), inward, outward)
    else:
        moments = held_moments(pipeline, here.stage, apart=plan.zero_stage >= 2, inner=tuple(between))
    chunk_of = {stage: chunk for chunk, stage in enumerate(plan.place_stages(here.stage))}
    chunks = {name: chunk_of[layout.chunk_of[name]] for name in here.names}
    parts = _component_moments(here, saved, copies, held_of, {} if stale else here.made_before())
    message_bytes = here.message_bytes()
    arriving = moments.arriving @ [message_bytes[link] for link in inward]
    leaving = moments.leaving @ [message_bytes[link] for link in outward] + moments.between @ list(between.values())
    loaded, counted = (np.zeros(plan.chunks) for _ in range(2))
    for name, (loaded_bytes, saved_bytes) in loaded_of.items():
        loaded[chunks[name]] += loaded_bytes
        counted[chunks[name]] += saved_bytes
    inputs = moments.unread @ loaded + moments.read @ (loaded - counted)
    kept_of, waiting_of = (np.zeros(plan.chunks) for _ in range(2))
    for part in parts:
        kept_of[chunks[part.name]] += part.kept
        waiting_of[chunks[part.name]] += part.waits
    waiting = moments.waiting @ waiting_of
    held = moments.alive @ kept_of + waiting + arriving + leaving + inputs
    row, peak = _fullest(moments, held, [[part for part in parts if chunks[part.name] == n] for n in range(plan.chunks)])

    alive = {name: int(moments.alive[row, chunk]) for name, chunk in chunks.items()}
    lines: dict[str, float] = {
        **_weight_lines(kept, rank, numerics),
        "activations": sum(alive[name] * size for name, size in saved.items()) + float(waiting[row]),
        "casts": sum(alive[name] * size for name, size in copies.items() if not layout.recomputes(name)),
        "boundary_values": sum(alive[name] * size for name, size in held_of.items()) + float(leaving[row]),
        "receive_buffers": float(arriving[row]),
        "inputs": float(inputs[row]),
    }
    passing = sum(lines[name] for name in ("activations", "casts", "boundary_values", "inputs", "receive_buffers"))
    staying, updating = 0, 0
    for update in () if plan.optimizer_offload else updates_of(layout, rank):  # one after the other
        stays, passes = numerics.optimizer_bytes(update.optimizer)
        staying, updating = staying + stays * update.elements, max(updating, passes * update.elements)
    beyond = updating - passing  # all that passes is gone by the update
    unsharded = min(peak.whole_bytes, peak.size_bytes) if peak.size_bytes >= beyond else 0.0
    workspace = max(peak.size_bytes, beyond) - unsharded
    dynamic = lines["activations"] + lines["casts"] + lines["boundary_values"] + unsharded + workspace
    beside = device.allocator.bytes_beside(dynamic)
    lines |= {
        "unsharded": unsharded,
        "optimizer_state": staying,
        "buffers": sum(kept.component(name).buffer_bytes for name in here.names),
        "communication": communication_bytes(here, backend),
        "context": device.context_bytes,
        "workspace": workspace,
        "allocator": beside.median,
    }
    low, high = round(beside.p05), round(beside.p95)
    return RankMemory(
        rank=rank,
        lines=tuple((name, round(lines[name])) for name in LINES),
        limit_bytes=device.memory_bytes,
        spreads=(("allocator", low, high),) if beside.p05 < beside.p95 else (),
    )


LINES = (
    *("parameters", "casts", "gradients", "unsharded", "optimizer_state", "buffers", "activations", "boundary_values"),
    *("receive_buffers", "inputs", "communication", "context", "workspace", "allocator"),
)
"""Of every rank, in order."""


def _weight_lines(kept: KeptActivations, rank: int, numerics: Numerics) -> dict[str, float]:
    """Bytes of parameters and gradients as held all the time.

    With ZeRO they lie in buckets padded to equal parts. This rank updates one part (stage 1), keeps only the gradients of that
    part (stage 2), and only its parameters (stage 3). Frozen parameters are divided under ZeRO 3 alone. Leaves out: of weights
    in 8 bits the transposed copy that Hopper's products need, and that buckets are gathered in them.
    """
    layout = kept.layout

    parameters, gradients, divided = 0, 0, 1
    frozen = set[str]() if len(layout.model.trainable_parameters) < len(layout.model.parameters) else None
    for bucket in layout.gathered_buckets(rank):
        ranks = len(bucket.group)
        stage = layout.zero_stage(bucket.family, ranks)
        size = bucket.family.padded_bytes(ranks) if stage else bucket.size_bytes
        parameters += size // ranks if stage >= 3 else size
        divided = max(divided, ranks) if stage >= 3 else divided
        if bucket.trainable:
            gradients += size // ranks if stage >= 2 else size
        elif frozen is not None:
            frozen.update(held.name for held in bucket.first)
    if frozen is not None:
        whole = (held for held in layout.rank_parameters(rank) if not held.trainable and held.name not in frozen)
        parameters += sum(held.size_bytes for held in whole)
    spared = 0.0
    if numerics.weight_dtype:
        parts = map(kept.component, layout.rank_components(rank))
        products = (op for part in parts for op in part.operators if op.kind == "matmul" and op.function != NOT_LOW)
        elements = sum(op.parameter_bytes * op.count for op in products) / FULL_BYTES
        spared = elements * (numerics.format.weight_bytes - numerics.format.element_bytes) / divided
    return {"parameters": parameters - spared, "gradients": numerics.gradient_bytes(gradients)}


# --- the fullest moment -----------------------------------------------------------------------------------------------


class Moment(NamedTuple):
    """Bytes beyond what is held, while a component runs; and how much of it are buckets that are whole then."""

    size_bytes: float
    whole_bytes: float


class ComponentMoments(NamedTuple):
    """One component of one microbatch on a rank, bytes; all but `kept` and `largest_bytes` with what waits beside it.

    Attributes:
        kept: from its forward to the end of its backward.
        forward: the fullest moment of its forward, beyond what it and those before it in its chunk keep.
        second, backward, first_half: beyond all that is kept, while it runs forward again, backward, or the first half of its
            backward (None: not counted, or not halved). handed: gradients of its inputs, as it makes them.
        whole: buckets that are whole meanwhile, by phase and microbatch. phase: of the task that hands on its gradients.
        waits: what it adds between the halves of a microbatch's backward. only_weights: its backward hands on no gradient.
            largest_bytes: of its trainable parameters.
    """

    name: str
    kept: float
    forward: float
    second: float
    backward: float
    handed: float
    whole: Mapping[tuple[Phase, int], float]
    phase: Phase
    first_half: float | None
    waits: float
    only_weights: bool
    largest_bytes: int

    def moment(self, size: float, microbatch: int, phase: Phase) -> Moment:
        """So many bytes beside the buckets that are whole then."""
        whole = self.whole.get((phase, microbatch), 0.0) if self.whole else 0.0
        return Moment(size + whole, whole)

    def of_backward(self, level: float, microbatch: int, size: float | None = None) -> Moment:
        """The fullest moment of its backward (of so many bytes, if given), and of its forward before that, at a level beyond
        what is held."""
        again = self.moment(level + self.second, microbatch, Phase.RECOMPUTE) if self.second else Moment(0.0, 0.0)
        level += self.backward if size is None else size
        return max(again, self.moment(level, microbatch, self.phase))


def _component_alone(here: RankValues, name: str, copied: int) -> ComponentMoments:
    """A component without what it keeps, what waits beside it, what was made before and whole buckets: the same for all of one
    `KeptActivations.memory_kind`. `copied`: bytes of its casts."""
    layout, kept = here.layout, here.kept
    component, samples, gradients = kept.component(name), layout.local_samples(name), here.gradients_of(name)
    forward_peak, split = fullest_bytes(component.forward_peaks, samples), component.split_backward
    # the backward was counted when it was traced, or has the gradients of the largest operator: of its input, output and
    # parameters, before these are added to their bucket
    peaks = component.backward_peaks or [(op.activation_bytes, op.parameter_bytes) for op in component.operators]
    runs_backward = gradients.converted or not component.forward_peaks
    backward = max(fullest_bytes(peaks, samples), gradients.converted) if runs_backward else 0.0
    first_half = None if split is None else max(fullest_bytes(split.peaks, samples), gradients.converted)
    again_bytes, second, forward = 0.0, 0.0, float(forward_peak)
    if layout.recomputes(name):
        again = kept.again(name)
        again_bytes = again.saved_bytes + copied
        backward += again_bytes - again.released_bytes
        if first_half is not None:
            first_half += again_bytes - again.released_bytes
        second = (forward_peak if again.fullest_bytes is None else again.fullest_bytes) + gradients.wanted
        forward = again.first_bytes
    halved, only_weights = layout.is_halved(name), not layout.wants_input_gradient(name)
    if halved and split is not None:
        waits = fullest_bytes([split.waiting], samples) + again_bytes
    elif halved:
        element_bytes = number_format(kept.precision).element_bytes
        waits = max(gradients.wanted, _arrived_bytes(component, samples, element_bytes)) + again_bytes
    else:
        waits = gradients.wanted if only_weights else 0.0
    return ComponentMoments(
        name=name,
        kept=0.0,
        forward=forward,
        second=second,
        backward=backward,
        handed=gradients.handed,
        whole={},
        phase=layout.gradient_phase(name),
        first_half=first_half if halved else None,
        waits=waits,
        only_weights=only_weights,
        largest_bytes=max((parameter.size_bytes for parameter in component.trainable_parameters), default=0),
    )


def _component_moments(
    here: RankValues,
    saved: Mapping[str, float],
    copies: Mapping[str, int],
    held_of: Mapping[str, float],
    made_before: Mapping[str, tuple[float, float]],
) -> list[ComponentMoments]:
    """What is there while each component of a rank runs. A recomputed one runs forward before its backward, beside the
    gradients of what it puts out, which have been converted by then."""
    layout, count = here.layout, len(here.names)
    values_beside, gradients_beside = (
        alive_bytes(lifetimes, count) for lifetimes in (here.waiting_values(), here.waiting_gradients())
    )
    converted_of = here.converted_for_others(gradients_beside)
    whole_of: dict[str, dict[tuple[Phase, int], float]] = {}
    for (phase, name, microbatch), size in whole_bytes(layout, here.rank).items():
        whole_of.setdefault(name, {})[phase, microbatch] = size
    parts = []
    for number, name in enumerate(here.names):
        kind, counted = here.kept.memory_kind(name), partial(_component_alone, here, name, copies[name])
        alone = counted() if kind is None else here.once(("sizes", kind), counted)
        made, made_back = made_before.get(name, (0.0, 0.0))
        beside, again = gradients_beside[number] + made_back, layout.recomputes(name)
        kept_bytes = saved[name] + (0 if again else copies[name]) + held_of.get(name, 0.0)
        gives_up = not layout.is_halved(name) and not alone.only_weights
        parts.append(
            alone._replace(
                name=name,
                kept=kept_bytes,
                forward=made + (0.0 if again and not alone.forward else values_beside[number] + alone.forward),
                second=alone.second + beside if again else 0.0,
                backward=max(alone.backward + beside, converted_of.get(name, 0.0)),
                handed=alone.handed + beside,
                whole=whole_of.get(name, {}),
                first_half=None if alone.first_half is None else alone.first_half + beside,
                waits=-kept_bytes if gives_up else alone.waits,
            )
        )
    return parts


def _fullest(
    moments: HeldMoments, held: np.ndarray[tuple[int], np.dtype[np.float64]], parts: Sequence[Sequence[ComponentMoments]]
) -> tuple[int, Moment]:
    """The row of the forward at whose end most is held, and how much more the fullest moment has."""
    peaks = {kind: _action_peak(parts[kind[0]], *kind[1:]) for kind in dict.fromkeys(moments.kinds)}
    idle = not any(parts)  # a rank may run nothing in some of its chunks, or in all
    running = [row for row, kind in enumerate(moments.kinds) if parts[kind[0]] or idle]
    forwards = (row for row in running if moments.kinds[row][1] is Phase.FORWARD)
    base = max(forwards, key=lambda row: (held[row], moments.alive[row].sum()))  # of batches read rather than unread
    best = max(running, key=lambda row: held[row] + peaks[moments.kinds[row]].size_bytes)
    peak = peaks[moments.kinds[best]]
    return base, Moment(max(0.0, float(held[best] - held[base]) + peak.size_bytes), peak.whole_bytes)


def _action_peak(parts: Sequence[ComponentMoments], phase: Phase, microbatch: int) -> Moment:
    """The fullest moment of an action beyond what is held while it runs, which contains all that its microbatch keeps."""
    moments, level = [Moment(0.0, 0.0)], 0.0
    if phase is Phase.FORWARD:
        level = -sum(part.kept for part in parts)
        for part in parts:
            moments.append(part.moment(level + part.forward, microbatch, phase))
            level += part.kept
    elif phase is Phase.BACKWARD:  # while a component runs, what those after it in the chunk kept is free
        for part in reversed(parts):
            moments.append(part.of_backward(level, microbatch))
            level -= part.kept
    elif phase is Phase.BACKWARD_INPUT:  # nothing is free before the half for weights, but where there is nothing to do in it
        for part in reversed(parts):
            if part.first_half is not None:
                moments.append(part.of_backward(level, microbatch, part.first_half))
            elif not part.only_weights:
                ended = level + part.waits + part.handed
                moments.append(part.moment(ended, microbatch, part.phase))
                moments.append(part.of_backward(level, microbatch))
            level += part.waits
    else:  # what waited for a component is free after it
        for part in reversed(parts):
            if part.only_weights:
                moments.append(part.of_backward(level - part.waits, microbatch))
            else:
                moments.append(part.moment(level + part.largest_bytes, microbatch, phase))
            level -= part.kept + part.waits
    return max(moments)


def whole_bytes(layout: PlanIndex, rank: int) -> dict[Use, float]:
    """Bytes of the buckets that are whole on a rank while each of its components runs; empty below ZeRO 2.

    Of few actions (`few_actions`), by whose microbatches `HeldMoments.kinds` counts too. A forward that is computed again is a
    phase of its own: gradients that are still being sent then may be gone in the backward.
    """
    plan = layout.plan
    if plan.zero_stage < 2:
        return {}
    place = plan.stage_of_rank(rank)
    few = few_actions(plan.pipeline_order, place, plan.mesh.pp, plan.microbatches, plan.chunks)
    uses = uses_of(layout, place, few.actions)  # buckets come and go by what runs right before and after
    by_use = dict(zip(uses, bucket_bytes(layout, uses, layout.gathered_buckets(rank)), strict=True))
    if layout.shards_alike:
        return by_use
    return {use: size for use, size in by_use.items() if layout.runs_on(rank, use.component)}


GATES = {"_thnn_fused_lstm_cell": 4, "_thnn_fused_gru_cell": 3}
"""Cells of fused recurrent layers, and the gates of each hidden feature."""


def _arrived_bytes(component: Component, samples: int, element_bytes: int) -> float:
    """Gradients that arrive at operators with a parameter, where the first half of a backward was not counted
    (`SplitBackward`): as large as what these operators make.

    A fused recurrent layer is one operator there: the gradient of its hidden features arrives, and none of its gates. Leaves
    out what the first half makes for a while, and parameters that enter several operators.
    """
    made_dims = {"matmul": ("problems", "m", "n"), "convolution": ("k", "out_h", "out_w"), "memory_bound": ("elements",)}
    gates = {dict(operator.shape)["elements"] for operator in component.operators if operator.function in GATES}
    total = 0
    for operator in component.operators:
        sizes, elements = dict(operator.shape), 1
        if operator.function in GATES:
            elements = sizes["elements"] // GATES[operator.function]
        elif operator.kind == "matmul" and sizes["n"] in gates:
            continue
        elif operator.parameter_bytes and operator.kind != "embedding":
            for dim in made_dims.get(operator.kind, ()):
                elements *= sizes.get(dim, 1)
        else:
            continue
        total += elements * operator.count
    return float(total * element_bytes * samples)


# --- communication ----------------------------------------------------------------------------------------------------

NCCL_COMMUNICATOR_BYTES = 256 * MIB
"""Assumed per communicator: about a dozen channels, each with send and receive buffers of 4 MiB (the default
NCCL_BUFFSIZE) for one protocol. The low-latency protocols and scratch are taken to need as much again; rounded up."""


class _Sent(NamedTuple):
    """What a rank sends, receives or reduces, and the process group it does it in."""

    group: tuple[object, ...]
    size_bytes: float


def communication_bytes(here: RankValues, backend: str) -> int:
    """Buffers of communicators with NCCL; gloo keeps a scratch copy of the largest bucket or transfer."""
    sent = [*_buckets_sent(here.layout, here.rank), *_values_sent(here)]
    communicators = len({message.group for message in sent})
    if backend == "nccl":
        return NCCL_COMMUNICATOR_BYTES * communicators
    return round(max((message.size_bytes for message in sent), default=0.0))


def _values_sent(here: RankValues) -> list[_Sent]:
    """Conversions and transfers between stages; values that are as large and laid out alike count once."""
    layout, plan, stage = here.layout, here.layout.plan, here.stage
    sent, seen = list[_Sent](), set[object]()
    for value in map(here.values.__getitem__, layout.values_at[stage]):
        home = layout.stage_of_value[value.name]
        if home is None:
            continue
        made, readings = layout.source[value.name], layout.readings[value.name]
        size = value.bytes_per_sample, value.fixed_bytes, value.differentiable
        kind = (home, made, size, tuple([(reading.stage, reading.ends) for reading in readings]))
        if kind in seen:
            continue
        seen.add(kind)
        for reading in readings:
            ways = [(home, reading.stage, made.value, reading.ends.value, reading.ends.value)]
            if value.differentiable:
                ways.append((reading.stage, home, reading.ends.gradient, made.gradient, reading.ends.gradient))
            for source, target, begin, end, moved in ways:
                if source != target and stage in (source, target) and here.shard in moved.holders(plan.mesh.tp):
                    sent.append(_Sent((source, target), local_bytes(layout, value, moved)))
                if stage == home:
                    for hop in conversion(begin, end, plan.mesh.tp):
                        sent += _hop_sent(layout, value, hop, here.shard)
    return sent


def _buckets_sent(layout: PlanIndex, rank: int) -> list[_Sent]:
    """The largest bucket of every group of ranks, and the largest part that sharding groups sum."""
    largest: dict[int, _Sent] = {}
    for bucket in layout.gathered_buckets(rank):
        size = bucket.padded_bytes if layout.is_divided(bucket) else bucket.size_bytes
        group = id(bucket.group)  # buckets of the same ranks share one tuple
        if len(bucket.group) > 1 and (group not in largest or size > largest[group].size_bytes):
            largest[group] = _Sent(("dp", bucket.group), size)
        if bucket.trainable and (work := replica_sum_work(layout, bucket, rank)) is not None:
            sums = -1 - group
            if sums not in largest or work.size_bytes > largest[sums].size_bytes:
                largest[sums] = _Sent(("dp", work.group), work.size_bytes)
    return list(largest.values())


def _hop_sent(layout: PlanIndex, value: Value, hop: Hop, shard: int) -> list[_Sent]:
    tp = layout.plan.mesh.tp
    if hop.operation in LOCAL_HOPS:
        return []
    size_bytes = max(local_bytes(layout, value, hop.source), local_bytes(layout, value, hop.target))
    if hop.operation in POINT_TO_POINT_HOPS:
        pairs = [tuple(sorted(pair)) for pair in hop_pairs(hop, tp) if shard in pair]
        return [_Sent(("tp", pair), size_bytes / (1 if hop.operation == "move" else tp)) for pair in pairs]
    return [_Sent(("tp", group), size_bytes) for group in hop_groups(hop, tp) if shard in group]


# --- what lies in the host's memory -----------------------------------------------------------------------------------

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
    """What a plan copies to the host. Values that another component needs too are copied with the last one that does
    (`parsim.plans.plan`)."""
    layout, chosen = kept.layout, kept.layout.plan.offloaded & kept.layout.differentiable
    order = layout.model.component_index
    copied, away, spans = dict[str, int](), dict[str, int](), list[tuple[str, str, int]]()
    for name in sorted(chosen, key=order.__getitem__):
        left, later = kept.saved_bytes(name), list[tuple[str, int]]()
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


def with_offloaded(layout: PlanIndex, precision: str) -> PlanIndex:
    """The index that says how much each component copies to the host."""
    if not layout.plan.activation_offload:
        return layout
    return replace(layout, offloaded=offloaded_by(KeptActivations(layout, precision)).copied)


def _with_offload_lines(memory: RankMemory, kept: KeptActivations, offloaded: Offloaded, numerics: Numerics) -> RankMemory:
    layout, plan = kept.layout, kept.layout.plan
    lines, host = memory.lines, list[tuple[str, int]]()
    if plan.optimizer_offload:
        stays = sum(
            numerics.optimizer_bytes(update.optimizer)[0] * update.elements for update in updates_of(layout, memory.rank)
        )
        buckets = layout.rank_buckets(memory.rank)
        copies = sum(layout.updated_bytes(bucket.family, len(bucket.group)) for bucket in buckets)
        host += [("optimizer_state", stays), ("gradients", copies), ("parameters", copies)]
    if plan.activation_offload:
        blocks = _blocks(layout, plan.stage_of_rank(memory.rank), plan.shard_of_rank(memory.rank))
        lines = (*lines, (BUFFERS, _most_in_flight(blocks, offloaded, layout.model.component_index)))
        changes: dict[int, list[int]] = {}  # of the bytes that are away, by block: equal ones are one tuple
        for block in blocks:
            signed = [offloaded.copied.get(group.component, 0) * (1 if group.forward else -1) for group in block]
            changes.setdefault(id(block), signed)
        most_away = max(accumulate((change for block in blocks for change in changes[id(block)]), initial=0))
        host.append(("activations", most_away))
    return replace(memory, lines=lines, host_lines=tuple(host))


def _blocks(layout: PlanIndex, place: int, shard: int) -> list[tuple[ComponentUses, ...]]:
    """The computation of a tp rank of a place, action by action, those without any left out. Actions of one stage and phase
    share one tuple, which has the microbatch of the first."""
    plan, by_kind = layout.plan, dict[tuple[int, Phase], tuple[ComponentUses, ...]]()
    actions = pipeline_actions(plan.pipeline_order, place, plan.mesh.pp, plan.microbatches, plan.chunks)
    for action in actions:
        if (action.stage, action.phase) not in by_kind:
            uses = (use for use in uses_of(layout, place, [action]) if layout.placement[use.component].runs_on(shard))
            by_kind[action.stage, action.phase] = tuple(groups_of(list(uses)))
    return [groups for action in actions if (groups := by_kind[action.stage, action.phase])]


def _most_in_flight(blocks: Sequence[tuple[ComponentUses, ...]], offloaded: Offloaded, order: Mapping[str, int]) -> int:
    """Bytes on the device while some component computes: its own, those of the one before it, which are leaving, and those
    that are being fetched for the next. Every sequence of three blocks is looked at once."""
    spans = [Lifetime(name, order[name], order[last] - 1, size) for name, last, size in offloaded.spans]
    beside = alive_bytes(spans, len(order))
    most = 0
    unlike = {tuple(map(id, three)): three for three in zip(((), *blocks), blocks, (*blocks[1:], ()), strict=False)}
    for before, block, after in unlike.values():
        groups = (*before[-1:], *block, *after[:1])
        sizes = [offloaded.copied.get(group.component, 0) for group in groups]
        for number in range(len(before[-1:]), len(before[-1:]) + len(block)):
            here = sizes[number] + round(beside[order[groups[number].component]])
            if number and groups[number - 1].forward:
                here += sizes[number - 1]
            if number + 1 < len(groups) and not groups[number + 1].forward:
                here += sizes[number + 1]
            most = max(most, here)
    return most


def with_host_limits(
    first: Sequence[RankMemory], every: Sequence[RankMemory], layout: PlanIndex, cluster: Cluster
) -> list[RankMemory]:
    """The memory of the first of ranks that hold as much, with what each may hold of its node's memory beside the node's
    others. `every`: of all ranks."""
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


# --- beside a synchronous step ----------------------------------------------------------------------------------------

LET_GO = ("activations", "casts", "boundary_values", "unsharded", "workspace")
"""Lines of the step whose memory is free when a round begins."""
BETWEEN_STEPS = (*LET_GO, "inputs", "receive_buffers")
"""Those whose memory is free between two steps."""
MOST_SCORED = 64
"""Samples of a batch that is scored, at most (`parsim.execute.evaluation`)."""


ROUNDING_ARRAYS = 3
"""Arrays as large as a bucket that are alive while a change of it is restored (`parsim.execute.mixing.restored`)."""


def batches_held(layout: PlanIndex, stage: int) -> int:
    """Batches that a stale stage has run forward and not backward, at the fullest moment."""
    return 1 + layout.plan.synchronisation.delay_of(stage, layout.plan.mesh.pp)


def _with_relaxed_lines(memory: RankMemory, kept: KeptActivations) -> RankMemory:
    layout, rank = kept.layout, memory.rank
    plan, rule = layout.plan, layout.plan.synchronisation
    trained = sum(bucket.size_bytes for bucket in layout.rank_buckets(rank))
    if rule.is_stale:
        place = plan.stage_of_rank(rank)
        held = batches_held(layout, place)
        sizes = RankValues(kept, rank).message_bytes().items()
        late = [size for link, size in sizes if link.target == place and lateness(layout, link.source, link.target)]
        lines = [(name, size + round(sum(late)) if name == "receive_buffers" else size) for name, size in memory.lines]
        memory = replace(memory, lines=(*lines, ("stashed_weights", held * trained if held > 1 and rule.stashes else 0)))
    lines = [("outer_state", outer_arrays(layout) * trained)] if outer_arrays(layout) else []
    if rule.message_format:
        buckets = layout.rank_buckets(rank)
        rounds = range(rule.fragments)
        sent = max(
            sum(message_bytes(rule, each) for each in buckets if each.number % rule.fragments == turn) for turn in rounds
        )
        gathered, let_go = (1 + plan.mesh.dp) * sent, sum(memory.line(name) for name in LET_GO)
        rounding = ROUNDING_ARRAYS * max((bucket.size_bytes for bucket in buckets), default=0)
        beside = gathered if rule.combines_first else 0  # that arrives beside the step; its rounding is before and behind it
        lines.append(("neighbour_buffers", max(beside, gathered + rounding - let_go)))
    if rule.kind == "gossip":
        arriving = most_neighbours(rule, plan.mesh.dp)[plan.replica_of_rank(rank)] * trained
        let_go = 0 if rule.combines_first else sum(memory.line(name) for name in LET_GO)  # that arrives beside the step
        lines.append(("neighbour_buffers", max(0, arriving - let_go)))
    return replace(memory, lines=(*memory.lines, *lines))


def _with_evaluation_line(memory: RankMemory, kept: KeptActivations, scored: Scored) -> RankMemory:
    """The memory of a rank with the line `evaluation`: 0 where the step needs more; none where nothing is validated.

    A rank builds the module, which then takes the gathered weights in place of its own. Replicas whose weights are whole in any
    case gather none, unless averages are scored, or the mean of replicas that mix in rounds. Leaves out what the library keeps
    while it gathers.
    """
    if not scored:
        return memory
    plan, model = kept.layout.plan, kept.layout.model
    buffers = sum(component.buffer_bytes for component in model.components)
    is_whole = (
        plan.mesh.dp == plan.world_size and plan.zero_stage < 3 and scored == "weights" and not plan.synchronisation.mixes
    )
    gathered = (0 if is_whole else model.parameter_bytes) + buffers
    scoring = _scored_bytes(model, min(MOST_SCORED, max(1, plan.microbatch_samples)))
    needed = gathered + buffers + max(model.parameter_bytes, scoring)
    free = sum(memory.line(name) for name in BETWEEN_STEPS)
    return replace(memory, lines=(*memory.lines, ("evaluation", max(0, needed - free))))


def _scored_bytes(model: Model, samples: int) -> int:
    """Bytes of one forward of the whole model, of which nothing is kept: what its components make, and what waits."""
    place = model.component_index
    sizes = {value.name: value.size_bytes(samples) for value in model.values}
    batch = {value.name for value in model.values if value.producer is None}
    lifetimes = []
    for value in model.values:
        if readers := model.readers[value.name]:
            born = 0 if value.producer is None else place[value.producer] + 1
            lifetimes.append(Lifetime(value.name, born, place[readers[-1]], sizes[value.name]))
    waiting = alive_bytes(lifetimes, len(model.components))
    return sum(sizes[name] for name in batch) + max(
        round(waiting[place[component.name]])
        - sum(sizes[name] for name in component.inputs if name in batch)
        + fullest_bytes(component.forward_peaks, samples)
        for component in model.components
    )
