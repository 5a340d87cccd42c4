"""An Answer: the ranked plans of a question, and the chosen one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from parsim.app.config import Question
from parsim.app.doctor import progress
from parsim.app.frames import plans_frame
from parsim.app.prediction import Prediction
from parsim.app.question import assumed_text, constant_text, loss_note, loss_text, precision_text, taken_defaults
from parsim.app.to_target import RULES, TargetRanking, to_target
from parsim.costs.loading import MeasuredLoading
from parsim.errors import DoesNotFitError, PlanError, ScheduleError
from parsim.plans.plan import plan_in_words
from parsim.predict.evaluate import Evaluation
from parsim.predict.memory import SAFE_PROBABILITY
from parsim.predict.problem import PlanningProblem
from parsim.predict.result import PlanResult
from parsim.report.notebook import paragraph_html, table_html
from parsim.report.tables import ReportTable, strategy_table, to_text
from parsim.search.placement.certificate import certificate_of
from parsim.search.placement.paper import paper_certificate
from parsim.search.search import Search, is_tie, most_frequent, search, simpler_tie
from parsim.search.tree import Tally
from parsim.units import format_bytes, format_percent, format_seconds

if TYPE_CHECKING:
    import pandas as pd


PLANS_SHOWN = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """The result of `parsim.plan`.

    Attributes:
        question: the question and its defaults. problem: the same with the model and the cluster loaded.
        search: the plans that were compared; None if the question fixed the plan. evaluation: of the chosen plan,
            or, if none fits, of the fastest.
    """

    question: Question
    problem: PlanningProblem
    search: Search | None
    evaluation: Evaluation

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

    @property
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
    def candidates(self) -> tuple[Prediction, ...]:
        """The best plan of each family, those that fit first, the fastest first."""
        return tuple(self._predicted(entry) for entry in self._ranked)

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
        )

    def table(self) -> pd.DataFrame:
        """The ranked plans, one row each.

        Columns: strategy, plan (its summary), chosen, step_s with its 90% interval step_p05_s and step_p95_s (seconds),
        throughput_samples_per_s, communication_fraction (exposed communication over the step), communication_busy_fraction,
        exposed_communication_s, bubble_fraction, peak_memory_bytes (of the fullest rank), fits, reason.
        """
        return plans_frame([entry.result for entry in self._ranked], self._chosen_row())

    def sentence(self) -> str:
        """The recommendation in words; the table has the exact plan."""
        problem = self.problem
        size = f"{problem.cluster.size} device{'' if problem.cluster.size == 1 else 's'}"
        if self.fits and (idle := problem.cluster.size - self.prediction.plan.world_size):
            size += f", {idle} of them idle"
        where = f"{problem.model.name} on {problem.cluster.name} ({size}), global batch {problem.global_batch}"
        if self.fits:
            return f"{where}: use {plan_in_words(self.prediction.plan)}, {self.prediction.headline()}."
        return f"{where}: {self.verdict()}"

    def runners_up(self) -> str:
        """The plans closest to the choice: a simpler one that is as fast, and the next best split; empty if there is none."""
        parts = []
        if self.tie is not None and plan_in_words(self.tie.result.plan) != plan_in_words(self.prediction.plan):
            simpler = self.tie.result
            parts.append(f"A tie, and simpler: {plan_in_words(simpler.plan)}, {format_seconds(simpler.step_s.median)}.")
        if (other := self._next_family()) is not None:
            slower = other.step_s.median / self.prediction.step_s.median - 1
            told = "a tie" if is_tie(1 + slower, 1.0) else f"{slower:.0%} slower"
            parts.append(f"Next: {plan_in_words(other.plan)}, {told}.")
        if self.fits and not self.prediction.is_safe:
            parts.append(self._safer())
        return " ".join(parts)

    def _safer(self) -> str:
        """Beside a plan that may run out of memory: the fastest of those shown that will not, and how to ask for such plans."""
        least = f"{SAFE_PROBABILITY:.0%}"
        if self.safer is None:
            return f"For plans that fit with {least}, set plan.fit_probability = {SAFE_PROBABILITY}."
        safe = self.safer.result
        slower = safe.step_s.median / self.prediction.step_s.median - 1
        told = "as fast" if is_tie(1 + slower, 1.0) else f"{slower:.0%} slower"
        return (
            f"Fits with {least} or more: {plan_in_words(safe.plan)}, {format_bytes(max(safe.peak_memory_bytes))}, {told}. "
            f"plan.fit_probability = {SAFE_PROBABILITY} searches for such plans alone."
        )

    @cached_property
    def safer(self) -> Evaluation | None:
        """If the choice may run out of memory: the fastest known plan that fits with `SAFE_PROBABILITY`.

        That is one of the ranked plans, or one found by a search on the mesh of the choice, with as many microbatches. None
        if the choice is safe, or if there is no such plan.
        """
        if self.search is None or not self.fits or self.prediction.is_safe:
            return None

        row = self._chosen_row()
        with progress(f"Looking for a plan that fits with {SAFE_PROBABILITY:.0%}"):
            return safer_plan(self.problem, self._ranked, self._ranked[row or 0])

    def heading(self) -> list[str]:
        """What stands above the table: the answer, what is next to it, and the whole training where it was asked for."""
        figures = self.prediction.quoted
        run = self.prediction.samples_run or (None if figures is None else figures.run)
        whole = [] if run is None or not self.fits else run.lines()
        return list(filter(None, [self.sentence(), self.runners_up(), *whole]))

    @cached_property
    def tie(self) -> Evaluation | None:
        """A simpler plan on the same mesh that is as fast as a measurement can tell (`parsim.search.search`); None: none is."""
        if self.search is None or not self.fits:
            return None
        return simpler_tie(self.problem, self.evaluation)

    def _next_family(self) -> PlanResult | None:
        """The fastest plan that fits on another mesh than the choice, or with other placements."""
        if not self.fits:
            return None
        plan = self.evaluation.result.plan
        others = (entry.result for entry in self._ranked if entry.result.fits)
        return next((other for other in others if (other.plan.mesh, other.plan.stages) != (plan.mesh, plan.stages)), None)

    def verdict(self) -> str:
        """The choice, how it was made, and how far it can be from the best; or what would have to change."""
        needed = [max(rank.needed_bytes for rank in entry.memory) for entry in self._ranked]
        row = self._chosen_row()
        summary = "" if row is None else self._ranked[row].result.plan.summary()
        short = [max(rank.host_excess_bytes for rank in entry.memory) for entry in self._ranked]
        return _verdict(self.to_dict(), needed, summary, short)

    def lines(self) -> list[str]:
        """What stands below the table: families without a plan, how the choice was made, and the defaults that were taken."""
        skipped = () if self.search is None else self.search.skipped
        return [
            *([] if self.question.source.recipe is None else self.question.source.recipe.lines()),
            *(f"{name}: {why}" for name, why in skipped),
            *([self.verdict()] if self.fits else []),  # without a plan it is the sentence above the table
            *([] if (figures := self.prediction.quoted) is None else figures.lines(run=not self.fits)),
            *([self.problem.loading.text()] if isinstance(self.problem.loading, MeasuredLoading) else []),
            loss_text(self.problem.model),
            *filter(
                None,
                [
                    constant_text(self.problem.model),
                    assumed_text(self.assumed),
                    precision_text(self.assumed, self.problem.cluster.devices[0].type.peak_flop_per_s),
                ],
            ),
        ]

    def report(self) -> ReportTable:
        """The ranked table as texts."""
        results = [entry.result.to_dict() for entry in self._ranked]
        row = self._chosen_row()
        return strategy_table(results, chosen=None if row is None else results[row], title="")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, as `parsim plan --json` prints it."""
        document = self._given() if self.search is None else self.search.to_dict()
        model = self.problem.model
        if self.question.source.recipe is not None:
            document["config_file"] = self.question.source.recipe.to_dict()
        figures = self.prediction.quoted
        document["quoted"] = None if figures is None else figures.to_dict()
        run = self.prediction.samples_run
        document["samples_run"] = None if run is None else run.to_dict()
        loading = self.problem.loading
        document["loading"] = None if loading is None else loading.to_dict()
        document["tie"] = None if self.tie is None else self.tie.result.to_dict()
        document["safer"] = None if self.safer is None else self.safer.result.to_dict()
        return document | {"assumed": _plain(self.assumed), "loss": model.loss or None, "loss_note": loss_note(model) or None}

    def certificate(self) -> dict[str, Any]:
        """The placement problem of this question, solved by two solvers; `reason` where there is none.

        Keys: `verdict`, `exact` and `milp` (each with `status`, `seconds`, `lower_bound_s`, `gap`, `taken_s`, `reason`),
        `relative_difference`, `microbatches`, `components`, `choices`; and `paper`, the same keys of the paper's formulation
        for this model and cluster, with the `placements` that its optimum stands for.
        """
        with progress("Certifying placements"):
            own = certificate_of(self.problem, self.search, self.question.plan.strategy)
            return own | {"paper": paper_certificate(self.problem)}

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
            "judged": 1,
            "considered": Tally(simulated=1).to_dict(),
            "skipped": {},
        }

    def _chosen_row(self) -> int | None:
        if not self.fits:
            return None
        plan = self.evaluation.result.plan
        return next(number for number, entry in enumerate(self._ranked) if entry.result.plan.program == plan.program)

    def __str__(self) -> str:
        return "\n".join(self.heading()) + f"\n\n{to_text(self.report())}" + "\n".join(self.lines())

    def __repr__(self) -> str:
        rows = [_short_row(entry.result) for entry in self._ranked]
        more = [f"  ... and {len(rows) - PLANS_SHOWN} more"] if len(rows) > PLANS_SHOWN else []
        return "\n".join([f"Answer: {self.sentence()}", *rows[:PLANS_SHOWN], *more])

    def _repr_html_(self) -> str:
        return "".join(
            [
                *map(paragraph_html, filter(None, [self.sentence(), self.runners_up()])),
                table_html(self.report()),
                *(paragraph_html(line) for line in self.lines()),
            ]
        )


def _short_row(result: PlanResult) -> str:
    step, peak = format_seconds(result.step_s.median), format_bytes(max(result.peak_memory_bytes))
    return f"  {result.plan.summary()[:80]}: {step}, {peak}{'' if result.fits else ', does not fit'}"


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def _verdict(document: dict[str, Any], needed_bytes: Sequence[int], summary: str, short_bytes: Sequence[int]) -> str:
    """`needed_bytes`: by candidate, of the rank that needs most. `summary`: of the plan in the row that the table marks.

    `short_bytes`: by candidate, what the host of the fullest node lacks.
    """
    chosen = document["chosen"]
    if chosen is None:
        room, nearest, short = min(zip(needed_bytes, document["candidates"], short_bytes, strict=True), key=itemgetter(0))
        hosts = f", with {format_bytes(short)} more memory in every host," if short else ""
        untried = document.get("considered", {}).get("not_tried", 0)
        none = (
            f"No plan that was tried fits, and {untried:,} were not tried: give plan.mesh or plan.microbatches to search fewer"
            if untried
            else "No plan fits"
        )
        return (
            f"{none}. The nearest is {nearest['plan_summary']}: devices of "
            f"{format_bytes(room)}{hosts} would do; or use more devices or a smaller batch. "
            f"{considered_text(document)}"
        )
    return (
        f"Chosen: {summary}. None of the plans can take less than "
        f"{format_seconds(document['lower_bound_s'])} ({format_percent(document['gap'])} less). {considered_text(document)}"
        f"{_unrefined(document)}{_placements(document)}"
    )


def considered_text(document: dict[str, Any]) -> str:
    """`Of 412 plans: 31 simulated, 341 ruled out by a lower bound on their time, 37 do not fit, 3 impossible (why).`"""
    counts = document["considered"]
    impossible = counts["infeasible"]
    told = {
        "slower_by_a_lower_bound": "ruled out by a lower bound on their time",
        "do_not_fit": "do not fit",
        "not_tried": "not tried",
    }
    parts = [f"{counts['simulated']:,} simulated"]
    parts += [f"{counts[key]:,} {words}" for key, words in told.items() if counts[key]]
    if impossible:
        why = "" if document["chosen"] else f" ({most_frequent(impossible, ' in --json')})"
        parts.append(f"{sum(impossible.values()):,} impossible{why}")
    return f"Of {counts['plans']:,} plans: {', '.join(parts)}."


def _unrefined(document: dict[str, Any]) -> str:
    """Which strategies are shown by a plan that more search could better."""
    names = document.get("unrefined", [])
    return f" Not refined after losing: {', '.join(names)}; a separate search may find faster plans for them." if names else ""


def _placements(document: dict[str, Any]) -> str:
    """How the solver of placements vouches for the best one on a single stage."""
    solved = [entry for entry in document.get("placements", ()) if entry["seconds"] is not None]
    if not solved:
        return ""
    best = min(solved, key=lambda entry: float(entry["seconds"]))
    return (
        f"\nPlacements of single components on one stage: {best['status']}, {format_seconds(best['seconds'])} under the cost "
        f"model, gap {format_percent(best['gap'])}."
    )


# A plan that surely fits, beside a choice that may run out of memory.


def safer_plan(problem: PlanningProblem, ranked: Sequence[Evaluation], chosen: Evaluation) -> Evaluation | None:
    """The fastest plan known that fits with `SAFE_PROBABILITY`: of those ranked, or of a search near the choice.

    That search keeps mesh, microbatches and strategy of the choice, and leaves ZeRO, buckets and recomputation as free as the
    question does. A safe plan on another mesh may be faster.

    Args:
        problem: model, cluster and batch. ranked: the plans of the answer. chosen: that among them which may not fit.
    """
    found = [entry for entry in ranked if entry.result.fits and entry.result.fit_probability >= SAFE_PROBABILITY]
    if not problem.constraints.synchronisation.is_relaxed:
        near = _near(problem, chosen)
        found += [] if near is None else [near]
    return min(found, key=lambda entry: entry.result.step_s.median, default=None)


def _near(problem: PlanningProblem, chosen: Evaluation) -> Evaluation | None:
    plan = chosen.result.plan
    mesh = plan.mesh
    constraints = replace(problem.constraints, pp=mesh.pp, dp=mesh.dp, tp=mesh.tp, microbatches=plan.microbatches)
    careful = replace(problem, fit_probability=SAFE_PROBABILITY, constraints=constraints)
    try:
        return search(careful, (chosen.result.strategy,)).chosen
    except (PlanError, ScheduleError):  # the strategy has no plan under these constraints
        return None
