"""Losses as sums over samples, so that gradients add up over microbatches and replicas.

The executor divides by the global batch; per sample a loss is the mean over that sample's targets. A new loss is one row, or
a plain function of (output, target) named as "package:function". Which tensor of an output a loss reads and what its targets
are is settled in `parsim.model.objective`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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


def _bce(output: Tensor, target: Tensor) -> Tensor:
    """Logits of the second of two classes, and targets 0.0 or 1.0, [B, ...] of one shape."""
    import torch.nn.functional as functional

    total = functional.binary_cross_entropy_with_logits(output, target, reduction="sum")
    return total / math.prod(output.shape[1:])


def _own(output: Tensor, target: Tensor) -> Tensor:
    """What the module returns is its loss; see `parsim.model.objective.total`."""
    return output


CLASSES, NUMBERS, BINARY, NOTHING = "classes", "numbers", "binary", "nothing"
TARGETS = (CLASSES, NUMBERS, BINARY, NOTHING)
OWN = "own"
CROSS_ENTROPY = "cross_entropy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One loss.

    Attributes:
        total: (output [B, ...], target) -> the sum over the B samples of each one's mean loss. It is a scalar that
            depends on samples one by one, so microbatches and replicas add up.
        targets: CLASSES (int64 [B, ...], below the output's last size), NUMBERS (the shape and dtype of the output), BINARY
            (the same, 0.0 or 1.0) or NOTHING (the module takes its targets itself).
        plain: a user's function, or the module's own loss. `total` then gives what it returned: one number per sample, or a
            scalar, which is taken as the mean over the batch.
    """

    total: Callable[[Tensor, Tensor], Tensor]
    targets: str = CLASSES
    plain: bool = False

    def __post_init__(self) -> None:
        if self.targets not in TARGETS:
            raise ModelError(f"the targets of a loss are one of {', '.join(TARGETS)}, got {self.targets!r}")


def _from_function(found: Any) -> Any:
    """A plain function (output, target) as a Loss; anything else as it is."""
    if callable(found) and not isinstance(found, type | Loss):
        return Loss(total=found, targets=NUMBERS, plain=True)
    return found


LOSSES: Registry[Loss] = Registry(
    "loss",
    Loss,
    {
        CROSS_ENTROPY: Loss(total=_cross_entropy),
        "mse": Loss(total=_mse, targets=NUMBERS),
        "bce": Loss(total=_bce, targets=BINARY),
        OWN: Loss(total=_own, targets=NOTHING, plain=True),
    },
    error=ModelError,
    adapt=_from_function,
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
    maps = f', "cross_entropy" with classes_dim = 0 (maps of {output[0]} classes)' if len(output) > 2 else ""
    raise ModelError(
        f'{name} returns {list(output)} per sample, so the loss is ambiguous. In [model] choose loss = "mse" (targets like '
        f'the output), "bce" (0 or 1 for each number), "cross_entropy" with classes_dim = -1 (classes along the last dim, '
        f'{output[-1]}){maps}. Or give a loss of your own as "package:function" or "package.module:ROW"'
    )


def loss_sum(kind: str, output: Tensor, target: Tensor) -> Tensor:
    """The sum over the samples (dim 0) of each sample's mean loss; a scalar. For rows of LOSSES alone.

    Raises ModelError for an unknown kind.
    """
    return LOSSES[kind].total(output, target)
