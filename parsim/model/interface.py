"""What the model of a spec takes and gives: shapes, loss, and batches made of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from parsim.errors import ModelError
from parsim.model.build import build_fake
from parsim.model.hugging_face import config_shape
from parsim.model.losses import LOSSES, NUMBERS, usual_loss
from parsim.model.spec import ModelSpec, resolve
from parsim.model.tracing.trace import require_torch
from parsim.model.zoo import ZOO

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """What a model takes and gives, for one sample.

    Attributes:
        inputs: "image" (floats of any shape) or "tokens" (integers below `bound`).
        output: shape of the logits; with a loss over classes its last size is their number.
        loss: a key of `parsim.model.losses.LOSSES`.
    """

    inputs: str
    input_shape: tuple[int, ...]
    bound: int
    output: tuple[int, ...]
    loss: str


@lru_cache(maxsize=64)
def interface_of(spec: ModelSpec) -> Interface:
    """Shapes of one sample and of its output, and the loss. Needs torch for a factory or a Hugging Face config.

    Args:
        spec: of the model.
    """
    spec = resolve(spec)
    if spec.name not in ZOO:
        return _foreign_interface(spec)
    row, args = ZOO[spec.name], dict(spec.args)
    shape = spec.input_shape or row.input_shape
    classes = int(str(args[row.classes]))
    output = (classes,) if row.inputs == "image" else (*shape, classes)
    return Interface(inputs=row.inputs, input_shape=shape, bound=classes, output=output, loss=spec.loss or row.loss)


def _foreign_interface(spec: ModelSpec) -> Interface:
    """One fake forward tells the output. Inputs are tokens if the sample has one dim and the module an nn.Embedding.

    Unless the spec says, the loss is the usual one of such an output. Raises ModelError where the output leaves it open.
    """
    import torch
    from torch import nn

    from parsim.model.tracing.recording import run_recorded

    module = build_fake(spec)
    shape = spec.input_shape or config_shape(module)
    if shape is None:
        raise ModelError(f"{spec.name} needs an input_shape: the shape of one sample, e.g. [3, 224, 224] or [seq]")
    tables = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
    tokens = len(shape) == 1 and bool(tables)
    example = torch.zeros((2, *shape), dtype=torch.long if tokens else torch.float32)
    recording = run_recorded(module, (example,), {}, loss="mse")
    assert recording.logits_value is not None
    output = tuple(recording.tensors[recording.logits_value].shape[1:])
    bound = getattr(getattr(module, "config", None), "vocab_size", tables[0] if tables else 0)
    loss = spec.loss or usual_loss(spec.name, output, tokens=tokens)
    return Interface(inputs="tokens" if tokens else "image", input_shape=shape, bound=bound, output=output, loss=loss)


def example_batch(
    spec: ModelSpec, samples: int, seed: int = 0, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> tuple[tuple[Tensor, ...], Tensor]:
    """A random batch, the same for the same seed on every device.

    Images and other float inputs are standard normal of `dtype`; tokens and classes are uniform int64.

    Args:
        spec: of the model. samples: B. seed: of the generator.
        dtype: of float inputs (None: float32). device: of the result.

    Returns:
        (inputs, target), the first dim of each is B.
    """
    require_torch("make an example batch")
    import torch

    kind = interface_of(resolve(spec))
    dtype = dtype or torch.float32
    generator = torch.Generator().manual_seed(seed)
    if kind.inputs == "tokens":
        given = torch.randint(kind.bound, (samples, *kind.input_shape), generator=generator)
    else:
        given = torch.randn((samples, *kind.input_shape), generator=generator, dtype=torch.float64).to(dtype)
    if LOSSES[kind.loss].targets == NUMBERS:
        target = torch.randn((samples, *kind.output), generator=generator, dtype=torch.float64).to(dtype)
    else:
        target = torch.randint(kind.output[-1], (samples, *kind.output[:-1]), generator=generator)
    return (given.to(device),), target.to(device)


def loss_of(spec: ModelSpec) -> str:
    """The key of `parsim.model.losses.LOSSES` with which a model trains.

    Args:
        spec: of the model.
    """
    if spec.name in ZOO:
        return spec.loss or ZOO[spec.name].loss
    return interface_of(resolve(spec)).loss
