"""Models traced beforehand, so that planning needs no torch. `python -m parsim.model.presets.generate` writes them."""

from __future__ import annotations

from importlib.resources import files

from parsim.errors import ModelError
from parsim.model.model import Model

# File stem -> (zoo name, arguments that differ from its defaults). All at block granularity, with the loss.
PRESETS: dict[str, tuple[str, dict[str, str | int | float | bool | None]]] = {
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
GRANULARITY = "block"


def load_preset(stem: str) -> Model:
    """Raises ModelError if the file is not installed or broken."""
    resource = files("parsim.model.presets").joinpath(f"{stem}.json")
    if not resource.is_file():
        raise ModelError(f"the preset {stem}.json is not installed; run python -m parsim.model.presets.generate (needs torch)")
    return Model.from_json(resource.read_text(), f"preset {stem}.json")
