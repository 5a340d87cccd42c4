"""The formats of `parsim export`, by the name that --format takes. A format is one module here and one row of FORMATS."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from parsim.errors import ConfigError, near_matches
from parsim.workflow.exporting.chakra import write_chakra
from parsim.workflow.exporting.chrome import write_chrome
from parsim.workflow.exporting.deepspeed import write_deepspeed
from parsim.workflow.exporting.megatron import write_megatron
from parsim.workflow.exporting.request import Exported, ExportFormat, ExportRequest
from parsim.workflow.exporting.torchtitan import write_torchtitan
from parsim.workflow.exporting.weights import write_weights
from parsim.workflow.folders.run_folder import RunFolder
from parsim.workflow.training.export import Chosen

FORMATS: Mapping[str, ExportFormat] = {
    "state_dict": ExportFormat(what="trained weights, as torch.save writes them", write=write_weights, of_weights=True),
    "safetensors": ExportFormat(what="trained weights, as safetensors", write=write_weights, of_weights=True),
    "deepspeed": ExportFormat(what="a DeepSpeed config: data parallelism and ZeRO", write=write_deepspeed),
    "torchtitan": ExportFormat(what="a TOML file of torchtitan", write=write_torchtitan),
    "megatron": ExportFormat(what="a script with the arguments of Megatron-LM", write=write_megatron),
    "chakra": ExportFormat(what="MLCommons Chakra execution traces, one per rank", write=write_chakra),
    "chrome": ExportFormat(what="the timeline as a Chrome trace, for Perfetto", write=write_chrome),
}


def export_folder(path: Path, *, format: str, out: Path | None = None, checkpoint: Chosen | None = None) -> Exported:
    """Write a folder of `parsim run` or `parsim simulate --out` as a file of another tool.

    Args:
        path: of the folder. format: a key of FORMATS. out: the file; None: the format's own name in the folder.
        checkpoint: "best" or "last", of weights; None: the best if there is one.

    Returns:
        What was written, and what the format cannot express.

    Raises:
        ConfigError: an unknown format, no run folder, or a plan that the format cannot express.
        MissingDependencyError: the format needs a package that is not installed.
    """
    if format not in FORMATS:
        raise ConfigError(f"format {format!r} is unknown{near_matches(format, FORMATS)}")
    row = FORMATS[format]
    if checkpoint is not None and not row.of_weights:
        weights = ", ".join(name for name, entry in FORMATS.items() if entry.of_weights)
        raise ConfigError(f"--checkpoint {checkpoint} means nothing for {row.what}; it belongs to {weights}")
    return row.write(ExportRequest(folder=RunFolder(path), format=format, out=out, checkpoint=checkpoint))
