"""Plotly figures from timelines and from the dictionaries that JSON results hold.

Every figure keeps one trace per kind or category, however many spans it draws.
"""

from __future__ import annotations

import html
import itertools
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from parsim.costs.history import LEVEL, Judged, ValidationRecord, judged_split, records_needed, shares_by_level
from parsim.errors import require
from parsim.predict.memory import NOT_TENSORS
from parsim.program.taskgraph import TaskGraph, parse_resource
from parsim.report.legend import (
    BLUE,
    CATEGORY_COLOURS,
    CLEAR,
    GREY,
    INK,
    KIND_COLOURS,
    MEMORY_COLOURS,
    METRICS,
    ORANGE,
    SERIES,
    VERMILION,
    axis_name,
    axis_scale,
    value_name,
)
from parsim.report.tables import (
    CATEGORIES,
    NOTHING,
    format_error,
    interval_texts,
    is_chosen,
    line_name,
    memory_lines,
    plan_text,
)
from parsim.report.trace import stream_order, task_label
from parsim.timeline import Timeline
from parsim.units import format_bytes, format_seconds
from parsim.work import kind_of

require("plotly", "a page with figures")

import plotly.graph_objects as go  # noqa: E402
from plotly.subplots import make_subplots  # noqa: E402

PREDICTED, MEASURED = BLUE, "#4a5560"

ROW_PX = 20
MAX_ROWS = 96
PICTURE_ROWS = 24
MAX_BARS = 8000
MAX_LABELLED_BARS = 600
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


@dataclass(frozen=True, slots=True)
class Bar:
    """One rectangle of a timeline: one span, or many that are too short to be drawn apart."""

    row: int
    kind: str
    start_s: float
    end_s: float
    hover: str
    label: str


def timeline_figure(graph: TaskGraph, timelines: Mapping[str, Timeline], *, most_rows: int = MAX_ROWS) -> go.Figure:
    """Gantt chart of one or more timelines of `graph` on one time axis: a row per rank and stream, coloured by kind.

    Beyond `most_rows` rows the first ranks are shown and the axis says so; beyond MAX_BARS spans, neighbours of one kind
    closer than a pixel are drawn as one bar.
    """
    resources = {parse_resource(name) for timeline in timelines.values() for name in timeline.resources}
    ordered = sorted(resources, key=lambda resource: (resource.rank, *stream_order(resource.stream)))
    shown = ordered
    if len(ordered) > most_rows:
        shown = [place for place in ordered if place.rank < max(ordered[0].rank + 1, ordered[most_rows].rank)]
    row = {str(resource): number for number, resource in enumerate(shown)}
    longest_s = max((timeline.makespan_s for timeline in timelines.values()), default=0.0)
    scale, unit = axis_scale("time", longest_s)
    panel = max(3, len(shown)) * ROW_PX
    gap = 34
    height = len(timelines) * panel + (len(timelines) - 1) * gap
    part = f", ranks 0-{shown[-1].rank} of {graph.world_size}" if len(shown) < len(ordered) else ""
    titles = [
        f"<b>{html.escape(name)}</b>  {format_seconds(timeline.makespan_s)}{part}" for name, timeline in timelines.items()
    ]
    figure = make_subplots(rows=len(timelines), cols=1, shared_xaxes=True, vertical_spacing=gap / height, subplot_titles=titles)
    figure.update_annotations(x=0, xanchor="left", font={"size": 13, "color": INK})
    legend: set[str] = set()
    for number, timeline in enumerate(timelines.values(), start=1):
        bars = _labelled_once([bar for bar in _bars(graph, timeline, row) if bar.row >= 0])
        if len(bars) > MAX_BARS:
            bars = _merged(bars, longest_s / 2000)
        for kind in [*KIND_COLOURS, *sorted({bar.kind for bar in bars} - KIND_COLOURS.keys())]:
            of_kind = [bar for bar in bars if bar.kind == kind]
            if of_kind:
                figure.add_trace(_gantt_trace(kind, of_kind, scale, kind not in legend, len(bars)), row=number, col=1)
                legend.add(kind)
    ranks = [resource.rank for resource in shown]
    lines = [number - 0.5 for number in range(1, len(shown)) if ranks[number] != ranks[number - 1]]
    names = []
    for resource in shown:  # `r0 compute`, `r0 → r1`, `r1 ← r0`
        way = {"pp>": "→ r", "pp<": "← r"}.get(resource.stream[:3])
        names.append(f"r{resource.rank} {html.escape(resource.stream) if way is None else way + resource.stream[3:]}")
    _label_rows(figure, names, showgrid=False, zeroline=False, tickfont={"size": 11})
    figure.update_yaxes(minor={"tickvals": lines, "showgrid": True, "gridcolor": "#d5dae0"})
    figure.update_xaxes(range=[0, longest_s / scale * 1.005 or 1], zeroline=False, ticksuffix=f" {unit}")
    figure.update_layout(barmode="overlay", uniformtext={"minsize": 8, "mode": "hide"})
    return styled(figure, height + 60, top=30)


def _label_rows(figure: go.Figure, labels: Sequence[str], **settings: Any) -> None:
    figure.update_yaxes(
        tickvals=list(range(len(labels))),
        ticktext=list(labels),
        range=[len(labels) - 0.5, -0.5],
        automargin=True,
        fixedrange=True,
        **settings,
    )


def error_bars(above: Sequence[float], below: Sequence[float], colour: str, width: float, **settings: Any) -> dict[str, Any]:
    """How far an interval reaches on both sides of a point."""
    bars = {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "color": colour, "width": width}
    return {**bars, **settings}


CUT_AT = 1.25
"""Times the longest interval of a plan that fits: further the axis of plans does not go."""
LABEL_WIDTH = 24
"""Letters in a line of a label beside a bar."""


def strategies_figure(results: Sequence[Mapping[str, Any]], *, chosen: Mapping[str, Any] | str | None = None) -> go.Figure:
    """Step time with its 90% interval per PlanResult.to_dict(), best first as given.

    Plans that fit set the length of the axis. A longer bar of one that does not ends at the edge, and says its time.
    """
    longest_s = max((result["step_s"]["p95"] for result in results if result["fits"]), default=math.inf)
    steps_s = [result["step_s"]["median"] for result in results]
    edge_s = min(CUT_AT * longest_s, max(steps_s, default=0.0))
    scale, unit = axis_scale("time", edge_s)
    groups: dict[str, list[int]] = {"chosen": [], "fits": [], "does not fit": []}
    for number, result in enumerate(results):
        marked = is_chosen(result, chosen) and not groups["chosen"]
        groups["does not fit" if not result["fits"] else "chosen" if marked else "fits"].append(number)
    colours = {"chosen": BLUE, "fits": "#9fb7c9", "does not fit": "#f3d3c1"}
    plans = [plan_text(result.get("plan")) for result in results]
    figure = go.Figure()
    for group, numbers in groups.items():
        if not numbers:
            continue
        steps = [results[number]["step_s"] for number in numbers]
        scales = [math.nan if step["median"] > edge_s else scale for step in steps]  # a bar that is cut has no interval
        above = [(step["p95"] - step["median"]) / each for step, each in zip(steps, scales, strict=True)]
        below = [(step["median"] - step["p05"]) / each for step, each in zip(steps, scales, strict=True)]
        cut = [f"{format_seconds(step['median'])} →" if step["median"] > edge_s else "" for step in steps]
        figure.add_bar(
            name=group,
            orientation="h",
            y=numbers,
            x=[min(step["median"], edge_s) / scale for step in steps],
            base=[0.0] * len(cut) if any(cut) else None,
            text=cut if any(cut) else None,
            textposition="inside",
            textangle=0,
            insidetextanchor="middle",
            textfont={"color": INK},
            error_x=error_bars(above, below, INK, 4, thickness=1.2),
            marker={
                "color": colours[group],
                "pattern": {"shape": "/" if group == "does not fit" else "", "fgcolor": VERMILION, "size": 6},
            },
            customdata=[
                [html.escape(plans[number]), *interval_texts(step)] for number, step in zip(numbers, steps, strict=True)
            ],
            hovertemplate="%{customdata[0]}<br>%{customdata[1]} (%{customdata[2]})<extra></extra>",
        )
    _label_rows(figure, [_two_lines(str(result["strategy"]), plan) for result, plan in zip(results, plans, strict=True)])
    figure.update_xaxes(rangemode="tozero", zeroline=False, ticksuffix=f" {unit}")
    figure.update_layout(barmode="overlay", bargap=0.35)
    return styled(figure, _labelled_height(plans))


LEARNT = 400
"""Points of a curve of losses, each the mean over as many steps as it takes."""


def learning_figure(
    lines: Sequence[Mapping[str, Any]],
    *,
    step_s: float | None = None,
    beside: Mapping[str, tuple[Sequence[Mapping[str, Any]], float | None]] | None = None,
) -> go.Figure:
    """Loss over steps and over seconds, and the scores of validations, of a training or of several.

    Args: lines: of metrics.jsonl: step, seconds, and where there are any loss and validation. step_s: seconds of a step as
        predicted: the same losses over predicted time. beside: lines and step_s of other trainings, by name.
    """
    trainings = {"": (lines, step_s), **(beside or {})}
    looks = [line["validation"] for own, _ in trainings.values() for line in own if isinstance(line.get("validation"), Mapping)]
    names = dict.fromkeys(name for look in looks for name, value in look.items() if isinstance(value, float))
    shown = ["loss", *(name for name in names if name != "loss")]
    figure = make_subplots(rows=len(shown), cols=2, shared_yaxes="rows", horizontal_spacing=0.03, vertical_spacing=0.12)
    others = [colour for colour in SERIES if colour not in (BLUE, VERMILION)]
    for number, (name, (own, own_step_s)) in enumerate(trainings.items()):
        colours = (BLUE, VERMILION, GREY) if not number else 3 * (others[(number - 1) % len(others)],)
        for column, curve in _learning_curves(own, own_step_s, shown, colours, f" of {name}" if name else ""):
            figure.add_trace(curve, row=1 + shown.index(curve.meta), col=column)
    for row, name in enumerate(shown, 1):
        figure.update_yaxes(title_text=name, row=row, col=1)
    figure.update_xaxes(title_text="step", title_standoff=4, row=len(shown), col=1)
    figure.update_xaxes(title_text="seconds of steps", title_standoff=4, row=len(shown), col=2)
    return styled(figure, 60 + 240 * len(shown), bottom=TITLED)


def _learning_curves(
    lines: Sequence[Mapping[str, Any]], step_s: float | None, shown: Sequence[str], colours: Sequence[str], of: str
) -> Iterator[tuple[int, go.Scatter]]:
    """The curves of one training, each with its column, and with what it shows as its `meta`. colours: of losses, scores and
    predicted time."""
    seconds = np.cumsum([float(line.get("seconds", 0.0)) for line in lines])
    counted = [(number, line) for number, line in enumerate(lines) if math.isfinite(line.get("loss", math.nan))]
    parts = [part for part in np.array_split(np.arange(len(counted)), min(LEARNT, len(counted))) if len(part)]
    losses = [float(np.mean([counted[place][1]["loss"] for place in part])) for part in parts]
    last = [counted[part[-1]] for part in parts]
    steps = [line["step"] for _, line in last]
    yield 1, _curve(f"loss of training{of}", steps, losses, colours[0], meta="loss")
    yield 2, _curve(f"measured seconds{of}", [float(seconds[number]) for number, _ in last], losses, colours[0], meta="loss")
    if step_s is not None:
        predicted = _curve(f"predicted seconds{of}", [step * step_s for step in steps], losses, colours[2], meta="loss")
        yield 2, predicted.update(line_dash="dot") if of else predicted
    looks = [(number, line) for number, line in enumerate(lines) if isinstance(line.get("validation"), Mapping)]
    for name in shown:
        scores = [(number, line, line["validation"][name]) for number, line in looks if name in line["validation"]]
        places = [line["step"] for _, line, _ in scores], [float(seconds[number]) for number, _, _ in scores]
        for column, x in enumerate(places if scores else (), 1):
            values = [score for _, _, score in scores]
            yield column, _curve(f"{name} of validation{of}", x, values, colours[1], mode="lines+markers", meta=name)


def scatter_figure(panels: Mapping[str, Sequence[tuple[str, float, float]]], *, x: str, y: str) -> go.Figure:
    """Points (name, x, y) in a panel each, one colour per name; x over a logarithmic axis. x, y: what the axes show."""
    figure = make_subplots(rows=1, cols=len(panels), shared_yaxes="rows", horizontal_spacing=0.03, subplot_titles=list(panels))
    names = list(dict.fromkeys(name for points in panels.values() for name, _, _ in points))
    for column, points in enumerate(panels.values(), 1):
        for name, colour in zip(names, itertools.cycle(SERIES)):
            own = [(across, up) for label, across, up in points if label == name and across > 0]
            if own:
                across, up = zip(*own, strict=True)
                figure.add_trace(_curve(name, across, up, colour, mode="markers"), row=1, col=column)
        figure.update_xaxes(title_text=x, title_standoff=4, type="log", row=1, col=column)
    figure.update_yaxes(title_text=y, row=1, col=1)
    return styled(figure, 380, bottom=TITLED)


def target_figure(curves: Mapping[str, Sequence[tuple[float, float]]], target: float, title: str) -> go.Figure:
    """Accuracy over simulated seconds, a curve of (seconds, score) per way of training; the target as a line."""
    figure = go.Figure()
    for name, points in curves.items():
        if points:
            seconds, scores = zip(*points, strict=True)
            figure.add_scatter(x=list(seconds), y=list(scores), name=name, mode="lines")
    figure.add_hline(y=target, line_dash="dash")
    return figure.update_layout(title=title, xaxis_title="simulated seconds", yaxis_title="test accuracy")


TITLED = 48
"""Pixels below a plot whose axis has a title."""


def _curve(
    name: str, x: Sequence[float], y: Sequence[float], colour: str, *, mode: str = "lines", meta: str | None = None
) -> go.Scatter:
    line, marker = {"color": colour, "width": 1.5}, {"color": colour}  # the legend shows the marker's
    return go.Scatter(name=name, x=list(x), y=list(y), mode=mode, line=line, marker=marker, meta=meta)


def breakdown_figure(breakdowns: Mapping[str, Sequence[Mapping[str, Any]]]) -> go.Figure:
    """Categories of the step per rank, stacked; {"predicted": [...], "measured": [...]} stand one above the other."""
    rows = [(rank["rank"], name, rank) for name, ranks in breakdowns.items() for rank in ranks]
    rows.sort(key=lambda row: row[0])
    scale, unit = axis_scale("time", max((sum(rank[key] for key in CATEGORIES) for _, _, rank in rows), default=0.0))
    figure = go.Figure()
    for key, name in CATEGORIES.items():
        seconds = [rank[key] for _, _, rank in rows]
        if not any(seconds):
            continue
        figure.add_bar(
            name=name,
            orientation="h",
            y=list(range(len(rows))),
            x=[value / scale for value in seconds],
            marker={"color": CATEGORY_COLOURS[key]},
            customdata=[format_seconds(value) for value in seconds],
            hovertemplate=f"{name}<br>%{{customdata}}<extra></extra>",
        )
    several = len(breakdowns) > 1
    labels = [html.escape(f"rank {rank} {name}" if several else f"rank {rank}") for rank, name, _ in rows]
    _label_rows(figure, labels, tickfont={"size": 11})
    figure.update_xaxes(zeroline=False, ticksuffix=f" {unit}")
    figure.update_layout(barmode="stack", bargap=0.3, legend={"traceorder": "normal"})
    return styled(figure, 34 * max(2, len(rows)) + 50)


def kinds_figure(comparison: Mapping[str, Any]) -> go.Figure:
    """Predicted and measured seconds per kind of task, from Comparison.to_dict(); the error stands at the bars' end."""
    kinds = comparison["kinds"]
    scale, unit = axis_scale(
        "time", max((row[name] for row in kinds.values() for name in ("predicted", "measured")), default=0.0)
    )
    figure = go.Figure()
    for name, colour in (("predicted", PREDICTED), ("measured", MEASURED)):
        figure.add_bar(
            name=name,
            orientation="h",
            y=list(kinds),
            x=[row[name] / scale for row in kinds.values()],
            marker={"color": colour},
            text=[format_error(row["relative_error"]) if name == "predicted" else "" for row in kinds.values()],
            textposition="outside",
            cliponaxis=False,
            customdata=[f"{format_seconds(row[name])} in {row['count']} tasks" for row in kinds.values()],
            hovertemplate=f"{name} %{{y}}<br>%{{customdata}}<extra></extra>",
        )
    figure.update_yaxes(autorange="reversed", automargin=True, fixedrange=True)
    figure.update_xaxes(zeroline=False, ticksuffix=f" {unit}", rangemode="tozero")
    figure.update_layout(barmode="group", bargap=0.3, bargroupgap=0.05)
    return styled(figure, 46 * max(2, len(kinds)) + 50)


def errors_figure(runs: Sequence[tuple[str, str, Mapping[str, Any]]]) -> go.Figure:
    """Error of the step per (model, plan, Comparison.to_dict()), with its predicted interval and the A/A floor."""
    defined = [(model, plan, run) for model, plan, run in runs if run["relative_error"] is not None]
    numbers = list(range(len(defined)))
    floors = [100 * (run["aa_floor"]["p95"] if run.get("aa_floor") else 0.0) for _, _, run in defined]
    figure = go.Figure()
    if any(floors):
        figure.add_bar(
            name="A/A floor (p95)",
            orientation="h",
            y=numbers,
            base=[-floor for floor in floors],
            x=[2 * floor for floor in floors],
            width=0.7,
            marker={"color": "#dfe3e8"},
            hovertemplate="A/A floor ±%{customdata}<extra></extra>",
            customdata=[f"{floor:.1f}%" for floor in floors],
        )
    above, below = [], []
    for _, _, run in defined:
        interval = run.get("predicted_step_s") or {"p05": run["predicted"], "p95": run["predicted"]}
        above.append(100 * (interval["p95"] - run["predicted"]) / run["measured"])
        below.append(100 * (run["predicted"] - interval["p05"]) / run["measured"])
    figure.add_scatter(
        name="error, with the predicted 90% interval",
        x=[100 * run["relative_error"] for _, _, run in defined],
        y=numbers,
        mode="markers",
        marker={"color": BLUE, "size": 10},
        error_x=error_bars(above, below, BLUE, 5),
        customdata=[
            [format_error(run["relative_error"]), format_seconds(run["predicted"]), format_seconds(run["measured"])]
            for _, _, run in defined
        ],
        hovertemplate="error %{customdata[0]}<br>predicted %{customdata[1]}<br>measured %{customdata[2]}<extra></extra>",
    )
    _label_rows(figure, [_two_lines(model, plan) for model, plan, _ in defined], showgrid=False, zeroline=False)
    figure.update_xaxes(zeroline=True, zerolinecolor=INK, zerolinewidth=1.5, zerolinelayer="above traces", ticksuffix="%")
    figure.update_xaxes(title="error of the predicted step")
    return styled(figure, _labelled_height([plan for _, plan, _ in defined]))


def _bars(graph: TaskGraph, timeline: Timeline, row: Mapping[str, int]) -> list[Bar]:
    """One bar per span; row -1 where the resource is not shown. Labelled by microbatch, or by component if there is one."""
    bars = []
    several = len({task.origin.microbatch for task in graph.tasks} - {None}) > 1
    for span in timeline:
        task = graph.tasks[span.task]
        size = getattr(task.work, "size_bytes", None)
        facts = [html.escape(task_label(task)), format_seconds(span.duration_s)]
        facts += [] if size is None else [format_bytes(size)]
        facts.append(f"from {format_seconds(span.start_s)}, on {html.escape(span.resource)}")
        origin = task.origin
        label = origin.microbatch if several else origin.component if origin.bucket is None else origin.bucket
        text, place = "" if label is None else html.escape(str(label)), row.get(span.resource, -1)
        bars.append(Bar(place, kind_of(task.work), span.start_s, span.end_s, "<br>".join(facts), text))
    return bars


def _labelled_once(bars: Sequence[Bar]) -> list[Bar]:
    """Of neighbours with one label the middle one keeps it."""
    labelled: list[Bar] = []
    ordered = sorted(bars, key=lambda bar: (bar.row, bar.start_s))
    for _, group in itertools.groupby(ordered, key=lambda bar: (bar.row, bar.kind, bar.label)):
        alike = list(group)
        labelled += [bar if place == len(alike) // 2 else replace(bar, label="") for place, bar in enumerate(alike)]
    return labelled


def _merged(bars: Sequence[Bar], resolution_s: float) -> list[Bar]:
    """Neighbours on one row, of one kind and nearer than `resolution_s`, as one bar that says how many it stands for."""
    merged: list[Bar] = []
    counts: list[int] = []
    last: dict[int, int] = {}
    for bar in sorted(bars, key=lambda bar: (bar.row, bar.start_s)):
        place = last.get(bar.row)
        if place is not None and merged[place].kind == bar.kind and bar.start_s - merged[place].end_s < resolution_s:
            counts[place] += 1
            end_s = max(merged[place].end_s, bar.end_s)
            length = format_seconds(end_s - merged[place].start_s)
            hover = f"{counts[place]} {bar.kind} tasks<br>{length}"
            merged[place] = Bar(bar.row, bar.kind, merged[place].start_s, end_s, hover, "")
        else:
            last[bar.row] = len(merged)
            merged.append(bar)
            counts.append(1)
    return merged


def _gantt_trace(kind: str, bars: Sequence[Bar], scale: float, in_legend: bool, total: int) -> go.Bar:
    labelled = total <= MAX_LABELLED_BARS
    return go.Bar(
        name=kind,
        legendgroup=kind,
        showlegend=in_legend,
        orientation="h",
        y=[bar.row for bar in bars],
        base=[bar.start_s / scale for bar in bars],
        x=[(bar.end_s - bar.start_s) / scale for bar in bars],
        width=0.86,
        marker={"color": KIND_COLOURS.get(kind, GREY), "line": {"width": 0.5 if labelled else 0, "color": "#FFFFFF"}},
        text=[bar.label for bar in bars] if labelled else None,
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        constraintext="inside",
        insidetextfont={"size": 10},
        customdata=[bar.hover for bar in bars],
        hovertemplate="%{customdata}<extra></extra>",
    )


def _small_lines(text: str) -> list[str]:
    return textwrap.wrap(text, LABEL_WIDTH, break_long_words=False)


def _labelled_height(explained: Sequence[str]) -> int:
    """The height of a figure with a row for each label of `_two_lines`, whose second parts are given."""
    most = max([1, *(len(_small_lines(text)) for text in explained)])
    return (30 + 14 * most) * max(2, len(explained)) + 50


def _two_lines(first: str, second: str) -> str:
    """A name and what explains it, in small lines that leave room for the bars on a narrow screen."""
    small = "<br>".join(html.escape(line) for line in _small_lines(second))
    return f'{html.escape(first)}<br><span style="font-size:11px">{small}</span>'


def styled(figure: go.Figure, height: int, *, top: int = 12, bottom: int = 30) -> go.Figure:
    """Common look; `height` in pixels is that of the plot with its axes, the legend apart. Pages add their colours."""
    figure.update_xaxes(gridcolor="#e8ebee", automargin=True)
    figure.update_yaxes(gridcolor="#e8ebee", automargin=True)
    figure.update_layout(
        template=go.layout.Template(),
        height=height,
        margin={"l": 8, "r": 36, "t": top, "b": bottom},
        font={"family": FONT, "size": 12, "color": INK},
        plot_bgcolor="rgba(0,0,0,0)",
    )
    return figure


LEVEL_NAMES = {
    "live": "live tensors",
    "allocated": "allocated blocks",
    "reserved": "reserved by the allocator",
    "driver": "the whole device",
}
"""The counters of `parsim.report.tables.memory_levels`, as a reader meets them."""
LEVEL_MARKS = {"live": "diamond", "allocated": "square", "reserved": "triangle-up", "driver": "circle"}


def memory_figure(memory: Sequence[Mapping[str, Any]], levels: Sequence[Mapping[str, Any]] = ()) -> go.Figure:
    """Predicted peak memory per rank, stacked by line, against the device's, with what each counter measured.

    Tensors lie at the bottom, then what the allocator keeps, then the rest. So the mark of a counter that was predicted exactly
    lies on the border above the last line that it sees.

    Args: memory: RankMemory as dictionaries. levels: MemoryLevel as dictionaries, of the same ranks.
    """
    amounts = [memory_lines(rank) for rank in memory]
    names = sorted(dict.fromkeys(name for lines in amounts for name in lines), key=lambda name: _ABOVE.get(name, 0))
    highest = max([*(sum(lines.values()) for lines in amounts), *(row["measured_bytes"] for row in levels)], default=0)
    scale, unit = axis_scale("bytes", highest)
    ranks = [f"rank {rank['rank']}" for rank in memory]
    figure = go.Figure()
    for name in names:
        values = [lines.get(name, 0) for lines in amounts]
        if not any(values):
            continue
        shown = html.escape(line_name(name))
        figure.add_bar(
            name=shown,
            x=ranks,
            y=[value / scale for value in values],
            marker={"color": MEMORY_COLOURS.get(name, GREY)},
            customdata=[format_bytes(value) for value in values],
            hovertemplate=f"%{{x}} {shown}<br>%{{customdata}}<extra></extra>",
        )
    for level, name in LEVEL_NAMES.items():
        rows = [row for row in levels if row["level"] == level]
        if rows:
            figure.add_scatter(
                name=f"measured: {name}",
                x=[f"rank {row['rank']}" for row in rows],
                y=[row["measured_bytes"] / scale for row in rows],
                mode="markers",
                marker={"symbol": LEVEL_MARKS[level], "size": 11, "color": "#FFFFFF", "line": {"color": INK, "width": 2}},
                customdata=[_level_text(row) for row in rows],
                hovertemplate=f"%{{x}}, {name}<br>%{{customdata}}<extra></extra>",
            )
    limits = [rank.get("limit_bytes") for rank in memory]
    known = [limit for limit in limits if limit is not None]
    title = unit
    if known and max(known) <= 4 * highest:
        figure.add_scatter(
            name="the device has",
            x=ranks,
            y=[None if limit is None else limit / scale for limit in limits],
            mode="lines+markers" if len(ranks) > 1 else "markers",
            marker={"symbol": "line-ew", "size": 26, "line": {"color": INK, "width": 2}},
            line={"color": INK, "dash": "dot", "width": 1.5},
            customdata=["" if limit is None else format_bytes(limit) for limit in limits],
            hovertemplate="%{x}: the device has %{customdata}<extra></extra>",
        )
    elif known:
        title += f" (the device has {format_bytes(min(known))})"
    figure.update_yaxes(title=title, rangemode="tozero", zeroline=False, fixedrange=True)
    figure.update_xaxes(type="category", fixedrange=True, showgrid=False)
    figure.update_layout(barmode="stack", bargap=0.4 if len(ranks) > 2 else 0.65)
    return styled(figure, 330)


_ABOVE = {"allocator": 1, **dict.fromkeys((name for name in NOT_TENSORS if name != "allocator"), 2)}
"""Lines that no counter of tensors sees, by how high they lie in the stack; tensors lie below."""


def level_lines(levels: Sequence[Mapping[str, Any]]) -> list[str]:
    """Per counter one sentence: of the rank that is furthest off."""
    worst: dict[str, Mapping[str, Any]] = {}
    for row in levels:
        if row["level"] not in worst or abs(row["relative_error"]) > abs(worst[row["level"]]["relative_error"]):
            worst[row["level"]] = row
    return [f"Rank {row['rank']}, {LEVEL_NAMES[level]}: {_level_text(row)}." for level, row in worst.items()]


def _level_text(row: Mapping[str, Any]) -> str:
    predicted, measured = format_bytes(row["predicted_bytes"]), format_bytes(row["measured_bytes"])
    return f"predicted {predicted}, measured {measured}, error {format_error(row['relative_error'])}"


# The curve of a sweep.


MOST_LINES = 12
MOST_PLACES = 40
"""Different values of a field that a line joins; more are those of a sample, of which every point is a mark."""


def sweep_figure(
    rows: Sequence[Mapping[str, Any]], keys: Sequence[str], *, column: str = "", picked: int | None = None
) -> go.Figure:
    """A figure of the points along one swept field, a line for each value of another one, with 90% intervals.

    Where several points share a place, the best is drawn. Points that do not fit or failed are left out.

    Args: rows: per point, the columns of a sweep's table. keys: the swept fields. column: of METRICS; otherwise the throughput.
        picked: number of the row to ring.
    """
    metric = next((each for each in METRICS if each.column == column), METRICS[0])
    answered = [row for row in rows if row["status"] == "ok" and row.get(metric.column) is not None]
    several = [key for key in keys if len({str(row[key]) for row in answered}) > 1] or list(keys)
    numeric = [key for key in several if all(isinstance(row[key], int | float) for row in answered)]
    along = next(iter(numeric), several[0])
    split = next((key for key in sorted(several, key=lambda key: key in numeric) if key != along), "")
    scale, unit = axis_scale(metric.kind, max((abs(row[metric.column]) for row in answered), default=0.0))
    places = sorted({row[along] for row in answered}) if along in numeric else []
    is_sampled = len(places) > MOST_PLACES

    def place(row: Mapping[str, Any]) -> Any:
        return row[along] if along in numeric else html.escape(value_name(row[along]))

    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in answered:
        lines.setdefault(f"{axis_name(split)} {value_name(row[split])}" if split else metric.name, []).append(row)
    if is_sampled:
        lines = {metric.name: answered}
    figure = go.Figure()
    for number, (name, points) in enumerate(itertools.islice(lines.items(), MOST_LINES)):
        best: dict[Any, Mapping[str, Any]] = {}
        for row in points:
            here = best.get(place(row))
            if here is None or (row[metric.column] < here[metric.column]) == (metric.best == "min"):
                best[place(row)] = row
        shown = sorted(best.values(), key=lambda row: row[along]) if along in numeric else list(best.values())
        below, above = (
            [abs(row.get(end, row[metric.column]) - row[metric.column]) / scale for row in shown]
            for end in metric.ends() or (metric.column, metric.column)
        )
        colour = SERIES[number % len(SERIES)]
        figure.add_scatter(
            name=html.escape(name),
            x=[place(row) for row in shown],
            y=[row[metric.column] / scale for row in shown],
            mode="markers" if is_sampled else "lines+markers",
            line={"color": colour, "width": 2},
            marker={"color": colour, "size": 8},
            error_y=None if is_sampled else error_bars(above, below, colour, 3, thickness=1.2),
        )
    ringed = [row for row in answered if picked is not None and row["point"] == picked]
    if ringed:
        mark = {"symbol": "circle", "size": 17, "color": CLEAR, "line": {"color": INK, "width": 2}}
        x, y = [place(row) for row in ringed], [row[metric.column] / scale for row in ringed]
        figure.add_trace(go.Scatter(name="picked", x=x, y=y, mode="markers", marker=mark))
    wide = bool(places) and places[0] > 0 and places[-1] >= 6 * places[0]
    few = {"tickvals": places, "ticktext": [f"{each:g}" for each in places]} if 0 < len(places) <= MOST_LINES else {}
    left_out = len(lines) - MOST_LINES
    more = f"; {left_out} more values of {axis_name(split).lower()} are not drawn" if left_out > 0 else ""
    figure.update_xaxes(title=axis_name(along) + more, type="log" if wide else None, **few)
    figure.update_yaxes(title=f"{metric.name} ({unit})", rangemode="tozero")
    return styled(figure, 420, bottom=TITLED)


# How often predicted intervals held.


LEVELS = tuple(number / 20 for number in range(1, 20))
COVERAGE_PX = 340


def coverage_figures(records: Sequence[ValidationRecord]) -> list[tuple[str, go.Figure, str]]:
    """(title, figure, caption) of both figures. One without enough records to show something is left out."""
    if len(records) < 2:
        return []
    intervals = (
        "Every validation: its interval, corrected by records of other runs and other models, and the measured step. Both are "
        "relative to the predicted median, in order of the measured step."
    )
    levels = (
        "How many measured steps lay inside intervals of every nominal level. On the diagonal an interval of 90% holds 90% of "
        "them; below it intervals are too narrow."
    )
    figures = [("Predicted intervals and measured steps", intervals_figure(judged_split(records)), intervals)]
    if len(records) >= records_needed():
        figures.append(("Nominal and empirical coverage", levels_figure(records), levels))
    return figures


def intervals_figure(rows: Sequence[Judged]) -> go.Figure:
    """Interval and measured step of every judged record in percent of its median, ordered by the measured step."""
    ordered = sorted(rows, key=lambda row: row.record.measured_s / row.record.predicted_s)
    places = list(range(1, len(ordered) + 1))
    above = [100 * (row.high_s / row.record.predicted_s - 1) for row in ordered]
    below = [100 * (1 - row.low_s / row.record.predicted_s) for row in ordered]
    figure = go.Figure()
    figure.add_scatter(
        name="corrected 90% interval",
        x=places,
        y=[0.0] * len(ordered),
        mode="markers",
        marker={"color": BLUE, "size": 3},
        error_y=error_bars(above, below, BLUE, 2, thickness=1.2),
        hoverinfo="skip",
    )
    for name, colour, covered in (("measured, inside", INK, True), ("measured, outside", VERMILION, False)):
        chosen = [(place, row.record) for place, row in zip(places, ordered, strict=True) if row.covered is covered]
        if chosen:
            figure.add_scatter(
                name=name,
                x=[place for place, _ in chosen],
                y=[100 * (record.measured_s / record.predicted_s - 1) for _, record in chosen],
                mode="markers",
                marker={"color": colour, "size": 7},
                customdata=[[record.model, record.plan or NOTHING, record.run] for _, record in chosen],
                hovertemplate="%{customdata[0]}, %{customdata[1]}<br>run %{customdata[2]}<br>measured %{y:+.1f}%"
                "<extra></extra>",
            )
    figure.update_xaxes(title="validation", zeroline=False, dtick=max(1, len(ordered) // 10))
    figure.update_yaxes(ticksuffix="%", zeroline=True, zerolinecolor=GREY, fixedrange=True)
    return styled(figure, COVERAGE_PX)


def levels_figure(records: Sequence[ValidationRecord]) -> go.Figure:
    """Empirical coverage against the nominal level, as predicted and corrected by the split."""
    shares = shares_by_level(records, LEVELS)
    corrected = [(share.level, share.corrected) for share in shares if share.corrected is not None]
    lines = {
        "what it should be": (GREY, [(level, level) for level in (0.0, 1.0)]),
        "as predicted": (ORANGE, [(share.level, share.predicted) for share in shares]),
        "corrected": (BLUE, corrected),
    }
    figure = go.Figure()
    for name, (colour, points) in lines.items():
        if points:
            figure.add_scatter(
                name=name,
                x=[100 * level for level, _ in points],
                y=[100 * share for _, share in points],
                mode="lines+markers",
                line={"color": colour},
                marker={"color": colour, "size": 6},
                hovertemplate=f"{name}: %{{y:.0f}}% of intervals of %{{x:.0f}}%<extra></extra>",
            )
    figure.add_vline(x=100 * LEVEL, line={"color": GREY, "dash": "dot"})
    figure.update_xaxes(title="nominal level", ticksuffix="%", range=[0, 100])
    figure.update_yaxes(ticksuffix="%", range=[0, 102], fixedrange=True)
    return styled(figure, COVERAGE_PX)
