"""Three tasks that are no classification of images: modules, generated data and a metric, as a user keeps them beside a run
file. The run files of this folder train on the larger data.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

SIZES = {"train": 64, "validation": 20, "test": 20}
LARGER = {"train": 512, "validation": 128, "test": 128}
VOCABULARY, LENGTH = 12, 8


def segmenter() -> nn.Module:
    """[1, 8, 8] images to three classes per pixel; with running statistics."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 3, 1),
    )


def blobs(split: str, seed: int) -> Dataset[Any]:
    """Dark, grey and bright places under noise."""
    return _blobs(SIZES[split], seed + len(split))


def more_blobs(split: str, seed: int) -> Dataset[Any]:
    return _blobs(LARGER[split], seed + len(split))


def _blobs(number: int, seed: int) -> Dataset[Any]:
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(3, (number, 4, 4), generator=generator).repeat_interleave(2, 1).repeat_interleave(2, 2)
    images = classes[:, None] - 1.0 + 0.3 * torch.randn(number, 1, 8, 8, generator=generator)
    return TensorDataset(images, classes)


def regressor() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def surface(seed: int) -> list[dict[str, Any]]:
    """y = x0 x1 + x2; without splits, so a part is held out."""
    return _surface(80, seed)


def larger_surface(split: str, seed: int) -> list[dict[str, Any]]:
    return _surface(LARGER[split], seed + len(split))


def _surface(number: int, seed: int) -> list[dict[str, Any]]:
    x = torch.randn(number, 5, generator=torch.Generator().manual_seed(seed))
    return [{"input": row, "target": (row[0] * row[1] + row[2])[None]} for row in x]


def within_a_tenth(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A metric of one's own: one number per sample."""
    return ((output - target).abs() < 0.1).float().mean(1)


class LanguageModel(nn.Module):
    """A transformer that sees the tokens so far, with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True) for _ in range(2))
        self.register_buffer("later", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1))
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, 16))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) + self.places
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.later)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def sentences(split: str, seed: int) -> Dataset[Any]:
    """Every token is the one before plus a step of the sentence's own, 1 to 3. So the first step alone cannot be known."""
    return _sentences(SIZES[split], seed + len(split))


def more_sentences(split: str, seed: int) -> Dataset[Any]:
    return _sentences(LARGER[split], seed + len(split))


def _sentences(number: int, seed: int) -> Dataset[Any]:
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(VOCABULARY, (number, 1), generator=generator)
    step = torch.randint(1, 4, (number, 1), generator=generator)
    tokens = (first + step * torch.arange(LENGTH + 1)) % VOCABULARY
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])
