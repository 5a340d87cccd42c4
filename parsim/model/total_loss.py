"""Cross-entropy over tokens in three parts, so that no rank needs all the logits of a token.

1. `loss.maximum`: the largest logit of each token. Of shards the largest of their maxima: an all_reduce of maxima.
2. `loss.sums`: the sum of exp(logit - maximum), and the logit of the target less the maximum. Of shards a sum of each: one
   all_reduce of two numbers per token. A shard whose classes the target is none of adds zero.
3. `loss`: log(sum) - logit, of every token, and their mean per sample.

The gradient of the logits is softmax - 1 at the target; a shard makes its own piece. Source: Megatron-LM,
megatron/core/tensor_parallel/cross_entropy.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from parsim.errors import ModelError
from parsim.model.component import LOSS
from parsim.model.inputs import IGNORED
from parsim.model.objective import CLASSES, CROSS_ENTROPY, LOGITS, NOTHING, Objective, OutputKind, choose_output, own_entry

MAXIMUM, SUMS = f"{LOSS}.maximum", f"{LOSS}.sums"


def total_in_parts(logits: Tensor, target: Tensor, begin: Callable[[str], None]) -> Tensor:
    """The sum over samples of the mean over their tokens, as the row "cross_entropy" has it.

    Args:
        logits: [B, ..., classes]. target: classes [B, ...]. begin: called with the name of every part before its first call.
    """
    begin(MAXIMUM)
    with torch.no_grad():
        maximum = torch.amax(logits, -1, keepdim=True)
    begin(SUMS)
    sums = ClassSums.apply(logits, maximum, target, 0)  # type: ignore[no-untyped-call]
    begin(LOSS)
    losses = torch.log(sums[..., 0]) - sums[..., 1]
    total: Tensor = losses.masked_fill(target == IGNORED, 0.0).sum() / math.prod(target.shape[1:])
    return total


class ClassSums(torch.autograd.Function):
    """Part 2 for the classes of one shard; keeps the exponentials alone for the backward.

    `classes`: of all shards, if the last one ends in logits that stand for no class. They count nothing.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, maximum: Tensor, target: Tensor, shard: int, classes: int | None = None) -> Tensor:
        kind = torch.promote_types(logits.dtype, torch.float32)
        shifted = logits.to(kind) - maximum.to(kind)
        here = target - shard * logits.shape[-1]
        foreign = (here < 0) | (here >= logits.shape[-1])
        place = here.masked_fill(foreign, 0).unsqueeze(-1)
        label = shifted.gather(-1, place).squeeze(-1).masked_fill(foreign, 0.0)
        exponentials = shifted.exp_()
        if classes is not None and (shard + 1) * logits.shape[-1] > classes:
            exponentials[..., classes - shard * logits.shape[-1] :] = 0.0
        ctx.save_for_backward(exponentials, place, foreign)
        ctx.kind = logits.dtype
        return torch.stack((exponentials.sum(-1), label), -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        exponentials, place, foreign = ctx.saved_tensors
        of_sum, of_label = gradients[0].unbind(-1)
        made = exponentials * of_sum.unsqueeze(-1)
        made.scatter_add_(-1, place, of_label.masked_fill(foreign, 0.0).unsqueeze(-1))
        return made.to(ctx.kind), None, None, None, None


class_sums: Callable[..., Tensor] = ClassSums.apply
"""(logits, maximum, target, shard, classes=None) -> [B, ..., 2]; a shard holds classes [shard * n, (shard + 1) * n)."""


# The loss of what a module returned, as the sum over the samples of a batch: one function for tracing, training and scoring.
#
# A module or a plain function gives one number per sample, which are added up, or a scalar, which is taken as the mean over
# the batch. Whether a scalar is that mean is found out by `parsim.model.coupling`.


MEAN, PER_SAMPLE, SUM = "mean", "per sample", "sum"
"""What a loss gave: a scalar taken as the mean, one number per sample, or the sum itself (a row of LOSSES)."""


def entries(output: Any) -> dict[str, Tensor]:
    """The tensors of an output by name: keys, fields and numbers of places, joined by dots; "" is the output itself."""
    return {".".join(path): tensor for path, tensor in _tensors(output, ())}


def _tensors(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, (*path, str(key)))
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name), (*path, field.name))
    elif isinstance(value, tuple | list):
        names = getattr(value, "_fields", [str(place) for place in range(len(value))])
        for name, item in zip(names, value, strict=True):
            yield from _tensors(item, (*path, name))
    elif isinstance(logits := getattr(value, LOGITS, None), Tensor):
        yield (*path, LOGITS), logits


def output_kinds(tensors: Mapping[str, Tensor]) -> dict[str, OutputKind]:
    """Shapes and types of the entries of an output."""
    return {name: OutputKind(tuple(each.shape), str(each.dtype).removeprefix("torch.")) for name, each in tensors.items()}


def total_loss(objective: Objective, output: Any, target: Tensor | None, samples: int, name: str = "the model") -> Tensor:
    """The sum over the samples of the loss of what a module returned; a scalar.

    Args:
        output: of the module, for `samples` samples. target: None where the module takes its targets itself.
        name: of the model, for messages.

    Raises:
        ModelError: an output that leaves open what the loss reads, or a loss that is neither a scalar nor one number per
            sample.
    """
    return total_and_form(objective, output, target, samples, name)[0]


def total_and_form(
    objective: Objective,
    output: Any,
    target: Tensor | None,
    samples: int,
    name: str = "the model",
    *,
    begin: Callable[[str], None] | None = None,
) -> tuple[Tensor, str]:
    """`total_loss`, and what the loss gave: MEAN, PER_SAMPLE or SUM.

    Args:
        begin: take the loss in parts where it has any, and tell the name of each before its first call.
    """
    row = objective.row
    tensors = entries(output)
    kinds = output_kinds(tensors)
    if row.targets == NOTHING:
        return _as_sum(tensors[own_entry(name, kinds, objective.output)], samples, name)
    assert target is not None, "a loss over an output has targets"
    takes_all = row.plain and objective.output is None and LOGITS not in tensors and len(tensors) != 1
    read = output if takes_all else _classes_last(objective, tensors[choose_output(name, kinds, objective.output)])
    # in parts: the cross-entropy of several tokens per sample, classes last
    tokens = begin is not None and objective.loss == CROSS_ENTROPY and read.dim() >= 3
    if begin is not None and tokens and objective.classes_dim in (None, -1, read.dim() - 2):
        return total_in_parts(read, target, begin), SUM
    value = row.total(read, target)
    if not row.plain:
        return value, SUM
    if not isinstance(value, Tensor):
        raise ModelError(f"{objective.loss} returned a {type(value).__name__}; return a tensor: a scalar, or one per sample")
    return _as_sum(value, samples, objective.loss)


def _classes_last(objective: Objective, output: Tensor) -> Tensor:
    dim = objective.classes_dim
    if objective.row.targets != CLASSES or dim in (None, -1) or dim == output.dim() - 2:
        return output
    assert dim is not None
    return output.movedim(dim + 1 if dim >= 0 else dim, -1)


def _as_sum(value: Tensor, samples: int, what: str) -> tuple[Tensor, str]:
    if value.dim() == 1 and value.shape[0] == samples:
        return value.sum(), PER_SAMPLE
    if value.numel() == 1:
        return value.reshape(()) * samples, MEAN
    raise ModelError(
        f"the loss of {what} has shape {list(value.shape)} for {samples} samples; return a scalar, the mean over the batch, or "
        "one number per sample"
    )
