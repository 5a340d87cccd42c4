"""Figures 1 to 6 of the paper, with what is printed beside what is found, and the map. HTML, without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from experiments.adaptive.paper import EPOCHS, GPUS, MODELS, STRATEGIES

Tables = dict[str, Any]
Row = dict[str, Any]
SOURCES = ("paper", "honest", "fit")


def draw(out: Path, tables: Tables) -> None:
    """Every figure for which `tables` holds the rows."""
    figures: dict[str, go.Figure] = {}
    if "table" in tables:
        figures["figure1_hours"] = _bars(tables["table"], "hours", f"Hours of {EPOCHS} epochs of CIFAR-100", "hours")
        figures["figure2_speed"] = _speed(tables["scaling"])
        figures["figure3_communication"] = _bars(
            tables["table"], "communication", f"Communication on {GPUS} GPUs", "share of the time"
        )
        figures["figure5_memory"] = _bars(tables["table"], "memory_gb", "Peak memory of a GPU", "GB")
        figures["figure6_choices"] = _choices(tables["choices"])
    if "learning" in tables:
        figures["figure4_accuracy"] = _accuracy(tables["learning"])
    if "map" in tables:
        figures |= {f"map_{name.split('-')[0].lower()}": _map(tables["map"], name) for name in MODELS}
    for name, figure in figures.items():
        figure.write_html(out / f"{name}.html", include_plotlyjs=True)


def _bars(rows: list[Row], quantity: str, title: str, unit: str) -> go.Figure:
    figure = go.Figure()
    own = [row for row in rows if row["quantity"] == quantity]
    for source in SOURCES:
        some = [row for row in own if row[source] is not None]
        if some:
            figure.add_bar(
                x=[[row["model"] for row in some], [row["strategy"] for row in some]],
                y=[row[source] for row in some],
                name=source,
            )
    return figure.update_layout(title=title, yaxis_title=unit, barmode="group")


def _speed(rows: list[Row]) -> go.Figure:
    figure = go.Figure()
    for name in MODELS:
        for strategy in STRATEGIES[1:]:
            own = [row for row in rows if row["model"] == name and row["strategy"] == strategy]
            figure.add_scatter(
                x=[1, *(row["gpus"] for row in own)], y=[1, *(row["speedup"] for row in own)], name=f"{name} {strategy}"
            )
            printed = MODELS[name].hours[0] / MODELS[name].printed("hours", strategy)
            figure.add_scatter(x=[GPUS], y=[printed], mode="markers", name=f"{name} {strategy}, printed", showlegend=False)
    return figure.update_layout(title="Speed-up over one GPU", xaxis_title="GPUs", yaxis_title="times")


def _choices(rows: list[Row]) -> go.Figure:
    ways = ("dp", "mp", "hp")
    own = [row for row in rows if row["model"] == "ViT-B/16"]
    return go.Figure(
        go.Heatmap(
            x=[row["component"] for row in own],
            y=["by the paper's constants"],
            z=[[ways.index(row["choice"]) for row in own]],
            text=[[row["choice"] for row in own]],
            texttemplate="%{text}",
            showscale=False,
        )
    ).update_layout(title="Strategy of every component of ViT-B/16", margin={"b": 140})


def _accuracy(rows: list[Row]) -> go.Figure:
    figure = go.Figure()
    for strategy in STRATEGIES:
        figure.add_box(y=[row["accuracy"][strategy] for row in rows], name=strategy, boxpoints="all")
    return figure.update_layout(title=f"Digits, accuracy over {len(rows)} seeds", yaxis_title="test accuracy")


def _map(rows: list[Row], name: str) -> go.Figure:
    own = [row for row in rows if row["model"] == name]
    links = sorted({row["link"] for row in own}, reverse=True)
    places = sorted({(row["batch"], row["memory_gib"]) for row in own})
    at = {(row["batch"], row["memory_gib"], row["link"]): row for row in own}
    cells = [[at[(*place, link)] for link in links] for place in places]
    return go.Figure(
        go.Heatmap(
            x=[f"1/{1 / link:.0f}" for link in links],
            y=[f"batch {batch}, {memory:g} GiB" for batch, memory in places],
            z=[[row["gain_over_hp"] for row in line] for line in cells],
            text=[[f"{row['fastest_uniform']}{' *' if row['papers_order'] else ''}" for row in line] for line in cells],
            texttemplate="%{text}",
            zmin=0,
            zmax=0.5,
            colorbar={"title": "gain over hp"},
        )
    ).update_layout(
        title=f"{name}: what adaptive gains over hybrid, the fastest uniform family, and * the paper's order",
        xaxis_title="speed of links, of the profile's",
    )
