"""A Sweep: a table with a row per point, the point that a goal picks, and the sensitivity of the fields."""

from __future__ import annotations

import re
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parsim.app.calibration import Calibration
from parsim.app.doctor import Say, progress
from parsim.app.functions import AskedCluster, AskedModel
from parsim.app.sweep.executing import (
    COLUMNS,
    FAILED,
    MEMORY_PREFIX,
    MEMORY_SUFFIX,
    OK,
    RowLog,
    SweepFolder,
    here,
    here_or_in_processes,
    in_processes,
    on_dask,
)
from parsim.app.sweep.goal import Sensitivity, parse_goal, sensitivity
from parsim.app.sweep.points import (
    Axis,
    BaseQuestion,
    SweepPoint,
    SweptSettings,
    axes_of,
    grid,
    points_of,
    saltelli,
    sobol_sample,
)
from parsim.errors import ConfigError, near_matches
from parsim.files import value_text
from parsim.model.model import Model
from parsim.report.legend import METRICS, axis_name, value_name
from parsim.report.picture import PAGES, checked_ending, plotted
from parsim.report.tables import NOTHING, Column, ReportTable, format_rate, frame, paragraph_html, table_html, to_text
from parsim.units import format_bytes, format_money, format_seconds

if TYPE_CHECKING:
    import pandas as pd


TIES_SHOWN = 3
ROWS_SHOWN = 12


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
        always = ("status", "reason")
        names = [name for name in COLUMNS if name in always or any(row.get(name) is not None for row in self.answers)]
        return ("point", *swept, *names, *(f"{MEMORY_PREFIX}{name}{MEMORY_SUFFIX}" for name in lines))

    @cached_property
    def rows(self) -> tuple[dict[str, Any], ...]:
        """Per point its number, the swept values and the results; in the order of the points."""
        rows = []
        for number, (settings, answer) in enumerate(zip(self.settings, self.answers, strict=True)):
            lines = {f"{MEMORY_PREFIX}{name}{MEMORY_SUFFIX}": size for name, size in answer.get("memory_lines", {}).items()}
            rest = {name: value for name, value in answer.items() if name != "memory_lines"}
            rows.append({"point": number, **settings, **rest, **lines})
        return tuple(rows)

    def table(self) -> pd.DataFrame:
        """A DataFrame, one row per point; the units are in the column names. Unknown values are missing."""
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
        number = parse_goal(goal or self.goal or "max throughput", self.rows, self.columns).best(self.rows)
        return None if number is None else self.rows[number]

    def sensitivity(self, column: str = "step_s") -> Sensitivity:
        """Sobol indices of the swept fields for a column. Needs a sweep with `sensitivity=`.

        Raises:
            ConfigError: another design, no such column, or too many points failed. MissingDependencyError: without SALib.
        """
        if self.design != "saltelli":
            raise ConfigError("Sobol indices need the points of a Saltelli design; sweep with --sensitivity N (sensitivity=N)")
        if column not in self.columns:
            raise ConfigError(f"there is no column {column!r}{near_matches(column, self.columns)}")
        return sensitivity(self.axes, self.rows, column, self.seed)

    def plot(self, path: str | Path | None = None, *, column: str | None = None) -> Any:
        """A figure of the points along the first swept field, a line for each value of the next.

        Args:
            path: also write the picture, as PNG, SVG or PDF by its ending. column: what is drawn, such as "step_s"; left out:
                what the goal asks for, else the throughput.

        Returns, raises: as `Answer.plot`; ConfigError also where the column cannot be drawn or no point has an answer.
        """
        from parsim.report.figures import sweep_figure

        aim = parse_goal(self.goal, self.rows, self.columns).column if self.goal else METRICS[0].column
        drawable = [metric.column for metric in METRICS if any(row.get(metric.column) is not None for row in self.rows)]
        if column is not None and column not in drawable:
            raise ConfigError(f"plot(column={column!r}): not a figure of this sweep's points{near_matches(column, drawable)}")
        if not any(row["status"] == OK for row in self.answers):
            raise ConfigError(f"{self.sentence()} There is nothing to draw; the column `reason` says why")
        best = self._picked_row()
        figure = sweep_figure(
            self.rows, [axis.key for axis in self.axes], column=column or aim, picked=None if best is None else best["point"]
        )
        return plotted(figure, f"{self.title}. {self.answer()}", path)

    def explore(self, path: str | Path | None = None) -> Path:
        """Write the explorer, one page that opens offline, and return its path; left out: explorer.html in the folder.

        Raises ConfigError: the path is a folder or does not end in .html, or the sweep has none and no path is given.
        """
        from parsim.report.explorer import ExplorerData, write_explorer_page

        if path is None and self.folder is None:
            raise ConfigError("the sweep has no folder, so explore() needs the path of the page")
        page = SweepFolder(Path(str(self.folder))).explorer if path is None else checked_ending(path, PAGES, "page")
        best = None
        if self.goal:
            with suppress(ConfigError):
                best = self.best()
        data = ExplorerData(
            title=self.title,
            answer=self.answer(),
            summary=[*self.heading(), *(line for line in self.lines() if line not in self.notes)],
            axes=[axis.key for axis in self.axes],
            rows=self.rows,
            picked=None if best is None else int(best["point"]),
            command=f"parsim plan {self.asked}".strip(),
            notes=list(self.notes),
        )
        return write_explorer_page(data, page)

    def sentence(self) -> str:
        """`64 points (8 do not fit, 2 failed); 12 were known before.`"""
        counts = Counter(row["status"] for row in self.answers)
        parts = [f"{counts['does_not_fit']} do not fit"] if counts["does_not_fit"] else []
        parts += [f"{counts[FAILED]} failed"] if counts[FAILED] else []
        count = f"{len(self.answers)} point{'s' if len(self.answers) != 1 else ''}"
        without = f" ({', '.join(parts)})" if parts else ""
        reused = f"; {self.reused} were known before" if self.reused else ""
        return f"{self.title}: {count}{without}{reused}."

    def _picked_row(self) -> dict[str, Any] | None:
        """The row that `best` takes; None also where the goal's column has no value."""
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
        for name, text in (("usd_per_epoch", "per epoch"), ("run_usd", "in all")):
            spent += [f"{format_money(row[name])} {text}"] if row.get(name) is not None else []
        ties = [str(self.rows[number]["point"]) for number in parse_goal(what, self.rows, self.columns).ties(self.rows)]
        more = f" and {len(ties) - TIES_SHOWN} more" if len(ties) > TIES_SHOWN else ""
        tie = f"; a tie with point{'s' if len(ties) > 1 else ''} {', '.join(ties[:TIES_SHOWN])}{more}" if ties else ""
        return f"{what}: point {row['point']} ({where}): {row['plan_in_words']}, {', '.join(spent)}{tie}."

    def answer(self) -> str:
        """The point that the goal picks, in a sentence without keys: for pages and pictures."""
        row = self._picked_row()
        if row is None:
            return self.picked() if self.goal else self.sentence()
        where = ", ".join(f"{axis_name(axis.key).lower()} {value_name(row[axis.key])}" for axis in self.axes)
        found = [f"{format_seconds(row['step_s'])} per step, {format_rate(row['throughput_samples_per_s'])} samples/s"]
        priced = (("run_usd", "in all"), ("usd_per_epoch", "per epoch"), ("usd_per_million_samples", "per million samples"))
        found += [f"{format_money(row[name])} {text}" for name, text in priced if row.get(name) is not None][:1]
        aim = f"{self.goal}: " if self.goal else "the most samples per second: "
        return f"{aim[0].upper()}{aim[1:]}{row['plan_in_words']} at {where} takes {', '.join(found)}."

    def heading(self) -> list[str]:
        """What stands above the table: how many points there are, and what the goal picks."""
        picked = [self.picked()] if any(row["status"] == OK for row in self.answers) or self.goal else []
        return [self.sentence(), *picked]

    def lines(self) -> list[str]:
        """What stands below the table."""
        lines = self.sensitivity().lines() if self.design == "saltelli" else []
        alike: dict[str, list[str]] = {}  # reasons that differ in numbers alone count as one
        for row in self.answers:
            if row["status"] == FAILED:
                reason = row["reason"].splitlines()[0]
                alike.setdefault(re.sub(r"\d+", "#", reason), []).append(reason)
        for reasons in sorted(alike.values(), key=len, reverse=True)[:3]:
            points = f"{len(reasons)} point{'s' if len(reasons) > 1 else ''}"
            example = ", for example" if len(set(reasons)) > 1 else ""
            lines.append(f"failed ({points}{example}): {reasons[0]}")
        return [*lines, *self.notes]

    def report(self, most: int = ROWS_SHOWN) -> ReportTable:
        """The first rows as texts; the picked one is marked."""
        swept = [axis.key for axis in self.axes]
        priced = any(row.get("usd_per_million_samples") is not None for row in self.rows)
        figures = ["plan", "step", "90% interval", "samples/s", "memory", *(["USD per million samples"] if priced else [])]
        names = [*swept, *figures, "status"]
        columns = tuple(Column(name=name, numeric=name not in ("plan", "status"), wraps=name == "plan") for name in names)
        best = self._picked_row()
        texts = []
        for row in self.rows[:most]:
            first = [str(row[key]) if not isinstance(row[key], float) else f"{row[key]:.4g}" for key in swept]
            if best is not None and row["point"] == best["point"]:
                first[0] = f"> {first[0]}"
            results = _figures(row)[: len(figures)] if row["status"] != FAILED else [NOTHING] * len(figures)
            texts.append((*first, *results, row["status"]))
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
        return {
            **self.description(),
            "points": list(self.rows),
            "failed": self.failed,
            "reused": self.reused,
            "best": self._picked_row(),
            "sensitivity": self.sensitivity().to_dict() if self.design == "saltelli" else None,
            "folder": None if self.folder is None else str(self.folder),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        return "\n".join([*self.heading(), "", to_text(self.report()), *self.lines()])

    def __repr__(self) -> str:
        return f"Sweep({self.sentence()})"

    def _repr_html_(self) -> str:
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
        NOTHING if price is None else format_money(price).removesuffix(" USD"),
    ]


def open_sweep(path: Path) -> Sweep:
    """The sweep that a folder (the --out of `parsim sweep`) holds; points that were not answered yet are rows that say so.

    Raises ConfigError: it is not a folder of a sweep.
    """
    folder = SweepFolder(path)
    document = folder.read_description()
    points: Sequence[dict[str, Any]] = document["points"]
    answers = folder.known({point["key"] for point in points})
    waiting = {"status": FAILED, "reason": "not answered yet: the sweep was stopped; give its command again"}
    axes = []
    for axis in document.get("axes", ()):
        ends = axis["ends"] and tuple(axis["ends"])
        axes.append(Axis(key=str(axis["key"]), values=tuple(axis["values"]), ends=ends, log=bool(axis["log"])))
    return Sweep(
        title=str(document.get("title", path.name)),
        axes=tuple(axes),
        settings=tuple(point["settings"] for point in points),
        answers=tuple(answers.get(point["key"], waiting) for point in points),
        design=str(document.get("design", "grid")),
        seed=int(document.get("seed", 0)),
        goal=str(document.get("goal") or ""),
        asked=str(document.get("asked") or ""),
        folder=path,
    )


# `parsim.sweep`: one question at many points.


SAY_EVERY_S = 5.0
PointPlace = Callable[[Sequence[SweepPoint]], Iterator[tuple[int, dict[str, Any]]]]
"""Where points are answered: yields their rows."""


def sweep(
    model: AskedModel,
    over: Mapping[str, Any] | Sequence[str],
    *,
    cluster: AskedCluster | None = None,
    global_batch: int | None = None,
    settings: Mapping[str, object] | None = None,
    overrides: Sequence[str] = (),
    example_inputs: Any = None,
    sample: int | None = None,
    sensitivity: int | None = None,
    seed: int = 0,
    goal: str | None = None,
    samples_per_epoch: int | None = None,
    jobs: int | None = None,
    on: str | None = None,
    out: str | Path | None = None,
) -> Sweep:
    """Evaluate one question at many points: a grid, or a sample, over any keys of a run file.

    Args:
        model, cluster, global_batch, settings, overrides, example_inputs: as for `plan`, without the swept ones.
        over: key -> values, such as {"cluster.nodes": [1, 2, 4], "training.global_batch": "256:4096:x2"}; or strings in the
            form of `--over`. Further keys: "scale.compute", "scale.links", "scale.memory", factors on the hardware.
        sample: number of points of a Sobol sequence, instead of the whole grid. sensitivity: N * (fields + 2) points from which
            Sobol indices are computed; N is a power of two. seed: of both.
        goal: picks a point, such as "min cost where epoch < 2h".
        samples_per_epoch: of the data, for the time and price of an epoch.
        jobs: processes; 1: only this one; default: this one, and one per core once that pays for their start.
        on: the address of a Dask scheduler, such as "tcp://10.0.0.1:8786", whose workers evaluate the points.
        out: a folder for the rows, points.csv and points.parquet; points in it are reused.

    Returns:
        A row per point; a point that fails has the reason in its row.

    Raises:
        ParsimError: ConfigError for an unknown field, an empty range, a goal that cannot be read, or no Dask cluster;
            MissingDependencyError without SALib or dask; ExecutionError for a full disk.

    >>> found = sweep("mlp", {"cluster.devices": [1, 2], "plan.strategy": ["dp"]}, cluster="dgx1-v100-32gb", global_batch=64)
    >>> [row["status"] for row in found.rows]
    ['ok', 'ok']
    """
    axes = axes_of(over)
    designed, design = _designed(axes, sample, sensitivity, seed)
    if samples_per_epoch is not None and samples_per_epoch < 1:
        raise ConfigError(f"samples_per_epoch = {samples_per_epoch}: must be >= 1")
    base = BaseQuestion(
        model=model,
        cluster=cluster.path if isinstance(cluster, Calibration) else cluster,
        global_batch=global_batch,
        settings=dict(settings or {}),
        overrides=tuple(overrides),
        example_inputs=example_inputs,
        samples_per_epoch=samples_per_epoch,
    )
    _check_swept(base, axes)
    if not isinstance(model, str | Path | Model):  # an nn.Module is traced once
        base = _traced(base, designed[0])
    if goal:  # its form and its units; whether a column has values shows once the rows are there
        parse_goal(goal, [{"status": FAILED}], [*COLUMNS, *(axis.key for axis in axes)])
    place = _place(jobs, on)
    folder = None if out is None else SweepFolder(Path(out))
    if folder is not None:
        folder.check_usable()
    points = points_of(base, designed)
    unanswered = Sweep(
        title=_title(points, model),
        axes=axes,
        settings=tuple(designed),
        answers=(),
        design=design,
        seed=seed,
        goal=goal or "",
        asked=_words(base),
        folder=None if folder is None else folder.path,
    )
    answered = _answered(unanswered, points, place, folder)
    if folder is not None and (note := folder.write_tables(answered.table())):
        answered = replace(answered, notes=(note,))
    return answered


def _designed(
    axes: tuple[Axis, ...], sample: int | None, sensitivity: int | None, seed: int
) -> tuple[list[SweptSettings], str]:
    if sample is not None and sensitivity is not None:
        raise ConfigError("--sample and --sensitivity both choose the points; give one of them")
    if sensitivity is not None:
        return saltelli(axes, sensitivity, seed), "saltelli"
    if sample is not None:
        return sobol_sample(axes, sample, seed), "sample"
    return grid(axes), "grid"


def _check_swept(base: BaseQuestion, axes: tuple[Axis, ...]) -> None:
    for name, value in (("cluster", base.cluster), ("model", base.model)):
        swept = [axis.key for axis in axes if axis.key.startswith(f"{name}.")]
        if swept and value is not None and not isinstance(value, str | Path):
            raise ConfigError(f"the {name} was given as a value, which --over {swept[0]} cannot change; give its name instead")


def _traced(base: BaseQuestion, first: SweptSettings) -> BaseQuestion:
    return replace(
        base,
        model=base.at(first).source.model,
        example_inputs=None,
        settings={key: value for key, value in base.settings.items() if not key.startswith("model.")},
        overrides=tuple(text for text in base.overrides if not text.startswith("model.")),
    )


def _answered(sweep: Sweep, points: Sequence[SweepPoint], place: PointPlace, folder: SweepFolder | None) -> Sweep:
    """The sweep with its answers. Equal points are asked once, and points that the folder holds not at all."""
    with nullcontext() if folder is None else folder.writing() as log:
        answers: dict[str, dict[str, Any]] = {}
        if folder is not None:
            folder.write_description(sweep.description(), points)
            answers = folder.known({point.key for point in points})
        reused = sum(point.key in answers for point in points)
        order = _neighbours({point.key: point for point in points if point.key not in answers}.values())
        if order:
            with progress(f"Sweeping {sweep.title}") as say:
                _ask_all(order, place, log, answers, say)
    return replace(sweep, answers=tuple(answers[point.key] for point in points), reused=reused)


def _ask_all(
    order: Sequence[SweepPoint], place: PointPlace, log: RowLog | None, answers: dict[str, dict[str, Any]], say: Say
) -> None:
    by_number = {point.number: point for point in order}
    first_s = shown_s = time.monotonic()
    total, failed, done = len(order), 0, 0
    try:
        for done, (number, row) in enumerate(place(order), start=1):
            point, now_s = by_number[number], time.monotonic()
            if log is not None:
                log.add(point, row)
            answers[point.key] = row
            failed += row["status"] == FAILED
            if done == 1:  # it compiled and loaded what all others only use, and is not counted
                first_s = now_s
            elif now_s - shown_s > SAY_EVERY_S:
                shown_s = now_s
                remaining = format_seconds((now_s - first_s) / (done - 1) * (total - done))
                say(f"{done} of {total} points{f', {failed} failed' if failed else ''}, about {remaining} left")
    except (KeyboardInterrupt, SystemExit) as ending:
        next_step = "they are kept, and the same command continues" if log is not None else "give out= to keep them"
        text = f"stopped after {done} of {total} points; {next_step}"
        say(text)
        ending.add_note(text)  # told
        raise


def _neighbours(points: Iterable[SweepPoint]) -> list[SweepPoint]:
    """Points of one cluster and one model beside one another, so that a process loads both once.

    Of these, points that differ in the strategy alone, so that one takes over what the search of the other found.
    """
    first: dict[str, int] = {}

    def place(point: SweepPoint) -> tuple[str, str, int, int]:
        if point.question is None:
            return "", "", point.number, point.number
        config = point.question
        without_strategy = f"{config.model_dump_json(exclude={'plan': {'strategy'}})} {sorted(point.scale.items())}"
        alike = first.setdefault(without_strategy, point.number)
        return config.cluster.model_dump_json(), config.model.model_dump_json(), alike, point.number

    return sorted(points, key=place)


def _place(jobs: int | None, on: str | None) -> PointPlace:
    if on is not None:
        if jobs is not None:
            raise ConfigError(f"--jobs {jobs} is for this machine, and --on {on} has its own workers; drop one of them")
        return lambda points: on_dask(points, on)
    if jobs is None:
        return here_or_in_processes
    if jobs < 1:
        raise ConfigError(f"--jobs {jobs}: give at least one process")
    return here if jobs == 1 else lambda points: in_processes(points, jobs)


def _words(base: BaseQuestion) -> str:
    """`resnet50 --on dgx1-v100-32gb --batch 1024 --set plan.zero_stage=1`; empty for a model that was given as a value."""
    if not isinstance(base.model, str | Path):
        return ""
    words = [str(base.model)]
    words += ["--on", str(base.cluster)] if isinstance(base.cluster, str | Path) else []
    words += ["--batch", str(base.global_batch)] if base.global_batch is not None else []
    changes = [*(f"{key}={value_text(value)}" for key, value in base.settings.items() if value is not None), *base.overrides]
    return shlex.join([*words, *(word for change in changes for word in ("--set", change))])


def _title(points: Sequence[SweepPoint], model: Any) -> str:
    """`resnet50 on 4 x dgx1-v100-32gb`, `3 models on 2 machines`, of the points that are questions."""
    questions = [point.question for point in points if point.question is not None]
    if not questions:
        return str(model)
    names = {question.model.name for question in questions}
    machines = {question.cluster.machine for question in questions}
    nodes = {1 if question.cluster.group is not None else question.cluster.nodes for question in questions}
    name, machine = (Path(text).name if "/" in text else text for text in (min(names), min(machines)))
    if len(machines) == 1 and len(nodes) == 1 and nodes != {1}:
        machine = f"{min(nodes)} x {machine}"
    where = machine if len(machines) == 1 else f"{len(machines)} machines"
    return f"{name if len(names) == 1 else f'{len(names)} models'} on {where}"
