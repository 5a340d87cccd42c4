"""One rank interprets its part of a TaskGraph. Nothing here decides anything: order and overlap are the graph's.

The autograd graph is cut at component boundaries: the forward of a component runs on detached inputs, its backward task
calls autograd on its own outputs only. A gradient bucket is a flat array whose views are the parameters' gradients.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from parsim.errors import ExecutionError
from parsim.execute.stage import StageReplica
from parsim.execute.streams import Streams, TaskTime
from parsim.graph.task import COMPUTE, HOST, Task
from parsim.graph.taskgraph import TaskGraph
from parsim.model.autograd_cut import Saved, backward_component, forward_component
from parsim.model.component import LOSS
from parsim.work import Collective, Compute, LoadBatch, OptimizerStep, Phase, SendRecv

BatchSource = Callable[[int], Mapping[str, Tensor]]
"""Microbatch number -> the batch values (model inputs, "target") this rank's stage reads."""

Place = tuple[str, int]
"""(value, microbatch)."""


class RankProgram:
    """The tasks of one rank, in issue order, and the state of one step while it runs.

    Args:
        groups: process group by (stream, ranks in ascending order).
        on_receive: told of every receive buffer, for whoever counts memory.
    """

    def __init__(
        self,
        graph: TaskGraph,
        stage: StageReplica,
        streams: Streams,
        groups: Mapping[tuple[str, tuple[int, ...]], dist.ProcessGroup],
        on_receive: Callable[[Tensor], None] = lambda _: None,
    ) -> None:
        self._stage = stage
        self._streams = streams
        self._groups = groups
        self.on_receive = on_receive
        rank = stage.rank
        local = [task for task in graph.tasks if rank in task.ranks]
        indices = {task.index for task in local}
        self._tasks: list[tuple[Task, str, tuple[int, ...]]] = []
        for task in local:
            stream = next(resource.stream for resource in task.resources if resource.rank == rank)
            self._tasks.append((task, stream, tuple(index for index in task.dependencies if index in indices)))
        self._readers = self._count_readers()
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._values: dict[Place, Tensor] = {}
        self._left: dict[Place, int] = {}
        self._records: dict[Place, Saved] = {}
        self._gradients: dict[Place, Tensor] = {}
        self._received: dict[Place, list[tuple[int, Tensor]]] = defaultdict(list)
        self._loss: list[Tensor] = []

    def _count_readers(self) -> dict[str, int]:
        """How often a value is read here (by components and sends) before it can be dropped."""
        layout, stage = self._stage.layout, self._stage.number
        readers: dict[str, int] = {}
        for value, names in layout.consumers.items():
            here = sum(layout.stage_of[name] == stage for name in names)
            sends = len(layout.remote_stages[value]) if layout.stage_of_value[value] == stage else 0
            readers[value] = here + sends
        return readers

    def step(self, batch: BatchSource) -> tuple[float, list[TaskTime]]:
        """Run one training step.

        Returns:
            The sum over this rank's samples of the loss (0 where the last stage is elsewhere), and the tasks' times.
        """
        self._reset()
        streams = self._streams
        for task, stream, before in self._tasks:
            if stream not in (COMPUTE, HOST):
                streams.submit(task.index, stream, before, self._operation(task, batch))
        for task, stream, before in self._tasks:
            if stream in (COMPUTE, HOST):
                streams.compute(task.index, stream, before, self._operation(task, batch))
        times = streams.finish()
        return float(sum(loss.item() for loss in self._loss)), times

    def _operation(self, task: Task, batch: BatchSource) -> Callable[[], None]:
        match task.work:
            case Compute(phase=Phase.FORWARD):
                return lambda: self._forward(task)
            case Compute():
                return lambda: self._backward(task)
            case LoadBatch():
                return lambda: self._load(batch)
            case OptimizerStep():
                return self._stage.optimizer_step
            case Collective():
                return lambda: self._reduce(task)
            case SendRecv():
                return lambda: self._transfer(task)
        raise ExecutionError(f"no way to run {task.work}; teach parsim.execute.runtime this work")

    def _load(self, batch: BatchSource) -> None:
        for microbatch in range(self._stage.layout.plan.microbatches):
            for value, tensor in batch(microbatch).items():
                self._put(value, microbatch, tensor)

    def _put(self, value: str, microbatch: int, tensor: Tensor) -> None:
        if self._readers[value]:
            with self._lock:
                self._values[value, microbatch] = tensor
                self._left[value, microbatch] = self._readers[value]

    def _take(self, value: str, microbatch: int) -> Tensor:
        place = (value, microbatch)
        with self._lock:
            tensor = self._values[place]
            self._left[place] -= 1
            if not self._left[place]:
                del self._values[place], self._left[place]
        return tensor

    def _forward(self, task: Task) -> None:
        name, microbatch = _component_of(task)
        runnable = self._stage.runnables[name]
        inputs = {value: self._take(value, microbatch) for value in dict.fromkeys(runnable.input_names)}
        for tensor in inputs.values():
            _used_here(tensor)
        outputs, record = forward_component(runnable, [inputs[value] for value in runnable.input_names])
        if name in self._stage.layout.differentiable:
            self._records[name, microbatch] = record
        if name == LOSS:
            self._loss.append(outputs[0])
        for value, tensor in zip(runnable.output_names, outputs, strict=True):
            self._put(value, microbatch, tensor)

    def _backward(self, task: Task) -> None:
        name, microbatch = _component_of(task)
        runnable = self._stage.runnables[name]
        record = self._records.pop((name, microbatch))
        outputs = [self._gradient_of(value, microbatch) for value in runnable.output_names]
        if name == LOSS:
            outputs = [self._stage.loss_gradient]
        so_far = [self._gradients.pop((value, microbatch), None) for value in runnable.input_names]
        gradients = backward_component(record, outputs, so_far)
        for value, gradient in zip(runnable.input_names, gradients, strict=True):
            if gradient is not None:
                self._gradients[value, microbatch] = gradient

    def _gradient_of(self, value: str, microbatch: int) -> Tensor | None:
        """Gradient of a value from all its readers, later stages first, as autograd would add them."""
        local = self._gradients.pop((value, microbatch), None)
        remote = sorted(self._received.pop((value, microbatch), []), key=lambda entry: -entry[0])
        total: Tensor | None = None
        for tensor in [tensor for _, tensor in remote] + ([local] if local is not None else []):
            _used_here(tensor)
            total = tensor if total is None else total + tensor
        return total

    def _reduce(self, task: Task) -> None:
        assert isinstance(task.work, Collective)
        bucket = task.origin.bucket
        assert bucket is not None, "a collective of this vocabulary reduces a gradient bucket"
        flat = self._stage.buckets[bucket]
        _used_here(flat)
        dist.all_reduce(flat, group=self._groups["dp", tuple(sorted(task.work.group))])

    def _transfer(self, task: Task) -> None:
        work, origin = task.work, task.origin
        assert isinstance(work, SendRecv)
        assert origin.value is not None
        assert origin.microbatch is not None
        layout = self._stage.layout
        home = layout.stage_of_value[origin.value]
        is_gradient = home != origin.stage
        ranks = (min(work.source, work.destination), max(work.source, work.destination))
        if self._stage.rank == work.source:
            if is_gradient:
                tensor = self._gradients.pop((origin.value, origin.microbatch))
            else:
                tensor = self._take(origin.value, origin.microbatch)
            tensor = tensor.contiguous()
            _used_here(tensor)
            dist.send(tensor, work.destination, group=self._groups[f"pp>{work.destination}", ranks])
            return
        shape, dtype = self._stage.value_shapes[origin.value]
        buffer = torch.empty(shape, dtype=dtype, device=self._stage.device)
        self.on_receive(buffer)
        dist.recv(buffer, work.source, group=self._groups[f"pp>{self._stage.rank}", ranks])
        if is_gradient:
            with self._lock:
                self._received[origin.value, origin.microbatch].append((origin.stage, buffer))
        else:
            self._put(origin.value, origin.microbatch, buffer)


def required_groups(graph: TaskGraph) -> list[tuple[str, tuple[int, ...]]]:
    """(stream, ranks ascending) of every process group a graph needs; the same list on every rank.

    A transfer's group is named after its sending stream, so that both directions of a pair have one each.
    """
    needed: dict[tuple[str, tuple[int, ...]], None] = {}
    for task in graph.tasks:
        match task.work:
            case Collective():
                needed["dp", tuple(sorted(task.work.group))] = None
            case SendRecv():
                ends = (min(task.work.source, task.work.destination), max(task.work.source, task.work.destination))
                needed[f"pp>{task.work.destination}", ends] = None
    return list(needed)


def _component_of(task: Task) -> tuple[str, int]:
    component, microbatch = task.origin.component, task.origin.microbatch
    assert component is not None
    assert microbatch is not None
    return component, microbatch


def _used_here(tensor: Tensor) -> None:
    """Tell CUDA's allocator that the current stream reads memory that another stream may have allocated."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
