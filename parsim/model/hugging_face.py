"""Modules from a Hugging Face config.json alone: without network, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from parsim.errors import MissingDependencyError, ModelError
from parsim.files import parse_json
from parsim.model.spec import ModelSpec

if TYPE_CHECKING:
    from torch import nn

_HEADS = {
    "ForImageClassification": "AutoModelForImageClassification",
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
}


def module_from_config(spec: ModelSpec) -> nn.Module:
    """From the config alone, without network; randomly initialised."""
    path = Path(spec.name)
    if not path.is_file():
        raise ModelError(f"no Hugging Face config at {path}; give the path of a config.json")
    try:
        import transformers
    except ImportError as error:
        raise MissingDependencyError(f"transformers is needed to build {path}; install parsim[hf]") from error
    try:
        document = {**parse_json(path.read_text()), **dict(spec.args)}
        architecture = str(document["architectures"][0])
        config = transformers.AutoConfig.for_model(**document)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ModelError(f"{path} is not a Hugging Face config with model_type and architectures: {error!r}") from error
    suffix = next((suffix for suffix in _HEADS if architecture.endswith(suffix)), None)
    if suffix is None:
        raise ModelError(f"{path}: architecture {architecture!r} is not one of those supported: *{', *'.join(_HEADS)}")
    if hasattr(config, "use_cache"):
        config.use_cache = False
    module: nn.Module = getattr(transformers, _HEADS[suffix]).from_config(config)
    return module


def config_shape(module: nn.Module) -> tuple[int, ...] | None:
    config = getattr(module, "config", None)
    if hasattr(config, "image_size"):
        size = config.image_size  # type: ignore[union-attr]
        height, width = (size, size) if isinstance(size, int) else size
        return (config.num_channels, height, width)  # type: ignore[union-attr]
    length = getattr(config, "max_position_embeddings", None)
    return None if length is None else (int(length),)
