"""report.html: one self-contained page with tables and plotly figures that opens offline.

The first screen has the answer as a sentence and one picture. plotly.js stands in the page once; a content security policy
forbids every request. The page reads on a phone, where table rows become cards, and up to 2,560 pixels, in light and dark.
Every text that comes from a user (component, model and file names) is escaped.
"""

from __future__ import annotations

import html
import importlib.resources
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parsim.errors import require
from parsim.files import write_text_atomically
from parsim.program.taskgraph import TaskGraph
from parsim.report import figures, tables
from parsim.timeline import Timeline
from parsim.units import format_seconds

if TYPE_CHECKING:
    import plotly.graph_objects as go


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRun:
    """One plan that was simulated and, where the machine allows it, run.

    Attributes:
        label: e.g. "dp"; plan: Plan.to_dict() or a text.
        graph, predicted, measured: the program and its timelines (measured: one typical step).
        predicted_breakdown, measured_breakdown: RankBreakdown as dictionaries. memory: RankMemory as dictionaries.
        memory_levels: MemoryLevel as dictionaries: what was measured, each beside what was predicted of the same kind.
        comparison: Comparison.to_dict(). step_s: predicted, the mean of steps in a row. None: not known.
    """

    label: str
    plan: Mapping[str, Any] | str
    graph: TaskGraph
    predicted: Timeline
    predicted_breakdown: Sequence[Mapping[str, Any]]
    memory: Sequence[Mapping[str, Any]]
    measured: Timeline | None = None
    measured_breakdown: Sequence[Mapping[str, Any]] = ()
    memory_levels: Sequence[Mapping[str, Any]] = ()
    comparison: Mapping[str, Any] | None = None
    step_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSection:
    """One model on one cluster.

    Attributes:
        model: its name. title: e.g. "resnet50 on dgx1-v100-32gb". text: what was asked, one paragraph.
        results: PlanResult.to_dict() of every candidate, ranked. chosen: one of them, or its strategy.
    """

    model: str
    title: str
    text: str
    results: Sequence[Mapping[str, Any]]
    chosen: Mapping[str, Any] | str | None
    runs: Sequence[ReportRun]


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
    on_top = data.extra_figures[:1] if not data.sections else ()  # a page of figures alone: its first one
    parts = [_first_picture(data, runs, drawn, on_top)]
    if runs:
        links.insert(0, ("validation", "Predicted against measured"))
        table = _table(tables.validation_table(runs, title=""))
        parts.append(f'<section class="card" id="validation"><h2>Predicted against measured</h2>{table}</section>')
    if data.learning is not None:
        links.append(("learning", "Learning"))
        parts.append(f'<section class="card" id="learning"><h2>Learning</h2>{_figure(drawn, *data.learning)}</section>')
    parts += [_section(section, number, drawn) for number, section in enumerate(data.sections)]
    links.append(("more", "Where the numbers come from"))
    facts = "".join(f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>" for name, value in data.facts)
    parts.append('<section class="card" id="more"><h2>Where the numbers come from</h2>')
    parts.append(f'<dl class="facts">{facts}</dl>' if facts else "")
    parts += [f"<h3>{html.escape(table.title)}</h3>{_table(table)}" for table in data.extra_tables]
    parts += [f"<h3>{html.escape(title)}</h3>{_figure(drawn, *shown)}" for title, *shown in data.extra_figures[len(on_top) :]]
    parts.append("</section>")
    navigation = "".join(f'<a href="#{anchor}">{html.escape(text)}</a>' for anchor, text in links)
    parts.insert(1, f'<nav aria-label="Parts of the page">{navigation}</nav>')
    figures_json = ",".join(figure.to_json() for figure in drawn).replace("<", "\\u003c")
    return standalone_page(
        data.title,
        body="<main>" + "\n".join([_header(data), *parts]) + "</main>\n",
        data=("figures", f"[{figures_json}]"),
        script="report.js",
    )


def _header(data: ReportData) -> str:
    """The answer: the first line of the summary; the others stand below the first picture."""
    answer = html.escape(data.summary[0] if data.summary else data.title)
    return (
        f'<header><div class="bar"><p class="eyebrow">{html.escape(data.title)}</p>'
        '<div class="tools"><button type="button" id="theme" title="Light or dark">Dark</button></div></div>'
        f"<h1>{answer}</h1>"
        "<noscript><p>The tables need nothing; the figures need JavaScript, all of it in this file.</p></noscript></header>"
    )


ROWS_ON_TOP = 12
"""Of each timeline in the first picture: as many as a screen shows below the answer."""


def _first_picture(
    data: ReportData,
    runs: Sequence[tuple[str, str, Mapping[str, Any]]],
    drawn: list[go.Figure],
    on_top: Sequence[tuple[str, go.Figure, str]],
) -> str:
    """Several runs: the error of each. One plan: its timeline. Else the first figure there is. Then the rest of the summary."""
    rest = "".join(f"<p>{html.escape(text)}</p>" for text in data.summary[1:])
    shown = next((run for section in data.sections for run in section.runs), None)
    picture = ""
    if len(runs) > 1:
        caption = (
            "Error of the step, its predicted 90% interval, and in grey how far two halves of the same measurement "
            "differ: an error inside the grey band may be noise."
        )
        picture = _figure(drawn, figures.errors_figure(runs), caption)
    elif shown is not None:
        caption = "One step, a row per rank and stream. All rows are in the part on this plan."
        picture = _figure(drawn, figures.timeline_figure(shown.graph, _timelines(shown), most_rows=ROWS_ON_TOP), caption)
    for title, figure, caption in on_top:
        picture = f"<h2>{html.escape(title)}</h2>{_figure(drawn, figure, caption)}"
    return f'<section class="card hero">{picture}{rest}</section>' if picture or rest else ""


def _timelines(run: ReportRun) -> dict[str, Timeline]:
    several = run.comparison is not None and run.comparison["measured_step_s"]["steps"] > 1
    lines = {"Predicted": run.predicted, "Measured, one step" if several else "Measured": run.measured}
    return {name: line for name, line in lines.items() if line is not None}


def _section(section: ReportSection, number: int, drawn: list[go.Figure]) -> str:
    parts = [f'<section class="card" id="section-{number}"><h2>{html.escape(section.title)}</h2>']
    parts += [f"<p>{html.escape(section.text)}</p>"] if section.text else []
    if len(section.results) == 1:  # a figure would show one bar
        parts += ["<h3>The plan</h3>", _table(tables.strategy_table([tables.alone(section.results[0])], title=""))]
    else:
        caption = "Predicted step time by plan, with its 90% interval; hatched plans do not fit in memory."
        parts += [
            "<h3>Strategies</h3>",
            _table(tables.strategy_table(section.results, chosen=section.chosen, title="")),
            _figure(drawn, figures.strategies_figure(section.results, chosen=section.chosen), caption),
        ]
    parts += [_run(run, drawn, opened=place == 0) for place, run in enumerate(section.runs)]
    return "".join(parts) + "</section>"


def _run(run: ReportRun, drawn: list[go.Figure], *, opened: bool) -> str:
    caption = (
        "A row per rank and stream, time from the start of the step; bars are labelled with their microbatch or "
        "component. Point at one for more, drag to zoom in, double-click to zoom out."
    )
    if run.step_s is not None:
        alone, in_a_row = format_seconds(run.predicted.makespan_s), format_seconds(run.step_s)
        if alone != in_a_row:
            caption += f" The predicted step is drawn by itself ({alone}). In a row, steps overlap at their ends and "
            caption += f"take {in_a_row} each."
    stack = "Predicted, by line: tensors at the bottom, then what the allocator keeps, then the context and libraries."
    if run.memory_levels:
        stack += " A mark is what a counter measured; predicted exactly, it lies above the last line that it sees. "
        stack += " ".join(figures.level_lines(run.memory_levels))
    both = {"predicted": run.predicted_breakdown, "measured": run.measured_breakdown}
    breakdown = figures.breakdown_figure({name: rows for name, rows in both.items() if len(rows)})
    parts = [
        f"<details{' open' if opened else ''}><summary>{_run_title(run)}</summary>",
        "<h4>Timeline of one step</h4>",
        _figure(drawn, figures.timeline_figure(run.graph, _timelines(run)), caption),
        '<div class="pair"><div><h4>Where the step goes</h4>',
        _figure(drawn, breakdown, "Per rank, on its compute stream; the categories sum to the step."),
        "</div><div><h4>Peak memory</h4>",
        _figure(drawn, figures.memory_figure(run.memory, run.memory_levels), stack),
        "</div></div>",
    ]
    if run.comparison is not None:
        furthest = _table(tables.largest_errors_table(run.comparison, title=""))
        kinds = "Seconds per step, summed over the tasks of a kind; beside the bars the error of the sum."
        parts += [
            "<h4>Error by kind of task</h4>",
            _figure(drawn, figures.kinds_figure(run.comparison), kinds),
            _table(tables.kind_table(run.comparison, title="")),
            f'<details class="inner"><summary>Tasks furthest off</summary>{furthest}</details>',
        ]
    return "".join(parts) + "</details>"


def _run_name(run: ReportRun) -> str:
    plan = tables.plan_text(run.plan)
    return run.label if plan == tables.NOTHING else f"{run.label} · {plan}"


def _run_title(run: ReportRun) -> str:
    if run.comparison is not None:
        predicted, measured = (format_seconds(run.comparison[key]) for key in ("predicted", "measured"))
        text = f"predicted {predicted}, measured {measured}, error {tables.format_error(run.comparison['relative_error'])}"
    elif run.step_s is not None:
        text = f"predicted {format_seconds(run.step_s)} a step"
    else:
        text = f"predicted {format_seconds(run.predicted.makespan_s)}"
    return f"<strong>{html.escape(_run_name(run))}</strong> <span>{text}</span>"


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
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
    listing = f'<ul class="notes">{notes}</ul>' if notes else ""
    return f'<div class="table" tabindex="0"><table class="cards">{body}</table></div>{listing}'


def _classes(column: tables.Column, text: str = "", place: int | None = None) -> str:
    flags = {"number": column.numeric, "wraps": column.wraps, "head": place == 0, "long": len(text) > 13}
    names = [name for name, holds in flags.items() if holds]
    return f' class="{" ".join(names)}"' if names else ""


def _cell(text: str) -> str:
    return f'<b class="no">{text}</b>' if text == "NO" else html.escape(text)


def _figure(drawn: list[go.Figure], figure: go.Figure, caption: str) -> str:
    """A place for the figure, as high as it will be, so that the page does not jump while figures are drawn.

    The script puts its legend above it, of buttons that wrap on a phone, and hide and show traces.
    """
    drawn.append(figure)
    text = html.escape(caption)
    place = f'data-figure="{len(drawn) - 1}" style="height:{figure.layout.height}px"'
    return (
        f'<figure><div class="legend"></div><div class="plot" {place} role="img" aria-label="{text}"></div>'
        f"<figcaption>{text}</figcaption></figure>"
    )


# The frame of a page that opens offline: its style, its data, plotly.js and its scripts stand in it once.


POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
"""Forbids every request."""


def asset(name: str) -> str:
    """A file of `parsim/report/assets`."""
    return importlib.resources.files("parsim.report").joinpath("assets", name).read_text("utf-8")


def standalone_page(title: str, *, body: str, data: tuple[str, str], script: str) -> str:
    """A whole HTML page in the look of all pages (page.css, page.js).

    Args: title: a text, which is escaped. body: HTML. data: id of the element that the script reads, and its JSON without "<".
        script: name of the page's own asset.
    """
    require("plotly", "a page with figures")
    from plotly.offline import get_plotlyjs

    plotly_js = get_plotlyjs().replace("</script", "<\\/script")
    code = "".join(f"<script>{text}</script>\n" for text in (plotly_js, asset("page.js"), asset(script)))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{html.escape(title)}</title><style>{asset('page.css')}</style></head>\n"
        f'<body>{body}<script type="application/json" id="{data[0]}">{data[1]}</script>\n{code}</body></html>\n'
    )
