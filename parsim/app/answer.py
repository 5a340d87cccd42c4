"""An Answer: the ranked plans of a question, and the chosen one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parsim.app.config import LargestOf, Question
from parsim.app.doctor import progress
from parsim.app.prediction import AssumedFramework, Prediction
from parsim.app.question import assumed_text, constant_text, left_out_text, loss_note, loss_text, precision_text, taken_defaults
from parsim.app.relaxed import RULES, StepSize, TargetRanking, to_target
from parsim.costs.loading import MeasuredLoading
from parsim.errors import DoesNotFitError
from parsim.plans.plan import plan_in_words, recommendation
from parsim.predict.breakdown import tokens_per_sample
from parsim.predict.evaluate import Evaluation
from parsim.predict.memory import FIT_PROBABILITY
from parsim.predict.problem import PlanningProblem
from parsim.predict.result import PlanResult
from parsim.report.picture import plotted
from parsim.report.tables import ReportTable, paragraph_html, plans_frame, strategy_table, table_html, to_text
from parsim.search.memory_floor import weights_are_too_many, weights_bytes
from parsim.search.placement.certificate import certificate_of, paper_certificate
from parsim.search.search import Search, most_frequent
from parsim.search.tree import Tally, is_tie
from parsim.units import format_bytes, format_count, format_percent, format_seconds

if TYPE_CHECKING:
    import pandas as pd


PLANS_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The largest size that fits with 95%.

    Attributes:
        what: of the batch (samples), the sequence (tokens) or the model (layers). size: that fits; above: the next one that was
            tried, which does not; None: there is no larger one. asked: that of the question.
        faster: tokens (of other models samples) per second over those of the question as asked, less one; None: that does not
            fit.
    """

    what: LargestOf
    size: int
    above: int | None
    asked: int
    faster: float | None

    def lines(self, problem: PlanningProblem) -> list[str]:
        """What it is, and what it costs in time."""
        units = {"batch": "samples in one pass", "seq": "tokens", "model": "layers"}
        parameters = f" ({format_count(problem.model.parameter_count)} parameters)" if self.what == "model" else ""
        does_not = f"; {self.above:,} do not" if self.above is not None else ""
        lines = [f"Largest {self.what} that fits with 95%: {self.size:,} {units[self.what]}{parameters}{does_not}."]
        if self.faster is None:
            return [*lines, f"As asked, with {self.asked:,}, no plan fits."]
        per = "tokens" if tokens_per_sample(problem.model) else "samples"
        more = "more" if self.faster > 0 else "fewer"
        return [*lines, f"In time: {abs(self.faster):.0%} {more} {per} per second than as asked."]


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """The result of `parsim.plan`.

    Attributes:
        question: the question and its defaults. problem: the same with the model and the cluster loaded.
        search: the plans that were compared; None if the question fixed the plan. evaluation: of the chosen plan
            (`Search.recommended`), or, if none fits, of the fastest.
        assumed_framework: as which it is priced, where the question names none.
        largest: what was made as large as fits, which the question then has; None: it was asked as it is.
    """

    question: Question
    problem: PlanningProblem
    search: Search | None
    evaluation: Evaluation
    assumed_framework: AssumedFramework | None = None
    largest: Largest | None = None

    @property
    def fits(self) -> bool:
        """Whether any plan fits."""
        return self.evaluation.result.fits

    @property
    def status(self) -> str:
        """ "best_of_candidates", "given" (the question fixed the plan) or "infeasible" (no plan fits)."""
        if self.search is not None:
            return self.search.status
        return "given" if self.fits else "infeasible"

    @cached_property
    def prediction(self) -> Prediction:
        """The chosen plan; if none fits, the fastest of those."""
        return self._predicted(self.evaluation)

    @property
    def chosen(self) -> Prediction:
        """The chosen plan. Raises DoesNotFitError if no plan fits: `prediction` is the fastest of those."""
        if not self.fits:
            raise DoesNotFitError(f"{self.sentence()} There is no chosen plan; see answer.candidates")
        return self.prediction

    @property
    def step_size(self) -> StepSize | None:
        """Of the chosen plan, as `Prediction.step_size`."""
        return self.prediction.step_size

    @property
    def candidates(self) -> tuple[Prediction, ...]:
        """The best plan of each family, those that fit first, the fastest first."""
        return tuple(self._predicted(evaluation) for evaluation in self._ranked)

    @property
    def assumed(self) -> dict[str, Any]:
        """The defaults that were taken, by their key in a run file."""
        return taken_defaults(self.question, self.problem.cluster.size)

    @property
    def _ranked(self) -> tuple[Evaluation, ...]:
        return (self.evaluation,) if self.search is None else self.search.candidates

    def _predicted(self, evaluation: Evaluation) -> Prediction:
        return Prediction(
            question=self.question,
            problem=self.problem,
            evaluation=evaluation,
            among=() if self.search is None else self.search.candidates,
            assumed_framework=self.assumed_framework,
        )

    def table(self) -> pd.DataFrame:
        """The ranked plans, one row each.

        Columns: strategy, plan (its summary), chosen, step_s with its 90% interval step_p05_s and step_p95_s (seconds),
        throughput_samples_per_s, communication_fraction (exposed communication over the step), communication_busy_fraction,
        exposed_communication_s, bubble_fraction, peak_memory_bytes (of the fullest rank), fits, fit_probability, reason.
        """
        return plans_frame([evaluation.result for evaluation in self._ranked], self._chosen_row())

    def sentence(self) -> str:
        """The recommendation in words; the table has the exact plan."""
        problem = self.problem
        size = f"{problem.cluster.size} device{'' if problem.cluster.size == 1 else 's'}"
        if self.fits and (idle := problem.cluster.size - self.prediction.plan.world_size):
            size += f", {idle} of them idle"
        where = f"{problem.model.name} on {problem.cluster.name} ({size}), global batch {problem.global_batch}"
        if self.fits:
            return f"{where}: use {recommendation(self.prediction.plan)}, {self.prediction.headline()}."
        return f"{where}: {self.verdict()}"

    def runners_up(self) -> str:
        """The plans beside the choice: the fastest, where that is less simple; the next best split; a faster one that may not
        fit. Empty if there is none."""
        if not self.fits:
            return ""
        parts = []
        plan, step_s = self.prediction.plan, self.prediction.step_s.median

        def beside(other: PlanResult, tie: str) -> str:
            ratio = other.step_s.median / step_s
            return tie if is_tie(max(ratio, 1 / ratio), 1.0) else f"{abs(ratio - 1):.0%} {'slower' if ratio > 1 else 'faster'}"

        if self.fastest is not None and plan_in_words(self.fastest.result.plan) != plan_in_words(plan):
            best = self.fastest.result
            parts.append(
                f"A tie, and less simple: {plan_in_words(best.plan)}, {format_seconds(best.step_s.median)} "
                f"({format_percent(1 - best.step_s.median / step_s)} less)."
            )
        others = [evaluation.result for evaluation in self._ranked if evaluation.result.fits]
        known = [plan, *([] if self.fastest is None else [self.fastest.result.plan])]
        others = [
            other for other in others if all((other.plan.mesh, other.plan.stages) != (one.mesh, one.stages) for one in known)
        ]
        if others:
            parts.append(f"Next: {plan_in_words(others[0].plan)}, {beside(others[0], 'a tie')}.")
        if self.riskier is not None:
            risky = self.riskier.result
            parts.append(
                f"{beside(risky, 'As fast').capitalize()}, but fits with a probability of only {risky.fit_probability:.0%}: "
                f"{plan_in_words(risky.plan)}, {format_seconds(risky.step_s.median)}, "
                f"{format_bytes(max(risky.peak_memory_bytes))}. "
                f"plan.fit_probability = {FIT_PROBABILITY} allows it."
            )
        safe = self.problem.safe_probability
        if self.search is not None and self.prediction.fit_probability < safe:
            parts.append(f"No plan that was tried fits with {safe:.0%}.")
        return " ".join(parts)

    @property
    def riskier(self) -> Evaluation | None:
        """A plan that fits less surely than the choice, where it is faster by more than a tie; None: there is none."""
        return None if self.search is None else self.search.riskier

    def heading(self) -> list[str]:
        """What stands above the table: the answer, what is next to it, and the whole training where it was asked for."""
        figures = self.prediction.quoted
        run = self.prediction.samples_run or (None if figures is None else figures.run)
        figures_of_run = [] if run is None or not self.fits else run.lines()
        largest = [] if self.largest is None else self.largest.lines(self.problem)
        return list(filter(None, [*largest, self.sentence(), self.runners_up(), *figures_of_run]))

    @property
    def fastest(self) -> Evaluation | None:
        """The fastest plan, where the choice is a simpler one that ties with it; None: the choice is the fastest."""
        best = None if self.search is None else self.search.chosen
        return None if best is None or best.result.plan.program == self.evaluation.result.plan.program else best

    def verdict(self) -> str:
        """The choice, how it was made, and how far it can be from the best; or what would have to change."""
        document, row = self.to_dict(), self._chosen_row()
        considered = considered_text(document)
        if row is None:
            nearest = min(self._ranked, key=lambda evaluation: max(rank.needed_bytes for rank in evaluation.memory))
            room = max(rank.needed_bytes for rank in nearest.memory)
            short = max(rank.host_excess_bytes for rank in nearest.memory)
            hosts = f", with {format_bytes(short)} more memory in every host," if short else ""
            none, devices = "No plan fits", self.problem.cluster.devices
            if weights_are_too_many(self.problem, len(devices)):
                held, most = weights_bytes(self.problem), max(device.type.room_bytes for device in devices)
                none += f": weights, gradients and optimizer state are {format_bytes(held)}, which {math.ceil(held / most):,} "
                none += f"devices of {format_bytes(most)} would hold and {len(devices):,} do not"
            elif untried := document["considered"].get("not_tried", 0):
                none = f"No plan that was tried fits, and {untried:,} were not tried: give plan.mesh or plan.microbatches to "
                none += "search fewer"
            return (
                f"{none}. The nearest is {nearest.result.plan.summary()}: devices of {format_bytes(room)}{hosts} would do; or "
                f"use more devices or a smaller batch. {considered}"
            )
        text = (
            f"Chosen: {self._ranked[row].result.plan.summary()}. None of the plans can take less than "
            f"{format_seconds(document['lower_bound_s'])} ({format_percent(document['gap'])} less). {considered}"
        )
        if document.get("cut_short"):
            text += " Stopped by Ctrl-C: the rest of the plans was not looked at."
        elif names := document.get("unrefined", []):
            text += f" Not refined after losing: {', '.join(names)}; a separate search may find faster plans for them."
        solved = [placement for placement in document.get("placements", ()) if placement["seconds"] is not None]
        if solved:
            best = min(solved, key=lambda placement: float(placement["seconds"]))
            text += (
                f"\nPlacements of single components on one stage: {best['status']}, {format_seconds(best['seconds'])} under "
                f"the cost model, gap {format_percent(best['gap'])}."
            )
        return text

    def lines(self) -> list[str]:
        """What stands below the table: families without a plan, how the choice was made, and the defaults that were taken."""
        problem, recipe, figures = self.problem, self.question.source.recipe, self.prediction.quoted
        skipped = () if self.search is None else self.search.skipped
        lines = [
            *([] if recipe is None else recipe.lines()),
            *(f"{name}: {why}" for name, why in skipped),
            self.verdict() if self.fits else "",  # without a plan it is the sentence above the table
            *([] if figures is None else figures.lines(run=not self.fits)),
            problem.loading.text() if isinstance(problem.loading, MeasuredLoading) else "",
            *([] if self.step_size is None else self.step_size.lines()),
            loss_text(problem.model),
            constant_text(problem.model),
            assumed_text(self.assumed),
            "" if self.assumed_framework is None else self.assumed_framework.text(),
            left_out_text(self.question),
            precision_text(self.assumed, problem.cluster.devices[0].type.peak_flop_per_s),
        ]
        return list(filter(None, lines))

    def report(self) -> ReportTable:
        """The ranked table as texts."""
        results = [evaluation.result.to_dict() for evaluation in self._ranked]
        row = self._chosen_row()
        return strategy_table(results, chosen=None if row is None else results[row], title="")

    def plot(self, path: str | Path | None = None) -> Any:
        """The ranked plans with their 90% intervals; of one plan alone its step.

        Args:
            path: also write the picture, as PNG, SVG or PDF by its ending.

        Returns:
            A `matplotlib.figure.Figure`; without matplotlib a `plotly.graph_objects.Figure`.

        Raises:
            ConfigError: another ending. MissingDependencyError: a path, without matplotlib.
        """
        from parsim.report.figures import strategies_figure

        results, row = [evaluation.result.to_dict() for evaluation in self._ranked], self._chosen_row()
        if len(results) == 1:
            return self.prediction.plot(path)
        return plotted(strategies_figure(results, chosen=None if row is None else results[row]), self.sentence(), path)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, as `parsim plan --json` prints it."""
        document = self._given() if self.search is None else self.search.to_dict()
        model = self.problem.model
        if self.question.source.recipe is not None:
            document["config_file"] = self.question.source.recipe.to_dict()
        return document | {
            **self.prediction.parts(),
            **({} if self.largest is None else {"largest": asdict(self.largest)}),
            "assumed": {key: list(value) if isinstance(value, tuple) else value for key, value in self.assumed.items()},
            "loss": model.loss or None,
            "loss_note": loss_note(model) or None,
        }

    def certificate(self) -> dict[str, Any]:
        """The placement problem of this question, solved by two solvers; `reason` where there is none.

        Keys: `verdict`, `exact` and `milp` (each with `status`, `seconds`, `lower_bound_s`, `gap`, `taken_s`, `reason`),
        `relative_difference`, `microbatches`, `components`, `choices`; and `paper`, the same keys of the paper's formulation
        for this model and cluster, with the `placements` that its optimum stands for.
        """
        with progress("Certifying placements"):
            certificate = certificate_of(self.problem, self.search, self.question.plan.strategy)
            return certificate | {"paper": paper_certificate(self.problem)}

    def to_target(
        self, accuracy: float, *, rules: Sequence[str] | None = None, seeds: int = 3, most_steps: int = 2000
    ) -> TargetRanking:
        """Synchronous training and relaxed rules, ranked by simulated seconds to a test accuracy.

        Steps are counted on virtual replicas at this scale, of the model in question or of a stand-in that `learner` names.
        The step time is that of each rule's fastest plan.

        Args:
            accuracy: between 0 and 1. rules: as `plan.synchronisation` takes them; None: the usual ones.
            seeds: trainings of each. most_steps: after which a training is given up.

        Raises:
            ConfigError: an accuracy that is none, or the question asks for a relaxed rule itself. PlanError: an unknown rule.
            MissingDependencyError: without torch or scikit-learn.
        """
        with progress("Training virtual replicas") as say:
            return to_target(
                self.question,
                self.problem,
                self.evaluation,
                accuracy,
                rules=RULES if rules is None else rules,
                seeds=seeds,
                most_steps=most_steps,
                say=say,
            )

    def _given(self) -> dict[str, Any]:
        """A plan that was given, as the search would show it."""
        result = self.evaluation.result
        median = result.step_s.median
        return {
            "candidates": [result.to_dict()],
            "chosen": result.to_dict() if result.fits else None,
            "status": self.status,
            "lower_bound_s": result.lower_bound_s,
            "gap": max(0.0, (median - result.lower_bound_s) / median) if result.fits and median else 1.0,
            "fastest": result.to_dict() if result.fits else None,
            "riskier": None,
            "judged": 1,
            "considered": Tally(simulated=1).to_dict(),
            "skipped": {},
        }

    def _chosen_row(self) -> int | None:
        if not self.fits:
            return None
        plan = self.evaluation.result.plan
        return next(row for row, evaluation in enumerate(self._ranked) if evaluation.result.plan.program == plan.program)

    def __str__(self) -> str:
        return "\n".join(self.heading()) + f"\n\n{to_text(self.report())}" + "\n".join(self.lines())

    def __repr__(self) -> str:
        rows = [f"Answer: {self.sentence()}"]
        for result in [evaluation.result for evaluation in self._ranked][:PLANS_SHOWN]:
            step, peak = format_seconds(result.step_s.median), format_bytes(max(result.peak_memory_bytes))
            rows.append(f"  {result.plan.summary()[:80]}: {step}, {peak}{'' if result.fits else ', does not fit'}")
        more = len(self._ranked) - PLANS_SHOWN
        return "\n".join([*rows, *([f"  ... and {more} more"] if more > 0 else [])])

    def _repr_html_(self) -> str:
        texts = map(paragraph_html, filter(None, [self.sentence(), self.runners_up()]))
        return "".join([*texts, table_html(self.report()), *map(paragraph_html, self.lines())])


def considered_text(document: dict[str, Any]) -> str:
    """`Of 412 plans: 31 simulated, 341 ruled out by a lower bound on their time, 37 do not fit, 3 impossible (why).`"""
    counts = document["considered"]
    impossible = counts["infeasible"]
    words = {
        "slower_by_a_lower_bound": "ruled out by a lower bound on their time",
        "do_not_fit": "do not fit",
        "not_tried": "not tried",
    }
    parts = [f"{counts['simulated']:,} simulated"]
    parts += [f"{counts[key]:,} {text}" for key, text in words.items() if counts[key]]
    if impossible:
        why = "" if document["chosen"] else f" ({most_frequent(impossible, ' in --json')})"
        parts.append(f"{sum(impossible.values()):,} impossible{why}")
    return f"Of {counts['plans']:,} plans: {', '.join(parts)}."
