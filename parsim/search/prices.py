"""The cost of each choice of a placement: the figures of the scheduler's optimisation problem.

One stage of `dp x tp` ranks, `microbatches` microbatches per replica. Priced by the same Costs as the simulator's tasks, piece
by piece: computation of a component, conversion of a value from one layout to another, summing of gradients.

Leaves out what only the simulator knows: conversions that overlap with computation, and gradient buckets (the sum of a
component's gradients is charged its share of a full bucket).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from parsim.costs.costs import Costs
from parsim.model.component import Component, Value
from parsim.model.formats import component_in
from parsim.model.optimizers import update_steps
from parsim.model.shard.narrow import narrow
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
from parsim.plans.stages import Groups, concurrent_with
from parsim.predict.problem import PlanningProblem
from parsim.program.buckets import alike, hold
from parsim.program.passes.convert import hop_collective
from parsim.work import Collective, Compute, Phase, SendRecv, Work


def placements_of(component: Component, mesh: Mesh, samples: int, *, places: Sequence[int] = ()) -> tuple[Placement, ...]:
    """Every placement the component can have when a replica's microbatch is `samples` samples.

    Args:
        places: the tp ranks worth placing a component on alone.
    """
    tp = mesh.tp
    found = [BATCH] if samples % tp == 0 else []
    if tp > 1:
        found.append(REPLICATE)
        found += [Placement("place", shard=shard) for shard in places]
    for sharding in component.shardings:
        found += [
            Placement("shard", rule=sharding.rule, ways=ways)
            for ways in range(2, tp + 1)
            if tp % ways == 0 and sharding.allows(ways) and samples % (tp // ways) == 0
        ]
    return tuple(found)


ComputeKey = tuple[str, bool, Phase, int, str, int, str, tuple[tuple[int, int], ...]]
"""Fingerprint, whether it reads more than the batch, phase, samples, rule and ways of a shard, kind of device, and the
operators where only some run again."""


@dataclass
class ComputeSeconds:
    """Of one problem: prices of computation by numbers of ranks that are priced alike, and what tells components apart that
    cost differently."""

    by_ranks: dict[int, dict[ComputeKey, float]] = field(default_factory=dict)
    same_work: dict[str, tuple[str, bool]] = field(default_factory=dict)


@dataclass
class _Narrowed:
    """Of one problem, by component, rule and ways: one shard, and the bytes of its weights in another precision."""

    by_shard: dict[tuple[str, str, int], tuple[Component, int]] = field(default_factory=dict)


@dataclass
class _Kinds:
    """Of one problem: the first rank of each kind of device, and these by numbers of ranks; components that have a backward."""

    first: dict[str, int] = field(default_factory=dict)
    by_ranks: dict[int, dict[str, int]] = field(default_factory=dict)
    differentiable: frozenset[str] | None = None


def device_kinds(problem: PlanningProblem, ranks: int) -> dict[str, int]:
    """The kinds of device of the first ranks, each with its first rank.

    Args:
        problem: whose cluster is meant. ranks: of a plan.
    """
    known = problem.remembered(_Kinds)
    if not known.first:
        costs = problem.costs(problem.cluster.size)
        for rank in range(problem.cluster.size):
            known.first.setdefault(costs.device_kind(rank), rank)
    if ranks not in known.by_ranks:
        known.by_ranks[ranks] = {kind: first for kind, first in known.first.items() if first < ranks}
    return known.by_ranks[ranks]


ShardRanks = tuple[tuple[int, ...], ...]


@dataclass
class _Gradients:
    """Of one problem, by component, placement and tp."""

    by_placement: dict[tuple[str, Placement, int], dict[ShardRanks, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Prices:
    """Seconds and bytes of placements on the ranks of one stage.

    Attributes: samples: of one replica's microbatch. in_flight: microbatches whose activations are kept at once.
    """

    problem: PlanningProblem
    mesh: Mesh
    samples: int
    bucket_bytes: int
    in_flight: int = 1
    zero_stage: int = 0

    @cached_property
    def _seconds(self) -> dict[tuple[Work, int], float]:
        return {}

    def work_s(self, work: Work, rank: int) -> float:
        """The median price of any work."""
        key = (work, rank)
        if key not in self._seconds:
            self._seconds[key] = self._costs.estimate(work, rank, self._beside(work)).median_s
        return self._seconds[key]

    def _beside(self, work: Work) -> Groups:
        """What communicates at the same time on this mesh."""
        return concurrent_with(self.mesh, work) if self._costs.shares_links else Groups()

    @cached_property
    def _device_types(self) -> dict[str, int]:
        """One rank for each device type."""
        return device_kinds(self.problem, self.mesh.size)

    def compute_s(
        self, component: Component, placement: Placement, phase: Phase, *, fastest: bool = False, part: str = ""
    ) -> float:
        """One microbatch on the slowest device that has the component, or on the fastest. `part`: as in Compute."""
        ranks = (
            [self.mesh.rank(stage=0, replica=replica, shard=placement.shard) for replica in range(self.mesh.copies)]
            if placement.kind == "place"
            else list(self._device_types.values())
        )
        seconds = [self.compute_on_s(component, placement, phase, rank, part) for rank in ranks]
        return min(seconds) if fastest else max(seconds)

    def compute_on_s(self, component: Component, placement: Placement, phase: Phase, rank: int, part: str = "") -> float:
        """One microbatch on a rank of the cluster. Components that do the same work share a price, unless one of them alone
        reads nothing but the batch."""
        return self._local_s(
            component, placement, phase, rank, self.samples * placement.batch_ways(self.mesh.tp) // self.mesh.tp, part
        )

    def local_s(self, component: Component, placement: Placement, phase: Phase, rank: int) -> float:
        """As `compute_on_s`, where every rank that takes part computes all `samples`."""
        return self._local_s(component, placement, phase, rank, self.samples)

    def _local_s(
        self, component: Component, placement: Placement, phase: Phase, rank: int, samples: int, part: str = ""
    ) -> float:
        kind = self._costs.device_kind(rank)
        again = component.selective.operators if part and component.selective is not None else ()
        key = (*self._same_work[component.name], phase, samples, placement.rule, placement.ways, kind, again)
        if key not in self._computed:
            work = Compute(
                component=component.name, phase=phase, samples=samples, rule=placement.rule, ways=placement.ways, part=part
            )
            self._computed[key] = self._costs.estimate(work, rank).median_s
        return self._computed[key]

    @cached_property
    def _costs(self) -> Costs:
        return self.problem.costs(self.mesh.size)

    @cached_property
    def _computed(self) -> dict[ComputeKey, float]:
        """Shared by all meshes whose numbers of ranks have the same prices."""
        group = self.problem.cost_group(self.mesh.size)
        return self.problem.remembered(ComputeSeconds).by_ranks.setdefault(group, {})

    @cached_property
    def _same_work(self) -> dict[str, tuple[str, bool]]:
        model, known = self.problem.model, self.problem.remembered(ComputeSeconds).same_work
        if not known:
            known |= {
                component.name: (
                    component.fingerprint,
                    any(model.value[name].producer is not None for name in component.inputs),
                )
                for component in model.components
            }
        return known

    def same_work(self, component: Component) -> tuple[str, bool]:
        """Equal for components that cost the same."""
        return self._same_work[component.name]

    @cached_property
    def differentiable(self) -> frozenset[str]:
        """Components that have a backward."""
        known = self.problem.remembered(_Kinds)
        if known.differentiable is None:
            known.differentiable = self.problem.model.differentiable_components
        return known.differentiable

    def conversion_s(self, value: Value, source: ValueLayout, target: ValueLayout) -> float:
        """One microbatch of a value from one layout to another, in the first replica."""
        if source == target:
            return 0.0
        key = (value.bytes_per_sample, value.fixed_bytes, source, target)
        if key not in self._converted:
            self._converted[key] = sum(self._hop_s(value, hop) for hop in conversion(source, target, self.mesh.tp))
        return self._converted[key]

    @cached_property
    def _converted(self) -> dict[tuple[int, int, ValueLayout, ValueLayout], float]:
        return {}

    def _hop_s(self, value: Value, hop: Hop) -> float:
        if hop.operation in LOCAL_HOPS:
            return 0.0
        tp = self.mesh.tp
        size_bytes = value.size_bytes(self.samples)
        if hop.operation in POINT_TO_POINT_HOPS:
            piece = size_bytes if hop.operation == "move" else size_bytes // tp
            return sum(
                self.work_s(SendRecv(source=source, destination=target, size_bytes=piece), 0)
                for source, target in hop_pairs(hop, tp)
            )
        return max(self.work_s(hop_collective(hop, group, size_bytes, tp), 0) for group in hop_groups(hop, tp))

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

    def every_microbatch_s(self, component: Component, placement: Placement) -> float:
        """What of the component's gradients and parameters is sent for every microbatch (ZeRO 2 and 3)."""
        gathers = ("all_gather",) * 2 if self.zero_stage >= 3 else ()
        return self._buckets_s(component, placement, ("reduce_scatter", *gathers)) if self.zero_stage >= 2 else 0.0

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
        known, key = self.problem.remembered(_Gradients).by_placement, (component.name, placement, self.mesh.tp)
        if key not in known:
            sizes = known[key] = {}
            for parameter in component.trainable_parameters:
                shards = alike(component, placement, parameter.name, self.mesh.tp)
                sizes[shards] = sizes.get(shards, 0) + hold(component, placement, parameter, shards[0][0]).size_bytes
        return known[key]

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

    def _narrowed(self, component: Component, placement: Placement) -> tuple[Component, int]:
        """One shard of a component, and the bytes of its weights in another precision."""
        known, precision = self.problem.remembered(_Narrowed).by_shard, self.problem.numerics.precision
        key = component.name, placement.rule, placement.ways
        if key not in known:
            own = narrow(component_in(component, precision), placement.rule, placement.ways)
            known[key] = own, own.cast_bytes
        return known[key]

    def memory_bytes(self, component: Component, placement: Placement, shard: int) -> float:
        """What tp rank `shard` keeps for the component: weights, gradients, optimizer state, saved activations in flight.

        Leaves out what belongs to no single component: context, communication buffers, workspace, conversions in flight.
        """
        if not placement.runs_on(shard):
            return 0.0
        tp = self.mesh.tp
        own, cast = self._narrowed(component, placement)
        weights = sum(parameter.size_bytes for parameter in own.trainable_parameters)
        rate = self.problem.device_bytes_per_element
        state = float(sum(rate(parameter.optimizer) * parameter.elements for parameter in own.trainable_parameters))
        alike_ranks = self.mesh.group_copies * {"batch": tp, "shard": tp // placement.ways}.get(placement.kind, 1)
        by_stage = enumerate((state, weights, weights), start=1)  # what ZeRO divides: optimizer state, gradients, parameters
        held = sum(size / alike_ranks if stage <= self.zero_stage else size for stage, size in by_stage)
        samples = self.samples * placement.batch_ways(tp) // tp
        saved = own.saved_activation_bytes * samples + own.saved_fixed_bytes
        kept = saved + cast
        frozen = own.parameter_bytes - weights
        return held + frozen + component.buffer_bytes + self.in_flight * kept
