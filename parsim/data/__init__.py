"""Training data: samples in memory, and the order they are read in."""

from __future__ import annotations

from pathlib import Path

from parsim.data.cifar import load_cifar
from parsim.data.dataset import IGNORED, BatchOrder, Dataset, Target, part
from parsim.data.digits import load_digits
from parsim.data.generated import load_synthetic
from parsim.errors import DataError, near_matches

__all__ = ["DATASETS", "IGNORED", "BatchOrder", "Dataset", "Target", "load_dataset", "part"]

DATASETS = ("cifar10", "cifar100", "digits", "synthetic")
SPLITS = ("train", "test")


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
    """Load one of DATASETS as samples of `input_shape` for a model that predicts `target`.

    Args:
        input_shape: of one sample: (c, h, w), a flat (n,), or (seq,) for tokens.
        root: where CIFAR's folders lie; left out, the folder named by PARSIM_DATA_DIR.
        split: "train" or "test". seed, samples: of `synthetic` alone.

    Raises:
        DataError: an unknown name or split, files that are missing or damaged, a model the dataset does not fit.
        MissingDependencyError: digits without scikit-learn.
    """
    if name not in DATASETS:
        raise DataError(f"unknown dataset {name!r}{near_matches(name, DATASETS)}")
    if split not in SPLITS:
        raise DataError(f"unknown split {split!r}; known: {', '.join(SPLITS)}")
    if name == "digits":
        return load_digits(input_shape, target, split)
    if name == "synthetic":
        return load_synthetic(input_shape, target, split, seed=seed, samples=samples)
    return load_cifar(name, input_shape, target, split, root)
