"""What a plan holds at least, and what it must recompute at least to fit: known without working out its memory.

A place that holds too much must free it: a recomputed component frees at most what it saves, of every microbatch that is held.
The least seconds for that are those of a knapsack whose items may be divided.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from parsim.arrays import Floats
from parsim.plans.pipeline import PIPELINE_ORDERS, moments
from parsim.plans.placement import BATCH
from parsim.plans.plan import Plan
from parsim.predict.planning_problem import PlanningProblem
from parsim.schedule.bounds.computation import computation_of, prices_of
from parsim.schedule.bounds.memory import ROUNDED, HeldRuns, MemoryFloor, memory_floor
from parsim.schedule.bounds.step import ROUNDING, least_noise
from parsim.work import Phase

MOST_FORWARDS = 256
"""Of a place. Beyond, no more microbatches are counted, and of several runs of components one microbatch each."""


@dataclass(frozen=True)
class PlanFloor:
    """Of the plans of one cut into stages: the floor of its mesh and placements, and what its places run.

    Attributes: plan: with any ZeRO stage, buckets and recomputation.
    """

    problem: PlanningProblem
    plan: Plan
    floor: MemoryFloor
    places: tuple[HeldRuns, ...]

    def excess_bytes(self, stage: int, *, recomputing: bool, segments: bool = False) -> float:
        """By how much the plan does not fit at least; 0 where it might.

        Args:
            stage: of ZeRO. recomputing: whether it may recompute what it likes. segments: and whole runs of components.
        """
        over = max(0.0, self.floor.largest_bytes - float(self.floor.rooms.max()))
        held = self.floor.of_places(stage, self.places, recomputing=recomputing, segments=segments)
        return max(over, float(held.max()))

    def may_fit_with(self, stage: int, whole: Set[str], some: Set[str]) -> bool:
        """Whether a place may fit where just these components are recomputed; false only where none of the plans does.

        What they save is freed until their own backward. In that, what runs whole is whole again, beside what earlier
        components save.

        Args:
            stage: of ZeRO. whole, some: components whose forward runs again, or some operators of it; not as segments.
        """
        over = self.floor.of_places(stage, self.places, recomputing=False).tolist()
        return all(
            excess <= 0
            or (self._frees(place, whole | some) >= excess * ROUNDED and self._holds_again(stage, place, room, whole, some))
            for place, excess, room in zip(self.places, over, self.floor.rooms.tolist(), strict=True)
        )

    def _frees(self, place: HeldRuns, again: Set[str]) -> float:
        alive = np.max(np.array(place.moments), axis=0).tolist()
        names, saved = self._names, self.floor.saved.tolist()
        return sum(
            float(count * saved[number])
            for (first, last), count in zip(place.runs, alive, strict=True)
            for number in range(first, last)
            if names[number] in again
        )

    def _holds_again(self, stage: int, place: HeldRuns, room: float, whole: Set[str], some: Set[str]) -> bool:
        """Whether each component may be whole in its backward. Not known of components on single ranks, which run beside one
        another."""
        if self._placed_alone:
            return True
        names, saved, weights = self._names, self.floor.saved.tolist(), self.floor.weights.of(stage)
        left = room / ROUNDED - sum(float(weights[first:last].sum()) for first, last in place.runs)
        for first, last in place.runs:
            earlier = 0.0
            for number in range(first, last):
                if names[number] not in some and earlier + saved[number] > left:
                    return False
                if names[number] not in whole and names[number] not in some:
                    earlier += saved[number]
        return True

    @cached_property
    def _names(self) -> list[str]:
        return [component.name for component in self.problem.model.components]

    @cached_property
    def _placed_alone(self) -> bool:
        return any(placement.kind == "place" for stage in self.plan.stages for _, placement in stage.placed())

    def excess_of_any_cut(self, stage: int, *, recomputing: bool) -> float:
        """The same whatever the cut into stages.

        Args:
            stage, recomputing: as above.
        """
        pipeline = ((self.plan.pipeline_order, self.plan.chunks),)
        return self.floor.missing_bytes(stage, pipeline, self.plan.microbatches, recomputing=recomputing)

    def recomputing_bound_s(self, stage: int) -> float:
        """Seconds that no step goes below which recomputes as much as the plan must.

        Args:
            stage: of ZeRO.
        """
        problem, plan = self.problem, self.plan
        over = self.floor.of_places(stage, self.places, recomputing=False)
        bound = 0.0
        for work, place, excess in zip(computation_of(problem, plan), self.places, over.tolist(), strict=True):
            again = self._freeing_s(place, excess)
            bound = max(bound, work.busy_s + plan.microbatches * again)
            if work.after_s is not None:  # the first second forward may run before the first gradient has come
                bound = max(bound, work.done_s + work.after_s + (plan.microbatches - 1) * again)
        return (bound * least_noise(problem, plan.world_size) + problem.costs(plan.world_size).between_steps_s) * ROUNDING

    def _freeing_s(self, place: HeldRuns, excess: float) -> float:
        """The least seconds per microbatch of forwards that free so much."""
        if excess <= 0:
            return 0.0
        alive = np.max(np.array(place.moments), axis=0)
        frees = np.concatenate(
            [count * self.floor.saved[first:last] for (first, last), count in zip(place.runs, alive, strict=True)]
        )
        seconds = np.concatenate([self._forward_s[first:last] for first, last in place.runs])
        useful = frees > 0
        frees, seconds = frees[useful], seconds[useful]
        best = np.argsort(seconds / frees)
        freed = np.cumsum(frees[best])
        whole = int(np.searchsorted(freed, excess))
        if whole >= len(freed):
            return float(seconds.sum())
        before = float(freed[whole - 1]) if whole else 0.0
        return float(seconds[best][:whole].sum() + seconds[best][whole] * (excess - before) / frees[best][whole])

    @cached_property
    def _forward_s(self) -> Floats:
        """By component, of one microbatch on the fastest device."""
        prices = prices_of(self.problem, self.plan)
        placed = dict(pair for stage in self.plan.stages for pair in stage.placed())
        return np.array(
            [
                prices.compute_s(component, placed.get(component.name, BATCH), Phase.FORWARD, fastest=True)
                for component in self.problem.model.components
            ]
        )


@dataclass
class _Known:
    """Of one problem, by plan without ZeRO stage, buckets and recomputation."""

    floors: dict[Plan, PlanFloor | None] = field(default_factory=dict)


def plan_floor(problem: PlanningProblem, plan: Plan) -> PlanFloor | None:
    """What a plan holds at least; None where its stages are no runs of components.

    Args:
        problem: model, cluster and batch. plan: of this model.
    """
    known = problem.remembered(_Known).floors
    program = plan.without_zero()
    if program not in known:
        known[program] = _made(problem, program)
    return known[program]


def floor_excess_bytes(problem: PlanningProblem, plan: Plan, *, recomputing: bool, segments: bool = False) -> float:
    """By how much a plan does not fit at least; 0 where it might.

    Args:
        problem: model, cluster and batch. plan: of this model. recomputing: whether it may recompute what it likes.
        segments: and whole runs of components.
    """
    floor = plan_floor(problem, plan)
    if floor is None:
        return 0.0
    return max(0.0, floor.excess_bytes(plan.zero_stage, recomputing=recomputing, segments=segments))


def _made(problem: PlanningProblem, plan: Plan) -> PlanFloor | None:
    order, mesh = problem.model.component_index, plan.mesh
    runs = [(order[stage.components[0]], order[stage.components[-1]] + 1) for stage in plan.stages if stage.components]
    lengths = [len(stage.components) for stage in plan.stages]
    if len(runs) < len(plan.stages) or [last - first for first, last in runs] != lengths:
        return None
    placed = dict(pair for stage in plan.stages for pair in stage.placed())
    options = tuple((placed.get(component.name, BATCH),) for component in problem.model.components)
    halves = PIPELINE_ORDERS[plan.pipeline_order].halves
    places = []
    for place in range(mesh.pp):
        stages = plan.place_stages(place)
        every: tuple[tuple[int, ...], ...] = ((1,) * len(stages),)
        if not halves and (plan.chunks == 1 or plan.microbatches * plan.chunks <= MOST_FORWARDS):
            every = moments(plan.pipeline_order, place, mesh.pp, min(plan.microbatches, MOST_FORWARDS), plan.chunks)
        places.append(HeldRuns(tuple(runs[stage] for stage in stages), every))
    floor = memory_floor(problem, mesh, plan.microbatch_samples, options)
    return PlanFloor(problem, plan, floor, tuple(places))
