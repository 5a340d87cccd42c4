"""report.html: one self-contained page with tables and plotly figures that opens offline.

plotly.js stands in the page once; a content security policy forbids every request. The page reads at 1280 pixels and on
a phone, where table rows become cards. Every text that comes from a user (component, model and file names) is escaped.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parsim.files import write_text_atomically
from parsim.program.taskgraph import TaskGraph
from parsim.report import figures, tables
from parsim.report.plots import go
from parsim.report.standalone import standalone_page
from parsim.timeline import Timeline
from parsim.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRun:
    """One plan that was simulated and, where the machine allows it, run.

    Attributes:
        label: e.g. "dp"; plan: Plan.to_dict() or a text.
        graph, predicted, measured: the program and its timelines (measured: one typical step).
        predicted_breakdown, measured_breakdown: RankBreakdown as dictionaries. memory: RankMemory as dictionaries.
        memory_levels: MemoryLevel as dictionaries: what was measured, each beside what was predicted of the same kind.
        comparison: Comparison.to_dict().
        step_s: predicted, the mean of steps in a row. None: not known.
        absent: why a part is missing, by part: timeline, measured, breakdown, memory, comparison.
    """

    label: str
    plan: Mapping[str, Any] | str = ""
    graph: TaskGraph | None = None
    predicted: Timeline | None = None
    measured: Timeline | None = None
    predicted_breakdown: Sequence[Mapping[str, Any]] = ()
    measured_breakdown: Sequence[Mapping[str, Any]] = ()
    memory: Sequence[Mapping[str, Any]] = ()
    memory_levels: Sequence[Mapping[str, Any]] = ()
    comparison: Mapping[str, Any] | None = None
    step_s: float | None = None
    absent: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSection:
    """One model on one cluster.

    Attributes:
        model: its name. title: e.g. "resnet50 on dgx1-v100-32gb". text: what was asked, one paragraph.
        results: PlanResult.to_dict() of every candidate, ranked. chosen: one of them, or its strategy.
        absent: why there is no strategy table, under the key strategies.
    """

    model: str
    title: str
    text: str = ""
    results: Sequence[Mapping[str, Any]] = ()
    chosen: Mapping[str, Any] | str | None = None
    runs: Sequence[ReportRun] = ()
    absent: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """What report.html shows.

    Attributes:
        facts: (name, value) of what, machine, date, versions. summary: the answer in a sentence or a few.
        extra_tables: shown after the sections, e.g. `calibration_table(profile)`; extra_figures likewise: title, figure,
            caption. learning: the curves of a training (`learning_figure`) with a caption; None: nothing was trained.
    """

    title: str
    facts: Sequence[tuple[str, str]] = ()
    summary: Sequence[str] = ()
    sections: Sequence[ReportSection] = ()
    extra_tables: Sequence[tables.ReportTable] = ()
    extra_figures: Sequence[tuple[str, go.Figure, str]] = ()
    learning: tuple[go.Figure, str] | None = None


def write_report(data: ReportData, path: Path) -> None:
    """Write report.html, atomically."""
    write_text_atomically(path, report_html(data))


def report_html(data: ReportData) -> str:
    """The whole page, plotly.js included (about 5 MB)."""
    drawn: list[go.Figure] = []
    runs = [
        (section.model, _run_name(run), run.comparison)
        for section in data.sections
        for run in section.runs
        if run.comparison is not None
    ]
    links = [(f"section-{number}", section.title) for number, section in enumerate(data.sections)]
    parts = []
    if runs:
        links.insert(0, ("validation", "Predicted against measured"))
        caption = (
            "Error of the step, its predicted 90% interval, and in grey how far two halves of the same measurement "
            "differ: an error inside the grey band may be noise."
        )
        parts += [
            '<section id="validation"><h2>Predicted against measured</h2>',
            _table(tables.validation_table(runs, title="")),
            _figure(drawn, figures.errors_figure(runs), caption),
            "</section>",
        ]
    if data.learning is not None:
        links.append(("learning", "Learning"))
        parts += ['<section id="learning"><h2>Learning</h2>', _figure(drawn, *data.learning), "</section>"]
    parts += [_section(section, number, drawn) for number, section in enumerate(data.sections)]
    if data.extra_tables or data.extra_figures:
        links.append(("more", "Where the numbers come from"))
        parts.append('<section id="more"><h2>Where the numbers come from</h2>')
        parts += [f"<h3>{html.escape(table.title)}</h3>{_table(table)}" for table in data.extra_tables]
        parts += [f"<h3>{html.escape(title)}</h3>{_figure(drawn, *shown)}" for title, *shown in data.extra_figures]
        parts.append("</section>")
    figures_json = ",".join(figure.to_json() for figure in drawn).replace("<", "\\u003c")
    return standalone_page(
        data.title,
        style="report.css",
        body="<main>" + "\n".join([_header(data, links), *parts]) + "</main>\n",
        data=("figures", f"[{figures_json}]"),
        scripts=("report.js",),
    )


def _header(data: ReportData, links: Sequence[tuple[str, str]]) -> str:
    facts = "".join(f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>" for name, value in data.facts)
    facts = f'<dl class="facts">{facts}</dl>' if facts else ""
    summary = "".join(f"<p>{html.escape(text)}</p>" for text in data.summary)
    navigation = "".join(f'<a href="#{anchor}">{html.escape(text)}</a>' for anchor, text in links)
    return (
        f'<header><h1>{html.escape(data.title)}</h1><div class="summary">{summary}</div>{facts}'
        f"<nav>{navigation}</nav>"
        "<noscript><p>The tables need nothing; the figures need JavaScript, all of it in this file.</p></noscript></header>"
    )


def _section(section: ReportSection, number: int, drawn: list[go.Figure]) -> str:
    parts = [f'<section id="section-{number}"><h2>{html.escape(section.title)}</h2>']
    parts += [f"<p>{html.escape(section.text)}</p>"] if section.text else []
    if len(section.results) == 1:  # a figure would show one bar
        parts += ["<h3>The plan</h3>", _table(tables.strategy_table([tables.alone(section.results[0])], title=""))]
    elif section.results:
        caption = "Predicted step time by plan; hatched plans do not fit in memory."
        parts += [
            "<h3>Strategies</h3>",
            _table(tables.strategy_table(section.results, chosen=section.chosen, title="")),
            _figure(drawn, figures.strategies_figure(section.results, chosen=section.chosen), caption),
        ]
    else:
        parts.append(_absent(section.absent, "strategies"))
    parts += [_run(run, drawn, opened=place == 0) for place, run in enumerate(section.runs)]
    return "".join(parts) + "</section>"


def _run(run: ReportRun, drawn: list[go.Figure], *, opened: bool) -> str:
    parts = [f"<details{' open' if opened else ''}><summary>{_run_title(run)}</summary>", "<h4>Timeline of one step</h4>"]
    several = run.comparison is not None and run.comparison["measured_step_s"]["steps"] > 1
    lines = {"Predicted": run.predicted, "Measured (one step)" if several else "Measured": run.measured}
    timelines = {name: line for name, line in lines.items() if line is not None}
    if run.graph is not None and timelines:
        caption = (
            "A row per rank and stream, time from the start of the step; bars are labelled with their microbatch or "
            "component. Point at one for more, drag to zoom in, double-click to zoom out."
        )
        if run.step_s is not None and run.predicted is not None:
            alone, in_a_row = format_seconds(run.predicted.makespan_s), format_seconds(run.step_s)
            if alone != in_a_row:
                caption += f" The predicted step is drawn by itself ({alone}). In a row, steps overlap at their ends and "
                caption += f"take {in_a_row} each."
        parts.append(_figure(drawn, figures.timeline_figure(run.graph, timelines), caption))
    else:
        parts.append(_absent(run.absent, "timeline"))
    if run.measured is None and "measured" in run.absent:
        parts.append(_absent(run.absent, "measured"))
    parts.append('<div class="pair"><div><h4>Where the step goes</h4>')
    both = {"predicted": run.predicted_breakdown, "measured": run.measured_breakdown}
    breakdowns = {name: rows for name, rows in both.items() if len(rows)}
    if breakdowns:
        caption = "Per rank, on its compute stream; the categories sum to the step."
        parts.append(_figure(drawn, figures.breakdown_figure(breakdowns), caption))
    else:
        parts.append(_absent(run.absent, "breakdown"))
    levels = {row["level"] for row in run.memory_levels}
    if levels:
        caption = "Peak of live tensors, counted operator by operator, beside the predicted lines of tensors. "
        if "reserved" in levels:
            caption += "What the allocator reserved is compared with these and the line allocator."
        else:
            caption += "The context of the process and libraries are no tensors: no counter of a CPU sees them."
        parts.append("<h4>Memory, predicted and measured</h4>")
        parts.append(_figure(drawn, figures.memory_levels_figure(run.memory_levels), caption))
    parts.append("</div><div><h4>Peak memory by rank</h4>")
    if len(run.memory):
        on_device = [row["measured_bytes"] for row in run.memory_levels if row["level"] == "driver"]
        on_device = on_device if len(on_device) == len(run.memory) else []
        caption = "Predicted, by line, against what the device has"
        caption += "; diamonds: measured on the device." if on_device else "."
        parts.append(_figure(drawn, figures.memory_figure(run.memory, device_bytes=on_device), caption))
    else:
        parts.append(_absent(run.absent, "memory"))
    parts.append("</div></div>")
    if run.comparison is not None:
        caption = "Seconds per step, summed over the tasks of a kind; beside the bars the error of the sum."
        furthest = _table(tables.largest_errors_table(run.comparison, title=""))
        parts += [
            "<h4>Error by kind of task</h4>",
            _figure(drawn, figures.kinds_figure(run.comparison), caption),
            _table(tables.kind_table(run.comparison, title="")),
            f'<details class="inner"><summary>Tasks furthest off</summary>{furthest}</details>',
        ]
    elif run.measured is not None or "comparison" in run.absent:
        parts.append(_absent(run.absent, "comparison"))
    return "".join(parts) + "</details>"


def _run_name(run: ReportRun) -> str:
    plan = tables.plan_text(run.plan)
    return run.label if plan == tables.NOTHING else f"{run.label} · {plan}"


def _run_title(run: ReportRun) -> str:
    text = ""
    if run.comparison is not None:
        predicted, measured = (format_seconds(run.comparison[key]) for key in ("predicted", "measured"))
        text = f"predicted {predicted}, measured {measured}, error {tables.format_error(run.comparison['relative_error'])}"
    elif run.step_s is not None:
        text = f"predicted {format_seconds(run.step_s)} a step"
    elif run.predicted is not None:
        text = f"predicted {format_seconds(run.predicted.makespan_s)}"
    return f"<strong>{html.escape(_run_name(run))}</strong>" + (f" <span>{text}</span>" if text else "")


_REASONS = {
    "strategies": "No strategies were compared here.",
    "timeline": "No timeline was kept of this plan.",
    "breakdown": "No breakdown was made of this plan.",
    "memory": "Memory was not predicted for this plan.",
    "comparison": "The prediction was not compared with the measurement.",
}
"""Why a part is missing, where nothing else is known."""


def _absent(reasons: Mapping[str, str], part: str) -> str:
    return f'<p class="absent">{html.escape(reasons.get(part) or _REASONS[part])}</p>'


def _table(table: tables.ReportTable) -> str:
    """On a phone every row becomes a card: its first text the heading, `data-label` the name of every other."""
    head = "".join(f'<th scope="col"{_classes(column)}>{html.escape(column.name)}</th>' for column in table.columns)
    rows = []
    for number, row in enumerate(table.rows):
        cells = "".join(
            f'<td{_classes(column, text, place)} data-label="{html.escape(column.name)}">{_cell(text)}</td>'
            for place, (column, text) in enumerate(zip(table.columns, row, strict=True))
        )
        mark = ' class="chosen"' if number in table.emphasised else ""
        rows.append(f"<tr{mark}>{cells}</tr>")
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in table.notes)
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>' + (
        f'<ul class="notes">{notes}</ul>' if notes else ""
    )


def _classes(column: tables.Column, text: str = "", place: int | None = None) -> str:
    flags = {"number": column.numeric, "wraps": column.wraps, "head": place == 0, "long": len(text) > 13}
    names = [name for name, holds in flags.items() if holds]
    return f' class="{" ".join(names)}"' if names else ""


def _cell(text: str) -> str:
    return f'<b class="no">{text}</b>' if text == "NO" else html.escape(text)


def _figure(drawn: list[go.Figure], figure: go.Figure, caption: str) -> str:
    """A place for the figure, as high as it will be, so that the page does not jump while figures are drawn.

    The legend is made of buttons outside the plot: it wraps on a phone, and hides and shows traces.
    """
    figure.update_layout(showlegend=False)
    drawn.append(figure)
    text = html.escape(caption)
    swatches = {trace.name: _swatch(trace) for trace in figure.data}
    buttons = "".join(
        f'<button type="button" aria-pressed="true" data-trace="{html.escape(name)}">{swatch}{html.escape(name)}</button>'
        for name, swatch in swatches.items()
    )
    place = f'data-figure="{len(drawn) - 1}" style="height:{figure.layout.height}px"'
    return (
        f'<figure><div class="legend">{buttons}</div>'
        f'<div class="plot" {place} role="img" aria-label="{text}"></div>'
        f"<figcaption>{text}</figcaption></figure>"
    )


def _swatch(trace: Any) -> str:
    """The mark of a trace in its legend: a square, a hatched square, a dot, a diamond or a dash."""
    marker = trace.marker
    if trace.type == "bar":
        stripes = f"repeating-linear-gradient(135deg, {marker.pattern.fgcolor} 0 2px, {marker.color} 2px 5px)"
        return f'<i style="background:{stripes if marker.pattern.shape == "/" else marker.color}"></i>'
    if marker.symbol == "line-ew":
        return f'<i class="dash" style="border-color:{marker.line.color}"></i>'
    shape = "diamond" if marker.symbol == "diamond" else "dot"
    border = marker.line.color or marker.color
    return f'<i class="{shape}" style="background:{marker.color};border:2px solid {border}"></i>'
