"""Modules with several inputs, outputs and losses of their own; factories for specs and run files."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

CHANNELS, CLASSES, STEPS = 4, 5, 50


class Denoiser(nn.Module):
    """A diffusion net: an image and its step, given by name."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.time = nn.Embedding(STEPS, width)
        self.first = nn.Conv2d(CHANNELS, width, 3, padding=1)
        self.middle = nn.Conv2d(width, width, 3, padding=1)
        self.last = nn.Conv2d(width, CHANNELS, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        hidden = functional.silu(self.first(x)) + self.time(t)[:, :, None, None]
        hidden = functional.silu(self.middle(hidden))
        return self.last(hidden)


class Segmenter(nn.Module):
    """Maps of classes [classes, height, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.head = nn.Conv2d(8 + 3, CLASSES, 1)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(torch.cat([image, functional.relu(self.up(functional.relu(self.down(image))))], dim=1))


class OwnLoss(nn.Module):
    """Returns its loss: of two inputs, labels, and a table that is the same for every batch."""

    def __init__(self, per_sample: bool = False, entry: bool = False) -> None:
        super().__init__()
        self.per_sample, self.entry = per_sample, entry
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, labels: Tensor, prior: Tensor, *, mask: Tensor | None = None) -> object:
        logits = self.head(self.body(x)) + prior
        losses = functional.cross_entropy(logits, labels, reduction="none" if self.per_sample else "mean")
        return {"loss": losses, "logits": logits} if self.entry else losses


@dataclass
class Heads:
    """Two outputs."""

    value: Tensor
    policy: Tensor


class TwoHeads(nn.Module):
    """Nested inputs, and a dataclass of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.value = nn.Linear(8, 1)
        self.policy = nn.Linear(8, CLASSES)

    def forward(self, state: dict[str, Tensor]) -> Heads:
        hidden = functional.relu(self.body(torch.cat([state["mine"], state["theirs"]], dim=1)))
        return Heads(value=self.value(hidden), policy=self.policy(hidden))


class Contrastive(nn.Module):
    """Its loss compares every sample with the mean of the batch: no sum over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        return ((hidden - hidden.mean(dim=0, keepdim=True)) ** 2).mean()


def squares(output: Tensor, target: Tensor) -> Tensor:
    """A plain loss: a mean over the batch."""
    return functional.smooth_l1_loss(output, target)


def squares_per_sample(output: Tensor, target: Tensor) -> Tensor:
    """The same, one number per sample."""
    return functional.smooth_l1_loss(output, target, reduction="none").flatten(1).mean(dim=1)


def both_heads(output: Heads, target: Tensor) -> Tensor:
    """Of the whole output."""
    return functional.cross_entropy(output.policy, target) + output.value.square().mean()
