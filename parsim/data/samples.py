"""What a model takes of one sample, and samples of the user's own brought into that form."""

from __future__ import annotations

import contextlib
import inspect
import os
import random
import threading
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from parsim.errors import DataError, FactoryError, NoSplitError
from parsim.model.inputs import DEFAULT_DTYPE, IGNORED, ModelInput

TARGETS = ("target", "targets", "labels", "label", "y")
"""Names under which a mapping may hold the target."""


@dataclass(frozen=True, slots=True)
class Described:
    """The values of a sample, in the order in which the model takes them. name: of the dataset, for messages. inputs: with a
    batch. target: None where the inputs hold it."""

    name: str
    inputs: tuple[ModelInput, ...]
    target: ModelInput | None

    @property
    def entries(self) -> dict[str, ModelInput]:
        """By "input:0", ... and "target"."""
        inputs = {f"input:{place}": value for place, value in enumerate(self.inputs)}
        return inputs if self.target is None else {**inputs, "target": self.target}

    @property
    def types(self) -> Mapping[str, str]:
        """Types that do not follow the weights, by torch's names."""
        return {value: entry.dtype for value, entry in self.entries.items() if entry.dtype != DEFAULT_DTYPE}

    @property
    def form(self) -> str:
        names = [*(entry.name for entry in self.inputs), *(() if self.target is None else ("target",))]
        return f"({', '.join(names)})" if len(names) > 1 else names[0]

    def batch(self, samples: Sequence[Any], numbers: Sequence[int]) -> dict[str, NDArray[np.generic]]:
        """Samples, of these numbers, one below the other. Raises DataError: a sample that does not suit the model; it names
        sample, value, shape and type."""
        rows = []
        for sample, number in zip(samples, numbers, strict=True):
            parts = zip(self.entries.values(), self._parts(sample, f"sample {number}"), strict=True)
            rows.append([self._checked(value, np.asarray(_array(part)), f"sample {number}") for value, part in parts])
        return {name: np.ascontiguousarray(np.stack([row[place] for row in rows])) for place, name in enumerate(self.entries)}

    def _parts(self, sample: Any, where: str) -> list[Any]:
        count = len(self.entries)
        if isinstance(sample, Mapping):
            keys = [value.name for value in self.inputs]
            if self.target is not None:
                keys.append(next((key for key in TARGETS if key in sample and key not in keys), "target"))
            missing = [key for key in keys if key not in sample]
            if missing:
                raise DataError(
                    f"{self.name}: {where} has no {missing[0]!r} (its keys: {', '.join(map(str, sample))}); the model takes "
                    f"{self.form}, and the target may be called {' or '.join(TARGETS)}"
                )
            return [sample[key] for key in keys]
        if count == 1:
            return [sample[0] if isinstance(sample, tuple | list) and len(sample) == 1 else sample]
        if not isinstance(sample, tuple | list):
            raise DataError(
                f"{self.name}: {where} is a {type(sample).__name__}; return a tuple {self.form} or a mapping with these names"
            )
        if len(sample) != count:
            raise DataError(f"{self.name}: {where} has {len(sample)} values; the model takes {count}: {self.form}")
        return list(sample)

    def _checked(self, entry: ModelInput, array: NDArray[Any], where: str) -> NDArray[Any]:
        what = f"{self.name}: {entry.name} of {where}"
        if array.shape != entry.shape:
            raise DataError(
                f"{what} has shape {list(array.shape)}, and the model takes {list(entry.shape)}; change the dataset, or "
                "model.input_shape (or inputs, target)"
            )
        kinds = "fc" if entry.dtype.startswith("complex") else "f" if entry.is_number else "iu" if entry.is_integer else "b"
        if array.dtype.kind not in kinds:
            raise DataError(
                f"{what} is {array.dtype}, and the model takes {entry.dtype}; convert it in the dataset (images: x / 255)"
            )
        if entry.is_integer and entry.high is not None and array.size:
            seen = array[array != IGNORED] if entry is self.target else array
            if seen.size and (int(seen.min()) < entry.low or int(seen.max()) >= entry.high):
                raise DataError(
                    f"{what} holds {int(seen.min())} to {int(seen.max())}, and the model takes {entry.low} to {entry.high - 1}"
                    + ("; give low = -100 if these are labels, of which its loss ignores -100" if seen.min() == IGNORED else "")
                )
        return array.astype(entry.dtype) if entry.is_integer else array


def _array(value: Any) -> Any:
    """A tensor as an array; bfloat16, which numpy lacks, as float32."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        return (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
    return value


# Samples in memory, and the order in which training reads them.
#
# The order is a pure function of (seed, step). So every plan of one run sees the same samples in the same step, and a
# checkpoint's data state is two integers.


VALUES = "values"
TASKS = ("classify", "next_token", "masked_token", VALUES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a model predicts: one of `classes` per sample (`classify`), or per token (`next_token`, `masked_token`). `values`:
    anything else, or from other inputs than one image or row of tokens; `DataRequest.inputs` and `targets` say what."""

    task: str = "classify"
    classes: int = 10

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise DataError(f"unknown task {self.task!r}; known: {', '.join(TASKS)}")
        if self.classes < 2:
            raise DataError(f"a target needs at least 2 classes, got {self.classes}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dataset:
    """Samples kept as they were read, and resized and normalised per batch, so that 32x32 images feed a 224x224 model without a
    copy of the whole set at that size.

    Attributes:
        source: where the samples come from and what was done to them, in words. split: "train" or "test".
        stored: [n, c, h, w] images (any number type) or [n, seq] int64 tokens.
        targets: int64 [n] classes, or [n, seq] tokens (IGNORED where the loss must not look). classes: they are 0 .. classes-1.
        input_shape: of one sample as `batch` returns it. scale, offset: images become stored * scale + offset.
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
            check_resizable(self.stored.shape[1], self.input_shape, self.name)
        elif self.stored.shape[1:] != self.input_shape:
            raise DataError(
                f"{self.name}: token sequences have shape {self.stored.shape[1:]}, the model takes {self.input_shape}"
            )

    def __len__(self) -> int:
        return len(self.targets)

    def batch(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.float32] | NDArray[np.int64], NDArray[np.int64]]:
        """Inputs [len(indices), *input_shape] (float32 images or int64 tokens) and their targets, both contiguous."""
        targets = np.ascontiguousarray(self.targets[indices])
        chosen = self.stored[indices]
        if self.stored.ndim == 2:
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
        samples: how many; sample i is row i modulo the rows that are stored.
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
        batch = {f"input:{place}": np.ascontiguousarray(array) for place, array in enumerate(arrays)}
        if self.targets is not None:
            batch["target"] = np.ascontiguousarray(self.targets[rows])
        return batch


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


def check_resizable(channels: int, input_shape: tuple[int, ...], name: str) -> None:
    """Raise DataError unless `resize` can make samples of `input_shape` from images with so many channels."""
    shape = image_shape(input_shape, channels)
    if shape is None:
        raise DataError(
            f"{name} holds images, which cannot become samples of shape {input_shape}; give model.input_shape as "
            f"[channels, height, width], or flat as [c*k*k] with c = {channels}, 1 or 3"
        )
    if shape[0] != channels and shape[0] != 1 and shape[0] % channels:
        raise DataError(
            f"{name} has {channels} channels, which cannot become {shape[0]}; use a multiple of {channels} (channels are "
            "repeated) or 1 (they are averaged)"
        )


def resize(images: NDArray[np.float32], input_shape: tuple[int, ...]) -> NDArray[np.float32]:
    """[n, c, h, w] to [n, *input_shape] by nearest neighbour: pixel i of `size` reads pixel floor(i * stored / size). A
    multiple of the stored size repeats every pixel exactly; channels are repeated, or averaged into one."""
    shape = image_shape(input_shape, images.shape[1])
    assert shape is not None, "checked when the dataset was made"
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
    """Which samples step k trains on; the same for every plan. Its whole state is (seed, step). Each epoch is a permutation of
    the n samples drawn from (seed, epoch); the samples left over at its end are dropped."""

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
        return permutation(self.n, self.seed, epoch)[place * self.global_batch : (place + 1) * self.global_batch]


@lru_cache(maxsize=4)
def permutation(count: int, *seed: int) -> NDArray[np.int64]:
    """A uniformly random order of 0 .. count-1, the same on every machine: int64 [count], not to be written to. It sorts raw
    64-bit outputs of PCG64, a stream that numpy keeps fixed."""
    keys = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(count)
    order = np.argsort(keys, kind="stable").astype(np.int64)
    order.setflags(write=False)
    return order


def part(indices: NDArray[np.int64], *, replica: int, dp: int, microbatch: int = 0, microbatches: int = 1) -> NDArray[np.int64]:
    """The samples of one microbatch of one replica: contiguous slices, replica-major. With s = len(indices) / (dp *
    microbatches), replica r and microbatch m read indices[(r * microbatches + m) * s :][:s]. Raises DataError: the batch does
    not divide, or replica or microbatch is out of range."""
    parts = dp * microbatches
    if parts < 1 or len(indices) % parts:
        raise DataError(f"the batch ({len(indices)}) must be divisible by dp ({dp}) * microbatches ({microbatches}) = {parts}")
    if not (0 <= replica < dp and 0 <= microbatch < microbatches):
        raise DataError(f"replica {replica} of {dp}, microbatch {microbatch} of {microbatches}: count both from 0")
    size = len(indices) // parts
    start = (replica * microbatches + microbatch) * size
    return indices[start : start + size]


# The generators of the process (Python's, numpy's, and torch's for the CPU), which one thread uses at a time.
#
# On a GPU a thread reads the next samples beside the step, and datasets of the user's own draw from them. So does a component
# that draws its numbers on the host. Whoever needs the generators holds them (`alone`) and leaves them as they were.


_held: list[AbstractContextManager[bool]] = [threading.RLock()]


def alone() -> AbstractContextManager[bool]:
    """Inside, no other thread that asks uses the generators."""
    return _held[0]


if hasattr(os, "register_at_fork"):  # in a fork, whichever thread held them is not there
    os.register_at_fork(after_in_child=lambda: _held.__setitem__(0, threading.RLock()))


# Datasets of the user's own: map-style (`__getitem__`, `__len__`) and iterable ones, torch's or any others.
#
# What a sample is must not depend on the plan. So before each sample of a map-style dataset is read, the generators of
# Python, numpy and torch are seeded from (seed, split, epoch, sample). An iterable one is seeded once per pass and read in
# its own order, the same on every rank; a rank keeps its part. The training's own random states are put back.


Arrays = dict[str, NDArray[np.generic]]


class RandomStates:
    """The states of the generators of Python, numpy and torch while a dataset is read, apart from those of the training."""

    def __init__(self) -> None:
        self._last: tuple[Any, Any, Any] | None = None

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        with alone():
            others = _states()
            if self._last is not None:
                _set_states(self._last)
            try:
                yield
            finally:
                self._last = _states()
                _set_states(others)


def _states() -> tuple[Any, Any, Any]:
    import torch

    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()  # noqa: NPY002


def _set_states(states: tuple[Any, Any, Any]) -> None:
    import torch

    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    torch.default_generator.set_state(states[2])


def seed_generators(seed: int, split: str, *numbers: int) -> None:
    """Seed the three generators from a seed, the name of a split, and whole numbers >= 0."""
    import torch

    first, second = np.random.SeedSequence((seed, zlib.crc32(split.encode()), *numbers)).generate_state(2, np.uint32)
    random.seed(int(first))
    np.random.seed(int(first))  # noqa: NPY002
    torch.default_generator.manual_seed(int(first) << 32 | int(second))


class MapSamples:
    """A dataset with `__getitem__` and `__len__` (and perhaps `__getitems__`). seed: of random transformations."""

    def __init__(self, dataset: Any, described: Described, *, split: str, seed: int) -> None:
        self.dataset, self.described, self.split, self.seed = dataset, described, split, seed
        self._length = len(dataset)
        if not self._length:
            raise DataError(f"{described.name}: split {split!r} has no samples; return a dataset with at least one")

    def __len__(self) -> int:
        return self._length

    @property
    def types(self) -> Mapping[str, str]:
        return self.described.types

    def values(self, indices: NDArray[np.int64], epoch: int = 0) -> Arrays:
        """A batch as the executor takes it; random transformations differ from epoch to epoch."""
        samples, numbers = [], indices.tolist()
        with RandomStates().used():
            for number in numbers:
                seed_generators(self.seed, self.split, epoch, number)
                samples.append(self.dataset[number])
            return self.described.batch(samples, numbers)


class StreamSamples:
    """An iterable dataset, read in its own order, pass after pass; positions are counted through all passes. They must rise
    from call to call; going back begins anew."""

    def __init__(self, dataset: Any, described: Described, *, split: str, seed: int) -> None:
        self.dataset, self.described, self.split, self.seed = dataset, described, split, seed
        self._length: int | None = len(dataset) if hasattr(dataset, "__len__") else None
        self._begin()

    def __len__(self) -> int:
        if self._length is None:
            raise DataError(
                f"{self.described.name} is iterable and has no length: an epoch of it cannot be counted; set training.steps, "
                "or give the dataset a __len__"
            )
        return self._length

    @property
    def has_length(self) -> bool:
        return self._length is not None

    @property
    def types(self) -> Mapping[str, str]:
        return self.described.types

    def values(self, indices: NDArray[np.int64], epoch: int = 0) -> Arrays:
        """The samples at rising positions of the stream; `epoch` changes nothing."""
        if int(indices[0]) < self._position:
            self._begin()
        with self._states.used():
            return self.described.batch([self._read_to(int(index)) for index in indices], indices.tolist())

    def whole(self) -> MapSamples:
        """All samples of one pass, kept in memory: for validation."""
        self._begin()
        with self._states.used():
            self._start_pass()
            samples = list(self._iterator)
        self._begin()
        return MapSamples(samples, self.described, split=self.split, seed=self.seed)

    def _begin(self) -> None:
        self._position, self._pass = 0, 0
        self._iterator: Iterator[Any] = iter(())
        self._states = RandomStates()

    def _start_pass(self) -> None:
        seed_generators(self.seed, self.split, self._pass)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self._pass)
        self._iterator = iter(self.dataset)
        self._pass += 1

    def _read_to(self, position: int) -> Any:
        while True:
            sample = next(self._iterator, _NOTHING)
            if sample is _NOTHING:
                self._start_pass()
                sample = next(self._iterator, _NOTHING)
            if sample is _NOTHING:
                raise DataError(
                    f"{self.described.name}: a pass over split {self.split!r} gives no samples (after {self._position}); an "
                    "iterable dataset must start again whenever it is iterated: return an object with __iter__, not a generator"
                )
            self._position += 1
            if self._position == position + 1:
                return sample


_NOTHING = object()


# Samples of any kind, the order in which training reads them, and the part of them that is held out for validation.


SHARE = 0.1
"""Of the training samples, held out where nobody says how many."""
HELD_OUT = 7
"""Tells the seed of the held-out samples from those of the epochs' orders."""


@dataclass(frozen=True, slots=True, eq=False)
class ChosenSamples:
    """Some samples of a dataset. Attributes: base: the dataset. chosen: int64, their numbers in it."""

    base: Dataset | NamedDataset | MapSamples
    chosen: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def types(self) -> Mapping[str, str]:
        return self.base.types

    def values(self, indices: NDArray[np.int64], epoch: int = 0) -> dict[str, NDArray[np.generic]]:
        """A batch as the executor takes it; `indices` count the chosen samples."""
        return self.base.values(self.chosen[indices], epoch)


Samples = Dataset | NamedDataset | MapSamples | StreamSamples | ChosenSamples


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOrder:
    """The order of an iterable dataset: its own. Attributes: length: samples of one pass; None: nobody knows."""

    global_batch: int
    length: int | None

    @property
    def steps_per_epoch(self) -> int:
        """Raises DataError where the length is not known."""
        if self.length is None:
            raise DataError("an iterable dataset without a length has no epochs that can be counted; set training.steps")
        return max(1, self.length // self.global_batch)

    def epoch_of(self, step: int) -> int:
        """The pass that the first sample of a step belongs to; 0 where passes cannot be counted."""
        return 0 if self.length is None else step // self.steps_per_epoch

    def indices(self, step: int) -> NDArray[np.int64]:
        """The positions of the samples of a step."""
        return np.arange(step * self.global_batch, (step + 1) * self.global_batch, dtype=np.int64)


class Order(Protocol):
    """Which samples training reads, step by step: `BatchOrder`, `StreamOrder`, `parsim.data.shards.ShardedOrder`."""

    @property
    def global_batch(self) -> int:
        """Samples of a step."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one pass over the data."""

    def epoch_of(self, step: int) -> int:
        """The pass that a step belongs to, from 0."""

    def indices(self, step: int) -> NDArray[np.int64]:
        """The samples of a step: int64 [global_batch], the parts of the replicas one after another."""


def order_of(data: Samples, global_batch: int, seed: int) -> Order:
    """The order in which training reads the samples. Raises DataError for a batch larger than the dataset."""
    if isinstance(data, StreamSamples):
        return StreamOrder(global_batch=global_batch, length=len(data) if data.has_length else None)
    return BatchOrder(n=len(data), global_batch=global_batch, seed=seed)


def train_and_validation(load: Callable[[str], Samples], share: float | None, seed: int) -> tuple[Samples, Samples]:
    """The samples to train on, and those to validate with. load: gives a split of the dataset. share: as `hold_out` takes it,
    and raises; None: the dataset's own split, or SHARE without one."""
    if share is None:
        try:
            return load("train"), load("validation")
        except NoSplitError:
            share = SHARE
    return hold_out(load("train"), share, seed)


def hold_out(data: Samples, share: float, seed: int) -> tuple[ChosenSamples, ChosenSamples]:
    """The samples to train on, and those held out for validation, chosen by the seed alone. share: below 1: of the samples;
    else how many. Raises DataError: nothing would be held out, or nothing left to train on; or an iterable dataset, which has
    no numbers."""
    if isinstance(data, StreamSamples):
        raise DataError(
            f"{data.described.name} is iterable, so no part of it can be held out; let the dataset return one for split = "
            "'validation'"
        )
    assert not isinstance(data, ChosenSamples)
    count = round(share * len(data)) if share < 1 else int(share)
    if not 0 < count < len(data):
        raise DataError(
            f"training.evaluation.validation = {share:g} of {len(data)} samples holds out {count}; between 1 and "
            f"{len(data) - 1} can be: give a share such as 0.1, or a number of samples"
        )
    order = permutation(len(data), seed, HELD_OUT, len(data))
    return ChosenSamples(data, np.sort(order[count:])), ChosenSamples(data, np.sort(order[:count]))


@dataclass(frozen=True, slots=True)
class TargetValues:
    """The targets of a sample. binary: numbers that are 0 or 1."""

    described: ModelInput
    binary: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRequest:
    """A request for a dataset: the arguments of `load_dataset`."""

    input_shape: tuple[int, ...]
    target: Target
    split: str
    root: Path | None
    seed: int
    samples: int
    inputs: tuple[ModelInput, ...] = ()
    targets: TargetValues | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """One dataset. load: makes the samples, the same for equal requests, on every rank; raises DataError where the model does
    not suit the data. is_own: a factory that may have a split "validation"."""

    load: Callable[[DataRequest], Samples]
    is_own: bool = False


# `dataset = "package.module:factory"`: what a function or class of the user's own returns, as samples of the model.


TAKEN = ("split", "root", "seed")
"""Arguments that a factory may have."""

OwnSamples = Dataset | NamedDataset | MapSamples | StreamSamples


def load_own(factory: Callable[..., Any], ask: DataRequest) -> OwnSamples:
    """Call the factory with those of `split`, `root` and `seed` that it takes, and look at what it returns: a dataset, a
    mapping from "train", "validation" and "test" to datasets, or None for a split that it lacks. One that takes no split and
    returns one dataset has training samples alone.

    Raises NoSplitError: it has no such split. DataError: it returns no dataset, or samples that do not suit the model.
    FactoryError: it raised.
    """
    name = getattr(factory, "__qualname__", repr(factory))
    arguments = {"split": ask.split, "root": None if ask.root is None else str(ask.root), "seed": ask.seed}
    names = _taken(factory, name)
    try:
        dataset = factory(**{key: arguments[key] for key in names})
    except NoSplitError:
        raise
    except Exception as error:
        lines = traceback.format_exc(limit=-3)
        raise FactoryError(f"dataset {name} raised {type(error).__name__}: {error}\n{lines}") from error
    if isinstance(dataset, Mapping):
        dataset = dataset.get(ask.split)
    elif "split" not in names and ask.split != "train":
        dataset = None
    if dataset is None:
        raise NoSplitError(f"dataset {name} has no split {ask.split!r}; let it take split= and return one for {ask.split!r}")
    return _samples(dataset, name, ask)


def _taken(factory: Callable[..., Any], name: str) -> list[str]:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return []
    for parameter in parameters:
        is_needed = parameter.default is parameter.empty
        is_one = parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if is_needed and is_one and parameter.name not in TAKEN:
            raise DataError(
                f"dataset {name} needs the argument {parameter.name!r}; parsim gives {', '.join(TAKEN)}: give it a default, or "
                "write a function without it"
            )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return list(TAKEN)
    return [parameter.name for parameter in parameters if parameter.name in TAKEN]


def _samples(dataset: Any, name: str, ask: DataRequest) -> OwnSamples:
    if isinstance(dataset, Dataset | NamedDataset):
        return dataset
    has_items, has_length = hasattr(dataset, "__getitem__"), hasattr(dataset, "__len__")
    is_iterable = hasattr(type(dataset), "__iter__")
    if type(dataset).__name__ == "DataLoader" or isinstance(dataset, str | bytes) or not (has_items or is_iterable):
        raise DataError(
            f"dataset {name} returned a {type(dataset).__name__}; return a dataset: __getitem__ and __len__, or __iter__ "
            "(batches, order and workers are parsim's)"
        )
    if has_items and not has_length and not is_iterable:
        raise DataError(f"dataset {name}: {type(dataset).__name__} has __getitem__ but no __len__; add it")
    constant = [value.name for value in ask.inputs if value.constant]
    if constant:
        raise DataError(
            f"dataset {name}: input {constant[0]!r} is the same for every batch, and a dataset gives samples; make it a buffer "
            "of the module"
        )
    described = Described(name, ask.inputs, None if ask.targets is None else ask.targets.described)
    kind = MapSamples if has_items and has_length else StreamSamples
    return kind(dataset, described, split=ask.split, seed=ask.seed)
