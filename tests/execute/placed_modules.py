"""Modules with what is awkward to spread over ranks, for the tests of mixed plans; named to ModelSpec by their factories."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Scaled(nn.Module):
    """Multiplies with a table that belongs to no sample, and has a parameter without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return torch.tanh(self.linear(x * table)) * self.scale + x


class SharedTable(nn.Module):
    """A table made once and read by every block, as rotary position embeddings are: its dim 0 is not the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.table = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(Scaled() for _ in range(3))
        self.head = nn.Linear(6, 3)
        self.positions: Tensor
        self.register_buffer("positions", torch.linspace(0, 1, 4)[None])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        table = self.table(self.positions).cos()
        for block in self.blocks:
            x = block(x, table)
        return self.head(x)


def shared_table() -> nn.Module:
    return SharedTable()
