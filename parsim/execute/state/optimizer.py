"""Optimizers of the table, made in one place for calibration, execution and the single-process reference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from parsim.errors import ConfigError
from parsim.model.optimizers import OPTIMIZERS


def make_optimizer(name: str, parameters: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    """The optimizer of a row of `parsim.model.optimizers.OPTIMIZERS` (or "package.module:ROW") over these parameters.

    A tensor that occurs twice (tied weights) is updated once.

    Raises:
        ConfigError: an unknown name, or a row whose state is not what the optimizer keeps.
    """
    check_states(name)
    return OPTIMIZERS[name].make(distinct(parameters), lr)


@lru_cache(maxsize=64)
def check_states(name: str) -> None:
    """Raise ConfigError unless one step of the optimizer leaves the state that its row lists: memory, ZeRO and checkpoints
    count on it."""
    row = OPTIMIZERS[name]
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = row.make([parameter], row.learning_rate)
    optimizer.step()
    kept = {key: value for key, value in optimizer.state[parameter].items() if torch.is_tensor(value) and key != "step"}
    wrong = [key for key, value in kept.items() if value.shape != parameter.shape]
    if wrong:
        raise ConfigError(
            f"optimizer {name!r} keeps {wrong[0]!r} of shape {tuple(kept[wrong[0]].shape)} for a parameter of shape (3,); only "
            "arrays like the parameter and the counter 'step' can be divided and resumed: keep others in param_groups"
        )
    if set(kept) != set(row.states):
        raise ConfigError(
            f"optimizer {name!r} keeps the state {sorted(kept)}, its row says {sorted(row.states)}; correct Optimizer.states"
        )
    sizes = {value.element_size() for value in kept.values()}
    if sizes - {row.state_element_bytes}:
        raise ConfigError(
            f"optimizer {name!r} keeps {max(sizes)} bytes per element and state array, its row says {row.state_element_bytes}; "
            "correct Optimizer.state_element_bytes"
        )


def distinct(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Every tensor once, in first-seen order."""
    return list({id(parameter): parameter for parameter in parameters}.values())


def flat_gradients(parameters: Sequence[Tensor]) -> Tensor:
    """One zeroed flat array whose consecutive views become the `.grad` of `parameters` (one dtype and device).

    Autograd accumulates into an existing `.grad` in place, so the array is a gradient bucket that needs no copying, and
    `.zero_()` on it zeroes all its gradients in one pass. Zero with that, never with `optimizer.zero_grad()`, which drops
    the views.
    """
    first = parameters[0]
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters), dtype=first.dtype, device=first.device)
    offset = 0
    for parameter in parameters:
        parameter.grad = flat[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
    return flat
