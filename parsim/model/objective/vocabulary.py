"""Cross-entropy over tokens in three parts, so that no rank needs all the logits of a token.

1. `loss.maximum`: the largest logit of each token. Of shards the largest of their maxima: an all_reduce of maxima.
2. `loss.sums`: the sum of exp(logit - maximum), and the logit of the target less the maximum. Of shards a sum of each: one
   all_reduce of two numbers per token. A shard whose classes the target is none of adds zero.
3. `loss`: log(sum) - logit, of every token, and their mean per sample.

The gradient of the logits is softmax - 1 at the target; a shard makes its own piece. Source: Megatron-LM,
megatron/core/tensor_parallel/cross_entropy.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parsim.model.component import LOSS
from parsim.model.inputs import IGNORED
from parsim.model.losses import CROSS_ENTROPY
from parsim.model.objective.objective import Objective

MAXIMUM, SUMS = f"{LOSS}.maximum", f"{LOSS}.sums"


def has_parts(objective: Objective, logits: Tensor) -> bool:
    """Whether a loss can be taken in parts: the cross-entropy of several tokens per sample, classes last."""
    return objective.loss == CROSS_ENTROPY and logits.dim() >= 3 and objective.classes_dim in (None, -1, logits.dim() - 2)


def total_in_parts(logits: Tensor, target: Tensor, begin: Callable[[str], None]) -> Tensor:
    """The sum over samples of the mean over their tokens, as the row "cross_entropy" has it.

    Args:
        logits: [B, ..., classes]. target: classes [B, ...]. begin: called with the name of every part before its first call.
    """
    begin(MAXIMUM)
    with torch.no_grad():
        maximum = torch.amax(logits, -1, keepdim=True)
    begin(SUMS)
    sums = ClassSums.apply(logits, maximum, target, 0)  # type: ignore[no-untyped-call]
    begin(LOSS)
    losses = torch.log(sums[..., 0]) - sums[..., 1]
    total: Tensor = losses.masked_fill(target == IGNORED, 0.0).sum() / math.prod(target.shape[1:])
    return total


class ClassSums(torch.autograd.Function):
    """Part 2 for the classes of one shard; keeps the exponentials alone for the backward.

    `classes`: of all shards, if the last one ends in logits that stand for no class. They count nothing.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, maximum: Tensor, target: Tensor, shard: int, classes: int | None = None) -> Tensor:
        kind = torch.promote_types(logits.dtype, torch.float32)
        shifted = logits.to(kind) - maximum.to(kind)
        own = target - shard * logits.shape[-1]
        foreign = (own < 0) | (own >= logits.shape[-1])
        place = own.masked_fill(foreign, 0).unsqueeze(-1)
        label = shifted.gather(-1, place).squeeze(-1).masked_fill(foreign, 0.0)
        exponentials = shifted.exp_()
        if classes is not None and (shard + 1) * logits.shape[-1] > classes:
            exponentials[..., classes - shard * logits.shape[-1] :] = 0.0
        ctx.save_for_backward(exponentials, place, foreign)
        ctx.kind = logits.dtype
        return torch.stack((exponentials.sum(-1), label), -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        exponentials, place, foreign = ctx.saved_tensors
        of_sum, of_label = gradients[0].unbind(-1)
        made = exponentials * of_sum.unsqueeze(-1)
        made.scatter_add_(-1, place, of_label.masked_fill(foreign, 0.0).unsqueeze(-1))
        return made.to(ctx.kind), None, None, None, None


class_sums: Callable[..., Tensor] = ClassSums.apply
"""(logits, maximum, target, shard, classes=None) -> [B, ..., 2]; a shard holds classes [shard * n, (shard + 1) * n)."""
