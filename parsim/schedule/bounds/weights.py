"""Bytes of parameters, gradients and optimizer state that the components hold at least, by ZeRO stage.

Divided by as much as tp and ZeRO can. A tied parameter counts with the first component that has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from parsim.arrays import Floats
from parsim.graph.parameter_buckets import alike, hold
from parsim.model.component import Component, Parameter
from parsim.plans.mesh import Mesh
from parsim.plans.placement import Placement
from parsim.predict.planning_problem import PlanningProblem

Options = Sequence[tuple[Placement, ...]]


@dataclass
class _KnownWeights:
    """Of one problem."""

    untied: tuple[Component, ...] | None = None
    parts: dict[tuple[str, Placement, int], WeightParts] = field(default_factory=dict)
    prints: tuple[tuple[str, str], ...] = ()
    total_bytes: float | None = None
    alike: dict[tuple[tuple[Placement, ...], ...], AlikeComponents] = field(default_factory=dict)


@dataclass(frozen=True)
class LeastWeights:
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
        alike = alike_components(self.problem, self.options)
        parts, copies = self.problem.remembered(_KnownWeights).parts, self.mesh.group_copies
        untied, found = untied_components(self.problem), []
        for number in alike.first:
            component, least = untied[number], float("inf")
            for choice in self.options[number]:
                held = component.fingerprint, choice, self.mesh.tp
                if held not in parts:
                    parts[held] = weight_parts(self.problem, self.mesh.tp, component, choice)
                least = min(least, parts[held].bytes_at(stage, copies))
            found.append(least if self.options[number] else 0.0)
        own: Floats = np.array(found)[alike.kinds]
        return own


class AlikeComponents(NamedTuple):
    """Components that do the same work, have the same parameters to themselves, and have the same options.

    Attributes: first: by kind the number of its first component. kinds: int64 [n], by component.
    """

    first: tuple[int, ...]
    kinds: NDArray[np.int64]


def alike_components(problem: PlanningProblem, options: Options) -> AlikeComponents:
    """Which components are alike; worked out once for the same options.

    Args:
        problem: model, cluster and batch. options: per component the placements that it may have.
    """
    known = problem.remembered(_KnownWeights)
    key = tuple(options)
    if key not in known.alike:
        if not known.prints:
            own = [component.fingerprint for component in untied_components(problem)]
            known.prints = tuple(zip(problem.model.fingerprints, own, strict=True))
        numbers: dict[object, int] = {}
        kinds = [numbers.setdefault(each, len(numbers)) for each in zip(known.prints, key, strict=True)]
        first = np.unique(kinds, return_index=True)[1]
        known.alike[key] = AlikeComponents(tuple(first.tolist()), np.array(kinds, dtype=np.int64))
    return known.alike[key]


class WeightParts(NamedTuple):
    """Of the mean tp rank: bytes that every rank holds, and bytes per number of tp ranks that hold the same. The latter are the
    optimizer state, the gradients and the parameters, which ZeRO divides over these ranks and their copies."""

    whole: float
    divided: tuple[tuple[int, tuple[float, float, float]], ...]

    def bytes_at(self, stage: int, copies: int) -> float:
        return self.whole + sum(
            size / (copies * ranks) if number <= stage else size
            for ranks, sizes in self.divided
            for number, size in enumerate(sizes, start=1)
        )


def untied_components(problem: PlanningProblem) -> tuple[Component, ...]:
    """The components, each without the parameters that an earlier one has.

    Args:
        problem: with the model.
    """
    known = problem.remembered(_KnownWeights)
    if known.untied is None:
        seen: set[str] = set()
        found = []
        for component in problem.model.components:
            own = tuple(each for each in component.parameters if each.name not in seen)
            seen.update(each.name for each in own)
            found.append(component if own == component.parameters else replace(component, parameters=own))
        known.untied = tuple(found)
    return known.untied


def weights_are_too_many(problem: PlanningProblem, devices: int) -> bool:
    """Whether parameters, gradients and optimizer state do not fit, whatever divides them over so many devices, or fewer.

    Args:
        problem: model, cluster and optimizer. devices: the first ones of the cluster.
    """
    known = problem.remembered(_KnownWeights)
    if known.total_bytes is None:
        known.total_bytes = sum(
            _held_once(problem, parameter) for one in untied_components(problem) for parameter in one.parameters
        )
    rooms = (device.type.memory_bytes - device.type.context_bytes for device in problem.cluster.devices[:devices])
    return known.total_bytes > devices * max(rooms)


def _held_once(problem: PlanningProblem, parameter: Parameter) -> float:
    if not parameter.trainable:
        return parameter.size_bytes
    return problem.device_bytes_per_element(parameter.optimizer) * parameter.elements + 2 * parameter.size_bytes


def weight_parts(problem: PlanningProblem, tp: int, component: Component, placement: Placement) -> WeightParts:
    """Of one component of the mean tp rank.

    Args:
        problem: with the optimizer. tp: ways of the mesh. component: of the model. placement: how it lies.
    """
    whole, divided = 0.0, dict[int, list[float]]()
    for parameter in component.parameters:
        held = hold(component, placement, parameter, 0)
        groups = alike(component, placement, parameter.name, tp)
        holders = sum(len(group) for group in groups) / tp
        if not parameter.trainable:
            whole += holders * held.size_bytes
            continue
        sizes = divided.setdefault(len(groups[0]), [0.0, 0.0, 0.0])
        state = problem.device_bytes_per_element(parameter.optimizer) * held.elements
        for number, size in enumerate((state, held.size_bytes, held.size_bytes)):
            sizes[number] += holders * size
    return WeightParts(whole, tuple((ranks, (state, gradients, own)) for ranks, (state, gradients, own) in divided.items()))
