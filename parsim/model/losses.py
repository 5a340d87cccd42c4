"""Losses as sums over samples, so that gradients add up over microbatches and replicas.

The executor divides by the global batch; per sample a loss is the mean over that sample's targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from parsim.errors import ModelError, near_matches

if TYPE_CHECKING:
    from torch import Tensor


def _cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Logits [B, ..., classes], target classes [B, ...]."""
    import torch.nn.functional as functional

    if output.dim() == 2:
        return functional.cross_entropy(output, target, reduction="sum")
    total = functional.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="sum")
    return total / math.prod(output.shape[1:-1])


def _mse(output: Tensor, target: Tensor) -> Tensor:
    """Output and target [B, ...] of one shape."""
    import torch.nn.functional as functional

    return functional.mse_loss(output, target, reduction="sum") / math.prod(output.shape[1:])


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"cross_entropy": _cross_entropy, "mse": _mse}


def loss_sum(kind: str, output: Tensor, target: Tensor) -> Tensor:
    """The sum over the samples (dim 0) of each sample's mean loss; a scalar.

    Raises ModelError for an unknown kind.
    """
    if kind not in LOSSES:
        raise ModelError(f"unknown loss {kind!r}{near_matches(kind, LOSSES)}")
    return LOSSES[kind](output, target)
