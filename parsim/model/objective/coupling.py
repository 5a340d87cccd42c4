"""Whether a loss is a sum over samples, found out on a few samples of the real module.

Gradients of microbatches and replicas add up only if the loss of a batch is the mean of the losses of its samples. A loss that
compares samples with each other (contrastive losses, statistics over the batch) is none: dividing the batch changes it. So
does a module that mixes samples, as one over the nodes of a graph, under any loss.
Leaves out: modules of more than `MOST_ELEMENTS` parameters, and losses that draw random numbers; these stay unchecked. So do
modules with more than `MOST_FLOP` under a loss of parsim's.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from parsim.model.model import ADDED_UP, COUPLED, MIXING
from parsim.model.objective.objective import Objective
from parsim.model.objective.total import MEAN, total_loss

MOST_ELEMENTS = 30_000_000
SAMPLES = 4
LEAST_SAMPLES = 2
"""Where a sample takes more than `MOST_FLOP`: enough to compare one with another."""
TOLERANCE = 1e-9
UNCHECKED = "unchecked"
MOST_FLOP = 1e9
"""Of the forward of a sample, for the check of a module under one of parsim's losses: most of these mix nothing."""

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
    Under a loss of parsim's: MIXING where the module is seen to mix samples, else `form`.

    Args:
        module: with real weights; it stays as it is. form: what the loss gave, see `total`.
        inputs, target: a batch by name. constants: names of inputs without a batch.
        call: makes the arguments of the module of such inputs.
    """
    unchecked = form if objective.adds_up else f"{form} {UNCHECKED}".strip()
    if sum(parameter.numel() for parameter in module.parameters()) > MOST_ELEMENTS:
        return unchecked
    samples = next(len(tensor) for name, tensor in inputs.items() if name not in constants)
    with torch.random.fork_rng(devices=[]):
        try:
            total = _totals(module, objective, inputs, target, constants, call)
            whole = total(0, samples, 0)
            if not math.isfinite(whole):
                return unchecked
            found = _form(total, whole, samples, objective, form)
            draws = found != form and whole != total(0, samples, 1)
        except Exception:  # the user's module, in a mode, type or batch that it may not be made for
            return unchecked
    return unchecked if draws else found


def samples_judged(flop: float) -> int:
    """How many samples of a batch to judge by. Args: flop: of the forward of one."""
    return SAMPLES if flop <= MOST_FLOP else LEAST_SAMPLES


def _form(total: Callable[[int, int, int], float], whole: float, samples: int, objective: Objective, form: str) -> str:
    """`loss_form`, as if no random numbers were drawn."""
    if objective.adds_up:
        return MIXING if _mixes(total, whole, samples) else form
    single = sum(total(place, place + 1, 0) for place in range(samples))
    if _are_close(whole, single):
        return form
    return ADDED_UP if form == MEAN and _are_close(whole, samples * single) else COUPLED


def _mixes(total: Callable[[int, int, int], float], whole: float, samples: int) -> bool:
    """Whether the batch's loss is another one in parts. A batch that runs whole and in no part mixes, too."""
    for size in [1, samples // 2] if samples <= SAMPLES else [samples // 2]:
        with contextlib.suppress(Exception):  # a module may squeeze a batch of one, or index into the whole one
            parts = (total(first, min(first + size, samples), 0) for first in range(0, samples, size))
            return not _are_close(whole, sum(parts))
    return True


def _totals(
    module: nn.Module,
    objective: Objective,
    inputs: Mapping[str, Tensor],
    target: Tensor | None,
    constants: frozenset[str],
    call: ArgumentsOf,
) -> Callable[[int, int, int], float]:
    """(first, last, seed) -> the loss of these samples, added up, of a copy in float64 and eval mode."""
    judge = copy.deepcopy(module).double().eval()

    def total(first: int, last: int, seed: int) -> float:
        given = {name: _of(tensor, name in constants, first, last) for name, tensor in inputs.items()}
        wanted = None if target is None else _of(target, False, first, last)

        def once() -> float:
            args, kwargs = call(given)
            torch.manual_seed(seed)
            with torch.no_grad():
                return float(total_loss(objective, judge(*args, **kwargs), wanted, last - first))

        with contextlib.suppress(Exception), _made_in_float64():
            return once()
        return once()  # a forward that names float32 itself may need it throughout

    return total


@contextlib.contextmanager
def _made_in_float64() -> Iterator[None]:
    """Tensors that a forward makes, such as torch.zeros(3), get the type of the copy's weights."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _are_close(one: float, other: float) -> bool:
    return abs(one - other) <= TOLERANCE * max(abs(one), abs(other), 1e-12)


def _of(tensor: Tensor, constant: bool, first: int, last: int) -> Tensor:
    part = tensor if constant else tensor[first:last]
    return part.double() if part.dtype == torch.float32 else part
