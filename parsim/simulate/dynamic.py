"""The dynamic engine: a discrete-event simulation on SimPy.

Same-instant rule (both engines): each resource runs its tasks in issue order; a task starts when its dependencies have
ended and it is at the head of every resource it needs, which are then all free; it holds them all until it ends. So
what happens in one instant never depends on which event is looked at first.

Every task is a countdown of what blocks it, then a timer; every resource an in-order queue that hands its turn on when
its head ends. While one rank computes and communicates at once (`overlap`), its computation runs at rate 1 / compute and
its communication at 1 / communication; a collective or a transfer goes at the rate of its slowest rank. Rates change
once per instant, after everything that starts or ends in it; a task whose rate changes gets a new timer for what is left
of it.

Under `conditions` (a scenario) the paces come from `parsim.simulate.paces`: stragglers, links whose bandwidth changes, and
links shared max-min fairly by whoever uses them. Where none of it touches a task, the task ends when the static engine says.

Leaves out: failures, which stop whole steps and belong to `parsim.simulate.whole_run`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import simpy
from numpy.typing import ArrayLike

from parsim.costs.estimate import OverlapFactors
from parsim.errors import ScenarioError
from parsim.graph.columns import Columns, columns_of
from parsim.graph.task import COMPUTE
from parsim.graph.taskgraph import TaskGraph
from parsim.simulate.boundary import checked_durations_s, checked_factors, simulated_timeline
from parsim.simulate.compile import Program
from parsim.simulate.conditions import Conditions
from parsim.simulate.deadlock import describe_task, stuck_error
from parsim.simulate.paces import Paces
from parsim.timeline import Timeline
from parsim.work import is_communication


def simulate(
    graph: Program,
    durations_s: ArrayLike,
    *,
    overlap: OverlapFactors | None = None,
    conditions: Conditions | None = None,
) -> Timeline:
    """The Timeline of one step that starts at 0 with every resource free.

    Args:
        durations_s: float64 [n], seconds each task takes alone.
        overlap: slowdown while one rank computes and communicates at once; None for none.
        conditions: of the world; None for none.

    Raises:
        GraphError: a cycle of dependencies; durations of the wrong shape, negative or not finite; factors below 1.
        DeadlockError: issue orders that wait for one another.
        ScenarioError: a link that is down for good stops the step.
    """
    columns = columns_of(graph) if isinstance(graph, TaskGraph) else graph if isinstance(graph, Columns) else graph.columns
    graph = columns.graph
    durations = checked_durations_s(columns, durations_s, dimensions=1).tolist()
    run = _Run(graph, durations, checked_factors(overlap), conditions)
    run.environment.run()
    if len(run.finished) < len(graph.tasks):
        run.check_lanes()
        raise stuck_error(graph, run.finished)
    return simulated_timeline(columns, np.array(run.start_s), np.array(run.end_s))


class _Queue:
    """The tasks of one resource in issue order; the first one that has not ended is the head."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order = order
        self._place = 0

    @property
    def head(self) -> int | None:
        return self._order[self._place] if self._place < len(self._order) else None

    def advance(self) -> int | None:
        """The head has ended; returns the next one."""
        self._place += 1
        return self.head


class _Run:
    """One simulation. `blockers[i]` counts the dependencies of task i that run or wait and the queues it does not head."""

    def __init__(
        self, graph: TaskGraph, durations: list[float], factors: tuple[float, float], conditions: Conditions | None
    ) -> None:
        n = len(graph.tasks)
        self.environment = simpy.Environment()
        self.finished: set[int] = set()
        self.start_s, self.end_s = [0.0] * n, [0.0] * n
        self._graph = graph
        self._durations = durations
        self._queues = {resource: _Queue(order) for resource, order in graph.issue_order.items()}
        self._dependents: list[list[int]] = [[] for _ in range(n)]
        self._blockers = [len(set(task.dependencies)) + len(task.resources) for task in graph.tasks]
        self._rates: _Rates | Paces | None = None
        if conditions is not None:
            self._rates = Paces(self, graph, factors, conditions)
        elif factors != (1.0, 1.0):
            self._rates = _Rates(self, graph, factors)
        self._timers: dict[int, simpy.Timeout] = {}
        for task in graph.tasks:
            for dependency in set(task.dependencies):
                self._dependents[dependency].append(task.index)
        for queue in self._queues.values():
            self._unblock(queue.head)

    def _unblock(self, task: int | None) -> None:
        if task is None:
            return
        self._blockers[task] -= 1
        if self._blockers[task] == 0:
            self.start_s[task] = self.environment.now
            self.set_timer(task, self._durations[task])
            if self._rates:
                self._rates.started(task, self._durations[task])

    def set_timer(self, task: int, delay_s: float) -> None:
        """Task ends `delay_s` from now, unless another timer is set for it before."""
        timer = self.environment.timeout(delay_s)
        self._timers[task] = timer
        timer.callbacks.append(lambda event: self._end(task) if self._timers.get(task) is event else None)

    def stop_timer(self, task: int) -> None:
        """Task stands still until a timer is set for it."""
        self._timers.pop(task, None)

    def check_lanes(self) -> None:
        """Raises ScenarioError if a task stands still since a link it needs has no bandwidth and never will have."""
        standing = self._rates.standing if isinstance(self._rates, Paces) else {}
        for task, lanes in standing.items():
            names = ", ".join(sorted({"-".join(sorted((lane.source, lane.target))) for lane in lanes}))
            raise ScenarioError(
                f"{describe_task(self._graph, task)} never ends: bandwidth_factor = 0 on {names} to the end of the scenario; "
                "give the spell an until_s, or a factor above 0"
            )

    def _end(self, task: int) -> None:
        del self._timers[task]
        self.end_s[task] = self.environment.now
        self.finished.add(task)
        if self._rates:
            self._rates.ended(task)
        for later in self._dependents[task]:
            self._unblock(later)
        for resource in self._graph.tasks[task].resources:
            self._unblock(self._queues[resource].advance())


class _Rates:
    """Who computes and who communicates on each rank, and what is left of each running task."""

    def __init__(self, run: _Run, graph: TaskGraph, factors: tuple[float, float]) -> None:
        self._run = run
        self._environment = run.environment
        self._factors = factors
        self._communicates = [is_communication(task.work) for task in graph.tasks]
        self._ranks = [
            task.ranks
            if is_communication(task.work)
            else tuple(resource.rank for resource in task.resources if resource.stream == COMPUTE)
            for task in graph.tasks
        ]
        self._active: list[list[set[int]]] = [[set(), set()] for _ in range(graph.world_size)]
        self._left_s: dict[int, float] = {}
        self._since_s: dict[int, float] = {}
        self._slowed: set[int] = set()
        self._changed: dict[int, None] = {}

    def started(self, task: int, duration_s: float) -> None:
        self._left_s[task] = duration_s
        self._since_s[task] = self._environment.now
        for rank in self._ranks[task]:
            self._active[rank][self._communicates[task]].add(task)
        self._note_change(task)

    def ended(self, task: int) -> None:
        self._slowed.discard(task)
        for rank in self._ranks[task]:
            self._active[rank][self._communicates[task]].discard(task)
        self._note_change(task)

    def _note_change(self, task: int) -> None:
        if not self._changed and self._ranks[task]:
            self._at_end_of_instant()
        self._changed.update(dict.fromkeys(self._ranks[task]))

    def _at_end_of_instant(self, _: object = None) -> None:
        """Wait behind all other events of this instant, then apply the new rates."""
        self._environment.timeout(0).callbacks.append(
            lambda event: self._apply() if self._environment.peek() > self._environment.now else self._at_end_of_instant()
        )

    def _apply(self) -> None:
        now = self._environment.now
        tasks = dict.fromkeys(task for rank in self._changed for side in self._active[rank] for task in side)
        self._changed.clear()
        for task in tasks:
            slow = any(self._active[rank][not self._communicates[task]] for rank in self._ranks[task])
            if slow == (task in self._slowed):
                continue
            factor = self._factors[self._communicates[task]]
            self._left_s[task] = max(0.0, self._left_s[task] - (now - self._since_s[task]) / (1.0 if slow else factor))
            self._since_s[task] = now
            self._slowed.symmetric_difference_update({task})
            self._run.set_timer(task, self._left_s[task] * (factor if slow else 1.0))
