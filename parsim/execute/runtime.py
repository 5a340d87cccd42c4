"""One rank interprets its part of a TaskGraph. The graph alone decides order and overlap.

The autograd graph is cut at component boundaries: the forward of a component runs on detached inputs, its backward task
calls autograd on its own outputs only. A gradient bucket is a flat array whose views are the parameters' gradients.

What the tasks run is in `parsim.execute.operations`: each is bound to its component, values and process group once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from parsim.errors import ExecutionError
from parsim.execute.mixing import GroupsByStream, MixingRounds, StaleStage, runs
from parsim.execute.operations import Communicating, Computing, StepValues, StepWatch, Store
from parsim.execute.processes.group import StreamLink
from parsim.execute.stage import StageReplica
from parsim.execute.streams import BatchSource, Operation, Streams, TaskTime
from parsim.program.lifetimes import bucket_rooms, message_rooms
from parsim.program.lower import lower
from parsim.program.placed import PlanIndex
from parsim.program.taskgraph import COMPUTE, HOST, RankTasks, Task, TaskGraph, in_order, rank_tasks
from parsim.work import ClipGradients, Collective, Compute, LoadBatch, OptimizerStep, Phase, SendRecv


@dataclass(frozen=True, kw_only=True, eq=False)
class StepScript:
    """tasks: of the rank. updates: whether an optimizer's step is among them. mixing: what to do for tasks of a round.
    is_first: whether it is the step that the prediction shows: like the one that the first round follows. share: of the
    replicas that compute in the step. launches: the numbers of `tasks` in the order that all ranks launch in; none where ranks
    need no such order."""

    tasks: RankTasks
    updates: bool
    mixing: Mapping[int, Callable[[], None]] = field(default_factory=dict)
    is_first: bool = True
    share: float = 1.0
    launches: tuple[int, ...] = ()

    @cached_property
    def computes(self) -> bool:
        """Whether the rank computes in the step: not where its replica is not drawn, or no batch has come to its stage."""
        return any(isinstance(task.work, Compute) for task, _, _ in self.tasks)


class StepScripts:
    """The scripts of one rank, each made once.

    graph: of the step that the first round follows, or of every step. mixing: where replicas mix in rounds, the rank's part of
    them. stale: where stages are decoupled, what waits there. launch_order: of all tasks of a graph; None: ranks need none.
    """

    def __init__(
        self,
        graph: TaskGraph,
        layout: PlanIndex,
        rank: int,
        mixing: MixingRounds | None,
        stale: StaleStage | None = None,
        launch_order: Callable[[TaskGraph, PlanIndex], Sequence[int]] | None = None,
    ) -> None:
        self._layout, self._rank, self._mixing, self._stale = layout, rank, mixing, stale
        self._first, self._launch_order = graph, launch_order
        self._made: dict[tuple[object, ...], StepScript] = {}
        rule, every = layout.plan.synchronisation, graph
        if rule.participation < 1.0:  # the step in which all replicas compute
            every = lower(replace(layout.plan, synchronisation=replace(rule, participation=1.0, seed=0)), layout.model)
        self._whole = self._script(every, {})

    def of_step(self, number: int | None) -> StepScript:
        """The script of training step `number` >= 0; None: what the rank does at most in any step."""
        rule = self._layout.plan.synchronisation
        if number is None:
            return self._whole
        since = None if self._stale is None else self._stale.since(number)
        if self._mixing is None:
            return self._whole if since is None else self._filling(self._whole, since, ())
        replicas = self._layout.plan.mesh.dp
        mixing_round = self._mixing.round_of(number)
        local = not rule.due(number)
        drawn = rule.takes_part(mixing_round, replicas)
        of_round = () if local else (rule.matrix(mixing_round, replicas).tobytes(), mixing_round % rule.fragments)
        key = (local, drawn, *of_round)
        if key not in self._made:
            graph = lower(self._layout.plan, self._layout.model, self._layout, mixing_round=mixing_round, local=local)
            mixes = rule.combines_first or not local
            operations = self._mixing.operations(graph, mixing_round, local=local) if mixes else {}
            share = sum(drawn) / replicas
            self._made[key] = self._script(graph, operations, is_first=graph.tasks == self._first.tasks, share=share)
        return self._made[key] if since is None else self._filling(self._made[key], since, key)

    def _filling(self, whole: StepScript, since: int, key: tuple[object, ...]) -> StepScript:
        """What a decoupled stage does of a script so many steps after the stages began to fill. key: of the script."""
        plan = self._layout.plan
        if since >= plan.synchronisation.steps_to_fill(plan.mesh.pp):
            return whole
        if (since, *key) not in self._made:
            tasks = [entry for entry in whole.tasks if runs(entry[0], plan, self._rank, since)]
            runs_now = {task.index for task, _, _ in tasks}
            tasks = [(task, stream, tuple(index for index in before if index in runs_now)) for task, stream, before in tasks]
            launches = tuple(index for index in whole.launches if index in runs_now)
            filled = replace(whole, tasks=tasks, updates=_updates(tasks), is_first=False, launches=launches)
            self._made[(since, *key)] = filled
        return self._made[(since, *key)]

    def _script(
        self, graph: TaskGraph, mixing: Mapping[int, Callable[[], None]], *, is_first: bool = True, share: float = 1.0
    ) -> StepScript:
        tasks = rank_tasks(graph, self._rank)
        launches: tuple[int, ...] = ()
        if self._launch_order is not None:
            numbers = {task.index for task, _, _ in tasks}
            launches = tuple(index for index in self._launch_order(graph, self._layout) if index in numbers)
        return StepScript(
            tasks=tasks, updates=_updates(tasks), mixing=mixing, is_first=is_first, share=share, launches=launches
        )


def _updates(tasks: RankTasks) -> bool:
    return any(isinstance(task.work, OptimizerStep) for task, _, _ in tasks)


# One order for the launches of all ranks, in which every task of a step comes behind all that it waits for, on any rank.
#
# NCCL's kernels wait for data, and CUDA promises for no two streams that they run at the same time. So NCCL asks that every
# rank gives its communications in the same order, over whatever communicators. Each rank launches its tasks in this order,
# computation too. Then no rank waits for ever even where a GPU runs one thing after the other: where streams share a queue, or
# loading a kernel waits until the device is idle. Nor does it where the host waits for its peers, as at the first collective of
# every communicator, which connects them. The first task in the order that has not ended can always run.
#
# A launch is early: a task stands behind about as many others as separate it from the beginning of the step. Streams still run
# at the same time where the device lets them.
#
# Source: NCCL's user guide, "Using multiple NCCL communicators concurrently"; CUDA programming guide, "Lazy Loading".


def launch_order(graph: TaskGraph, layout: PlanIndex) -> list[int]:
    """The numbers of all tasks of all ranks in a step; the same on every rank. Whatever follows no update comes before all
    updates: with a scaled loss, ranks agree in their first one, and their hosts wait for one another there. Raises
    ExecutionError: tasks wait for one another."""
    before = graph.predecessors()
    for index, awaited in room_waits(graph, layout).items():
        before[index].extend(awaited)
    order = in_order(before)
    if len(order) < len(graph.tasks):
        raise ExecutionError(
            f"{len(graph.tasks) - len(order)} tasks of the step wait for one another; this is a fault of parsim"
        )
    late: set[int] = set()
    for index in order:
        if isinstance(graph.tasks[index].work, OptimizerStep) or not late.isdisjoint(before[index]):
            late.add(index)
    return [*(index for index in order if index not in late), *(index for index in order if index in late)]


def room_waits(graph: TaskGraph, layout: PlanIndex) -> Mapping[int, Sequence[int]]:
    """What messages between stages, and computations, also wait for: room, or that what was sent before has left."""
    if layout.plan.mesh.pp == 1:
        return {}
    tasks: list[RankTasks] = [[] for _ in range(graph.world_size)]
    for task in graph.tasks:
        for rank, stream in {resource.rank: resource.stream for resource in reversed(task.resources)}.items():
            tasks[rank].append((task, stream, ()))
    waits: dict[int, list[int]] = {}
    for rank, tasks_of_rank in enumerate(tasks):
        for index, awaited in message_rooms(tasks_of_rank, layout, rank).awaited.items():
            waits.setdefault(index, []).extend(awaited)
    return waits


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
    """The tasks of one rank, in issue order, and the state of one step while it runs. groups: process group by (stream, ranks
    in ascending order). mixing, stale: as for `StepScripts`; `graph` is then that of the first round."""

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
        self._room = bucket_rooms(self._script.tasks, stage.layout, stage.rank)
        self._transfers = message_rooms(self._script.tasks, stage.layout, stage.rank)
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
        """Repeat the forward of a batch that waits for its backward, where a decoupled stage goes on from a checkpoint. draw:
        of the random numbers of its step."""
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
        return self._steps.of_step(number)

    def step(
        self, batch: BatchSource, following: BatchSource | None = None, *, script: StepScript | None = None
    ) -> tuple[float, list[TaskTime]]:
        """Run one training step. Returns the sum over this rank's samples of the loss (0 where another rank counts it), and the
        tasks' times.

        script: of this step, where steps differ. following: the `batch` of the next call, where it is known: it is loaded
        beside this step, where the device can.
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
        if following is None:  # it is not known
            return

        def read() -> None:
            self.watch.loading()
            self._ahead = following, self._computing.read(following)

        self._streams.load_ahead(load.task.index, load.stream, read)


def _is_ready(following: BatchSource | None) -> bool:
    """Whether the next batch can be loaded now. It is before the update if so, as the host waits there with a scaled loss."""
    return bool(getattr(following, "is_ready", lambda: False)())


def _last(before: Sequence[int], places: Mapping[int, tuple[int, str]]) -> tuple[int, ...]:
    """The last task of each stream among those that a task waits for: streams run in issue order. places: per task of the
    script its number in issue order, and its stream."""
    ordered = sorted(places[index] + (index,) for index in before if index in places)
    return tuple({stream: index for _, stream, index in ordered}.values())


def required_groups(graph: TaskGraph) -> list[tuple[str, tuple[int, ...]]]:
    """The process groups that a graph needs, (stream, ranks ascending) in order of first use; the same list on every rank. A
    transfer's group is named after its sending stream, so both directions of a pair have one each."""
    needed: dict[tuple[str, tuple[int, ...]], None] = {}
    for task in graph.tasks:
        match task.work:
            case Collective():
                needed[task.resources[0].stream, tuple(sorted(task.work.group))] = None
            case SendRecv():
                needed[_link_of(task, task.work).stream] = None
    return list(needed)


def required_links(graph: TaskGraph) -> list[StreamLink]:
    """The links over which a graph's transfers go, in order of first use; the same list on every rank."""
    return list(dict.fromkeys(_link_of(task, task.work) for task in graph.tasks if isinstance(task.work, SendRecv)))


def _link_of(task: Task, work: SendRecv) -> StreamLink:
    ends = (min(work.source, work.destination), max(work.source, work.destination))
    return StreamLink((task.resources[0].stream, ends), work.source, work.destination)
