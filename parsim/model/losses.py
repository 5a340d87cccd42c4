"""Losses as sums over samples, so that gradients add up over microbatches and replicas.

The executor divides by the global batch; per sample a loss is the mean over that sample's targets. A new loss is one row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parsim.errors import ModelError
from parsim.registry import Registry

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


CLASSES, NUMBERS = "classes", "numbers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One loss.

    Attributes:
        total: (output [B, ...], target) -> the sum over the B samples of each one's mean loss. It is a scalar that
            depends on samples one by one, so microbatches and replicas add up.
        targets: CLASSES (int64 [B, ...], below the output's last size) or NUMBERS (the shape and dtype of the output).
    """

    total: Callable[[Tensor, Tensor], Tensor]
    targets: str = CLASSES

    def __post_init__(self) -> None:
        if self.targets not in (CLASSES, NUMBERS):
            raise ModelError(f"a loss takes {CLASSES!r} or {NUMBERS!r} as targets, got {self.targets!r}")


LOSSES: Registry[Loss] = Registry(
    "loss",
    Loss,
    {"cross_entropy": Loss(total=_cross_entropy), "mse": Loss(total=_mse, targets=NUMBERS)},
    error=ModelError,
)


def usual_loss(name: str, output: tuple[int, ...], *, tokens: bool) -> str:
    """The loss that the shape of an output calls for, where nobody chose one.

    Args:
        name: of the model, for the message. output: of one sample. tokens: the sample is a row of token numbers.

    One number per sample is a regression, a vector holds the logits of classes, and tokens in, [seq, vocabulary] out is a
    language model.

    Raises:
        ModelError: any other shape leaves the loss open, e.g. an image.
    """
    if math.prod(output) == 1:
        return "mse"
    if len(output) == 1 or (tokens and len(output) == 2):
        return "cross_entropy"
    raise ModelError(
        f'{name} returns {list(output)} per sample, which leaves the loss open; in [model] choose loss = "mse" (targets like '
        f'the output), "cross_entropy" (classes along the last dim, {output[-1]}) or "package.module:ROW", a loss of your own'
    )


def loss_sum(kind: str, output: Tensor, target: Tensor) -> Tensor:
    """The sum over the samples (dim 0) of each sample's mean loss; a scalar.

    Raises ModelError for an unknown kind.
    """
    return LOSSES[kind].total(output, target)
