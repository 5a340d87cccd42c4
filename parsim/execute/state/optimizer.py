"""The optimizers by name, made in one place for calibration, execution and the single-process reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from parsim.errors import ConfigError, near_matches

MOMENTUM = 0.9


def _sgd(parameters: list[Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, foreach=True)


def _sgd_momentum(parameters: list[Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=MOMENTUM, foreach=True)


def _adam(parameters: list[Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=lr, foreach=True)


def _adamw(parameters: list[Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, foreach=True)


OPTIMIZERS: dict[str, Callable[[list[Tensor], float], torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "sgd_momentum": _sgd_momentum,
    "adam": _adam,
    "adamw": _adamw,
}
STATE_ARRAYS: dict[str, int] = {"sgd": 0, "sgd_momentum": 1, "adam": 2, "adamw": 2}


def make_optimizer(name: str, parameters: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    """torch.optim's optimizer in its foreach form, with torch's defaults but for the momentum of `sgd_momentum` (0.9).

    A tensor that occurs twice (tied weights) is updated once. Raises ConfigError for an unknown name.
    """
    if name not in OPTIMIZERS:
        raise ConfigError(f"unknown optimizer {name!r}{near_matches(name, OPTIMIZERS)}")
    return OPTIMIZERS[name](distinct(parameters), lr)


def state_bytes_per_element(name: str, element_bytes: int = 4) -> int:
    """Bytes of optimizer state per parameter scalar. Leaves out Adam's step counter (4 bytes per array)."""
    if name not in STATE_ARRAYS:
        raise ConfigError(f"unknown optimizer {name!r}{near_matches(name, STATE_ARRAYS)}")
    return STATE_ARRAYS[name] * element_bytes


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
