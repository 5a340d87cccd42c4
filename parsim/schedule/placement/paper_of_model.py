"""The paper's problem (reading R) of a real model on a real cluster, and its certificate.

One stage over all devices, as in `parsim.schedule.placement.placement_problem`. A component's strategies are the placements it
can have. Data parallel: the batch is cut over all devices. Model parallel: one device alone, or a shard of it per device.
Hybrid: shards over some devices, with replicas over the rest.

    t_comp   forward, backward and the optimizer's step on device j, of the whole batch
    t_comm   the sum of the gradients over the ranks that hold them alike; and for a component that is not batch-sharded, what
             it takes to bring its inputs from batch shards to where it reads them, and its outputs back, forward and backward
    mem      weights, gradients, optimizer state and saved activations of the component on device j

Leaves out, as the formulation does: that neighbours with the same placement need no conversion between them, overlap,
pipelines, and that components with a common parameter must hold it alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from parsim.model.component import Component
from parsim.plans.mesh import Mesh
from parsim.plans.placement import BATCH, Placement
from parsim.plans.plan import DEFAULT_BUCKET_BYTES
from parsim.plans.redistribution import ValueLayout, input_ends, output_ends
from parsim.predict.planning_problem import PlanningProblem
from parsim.schedule.options import Prices, placements_of
from parsim.schedule.placement.certificate import relative_difference, timed, verdict_of
from parsim.schedule.placement.paper_formulation import PaperProblem, solve_paper_dynamic, solve_paper_milp
from parsim.work import Phase

MOST_LABELS = 4_000
"""Of the dynamic programme; a second or two."""

BATCH_SHARDS = ValueLayout("full", 1)
"""Every rank holds its own part of the batch, whole."""


def paper_problem_of(
    problem: PlanningProblem, *, microbatches: int = 1, zero_stage: int = 0
) -> tuple[PaperProblem, tuple[tuple[Placement, ...], ...]]:
    """Price every strategy of every component by the problem's costs.

    Args:
        problem: model, cluster and batch. microbatches: into which the batch is cut. zero_stage: of the memory and the sums.

    Returns:
        The paper's problem, and per component the placements that its strategies stand for. Seconds of one step, bytes per
        device.
    """
    mesh = Mesh(tp=problem.cluster.size)
    samples = problem.global_batch // microbatches
    prices = Prices(problem=problem, mesh=mesh, samples=samples, bucket_bytes=DEFAULT_BUCKET_BYTES, zero_stage=zero_stage)
    components = problem.model.components
    strategies = tuple(placements_of(each, mesh, samples, places=tuple(range(mesh.tp))) for each in components)
    figures = [_figures(prices, each, choices, microbatches) for each, choices in zip(components, strategies, strict=True)]
    compute, communication, memory = zip(*figures, strict=True)
    devices = problem.cluster.devices
    limits = np.array([device.type.memory_bytes - device.type.context_bytes for device in devices], dtype=np.float64)
    paper = PaperProblem(compute_s=compute, communication_s=communication, memory_bytes=memory, limit_bytes=limits)
    return paper, strategies


def _figures(
    prices: Prices, component: Component, choices: Sequence[Placement], microbatches: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """float64 [strategy, device]: seconds of computation and of communication (NaN off D(s)), bytes (0 off D(s))."""
    devices = prices.mesh.tp
    compute = np.full((len(choices), devices), np.nan)
    communication, memory = compute.copy(), np.zeros_like(compute)
    phases = (Phase.FORWARD, Phase.BACKWARD) if component.name in prices.differentiable else (Phase.FORWARD,)
    for row, choice in enumerate(choices):
        moved = microbatches * _moved_s(prices, component, choice) + prices.synchronisation_s(component, choice)
        update = prices.update_s(component, choice)
        for device in range(devices):
            if choice.runs_on(device):
                once = sum(prices.compute_on_s(component, choice, phase, device) for phase in phases)
                compute[row, device] = microbatches * once + update
                communication[row, device] = moved
                memory[row, device] = prices.memory_bytes(component, choice, device)
    return compute, communication, memory


def _moved_s(prices: Prices, component: Component, choice: Placement) -> float:
    """One microbatch: inputs from batch shards, outputs back to batch shards, and their gradients the other way."""
    if choice == BATCH:
        return 0.0
    values, tp, total = prices.problem.model.value, prices.mesh.tp, 0.0
    backwards = component.name in prices.differentiable
    for number, name in enumerate(component.inputs):
        value, ends = values[name], input_ends(component, choice, tp, number)
        if value.producer is not None:
            total += prices.conversion_s(value, BATCH_SHARDS, ends.value)
            if value.differentiable and backwards:
                total += prices.conversion_s(value, ends.gradient, BATCH_SHARDS)
    for number, name in enumerate(component.outputs):
        value, ends = values[name], output_ends(component, choice, tp, number)
        if any(name in reader.inputs for reader in prices.problem.model.components):
            total += prices.conversion_s(value, ends.value, BATCH_SHARDS)
            if value.differentiable and backwards:
                total += prices.conversion_s(value, BATCH_SHARDS, ends.gradient)
    return total


def paper_certificate(problem: PlanningProblem, *, microbatches: int = 1) -> dict[str, Any]:
    """The paper's problem of this model and cluster, solved by the dynamic programme and by the MILP.

    Args:
        problem: model, cluster and batch. microbatches: into which the batch is cut.

    Returns:
        Plain JSON with the keys of `Certificate.to_dict`, and `placements`, the strategy of every component (none if nothing
        fits).
    """
    paper, strategies = paper_problem_of(problem, microbatches=microbatches)
    exact = timed(lambda: solve_paper_dynamic(paper, most_labels=MOST_LABELS))
    milp = timed(lambda: solve_paper_milp(paper))
    chosen = exact.solution.choice or milp.solution.choice
    names = [component.name for component in problem.model.components]
    return {
        "relative_difference": relative_difference(exact.solution, milp.solution),
        "verdict": verdict_of(exact.solution, milp.solution),
        "microbatches": microbatches,
        "components": len(names),
        "choices": sum(map(len, strategies)),
        "exact": exact.to_dict(),
        "milp": milp.to_dict(),
        "placements": {name: str(options[number]) for name, options, number in zip(names, strategies, chosen, strict=True)}
        if chosen
        else {},
    }
