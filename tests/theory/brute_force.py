"""Every choice, one after the other: the oracle of the solvers on small instances."""

from __future__ import annotations

import itertools
import math

import numpy as np

from parsim.errors import ScheduleError
from parsim.search.placement.problem import PlacementProblem, Solution, fits, step_s, why_infeasible

MOST_CHOICES = 1_000_000


def solve_brute_force(placing: PlacementProblem) -> Solution:
    """Find the fitting choice with the shortest step by trying all.

    Args:
        placing: the problem, with at most MOST_CHOICES choices.

    Raises:
        ScheduleError: more than MOST_CHOICES choices.
    """
    count = math.prod(len(options) for options in placing.options)
    if count > MOST_CHOICES:
        raise ScheduleError(f"{count} choices are too many to try one by one (at most {MOST_CHOICES}); use solve_exactly")
    best: tuple[float, tuple[int, ...]] = (np.inf, ())
    for choice in itertools.product(*(range(len(options)) for options in placing.options)):
        if fits(placing, choice):
            best = min(best, (step_s(placing, choice), choice))
    if not best[1]:
        reason = why_infeasible(placing)
        return Solution(choice=(), seconds=np.inf, lower_bound_s=np.inf, status="infeasible", reason=reason)
    return Solution(choice=best[1], seconds=best[0], lower_bound_s=best[0], status="optimal")
