"""Modules of which only a part is trained, named to ModelSpec by their factories."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LowRankLinear(nn.Module):
    """A frozen layer with a trained update of low rank beside it (LoRA)."""

    def __init__(self, inputs: int, outputs: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.up(self.down(x))


class LowRankWeight(nn.Module):
    """The same as a parametrization of a weight."""

    def __init__(self, weight: Tensor, rank: int = 2) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, weight.shape[1]) / weight.shape[1])
        self.up = nn.Parameter(torch.randn(weight.shape[0], rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def stack(width: int = 16, layers: int = 3) -> nn.Sequential:
    """Hidden layers between an input of 64 numbers and ten classes."""
    hidden = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Tanh(), *hidden, nn.Linear(width, 10))


def adapters(width: int = 16, layers: int = 3) -> nn.Module:
    """Every hidden layer frozen beside a trained update of low rank; input and output layer frozen."""
    hidden = [part for _ in range(layers) for part in (LowRankLinear(width, width), nn.Tanh())]
    frozen = nn.Linear(64, width).requires_grad_(False), nn.Linear(width, 10).requires_grad_(False)
    return nn.Sequential(nn.Flatten(), frozen[0], nn.Tanh(), *hidden, frozen[1])


def parametrized_adapters(width: int = 16, layers: int = 3) -> nn.Module:
    """The update of low rank inside the weight, by torch's parametrizations."""
    module = stack(width, layers).requires_grad_(False)
    for part in module:
        if isinstance(part, nn.Linear) and part.in_features == width:
            nn.utils.parametrize.register_parametrization(part, "weight", LowRankWeight(part.weight))
    return module


def frozen_start(width: int = 16, layers: int = 3) -> nn.Module:
    """A pretrained trunk whose last two layers are trained: the first ones have no backward at all."""
    module = stack(width, layers)
    for part in module[:-3]:
        part.requires_grad_(False)
    return module


def frozen_middle(width: int = 16, layers: int = 3) -> nn.Module:
    """Frozen layers between trained ones: gradients pass through them."""
    module = stack(width, layers)
    for part in module[3:7]:
        part.requires_grad_(False)
    return module


def biases_only(width: int = 16, layers: int = 3) -> nn.Module:
    """Every weight matrix frozen, every bias trained (BitFit)."""
    module = stack(width, layers)
    for parameter in module.parameters():
        parameter.requires_grad_(parameter.dim() == 1)
    return module
