"""Ways of synchronising, ranked by simulated seconds to an accuracy: seconds of a step times steps that replicas need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from parsim.app.config import Question
from parsim.app.doctor import Say
from parsim.errors import ConfigError, ParsimError
from parsim.plans.synchronisation import ALL_REDUCE, Synchronisation, parse_synchronisation
from parsim.predict.evaluate import Evaluation, simulated_step
from parsim.predict.problem import PlanningProblem
from parsim.predict.result import PlanResult
from parsim.search.relaxed import relaxed_search
from parsim.units import format_seconds

if TYPE_CHECKING:
    from parsim.relaxed.replicas import LearntSteps


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
        seconds, remaining = 0.0, steps
        for lasts, step_s in self.phases[:-1]:
            seconds += min(remaining, lasts) * step_s
            remaining -= min(remaining, lasts)
        return seconds + remaining * self.phases[-1][1]

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
        contenders = [contender.to_dict() for contender in self.contenders]
        return {"target_accuracy": self.target, "learner": self.learner, "contenders": contenders}

    def lines(self) -> list[str]:
        """Sentences for people."""
        first = self.contenders[0]
        winner = f"{first.rule} first" if first.seconds is not None else "no way reaches it"
        heading = f"Time to test accuracy {self.target:g}: {winner}. Steps were counted on {self.learner}."
        return [heading, *(f"  {contender.line()}" for contender in self.contenders)]

    def figure(self) -> Any:
        """Accuracy over simulated seconds, a plotly Figure."""
        from parsim.report.plots import go

        figure = go.Figure()
        for contender in self.contenders:
            if points := contender.curve():
                seconds, scores = zip(*points, strict=True)
                figure.add_scatter(x=list(seconds), y=list(scores), name=str(contender.rule), mode="lines")
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

    compared = [ALL_REDUCE, *asked_rules(target, rules)]
    if seeds < 1:
        raise ConfigError(f"steps are counted over at least one seed, got {seeds}")
    if problem.constraints.synchronisation.is_relaxed:
        raise ConfigError(
            f"the question asks for synchronisation {problem.constraints.synchronisation} already; leave "
            "plan.synchronisation out, or add --set plan.synchronisation=all_reduce, and every way is compared"
        )
    planned = [_planned(problem, best, rule, most_steps) for rule in compared]
    replicas = max((contender.result.plan.mesh.dp for contender in planned if contender.result is not None), default=1)
    learner = learner_of(question, problem.model, replicas)
    contenders = []
    for number, contender in enumerate(planned, 1):
        if contender.result is not None:
            try:
                learnt = learner.steps_to(target, contender.result.plan, contender.rule, range(seeds), most_steps)
                contender = replace(contender, learnt=learnt)
            except ParsimError as error:
                contender = replace(contender, result=None, reason=str(error))
        contenders.append(contender)
        if say is not None:
            say(f"{number} of {len(planned)} ways: {contender.line()}")

    def place(contender: Contender) -> tuple[bool, float, bool, float]:
        score = 0.0 if contender.learnt is None else contender.learnt.best.best
        return contender.seconds is None, contender.seconds or 0.0, contender.result is None, -score

    return TargetRanking(target=target, learner=learner.words, contenders=tuple(sorted(contenders, key=place)))


def asked_rules(target: float, rules: Sequence[str]) -> list[Synchronisation]:
    """The relaxed rules to compare, each once; arguments and errors as `to_target`. A command calls it before it plans."""
    if not 0 < target < 1:
        raise ConfigError(f"a target accuracy lies between 0 and 1, got {target:g}; give 0.95 for 95%")
    return list(dict.fromkeys(rule for text in rules if (rule := parse_synchronisation(text)).is_relaxed))


def _planned(problem: PlanningProblem, best: Evaluation, rule: Synchronisation, most_steps: int) -> Contender:
    """The fastest plan of a rule that fits."""
    chosen: Evaluation | None = best
    if rule.is_closed_loop:
        return Contender(rule=rule, reason="how long each graph of a closed loop lasts is known only as it trains; use linear")
    if rule.is_relaxed:
        problem = replace(problem, constraints=replace(problem.constraints, synchronisation=rule))
        try:
            chosen = relaxed_search(problem, ("adaptive",), samples=0).chosen
        except ParsimError as error:
            return Contender(rule=rule, reason=str(error))
    if chosen is None or not chosen.result.fits:
        return Contender(rule=rule, reason="no plan fits")
    plan = chosen.result.plan
    # Of Ada per graph how many steps it lasts, and the seconds of its step: a target may be reached on its first graphs.
    # Graphs that begin after `most_steps` are left out, since no training comes to them.
    phases: list[tuple[int, float]] = []
    for rounds, graph in rule.mixing.phases(plan.mesh.dp) if rule.graph else ():
        if sum(steps for steps, _ in phases) >= most_steps:
            break
        step_s = simulated_step(problem, replace(plan, synchronisation=replace(rule, graph=graph))).step_s
        phases.append((rounds * rule.period_steps, step_s))
    return Contender(rule=rule, result=chosen.result, phases=tuple(phases))
