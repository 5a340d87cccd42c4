"""Many samples for little memory: an epoch of hundreds of steps, as in real trainings."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

LENGTH, DIFFERENT = 100_000, 2_048
SHAPE, CLASSES = (1, 32, 32), 10


class Repeated(Dataset[Any]):
    """The same random samples again and again, with classes that a linear function of them has chosen."""

    def __init__(self, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(DIFFERENT, *SHAPE, generator=random)
        chooser = torch.randn(self.inputs[0].numel(), CLASSES, generator=random)
        self.targets = (self.inputs.flatten(1) @ chooser).argmax(1)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.inputs[index % DIFFERENT], int(self.targets[index % DIFFERENT])


def repeated(split: str, seed: int) -> Repeated | None:
    """Args: split: only "train" is there. seed: of the random numbers."""
    return Repeated(seed) if split == "train" else None
