"""A Prediction: one plan on one cluster, with its step, memory, breakdown and timeline as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from parsim.app.config import Question
from parsim.app.large import Quoted, TrainingRun, quoted, samples_run
from parsim.app.question import taken_defaults
from parsim.app.relaxed import StepSize, step_size
from parsim.errors import ConfigError
from parsim.formats.exports import EvaluatedStep, Exported, format_to_write
from parsim.formats.recipe import PlannedRecipe, recipe_of_plan
from parsim.model.catalogue.names import KERNEL
from parsim.plans.plan import Plan, plan_in_words
from parsim.predict.breakdown import critical_path
from parsim.predict.evaluate import Evaluation, evaluate
from parsim.predict.explain import Explanation, explain_plan
from parsim.predict.memory import SAFE_PROBABILITY
from parsim.predict.problem import PlanningProblem
from parsim.predict.result import Interval, PlanResult
from parsim.report.picture import plotted
from parsim.report.tables import (
    ReportTable,
    breakdown_frame,
    breakdown_table,
    format_rate,
    interval_texts,
    memory_frame,
    memory_table,
    strategy_table,
    table_html,
    timeline_frame,
    to_text,
)
from parsim.report.trace import task_label
from parsim.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd


ALIKE = 0.005
"""Of the step: below this, frameworks take equally long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssumedFramework:
    """Attributes: name: as which the answer is priced, with the year of an old version. by: what speaks for it. others:
    likewise plausible for the plan, with the step over that of the assumed one.
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Prediction:
    """The prediction for one plan. `parsim.run` trains with this plan for real.

    Attributes:
        question: what was asked. problem, evaluation: the priced and simulated values, for more than the methods return.
        among: the best plan of each compared family; empty for a given plan.
        assumed_framework: as which it is priced, where the question names none.
        engine: "static" or "dynamic". scenario: the scenario and its results; None without one.
    """

    question: Question
    problem: PlanningProblem
    evaluation: Evaluation
    among: tuple[Evaluation, ...] = ()
    assumed_framework: AssumedFramework | None = None
    engine: str = "static"
    scenario: Mapping[str, Any] | None = None

    @property
    def result(self) -> PlanResult:
        """The figures that all results share, and the keys of the JSON."""
        return self.evaluation.result

    @property
    def plan(self) -> Plan:
        return self.result.plan

    @property
    def strategy(self) -> str:
        return self.result.strategy

    @property
    def step_s(self) -> Interval:
        """Seconds of the mean step of a run of many steps: median and 90% interval.

        Under a scenario: of a run that stays in the state at its start.
        """
        return self.result.step_s.times(self._slowdown)

    @property
    def throughput_samples_per_s(self) -> Interval:
        """Samples per second: median and 90% interval; under a scenario as `step_s`."""
        return self.result.throughput_samples_per_s.times(1 / self._slowdown)

    @property
    def _slowdown(self) -> float:
        return 1.0 if self.scenario is None else float(self.scenario["states"][0]["slowdown"])

    @property
    def peak_memory_bytes(self) -> tuple[int, ...]:
        """Per rank."""
        return self.result.peak_memory_bytes

    @property
    def fits(self) -> bool:
        """Whether every rank's memory fits its device."""
        return self.result.fits

    @property
    def is_safe(self) -> bool:
        """Whether it fits with a probability of at least 95%."""
        return self.fit_probability >= SAFE_PROBABILITY

    @property
    def fit_probability(self) -> float:
        """That every rank's memory stays within its device's; the plan fits from 0.95 on."""
        return self.result.fit_probability

    @property
    def assumed(self) -> dict[str, Any]:
        """The defaults that were taken, by their key in a run file."""
        return taken_defaults(self.question, self.problem.cluster.size)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Of the prices and the plan, and of a step size beyond the safe one."""
        return self.result.warnings + (() if self.step_size is None else tuple(self.step_size.warnings()))

    def breakdown(self) -> pd.DataFrame:
        """Where the step of each rank went, one row per rank.

        Columns: rank; step_s and its categories compute_s, load_s, host_s, exposed_communication_s, bubble_s, idle_s, which
        sum to it; communication_busy_s, which counts hidden communication too. Seconds.
        """
        return breakdown_frame(self.evaluation.breakdown)

    def memory(self) -> pd.DataFrame:
        """Peak memory, one row per rank and line.

        Columns: rank, line ("parameters", "gradients", ...), size_bytes; p05_bytes and p95_bytes differ from it where the line
        cannot be counted exactly. The lines of a rank sum to its peak.
        """
        return memory_frame(self.evaluation.memory)

    def timeline(self) -> pd.DataFrame:
        """The predicted step, one row per task and resource it holds, by start. Plans beyond 64 ranks or 500,000 tasks
        list those ranks alone that stand for others.

        Columns: task, kind, rank, stream, component, stage, replica, microbatch, bucket, value; start_s, end_s, duration_s in
        seconds from the start of the step.
        """
        shown = self.evaluation
        if shown.folding.is_folded and shown.lists_every_rank:
            shown = evaluate(self.problem, self.plan, samples=0, fold=False)
        return timeline_frame(shown.graph, shown.timeline)

    def plot(self, path: str | Path | None = None) -> Any:
        """One predicted step, task by task on every rank; `path`, result and errors as for `Answer.plot`."""
        from parsim.report.figures import PICTURE_ROWS, timeline_figure

        step = {"One step by itself, predicted": self.evaluation.timeline}
        title = f"{self.problem.model.name} on {self.problem.cluster.name}: {plan_in_words(self.plan)}, {self.headline()}"
        return plotted(timeline_figure(self.evaluation.graph, step, most_rows=PICTURE_ROWS), title, path)

    def critical_path(self) -> list[str]:
        """The tasks on the critical path of the step, in order, with their names in traces."""
        compiled = self.evaluation.compiled
        numbers = np.array(critical_path(compiled, self.evaluation.timeline), dtype=np.int64)
        return [task_label(task) for task in compiled.columns.select(numbers)]

    def explain(self) -> Explanation:
        """Where every millisecond of the step comes from: by category, by task, and term by term, summing to the step.

        Print it, or take its `table()`: a DataFrame with the columns category, kind, component, phase, tasks, term, operation,
        value, unit, seconds, origin, detail.
        """
        return explain_plan(self.problem, self.evaluation)

    @cached_property
    def quoted(self) -> Quoted | None:
        """Tokens per second, MFU and HFU, memory by line, days and price of `training.tokens`; None: no language model."""
        return quoted(self.question, self.problem, self.evaluation)

    @cached_property
    def samples_run(self) -> TrainingRun | None:
        """Days, price and energy of `training.samples`; None: not asked for."""
        return samples_run(self.question, self.problem, self.evaluation)

    @cached_property
    def step_size(self) -> StepSize | None:
        """The learning rate beside what is known to converge under a relaxed rule; None: the plan is synchronous."""
        return step_size(self.question, self.plan)

    def export(self, format: str, *, out: str | Path) -> Exported:
        """Write the plan or its timeline as a file of another tool; returns what was written and what is `left_out`.

        Args:
            format: "deepspeed", "torchtitan", "megatron", "chakra" or "chrome" (docs/export.md).
            out: the file, or the folder of several.

        Raises:
            ConfigError: an unknown format, or a plan that it cannot express.
        """
        row = format_to_write(format, {})
        if row.writes == "recipe":
            value: object = recipe_of(row.tool, self.question, self.plan)
        elif row.writes == "step":
            value = EvaluatedStep(problem=self.problem, evaluation=self.evaluation)
        else:
            raise ConfigError(f"format {format!r} is {row.what}, and nothing was trained; use `parsim run`")
        assert row.write is not None
        exported: Exported = row.write(value, Path(out))
        return exported

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON: the keys all results share, with `breakdown` and `memory` per rank; `quoted` of a language model."""
        return describe(self.evaluation) | self.parts()

    def parts(self) -> dict[str, Any]:
        """What is known of some plans alone, as JSON; None where it is not."""
        parts = {
            "quoted": self.quoted,
            "samples_run": self.samples_run,
            "loading": self.problem.loading,
            "framework": self.assumed_framework,
            "step_size": self.step_size,
        }
        return {key: None if part is None else part.to_dict() for key, part in parts.items()}

    def headline(self) -> str:
        """`355 ms per step (90% interval 294–433 ms), 2.89 k samples/s, 12 GiB of 32 GiB per device`."""
        median, interval = interval_texts(self.step_s.to_dict())
        rate = format_rate(self.throughput_samples_per_s.median)
        fullest = max(self.evaluation.memory, key=lambda rank: rank.total_bytes)
        memory = f"{format_bytes(fullest.total_bytes)} of {format_bytes(fullest.limit_bytes)} per device"
        fits = "" if self.fits else "; does not fit"
        if self.fits and not self.is_safe:
            fits = f"; fits with a probability of only {self.fit_probability:.0%}"
        return f"{median} per step (90% interval {interval}), {rate} samples/s, {memory}{fits}"

    def __repr__(self) -> str:
        return f"Prediction({self.plan.summary()}: {self.headline()})"

    def __str__(self) -> str:
        lines = ["\n".join(map(to_text, self._tables())) + self.evaluation.alone_text()]
        if self.scenario is not None:
            lines.append(f"Under {self.scenario['file']}: {self.headline()}")
        if self.problem.loading is not None:
            lines.append(self.problem.loading.text())
        for figures in (self.quoted, self.samples_run):
            lines += [] if figures is None else figures.lines()
        lines += [] if self.step_size is None else self.step_size.lines()
        lines += [] if self.assumed_framework is None else [self.assumed_framework.text()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        strategies, breakdown, _ = self._tables()
        return table_html(strategies) + table_html(breakdown)

    def _tables(self) -> tuple[ReportTable, ReportTable, ReportTable]:
        document = describe(self.evaluation)
        title = f"{self.problem.model.name} on {self.problem.cluster.name}, batch {self.problem.global_batch}"
        return (
            strategy_table([self.result.to_dict()], title=title),
            breakdown_table(document["breakdown"]),
            memory_table(document["memory"]),
        )


def describe(evaluation: Evaluation) -> dict[str, Any]:
    """PlanResult.to_dict() with `breakdown` and `memory` per rank."""
    memory = []
    for rank in evaluation.memory:
        row = {
            "rank": rank.rank,
            "lines": dict(rank.lines),
            "spreads": {name: {"p05_bytes": low, "p95_bytes": high} for name, low, high in rank.spreads},
            "total_bytes": rank.total_bytes,
            "p05_bytes": rank.low_bytes,
            "p95_bytes": rank.high_bytes,
            "limit_bytes": rank.limit_bytes,
            "fits": rank.fits,
            "fit_probability": rank.fit_probability,
        }
        if rank.host_lines:
            row |= {"host_lines": dict(rank.host_lines)}
            row |= {"host_bytes": rank.host_bytes, "host_limit_bytes": rank.host_limit_bytes}
        memory.append(row)
    breakdown = [asdict(rank) | {"step_s": rank.step_s} for rank in evaluation.breakdown]
    return evaluation.result.to_dict() | {"breakdown": breakdown, "memory": memory}


def recipe_of(framework: str, config: Question, plan: Plan) -> PlannedRecipe:
    """The recipe of a plan and of how it trains, for the file of a framework. Raises ConfigError as `recipe_of_plan`."""
    training = config.training
    numbers = {"learning_rate": training.resolved_learning_rate, "weight_decay": training.resolved_weight_decay}
    args = dict(config.model_spec.args)  # with plan.sequence_parallel
    if KERNEL in args and KERNEL not in dict(config.model.args):  # of a framework: files say whether they compile
        del args[KERNEL]
        args |= {KERNEL: "eager"} if config.software.compiled is False else {}
    return recipe_of_plan(
        framework,
        plan,
        model=config.model.name,
        args=args,
        training=training.model_dump() | numbers,
        nodes=config.cluster.nodes,
    )
