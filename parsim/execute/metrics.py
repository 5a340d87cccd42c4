"""Metrics of validation by name: sums over batches, added up over all ranks, and the number that follows from them.

Nothing here imports torch at the top, so a run file is checked without it. A new metric is one row; a plain function
(output, target) of the user's own becomes one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from parsim.errors import ExecutionError
from parsim.model.inputs import IGNORED
from parsim.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric.

    Attributes:
        sums: (output, target, dim of the classes) -> (numerators, denominators) of a batch, of equal shape.
        value: of their sums over all batches: a list of each. larger_is_better: None: nobody knows, and whoever follows it says
            so.
    """

    sums: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
    value: Callable[[list[float], list[float]], float]
    larger_is_better: bool | None = None


def mean_ratio(numerators: list[float], denominators: list[float]) -> float:
    ratios = [above / below for above, below in zip(numerators, denominators, strict=True) if below]
    return sum(ratios) / len(ratios) if ratios else float("nan")


def _exponential(numerators: list[float], denominators: list[float]) -> float:
    return math.exp(min(mean_ratio(numerators, denominators), 700.0))


def _accuracy(output: Tensor, target: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    counts = target != IGNORED
    return ((output.argmax(dim) == target) & counts).sum(), counts.sum()


def _cross_entropy(output: Tensor, target: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    from torch.nn.functional import cross_entropy

    total = cross_entropy(output.movedim(dim, 1).float(), target, ignore_index=IGNORED, reduction="sum")
    return total, (target != IGNORED).sum()


def _iou(output: Tensor, target: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Per class the places that are predicted and right, and those that are predicted or right."""
    import torch

    classes, counts = output.shape[dim], target != IGNORED
    predicted, right = output.argmax(dim)[counts], target[counts]
    both = torch.bincount(right[predicted == right], minlength=classes)
    return both, torch.bincount(predicted, minlength=classes) + torch.bincount(right, minlength=classes) - both


def _absolute(output: Tensor, target: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return (output - target).abs().sum(), output.new_tensor(output.numel())


def _squared(output: Tensor, target: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return (output - target).square().sum(), output.new_tensor(output.numel())


def _of_function(function: Callable[[Any, Any], Any], output: Tensor, target: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The sums of a user's function, which returns one of three things."""
    import torch

    result = function(output, target)
    if isinstance(result, tuple) and len(result) == 2:
        above, below = (torch.as_tensor(part) for part in result)
        if above.shape == below.shape:
            return above, below
    elif isinstance(result, int | float | torch.Tensor):
        number = torch.as_tensor(result)
        if number.dim() == 0:
            return number * len(output), torch.tensor(len(output))
        if number.shape == (len(output),):
            return number.sum(), torch.tensor(len(output))
    name, shape = getattr(function, "__name__", "metric"), getattr(result, "shape", None)
    kind = type(result).__name__ if shape is None else f"{type(result).__name__} of shape {list(shape)}"
    raise ExecutionError(
        f"metric {name} returned {kind}; return the mean over the batch, one number per sample, or a pair "
        "(numerators, denominators) of equal shape, which are added up over all batches"
    )


def _from_function(entry: Any) -> Any:
    """A plain function (output, target) as a Metric; anything else as it is."""
    if callable(entry) and not isinstance(entry, type | Metric):
        return Metric(sums=partial(_of_function, entry), value=mean_ratio)
    return entry


METRICS: Registry[Metric] = Registry(
    "metric",
    Metric,
    {
        "accuracy": Metric(sums=_accuracy, value=mean_ratio, larger_is_better=True),
        "perplexity": Metric(sums=_cross_entropy, value=_exponential, larger_is_better=False),
        "mean_iou": Metric(sums=_iou, value=mean_ratio, larger_is_better=True),
        "mean_absolute_error": Metric(sums=_absolute, value=mean_ratio, larger_is_better=False),
        "mean_squared_error": Metric(sums=_squared, value=mean_ratio, larger_is_better=False),
    },
    adapt=_from_function,
)

LOSS_NAME = "loss"
"""What monitor may name beside the metrics."""
