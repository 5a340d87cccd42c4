"""A certificate for the placements that a search chose: its exact solver and a MILP solver, on the same problem.

The two share no algorithm (labels over frontiers, `exact`; branch and cut in HiGHS, `milp`), so equal optima vouch for both.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from parsim.errors import ScheduleError
from parsim.schedule.placement.exact import solve_exactly
from parsim.schedule.placement.milp import solve_milp
from parsim.schedule.placement.objective import Solution
from parsim.schedule.placement.placement_problem import PlacementProblem
from parsim.units import format_percent, format_seconds

AGREEMENT = 1e-6
"""Two optima are the same up to this share of the larger one."""

MOST_LABELS = 20_000
"""Of the exact solver; beyond, its answer is "feasible" with a bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverRun:
    """The answer of one solver, and the seconds it took."""

    solution: Solution
    taken_s: float

    def to_dict(self) -> dict[str, Any]:
        return {**self.solution.to_dict(), "taken_s": self.taken_s}


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Both answers to one placement problem.

    Attributes:
        microbatches: of the problem. components, choices: how many it has; `choices` counts every component's options.
    """

    microbatches: int
    components: int
    choices: int
    exact: SolverRun
    milp: SolverRun

    @property
    def relative_difference(self) -> float | None:
        """|exact - MILP| over the larger one; None unless both found a choice."""
        return relative_difference(self.exact.solution, self.milp.solution)

    @property
    def verdict(self) -> str:
        """One of agree (both proved the same optimum, or that there is none), disagree (different answers) and unproven."""
        return verdict_of(self.exact.solution, self.milp.solution)

    def to_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "microbatches": self.microbatches,
            "components": self.components,
            "choices": self.choices,
            "exact": self.exact.to_dict(),
            "milp": self.milp.to_dict(),
            "relative_difference": self.relative_difference,
        }


def relative_difference(one: Solution, other: Solution) -> float | None:
    """|one - other| over the larger one; None unless both hold a choice.

    Args:
        one, other: answers to one problem.
    """
    if not one.choice or not other.choice:
        return None
    larger = max(one.seconds, other.seconds)
    return abs(one.seconds - other.seconds) / larger if larger else 0.0


def verdict_of(one: Solution, other: Solution) -> str:
    """ "agree" (both proved the same optimum, or that there is none), "disagree" (different answers) or "unproven".

    Args:
        one, other: answers of two solvers to one problem.
    """
    if not {one.status, other.status} <= {"optimal", "infeasible"}:
        return "unproven"
    difference = relative_difference(one, other)
    if difference is None:
        return "agree" if one.status == other.status else "disagree"
    return "agree" if difference <= AGREEMENT else "disagree"


def certify(placing: PlacementProblem, microbatches: int, *, hints: Sequence[Sequence[int]] = ()) -> Certificate:
    """Solve the problem twice. A solver that fails is a result: its status is "inaccurate", with the reason.

    Args:
        placing: the problem. microbatches: of its plan.
        hints: choices from which the exact solver may begin.
    """
    return Certificate(
        microbatches=microbatches,
        components=len(placing.components),
        choices=sum(len(options) for options in placing.options),
        exact=timed(lambda: solve_exactly(placing, hints=hints, most_labels=MOST_LABELS)),
        milp=timed(lambda: solve_milp(placing)),
    )


def timed(solve: Callable[[], Solution]) -> SolverRun:
    """The answer of a solver; "inaccurate", with the reason, where it fails.

    Args:
        solve: the solver, with its problem.
    """
    begin_s = time.perf_counter()
    try:
        solution = solve()
    except ScheduleError as error:
        solution = Solution(choice=(), seconds=math.inf, lower_bound_s=0.0, status="inaccurate", reason=str(error))
    return SolverRun(solution=solution, taken_s=time.perf_counter() - begin_s)


def certificate_text(certificate: dict[str, Any]) -> str:
    """`Certificate.to_dict()` as text for people, or the reason why there is none.

    Args:
        certificate: the dictionary.
    """
    paper = certificate.get("paper")
    after = [] if paper is None else _lines("the paper's formulation", paper)
    if "exact" not in certificate:
        return "\n".join([f"Certificate: none. {certificate['reason']}", *after])
    return "\n".join([*_lines("the placement problem", certificate), *after])


def _lines(what: str, certificate: dict[str, Any]) -> list[str]:
    lines = [
        f"Certificate of {what} ({certificate['components']} components, {certificate['choices']} choices, "
        f"{certificate['microbatches']} microbatches): {_VERDICTS[certificate['verdict']]}"
    ]
    for name, title in (("exact", "exact solver"), ("milp", "MILP (HiGHS)")):
        run = certificate[name]
        found = "no choice" if run["seconds"] is None else f"{format_seconds(run['seconds'])}, gap {format_percent(run['gap'])}"
        why = f" ({run['reason']})" if run["reason"] else ""
        lines.append(f"  {title}: {run['status']}, {found}; took {format_seconds(run['taken_s'])}{why}")
    if certificate["relative_difference"] is not None:
        lines.append(f"  relative difference of the two: {certificate['relative_difference']:.1e}")
    return lines


_VERDICTS = {
    "agree": "both solvers prove the same answer.",
    "disagree": "THE SOLVERS DISAGREE; please report this problem.",
    "unproven": "at least one solver does not prove its answer.",
}
