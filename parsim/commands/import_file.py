"""`parsim import`: files of other tools as profiles, run files and measured timelines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from parsim.commands.output import JsonFlag, Overrides, print_json, print_tables
from parsim.workflow.progress import progress
from parsim.workflow.toml_text import parse_numbers


def import_command(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Of nccl-tests, torch.profiler, nsys, nvidia-smi topo -m, lstopo or DeepSpeed."),
    ],
    kind: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="nccl-tests, kineto (torch.profiler), nsys, topo, lstopo or deepspeed. Default: detected from the content.",
        ),
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="PROFILE.json, RUN.toml or TIMELINE.json.gz to write. Without it, only report."),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--on", metavar="CLUSTER", help="The measured machine: a profile, or GPUs (8xh100-sxm).")
    ] = None,
    collective: Annotated[str | None, typer.Option(help="nccl-tests: the collective, where the file does not name it.")] = None,
    ranks: Annotated[
        str | None, typer.Option(help="nccl-tests: the devices, e.g. 0,1,2,3, where the file lacks them. nsys: the GPU.")
    ] = None,
    world_size: Annotated[int | None, typer.Option(min=1, help="DeepSpeed: data-parallel ranks.")] = None,
    precision: Annotated[
        str | None,
        typer.Option(help="Trace: compare kernels with the peak of this precision. Default: that of most matrix products."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Trace: how many steps it holds, where none are marked.")] = None,
    against: Annotated[
        Path | None,
        typer.Option(metavar="RUN.toml", help="Trace: predict the step of this run file, and show both side by side."),
    ] = None,
    overrides: Overrides = None,
    as_json: JsonFlag = False,
) -> None:
    """Read a file of another tool into a profile, a run file or a measured timeline."""
    from parsim.workflow.importing.import_file import import_file

    with progress(f"Reading {file}"):
        imported = import_file(
            file,
            kind=kind,
            into=into,
            cluster=cluster,
            collective=collective,
            ranks=None if ranks is None else parse_numbers("--ranks", ranks),
            world_size=world_size,
            precision=precision,
            steps=steps,
            against=against,
            overrides=overrides or (),
        )
    if as_json:
        print_json(imported.to_dict())
        return
    print(imported.summary)
    print_tables(imported.tables)
    for note in imported.notes():
        print(note)
    if imported.into is not None:
        print(f"Written: {imported.into}")
        if imported.kind == "nccl-tests":
            print(f"Next: parsim plan MODEL --on {imported.into} --batch N")
    elif imported.kind in ("kineto", "nsys") and against is None:
        print("Next: --against RUN.toml shows the predicted step beside this one")
