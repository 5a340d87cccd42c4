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
from dataclasses import dataclass, field, replace
from operator import mul
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from parsim.arrays import Floats
from parsim.graph.parameter_buckets import alike, hold
from parsim.model.component import Component
from parsim.model.precision import component_in, value_in
from parsim.model.shard.narrow import narrow
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import PIPELINE_ORDERS, moments
from parsim.plans.placement import Placement
from parsim.plans.plan import ZERO_STAGES
from parsim.plans.recompute import AUTO, NONE
from parsim.predict.planning_problem import PlanningProblem

Options = Sequence[tuple[Placement, ...]]
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

    weights: _Weights
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
        found = max(0.0, float(weights.sum()) * ROUNDED / places - room, self.largest_bytes * ROUNDED - room)
        if found:
            return found
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
    known = problem.remembered(_Least)
    held = tuple(options), mesh
    key = (*held, samples)
    if key not in known.floors:
        if held not in known.weights:
            known.weights[held] = _Weights(problem, mesh, held[0])
        devices = problem.cluster.devices
        rooms = [
            max(devices[rank].type.memory_bytes - devices[rank].type.context_bytes for rank in mesh.stage_ranks(place))
            for place in range(mesh.pp)
        ]
        saved, largest_bytes = _least_saved(problem, mesh, samples, held[0])
        known.floors[key] = MemoryFloor(
            weights=known.weights[held],
            kept=saved if problem.recompute == NONE else _always_kept(problem, mesh, samples),
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


@dataclass
class _Least:
    """Of one problem: weights on a mesh, what one component saves of so many samples, and what is made of both."""

    untied: tuple[Component, ...] | None = None
    parts: dict[tuple[str, Placement, int], _Parts] = field(default_factory=dict)
    weights: dict[tuple[tuple[tuple[Placement, ...], ...], Mesh], _Weights] = field(default_factory=dict)
    saved: dict[tuple[str, tuple[Placement, ...], int, int], tuple[float, float]] = field(default_factory=dict)
    floors: dict[tuple[tuple[tuple[Placement, ...], ...], Mesh, int], MemoryFloor] = field(default_factory=dict)
    rates: Floats | None = None
    prints: tuple[tuple[str, str], ...] = ()
    alike: dict[tuple[tuple[Placement, ...], ...], _Alike] = field(default_factory=dict)
    kinds: dict[tuple[int, tuple[Placement, ...]], list[tuple[int, Component, Placement, _Parts]]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Weights:
    """By ZeRO stage and component, a tied parameter with the first that has it; a stage is worked out when it is asked for."""

    problem: PlanningProblem
    mesh: Mesh
    options: Options
    stages: dict[int, Floats] = field(default_factory=dict)

    def of(self, stage: int) -> Floats:
        if stage not in self.stages:
            self.stages[stage] = self._of(stage)
        return self.stages[stage]

    def _of(self, stage: int) -> Floats:
        alike = _alike(self.problem, self.options)
        parts, copies = self.problem.remembered(_Least).parts, self.mesh.copies
        untied, found = _untied(self.problem), []
        for number in alike.first:
            component, least = untied[number], float("inf")
            for choice in self.options[number]:
                held = component.fingerprint, choice, self.mesh.tp
                if held not in parts:
                    parts[held] = _weight_parts(self.problem, self.mesh.tp, component, choice)
                least = min(least, parts[held].bytes_at(stage, copies))
            found.append(least if self.options[number] else 0.0)
        own: Floats = np.array(found)[alike.kinds]
        return own


class _Alike(NamedTuple):
    """Components that do the same work, have the same parameters to themselves, and have the same options.

    Attributes: first: by kind the number of its first component. kinds: int64 [n], by component.
    """

    first: tuple[int, ...]
    kinds: NDArray[np.int64]


def _alike(problem: PlanningProblem, options: Options) -> _Alike:
    known = problem.remembered(_Least)
    key = tuple(options)
    if key not in known.alike:
        if not known.prints:
            own = [component.fingerprint for component in _untied(problem)]
            known.prints = tuple(zip(problem.model.fingerprints, own, strict=True))
        numbers: dict[object, int] = {}
        kinds = [numbers.setdefault(each, len(numbers)) for each in zip(known.prints, key, strict=True)]
        first = np.unique(kinds, return_index=True)[1]
        known.alike[key] = _Alike(tuple(first.tolist()), np.array(kinds, dtype=np.int64))
    return known.alike[key]


class _Parts(NamedTuple):
    """Of the mean tp rank: bytes that every rank holds, and bytes per number of tp ranks that hold the same. The latter are the
    optimizer state, the gradients and the parameters, which ZeRO divides over these ranks and their replicas."""

    whole: float
    divided: tuple[tuple[int, tuple[float, float, float]], ...]

    def bytes_at(self, stage: int, copies: int) -> float:
        return self.whole + sum(
            size / (copies * ranks) if number <= stage else size
            for ranks, sizes in self.divided
            for number, size in enumerate(sizes, start=1)
        )


def _untied(problem: PlanningProblem) -> tuple[Component, ...]:
    """The components, each without the parameters that an earlier one has."""
    known = problem.remembered(_Least)
    if known.untied is None:
        seen: set[str] = set()
        found = []
        for component in problem.model.components:
            own = tuple(each for each in component.parameters if each.name not in seen)
            seen.update(each.name for each in own)
            found.append(component if own == component.parameters else replace(component, parameters=own))
        known.untied = tuple(found)
    return known.untied


def _weight_parts(problem: PlanningProblem, tp: int, component: Component, placement: Placement) -> _Parts:
    whole, divided = 0.0, dict[int, list[float]]()
    for parameter in component.parameters:
        held = hold(component, placement, parameter, 0)
        groups = alike(component, placement, parameter.name, tp)
        holders = sum(len(group) for group in groups) / tp
        if not parameter.trainable:
            whole += holders * held.size_bytes
            continue
        sizes = divided.setdefault(len(groups[0]), [0.0, 0.0, 0.0])
        state = problem.state_bytes_per_element(parameter.optimizer) * held.elements
        for number, size in enumerate((state, held.size_bytes, held.size_bytes)):
            sizes[number] += holders * size
    return _Parts(whole, tuple((ranks, (state, gradients, own)) for ranks, (state, gradients, own) in divided.items()))


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
    known = problem.remembered(_Least)
    key = (mesh.tp, tuple(placed))
    if key not in known.kinds:
        kinds: dict[tuple[str, Placement], tuple[Component, int]] = {}
        untied, alike = _untied(problem), _alike(problem, [(placement,) for placement in placed])
        for kind, of_kind in zip(alike.first, np.bincount(alike.kinds).tolist(), strict=True):
            component, placement = untied[kind], placed[kind]
            first, number = kinds.get((component.fingerprint, placement), (component, 0))
            kinds[component.fingerprint, placement] = first, number + of_kind
        known.kinds[key] = [
            (number, component, placement, _weight_parts(problem, mesh.tp, component, placement))
            for (_, placement), (component, number) in kinds.items()
        ]
    every = known.kinds[key]
    saved = sum(
        number * _saved_bytes(problem, mesh, samples, component, placement) / (mesh.tp if placement.kind == "place" else 1)
        for number, component, placement, _ in every
    )
    return HeldTotals(
        weights=tuple(sum(number * parts.bytes_at(stage, mesh.copies) for number, *_, parts in every) for stage in ZERO_STAGES),
        parameters=sum(number * sizes[2] for number, *_, parts in every for _, sizes in parts.divided),
        saved=saved,
        kept=saved if problem.recompute == NONE else float(_always_kept(problem, mesh, samples).sum()),
    )


def _least_saved(problem: PlanningProblem, mesh: Mesh, samples: int, options: Options) -> tuple[Floats, float]:
    """By component what it saves of one microbatch on the mean tp rank; and the most that one saves on a rank that has it."""
    known, alike = problem.remembered(_Least).saved, _alike(problem, options)
    found = []
    for number in alike.first:
        component, choices = problem.model.components[number], options[number]
        key = component.fingerprint, choices, mesh.tp, samples
        if key not in known:
            every = [_saved_bytes(problem, mesh, samples, component, choice) for choice in choices]
            means = [size / mesh.tp if choice.kind == "place" else size for size, choice in zip(every, choices, strict=True)]
            known[key] = min(means, default=0.0), min(every, default=0.0)
        found.append(known[key])
    saved: Floats = np.array([mean for mean, _ in found])[alike.kinds]
    return saved, max((alone for _, alone in found), default=0.0)


def _saved_bytes(problem: PlanningProblem, mesh: Mesh, samples: int, component: Component, placement: Placement) -> float:
    own = narrow(component_in(component, problem.precision), placement.rule, placement.ways)
    local = samples * placement.batch_ways(mesh.tp) // mesh.tp
    return float(own.saved_activation_bytes * local)


def _always_kept(problem: PlanningProblem, mesh: Mesh, samples: int) -> Floats:
    """By component, of one microbatch: what is kept whatever is recomputed. A shard has at least its part of each value."""
    known = problem.remembered(_Least)
    if known.rates is None:
        known.rates = _kept_rates(problem)
    rounded = np.maximum(0.0, known.rates / mesh.tp - ROUNDED_VALUES)
    kept: Floats = rounded * samples
    return kept


ROUNDED_VALUES = 16
"""Bytes per sample by which the values of one component in shards are rounded down together: they are whole numbers."""


def _kept_rates(problem: PlanningProblem) -> Floats:
    """Bytes per sample that are kept whatever is recomputed, by component.

    A value is kept in any case if a reader needs it for its backward; it counts with the first such reader. Beside these, a
    component keeps either what it saves and no value stands for, or, recomputed, what it reads: of that its share among all
    readers. The less of both counts. Values that share storage count together as no more than what their first saver saves.
    """
    model, precision = problem.model, problem.precision
    order = model.component_index
    saved = [float(component_in(component, precision).saved_activation_bytes) for component in model.components]
    values = [value for value in (value_in(value, precision) for value in model.values) if value.producer is not None]
    savers = {value.name: sorted(value.savers or (), key=order.__getitem__) for value in values}
    stood_for = [0.0] * len(saved)
    for value in values:
        for first in savers[value.name][:1]:
            stood_for[order[first]] += value.bytes_per_sample
    rates, read = np.zeros(len(saved)), np.zeros(len(saved))
    readers: dict[str, list[str]] = {}
    for component in model.components:
        for name in dict.fromkeys(component.inputs):
            readers.setdefault(name, []).append(component.name)
    for value in values:
        size = float(value.bytes_per_sample)
        for first in savers[value.name][:1]:
            size *= min(1.0, saved[order[first]] / max(stood_for[order[first]], 1.0))
        reading = readers.get(value.name, [])
        needing = next((name for name in savers[value.name] if name in reading), None)
        if needing is not None:
            rates[order[needing]] += size
        else:
            for name in reading:
                read[order[name]] += size / len(reading)
    inside = np.maximum(0.0, np.array(saved) - np.array(stood_for))
    least: Floats = rates + np.minimum(read, inside)
    return least
