"""A decoupled stage between steps: the batches it has run forward and not yet backward, and what has arrived for the next step.

Which batches a stage runs forward and backward in a step, `parsim.program.passes.rounds` says. Both use the weights of the
beginning of the step. A batch that waits keeps (`Synchronisation.backward`)

stash   the weights of its forward: the stage runs it on a copy of its module, whose gradients are the stage's own. So the
        gradient is that of one model whose stages are of different steps
fresh   its activations alone: it runs on a module whose weights are the stage's memory under other names, and autograd does
        not notice that they change. An operator that saves something made of a weight has that of the forward
replay  the stage's inputs and random states: its forward runs again before its backward, on the weights of then

At the beginning and after a checkpoint of another plan the stages fill one by one: what has nothing to work on does not run,
the optimizer included. They do so, too, after one of "fresh", whose activations no weights can make again. At the end what
waits is not trained on.

Running statistics are the stage's own, taken when a batch runs forward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from parsim.execute.mixing import PLAN, lacking, own_marker
from parsim.execute.stage import StageReplica
from parsim.execute.streams import BatchSource
from parsim.model.autograd.cut import Saved
from parsim.model.autograd.recompute import RecomputeInputs
from parsim.model.runnable import Runnable
from parsim.plans.plan import Plan
from parsim.program.passes.rounds import is_late
from parsim.program.task import Task
from parsim.work import Compute, LoadBatch, Phase, SendRecv


def runs(task: Task, plan: Plan, rank: int, since: int) -> bool:
    """Whether a task of `rank` has anything to work on, `since` steps after the stages of a stale plan began to fill."""
    work = task.work
    stage = plan.stage_of_rank(work.source if isinstance(work, SendRecv) else rank)
    rule, stages = plan.synchronisation, plan.mesh.pp
    forward = isinstance(work, LoadBatch) or (isinstance(work, Compute) and work.phase is Phase.FORWARD)
    if forward or (isinstance(work, SendRecv) and task.origin.bucket is None and not task.origin.gradient):
        return since >= rule.forward_lag(stage, stages)
    return since >= rule.backward_lag(stage, stages)


@dataclass(slots=True, kw_only=True, eq=False)
class WaitingBatch:
    """A batch between its forward and its backward on this stage.

    Attributes:
        runnables: by component, on the weights of the forward. inputs: what came for it from other stages, by task.
        records: by component and microbatch, for the backward. kept: likewise for the second forward, where it is replayed.
        draw: of the random numbers of its forward.
    """

    runnables: Mapping[str, Runnable]
    inputs: dict[int, Tensor]
    records: dict[tuple[str, int], Saved] = field(default_factory=dict)
    kept: dict[tuple[str, int], RecomputeInputs] = field(default_factory=dict)
    draw: int = 0


class StaleStage:
    """What a rank of a decoupled plan keeps from step to step.

    Attributes:
        filling: steps until every stage runs a forward and a backward in every step.
        began: the step in which the first stage ran its first forward.
        forward, due: the batches that the step at hand runs forward and backward; None where there is none yet.
        arrived: what the step before has received, by task.
    """

    def __init__(self, stage: StageReplica) -> None:
        self._stage, self._plan = stage, stage.layout.plan
        rule, stages, number = self._plan.synchronisation, self._plan.mesh.pp, self._plan.stage_of_rank(stage.rank)
        self.filling = rule.steps_to_fill(stages)
        self.delay = rule.delay_of(number, stages)
        self.beta = rule.beta
        self._forward_lag, self._backward_lag = rule.forward_lag(number, stages), rule.backward_lag(number, stages)
        self._stashes, self._replays = rule.stashes and self.delay > 0, rule.replays and self.delay > 0
        fresh = self.delay > 0 and not self._stashes and not self._replays
        self._modules = [_copied(stage, shares=fresh) for _ in range(1 if fresh else self.delay + 1 if self._stashes else 0)]
        self._runnables: list[Mapping[str, Runnable]] = [
            {name: Runnable(entry.program, module) for name, entry in stage.runnables.items()} for module in self._modules
        ] or [stage.runnables]
        self.restart(0)

    def restart(self, step: int) -> None:
        """Forget what waits: the stages fill anew from `step` on."""
        self.began = step
        self._waiting: dict[int, WaitingBatch] = {}
        self._arriving: dict[int, Tensor] = {}
        self._gradients: set[int] = set()
        self.arrived: dict[int, Tensor] = {}
        self.forward: WaitingBatch | None = None
        self.due: WaitingBatch | None = None

    def copies(self) -> list[Tensor]:
        """The weights of batches that wait: alive between steps."""
        return [parameter for module in self._modules if self._stashes for parameter in self._trained(module).values()]

    def _trained(self, module: nn.Module) -> dict[str, Tensor]:
        """The weights of a copy that differ from the stage's, by name."""
        parameters = dict(module.named_parameters(remove_duplicate=False))
        return {name: parameters[name] for name in self._stage.parameters if parameters[name].requires_grad}

    def since(self, step: int) -> int:
        """Steps since the stages began to fill, as far as they differ from one another."""
        return min(step - self.began, self.filling)

    def batch_of(self, step: int) -> int:
        """The batch that this stage runs forward in `step`; before `began` it runs none."""
        return step - self._forward_lag

    def begin_step(self, step: int) -> None:
        """Take what has arrived, and the weights of now for the batch that runs forward. step: of the training, from 0."""
        self.arrived, self._arriving = self._arriving, {}
        self.forward = self.due = None
        if self.batch_of(step) >= self.began:
            self.forward = self._enter(self.batch_of(step), self.arrived)
        if self.since(step) >= self._backward_lag:
            self.due = self._waiting.pop(self.batch_of(step) - self.delay)

    def _enter(self, batch: int, arrived: Mapping[int, Tensor]) -> WaitingBatch:
        place = batch % len(self._runnables)
        if self._stashes:
            self._copy_weights(self._modules[place], self._stage.parameters)
        inputs = {task: tensor for task, tensor in arrived.items() if self.delay and task not in self._gradients}
        self._waiting[batch] = WaitingBatch(runnables=self._runnables[place], inputs=inputs)
        return self._waiting[batch]

    def _copy_weights(self, module: nn.Module, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self._trained(module).items():
                parameter.copy_(weights[name])

    def arrives(self, task: Task, tensor: Tensor) -> bool:
        """Take what another stage has sent. Returns whether it is for the next step, and not for this one."""
        if task.origin.gradient:
            self._gradients.add(task.index)
            if self.beta != 1.0:
                tensor.mul_(self.beta)
        assert isinstance(task.work, SendRecv)
        if is_late(self._stage.layout, task.work):
            self._arriving[task.index] = tensor
            return True
        if self.forward is not None and self.delay and not task.origin.gradient:
            self.forward.inputs[task.index] = tensor
        return False

    # --- checkpoints --------------------------------------------------------------------------------------------------

    @property
    def _is_resumable(self) -> bool:
        """Whether what waits can be made again, on all stages alike."""
        return self._plan.synchronisation.backward != "fresh"

    @property
    def marker(self) -> str:
        """What a checkpoint's own part must have been written by."""
        return own_marker(self._plan)

    def own_state(self) -> dict[str, Any]:
        """The batches that wait here, each with its weights, inputs and random numbers, and what has just arrived."""
        state: dict[str, Any] = {PLAN: self.marker, "began": torch.tensor(self.began)}
        state |= {f"arrived/{task}": tensor for task, tensor in self._arriving.items()}
        for batch, waiting in self._waiting.items() if self._is_resumable else ():
            state[f"waiting/{batch}/draw"] = torch.tensor(waiting.draw)
            state |= {f"waiting/{batch}/inputs/{task}": tensor for task, tensor in waiting.inputs.items()}
            weights = self._trained(self._modules[batch % len(self._modules)]) if self._stashes else {}
            state |= {f"waiting/{batch}/weights/{name}": weight.detach() for name, weight in weights.items()}
        return state

    def load_own(
        self,
        state: Mapping[str, Any],
        step: int,
        run_forward: Callable[[BatchSource, int], None],
        source: Callable[[int], BatchSource],
    ) -> None:
        """Run the batches that waited forward again, as they were; a checkpoint of another plan begins with none.

        Args:
            state: of `own_state`, on any device. step: in which the training goes on. source: of a batch, by number.
            run_forward: of a batch, with the number that its random draws follow from.

        Raises ExecutionError: a part of the state is missing.
        """
        self.restart(step)
        if state.get(PLAN) != self.marker or not self._is_resumable:
            return
        parts = [key.split("/", 3) for key in state]

        def here(part: list[str]) -> Tensor:
            tensor: Tensor = state["/".join(part)].to(self._stage.device)
            return tensor

        try:
            buffers = {name: tensor.clone() for name, tensor in self._stage.buffers().items()}
            for batch in sorted({int(part[1]) for part in parts if part[0] == "waiting"}):
                prefix = f"waiting/{batch}/"
                inputs = {int(part[3]): here(part) for part in parts if part[:3] == ["waiting", str(batch), "inputs"]}
                self.arrived, self.forward = inputs, self._enter(batch, inputs)
                if self._stashes:
                    module = self._modules[batch % len(self._modules)]
                    self._copy_weights(module, {name: state[f"{prefix}weights/{name}"] for name in self._trained(module)})
                run_forward(source(batch), int(state[f"{prefix}draw"]))
            for name, tensor in self._stage.buffers().items():
                tensor.data.copy_(buffers[name])  # as training forwards write them: what waits may have saved them
            self._arriving = {int(part[1]): here(part) for part in parts if part[0] == "arrived"}
            self.began = int(state["began"])
        except KeyError as error:
            raise lacking(error, self._stage.rank) from error


def _copied(stage: StageReplica, *, shares: bool) -> nn.Module:
    """A copy of the stage's module, with weights of its own or in the stage's memory (shares). The rest is the stage's."""
    shared = [*stage.module.buffers(), *(entry for entry in stage.module.parameters() if not entry.requires_grad)]
    module = copy.deepcopy(stage.module, {id(tensor): tensor for tensor in shared})
    for name, parameter in module.named_parameters(remove_duplicate=False):
        held = stage.parameters.get(name)
        if held is not None and parameter.requires_grad:
            if shares:
                parameter.data = held.data
            parameter.grad = held.grad
    for path, part in stage.module.named_modules():
        module.get_submodule(path)._buffers = part._buffers  # also where a forward assigns one anew
    return module
