"""`parsim sweep`, `compare`, `explore` and `bench-graphs`: questions at many points, and answers side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from parsim.app.config_text import parse_numbers
from parsim.app.doctor import progress
from parsim.commands.output import (
    AllowCode,
    Asked,
    BatchOption,
    GpusOption,
    JsonFlag,
    NetworkOption,
    Overrides,
    PageOption,
    PlotOption,
    SeqOption,
    TokensOption,
    TuneOption,
    on_gpus,
    tell,
)

OverOption = Annotated[
    list[str] | None,
    typer.Option(
        "--over",
        metavar="KEY=VALUES",
        help="A key and its values: cluster.nodes=1,2,4, training.global_batch=256:4096:x2, scale.links=0.5:2:log (samples).",
    ),
]


def sweep(
    asked: Asked,
    over: OverOption = None,
    on: Annotated[
        list[str] | None,
        typer.Option(
            "--on", metavar="CLUSTER|tcp://…", help="With a MODEL: its cluster. tcp://HOST:PORT: run on this Dask scheduler."
        ),
    ] = None,
    gpus: GpusOption = None,
    network: NetworkOption = None,
    batch: BatchOption = None,
    seq: SeqOption = None,
    tune: TuneOption = None,
    tokens: TokensOption = None,
    overrides: Overrides = None,
    allow_code: AllowCode = False,
    sample: Annotated[
        int | None, typer.Option("--sample", metavar="N", help="Draw N points of a Sobol sequence instead of the grid.")
    ] = None,
    sensitivity: Annotated[
        int | None,
        typer.Option(
            "--sensitivity", metavar="N", help="Draw N * (keys + 2) points, and compute the Sobol indices of each key."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of a sample.")] = 0,
    goal: Annotated[
        str | None, typer.Option("--goal", metavar="GOAL", help='The point to pick, e.g. "min cost where epoch < 2h".')
    ] = None,
    samples_per_epoch: Annotated[
        int | None, typer.Option("--samples-per-epoch", metavar="N", help="Samples of an epoch: adds its time and price.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", metavar="N", help="Processes. Default: as many cores as pay for their start.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder of the sweep. Default: runs/NAME-sweep.")
    ] = None,
    plot: PlotOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Answer a question at many points. Points that were evaluated before are reused."""
    from parsim.app.sweep.sweep import sweep as sweep_over

    addresses = [text for text in on or [] if "://" in text]  # of Dask schedulers; a cluster has none
    clusters = [text for text in on or [] if "://" not in text]
    if len(addresses) > 1 or len(clusters) > 1:
        raise typer.BadParameter("give --on once for the cluster of a MODEL, and once for a Dask scheduler (tcp://HOST:PORT)")
    cluster = next(iter(clusters), None)
    where, changes = on_gpus(cluster, gpus, network, overrides, seq=seq, tokens=tokens, tune=tune)
    folder = out or Path("runs") / f"{Path(asked).stem or 'model'}-sweep"
    answers = sweep_over(
        asked,
        over or [],
        cluster=where,
        global_batch=batch,
        overrides=changes,
        sample=sample,
        sensitivity=sensitivity,
        seed=seed,
        goal=goal,
        samples_per_epoch=samples_per_epoch,
        jobs=jobs,
        on=next(iter(addresses), None),
        out=folder,
    )
    if plot is not None:
        answers.plot(plot)
    rows = f"Rows: {folder / 'points.csv'}; a page to explore them: parsim explore {folder}"
    document = answers.to_dict() if as_json else None
    tell(as_json, document, *answers.heading(), "", answers.report(), *answers.lines(), rows, picture=plot)


def compare(
    first: Annotated[str, typer.Argument(metavar="A", help="A run folder, a --json file, or a point SWEEP_DIR:NUMBER.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The other one.")],
    as_json: JsonFlag = False,
) -> None:
    """Show the differences between two answers, and their causes."""
    from parsim.app.sweep.difference import compare_answers

    difference = compare_answers(first, second)
    tell(as_json, difference.to_dict(), *difference.lines())


def explore(
    sweep_folder: Annotated[Path, typer.Argument(metavar="SWEEP_DIR", help="Folder of a sweep.")],
    out: PageOption = None,
    plot: PlotOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Write the explorer of a sweep, one page (SWEEP_DIR/explorer.html): sliders, a map of winning plans, Pareto fronts."""
    from parsim.app.sweep.sweep import open_sweep

    with progress(f"Drawing {sweep_folder}"):
        opened = open_sweep(sweep_folder)
        page = opened.explore(out)
        if plot is not None:
            opened.plot(plot)
    document = {"explorer": str(page), "picture": None if plot is None else str(plot)}
    tell(as_json, document, f"Explorer: {page}", picture=plot)


# `parsim bench-graphs`: accuracy and the variance between replicas, over graphs, replicas, models and shards.


def bench_graphs(
    graphs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[GRAPH]...", help='"ring", "lattice(neighbours=4)", "ada", "all_reduce", ...; none: seven.'),
    ] = None,
    models: Annotated[str, typer.Option(help="Of logistic, mlp, cnn, transformer, resnet_small, vit_small.")] = "mlp",
    replicas: Annotated[str, typer.Option(help="Numbers of replicas, with commas between.")] = "16",
    shards: Annotated[
        list[str] | None, typer.Option("--shards", help="As training.shards. Repeatable; default: iid and label_sorted.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each.")] = 1,
    epochs: Annotated[int, typer.Option(min=1, help="Over all samples.")] = 20,
    batch: Annotated[int, typer.Option(min=1, help="Samples per replica and step.")] = 8,
    dataset: Annotated[str, typer.Option(help="Of resnet_small and others of the zoo: digits, cifar10.")] = "digits",
    root: Annotated[str | None, typer.Option("--data", metavar="DIR", help="Folder of its files.")] = None,
    plot: PlotOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Compare mixing graphs on virtual replicas: accuracy against the variance of their parameters (DBench)."""
    from parsim.app.relaxed import bench_graphs as compared

    comparison = compared(
        graphs or (),
        models=[name.strip() for name in models.split(",")],
        replicas=parse_numbers("--replicas", replicas),
        shards=shards or ("iid", "label_sorted"),
        seeds=seeds,
        epochs=epochs,
        batch=batch,
        dataset=dataset,
        root=root,
    )
    if plot is not None:
        comparison.plot(plot)
    tell(as_json, comparison.to_dict(), comparison.report(), *comparison.findings(), picture=plot)
