"""Metrics of validation by name, and the numbers that a training writes down.

A metric is sums over batches, added up over all ranks, and the number that follows from them.

Nothing here imports torch at the top, so a run file is checked without it. A new metric is one row; a plain function
(output, target) of the user's own becomes one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parsim.errors import ExecutionError
from parsim.files import parse_json, read_regular
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


# metrics.jsonl of a training: one line per step, over all its parts. `parsim.execute.train` writes it.


FILE = "metrics.jsonl"
_SAME = 1e-9
"""Relative difference of a sum of ranks' losses that is added up in another order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCurve:
    """The losses of a training, one per step from `first_step` (1 at least) on. validation: scores, each with its step; None
    where the file lacks earlier parts."""

    first_step: int
    losses: tuple[float, ...]
    validation: tuple[dict[str, Any], ...] | None = None


def loss_curve(folder: Path, last: Sequence[float], steps: int) -> LossCurve:
    """All losses of a training that may have gone on several times; only those of its last part (`last`, as ranks recorded
    them) where the file in the run's folder lacks others. steps: that were made in all."""
    lines = lines_of(folder)
    counted = [line for line in lines if "loss" in line]
    whole = tuple(float(line["loss"]) for line in counted)
    tail = whole[len(whole) - len(last) :]
    is_whole = (
        [line["step"] for line in lines] == list(range(1, steps + 1))
        and len(tail) == len(last)
        and all(math.isclose(one, two, rel_tol=_SAME) for one, two in zip(tail, last, strict=True))
    )
    if not is_whole or not counted:
        return LossCurve(first_step=steps - len(last) + 1, losses=tuple(last))
    seen = ({"step": line["step"], **line["validation"]} for line in lines if isinstance(line.get("validation"), dict))
    return LossCurve(first_step=counted[0]["step"], losses=whole, validation=tuple(seen))


def lines_of(folder: Path) -> tuple[dict[str, Any], ...]:
    """The steps that a training has written down, each with its step, seconds and perhaps loss and validation; none without."""
    try:
        return tuple(_lines(read_regular(folder / FILE)))
    except (OSError, ValueError):
        return ()


def _lines(content: bytes) -> Iterator[dict[str, Any]]:
    """The lines of the file. Raises ValueError for one that is none."""
    for text in content.decode().splitlines():
        line = parse_json(text, allow_nan=True)  # a gradient norm in fp16 may have overflowed
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            raise ValueError("a line is not a step of a training")
        if not isinstance(line.get("loss", 0.0), int | float):
            raise ValueError("a loss is not a number")
        yield line
