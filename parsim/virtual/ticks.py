"""Decoupled backpropagation with stale gradients, S groups of K modules, in one process, tick by tick.

Each tick takes one batch per group. Agents (s, k) work as `algorithms.staleness` says; equal modules of the groups are kept
together by averaging gradients (all_reduce) or by a mixing matrix over the groups (consensus). K = 1 is data-parallel
training with that mixing; S = 1 is the decoupled pipeline alone; S = K = 1 is SGD.

Leaves out: seconds. A tick is a tick; `algorithms.staleness.tick_s` and the simulator price it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from parsim.algorithms.periods import Period, every_steps
from parsim.algorithms.staleness import decoupling
from parsim.errors import AlgorithmError
from parsim.plans.mixing import check_doubly_stochastic
from parsim.virtual.agent import Agent, BatchLoss, Gradients, TickRule
from parsim.virtual.rounds import Mixing

Batch = Sequence[tuple[Tensor, Tensor]]
"""Inputs and targets, one pair per group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientEvent:
    """The weight gradient (in the order of the module's parameters) that agent (group, k) has just computed."""

    tick: int
    group: int
    k: int
    batch: int
    gradient: Gradients


class TickEngine:
    """S groups of agents and the values between them.

    Args:
        pieces: the K modules of the model in order; every group begins with a copy.
        loss: of the last module's output and the targets, a scalar (a mean over the batch).
        mixing: None averages gradients over the groups; a function mixes the weights after each update the period says.
    """

    def __init__(
        self,
        pieces: Sequence[nn.Module],
        loss: BatchLoss,
        rule: TickRule,
        *,
        groups: int = 1,
        mixing: Mixing | None = None,
        period: Period | None = None,
    ) -> None:
        if groups < 1 or not pieces:
            raise AlgorithmError(f"a tick engine needs at least one group and one module, got {groups} and {len(pieces)}")
        if period is not None and mixing is None:
            raise AlgorithmError("a period applies to mixing weights; gradients are averaged at every update: give a mixing")
        self.loss, self.rule, self.groups, self.modules = loss, rule, groups, len(pieces)
        self.mixing, self.period = mixing, period if period is not None else every_steps(1)
        self.schedule = decoupling(rule.schedule)
        self.agents = [
            [Agent(piece, k=number, modules=len(pieces), rule=rule) for number, piece in enumerate(pieces, start=1)]
            for _ in range(groups)
        ]
        self.tick = 0
        self.losses: list[float] = []
        self._first_tick, self._entered = 0, 0
        self._values: dict[tuple[int, int, int], Tensor] = {}
        self._gradients: dict[tuple[int, int, int], Tensor] = {}
        self._targets: dict[int, list[Tensor]] = {}

    def run(
        self, batches: Iterable[Batch], *, drain: bool = True, observe: Callable[[GradientEvent], None] | None = None
    ) -> None:
        """One tick per batch; then, with `drain`, as many as the last batch needs to be applied by every module.

        Without `drain` the batches in flight stay there, and a further `run` goes on with them. Gradients short of
        `accumulate` wait for the next `run` in either case.
        """
        for batch in batches:
            self.step(batch, observe)
        if drain:
            for _ in range(self.schedule.span(self.modules)):
                self.step(None, observe)
            self._first_tick, self._entered = self.tick, 0

    def step(self, batch: Batch | None, observe: Callable[[GradientEvent], None] | None = None) -> None:
        """One tick: a new batch enters (None while draining), every module does what is due."""
        if batch is not None:
            self._enter(batch)
        delayed = [k for k in range(1, self.modules + 1) if self.schedule.delay(k, self.modules) > 0]
        prompt = [k for k in range(1, self.modules + 1) if k not in delayed]
        self._backward(delayed, observe)
        if self.rule.order == "backward_first":
            self._update(delayed)
        self._forward()
        self._backward(prompt[::-1], observe)
        self._update(prompt if self.rule.order == "backward_first" else [*delayed, *prompt])
        self.tick += 1

    def _enter(self, batch: Batch) -> None:
        if len(batch) != self.groups:
            raise AlgorithmError(f"{self.groups} groups need {self.groups} batches per tick, got {len(batch)}")
        if self._entered != self.tick - self._first_tick:
            raise AlgorithmError("batches must enter in consecutive ticks; drain the engine before a pause")
        for group, (value, _) in enumerate(batch):
            self._values[group, 1, self._entered] = value
        self._targets[self._entered] = [targets for _, targets in batch]
        self._entered += 1

    def _due(self, offset: int) -> int | None:
        """The batch that entered `offset` ticks ago."""
        batch = self.tick - self._first_tick - offset
        return batch if 0 <= batch < self._entered else None

    def _forward(self) -> None:
        for k in range(1, self.modules + 1):
            batch = self._due(self.schedule.forward_tick(k, self.modules))
            if batch is None:
                continue
            for group in range(self.groups):
                output = self.agents[group][k - 1].forward(batch, self._values.pop((group, k, batch)))
                if k < self.modules:
                    self._values[group, k + 1, batch] = output

    def _backward(self, modules: Sequence[int], observe: Callable[[GradientEvent], None] | None) -> None:
        for k in modules:
            batch = self._due(self.schedule.backward_tick(k, self.modules))
            if batch is None:
                continue
            targets = self._targets.pop(batch) if k == self.modules else []
            for group in range(self.groups):
                agent = self.agents[group][k - 1]
                if k == self.modules:
                    loss, below = agent.loss_backward(batch, targets[group], self.loss)
                    self.losses.append(loss)
                else:
                    below = agent.backward(batch, self._gradients.pop((group, k, batch)))
                if below is not None:
                    self._gradients[group, k - 1, batch] = below
                if observe is not None:
                    number, gradient = agent.last_gradient
                    observe(GradientEvent(tick=self.tick, group=group, k=k, batch=number, gradient=gradient))

    def _update(self, modules: Sequence[int]) -> None:
        for k in modules:
            agents = [group[k - 1] for group in self.agents]
            ready = [gradient for agent in agents if (gradient := agent.ready_gradient()) is not None]
            if not ready:
                continue
            if self.mixing is None:
                ready = [mean_over_groups(ready)] * self.groups
            for agent, gradient in zip(agents, ready, strict=True):
                agent.update(gradient, self.tick)
            if self.mixing is not None and self.period.due(agents[0].updates - 1):
                mix_agents(agents, self.mixing(agents[0].updates - 1))

    def average_parameters(self) -> list[dict[str, Tensor]]:
        """Per module the mean over groups of its parameters, by name."""
        return [
            {
                name: torch.stack([group[k].live[place].detach() for group in self.agents]).mean(0)
                for place, name in enumerate(self.agents[0][k].names)
            }
            for k in range(self.modules)
        ]

    def predict(self, inputs: Tensor) -> Tensor:
        """The output of the model averaged over the groups, in eval mode (with the first group's buffers)."""
        value = inputs
        with torch.no_grad():
            for agent, weights in zip(self.agents[0], self.average_parameters(), strict=True):
                training = agent.module.training
                agent.module.eval()
                value = torch.func.functional_call(agent.module, weights, (value,))
                agent.module.train(training)
        return value


def mean_over_groups(gradients: Sequence[Gradients]) -> Gradients:
    """The mean gradient of S groups, summed in the order of the groups."""
    totals = [part.clone() for part in gradients[0]]
    for other in gradients[1:]:
        for total, part in zip(totals, other, strict=True):
            total.add_(part)
    return tuple(total.div_(len(gradients)) for total in totals)


def mix_agents(agents: Sequence[Agent], matrix: NDArray[np.float64]) -> None:
    """w_s <- sum_r A_sr w_r over the agents of one module. Raises AlgorithmError unless A is doubly stochastic."""
    check_doubly_stochastic(matrix)
    weights = torch.tensor(matrix, dtype=agents[0].live[0].dtype)
    for place in range(len(agents[0].live)):
        stacked = torch.stack([agent.live[place].data for agent in agents])
        mixed = torch.tensordot(weights, stacked, dims=1)
        for agent, value in zip(agents, mixed, strict=True):
            agent.live[place].data.copy_(value)
