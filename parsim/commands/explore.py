"""`parsim explore`: a sweep as one page with sliders, maps and fronts, which needs no network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from parsim.commands.output import JsonFlag, print_json
from parsim.workflow.progress import progress


def explore(
    sweep_folder: Annotated[Path, typer.Argument(metavar="SWEEP_DIR", help="The --out of `parsim sweep`.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="PAGE.html", help="Left out: explorer.html in it.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write the explorer of a sweep: one page with sliders, a map of winning plans, fronts and curves."""
    from parsim.workflow.sweeps.result import open_sweep

    with progress(f"Drawing {sweep_folder}"):
        page = open_sweep(sweep_folder).explore(out)
    if as_json:
        print_json({"explorer": str(page)})
    else:
        print(f"Explorer: {page}")
