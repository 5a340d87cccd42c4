"""Samples in memory, and the order in which training reads them.

The order is a pure function of (seed, step). So every plan of one run sees the same samples in the same step, and a
checkpoint's data state is two integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from parsim.errors import DataError

VALUES = "values"
TASKS = ("classify", "next_token", "masked_token", VALUES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a model predicts: one of `classes` per sample (`classify`), or per token (`next_token`, `masked_token`).

    `values`: anything else, or from other inputs than one image or row of tokens; `DataRequest.inputs` and `targets` say what.
    """

    task: str = "classify"
    classes: int = 10

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise DataError(f"unknown task {self.task!r}; known: {', '.join(TASKS)}")
        if self.classes < 2:
            raise DataError(f"a target needs at least 2 classes, got {self.classes}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dataset:
    """Samples kept as they were read, and resized and normalised per batch, so that 32x32 images feed a 224x224 model
    without a copy of the whole set at that size.

    Attributes:
        name: "digits", "cifar10", ... source: where the samples come from and what was done to them, in words.
        split: "train" or "test".
        stored: [n, c, h, w] images (any number type) or [n, seq] int64 tokens.
        targets: int64 [n] classes, or [n, seq] tokens (IGNORED where the loss must not look).
        input_shape: shape of one sample as `batch` returns it. classes: targets are 0 .. classes-1.
        scale, offset: images become stored * scale + offset.
    """

    name: str
    source: str
    split: str
    stored: NDArray[np.generic]
    targets: NDArray[np.int64]
    input_shape: tuple[int, ...]
    classes: int
    scale: float = 1.0
    offset: float = 0.0

    def __post_init__(self) -> None:
        if len(self.stored) != len(self.targets):
            raise DataError(f"{self.name}: {len(self.stored)} samples but {len(self.targets)} targets; they must be as many")
        if self.stored.ndim == 4:
            check_resizable((self.stored.shape[1], self.stored.shape[2], self.stored.shape[3]), self.input_shape, self.name)
        elif self.stored.shape[1:] != self.input_shape:
            raise DataError(
                f"{self.name}: token sequences have shape {self.stored.shape[1:]}, the model takes {self.input_shape}"
            )

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def is_tokens(self) -> bool:
        return self.stored.ndim == 2

    def batch(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.float32] | NDArray[np.int64], NDArray[np.int64]]:
        """Inputs [len(indices), *input_shape] (float32 images or int64 tokens) and their targets, both contiguous."""
        targets = np.ascontiguousarray(self.targets[indices])
        chosen = self.stored[indices]
        if self.is_tokens:
            return np.ascontiguousarray(chosen, dtype=np.int64), targets
        images = chosen.astype(np.float32) * np.float32(self.scale) + np.float32(self.offset)
        return resize(images, self.input_shape), targets

    def values(self, indices: NDArray[np.int64], epoch: int = 0) -> dict[str, NDArray[np.generic]]:
        """A batch as the executor takes it: "input:0" and "target", the same in every epoch."""
        inputs, targets = self.batch(indices)
        return {"input:0": inputs, "target": targets}

    @property
    def types(self) -> Mapping[str, str]:
        """No array has a type of its own: numbers follow the weights."""
        return {}

    @property
    def inputs(self) -> NDArray[np.float32] | NDArray[np.int64]:
        """All inputs [n, *input_shape]; at 224x224 this is large (0.6 MB per image): prefer `batch`."""
        return self.batch(np.arange(len(self), dtype=np.int64))[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NamedDataset:
    """Samples of several inputs of any type, kept as the model takes them.

    Attributes:
        name, source, split: as of a Dataset. samples: how many; sample i is row i modulo the rows that are stored.
        inputs: [rows, ...] by name, in the order in which the model takes them. constants: after them, the same in every batch.
        targets: [rows, ...]; None where the inputs hold them.
        types: torch's names of types, by "input:0" ... and "target"; those without one follow the weights.
    """

    name: str
    source: str
    split: str
    samples: int
    inputs: Mapping[str, NDArray[np.generic]]
    targets: NDArray[np.generic] | None
    constants: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        arrays = {**self.inputs, **({} if self.targets is None else {"targets": self.targets})}
        rows = {name: len(array) for name, array in arrays.items()}
        if not rows or len(set(rows.values())) != 1 or not min(rows.values()) or self.samples < 1:
            raise DataError(f"{self.name}: inputs and targets must have equally many rows, at least 1; got {rows}")

    def __len__(self) -> int:
        return self.samples

    def values(self, indices: NDArray[np.int64], epoch: int = 0) -> dict[str, NDArray[np.generic]]:
        """A batch as the executor takes it: "input:0", "input:1", ... in the order of the inputs, and "target"."""
        rows = indices % len(next(iter(self.inputs.values())))
        arrays = [*(array[rows] for array in self.inputs.values()), *self.constants.values()]
        found = {f"input:{place}": np.ascontiguousarray(array) for place, array in enumerate(arrays)}
        if self.targets is not None:
            found["target"] = np.ascontiguousarray(self.targets[rows])
        return found


def image_shape(input_shape: tuple[int, ...], stored_channels: int) -> tuple[int, int, int] | None:
    """(c, h, w) for the shape of one sample: itself, or for a flat (n,) the square image of n = c*k*k pixels; else None."""
    if len(input_shape) == 3 and min(input_shape) >= 1:
        return (input_shape[0], input_shape[1], input_shape[2])
    if len(input_shape) == 1:
        for channels in dict.fromkeys((stored_channels, 1, 3)):
            side = round((input_shape[0] / channels) ** 0.5)
            if side >= 1 and channels * side * side == input_shape[0]:
                return (channels, side, side)
    return None


def check_images(name: str, target: Target) -> None:
    """Raise DataError for a model that wants anything else than one image or predicts no class of it."""
    if target.task == VALUES:
        raise DataError(
            f"{name} holds images and one class of each, and this model has other inputs or targets; use dataset = "
            "'synthetic', or a dataset of your own as package.module:ROW"
        )


def check_resizable(stored: tuple[int, int, int], input_shape: tuple[int, ...], name: str) -> None:
    """Raise DataError unless `resize` can make samples of `input_shape` from images (c, h, w)."""
    shape = image_shape(input_shape, stored[0])
    if shape is None:
        raise DataError(
            f"{name} holds images, which cannot become samples of shape {input_shape}; give model.input_shape as "
            f"[channels, height, width], or flat as [c*k*k] with c = {stored[0]}, 1 or 3"
        )
    if shape[0] != stored[0] and shape[0] != 1 and shape[0] % stored[0]:
        raise DataError(
            f"{name} has {stored[0]} channels, which cannot become {shape[0]}; use a multiple of {stored[0]} (channels are "
            "repeated) or 1 (they are averaged)"
        )


def resize(images: NDArray[np.float32], input_shape: tuple[int, ...]) -> NDArray[np.float32]:
    """[n, c, h, w] to [n, *input_shape] by nearest neighbour: pixel i of `size` reads pixel floor(i * stored / size).

    A multiple of the stored size repeats every pixel exactly; channels are repeated, or averaged into one.
    """
    shape = image_shape(input_shape, images.shape[1])
    if shape is None:
        raise DataError(f"images cannot become samples of shape {input_shape}")
    channels, height, width = shape
    if channels != images.shape[1]:
        if channels == 1:
            images = images.mean(axis=1, keepdims=True, dtype=np.float32)
        else:
            images = np.tile(images, (1, channels // images.shape[1], 1, 1))
    if (height, width) != images.shape[2:]:
        rows = np.arange(height) * images.shape[2] // height
        columns = np.arange(width) * images.shape[3] // width
        images = images[:, :, rows][:, :, :, columns]
    return np.ascontiguousarray(images.reshape(len(images), *input_shape), dtype=np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOrder:
    """Which samples step k trains on; the same for every plan. Its whole state is (seed, step).

    Each epoch is a permutation of the n samples drawn from (seed, epoch); the samples left over at its end are dropped.
    The permutation sorts raw 64-bit outputs of PCG64, a stream numpy keeps fixed, so it is the same on every machine.
    """

    n: int
    global_batch: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.global_batch < 1 or self.n < self.global_batch:
            raise DataError(
                f"global_batch ({self.global_batch}) must be between 1 and the samples of the dataset ({self.n}); "
                "use a smaller batch or a larger dataset"
            )
        if self.seed < 0:
            raise DataError(f"the seed must be >= 0, got {self.seed}")

    @property
    def steps_per_epoch(self) -> int:
        return self.n // self.global_batch

    def epoch_of(self, step: int) -> int:
        """The pass over the data that a step belongs to, from 0."""
        return step // self.steps_per_epoch

    def indices(self, step: int) -> NDArray[np.int64]:
        """The sample numbers of global step `step` >= 0: int64 [global_batch]."""
        if step < 0:
            raise DataError(f"steps are counted from 0, got {step}")
        epoch, place = divmod(step, self.steps_per_epoch)
        return _permutation(self.n, self.seed, epoch)[place * self.global_batch : (place + 1) * self.global_batch]


@lru_cache(maxsize=4)
def _permutation(n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(n)
    order = np.argsort(keys, kind="stable").astype(np.int64)
    order.setflags(write=False)
    return order


def part(indices: NDArray[np.int64], *, replica: int, dp: int, microbatch: int = 0, microbatches: int = 1) -> NDArray[np.int64]:
    """The samples of one microbatch of one replica: contiguous slices, replica-major.

    With s = len(indices) / (dp * microbatches), replica r and microbatch m read indices[(r * microbatches + m) * s :][:s].

    Raises:
        DataError: the batch does not divide, or replica or microbatch is out of range.
    """
    parts = dp * microbatches
    if parts < 1 or len(indices) % parts:
        raise DataError(f"the batch ({len(indices)}) must be divisible by dp ({dp}) * microbatches ({microbatches}) = {parts}")
    if not (0 <= replica < dp and 0 <= microbatch < microbatches):
        raise DataError(f"replica {replica} of {dp}, microbatch {microbatch} of {microbatches}: count both from 0")
    size = len(indices) // parts
    start = (replica * microbatches + microbatch) * size
    return indices[start : start + size]
