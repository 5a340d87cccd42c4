"""One module of a decoupled model and the one who trains it: forward now, backward some ticks later, then update.

The single-process engine (`ticks`) and a process per agent under torch.distributed drive the same Agent, so their weights are
the same numbers.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from parsim.algorithms.staleness import check_beta, check_mode, check_order, decoupling, even_cuts
from parsim.errors import AlgorithmError

BatchLoss = Callable[[Tensor, Tensor], Tensor]
Gradients = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TickRule:
    """How a decoupled model is trained.

    Attributes:
        schedule: a row of DECOUPLINGS. mode, order: of MODES and ORDERS.
        beta: each module boundary multiplies the gradient by it. accumulate: gradients averaged per update (ADL's M).
        learning_rate: a number, or a function of the tick. momentum, weight_decay: as in torch.optim.SGD.
    """

    schedule: str = "fdg"
    mode: str = "stash"
    order: str = "concurrent"
    beta: float = 1.0
    accumulate: int = 1
    learning_rate: float | Callable[[int], float] = 0.05
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        decoupling(self.schedule)
        check_mode(self.mode)
        check_order(self.order)
        check_beta(self.beta)
        if self.accumulate < 1:
            raise AlgorithmError(f"accumulate must be >= 1 gradients per update, got {self.accumulate}")

    def rate(self, tick: int) -> float:
        """The learning rate of updates made in `tick`."""
        return self.learning_rate(tick) if callable(self.learning_rate) else self.learning_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """One update: the batches whose mean gradient it applied, and its staleness, the most updates since their forwards."""

    tick: int
    batches: tuple[int, ...]
    staleness: int


@dataclass(slots=True, kw_only=True)
class _InFlight:
    """A batch between its forward and its backward. Mode replay keeps no output, the others the graph behind it."""

    input: Tensor
    output: Tensor | None
    weights: tuple[Tensor, ...]
    version: int


class Agent:
    """Module number `k` of `modules` (counted from 1), with its own copy of the module, optimizer state and batches in flight.

    Normalisation statistics are the agent's own, taken from its (stale) inputs; mode replay updates them twice per batch.
    """

    def __init__(self, module: nn.Module, *, k: int, modules: int, rule: TickRule) -> None:
        self.module = copy.deepcopy(module)
        self.k, self.modules, self.rule = k, modules, rule
        self.names = tuple(name for name, _ in self.module.named_parameters())
        self.live: tuple[Tensor, ...] = tuple(self.module.parameters())
        self.updates = 0
        self.log: list[Applied] = []
        self._in_flight: dict[int, _InFlight] = {}
        self._momenta: list[Tensor] | None = None
        self._collected: list[tuple[int, int, Gradients]] = []

    @property
    def batches_held(self) -> int:
        """Batches between their forward and their backward."""
        return len(self._in_flight)

    def forward(self, batch: int, value: Tensor) -> Tensor:
        """The module's output for a batch, detached; what its backward needs is kept."""
        delayed = decoupling(self.rule.schedule).delay(self.k, self.modules) > 0
        value = value.detach()
        if self.k > 1:
            value.requires_grad_()
        if self.rule.mode == "replay" and delayed:
            with torch.no_grad():
                output = self._run(value, self.live)
            self._in_flight[batch] = _InFlight(input=value, output=None, weights=(), version=self.updates)
            return output
        weights = self.live
        if self.rule.mode == "stash" and delayed:
            weights = tuple(weight.detach().clone().requires_grad_() for weight in self.live)
        output = self._run(value, weights)
        self._in_flight[batch] = _InFlight(input=value, output=output, weights=weights, version=self.updates)
        return output.detach()

    def backward(self, batch: int, gradient: Tensor) -> Tensor | None:
        """Collect the batch's weight gradient; return its input gradient times beta, for module k-1 (None of the first).

        Args:
            gradient: of the loss by this module's output, shrunk by the boundaries above.
        """
        kept = self._in_flight.pop(batch)
        output, weights = kept.output, kept.weights
        if output is None:
            weights = self.live
            output = self._run(kept.input, weights)
        return self._collect(batch, kept, output, weights, gradient)

    def loss_backward(self, batch: int, targets: Tensor, loss: BatchLoss) -> tuple[float, Tensor | None]:
        """The last module's backward: the loss of the batch, and the input gradient as `backward` returns it."""
        kept = self._in_flight.pop(batch)
        if kept.output is None:
            raise AlgorithmError(f"module {self.k} of {self.modules} is not the last: it has no loss")
        value = loss(kept.output, targets)
        return value.item(), self._collect(batch, kept, value, kept.weights, None)

    def _collect(
        self, batch: int, kept: _InFlight, output: Tensor, weights: Sequence[Tensor], gradient: Tensor | None
    ) -> Tensor | None:
        wanted = [*weights, kept.input] if self.k > 1 else list(weights)
        found = torch.autograd.grad(output, wanted, gradient)
        self._collected.append((batch, kept.version, found[: len(weights)]))
        return found[-1] * self.rule.beta if self.k > 1 else None

    @property
    def last_gradient(self) -> tuple[int, Gradients]:
        """The batch and the weight gradient that were collected last and not applied yet."""
        batch, _, gradient = self._collected[-1]
        return batch, gradient

    def ready_gradient(self) -> Gradients | None:
        """The mean of the collected gradients once there are `accumulate`; None before."""
        if len(self._collected) < self.rule.accumulate:
            return None
        collected = [gradient for _, _, gradient in self._collected]
        if len(collected) == 1:
            return collected[0]
        return tuple(torch.stack(parts).mean(0) for parts in zip(*collected, strict=True))

    def update(self, gradient: Sequence[Tensor], tick: int) -> None:
        """One SGD step as torch.optim.SGD makes it, in place under autograd's back (mode fresh reads the weights later)."""
        batches = tuple(batch for batch, _, _ in self._collected)
        oldest = min((version for _, version, _ in self._collected), default=self.updates)
        self.log.append(Applied(tick=tick, batches=batches, staleness=self.updates - oldest))
        rate, rule = self.rule.rate(tick), self.rule
        step = [
            part.add(weight.data, alpha=rule.weight_decay) if rule.weight_decay else part.clone()
            for part, weight in zip(gradient, self.live, strict=True)
        ]
        if rule.momentum:
            if self._momenta is None:
                self._momenta = step
            else:
                for momentum, part in zip(self._momenta, step, strict=True):
                    momentum.mul_(rule.momentum).add_(part)
            step = self._momenta
        for weight, part in zip(self.live, step, strict=True):
            weight.data.add_(part, alpha=-rate)
        self.updates += 1
        self._collected.clear()

    def _run(self, value: Tensor, weights: Sequence[Tensor]) -> Tensor:
        output: Tensor = functional_call(self.module, dict(zip(self.names, weights, strict=True)), (value,))
        return output


def cut_sequential(model: nn.Sequential, modules: int) -> tuple[nn.Sequential, ...]:
    """`modules` pieces of a Sequential, with as even a number of parameterised layers in each as can be.

    Layers without parameters stay with the layer before them.

    Raises:
        AlgorithmError: a partition deeper than the model.
    """
    layers = list(model)
    starts = [place for place, layer in enumerate(layers) if any(True for _ in layer.parameters())]
    cuts = even_cuts(len(starts), modules)
    edges = [0, *(starts[sum(cuts[: number + 1])] for number in range(modules - 1)), len(layers)]
    return tuple(nn.Sequential(*layers[first:last]) for first, last in itertools.pairwise(edges))
