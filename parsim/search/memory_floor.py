"""A lower bound of the memory of a rank, whatever is recomputed: what the search leaves out without working out its memory.

    weights       parameters, gradients and optimizer state, divided by as much as tp and ZeRO can
    activations   of one microbatch, as often as the order holds it: what components save. Where it is free what is recomputed:
                  the values that some reader needs for its backward. Recomputed or not, such a reader keeps them
    largest       what one component saves of one microbatch: it lies on a rank during the backward of the component

Bytes are the mean over the tp ranks of a place, and the fullest rank holds at least that. Leaves out everything else, so a plan
above the bound may still not fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import mul
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from parsim.model.component import Component
from parsim.model.formats import component_in, value_in
from parsim.numeric import Floats, Ints
from parsim.plans.layouts import BATCH, Placement
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import PIPELINE_ORDERS, moments
from parsim.plans.plan import BY_OPERATOR, NONE, ZERO_STAGES, Plan, Recompute
from parsim.predict.problem import PlanningProblem
from parsim.program.buckets import alike, hold
from parsim.records import once
from parsim.search.bound import ROUNDING, computation_of, prices_of, whole_step_s
from parsim.search.prices import narrowed
from parsim.search.stages import Segments, segments_of
from parsim.work import Phase

# Which components to recompute so that a rank keeps least between forward and backward, and what each keeps then.
#
# A recomputed component keeps its inputs. One that is not keeps what it saves, which may stand for the inputs of others: an
# addition that stays as it is keeps one value for two that it reads. So recomputing all components need not keep least.
# Components of one kind are treated alike: kind by kind, as long as that keeps less. Components of a segment keep what enters
# it.
#
# Leaves out: fixed bytes, layouts of values between shards. It decides what is tried, never what is left out.


MOST_KINDS = 24
"""Kinds of components of which more and less recomputation is tried, the most frequent first."""

AS_IT_IS, SOME, WHOLE = 0, 1, 2
"""How a component is recomputed: not, by operator, or all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastKept:
    """Attributes:
    recompute, segments: of a plan, of which stages may cut segments in two.
    kept: float64 [n], bytes per sample that each component keeps.
    """

    recompute: Recompute
    kept: Floats
    segments: Segments = ()


def recompute_of(levels: Iterable[tuple[str, int]]) -> Recompute:
    """A plan's choice of components with SOME, WHOLE or AS_IT_IS."""
    return tuple(name if level == WHOLE else BY_OPERATOR + name for name, level in levels if level != AS_IT_IS) or NONE


@once
def least_kept(problem: PlanningProblem) -> LeastKept:
    """The choice that keeps least of those that treat components of one kind alike, without segments."""
    components, backwards = problem.model.components, problem.model.differentiable_components
    kinds: dict[str, list[int]] = {}
    for number, component in enumerate(components):
        if component.name in backwards:
            kinds.setdefault(component.fingerprint, []).append(number)
    levels = [WHOLE if component.name in backwards else AS_IT_IS for component in components]
    least = _kept_bytes(problem, levels).sum()
    for numbers in sorted(kinds.values(), key=len, reverse=True)[:MOST_KINDS]:
        for level in (AS_IT_IS, SOME) if components[numbers[0]].selective is not None else (AS_IT_IS,):
            tried = list(levels)
            for number in numbers:
                tried[number] = level
            if (total := _kept_bytes(problem, tried).sum()) < least:
                least, levels = total, tried
    recompute = recompute_of(zip(problem.model.component_index, levels, strict=True))
    return LeastKept(recompute=recompute, kept=_kept_bytes(problem, levels))


@once
def kept_together(problem: PlanningProblem) -> tuple[LeastKept, ...]:
    """Layers as segments, and all else as it keeps least alone; the shortest segments first, none where there may be none."""
    return tuple(_together(problem, segments) for segments in segments_of(problem))


def tightest(problem: PlanningProblem) -> LeastKept:
    """What keeps least: single components, or segments of one block, which are hardly more than these while they are whole."""
    return min([least_kept(problem), *kept_together(problem)[:1]], key=lambda way: float(way.kept.sum()))


def _together(problem: PlanningProblem, segments: Segments) -> LeastKept:
    alone = least_kept(problem).recompute
    number_of = {name: number for number, segment in enumerate(segments) for name in segment}
    levels = dict.fromkeys(problem.model.component_index, AS_IT_IS)
    for entry in () if isinstance(alone, str) else alone:
        levels[entry.removeprefix(BY_OPERATOR)] = SOME if entry.startswith(BY_OPERATOR) else WHOLE
    recompute = recompute_of((name, level) for name, level in levels.items() if name not in number_of)
    for name in number_of:
        levels[name] = WHOLE if name in problem.model.differentiable_components else AS_IT_IS
    kept = _kept_bytes(problem, list(levels.values()), [number_of.get(name, -1) for name in levels])
    return LeastKept(recompute=recompute, kept=kept, segments=segments)


Keepers = list[tuple[int, set[int]]]
"""Components that may keep a value, and at which levels each does."""


@once
def _ledger(problem: PlanningProblem) -> tuple[list[tuple[float, float, float]], list[tuple[float, int, Keepers]]]:
    """By component the bytes that it keeps beside values at every level; by value its bytes, its maker and who may keep it."""
    model, precision, order = problem.model, problem.numerics.precision, problem.model.component_index
    components = [component_in(component, precision) for component in model.components]
    beside = [
        (float(one.saved_activation_bytes), float(one.selective.kept[0]) if one.selective else 0.0, 0.0) for one in components
    ]
    keepers: dict[str, dict[int, set[int]]] = {}
    for number, component in enumerate(components):
        for name in dict.fromkeys(component.inputs):
            keepers.setdefault(name, {}).setdefault(number, set()).add(WHOLE)
        for name in component.selective.values if component.selective else ():
            keepers.setdefault(name, {}).setdefault(number, set()).add(SOME)
    values = []
    for value in (value_in(value, precision) for value in model.values):
        savers = sorted(order[name] for name in value.savers or ())
        size = float(value.bytes_per_sample)
        if savers:
            saved, some, whole = beside[savers[0]]
            beside[savers[0]] = max(0.0, saved - size), some, whole
        if value.producer is not None:
            keeping = keepers.get(value.name, {})
            for number in savers:
                keeping.setdefault(number, set()).add(AS_IT_IS)
            values.append((size, order[value.producer], sorted(keeping.items())))
    return beside, values


def _kept_bytes(problem: PlanningProblem, levels: Sequence[int], segments: Sequence[int] = ()) -> Floats:
    """float64 [n], bytes per sample: a value counts with the first component that keeps it.

    Args:
        levels: by component. segments: by component the number of its segment, -1 for none.
    """
    beside, values = _ledger(problem)
    total = np.array([sizes[level] for sizes, level in zip(beside, levels, strict=True)])
    for size, maker, keepers in values:
        for number, when in keepers:
            remade = segments and segments[number] >= 0 and segments[number] == segments[maker]
            if levels[number] in when and not remade:
                total[number] += size
                break
    return total


# Bytes of parameters, gradients and optimizer state that the components hold at least, by ZeRO stage.
#
# Divided by as much as tp and ZeRO can. A tied parameter counts with the first component that has it.


Options = tuple[tuple[Placement, ...], ...]
"""Per component the placements that it may have."""


@dataclass(frozen=True)
class LeastWeights:
    """By ZeRO stage and component, a tied parameter with the first that has it; a stage is worked out when it is asked for."""

    problem: PlanningProblem
    mesh: Mesh
    options: Options
    stages: dict[int, Floats] = field(default_factory=dict)

    def of(self, stage: int) -> Floats:
        if stage not in self.stages:
            alike = alike_components(self.problem, self.options)
            untied, least = untied_components(self.problem), []
            for number in alike.first:
                parts = (weight_parts(self.problem, self.mesh.tp, untied[number], choice) for choice in self.options[number])
                least.append(min((each.bytes_at(stage, self.mesh.group_copies) for each in parts), default=0.0))
            self.stages[stage] = np.array(least)[alike.kinds]
        return self.stages[stage]


class AlikeComponents(NamedTuple):
    """Components that do the same work, have the same parameters to themselves, and have the same options: by kind the number
    of its first component, and int64 [n] the kind of every component."""

    first: tuple[int, ...]
    kinds: NDArray[np.int64]


@once
def alike_components(problem: PlanningProblem, options: Options) -> AlikeComponents:
    """Which components are alike where each may have these placements."""
    numbers: dict[object, int] = {}
    kinds = [numbers.setdefault(each, len(numbers)) for each in zip(_prints(problem), options, strict=True)]
    first = np.unique(kinds, return_index=True)[1]
    return AlikeComponents(tuple(first.tolist()), np.array(kinds, dtype=np.int64))


@once
def _prints(problem: PlanningProblem) -> tuple[tuple[str, str], ...]:
    untied = [component.fingerprint for component in untied_components(problem)]
    return tuple(zip(problem.model.fingerprints, untied, strict=True))


class WeightParts(NamedTuple):
    """Bytes of the mean tp rank, by number of tp ranks that hold the same, over that of ranks with other experts: the optimizer
    state, the gradients and the parameters (frozen ones too), which ZeRO divides over these ranks and their copies."""

    divided: tuple[tuple[float, tuple[float, float, float]], ...]

    def bytes_at(self, stage: int, copies: int) -> float:
        return sum(
            size / (copies * ranks) if number <= stage else size
            for ranks, sizes in self.divided
            for number, size in enumerate(sizes, start=1)
        )


@once
def untied_components(problem: PlanningProblem) -> tuple[Component, ...]:
    """The components, each without the parameters that an earlier one has."""
    seen: set[str] = set()
    untied = []
    for component in problem.model.components:
        parameters = tuple(each for each in component.parameters if each.name not in seen)
        seen.update(each.name for each in parameters)
        untied.append(component if parameters == component.parameters else replace(component, parameters=parameters))
    return tuple(untied)


def weights_are_too_many(problem: PlanningProblem, devices: int) -> bool:
    """Whether parameters, gradients and optimizer state do not fit, whatever divides them over so many devices, or fewer."""
    rooms = (device.type.room_bytes for device in problem.cluster.devices[:devices])
    return weights_bytes(problem) > devices * max(rooms)


@once
def weights_bytes(problem: PlanningProblem) -> float:
    """Parameters, gradients and optimizer state of the whole model, each once."""
    return sum(
        problem.device_bytes_per_element(parameter.optimizer) * parameter.elements + 2 * parameter.size_bytes
        if parameter.trainable
        else parameter.size_bytes
        for component in untied_components(problem)
        for parameter in component.parameters
    )


def weight_parts(problem: PlanningProblem, tp: int, component: Component, placement: Placement) -> WeightParts:
    """What the mean tp rank holds of one component; worked out once for components that are alike."""
    known, key = problem.answers(weight_parts), (component.fingerprint, placement, tp)
    if key not in known:
        known[key] = _weight_parts(problem, tp, component, placement)
    return cast(WeightParts, known[key])


def _weight_parts(problem: PlanningProblem, tp: int, component: Component, placement: Placement) -> WeightParts:
    divided = dict[float, list[float]]()
    for parameter in component.parameters:
        held = hold(component, placement, parameter, 0)
        groups = alike(component, placement, parameter.name, tp)
        holders = sum(len(group) for group in groups) / tp
        sizes = divided.setdefault(len(groups[0]) / parameter.expert_ways, [0.0, 0.0, 0.0])
        if not parameter.trainable:
            sizes[2] += holders * held.size_bytes
            continue
        state = problem.device_bytes_per_element(parameter.optimizer) * held.elements
        for number, size in enumerate((state, held.size_bytes, held.size_bytes)):
            sizes[number] += holders * size
    return WeightParts(tuple((ranks, (sizes[0], sizes[1], sizes[2])) for ranks, sizes in divided.items()))


# Bytes of one microbatch that the components keep at least for their backward.


def least_saved(problem: PlanningProblem, mesh: Mesh, samples: int, options: Options) -> tuple[Floats, float]:
    """By component what it saves of one microbatch on the mean tp rank; and the most that one saves on a rank that has it.

    Returns:
        Bytes, float64 [n] and one number.
    """
    known, alike = problem.answers(least_saved), alike_components(problem, options)
    least = []
    for number in alike.first:
        component, choices = problem.model.components[number], options[number]
        key = component.fingerprint, choices, mesh.tp, samples
        if key not in known:
            alone = [saved_bytes(problem, mesh, samples, component, choice) for choice in choices]
            means = [size / mesh.tp if choice.kind == "place" else size for size, choice in zip(alone, choices, strict=True)]
            known[key] = min(means, default=0.0), min(alone, default=0.0)
        least.append(known[key])
    saved: Floats = np.array([mean for mean, _ in least])[alike.kinds]
    return saved, max((alone for _, alone in least), default=0.0)


def saved_bytes(problem: PlanningProblem, mesh: Mesh, samples: int, component: Component, placement: Placement) -> float:
    """What one component saves of one microbatch on a rank that has it."""
    local = samples * placement.batch_ways(mesh.tp) // mesh.tp
    return float(narrowed(problem, component.name, placement.rule, placement.ways)[0].saved_activation_bytes * local)


def always_kept(problem: PlanningProblem, mesh: Mesh, samples: int) -> Floats:
    """By component, of one microbatch: what is kept whatever is recomputed. A shard has at least its part of each value.

    Returns:
        Bytes, float64 [n].
    """
    kept: Floats = np.maximum(0.0, _kept_rates(problem) / mesh.tp - ROUNDED_VALUES) * samples
    return kept


ROUNDED_VALUES = 16
"""Bytes per sample by which the values of one component in shards are rounded down together: they are whole numbers."""


@once
def _kept_rates(problem: PlanningProblem) -> Floats:
    """Bytes per sample that are kept whatever is recomputed, by component.

    A value is kept in any case if a reader needs it for its backward; it counts with the first such reader. Beside these, a
    component keeps either what it saves and no value stands for, or, recomputed, what it reads: of that its share among all
    readers. The less of both counts. Values that share storage count together as no more than what their first saver saves.
    """
    model, precision = problem.model, problem.numerics.precision
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
            recomputing: whether plans may recompute what they like. segments: and in segments, within which nothing is kept.
        """
        kept = self._kept_at_least(recomputing=recomputing, segments=segments)
        weights, room, places = self.weights.of(stage), float(self.rooms.max()), len(self.rooms)
        held = float(weights.sum())
        if max(held / places, self.largest_bytes) * ROUNDING > room:  # beside the weights of all there is the largest, or all
            beside = max(self.largest_bytes, float(kept.sum()))
            return max((held + beside) / places, self.largest_bytes) * ROUNDING - room
        least = float("inf")
        for order, chunks in pipeline:
            least = min(least, self._missing_of(weights, kept, order, chunks, microbatches))
            if not least:
                break
        return least

    def _missing_of(self, weights: Floats, kept: Floats, order: str, chunks: int, microbatches: int) -> float:
        places = len(self.rooms)
        if chunks > 1 or PIPELINE_ORDERS[order].halves:  # several runs of components per place: one microbatch of all
            total = float(weights.sum() + kept.sum())
            return max(0.0, (total * ROUNDING - float(self.rooms.sum())) / places)
        up_to = np.concatenate([np.zeros((2, 1)), np.cumsum([weights, kept], axis=1)], axis=1)
        taken, count = 0, len(kept)
        for place in range(places):  # as many as may fit: what is left is least
            alive = moments(order, place, places, microbatches)[-1][0]
            held = (up_to[0] - up_to[0][taken] + alive * (up_to[1] - up_to[1][taken])) * ROUNDING
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
        """float64 [places]: by how much each holds more than it has room for, at least; negative where there is room."""
        weights, kept = self.weights.of(stage), self._kept_at_least(recomputing=recomputing, segments=segments)
        held = []
        for place in places:
            by_run = [float(kept[first:last].sum()) for first, last in place.runs]
            most = max(sum(map(mul, alive, by_run)) for alive in place.moments)
            held.append(most + sum(float(weights[first:last].sum()) for first, last in place.runs))
        excess: Floats = np.array(held) * ROUNDING - self.rooms
        return excess


@once
def rooms_of(problem: PlanningProblem) -> Ints:
    """int64 [ranks]: bytes that weights and activations may have on the devices."""
    return np.array([device.type.room_bytes for device in problem.cluster.devices], dtype=np.int64)


@once
def memory_floor(problem: PlanningProblem, mesh: Mesh, samples: int, options: Options) -> MemoryFloor:
    """What the components of a model hold at least where each may have these placements."""
    ranks = [mesh.stage_range(place) for place in range(mesh.pp)]
    rooms = [rooms_of(problem)[own.start : own.stop].max() for own in ranks]
    saved, largest_bytes = least_saved(problem, mesh, samples, options)
    if problem.activation_offload:  # what a component saves may all be away, but for its own backward
        saved = np.zeros_like(saved)
    return MemoryFloor(
        weights=_least_weights(problem, mesh, options),
        kept=saved if problem.recompute == NONE or problem.activation_offload else always_kept(problem, mesh, samples),
        saved=saved,
        largest_bytes=largest_bytes,
        rooms=np.array(rooms, dtype=np.float64),
    )


@once
def _least_weights(problem: PlanningProblem, mesh: Mesh, options: Options) -> LeastWeights:
    return LeastWeights(problem, mesh, options)


def missing_bytes(
    problem: PlanningProblem,
    mesh: Mesh,
    count: int,
    options: Options,
    pipeline: Sequence[tuple[str, int]] = (("1f1b", 1),),
) -> float:
    """By how much no plan with these pipeline orders can fit; 0 where some might."""
    floor = memory_floor(problem, mesh, problem.global_batch // (mesh.dp * count), options)
    return floor.missing_bytes(
        max(problem.zero_stages), pipeline, count, segments=problem.segments and problem.recompute != NONE
    )


class HeldTotals(NamedTuple):
    """Bytes of the mean tp rank that holds the whole model: by ZeRO stage its weights, the trainable parameters, the frozen
    ones, what is saved of one microbatch, and what is kept of it whatever is recomputed."""

    weights: tuple[float, ...]
    trained: float
    frozen: float
    saved: float
    kept: float


def held_totals(problem: PlanningProblem, mesh: Mesh, samples: int, placed: Sequence[Placement]) -> HeldTotals:
    """What the components hold together where they are placed so, each kind worked out once."""
    kinds = _kinds(problem, mesh.tp, tuple(placed))
    copies = mesh.group_copies
    weights = tuple(sum(number * parts.bytes_at(stage, copies) for number, *_, parts in kinds) for stage in ZERO_STAGES)
    trained, every = (sum(number * sizes[of] for number, *_, parts in kinds for _, sizes in parts.divided) for of in (1, 2))
    if problem.activation_offload:
        return HeldTotals(weights=weights, trained=trained, frozen=every - trained, saved=0.0, kept=0.0)
    saved = sum(
        number * saved_bytes(problem, mesh, samples, component, placement) / (mesh.tp if placement.kind == "place" else 1)
        for number, component, placement, _ in kinds
    )
    kept = saved if problem.recompute == NONE else float(always_kept(problem, mesh, samples).sum())
    return HeldTotals(weights=weights, trained=trained, frozen=every - trained, saved=saved, kept=kept)


@once
def _kinds(
    problem: PlanningProblem, tp: int, placed: tuple[Placement, ...]
) -> list[tuple[int, Component, Placement, WeightParts]]:
    """How many components are alike, one of them, how they lie, and what one holds."""
    kinds: dict[tuple[str, Placement], tuple[Component, int]] = {}
    untied, alike = untied_components(problem), alike_components(problem, tuple((placement,) for placement in placed))
    for kind, of_kind in zip(alike.first, np.bincount(alike.kinds).tolist(), strict=True):
        component, placement = untied[kind], placed[kind]
        first, number = kinds.get((component.fingerprint, placement), (component, 0))
        kinds[component.fingerprint, placement] = first, number + of_kind
    return [
        (number, component, placement, weight_parts(problem, tp, component, placement))
        for (_, placement), (component, number) in kinds.items()
    ]


# What a plan holds at least, and what it must recompute at least to fit: known without working out its memory.
#
# A place that holds too much must free it: a recomputed component frees at most what it saves, of every microbatch that is
# held.
# The least seconds for that are those of a knapsack whose items may be divided.


MOST_FORWARDS = 256
"""Of a place. Beyond, no more microbatches are counted, and of several runs of components one microbatch each."""


@dataclass(frozen=True)
class PlanFloor:
    """The floor of the mesh and placements of plans with one cut into stages, and what its places run.

    Attributes: plan: with any ZeRO stage, buckets and recomputation.
    """

    problem: PlanningProblem
    plan: Plan
    floor: MemoryFloor
    places: tuple[HeldRuns, ...]

    def excess_bytes(self, stage: int, *, recomputing: bool, segments: bool = False) -> float:
        """By how much the plan does not fit at least; 0 where it might.

        Args:
            recomputing: whether it may recompute what it likes. segments: and whole runs of components.
        """
        over = max(0.0, self.floor.largest_bytes - float(self.floor.rooms.max()))
        held = self.floor.of_places(stage, self.places, recomputing=recomputing, segments=segments)
        return max(over, float(held.max()))

    def may_fit_with(self, stage: int, whole: Set[str], some: Set[str]) -> bool:
        """Whether a place may fit where just these components are recomputed; false only where none of the plans does.

        What they save is freed until their own backward. In that, what runs whole is whole again, beside what earlier
        components save.

        Args:
            whole, some: components whose forward runs again, or some operators of it; not as segments.
        """
        names, saved = [component.name for component in self.problem.model.components], self.floor.saved.tolist()

        def frees(place: HeldRuns) -> float:
            alive = np.max(np.array(place.moments), axis=0).tolist()
            return sum(
                float(count * saved[number])
                for (first, last), count in zip(place.runs, alive, strict=True)
                for number in range(first, last)
                if names[number] in whole or names[number] in some
            )

        def holds_again(place: HeldRuns, room: float) -> bool:
            """Whether each component may be whole in its backward."""
            weights = self.floor.weights.of(stage)
            left = room / ROUNDING - sum(float(weights[first:last].sum()) for first, last in place.runs)
            for first, last in place.runs:
                earlier = 0.0
                for number in range(first, last):
                    if names[number] not in some and earlier + saved[number] > left:
                        return False
                    if names[number] not in whole and names[number] not in some:
                        earlier += saved[number]
            return True

        # components on single ranks run beside one another: of these it is not known what they hold again
        alone = any(placement.kind == "place" for part in self.plan.stages for placement in part.placements)
        over = self.floor.of_places(stage, self.places, recomputing=False).tolist()
        return all(
            excess <= 0 or (frees(place) >= excess * ROUNDING and (alone or holds_again(place, room)))
            for place, excess, room in zip(self.places, over, self.floor.rooms.tolist(), strict=True)
        )

    def excess_of_any_cut(self, stage: int, *, recomputing: bool) -> float:
        """By how much the plan does not fit at least, whatever the cut into stages."""
        pipeline = ((self.plan.pipeline_order, self.plan.chunks),)
        return self.floor.missing_bytes(stage, pipeline, self.plan.microbatches, recomputing=recomputing)

    def recomputing_bound_s(self, stage: int) -> float:
        """Seconds that no step goes below which recomputes as much as the plan must at a ZeRO stage."""
        problem, plan = self.problem, self.plan
        over = self.floor.of_places(stage, self.places, recomputing=False)
        bound = 0.0
        for work, place, excess in zip(computation_of(problem, plan), self.places, over.tolist(), strict=True):
            again = self._freeing_s(place, excess)
            bound = max(bound, work.busy_s + plan.microbatches * again)
            if work.after_s is not None:  # the first second forward may run before the first gradient has come
                bound = max(bound, work.done_s + work.after_s + (plan.microbatches - 1) * again)
        return whole_step_s(problem, plan, bound)

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


def plan_floor(problem: PlanningProblem, plan: Plan) -> PlanFloor | None:
    """What a plan holds at least; None where its stages are no runs of components."""
    return _plan_floor(problem, plan.without_zero())


def floor_excess_bytes(problem: PlanningProblem, plan: Plan, *, recomputing: bool, segments: bool = False) -> float:
    """By how much a plan does not fit at least; 0 where it might.

    Args:
        recomputing: whether it may recompute what it likes. segments: and whole runs of components.
    """
    floor = plan_floor(problem, plan)
    if floor is None:
        return 0.0
    return max(0.0, floor.excess_bytes(plan.zero_stage, recomputing=recomputing, segments=segments))


@once
def _plan_floor(problem: PlanningProblem, plan: Plan) -> PlanFloor | None:
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
