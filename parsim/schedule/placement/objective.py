"""The step time of a choice of placements under `parsim.schedule.placement.placement_problem`, and the Solution that
every solver returns.

    step = sum of forward and backward, conversions included, + what of the gradient synchronisation outlasts the backward

The synchronisation runs on a separate stream, in reverse component order, each component's when its backward has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parsim.arrays import Floats
from parsim.schedule.placement.placement_problem import PlacementProblem
from parsim.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Attributes:
    choice: per component the number of its option; empty where nothing is feasible.
    seconds: its step. lower_bound_s: no choice has a shorter step.
    status: "optimal" (proven), "feasible" (the bound says how far from optimal it may be), "infeasible" (proven), or
        "inaccurate" (the solver does not vouch for its answer).
    reason: of an infeasible problem: which constraint, and by how much.
    """

    choice: tuple[int, ...]
    seconds: float
    lower_bound_s: float
    status: str
    reason: str = ""

    @property
    def gap(self) -> float:
        """(seconds - bound) / seconds."""
        return max(0.0, 1 - self.lower_bound_s / self.seconds) if self.choice and self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values; infinity becomes None."""
        seconds = self.seconds if np.isfinite(self.seconds) else None
        bound = self.lower_bound_s if np.isfinite(self.lower_bound_s) else None
        return {"status": self.status, "seconds": seconds, "lower_bound_s": bound, "gap": self.gap, "reason": self.reason}


def step_s(placing: PlacementProblem, choice: Sequence[int]) -> float:
    """Seconds of the step of one choice, whether it fits or not; infinite for a pair that is not allowed.

    Args:
        placing: the problem. choice: per component the number of its option.

    Returns:
        Seconds. Leaves out overlap of conversions with computation.
    """
    total = late = 0.0
    back = [float(placing.backward_s[number][option]) for number, option in enumerate(choice)]
    for (one, two), (forward, backward) in placing.conversion_s.items():
        total += float(forward[choice[one], choice[two]])
        back[one] += float(backward[choice[one], choice[two]])
    for (one, two), allowed in placing.allowed.items():
        if not allowed[choice[one], choice[two]]:
            return float("inf")
    for number in range(len(choice) - 1, -1, -1):
        option = choice[number]
        total += float(placing.forward_s[number][option]) + back[number]
        late = float(placing.synchronisation_s[number][option]) + max(0.0, late - back[number])
    return total + late


def memory_of(placing: PlacementProblem, choice: Sequence[int]) -> Floats:
    """Memory of one choice.

    Args:
        placing: the problem. choice: per component the number of its option.

    Returns:
        float64 [tp]: bytes per tp rank.
    """
    total = np.zeros_like(placing.limit_bytes)
    for number, option in enumerate(choice):
        total = total + placing.memory_bytes[number][option]
    return total


def fits(placing: PlacementProblem, choice: Sequence[int]) -> bool:
    """Whether every tp rank can hold a choice, and components that share parameters agree.

    Args:
        placing: the problem. choice: per component the number of its option.
    """
    agree = all(bool(allowed[choice[one], choice[two]]) for (one, two), allowed in placing.allowed.items())
    return agree and bool(np.all(memory_of(placing, choice) <= placing.limit_bytes * (1 + 1e-12)))


def why_infeasible(placing: PlacementProblem) -> str:
    """The reason why no choice fits: the device too small for the smallest options and the bytes it needs, or contradicting
    pins.

    Args:
        placing: a problem without a feasible choice.
    """
    for (one, two), allowed in placing.allowed.items():
        if not allowed.any():
            return (
                f"{placing.components[one]} and {placing.components[two]} share a parameter, and no pair of their placements "
                "holds it alike; unpin one of them"
            )
    least = sum((own.min(axis=0) for own in placing.memory_bytes), np.zeros_like(placing.limit_bytes))
    short = least - placing.limit_bytes
    worst = int(short.argmax())
    if short[worst] > 0:
        return (
            f"memory of tp rank {worst}: even the smallest placement of every component takes {format_bytes(least[worst])} of "
            f"{format_bytes(max(0.0, placing.limit_bytes[worst]))}; it needs {format_bytes(short[worst])} more at the least"
        )
    return "memory: every rank could hold the smallest placements, but no choice is small enough on all of them at once"
