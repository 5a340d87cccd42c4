"""A decoupled stage between steps: the batches it has run forward and not yet backward, and what has arrived for the next step.

In step t a stage runs the forward of batch t - stage and the backward of batch t - 2 (K - 1) + stage. Both use the weights
of the beginning of the step (`parsim.program.passes.rounds`). A batch that waits keeps the weights of its forward: the
stage runs it on a copy of its module, whose gradients are the stage's own. So the gradient is that of one model whose
stages are of different steps ("stash" of `experiments/relaxed/decoupled.py`). At the beginning and after a checkpoint
another plan the stages fill one by one: what has nothing to work on does not run, the optimizer included. At the end what
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

from parsim.execute.mixing import PLAN, lacking
from parsim.execute.stage import StageReplica
from parsim.execute.streams import BatchSource
from parsim.model.autograd.cut import Saved
from parsim.model.runnable import Runnable
from parsim.plans.plan import Plan
from parsim.program.task import Task
from parsim.work import Compute, LoadBatch, Phase, SendRecv


def runs(task: Task, plan: Plan, rank: int, since: int) -> bool:
    """Whether a task of `rank` has anything to work on, `since` steps after the stages of a stale plan began to fill."""
    work = task.work
    stage = plan.stage_of_rank(work.source if isinstance(work, SendRecv) else rank)
    forward = isinstance(work, LoadBatch) or (isinstance(work, Compute) and work.phase is Phase.FORWARD)
    if forward or (isinstance(work, SendRecv) and not task.origin.gradient):
        return since >= stage
    return since >= plan.synchronisation.steps_to_fill(plan.mesh.pp) - stage


@dataclass(slots=True, kw_only=True, eq=False)
class WaitingBatch:
    """A batch between its forward and its backward on this stage.

    Attributes:
        runnables: by component, on the weights of the forward. inputs: what came for it from other stages, by task.
        records: by component and microbatch, for the backward. draw: of the random numbers of its forward.
    """

    runnables: Mapping[str, Runnable]
    inputs: dict[int, Tensor]
    records: dict[tuple[str, int], Saved] = field(default_factory=dict)
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
        self._number = self._plan.stage_of_rank(stage.rank)
        self.filling = self._plan.synchronisation.steps_to_fill(self._plan.mesh.pp)
        self.delay = self._plan.synchronisation.delay_of(self._number, self._plan.mesh.pp)
        self._modules = [_copied(stage) for _ in range(self.delay + 1)] if self.delay else []
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
        return [parameter for module in self._modules for parameter in self._trained(module).values()]

    def _trained(self, module: nn.Module) -> dict[str, Tensor]:
        """The weights of a copy that differ from the stage's, by name."""
        parameters = dict(module.named_parameters(remove_duplicate=False))
        return {name: parameters[name] for name in self._stage.parameters if parameters[name].requires_grad}

    def since(self, step: int) -> int:
        """Steps since the stages began to fill, as far as they differ from one another."""
        return min(step - self.began, self.filling)

    def batch_of(self, step: int) -> int:
        """The batch that this stage runs forward in `step`; before `began` it runs none."""
        return step - self._number

    def begin_step(self, step: int) -> None:
        """Take what has arrived, and the weights of now for the batch that runs forward. step: of the training, from 0."""
        self.arrived, self._arriving = self._arriving, {}
        self.forward = self.due = None
        if self.batch_of(step) >= self.began:
            self.forward = self._enter(self.batch_of(step), self.arrived)
        if self.since(step) >= self.filling - self._number:
            self.due = self._waiting.pop(self.batch_of(step) - self.delay)

    def _enter(self, batch: int, arrived: Mapping[int, Tensor]) -> WaitingBatch:
        place = batch % len(self._runnables)
        if self._modules:
            self._copy_weights(self._modules[place], self._stage.parameters)
        inputs = {task: tensor for task, tensor in arrived.items() if self._modules and task not in self._gradients}
        self._waiting[batch] = WaitingBatch(runnables=self._runnables[place], inputs=inputs)
        return self._waiting[batch]

    def _copy_weights(self, module: nn.Module, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self._trained(module).items():
                parameter.copy_(weights[name])

    def arrives(self, task: Task, tensor: Tensor) -> None:
        """What another stage has sent, for the next step."""
        self._arriving[task.index] = tensor
        if task.origin.gradient:
            self._gradients.add(task.index)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    @property
    def marker(self) -> str:
        """What a checkpoint's own part must have been written by."""
        return f"{self._plan.mesh} {self._plan.synchronisation} {[stage.components for stage in self._plan.stages]}"

    def own_state(self) -> dict[str, Any]:
        """The batches that wait here, each with its weights, inputs and random numbers, and what has just arrived."""
        state: dict[str, Any] = {PLAN: self.marker, "began": torch.tensor(self.began)}
        state |= {f"arrived/{task}": tensor for task, tensor in self._arriving.items()}
        for batch, waiting in self._waiting.items():
            state[f"waiting/{batch}/draw"] = torch.tensor(waiting.draw)
            state |= {f"waiting/{batch}/inputs/{task}": tensor for task, tensor in waiting.inputs.items()}
            weights = self._trained(self._modules[batch % len(self._modules)])
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
        if state.get(PLAN) != self.marker:
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
                module = self._modules[batch % len(self._modules)]
                self._copy_weights(module, {name: state[f"{prefix}weights/{name}"] for name in self._trained(module)})
                run_forward(source(batch), int(state[f"{prefix}draw"]))
            for name, tensor in self._stage.buffers().items():
                tensor.data.copy_(buffers[name])  # as training forwards write them: what waits may have saved them
            self._arriving = {int(part[1]): here(part) for part in parts if part[0] == "arrived"}
            self.began = int(state["began"])
        except KeyError as error:
            raise lacking(error, self._stage.rank) from error


def _copied(stage: StageReplica) -> nn.Module:
    """A copy of the stage's module with weights of its own: buffers, frozen parameters and gradients are the stage's."""
    shared = [*stage.module.buffers(), *(entry for entry in stage.module.parameters() if not entry.requires_grad)]
    module = copy.deepcopy(stage.module, {id(tensor): tensor for tensor in shared})
    for name, parameter in module.named_parameters(remove_duplicate=False):
        held = stage.parameters.get(name)
        if held is not None and parameter.requires_grad:
            parameter.grad = held.grad
    for path, part in stage.module.named_modules():
        module.get_submodule(path)._buffers = part._buffers  # also where a forward assigns one anew
    return module
