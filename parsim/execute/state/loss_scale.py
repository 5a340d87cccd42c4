"""Dynamic loss scaling for fp16: the largest power of two (times the first scale) under which no gradient overflows.

A step whose gradients are not all finite is skipped, on all ranks or on none, and the scale falls; after enough good steps in a
row it grows. The rule is that of torch.amp.GradScaler, so a plan trains as one process with that scaler does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

FIRST_SCALE, GROWTH_STEPS = 65536.0, 2000
"""torch.amp.GradScaler's defaults, as are the factors."""
GROWTH, BACKOFF = 2.0, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """Attributes: scale: of the loss. good_steps: since it last changed, fewer than growth_steps."""

    scale: float = FIRST_SCALE
    good_steps: int = 0
    growth_steps: int = GROWTH_STEPS

    def after(self, overflowed: bool) -> LossScale:
        """The scale of the next step."""
        if overflowed:
            return replace(self, scale=self.scale * BACKOFF, good_steps=0)
        if self.good_steps + 1 < self.growth_steps:
            return replace(self, good_steps=self.good_steps + 1)
        grown = self.scale * GROWTH
        return replace(self, scale=grown if math.isfinite(torch.tensor(grown).item()) else self.scale, good_steps=0)

    def to_tensor(self) -> Tensor:
        """For a checkpoint."""
        return torch.tensor([self.scale, float(self.good_steps)], dtype=torch.float64)

    def from_tensor(self, saved: Tensor) -> LossScale:
        """As `to_tensor` left it; how often it grows stays as it is here."""
        scale, good_steps = saved.tolist()
        return replace(self, scale=scale, good_steps=int(good_steps) % self.growth_steps)


def overflow_flag(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """A tensor of one number, above 0 if an entry of the gradients is infinite or no number.

    By the largest magnitude of each array, which needs no memory: `isfinite` of all entries takes as much again as they do.
    """
    flag = torch.zeros(1, dtype=torch.float32, device=device)
    for gradient in gradients:
        if gradient.numel():
            flag += (~torch.isfinite(torch.linalg.vector_norm(gradient, ord=math.inf))).float()
    return flag
