"""Ways of synchronising, ranked by simulated seconds to an accuracy: seconds of a step times steps that replicas need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from parsim.app.config import Question
from parsim.app.doctor import Say
from parsim.errors import ConfigError, ParsimError
from parsim.plans.plan import Plan
from parsim.plans.synchronisation import ALL_REDUCE, Synchronisation, parse_synchronisation
from parsim.predict.evaluate import Evaluation, simulated_step
from parsim.predict.problem import PlanningProblem
from parsim.predict.result import PlanResult
from parsim.search.relaxed import relaxed_search
from parsim.units import format_seconds

if TYPE_CHECKING:
    from parsim.app.learners import Learner
    from parsim.relaxed.to_target import LearntSteps


RULES = (
    "average/4",
    "average/16",
    "average/16 outer=nesterov:0.7:0.9",
    "gossip/1 ring",
    "gossip/1 one_peer_exponential",
    "merge/4",
    "stale",
)
"""Tried beside synchronous training, unless others are given."""
SEEDS = 3
MOST_STEPS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way of training, and when it gets to the accuracy.

    Attributes:
        rule: of synchronisation. result: its fastest plan that fits; None: it has none, and `reason` says why.
        learnt: steps on virtual replicas; None without a plan.
        phases: of a graph that changes (Ada), how many steps each one lasts and the seconds of its step; the last one stays.
    """

    rule: Synchronisation
    result: PlanResult | None = None
    learnt: LearntSteps | None = None
    reason: str = ""
    phases: tuple[tuple[int, float], ...] = ()

    def seconds_after(self, steps: float) -> float:
        """Simulated, of the first `steps` steps."""
        if self.result is None:
            raise ConfigError(f"{self.rule} has no plan: {self.reason}")
        if not self.phases:
            return steps * self.result.step_s.median
        seconds, left = 0.0, steps
        for lasts, step_s in self.phases[:-1]:
            seconds += min(left, lasts) * step_s
            left -= min(left, lasts)
        return seconds + left * self.phases[-1][1]

    @property
    def seconds(self) -> float | None:
        """Simulated, to the accuracy; None: it is not reached, or there is no plan."""
        if self.result is None or self.learnt is None or self.learnt.steps is None:
            return None
        return self.seconds_after(self.learnt.steps)

    def curve(self) -> list[tuple[float, float]]:
        """(simulated seconds, score) of the first seed."""
        if self.result is None or self.learnt is None:
            return []
        return [(self.seconds_after(step), score) for step, score in self.learnt.courses[0].scores]

    def line(self) -> str:
        """`gossip/1 ring: 12 s = 120 steps of 100 ms (110 to 135), learning rate 0.4`."""
        if self.result is None or self.learnt is None:
            return f"{self.rule}: no plan ({self.reason})"
        best = self.learnt.best
        plan = f"{self.result.plan.summary()}, learning rate {self.learnt.learning_rate:g}"
        if self.seconds is None or self.learnt.steps is None:
            when = f"{format_seconds(self.seconds_after(best.best_step))} ({best.best_step} steps)"
            return f"{self.rule}: not reached; {best.best:.3f} at most, after {when}; {plan}"
        low, high = self.learnt.spread
        among = f"{low} to {'not reached' if high is None else high}"
        return (
            f"{self.rule}: {format_seconds(self.seconds)} = {self.learnt.steps:.0f} steps ({among}) of "
            f"{format_seconds(self.seconds / self.learnt.steps)}{' on average' if self.phases else ''}; {plan}"
        )

    def to_dict(self) -> dict[str, Any]:
        learnt = self.learnt
        return {
            "synchronisation": str(self.rule),
            "seconds": self.seconds,
            "steps": None if learnt is None else learnt.steps,
            "steps_by_seed": [] if learnt is None else [course.steps for course in learnt.courses],
            "best_score": None if learnt is None else learnt.best.best,
            "best_score_step": None if learnt is None else learnt.best.best_step,
            "learning_rate": None if learnt is None else learnt.learning_rate,
            "step_s": None if self.result is None else self.result.step_s.to_dict(),
            "plan_summary": None if self.result is None else self.result.plan.summary(),
            "curve": self.curve(),
            "reason": self.reason or None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRanking:
    """Attributes: target: the accuracy. learner: what learnt, in words. contenders: the soonest first, unreached ones last."""

    target: float
    learner: str
    contenders: tuple[Contender, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, under `to_target`."""
        return {
            "target_accuracy": self.target,
            "learner": self.learner,
            "contenders": [entry.to_dict() for entry in self.contenders],
        }

    def lines(self) -> list[str]:
        """The same for people."""
        first = self.contenders[0]
        said = f"{first.rule} first" if first.seconds is not None else "no way reaches it"
        return [
            f"Time to test accuracy {self.target:g}: {said}. Steps were counted on {self.learner}.",
            *(f"  {entry.line()}" for entry in self.contenders),
        ]

    def figure(self) -> Any:
        """Accuracy over simulated seconds, a plotly Figure."""
        import plotly.graph_objects as go

        figure = go.Figure()
        for entry in self.contenders:
            points = entry.curve()
            if points:
                figure.add_scatter(x=[x for x, _ in points], y=[y for _, y in points], name=str(entry.rule), mode="lines")
        figure.add_hline(y=self.target, line_dash="dash")
        return figure.update_layout(
            title=f"Test accuracy of {self.learner}", xaxis_title="simulated seconds", yaxis_title="test accuracy"
        )


def to_target(
    question: Question,
    problem: PlanningProblem,
    best: Evaluation,
    target: float,
    *,
    rules: Sequence[str] = RULES,
    seeds: int = SEEDS,
    most_steps: int = MOST_STEPS,
    say: Say | None = None,
) -> TargetRanking:
    """Rank synchronous training and relaxed rules by seconds to an accuracy.

    Args:
        question: without a relaxed rule. problem: loaded from it. best: of its fastest plan, which trains synchronously.
        target: test accuracy, between 0 and 1. rules: to compare, as `plan.synchronisation` takes them.
        seeds: trainings of each. most_steps: after which one is given up. say: is told of every rule that has been trained.

    Raises:
        ConfigError: a target that is none, or a question that asks for a relaxed rule itself. PlanError: a rule that is none.
    """
    from parsim.app.learners import learner_of

    wanted = [ALL_REDUCE, *asked_rules(target, rules)]
    if seeds < 1:
        raise ConfigError(f"steps are counted over at least one seed, got {seeds}")
    if problem.constraints.synchronisation.is_relaxed:
        raise ConfigError(
            f"the question asks for synchronisation {problem.constraints.synchronisation} already; leave "
            "plan.synchronisation out, or add --set plan.synchronisation=all_reduce, and every way is compared"
        )
    planned = [_planned(problem, best, rule, most_steps) for rule in wanted]
    replicas = max((entry.result.plan.mesh.dp for entry in planned if entry.result is not None), default=1)
    learner = learner_of(question, problem.model, replicas)
    contenders = []
    for number, entry in enumerate(planned, 1):
        contenders.append(_learnt(entry, learner, target, range(seeds), most_steps))
        if say is not None:
            say(f"{number} of {len(planned)} ways: {contenders[-1].line()}")

    def place(entry: Contender) -> tuple[bool, float, bool, float]:
        score = 0.0 if entry.learnt is None else entry.learnt.best.best
        return entry.seconds is None, entry.seconds or 0.0, entry.result is None, -score

    return TargetRanking(target=target, learner=learner.words, contenders=tuple(sorted(contenders, key=place)))


def asked_rules(target: float, rules: Sequence[str]) -> list[Synchronisation]:
    """The rules to compare, each once. A command calls it before it plans.

    Args:
        target: test accuracy. rules: as `plan.synchronisation` takes them.

    Raises:
        ConfigError: a target that is none. PlanError: a rule that is none.
    """
    if not 0 < target < 1:
        raise ConfigError(f"a target accuracy lies between 0 and 1, got {target:g}; give 0.95 for 95%")
    return list(dict.fromkeys(rule for text in rules if (rule := parse_synchronisation(text)).is_relaxed))


def _planned(problem: PlanningProblem, best: Evaluation, rule: Synchronisation, most_steps: int) -> Contender:
    """The fastest plan of a rule that fits."""
    if not rule.is_relaxed:
        if not best.result.fits:
            return Contender(rule=rule, reason="no plan fits")
        return Contender(rule=rule, result=best.result)
    relaxed = replace(problem, constraints=replace(problem.constraints, synchronisation=rule))
    try:
        search = relaxed_search(relaxed, ("adaptive",), samples=0)
    except ParsimError as error:
        return Contender(rule=rule, reason=str(error))
    if search.chosen is None:
        return Contender(rule=rule, reason="no plan fits")
    result = search.chosen.result
    return Contender(rule=rule, result=result, phases=_phases(relaxed, result.plan, most_steps))


def _phases(problem: PlanningProblem, plan: Plan, most_steps: int) -> tuple[tuple[int, float], ...]:
    """Of Ada per graph how many steps it lasts, and the seconds of its step: a target may be reached on its first ones.

    Graphs that begin after `most_steps` are left out, since no training comes to them.
    """
    rule = plan.synchronisation
    found: list[tuple[int, float]] = []
    for rounds, graph in rule.mixing.phases(plan.mesh.dp) if rule.graph else ():
        if sum(steps for steps, _ in found) >= most_steps:
            break
        own = replace(plan, synchronisation=replace(rule, graph=graph))
        found.append((rounds * rule.period_steps, simulated_step(problem, own).step_s))
    return tuple(found)


def _learnt(entry: Contender, learner: Learner, target: float, seeds: Sequence[int], most_steps: int) -> Contender:
    if entry.result is None:
        return entry
    try:
        return replace(entry, learnt=learner.steps_to(target, entry.result.plan, entry.rule, seeds, most_steps))
    except ParsimError as error:
        return replace(entry, result=None, reason=str(error))
