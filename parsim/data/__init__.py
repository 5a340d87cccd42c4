"""Training data: samples in memory, and the order they are read in. A new dataset is one row of DATASETS."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from parsim.data.cifar import load_cifar
from parsim.data.generated import load_digits, load_synthetic, load_values
from parsim.data.samples import (
    VALUES,
    BatchOrder,
    DataRequest,
    Dataset,
    DataSource,
    NamedDataset,
    Order,
    Samples,
    Target,
    TargetValues,
    hold_out,
    image_shape,
    load_own,
    order_of,
    part,
    train_and_validation,
)
from parsim.errors import DataError, NoSplitError
from parsim.model.build import interface_of
from parsim.model.inputs import IGNORED, ModelInput
from parsim.model.objective import BINARY, CLASSES
from parsim.model.spec import ModelSpec
from parsim.registry import Registry

__all__ = [
    "DATASETS",
    "IGNORED",
    "BatchOrder",
    "DataRequest",
    "DataSource",
    "Dataset",
    "NamedDataset",
    "Order",
    "Samples",
    "Target",
    "TargetValues",
    "dataset_for",
    "hold_out",
    "load_dataset",
    "order_of",
    "part",
    "target_of",
    "train_and_validation",
]

SPLITS = ("train", "validation", "test")
"""The shipped datasets have no "validation"; a training holds a part of "train" out."""


def _from_factory(row: Any) -> Any:
    is_factory = callable(row) and not isinstance(row, DataSource)
    return DataSource(load=partial(load_own, row), is_own=True) if is_factory else row


def _synthetic(ask: DataRequest) -> Samples:
    if ask.target.task == VALUES:
        return load_values(ask.inputs, ask.targets, ask.split, seed=ask.seed, samples=ask.samples)
    return load_synthetic(ask.input_shape, ask.target, ask.split, seed=ask.seed, samples=ask.samples)


DATASETS: Registry[DataSource] = Registry(
    "dataset",
    DataSource,
    {
        "cifar10": DataSource(load=lambda ask: load_cifar("cifar10", ask.input_shape, ask.target, ask.split, ask.root)),
        "cifar100": DataSource(load=lambda ask: load_cifar("cifar100", ask.input_shape, ask.target, ask.split, ask.root)),
        "digits": DataSource(load=lambda ask: load_digits(ask.input_shape, ask.target, ask.split)),
        "synthetic": DataSource(load=_synthetic),
    },
    error=DataError,
    adapt=_from_factory,
)


def load_dataset(
    name: str,
    *,
    input_shape: tuple[int, ...],
    target: Target,
    root: Path | None = None,
    split: str = "train",
    seed: int = 0,
    samples: int = 4096,
    inputs: tuple[ModelInput, ...] = (),
    targets: TargetValues | None = None,
) -> Samples:
    """Load a row of DATASETS (or "package.module:ROW") as samples of `input_shape` for a model that predicts `target`.

    Args:
        input_shape: of one sample: (c, h, w), a flat (n,), or (seq,) for tokens.
        root: where CIFAR's folders lie; left out, the folder named by PARSIM_DATA_DIR.
        split: "train", "test", or "validation" of one's own. seed: of `synthetic`, and of random transformations. samples: of
            `synthetic` alone.
        inputs, targets: what the model takes and predicts, where `target.task` is "values".

    Raises DataError: an unknown name or split, files that are missing or damaged, a model the dataset does not fit;
    MissingDependencyError: digits without scikit-learn.
    """
    source = DATASETS[name]
    if split not in SPLITS:
        raise DataError(f"unknown split {split!r}; known: {', '.join(SPLITS)}")
    if split == "validation" and not source.is_own:
        raise NoSplitError(f"dataset {name} has no split 'validation'; a part of 'train' is held out instead")
    request = DataRequest(
        input_shape=input_shape,
        target=target,
        split=split,
        root=root,
        seed=seed,
        samples=samples,
        inputs=inputs,
        targets=targets,
    )
    data = source.load(request)
    if not isinstance(data, Samples):
        raise DataError(f"dataset {name!r} returned a {type(data).__name__}; return a parsim.data.Dataset")
    return data


# The samples a model trains on: a dataset by name, with the inputs and targets the model takes.


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
