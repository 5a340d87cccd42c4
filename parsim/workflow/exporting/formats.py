"""The formats of `parsim export`, by the name that --format takes. A format is one module here and one row of FORMATS."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parsim.app.run_folder import RunFolder
from parsim.errors import ConfigError, near_matches
from parsim.workflow.exporting.chakra import write_chakra
from parsim.workflow.exporting.chrome import write_chrome
from parsim.workflow.exporting.deepspeed import write_deepspeed
from parsim.workflow.exporting.launch import write_launch
from parsim.workflow.exporting.megatron import write_megatron
from parsim.workflow.exporting.request import Exported, ExportFormat, ExportRequest
from parsim.workflow.exporting.torchtitan import write_torchtitan
from parsim.workflow.exporting.weights import write_weights

OF_WEIGHTS = ("checkpoint", "weights")
TO_LAUNCH = ("interface", "nodes", "port", "checkpoint_every")

FORMATS: Mapping[str, ExportFormat] = {
    "state_dict": ExportFormat(what="trained weights, as torch.save writes them", write=write_weights, options=OF_WEIGHTS),
    "safetensors": ExportFormat(what="trained weights, as safetensors", write=write_weights, options=OF_WEIGHTS),
    "torchrun": ExportFormat(what="a script that launches the training with torchrun", write=write_launch, options=TO_LAUNCH),
    "slurm": ExportFormat(what="a batch script that launches the training with Slurm", write=write_launch, options=TO_LAUNCH),
    "deepspeed": ExportFormat(what="a DeepSpeed config: data parallelism and ZeRO", write=write_deepspeed),
    "torchtitan": ExportFormat(what="a TOML file of torchtitan", write=write_torchtitan),
    "megatron": ExportFormat(what="a script with the arguments of Megatron-LM", write=write_megatron),
    "chakra": ExportFormat(what="MLCommons Chakra execution traces, one per rank", write=write_chakra),
    "chrome": ExportFormat(what="the timeline as a Chrome trace, for Perfetto", write=write_chrome),
}


def export_folder(path: Path, *, format: str, out: Path | None = None, **options: Any) -> Exported:
    """Write a folder of `parsim run` or `parsim simulate --out` as a file of another tool.

    Args:
        path: of the folder. format: a key of FORMATS. out: the file; None: the format's own name in the folder.
        options: of weights and of launch files, as in `export_weights` and `export_launch`.

    Returns:
        What was written, and what the format cannot express.

    Raises:
        ConfigError: an unknown format, an option of another one, no run folder, or a plan that the format cannot express.
        MissingDependencyError: the format needs a package that is not installed.
    """
    if format not in FORMATS:
        raise ConfigError(f"format {format!r} is unknown{near_matches(format, FORMATS)}")
    row = FORMATS[format]
    for option, value in options.items():
        if option not in row.options:
            others = ", ".join(name for name, entry in FORMATS.items() if option in entry.options)
            flag = f"--{option.replace('_', '-')} {value}"
            raise ConfigError(f"{flag} does not apply to {row.what}; it belongs to {others or 'no format'}")
    return row.write(ExportRequest(folder=RunFolder(path), format=format, out=out, options=options))
