"""The tables of the command line and of report.html, as values.

Each function takes the dictionaries that JSON results hold and returns a `ReportTable` of texts; `to_rich`, `to_text` (fixed
width, the same everywhere) and `table_html` (for notebooks) print one, `parsim.report.page` turns it into a page. All relative
errors are (predicted - measured) / measured.
"""

from __future__ import annotations

import html
import math
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from statistics import median
from typing import TYPE_CHECKING, Any

from parsim.costs.history import ValidationRecord, correction, coverage_by, coverage_of, judged_split
from parsim.execute.cuda.gpu import MemoryUse
from parsim.hardware.profile import Profile
from parsim.hardware.records import OperatorFit, OperatorSurface
from parsim.hardware.speed_factor import speed_since
from parsim.plans.plan import DEFAULT_BUCKET_BYTES
from parsim.predict.breakdown import RankBreakdown
from parsim.predict.memory import RankMemory, verdict_text
from parsim.predict.result import PlanResult
from parsim.program.taskgraph import TaskGraph, parse_resource
from parsim.timeline import Timeline
from parsim.units import (
    format_bandwidth,
    format_bytes,
    format_count,
    format_energy,
    format_money,
    format_percent,
    format_seconds,
    printable,
    three_digits,
)
from parsim.work import kind_of

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from parsim.costs.history import HistoryLine

NOTHING = "–"
TEXT_WIDTH = 120
READABLE = 36
MEMORY_COLUMNS = 8
MARK = "> "


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """`numeric` columns are right-aligned and never wrapped; `wraps` marks the one that gives way when space is short."""

    name: str
    numeric: bool = False
    wraps: bool = False


def columns_of(*names: str, words: Sequence[str] = (), wraps: str = "") -> tuple[Column, ...]:
    """Columns of numbers, but for those of `words` and the one that `wraps`."""
    return tuple(Column(name=name, numeric=name not in (*words, wraps), wraps=name == wraps) for name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    """Texts in rows. `emphasised` are the numbers of rows to point out (the choice); `notes` stand below the table."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    emphasised: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def alone(result: Mapping[str, Any]) -> dict[str, Any]:
    """The result of one plan without the words that it is the fastest: it was compared with none."""
    reason = str(result.get("reason", ""))
    return {**result, "reason": reason.removeprefix("fastest plan that fits").removeprefix("; ")}


def is_chosen(result: Mapping[str, Any], chosen: Mapping[str, Any] | str | None) -> bool:
    """Whether a result is the one that was chosen; `chosen`: that result, or its strategy."""
    return chosen is not None and (result["strategy"] == chosen if isinstance(chosen, str) else result == chosen)


def strategy_table(
    results: Sequence[Mapping[str, Any]], *, chosen: Mapping[str, Any] | str | None = None, title: str = "Strategies"
) -> ReportTable:
    """One row per PlanResult.to_dict(), in the order given.

    `chosen` is the result that was chosen, or its strategy; its row is marked.
    """
    names = ("strategy", "plan", "step", "90% interval", "samples/s", "communication", "bubble", "peak memory", "fits", "why")
    mark = next((number for number, result in enumerate(results) if is_chosen(result, chosen)), None)
    rows = []
    for number, result in enumerate(results):
        step, interval = interval_texts(result["step_s"])
        rows.append(
            (
                f"{MARK}{result['strategy']}" if number == mark else str(result["strategy"]),
                plan_text(result.get("plan")),
                step,
                interval,
                format_rate(result["throughput_samples_per_s"]["median"]),
                " of ".join(format_percent(result[key]) for key in ("communication_fraction", "communication_busy_fraction")),
                format_percent(result["bubble_fraction"]),
                format_bytes(max(result["peak_memory_bytes"], default=0)),
                verdict_text(result["fits"], result.get("fit_probability", float(result["fits"]))),
                "; ".join(filter(None, [str(result.get("reason", "")), *map(str, result.get("warnings", ()))])) or NOTHING,
            )
        )
    notes = [f"{MARK}the choice"] if mark is not None else []
    notes += [
        "communication: exposed communication of all communication, as shares of the step",
        "peak memory: of the fullest rank",
        *correction_notes(results),
    ]
    # where costs come from: once if the plans are alike in that, else plan by plan
    sources = {str(result["strategy"]): result["cost_sources"] for result in results if result.get("cost_sources")}
    if sources:
        first, *others = sources.values()
        alike = all(
            abs(shares.get(name, 0.0) - first.get(name, 0.0)) < ALIKE for shares in others for name in {*first, *shares}
        )
        per_plan = "; ".join(f"{strategy} {sources_text(shares)}" for strategy, shares in sources.items())
        notes.append(f"sources of the costs, by share of the task seconds: {sources_text(first) if alike else per_plan}")
    columns = columns_of(*names, words=("strategy", "plan", "fits"), wraps="why")
    emphasised = () if mark is None else (mark,)
    return ReportTable(title=title, columns=columns, rows=tuple(rows), emphasised=emphasised, notes=tuple(notes))


ALIKE = 0.05
"""Shares of sources that differ by less count as equal."""


PACE_NOTE = "at measured speed: error after correcting for the machine's measured speed (x: slower than while calibrating)"


def validation_table(
    runs: Sequence[tuple[str, str, Mapping[str, Any]]], *, title: str = "Predicted against measured"
) -> ReportTable:
    """One row per (model, strategy or plan, Comparison.to_dict()), each error with its A/A floor."""
    paced = any("at_pace" in comparison for _, _, comparison in runs)
    names = ["model", "plan", "predicted", "90% interval", "measured", "error"]
    names += [*(["at measured speed"] if paced else []), "A/A floor", "within", "steps", "memory error"]
    rows = []
    for model, plan, comparison in runs:
        interval, floor, pace = (comparison.get(key) for key in ("predicted_step_s", "aa_floor", "at_pace"))
        memory = [row["relative_error"] for row in comparison.get("memory", ()) if row["relative_error"] is not None]
        cells = [
            model,
            plan,
            format_seconds(comparison["predicted"]),
            interval_texts(interval)[1] if interval else NOTHING,
            format_seconds(comparison["measured"]),
            format_error(comparison["relative_error"]),
        ]
        if paced:
            cells.append(f"{format_error(pace['relative_error'])} (x{pace['slowness']:.2f})" if pace else NOTHING)
        cells += [
            f"±{format_percent(floor['median'])} (p95 {format_percent(floor['p95'])})" if floor else NOTHING,
            _yes_or_no(comparison.get("within_interval")),
            str(comparison["measured_step_s"]["steps"]),
            format_error(max(memory, key=abs)) if memory else NOTHING,
        ]
        rows.append(tuple(cells))
    # ranks of relaxed plans are timed by their own clocks, so no step contains how far they are apart
    apart = [format_seconds(comparison["skew_s"]) for _, _, comparison in runs if "skew_s" in comparison]
    notes = (
        "error = (predicted - measured) / measured of the mean step; memory error: the worst rank's",
        *([PACE_NOTE] if paced else []),
        *(
            [f"ranks begin the same step {', '.join(apart)} apart on average; measured is each rank's own step"]
            if apart
            else []
        ),
        "A/A floor: difference between two halves of the same measurement (median and p95 over random halves of its rounds)",
        *correction_notes([comparison for _, _, comparison in runs]),
    )
    columns = columns_of(*names, words=("model", "within"), wraps="plan")
    return ReportTable(title=title, columns=columns, rows=tuple(rows), notes=notes)


def _yes_or_no(holds: bool | None) -> str:
    return NOTHING if holds is None else "yes" if holds else "NO"


def correction_notes(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """How validations corrected the intervals of results or comparisons, and problems of their profiles, without duplicates."""
    corrections = [correction for result in results if (correction := result.get("interval_correction"))]
    texts = [f"90% interval: {each['text']}" for each in corrections if each["records"]]  # without any there is nothing to say
    warnings = [f"warning: {text}" for each in corrections for text in each["warnings"]]
    return list(dict.fromkeys([*texts, *warnings]))


def kind_table(comparison: Mapping[str, Any], *, title: str = "Error by kind of task") -> ReportTable:
    """Seconds per step of each kind of task, from Comparison.to_dict()."""
    names = ("kind", "tasks", "predicted", "measured", "error", "median task |error|", "within")
    rows = []
    for kind, row in comparison["kinds"].items():
        seconds, median = [format_seconds(row[key]) for key in ("predicted", "measured")], row["median_absolute_relative_error"]
        error = format_error(row["relative_error"])
        median_text = NOTHING if median is None else format_percent(median)
        rows.append((kind, str(row["count"]), *seconds, error, median_text, _yes_or_no(row["within_interval"])))
    notes = ("seconds summed over the tasks of one step; a task on several ranks counts once",)
    columns = columns_of(*names, words=("kind", "within"))
    return ReportTable(title=title, columns=columns, rows=tuple(rows), notes=notes)


def largest_errors_table(comparison: Mapping[str, Any], *, title: str = "Tasks furthest off") -> ReportTable:
    """The tasks whose seconds differ most, from Comparison.to_dict()."""
    rows = []
    for row in comparison["largest_errors"]:
        origin = row["origin"]
        parts = [str(origin[key]) for key in ("component", "value") if key in origin]
        parts += [f"{key} {origin[key]}" for key in ("bucket", "microbatch", "replica", "stage") if key in origin]
        ranks, seconds = ",".join(map(str, row["ranks"])), [format_seconds(row[key]) for key in ("predicted", "measured")]
        error = format_error(row["relative_error"])
        rows.append((str(row["task"]), row["kind"], ", ".join(parts), ranks, *seconds, error))
    names = ("task", "kind", "of", "ranks", "predicted", "measured", "error")
    columns = columns_of(*names, words=("kind", "ranks"), wraps="of")
    return ReportTable(title=title, columns=columns, rows=tuple(rows))


def memory_table(memory: Sequence[Mapping[str, Any]]) -> ReportTable:
    """One row per line and one column per rank (equal ranks share one), from RankMemory as dictionaries.

    Of more than MEMORY_COLUMNS different columns, the fullest. A line that is 0 on all of them is left out.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, rank in enumerate(memory):
        key = (*memory_lines(rank).items(), rank.get("limit_bytes"), *rank.get("host_lines", {}).items())
        groups.setdefault(key, []).append(number)
    peaks = [sum(memory_lines(rank).values()) for rank in memory]
    shown = sorted(sorted(groups.values(), key=lambda group: -peaks[group[0]])[:MEMORY_COLUMNS])
    ranks = [memory[group[0]] for group in shown]
    lines, hosts = [memory_lines(rank) for rank in ranks], [rank.get("host_lines", {}) for rank in ranks]

    def sizes(values: Iterable[float | None]) -> list[str]:
        return [NOTHING if value is None else format_bytes(value) for value in values]

    names = list(dict.fromkeys(name for line in lines for name, size in line.items() if size))
    rows = [[line_name(name), *sizes(line.get(name, 0) for line in lines)] for name in names]
    rows.append(["peak", *sizes(peaks[group[0]] for group in shown)])
    if any("p95_bytes" in rank for rank in ranks):
        ends = [
            [format_bytes(rank.get(key, peaks[group[0]])) for key in ("p05_bytes", "p95_bytes")]
            for group, rank in zip(shown, ranks, strict=True)
        ]
        rows.append(["p05 to p95", *(" to ".join(pair) for pair in ends)])
    rows.append(["device limit", *sizes(rank.get("limit_bytes") for rank in ranks)])
    for name in dict.fromkeys(name for host in hosts for name in host):
        rows.append([f"in the host's memory: {line_name(name)}", *sizes(host.get(name, 0) for host in hosts)])
    if any("host_limit_bytes" in rank for rank in ranks):
        rows.append(["host's memory for the rank", *sizes(rank.get("host_limit_bytes") for rank in ranks)])
    numbers = [[memory[number]["rank"] for number in group] for group in shown]
    headings = [f"{'rank' if len(group) == 1 else 'ranks'} {_runs_text(group)}" for group in numbers]
    notes = (f"the {len(shown)} fullest of {len(groups)} different ranks",) if len(shown) < len(groups) else ()
    return ReportTable(
        title="Peak memory by rank",
        columns=columns_of("line", *headings, words=("line",)),
        rows=tuple(map(tuple, rows)),
        emphasised=(len(names),),
        notes=notes,
    )


def line_name(name: str) -> str:
    """`optimizer_state` -> `optimizer state`."""
    return name.removesuffix("_bytes").replace("_", " ")


def memory_lines(rank: Mapping[str, Any]) -> dict[str, float]:
    """The lines of one rank's memory, bytes by name; `lines` is a mapping, pairs, or records of name and size_bytes."""
    lines = rank["lines"]
    if isinstance(lines, Mapping):
        return dict(lines)
    pairs = ((line["name"], line["size_bytes"]) if isinstance(line, Mapping) else line for line in lines)
    return {str(name): float(size_bytes) for name, size_bytes in pairs}


CATEGORIES = {
    "compute_s": "compute",
    "load_s": "load",
    "host_s": "host",
    "exposed_communication_s": "exposed communication",
    "bubble_s": "bubble",
    "idle_s": "idle",
}


def breakdown_table(breakdown: Sequence[Mapping[str, Any]]) -> ReportTable:
    """One column per category, from RankBreakdown as dictionaries; the categories sum to the step. Ranks whose rows read
    the same share one."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank in breakdown:
        cells = (*(format_seconds(rank[key]) for key in CATEGORIES), format_seconds(sum(rank[key] for key in CATEGORIES)))
        alike.setdefault(cells, []).append(rank["rank"])
    rows = tuple((_runs_text(ranks), *cells) for cells, ranks in alike.items())
    columns = columns_of("ranks", *CATEGORIES.values(), "step", words=("ranks",))
    return ReportTable(title="Where the step goes", columns=columns, rows=rows)


MOST_RUNS, SHOWN_RUNS = 12, 4
"""Runs of ranks that are listed in full, and those that are shown of more."""
MOST_LISTED = 8
"""Ranks of a group that are listed one by one even where they follow one another."""


def cost_table(rows: Sequence[Mapping[str, Any]], *, title: str = "Costs") -> ReportTable:
    """Rows of `parsim cost`: seconds, and whichever they have of component, phase, rule, ways, samples, busbw, ..., source."""
    words = ("component", "phase", "rule", "operation", "algorithm")
    present = [key for key in (*words, "ways", "samples", "ranks") if any(key in row for row in rows)]
    with_size = any("size_bytes" in row for row in rows)
    with_bandwidth = any(row.get("busbw_bytes_per_s") is not None for row in rows)
    names = [*present, *(["size"] if with_size else []), "time", "90% interval"]
    names += [*(["busbw"] if with_bandwidth else []), "source"]
    body = []
    for row in rows:
        ranks = row.get("ranks", NOTHING)
        if not isinstance(ranks, int | str):  # `0,1,3`, or `0-15` for many in a row
            in_a_row = len(ranks) > MOST_LISTED and list(ranks) == list(range(ranks[0], ranks[-1] + 1))
            ranks = f"{ranks[0]}-{ranks[-1]}" if in_a_row else ",".join(map(str, ranks))
        cells = [str(ranks if key == "ranks" else row.get(key, NOTHING)) for key in present]
        cells += [format_bytes(row["size_bytes"])] if with_size else []
        cells += interval_texts(row["seconds"])
        if with_bandwidth:
            bandwidth = row.get("busbw_bytes_per_s")
            cells.append(NOTHING if bandwidth is None else format_bandwidth(bandwidth))
        body.append((*cells, str(row.get("source", NOTHING))))
    columns = columns_of(*names, words=(*words, "source"), wraps="component")
    return ReportTable(title=title, columns=columns, rows=tuple(body))


def plan_text(plan: object) -> str:
    """A plan's dictionary in one line, as `Plan.summary` without the strategy; a text stays as it is."""
    if not isinstance(plan, Mapping):
        return str(plan) if plan else NOTHING
    mesh, microbatches = plan["mesh"], plan["microbatches"]
    axes = [f"{axis}={mesh[axis]}" for axis in ("pp", "dp", "tp", "cp", "ep", "dp_shard") if mesh.get(axis, 1) > 1]
    text = f"{' '.join(axes) or '1 device'} mb={microbatches}x{plan['global_batch'] // (mesh['dp'] * microbatches)}"
    if mesh["pp"] > 1:
        chunks = len(plan.get("stages", ())) // mesh["pp"]
        text += f" {plan['pipeline_order']}" + (f"x{chunks}" if chunks > 1 else "")
    text += f" zero{plan['zero_stage']}" if plan.get("zero_stage") else ""
    size, again = plan.get("bucket_bytes", DEFAULT_BUCKET_BYTES), plan.get("recompute", "none")
    if size != DEFAULT_BUCKET_BYTES and mesh["dp"] * mesh["tp"] * mesh.get("cp", 1) > 1:
        text += f" buckets={format_bytes(size).replace(' ', '')}"
    if again != "none":
        text += f" recompute={again if isinstance(again, str) else len(again)}"
    text += " optimizer-offload" if plan.get("optimizer_offload") else ""
    if some := plan.get("activation_offload"):
        text += f" activation-offload{'' if some is True else f'={len(some)}'}"
    return text


def sources_text(sources: Mapping[str, float]) -> str:
    """`measured 92%, fitted 8%`, the largest share first."""
    ranked = sorted(sources.items(), key=lambda item: -item[1])
    return ", ".join(f"{source} {100 * share:.0f}%" for source, share in ranked if share >= 0.005)


def interval_texts(interval: Mapping[str, float]) -> tuple[str, str]:
    """("812 ms", "790–840 ms") of {"median", "p05", "p95"} in seconds; a unit that both ends share is written once."""
    low, high = format_seconds(interval["p05"]), format_seconds(interval["p95"])
    low_number, _, low_unit = low.partition(" ")
    both = f"{low_number}–{high}" if low_unit == high.partition(" ")[2] and low.count(" ") == 1 else f"{low} – {high}"
    return format_seconds(interval["median"]), both


def format_rate(per_second: float) -> str:
    """Three significant digits: 45.6, 1.23 k."""
    return three_digits(per_second) if per_second < 1000 else format_count(per_second)


def format_error(error: float | None) -> str:
    """A relative error with its sign: +4.2%; n/a where it is not defined."""
    if error is None:
        return "n/a"
    text = format_percent(abs(error))
    return text if text == format_percent(0.0) else f"{'+' if error >= 0 else '-'}{text}"


def _runs_text(ranks: Sequence[int]) -> str:
    """Ascending ranks as `0-3,8-11,15`; of many runs the first: `0-1,4-7,10-13,16-19,... (672 ranks)`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = runs if len(runs) <= MOST_RUNS else runs[:SHOWN_RUNS]
    text = ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in shown)
    return text if shown is runs else f"{text},... ({len(ranks)} ranks)"


def to_rich(table: ReportTable, width: int | None = None) -> Table:
    """For a terminal `width` characters wide (None: as wide as it is)."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = _folded(_printable(table), shutil.get_terminal_size().columns if width is None else width)
    notes = "\n".join(table.notes) or None
    caption = None if notes is None else Text(notes)  # as it is: a name of the user's may look like markup
    drawn = Table(title=Text(table.title), title_justify="left", caption=caption, caption_justify="left", box=SIMPLE_HEAD)
    for column in table.columns:
        drawn.add_column(Text(column.name), justify="right" if column.numeric else "left", no_wrap=column.numeric)
    for number, row in enumerate(table.rows):
        drawn.add_row(*(Text(cell) for cell in row), style="bold" if number in table.emphasised else None)
    return drawn


def to_text(table: ReportTable, width: int = TEXT_WIDTH) -> str:
    """Plain text, the same on every machine; the columns that wrap share what `width` characters leave (at least 16 each)."""
    table = _folded(_printable(table), width)
    sizes = _natural_sizes(table)
    wrapping = [number for number, column in enumerate(table.columns) if column.wraps]
    spare = width - 2 * (len(sizes) - 1) - sum(size for number, size in enumerate(sizes) if number not in wrapping)
    for place, number in enumerate(wrapping):
        share = max(16, spare // (len(wrapping) - place))
        sizes[number] = min(sizes[number], share)
        spare -= sizes[number]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(size) if column.numeric else cell.ljust(size)
            for cell, column, size in zip(cells, table.columns, sizes, strict=True)
        )
        return "  ".join(padded).rstrip()

    lines = [table.title, ""] if table.title else []
    lines += [line([column.name for column in table.columns]), "  ".join("-" * size for size in sizes)]
    for row in table.rows:
        cells = [
            textwrap.wrap(cell, sizes[number]) or [""] if number in wrapping else [cell] for number, cell in enumerate(row)
        ]
        lines += map(line, zip_longest(*cells, fillvalue=""))
    pieces = [piece for note in table.notes for piece in textwrap.wrap(note, width, subsequent_indent="  ")]
    return "\n".join([*lines, "", *pieces] if pieces else lines) + "\n"


def _printable(table: ReportTable) -> ReportTable:
    """With control characters spelled out: names of the user's reach a terminal, which would obey them."""
    return replace(
        table,
        title=printable(table.title),
        columns=tuple(replace(column, name=printable(column.name)) for column in table.columns),
        rows=tuple(tuple(printable(cell) for cell in row) for row in table.rows),
        notes=tuple(printable(note) for note in table.notes),
    )


def _folded(table: ReportTable, width: int) -> ReportTable:
    """Where a last, wrapping column would be squeezed below READABLE characters, its texts become notes instead."""
    sizes = _natural_sizes(table)
    room = width - 2 * (len(sizes) - 1) - sum(sizes[:-1])
    if not table.columns[-1].wraps or room >= min(READABLE, sizes[-1]):
        return table
    notes = tuple(f"{row[0].removeprefix(MARK)}: {row[-1]}" for row in table.rows if row[-1] != NOTHING)
    rows = tuple(row[:-1] for row in table.rows)
    return replace(table, columns=table.columns[:-1], rows=rows, notes=(*notes, *table.notes))


def _natural_sizes(table: ReportTable) -> list[int]:
    return [max(len(column.name), *(len(row[n]) for row in table.rows), 0) for n, column in enumerate(table.columns)]


def history_table(lines: Sequence[HistoryLine], title: str) -> ReportTable:
    """Every line of a history: what was predicted and measured, and whether it is used."""
    rows = []
    for line in lines:
        record = line.record
        told = (NOTHING,) * 5
        if record is not None:
            predicted_s, measured_s = format_seconds(record.predicted_s), format_seconds(record.measured_s)
            told = (record.when or NOTHING, record.model, record.run, predicted_s, measured_s)
        rows.append((str(line.number), *(printable(text) for text in (*told, line.why or "yes"))))
    names = ("line", "when", "model", "run", "predicted", "measured", "used")
    notes = ("`parsim history PROFILE --remove LINE` removes a line",) if rows else ("no validation yet",)
    columns = columns_of(*names, words=("when", "model", "run"), wraps="used")
    return ReportTable(title=title, columns=columns, rows=tuple(rows), notes=notes)


# A ReportTable as HTML for a notebook: without styles, every text escaped.


def table_html(table: ReportTable) -> str:
    """Caption, head, rows (those to point out in bold) and notes."""
    head = "".join(f"<th>{html.escape(column.name)}</th>" for column in table.columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{_marked(text, number in table.emphasised)}</td>" for text in row) + "</tr>"
        for number, row in enumerate(table.rows)
    )
    caption = f"<caption>{html.escape(table.title)}</caption>" if table.title else ""
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in table.notes)
    listing = f"<ul>{notes}</ul>" if notes else ""
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{listing}"


def paragraph_html(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def _marked(text: str, emphasised: bool) -> str:
    return f"<b>{html.escape(text)}</b>" if emphasised else html.escape(text)


# What a profile holds, runs under scenarios, measured memory, and how prices were computed.


def models_table(rows: Mapping[str, Mapping[str, Any]]) -> ReportTable:
    """Models by name, as `parsim.model.catalogue.names.described` has them."""
    rows_of_models = tuple(
        (
            name,
            format_count(row["parameters"]),
            *(f"{row[key]:,}" if row[key] else "" for key in ("layers", "hidden", "tokens")),
            ", ".join(row["other_names"]),
        )
        for name, row in rows.items()
    )
    columns = columns_of("model", "parameters", "layers", "hidden", "tokens", "also", words=("model",), wraps="also")
    notes = ("An id of Hugging Face is the name of its shape: meta-llama/Llama-3.1-8B is llama3-8b.",)
    return ReportTable(title="Models by name", columns=columns, rows=rows_of_models, notes=notes)


def instance_table(rented: Mapping[str, Mapping[str, Any]]) -> ReportTable:
    """Instance types of clouds by name, as `CloudInstance.to_dict` has them."""
    rows = [
        (
            name,
            row["cloud"],
            row["machine"],
            row["network_text"],
            "" if row["usd_per_hour"] is None else f"{row['usd_per_hour']:g}",
            row["price_source"].partition(", ")[2],
        )
        for name, row in rented.items()
    ]
    names, words = ("instance", "cloud", "machine", "network", "USD per hour", "price of"), ("instance", "cloud", "machine")
    columns = columns_of(*names, words=(*words, "price of"), wraps="network")
    notes = ("Give one as --on, or several as --on 2xp5.48xlarge. A price that is empty is that of the GPU's part.",)
    return ReportTable(title="Instance types", columns=columns, rows=tuple(rows), notes=notes)


def calibration_table(profile: Profile) -> ReportTable:
    """What a profile holds: measured points with their range and spread, and the fits made of them."""
    compute, collectives = profile.compute, profile.communication.points
    rows: list[tuple[str, str, str, str]] = []
    for phase in ("forward", "backward"):
        points = [point for point in compute.components if point.phase == phase]
        if points:
            names = len({(point.model, point.component) for point in points})
            samples = ", ".join(map(str, sorted({point.samples for point in points})))
            what = f"{names} components at {samples} samples"
            rows.append((phase, str(len(points)), what, _spread([point.spread for point in points])))
    if compute.optimizers:
        optimizers = ", ".join(sorted({point.optimizer for point in compute.optimizers}))
        what = f"{optimizers}: {_range([point.elements for point in compute.optimizers], format_count)} elements"
        rows.append(("optimizer", str(len(compute.optimizers)), what, _spread([point.spread for point in compute.optimizers])))
    if compute.operator_points or compute.operator_fits:
        fits: list[OperatorFit | OperatorSurface] = [*compute.operator_fits, *compute.operator_surfaces]
        kinds = ", ".join(dict.fromkeys(f"{fit.kind} {fit.phase}" for fit in fits))
        what = f"fitted: {kinds}; the spread is about the fit" if fits else "not fitted"
        rows.append(("operators", str(len(compute.operator_points)), what, _spread([fit.relative_sigma for fit in fits])))
    for operation, group_size in dict.fromkeys((point.operation, len(point.group)) for point in collectives):
        of_group = [point for point in collectives if point.operation == operation and len(point.group) == group_size]
        what = f"{_range([point.size_bytes for point in of_group], format_bytes)} over {group_size} ranks"
        spread = _spread([point.spread for point in of_group if point.spread is not None])
        rows.append((operation, str(len(of_group)), what, spread))
    if profile.noise is not None:
        rows.append(("drift", NOTHING, "of the whole machine from run to run", f"±{format_percent(profile.noise.drift_sigma)}"))
        if profile.noise.rank_sigma:
            spread = f"±{format_percent(profile.noise.rank_sigma)}"
            rows.append(("ranks", NOTHING, "of one rank's step against the others'", spread))
    if profile.overlap is not None:
        compute_factor, communication_factor = profile.overlap.compute_factor, profile.overlap.communication_factor
        what = f"compute x{compute_factor:.3g}, communication x{communication_factor:.3g} while both run"
        rows.append(("overlap", NOTHING, what, NOTHING))
    if profile.host is not None:
        host = f"{format_seconds(profile.host.task_s)} per task, {format_seconds(profile.host.step_s)} per step"
        if profile.host.post_wait_s:
            host += f", {format_seconds(profile.host.post_wait_s)} after a wait"
        if profile.host.launch_s:
            host += f", {format_seconds(profile.host.launch_s)} per launch"
        if profile.host.core_sharing > 1:
            host += f"; computing x{profile.host.core_sharing:.3g} where ranks share a core"
        rows.append(("host", NOTHING, host, NOTHING))
    if profile.today is not None:
        what = f"{speed_since(profile).text} for the same work, as of {profile.today.created}"
        rows.append(("today", NOTHING, what, NOTHING))
    return ReportTable(
        title=f"Calibration {profile.name}",
        columns=columns_of("kind", "points", "what", "spread", words=("kind",), wraps="what"),
        rows=tuple(rows),
        notes=(f"{profile.provenance.machine}; {profile.provenance.created}; {profile.provenance.command}",),
    )


def _spread(values: Sequence[float]) -> str:
    return f"±{format_percent(median(values))}" if values else NOTHING


def _range(values: Sequence[float], text: Any) -> str:
    low, high = min(values), max(values)
    return str(text(low)) if low == high else f"{text(low)} to {text(high)}"


# The tables of a plan in a scenario: the step under every state of the machine, the whole run, the checkpoint interval.


MOST_STATES = 24


def states_table(states: Sequence[Mapping[str, Any]]) -> ReportTable:
    """One row per state of the machine, in order of time."""
    rows = []
    for state in states[:MOST_STATES]:
        until = NOTHING if state["until_s"] is None else format_seconds(state["until_s"])
        step, slowdown = "stands still", NOTHING
        if not math.isinf(state["step_s"]):
            step, slowdown = format_seconds(state["step_s"]), f"{state['slowdown']:.3f}"
        rows.append((format_seconds(state["from_s"]), until, step, slowdown))
    more = len(states) - MOST_STATES
    return ReportTable(
        title="The step in every state of the machine",
        columns=columns_of("from", "until", "step", "times the quiet one"),
        rows=tuple(rows),
        notes=(f"{more} more states",) if more > 0 else (),
    )


def run_table(run: Mapping[str, Any]) -> ReportTable:
    """A whole run: each figure with its median and 90% interval."""
    names = {
        "total_s": "time",
        "training_s": "of it training",
        "lost_s": "of that undone by failures",
        "checkpoint_s": "checkpoints",
        "evaluation_s": "evaluation",
        "epoch_start_s": "starts of epochs",
        "down_s": "starting and restarting",
    }
    rows = [(title, *interval_texts(run[key])) for key, title in names.items()]
    rows.append(("failures", *_texts(run["failures"], lambda value: f"{value:.3g}")))
    rows.append(("useful share of the time", *_texts(run["useful_fraction"], format_percent)))
    if run["price"]["median"]:
        rows.append(("price", *_texts(run["price"], lambda value: format_money(value, run["currency"]))))
    if run["energy_j"]["median"]:
        rows.append(("energy", *_texts(run["energy_j"], lambda value: format_energy(value / 3.6e6))))
    return ReportTable(
        title=f"The whole run: {run['epochs']} epochs, {run['steps']} steps, {run['draws']} draws",
        columns=columns_of("figure", "median", "90%", wraps="figure"),
        rows=tuple(rows),
    )


def interval_table(choice: Mapping[str, Any]) -> ReportTable:
    """The mean run under every checkpoint interval, the best one marked, beside the formulas."""
    best = min(row["mean_s"] for row in choice["rows"])
    rows = [
        (format_seconds(row["interval_s"]), format_seconds(row["mean_s"]), f"+{100 * (row['mean_s'] / best - 1):.2f}%")
        for row in choice["rows"]
    ]
    return ReportTable(
        title="Checkpoint interval",
        columns=columns_of("interval", "mean time", "longer than the best"),
        rows=tuple(rows),
        emphasised=tuple(number for number, row in enumerate(choice["rows"]) if row["mean_s"] == best),
        notes=(
            f"simulated optimum {format_seconds(choice['simulated_s'])}; Young {format_seconds(choice['young_s'])}, Daly "
            f"{format_seconds(choice['daly_s'])} (a failure every {format_seconds(choice['mtbf_s'])}, "
            f"{format_seconds(choice['write_s'])} to write)",
        ),
    )


def _texts(interval: Mapping[str, float], text: Any) -> tuple[str, str]:
    return text(interval["median"]), f"{text(interval['p05'])}–{text(interval['p95'])}"


# Predicted and measured memory of every rank, like with like: each counter beside the lines of the prediction that it sees.


@dataclass(frozen=True, slots=True)
class MemoryLevel:
    """Attributes: level: "live", "allocated", "reserved" or "driver". relative_error: (predicted - measured) / measured."""

    rank: int
    level: str
    predicted_bytes: int
    measured_bytes: int
    relative_error: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def memory_levels(predicted: Sequence[RankMemory], measured: Sequence[MemoryUse | None]) -> tuple[MemoryLevel, ...]:
    """Up to four rows per rank; none for a counter that was not there.

    Live and allocated are held against the lines of tensors, reserved against these and the line `allocator`, what the driver
    no longer has against all lines.
    """
    rows = []
    for memory, use in zip(predicted, measured, strict=True):
        if use is None:
            continue
        tensors = sum(memory.tensor_lines.values())
        for level, foreseen, seen in (
            ("live", tensors, use.live_bytes),
            ("allocated", tensors, use.allocated_bytes),
            ("reserved", tensors + memory.line("allocator"), use.reserved_bytes),
            ("driver", memory.total_bytes, use.driver_bytes),
        ):
            if seen:
                rows.append(MemoryLevel(memory.rank, level, foreseen, seen, (foreseen - seen) / seen))
    return tuple(rows)


# Tables of how prices were computed: `parsim cost --explain`.


def price_tables(rows: Sequence[Mapping[str, Any]]) -> list[ReportTable]:
    """One table per row of `parsim cost`: the terms in the order in which they make the price, and where each is from.

    Args: rows: with the key "terms", as `parsim.costs.estimate.Estimate.term_rows` gives them.
    """
    columns = columns_of("term", "operation", "value", "running total", "from", words=("term", "operation"), wraps="from")
    tables = []
    for row in rows:
        shard = f" (1/{row['ways']} by {row['rule']})" if "ways" in row else ""
        what = f"{row['component']} {row['phase']}{shard}" if "component" in row else str(row["operation"])
        terms = tuple(
            (
                str(term["term"]),
                str(term["operation"]),
                format_seconds(term["value"]) if term["unit"] == "s" else f"{term['value']:.4g}",
                format_seconds(term["running_total_s"]),
                ": ".join(text for text in (str(term["origin"]), str(term["detail"])) if text),
            )
            for term in row["terms"]
        )
        tables.append(ReportTable(title=f"How {what} is priced", columns=columns, rows=terms))
    return tables


# DataFrames: units stand in the column names, and nothing is rounded.


def plans_frame(results: Sequence[PlanResult], chosen: int | None) -> pd.DataFrame:
    """One row per plan, in the order given. Args: chosen: the number of the chosen one, or None."""
    rows = [
        {
            "strategy": result.strategy,
            "plan": result.plan.summary(),
            "chosen": number == chosen,
            "step_s": result.step_s.median,
            "step_p05_s": result.step_s.p05,
            "step_p95_s": result.step_s.p95,
            "throughput_samples_per_s": result.throughput_samples_per_s.median,
            "communication_fraction": result.communication_fraction,
            "communication_busy_fraction": result.communication_busy_fraction,
            "exposed_communication_s": result.exposed_communication_s,
            "bubble_fraction": result.bubble_fraction,
            "peak_memory_bytes": max(result.peak_memory_bytes),
            "fits": result.fits,
            "fit_probability": result.fit_probability,
            "reason": result.reason,
        }
        for number, result in enumerate(results)
    ]
    return frame(rows, list(rows[0]))


def breakdown_frame(breakdown: Sequence[RankBreakdown]) -> pd.DataFrame:
    """One row per rank, seconds by category."""
    columns = ("rank", "step_s", *CATEGORIES, "communication_busy_s")
    return frame([asdict(rank) | {"step_s": rank.step_s} for rank in breakdown], columns)


def memory_frame(memory: Sequence[RankMemory]) -> pd.DataFrame:
    """One row per rank and line, bytes."""
    rows = []
    for rank in memory:
        spreads = {name: (low, high) for name, low, high in rank.spreads}
        for line, size_bytes in rank.lines:
            low, high = spreads.get(line, (size_bytes, size_bytes))
            rows.append({"rank": rank.rank, "line": line, "size_bytes": size_bytes, "p05_bytes": low, "p95_bytes": high})
    return frame(rows, ("rank", "line", "size_bytes", "p05_bytes", "p95_bytes"))


def timeline_frame(graph: TaskGraph, timeline: Timeline) -> pd.DataFrame:
    """One row per span in order of start, seconds."""
    resources = [parse_resource(name) for name in timeline.resources]
    order = timeline.start_s.argsort(kind="stable")
    tasks = [graph.tasks[number] for number in timeline.task[order].tolist()]
    places = [resources[number] for number in timeline.resource[order].tolist()]
    start_s, end_s = timeline.start_s[order], timeline.end_s[order]
    columns: dict[str, Any] = {"task": [task.index for task in tasks], "kind": [kind_of(task.work) for task in tasks]}
    columns |= {"rank": [place.rank for place in places], "stream": [place.stream for place in places]}
    for key in ("component", "stage", "replica", "microbatch", "bucket", "value"):
        columns[key] = [getattr(task.origin, key) for task in tasks]
    columns |= {"start_s": start_s, "end_s": end_s, "duration_s": end_s - start_s}
    import pandas as pd

    return pd.DataFrame(columns).astype(dict.fromkeys(("stage", "replica", "microbatch", "bucket"), "Int64"))


def frame(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    """A DataFrame with these columns in this order, also without rows."""
    import pandas as pd

    return pd.DataFrame(list(rows), columns=list(columns))


def coverage_tables(records: Sequence[ValidationRecord]) -> list[ReportTable]:
    """All records, those of each model and of each run; no table without records.

    Every interval is corrected by records of other runs and other models. The interval as predicted stands beside it.
    """
    if not records:
        return []
    judged = judged_split(records)
    groups = {"all": coverage_of(judged)}
    groups |= {f"model {name}": each for name, each in coverage_by(judged, lambda record: record.model).items()}
    groups |= {f"run {name}": each for name, each in coverage_by(judged, lambda record: record.run).items()}
    rows = tuple(
        (
            name,
            str(coverage.tested),
            str(coverage.covered),
            format_percent(coverage.fraction),
            f"{format_percent(coverage.low)} to {format_percent(coverage.high)}",
            format_percent(coverage.mean_width),
            format_percent(coverage.uncorrected_fraction),
            format_percent(coverage.uncorrected_mean_width),
        )
        for name, coverage in groups.items()
    )
    names = ("validations of", "tested", "inside", "coverage", "95% interval", "mean width", "as predicted", "its mean width")
    notes = (
        "each interval is corrected by records of other runs and other models; as predicted: before any correction",
        "width: p95 - p05 over the median; 95% interval: Clopper-Pearson; "
        f"corrected: {groups['all'].corrected} of {len(judged)}",
        f"for new predictions: {correction(records).describe()}",
    )
    columns = columns_of(*names, wraps="validations of")
    return [ReportTable(title="Coverage of 90% intervals", columns=columns, rows=rows, emphasised=(0,), notes=notes)]
