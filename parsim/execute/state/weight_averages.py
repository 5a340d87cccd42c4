"""Exponential moving averages of the weights, as `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn` keeps them.

A rank averages what its optimizer updates: its parameters, its part of a divided bucket, or the copies in fp32. The averages
are an entry of the optimizer's state, `EMA`. So they are divided, moved to another plan, and kept in checkpoints as
the optimizer's own arrays are.

Leaves out: a step that an overflowing gradient skips is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from parsim.execute.state.checkpoint import RankState

EMA = "ema"


@torch.no_grad()
def update_averages(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """After an update: ema = decay * ema + (1 - decay) * weight; the first time a copy.

    Args:
        optimizer: which has stepped: Adam takes an empty state for that of a first step. decay: in [0, 1].
    """
    averaged: list[Tensor] = []
    weights: list[Tensor] = []
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            state = optimizer.state[tensor]
            if EMA in state:
                averaged.append(state[EMA])
                weights.append(tensor.detach())
            else:
                state[EMA] = tensor.detach().clone(memory_format=torch.preserve_format)
    if averaged:
        _averaging(decay)(averaged, weights, None)


def _averaging(decay: float) -> Callable[..., None]:
    make: Any = get_ema_multi_avg_fn  # torch leaves it without types
    average: Callable[..., None] = make(decay)
    return average


def averaged_state(state: RankState, trained: Collection[str]) -> RankState:
    """The same with the averages that this rank contributes in place of the trained weights; frozen weights stay.

    Args:
        state: of one rank, or whole. trained: names of the parameters that are averaged.
    """
    averages = {name: own[EMA] for name, own in state.optimizer.items() if EMA in own}
    frozen = {name: value for name, value in state.weights.items() if name not in trained}
    fragments = dict(state.fragments)
    if fragments:
        parts = {name: part for name, part in fragments["weights"].items() if name in frozen}
        fragments["weights"] = {**parts, **{name: fragments["optimizer"][name] for name in averages}}
    return replace(state, weights={**frozen, **averages}, fragments=fragments)
