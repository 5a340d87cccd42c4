"""Programs priced by Costs: seconds for every task of a part; and tensor-parallel communication beside products.

With `Plan.tensor_overlap` an all_gather or reduce_scatter over n shards runs in n pieces. While one piece is sent, the
product of another runs, so of its T seconds at most n - 1 pieces hide behind a product of m seconds:

    exposed = max(T / n, T - (n - 1) / n * m)

m is the mean forward of the plan's cut components with products. Source: what Transformer Engine calls tp_comm_overlap.

With `Plan.tensor_backward_overlap` the gradient of the input of a product that is cut by columns is summed over the shards
(all_reduce or reduce_scatter) beside the gradient of its weight, w seconds, taken to be those of its forward:

    exposed = T - min(T, w)

Forwards and backwards send the same, so they share a price: the mean over them. Source: the backward of
ColumnParallelLinearWithAsyncAllreduce and ColumnParallelLinearWithSequenceParallelism, NVIDIA/Megatron-LM
megatron/mpu/layers.py @02bb1f5c86fc.

Leaves out: that products of pieces are less efficient than whole ones, and the multiprocessors that communication takes from
products; in pieces, sums (all_reduce), which no product waits for piece by piece; beside gradients of weights, components
that were measured as a whole, whose products are not known apart: they hide nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from parsim.costs.communication.exchange import exchange_seconds
from parsim.costs.costs import Costs
from parsim.costs.estimate import Estimate, Term
from parsim.costs.pricing import price
from parsim.engines.program import DurationsOf, Part
from parsim.graph.columns import Unit
from parsim.model.component import Component
from parsim.model.model import Model
from parsim.plans.plan import Plan
from parsim.work import Collective, Compute, Phase, SendRecv

IN_PIECES = ("all_gather", "reduce_scatter")
SUMS = ("all_reduce", "reduce_scatter")


def priced(costs: Costs) -> DurationsOf:
    """Make a function that prices every task of a part: medians by `costs`, rank r on `costs.cluster.devices[r]`.

    It assumes that the transfers of a part run at the same time: those of one size share links and cards
    (`parsim.costs.communication.exchange`). This is exact for a round of gossip, and too slow for parts whose transfers
    follow one another.

    Args:
        costs: of one model on one cluster.

    Returns:
        A function (part, step) -> float64 [tasks] seconds; it raises CostError as the estimates do. Leaves out that waiting
        ranks give their links to others, and the slowdown of computation by communication.
    """

    def seconds(part: Part, t: int) -> NDArray[np.float64]:
        tasks = part.graph.tasks
        sends: dict[int, dict[tuple[int, int], list[int]]] = {}
        local: list[int] = []
        for task in tasks:
            if isinstance(task.work, SendRecv):
                pair = (task.work.source, task.work.destination)
                sends.setdefault(task.work.size_bytes, {}).setdefault(pair, []).append(task.index)
            else:
                local.append(task.index)
        found = np.zeros(len(tasks))
        estimates = price([(tasks[index].work, tasks[index].ranks[0]) for index in local], costs)
        found[local] = [estimate.median_s for estimate in estimates]
        for size_bytes, pairs in sends.items():
            for place, value in zip(pairs.values(), exchange_seconds(list(pairs), size_bytes, costs.cluster), strict=True):
                found[place] = value
        return found

    return seconds


def beside_products(model: Model, plan: Plan, units: Sequence[Unit], estimates: Sequence[Estimate]) -> list[Estimate]:
    """Estimates of a program's units with tensor-parallel communication as far as products do not hide it.

    Args:
        model, plan: of the program. units: its work. estimates: of the units alone, in their order.

    Returns:
        The same estimates if the plan does not overlap.
    """
    if plan.tensor_backward_overlap:
        return _beside_weight_gradients(model, plan, units, estimates)
    if not plan.tensor_overlap:
        return list(estimates)
    products = {component.name for component in model.components if any(op.kind == "matmul" for op in component.operators)}
    forwards = [
        estimate.median_s
        for unit, estimate in zip(units, estimates, strict=True)
        if isinstance(unit.work, Compute)
        and (unit.work.phase, unit.work.ways > 1) == (Phase.FORWARD, True)
        and unit.work.component in products
    ]
    if not forwards:
        return list(estimates)
    product_s = fmean(forwards)
    return [
        _exposed(estimate, product_s, plan.mesh.tp) if _among_shards(plan, unit, IN_PIECES) else estimate
        for unit, estimate in zip(units, estimates, strict=True)
    ]


def _among_shards(plan: Plan, unit: Unit, operations: Sequence[str]) -> bool:
    """Whether it is one of these operations among the shards of one copy of a stage."""
    work, tp = unit.work, plan.mesh.tp
    if not isinstance(work, Collective) or work.operation not in operations or len(work.group) != tp:
        return False
    return len({rank // tp for rank in work.group}) == 1


def _exposed(estimate: Estimate, product_s: float, pieces: int) -> Estimate:
    if not estimate.median_s:
        return estimate
    hidden = (pieces - 1) / pieces
    share = max(1 - hidden, 1 - hidden * product_s / estimate.median_s)
    return _exposed_share(estimate, share, f"{pieces} pieces beside products")


def _exposed_share(estimate: Estimate, share: float, detail: str) -> Estimate:
    return replace(
        estimate.then(Term("exposed share", "times", share, "assumed", detail)), detail=f"{estimate.detail}; {detail}"
    )


def _beside_weight_gradients(model: Model, plan: Plan, units: Sequence[Unit], estimates: Sequence[Estimate]) -> list[Estimate]:
    """Sums over shards, as far as gradients of weights do not hide those of the backward."""
    by_columns = {component.name: share for component in model.components if (share := _column_share(component))}
    weight_s = [
        by_columns[unit.work.component] * sum(term.value for term in estimate.terms if term.name == "matmul")
        for unit, estimate in zip(units, estimates, strict=True)
        if isinstance(unit.work, Compute)
        and (unit.work.phase, unit.work.ways > 1) == (Phase.FORWARD, True)
        and unit.work.component in by_columns
    ]
    if not weight_s:
        return list(estimates)
    again = sum(name in by_columns for names in plan.segments for name in names) / len(by_columns)
    backward = 1 / (2 + again)  # of the runs of a component: its forward, its backward, and its forward again
    return [
        _hidden(estimate, weight_s, backward) if _among_shards(plan, unit, SUMS) else estimate
        for unit, estimate in zip(units, estimates, strict=True)
    ]


def _column_share(component: Component) -> float:
    """Flop of the products that shards cut by columns, over those of all its products; 0 without any."""
    cut = {entry.number for sharding in component.shardings for entry in sharding.operators if entry.dim == "n"}
    products = {number: op.forward_flop for number, op in enumerate(component.operators) if op.kind == "matmul"}
    return sum(flop for number, flop in products.items() if number in cut) / (sum(products.values()) or 1.0)


def _hidden(estimate: Estimate, weight_s: Sequence[float], backward: float) -> Estimate:
    if not estimate.median_s:
        return estimate
    share = 1 - backward * fmean(min(1.0, seconds / estimate.median_s) for seconds in weight_s)
    return _exposed_share(estimate, share, "in the backward beside gradients of weights")
