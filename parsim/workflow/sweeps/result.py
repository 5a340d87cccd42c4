"""A Sweep: a table with a row per point, the point that a goal picks, and the sensitivity of the fields."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parsim.errors import ConfigError, near_matches
from parsim.units import format_bytes, format_seconds
from parsim.workflow.sweeps.axes import Axis
from parsim.workflow.sweeps.designs import SweptSettings
from parsim.workflow.sweeps.folder import SweepFolder
from parsim.workflow.sweeps.goal import parse_goal
from parsim.workflow.sweeps.rows import COLUMNS, FAILED, MEMORY_PREFIX, MEMORY_SUFFIX, OK
from parsim.workflow.sweeps.sensitivity import Sensitivity, sensitivity

if TYPE_CHECKING:
    import pandas as pd

    from parsim.report.tables import ReportTable

TIES_SHOWN = 3
ROWS_SHOWN = 12
ASKED_AGAIN = "parsim plan"


@dataclass(frozen=True, kw_only=True, eq=False)
class Sweep:
    """The result of `parsim.sweep`.

    Attributes:
        title: what was asked, in words. axes: what was swept. settings, answers: per point: what was set, and known columns.
        design: "grid", "sample" or "saltelli". seed: of a sample. goal: as it was given; "" without one.
        asked: the question as `parsim plan` takes it, without what was swept. folder: where it lies; None in memory.
        reused: points that were known before. notes: for people.
    """

    title: str
    axes: tuple[Axis, ...]
    settings: tuple[SweptSettings, ...]
    answers: tuple[dict[str, Any], ...]
    design: str = "grid"
    seed: int = 0
    goal: str = ""
    asked: str = ""
    folder: Path | None = None
    reused: int = 0
    notes: tuple[str, ...] = ()

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Columns of the table: point, the swept fields, the results, memory by line."""
        swept = [axis.key for axis in self.axes]
        lines = dict.fromkeys(name for row in self.answers for name in row.get("memory_lines", {}))
        known = [
            name for name in COLUMNS if any(row.get(name) is not None for row in self.answers) or name in ("status", "reason")
        ]
        return ("point", *swept, *known, *(f"{MEMORY_PREFIX}{name}{MEMORY_SUFFIX}" for name in lines))

    @cached_property
    def rows(self) -> tuple[dict[str, Any], ...]:
        """Per point its number, the swept values and the results; in the order of the points."""
        found = []
        for number, (settings, answer) in enumerate(zip(self.settings, self.answers, strict=True)):
            lines = {f"{MEMORY_PREFIX}{name}{MEMORY_SUFFIX}": size for name, size in answer.get("memory_lines", {}).items()}
            rest = {name: value for name, value in answer.items() if name != "memory_lines"}
            found.append({"point": number, **settings, **rest, **lines})
        return tuple(found)

    def table(self) -> pd.DataFrame:
        """A DataFrame, one row per point; the units are in the column names. Unknown values are missing."""
        from parsim.workflow.public.frames import frame

        return frame(self.rows, self.columns)

    @property
    def failed(self) -> int:
        """Points without an answer; their rows say why."""
        return sum(row["status"] == FAILED for row in self.answers)

    def best(self, goal: str | None = None) -> dict[str, Any] | None:
        """The row that a goal picks; None if no point meets its conditions.

        Args:
            goal: such as "min cost where epoch < 2h"; left out: the sweep's own, else the most samples per second.

        Raises:
            ConfigError: not a goal over the columns of this sweep.

        >>> from parsim import sweep
        >>> found = sweep("mlp", {"cluster.devices": [1, 2, 4]}, cluster="dgx1-v100-32gb", global_batch=64)
        >>> found.best("max throughput")["cluster.devices"] in (1, 2, 4)
        True
        """
        asked = parse_goal(goal or self.goal or "max throughput", self.rows, self.columns)
        number = asked.best(self.rows)
        return None if number is None else self.rows[number]

    def sensitivity(self, column: str = "step_s") -> Sensitivity:
        """Sobol indices of the swept fields for a column. Needs a sweep with `sensitivity=`.

        Args:
            column: of numbers.

        Raises:
            ConfigError: another design, no such column, or too many points failed. MissingDependencyError: without SALib.
        """
        if self.design != "saltelli":
            raise ConfigError("Sobol indices need the points of a Saltelli design; sweep with --sensitivity N (sensitivity=N)")
        if column not in self.columns:
            raise ConfigError(f"there is no column {column!r}{near_matches(column, self.columns)}")
        return sensitivity(self.axes, self.rows, column, self.seed)

    def explore(self, path: str | Path | None = None) -> Path:
        """Write the explorer, one page that opens offline. Returns its path.

        Args:
            path: of the page; left out: explorer.html in the sweep's folder.
        """
        from parsim.workflow.sweeps.explore import write_explorer

        if path is None and self.folder is None:
            raise ConfigError("the sweep has no folder, so explore() needs the path of the page")
        return write_explorer(self, Path(path) if path is not None else SweepFolder(Path(str(self.folder))).explorer)

    def sentence(self) -> str:
        """`64 points (8 do not fit, 2 failed); 12 were known before.`"""
        counts = Counter(row["status"] for row in self.answers)
        parts = [f"{counts['does_not_fit']} do not fit"] if counts["does_not_fit"] else []
        parts += [f"{counts[FAILED]} failed"] if counts[FAILED] else []
        known = f"; {self.reused} were known before" if self.reused else ""
        told = f" ({', '.join(parts)})" if parts else ""
        return f"{self.title}: {len(self.answers)} point{'s' if len(self.answers) != 1 else ''}{told}{known}."

    def _picked_row(self) -> dict[str, Any] | None:
        """As `best`; None also where the goal's column has no value."""
        try:
            return self.best() if any(row["status"] == OK for row in self.answers) else None
        except ConfigError:
            return None

    def picked(self) -> str:
        """The point that the goal picks, in words."""
        what = self.goal or "max throughput"
        try:
            row = self.best()
        except ConfigError as error:
            return str(error)
        if row is None:
            return f"{what}: no point meets it."
        where = ", ".join(f"{axis.key} = {row[axis.key]}" for axis in self.axes)
        spent = [f"{format_seconds(row['step_s'])} per step"]
        spent += [f"{format_seconds(row['epoch_s'])} per epoch"] if row.get("epoch_s") is not None else []
        for name, text in (("usd_per_epoch", "USD per epoch"), ("run_usd", "USD in all")):
            spent += [f"{row[name]:,.2f} {text}"] if row.get(name) is not None else []
        return f"{what}: point {row['point']} ({where}): {row['plan_in_words']}, {', '.join(spent)}{self._ties()}."

    def _ties(self) -> str:
        """`; a tie with point 5`, where other points are as good as a measurement can tell."""
        goal = parse_goal(self.goal or "max throughput", self.rows, self.columns)
        numbers = [str(self.rows[number]["point"]) for number in goal.ties(self.rows)]
        if not numbers:
            return ""
        shown = ", ".join(numbers[:TIES_SHOWN]) + (f" and {len(numbers) - TIES_SHOWN} more" * (len(numbers) > TIES_SHOWN))
        return f"; a tie with point{'s' if len(numbers) > 1 else ''} {shown}"

    def heading(self) -> list[str]:
        """What stands above the table: how many points there are, and what the goal picks."""
        picked = [self.picked()] if any(row["status"] == OK for row in self.answers) or self.goal else []
        return [self.sentence(), *picked]

    def lines(self) -> list[str]:
        """What stands below the table."""
        matters = self.sensitivity().lines() if self.design == "saltelli" else []
        return [*matters, *self._failures(), *self.notes]

    def _failures(self) -> list[str]:
        """The commonest reasons of points that failed. Reasons that differ in numbers alone count as one."""
        alike: dict[str, list[str]] = {}
        for row in self.answers:
            if row["status"] == FAILED:
                reason = row["reason"].splitlines()[0]
                alike.setdefault(re.sub(r"\d+", "#", reason), []).append(reason)
        lines = []
        for reasons in sorted(alike.values(), key=len, reverse=True)[:3]:
            points = f"{len(reasons)} point{'s' if len(reasons) > 1 else ''}"
            example = ", for example" if len(set(reasons)) > 1 else ""
            lines.append(f"failed ({points}{example}): {reasons[0]}")
        return lines

    def report(self, most: int = ROWS_SHOWN) -> ReportTable:
        """The first rows as texts; the picked one is marked.

        Args:
            most: rows that are shown.
        """
        from parsim.report.tables import NOTHING, Column, ReportTable

        swept = [axis.key for axis in self.axes]
        priced = any(row.get("usd_per_million_samples") is not None for row in self.rows)
        figures = ["plan", "step", "90% interval", "samples/s", "memory", *(["USD per million samples"] if priced else [])]
        names = [*swept, *figures, "status"]
        columns = tuple(Column(name=name, numeric=name not in ("plan", "status"), wraps=name == "plan") for name in names)
        shown = self.rows[:most]
        best = self._picked_row()
        texts = []
        for row in shown:
            mark = "> " if best is not None and row["point"] == best["point"] else ""
            first = [str(row[key]) if not isinstance(row[key], float) else f"{row[key]:.4g}" for key in swept]
            first[0] = mark + first[0]
            texts.append(
                (
                    *first,
                    *(_figures(row)[: len(figures)] if row["status"] != FAILED else [NOTHING] * len(figures)),
                    row["status"],
                )
            )
        notes = [f"... and {len(self.rows) - most} more"] if len(self.rows) > most else []
        return ReportTable(title="", columns=columns, rows=tuple(texts), notes=tuple(notes))

    def description(self) -> dict[str, Any]:
        """What was asked, as sweep.json keeps it beside the points."""
        return {
            "title": self.title,
            "axes": [axis.to_dict() for axis in self.axes],
            "design": self.design,
            "seed": self.seed,
            "goal": self.goal or None,
            "asked": self.asked,
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, as `parsim sweep --json` prints it."""
        best = self._picked_row()
        return {
            **self.description(),
            "points": list(self.rows),
            "failed": self.failed,
            "reused": self.reused,
            "best": best,
            "sensitivity": self.sensitivity().to_dict() if self.design == "saltelli" else None,
            "folder": None if self.folder is None else str(self.folder),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        from parsim.report.tables import to_text

        return "\n".join([*self.heading(), "", to_text(self.report()), *self.lines()])

    def __repr__(self) -> str:
        return f"Sweep({self.sentence()})"

    def _repr_html_(self) -> str:
        from parsim.report.notebook import paragraph_html, table_html

        above, below = ("".join(map(paragraph_html, lines)) for lines in (self.heading(), self.lines()))
        return above + table_html(self.report()) + below


def _figures(row: dict[str, Any]) -> list[str]:
    price = row.get("usd_per_million_samples")
    return [
        str(row["division"]),
        format_seconds(row["step_s"]),
        f"{format_seconds(row['step_p05_s'])} to {format_seconds(row['step_p95_s'])}",
        f"{row['throughput_samples_per_s']:,.4g}",
        format_bytes(row["peak_memory_bytes"]),
        "–" if price is None else f"{price:,.2f}",
    ]


def open_sweep(path: Path) -> Sweep:
    """The sweep that a folder holds; points that were not answered yet are rows that say so.

    Args:
        path: the --out of `parsim sweep`.

    Raises:
        ConfigError: it is not a folder of a sweep.
    """
    folder = SweepFolder(path)
    document = folder.read_description()
    listed: Sequence[dict[str, Any]] = document["points"]
    known = folder.known({entry["key"] for entry in listed})
    waiting = {"status": FAILED, "reason": "not answered yet: the sweep was stopped; give its command again"}
    axes = tuple(
        Axis(
            key=str(axis["key"]), values=tuple(axis["values"]), ends=axis["ends"] and tuple(axis["ends"]), log=bool(axis["log"])
        )
        for axis in document.get("axes", ())
    )
    return Sweep(
        title=str(document.get("title", path.name)),
        axes=axes,
        settings=tuple(entry["settings"] for entry in listed),
        answers=tuple(known.get(entry["key"], waiting) for entry in listed),
        design=str(document.get("design", "grid")),
        seed=int(document.get("seed", 0)),
        goal=str(document.get("goal") or ""),
        asked=str(document.get("asked") or ""),
        folder=path,
    )
