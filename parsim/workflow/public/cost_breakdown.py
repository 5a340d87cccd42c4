"""Where the seconds of a plan's prices come from: by kind of task, and by what each price rests on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from parsim.costs.estimate import Source
from parsim.predict.evaluate import Evaluation, task_seconds
from parsim.report.tables import Column, ReportTable, to_text
from parsim.units import format_percent, format_seconds
from parsim.work import kind_of
from parsim.workflow.public.frames import frame

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("kind", "source", "detail", "units", "task_s", "share")
ROWS_SHOWN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """All units of one kind that rest on the same numbers.

    Attributes: units: different pieces of work. task_s: seconds of all their tasks in one step, over all ranks.
    """

    kind: str
    source: Source
    detail: str
    units: int
    task_s: float


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CostBreakdown:
    """Attributes: rows: the largest first; their seconds sum to those of all tasks of one step."""

    plan: str
    rows: tuple[CostRow, ...]

    @property
    def total_s(self) -> float:
        return sum(row.task_s for row in self.rows)

    def table(self) -> pd.DataFrame:
        """Columns: kind, source, detail, units, task_s (seconds of all tasks of one step), share of all task seconds."""
        total_s = self.total_s or 1.0
        rows = [
            {
                "kind": row.kind,
                "source": row.source,
                "detail": row.detail,
                "units": row.units,
                "task_s": row.task_s,
                "share": row.task_s / total_s,
            }
            for row in self.rows
        ]
        return frame(rows, COLUMNS)

    def report(self, most: int | None = None) -> ReportTable:
        """As a table of texts, with the `most` largest rows."""
        columns = (
            Column(name="kind"),
            Column(name="task time", numeric=True),
            Column(name="share", numeric=True),
            Column(name="source"),
            Column(name="price", wraps=True),
        )
        shown = self.rows if most is None else self.rows[:most]
        total_s = self.total_s or 1.0
        rows = tuple(
            (row.kind, format_seconds(row.task_s), format_percent(row.task_s / total_s), row.source, row.detail)
            for row in shown
        )
        left_s = sum(row.task_s for row in self.rows[len(shown) :])
        left = len(self.rows) - len(shown)
        notes = (f"{left} more rows: {format_seconds(left_s)}",) if left else ()
        return ReportTable(title=f"Costs of {self.plan}", columns=columns, rows=rows, notes=notes)

    def __str__(self) -> str:
        return to_text(self.report())

    def __repr__(self) -> str:
        lines = to_text(self.report(ROWS_SHOWN)).splitlines()
        return "\n".join(lines[:15])


def cost_breakdown(evaluation: Evaluation) -> CostBreakdown:
    """The prices of an evaluated plan, summed over tasks that are priced alike."""
    seconds = task_seconds(evaluation)
    units: dict[tuple[str, Source, str], int] = {}
    sums: dict[tuple[str, Source, str], float] = {}
    for unit, estimate, own_s in zip(evaluation.compiled.columns.units, evaluation.estimates, seconds.tolist(), strict=True):
        key = (kind_of(unit.work), estimate.source, estimate.detail)
        units[key] = units.get(key, 0) + 1
        sums[key] = sums.get(key, 0.0) + own_s
    ranked = sorted(sums, key=lambda key: -sums[key])
    rows = tuple(
        CostRow(kind=kind, source=source, detail=detail, units=units[kind, source, detail], task_s=sums[kind, source, detail])
        for kind, source, detail in ranked
    )
    return CostBreakdown(plan=evaluation.result.plan.summary(), rows=rows)
