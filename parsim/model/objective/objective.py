"""What a model minimises: a loss, the output it reads, and its targets. Needs no torch.

An Objective travels as text: `cross_entropy`, `cross_entropy(classes_dim=0)`, `mse(output="pixels")`. Plans, Models and jobs
hold this text, and `parse_objective` reads it back.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from parsim.errors import ModelError, TraceError
from parsim.model.inputs import ModelInput
from parsim.model.losses import LOSSES, NOTHING, Loss

TARGET = "target"
"""Name of the targets among the inputs of a Model."""
LAST = -1


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss and what it is taken of.

    Attributes:
        loss: a row of `parsim.model.losses.LOSSES`, "package.module:ROW" or "package:function".
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

    @property
    def takes_targets(self) -> bool:
        return self.row.targets != NOTHING


_FORM = re.compile(r"([^()]+)(?:\((.*)\))?", re.DOTALL)


@lru_cache(maxsize=256)
def parse_objective(text: str) -> Objective:
    """Inverse of `str`. Raises ModelError for a text of another form."""
    form = _FORM.fullmatch(text)
    if form is None:
        raise ModelError(f"not a loss: {text!r}; write its name, or name(output=..., classes_dim=..., target=...)")
    found: dict[str, object] = {}
    rest = (form[2] or "").strip()
    decoder = json.JSONDecoder()
    try:
        while rest:
            key, _, rest = rest.partition("=")
            value, end = decoder.raw_decode(rest.lstrip())
            rest = rest.lstrip()[end:].lstrip(", ")
            found[key.strip()] = ModelInput.from_dict(TARGET, value) if key.strip() == TARGET else value
        return Objective(form[1], **found)  # type: ignore[arg-type]
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
