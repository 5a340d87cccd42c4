"""Optimizers of the table, made in one place for calibration, execution and the single-process reference."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from parsim.errors import ConfigError, near_matches
from parsim.execute.training.recipe import PLAIN, TrainingRecipe
from parsim.model.optimizers import COUNTERS, OPTIMIZERS

FIXED = ("lr", "foreach", "fused", "capturable", "differentiable", "amsgrad")
"""Arguments of torch's optimizers that parsim sets: the rate has its own key, the others change the state or the kernels."""


def make_optimizer(
    name: str, parameters: Iterable[Tensor], lr: float, *, recipe: TrainingRecipe = PLAIN, exempt: Iterable[Tensor] = ()
) -> torch.optim.Optimizer:
    """The optimizer of a row of `parsim.model.optimizers.OPTIMIZERS` (or "package.module:ROW") over these parameters.

    A tensor that occurs twice (tied weights) is updated once.

    Args:
        recipe: its arguments and weight decay. exempt: those of the parameters without weight decay, in a group of their own.

    Raises:
        ConfigError: an unknown name, arguments that the optimizer does not take, or a row whose state is not what it keeps.
    """
    check_states(name, recipe)
    without = {id(tensor) for tensor in exempt}
    every = distinct(parameters)
    decayed, rest = [tensor for tensor in every if id(tensor) not in without], [t for t in every if id(t) in without]
    optimizer = OPTIMIZERS[name].make(decayed or rest, lr)
    if decayed and rest:
        optimizer.add_param_group({"params": rest})
    for group in optimizer.param_groups:
        group.update(recipe.group_settings)
    if rest:
        optimizer.param_groups[-1]["weight_decay"] = 0.0
    return optimizer


@lru_cache(maxsize=64)
def check_states(name: str, recipe: TrainingRecipe = PLAIN) -> None:
    """Raise ConfigError unless the optimizer takes the recipe's arguments, and one step of it leaves the state that its row
    lists: memory, ZeRO and checkpoints count on it."""
    row = OPTIMIZERS[name]
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = row.make([parameter], row.learning_rate)
    _check_settings(name, optimizer, recipe.group_settings)
    for group in optimizer.param_groups:
        group.update(recipe.group_settings)
    optimizer.step()
    kept = {key: value for key, value in optimizer.state[parameter].items() if torch.is_tensor(value) and key not in COUNTERS}
    wrong = [key for key, value in kept.items() if value.shape != parameter.shape]
    if wrong:
        raise ConfigError(
            f"optimizer {name!r} keeps {wrong[0]!r} of shape {tuple(kept[wrong[0]].shape)} for a parameter of shape (3,). Only "
            f"arrays like the parameter and the counters {', '.join(COUNTERS)} can be divided and resumed: keep others in "
            "param_groups"
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


def _check_settings(name: str, optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> None:
    """Raise ConfigError for arguments that the optimizer does not take, or refuses."""
    accepted = inspect.signature(type(optimizer)).parameters
    free = [key for key in optimizer.defaults if key not in FIXED and key in accepted]
    for key in settings:
        if key == "weight_decay" and key not in free:
            raise ConfigError(f"optimizer {name!r} has no weight decay; drop training.weight_decay, or take another optimizer")
        if key not in free:
            near = near_matches(key, free)
            listing = "" if near.startswith("; known") else f" ({name} takes: {', '.join(free)})"
            raise ConfigError(f"training.optimizer_args.{key}: optimizer {name!r} has no such argument to set{near}{listing}")
    if not type(optimizer).__module__.startswith("torch.optim"):
        return
    arguments = {**{key: optimizer.defaults[key] for key in free}, **settings}
    make: Any = type(optimizer)
    try:
        make([torch.nn.Parameter(torch.ones(1))], lr=optimizer.defaults["lr"], **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"training.optimizer_args: torch refuses the arguments of {name}: {error}") from error


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
