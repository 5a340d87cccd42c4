"""A multilayer perceptron on flattened inputs."""

from __future__ import annotations

import math

from torch import Tensor, nn


class MLP(nn.Module):
    """`depth` hidden linear layers of `width` with ReLU, then a classifier. Input [batch, ...] is flattened."""

    def __init__(self, *, inputs: int, width: int, depth: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [nn.Linear(inputs, width), nn.ReLU(), nn.Dropout(dropout)]
            inputs = width
        self.layers = nn.Sequential(*layers, nn.Linear(inputs, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x.flatten(1))
        return out


def mlp(
    *,
    num_classes: int = 10,
    width: int = 512,
    depth: int = 3,
    dropout: float = 0.0,
    input_shape: tuple[int, ...] = (1, 32, 32),
) -> MLP:
    """The default takes digits as 1 x 32 x 32 images."""
    return MLP(inputs=math.prod(input_shape), width=width, depth=depth, num_classes=num_classes, dropout=dropout)
