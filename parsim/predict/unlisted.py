"""What the answer says of operators that the table of operators lacks: their names and their share of the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from parsim.costs.compute.compute import ComputeCosts
from parsim.costs.compute.operator_model import ComputeRequest, OperatorModel
from parsim.costs.estimate import Estimate
from parsim.graph.columns import Unit
from parsim.model.operator_table import UNLISTED
from parsim.model.shard.narrow import narrow
from parsim.predict.planning_problem import PlanningProblem
from parsim.units import format_percent
from parsim.work import Compute

SHOWN = 5


def unlisted_warnings(
    problem: PlanningProblem, units: Sequence[Unit], estimates: Sequence[Estimate], seconds: NDArray[np.float64]
) -> tuple[str, ...]:
    """One line that names them, the largest share first; none where the model has none or all of it was measured.

    The share is of all task time, as a model without them would be priced. It counts the bytes they move, not arithmetic that
    nobody stated, so it is a lower bound.

    Args:
        units, estimates, seconds: what the step does, its prices, and the seconds of all tasks of each unit.
    """
    names = {
        component.name: sorted({entry.function for entry in component.operators if entry.function.startswith(UNLISTED)})
        for component in problem.model.components
    }
    if not any(names.values()):
        return ()
    costs = ComputeCosts(problem.cluster.profile, problem.precision)
    total = max(float(seconds.sum()), 1e-30)
    shares: dict[str, float] = {}
    for unit, estimate, own_s in zip(units, estimates, seconds.tolist(), strict=True):
        work = unit.work
        if not isinstance(work, Compute) or estimate.source == "measured" or not names[work.component]:
            continue
        model = costs.operator_model(problem.cluster.devices[unit.rank].type)
        for name in names[work.component]:
            shares[name] = shares.get(name, 0.0) + _share(problem, work, name, model) * own_s / total
    if not shares:
        return ()
    ranked = sorted(shares.items(), key=lambda entry: (-entry[1], entry[0]))
    listing = ", ".join(f"{name.removeprefix(UNLISTED)} ({format_percent(share)})" for name, share in ranked[:SHOWN])
    more = f" and {len(ranked) - SHOWN} more" if len(ranked) > SHOWN else ""
    return (
        f"at least {format_percent(sum(shares.values()))} of the task time is in operators that parsim has no formula for, "
        f"priced by the bytes they move alone: {listing}{more}; add a row to parsim.model.operator_table.TABLE",
    )


def _share(problem: PlanningProblem, work: Compute, name: str, model: OperatorModel) -> float:
    """Of the component's seconds, by the operator model."""
    whole = narrow(problem.model.component(work.component), work.rule, work.ways)
    rest = replace(whole, operators=tuple(entry for entry in whole.operators if entry.function != name))
    with_s, without_s = (
        model.seconds(ComputeRequest(component=component, phase=work.phase, samples=work.samples))
        for component in (whole, rest)
    )
    return max(0.0, 1.0 - without_s / with_s) if with_s else 0.0
