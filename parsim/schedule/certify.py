"""The certificate of a search: the placement problem of the user's own model and cluster, solved by two solvers."""

from __future__ import annotations

from typing import Any

from parsim.predict.planning_problem import PlanningProblem
from parsim.schedule.placement.certificate import certify
from parsim.schedule.search import Search
from parsim.schedule.tensor import posed_placement


def certificate_of(problem: PlanningProblem, found: Search | None, strategy: str) -> dict[str, Any]:
    """Of the number of microbatches with the best placement that the search found.

    Args:
        found: the search; None for a plan that was given.

    Returns:
        `Certificate.to_dict()`, or {"reason"} where there is no placement problem.
    """
    if found is None or strategy != "adaptive":
        what = "the plan is given by hand" if found is None else f'strategy "{strategy}" places all components by one rule'
        return {"reason": f'{what}, so no placement is chosen; plan with strategy = "adaptive"'}
    if not found.placements:
        return {"reason": f"no placement problem was posed: {dict(found.skipped).get('adaptive', 'no number of microbatches')}"}
    posed = [entry for entry in found.placements if entry.mesh.pp == 1] or found.placements
    best = min(posed, key=lambda entry: entry.solution.seconds)
    placing, hints = posed_placement(problem, best.microbatches, best.mesh)
    return certify(placing, best.microbatches, hints=hints).to_dict()
