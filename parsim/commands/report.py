"""`parsim report`: draw report.html and trace.json of a run folder again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from parsim.commands.folder import write_pages
from parsim.commands.output import JsonFlag, print_json, progress
from parsim.commands.run_folder import RunFolder


def report(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A folder of `run` or `simulate --out`.")],
    as_json: JsonFlag = False,
) -> None:
    """Draw report.html and trace.json of a run folder again."""
    folder = RunFolder(run_folder)
    with progress(f"Drawing {run_folder}"):
        page = write_pages(folder)
    drawn = folder.trace.is_file()
    if as_json:
        print_json({"report": str(page), "trace": str(folder.trace) if drawn else None})
    else:
        print(f"Report: {page}" + (f"; trace for Perfetto: {folder.trace}" if drawn else ""))
