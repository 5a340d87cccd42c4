"""Training data: samples in memory, and the order they are read in. A new dataset is one row of DATASETS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from parsim.data.cifar import load_cifar
from parsim.data.dataset import IGNORED, BatchOrder, Dataset, Target, part
from parsim.data.digits import load_digits
from parsim.data.generated import load_synthetic
from parsim.errors import DataError
from parsim.registry import Registry

__all__ = [
    "DATASETS",
    "IGNORED",
    "BatchOrder",
    "DataRequest",
    "DataSource",
    "Dataset",
    "Target",
    "load_dataset",
    "part",
]

SPLITS = ("train", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRequest:
    """A request for a dataset; the attributes are the arguments of `load_dataset`."""

    input_shape: tuple[int, ...]
    target: Target
    split: str
    root: Path | None
    seed: int
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """One dataset.

    Attributes:
        load: makes the Dataset; the same samples for equal requests, on every rank. Raises DataError where the model does not
            suit the data.
    """

    load: Callable[[DataRequest], Dataset]


DATASETS: Registry[DataSource] = Registry(
    "dataset",
    DataSource,
    {
        "cifar10": DataSource(load=lambda ask: load_cifar("cifar10", ask.input_shape, ask.target, ask.split, ask.root)),
        "cifar100": DataSource(load=lambda ask: load_cifar("cifar100", ask.input_shape, ask.target, ask.split, ask.root)),
        "digits": DataSource(load=lambda ask: load_digits(ask.input_shape, ask.target, ask.split)),
        "synthetic": DataSource(
            load=lambda ask: load_synthetic(ask.input_shape, ask.target, ask.split, seed=ask.seed, samples=ask.samples)
        ),
    },
    error=DataError,
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
) -> Dataset:
    """Load a row of DATASETS (or "package.module:ROW") as samples of `input_shape` for a model that predicts `target`.

    Args:
        input_shape: of one sample: (c, h, w), a flat (n,), or (seq,) for tokens.
        root: where CIFAR's folders lie; left out, the folder named by PARSIM_DATA_DIR.
        split: "train" or "test". seed, samples: of `synthetic` alone.

    Raises:
        DataError: an unknown name or split, files that are missing or damaged, a model the dataset does not fit.
        MissingDependencyError: digits without scikit-learn.
    """
    source = DATASETS[name]
    if split not in SPLITS:
        raise DataError(f"unknown split {split!r}; known: {', '.join(SPLITS)}")
    found = source.load(DataRequest(input_shape=input_shape, target=target, split=split, root=root, seed=seed, samples=samples))
    if not isinstance(found, Dataset):
        raise DataError(f"dataset {name!r} returned a {type(found).__name__}; return a parsim.data.Dataset")
    return found
