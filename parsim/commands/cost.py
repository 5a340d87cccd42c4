"""`parsim cost`: seconds of a collective, or of every component of a model, on a profile."""

from __future__ import annotations

from typing import Annotated

import typer

from parsim.commands.output import JsonFlag, print_json, print_tables
from parsim.workflow.config import Granularity
from parsim.workflow.toml_text import parse_numbers, scalar_pairs


def cost(
    profile: Annotated[str, typer.Argument(help="A shipped profile by name, or the path of one.")],
    collective: Annotated[str | None, typer.Option(help="all_reduce, all_gather, reduce_scatter, ..., or send_recv.")] = None,
    size_bytes: Annotated[int | None, typer.Option(help="Bytes of the whole array, as nccl-tests counts them.")] = None,
    ranks: Annotated[
        str | None, typer.Option(help="Devices of the group, e.g. 0,1,2, numbered over all nodes. Default: all.")
    ] = None,
    nodes: Annotated[int, typer.Option(help="Number of machines of the profile, connected by --network.")] = 1,
    network: Annotated[str | None, typer.Option(help="A shipped network by name, or the path of one.")] = None,
    model: Annotated[str | None, typer.Option(help="Price every component of this model instead.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples per rank.")] = None,
    args: Annotated[list[str] | None, typer.Option("--arg", metavar="KEY=VALUE", help="An argument of the model.")] = None,
    input_shape: Annotated[str | None, typer.Option(help="Shape of one sample, e.g. 3,224,224.")] = None,
    granularity: Annotated[Granularity, typer.Option(help="Size of the model's components.")] = "block",
    ways: Annotated[int | None, typer.Option(help="Price one of N tensor-parallel shards of each component too.")] = None,
    precision: Annotated[str, typer.Option(help="Precision of the computation.")] = "fp32",
    optimizer: Annotated[str, typer.Option(help="Optimizer to price.")] = "sgd_momentum",
    explain: Annotated[bool, typer.Option("--explain", help="Print the terms of every price and their sources too.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Price a collective, or every component of a model."""
    from parsim.report.price_tables import price_tables
    from parsim.report.tables import cost_table
    from parsim.workflow.public.functions import cost as price

    if (collective is None) == (model is None):
        raise typer.BadParameter("give either --collective with --size-bytes, or --model with --batch")
    if collective is not None and size_bytes is None:
        raise typer.BadParameter("--collective needs --size-bytes")
    if model is not None and batch is None:
        raise typer.BadParameter("--model needs --batch")
    if ways is not None and model is None:
        raise typer.BadParameter("--ways needs --model")
    prices = price(
        profile,
        collective=collective,
        size_bytes=size_bytes,
        ranks=None if ranks is None else parse_numbers("--ranks", ranks),
        nodes=nodes,
        network=network,
        model=model,
        batch=batch,
        args=dict(scalar_pairs(args or [])),
        input_shape=None if input_shape is None else parse_numbers("--input-shape", input_shape),
        granularity=granularity,
        ways=ways,
        precision=precision,
        optimizer=optimizer,
    )
    if as_json:
        print_json(prices.to_dict())
        return
    print_tables([cost_table(prices.rows, title=prices.title), *(price_tables(prices.rows) if explain else ())])
