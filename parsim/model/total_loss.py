"""Cross-entropy over tokens in three parts, so that no rank needs all the logits of a token.

1. `loss.maximum`: the largest logit of each token. Of shards the largest of their maxima: an all_reduce of maxima.
2. `loss.sums`: the sum of exp(logit - maximum), and the logit of the target less the maximum. Of shards a sum of each: one
   all_reduce of two numbers per token. A shard whose classes the target is none of adds zero.
3. `loss`: log(sum) - logit, of every token, and their mean per sample.

The gradient of the logits is softmax - 1 at the target; a shard makes its own piece. Source: Megatron-LM,
megatron/core/tensor_parallel/cross_entropy.py.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parsim.errors import ModelError
from parsim.model.component import LOSS
from parsim.model.inputs import IGNORED
from parsim.model.model import ADDED_UP, COUPLED, MIXING
from parsim.model.objective import CLASSES, CROSS_ENTROPY, LOGITS, NOTHING, Objective, OutputKind, choose_output, own_entry
from parsim.private import TorchDispatchMode

MAXIMUM, SUMS = f"{LOSS}.maximum", f"{LOSS}.sums"


def total_in_parts(logits: Tensor, target: Tensor, begin: Callable[[str], None]) -> Tensor:
    """The sum over samples of the mean over their tokens, as the row "cross_entropy" has it.

    `logits`: [B, ..., classes]. `target`: classes [B, ...]. `begin`: called with the name of every part before its first call.
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
    `classes`: of all shards, if the last one ends in logits that stand for no class. They count nothing."""

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
# the batch. Whether a scalar is that mean is found out by `loss_form`.


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
    `output`: of the module, for `samples` samples. `target`: None where the module takes its targets itself. `name`: of the
    model, for messages. Raises ModelError: an output that leaves open what the loss reads, or a loss that is neither a scalar
    nor one number per sample."""
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
    `begin`: take the loss in parts where it has any, and tell the name of each before its first call."""
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


# Whether a loss is a sum over samples, found out on a few samples of the real module.
#
# Gradients of microbatches and replicas add up only if the loss of a batch is the mean of the losses of its samples. A loss
# that compares samples with each other (contrastive losses, statistics over the batch) is none: dividing the batch changes it.
# So does a module that mixes samples, as one over the nodes of a graph, under any loss.
#
# Leaves out: modules of more than `MOST_ELEMENTS` parameters, and losses that draw random numbers; these stay unchecked. So do
# modules with more than `MOST_FLOP` under a loss of parsim's.


MOST_ELEMENTS = 30_000_000
SAMPLES = 4
LEAST_SAMPLES = 2
"""Where a sample takes more than `MOST_FLOP`: enough to compare one with another."""
TOLERANCE = 1e-9
"""Relative, of losses in float64."""
ROUNDINGS = 100.0
"""Relative tolerance over the rounding of the least exact type that a forward computes in: `.float()` is common at its end."""
MOST_TOLERANCE = 0.05
GRADIENT_TOLERANCE = 1e-6
"""Relative, of gradients in float64."""
UNCHECKED = "unchecked"
MOST_FLOP = 1e9
"""Of the forward of a sample, for the check of a module under one of parsim's losses: most of these mix nothing."""

_EVALUATED = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
"""Parts whose training is known: BatchNorm is that of a rank, and dropout draws for every sample."""

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
    Under a loss of parsim's: MIXING where the module is seen to mix samples, else `form`. `module`: with real weights; it stays
    as it is. `form`: what the loss gave, see `total`. `inputs`, `target`: a batch by name. `constants`: names of inputs without
    a batch. `call`: makes the arguments of the module of such inputs.
    """
    unchecked = form if objective.adds_up else f"{form} {UNCHECKED}".strip()
    if sum(parameter.numel() for parameter in module.parameters()) > MOST_ELEMENTS:
        return unchecked
    samples = next(len(tensor) for name, tensor in inputs.items() if name not in constants)
    with torch.random.fork_rng(devices=[]):
        try:
            total = _Totals(module, objective, inputs, target, constants, call)
            batch = total(0, samples, 0)
            if not math.isfinite(batch):
                return unchecked
            evaluated = _form(total, batch, samples, objective, form)
            if evaluated != form:
                return unchecked if batch != total(0, samples, 1) else evaluated  # unchecked: it draws random numbers
            trains = _Totals(module, objective, inputs, target, constants, call, training=True)
            if _mixes_in_training(trains, batch, samples):
                return MIXING
            if total.own_backwards and not _gradients_add_up(total, samples):
                return MIXING if objective.adds_up else COUPLED
            return form
        except Exception:  # the user's module, in a mode, type or batch that it may not be made for
            return unchecked


def samples_judged(flop: float) -> int:
    """How many samples of a batch to judge by, from the flop of one sample's forward."""
    return SAMPLES if flop <= MOST_FLOP else LEAST_SAMPLES


def _form(total: _Totals, whole: float, samples: int, objective: Objective, form: str) -> str:
    """`loss_form`, as if no random numbers were drawn."""
    if objective.adds_up:
        return MIXING if _mixes(total, whole, samples) else form
    single = sum(total(place, place + 1, 0) for place in range(samples))
    if total.are_close(whole, single):
        return form
    return ADDED_UP if form == MEAN and total.are_close(whole, samples * single) else COUPLED


def _mixes(total: _Totals, whole: float, samples: int) -> bool:
    """Whether the batch's loss is another one in parts. A batch that runs whole and in no part mixes, too.
    Of two samples that run in no part, each is taken twice: the module may only squeeze a batch of one."""
    for size in [1, samples // 2] if samples <= SAMPLES else [samples // 2]:
        with contextlib.suppress(Exception):  # a module may squeeze a batch of one, or index into the whole one
            parts = (total(first, min(first + size, samples), 0) for first in range(0, samples, size))
            return not total.are_close(whole, sum(parts))
    if samples == LEAST_SAMPLES:
        return not total.are_close(2 * whole, sum(total(place, place + 1, 0, times=2) for place in range(samples)))
    return True


def _mixes_in_training(total: _Totals, evaluated: float, samples: int) -> bool:
    """Whether a module mixes samples in training alone, as batch statistics of one's own do. Open where it draws numbers.
    `total`: in training mode. `evaluated`: the loss in eval mode: where it is the same, nothing else is done in training."""
    with contextlib.suppress(Exception):  # a module may need another batch, or have no loss in this type
        whole = total(0, samples, 0)
        if not math.isfinite(whole) or total.are_close(whole, evaluated) or whole != total(0, samples, 1):
            return False
        return _mixes(total, whole, samples)
    return False


def _gradients_add_up(total: _Totals, samples: int) -> bool:
    """Whether the gradient of a batch is the sum of those of its samples, where the user's own backward makes it."""
    with contextlib.suppress(Exception):  # as above
        whole = total.gradient(0, samples)
        if bool(whole.isfinite().all()):
            rest = float((whole - sum(total.gradient(place, place + 1) for place in range(samples))).norm())
            size = float(whole.norm())
            return total.are_close(size + rest, size, least=GRADIENT_TOLERANCE)
    return True


@contextlib.contextmanager
def _own_backwards(uses: list[bool]) -> Iterator[None]:
    """Inside, every use of a torch.autograd.Function is noted in `uses`."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        uses.append(True)
        return original.__get__(None, cls)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


class _Totals:
    """The loss of some samples, added up, of a copy in float64 and eval mode.
    `training`: in training mode, but for BatchNorm and dropout of torch. Each loss is that of the first state. `own_backwards`
    has entries where a forward has used a torch.autograd.Function."""

    def __init__(
        self,
        module: nn.Module,
        objective: Objective,
        inputs: Mapping[str, Tensor],
        target: Tensor | None,
        constants: frozenset[str],
        call: ArgumentsOf,
        *,
        training: bool = False,
    ) -> None:
        self._judge = copy.deepcopy(module).double().train(training)
        for part in self._judge.modules():
            if isinstance(part, _EVALUATED):
                part.eval()
        # where a forward in training may write (buffers and frozen parameters), and the values there
        self._first: list[tuple[dict[str, Any], str, Tensor, Tensor]] = [
            (holder, name, tensor, tensor.detach().clone())
            for part in (self._judge.modules() if training else ())
            for holder in (part._buffers, part._parameters)
            for name, tensor in holder.items()
            if tensor is not None and not tensor.requires_grad
        ]
        self._objective, self._inputs, self._target = objective, inputs, target
        self._constants, self._call = constants, call
        self._types = _Types()
        self.own_backwards: list[bool] = []

    def __call__(self, first: int, last: int, seed: int, *, times: int = 1) -> float:
        """The loss of the samples from `first` to `last`, all of them `times` times."""
        samples = self._samples(first, last, times)

        def once() -> float:
            for holder, name, tensor, value in self._first:  # what an earlier forward has changed
                tensor.data = value.clone()
                holder[name] = tensor
            torch.manual_seed(seed)
            with torch.no_grad(), self._types, _own_backwards(self.own_backwards):
                return float(self._loss(*samples))

        with contextlib.suppress(Exception), _made_in_float64():
            return once()
        return once()  # a forward that names float32 itself may need it throughout

    def gradient(self, first: int, last: int) -> Tensor:
        """Gradient of the loss of these samples, all parameters in one row."""
        samples = self._samples(first, last)
        torch.manual_seed(0)
        with torch.enable_grad(), _made_in_float64():
            loss = self._loss(*samples)
        weights = [parameter for parameter in self._judge.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(loss, weights, materialize_grads=True)
        return torch.cat([gradient.flatten() for gradient in gradients])

    def _samples(self, first: int, last: int, times: int = 1) -> tuple[dict[str, Tensor], Tensor | None, int]:
        """Inputs, target and number of samples, in float64 where they are float32."""

        def part(tensor: Tensor, constant: bool) -> Tensor:
            samples = tensor if constant else torch.cat([tensor[first:last]] * times)
            return samples.double() if samples.dtype == torch.float32 else samples

        inputs = {name: part(tensor, name in self._constants) for name, tensor in self._inputs.items()}
        return inputs, None if self._target is None else part(self._target, False), times * (last - first)

    def _loss(self, inputs: Mapping[str, Tensor], target: Tensor | None, samples: int) -> Tensor:
        args, kwargs = self._call(inputs)
        return total_loss(self._objective, self._judge(*args, **kwargs), target, samples)

    def are_close(self, one: float, other: float, *, least: float = TOLERANCE) -> bool:
        """Whether two losses differ by no more than the types leave open that were computed in."""
        rounding = max(least, min(MOST_TOLERANCE, ROUNDINGS * self._types.rounding)) if self._types.rounding else least
        return abs(one - other) <= rounding * max(abs(one), abs(other), 1e-12)


class _Types(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The rounding of the least exact type of what was computed; 0 where all was in float64."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rounding = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64:
                self.rounding = max(self.rounding, torch.finfo(value.dtype).eps)
        return result


@contextlib.contextmanager
def _made_in_float64() -> Iterator[None]:
    """Tensors that a forward makes, such as torch.zeros(3), get the type of the copy's weights."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
