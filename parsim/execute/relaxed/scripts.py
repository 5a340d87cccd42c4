"""What a rank does in each training step: its tasks in issue order, which differ where a mixing round follows some steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from parsim.execute.relaxed.mixing import MixingRounds
from parsim.execute.relaxed.stale import StaleStage, runs
from parsim.graph.lower import lower
from parsim.graph.plan_index import PlanIndex
from parsim.graph.task import Task
from parsim.graph.taskgraph import TaskGraph
from parsim.work import Compute, OptimizerStep

RankTasks = list[tuple[Task, str, tuple[int, ...]]]
"""In issue order: a task, its stream on the rank, and the tasks of the rank that it waits for."""


def rank_tasks(graph: TaskGraph, rank: int) -> RankTasks:
    """The tasks of one rank, in issue order.

    Args:
        graph: of all ranks. rank: global number.
    """
    local = [task for task in graph.tasks if rank in task.ranks]
    indices = {task.index for task in local}
    found: RankTasks = []
    for task in local:
        stream = next(resource.stream for resource in task.resources if resource.rank == rank)
        found.append((task, stream, tuple(index for index in task.dependencies if index in indices)))
    return found


def _with_every_replica(graph: TaskGraph, layout: PlanIndex) -> TaskGraph:
    """The graph of a step in which all replicas compute."""
    plan, rule = layout.plan, layout.plan.synchronisation
    if rule.participation == 1.0:
        return graph
    return lower(replace(plan, synchronisation=replace(rule, participation=1.0, seed=0)), layout.model)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepScript:
    """Attributes:
    tasks: of the rank. updates: whether an optimizer's step is among them. mixing: what to do for tasks of a round.
    is_first: whether it is the step that the prediction shows: like the one that the first round follows.
    share: of the replicas that compute in the step.
    launches: the numbers of `tasks` in the order that all ranks launch in; none where ranks need no such order.
    """

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

    Args:
        graph: of the step that the first round follows, or of every step. layout: of the plan. rank: global number.
        mixing: where replicas mix in rounds, the rank's part of them. stale: where stages are decoupled, what waits there.
        launch_order: of all tasks of a graph; None: ranks need none.
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
        self._whole = self._script(_with_every_replica(graph, layout), {})

    def of_step(self, number: int | None) -> StepScript:
        """The script of training step `number` >= 0; None: what the rank does at most in any step."""
        rule = self._layout.plan.synchronisation
        if number is not None and self._stale is not None:
            return self._filling(self._stale.since(number))
        if number is None or self._mixing is None:
            return self._whole
        replicas = self._layout.plan.mesh.dp
        mixing_round = number // rule.period_steps
        local = not rule.due(number)
        drawn = rule.takes_part(mixing_round, replicas)
        key = (local, drawn, *(() if local else (rule.matrix(mixing_round, replicas).tobytes(),)))
        if key not in self._made:
            graph = lower(self._layout.plan, self._layout.model, self._layout, mixing_round=mixing_round, local=local)
            operations = {} if local else self._mixing.operations(graph, mixing_round)
            share = sum(drawn) / replicas
            self._made[key] = self._script(graph, operations, is_first=graph.tasks == self._first.tasks, share=share)
        return self._made[key]

    def _filling(self, since: int) -> StepScript:
        """What a decoupled stage does so many steps after the stages began to fill."""
        plan = self._layout.plan
        if since >= plan.synchronisation.steps_to_fill(plan.mesh.pp):
            return self._whole
        if (since,) not in self._made:
            tasks = [entry for entry in self._whole.tasks if runs(entry[0], plan, self._rank, since)]
            left = {task.index for task, _, _ in tasks}
            tasks = [(task, stream, tuple(index for index in before if index in left)) for task, stream, before in tasks]
            launches = tuple(index for index in self._whole.launches if index in left)
            self._made[since,] = StepScript(tasks=tasks, updates=_updates(tasks), is_first=False, launches=launches)
        return self._made[since,]

    def _script(
        self, graph: TaskGraph, mixing: Mapping[int, Callable[[], None]], *, is_first: bool = True, share: float = 1.0
    ) -> StepScript:
        tasks = rank_tasks(graph, self._rank)
        launches: tuple[int, ...] = ()
        if self._launch_order is not None:
            own = {task.index for task, _, _ in tasks}
            launches = tuple(index for index in self._launch_order(graph, self._layout) if index in own)
        return StepScript(
            tasks=tasks, updates=_updates(tasks), mixing=mixing, is_first=is_first, share=share, launches=launches
        )


def _updates(tasks: RankTasks) -> bool:
    return any(isinstance(task.work, OptimizerStep) for task, _, _ in tasks)
