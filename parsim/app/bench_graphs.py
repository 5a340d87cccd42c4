"""`parsim.bench_graphs` (DBench): how accuracy and the variance between replicas depend on graph, replicas, model, shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parsim.app.doctor import progress
from parsim.app.frames import frame
from parsim.errors import ConfigError, near_matches
from parsim.report.picture import plotted
from parsim.report.tables import Column, ReportTable, to_text

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = (
    *("model", "n", "sharding", "way", "seeds", "score", "score_deviation", "mean_replica_score", "connections", "sent_bytes"),
    *("final_consensus", "consensus", "coefficient_of_variation", "dispersion_index", "gini", "quartile_coefficient"),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class GraphBench:
    """The result of `parsim.bench_graphs`.

    Attributes:
        tables: by name. `dbench`: a row per model, replicas, shards and graph. `dbench_ranks`, `dbench_relations`: Kendall's
            tau of scores with connections and with each metric. `dbench_tensors`: the metrics of every tensor.
    """

    tables: dict[str, list[dict[str, Any]]]

    def table(self) -> pd.DataFrame:
        """A row per model, number of replicas (n), shards and graph (way): scores, connections, bytes and the metrics."""
        return frame(self.tables["dbench"], COLUMNS)

    def findings(self) -> list[str]:
        """Sentences: what more replicas cost, and how accuracy goes with connections and with the variance of replicas."""
        lines, rows = [], self.tables["dbench"]
        sizes = sorted({row["n"] for row in rows})
        kinds = list(dict.fromkeys((row["model"], row["sharding"]) for row in rows))
        for model, sharding in kinds if len(sizes) > 1 else ():
            lost = {
                way: next(_cells(rows, model, sharding, sizes[0], way)) - next(_cells(rows, model, sharding, sizes[-1], way))
                for way in dict.fromkeys(row["way"] for row in rows)
            }
            words = ", ".join(f"{way} {-value:+.3f}" for way, value in lost.items())
            lines.append(f"{model}, {sharding}: accuracy from {sizes[0]} to {sizes[-1]} replicas: {words}")
        related = self.tables["dbench_relations"]
        for sharding in dict.fromkeys(row["sharding"] for row in related):
            own = [row for row in related if row["sharding"] == sharding]
            taus = {name: _mean([row for row in own if row["of"] == name]) for name in dict.fromkeys(row["of"] for row in own)}
            words = ", ".join(f"{name.replace('_', ' ')} {score:+.2f} ({alone:+.2f})" for name, (score, alone) in taus.items())
            lines.append(f"{sharding}: Kendall's tau of accuracy (of the replicas' own accuracy) with {words}")
        return lines

    def report(self) -> ReportTable:
        """The rows as texts."""
        columns = (
            *(Column(name=name) for name in ("model", "shards", "graph")),
            *(
                Column(name=name, numeric=True)
                for name in ("replicas", "averaged", "replicas' own", "connections", "distance", "Gini")
            ),
        )
        rows = tuple(
            (
                row["model"],
                row["sharding"],
                row["way"],
                str(row["n"]),
                f"{row['score']:.3f}" + (f" ± {row['score_deviation']:.3f}" if row["seeds"] > 1 else ""),
                f"{row['mean_replica_score']:.3f}",
                f"{row['connections']:.1f}",
                f"{row['final_consensus']:.3g}",
                f"{row['gini']:.3g}",
            )
            for row in self.tables["dbench"]
        )
        notes = (
            "averaged: accuracy of the mean weights; replicas' own: the mean of theirs",
            "distance: mean squared distance to the mean weights at the end; Gini: of the norms of tensors, before mixing",
        )
        return ReportTable(title="", columns=columns, rows=rows, notes=notes)

    def plot(self, path: str | Path | None = None) -> Any:
        """Accuracy of the averaged model against the distance of replicas, a panel per kind of shards, a colour per graph.

        Args:
            path: also write the picture, as PNG, SVG or PDF by its ending. Result and errors as for `Answer.plot`.
        """
        from parsim.report.figures import scatter_figure

        shards = list(dict.fromkeys(row["sharding"] for row in self.tables["dbench"]))
        points = {
            sharding: [
                (row["way"], row["consensus"], row["score"]) for row in self.tables["dbench"] if row["sharding"] == sharding
            ]
            for sharding in shards
        }
        figure = scatter_figure(points, x="distance between replicas (mean over the run)", y="accuracy of the averaged model")
        return plotted(
            figure, "Accuracy against the distance between replicas, by graph (all_reduce, at 0, is not drawn)", path
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {**self.tables, "findings": self.findings()}

    def __str__(self) -> str:
        return "\n".join([to_text(self.report()), *self.findings()])


def _cells(rows: Sequence[dict[str, Any]], model: str, sharding: str, n: int, way: str) -> Any:
    wanted = (model, sharding, n, way)
    return (row["score"] for row in rows if (row["model"], row["sharding"], row["n"], row["way"]) == wanted)


def _mean(rows: Sequence[dict[str, Any]]) -> tuple[float, float]:
    keys = ("tau_with_score", "tau_with_mean_replica_score")
    first, second = (sum(row[key] for row in rows) / len(rows) for key in keys)
    return first, second


def bench_graphs(
    graphs: Sequence[str] = (),
    *,
    models: Sequence[str] = ("mlp",),
    replicas: Sequence[int] = (16,),
    shards: Sequence[str] = ("iid", "label_sorted"),
    seeds: int = 1,
    epochs: int = 20,
    batch: int = 8,
) -> GraphBench:
    """Train virtual replicas on digits over several graphs, and relate accuracy to the variance of their parameters (DBench).

    Args:
        graphs: "all_reduce" (centralised), "ring", "lattice(neighbours=4)", "ada" and others of `plan.synchronisation.graph`,
            or whole rules such as "average/8"; left out: seven usual ones.
        models: "logistic", "mlp", "cnn" and "transformer". replicas: how many, one bench each. shards: as `training.shards`.
        seeds: trainings of each. epochs: over all samples. batch: samples per replica and step.

    Raises:
        ConfigError: an unknown model, or fewer than two graphs. PlanError, DataError, AlgorithmError: graphs, shards or
            replicas that cannot be. MissingDependencyError: without torch or scikit-learn.
    """
    from parsim.relaxed.dbench import GRAPHS, MODELS, bench_tables, run_bench

    for name in models:
        if name not in MODELS:
            raise ConfigError(f"unknown model {name!r} of the graph bench{near_matches(name, MODELS)}")
    compared = tuple(dict.fromkeys(graphs or GRAPHS))
    if len(compared) < 2:
        raise ConfigError(f"graphs are compared, and {', '.join(compared)} is one; add another, for example all_reduce")
    with progress("Training virtual replicas") as say:
        runs = run_bench(
            {name: MODELS[name] for name in models},
            compared,
            replicas=replicas,
            shards=shards,
            seeds=range(seeds),
            epochs=epochs,
            batch=batch,
            say=say,
        )
    return GraphBench(tables=bench_tables(runs))
