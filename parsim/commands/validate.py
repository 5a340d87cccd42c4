"""`parsim validate`: was the prediction right? For an existing run, or for a new one measured in rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from parsim.commands.output import AllowCode, JsonFlag, Overrides, print_json, print_tables, print_verdict

ROUNDS = 10


def validate(
    target: Annotated[Path, typer.Argument(metavar="RUN_DIR|RUN.toml", help="A folder of `parsim run`, or a run file.")],
    out: Annotated[Path | None, typer.Option(help="With a RUN.toml: folder of the new run.")] = None,
    rounds: Annotated[
        int, typer.Option(min=4, help="With a RUN.toml: rounds to measure. Halves of them give the A/A floor (noise).")
    ] = ROUNDS,
    tasks: Annotated[bool, typer.Option("--tasks", help="List every task in the JSON, not only the largest errors.")] = False,
    history: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Record the validation here instead of beside the profile.")
    ] = None,
    session: Annotated[
        str | None, typer.Option(help="Name of measurements made together: one of them never corrects the interval of another.")
    ] = None,
    update: Annotated[
        bool, typer.Option("--update", help="Correct the profile by the measured run, without a calibration.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds without progress of a process after which the run ends.")] = 30,
    overrides: Overrides = None,
    allow_code: AllowCode = False,
    as_json: JsonFlag = False,
) -> None:
    """Compare predicted with measured: step, every kind of task, peak memory. Record it in the profile's history."""
    from parsim.report.tables import kind_table, validation_table
    from parsim.workflow.public.functions import validate as judge

    done = judge(
        target,
        out=out,
        rounds=rounds,
        tasks=tasks,
        history=history,
        session=session,
        update=update,
        timeout_s=timeout,
        overrides=overrides or [],
    )
    document, asked = done.to_dict(), done.prediction
    speed = document["at_pace"]
    if as_json:
        print_json(document)
        return
    summary, found = asked.plan.summary(), done.comparison.to_dict()
    print_tables(
        [
            validation_table([(asked.problem.model.name, summary, found)]),
            kind_table(found),
        ]
    )
    if speed is not None:
        print(f"speed: {speed['text']}")
        if speed["warning"]:
            print(f"warning: {speed['warning']}")
    print_verdict(document)
    if update:
        print(f"update: {document['update']['text']}")
    print(f"folder: {done.folder} (report.html, trace.json for Perfetto)")
