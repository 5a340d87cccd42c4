"""Who is taken to have written the training loop where a question does not say, and how much others would differ.

One framework prices an answer: plans that are priced as different ones could not be compared. Where the question fixes the
plan, it is the most likely one for that plan; where plans are searched for, the most likely one that has all of them. What a
search may propose does not follow from it. The interval reaches to what the others would take on the chosen plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from parsim.app.config import Question, facts_of_plan
from parsim.app.load import problem_of
from parsim.model.catalogue.frameworks import Framework, Guess, framework_of
from parsim.plans.plan import Plan
from parsim.predict.evaluate import Evaluation, simulated_step
from parsim.predict.problem import PlanningProblem
from parsim.search.by_hand import framework_switches

MOST_OTHERS = 3
"""Frameworks whose price is compared: each is a simulation."""
ALIKE = 0.005
"""Of the step: below this, frameworks take equally long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssumedFramework:
    """Attributes:
    name: as which the answer is priced, with the year of an old version. by: what speaks for it.
    others: likewise plausible for the plan, with the step over that of the assumed one.
    """

    name: str
    by: str
    others: tuple[tuple[str, float], ...]

    def text(self) -> str:
        """`framework not given: priced as megatron, by tp 8; torchtitan would be 12% slower`."""
        parts = [f"framework not given: priced as {self.name}, by {self.by}"]
        unlike = [other for other in self.others if abs(other[1] - 1) >= ALIKE]
        if unlike:
            parts.append(", ".join(f"{name} would be {_beside(ratio)}" for name, ratio in unlike))
        elif self.others:
            parts.append(f"{' and '.join(name for name, _ in self.others)} would take as long")
        return "; ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"assumed": self.name, "by": self.by, "others": dict(self.others)}

    def spanned(self, problem: PlanningProblem) -> PlanningProblem:
        """The problem whose interval reaches to what all of them take."""
        learnt, steps = problem.learnt, [ratio for _, ratio in self.others]
        low, high = min([learnt.low, *steps]), max([learnt.high, *steps])
        return problem if (low, high) == (learnt.low, learnt.high) else problem.knowing(replace(learnt, low=low, high=high))


def _beside(ratio: float) -> str:
    return f"{abs(ratio - 1):.0%} {'slower' if ratio > 1 else 'faster'}"


def assumed_framework(question: Question, evaluation: Evaluation, *, cut_short: bool = False) -> AssumedFramework | None:
    """Of an answer, by the plan that was chosen; None where the framework is known, or nothing is assumed.

    Args:
        cut_short: whether Ctrl-C ended the search; then no other framework is priced, and the answer says so.

    Raises CostError as `evaluate`.
    """
    guess = question.guess
    if guess is None:
        return None
    if cut_short:
        stopped = f"{guess.by}; its interval does not reach to other frameworks, which were not priced"
        return AssumedFramework(name=guess.frameworks[0].version, by=stopped, others=())
    plan, step_s = evaluation.result.plan, evaluation.result.step_s.median
    assumed, likely = guess.frameworks[0], question.guess_for(facts_of_plan(plan))
    current = [framework_of(assumed.name)] if assumed.until else []
    first, *rest = likely.frameworks
    others = _unlike(question, assumed, [first, *current, *rest, *guess.frameworks], plan)
    ratios = [(row.version, _step_s(question, replace(guess, frameworks=(row,)), plan) / step_s) for row in others]
    return AssumedFramework(name=assumed.version, by=guess.by, others=tuple(ratios))


def _unlike(question: Question, assumed: Framework, rows: Iterable[Framework], plan: Plan) -> list[Framework]:
    """Those that do otherwise than the assumed one and than one another where it changes the seconds of the plan."""

    def seconds_key(row: Framework) -> tuple[object, ...]:
        switches: dict[str, Any] = {**framework_switches(row)}
        switched = replace(plan, **switches).switched
        host = (row.launches_on(question.cluster.gpu or ""), row.step_s)
        return (row.kernels_of(question.has_low_products), switched, host, row.full_gradients, row.clip, row.routing)

    distinct = {seconds_key(assumed): assumed}
    for row in rows:
        distinct.setdefault(seconds_key(row), row)
    return list(distinct.values())[1 : 1 + MOST_OTHERS]


def _step_s(question: Question, guess: Guess, plan: Plan) -> float:
    """Seconds of the plan as the framework of a guess runs it."""
    problem = problem_of(question.sourced(guess=guess))
    return simulated_step(problem, replace(plan, **problem.plan_settings)).step_s
