"""Bytes of one microbatch that the components keep at least for their backward."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from parsim.arrays import Floats
from parsim.model.component import Component
from parsim.model.precision import component_in, value_in
from parsim.model.shard.narrow import narrow
from parsim.plans.mesh import Mesh
from parsim.plans.placement import Placement
from parsim.predict.planning_problem import PlanningProblem
from parsim.schedule.bounds.weights import Options, alike_components


@dataclass
class _KnownKept:
    """Of one problem: what one component saves of so many samples, and the rates that are always kept."""

    saved: dict[tuple[str, tuple[Placement, ...], int, int], tuple[float, float]] = field(default_factory=dict)
    rates: Floats | None = None


def least_saved(problem: PlanningProblem, mesh: Mesh, samples: int, options: Options) -> tuple[Floats, float]:
    """By component what it saves of one microbatch on the mean tp rank; and the most that one saves on a rank that has it.

    Args:
        problem: model, cluster and batch. mesh: of the plans. samples: of one replica's microbatch.
        options: per component the placements that it may have.

    Returns:
        Bytes, float64 [n] and one number.
    """
    known, alike = problem.remembered(_KnownKept).saved, alike_components(problem, options)
    found = []
    for number in alike.first:
        component, choices = problem.model.components[number], options[number]
        key = component.fingerprint, choices, mesh.tp, samples
        if key not in known:
            every = [saved_bytes(problem, mesh, samples, component, choice) for choice in choices]
            means = [size / mesh.tp if choice.kind == "place" else size for size, choice in zip(every, choices, strict=True)]
            known[key] = min(means, default=0.0), min(every, default=0.0)
        found.append(known[key])
    saved: Floats = np.array([mean for mean, _ in found])[alike.kinds]
    return saved, max((alone for _, alone in found), default=0.0)


def saved_bytes(problem: PlanningProblem, mesh: Mesh, samples: int, component: Component, placement: Placement) -> float:
    """What one component saves of one microbatch on a rank that has it.

    Args:
        problem: with the precision. mesh: of the plans. samples: of one replica's microbatch.
        component: of the model. placement: how it lies.
    """
    own = narrow(component_in(component, problem.precision), placement.rule, placement.ways)
    local = samples * placement.batch_ways(mesh.tp) // mesh.tp
    return float(own.saved_activation_bytes * local)


def always_kept(problem: PlanningProblem, mesh: Mesh, samples: int) -> Floats:
    """By component, of one microbatch: what is kept whatever is recomputed. A shard has at least its part of each value.

    Args:
        problem: model, cluster and batch. mesh: of the plans. samples: of one replica's microbatch.

    Returns:
        Bytes, float64 [n].
    """
    known = problem.remembered(_KnownKept)
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
