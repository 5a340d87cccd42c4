"""Single-process training that every synchronous plan must equal: the plain module, plain autograd, one optimizer.

It replays what a plan leaves to choice: microbatches as normalisation groups, and running statistics per replica.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parsim.data import BatchOrder, Dataset, part
from parsim.execute.optimizer import make_optimizer
from parsim.execute.stage import seeded_module
from parsim.model.losses import loss_sum
from parsim.model.spec import ModelSpec, loss_of
from parsim.plan.plan import Plan


@dataclass(frozen=True, kw_only=True)
class ReferenceResult:
    """Attributes:
    parameters: by qualified name. optimizer_state: by parameter name, then by torch's key.
    buffers: per replica, by qualified name. losses: mean over the global batch, per step.
    """

    parameters: dict[str, Tensor]
    optimizer_state: dict[str, dict[str, Tensor]]
    buffers: tuple[dict[str, Tensor], ...]
    losses: tuple[float, ...]


def train_reference(
    spec: ModelSpec,
    plan: Plan,
    data: Dataset,
    *,
    optimizer: str,
    learning_rate: float,
    dtype: torch.dtype,
    seed: int,
    steps: int,
) -> ReferenceResult:
    """`steps` steps in this process, on the same samples in the same order as any plan with this global batch."""
    module = seeded_module(spec, seed, dtype, torch.device("cpu"))
    named = dict(module.named_parameters())
    updater = make_optimizer(optimizer, named.values(), learning_rate)
    replicas = [_clone(dict(module.named_buffers())) for _ in range(plan.mesh.dp)]
    order = BatchOrder(n=len(data), global_batch=plan.global_batch, seed=seed)
    losses = []
    for step in range(steps):
        indices = order.indices(step)
        updater.zero_grad()
        total = 0.0
        for replica, buffers in enumerate(replicas):
            _load(dict(module.named_buffers()), buffers)
            for microbatch in range(plan.microbatches):
                own = part(indices, replica=replica, dp=plan.mesh.dp, microbatch=microbatch, microbatches=plan.microbatches)
                inputs, targets = data.batch(own)
                tensor = torch.from_numpy(inputs)
                if tensor.is_floating_point():
                    tensor = tensor.to(dtype)
                loss = loss_sum(loss_of(spec), module(tensor), torch.from_numpy(targets)) / plan.global_batch
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.item()
            replicas[replica] = _clone(dict(module.named_buffers()))
        updater.step()
        losses.append(total)
    state = {
        name: {key: value.detach().clone() for key, value in updater.state[parameter].items() if isinstance(value, Tensor)}
        for name, parameter in named.items()
    }
    return ReferenceResult(parameters=_clone(named), optimizer_state=state, buffers=tuple(replicas), losses=tuple(losses))


def _clone(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _load(live: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(saved[name])


def largest_difference(expected: dict[str, Tensor], actual: dict[str, Tensor], names: Sequence[str] | None = None) -> float:
    """max |a - b| over the named tensors (all of `expected` if None); a missing tensor counts as infinite."""
    worst = 0.0
    for name in names if names is not None else expected:
        if name not in actual:
            return float("inf")
        difference = (expected[name].double() - actual[name].double()).abs()
        worst = max(worst, float(difference.max()) if difference.numel() else 0.0)
    return worst
