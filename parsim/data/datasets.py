"""The samples a model trains on: a dataset by name, with the inputs and targets the model takes."""

from __future__ import annotations

from pathlib import Path

from parsim.data import load_dataset
from parsim.data.samples import VALUES, Samples, Target, TargetValues, image_shape
from parsim.model.build import interface_of
from parsim.model.objective import BINARY, CLASSES
from parsim.model.spec import ModelSpec

MASKED = ("bert", "bert_small")
"""Models of the zoo that predict the tokens hidden from them; other token models predict the next token."""


def target_of(spec: ModelSpec) -> Target:
    """What the model predicts: a class of an image, tokens of a row of tokens, or values that its interface describes."""
    interface = interface_of(spec)
    target = interface.target
    if target is None or target.high is None or interface.objective.row.targets != CLASSES or len(interface.inputs) != 1:
        return Target(task=VALUES)
    if interface.takes_tokens and target.shape == interface.input_shape:
        return Target(task="masked_token" if spec.name in MASKED else "next_token", classes=target.high)
    (inputs,) = interface.inputs
    is_image = inputs.is_number and (len(inputs.shape) == 1 or image_shape(inputs.shape, 1) is not None)
    if target.shape == () and is_image:
        return Target(task="classify", classes=target.high)
    return Target(task=VALUES)


def dataset_for(spec: ModelSpec, name: str, *, root: str | None, split: str = "train", seed: int = 0) -> Samples:
    """Load `name` for the model. Raises DataError as `load_dataset`."""
    interface = interface_of(spec)
    described = interface.target
    binary = interface.objective.row.targets == BINARY
    return load_dataset(
        name,
        input_shape=interface.input_shape,
        target=target_of(spec),
        root=None if root is None else Path(root),
        split=split,
        seed=seed,
        inputs=interface.inputs,
        targets=None if described is None else TargetValues(described, binary=binary),
    )
