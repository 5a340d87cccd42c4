"""Samples of any kind, the order in which training reads them, and the part of them that is held out for validation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from parsim.data.dataset import BatchOrder, Dataset, NamedDataset
from parsim.data.own.samples import MapSamples, StreamSamples
from parsim.errors import DataError, NoSplitError

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
        """Those of the dataset."""
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
        """Of a step's first sample; 0 where passes cannot be counted."""
        return 0 if self.length is None else step // self.steps_per_epoch

    def indices(self, step: int) -> NDArray[np.int64]:
        """The positions of the samples of a step."""
        return np.arange(step * self.global_batch, (step + 1) * self.global_batch, dtype=np.int64)


Order = BatchOrder | StreamOrder


def order_of(data: Samples, global_batch: int, seed: int) -> Order:
    """The order in which training reads the samples. Raises DataError for a batch larger than the dataset."""
    if isinstance(data, StreamSamples):
        return StreamOrder(global_batch=global_batch, length=len(data) if data.has_length else None)
    return BatchOrder(n=len(data), global_batch=global_batch, seed=seed)


def train_and_validation(load: Callable[[str], Samples], share: float | None, seed: int) -> tuple[Samples, Samples]:
    """The samples to train on, and those to validate with.

    Args:
        load: gives a split of the dataset. share: as `hold_out` takes it; None: the dataset's own split, or SHARE without one.

    Raises:
        DataError: as `hold_out`.
    """
    if share is None:
        try:
            return load("train"), load("validation")
        except NoSplitError:
            share = SHARE
    return hold_out(load("train"), share, seed)


def hold_out(data: Samples, share: float, seed: int) -> tuple[ChosenSamples, ChosenSamples]:
    """The samples to train on, and those held out for validation, chosen by the seed alone.

    Args:
        share: below 1: of the samples; else how many.

    Raises:
        DataError: nothing would be held out, or nothing left to train on; or an iterable dataset, which has no numbers.
    """
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
    keys = np.random.PCG64(np.random.SeedSequence([seed, HELD_OUT, len(data)])).random_raw(len(data))
    order = np.argsort(keys, kind="stable").astype(np.int64)
    return ChosenSamples(data, np.sort(order[count:])), ChosenSamples(data, np.sort(order[:count]))
