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
from parsim.program.taskgraph import TaskGraph
from parsim.report import figures, tables
from parsim.report import figures as memory_figures
from parsim.timeline import Timeline
from parsim.units import format_seconds

# The style and the script of report.html: nothing in them is fetched, nothing depends on the data.


PAGE_STYLE = """
:root { --ink: #1f2933; --soft: #52606d; --line: #e1e5ea; --accent: #0072B2; --bad: #b34700; }
* { box-sizing: border-box; }
html { scroll-behavior: smooth; -webkit-text-size-adjust: 100%; }
body { margin: 0; background: #f4f6f8; color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 24px 20px 60px; }
header, section { background: white; border: 1px solid var(--line); border-radius: 10px; padding: 22px 26px; margin: 0 0 18px; }
h1 { font-size: 27px; line-height: 1.2; margin: 0 0 8px; letter-spacing: -0.01em; }
h2 { font-size: 20px; line-height: 1.3; margin: 0 0 10px; letter-spacing: -0.005em; }
h3 { font-size: 16px; margin: 18px 0 6px; }
h4 { font-size: 14px; margin: 20px 0 4px; color: var(--ink); }
p { margin: 6px 0; max-width: 78ch; overflow-wrap: anywhere; }
.summary p { font-size: 17px; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(230px, 1fr)); gap: 8px 24px; margin: 16px 0 0;
  padding: 14px 0 0; border-top: 1px solid var(--line); }
.facts dt { font-size: 12px; color: var(--soft); }
.facts dd { margin: 0; overflow-wrap: anywhere; }
nav { display: flex; flex-wrap: wrap; gap: 6px 18px; margin-top: 14px; padding-top: 12px; border-top: 1px solid var(--line); }
a { color: var(--accent); text-decoration: none; }
a:hover, a:focus-visible { text-decoration: underline; }
.table { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: 12.5px; border-bottom: 2px solid var(--line);
  padding: 6px 14px 6px 0; white-space: nowrap; vertical-align: bottom; }
td { padding: 7px 14px 7px 0; border-bottom: 1px solid var(--line); vertical-align: top; white-space: nowrap; }
td.wraps { white-space: normal; min-width: 170px; overflow-wrap: anywhere; }
th.number, td.number { text-align: right; }
tr.chosen td { background: #eaf4fb; font-weight: 600; }
tr.chosen td.wraps { font-weight: 400; }
.no { color: var(--bad); }
.notes { margin: 6px 0 0; padding-left: 18px; color: var(--soft); font-size: 12.5px; }
details { border-top: 1px solid var(--line); margin-top: 18px; padding-top: 4px; }
summary { cursor: pointer; padding: 10px 0; font-size: 15px; }
summary span { color: var(--soft); margin-left: 6px; }
details.inner { margin-top: 8px; }
details.inner summary { font-size: 14px; font-weight: 600; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 2px 0 4px; }
.legend button { display: inline-flex; align-items: center; gap: 6px; border: 0; background: none; padding: 3px 0; margin: 0;
  font: inherit; font-size: 13px; color: var(--ink); cursor: pointer; }
.legend button[aria-pressed=false] { opacity: 0.4; text-decoration: line-through; }
.legend i { width: 13px; height: 13px; flex: none; border-radius: 2px; }
.legend i.dot { border-radius: 50%; width: 11px; height: 11px; }
.legend i.diamond { transform: rotate(45deg); width: 11px; height: 11px; border-radius: 1px; }
.legend i.dash { width: 18px; height: 0; border-top: 2px dotted; border-radius: 0; }
figure { margin: 4px 0 10px; }
.plot { width: 100%; }
figcaption { color: var(--soft); font-size: 12.5px; }
.absent { color: var(--soft); font-style: italic; }
.pair { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 0 28px; }
@media (max-width: 900px) { .pair { grid-template-columns: minmax(0, 1fr); } }
@media (max-width: 640px) {
  main { padding: 0 0 40px; }
  header, section { border-radius: 0; border-left: 0; border-right: 0; padding: 18px 14px; margin-bottom: 10px; }
  h1 { font-size: 23px; }
  .summary p { font-size: 16px; }
  nav { flex-direction: column; }
  summary span { display: block; margin-left: 16px; }
  thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  table, tbody { display: block; width: 100%; }
  tr { display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 4px 12px; border: 1px solid var(--line);
    border-radius: 8px; padding: 9px 12px; margin: 8px 0; }
  tr.chosen { background: #eaf4fb; border-color: #b5d8ee; }
  tr.chosen td { background: none; }
  td, td.number, td.wraps { display: block; padding: 0; border: 0; text-align: left; white-space: normal; min-width: 0; }
  td::before { content: attr(data-label); display: block; color: var(--soft); font-weight: 400; font-size: 11.5px; }
  td.long { grid-column: span 2; }
  td.wraps, td.head { grid-column: 1 / -1; }
  td.head { font-weight: 600; font-size: 15px; }
  td.head::before { display: none; }
}
@media (min-width: 1900px) {
  body { font-size: 17px; }
  main { max-width: 1760px; }
  table { font-size: 15.5px; }
  th, .notes, figcaption { font-size: 14.5px; }
  .legend button { font-size: 14.5px; }
}
@media print {
  body { background: white; }
  main { padding: 0; }
  header, section { border: 0; padding: 0 0 14px; }
  figure, tr, h2, h3, h4 { break-inside: avoid; }
  h2, h3, h4 { break-after: avoid; }
  .table { overflow: visible; }
  table { font-size: 9.5px; }
  th, td { font-size: 9.5px; padding: 3px 6px 3px 0; white-space: normal; }
  td.wraps { min-width: 0; }
}
"""

PAGE_SCRIPT = """
(function () {
  "use strict";
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const config = {responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"]};
  let busy = false;
  function next() {
    const place = [...document.querySelectorAll(".plot:not([data-drawn])")].find((div) => div.offsetParent !== null);
    if (!place) { busy = false; document.body.dataset.ready = "true"; return; }
    busy = true;
    place.dataset.drawn = "true";
    const figure = figures[Number(place.dataset.figure)];
    const narrow = window.matchMedia("(max-width: 640px)").matches;
    if (narrow) { figure.layout.font.size = 11; figure.layout.dragmode = false; }
    else if (window.matchMedia("(min-width: 1900px)").matches) figure.layout.font.size = 15;
    Plotly.newPlot(place, figure.data, figure.layout, narrow ? {...config, displayModeBar: false} : config)
      .then(() => window.setTimeout(next, 0));
  }
  document.querySelectorAll(".legend button").forEach((button) => button.addEventListener("click", () => {
    const plot = button.closest("figure").querySelector(".plot");
    const shown = button.getAttribute("aria-pressed") !== "true";
    const numbers = plot.data.flatMap((trace, number) => trace.name === button.dataset.trace ? [number] : []);
    Plotly.restyle(plot, {visible: shown}, numbers);
    button.setAttribute("aria-pressed", String(shown));
  }));
  document.querySelectorAll("details").forEach((details) => details.addEventListener("toggle", () => { if (!busy) next(); }));
  next();
})();
"""


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
