"""Plain weights of a run folder: a file that loads into the original module, without parsim."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from parsim.app.config import load_config
from parsim.app.doctor import warn
from parsim.app.run_folder import RunFolder
from parsim.errors import ConfigError, MissingDependencyError, near_matches
from parsim.files import write_atomically

if TYPE_CHECKING:
    from torch import Tensor

    from parsim.execute.checkpoint.checkpoint import Checkpoint

BEST, LAST = "best", "last"
Chosen = Literal["best", "last"]
SUFFIXES = {"state_dict": ".pt", "safetensors": ".safetensors"}
"""Formats of weights, and the suffix of each."""
WEIGHTS = ("trained", "ema")


def export_weights(
    path: Path,
    *,
    format: str = "state_dict",
    out: Path | None = None,
    checkpoint: Chosen | None = None,
    weights: str = "trained",
) -> dict[str, Any]:
    """Write the weights and buffers of a training as the state_dict of its module.

    Args:
        path: of the run folder. format: "state_dict" (`torch.save`, read it with weights_only=True) or "safetensors".
        out: the file; None: weights.pt or weights.safetensors in the run folder.
        weights: "trained", or "ema": their moving averages (training.ema).
        checkpoint: "best" by its validation score, or "last"; None: the best if there is one, else the last.

    Returns:
        What was written: file, format, checkpoint, weights, step, tensors, elements; warnings: newer ones that are damaged.

    Raises:
        ConfigError: an unknown format, no run folder, or no checkpoint. MissingDependencyError: safetensors is not installed.
    """
    if format not in SUFFIXES:
        raise ConfigError(f"format {format!r} is unknown{near_matches(format, SUFFIXES)}")
    if weights not in WEIGHTS:
        raise ConfigError(f"weights {weights!r} are unknown{near_matches(weights, WEIGHTS)}")
    folder = RunFolder(path)
    folder.read_config()
    config = load_config(folder.config)  # the module is built: its code must be trusted
    writer = _writer(format)
    kind, found, told = _found(folder, checkpoint)
    tensors = _state_dict(config.model_spec, found, averaged=weights == "ema", seed=config.training.seed)
    file = path / f"{'ema' if weights == 'ema' else 'weights'}{SUFFIXES[format]}" if out is None else out
    write_atomically(file, lambda handle: writer(tensors, handle), force=True)
    elements = sum(value.numel() for value in tensors.values())
    return {
        "file": str(file),
        "format": format,
        "checkpoint": kind,
        "weights": weights,
        "step": found.step,
        "tensors": len(tensors),
        "elements": elements,
        "warnings": told,
    }


def _found(folder: RunFolder, checkpoint: Chosen | None) -> tuple[str, Checkpoint, list[str]]:
    """Which checkpoint, and what was wrong with those that come before it."""
    from parsim.execute.checkpoint.checkpoint import latest_checkpoint

    places = {BEST: folder.best, LAST: folder.checkpoints}
    if checkpoint is not None and checkpoint not in places:
        raise ConfigError(f"checkpoint {checkpoint!r} is unknown{near_matches(checkpoint, places)}")
    told = []
    for kind in (BEST, LAST) if checkpoint is None else (checkpoint,):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = latest_checkpoint(places[kind])
        told += [str(entry.message) for entry in caught]
        if found is not None:
            for text in told:
                warn(text)
            return kind, found, told
    why = f" ({told[0]})" if told else ""
    best = "; a best one needs [training.evaluation]" if checkpoint == BEST else ""
    raise ConfigError(f"{folder.path} holds no {checkpoint or 'whole'} checkpoint{why}{best}; train with `parsim run` first")


def _state_dict(spec: Any, found: Checkpoint, *, averaged: bool, seed: int) -> dict[str, Tensor]:
    """Of the module with the checkpoint's weights, under every name that the module gives them.

    Parameters that the forward does not use are as `seed` initialises them.
    """
    import torch

    from parsim.execute.checkpoint.checkpoint import load_state, restore_one_by_one
    from parsim.execute.optimizer import EMA, averaged_state
    from parsim.model.build import build_module

    state = load_state(found)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = build_module(spec)
    if averaged:
        trained = {name for name, own in state.optimizer.items() if EMA in own}
        if not trained:
            raise ConfigError(f"{found.folder} holds no averages of the weights; train with training.ema = {{ decay = 0.999 }}")
        state = averaged_state(state, trained)
    types = {value.dtype for value in state.weights.values() if value.is_floating_point()}
    if len(types) == 1 and types != {torch.float32}:
        module = module.to(types.pop())
    restore_one_by_one(dict(module.named_parameters()), state.weights)
    restore_one_by_one(dict(module.named_buffers()), state.buffers)
    return {
        name: value.detach().cpu().contiguous().clone()
        for name, value in module.state_dict().items()
        if isinstance(value, torch.Tensor)
    }


def _writer(format: str) -> Callable[[Mapping[str, Tensor], Any], Any]:
    import torch

    if format == "state_dict":
        return lambda tensors, handle: torch.save(dict(tensors), handle)
    try:
        from safetensors.torch import save
    except ImportError as error:
        raise MissingDependencyError(
            "--format safetensors needs the package safetensors: pip install 'parsim[safetensors]'; or take --format state_dict"
        ) from error
    return lambda tensors, handle: handle.write(save(dict(tensors), {"format": "pt"}))
