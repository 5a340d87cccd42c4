"""The learning rate of a question beside what is known of the step size of its plan's rule of synchronisation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from parsim.app.config import Question
from parsim.errors import MissingDependencyError
from parsim.plans.convergence import StepCondition, step_condition
from parsim.plans.plan import Plan

MOMENTUM = {"sgd": 0.0, "sgd_momentum": 0.9}
"""Optimizers whose step is a learning rate times a sum of gradients, and their momentum where none is given."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepSize:
    """Attributes: condition: of the rule. question: with the learning rate and the optimizer."""

    question: Question
    plan: Plan
    condition: StepCondition

    @property
    def learning_rate(self) -> float:
        return self.question.training.resolved_learning_rate

    @property
    def momentum(self) -> float | None:
        """Of SGD; None: the optimizer scales its steps by what it has seen."""
        training = self.question.training
        usual = MOMENTUM.get(training.optimizer)
        given = dict(training.optimizer_args).get("momentum", usual)
        return float(given) if usual is not None and isinstance(given, int | float) else None

    @property
    def step(self) -> float | None:
        """eta that the conditions are about: with momentum b a gradient moves the weights by lr / (1 - b) in all."""
        return None if self.momentum is None else self.learning_rate / (1.0 - self.momentum)

    @cached_property
    def curvature(self) -> tuple[float, int] | None:
        """L of the loss at the first weights and the samples it was measured on; None: the model cannot be run here and now."""
        if self.step is None:
            return None
        from parsim.app.learners import first_curvature

        try:
            return first_curvature(self.question)
        except MissingDependencyError:
            return None

    @property
    def times_safe(self) -> float | None:
        """The step over the largest safe one; None where either is not known."""
        if self.step is None or self.condition.safe is None or not self.curvature:
            return None
        return self.step * self.curvature[0] / self.condition.safe

    def lines(self) -> list[str]:
        """Sentences for people."""
        condition = self.condition
        known = [
            "" if condition.safe is None else f"safe up to {condition.safe:.3g}/L, where synchronous training has 1/L",
            "" if condition.limit is None else f"quadratic losses {_until(condition)} {condition.limit:.3g}/L",
            condition.why,
        ]
        terms = f" ({terms})" if (terms := condition.terms()) else ""
        text = f"Step size of {self.plan.synchronisation}{terms}: {'; '.join(filter(None, known))}."
        lines = [f"{text} L is the largest curvature of the loss."]
        if condition.safe is None and condition.limit is None:
            return [text]
        if self.step is None:
            return [f"{lines[0]} {self.question.training.optimizer} scales its steps, so the bound does not apply to it."]
        return [lines[0], self._of_this_rate()]

    def _of_this_rate(self) -> str:
        """`Safe step size here: 0.012, with L = 19 at the first weights (512 samples); yours, 0.1, is 8.3 times that.`"""
        condition, step = self.condition, self.step
        assert step is not None
        yours = f"{self.learning_rate:g}" + (f" / (1 - {self.momentum:g}) = {step:.3g}" if self.momentum else "")
        reach, word = (condition.limit, "stable") if condition.safe is None else (condition.safe, "safe")
        assert reach is not None
        if not self.curvature:
            return f"Your step size, {yours}, is {word} while L is at most {reach / step:.3g}."
        curvature, samples = self.curvature
        ratio = step * curvature / reach
        text = (
            f"{word.capitalize()} step size here: {reach / curvature:.3g}, with L = {curvature:.3g} at the first weights "
            f"({samples} samples); yours, {yours}, is {ratio:.2g} times that."
        )
        if condition.limit is not None and step * curvature > condition.limit:
            text += f" It is also beyond {condition.limit / curvature:.3g}, where quadratic losses of this curvature diverge."
        return text

    def warnings(self) -> list[str]:
        """What is said of a step beyond the safe one, or beyond what quadratic losses bear."""
        curvature, step, limit = self.curvature, self.step, self.condition.limit
        beyond = curvature and step and limit is not None and step * curvature[0] > limit
        return self.lines()[-1:] if beyond or (self.times_safe or 0.0) > 1.0 else []

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "learning_rate": self.learning_rate,
            "momentum": self.momentum,
            "step": self.step,
            "curvature": None if self.curvature is None else self.curvature[0],
            "curvature_samples": None if self.curvature is None else self.curvature[1],
            "times_safe": self.times_safe,
            **self.condition.to_dict(),
        }


def _until(condition: StepCondition) -> str:
    return "diverge beyond" if condition.is_exact else "converge up to"


def step_size(question: Question, plan: Plan) -> StepSize | None:
    """Of a relaxed plan; None for synchronous training."""
    if not plan.synchronisation.is_relaxed:
        return None
    condition = step_condition(plan.synchronisation, replicas=plan.mesh.dp, stages=plan.mesh.pp)
    return StepSize(question=question, plan=plan, condition=condition)
