"""Losses as sums over samples, so that gradients add up over microbatches and replicas; and what a loss reads of an output.

The executor divides by the global batch; per sample a loss is the mean over that sample's targets. A new loss is one row, or a
plain function of (output, target) named as "package:function".
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from parsim.errors import ModelError, TraceError, near_matches
from parsim.model.inputs import FLOATS, ModelInput
from parsim.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor


def _cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Logits [B, ..., classes], target classes [B, ...]."""
    import torch.nn.functional as functional

    if output.dim() == 2:
        return functional.cross_entropy(output, target, reduction="sum")
    total = functional.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="sum")
    return total / math.prod(output.shape[1:-1])


def _mean_of(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of torch over output and target [B, ...] of one shape: the mean of each sample, summed over samples."""

    def total(output: Tensor, target: Tensor) -> Tensor:
        import torch.nn.functional as functional

        summed: Tensor = getattr(functional, name)(output, target, reduction="sum")
        return summed / math.prod(output.shape[1:])

    return total


CLASSES, NUMBERS, BINARY, NOTHING = "classes", "numbers", "binary", "nothing"
TARGETS = (CLASSES, NUMBERS, BINARY, NOTHING)
OWN = "own"
CROSS_ENTROPY = "cross_entropy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One loss.

    Attributes:
        total: (output [B, ...], target) -> the sum over the B samples of each one's mean loss. It is a scalar that
            depends on samples one by one, so microbatches and replicas add up.
        targets: CLASSES (int64 [B, ...], below the output's last size), NUMBERS (the shape and dtype of the output), BINARY
            (the same, 0.0 or 1.0) or NOTHING (the module takes its targets itself).
        plain: a user's function, or the module's own loss. `total` then gives what it returned: one number per sample, or a
            scalar, which is taken as the mean over the batch.
    """

    total: Callable[[Tensor, Tensor], Tensor]
    targets: str = CLASSES
    plain: bool = False

    def __post_init__(self) -> None:
        if self.targets not in TARGETS:
            raise ModelError(f"the targets of a loss are one of {', '.join(TARGETS)}, got {self.targets!r}")


def _from_function(row: Any) -> Any:
    """A plain function (output, target) as a Loss; anything else as it is."""
    is_function = callable(row) and not isinstance(row, type | Loss)
    return Loss(total=row, targets=NUMBERS, plain=True) if is_function else row


LOSSES: Registry[Loss] = Registry(
    "loss",
    Loss,
    {
        CROSS_ENTROPY: Loss(total=_cross_entropy),
        "mse": Loss(total=_mean_of("mse_loss"), targets=NUMBERS),
        # output: logits of the second of two classes, targets 0.0 or 1.0
        "bce": Loss(total=_mean_of("binary_cross_entropy_with_logits"), targets=BINARY),
        # what the module returns is its loss; see `parsim.model.total_loss`
        OWN: Loss(total=lambda output, target: output, targets=NOTHING, plain=True),
    },
    error=ModelError,
    adapt=_from_function,
)


def usual_loss(name: str, output: tuple[int, ...], *, tokens: bool) -> str:
    """The loss that the shape of one sample's output calls for, where nobody chose one.
    One number is a regression, a vector holds the logits of classes, and tokens in, [seq, vocabulary] out is a language model.
    Raises ModelError for any other shape, e.g. an image."""
    if math.prod(output) == 1:
        return "mse"
    if len(output) == 1 or (tokens and len(output) == 2):
        return "cross_entropy"
    maps = f', "cross_entropy" with classes_dim = 0 (maps of {output[0]} classes)' if len(output) > 2 else ""
    raise ModelError(
        f'{name} returns {list(output)} per sample, so the loss is ambiguous. In [model] choose loss = "mse" (targets like '
        f'the output), "bce" (0 or 1 for each number), "cross_entropy" with classes_dim = -1 (classes along the last dim, '
        f'{output[-1]}){maps}. Or give a loss of your own as "package:function" or "package.module:ROW"'
    )


# What a model minimises: a loss, the output it reads, and its targets. Needs no torch.
#
# An Objective travels as text: `cross_entropy`, `cross_entropy(classes_dim=0)`, `mse(output="pixels")`. Plans, Models and
# jobs hold this text, and `parse_objective` reads it back.


TARGET = "target"
"""Name of the targets among the inputs of a Model."""
LAST = -1


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss and what it is taken of.

    Attributes:
        loss: a row of `parsim.model.objective.LOSSES`, "package.module:ROW" or "package:function".
        output: which tensor of the module's output it reads, by the name of the entry; None: the only one, or `.logits`.
        classes_dim: of one sample, along which cross_entropy finds its classes; None: the last, and not stated.
        target: the targets, where the loss does not say what they are.
    """

    loss: str
    output: str | None = None
    classes_dim: int | None = None
    target: ModelInput | None = None

    def __str__(self) -> str:
        parts = [f"{key}={json.dumps(value)}" for key in ("output", "classes_dim") if (value := getattr(self, key)) is not None]
        if self.target is not None:
            parts.append(f"{TARGET}={json.dumps(self.target.to_dict())}")
        return f"{self.loss}({', '.join(parts)})" if parts else self.loss

    @property
    def row(self) -> Loss:
        """Raises ModelError for an unknown loss."""
        return LOSSES[self.loss]

    @property
    def adds_up(self) -> bool:
        """Whether the loss is one of parsim's own, which are sums over the samples of an output."""
        return self.loss in LOSSES and not self.row.plain


_FORM = re.compile(r"([^()]+)(?:\((.*)\))?", re.DOTALL)


@lru_cache(maxsize=256)
def parse_objective(text: str) -> Objective:
    """Inverse of `str`. Raises ModelError for a text of another form."""
    form = _FORM.fullmatch(text)
    if form is None:
        raise ModelError(f"not a loss: {text!r}; write its name, or name(output=..., classes_dim=..., target=...)")
    keys: dict[str, object] = {}
    rest = (form[2] or "").strip()
    decoder = json.JSONDecoder()
    try:
        while rest:
            key, _, rest = rest.partition("=")
            value, end = decoder.raw_decode(rest.lstrip())
            rest = rest.lstrip()[end:].lstrip(", ")
            keys[key.strip()] = ModelInput.from_dict(TARGET, value) if key.strip() == TARGET else value
        return Objective(form[1], **keys)  # type: ignore[arg-type]
    except (json.JSONDecodeError, TypeError) as error:
        raise ModelError(f"not a loss: {text!r} ({error}); write name(output=..., classes_dim=..., target=...)") from error


@contextlib.contextmanager
def naming_coupled_losses() -> Iterator[None]:
    """A forward whose sizes grow with the square of the batch compares samples: say what that means for a loss."""
    try:
        yield
    except TraceError as error:
        if "not linear in the batch" not in str(error):
            raise
        raise TraceError(
            f"{error}. A loss that compares the samples of a batch with each other (a contrastive one) is not a sum over "
            "samples: data parallelism and microbatches would change it. It can be planned where pairs meet "
            "after the last use of a parameter: scale the embeddings and not their products"
        ) from error


# Which loss a module trains by, what of its output the loss reads, and what its targets are. Needs no torch.
#
# Settled once, from the shapes of the outputs; what is left open is refused with the choices.


LOGITS, LOSS_ENTRY = "logits", "loss"


class OutputKind(NamedTuple):
    """One tensor that a module returns: its whole shape, torch's name of its dtype."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What a module trains by.
    `objective`: complete. `entry`: the name of the output that the loss reads; None: all that is returned. `output`: shape of
    one sample of that entry; () for None. `target`: the targets of a batch; None where the module takes them itself."""

    objective: Objective
    entry: str | None
    output: tuple[int, ...]
    target: ModelInput | None


def settle(
    name: str,
    outputs: Mapping[str, OutputKind],
    samples: int,
    objective: Objective | None,
    *,
    tokens: bool,
    output: str | None = None,
) -> Settled:
    """The loss of a module and its targets.

    `name`: of the model, for messages. `outputs`: by the name of the entry; "" is the whole output. `samples`: of the batch.
    `objective`: the choice; None: the usual one of such an output. `tokens`: a sample is a row of token numbers. `output`:
    which output a loss that nobody chose reads. Raises ModelError: an output or a loss that is left open, or a loss that does
    not fit the output.
    """
    if objective is None:
        if LOSS_ENTRY in outputs:  # of the whole batch or per sample
            returns_loss = len(outputs[LOSS_ENTRY].shape) <= 1 and outputs[LOSS_ENTRY].dtype in FLOATS
        else:
            returns_loss = len(outputs) == 1 and _is_number(next(iter(outputs.values())))
        if output is None and returns_loss:
            return Settled(objective=Objective(OWN), entry=None, output=(), target=None)
        chosen = choose_output(name, outputs, output)
        if output is not None and _is_number(outputs[chosen]):
            return Settled(objective=Objective(OWN, output=output), entry=None, output=(), target=None)
        shape = _sample_of(name, chosen, outputs[chosen], samples)
        objective = Objective(usual_loss(name, shape, tokens=tokens), output=output)
    row = objective.row
    if row.targets == NOTHING:
        own_entry(name, outputs, objective.output)
        return Settled(objective=objective, entry=None, output=(), target=None)
    if row.plain and objective.output is None and LOGITS not in outputs and len(outputs) != 1:
        if objective.target is None:
            raise ModelError(
                f"{name} returns {_listing(outputs)}, and {objective.loss} takes all of it, so its targets are unknown; in "
                f'[model] give target = {{ shape = [...], dtype = "..." }}, or output = "..." to hand on one of them'
            )
        return Settled(objective=objective, entry=None, output=(), target=objective.target)
    chosen = choose_output(name, outputs, objective.output)
    shape = _sample_of(name, chosen, outputs[chosen], samples)
    target = _checked_target(name, objective, shape, outputs[chosen].dtype)
    return Settled(objective=objective, entry=chosen, output=shape, target=target)


def _is_number(kind: OutputKind) -> bool:
    """One number for the whole batch."""
    return kind.shape == () and kind.dtype in FLOATS


def choose_output(name: str, outputs: Mapping[str, OutputKind], choice: str | None) -> str:
    """The entry a loss reads: the choice, else `.logits`, else the only one. Raises ModelError with the choices."""
    if choice is not None:
        if choice not in outputs:
            near = near_matches(choice, [key for key in outputs if key])
            raise ModelError(f"{name} returns no {choice!r}{near}; it returns {_listing(outputs)}")
        return choice
    if LOGITS in outputs:
        return LOGITS
    if len(outputs) == 1:
        return next(iter(outputs))
    if not outputs:
        raise ModelError(f"{name} returns no tensor, so no loss can be taken; return a tensor, or tensors in a tuple or dict")
    first = next(iter(outputs))
    numbers = [entry for entry, kind in outputs.items() if _is_number(kind)]
    losses = f' (output = "{numbers[0]}" is one number: the loss of the module itself)' if len(numbers) == 1 else ""
    raise ModelError(
        f"{name} returns {len(outputs)} tensors, {_listing(outputs)}, so the input of the loss is ambiguous. In [model] choose "
        f'output = "{first}" or another of them{losses}, or loss = "package:function", a function (output, target) of '
        "all of them"
    )


def own_entry(name: str, outputs: Mapping[str, OutputKind], choice: str | None) -> str:
    """The entry that holds the module's own loss: the choice, else `loss`, else the only one. Raises ModelError."""
    if choice is not None or (len(outputs) == 1 and LOSS_ENTRY not in outputs):
        entry = choose_output(name, outputs, choice)
    elif LOSS_ENTRY in outputs:
        entry = LOSS_ENTRY
    else:
        raise ModelError(
            f'{name} returns {_listing(outputs)}, and loss = "own" needs its loss: return it alone or as .loss, or choose '
            f'output = "..."'
        )
    shape, dtype = outputs[entry]
    if dtype not in FLOATS or len(shape) > 1:
        raise ModelError(
            f"{name} returns {_text(entry, outputs[entry])} as its own loss; a loss is one number, the mean over the batch, or "
            "one number per sample"
        )
    return entry


def _sample_of(name: str, entry: str, kind: OutputKind, samples: int) -> tuple[int, ...]:
    if not kind.shape or kind.shape[0] != samples:
        raise ModelError(
            f"{name} returns {_text(entry, kind)} for {samples} samples (dim 0 of the first input): dim 0 is not the "
            f'batch, so there is no loss per sample. Take and return [batch, ...], or choose loss = "own" if it is the loss'
        )
    return kind.shape[1:]


def _checked_target(name: str, objective: Objective, shape: tuple[int, ...], dtype: str) -> ModelInput:
    """The targets of a loss over an output of that shape per sample; ModelError where the loss does not fit."""
    row, loss = objective.row, objective.loss
    if dtype not in FLOATS and not row.plain:
        raise ModelError(
            f"{name} returns {dtype} {list(shape)} per sample, which has no gradient; {loss} needs floating-point outputs such "
            "as logits: return them before argmax or rounding"
        )
    if dtype.startswith("complex") and not row.plain:
        raise ModelError(
            f"{name} returns {dtype} {list(shape)} per sample, and {loss} needs real numbers: return .real, .abs(), or both "
            "parts by torch.view_as_real"
        )
    if objective.classes_dim is not None and row.targets != CLASSES:
        raise ModelError(f"classes_dim is for losses over classes, and {loss} takes {row.targets}; drop classes_dim")
    if objective.target is not None:
        if loss in LOSSES:
            raise ModelError(f"{loss} defines its targets itself; drop target, which is for a loss of your own")
        return replace(objective.target, name=TARGET)
    if row.targets != CLASSES:
        return ModelInput(TARGET, shape)
    return _class_targets(name, objective, shape)


def _class_targets(name: str, objective: Objective, shape: tuple[int, ...]) -> ModelInput:
    loss, dim = objective.loss, objective.classes_dim
    if not shape:
        raise ModelError(
            f'{name} returns one number per sample, and {loss} needs one for each class; set loss = "mse" (a regression) or '
            '"bce" (two classes), or return logits [classes]'
        )
    if dim is None:
        if len(shape) > 2 and loss in LOSSES:
            raise ModelError(
                f"{name} returns {list(shape)} per sample, so the dim of the classes for {loss} is ambiguous; set classes_dim "
                f"= 0 ({shape[0]} classes, as torch's cross_entropy takes maps) or classes_dim = -1 ({shape[-1]} classes)"
            )
        dim = LAST
    if not -len(shape) <= dim < len(shape):
        raise ModelError(f"classes_dim = {dim}: {name} returns {list(shape)} per sample, so it is 0 to {len(shape) - 1}, or -1")
    classes = shape[dim]
    if classes < 2:
        raise ModelError(
            f"{name} returns {list(shape)} per sample, {classes} class along dim {dim}, and {loss} needs at least 2; set "
            'loss = "mse" (a regression) or "bce" (two classes)'
        )
    place = dim % len(shape)
    return ModelInput(TARGET, (*shape[:place], *shape[place + 1 :]), dtype="int64", high=classes)


def _listing(outputs: Mapping[str, OutputKind]) -> str:
    return ", ".join(_text(entry, kind) for entry, kind in outputs.items())


def _text(entry: str, kind: OutputKind) -> str:
    name = f'"{entry}" ' if entry else ""
    return f"{name}{kind.dtype} {list(kind.shape)}"
