"""A lower bound of the memory of a rank, whatever is recomputed: what the search leaves out without working out its memory.

    weights       parameters, gradients and optimizer state, divided by as much as tp and ZeRO can
    activations   of one microbatch, as often as the order holds it: what components save. Where it is free what is recomputed:
                  the values that some reader needs for its backward. Recomputed or not, such a reader keeps them
    largest       what one component saves of one microbatch: it lies on a rank during the backward of the component

Bytes are the mean over the tp ranks of a place, and the fullest rank holds at least that. Leaves out everything else, so a plan
above the bound may still not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import NamedTuple

import numpy as np

from parsim.arrays import Floats
from parsim.model.component import Component
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import PIPELINE_ORDERS, moments
from parsim.plans.placement import Placement
from parsim.plans.plan import ZERO_STAGES
from parsim.plans.recompute import AUTO, NONE
from parsim.predict.planning_problem import PlanningProblem
from parsim.schedule.bounds.kept import always_kept, least_saved, saved_bytes
from parsim.schedule.bounds.weights import (
    LeastWeights,
    Options,
    WeightParts,
    alike_components,
    untied_components,
    weight_parts,
)

ROUNDED = 1 - 1e-9


class HeldRuns(NamedTuple):
    """A place on the pp axis: its runs of components (first, one past the last), and at some moments how many microbatches it
    holds of each."""

    runs: tuple[tuple[int, int], ...]
    moments: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFloor:
    """What the components hold at least on a mesh, float64 [n] bytes of the mean tp rank.

    Attributes:
        weights: by ZeRO stage. kept: of one microbatch, whatever is recomputed. saved: of one microbatch, nothing recomputed.
        largest_bytes: what one component saves of one microbatch. rooms: by place on the pp axis, of its largest device.
    """

    weights: LeastWeights
    kept: Floats
    saved: Floats
    largest_bytes: float
    rooms: Floats

    def missing_bytes(
        self,
        stage: int,
        pipeline: Sequence[tuple[str, int]],
        microbatches: int,
        *,
        recomputing: bool = True,
        segments: bool = False,
    ) -> float:
        """By how much no plan can fit, whatever the cut into stages; 0 where some might.

        Args:
            stage: of ZeRO. pipeline: orders with their stages per rank. microbatches: per replica.
            recomputing: whether plans may recompute what they like. segments: and in segments, within which nothing is kept.
        """
        own = self._kept_at_least(recomputing=recomputing, segments=segments)
        weights, room = self.weights.of(stage), float(self.rooms.max())
        places = len(self.rooms)
        held = float(weights.sum())
        if max(held / places, self.largest_bytes) * ROUNDED > room:  # beside the weights of all there is the largest, or all
            beside = max(self.largest_bytes, float(own.sum()))
            return max((held + beside) / places, self.largest_bytes) * ROUNDED - room
        least = float("inf")
        for order, chunks in pipeline:
            least = min(least, self._missing_of(self.weights.of(stage), own, order, chunks, microbatches))
            if not least:
                break
        return least

    def _missing_of(self, weights: Floats, own: Floats, order: str, chunks: int, microbatches: int) -> float:
        places = len(self.rooms)
        if chunks > 1 or PIPELINE_ORDERS[order].halves:  # several runs of components per place: one microbatch of all
            total = float(weights.sum() + own.sum())
            return max(0.0, (total * ROUNDED - float(self.rooms.sum())) / places)
        up_to = np.concatenate([np.zeros((2, 1)), np.cumsum([weights, own], axis=1)], axis=1)
        taken, count = 0, len(own)
        for place in range(places):  # as many as may fit: what is left is least
            alive = moments(order, place, places, microbatches)[-1][0]
            held = (up_to[0] - up_to[0][taken] + alive * (up_to[1] - up_to[1][taken])) * ROUNDED
            taken = int(np.searchsorted(held, self.rooms[place], side="right")) - 1
            if taken >= count:
                return 0.0
        return float(up_to[0][count] - up_to[0][taken] + up_to[1][count] - up_to[1][taken]) / places

    def _kept_at_least(self, *, recomputing: bool, segments: bool) -> Floats:
        """Per component. A segment may be as long as a stage, so of its components nothing is counted."""
        if segments:
            return np.zeros_like(self.kept)
        return self.kept if recomputing else self.saved

    def of_places(self, stage: int, places: Sequence[HeldRuns], *, recomputing: bool, segments: bool = False) -> Floats:
        """float64 [places]: by how much each holds more than it has room for, at least; negative where there is room.

        Args:
            stage: of ZeRO. places: what they run. recomputing, segments: as above.
        """
        weights, own = self.weights.of(stage), self._kept_at_least(recomputing=recomputing, segments=segments)
        held = []
        for place in places:
            kept = [float(own[first:last].sum()) for first, last in place.runs]
            most = max(sum(map(mul, alive, kept)) for alive in place.moments)
            held.append(most + sum(float(weights[first:last].sum()) for first, last in place.runs))
        found: Floats = np.array(held) * ROUNDED - self.rooms
        return found


def memory_floor(problem: PlanningProblem, mesh: Mesh, samples: int, options: Options) -> MemoryFloor:
    """What the components of a model hold at least.

    Args:
        problem: model, cluster and batch. mesh: of the plans. samples: of one replica's microbatch.
        options: per component the placements that it may have.
    """
    known = problem.remembered(_KnownFloors)
    held = tuple(options), mesh
    key = (*held, samples)
    if key not in known.floors:
        if held not in known.weights:
            known.weights[held] = LeastWeights(problem, mesh, held[0])
        devices = problem.cluster.devices
        rooms = [
            max(devices[rank].type.memory_bytes - devices[rank].type.context_bytes for rank in mesh.stage_ranks(place))
            for place in range(mesh.pp)
        ]
        saved, largest_bytes = least_saved(problem, mesh, samples, held[0])
        if problem.activation_offload:  # what a component saves may all be away, but for its own backward
            saved = np.zeros_like(saved)
        known.floors[key] = MemoryFloor(
            weights=known.weights[held],
            kept=saved if problem.recompute == NONE or problem.activation_offload else always_kept(problem, mesh, samples),
            saved=saved,
            largest_bytes=largest_bytes,
            rooms=np.array(rooms, dtype=np.float64),
        )
    return known.floors[key]


def missing_bytes(
    problem: PlanningProblem,
    mesh: Mesh,
    count: int,
    options: Options,
    pipeline: Sequence[tuple[str, int]] = (("1f1b", 1),),
) -> float:
    """By how much no plan can fit; 0 where some might.

    Args:
        problem: model, cluster and batch. mesh: of the plans. count: microbatches per replica.
        options: per component the placements that it may have. pipeline: orders of the plans, with their stages per rank.
    """
    floor = memory_floor(problem, mesh, problem.global_batch // (mesh.dp * count), options)
    stages = (problem.zero_stage,) if isinstance(problem.zero_stage, int) else ZERO_STAGES[-1:]  # the most divided
    return floor.missing_bytes(stages[0], pipeline, count, segments=problem.segments and problem.recompute == AUTO)


_Kind = tuple[int, Component, Placement, WeightParts]
"""How many components are alike, one of them, and how they lie."""


@dataclass
class _KnownFloors:
    """Of one problem: weights and floors on a mesh, and components that are alike."""

    weights: dict[tuple[tuple[tuple[Placement, ...], ...], Mesh], LeastWeights] = field(default_factory=dict)
    floors: dict[tuple[tuple[tuple[Placement, ...], ...], Mesh, int], MemoryFloor] = field(default_factory=dict)
    kinds: dict[tuple[int, tuple[Placement, ...]], list[_Kind]] = field(default_factory=dict)


class HeldTotals(NamedTuple):
    """Bytes of the mean tp rank that holds the whole model.

    Attributes: weights: by ZeRO stage. parameters: trainable ones alone. saved: of one microbatch. kept: likewise, whatever is
        recomputed.
    """

    weights: tuple[float, ...]
    parameters: float
    saved: float
    kept: float


def held_totals(problem: PlanningProblem, mesh: Mesh, samples: int, placed: Sequence[Placement]) -> HeldTotals:
    """What the components hold together, each kind worked out once.

    Args:
        problem: model, cluster and batch. mesh: of the plans. samples: of one replica's microbatch. placed: by component.
    """
    known = problem.remembered(_KnownFloors)
    key = (mesh.tp, tuple(placed))
    if key not in known.kinds:
        kinds: dict[tuple[str, Placement], tuple[Component, int]] = {}
        untied, alike = untied_components(problem), alike_components(problem, [(placement,) for placement in placed])
        for kind, of_kind in zip(alike.first, np.bincount(alike.kinds).tolist(), strict=True):
            component, placement = untied[kind], placed[kind]
            first, number = kinds.get((component.fingerprint, placement), (component, 0))
            kinds[component.fingerprint, placement] = first, number + of_kind
        known.kinds[key] = [
            (number, component, placement, weight_parts(problem, mesh.tp, component, placement))
            for (_, placement), (component, number) in kinds.items()
        ]
    every = known.kinds[key]
    copies = mesh.group_copies
    weights = tuple(sum(number * parts.bytes_at(stage, copies) for number, *_, parts in every) for stage in ZERO_STAGES)
    parameters = sum(number * sizes[2] for number, *_, parts in every for _, sizes in parts.divided)
    if problem.activation_offload:
        return HeldTotals(weights=weights, parameters=parameters, saved=0.0, kept=0.0)
    saved = sum(
        number * saved_bytes(problem, mesh, samples, component, placement) / (mesh.tp if placement.kind == "place" else 1)
        for number, component, placement, _ in every
    )
    return HeldTotals(
        weights=weights,
        parameters=parameters,
        saved=saved,
        kept=saved if problem.recompute == NONE else float(always_kept(problem, mesh, samples).sum()),
    )
