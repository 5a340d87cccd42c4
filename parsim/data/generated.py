"""Generated samples of any shape that a model can learn: for models and sizes no bundled dataset fits.

Leaves out everything that makes real data hard; a loss that falls on it says that training works, not how well.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from parsim.data.dataset import Dataset, Target, image_shape
from parsim.errors import DataError
from parsim.model.inputs import IGNORED

MAX_STORED_SIDE = 32
MASKED_FRACTION = 0.15
FOLLOWS_RULE = 0.9


def load_synthetic(input_shape: tuple[int, ...], target: Target, split: str, *, seed: int, samples: int) -> Dataset:
    """`samples` samples, the same for the same (shape, target, split, seed).

    classify: images (or flat vectors) of unit noise around a mean image of their class.
    next_token: sequences in which a fixed rule gives the next token 9 times of 10; the target is the sequence shifted by one.
    masked_token: the same sequences with 15% of the tokens replaced by the last token of the vocabulary; the target
    holds the replaced tokens, and IGNORED elsewhere.

    Raises:
        DataError: a shape that is neither (c, h, w), (n,) nor, for tokens, (seq,).
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
    inputs, targets = _mask(sequences[:, :-1], vocabulary, rng) if masked else (sequences[:, :-1], sequences[:, 1:])
    return Dataset(
        name="synthetic",
        source=f"generated from seed {seed}: tokens that follow a fixed successor 9 times of 10, {target.task} targets",
        split=split,
        stored=np.ascontiguousarray(inputs),
        targets=np.ascontiguousarray(targets),
        input_shape=(seq,),
        classes=target.classes,
    )


def _mask(
    sequences: NDArray[np.int64], mask_token: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    hidden = rng.random(sequences.shape) < MASKED_FRACTION
    hidden[:, 0] |= ~hidden.any(axis=1)  # at least one per sample, so that every sample has a loss
    return np.where(hidden, mask_token, sequences), np.where(hidden, sequences, IGNORED)
