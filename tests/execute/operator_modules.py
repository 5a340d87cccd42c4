"""Modules whose kernels torch's flop counter does not know, each with the flop of a forward by formula."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LENGTH, FEATURES, HIDDEN, CLASSES = 20, 64, 128, 10


class Recurrent(nn.Module):
    """The last step of a recurrent stack, classified."""

    def __init__(self, kind: type[nn.RNNBase], layers: int = 2, bidirectional: bool = False) -> None:
        super().__init__()
        self.stack = kind(FEATURES, HIDDEN, num_layers=layers, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(HIDDEN * (1 + bidirectional), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stack(x)[0][:, -1])


def recurrent_flop(gates: int, layers: int = 2, ways: int = 1) -> int:
    """Each step of each direction: gates x hidden outputs from its input and from its state."""
    inputs = [FEATURES, *(HIDDEN * ways for _ in range(layers - 1))]
    return sum(2 * LENGTH * ways * gates * HIDDEN * (size + HIDDEN) for size in inputs) + 2 * HIDDEN * ways * CLASSES


class UNet(nn.Module):
    """One level, a grouped and a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 32, 3, padding=1)
        self.bottom = nn.Conv2d(32, 64, 3, stride=2, padding=1, groups=4)
        self.up = nn.ConvTranspose2d(64, 32, 2, stride=2)
        self.out = nn.Conv2d(64, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        high = F.relu(self.down(x))
        low = F.relu(self.bottom(high))
        return self.out(torch.cat([high, self.up(low)], 1))


UNET_FLOP = 2 * (32 * 32 * 32 * 3 * 9 + 16 * 16 * 64 * 8 * 9 + 16 * 16 * 64 * 32 * 4 + 32 * 32 * 3 * 64 * 9)


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Bilinear(32, 48, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.pair(x[:, 0, :32], x[:, 0, :48])


class Fourier(nn.Module):
    """The mixing of FNet: a transform over tokens and features."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft2(self.inside(x)).real.mean(1)


FOURIER_FLOP = 2 * LENGTH * FEATURES**2 + 5 * LENGTH * FEATURES * math.log2(LENGTH * FEATURES)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(100_000, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x)


class LowRank(nn.Module):
    """A weight of two factors: work on parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(FEATURES, 8))
        self.right = nn.Parameter(torch.randn(8, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x[:, 0], self.left @ self.right)


class Loop(nn.Module):
    """One product per sample, in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([sample @ self.weight for sample in x]).mean(1)


class Solve(nn.Module):
    """A linear system per sample."""

    def forward(self, x: Tensor) -> Tensor:
        square = x[:, :LENGTH, :LENGTH] + torch.eye(LENGTH)
        return torch.linalg.solve(square, x[:, :, :1])[..., 0]


Case = tuple[Callable[[], nn.Module], tuple[int, ...], float, float]
SEQUENCE = (LENGTH, FEATURES)
CASES: dict[str, Case] = {
    "lstm": (lambda: Recurrent(nn.LSTM), SEQUENCE, recurrent_flop(4), 2),
    "lstm_bidirectional": (lambda: Recurrent(nn.LSTM, bidirectional=True), SEQUENCE, recurrent_flop(4, ways=2), 2),
    "gru": (lambda: Recurrent(nn.GRU), SEQUENCE, recurrent_flop(3), 2),
    "rnn": (lambda: Recurrent(nn.RNN), SEQUENCE, recurrent_flop(1), 2),
    "unet": (UNet, (3, 32, 32), UNET_FLOP, 2),
    "bilinear": (Bilinear, SEQUENCE, 2 * 32 * 48 * FEATURES, 2),
    "fourier": (Fourier, SEQUENCE, FOURIER_FLOP, 1),
    "loop": (Loop, SEQUENCE, 2 * LENGTH * FEATURES**2, 2),
    "solve": (Solve, SEQUENCE, 2 * LENGTH**3 / 3 + 2 * LENGTH**2, 2),
}
"""Factory, shape of one sample, flop of its forward, and at least how many times that its backward computes."""
