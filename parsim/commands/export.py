"""`parsim export`: the weights of a run folder for use without parsim, or a file that launches its training elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from parsim.commands.output import AllowCode, JsonFlag, print_json
from parsim.errors import ConfigError, near_matches


def export(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Of `run`; to launch, also of `simulate --out`.")],
    format: Annotated[
        str, typer.Option("--format", help="Of weights: state_dict, safetensors. To launch: torchrun, slurm.")
    ] = "state_dict",
    out: Annotated[Path | None, typer.Option("--out", help="The file; left out: one in RUN_DIR.")] = None,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", help="best or last; left out: best if there is one.")
    ] = None,
    weights: Annotated[str, typer.Option("--weights", help="trained, or ema: their moving averages.")] = "trained",
    interface: Annotated[str | None, typer.Option("--interface", help="To launch: where the ranks meet; left out: lo.")] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="To launch: machines; left out: the plan's.")] = None,
    port: Annotated[int, typer.Option("--port", help="To launch: of the ranks' store.")] = 29500,
    checkpoint_every: Annotated[int, typer.Option(min=0, help="To launch: steps between checkpoints; 0: at the end.")] = 0,
    allow_code: AllowCode = False,
    as_json: JsonFlag = False,
) -> None:
    """Write the trained weights as a plain file that loads into the original module, or a file that launches the training."""
    from parsim.workflow.training.export import SUFFIXES, export_weights
    from parsim.workflow.training.launch_files import FORMATS, export_launch

    if format in FORMATS:
        done = export_launch(
            run_folder,
            format=format,
            interface=interface,
            nodes=nodes,
            port=port,
            checkpoint_every=checkpoint_every,
            out=out,
        )
        if as_json:
            print_json(done)
            return
        print(f"{done['nodes']} x {done['ranks_per_node']} ranks over {done['interface']}: {done['file']}")
        return
    if format not in SUFFIXES:
        raise ConfigError(f"format {format!r} is unknown{near_matches(format, (*SUFFIXES, *FORMATS))}")
    done = export_weights(run_folder, format=format, out=out, checkpoint=checkpoint, weights=weights)  # type: ignore[arg-type]
    if as_json:
        print_json(done)
        return
    what = "Averages of the weights" if weights == "ema" else "Weights"
    print(f"{what} of the {done['checkpoint']} checkpoint (step {done['step']}, {done['tensors']} tensors): {done['file']}")
