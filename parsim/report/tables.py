"""The tables of the command line and of report.html, as values.

Each function takes the dictionaries that JSON results hold and returns a `ReportTable` of texts; `to_rich` and `to_text`
(fixed width, the same everywhere) print one, `parsim.report.page` turns it into HTML. All relative errors are
(predicted - measured) / measured.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from parsim.plans.plan import DEFAULT_BUCKET_BYTES
from parsim.predict.memory import verdict_text
from parsim.units import format_bandwidth, format_bytes, format_count, format_percent, format_seconds, printable, three_digits

if TYPE_CHECKING:
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
    return ReportTable(
        title=title,
        columns=columns_of(*names, words=("strategy", "plan", "fits"), wraps="why"),
        rows=tuple(rows),
        emphasised=() if mark is None else (mark,),
        notes=tuple(notes),
    )


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
    notes = (
        "error = (predicted - measured) / measured of the mean step; memory error: the worst rank's",
        *([PACE_NOTE] if paced else []),
        *_skew_notes([comparison for _, _, comparison in runs]),
        "A/A floor: difference between two halves of the same measurement (median and p95 over random halves of its rounds)",
        *correction_notes([comparison for _, _, comparison in runs]),
    )
    columns = columns_of(*names, words=("model", "within"), wraps="plan")
    return ReportTable(title=title, columns=columns, rows=tuple(rows), notes=notes)


def _skew_notes(comparisons: Sequence[Mapping[str, Any]]) -> list[str]:
    """How far ranks of relaxed plans are apart: their steps are timed by their own clocks, so no step contains it."""
    apart = [format_seconds(comparison["skew_s"]) for comparison in comparisons if "skew_s" in comparison]
    return [f"ranks begin the same step {', '.join(apart)} apart on average; measured is each rank's own step"] if apart else []


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
    return ReportTable(title=title, columns=columns_of(*names, words=("kind", "ranks"), wraps="of"), rows=tuple(rows))


def memory_table(memory: Sequence[Mapping[str, Any]], *, title: str = "Peak memory by rank") -> ReportTable:
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
        title=title,
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


def breakdown_table(breakdown: Sequence[Mapping[str, Any]], *, title: str = "Where the step goes") -> ReportTable:
    """One column per category, from RankBreakdown as dictionaries; the categories sum to the step. Ranks whose rows read
    the same share one."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank in breakdown:
        cells = (*(format_seconds(rank[key]) for key in CATEGORIES), format_seconds(sum(rank[key] for key in CATEGORIES)))
        alike.setdefault(cells, []).append(rank["rank"])
    rows = tuple((_runs_text(ranks), *cells) for cells, ranks in alike.items())
    return ReportTable(title=title, columns=columns_of("ranks", *CATEGORIES.values(), "step", words=("ranks",)), rows=rows)


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
    return ReportTable(
        title=title, columns=columns_of(*names, words=("when", "model", "run"), wraps="used"), rows=tuple(rows), notes=notes
    )
