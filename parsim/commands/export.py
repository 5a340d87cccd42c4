"""`parsim export`: a run folder as a file of another tool: trained weights, launch configurations, traces."""

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
        str, typer.Option("--format", help="Of weights: state_dict or safetensors; others: docs/export.md.")
    ] = "state_dict",
    out: Annotated[Path | None, typer.Option("--out", help="The file; left out: the format's own name in RUN_DIR.")] = None,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", help="Of weights: best or last; left out: best if there is one.")
    ] = None,
    allow_code: AllowCode = False,
    as_json: JsonFlag = False,
) -> None:
    """Write a run folder as a file of another tool: its weights, its plan or its timeline."""
    from parsim.workflow.exporting.formats import export_folder

    done = export_folder(run_folder, format=format, out=out, checkpoint=checkpoint)  # type: ignore[arg-type]
    if as_json:
        print_json(done.to_dict())
        return
    for line in done.lines():
        print(line)
