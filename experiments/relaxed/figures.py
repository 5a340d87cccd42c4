"""Plots of the decentralised experiments, as self-contained pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

Row = dict[str, Any]
Tables = dict[str, list[Row]]


def draw(out: Path, tables: Tables) -> list[Path]:
    """A page per part that ran."""
    made = []
    for name, needs, page in (
        ("accuracy", "figures", _accuracy),
        ("ada", "ada", _ada),
        ("dbench", "dbench", _dbench),
        ("dbench_ranks", "dbench_ranks", _ranks),
        ("times", "times", _times),
        ("time_to_accuracy", "curves", _curves),
    ):
        if tables.get(needs):
            made.append(out / f"{name}.html")
            page(tables).write_html(made[-1], include_plotlyjs=True)
    return made


def _accuracy(tables: Tables) -> go.Figure:
    figure = make_subplots(rows=1, cols=2, subplot_titles=["IID shards", "label-sorted shards"])
    for place, sharding in enumerate(("iid", "label_sorted"), start=1):
        rows = [row for row in tables["figures"] if row["sharding"] == sharding]
        names = [row["graph"] for row in rows]
        for column, label in (("accuracy", "averaged model"), ("replicas", "mean of the replicas")):
            error = "deviation" if column == "accuracy" else "replicas_deviation"
            figure.add_bar(
                x=names,
                y=[row[column] for row in rows],
                error_y={"array": [row[error] for row in rows]},
                name=label,
                legendgroup=label,
                showlegend=place == 1,
                marker_color="#4477aa" if column == "accuracy" else "#cc6677",
                row=1,
                col=place,
            )
        for column, symbol in (("specified", "diamond"), ("specified_replicas", "x")):
            figure.add_scatter(
                x=names,
                y=[row[column] for row in rows],
                name=column.replace("_", ", "),
                legendgroup=column,
                showlegend=place == 1,
                mode="markers",
                marker={"symbol": symbol, "size": 10, "color": "black"},
                row=1,
                col=place,
            )
    figure.update_yaxes(title="accuracy").update_yaxes(range=[0.9, 0.97], col=1)
    return figure.update_layout(title="16 replicas of the digits MLP, 20 epochs")


def _ada(tables: Tables) -> go.Figure:
    figure = make_subplots(rows=1, cols=2, subplot_titles=["label-sorted shards", "label-sorted shards: connections"])
    for number, row in enumerate(row for row in tables["ada"] if row["sharding"] == "label_sorted"):
        colour = _MANY[number % len(_MANY)]
        adapts = row["graph"].startswith("ada")
        figure.add_scatter(
            x=[row["sent_in_weights"]],
            y=[row["accuracy"]],
            error_y={"array": [row["deviation"]]},
            name=row["graph"],
            legendgroup=row["graph"],
            mode="markers",
            marker={"size": 11, "symbol": "circle" if adapts else "square", "color": colour},
            row=1,
            col=1,
        )
        if adapts:
            path = [int(k) for k in row["connections_by_epoch"].split()]
            line = {"color": colour}
            figure.add_scatter(y=path, line=line, name=row["graph"], legendgroup=row["graph"], showlegend=False, row=1, col=2)
    figure.update_xaxes(title="sent by a replica, in weights", row=1, col=1).update_yaxes(title="accuracy", row=1, col=1)
    figure.update_xaxes(title="epoch", row=1, col=2).update_yaxes(title="neighbours", row=1, col=2)
    return figure.update_layout(title="Ada's schedules (circles) and fixed graphs (squares)")


def _dbench(tables: Tables) -> go.Figure:
    rows = tables["dbench"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    titles = [f"{model}, {sharding}" for sharding in ("iid", "label_sorted") for model in models]
    figure = make_subplots(rows=2, cols=len(models), subplot_titles=titles)
    ways = [way for way in dict.fromkeys(row["way"] for row in rows) if way != "centralised"]
    scales = list(dict.fromkeys(row["n"] for row in rows))
    for line, sharding in enumerate(("iid", "label_sorted"), start=1):
        for column, model in enumerate(models, start=1):
            for number, way in enumerate(ways):
                found = [row for row in rows if (row["model"], row["sharding"], row["way"]) == (model, sharding, way)]
                figure.add_scatter(
                    x=[row["consensus"] for row in found],
                    y=[row["score"] for row in found],
                    text=[f"n = {row['n']}" for row in found],
                    name=way,
                    legendgroup=way,
                    showlegend=(line, column) == (1, 1),
                    mode="markers",
                    marker={"size": [7 + 4 * scales.index(row["n"]) for row in found], "color": _COLOURS[number % 7]},
                    row=line,
                    col=column,
                )
    figure.update_xaxes(type="log").update_xaxes(title="consensus distance", row=2)
    figure.update_yaxes(title="accuracy", col=1)
    return figure.update_layout(title="Accuracy against the mean distance between replicas (larger dots: more replicas)")


def _ranks(tables: Tables) -> go.Figure:
    """Mean ranks over models and scales: a row per way, a column per metric."""
    rows = tables["dbench_ranks"]
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    ways = [key for key in rows[0] if key not in ("model", "n", "sharding", "metric", "tau_with_score")]
    figure = make_subplots(rows=1, cols=2, subplot_titles=["IID shards", "label-sorted shards"])
    for place, sharding in enumerate(("iid", "label_sorted"), start=1):
        ranks = [
            [
                sum(row[way] for row in found) / len(found)
                for metric in metrics
                for found in [[row for row in rows if (row["metric"], row["sharding"]) == (metric, sharding)]]
            ]
            for way in ways
        ]
        figure.add_heatmap(
            x=metrics, y=ways, z=ranks, zmin=1, zmax=len(ways), texttemplate="%{z:.2f}", colorscale="Blues", row=1, col=place
        )
    return figure.update_layout(title="Mean rank of each way of training by variance over replicas (1: least)")


def _times(tables: Tables) -> go.Figure:
    rows = tables["times"]
    largest = max(row["gpus"] for row in rows)
    figure = make_subplots(rows=1, cols=2, subplot_titles=["step against all_reduce", f"where a step goes, {largest} GPUs"])
    families = list(dict.fromkeys(row["algorithm"].partition(",")[0] for row in rows))
    for way in dict.fromkeys(row["algorithm"] for row in rows):
        found = [row for row in rows if row["algorithm"] == way]
        colour = _MANY[families.index(way.partition(",")[0]) % len(_MANY)]
        figure.add_scatter(
            x=[row["gpus"] for row in found],
            y=[row["against_all_reduce"] for row in found],
            name=way,
            line={"color": colour, "dash": "dash" if "combine_adapt" in way else "solid"},
            row=1,
            col=1,
        )
    at_most = [row for row in rows if row["gpus"] == largest]
    names = [row["algorithm"] for row in at_most]
    for term in ("compute", "barrier", "latency", "volume", "hidden"):
        sign = -1.0 if term == "hidden" else 1.0
        figure.add_bar(x=names, y=[sign * row[f"{term}_ms"] for row in at_most], name=term, row=1, col=2)
    figure.update_yaxes(type="log", row=1, col=1).update_xaxes(type="log", title="GPUs", row=1, col=1).update_yaxes(
        title="ms", row=1, col=2
    )
    figure.update_yaxes(title="step / step of all_reduce", row=1, col=1)
    return figure.update_layout(title="ResNet-50 on Summit nodes, 32 images per GPU", barmode="relative", height=700)


def _curves(tables: Tables) -> go.Figure:
    figure = go.Figure()
    rows = tables["curves"]
    for way in dict.fromkeys(row["way"] for row in rows):
        found = [row for row in rows if row["way"] == way]
        figure.add_scatter(x=[row["seconds"] for row in found], y=[row["accuracy"] for row in found], name=way)
    figure.update_xaxes(title="simulated seconds").update_yaxes(title="accuracy of the averaged model")
    return figure.update_layout(title="Digits on 32 replicas over simulated seconds, with stragglers")


_MANY = (
    *("#332288", "#88ccee", "#44aa99", "#117733", "#999933", "#ddcc77", "#cc6677", "#882255", "#aa4499", "#000000"),
    *("#e69f00", "#0072b2", "#d55e00"),
)
_COLOURS = ("#000000", "#cc6677", "#ddcc77", "#117733", "#88ccee", "#4477aa", "#aa4499")
