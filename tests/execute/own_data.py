"""Datasets as users write them, and some that are wrong. Named in tests as tests.execute.own_data:NAME."""

from __future__ import annotations

import random
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
