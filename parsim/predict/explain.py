"""Where every millisecond of a predicted step comes from: by category, by task, and term by term.

All seconds are those of the mean rank in one step. They add up:

    step = compute + exposed communication + bubble + load + idle + host
           + overlap of steps in a row + waiting for the slowest rank + host between steps

Within a category its tasks add up to it. There is one entry per kind of task (one component in one phase, one collective of
one size) with the seconds of its price, term by term. One more entry is what the engine makes of them: overlap slows both
sides, and communication hides behind computation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from parsim.costs.estimate import Estimate, TermOperation, TermOrigin, running_totals_s
from parsim.predict.evaluate import Evaluation, ranks_per_task
from parsim.predict.problem import PlanningProblem
from parsim.units import format_bytes, format_percent, format_seconds
from parsim.work import ClipGradients, Collective, Compute, HostCopy, HostUpdate, LoadBatch, Mix, OptimizerStep, SendRecv, Work

if TYPE_CHECKING:
    import pandas as pd

COMPUTE, COMMUNICATION, LOAD = "compute", "exposed communication", "load"
BUBBLE, IDLE, HOST = "bubble", "idle", "host"
NEXT_STEP, SLOWEST, BETWEEN = "overlap of steps in a row", "waiting for the slowest rank", "host between steps"

ENGINE_ROWS = {
    COMPUTE: "slowed by communication and shared cores",
    COMMUNICATION: "hidden behind computation, less what overlap slows",
    LOAD: "hidden behind other work",
    HOST: "hidden behind other work",
}
"""Per category, what lies between the prices of its tasks and the seconds of it in the step."""

SHOWN_TASKS = 20
NEGLIGIBLE = 1e-9
"""Share of the step below which a row of the engine is rounding."""


class TaskKind(NamedTuple):
    """Attributes: kind: "compute", "optimizer", "mix", "load", or the operation. component: of communication its size."""

    category: str
    kind: str
    component: str = ""
    phase: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in (self.component or self.kind, self.phase) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedTerm:
    """Attributes:
    value: of the term; None where tasks of one kind have different ones. seconds: what it adds to the mean rank's step.
    """

    name: str
    operation: TermOperation
    value: float | None
    seconds: float
    origin: TermOrigin
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedTask:
    """All tasks of one kind in one step.

    Attributes: tasks: how many the mean rank has. seconds: of all of them; the sum of the terms.
    """

    what: TaskKind
    tasks: float
    seconds: float
    terms: tuple[ExplainedTerm, ...]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Explanation:
    """Attributes:
    title: which plan on which cluster. step_s: the predicted mean step. categories: name and seconds; they sum to the step.
    tasks: largest first within their category; those of a category sum to it. None for the categories without tasks.
    """

    title: str
    step_s: float
    categories: tuple[tuple[str, float], ...]
    tasks: tuple[ExplainedTask, ...]

    def of(self, category: str) -> tuple[ExplainedTask, ...]:
        return tuple(task for task in self.tasks if task.what.category == category)

    def __repr__(self) -> str:
        return (
            f"Explanation({self.title}: {format_seconds(self.step_s)}, {len(self.tasks)} kinds of task; print it or .table())"
        )

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.categories)
        lines = [f"Where the {format_seconds(self.step_s)} of a step come from: {self.title} (seconds of the mean rank)"]
        for name, seconds in (*self.categories, ("step", self.step_s)):
            share = format_percent(seconds / self.step_s) if self.step_s else ""
            lines.append(f"  {name:{width}}  {format_seconds(seconds):>9}  {share:>7}")
        for category, seconds in self.categories:
            tasks = self.of(category)
            if not tasks:
                continue
            lines += ["", f"{category}, {format_seconds(seconds)}:"]
            priced, engine = [task for task in tasks if task.tasks], [task for task in tasks if not task.tasks]
            lines += map(_line, priced[:SHOWN_TASKS])
            rest = priced[SHOWN_TASKS:]
            if rest:
                rest_s, kinds = sum(task.seconds for task in rest), "kind" if len(rest) == 1 else "kinds"
                lines.append(f"  {len(rest)} more {kinds} of task, together {format_seconds(rest_s)} (all of them: .table())")
            lines += map(_line, engine)
        return "\n".join(lines)

    def rows(self) -> list[dict[str, Any]]:
        """One row per task kind and term; categories without tasks have one row. The column "seconds" sums to the step."""
        rows: list[dict[str, Any]] = []
        explained = {task.what.category for task in self.tasks}
        for category, seconds in self.categories:
            if category not in explained:
                rows.append(_row(TaskKind(category, category), 0.0, None, seconds))
            for task in self.of(category):
                rows += [_row(task.what, task.tasks, term, term.seconds) for term in task.terms]
                if not task.terms:
                    rows.append(_row(task.what, task.tasks, None, task.seconds))
        return rows

    def table(self) -> pd.DataFrame:
        """`rows` as a table. Columns: category, kind, component, phase, tasks, term, operation, value, unit, seconds, origin,
        detail."""
        import pandas as pd

        return pd.DataFrame(self.rows())

    def to_dict(self) -> dict[str, Any]:
        return {"title": self.title, "step_s": self.step_s, "categories": dict(self.categories), "rows": self.rows()}


def explain_plan(problem: PlanningProblem, evaluation: Evaluation) -> Explanation:
    """Where every millisecond of the predicted step comes from, for an evaluation of a plan of this problem."""
    result = evaluation.result
    categories = _categories(problem, evaluation)
    seconds = dict(categories)
    by_kind = _tasks_by_kind(evaluation)
    tasks: list[ExplainedTask] = []
    for category, _ in categories:
        in_category = sorted((task for task in by_kind if task.what.category == category), key=lambda task: -task.seconds)
        if not in_category:
            continue
        left_s = seconds[category] - sum(task.seconds for task in in_category)
        if abs(left_s) > NEGLIGIBLE * result.step_s.median:
            engine = TaskKind(category, ENGINE_ROWS[category])
            in_category.append(ExplainedTask(what=engine, tasks=0.0, seconds=left_s, terms=()))
        tasks += in_category
    return Explanation(
        title=f"{result.plan.summary()} on {result.cluster}",
        step_s=result.step_s.median,
        categories=categories,
        tasks=tuple(tasks),
    )


def _categories(problem: PlanningProblem, evaluation: Evaluation) -> tuple[tuple[str, float], ...]:
    """Name and seconds; those that are zero for the plan are left out, but for computation."""
    step_s, steady_s = evaluation.result.step_s.median, evaluation.steady_s
    between_s = problem.costs(evaluation.result.plan.world_size).between_steps_s
    means = {name: float(np.mean([getattr(part, key) for part in evaluation.breakdown])) for name, key in _BREAKDOWN.items()}
    alone_s = sum(means.values())
    seconds = {
        **means,
        NEXT_STEP: steady_s - alone_s,
        SLOWEST: step_s - between_s - steady_s,
        BETWEEN: between_s,
    }
    return tuple((name, value) for name, value in seconds.items() if name == COMPUTE or abs(value) > NEGLIGIBLE * step_s)


_BREAKDOWN = {
    COMPUTE: "compute_s",
    COMMUNICATION: "exposed_communication_s",
    BUBBLE: "bubble_s",
    LOAD: "load_s",
    IDLE: "idle_s",
    HOST: "host_s",
}


def _tasks_by_kind(evaluation: Evaluation) -> list[ExplainedTask]:
    """Units of one kind together, each weighted by how many of its tasks the mean rank has."""
    columns, folding = evaluation.compiled.columns, evaluation.folding
    per_task = ranks_per_task(columns, folding)
    per_unit = np.bincount(columns.unit, weights=per_task, minlength=len(columns.units)) / float(sum(folding.weights))
    groups: dict[TaskKind, list[tuple[Estimate, float]]] = {}
    for unit, estimate, tasks in zip(columns.units, evaluation.estimates, per_unit.tolist(), strict=True):
        if tasks:
            groups.setdefault(_kind_of(unit.work), []).append((estimate, tasks))
    return [
        ExplainedTask(
            what=what,
            tasks=sum(tasks for _, tasks in members),
            seconds=sum(estimate.median_s * tasks for estimate, tasks in members),
            terms=_terms(members),
        )
        for what, members in groups.items()
    ]


def _terms(members: Iterable[tuple[Estimate, float]]) -> tuple[ExplainedTerm, ...]:
    """The terms of like prices together, in the order of the first that has each."""
    by_term: dict[tuple[str, TermOperation, TermOrigin], list[tuple[float, float, str]]] = {}
    for estimate, tasks in members:
        before_s = 0.0
        for term, total_s in running_totals_s(estimate.terms):
            row = (term.value, (total_s - before_s) * tasks, term.text)
            by_term.setdefault((term.name, term.operation, term.origin), []).append(row)
            before_s = total_s
    return tuple(
        ExplainedTerm(
            name=name,
            operation=operation,
            value=entries[0][0] if len({value for value, _, _ in entries}) == 1 else None,
            seconds=sum(seconds for _, seconds, _ in entries),
            origin=origin,
            detail=entries[0][2] if len({text for _, _, text in entries}) == 1 else f"e.g. {entries[0][2]}",
        )
        for (name, operation, origin), entries in by_term.items()
    )


def _kind_of(work: Work) -> TaskKind:
    match work:
        case Compute():
            shard = f" 1/{work.ways} {work.rule}" if work.ways > 1 else ""
            return TaskKind(COMPUTE, "compute", f"{work.component}{shard}", work.phase.value)
        case OptimizerStep():
            return TaskKind(COMPUTE, "optimizer", "", work.update_group)
        case ClipGradients():
            return TaskKind(COMPUTE, "clip", work.part)
        case Mix():
            return TaskKind(COMPUTE, "mix")
        case LoadBatch():
            return TaskKind(LOAD, "load")
        case HostCopy():
            way = "copy to host" if work.to_host else "copy from host"
            return TaskKind(HOST, way, f"{way} of {format_bytes(work.size_bytes)}")
        case HostUpdate():
            return TaskKind(HOST, "update on the host")
        case Collective():
            what = f"{work.operation} of {format_bytes(work.size_bytes)} over {len(work.group)} ranks"
            return TaskKind(COMMUNICATION, work.operation, what)
        case SendRecv():
            return TaskKind(COMMUNICATION, "send_recv", f"send_recv of {format_bytes(work.size_bytes)}")


def _row(what: TaskKind, tasks: float, term: ExplainedTerm | None, seconds: float) -> dict[str, Any]:
    return {
        "category": what.category,
        "kind": what.kind,
        "component": what.component,
        "phase": what.phase,
        "tasks": tasks,
        "term": "" if term is None else term.name,
        "operation": "" if term is None else term.operation,
        "value": None if term is None else term.value,
        "unit": "s" if term is None or term.operation in ("start", "plus") else "",
        "seconds": seconds,
        "origin": "simulated" if term is None else term.origin,
        "detail": "" if term is None else term.detail,
    }


def _line(task: ExplainedTask) -> str:
    """`layer1 backward  x1  12.3 ms = convolution 10.1 ms + memory_bound 1.2 ms + efficiency (over 0.92) 1 ms`."""
    count = f" x{task.tasks:.3g}" if task.tasks else ""
    parts = [f"{_named(term)} {format_seconds(term.seconds)}" for term in task.terms if term.seconds]
    return f"  {format_seconds(task.seconds):>9}  {task.what}{count}" + (f" = {' + '.join(parts)}" if parts else "")


def _named(term: ExplainedTerm) -> str:
    if term.operation not in ("times", "over") or term.value is None:
        return term.name
    return f"{term.name} ({term.operation} {term.value:.3g})"
