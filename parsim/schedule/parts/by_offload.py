"""Whether a plan that does not fit would with something in the host's memory: a way out that a search does not take itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from parsim.errors import PlanError
from parsim.hardware.device_kinds import DEVICE_KINDS
from parsim.plans.plan import Plan
from parsim.plans.recompute import AUTO, FULL
from parsim.predict.planning_problem import PlanningProblem


def way_out(problem: PlanningProblem, plan: Plan) -> str:
    """`; with plan.optimizer_offload = true it would fit`; "" where offload does not help, or devices compute on the host.

    Args:
        problem: model, cluster and batch. plan: that does not fit.
    """
    if any(DEVICE_KINDS[device.type.kind].on_cores for device in problem.cluster.devices[: plan.world_size]):
        return ""
    again: tuple[dict[str, Any], ...] = ({}, {"recompute": FULL, "segments": ()}) if problem.recompute == AUTO else ({},)
    for keys in _offloads(plan):
        for recomputing in again:
            try:
                other = replace(plan, **keys, **recomputing)
            except PlanError:  # segments, halves, relaxed synchronisation
                continue
            if all(memory.fits for memory in problem.unlike_memory(other)):
                more = ", recomputing activations" if recomputing else ""
                return f"; with {' and '.join(f'plan.{key} = true' for key in keys)} it would fit{more}"
    return ""


def _offloads(plan: Plan) -> Iterator[dict[str, Any]]:
    """What else may lie in the host's memory, the least first."""
    state = {} if plan.optimizer_offload else {"optimizer_offload": True}
    activations = {} if plan.activation_offload is True else {"activation_offload": True}
    if state:
        yield state
    if activations:
        yield activations
    if state and activations:
        yield state | activations
