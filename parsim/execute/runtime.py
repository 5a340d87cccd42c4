"""One rank interprets its part of a TaskGraph. The graph alone decides order and overlap.

The autograd graph is cut at component boundaries: the forward of a component runs on detached inputs, its backward task
calls autograd on its own outputs only. A gradient bucket is a flat array whose views are the parameters' gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parsim.errors import ExecutionError
from parsim.execute.convert import all_gather_flat, reduce_scatter_flat, run_hop
from parsim.execute.records.memory_lines import StepWatch
from parsim.execute.records.task_time import TaskTime
from parsim.execute.relaxed.mixing import MixingRounds
from parsim.execute.relaxed.scripts import StepScript, StepScripts
from parsim.execute.relaxed.stale import StaleStage
from parsim.execute.rooms.buckets import BucketOfMicrobatch, rooms_of
from parsim.execute.rooms.transfers import transfer_rooms
from parsim.execute.stage import StageReplica
from parsim.execute.state.store import Instance, Store, ValueKey, batch_piece
from parsim.execute.streams import Streams
from parsim.graph.passes.clipping import sums_norm
from parsim.graph.passes.gradients import DP_STREAM
from parsim.graph.placed_model import Reading
from parsim.graph.task import COMPUTE, HOST, Task
from parsim.graph.taskgraph import TaskGraph
from parsim.model.autograd.cut import Saved, backward_component, forward_component
from parsim.model.autograd.halves import BackwardHalf, backward_inputs, backward_weights
from parsim.model.autograd.recompute import RecomputeInputs, forward_keeping_calls, forward_keeping_inputs, recompute
from parsim.model.component import LOSS
from parsim.plans.redistribution import ValueLayout
from parsim.work import NORM, ClipGradients, Collective, Compute, LoadBatch, OptimizerStep, Phase, SendRecv

BatchSource = Callable[[int], Mapping[str, Tensor]]
"""Microbatch number -> the batch values (model inputs, "target") this rank reads: its `Layout.batch_ways` share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Instances:
    """Of one component: what it reads and makes, the gradients of its inputs, and which are complete behind its backward,
    each with whether another stage wants it."""

    inputs: tuple[Instance, ...]
    outputs: tuple[Instance, ...]
    growing: tuple[ValueKey, ...]
    completed: tuple[tuple[Instance, bool], ...]


class RankProgram:
    """The tasks of one rank, in issue order, and the state of one step while it runs.

    Args:
        groups: process group by (stream, ranks in ascending order).
        mixing: where replicas mix their weights in rounds, this rank's part of them; `graph` is then that of the first round.
        stale: where stages are decoupled, what waits on this one between steps.

    Attributes:
        watch: receives the events of a step, for tools that count memory.
    """

    def __init__(
        self,
        graph: TaskGraph,
        stage: StageReplica,
        streams: Streams,
        groups: Mapping[tuple[str, tuple[int, ...]], dist.ProcessGroup],
        mixing: MixingRounds | None = None,
        stale: StaleStage | None = None,
    ) -> None:
        self._stage = stage
        self._stale = stale
        self._streams = streams
        self._groups = groups
        self.watch = StepWatch()
        self._steps = StepScripts(graph, stage.layout, stage.rank, mixing, stale)
        self._script = self._steps.of_step(None)
        self._room = rooms_of(self._script.tasks)
        self._transfers = transfer_rooms(self._script.tasks, stage.layout, stage.rank)
        tasks = {task.index: task for task, _, _ in self._script.tasks}
        self._store = Store(stage.layout, stage.rank, list(tasks.values()), streams)
        self._tasks = tasks
        self._reading: dict[tuple[str, str], Reading] = {
            (name, value): reading
            for value, readings in stage.layout.readings.items()
            for reading in readings
            for name in reading.components
        }
        self._norm: Tensor | None = None
        self._of = {name: self._instances(name) for name in stage.runnables}
        self._ahead: tuple[BatchSource, list[Mapping[str, Tensor]]] | None = None
        self._batch: BatchSource | None = None
        self._operations: dict[int, tuple[StepScript, list[Callable[[], None]]]] = {}
        self._reset()

    def _instances(self, name: str) -> _Instances:
        stage, layout = self._stage, self._stage.layout
        runnable = stage.runnables[name]
        return _Instances(
            inputs=tuple(Instance(ValueKey(value), layout.reads_in(name, value).value) for value in runnable.input_names),
            outputs=tuple(Instance(ValueKey(value), layout.source[value].value) for value in runnable.output_names),
            growing=tuple(ValueKey(value, self._reading[name, value]) for value in runnable.input_names),
            completed=tuple(
                (Instance(ValueKey(value, reading), reading.ends.gradient), layout.stage_of_value[value] != stage.number)
                for value, reading in layout.completed_readings(stage.number, name)
            ),
        )

    def _reset(self) -> None:
        self._store.clear()
        self._records: dict[tuple[str, int], Saved] = {}
        self._made = self._records
        if self._stale is not None:
            self._take_over(self._stale)
        self._kept: dict[tuple[str, int], RecomputeInputs] = {}
        self._halves: dict[tuple[str, int], BackwardHalf] = {}
        self._growing: dict[tuple[ValueKey, int], Tensor] = {}
        self._loss: list[Tensor] = []
        self._sent: dict[BucketOfMicrobatch, tuple[Tensor, Tensor]] = {}
        self._receiving: dict[int, tuple[Tensor, Any]] = {}
        self._leaving: dict[int, Tensor | None] = {}  # None: given up, though it may still be being sent

    def _take_over(self, stale: StaleStage) -> None:
        """What a decoupled stage has from the steps before: what has arrived, and the forward of the batch that is due."""
        arrived, stale.arrived = stale.arrived, {}
        for index, tensor in arrived.items():
            microbatch = self._tasks[index].origin.microbatch
            assert microbatch is not None
            self._store.put(self._store.moved(self._tasks[index]), microbatch, tensor)
        self._made = {} if stale.forward is None else stale.forward.records
        self._records = {} if stale.due is None else stale.due.records

    def run_forward_again(self, batch: BatchSource, draw: int) -> None:
        """Of a decoupled stage that goes on from a checkpoint: the forward of a batch that waits for its backward.

        Args:
            batch: its values. draw: of the random numbers of its step.
        """
        assert self._stale is not None
        assert self._stale.forward is not None
        self._stale.forward.draw = draw
        self._reset()
        with self._stage.randomness.step(draw):
            for task in self._tasks.values():
                if isinstance(task.work, LoadBatch):
                    self._batch = batch
                    self._load()
                elif isinstance(task.work, Compute) and task.work.phase is Phase.FORWARD:
                    self._forward(task)
        self._reset()

    def script(self, number: int) -> StepScript:
        """What this rank does in training step `number`."""
        return self._steps.of_step(number)

    def step(
        self, batch: BatchSource, following: BatchSource | None = None, *, script: StepScript | None = None
    ) -> tuple[float, list[TaskTime]]:
        """Run one training step.

        Args:
            script: of this step, where steps differ (`script`).
            following: the `batch` of the next call, where it is known: it is loaded beside this step, where the device can.

        Returns:
            The sum over this rank's samples of the loss (0 where another rank counts it), and the tasks' times.
        """
        self._script = script or self._script
        with self._stage.randomness.step():
            if self._stale is not None and self._stale.forward is not None:
                self._stale.forward.draw = self._stage.randomness.draw
            return self._step(batch, following)

    def _step(self, batch: BatchSource, following: BatchSource | None) -> tuple[float, list[TaskTime]]:
        self._reset()
        streams = self._streams
        for bucket in self._room.first_parameters:
            self._begin_parameters(bucket)
        self._make_room(self._transfers.first)
        awaited = self._transfers.awaited
        self._batch = batch
        issued = list(zip(self._script.tasks, self._operations_of(self._script), strict=True))
        for (task, stream, before), operation in issued:
            if stream not in (COMPUTE, HOST):
                streams.submit(task.index, stream, (*before, *awaited.get(task.index, ())), operation)
        load = None
        for (task, stream, before), operation in issued:
            if isinstance(task.work, LoadBatch) and streams.loads_ahead:
                load = task.index, stream
                self._begin_batch(task.index, stream, before, batch)
            elif stream in (COMPUTE, HOST):
                streams.compute(task.index, stream, (*before, *awaited.get(task.index, ())), operation)
        if not self._script.updates:
            self._stage.overflowed()
        if load is not None and following is not None:
            streams.load_ahead(*load, lambda: self._load_ahead(following))
        times = streams.finish()
        self._leaving.clear()
        return float(sum(loss.item() for loss in self._loss)), times

    def _operations_of(self, script: StepScript) -> list[Callable[[], None]]:
        """What every task of a script runs, made once per script. Scripts are kept: none takes the identity of another."""
        if id(script) not in self._operations:
            made: list[Callable[[], None]] = []
            self._operations[id(script)] = script, made
            for task, stream, _ in script.tasks:
                operation = self._operation(task)
                if stream in (COMPUTE, HOST):
                    operation = self._between(task, self._watched(task, self._ended(task, operation)))
                made.append(operation)
        return self._operations[id(script)][1]

    def _watched(self, task: Task, operation: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            self.watch.begins(task)
            operation()
            self.watch.ends(task)

        return run

    def _operation(self, task: Task) -> Callable[[], None]:
        if (mixing := self._script.mixing.get(task.index)) is not None:
            return mixing
        match task.work:
            case Compute(phase=Phase.FORWARD):
                return lambda: self._forward(task)
            case Compute(phase=Phase.RECOMPUTE):
                return lambda: self._recompute(task)
            case Compute(phase=Phase.BACKWARD_WEIGHT):
                return lambda: self._backward_weights(task)
            case Compute():
                return lambda: self._backward(task)
            case LoadBatch():
                return self._load
            case OptimizerStep():
                return self._stage.optimizer_step
            case ClipGradients(part=part):
                return self._begin_norm if part == NORM else self._scale_gradients
            case Collective() if sums_norm(task):
                return lambda: self._sum_norm(task)
            case Collective() | SendRecv() if task.origin.hop is not None:
                return lambda: self._hop(task)
            case Collective():
                return lambda: self._synchronise(task)
            case SendRecv():
                return lambda: self._transfer(task)
        raise ExecutionError(f"no way to run {task.work}; teach parsim.execute.runtime this work")

    def _ended(self, task: Task, operation: Callable[[], None]) -> Callable[[], None]:
        """The operation, and the room for buckets that are whole for a while around it (ZeRO 2 and 3)."""
        room = self._room.around.get(task.index)
        if room is None:
            return operation

        def run() -> None:
            for key in room.forgotten:
                del self._sent[key]
            operation()
            for bucket in room.ending_parameters:
                flat = self._stage.flat_parameters(bucket)
                self._streams.used(flat)
                self._stage.end_parameters(bucket)
                self.watch.resized(flat)
            for bucket, microbatch in room.ending_gradients:
                chunk = self._stage.gradient_chunk(bucket)
                own = torch.empty(chunk.shape, dtype=chunk.dtype, device=chunk.device)
                self._sent[bucket, microbatch] = self._stage.end_gradients(bucket), own
            for bucket in room.beginning_parameters:
                self._begin_parameters(bucket)

        return run

    def _between(self, task: Task, operation: Callable[[], None]) -> Callable[[], None]:
        """The operation, and around it what is given up of messages to other stages, and room for those of others."""
        forgotten, arriving = self._transfers.forgotten.get(task.index, ()), self._transfers.behind.get(task.index, ())
        if not forgotten and not arriving:
            return operation

        def run() -> None:
            for index in forgotten:
                self._leaving[index] = None
            operation()
            self._make_room(arriving)

        return run

    def _make_room(self, receives: Sequence[Task]) -> None:
        """Room for messages of other stages. Their stream begins when what is in this memory until now has been read."""
        if receives:
            self.watch.receiving()
            buffers = [self._buffer(self._store.moved(task)) for task in receives]
            fence = self._streams.fence()
            self._receiving.update((task.index, (buffer, fence)) for task, buffer in zip(receives, buffers, strict=True))

    def _begin_parameters(self, bucket: int) -> None:
        self.watch.resized(self._stage.begin_parameters(bucket))

    def _begin_batch(self, index: int, stream: str, before: Sequence[int], batch: BatchSource) -> None:
        """The batch that was loaded beside the step before; else it is loaded now."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[0] is not batch:
            self._streams.load(index, stream, before, self._load)
            return
        self._streams.loaded(index)
        for microbatch, values in enumerate(ahead[1]):
            self._keep_batch(microbatch, values)

    def _load_ahead(self, following: BatchSource) -> None:
        self.watch.loading()
        self._ahead = following, [following(microbatch) for microbatch in range(self._stage.layout.plan.microbatches)]

    def _load(self) -> None:
        batch, self._batch = self._batch, None
        assert batch is not None
        for microbatch in range(self._stage.layout.plan.microbatches):
            self._keep_batch(microbatch, batch(microbatch))

    def _keep_batch(self, microbatch: int, values: Mapping[str, Tensor]) -> None:
        layout = ValueLayout("full", self._stage.layout.batch_ways(self._stage.rank))
        for value, tensor in values.items():
            self.watch.loaded(tensor)
            self._store.put(Instance(ValueKey(value), layout), microbatch, tensor)

    def _forward(self, task: Task) -> None:
        name, microbatch = _component_of(task)
        running = None if self._stale is None else self._stale.forward
        runnable = self._stage.runnables[name] if running is None else running.runnables[name]
        layout, own = self._stage.layout, self._of[name]
        inputs = {instance: self._taken(instance, microbatch) for instance in dict.fromkeys(own.inputs)}
        given = [inputs[instance] for instance in own.inputs]
        self._stage.randomness.begin(name, microbatch)
        if layout.recomputes(name):
            run = forward_keeping_calls if layout.recomputes_by_operator(name) else forward_keeping_inputs
            with self._stage.computing():
                outputs, self._kept[name, microbatch] = run(runnable, given, self._stage.device)
        else:
            with self._stage.computing():
                outputs, record = forward_component(runnable, given)
            if name in layout.differentiable:
                self._made[name, microbatch] = record
        if name == LOSS and self._stage.loss_counts:
            self._loss.append(outputs[0])
        for instance, tensor in zip(own.outputs, outputs, strict=True):
            self._store.put(instance, microbatch, tensor)

    def _recompute(self, task: Task) -> None:
        name, microbatch = _component_of(task)
        kept = self._kept.pop((name, microbatch))
        with self._stage.computing():
            self._records[name, microbatch] = recompute(self._stage.runnables[name], kept, self._stage.device)

    def _backward(self, task: Task) -> None:
        """Gradients of a value from readers that make it alike add up inside the backwards, see `backward_component`."""
        name, microbatch = _component_of(task)
        waited = None if self._stale is None else self._stale.due
        runnable = self._stage.runnables[name] if waited is None else waited.runnables[name]
        record = self._records.pop((name, microbatch))
        outputs = [self._gradient_of(value, microbatch) for value in runnable.output_names]
        if name == LOSS:
            outputs = [self._stage.loss_gradient]
        own = self._of[name]
        items = own.growing
        so_far = [self._growing.pop((item, microbatch), None) for item in items]
        assert isinstance(task.work, Compute)
        if task.work.phase is self._stage.layout.weight_phase(name):
            self._stage.begin_gradients(name)
        if task.work.phase is Phase.BACKWARD_INPUT:
            gradients, self._halves[name, microbatch] = backward_inputs(record, runnable.parameters(), outputs, so_far)
        else:
            gradients = backward_component(record, outputs, so_far)
        for item, gradient in zip(items, gradients, strict=True):
            if gradient is not None:
                self._growing[item, microbatch] = gradient
        for instance, leaves in own.completed:
            whole = self._growing.pop((instance.item, microbatch), None)
            if whole is not None:  # a piece of a larger gradient would keep all of that until it is sent
                self._store.put(instance, microbatch, whole.contiguous() if leaves else whole)

    def _backward_weights(self, task: Task) -> None:
        name, microbatch = _component_of(task)
        self._stage.begin_gradients(name)
        backward_weights(self._halves.pop((name, microbatch)))

    def _gradient_of(self, value: str, microbatch: int) -> Tensor | None:
        """Gradient of a value from all its readers, later ones first, as autograd would add them."""
        total: Tensor | None = None
        for instance in self._store.gradients(value):
            tensor = self._store.take(instance, microbatch)
            if tensor is not None:
                total = tensor if total is None else total + tensor
        return total

    def _taken(self, instance: Instance, microbatch: int) -> Tensor:
        """From the store; a gradient that no backward here has added to is zero."""
        tensor = self._store.take(instance, microbatch)
        if tensor is None:
            assert instance.item.reading is not None, f"{instance.item.value} was not made before it is read"
            return self._buffer(instance).zero_()
        return tensor

    def _buffer(self, instance: Instance) -> Tensor:
        """Room for what another rank sends. The allocator gives it memory that no stream of `Streams.used` still reads."""
        shape, dtype = self._stage.local_shape(instance.item.value, instance.layout)
        buffer = torch.empty(shape, dtype=dtype, device=self._stage.device)
        self.watch.received(buffer)
        return buffer

    def _synchronise(self, task: Task) -> None:
        """A gradient bucket: summed whole, or with ZeRO summed in parts; and its parameters put together again."""
        assert isinstance(task.work, Collective)
        number, microbatch = task.origin.bucket, task.origin.microbatch
        assert number is not None, "a collective without a hop belongs to a gradient bucket"
        group = self._groups[DP_STREAM, tuple(sorted(task.work.group))]
        match task.work.operation:
            case "all_reduce":
                flat = self._stage.flat_gradient(number)
                self._streams.used(flat)
                dist.all_reduce(flat, group=group)
            case "reduce_scatter":
                if microbatch is not None:
                    flat, own = self._sent[number, microbatch]
                    self._streams.used(flat)
                    self._streams.used(own)
                    reduce_scatter_flat(own, flat, group)
                    self._stage.add_gradients(number, own)
                    return
                flat = self._stage.flat_gradient(number)
                self._streams.used(flat)
                chunk = self._stage.gradient_chunk(number)
                own = torch.empty_like(chunk)  # the chunk is part of what is sent
                reduce_scatter_flat(own, flat, group)
                chunk.copy_(own)
            case "all_gather" if microbatch is not None:
                flat = self._stage.flat_parameters(number)
                self._streams.used(flat)
                all_gather_flat(flat, self._stage.parameter_chunk(number), group)
            case "all_gather":
                flat = self._stage.flat_parameters(number)
                self._streams.used(flat)
                all_gather_flat(flat, self._stage.parameter_chunk(number).clone(), group)

    def _begin_norm(self) -> None:
        """This rank's share of the squared norm of all gradients."""
        self._norm = self._stage.squared_norm()

    def _sum_norm(self, task: Task) -> None:
        assert isinstance(task.work, Collective)
        assert self._norm is not None
        self._streams.used(self._norm)
        dist.all_reduce(self._norm, group=self._groups[DP_STREAM, tuple(sorted(task.work.group))])

    def _scale_gradients(self) -> None:
        assert self._norm is not None
        self._streams.used(self._norm)
        self._stage.clip_gradients(self._norm)

    def _hop(self, task: Task) -> None:
        """One step of a conversion on the tp axis."""
        origin, store = task.origin, self._store
        assert origin.hop is not None
        assert origin.microbatch is not None
        before, after = store.before(task), store.after(task)
        if isinstance(task.work, SendRecv):
            self._message(task, before, after)
            return
        assert isinstance(task.work, Collective)
        held = store.shard in origin.hop.source.holders(store.tp)
        tensor = self._taken(before, origin.microbatch) if held else self._buffer(before)
        group = self._groups["tp", tuple(sorted(task.work.group))]
        made = run_hop(origin.hop, tensor, ranks=task.work.group, group=group)
        self.watch.received(made)
        store.put(after, origin.microbatch, made)

    def _message(self, task: Task, before: Instance, after: Instance) -> None:
        """A point-to-point hop: a piece to or from the rank that has the whole, or the whole from one rank to another."""
        work, origin, store = task.work, task.origin, self._store
        assert isinstance(work, SendRecv)
        assert origin.hop is not None
        assert origin.microbatch is not None
        group = self._groups["tp", tuple(sorted((work.source, work.destination)))]
        plan = self._stage.layout.plan
        scattered = origin.hop.operation == "scatter"
        if self._stage.rank == work.source:
            tensor = self._taken(before, origin.microbatch)
            if scattered:
                tensor = batch_piece(tensor, store.tp, plan.shard_of_rank(work.destination))
            tensor = tensor.contiguous()
            dist.send(tensor, work.destination, group=group)
            return
        gathered = origin.hop.operation == "gather"
        buffer = self._buffer(before if gathered else after)
        dist.recv(buffer, work.source, group=group)
        if gathered:
            store.put_piece(after, origin.microbatch, plan.shard_of_rank(work.source), buffer)
        else:
            store.put(after, origin.microbatch, buffer)

    def _transfer(self, task: Task) -> None:
        """A value to a later stage, or a gradient to an earlier one."""
        work, origin = task.work, task.origin
        assert isinstance(work, SendRecv)
        assert origin.microbatch is not None
        moved = self._store.moved(task)
        ranks = (min(work.source, work.destination), max(work.source, work.destination))
        group = self._groups[f"pp>{work.destination}", ranks]
        if self._stage.rank == work.source:
            tensor = self._taken(moved, origin.microbatch).contiguous()
            self._leaving.setdefault(task.index, tensor)
            self.watch.received(tensor)
            dist.send(tensor, work.destination, group=group)
            return
        buffer, fence = self._receiving.pop(task.index)
        self._streams.after(fence)
        self._streams.used(buffer)
        dist.recv(buffer, work.source, group=group)
        if self._stale is not None:
            self._stale.arrives(task, buffer)
        else:
            self._store.put(moved, origin.microbatch, buffer)


def required_groups(graph: TaskGraph) -> list[tuple[str, tuple[int, ...]]]:
    """The process groups that a graph needs; the same list on every rank.

    A transfer's group is named after its sending stream, so both directions of a pair have one each.

    Args:
        graph: of all ranks.

    Returns:
        (stream, ranks ascending) of every group, in order of first use.
    """
    needed: dict[tuple[str, tuple[int, ...]], None] = {}
    for task in graph.tasks:
        match task.work:
            case Collective():
                needed[task.resources[0].stream, tuple(sorted(task.work.group))] = None
            case SendRecv():
                ends = (min(task.work.source, task.work.destination), max(task.work.source, task.work.destination))
                needed[task.resources[0].stream, ends] = None
    return list(needed)


def _component_of(task: Task) -> tuple[str, int]:
    component, microbatch = task.origin.component, task.origin.microbatch
    assert component is not None
    assert microbatch is not None
    return component, microbatch
