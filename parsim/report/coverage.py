"""How often predicted intervals held: a table and two figures of a profile's history."""

from __future__ import annotations

from collections.abc import Sequence

from parsim.costs.history import (
    LEVEL,
    Judged,
    ValidationRecord,
    correction,
    coverage_by,
    coverage_of,
    judged_split,
    records_needed,
    shares_by_level,
)
from parsim.report.figures import error_bars, styled
from parsim.report.legend import BLUE, GREY, INK, ORANGE, VERMILION
from parsim.report.plots import go
from parsim.report.tables import NOTHING, ReportTable, columns_of
from parsim.units import format_percent

LEVELS = tuple(number / 20 for number in range(1, 20))
HEIGHT_PX = 340


def coverage_tables(records: Sequence[ValidationRecord], *, title: str = "Coverage of 90% intervals") -> list[ReportTable]:
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
    return [ReportTable(title=title, columns=columns, rows=rows, emphasised=(0,), notes=notes)]


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
    figure.add_trace(
        go.Scatter(
            name="corrected 90% interval",
            x=places,
            y=[0.0] * len(ordered),
            mode="markers",
            marker={"color": BLUE, "size": 3},
            error_y=error_bars(above, below, BLUE, 2, thickness=1.2),
            hoverinfo="skip",
        )
    )
    for name, colour, covered in (("measured, inside", INK, True), ("measured, outside", VERMILION, False)):
        chosen = [(place, row.record) for place, row in zip(places, ordered, strict=True) if row.covered is covered]
        if chosen:
            figure.add_trace(
                go.Scatter(
                    name=name,
                    x=[place for place, _ in chosen],
                    y=[100 * (record.measured_s / record.predicted_s - 1) for _, record in chosen],
                    mode="markers",
                    marker={"color": colour, "size": 7},
                    customdata=[[record.model, record.plan or NOTHING, record.run] for _, record in chosen],
                    hovertemplate="%{customdata[0]}, %{customdata[1]}<br>run %{customdata[2]}<br>measured %{y:+.1f}%"
                    "<extra></extra>",
                )
            )
    figure.update_xaxes(title="validation", zeroline=False, dtick=max(1, len(ordered) // 10))
    figure.update_yaxes(ticksuffix="%", zeroline=True, zerolinecolor=GREY, fixedrange=True)
    return styled(figure, HEIGHT_PX)


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
