"""Pipeline stages of one mesh, cut by cost: the plan whose slowest stage is fastest among those whose stages fit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

from parsim.arrays import Floats
from parsim.errors import ScheduleError
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import check_chunks, stages_by_rank
from parsim.plans.placement import BATCH, Placement
from parsim.plans.plan import DEFAULT_BUCKET_BYTES, Plan
from parsim.plans.recompute import Recompute
from parsim.plans.staged import stages_of
from parsim.predict.planning_problem import PlanningProblem
from parsim.schedule.cuts import Bounds, are_listed, count_cuts, cuts_by_bound
from parsim.schedule.partition import partition
from parsim.schedule.recomputation.segments import within_stages
from parsim.schedule.recomputation.steps import Segments
from parsim.schedule.stage_costs import StageCosts

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
            clip_gradients=self.problem.clip_gradients,
            optimizer_offload=self.problem.optimizer_offload,
            activation_offload=self.problem.activation_offload,
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

    def _cut(self, stage_s: Callable[[int], Floats]) -> Bounds:
        places = self._costs.places
        crossing_s = self._costs.cuts_s()
        cut = partition(len(places) - 1, self.mesh.pp * self.chunks, stage_s, [crossing_s[place] for place in places[:-1]])
        return tuple((places[first], places[last]) for first, last in cut)

    def placing(self, placements: Mapping[str, Placement]) -> Cutting:
        """The same with other placements, by component."""
        return replace(self, placements=placements)

    @property
    def others(self) -> int:
        """How many cuts there are beside the fastest; 0 where they are too many to be listed."""
        count, components = self.mesh.pp * self.chunks, len(self.problem.model.components)
        if count > components or not are_listed(components, count) or len(self._costs.places) <= components:
            return 0
        return count_cuts(components, count) - 1

    def others_by_bound(self) -> Iterator[tuple[float, Bounds]]:
        """Every cut but the fastest, with a lower bound of the pipeline without transfers; bounds ascending."""
        count, components = self.mesh.pp * self.chunks, len(self.problem.model.components)
        before = self._costs.before_s
        first = self.fastest_cut
        for bound, cut in cuts_by_bound(components, count, self._costs.seconds, before, self.microbatches):
            if cut != first:
                yield bound, cut

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
        count = self.mesh.pp * self.chunks
        limits = self._costs.limits_bytes()
        with contextlib.suppress(ScheduleError):  # where no cut fits
            for _ in range(TIGHTENINGS):
                excess = _excess_bytes(self.problem, tried)
                if not any(excess):
                    return tried
                if count == 1:
                    return None
                limits = [limit - 1.02 * over / self.chunks for limit, over in zip(limits, excess, strict=True)]
                tried = self.plan(self._cut(partial(self._costs.fitting_s, limits)))
            return None if any(_excess_bytes(self.problem, tried)) else tried
        return None

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
                excess = _excess_bytes(self.problem, tried)
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


def _excess_bytes(problem: PlanningProblem, plan: Plan) -> list[float]:
    """Per stage by how much its worst rank does not fit."""
    worst = [0.0] * plan.mesh.pp
    for entry in problem.unlike_memory(plan):
        place = plan.stage_of_rank(entry.rank)
        worst[place] = max(worst[place], float(entry.excess_bytes))
    return [worst[place] for place in plan.stage_places]
