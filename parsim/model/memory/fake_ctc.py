"""The CTC loss on fake tensors, for which torch has no kernel: its sizes depend on the lengths of the targets.

Every target is taken to be as long as its row, so sizes are the largest that a batch can have. A run calls the real kernel on
the real lengths.

Source: aten/src/ATen/native/LossCTC.cpp: alpha has 2 S + 1 states of each step, and the backward a gradient of each logit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException

_FORWARD = (torch.ops.aten._ctc_loss.default, torch.ops.aten._ctc_loss.Tensor)
_BACKWARD = (torch.ops.aten._ctc_loss_backward.default, torch.ops.aten._ctc_loss_backward.Tensor)
CTC = frozenset((*_FORWARD, *_BACKWARD))


def fake_ctc(func: Any, args: Sequence[Any]) -> Tensor | tuple[Tensor, Tensor]:
    """What one of `CTC` makes of fake arguments.

    Raises:
        DynamicOutputShapeException: targets in one row, whose longest only the lengths tell.
    """
    if func in _BACKWARD:
        return torch.empty_like(args[1])
    log_probs, targets = args[0], args[1]
    steps, batch = (log_probs.shape[0], 1) if log_probs.dim() == 2 else log_probs.shape[:2]
    if targets.dim() == 1 and batch > 1:
        raise DynamicOutputShapeException(func)
    longest = targets.shape[-1]
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * longest + 1)
