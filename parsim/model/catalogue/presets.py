"""Models traced beforehand, so that planning needs no torch. `python tools/generate_presets.py` writes them.

A file is gzipped text with one Model as JSON per line, in the order of GRANULARITIES.
"""

from __future__ import annotations

import gzip
import zlib
from importlib.resources import files

from parsim.errors import ModelError
from parsim.model.model import GRANULARITIES, Model

# File stem -> (zoo name, arguments that differ from its defaults). With the loss.
PRESETS: dict[str, tuple[str, dict[str, str | int | float | bool]]] = {
    "resnet50": ("resnet50", {}),
    "resnet50-100": ("resnet50", {"num_classes": 100}),
    "resnet_small": ("resnet_small", {}),
    "vit_b_16": ("vit_b_16", {}),
    "vit_b_16-100": ("vit_b_16", {"num_classes": 100}),
    "vit_small": ("vit_small", {}),
    "vgg16": ("vgg16", {}),
    "vgg16-100": ("vgg16", {"num_classes": 100}),
    "vgg_small": ("vgg_small", {}),
    "gpt": ("gpt", {}),
    "gpt_small": ("gpt_small", {}),
    "bert": ("bert", {}),
    "bert_small": ("bert_small", {}),
    "mlp": ("mlp", {}),
}
SUFFIX = ".jsonl.gz"


def preset_lines(stem: str) -> list[str]:
    """The JSON of each granularity. Raises ModelError if the file is not installed or broken."""
    resource = files("parsim.model.catalogue").joinpath("presets", f"{stem}{SUFFIX}")
    if not resource.is_file():
        raise ModelError(f"the preset {stem}{SUFFIX} is not installed; run python tools/generate_presets.py (needs torch)")
    try:
        lines = gzip.decompress(resource.read_bytes()).decode().splitlines()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ModelError(f"the preset {stem}{SUFFIX} is broken: {error}; install parsim again") from error
    if len(lines) != len(GRANULARITIES):
        raise ModelError(f"the preset {stem}{SUFFIX} has {len(lines)} models, not {len(GRANULARITIES)}; generate it again")
    return lines


def load_preset(stem: str, granularity: str) -> Model:
    """Raises ModelError if the file is not installed or broken."""
    return Model.from_json(preset_lines(stem)[GRANULARITIES.index(granularity)], f"preset {stem}{SUFFIX}")
