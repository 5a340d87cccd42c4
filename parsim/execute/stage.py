"""What one rank holds of a model under a plan: its stage's components, their parameters, gradient buckets, optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from parsim.execute.optimizer import flat_gradients, make_optimizer
from parsim.graph.layout import Layout
from parsim.model.runnable import Runnable
from parsim.model.spec import ModelSpec, build_module, example_batch, loss_of
from parsim.model.trace import record


class StageReplica:
    """The stage of `rank`, with weights from `seed` (equal on every rank), ready to run.

    Components are recorded at the plan's microbatch, in training mode, on `device`. Parameters of other stages are
    emptied, so that a rank's memory is its own stage's.

    Attributes:
        runnables: by component name. value_shapes: (shape, dtype) of every value at the microbatch.
        buckets: flat gradients by bucket number, of all buckets this stage holds.
        loss_gradient: d(mean loss over the global batch) / d(sum of losses) = 1 / global_batch.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layout: Layout,
        rank: int,
        *,
        optimizer: str,
        learning_rate: float,
        dtype: torch.dtype,
        seed: int,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.rank = rank
        self.number = layout.plan.stage_of_rank(rank)
        self.device = device
        self.module = seeded_module(spec, seed, dtype, device)
        samples = layout.plan.microbatch_samples
        inputs, target = example_batch(spec, samples, dtype=dtype, device=str(device))
        runnables = record(self.module, inputs, granularity=layout.model.granularity, loss=loss_of(spec))
        self.value_shapes = _shapes(self.module, runnables, inputs, target)
        own = set(layout.plan.stages[self.number].components)
        self.runnables: dict[str, Runnable] = {entry.name: entry for entry in runnables if entry.name in own}
        everything = dict(self.module.named_parameters(remove_duplicate=False))
        self.parameters = {p.name: everything[p.name] for p in layout.stage_parameters(self.number)}
        self._drop_other_parameters()
        self.buckets: dict[int, Tensor] = {
            bucket.number: flat_gradients([self.parameters[p.name] for p in bucket.parameters])
            for bucket in layout.buckets
            if self.number in bucket.stages
        }
        self._optimizer = make_optimizer(optimizer, self.parameters.values(), learning_rate) if self.parameters else None
        self.loss_gradient = torch.tensor(1.0 / layout.plan.global_batch, dtype=dtype, device=device)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self._optimizer

    def optimizer_step(self) -> None:
        """Update, then zero the buckets for the next step."""
        assert self._optimizer is not None, "a stage without parameters has no optimizer task"
        self._optimizer.step()
        for flat in self.buckets.values():
            flat.zero_()

    def buffers(self) -> dict[str, Tensor]:
        """Buffers that this stage's components read or update, by qualified name."""
        names = {name for entry in self.runnables.values() for name in entry.buffer_names}
        return {name: tensor for name, tensor in self.module.named_buffers() if name in names}

    def resident_tensors(self) -> list[Tensor]:
        """What is alive between steps: parameters, buckets, optimizer state, buffers."""
        state = [] if self._optimizer is None else [entry for held in self._optimizer.state.values() for entry in held.values()]
        tensors = [entry for entry in state if isinstance(entry, Tensor)]
        return [*self.parameters.values(), *self.buckets.values(), *self.buffers().values(), *tensors]

    def _drop_other_parameters(self) -> None:
        own = {id(parameter) for parameter in self.parameters.values()}
        for parameter in self.module.parameters():
            if id(parameter) not in own:
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=self.device)


def seeded_module(spec: ModelSpec, seed: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The module in training mode with weights that depend on the seed alone."""
    torch.manual_seed(seed)
    module = build_module(spec).to(device=device, dtype=dtype)
    return module.train()


def _restore(module: nn.Module, before: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in module.named_buffers():
            tensor.copy_(before[name])


def _shapes(
    module: nn.Module, runnables: Sequence[Runnable], inputs: Sequence[Tensor], target: Tensor
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every value, from one run without gradients."""
    before = {name: tensor.clone() for name, tensor in module.named_buffers()}
    values: dict[str, Tensor] = {f"input:{number}": tensor for number, tensor in enumerate(inputs)}
    values["target"] = target
    with torch.no_grad():
        for entry in runnables:
            outputs = entry([values[name] for name in entry.input_names])
            values.update(zip(entry.output_names, outputs, strict=True))
    _restore(module, before)
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in values.items()}
