"""`parsim import`: files of other tools as profiles, run files and measured timelines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from parsim.app.config_text import parse_numbers
from parsim.app.doctor import progress
from parsim.commands.output import AllowCode, JsonFlag, Overrides, tell


def import_command(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Of nccl-tests, torch.profiler, nsys, nvidia-smi, rocm-smi, lstopo or DeepSpeed."),
    ],
    kind: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="nccl-tests, kineto (torch.profiler), nsys, topo, rocm-topo, lstopo or deepspeed. Default: by content.",
        ),
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="PROFILE.json, NETWORK.json, RUN.toml or TIMELINE.json.gz to write. Default: none."),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--on", metavar="CLUSTER", help="The measured machine: a profile, or GPUs (8xh100-sxm).")
    ] = None,
    network: Annotated[
        str | None, typer.Option(metavar="NETWORK", help="nccl-tests over several hosts: what a new NETWORK.json starts from.")
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
    """Read a file of another tool into a profile, a network, a run file or a measured timeline."""
    from parsim.app.foreign import import_file

    with progress(f"Reading {file}"):
        imported = import_file(
            file,
            kind=kind,
            into=into,
            cluster=cluster,
            network=network,
            collective=collective,
            ranks=None if ranks is None else parse_numbers("--ranks", ranks),
            world_size=world_size,
            precision=precision,
            steps=steps,
            against=against,
            overrides=overrides or (),
        )
    then = []
    if imported.into is not None:
        then.append(f"Written: {imported.into}")
        if imported.kind == "nccl-tests":
            on = f"16x... --network {imported.into}" if "network" in imported.found else imported.into
            then.append(f"Next: parsim plan MODEL --on {on} --batch N")
    elif imported.kind in ("kineto", "nsys") and against is None:
        then.append("Next: --against RUN.toml shows the predicted step beside this one")
    tell(as_json, imported.to_dict(), imported.summary, *imported.tables, *imported.notes(), *then)


# `parsim export`: a run folder as a file of another tool: trained weights, launch files, plans, traces.


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
        typer.Option("--checkpoint-every", min=0, help="Launch files: steps between checkpoints. Default: about every minute."),
    ] = None,
    allow_code: AllowCode = False,
    as_json: JsonFlag = False,
) -> None:
    """Write a run folder as a file of another tool: its weights, its launch script, its plan or its timeline."""
    from parsim.app.foreign import export_folder

    keywords = {
        "checkpoint": checkpoint,
        "weights": weights,
        "interface": interface,
        "nodes": nodes,
        "port": port,
        "checkpoint_every": checkpoint_every,
    }
    options = {name: value for name, value in keywords.items() if value is not None}
    done = export_folder(run_folder, format=format, out=out, **options)
    tell(as_json, done.to_dict(), *done.lines())
