"""Of large problems, the parts that are opened first: what people choose, on all devices.

The other parts are opened last, as far as their bounds are below the best plan and `most_late` allows. The answer counts what
is left then as "not tried". Problems that are not large are searched without this.
"""

from __future__ import annotations

from parsim.plans.mesh import Mesh
from parsim.predict.planning_problem import PlanningProblem

LARGE = 4096
"""Devices times components from which a problem is large."""

USUAL_ORDERS = (("1f1b", 1), ("interleaved", 2))
"""With their stages per rank."""

MOST_LATE = 2000
"""Parts that refine what was found (other cuts, other bucket sizes), of which so many are opened."""

FEWEST_LATE = 20
"""The same of the largest problems, whose parts cost more to open."""


def is_large(problem: PlanningProblem) -> bool:
    """Whether some parts of a search are opened before others.

    Args:
        problem: model and cluster.
    """
    return _size(problem) > LARGE


def most_late(problem: PlanningProblem) -> int:
    """How many parts are opened that refine what was found.

    Args:
        problem: model and cluster.
    """
    return max(FEWEST_LATE, int(MOST_LATE * min(1.0, LARGE / _size(problem)) ** 2))


def is_usual(problem: PlanningProblem, mesh: Mesh, order: tuple[str, int], *, mixed: bool) -> bool:
    """Whether a part of a large problem is opened first.

    Args:
        problem: model, cluster and constraints. mesh, order: of its plans; the order with its stages per rank.
        mixed: whether every component has a placement of its own.
    """
    asked = problem.constraints
    in_node = _devices_per_node(problem)
    within = asked.tp is not None or in_node % mesh.tp == 0
    ordered = asked.pipeline_order is not None or asked.chunks is not None or mesh.pp == 1 or order in USUAL_ORDERS
    return within and ordered and not mixed


def _size(problem: PlanningProblem) -> int:
    return problem.cluster.size * len(problem.model.components)


def _devices_per_node(problem: PlanningProblem) -> int:
    nodes: dict[int, int] = {}
    for node, _ in problem.cluster.places:
        nodes[node] = nodes.get(node, 0) + 1
    return max(nodes.values())
