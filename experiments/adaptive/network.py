"""A network whose cheapest cut lies at an uneven place: a narrow layer behind most of the work."""

from __future__ import annotations

import math

from torch import nn


def narrow(
    *, width: int = 320, waist: int = 64, before: int = 8, after: int = 1, classes: int = 320, side: int = 16
) -> nn.Sequential:
    """Linear layers with ReLU on images of one channel, flattened: `before` of `width`, one of `waist`, `after` of `width`.

    A pipeline cut at the waist sends little and is uneven; data parallelism is even and sends the gradients of all weights.
    The classes are as many as a layer is wide: a cut before the loss sends as much as elsewhere.
    """
    layers: list[nn.Module] = [nn.Flatten()]
    inputs = math.prod((side, side))
    for size in (*[width] * before, waist, *[width] * after):
        layers += [nn.Linear(inputs, size), nn.ReLU()]
        inputs = size
    return nn.Sequential(*layers, nn.Linear(inputs, classes))
