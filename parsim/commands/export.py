"""`parsim export`: a run folder as a file of another tool: trained weights, launch files, plans, traces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from parsim.commands.output import AllowCode, JsonFlag, print_json


def export(
    run_folder: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="A folder of `parsim run`, or of `parsim simulate --out`.")
    ],
    format: Annotated[
        str,
        typer.Option("--format", help="state_dict, safetensors, torchrun, slurm, ...: docs/export.md."),
    ] = "state_dict",
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write. Default: the usual name of the format, in RUN_DIR.")
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", help="Weights: the best or the last checkpoint. Default: best, if there is one."),
    ] = None,
    weights: Annotated[
        str | None, typer.Option("--weights", help="Weights: trained, or ema (their moving averages). Default: trained.")
    ] = None,
    interface: Annotated[
        str | None, typer.Option("--interface", help="Launch files: network interface on which the ranks meet. Default: lo.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=1, help="Launch files: number of machines. Default: as in the plan.")
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", help="Launch files: port on which the ranks meet. Default: 29500.")
    ] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option("--checkpoint-every", min=0, help="Launch files: steps between checkpoints."),
    ] = None,
    allow_code: AllowCode = False,
    as_json: JsonFlag = False,
) -> None:
    """Write a run folder as a file of another tool: its weights, its launch script, its plan or its timeline."""
    from parsim.workflow.exporting.formats import export_folder

    given = {
        "checkpoint": checkpoint,
        "weights": weights,
        "interface": interface,
        "nodes": nodes,
        "port": port,
        "checkpoint_every": checkpoint_every,
    }
    options = {name: value for name, value in given.items() if value is not None}
    done = export_folder(run_folder, format=format, out=out, **options)
    if as_json:
        print_json(done.to_dict())
        return
    for line in done.lines():
        print(line)
