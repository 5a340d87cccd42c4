"""scikit-learn's bundled handwritten digits: 1,797 images of 8x8 pixels with values 0..16, ten classes; needs no download.

Source: `sklearn.datasets.load_digits` (the test set of the UCI "Optical Recognition of Handwritten Digits" data).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from parsim.data.dataset import Dataset, Target, check_images
from parsim.errors import DataError, MissingDependencyError

CLASSES = 10
TEST_SAMPLES = 297
_SPLIT_SEED = 20240229  # fixed: which images are held out never depends on the run's seed


def load_digits(input_shape: tuple[int, ...], target: Target, split: str) -> Dataset:
    """1,500 training or 297 test images, standardised with the mean and deviation of the training images.

    Raises:
        DataError: the model wants tokens, or fewer than ten classes.
        MissingDependencyError: scikit-learn is not installed.
    """
    check_images("digits", target)
    if target.task != "classify" or target.classes < CLASSES:
        raise DataError(
            f"digits has {CLASSES} classes of images; the model predicts {target.classes} with task {target.task!r}; "
            f"use a model with num_classes >= {CLASSES}, or dataset = 'synthetic'"
        )
    images, labels = _read()
    order = np.argsort(np.random.PCG64(np.random.SeedSequence(_SPLIT_SEED)).random_raw(len(images)), kind="stable")
    train, test = order[TEST_SAMPLES:], order[:TEST_SAMPLES]
    mean, deviation = float(images[train].mean()), float(images[train].std())
    chosen = train if split == "train" else test
    return Dataset(
        name="digits",
        source="scikit-learn's bundled 8x8 digits, pixels repeated to the model's size, standardised",
        split=split,
        stored=images[chosen],
        targets=labels[chosen],
        input_shape=input_shape,
        classes=CLASSES,
        scale=1.0 / deviation,
        offset=-mean / deviation,
    )


def _read() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    try:
        from sklearn import datasets
    except ImportError as error:
        raise MissingDependencyError(
            "the digits dataset comes with scikit-learn, which is not installed; "
            "pip install 'parsim[torch]', or use dataset = 'synthetic'"
        ) from error
    bunch = datasets.load_digits()
    return bunch.images.astype(np.uint8)[:, None], bunch.target.astype(np.int64)
