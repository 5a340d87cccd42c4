"""`parsim demo`: the main job, end to end, on whatever this machine has."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from parsim.commands.output import JsonFlag, print_json, print_tables
from parsim.errors import MissingDependencyError

if TYPE_CHECKING:
    from parsim.app.answer import Answer


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the profile, the runs and report.html.")] = Path("parsim-demo"),
    nproc: Annotated[
        int | None,
        typer.Option(min=1, max=8, help="Ranks of the real runs. Default: one per GPU, or 2 processes on a CPU."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Calibrate and measure longer: five minutes instead of two.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Plan, calibrate, train and compare on this machine, and write a report: everything once, in two minutes."""
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError("the demo trains for real and needs torch; pip install 'parsim[torch]'")
    from parsim.app.demo import run_demo

    def show(answer: Answer) -> None:
        if not as_json:
            print(answer.sentence())
            print_tables([answer.report()])
            print(answer.runners_up(), end="\n\n")

    result = run_demo(out, nproc, full=full, show=show)
    if as_json:
        print_json(result.to_dict())
        return
    print_tables([result.table()])
    print("\n".join(result.lines()))
