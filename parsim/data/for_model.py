"""The samples a model trains on: a dataset by name, in the shape and with the targets the model takes."""

from __future__ import annotations

from pathlib import Path

from parsim.data.dataset import Dataset, Target
from parsim.errors import DataError
from parsim.model.interface import interface_of
from parsim.model.losses import CLASSES, LOSSES
from parsim.model.spec import ModelSpec

MASKED = ("bert", "bert_small")
"""Models of the zoo that predict the tokens hidden from them; other token models predict the next token."""


def target_of(spec: ModelSpec) -> Target:
    """What the model predicts. Raises DataError for a model that predicts no classes."""
    interface = interface_of(spec)
    if LOSSES[interface.loss].targets != CLASSES:
        raise DataError(f"{spec.name} predicts {interface.output} numbers, and the datasets hold classes; use a classifier")
    classes = interface.output[-1]
    if interface.takes_tokens and len(interface.output) > 1:
        return Target(task="masked_token" if spec.name in MASKED else "next_token", classes=classes)
    return Target(task="classify", classes=classes)


def dataset_for(spec: ModelSpec, name: str, *, root: str | None, split: str = "train", seed: int = 0) -> Dataset:
    """Load `name` for the model. Raises DataError as `load_dataset`."""
    from parsim.data import load_dataset

    return load_dataset(
        name,
        input_shape=interface_of(spec).input_shape,
        target=target_of(spec),
        root=None if root is None else Path(root),
        split=split,
        seed=seed,
    )
