"""Generated samples of any inputs and targets, for models that no bundled dataset fits.

Numbers are standard normal, integers and booleans uniform. A target follows from its own sample, so that a model can learn it:
the mean of a few numbers of the sample, chosen once, with noise. Class and binary targets are cut from that number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parsim.data.samples import Dataset, NamedDataset, Target, TargetValues, check_images, image_shape, permutation
from parsim.errors import DataError, MissingDependencyError
from parsim.model.inputs import DEFAULT_DTYPE, IGNORED, IGNORED_SHARE, ModelInput

MOST_BYTES = 256 * 2**20
"""Of all rows that are kept; further samples repeat them."""
MIXED = 4
NOISE = 0.1


def load_values(
    inputs: tuple[ModelInput, ...], targets: TargetValues | None, split: str, *, seed: int, samples: int
) -> NamedDataset:
    """`samples` samples, the same for the same (inputs, targets, split, seed). Raises DataError: no samples, a seed below 0, or
    no input with a batch."""
    batched, constant = ([entry for entry in inputs if entry.constant is is_fixed] for is_fixed in (False, True))
    if samples < 1 or seed < 0 or not batched:
        raise DataError(f"synthetic data needs samples >= 1, seed >= 0 and an input, got {samples}, {seed} and {len(batched)}")
    described = [*batched, *([] if targets is None else [targets.described])]
    row_bytes = sum(8 * math.prod(entry.shape) for entry in described)
    rows = max(1, min(samples, MOST_BYTES // row_bytes))
    rng, fixed = np.random.default_rng([seed, 0 if split == "train" else 1]), np.random.default_rng([seed, 2])
    arrays = {entry.name: _drawn(entry, (rows, *entry.shape), rng) for entry in batched}
    constants = {entry.name: _drawn(entry, entry.shape, fixed) for entry in constant}
    places = {f"input:{place}": entry for place, entry in enumerate([*batched, *constant])}
    values = None
    if targets is not None:
        values = _targets(targets, _features(batched, arrays), np.random.default_rng([seed, 3]), rng)
        places["target"] = targets.described
    return NamedDataset(
        name="synthetic",
        source=f"generated from seed {seed}: {rows} different samples, targets are means of {MIXED} numbers of a sample",
        split=split,
        samples=samples,
        inputs=arrays,
        targets=values,
        constants=constants,
        types={place: entry.dtype for place, entry in places.items() if entry.dtype != DEFAULT_DTYPE},
    )


def _drawn(entry: ModelInput, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[Any]:
    if entry.dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if entry.is_integer:
        if entry.high is None:
            raise DataError(
                f"input {entry.name} holds integers, and their range is unknown; give high, their exclusive upper bound"
            )
        drawn = rng.integers(entry.least_drawn, entry.high, shape)
        if entry.has_ignored:
            drawn[rng.random(shape) < IGNORED_SHARE] = IGNORED
        return drawn.astype(entry.dtype)
    if entry.dtype.startswith("complex"):
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)) / math.sqrt(2)
    return rng.standard_normal(shape, dtype=np.float32)


def _features(inputs: Sequence[ModelInput], arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
    """[rows, numbers] of about unit deviation."""
    columns = []
    for entry in inputs:
        flat = arrays[entry.name].reshape(len(arrays[entry.name]), -1)
        if entry.is_integer and entry.high is not None:
            flat = (flat - (entry.low + entry.high - 1) / 2) / max(1.0, (entry.high - entry.low) / math.sqrt(12))
        columns.append(np.asarray(flat.real, dtype=np.float64))
    return np.concatenate(columns, axis=1)


def _targets(
    targets: TargetValues, features: NDArray[np.float64], fixed: np.random.Generator, rng: np.random.Generator
) -> NDArray[Any]:
    entry, rows = targets.described, len(features)
    size = math.prod(entry.shape)
    chosen = fixed.integers(0, features.shape[1], (MIXED, size))
    values = sum(features[:, places] for places in chosen) / math.sqrt(MIXED)
    values = (values + NOISE * rng.standard_normal((rows, size))).reshape(rows, *entry.shape)
    if targets.binary:
        return (values > 0).astype(np.float32)
    if entry.dtype == "bool":
        return np.asarray(values > 0)
    if not entry.is_integer:
        return values.astype(np.complex128 if entry.dtype.startswith("complex") else np.float32)
    if entry.high is None:
        raise DataError("targets hold integers, and their range is unknown; give target.high, their exclusive upper bound")
    share = 1 / (1 + np.exp(-1.702 * values))  # close to the normal distribution's own: classes are about equally frequent
    low = entry.least_drawn
    classes = low + (share * (entry.high - low)).astype(np.int64)
    return np.clip(classes, low, entry.high - 1).astype(entry.dtype)


# Generated samples of any shape that a model can learn: for models and sizes no bundled dataset fits.
#
# Leaves out everything that makes real data hard; a loss that falls on it says that training works, not how well.


MAX_STORED_SIDE = 32
MASKED_FRACTION = 0.15
FOLLOWS_RULE = 0.9


def load_synthetic(input_shape: tuple[int, ...], target: Target, split: str, *, seed: int, samples: int) -> Dataset:
    """`samples` samples, the same for the same (shape, target, split, seed).

    classify: images (or flat vectors) of unit noise around a mean image of their class.
    next_token: sequences in which a fixed rule gives the next token 9 times of 10; the target is the sequence shifted by one.
    masked_token: the same sequences with 15% of the tokens replaced by the last token of the vocabulary; the target holds the
    replaced tokens, and IGNORED elsewhere.

    Raises DataError: a shape that is neither (c, h, w), (n,) nor, for tokens, (seq,).
    """
    if samples < 1 or seed < 0:
        raise DataError(f"synthetic data needs samples >= 1 and seed >= 0, got {samples} and {seed}")
    if not input_shape or min(input_shape) < 1:
        raise DataError(f"the shape of a sample must be positive sizes, got {input_shape}")
    rng = np.random.default_rng([seed, 0 if split == "train" else 1])
    if target.task == "classify":
        return _images(input_shape, target, split, seed, samples, rng)
    if len(input_shape) != 1:
        raise DataError(f"token samples have shape [seq], got {list(input_shape)}; set model.input_shape = [seq]")
    return _tokens(input_shape[0], target, split, seed, samples, rng)


def _images(
    input_shape: tuple[int, ...], target: Target, split: str, seed: int, samples: int, rng: np.random.Generator
) -> Dataset:
    shape = image_shape(input_shape, 1)
    if shape is None and len(input_shape) == 1:
        shape = (input_shape[0], 1, 1)
    if shape is None:
        raise DataError(f"synthetic images have shape [c, h, w] or [n], got {list(input_shape)}")
    channels, height, width = shape
    stored_shape = (channels, min(height, MAX_STORED_SIDE), min(width, MAX_STORED_SIDE))
    means = np.random.default_rng([seed, 2]).standard_normal((target.classes, *stored_shape), dtype=np.float32)
    targets = rng.integers(0, target.classes, samples)
    stored = rng.standard_normal((samples, *stored_shape), dtype=np.float32)
    stored += means[targets]
    return Dataset(
        name="synthetic",
        source=f"generated from seed {seed}: unit noise around one mean image per class, pixels repeated to the model's size",
        split=split,
        stored=stored,
        targets=targets,
        input_shape=input_shape,
        classes=target.classes,
        scale=0.5**0.5,
    )


def _tokens(seq: int, target: Target, split: str, seed: int, samples: int, rng: np.random.Generator) -> Dataset:
    masked = target.task == "masked_token"
    vocabulary = target.classes - 1 if masked else target.classes
    successor = np.random.default_rng([seed, 3]).permutation(vocabulary)
    sequences = np.empty((samples, seq + 1), dtype=np.int64)
    sequences[:, 0] = rng.integers(0, vocabulary, samples)
    for place in range(seq):
        surprise = rng.integers(0, vocabulary, samples)
        ruled = rng.random(samples) < FOLLOWS_RULE
        sequences[:, place + 1] = np.where(ruled, successor[sequences[:, place]], surprise)
    inputs, targets = sequences[:, :-1], sequences[:, 1:]
    if masked:
        hidden = rng.random(inputs.shape) < MASKED_FRACTION
        hidden[:, 0] |= ~hidden.any(axis=1)  # at least one per sample, so that every sample has a loss
        inputs, targets = np.where(hidden, vocabulary, inputs), np.where(hidden, inputs, IGNORED)
    return Dataset(
        name="synthetic",
        source=f"generated from seed {seed}: tokens that follow a fixed successor 9 times of 10, {target.task} targets",
        split=split,
        stored=np.ascontiguousarray(inputs),
        targets=np.ascontiguousarray(targets),
        input_shape=(seq,),
        classes=target.classes,
    )


# scikit-learn's bundled handwritten digits: 1,797 images of 8x8 pixels with values 0..16, ten classes; needs no download.
#
# Source: `sklearn.datasets.load_digits` (the test set of the UCI "Optical Recognition of Handwritten Digits" data).


CLASSES = 10
TEST_SAMPLES = 297
_SPLIT_SEED = 20240229  # fixed: which images are held out never depends on the run's seed


def load_digits(input_shape: tuple[int, ...], target: Target, split: str) -> Dataset:
    """1,500 training or 297 test images, standardised with the mean and deviation of the training images. Raises DataError: the
    model wants tokens, or fewer than ten classes; MissingDependencyError: scikit-learn is not installed."""
    check_images("digits", target)
    if target.task != "classify" or target.classes < CLASSES:
        raise DataError(
            f"digits has {CLASSES} classes of images; the model predicts {target.classes} with task {target.task!r}; "
            f"use a model with num_classes >= {CLASSES}, or dataset = 'synthetic'"
        )
    try:
        from sklearn import datasets
    except ImportError as error:
        raise MissingDependencyError(
            "the digits dataset comes with scikit-learn, which is not installed; "
            "pip install 'parsim[torch]', or use dataset = 'synthetic'"
        ) from error
    bunch = datasets.load_digits()
    images, labels = bunch.images.astype(np.uint8)[:, None], bunch.target.astype(np.int64)
    order = permutation(len(images), _SPLIT_SEED)
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
