"""A lower bound of the memory of a rank, over all cuts into stages, orders, buckets and recomputed components.

    weights       parameters, gradients and optimizer state, divided by as much as tp and ZeRO can; the fullest place on the pp
                  axis holds at least the mean over the places
    activations   what one microbatch of one component saves: it lies on a rank during the backward of the component

Leaves out everything else, so a plan above the bound may still not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from parsim.graph.parameter_buckets import alike, hold
from parsim.model.component import Component
from parsim.model.precision import component_in
from parsim.model.shard.narrow import narrow
from parsim.plans.mesh import Mesh
from parsim.plans.placement import Placement
from parsim.plans.plan import ZERO_STAGES
from parsim.predict.planning_problem import PlanningProblem


def missing_bytes(problem: PlanningProblem, mesh: Mesh, samples: int, options: Sequence[tuple[Placement, ...]]) -> float:
    """By how much no plan can fit; 0 where some might.

    Args:
        problem: model, cluster and batch. mesh: of the plans. samples: of one replica's microbatch.
        options: per component the placements that it may have.
    """
    stage = problem.zero_stage if isinstance(problem.zero_stage, int) else ZERO_STAGES[-1]
    seen: set[str] = set()
    weights = largest = 0.0
    known: dict[object, tuple[float, float]] = {}
    for component, choices in zip(problem.model.components, options, strict=True):
        own = replace(component, parameters=tuple(each for each in component.parameters if each.name not in seen))
        seen.update(each.name for each in own.parameters)
        key = (component.fingerprint, tuple(each.elements for each in own.parameters), choices)
        if key not in known:
            known[key] = (
                min((_weight_bytes(problem, mesh, stage, own, choice) for choice in choices), default=0.0),
                min((_saved_bytes(problem, mesh, samples, component, choice) for choice in choices), default=0.0),
            )
        weights += known[key][0]
        largest = max(largest, known[key][1])
    room = max(device.type.memory_bytes - device.type.context_bytes for device in problem.cluster.devices[: mesh.size])
    return max(0.0, max(weights / mesh.pp, largest) * (1 - 1e-9) - room)


def _weight_bytes(problem: PlanningProblem, mesh: Mesh, stage: int, component: Component, placement: Placement) -> float:
    """Of the mean tp rank."""
    total = 0.0
    for parameter in component.parameters:
        held = hold(component, placement, parameter, 0)
        groups = alike(component, placement, parameter.name, mesh.tp)
        holders = sum(len(group) for group in groups) / mesh.tp
        group = mesh.copies * len(groups[0])
        if not parameter.trainable:
            total += holders * held.size_bytes
            continue
        state = problem.optimizer_state_bytes_per_element * held.elements
        parts = enumerate((state, held.size_bytes, held.size_bytes), start=1)  # optimizer state, gradients, parameters
        total += holders * sum(size / group if number <= stage else size for number, size in parts)
    return total


def _saved_bytes(problem: PlanningProblem, mesh: Mesh, samples: int, component: Component, placement: Placement) -> float:
    own = narrow(component_in(component, problem.precision), placement.rule, placement.ways)
    local = samples * placement.batch_ways(mesh.tp) // mesh.tp
    return float(own.saved_activation_bytes * local)
