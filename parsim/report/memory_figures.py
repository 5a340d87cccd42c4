"""Figures of memory: the predicted peak by line, and what was measured beside the prediction of the same kind.

The lines have the colours of Paul Tol's muted scheme, which colour-blind readers can distinguish.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from parsim.report.figures import GREY, INK, MEASURED, PREDICTED, styled
from parsim.report.tables import format_error, line_name, memory_lines
from parsim.units import GIB, KIB, MIB, format_bytes

MEMORY_COLOURS = {
    "parameters": "#332288",
    "casts": "#6699CC",
    "gradients": "#88CCEE",
    "unsharded": "#4477AA",
    "optimizer_state": "#44AA99",
    "buffers": "#117733",
    "activations": "#DDCC77",
    "boundary_values": "#999933",
    "receive_buffers": "#661100",
    "inputs": "#CC6677",
    "communication": "#882255",
    "context": "#CBD0D6",
    "workspace": "#AA4499",
    "allocator": "#DDDDDD",
}


def memory_figure(memory: Sequence[Mapping[str, Any]], *, device_bytes: Sequence[int] = ()) -> go.Figure:
    """Predicted peak memory per rank, stacked by line, against the device limit.

    Args:
        memory: RankMemory as dictionaries. device_bytes: by rank, all that the device was seen to hold; the same kind of
            number as a whole bar. Empty: nobody counted it.
    """
    amounts = [memory_lines(rank) for rank in memory]
    names = list(dict.fromkeys(name for lines in amounts for name in lines))
    peaks = [sum(lines.values()) for lines in amounts]
    highest = max([*peaks, *device_bytes], default=0)
    scale, unit = _size_unit(highest)
    ranks = [f"r{rank['rank']}" for rank in memory]
    figure = go.Figure()
    for name in names:
        values = [lines.get(name, 0) for lines in amounts]
        if not any(values):
            continue
        shown = html.escape(line_name(name))
        figure.add_trace(
            go.Bar(
                name=shown,
                x=ranks,
                y=[value / scale for value in values],
                marker={"color": MEMORY_COLOURS.get(name, GREY)},
                customdata=[format_bytes(value) for value in values],
                hovertemplate=f"%{{x}} {shown}<br>%{{customdata}}<extra></extra>",
            )
        )
    if len(device_bytes):
        figure.add_trace(
            go.Scatter(
                name="measured on the device",
                x=ranks,
                y=[value / scale for value in device_bytes],
                mode="markers",
                marker={"symbol": "diamond", "size": 10, "color": "white", "line": {"color": INK, "width": 2}},
                customdata=[
                    [format_bytes(value), format_error((peak - value) / value if value else None)]
                    for peak, value in zip(peaks, device_bytes, strict=True)
                ],
                hovertemplate="%{x} measured on the device<br>%{customdata[0]}<br>error %{customdata[1]}<extra></extra>",
            )
        )
    limits = [rank.get("limit_bytes") for rank in memory]
    known = [limit for limit in limits if limit is not None]
    title = unit
    if known and max(known) <= 4 * highest:
        figure.add_trace(
            go.Scatter(
                name="device limit",
                x=ranks,
                y=[None if limit is None else limit / scale for limit in limits],
                mode="lines+markers" if len(ranks) > 1 else "markers",
                marker={"symbol": "line-ew", "size": 26, "line": {"color": INK, "width": 2}},
                line={"color": INK, "dash": "dot", "width": 1.5},
                customdata=["" if limit is None else format_bytes(limit) for limit in limits],
                hovertemplate="%{x} device limit<br>%{customdata}<extra></extra>",
            )
        )
    elif known:
        title += f" (device limit {format_bytes(min(known))})"
    figure.update_yaxes(title=title, rangemode="tozero", zeroline=False, fixedrange=True)
    figure.update_xaxes(type="category", fixedrange=True, showgrid=False)
    figure.update_layout(barmode="stack", bargap=0.4 if len(ranks) > 2 else 0.65)
    return styled(figure, 330)


LEVEL_NAMES = {
    "live": "live tensors",
    "allocated": "allocated blocks",
    "reserved": "reserved",
    "driver": "whole device",
}
"""The counters of `report/memory_levels`, as a reader meets them."""


def memory_levels_figure(levels: Sequence[Mapping[str, Any]]) -> go.Figure:
    """Predicted and measured bytes per rank and counter, from MemoryLevel.to_dict(); the error stands at the bars' end."""
    several = len({row["level"] for row in levels}) > 1
    rows = [html.escape(f"r{row['rank']} {LEVEL_NAMES[row['level']]}" if several else f"r{row['rank']}") for row in levels]
    sizes = {name: [row[f"{name}_bytes"] for row in levels] for name in ("predicted", "measured")}
    scale, unit = _size_unit(max((size for own in sizes.values() for size in own), default=0))
    figure = go.Figure()
    for name, colour in (("predicted", PREDICTED), ("measured", MEASURED)):
        figure.add_trace(
            go.Bar(
                name=name,
                orientation="h",
                y=rows,
                x=[size / scale for size in sizes[name]],
                marker={"color": colour},
                text=[format_error(row["relative_error"]) if name == "predicted" else "" for row in levels],
                textposition="outside",
                cliponaxis=False,
                customdata=[format_bytes(size) for size in sizes[name]],
                hovertemplate=f"{name} %{{y}}<br>%{{customdata}}<extra></extra>",
            )
        )
    longest = max((size / scale for own in sizes.values() for size in own), default=1.0)
    figure.update_yaxes(autorange="reversed", automargin=True, fixedrange=True)
    figure.update_xaxes(zeroline=False, ticksuffix=f" {unit}", range=[0, 1.2 * longest], fixedrange=True)
    figure.update_layout(barmode="group", bargap=0.3, bargroupgap=0.05)
    return styled(figure, 46 * max(2, len(rows)) + 50)


def _size_unit(highest: float) -> tuple[int, str]:
    """The largest unit that the size reaches, in bytes, and its name."""
    return next(((size, name) for size, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if highest >= size), (1, "B"))
