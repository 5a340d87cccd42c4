"""The scheduling problem as the paper prints it ("reading R"), for comparison with the one parsim solves.

    min over strategies  sum_i  max over devices j of D(s_i) [ t_comp(i, s_i, j) + t_comm(i, s_i, j) ]
    s.t.                 sum_i mem(i, s_i, j) <= M_j   for every device j

It is a multiple-choice knapsack: a `PlacementProblem` without conversions, without sums of gradients beside the backward, and
without components that must agree. Where t_comp does not depend on the strategy it degenerates to the least t_comm of every
component.

One stage over all devices. A component's strategies are the placements it can have. Data parallel: the batch is cut over all
devices. Model parallel: one device alone, or a shard of it per device. Hybrid: shards over some devices, with replicas over
the rest.

    t_comp   forward, backward and the optimizer's step on device j, of the whole batch
    t_comm   the sum of the gradients over the ranks that hold them alike; of a component that is not batch-sharded, also
             what it takes to bring its inputs from batch shards to where it reads them, and its outputs back, both ways
    mem      weights, gradients, optimizer state and saved activations of the component on device j

Leaves out, as the formulation does: that neighbours with the same placement need no conversion between them, overlap,
pipelines, and that components with a common parameter must hold it alike.

Source: arXiv 2503.23186, the optimisation of its section on the adaptive scheduling algorithm. It is read with one set of
devices D(s) per strategy: its formula has device(c_i) = j, which data parallelism contradicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from parsim.model.component import Component
from parsim.numeric import Floats
from parsim.plans.layouts import BATCH, PIECES, Placement, input_ends, output_ends
from parsim.plans.mesh import Mesh
from parsim.predict.problem import PlanningProblem
from parsim.search.placement.certificate import certify
from parsim.search.placement.problem import PlacementProblem
from parsim.search.prices import Prices, placements_of


def paper_problem_of(problem: PlanningProblem, *, microbatches: int = 1, zero_stage: int = 0) -> PlacementProblem:
    """Price every strategy of every component by the problem's costs.

    Args:
        zero_stage: of the memory and the sums.

    Returns:
        The paper's problem: `forward_s` holds the seconds of a step on the slowest device of each strategy.
    """
    mesh = Mesh(tp=problem.cluster.size)
    samples = problem.global_batch // microbatches
    prices = Prices(problem, mesh, samples, zero_stage=zero_stage)
    components = problem.model.components
    options = tuple(placements_of(each, mesh, samples, places=range(mesh.tp)) for each in components)
    rows = [_figures(prices, each, choices, microbatches) for each, choices in zip(components, options, strict=True)]
    nothing = tuple(np.zeros(len(choices)) for choices in options)
    devices = problem.cluster.devices
    return PlacementProblem(
        components=tuple(component.name for component in components),
        options=options,
        forward_s=tuple(seconds for seconds, _ in rows),
        backward_s=nothing,
        synchronisation_s=nothing,
        conversion_s={},
        memory_bytes=tuple(memory for _, memory in rows),
        limit_bytes=np.array([float(device.type.room_bytes) for device in devices]),
        allowed={},
    )


def _figures(prices: Prices, component: Component, choices: Sequence[Placement], microbatches: int) -> tuple[Floats, Floats]:
    """float64 [strategy]: seconds on the slowest device; float64 [strategy, device]: bytes (0 off D(s))."""
    seconds, memory = np.zeros(len(choices)), np.zeros((len(choices), prices.mesh.tp))
    for row, choice in enumerate(choices):
        moved = microbatches * _moved_s(prices, component, choice) + prices.synchronisation_s(component, choice)
        update = prices.update_s(component, choice)
        for device in range(prices.mesh.tp):
            if choice.runs_on(device):
                once = sum(prices.compute_on_s(component, choice, phase, device) for phase in prices.phases(component))
                seconds[row] = max(seconds[row], microbatches * once + update + moved)
                memory[row, device] = prices.memory_bytes(component, choice, device)
    return seconds, memory


def _moved_s(prices: Prices, component: Component, choice: Placement) -> float:
    """One microbatch: inputs from batch shards, outputs back to batch shards, and their gradients the other way."""
    if choice == BATCH:
        return 0.0
    values, tp, total = prices.problem.model.value, prices.mesh.tp, 0.0
    backwards = component.name in prices.differentiable
    for number, name in enumerate(component.inputs):
        value, ends = values[name], input_ends(component, choice, tp, number)
        if value.producer is not None:
            total += prices.conversion_s(value, PIECES, ends.value)
            if value.differentiable and backwards:
                total += prices.conversion_s(value, ends.gradient, PIECES)
    for number, name in enumerate(component.outputs):
        value, ends = values[name], output_ends(component, choice, tp, number)
        if any(name in reader.inputs for reader in prices.problem.model.components):
            total += prices.conversion_s(value, ends.value, PIECES)
            if value.differentiable and backwards:
                total += prices.conversion_s(value, PIECES, ends.gradient)
    return total


def paper_certificate(problem: PlanningProblem, *, microbatches: int = 1) -> dict[str, Any]:
    """The paper's problem of this model and cluster, solved by both solvers.

    Returns:
        Plain JSON with the keys of `Certificate.to_dict`, and `placements`, the strategy of every component (none if nothing
        fits).
    """
    paper = paper_problem_of(problem, microbatches=microbatches)
    certificate = certify(paper, microbatches)
    chosen = certificate.exact.solution.choice or certificate.milp.solution.choice
    placed = zip(paper.components, paper.options, chosen, strict=True) if chosen else ()
    return {**certificate.to_dict(), "placements": {name: str(options[number]) for name, options, number in placed}}
