"""Datasets as users write them, and some that are wrong. Named in tests as tests.execute.own_data:NAME."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

CLASSES, SIZES = 10, {"train": 48, "validation": 16, "test": 16}


class Noisy(Dataset):  # type: ignore[type-arg]
    """8 x 8 images, each with another noise in every epoch, drawn from all three generators."""

    def __init__(self, split: str, root: str | None = None, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed + len(split))
        means = torch.randn(CLASSES, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
        self.labels = torch.randint(CLASSES, (SIZES[split],), generator=generator)
        self.images = means[self.labels]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = 0.1 * torch.randn(1, 8, 8) + 0.1 * random.random() + 0.1 * float(np.random.rand())  # noqa: NPY002
        return self.images[index] + noise, int(self.labels[index])


class Stream(IterableDataset):  # type: ignore[type-arg]
    """20 samples per pass, in an order of the generator's own; as mappings."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        data = Noisy("train")
        for index in torch.randperm(20).tolist():
            image, label = data[index]
            yield {"x": image, "labels": label}


def stream() -> Stream:
    return Stream()


def only_train() -> Noisy:
    return Noisy("train")


def wide(split: str) -> list[tuple[torch.Tensor, int]]:
    return [(torch.zeros(1, 16, 16), 0)] * 48


def bytes_for_numbers(split: str) -> list[tuple[torch.Tensor, int]]:
    return [(torch.zeros(1, 8, 8, dtype=torch.uint8), 0)] * 48


def class_too_high(split: str) -> list[tuple[torch.Tensor, int]]:
    return [(torch.zeros(1, 8, 8), 10)] * 48


def bare(split: str) -> list[torch.Tensor]:
    return [torch.zeros(1, 8, 8)] * 48


def number(split: str) -> int:
    return 3


def empty(split: str) -> list[Any]:
    return []


def raises(split: str) -> list[Any]:
    raise FileNotFoundError("no such folder /data")


def needs_more(split: str, folder: str) -> list[Any]:
    return []


def spent() -> Iterator[tuple[torch.Tensor, int]]:
    """A generator can be read once only."""
    return iter([(torch.zeros(1, 8, 8), 0)] * 4)


SLEEP_S = 0.005


class Slow(Dataset):  # type: ignore[type-arg]
    """Every sample takes `SLEEP_S`, and the first one a quarter of a second."""

    def __init__(self, split: str, first_s: float = 0.0) -> None:
        self._first_s = first_s

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        first_s, self._first_s = self._first_s, 0.0
        time.sleep(SLEEP_S + first_s)
        return torch.zeros(1, 8, 8), index % CLASSES


class SlowStream(IterableDataset):  # type: ignore[type-arg]
    """The same, read in its own order; every rank reads all of it."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        for index in range(512):
            time.sleep(SLEEP_S)
            yield torch.zeros(1, 8, 8), index % CLASSES


def slow(split: str) -> Slow:
    return Slow(split)


def slow_first(split: str) -> Slow:
    return Slow(split, 0.25)


def slow_stream(split: str) -> SlowStream:
    return SlowStream()


class Busy(Slow):
    """Every sample takes `SLEEP_S` of a core."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        until_s = time.thread_time() + SLEEP_S
        while time.thread_time() < until_s:
            pass
        return torch.zeros(1, 8, 8), index % CLASSES


def busy(split: str) -> Busy:
    return Busy(split)


class Fatal(Slow):
    """Its second sample ends the process that reads it."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self._first_s:
            os._exit(3)
        self._first_s = 1.0
        return torch.zeros(1, 8, 8), 0


def fatal(split: str) -> Fatal:
    return Fatal(split)


class SlowToScore(Noisy):
    """Of the samples that are not trained on, each takes a quarter of a second."""

    def __init__(self, split: str) -> None:
        super().__init__(split)
        self._wait_s = 0.25 * (split != "train")

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self._wait_s)
        return super().__getitem__(index)


class Glacial(Slow):
    """A sample takes most of a second."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.7)
        return torch.zeros(1, 8, 8), 0


def glacial(split: str) -> Glacial:
    return Glacial(split)


class Views(Noisy):
    """Samples are views of one tensor."""

    def __init__(self, split: str) -> None:
        super().__init__(split)
        self.images = self.images.repeat(1000, 1, 1, 1)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], int(self.labels[index])


def views(split: str) -> Views:
    return Views(split)
