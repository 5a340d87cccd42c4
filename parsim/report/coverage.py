"""How often predicted intervals held: a table and two figures of a profile's history."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from parsim.costs.conformal import (
    LEVEL,
    Coverage,
    Judged,
    ValidationRecord,
    correction,
    coverage_by,
    coverage_of,
    judged_split,
    records_needed,
    shares_by_level,
)
from parsim.report.figures import BLUE, GREY, INK, ORANGE, VERMILION, styled
from parsim.report.tables import NOTHING, Column, ReportTable
from parsim.units import format_percent

LEVELS = tuple(number / 20 for number in range(1, 20))
HEIGHT_PX = 340


def coverage_tables(records: Sequence[ValidationRecord], *, title: str = "Coverage of 90% intervals") -> list[ReportTable]:
    """All records, those of each model and of each run; no table without records.

    Every interval is corrected by records of other runs and other models. The interval as predicted stands beside it.
    """
    if not records:
        return []
    rows = judged_split(records)
    groups = {"all": coverage_of(rows)}
    groups |= {f"model {name}": entry for name, entry in coverage_by(rows, lambda record: record.model).items()}
    groups |= {f"run {name}": entry for name, entry in coverage_by(rows, lambda record: record.run).items()}
    columns = (
        Column(name="validations of", wraps=True),
        Column(name="tested", numeric=True),
        Column(name="inside", numeric=True),
        Column(name="coverage", numeric=True),
        Column(name="95% interval", numeric=True),
        Column(name="mean width", numeric=True),
        Column(name="as predicted", numeric=True),
        Column(name="its mean width", numeric=True),
    )
    notes = (
        "each interval is corrected by records of other runs and other models; as predicted: before any correction",
        f"width: p95 - p05 over the median; 95% interval: Clopper-Pearson; corrected: {groups['all'].corrected} of {len(rows)}",
        f"for new predictions: {correction(records).describe()}",
    )
    cells = tuple((name, *_cells(entry)) for name, entry in groups.items())
    return [ReportTable(title=title, columns=columns, rows=cells, emphasised=(0,), notes=notes)]


def _cells(entry: Coverage) -> tuple[str, ...]:
    return (
        str(entry.tested),
        str(entry.covered),
        format_percent(entry.fraction),
        f"{format_percent(entry.low)} to {format_percent(entry.high)}",
        format_percent(entry.mean_width),
        format_percent(entry.uncorrected_fraction),
        format_percent(entry.uncorrected_mean_width),
    )


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
    figure = go.Figure()
    figure.add_trace(
        go.Scatter(
            name="corrected 90% interval",
            x=places,
            y=[0.0] * len(ordered),
            mode="markers",
            marker={"color": BLUE, "size": 3},
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [100 * (row.high_s / row.record.predicted_s - 1) for row in ordered],
                "arrayminus": [100 * (1 - row.low_s / row.record.predicted_s) for row in ordered],
                "color": BLUE,
                "thickness": 1.2,
                "width": 2,
            },
            hoverinfo="skip",
        )
    )
    for name, colour, covered in (("measured, inside", INK, True), ("measured, outside", VERMILION, False)):
        chosen = [(place, row) for place, row in zip(places, ordered, strict=True) if row.covered is covered]
        if chosen:
            figure.add_trace(_measured_points(name, colour, chosen))
    figure.update_xaxes(title="validation", zeroline=False, dtick=max(1, len(ordered) // 10))
    figure.update_yaxes(ticksuffix="%", zeroline=True, zerolinecolor=GREY, fixedrange=True)
    return styled(figure, HEIGHT_PX)


def _measured_points(name: str, colour: str, chosen: Sequence[tuple[int, Judged]]) -> go.Scatter:
    return go.Scatter(
        name=name,
        x=[place for place, _ in chosen],
        y=[100 * (row.record.measured_s / row.record.predicted_s - 1) for _, row in chosen],
        mode="markers",
        marker={"color": colour, "size": 7},
        customdata=[[row.record.model, row.record.plan or NOTHING, row.record.run] for _, row in chosen],
        hovertemplate="%{customdata[0]}, %{customdata[1]}<br>run %{customdata[2]}<br>measured %{y:+.1f}%<extra></extra>",
    )


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
            figure.add_trace(
                go.Scatter(
                    name=name,
                    x=[100 * level for level, _ in points],
                    y=[100 * share for _, share in points],
                    mode="lines+markers",
                    line={"color": colour},
                    marker={"color": colour, "size": 6},
                    hovertemplate=f"{name}: %{{y:.0f}}% of intervals of %{{x:.0f}}%<extra></extra>",
                )
            )
    figure.add_vline(x=100 * LEVEL, line={"color": GREY, "dash": "dot"})
    figure.update_xaxes(title="nominal level", ticksuffix="%", range=[0, 100])
    figure.update_yaxes(ticksuffix="%", range=[0, 102], fixedrange=True)
    return styled(figure, HEIGHT_PX)
