"""The tables of the command line and of report.html, as values.

Each function takes the dictionaries that JSON results hold and returns a `ReportTable` of texts; `to_rich` and `to_text`
(fixed width, the same everywhere) print one, `parsim.report.page` turns it into HTML. All relative errors are
(predicted - measured) / measured.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from parsim.plans.plan import DEFAULT_BUCKET_BYTES
from parsim.predict.memory import verdict_text
from parsim.units import format_bandwidth, format_bytes, format_count, format_percent, format_seconds, printable

if TYPE_CHECKING:
    from rich.table import Table

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


def strategy_table(
    results: Sequence[Mapping[str, Any]], *, chosen: Mapping[str, Any] | str | None = None, title: str = "Strategies"
) -> ReportTable:
    """One row per PlanResult.to_dict(), in the order given.

    `chosen` is the result that was chosen, or its strategy; its row is marked.
    """
    columns = (
        Column(name="strategy"),
        Column(name="plan"),
        Column(name="step", numeric=True),
        Column(name="90% interval", numeric=True),
        Column(name="samples/s", numeric=True),
        Column(name="communication", numeric=True),
        Column(name="bubble", numeric=True),
        Column(name="peak memory", numeric=True),
        Column(name="fits"),
        Column(name="why", wraps=True),
    )
    mark = next((number for number, result in enumerate(results) if _is_chosen(result, chosen)), None)
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
    notes.append("communication: exposed communication of all communication, as shares of the step")
    notes.append("peak memory: of the fullest rank")
    notes += correction_notes(results)
    notes += _sources_notes(results)
    return ReportTable(
        title=title, columns=columns, rows=tuple(rows), emphasised=() if mark is None else (mark,), notes=tuple(notes)
    )


ALIKE = 0.05
"""Shares of sources that differ by less count as equal."""


def _sources_notes(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where costs come from: once if the plans are alike in that, else plan by plan."""
    found = {str(result["strategy"]): result["cost_sources"] for result in results if result.get("cost_sources")}
    if not found:
        return []
    title = "sources of the costs, by share of the task seconds"
    first = next(iter(found.values()))
    names = {name for shares in found.values() for name in shares}
    if all(abs(shares.get(name, 0.0) - first.get(name, 0.0)) < ALIKE for shares in found.values() for name in names):
        return [f"{title}: {sources_text(first)}"]
    return [f"{title}: " + "; ".join(f"{strategy} {sources_text(shares)}" for strategy, shares in found.items())]


PACE_NOTE = "at measured speed: error after correcting for the machine's measured speed (x: slower than while calibrating)"


def validation_table(
    runs: Sequence[tuple[str, str, Mapping[str, Any]]], *, title: str = "Predicted against measured"
) -> ReportTable:
    """One row per (model, strategy or plan, Comparison.to_dict()), each error with its A/A floor."""
    paced = any("at_pace" in comparison for _, _, comparison in runs)
    columns = (
        Column(name="model"),
        Column(name="plan", wraps=True),
        Column(name="predicted", numeric=True),
        Column(name="90% interval", numeric=True),
        Column(name="measured", numeric=True),
        Column(name="error", numeric=True),
        *([Column(name="at measured speed", numeric=True)] if paced else []),
        Column(name="A/A floor", numeric=True),
        Column(name="within"),
        Column(name="steps", numeric=True),
        Column(name="memory error", numeric=True),
    )
    rows = []
    for model, plan, comparison in runs:
        interval = comparison.get("predicted_step_s")
        floor = comparison.get("aa_floor")
        within = comparison.get("within_interval")
        memory = [row["relative_error"] for row in comparison.get("memory", ()) if row["relative_error"] is not None]
        rows.append(
            (
                model,
                plan,
                format_seconds(comparison["predicted"]),
                interval_texts(interval)[1] if interval else NOTHING,
                format_seconds(comparison["measured"]),
                format_error(comparison["relative_error"]),
                *([_at_pace(comparison)] if paced else []),
                f"±{format_percent(floor['median'])} (p95 {format_percent(floor['p95'])})" if floor else NOTHING,
                NOTHING if within is None else "yes" if within else "NO",
                str(comparison["measured_step_s"]["steps"]),
                format_error(max(memory, key=abs)) if memory else NOTHING,
            )
        )
    notes = (
        "error = (predicted - measured) / measured of the mean step; memory error: the worst rank's",
        *([PACE_NOTE] if paced else []),
        "A/A floor: difference between two halves of the same measurement (median and p95 over random halves of its rounds)",
        *correction_notes([comparison for _, _, comparison in runs]),
    )
    return ReportTable(title=title, columns=columns, rows=tuple(rows), notes=notes)


def _at_pace(comparison: Mapping[str, Any]) -> str:
    found = comparison.get("at_pace")
    return f"{format_error(found['relative_error'])} (x{found['slowness']:.2f})" if found else NOTHING


def correction_notes(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """How validations corrected the intervals of results or comparisons, and problems of their profiles, without duplicates."""
    found = [entry for result in results if (entry := result.get("interval_correction"))]
    texts = [f"90% interval: {entry['text']}" for entry in found if entry["records"]]  # without any there is nothing to say
    warnings = [f"warning: {text}" for entry in found for text in entry["warnings"]]
    return list(dict.fromkeys([*texts, *warnings]))


def kind_table(comparison: Mapping[str, Any], *, title: str = "Error by kind of task") -> ReportTable:
    """Seconds per step of each kind of task, from Comparison.to_dict()."""
    columns = (
        Column(name="kind"),
        Column(name="tasks", numeric=True),
        Column(name="predicted", numeric=True),
        Column(name="measured", numeric=True),
        Column(name="error", numeric=True),
        Column(name="median task |error|", numeric=True),
        Column(name="within"),
    )
    rows = tuple(
        (
            kind,
            str(row["count"]),
            format_seconds(row["predicted"]),
            format_seconds(row["measured"]),
            format_error(row["relative_error"]),
            _percent_or_nothing(row["median_absolute_relative_error"]),
            NOTHING if row["within_interval"] is None else "yes" if row["within_interval"] else "NO",
        )
        for kind, row in comparison["kinds"].items()
    )
    notes = ("seconds summed over the tasks of one step; a task on several ranks counts once",)
    return ReportTable(title=title, columns=columns, rows=rows, notes=notes)


def largest_errors_table(comparison: Mapping[str, Any], *, title: str = "Tasks furthest off") -> ReportTable:
    """The tasks whose seconds differ most, from Comparison.to_dict()."""
    columns = (
        Column(name="task", numeric=True),
        Column(name="kind"),
        Column(name="of", wraps=True),
        Column(name="ranks"),
        Column(name="predicted", numeric=True),
        Column(name="measured", numeric=True),
        Column(name="error", numeric=True),
    )
    rows = tuple(
        (
            str(row["task"]),
            row["kind"],
            _origin_text(row["origin"]),
            ",".join(map(str, row["ranks"])),
            format_seconds(row["predicted"]),
            format_seconds(row["measured"]),
            format_error(row["relative_error"]),
        )
        for row in comparison["largest_errors"]
    )
    return ReportTable(title=title, columns=columns, rows=rows)


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
    amounts = [memory_lines(memory[group[0]]) for group in shown]
    names = list(dict.fromkeys(name for lines in amounts for name, size in lines.items() if size))
    rows = [[line_name(name), *(format_bytes(lines.get(name, 0)) for lines in amounts)] for name in names]
    rows.append(["peak", *(format_bytes(peaks[group[0]]) for group in shown)])
    if any("p95_bytes" in memory[group[0]] for group in shown):
        ends = [[memory[group[0]].get(key, peaks[group[0]]) for key in ("p05_bytes", "p95_bytes")] for group in shown]
        rows.append(["p05 to p95", *(f"{format_bytes(low)} to {format_bytes(high)}" for low, high in ends)])
    limits = [memory[group[0]].get("limit_bytes") for group in shown]
    rows.append(["device limit", *(NOTHING if limit is None else format_bytes(limit) for limit in limits)])
    hosts = [memory[group[0]].get("host_lines", {}) for group in shown]
    for name in dict.fromkeys(name for lines in hosts for name in lines):
        rows.append([f"in the host's memory: {line_name(name)}", *(format_bytes(lines.get(name, 0)) for lines in hosts)])
    if any("host_limit_bytes" in memory[group[0]] for group in shown):
        limits = [memory[group[0]].get("host_limit_bytes") for group in shown]
        rows.append(["host's memory for the rank", *(NOTHING if limit is None else format_bytes(limit) for limit in limits)])
    headings = [_ranks_text([memory[number]["rank"] for number in group]) for group in shown]
    columns = (Column(name="line"), *(Column(name=heading, numeric=True) for heading in headings))
    notes = (f"the {len(shown)} fullest of {len(groups)} different ranks",) if len(shown) < len(groups) else ()
    return ReportTable(title=title, columns=columns, rows=tuple(map(tuple, rows)), emphasised=(len(names),), notes=notes)


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
    columns = (
        Column(name="ranks"),
        *(Column(name=name, numeric=True) for name in CATEGORIES.values()),
        Column(name="step", numeric=True),
    )
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank in breakdown:
        cells = (*(format_seconds(rank[key]) for key in CATEGORIES), format_seconds(sum(rank[key] for key in CATEGORIES)))
        alike.setdefault(cells, []).append(rank["rank"])
    rows = tuple((_runs_text(ranks), *cells) for cells, ranks in alike.items())
    return ReportTable(title=title, columns=columns, rows=rows)


MOST_RUNS, SHOWN_RUNS = 12, 4
"""Runs of ranks that are listed in full, and those that are shown of more."""
MOST_LISTED = 8
"""Ranks of a group that are listed one by one even where they follow one another."""


def cost_table(rows: Sequence[Mapping[str, Any]], *, title: str = "Costs") -> ReportTable:
    """Rows of `parsim cost`: seconds, and whichever they have of component, phase, rule, ways, samples, busbw, ..., source."""
    texts = {"component": "component", "phase": "phase", "rule": "rule", "operation": "operation", "algorithm": "algorithm"}
    counts = {"ways": "ways", "samples": "samples", "ranks": "ranks"}
    present = [key for key in (*texts, *counts) if any(key in row for row in rows)]
    with_bandwidth = any(row.get("busbw_bytes_per_s") is not None for row in rows)
    columns = (
        *(Column(name=key, numeric=key in counts, wraps=key == "component") for key in present),
        *([Column(name="size", numeric=True)] if any("size_bytes" in row for row in rows) else []),
        Column(name="time", numeric=True),
        Column(name="90% interval", numeric=True),
        *([Column(name="busbw", numeric=True)] if with_bandwidth else []),
        Column(name="source"),
    )
    body = []
    for row in rows:
        time, interval = interval_texts(row["seconds"])
        bandwidth = row.get("busbw_bytes_per_s")
        ranks = row.get("ranks", NOTHING)
        ranks_text = ranks if isinstance(ranks, int | str) else _group_text(list(ranks))
        body.append(
            (
                *(str(ranks_text if key == "ranks" else row.get(key, NOTHING)) for key in present),
                *([format_bytes(row["size_bytes"])] if any(column.name == "size" for column in columns) else []),
                time,
                interval,
                *([NOTHING if bandwidth is None else format_bandwidth(bandwidth)] if with_bandwidth else []),
                str(row.get("source", NOTHING)),
            )
        )
    return ReportTable(title=title, columns=columns, rows=tuple(body))


def plan_text(plan: object) -> str:
    """A plan's dictionary in one line, as `Plan.summary` without the strategy; a text stays as it is."""
    if not isinstance(plan, Mapping):
        return str(plan) if plan else NOTHING
    mesh = plan["mesh"]
    replicas, microbatches = mesh["dp"], plan["microbatches"]
    axes = (
        " ".join(f"{axis}={mesh[axis]}" for axis in ("pp", "dp", "tp", "cp", "ep", "dp_shard") if mesh.get(axis, 1) > 1)
        or "1 device"
    )
    order = f" {plan['pipeline_order']}" if mesh["pp"] > 1 else ""
    chunks = len(plan.get("stages", ())) // mesh["pp"]
    order += f"x{chunks}" if order and chunks > 1 else ""
    zero = f" zero{plan['zero_stage']}" if plan.get("zero_stage") else ""
    return f"{axes} mb={microbatches}x{plan['global_batch'] // (replicas * microbatches)}{order}{zero}{_rest_text(plan)}"


def _rest_text(plan: Mapping[str, Any]) -> str:
    """Bucket sizes that are not the usual ones, and recomputation."""
    size, again, text = plan.get("bucket_bytes", DEFAULT_BUCKET_BYTES), plan.get("recompute", "none"), ""
    if size != DEFAULT_BUCKET_BYTES and plan["mesh"]["dp"] * plan["mesh"]["tp"] * plan["mesh"].get("cp", 1) > 1:
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
    return f"{per_second:.3g}" if per_second < 1000 else format_count(per_second)


def format_error(error: float | None) -> str:
    """A relative error with its sign: +4.2%; n/a where it is not defined."""
    if error is None:
        return "n/a"
    text = format_percent(abs(error))
    return text if text == format_percent(0.0) else f"{'+' if error >= 0 else '-'}{text}"


def _origin_text(origin: Mapping[str, Any]) -> str:
    """`layer1.0, microbatch 2, replica 0, stage 1`."""
    named = [str(origin[key]) for key in ("component", "value") if key in origin]
    return ", ".join(named + [f"{key} {origin[key]}" for key in ("bucket", "microbatch", "replica", "stage") if key in origin])


def _group_text(ranks: Sequence[int]) -> str:
    """`0,1,3`, or `0-15` for many in a row."""
    in_a_row = len(ranks) > MOST_LISTED and list(ranks) == list(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]}-{ranks[-1]}" if in_a_row else ",".join(map(str, ranks))


def _ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-3`, `ranks 0,2`."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {_runs_text(ranks)}"


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


def _percent_or_nothing(fraction: float | None) -> str:
    return NOTHING if fraction is None else format_percent(fraction)


def _is_chosen(result: Mapping[str, Any], chosen: Mapping[str, Any] | str | None) -> bool:
    return chosen is not None and (result["strategy"] == chosen if isinstance(chosen, str) else result == chosen)


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
    lines = [table.title, ""] if table.title else []
    lines.append(_line([column.name for column in table.columns], table.columns, sizes))
    lines.append("  ".join("-" * size for size in sizes))
    for row in table.rows:
        cells = [
            textwrap.wrap(cell, sizes[number]) or [""] if number in wrapping else [cell] for number, cell in enumerate(row)
        ]
        for part in range(max(map(len, cells))):
            lines.append(_line([cell[part] if part < len(cell) else "" for cell in cells], table.columns, sizes))
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
    left = width - 2 * (len(sizes) - 1) - sum(sizes[:-1])
    if not table.columns[-1].wraps or left >= min(READABLE, sizes[-1]):
        return table
    notes = tuple(f"{row[0].removeprefix(MARK)}: {row[-1]}" for row in table.rows if row[-1] != NOTHING)
    rows = tuple(row[:-1] for row in table.rows)
    return replace(table, columns=table.columns[:-1], rows=rows, notes=(*notes, *table.notes))


def _natural_sizes(table: ReportTable) -> list[int]:
    return [max(len(column.name), *(len(row[n]) for row in table.rows), 0) for n, column in enumerate(table.columns)]


def _line(cells: Sequence[str], columns: Sequence[Column], sizes: Sequence[int]) -> str:
    padded = (
        cell.rjust(size) if column.numeric else cell.ljust(size)
        for cell, column, size in zip(cells, columns, sizes, strict=True)
    )
    return "  ".join(padded).rstrip()
