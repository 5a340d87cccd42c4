"""`parsim export`: the weights of a run folder for use without parsim."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from parsim.commands.output import AllowCode, JsonFlag, print_json


def export(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A folder of `parsim run`.")],
    format: Annotated[str, typer.Option("--format", help="state_dict or safetensors.")] = "state_dict",
    out: Annotated[Path | None, typer.Option("--out", help="The file; left out: weights.* in RUN_DIR.")] = None,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", help="best or last; left out: best if there is one.")
    ] = None,
    weights: Annotated[str, typer.Option("--weights", help="trained, or ema: their moving averages.")] = "trained",
    allow_code: AllowCode = False,
    as_json: JsonFlag = False,
) -> None:
    """Write the trained weights as a plain file that loads into the original module."""
    from parsim.workflow.training.export import export_weights

    done = export_weights(run_folder, format=format, out=out, checkpoint=checkpoint, weights=weights)  # type: ignore[arg-type]
    if as_json:
        print_json(done)
        return
    what = "Averages of the weights" if weights == "ema" else "Weights"
    print(f"{what} of the {done['checkpoint']} checkpoint (step {done['step']}, {done['tensors']} tensors): {done['file']}")
