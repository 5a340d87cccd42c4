"""Trained weights: `state_dict` and `safetensors`."""

from __future__ import annotations

from pathlib import Path

from parsim.workflow.exporting.request import Exported, ExportRequest
from parsim.workflow.training.export import export_weights


def write_weights(request: ExportRequest) -> Exported:
    """The weights of a checkpoint. Raises ConfigError: there is none; MissingDependencyError: safetensors is not installed."""
    done = export_weights(request.folder.path, format=request.format, out=request.out, **request.options)
    what = "Averages of the weights" if done["weights"] == "ema" else "Weights"
    return Exported(
        format=request.format,
        file=Path(done["file"]),
        summary=(
            f"{what} of the {done['checkpoint']} checkpoint (step {done['step']}, {done['tensors']} tensors): {done['file']}"
        ),
        found={key: done[key] for key in ("checkpoint", "weights", "step", "tensors", "elements", "warnings")},
    )
