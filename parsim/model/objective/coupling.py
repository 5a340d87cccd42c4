"""Whether a loss is a sum over samples, found out on a few samples of the real module.

Gradients of microbatches and replicas add up only if the loss of a batch is the mean of the losses of its samples. A loss that
compares samples with each other (contrastive losses, statistics over the batch) is none: dividing the batch changes it.
Leaves out: modules of more than `MOST_ELEMENTS` parameters, and losses that draw random numbers; these stay unchecked.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from parsim.model.model import ADDED_UP, COUPLED
from parsim.model.objective.objective import Objective
from parsim.model.objective.total import MEAN, total_loss

MOST_ELEMENTS = 30_000_000
SAMPLES = 4
TOLERANCE = 1e-9
UNCHECKED = "unchecked"

ArgumentsOf = Callable[[Mapping[str, Tensor]], tuple[tuple[Any, ...], Mapping[str, Any]]]


def loss_form(
    module: nn.Module,
    objective: Objective,
    form: str,
    inputs: Mapping[str, Tensor],
    target: Tensor | None,
    *,
    constants: frozenset[str] = frozenset(),
    call: ArgumentsOf,
) -> str:
    """Whether the loss is a sum over the samples: `form` where it is.

    COUPLED where it is no such sum, ADDED_UP where it is one and was taken as a mean, `form` and UNCHECKED where that is open.

    Args:
        module: with real weights; it stays as it is. form: what the loss gave, see `total`.
        inputs, target: a batch by name. constants: names of inputs without a batch.
        call: makes the arguments of the module of such inputs.
    """
    unchecked = f"{form} {UNCHECKED}".strip()
    if sum(parameter.numel() for parameter in module.parameters()) > MOST_ELEMENTS:
        return unchecked
    samples = next(len(tensor) for name, tensor in inputs.items() if name not in constants)
    state = torch.get_rng_state()
    try:
        judge = copy.deepcopy(module).double().eval()

        def total(first: int, last: int, seed: int) -> float:
            given = {name: _of(tensor, name in constants, first, last) for name, tensor in inputs.items()}
            args, kwargs = call(given)
            torch.manual_seed(seed)
            wanted = None if target is None else _of(target, False, first, last)
            with torch.no_grad():
                return float(total_loss(objective, judge(*args, **kwargs), wanted, last - first))

        whole = total(0, samples, 0)
        if whole != total(0, samples, 1) or not math.isfinite(whole):
            return unchecked
        single = sum(total(place, place + 1, 0) for place in range(samples))
    except Exception:  # the user's module, in a mode, type or batch that it may not be made for
        return unchecked
    finally:
        torch.set_rng_state(state)
    if _are_close(whole, single):
        return form
    return ADDED_UP if form == MEAN and _are_close(whole, samples * single) else COUPLED


def _are_close(one: float, other: float) -> bool:
    return abs(one - other) <= TOLERANCE * max(abs(one), abs(other), 1e-12)


def _of(tensor: Tensor, constant: bool, first: int, last: int) -> Tensor:
    part = tensor if constant else tensor[first:last]
    return part.double() if part.dtype == torch.float32 else part
