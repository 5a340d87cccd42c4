"""Seconds and bytes of runs of components as stages of a pipeline, and where a model may be cut into stages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, groupby, pairwise
from typing import cast

import numpy as np

from parsim.costs.costs import Costs
from parsim.errors import ScheduleError
from parsim.model.component import Component
from parsim.model.model import Model, all_layers_of, layers_of
from parsim.numeric import Floats
from parsim.plans.layouts import BATCH, Placement
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import PIPELINE_ORDERS, check_chunks, moments, rank_of_stage, stages_by_rank
from parsim.plans.plan import AUTO, BY_OPERATOR, DEFAULT_BUCKET_BYTES, Plan, Recompute, named
from parsim.plans.stages import UNEVEN_CUTS, counted_out, stages_of
from parsim.predict.problem import PlanningProblem
from parsim.records import once
from parsim.search.placement.problem import is_chain
from parsim.search.prices import Prices
from parsim.search.space import INFINITE, Bounds, are_listed, count_cuts, cuts_by_bound, partition, sums_between
from parsim.work import SendRecv

MOST_PLACES = 1024
"""Components beyond which stages are cut between repeated blocks alone."""

LONGEST_BLOCK, MOSTLY = 64, 0.9
"""Components of a repeated block at most, and the share of a model that blocks must be."""


@dataclass(frozen=True)
class StageCosts:
    """Time and memory of a run of components on the devices of one stage."""

    problem: PlanningProblem
    mesh: Mesh
    samples: int
    microbatches: int
    order: str
    chunks: int
    placements: Mapping[str, Placement]
    zero_stage: int

    @cached_property
    def _costs(self) -> Costs:
        return self.problem.costs(self.mesh.size)

    @cached_property
    def _key(self) -> tuple[Mesh, int, tuple[tuple[str, Placement], ...]]:
        return self.mesh, self.samples, tuple(self.placements.items())

    @cached_property
    def _up_to_s(self) -> dict[str, Floats]:
        """Per device kind: forward and backward of one microbatch of the first i components."""
        known = self.problem.answers("up_to_s")
        if self._key not in known:
            prices = self._prices(in_flight=1)
            known[self._key] = by_kind = dict[str, Floats]()
            for rank in range(self.mesh.size):
                if (kind := self._costs.device_kind(rank)) not in by_kind:
                    by_kind[kind] = _running(
                        [
                            sum(prices.compute_on_s(component, placement, phase, rank) for phase in prices.phases(component))
                            for component, placement in self._placed
                        ]
                    )
        return cast(dict[str, Floats], known[self._key])

    @property
    def _placed(self) -> list[tuple[Component, Placement]]:
        return [(component, self.placements.get(component.name, BATCH)) for component in self.problem.model.components]

    @cached_property
    def _seconds(self) -> dict[str, Floats]:
        """Per device kind: forward and backward of one microbatch of components first..last-1, at [last, first]."""
        known, key = self.problem.answers("seconds"), (*self._key, len(self.places))
        if key not in known:
            places = list(self.places)
            some = np.tri(len(places), k=-1, dtype=bool)  # at [last, first] whether first < last
            known[key] = {
                kind: np.where(some, sums_between(running[places]), INFINITE) for kind, running in self._up_to_s.items()
            }
        return cast(dict[str, Floats], known[key])

    def runs_s(self, cut: Bounds) -> list[float]:
        """By stage the seconds of one microbatch on the slowest device of the stage."""
        return [
            max(float(self._up_to_s[kind][last] - self._up_to_s[kind][first]) for kind in kinds)
            for (first, last), kinds in zip(cut, self._kinds, strict=True)
        ]

    @property
    def places(self) -> tuple[int, ...]:
        """Where stages may begin and end, ascending, 0 and the number of components included."""
        places = cut_places(self.problem)
        enough = len(places) > self.mesh.pp * self.chunks
        return places if enough else tuple(range(len(self.problem.model.components) + 1))

    @cached_property
    def _kinds(self) -> list[set[str]]:
        """Per stage its kinds of devices."""
        return [
            {self._costs.device_kind(rank) for rank in self._costs.unlike_ranks(self.mesh.stage_range(place))}
            for place in rank_of_stage(self.order, self.mesh.pp, self.chunks)
        ]

    def seconds(self, stage: int) -> Floats:
        """At [last, first]: forward and backward of one microbatch on the slowest device of the stage; infinite where empty."""
        slowest: Floats = np.max([self._seconds[kind] for kind in self._kinds[stage]], axis=0)
        return slowest

    @cached_property
    def before_s(self) -> Floats:
        """By first component of a stage, what a microbatch takes before it and, going back, behind it at least.

        Each component on the fastest kind of device; nothing where stages do not wait for one another, or for halves alone.
        """
        alone = PIPELINE_ORDERS[self.order].halves or not is_chain(self.problem)
        least: Floats = np.min([np.diff(of_kind) for of_kind in self._up_to_s.values()], axis=0)
        return _running([0.0] * len(least) if alone else least.tolist())

    def _prices(self, *, in_flight: int) -> Prices:
        return Prices(self.problem, self.mesh, self.samples, in_flight=in_flight, zero_stage=self.zero_stage)

    @cached_property
    def _up_to_bytes(self) -> tuple[Floats, Floats]:
        """Bytes of the first i components: a fixed part, and a part per microbatch in flight."""
        none, one = (
            _running([prices.memory_bytes(component, placement, 0) for component, placement in self._placed])
            for prices in (self._prices(in_flight=0), self._prices(in_flight=1))
        )
        return none, one - none

    def limits_bytes(self) -> list[float]:
        """Per stage what its smallest device has for components of one chunk."""
        devices = self.problem.cluster.devices
        rooms = [
            min(devices[rank].type.room_bytes for rank in self.mesh.stage_ranks(place)) / self.chunks
            for place in range(self.mesh.pp)
        ]
        return [rooms[place] for place in rank_of_stage(self.order, self.mesh.pp, self.chunks)]

    def fitting_s(self, limits_bytes: Sequence[float], stage: int, kept_bytes: Floats | None = None) -> Floats:
        """The `seconds` of a stage, infinite where the stage would hold more than its limit.

        Args:
            limits_bytes: by stage. kept_bytes: float64 [n], of one microbatch, where components are recomputed.
        """
        held = sums_between(self._held_up_to(stage, kept_bytes)[list(self.places)])
        return np.where(held <= limits_bytes[stage], self.seconds(stage), INFINITE)

    def held_bytes(self, stage: int, run: tuple[int, int], kept_bytes: Floats) -> float:
        """What a run of components (first, one past the last) is taken to hold as a stage; the other arguments as above."""
        up_to = self._held_up_to(stage, kept_bytes)
        return float(up_to[run[1]] - up_to[run[0]])

    def _held_up_to(self, stage: int, kept_bytes: Floats | None) -> Floats:
        """By number of components what the first so many hold as a part of the stage."""
        fixed, alone = self._up_to_bytes
        of_one = alone if kept_bytes is None else _running(kept_bytes.tolist())
        pp = self.mesh.pp
        place = rank_of_stage(self.order, pp, self.chunks)[stage]
        chunk = stages_by_rank(self.order, pp, self.chunks)[place].index(stage)
        alive = max(moment[chunk] for moment in moments(self.order, place, pp, self.microbatches, self.chunks))
        held: Floats = fixed + alive * of_one
        return held

    def cuts_s(self) -> Sequence[float]:
        """Per place the transfer of everything that crosses the cut before it, forward, between the first two stages."""
        return _cuts_s(self.problem, self.mesh, self.samples)


@once
def _cuts_s(problem: PlanningProblem, mesh: Mesh, samples: int) -> Sequence[float]:
    prices = Prices(problem, mesh, samples)
    target = mesh.copies * mesh.tp
    sizes = crossing_bytes(problem, samples)
    return [prices.work_s(SendRecv(source=0, destination=target, size_bytes=size), 0) for size in sizes]


def is_long(model: Model) -> bool:
    """Whether a model has so many components that its repeated blocks are planned alike."""
    return len(model.components) > MOST_PLACES


@once
def cut_places(problem: PlanningProblem) -> tuple[int, ...]:
    """Where stages may begin and end, ascending: anywhere, but in models of many components between repeated blocks alone."""
    prints = problem.model.fingerprints
    count = len(prints)
    for period in range(1, LONGEST_BLOCK + 1) if is_long(problem.model) else ():
        alike = [one == two for one, two in zip(prints, prints[period:], strict=False)]
        if sum(alike) >= MOSTLY * count:
            first = alike.index(True)
            last = count - alike[::-1].index(True)
            return tuple(sorted({*range(first), *range(first, last, period), *range(last, count + 1)}))
    return tuple(range(count + 1))


def _running(values: Sequence[float]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.array(values, dtype=np.float64))])


def crossing_bytes(problem: PlanningProblem, samples: int) -> list[int]:
    """Per place the bytes of one microbatch that cross the cut before it: every value once, however many read it."""
    model = problem.model
    last_reader = {value: number for number, component in enumerate(model.components) for value in component.inputs}
    crossing = np.zeros(len(model.components) + 1, dtype=np.int64)
    for name, reader in last_reader.items():
        value = model.value[name]
        if value.producer is not None:
            crossing[model.component_index[value.producer] + 1] += value.size_bytes(samples)
            crossing[reader + 1] -= value.size_bytes(samples)
    return [int(size) for size in np.cumsum(crossing)[: len(model.components)]]


Segments = tuple[tuple[str, ...], ...]


# Whole layers recomputed together (`Plan.segments`), where the model is cut more finely than its layers.
#
# A segment keeps what enters it alone, as it lies between layers, and the components within it nothing. So a model at
# granularity "sublayer" keeps as little as the same model by blocks, and as Megatron-LM and torchtitan do. The executor cannot
# run segments, so there are some where a problem says so (`PlanningProblem.segments`): of every layer of which a question
# asks to recompute all, and in a search that is free to recompute.
#
# Leaves out: segments that are no runs of repeated blocks, and plans with segments of several lengths.


BLOCKS_TOGETHER = (1, 2, 4)
"""Blocks that are one segment, in the order in which they are tried: longer ones keep less, and are whole for a while."""


def _layers(problem: PlanningProblem) -> Bounds:
    """The layers of a problem's model; none where they may not be segments."""
    return layers_of(problem.model) if problem.segments else ()


def _joined(problem: PlanningProblem, together: int) -> Segments:
    """So many layers to a segment."""
    components, backwards, blocks = problem.model.components, problem.model.differentiable_components, _layers(problem)
    joined = (blocks[first : first + together] for first in range(0, len(blocks), together))
    names = (tuple(component.name for first, last in some for component in components[first:last]) for some in joined)
    return tuple(segment for segment in names if sum(name in backwards for name in segment) > 1)


@once
def segments_of(problem: PlanningProblem) -> tuple[Segments, ...]:
    """The ways in which a search may make segments of layers, the shortest first; none where it may not recompute them."""
    free = problem.recompute == AUTO and bool(_layers(problem))
    return tuple(_joined(problem, together) for together in BLOCKS_TOGETHER if free)


def recomputing_layers(problem: PlanningProblem, plan: Plan, recompute: Recompute) -> Plan:
    """The plan that recomputes what a question names; each layer of which that is all, as a segment."""
    plan = replace(plan, recompute=recompute)
    backwards = problem.model.differentiable_components
    segments = tuple(
        part
        for part in within_stages(plan, _joined(problem, 1))
        if plan.recomputed.issuperset(backwards.intersection(part)) and len(backwards.intersection(part)) > 1
    )
    if not segments:
        return plan
    inside = {name for segment in segments for name in segment}
    whole, some = named(plan.recompute, plan.components)
    alone = (*(whole - inside), *(BY_OPERATOR + name for name in some - inside))
    return replace(plan, recompute=alone, segments=segments)


def within_stages(plan: Plan, segments: Segments) -> Segments:
    """Segments cut where the stages of a plan begin; what is left of them of one component is none.

    Args:
        segments: of its model.
    """
    stage_of = {name: number for number, stage in enumerate(plan.stages) for name in stage.components}
    parts = (tuple(part) for segment in segments for _, part in groupby(segment, key=stage_of.__getitem__))
    return tuple(part for part in parts if len(part) > 1)


# Pipeline stages of one mesh, cut by cost: the plan whose slowest stage is fastest among those whose stages fit.


TIGHTENINGS = 4
"""How often stages that do not fit after all (workspace, boundary values) are cut again with that much less memory."""

USUALLY_LEFT = 0.94
"""Of a device's memory, beside workspace and buffers: with what cuts under recomputation begin."""


def balanced_plan(
    problem: PlanningProblem,
    strategy: str,
    mesh: Mesh,
    *,
    microbatches: int,
    pipeline_order: str,
    chunks: int = 1,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    placements: Mapping[str, Placement] | None = None,
    zero_stage: int | None = None,
) -> Plan:
    """The plan whose slowest stage is fastest among those whose stages fit; among all, where none fits.

    Args:
        chunks: stages per rank, of which each may take an equal part of its memory.
        placements: by component; None: all batch-sharded. zero_stage: None: that of the problem.

    Raises:
        ScheduleError: more stages than components. PlanError: the batch, the placements and the mesh do not go together.
        CostError: stages cannot be balanced where a component has no cost.
    """
    cutting = Cutting(
        problem=problem,
        strategy=strategy,
        mesh=mesh,
        microbatches=microbatches,
        order=pipeline_order,
        chunks=chunks,
        placements=placements or {},
        bucket_bytes=bucket_bytes,
        zero_stage=problem.fixed_zero_stage if zero_stage is None else zero_stage,
    )
    return cutting.fitting() or cutting.fastest()


@dataclass(frozen=True, kw_only=True)
class Cutting:
    """The plans that differ in the cut into stages alone.

    Attributes: placements: by component; what is left out is batch-sharded. Others: as `balanced_plan` takes them.
    """

    problem: PlanningProblem
    strategy: str
    mesh: Mesh
    microbatches: int
    order: str
    chunks: int = 1
    placements: Mapping[str, Placement]
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    zero_stage: int = 0

    def __post_init__(self) -> None:
        check_chunks(self.order, self.chunks)

    def plan(self, bounds: Bounds) -> Plan:
        """With these stages: of each its first component, and one past its last."""
        components = self.problem.model.components
        parts = ([component.name for component in components[first:last]] for first, last in bounds)
        return Plan(
            strategy=self.strategy,
            mesh=self.mesh,
            stages=stages_of(
                self.mesh, parts, lambda name: self.placements.get(name, BATCH), order=self.order, chunks=self.chunks
            ),
            global_batch=self.problem.global_batch,
            microbatches=self.microbatches,
            pipeline_order=self.order,
            bucket_bytes=self.bucket_bytes,
            zero_stage=max(self.zero_stage, self.mesh.least_zero_stage),
            **self.problem.plan_settings,
        )

    def fastest(self) -> Plan:
        """The plan whose slowest stage is fastest, whatever memory it takes. Raises ScheduleError, PlanError, CostError."""
        return self.plan(self.fastest_cut)

    @cached_property
    def fastest_cut(self) -> Bounds:
        """By stage its first component and one past its last. Raises ScheduleError, CostError."""
        if self.mesh.pp * self.chunks == 1:
            return ((0, len(self.problem.model.components)),)
        return self._cut(self._costs.seconds)

    @cached_property
    def _counted_out(self) -> Bounds | None:
        """The cut by numbers of layers, that a question or its framework asks for; None: stages are cut by cost.

        Raises ScheduleError: the framework has no cut into these stages, and no question asks for them.
        """
        constraints, layers = self.problem.constraints, all_layers_of(self.problem.model)
        stages = self.mesh.pp * self.chunks
        counts = constraints.stage_layers or counted_out(constraints.cut, len(layers), stages)
        if counts is None:
            is_asked = constraints.pp is not None and (constraints.chunks is not None or self.chunks == 1)
            if not constraints.cut or len(layers) < stages or is_asked:
                return None
            uneven = UNEVEN_CUTS.get(constraints.cut)
            counts = uneven(len(layers), stages) if uneven is not None else None
        if counts is None:
            raise ScheduleError(f"{constraints.framework} does not cut {len(layers)} layers into {stages} stages")
        places = [*(first for first, _ in layers), layers[-1][1]]
        starts = [places[number] for number in accumulate(counts[:-1])]
        return tuple(pairwise((0, *starts, len(self.problem.model.components))))

    def _cut(self, stage_s: Callable[[int], Floats]) -> Bounds:
        if self._counted_out is not None:
            return self._counted_out
        places = self._costs.places
        crossing_s = self._costs.cuts_s()
        cut = partition(len(places) - 1, self.mesh.pp * self.chunks, stage_s, [crossing_s[place] for place in places[:-1]])
        return tuple((places[first], places[last]) for first, last in cut)

    def placing(self, placements: Mapping[str, Placement]) -> Cutting:
        """The cutting with other placements, by component."""
        return replace(self, placements=placements)

    @property
    def others(self) -> int:
        """How many cuts there are beside the fastest; 0 where they are too many to be listed."""
        if self._counted_out is not None:
            return 0
        count, components = self.mesh.pp * self.chunks, len(self.problem.model.components)
        if count > components or not are_listed(components, count) or len(self._costs.places) <= components:
            return 0
        return count_cuts(components, count) - 1

    def others_by_bound(self) -> Iterator[tuple[float, Bounds]]:
        """Every cut but the fastest, with a lower bound of the pipeline without transfers; bounds ascending."""
        count, components = self.mesh.pp * self.chunks, len(self.problem.model.components)
        listed = cuts_by_bound(components, count, self._costs.seconds, self._costs.before_s, self.microbatches)
        return ((bound_s, cut) for bound_s, cut in listed if cut != self.fastest_cut)

    def least_s(self, cut: Bounds | None = None) -> float:
        """A lower bound of a pipeline without conversions and transfers: a place computes its stages, after what comes before.

        Args:
            cut: by stage its first component and one past its last; None: the cut whose slowest stage is fastest.

        Raises:
            ScheduleError: there is no such cut. CostError: a component without a price.
        """
        if any(placement.kind == "place" for placement in self.placements.values()):
            return 0.0
        runs = self.fastest_cut if cut is None else cut
        seconds = self._costs.runs_s(runs)
        before = self._costs.before_s
        return max(
            float(before[runs[own[0]][0]]) + self.microbatches * sum(seconds[stage] for stage in own)
            for own in stages_by_rank(self.order, self.mesh.pp, self.chunks)
        )

    def fitting(self) -> Plan | None:
        """The plan whose slowest stage is fastest among those whose stages fit; None where none was found."""
        tried = self.fastest()
        limits = self._costs.limits_bytes()
        with contextlib.suppress(ScheduleError):  # where no cut fits
            for left in range(TIGHTENINGS, -1, -1):
                excess = self._excess_bytes(tried)
                if not any(excess):
                    return tried
                if not left or self.mesh.pp * self.chunks == 1:
                    return None
                limits = [limit - 1.02 * over / self.chunks for limit, over in zip(limits, excess, strict=True)]
                tried = self.plan(self._cut(partial(self._costs.fitting_s, limits)))
        return None

    def _excess_bytes(self, plan: Plan) -> list[float]:
        """By stage, that of its place."""
        by_place = place_excess_bytes(self.problem, plan)
        return [by_place[place] for place in plan.stage_places]

    def fitting_recomputed(self, recompute: Recompute, kept_bytes: Floats, segments: Segments = ()) -> Plan | None:
        """The plan that recomputes these components, with the fastest stages found that fit; None where none was.

        Args:
            recompute: of the plan. kept_bytes: float64 [n], what each component then keeps of one microbatch.
            segments: of the model, which stages may cut in two.
        """
        if self.chunks > 1:
            return None
        limits = [USUALLY_LEFT * limit for limit in self._costs.limits_bytes()]
        with contextlib.suppress(ScheduleError):
            for _ in range(TIGHTENINGS):
                cut = self._cut(partial(self._costs.fitting_s, limits, kept_bytes=kept_bytes))
                whole = self.plan(cut)
                tried = replace(whole, recompute=recompute, segments=within_stages(whole, segments))
                excess = self._excess_bytes(tried)
                if not any(excess):
                    return tried
                for stage, (run, over) in enumerate(zip(cut, excess, strict=True)):
                    if over:  # less than what it was taken to hold, which leaves out buffers
                        limits[stage] = min(limits[stage], self._costs.held_bytes(stage, run, kept_bytes)) - 1.02 * over
        return None

    @cached_property
    def _costs(self) -> StageCosts:
        samples = self.problem.global_batch // (self.mesh.dp * self.microbatches)
        return StageCosts(
            self.problem, self.mesh, samples, self.microbatches, self.order, self.chunks, self.placements, self.zero_stage
        )


def place_excess_bytes(problem: PlanningProblem, plan: Plan) -> list[float]:
    """Per place on the pp axis by how much its worst rank does not fit safely; 0 where it does."""
    return [max(0.0, over) for over in place_over_bytes(problem, plan)]


def place_over_bytes(problem: PlanningProblem, plan: Plan) -> list[float]:
    """Per place on the pp axis how many bytes its worst rank needs beyond what it has; below 0 where it has more."""
    worst = [-float("inf")] * plan.mesh.pp
    for memory in problem.unlike_memory(plan):
        place = plan.stage_of_rank(memory.rank)
        short = float(memory.needed_at(problem.safe_probability) - memory.limit_bytes)
        over = max(short, float(memory.host_excess_bytes)) if memory.host_excess_bytes else short
        worst[place] = max(worst[place], over)
    return worst
