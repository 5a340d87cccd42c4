"""`parsim bench-graphs`: accuracy and the variance between replicas, over graphs, replicas, models and shards."""

from __future__ import annotations

from typing import Annotated

import typer

from parsim.app.bench_graphs import bench_graphs as compared
from parsim.app.config_text import parse_numbers
from parsim.commands.output import JsonFlag, PlotOption, print_json, print_lines, print_picture, print_tables


def bench_graphs(
    graphs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[GRAPH]...", help='"ring", "lattice(neighbours=4)", "ada", "all_reduce", ...; none: seven.'),
    ] = None,
    models: Annotated[str, typer.Option(help="Of logistic, mlp, cnn, transformer, with commas between.")] = "mlp",
    replicas: Annotated[str, typer.Option(help="Numbers of replicas, with commas between.")] = "16",
    shards: Annotated[
        list[str] | None, typer.Option("--shards", help="As training.shards. Repeatable; default: iid and label_sorted.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each.")] = 1,
    epochs: Annotated[int, typer.Option(min=1, help="Over all samples.")] = 20,
    batch: Annotated[int, typer.Option(min=1, help="Samples per replica and step.")] = 8,
    plot: PlotOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Compare mixing graphs on virtual replicas: accuracy against the variance of their parameters (DBench)."""
    comparison = compared(
        graphs or (),
        models=[name.strip() for name in models.split(",")],
        replicas=parse_numbers("--replicas", replicas),
        shards=shards or ("iid", "label_sorted"),
        seeds=seeds,
        epochs=epochs,
        batch=batch,
    )
    if plot is not None:
        comparison.plot(plot)
    if as_json:
        print_json(comparison.to_dict())
        return
    print_tables([comparison.report()])
    print_lines(comparison.findings())
    print_picture(plot)
