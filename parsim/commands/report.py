"""`parsim report`: draw report.html and trace.json of a run folder again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from parsim.commands.output import AllowCode, JsonFlag, print_json
from parsim.workflow.progress import progress


def report(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A folder of `run` or `simulate --out`.")],
    allow_code: AllowCode = False,
    as_json: JsonFlag = False,
) -> None:
    """Draw report.html and trace.json of a run folder again."""
    from parsim.workflow.folders.run_folder import RunFolder
    from parsim.workflow.folders.write_prediction import redraw

    folder = RunFolder(run_folder)
    with progress(f"Drawing {run_folder}"):
        redraw(folder)
    if as_json:
        print_json({"report": str(folder.report), "trace": str(folder.trace)})
    else:
        print(f"Report: {folder.report}; trace for Perfetto: {folder.trace}")
