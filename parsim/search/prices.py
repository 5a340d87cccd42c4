"""The cost of each choice of a placement: the figures of the scheduler's optimisation problem.

One stage of `dp x tp` ranks, `microbatches` microbatches per replica. Priced by the same Costs as the simulator's tasks, piece
by piece: computation of a component, conversion of a value from one layout to another, summing of gradients.

Leaves out what only the simulator knows: conversions that overlap with computation, and gradient buckets (the sum of a
component's gradients is charged its share of a full bucket).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

from parsim.costs.costs import Costs
from parsim.model.component import Component, InnerExchange, Value, narrow
from parsim.model.formats import component_in
from parsim.model.optimizers import update_steps
from parsim.plans.layouts import (
    BATCH,
    LOCAL_HOPS,
    POINT_TO_POINT_HOPS,
    REPLICATE,
    Hop,
    Placement,
    ValueLayout,
    conversion,
    hop_groups,
    hop_pairs,
)
from parsim.plans.mesh import Mesh
from parsim.plans.plan import DEFAULT_BUCKET_BYTES
from parsim.plans.stages import Groups, concurrent_with
from parsim.predict.problem import PlanningProblem
from parsim.program.buckets import alike, hold
from parsim.program.passes.convert import hop_collective, hop_message
from parsim.program.passes.inside import CONTEXT_STREAM, InnerStep, inner_steps
from parsim.records import once
from parsim.work import Collective, Compute, Phase, Work


def placements_of(component: Component, mesh: Mesh, samples: int, *, places: Sequence[int] = ()) -> tuple[Placement, ...]:
    """Every placement the component can have when a replica's microbatch is `samples` samples.

    Args:
        places: the tp ranks worth placing a component on alone.
    """
    tp = mesh.tp
    placements = [BATCH] if samples % tp == 0 else []
    if tp > 1:
        placements.append(REPLICATE)
        placements += [Placement("place", shard=shard) for shard in places]
    for sharding in component.shardings:
        placements += [
            Placement("shard", rule=sharding.rule, ways=ways)
            for ways in range(2, tp + 1)
            if tp % ways == 0 and sharding.allows(ways) and samples % (tp // ways) == 0
        ]
    return tuple(placements)


ComputeKey = tuple[str, bool, Phase, int, str, int, str, tuple[tuple[int, int], ...]]
"""Fingerprint, whether it reads more than the batch, phase, samples, rule and ways of a shard, kind of device, and the
operators where only some run again."""


@once
def device_kinds(problem: PlanningProblem, ranks: int) -> dict[str, int]:
    """The kinds of device of the first ranks, each with its first rank."""
    return {kind: first for kind, first in _first_of_kind(problem).items() if first < ranks}


@once
def _first_of_kind(problem: PlanningProblem) -> dict[str, int]:
    costs = problem.costs(problem.cluster.size)
    kinds: dict[str, int] = {}
    for rank in range(problem.cluster.size):
        kinds.setdefault(costs.device_kind(rank), rank)
    return kinds


@once
def _same_work(problem: PlanningProblem) -> dict[str, tuple[str, bool]]:
    """By component its fingerprint, and whether it reads more than the batch: equal where components cost the same."""
    values = problem.model.value
    return {
        component.name: (component.fingerprint, any(values[name].producer is not None for name in component.inputs))
        for component in problem.model.components
    }


ShardRanks = tuple[tuple[int, ...], ...]


@once
def narrowed(problem: PlanningProblem, name: str, rule: str, ways: int) -> tuple[Component, int]:
    """One shard of a component, and the bytes of its weights in another precision."""
    shard = narrow(component_in(problem.model.component(name), problem.numerics.precision), rule, ways)
    return shard, shard.cast_bytes


def hop_works(hop: Hop, base: int, size_bytes: int, tp: int) -> list[Work]:
    """What a hop over the tp ranks from `base` on sends: its messages, or a collective per group; nothing if it is local."""
    if hop.operation in LOCAL_HOPS:
        return []
    if hop.operation in POINT_TO_POINT_HOPS:
        return [hop_message(hop, base + source, base + target, size_bytes, tp) for source, target in hop_pairs(hop, tp)]
    groups = (tuple(base + rank for rank in group) for group in hop_groups(hop, tp))
    return [hop_collective(hop, group, size_bytes, tp) for group in groups]


MOST_COPIES = 1024
"""Of a stage, whose groups are listed for a bound or an estimate: beyond, the first so many stand for all."""


def fewer_copies(mesh: Mesh) -> Mesh:
    """The first stages of a mesh with at most about `MOST_COPIES` copies, in whole teams and sharding groups.

    Fewer groups at once never slow one another more, so a price beside these is a lower bound.
    """
    unit = math.lcm(mesh.team, mesh.group_copies if mesh.dp_shard else 1)
    copies = max(1, MOST_COPIES // unit) * unit
    return replace(mesh, pp=min(2, mesh.pp), dp=copies // mesh.cp) if copies < mesh.copies else mesh


@dataclass(frozen=True)
class Prices:
    """Seconds and bytes of placements on the ranks of one stage.

    Attributes: samples: of one replica's microbatch. in_flight: microbatches whose activations are kept at once.
    """

    problem: PlanningProblem
    mesh: Mesh
    samples: int
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    in_flight: int = 1
    zero_stage: int = 0

    @cached_property
    def _seconds(self) -> dict[tuple[Work, int], float]:
        return {}

    def work_s(self, work: Work, rank: int) -> float:
        """The median price of any work, beside what communicates at the same time on this mesh."""
        key = (work, rank)
        if key not in self._seconds:
            beside = concurrent_with(self.mesh, work) if self._costs.shares_links else Groups()
            self._seconds[key] = self._costs.estimate(work, rank, beside).median_s
        return self._seconds[key]

    def compute_s(
        self, component: Component, placement: Placement, phase: Phase, *, fastest: bool = False, part: str = ""
    ) -> float:
        """One microbatch on the slowest device that has the component, or on the fastest. `part`: as in Compute."""
        if placement.kind == "place":
            replicas = range(self.mesh.copies)
            ranks = [self.mesh.rank(stage=0, replica=replica, shard=placement.shard) for replica in replicas]
        else:
            ranks = list(device_kinds(self.problem, self.mesh.size).values())
        seconds = [self.compute_on_s(component, placement, phase, rank, part) for rank in ranks]
        return min(seconds) if fastest else max(seconds)

    def compute_on_s(self, component: Component, placement: Placement, phase: Phase, rank: int, part: str = "") -> float:
        """One microbatch on a rank of the cluster. Components that do the same work share a price, unless one of them alone
        reads nothing but the batch."""
        samples = self.samples * placement.batch_ways(self.mesh.tp) // self.mesh.tp
        return self.local_s(component, placement, phase, rank, samples, part)

    def local_s(
        self, component: Component, placement: Placement, phase: Phase, rank: int, samples: int, part: str = ""
    ) -> float:
        """So many samples on a rank that computes all of them, with what it waits for inside the component."""
        if component.inside is not None and not part and phase is not Phase.BACKWARD_WEIGHT:
            return self._parts_s(component, placement, phase, rank, samples)
        kind = self._costs.device_kind(rank)
        again = component.selective.operators if part and component.selective is not None else ()
        key = (*self._same_work[component.name], phase, samples, placement.rule, placement.ways, kind, again)
        if key not in self._computed:
            work = Compute(
                component=component.name, phase=phase, samples=samples, rule=placement.rule, ways=placement.ways, part=part
            )
            self._computed[key] = self._costs.estimate(work, rank).median_s
        return self._computed[key]

    def _parts_s(self, component: Component, placement: Placement, phase: Phase, rank: int, samples: int) -> float:
        """From the first to the last part of a component whose sequence or experts are divided, ranks in step."""
        key = (self._same_work[component.name], placement.rule, placement.ways, phase, rank, samples)
        if key not in self._in_parts:
            inside = narrowed(self.problem, component.name, placement.rule, placement.ways)[0].inside
            assert inside is not None
            ends, free = list[float](), dict[str, float]()
            for step in inner_steps(inside, phase, "ring"):
                if step.operation:
                    seconds = self._exchange_s(inside, step, rank, samples)
                else:
                    work = Compute(
                        component=component.name,
                        phase=phase,
                        samples=samples,
                        rule=placement.rule,
                        ways=placement.ways,
                        part=step.what,
                        parts=step.parts,
                    )
                    seconds = self.problem.price([(work, rank)], self.mesh)[0].median_s
                stream = step.what if step.operation else ""
                ends.append(max([free.get(stream, 0.0), *(ends[other] for other in step.after)]) + seconds)
                free[stream] = ends[-1]
            self._in_parts[key] = ends[-1]
        return self._in_parts[key]

    def _exchange_s(self, inside: InnerExchange, step: InnerStep, rank: int, samples: int) -> float:
        """An exchange of the group of a rank; nothing where the mesh has no such axis."""
        mesh = self.mesh
        ways = mesh.cp if step.what == CONTEXT_STREAM else mesh.ep
        if ways == 1:
            return 0.0
        stage, copy, shard = rank // (mesh.copies * mesh.tp), rank // mesh.tp % mesh.copies, rank % mesh.tp
        group = tuple(mesh.rank(stage=stage, replica=copy // ways * ways + place, shard=shard) for place in range(ways))
        size = inside.context_bytes * step.share if step.what == CONTEXT_STREAM else inside.expert_bytes
        work = Collective(
            operation=step.operation, group=group, size_bytes=round(size * samples), visits=step.visits_of(inside)
        )
        some = fewer_copies(mesh)
        beside = some if max(group) < some.copies * some.tp else mesh
        return self.problem.price([(work, rank)], mesh, beside)[0].median_s

    @cached_property
    def _in_parts(self) -> dict[object, float]:
        return self.problem.answers(("parts_s", self.mesh))

    @cached_property
    def _costs(self) -> Costs:
        return self.problem.costs(self.mesh.size)

    @cached_property
    def _computed(self) -> dict[ComputeKey, float]:
        """Shared by all meshes whose numbers of ranks have the same prices."""
        return self.problem.answers(("compute_s", self.problem.cost_group(self.mesh.size)))

    @cached_property
    def _same_work(self) -> dict[str, tuple[str, bool]]:
        return _same_work(self.problem)

    def same_work(self, component: Component) -> tuple[str, bool]:
        """Equal for components that cost the same."""
        return self._same_work[component.name]

    @cached_property
    def differentiable(self) -> frozenset[str]:
        """Components that have a backward."""
        return self.problem.model.differentiable_components

    def phases(self, component: Component) -> tuple[Phase, ...]:
        """What a component computes of every microbatch."""
        return (Phase.FORWARD, Phase.BACKWARD) if component.name in self.differentiable else (Phase.FORWARD,)

    def conversion_s(self, value: Value, source: ValueLayout, target: ValueLayout) -> float:
        """One microbatch of a value from one layout to another, in the first replica.

        Messages of a hop go one after another, and its groups at the same time.
        """
        if source == target:
            return 0.0
        key = (value.bytes_per_sample, value.fixed_bytes, source, target)
        if key not in self._converted:
            total, size_bytes, tp = 0.0, value.size_bytes(self.samples), self.mesh.tp
            for hop in conversion(source, target, tp):
                seconds = [self.work_s(work, 0) for work in hop_works(hop, 0, size_bytes, tp)]
                total += sum(seconds) if hop.operation in POINT_TO_POINT_HOPS else max(seconds, default=0.0)
            self._converted[key] = total
        return self._converted[key]

    @cached_property
    def _converted(self) -> dict[tuple[int, int, ValueLayout, ValueLayout], float]:
        return {}

    def synchronisation_s(self, component: Component, placement: Placement) -> float:
        """Summing the component's gradients over all ranks that hold them alike, with ZeRO gathering its parameters once."""
        operations = ("reduce_scatter", "all_gather") if self.zero_stage else ("all_reduce",)
        return self._buckets_s(component, placement, operations) + self._replica_sums_s(component, placement)

    def _replica_sums_s(self, component: Component, placement: Placement) -> float:
        """Summing the parts of the component's gradients over all sharding groups, where there are several."""
        mesh = self.mesh
        if mesh.groups == 1 or not self.zero_stage:
            return 0.0
        total = 0.0
        for shards, size_bytes in self._gradients(component, placement).items():
            group = tuple(
                mesh.rank(stage=0, replica=copy, shard=shards[0][0]) for copy in range(0, mesh.copies, mesh.group_copies)
            )
            whole, parts = max(size_bytes, self.bucket_bytes), mesh.group_copies * len(shards[0])
            work = Collective(operation="all_reduce", group=group, size_bytes=-(-whole // parts))
            total += self.work_s(work, 0) * size_bytes / whole
        return total

    def _buckets_s(self, component: Component, placement: Placement, operations: Sequence[str]) -> float:
        """Collectives over the component's share of full buckets."""
        total = 0.0
        for shards, size_bytes in self._gradients(component, placement).items():
            copies = self.mesh.group_copies if self.zero_stage else self.mesh.copies
            group = tuple(self.mesh.rank(stage=0, replica=copy, shard=shard) for copy in range(copies) for shard in shards[0])
            if len(group) > 1 and size_bytes:
                whole = max(size_bytes, self.bucket_bytes)
                seconds = sum(
                    self.work_s(Collective(operation=operation, group=group, size_bytes=whole), 0) for operation in operations
                )
                total += seconds * size_bytes / whole
        return total

    def _gradients(self, component: Component, placement: Placement) -> dict[ShardRanks, int]:
        """By the tp ranks that sum them together the bytes of a component's gradients."""
        known, key = self.problem.answers("gradients"), (component.name, placement, self.mesh.tp)
        if key not in known:
            known[key] = sizes = dict[ShardRanks, int]()
            for parameter in component.trainable_parameters:
                shards = alike(component, placement, parameter.name, self.mesh.tp)
                sizes[shards] = sizes.get(shards, 0) + hold(component, placement, parameter, shards[0][0]).size_bytes
        return cast(dict[ShardRanks, int], known[key])

    def update_s(self, component: Component, placement: Placement) -> float:
        """The optimizer's step over what one rank holds of the component."""
        shard = placement.shard if placement.kind == "place" else 0  # all others hold as many
        if not placement.runs_on(shard):
            return 0.0
        total = 0.0
        for step in update_steps(hold(component, placement, each, shard) for each in component.trainable_parameters):
            whole = replace(step, elements=max(step.elements, 1_000_000))
            total += self.work_s(whole, 0) * step.elements / whole.elements
        return total

    def memory_bytes(self, component: Component, placement: Placement, shard: int) -> float:
        """What tp rank `shard` keeps for the component: weights, gradients, optimizer state, saved activations in flight.

        Leaves out what belongs to no single component: context, communication buffers, workspace, conversions in flight.
        """
        if not placement.runs_on(shard):
            return 0.0
        tp = self.mesh.tp
        own, cast = narrowed(self.problem, component.name, placement.rule, placement.ways)
        weights = sum(parameter.size_bytes for parameter in own.trainable_parameters)
        rate = self.problem.device_bytes_per_element
        state = float(sum(rate(parameter.optimizer) * parameter.elements for parameter in own.trainable_parameters))
        alike_ranks = self.mesh.group_copies * {"batch": tp, "shard": tp // placement.ways}.get(placement.kind, 1)
        by_stage = enumerate((state, weights, own.parameter_bytes), start=1)  # what ZeRO divides: the last are the parameters
        held = sum(size / alike_ranks if stage <= self.zero_stage else size for stage, size in by_stage)
        samples = self.samples * placement.batch_ways(tp) // tp
        saved = own.saved_activation_bytes * samples + own.saved_fixed_bytes
        kept = saved + cast
        return held + component.buffer_bytes + self.in_flight * kept
