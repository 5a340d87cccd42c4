"""One rank interprets its part of a TaskGraph. The graph alone decides order and overlap.

The autograd graph is cut at component boundaries: the forward of a component runs on detached inputs, its backward task
calls autograd on its own outputs only. A gradient bucket is a flat array whose views are the parameters' gradients.

What the tasks run is in `parsim.execute.operations`: each is bound to its component, values and process group once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from parsim.errors import ExecutionError
from parsim.execute.launch_order import launch_order
from parsim.execute.operations.communicating import Communicating
from parsim.execute.operations.computing import BatchSource, Computing
from parsim.execute.operations.values import StepValues
from parsim.execute.processes.group import StreamLink
from parsim.execute.records.memory_lines import StepWatch
from parsim.execute.records.task_time import Operation, TaskTime
from parsim.execute.relaxed.mixing import GroupsByStream, MixingRounds
from parsim.execute.relaxed.scripts import StepScript, StepScripts
from parsim.execute.relaxed.stale import StaleStage
from parsim.execute.rooms.buckets import rooms_of
from parsim.execute.rooms.transfers import transfer_rooms
from parsim.execute.stage import StageReplica
from parsim.execute.state.store import Store
from parsim.execute.streams import Streams
from parsim.graph.task import COMPUTE, HOST, Task
from parsim.graph.taskgraph import TaskGraph
from parsim.work import ClipGradients, Collective, Compute, LoadBatch, OptimizerStep, Phase, SendRecv

__all__ = ["BatchSource", "RankProgram", "required_groups", "required_links"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    """A task, its stream, the tasks that it waits for, and what it runs."""

    task: Task
    stream: str
    before: tuple[int, ...]
    operation: Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class _Issue:
    """A script, bound, in the order in which the calling thread issues it."""

    script: StepScript
    entries: tuple[_Bound, ...]


class RankProgram:
    """The tasks of one rank, in issue order, and the state of one step while it runs.

    Args:
        groups: process group by (stream, ranks in ascending order).
        mixing: where replicas mix their weights in rounds, this rank's part of them; `graph` is then that of the first round.
        stale: where stages are decoupled, what waits on this one between steps.
    """

    def __init__(
        self,
        graph: TaskGraph,
        stage: StageReplica,
        streams: Streams,
        groups: GroupsByStream,
        mixing: MixingRounds | None = None,
        stale: StaleStage | None = None,
    ) -> None:
        self._stage = stage
        self._stale = stale
        self._streams = streams
        order = launch_order if streams.queues else None
        self._steps = StepScripts(graph, stage.layout, stage.rank, mixing, stale, order)
        self._script = self._steps.of_step(None)
        self._room = rooms_of(self._script.tasks)
        self._transfers = transfer_rooms(self._script.tasks, stage.layout, stage.rank)
        self._tasks = {task.index: task for task, _, _ in self._script.tasks}
        self._store = Store(stage.layout, stage.rank, list(self._tasks.values()), streams)
        self._values = StepValues(stage, self._store, streams)
        self._computing = Computing(self._values, stale)
        awaited = frozenset(index for waited in self._transfers.awaited.values() for index in waited)
        self._communicating = Communicating(self._values, groups, stale, awaited)
        self._ahead: tuple[BatchSource, list[Mapping[str, Tensor]]] | None = None
        self._issues: dict[int, _Issue] = {}
        self._reset()

    @property
    def watch(self) -> StepWatch:
        """Receives the events of a step, for tools that count memory."""
        return self._values.watch

    @watch.setter
    def watch(self, watch: StepWatch) -> None:
        self._values.watch = watch

    def _reset(self) -> None:
        self._store.clear()
        if self._stale is not None:
            self._take_over(self._stale)
        self._computing.reset()
        self._communicating.reset()

    def _take_over(self, stale: StaleStage) -> None:
        """What has arrived at a decoupled stage in the step before."""
        arrived, stale.arrived = stale.arrived, {}
        for index, tensor in arrived.items():
            microbatch = self._tasks[index].origin.microbatch
            assert microbatch is not None
            self._store.put(self._store.moved(self._tasks[index]), microbatch, tensor, computed=True)

    def run_forward_again(self, batch: BatchSource, draw: int) -> None:
        """Of a decoupled stage that goes on from a checkpoint: the forward of a batch that waits for its backward.

        Args:
            batch: its values. draw: of the random numbers of its step.
        """
        assert self._stale is not None
        assert self._stale.forward is not None
        self._stale.forward.draw = draw
        self._reset()
        self._computing.batch = batch
        with self._stage.randomness.step(draw):
            for task in self._tasks.values():
                if isinstance(task.work, LoadBatch) or (isinstance(task.work, Compute) and task.work.phase is Phase.FORWARD):
                    self._computing.operation(task)()
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
        self._communicating.begin_parameters(self._room.first_parameters)
        self._communicating.make_room(self._transfers.first)
        self._computing.batch = batch
        load = None
        for entry in self._issue_of(self._script).entries:
            if load is not None and isinstance(entry.task.work, OptimizerStep) and _is_ready(following):
                self._load_ahead(load, following)
                load = None
            if entry.stream not in (COMPUTE, HOST):
                streams.submit(entry.task.index, entry.stream, entry.before, entry.operation)
            elif streams.loads_ahead and isinstance(entry.task.work, LoadBatch):
                load = entry
                self._begin_batch(entry, batch)
            else:
                streams.compute(entry.task.index, entry.stream, entry.before, entry.operation)
        if not self._script.updates and self._stage.loss_scale is not None:
            if load is not None and _is_ready(following):
                self._load_ahead(load, following)
                load = None
            self._stage.overflowed()
        if load is not None:
            self._load_ahead(load, following)
        times = streams.finish()
        self._communicating.ended()
        losses = [loss.reshape(()) for loss in self._computing.losses]
        return float(sum(torch.stack(losses).tolist())) if losses else 0.0, times  # read at once: the host waits for each read

    # --- scripts, bound -----------------------------------------------------------------------------------------------

    def _issue_of(self, script: StepScript) -> _Issue:
        """Bound once per script. Scripts are kept: none takes the identity of another."""
        if id(script) not in self._issues:
            places = {task.index: (number, stream) for number, (task, stream, _) in enumerate(script.tasks)}
            bound: dict[int, _Bound] = {}
            for task, stream, before in script.tasks:
                every = (*before, *self._transfers.awaited.get(task.index, ()))
                operation = self._operation(task, script)
                if stream in (COMPUTE, HOST):
                    operation = self._with_room(task, operation)
                bound[task.index] = _Bound(task=task, stream=stream, before=_last(every, places), operation=operation)
            entries = [bound[index] for index in script.launches]
            if not entries:  # communication first: threads wait for what it needs
                entries = sorted(bound.values(), key=lambda entry: entry.stream in (COMPUTE, HOST))
            self._issues[id(script)] = _Issue(script=script, entries=tuple(entries))
        return self._issues[id(script)]

    def _operation(self, task: Task, script: StepScript) -> Operation:
        if (mixing := script.mixing.get(task.index)) is not None:
            return mixing
        match task.work:
            case Compute() | LoadBatch():
                return self._computing.operation(task)
            case OptimizerStep():
                return partial(self._stage.optimizer_step, task.work.update_group)
            case ClipGradients() | Collective() | SendRecv():
                return self._communicating.operation(task)
        raise ExecutionError(f"no executor for {task.work}; add it to parsim.execute.runtime")

    def _with_room(self, task: Task, operation: Operation) -> Operation:
        """A computation, and around it the room for what other ranks send, or are sent."""
        room = self._room.around.get(task.index)
        if room is not None:
            operation = self._communicating.around(room, operation)
        operation = self._watched(task, operation)
        forgotten, arriving = self._transfers.forgotten.get(task.index, ()), self._transfers.behind.get(task.index, ())
        return self._communicating.between(forgotten, arriving, operation) if forgotten or arriving else operation

    def _watched(self, task: Task, operation: Operation) -> Operation:
        values = self._values

        def run() -> None:
            values.watch.begins(task)
            operation()
            values.watch.ends(task)

        return run

    # --- batches that are loaded ahead --------------------------------------------------------------------------------

    def _begin_batch(self, load: _Bound, batch: BatchSource) -> None:
        """The batch that was loaded beside the step before; else it is loaded now."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[0] is not batch:
            self._streams.load(load.task.index, load.stream, load.before, load.operation)
            return
        self._streams.loaded(load.task.index)
        for microbatch, values in enumerate(ahead[1]):
            self._computing.keep(microbatch, values)

    def _load_ahead(self, load: _Bound, following: BatchSource | None) -> None:
        """Load the next step's batch, if it is known."""
        if following is not None:
            self._streams.load_ahead(load.task.index, load.stream, lambda: self._read_ahead(following))

    def _read_ahead(self, following: BatchSource) -> None:
        self.watch.loading()
        self._ahead = following, self._computing.read(following)


def _is_ready(following: BatchSource | None) -> bool:
    """Whether the next batch can be loaded now. It is before the update if so, as the host waits there with a scaled loss."""
    return bool(getattr(following, "is_ready", lambda: False)())


def _last(before: Sequence[int], places: Mapping[int, tuple[int, str]]) -> tuple[int, ...]:
    """Of what a task waits for, the last of each stream: streams run in issue order.

    Args:
        before: tasks. places: per task of the script its number in issue order, and its stream.
    """
    own = sorted(places[index] + (index,) for index in before if index in places)
    return tuple({stream: index for _, stream, index in own}.values())


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
                needed[_link_of(task, task.work).stream] = None
    return list(needed)


def required_links(graph: TaskGraph) -> list[StreamLink]:
    """The links over which a graph's transfers go, in order of first use; the same list on every rank.

    Args:
        graph: of all ranks.
    """
    return list(dict.fromkeys(_link_of(task, task.work) for task in graph.tasks if isinstance(task.work, SendRecv)))


def _link_of(task: Task, work: SendRecv) -> StreamLink:
    ends = (min(work.source, work.destination), max(work.source, work.destination))
    return StreamLink((task.resources[0].stream, ends), work.source, work.destination)
