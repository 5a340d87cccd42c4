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

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from parsim.files import write_text_atomically
from parsim.graph.taskgraph import TaskGraph
from parsim.report import figures, memory_figures, tables
from parsim.report.page import PAGE_SCRIPT, PAGE_STYLE
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
            caption.
    """

    title: str
    facts: Sequence[tuple[str, str]] = ()
    summary: Sequence[str] = ()
    sections: Sequence[ReportSection] = ()
    extra_tables: Sequence[tables.ReportTable] = ()
    extra_figures: Sequence[tuple[str, go.Figure, str]] = ()


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
    parts = [_header(data, compared=bool(runs))]
    if runs:
        parts.append('<section id="validation"><h2>Predicted against measured</h2>')
        parts.append(_table(tables.validation_table(runs, title="")))
        caption = (
            "Error of the step, its predicted 90% interval, and in grey how far two halves of the same measurement "
            "differ: an error inside the grey band may be noise."
        )
        parts.append(_figure(drawn, figures.errors_figure(runs), caption))
        parts.append("</section>")
    parts += [_section(section, number, drawn) for number, section in enumerate(data.sections)]
    if data.extra_tables or data.extra_figures:
        parts.append('<section id="more"><h2>Where the numbers come from</h2>')
        parts += [f"<h3>{html.escape(table.title)}</h3>{_table(table)}" for table in data.extra_tables]
        parts += [f"<h3>{html.escape(title)}</h3>{_figure(drawn, *shown)}" for title, *shown in data.extra_figures]
        parts.append("</section>")
    figures_json = ",".join(figure.to_json() for figure in drawn).replace("<", "\\u003c")
    plotly_js = get_plotlyjs().replace("</script", "<\\/script")
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light"><link rel="icon" href="data:,">'
        f"<title>{html.escape(data.title)}</title><style>{PAGE_STYLE}</style></head>\n<body><main>"
        + "\n".join(parts)
        + "</main>\n"
        f'<script type="application/json" id="figures">[{figures_json}]</script>\n'
        f"<script>{plotly_js}</script>\n<script>{PAGE_SCRIPT}</script>\n</body></html>\n"
    )


def _header(data: ReportData, *, compared: bool) -> str:
    facts = "".join(f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>" for name, value in data.facts)
    facts = f'<dl class="facts">{facts}</dl>' if facts else ""
    summary = "".join(f"<p>{html.escape(text)}</p>" for text in data.summary)
    links = [("validation", "Predicted against measured")] if compared else []
    links += [(f"section-{number}", section.title) for number, section in enumerate(data.sections)]
    links += [("more", "Where the numbers come from")] if data.extra_tables or data.extra_figures else []
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
        parts.append("<h3>The plan</h3>")
        parts.append(_table(tables.strategy_table([tables.alone(section.results[0])], title="")))
    elif section.results:
        parts.append("<h3>Strategies</h3>")
        parts.append(_table(tables.strategy_table(section.results, chosen=section.chosen, title="")))
        caption = "Predicted step time by plan; hatched plans do not fit in memory."
        parts.append(_figure(drawn, figures.strategies_figure(section.results, chosen=section.chosen), caption))
    else:
        parts.append(_absent(section.absent.get("strategies", "No strategies were compared here.")))
    for place, run in enumerate(section.runs):
        parts.append(_run(run, drawn, opened=place == 0))
    return "".join(parts) + "</section>"


def _run(run: ReportRun, drawn: list[go.Figure], *, opened: bool) -> str:
    parts = [f"<details{' open' if opened else ''}><summary>{_run_title(run)}</summary>"]
    several = run.comparison is not None and run.comparison["measured_step_s"]["steps"] > 1
    lines = {"Predicted": run.predicted, "Measured (one step)" if several else "Measured": run.measured}
    timelines = {name: line for name, line in lines.items() if line is not None}
    parts.append("<h4>Timeline of one step</h4>")
    if run.graph is not None and timelines:
        caption = (
            "A row per rank and stream, time from the start of the step; bars are labelled with their microbatch or "
            "component. Point at one for more, drag to zoom in, double-click to zoom out."
        )
        caption += _one_step_alone(run)
        parts.append(_figure(drawn, figures.timeline_figure(run.graph, timelines), caption))
    else:
        parts.append(_absent(run.absent.get("timeline", "No timeline was kept of this plan.")))
    if run.measured is None and "measured" in run.absent:
        parts.append(_absent(run.absent["measured"]))
    parts.append('<div class="pair"><div><h4>Where the step goes</h4>')
    breakdowns = {
        name: rows for name, rows in (("predicted", run.predicted_breakdown), ("measured", run.measured_breakdown)) if len(rows)
    }
    if breakdowns:
        caption = "Per rank, on its compute stream; the categories sum to the step."
        parts.append(_figure(drawn, figures.breakdown_figure(breakdowns), caption))
    else:
        parts.append(_absent(run.absent.get("breakdown", "No breakdown was made of this plan.")))
    if run.memory_levels:
        parts.append("<h4>Memory, predicted and measured</h4>")
        parts.append(_figure(drawn, memory_figures.memory_levels_figure(run.memory_levels), _levels_caption(run.memory_levels)))
    parts.append("</div><div><h4>Peak memory by rank</h4>")
    if len(run.memory):
        whole = [row["measured_bytes"] for row in run.memory_levels if row["level"] == "driver"]
        whole = whole if len(whole) == len(run.memory) else []
        caption = "Predicted, by line, against what the device has" + ("; diamonds: measured on the device." if whole else ".")
        parts.append(_figure(drawn, memory_figures.memory_figure(run.memory, device_bytes=whole), caption))
    else:
        parts.append(_absent(run.absent.get("memory", "Memory was not predicted for this plan.")))
    parts.append("</div></div>")
    if run.comparison is None and (run.measured is not None or "comparison" in run.absent):
        parts.append(_absent(run.absent.get("comparison", "The prediction was not compared with the measurement.")))
    elif run.comparison is not None:
        parts.append("<h4>Error by kind of task</h4>")
        caption = "Seconds per step, summed over the tasks of a kind; beside the bars the error of the sum."
        parts.append(_figure(drawn, figures.kinds_figure(run.comparison), caption))
        parts.append(_table(tables.kind_table(run.comparison, title="")))
        furthest = _table(tables.largest_errors_table(run.comparison, title=""))
        parts.append(f'<details class="inner"><summary>Tasks furthest off</summary>{furthest}</details>')
    return "".join(parts) + "</details>"


def _levels_caption(levels: Sequence[Mapping[str, Any]]) -> str:
    text = "Peak of live tensors, counted operator by operator, beside the predicted lines of tensors."
    if any(row["level"] == "reserved" for row in levels):
        return f"{text} What the allocator reserved is compared with these and the line allocator."
    return f"{text} The context of the process and libraries are no tensors: no counter of a CPU sees them."


def _run_name(run: ReportRun) -> str:
    plan = tables.plan_text(run.plan)
    return run.label if plan == tables.NOTHING else f"{run.label} · {plan}"


def _run_title(run: ReportRun) -> str:
    name = f"<strong>{html.escape(_run_name(run))}</strong>"
    if run.comparison is not None:
        error = tables.format_error(run.comparison["relative_error"])
        seconds = (format_seconds(run.comparison["predicted"]), format_seconds(run.comparison["measured"]))
        return f"{name} <span>predicted {seconds[0]}, measured {seconds[1]}, error {error}</span>"
    if run.step_s is not None:
        return f"{name} <span>predicted {format_seconds(run.step_s)} a step</span>"
    if run.predicted is not None:
        return f"{name} <span>predicted {format_seconds(run.predicted.makespan_s)}</span>"
    return name


def _one_step_alone(run: ReportRun) -> str:
    """Why the drawn step is longer than the predicted one; empty where both print alike."""
    if run.step_s is None or run.predicted is None:
        return ""
    alone, in_a_row = format_seconds(run.predicted.makespan_s), format_seconds(run.step_s)
    if alone == in_a_row:
        return ""
    return f" The predicted step is drawn by itself ({alone}). In a row, steps overlap at their ends and take {in_a_row} each."


def _absent(reason: str) -> str:
    return f'<p class="absent">{html.escape(reason)}</p>'


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
    number, height = len(drawn) - 1, figure.layout.height
    text = html.escape(caption)
    entries = {trace.name: _swatch(trace) for trace in figure.data}
    buttons = "".join(
        f'<button type="button" aria-pressed="true" data-trace="{html.escape(name)}">{swatch}{html.escape(name)}</button>'
        for name, swatch in entries.items()
    )
    return (
        f'<figure><div class="legend">{buttons}</div>'
        f'<div class="plot" data-figure="{number}" style="height:{height}px" role="img" aria-label="{text}"></div>'
        f"<figcaption>{text}</figcaption></figure>"
    )


def _swatch(trace: Any) -> str:
    """The mark of a trace in its legend: a square, a hatched square, a dot, a diamond or a dash."""
    marker = trace.marker
    if trace.type == "bar":
        hatched = marker.pattern.shape == "/"
        stripes = f"repeating-linear-gradient(135deg, {marker.pattern.fgcolor} 0 2px, {marker.color} 2px 5px)"
        return f'<i style="background:{stripes if hatched else marker.color}"></i>'
    if marker.symbol == "line-ew":
        return f'<i class="dash" style="border-color:{marker.line.color}"></i>'
    shape = "diamond" if marker.symbol == "diamond" else "dot"
    border = marker.line.color or marker.color
    return f'<i class="{shape}" style="background:{marker.color};border:2px solid {border}"></i>'
