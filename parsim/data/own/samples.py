"""Datasets of the user's own: map-style (`__getitem__`, `__len__`) and iterable ones, torch's or any others.

What a sample is must not depend on the plan. So before each sample of a map-style dataset is read, the generators of Python,
numpy and torch are seeded from (seed, split, epoch, sample). An iterable one is seeded once per pass and read in its own
order, the same on every rank; a rank keeps its part. The training's own random states are put back.
"""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parsim.data.host_generators import alone
from parsim.data.own.described import Described
from parsim.errors import DataError

Arrays = dict[str, NDArray[np.generic]]


class RandomStates:
    """The states of the generators of Python, numpy and torch while a dataset is read, apart from those of the training."""

    def __init__(self) -> None:
        self._own: tuple[Any, Any, Any] | None = None

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Go on from where the last use ended. Other threads that draw from them wait."""
        with alone():
            others = _states()
            if self._own is not None:
                _set_states(self._own)
            try:
                yield
            finally:
                self._own = _states()
                _set_states(others)


def _states() -> tuple[Any, Any, Any]:
    import torch

    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()  # noqa: NPY002


def _set_states(states: tuple[Any, Any, Any]) -> None:
    import torch

    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    torch.default_generator.set_state(states[2])


def seed_generators(*numbers: int) -> None:
    """Seed the three generators from whole numbers >= 0."""
    import torch

    first, second = np.random.SeedSequence(numbers).generate_state(2, np.uint32)
    random.seed(int(first))
    np.random.seed(int(first))  # noqa: NPY002
    torch.default_generator.manual_seed(int(first) << 32 | int(second))


def number_of(split: str) -> int:
    """Of a split's name, for seeds."""
    return zlib.crc32(split.encode())


class MapSamples:
    """A dataset with `__getitem__` and `__len__` (and perhaps `__getitems__`).

    Attributes: dataset: of the user. described: what the model takes. split: its name. seed: of random transformations.
    """

    def __init__(self, dataset: Any, described: Described, *, split: str, seed: int) -> None:
        self.dataset, self.described, self.split, self.seed = dataset, described, split, seed
        self._length = len(dataset)
        if not self._length:
            raise DataError(f"{described.name}: split {split!r} has no samples; return a dataset with at least one")

    def __len__(self) -> int:
        return self._length

    @property
    def types(self) -> Mapping[str, str]:
        """See `Described.types`."""
        return self.described.types

    def values(self, indices: NDArray[np.int64], epoch: int = 0) -> Arrays:
        """A batch as the executor takes it; random transformations differ from epoch to epoch."""
        with RandomStates().used():
            return self.described.batch([self._sample(int(index), epoch) for index in indices], indices.tolist())

    def _sample(self, index: int, epoch: int) -> Any:
        seed_generators(self.seed, number_of(self.split), epoch, index)
        return self.dataset[index]


class StreamSamples:
    """An iterable dataset, read in its own order, pass after pass; positions are counted through all passes.

    Positions must rise from call to call; going back begins anew.

    Attributes: as of MapSamples.
    """

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
        """See `Described.types`."""
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
            kept = list(self._iterator)
        self._begin()
        return MapSamples(kept, self.described, split=self.split, seed=self.seed)

    def _begin(self) -> None:
        self._position, self._pass = 0, 0
        self._iterator: Iterator[Any] = iter(())
        self._states = RandomStates()

    def _start_pass(self) -> None:
        seed_generators(self.seed, number_of(self.split), self._pass)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self._pass)
        self._iterator = iter(self.dataset)
        self._pass += 1

    def _read_to(self, position: int) -> Any:
        while True:
            for sample in self._iterator:
                self._position += 1
                if self._position == position + 1:
                    return sample
            before = self._position
            self._start_pass()
            first = next(self._iterator, _NOTHING)
            if first is _NOTHING:
                raise DataError(
                    f"{self.described.name}: a pass over split {self.split!r} gives no samples (after {before}); an iterable "
                    "dataset must start again whenever it is iterated: return an object with __iter__, not a generator"
                )
            self._position += 1
            if self._position == position + 1:
                return first


_NOTHING = object()
