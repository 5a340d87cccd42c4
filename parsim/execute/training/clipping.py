"""The global norm of gradients and the scaling by it, as torch.nn.utils.clip_grad_norm_ does them in one process."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

EPSILON = 1e-6
"""Added to the norm, as torch does."""
HALF_BITS = 16


def squared_norm(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """The sum of squares as one float64; half precision is added up in float32.

    Args:
        gradients: flat arrays. device: of the result.
    """
    total = torch.zeros(1, dtype=torch.float64, device=device)
    for gradient in gradients:
        wide = torch.float32 if torch.finfo(gradient.dtype).bits == HALF_BITS else gradient.dtype
        total += torch.linalg.vector_norm(gradient, dtype=wide).double().square()
    return total


def scale_to_norm(gradients: Iterable[Tensor], norm: Tensor, most: float) -> None:
    """Multiply by most / norm where the norm is above `most`; else by 1.

    A norm that is not a finite number makes the gradients not finite either, so the divergence is seen.
    """
    factor = torch.clamp(most / (norm + EPSILON), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
