"""Training that has diverged: a loss, weight or optimizer state that is not a finite number any more."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from parsim.errors import DivergedError
from parsim.execute.checkpoint.checkpoint import RankState


def check_loss(loss: float, *, step: int, rank: int, learning_rate: float) -> None:
    """Raise DivergedError unless the loss is finite.

    Args:
        loss: of this rank's samples. step: that was made, from 1.
    """
    if not math.isfinite(loss):
        raise DivergedError(f"training diverged: the loss of step {step} is {loss} on rank {rank}. {_advice(learning_rate)}")


def check_state(state: RankState, trained: Iterable[str], *, step: int, rank: int, learning_rate: float) -> None:
    """Raise DivergedError unless all that a checkpoint would hold of training is finite.

    Frozen weights and buffers may hold infinities (a mask), which are no sign of divergence.

    Args:
        trained: names of the parameters that are updated. step: steps that were made.
    """
    found = _not_finite(state, frozenset(trained))
    if found:
        raise DivergedError(f"training diverged: {found} on rank {rank} after step {step}. {_advice(learning_rate)}")


def _not_finite(state: RankState, trained: frozenset[str]) -> str:
    """The first tensor with a NaN or an infinity, in words; "" if there is none."""
    for name, weight in state.weights.items():
        if name in trained and not bool(torch.isfinite(weight).all()):
            return f"weight {name!r} is not finite"
    for name, entries in state.optimizer.items():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor) and not bool(torch.isfinite(value).all()):
                return f"the optimizer's {key} of {name!r} is not finite"
    for name, buffer in state.buffers.items():
        if buffer.is_floating_point() and bool(torch.isnan(buffer).any()):
            return f"buffer {name!r} holds NaN"
    return ""


def _advice(learning_rate: float) -> str:
    return f"Lower training.learning_rate ({learning_rate:g}), or look at the data and the loss."
