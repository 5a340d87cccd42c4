"""Of large problems, the parts that are opened first: what people choose, on all devices, the most promising first.

Every usual part has an estimate beside its bound (`parsim.schedule.parts.estimate`). They are opened in the order of the
estimates, as far as their bounds are below the best plan and the search's allowance lasts. All other parts follow. The answer
counts what is left then as "not tried". Problems that are not large are searched without this.
"""

from __future__ import annotations

from dataclasses import dataclass

from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan
from parsim.predict.planning_problem import PlanningProblem

LARGE = 4096
"""Devices times components from which a problem is large."""

USUAL_ORDERS = (("1f1b", 1), ("interleaved", 2))
"""With their stages per rank."""

MOST_LATE = 2000
"""Parts that refine what was found (other cuts, other bucket sizes), of which so many are opened."""

FEW_COMPONENTS = 6
"""Up to so many, all joint choices of placements may be listed."""

MOST_SINGLES = 500
"""Single plans that are judged beyond these parts, of models of few components: a plan of them is cheap."""

FEWEST_LATE = 20
"""The same of the largest problems, whose parts cost more to open."""

MOST_VISITS = 90_000
"""Components that a search of a large problem visits, about 10 CPU-seconds. What a part costs its `Node.visits` says."""

MICROBATCHES_PER_VISIT = 20
"""A simulation takes as long as visiting its components once for so many microbatches, and once beside."""

MOST_MISSES = 10
"""So many times the allowance may be spent until any plan fits."""


@dataclass
class Allowance:
    """What a search may still spend: visits of components. It knows no clock, so one question has one answer.

    Attributes: components: of the model. left: visits.
    """

    components: int
    left: float

    def lasts(self, *, known: bool) -> bool:
        """Whether another part may be opened.

        Args:
            known: whether a plan is known that fits. Without one the search goes on for longer.
        """
        return self.left > (0 if known else -MOST_MISSES * MOST_VISITS)

    def open(self, visits: int) -> None:
        """A part was opened that costs so many visits of all components."""
        self.left -= visits * self.components

    def simulate(self, plan: Plan) -> None:
        """A plan was simulated."""
        self.left -= self.components * (1 + plan.microbatches / MICROBATCHES_PER_VISIT)


def allowance(problem: PlanningProblem) -> Allowance:
    """What a search of the problem may spend.

    Args:
        problem: model and cluster.
    """
    return Allowance(len(problem.model.components), float(MOST_VISITS))


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


def most_singles(problem: PlanningProblem) -> int:
    """How many plans are judged that have a bound when no more of these parts may be opened.

    Args:
        problem: with the model.
    """
    return MOST_SINGLES if len(problem.model.components) <= FEW_COMPONENTS else 0


def is_usual(problem: PlanningProblem, mesh: Mesh, order: tuple[str, int]) -> bool:
    """Whether a part of a large problem is opened first.

    Args:
        problem: model, cluster and constraints. mesh, order: of its plans; the order with its stages per rank.
    """
    asked = problem.constraints
    within = asked.tp is not None or problem.cluster.most_on_a_node % mesh.tp == 0
    ordered = asked.pipeline_order is not None or asked.chunks is not None or mesh.pp == 1 or order in USUAL_ORDERS
    return within and ordered


def _size(problem: PlanningProblem) -> int:
    return problem.cluster.size * len(problem.model.components)
